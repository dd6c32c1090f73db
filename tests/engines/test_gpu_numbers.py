"""T2 and T3 of the GPU suite with real frameworks, rehearsed on the CPU; and what may be wrong, made wrong.

Only tests can ask for a rehearsal, and its rows say what they are.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imagefactory.suite.gpu import table
from imagefactory.verify import suite_files
from tests.made.gpu_suite import make_expectations
from tests.services.environments import Environment
from tests.services.libcuda import VARIABLE, build_libcuda

DATA = Path(__file__).parents[1] / "data"
FRAMEWORKS = ("jax", "onnxruntime-gpu")

Rows = dict[str, dict[str, Any]]


class Lab:
    """One framework's environment, with the suite and its expectations beside it."""

    def __init__(self, framework: str, environment: Environment, folder: Path) -> None:
        self.framework, self.environment, self.folder = framework, environment, folder
        asked = make_expectations(
            framework=framework, packages=dict(environment.packages), cuda="12", rehearsal=True
        )
        (folder / "expectations.json").write_text(json.dumps(asked))
        suite_files.write_suite(folder / "suite", suite_files.read_suite())

    def run(self, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [self.environment.python, "-I", "-B", *arguments]
        environment = {**os.environ, **environ}
        return subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)

    def rehearse(self, part: str) -> Rows:
        report = self.folder / f"{part}.json"
        files = (self.folder / "expectations.json", report)
        done = self.run(self.folder / "suite/verify.py", "--part", part, *files)
        assert report.exists(), done.stderr[-2000:]
        return {row["name"]: row for row in json.loads(report.read_text())["checks"]}


@pytest.fixture(scope="module", params=FRAMEWORKS)
def lab(
    request: pytest.FixtureRequest,
    environment_of: Callable[[str], Environment],
    tmp_path_factory: pytest.TempPathFactory,
) -> Lab:
    return Lab(request.param, environment_of(request.param), tmp_path_factory.mktemp("numbers"))


def test_the_checks_pass_on_the_cpu_and_say_so(
    environment_of: Callable[[str], Environment], tmp_path: Path
) -> None:
    """Those of the other frameworks run in their images (tests/e2e); here jax is broken in many ways."""
    lab = Lab("onnxruntime-gpu", environment_of("onnxruntime-gpu"), tmp_path)
    rows = {**lab.rehearse("numbers"), **lab.rehearse("jit"), **lab.rehearse("native")}
    assert tuple(rows) == (*table.PARTS["numbers"], *table.PARTS["jit"], *table.PARTS["native"])
    for check, row in rows.items():
        numbers = row["numbers"]
        applies = not table.not_applicable("onnxruntime", check, lab.environment.packages)
        assert row["state"] == ("passed" if applies else "not-applicable"), row
        bounds = {key for key in numbers if key.endswith("-bound")}
        assert all(numbers[key[:-5] + "error"] <= numbers[key] for key in bounds)
        assert not [key for key in numbers if key.endswith("per-s")]
        if bounds:
            assert "(rehearsed on the CPU)" in row["detail"]
    assert len(rows["matmul"]["numbers"]) >= 12


@pytest.fixture(scope="module")
def wronged(lab: Lab) -> dict[str, Rows]:
    """Check -> fault -> its row."""
    report = lab.folder / "faults.json"
    done = lab.run(DATA / "numbers_faults.py", lab.folder / "suite", lab.folder / "expectations.json", report)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: dict[str, Rows] = json.loads(report.read_text())
    return rows


def test_each_fault_is_seen(lab: Lab, wronged: dict[str, Rows]) -> None:
    rows = wronged
    for check, faults in rows.items():
        for fault, row in faults.items():
            where = f"{check} {fault}: {row}"
            assert row["state"] == ("failed" if fault else "passed"), where
    wrong = {
        check: {row["outcome"] for fault, row in faults.items() if fault} for check, faults in rows.items()
    }
    place = {"no-gpu"} if lab.framework == "jax" else {"load-failed"}
    code = wrong.pop("native-code")
    assert wrong.pop("memory") == {"load-failed"}
    assert code == place
    assert wrong.pop("matmul") == {"wrong-numbers"} | place
    if lab.framework == "jax":  # its build for the CPU has no NCCL, and nothing stands in for it
        assert rows["collective"]["no-nccl"]["detail"] == "the image has no libnccl.so.2"
        assert wrong.pop("collective") == {"load-failed"}
    assert set().union(*wrong.values()) == {"wrong-numbers"}


def test_what_is_wrong_is_told(wronged: dict[str, Rows]) -> None:
    rows = wronged
    assert "is off by inf" in rows["matmul"]["nan"]["detail"]
    assert rows["matmul"]["nan"]["numbers"]["float32-square-error"] == 1e300
    assert "tf32" not in rows["matmul"]["tf32-for-float32"]["detail"]
    assert "memory in use grows" in rows["memory"]["leak"]["detail"]
    controls = rows["numbers-controls"]
    assert (
        "a result of the CPU is taken; a result of another type is taken" in controls["takes-all"]["detail"]
    )
    assert controls["refuses-all"]["detail"].startswith("a right product is rejected")
    assert "a NaN is not noticed" in controls["sees-nothing"]["detail"]
    assert "float32 cut to tf32 is not noticed" in controls["too-wide"]["detail"]


