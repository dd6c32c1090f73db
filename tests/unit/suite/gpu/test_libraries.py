"""What T2 decides without a framework: the words for errors, the libraries' versions, bounds, copies."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import pytest

from imagefactory.suite.context import CheckFailure, Expected
from imagefactory.suite.gpu import libraries, table, tolerances
from imagefactory.suite.gpu.checks import numbers
from imagefactory.suite.gpu.context import GpuContext, SuiteRequest
from imagefactory.suite.gpu.driver import Driver, DriverError
from imagefactory.suite.gpu.frameworks import results
from imagefactory.verify.suite_files import SUITE_DIRECTORY
from tests.services.libcuda import build_libcuda

CUDNN, NCCL = "/site/nvidia/cudnn/lib/libcudnn.so.9", "/site/nvidia/nccl/lib/libnccl.so.2"


def make_context(packages: dict[str, str], site: str = "/site", **changes: Any) -> GpuContext:
    expected = Expected(
        nonce="n",
        target="t",
        framework="torch",
        distribution="torch",
        version="2.3.1",
        cuda="12.1",
        python="3.11",
        packages=packages,
        checks=(),
        uid=None,
    )
    values: dict[str, Any] = {"level": "quick", "capability": "", "driver": "", "predicted": {}, **changes}
    return GpuContext(
        request=SuiteRequest(expected=expected, **values), framework=None, site=site, prefix=site
    )


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "no-kernel"),
        (
            "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available for execution on the device",
            "no-kernel",
        ),
        ("CUDA failure 209: no kernel image is available ; GPU=0", "no-kernel"),
        ("failed to load PTX text as a module: PTX JIT compilation was disabled", "no-kernel"),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver-too-old"),
        ("cudaErrorCallRequiresNewerDriver: API call is not supported in the installed", "driver-too-old"),
        ("The NVIDIA driver on your system is too old (found version 11040)", "driver-too-old"),
        ("the provided PTX was compiled with an unsupported toolchain.", "driver-too-old"),
        ("CUDA failure 35: x", "driver-too-old"),
        ("system has unsupported display driver / cuda driver combination", "infrastructure"),
        ("forward compatibility was attempted on non supported HW", "driver-too-old"),
        ("Could not satisfy device specification '/job:localhost/device:GPU:0'. Devices: [CPU]", "no-gpu"),
        ("no CUDA-capable device is detected", "no-gpu"),
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "no-gpu"),
        ("No CUDA GPUs are available", "no-gpu"),
        (
            "Unknown backend: 'gpu' requested, but no platforms that are instances of gpu are present.",
            "no-gpu",
        ),
        ("CUDA failure 100: no CUDA-capable device is detected", "no-gpu"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "infrastructure"),
        ("CUDA error: out of memory", "load-failed"),
        ("CUDNN_STATUS_NOT_SUPPORTED", "load-failed"),
        ("1009 of 2090 things are 350", "load-failed"),
    ],
)
def test_words_of_the_tables(message: str, word: str) -> None:
    assert results.classify(RuntimeError(message)) == word
    assert word in table.OUTCOMES


def test_the_cause_behind_an_exception_counts() -> None:
    error = ValueError("wrapped")
    error.__cause__ = RuntimeError("no kernel image is available for execution on the device")
    error.__cause__.__cause__ = error  # no end
    assert results.classify(error) == "no-kernel"
    assert results.classify(ValueError("wrapped")) == "load-failed"


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "number", "version"),
    [
        ("cudnn", 8500, "8.5.0"),
        ("cudnn", 8907, "8.9.7"),
        ("cudnn", 90100, "9.1.0"),
        ("cudnn", 92600, "9.26.0"),
        ("nccl", 2804, "2.8.4"),
        ("nccl", 21403, "2.14.3"),
        ("nccl", 23007, "2.30.7"),
    ],
)
def test_versions_from_numbers(library: str, number: int, version: str) -> None:
    assert results.version_of(library, number) == version


LOCKED = {"nvidia-cudnn-cu12": "9.1.0.70", "nvidia-nccl-cu12": "2.20.5", "torch": "2.3.1"}


@pytest.mark.parametrize(
    ("locked", "loaded", "told", "detail"),
    [
        (
            LOCKED,
            {"cudnn": {CUDNN: "9.1.0"}, "nccl": {NCCL: "2.20.5"}},
            {},
            "cudnn 9.1.0 as locked, nccl 2.20.5",
        ),
        (
            {"cudnn": "8.9.7.29", "nccl": "2.21.5.1"},
            {},
            {"cudnn": "8.9.7", "nccl": "2.21.5"},
            "nccl 2.21.5 as",
        ),
        ({"torch": "1.13.1"}, {}, {"nccl": "2.14.3"}, "nccl 2.14.3, the framework's own"),
    ],
)
def test_libraries_as_locked(locked: dict[str, str], loaded: Any, told: dict[str, str], detail: str) -> None:
    assert detail in libraries.judge_libraries(make_context(locked), loaded, told).detail


@pytest.mark.parametrize(
    ("locked", "loaded", "told", "words_of_it"),
    [
        (
            LOCKED,
            {"cudnn": {CUDNN: "9.1.1"}, "nccl": {NCCL: "2.20.5"}},
            {},
            "cudnn 9.1.1 is loaded, nvidia-cudnn",
        ),
        (
            LOCKED,
            {"cudnn": {CUDNN: "9.1.0"}, "nccl": {}},
            {},
            "nccl is locked .nvidia-nccl-cu12 2.20.5. and was",
        ),
        (
            LOCKED,
            {"cudnn": {CUDNN: "9.1.0", "/usr/lib/libcudnn.so.9": "9.1.0"}},
            {},
            "cudnn is loaded 2 times",
        ),
        (
            LOCKED,
            {"cudnn": {CUDNN: "9.1.0"}, "nccl": {NCCL: "2.20.5"}},
            {"cudnn": "9.0.0"},
            "9.0.0 by the framew",
        ),
        ({}, {}, {}, "neither cuDNN nor NCCL is loaded"),
    ],
)
def test_libraries_that_are_not_the_locks(
    locked: dict[str, str], loaded: Any, told: dict[str, str], words_of_it: str
) -> None:
    with pytest.raises(CheckFailure, match=words_of_it):
        libraries.judge_libraries(make_context(locked), loaded, told)


def test_a_rehearsal_loads_few_libraries_and_those_must_agree() -> None:
    context = make_context(LOCKED, rehearsal=True)
    assert "rehearsed" in libraries.judge_libraries(context, {}, {}).detail
    with pytest.raises(CheckFailure, match="is loaded"):
        libraries.judge_libraries(context, {"cudnn": {CUDNN: "9.9.9"}}, {})


def test_libraries_are_asked_for_their_version(tmp_path: Path) -> None:
    """A file of NCCL's name that is no library is an error of the loader, not a version."""
    assert libraries.versions_of(["/lib/libm.so.6", "/x/libcudnn_ops.so.9"]) == {"cudnn": {}, "nccl": {}}
    (tmp_path / "libnccl.so.2").write_text("")
    with pytest.raises(OSError, match="too short"):
        libraries.versions_of([str(tmp_path / "libnccl.so.2")])
    assert set(libraries.find_loaded()) == {"cudnn", "nccl"}


