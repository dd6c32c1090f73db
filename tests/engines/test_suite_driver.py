"""T0 on the stand-in for libcuda: what is right passes, each lie is seen, with the tables' word for it."""

from __future__ import annotations

import ast
import contextlib
import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imagefactory.suite.gpu import driver, kernels, table
from imagefactory.suite.gpu.checks import driver as checks
from imagefactory.verify.suite_files import SUITE_DIRECTORY
from tests.made.gpu_suite import Ground, Ran, Run, copy_suite, make_expectations
from tests.services import libcuda

# T0 alone: no framework of the suite.
GOOD = make_expectations(capability="8.0", framework="numpy", packages={"numpy": "2.0.0"})

# What the stand-in is told -> (the check that fails, its word, a part of what it says).
LIES = {
    "capability=": ("device", "no-gpu", "counts no GPU"),
    "fail=cuInit:100": ("driver", "no-gpu", "CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device"),
    "fail=cuInit:34": ("driver", "no-gpu", "LD_LIBRARY_PATH"),
    "fail=cuInit:803": ("driver", "infrastructure", "different drivers"),
    "fail=cuInit:804": ("driver", "driver-too-old", "needs a newer driver"),
    "fail=cuInit:304": ("driver", "infrastructure", "/dev/nvidia*"),
    "fail=cuInit:999": ("driver", "infrastructure", "CUDA error 999"),
    "exit=cuInit": ("driver", "load-failed", "exit code 0"),
    "version=11080": ("driver", "driver-too-old", "up to 11.8, the image needs 12.0"),
    "version=9020": ("driver", "driver-too-old", "up to 9.2, the image needs 12.0"),
    "capability=9.0": ("device", "wrong-gpu", "capability 8.0 was asked for, this is stand-in"),
    "mode=2": ("device", "infrastructure", "prohibits"),
    "fail=cuDevicePrimaryCtxRetain:46": ("vector-add", "infrastructure", "cuDevicePrimaryCtxRetain"),
    "fail=cuMemAlloc_v2:2": ("vector-add", "infrastructure", "cuMemAlloc_v2"),
    "fail=cuModuleLoadDataEx:209": ("vector-add", "no-kernel", "cuModuleLoadDataEx"),
    "fail=cuModuleLoadDataEx:222": ("vector-add", "driver-too-old", "cuModuleLoadDataEx"),
    "fail=cuModuleLoadDataEx:221": ("vector-add", "infrastructure", "libnvidia-ptxjitcompiler.so.1"),
    "fail=cuLaunchKernel:700": ("vector-add", "load-failed", "cuLaunchKernel: CUDA error 700"),
    "crash=cuLaunchKernel": ("vector-add", "load-failed", "signal 6: Fatal Python error: Aborted"),
    "kernel=never": ("vector-add", "wrong-numbers", "30011 of 30011 elements are wrong"),
    "kernel=wrong": ("vector-add", "wrong-numbers", "1 of 30011 elements are wrong: [15005]"),
    "kernel=overrun": ("vector-add", "wrong-numbers", "1 elements after the end were written"),
    "memory=leak": ("memory-returned", "load-failed", "did not come back"),
    "memory=fixed": ("memory-returned", "wrong-numbers", "the driver counts 0"),
    # Right numbers without the work.
    "kernel=always": ("driver-controls", "wrong-numbers", "a kernel that subtracts gave the sum"),
    "kernel=early": ("driver-controls", "wrong-numbers", "though no kernel ran"),
    "ptx=any": ("driver-controls", "wrong-numbers", "PTX that is none was compiled"),
}

# The suite's own code, broken: (file, what stands there, what is put there), what the controls must say.
MUTANTS = {
    "compares nothing": (
        ("gpu/kernels.py", "if result == whole:", "if True:"),
        "a kernel that subtracts gave the sum",
    ),
    "compares the first element": (
        ("gpu/kernels.py", "if result == whole:", "if result[:4] == whole[:4]:"),
        "a wrong bit in byte 120043 passed",
    ),
    "compares all but the guard": (
        ("gpu/kernels.py", "if result == whole:", "if result[: len(expected)] == expected:"),
        "a wrong bit in byte 121067 passed",
    ),
    "finds all memory": (
        ("gpu/checks/driver.py", "missing = before - library.free_memory()", "missing = 0"),
        "bytes that were kept were not missed",
    ),
    "takes any PTX": (
        ("gpu/driver.py", "        if code != 0:\n", "        if code not in (0, 218):\n"),
        "PTX that is none was compiled",
    ),
}


@pytest.fixture(scope="module")
def lied(stand_in: Path, suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ran]:
    """The driver's part under each lie, two at a time."""
    folder = tmp_path_factory.mktemp("lies")
    grounds = [Ground(suite=suite, library=stand_in, folder=folder / str(at)) for at in range(len(LIES))]
    with ThreadPoolExecutor(2) as pool:
        ran = pool.map(lambda ground, lie: ground.run(GOOD, lie), grounds, LIES)
        return dict(zip(LIES, ran, strict=True))


