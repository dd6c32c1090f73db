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

from imagefactory.suite.portability.models import MODELS
from imagefactory.verdicts.recorded import NEEDED, curves_of, without_units
from tests.e2e import pairs, rehearsal
from tests.e2e.numbers import assert_numbers, assert_several
from tests.e2e.portable_page import assert_same, follow_page, own_root
from tests.e2e.training import assert_emulated
from tests.services.factory import Factory
from tests.services.tier import NIGHTLY, many

pytestmark = pytest.mark.timeout(2400)  # Each builds some 12 GB first.

# What is built on PyTorch stands for PyTorch, whose layers it holds.
EXPORTING = "pytorch-onnx-2.15-cu132"
# Target -> the file of the suite that knows its framework.
NEWEST = {
    "onnxruntime-1.31-cu13": "onnxruntime",
    "jax-0.12.0-cu13-py313": "jax",
    "tensorflow-2.21-cu12": "tensorflow",
    EXPORTING: "torch",
    "numba-0.68-cu12": "numba",
    "cupy-14.2-cu12": "cupy",
}
# On JAX and onnxruntime tests/engines rehearses the same suite, in environments of small wheels. By day the
# largest and the smallest family: TensorFlow's 12 GB cost two minutes.
TRIED = many((EXPORTING, "numba-0.68-cu12"), tuple(NEWEST))

# As the check does, but what is exported is a copy with one wrong weight.
WRONG_EXPORT = """\
import importlib, runpy, sys

runpy.run_path("/suite/smoke.py")["load_suite"]("/suite")
package = "imagefactory_suite"
exporter = importlib.import_module(package + ".portability.torch")
maker = importlib.import_module(package + ".portability.torch_models")
models = importlib.import_module(package + ".portability.models")
models.MODELS = tuple(model for model in models.MODELS if model.name == "variational")
export = exporter.export
exporter.export = lambda network, *rest, **asked: export(maker.damaged(network), *rest, **asked)
sys.exit(importlib.import_module(package + ".gpu.part").main("portability", *sys.argv[1:]))
"""


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
        factory.run("store", "rm", f"{family}:{tag}", code=None)
        factory.run("store", "gc")
        shutil.rmtree(factory.cache / "wheels", ignore_errors=True)


@pytest.mark.parametrize("built", TRIED, indirect=True)
def test_the_newest_target_passes_its_smoke_test(built: str, factory: Factory, tmp_path: Path) -> None:
    rehearsal.prepare(factory, built, tmp_path)
    assert_numbers(factory, built, NEWEST[built], tmp_path)
    if built != EXPORTING:
        return
    assert_emulated(factory, built, tmp_path / "out")
    row = rehearsal.rehearse(factory, built, "profile", tmp_path)["profile"]
    assert row["state"] == "passed", row
    assert {*NEEDED, "up-pageable", "down-pageable"} <= curves_of(without_units(row["numbers"])).keys()
    phases = ("forward", "backward", "optimizer", "whole")
    assert {f"step-convnet-fp32-16-{phase}-s" for phase in phases} <= row["numbers"].keys()
    assert_several(factory, built, tmp_path)
    row = rehearsal.rehearse(factory, built, "portability", tmp_path)["portability"]
    assert row["state"] == "passed", row
    assert "on cpu, off by" in row["detail"]
    kinds = ("error", "p50-ms", "p95-ms")
    rows = {f"{model.name}-cpu-{by}" for model in MODELS for by in ("torch", "onnxruntime")}
    assert {f"{name}-{kind}" for name in rows for kind in kinds} <= row["numbers"].keys()
    assert not [name for name in row["numbers"] if "-gpu-" in name]

    (tmp_path / "out" / "wrong.py").write_text(WRONG_EXPORT)
    files = ("/out/expectations.json", "/out/wrong.json")
    rehearsal.run_inside(factory, built, tmp_path, "python", "-I", "-B", "/out/wrong.py", *files)
    row = rehearsal.rows_of(tmp_path / "out" / "wrong.json")["portability"]
    assert (row["state"], row["outcome"]) == ("failed", "wrong-numbers"), row
    assert row["detail"].startswith("variational: onnxruntime on the cpu is off by 0.0")

    rehearsal.in_earnest(tmp_path)  # where there is no GPU
    row = rehearsal.rehearse(factory, built, "portability", tmp_path)["portability"]
    assert (row["state"], row["outcome"]) == ("failed", "no-gpu"), row
    assert not [name for name in row["numbers"] if name.endswith("-ms")]

    follow_page(factory, tmp_path)
    pairs.compare(factory, built, tmp_path)
    if NIGHTLY:
        pairs.follow(factory, tmp_path)


# Their frameworks export by other packages; by day the smaller one.
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


@pytest.mark.parametrize("target", many(("jax-onnx-0.10.2-cpu",), tuple(OTHERS)))
def test_models_of_other_frameworks_compute_the_same(target: str, factory: Factory, tmp_path: Path) -> None:
    own = own_root(factory, tmp_path)
    # TVM refuses what jax2onnx exports with rows of any number.
    served = "openvino-2026.4-cpu" if target.startswith("jax") else "tvm-0.27-cpu"
    runtime = f"{served.partition('-')[0]}-cpu"
    own.run("build", target, served)
    models = tmp_path / "mine" / "models.py"
    models.parent.mkdir()
    models.write_text(OTHERS[target])
    to = ("--to", "onnxruntime-cpu", "--to", f"{runtime}@{served}")
    done = own.run("portability", "--json", target, "--models", str(models), *to, "-o", str(tmp_path / "out"))
    report = json.loads(done.stdout)["report"]
    by = {f"{report['models'][0]['framework']}-cpu", "onnxruntime-cpu", runtime}
    assert_same(report, by, {"mine"})
