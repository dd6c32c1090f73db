"""The newest target of every family builds from PyPI's real wheels and passes its smoke test.

In each the GPU suite's numbers are rehearsed on the CPU. On that of `pytorch-onnx` models are exported, run
and compared as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import pairs, rehearsal
from tests.e2e.numbers import (
    assert_nodes,
    assert_numbers,
    assert_portable,
    assert_profile,
    assert_several,
)
from tests.e2e.portable_page import EXPORTING, assert_same, follow_page, own_root
from tests.e2e.training import assert_emulated
from tests.services.factory import Factory
from tests.services.tier import NIGHTLY, many

pytestmark = pytest.mark.timeout(2400)  # Each builds some 12 GB first.

# Target -> the file of the suite that knows its framework. What is built on PyTorch stands for PyTorch, whose
# layers it holds.
NEWEST = {
    "onnxruntime-1.31-cu13": "onnxruntime",
    "jax-0.12.0-cu13-py313": "jax",
    "tensorflow-2.21-cu12": "tensorflow",
    EXPORTING: "torch",
    "numba-0.68-cu12": "numba",
    "cupy-14.2-cu12": "cupy",
}
# By day the smallest family. What is done here on PyTorch tests/e2e/test_main_job.py does by day; on JAX and
# onnxruntime tests/engines rehearses the same suite, in environments of small wheels.
TRIED = many(("numba-0.68-cu12",), tuple(NEWEST))


@pytest.fixture
def built(request: pytest.FixtureRequest, factory: Factory) -> Iterator[str]:
    """A target that is built and passed; some 12 GB each, freed before the next."""
    target: str = request.param
    version = target.partition("-cu")[0].rpartition("-")[2]
    family = target.partition(f"-{version}")[0]
    tag = target.removeprefix(f"{family}-")
    try:
        result = factory.build(target)
        assert result["smoke"]["passed"] is True
        assert result["gpu"] == "not-tested"
        assert result["image"]["name"] == f"{family}:{tag}"
        yield target
    finally:
        factory.run("image", "remove", f"{family}:{tag}", code=None)
        factory.run("image", "prune")
        shutil.rmtree(factory.cache / "wheels", ignore_errors=True)


@pytest.mark.parametrize("built", TRIED, indirect=True)
def test_the_newest_target_passes_its_smoke_test(built: str, factory: Factory, tmp_path: Path) -> None:
    rehearsal.prepare(factory, built, tmp_path)
    assert_numbers(factory, built, NEWEST[built], tmp_path)
    if built != EXPORTING:
        return
    assert_emulated(factory, built, tmp_path / "out")
    assert_profile(factory, built, tmp_path)
    assert_several(factory, built, tmp_path)
    assert_nodes(factory, built, tmp_path)
    assert_portable(factory, built, tmp_path)
    follow_page(own_root(factory, tmp_path), built)
    pairs.compare(factory, built, tmp_path)
    pairs.follow(factory, tmp_path)


# Their frameworks export by other packages. By day tests/e2e/test_main_job.py does the same with PyTorch.
OTHERS = {
    "jax-onnx-0.10.2-cpu": """\
import jax, numpy

WEIGHTS = jax.random.normal(jax.random.key(0), (8, 5))


def network(x, picked):
    return jax.nn.softmax(x @ WEIGHTS + WEIGHTS[picked, :5]), x.sum(-1)


def models():
    sample = {"x": numpy.ones((2, 8), "float32"), "picked": numpy.arange(2)}
    return [{"name": "mine", "model": network, "sample": sample}]
""",
    "tensorflow-onnx-2.21-cpu": """\
import numpy, tensorflow

keras = tensorflow.keras
one, other = keras.Input((4,), name="one"), keras.Input((4,), name="other")
joined = keras.layers.Dropout(0.5)(keras.layers.Concatenate()([one, other]))


def models():
    sample = {"one": numpy.ones((2, 4), "float32"), "other": numpy.eye(2, 4, dtype="float32")}
    network = keras.Model([one, other], keras.layers.Dense(3)(joined))
    return [{"name": "mine", "model": network, "sample": sample}]
""",
}


@pytest.mark.skipif(not NIGHTLY, reason="tests/run nightly runs it")
@pytest.mark.parametrize("target", OTHERS)
def test_models_of_other_frameworks_compute_the_same(target: str, factory: Factory, tmp_path: Path) -> None:
    own = own_root(factory, tmp_path)
    # TVM refuses what jax2onnx exports with rows of any number.
    served = "openvino-2026.4-cpu" if target.startswith("jax") else "tvm-0.27-cpu"
    name = f"{served.partition('-')[0]}-cpu"
    runtimes = {"onnxruntime-cpu": "onnxruntime-cpu", name: f"{name}@{served}"}
    own.run("build", target, served)
    models = tmp_path / "mine" / "models.py"
    models.parent.mkdir()
    models.write_text(OTHERS[target])
    to = [word for one in runtimes.values() for word in ("--to", one)]
    done = own.run(
        "model", "check", "--json", target, "--models", str(models), *to, "-o", str(tmp_path / "out")
    )
    report = json.loads(done.stdout)["report"]
    assert_same(report, {f"{report['models'][0]['framework']}-cpu", *runtimes}, {"mine"})