def test_everything_passes_on_an_honest_driver(run: Run) -> None:
    ran = run(GOOD)
    assert ran.code == 0, ran.errors
    report = ran.report
    assert {
        name: row["state"] for name, row in ran.rows.items() if name in table.PARTS["driver"]
    } == dict.fromkeys(table.PARTS["driver"], "passed")
    assert {row["state"] for name, row in ran.rows.items() if name not in table.PARTS["driver"]} == {
        "not-applicable"
    }
    assert tuple(ran.rows) == table.checks_of("quick")
    assert report["device"] == {
        "name": libcuda.NAME,
        "capability": "8.0",
        "uuid": libcuda.UUID,
        "memory": libcuda.MEMORY,
    }
    assert (report["cuda"], report["nonce"], report["running"], report["rehearsal"]) == (
        "12.4",
        "5eed",
        "",
        False,
    )
    assert ran.rows["vector-add"]["numbers"] == {"elements": 30_011.0}
    assert ran.rows["memory-returned"]["numbers"]["taken-bytes"] >= 256 << 20
    assert ran.rows["driver"]["detail"].endswith("libcuda.so.1")


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_seen(lied: Mapping[str, Ran], lie: str) -> None:
    check, word, text = LIES[lie]
    ran = lied[lie]
    assert ran.code == 1
    row = ran.rows[check]
    assert (row["state"], row["outcome"]) == ("failed", word), row
    assert text in row["detail"]
    before, after = table.PARTS["driver"], table.PARTS["driver"]
    at = before.index(check)
    assert all(ran.rows[name]["state"] == "passed" for name in before[:at])
    assert all(ran.rows[name]["state"] == "not-run" and ran.rows[name]["detail"] for name in after[at + 1 :])


def test_no_library_is_no_gpu(suite: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran = Ground(suite=suite, library=tmp_path / "empty", folder=tmp_path / "run").run(GOOD, part="driver")
    assert ran.states()["driver"] == ("failed", "no-gpu")
    assert "no driver was given to the container" in ran.rows["driver"]["detail"]


def test_a_slice_is_told_with_its_gpu(run: Run) -> None:
    ran = run(GOOD, "slice=1", part="driver")
    assert ran.report["facts"]["device"]["uuid"] == libcuda.SLICE
    assert f"a slice of {libcuda.UUID}" in ran.rows["device"]["detail"]


def test_a_gpu_of_another_kind_is_told_with_its_name(run: Run) -> None:
    """The report says which GPU there was, though nothing ran on it."""
    ran = run(GOOD, "capability=9.0", part="driver")
    assert ran.report["facts"]["device"]["capability"] == "9.0"
    assert ran.report["facts"]["cuda"] == "12.4"


def test_of_several_gpus_the_one_asked_for(run: Run) -> None:
    ran = run(GOOD, "capability=9.0,7.5,8.0", part="driver")
    assert ran.code == 0
    assert ran.report["facts"]["device"]["uuid"] == libcuda.UUID.removesuffix("00") + "02"
    assert ran.report["facts"]["visible"] == 3


@pytest.mark.parametrize("name", MUTANTS)
def test_the_controls_see_a_suite_that_looks_away(name: str, stand_in: Path, tmp_path: Path) -> None:
    """On an honest driver: the controls fail where the checks themselves prove nothing any more."""
    (file, old, new), text = MUTANTS[name]
    suite = copy_suite(tmp_path, changes={file: (old, new)})
    ran = Ground(suite=suite, library=stand_in, folder=tmp_path / "run").run(GOOD, part="driver")
    assert ran.rows["vector-add"]["state"] == "passed"
    assert ran.rows["driver-controls"]["state"] == "failed"
    assert text in ran.rows["driver-controls"]["detail"]


def test_every_word_of_the_tables_is_told_by_a_test() -> None:
    """A timeout is told by the part that ends a hanging one: test_gpu_suite_parts.py."""
    assert {word for _, word, _ in LIES.values()} | {table.TIMEOUT} == set(table.OUTCOMES)


def test_every_word_for_an_answer_of_the_driver_is_one_of_the_tables() -> None:
    assert set(checks.OUTCOMES.values()) <= set(table.OUTCOMES)
    assert set(checks.HINTS) >= {driver.JIT_COMPILER_NOT_FOUND, driver.SYSTEM_NOT_READY}


def test_the_context_that_was_current_is_so_again(stand_in: Path) -> None:
    """A framework's own, in whose process T2 asks the driver; also where the work ends in an error."""
    found = driver.Driver(str(stand_in / "libcuda.so.1"))
    current, own = ctypes.c_void_p(), ctypes.c_void_p(4096)
    found.library.cuCtxPushCurrent_v2(own)
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError), found.context(found.device(0)):
            found.library.cuCtxGetCurrent(ctypes.byref(current))
            assert current.value not in (None, own.value)
            assert fails == 0 or 1 / 0
        found.library.cuCtxGetCurrent(ctypes.byref(current))
        assert current.value == own.value


def test_vectors_are_exact_and_differ_by_nonce() -> None:
    one, other = kernels.make_vectors("a", 1000), kernels.make_vectors("b", 1000)
    assert one == kernels.make_vectors("a", 1000) != other
    assert max(*one.left, *one.right) < 1 << 22
    assert kernels.compare(one.total() + kernels.POISON * kernels.GUARD, one.total()) == ""
    assert kernels.compare(other.total() + kernels.POISON * kernels.GUARD, one.total())


def test_the_suite_is_written_for_python_3_9() -> None:
    for path in SUITE_DIRECTORY.rglob("*.py"):
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 9))