ALL_REDUCE = """\
import importlib, json, runpy, sys
from dataclasses import replace

suite, site, expectations = sys.argv[1:]
runpy.run_path(f"{suite}/smoke.py")["load_suite"](suite)
package = "imagefactory_suite.gpu"
part, contexts = importlib.import_module(f"{package}.part"), importlib.import_module(f"{package}.context")
asked = contexts.parse_request(open(expectations).read())
jax = importlib.import_module(f"{package}.frameworks.jax")
strict = contexts.GpuContext(request=replace(asked, rehearsal=False), framework=jax, site=site, prefix=site)
print(json.dumps([part.run_check("collective", strict, None)[0] for _ in range(2)]))
"""


@pytest.mark.parametrize(
    ("lie", "driver", "state", "detail"),
    [
        ("", "", "passed", "an all-reduce of one rank by NCCL 2.20.5"),
        ("wrong", "", "failed", "all-reduce is off by 1 (at most 0)"),
        ("idle", "", "failed", "all-reduce is off by 1 (at most 0)"),
        ("fails", "", "failed", "ncclAllReduce: unhandled system error"),
        ("", "fail=cuMemAlloc_v2:2", "failed", "cuMemAlloc_v2: CUDA error 2"),
    ],
)
def test_the_images_nccl_is_what_sums(
    environment_of: Callable[[str], Environment],
    tmp_path: Path,
    lie: str,
    driver: str,
    state: str,
    detail: str,
) -> None:
    """By its C interface, on stand-ins for it and for the driver."""
    place = tmp_path / "nvidia/nccl/lib"
    place.mkdir(parents=True)
    source = Path(__file__).parents[1] / "services/libnccl.c"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", source]
    subprocess.run([*command, "-o", place / "libnccl.so.2"], check=True)
    build_libcuda(tmp_path / "driver")
    lab = Lab("jax", environment_of("jax"), tmp_path)
    environ = {
        "LD_LIBRARY_PATH": str(tmp_path / "driver"),
        "IMAGEFACTORY_TEST_LIBNCCL": lie,
        VARIABLE: driver,
    }
    done = lab.run("-c", ALL_REDUCE, tmp_path / "suite", tmp_path, tmp_path / "expectations.json", **environ)
    assert done.returncode == 0, done.stderr[-2000:]
    for row in json.loads(done.stdout):
        assert row["state"] == state
        assert detail in row["detail"]


def test_a_result_of_elsewhere_is_refused(
    environment_of: Callable[[str], Environment], tmp_path: Path
) -> None:
    """What frameworks say of a result on a GPU, by objects that say it: the first of each is right."""
    lab = Lab("jax", environment_of("jax"), tmp_path)
    done = lab.run(DATA / "numbers_elsewhere.py", tmp_path / "suite", tmp_path / "expectations.json")
    assert done.returncode == 0, done.stderr[-2000:]
    cpu = "/job:localhost/replica:0/task:0/device:CPU:0"
    assert json.loads(done.stdout) == {
        "torch": ["", "torch computed on cpu, not on cuda", "torch computed in float16, not in float32"],
        "tensorflow": [
            "",
            f"tensorflow computed on {cpu}",
            "tensorflow computed in float16, not in float32",
            f"tensorflow computed on {cpu}, {cpu.replace('CPU', 'GPU')}",
        ],
        "onnxruntime": ["", "onnxruntime's result is on cpu", "onnxruntime's result is a tensor(double)"],
        "profile": [
            "",
            "onnxruntime ran MatMul by CPUExecutionProvider, not by CUDAExecutionProvider",
            "onnxruntime ran Cast by CPUExecutionProvider, not by CUDAExecutionProvider",
            "onnxruntime ran MatMul on float, not on float16",
            "onnxruntime's profile does not show MatMul",
            "onnxruntime's profile does not show MatMul",
        ],
    }


def test_what_is_made_of_a_gpus_answers(environment_of: Callable[[str], Environment], tmp_path: Path) -> None:
    """Memory that others use, controls that must each hold by themselves, what else a GPU is asked with."""
    lab = Lab("jax", environment_of("jax"), tmp_path)
    arguments = (tmp_path / "suite", tmp_path / "expectations.json", build_libcuda(tmp_path / "driver"))
    done = lab.run(DATA / "numbers_decisions.py", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout)
    assert answers.pop("triton") == [["libcuda.so"], True]
    assert answers.pop("tf32") == {"float32": "0", "tf32": "1", "float16": "1", "bfloat16": "1"}
    controls = "8 wrong results are rejected: values, shape, type, place"
    assert answers == {
        "steady": ["passed", "100 MiB in use, no more than 3 rounds before"],
        "another program takes some": ["passed", "700 MiB in use, no more than 3 rounds before"],
        "given back late": ["passed", "100 MiB in use, no more than 3 rounds before"],
        "leaks": ["failed", "memory in use grows: 100, 101, 102, 103, 104, 105, 106, 107 MiB"],
        "leaks in every other round": [
            "failed",
            "memory in use grows: 100, 100, 116, 116, 132, 132, 148, 148 MiB",
        ],
        "sees all": ["passed", controls],
        "sees places": ["failed", "a result of another type is taken"],
        "sees types": ["failed", "a result of the CPU is taken"],
    }