def test_there_is_one_nccl(tmp_path: Path) -> None:
    context = make_context({}, str(tmp_path))
    with pytest.raises(CheckFailure, match=r" no libnccl.so.2$"):
        libraries.find_nccl(context)
    for name in ("nvidia/nccl/lib", "nvidia/cu13/lib"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "libnccl.so.2").write_text("")
        if name == "nvidia/nccl/lib":
            assert libraries.find_nccl(context) == f"{tmp_path}/nvidia/nccl/lib/libnccl.so.2"
    with pytest.raises(CheckFailure, match=r"2 libnccl.so.2: /"):
        libraries.find_nccl(context)


# --- bounds --------------------------------------------------------------------------------------


def test_float32_leaves_no_room_for_tf32() -> None:
    """Cut factors err by about 2^-11 of the measure; no length that is used lets that pass as float32."""
    for length in (64, 512, 2048, 4096):
        assert tolerances.products("float32", length) < 2.0**-11 / 10
        assert 2.0**-11 * 5 < tolerances.products("tf32", length) < 0.02
    for length in (144, 8 * 29 * 29):  # what convolutions add up
        assert tolerances.convolution("float32", length) < 2.0**-11 * 1.5


def test_a_coarser_kind_and_a_longer_sum_may_err_more() -> None:
    kinds = ("float64", "float32", "float16", "bfloat16")
    for bound in (tolerances.products, tolerances.convolution, tolerances.sums):
        values = [bound(kind, 256) for kind in kinds]
        assert values == sorted(values)
        assert bound("float32", 64) < bound("float32", 1024)
    assert tolerances.solution("float64", 64) < 1e-12
    assert tolerances.singular("float32", 64) < 1e-3
    assert tolerances.training(8, 512) < 1e-3


