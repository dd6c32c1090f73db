"""T0: whose libcuda was loaded, where it does not start. What it computes stands in tests/engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imagefactory.suite.context import CheckFailure
from imagefactory.suite.gpu.checks import driver as checks
from imagefactory.suite.gpu.context import GpuContext, parse_request
from imagefactory.suite.gpu.driver import DriverError
from tests.made.gpu_suite import make_expectations

OWN = "/usr/lib/x86_64-linux-gnu/libcuda.so.610.43"
COMPAT = "/usr/local/cuda/compat/libcuda.so.610.43"
MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"


def mounts(*places: str) -> str:
    return "".join(f"{at} 1 0:{at} / {place} ro - overlay x ro\n" for at, place in enumerate(("/", *places)))


@pytest.mark.parametrize(
    ("loaded", "code", "module", "given", "outcome"),
    [
        (OWN, 803, MODULE, (), "load-failed"),
        (OWN, 100, MODULE, (), "load-failed"),
        (OWN, 999, MODULE, ("/proc", "/usr/lib/x86_64"), "load-failed"),
        (COMPAT, 803, MODULE, (), "load-failed"),
        (COMPAT, 804, MODULE, (), "driver-too-old"),
        (COMPAT, 100, MODULE, (), "no-gpu"),
        # the machine's own
        (OWN, 803, MODULE.replace("580.95.05", "610.43"), (), "infrastructure"),
        (OWN, 803, MODULE, (OWN,), "infrastructure"),
        (OWN, 803, MODULE, ("/usr/lib/x86_64-linux-gnu",), "infrastructure"),
        (OWN, 803, "", (), "infrastructure"),
        ("/.singularity.d/libs/libcuda.so.1", 803, MODULE, (), "infrastructure"),
        (OWN, 34, MODULE, (), "no-gpu"),
    ],
)
def test_a_libcuda_that_the_image_brings_is_the_images_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loaded: str,
    code: int,
    module: str,
    given: tuple[str, ...],
    outcome: str,
) -> None:
    """An installer had put the libraries of its day's driver into an image (E4S)."""

    class Unstarted:
        def begin(self) -> Any:
            raise DriverError("cuInit", code, "no")

    for name, text in (("MODULE", module), ("MOUNTS", mounts(*given))):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(checks, name, str(tmp_path / name))
    monkeypatch.setattr(checks, "Driver", Unstarted)
    monkeypatch.setattr(checks, "mapped_files", lambda: ["/usr/lib/libc.so.6", loaded])
    asked = parse_request(json.dumps(make_expectations()))
    with pytest.raises(CheckFailure) as raised:
        checks.check_driver(GpuContext(request=asked, framework=None, site="", prefix="", device={}))
    assert raised.value.outcome == outcome
    assert (loaded in str(raised.value)) == (outcome == "load-failed")


@pytest.mark.parametrize(
    ("paths", "loaded"),
    [
        (("/usr/bin/python3", "/usr/lib/libcudart.so.12", COMPAT), COMPAT),
        (("/.singularity.d/libs/libcuda.so.1",), "/.singularity.d/libs/libcuda.so.1"),
        (("/usr/lib/libcudart.so.12",), ""),
    ],
)
def test_the_loaded_libcuda_is_named(paths: tuple[str, ...], loaded: str) -> None:
    assert checks.loaded_libcuda(paths) == loaded