def test_bfloat16_needs_units_for_it() -> None:
    assert not tolerances.applies("bfloat16", "7.5")
    assert tolerances.applies("bfloat16", "8.0")
    assert tolerances.applies("bfloat16", "12.0")
    assert tolerances.applies("bfloat16", "")
    assert tolerances.applies("float16", "7.0")
    assert tolerances.oldest("bfloat16") == "8.0"


# --- the files of frameworks ---------------------------------------------------------------------


def names_of(path: Path) -> set[str]:
    """Functions and values at the top of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax", "onnxruntime", "numba", "cupy"])
def test_the_same_names_in_each_file(framework: str) -> None:
    """Those of the room's docstring; one may lack what the tables say does not apply to it."""
    folder = SUITE_DIRECTORY / "gpu/frameworks"
    document = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    wanted = set(re.findall(r"`(\w+)\(context|`(on_cpu)\(|`(KINDS|CPU_LACKS)`", document))
    names = {name for group in wanted for name in group if name}
    assert len(names) == 18
    checks = {
        "factorise": "linear-algebra",
        "train": "training",
        "all_reduce": "collective",
        "compile": "jit",
        "loaded": "library-versions",
    }
    excused = {name for name, check in checks.items() if table.not_applicable(framework, check, {})}
    excused |= {"prepare", "loaded"}
    assert names - excused <= names_of(folder / f"{framework}.py")


@pytest.mark.parametrize("check", ["collective", "library-versions"])
def test_cupy_uses_the_nccl_that_is_locked(check: str) -> None:
    assert table.not_applicable("cupy", check, {"cupy-cuda12x": "14.2.0"}).startswith("the lock has no NCCL")
    assert table.not_applicable("cupy", check, {"nvidia-nccl-cu12": "2.27.7"}) == ""


# --- pinned memory -------------------------------------------------------------------------------


def test_copies_from_pinned_memory_come_back(tmp_path: Path) -> None:
    driver = Driver(str(build_libcuda(tmp_path)))
    data = bytes(range(256)) * 4096
    copied = numbers.copy_pinned(data, driver)
    assert copied.back == data
    assert all(math.isfinite(took) and took >= 0 for took in (copied.up, copied.down))


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemFreeHost"])
def test_a_copy_that_fails_is_told(call: str, tmp_path: Path) -> None:
    driver = Driver(str(build_libcuda(tmp_path, f"fail={call}:2")))
    with pytest.raises(DriverError, match=call):
        numbers.copy_pinned(b"1234", driver)
