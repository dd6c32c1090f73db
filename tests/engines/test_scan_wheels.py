"""Real wheels against what is known of them: targets by library, the hole at Turing, a scan's cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.contradictions import contradictions
from imagefactory.gpu.predict import predict
from imagefactory.gpu.values import Compatibility, ScanResult
from imagefactory.progress import QuietProgress
from imagefactory.scan.files import scan_wheel
from tests.services.wheels import Wheels

# Modules by their targets, read with other tools (cuobjdump among them) before this scanner was.
TRUTH = {
    "torch-1.13.1": {
        "libtorch_cuda_cu.so": {
            "sm_37 sm_50 sm_60 sm_70 sm_75 sm_80 sm_86": 221,
            "sm_35 sm_50 sm_60 sm_70 sm_75 sm_80 sm_86": 50,
            "sm_80": 16,
            "sm_86": 8,
            "sm_75": 4,
            "sm_70": 3,
        },
    },
    "torch-2.3.1": {"libtorch_cuda.so": {"sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90": 332}},
    "torch-2.9.1": {
        "libtorch_cuda.so": {
            "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120": 393,
            "sm_70 sm_75 sm_80 sm_86 sm_90 sm_90a sm_100 sm_120": 2,
            "sm_70 sm_75 sm_80 sm_86 sm_90 sm_90a sm_100 sm_100a sm_120": 1,
            "sm_70 sm_75 sm_80 sm_86 sm_89 sm_90 sm_90a sm_100 sm_100a sm_120 sm_120a": 1,
        },
    },
    "torch-2.12.1": {
        "libtorch_cuda.so": {
            "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120": 387,
            "sm_75 sm_80 sm_86 sm_90 sm_100 sm_100a sm_103a sm_120": 57,
            "sm_75 sm_80 sm_86 sm_90 sm_90a sm_100 sm_120": 2,
            "sm_75 sm_80 sm_86 sm_90 sm_90a sm_100 sm_100a sm_103a sm_120": 1,
            "sm_75 sm_80 sm_86 sm_89 sm_90 sm_90a sm_100 sm_100a sm_103a sm_120 sm_120a sm_121a": 1,
        },
        "libtorch_cuda_linalg.so": {"sm_80 sm_86 sm_90 sm_100 sm_120": 65},
    },
}
CUDA = {"torch-1.13.1": "11.7", "torch-2.3.1": "12.1", "torch-2.9.1": "12.8", "torch-2.12.1": "13.0"}
ANSWERS = {
    "torch-1.13.1": {"7.0": "yes", "7.5": "yes", "8.6": "yes", "9.0": "no"},
    "torch-2.3.1": {"5.0": "yes", "6.1": "yes", "8.9": "yes", "9.0": "yes", "10.0": "no", "12.0": "no"},
    "torch-2.9.1": {"6.1": "no", "7.0": "yes", "7.5": "yes", "10.0": "yes", "12.0": "yes"},
    "torch-2.12.1": {"7.0": "no", "7.5": "partly", "8.0": "yes", "12.0": "yes"},
}


@pytest.fixture(scope="module", params=list(TRUTH))
def name(request: pytest.FixtureRequest, wheels: Wheels) -> Iterator[str]:
    """One after the other, so that the disk holds few at a time."""
    yield request.param
    if request.param != "torch-2.12.1":  # the test of what a scan costs takes it too
        wheels.drop(request.param)


@pytest.fixture(scope="module")
def contents(name: str, wheels: Wheels) -> ScanResult:
    return scan_wheel(wheels.fetch(name), QuietProgress(), workers=2)


def test_a_wheel_holds_what_is_known_of_it(name: str, contents: ScanResult) -> None:
    found = {
        one.path.rpartition("/")[2]: {" ".join(map(str, each.codes)): each.count for each in one.modules}
        for one in contents.libraries
    }
    assert {library: found.get(library) for library in TRUTH[name]} == TRUTH[name]
    assert [one.path for one in contents.libraries if one.damage] == []
    assert ("torch", "cuda", CUDA[name]) in contents.facts
    assert [(one.name, one.version) for one in contents.packages] == [("torch", name.partition("-")[2])]


def test_a_wheel_runs_where_it_is_known_to(name: str, contents: ScanResult) -> None:
    answers = {
        text: predict(contents, Capability(*map(int, text.split(".")))).answer.value for text in ANSWERS[name]
    }
    assert answers == ANSWERS[name]


def test_the_hole_at_turing_is_explained(name: str, contents: ScanResult) -> None:
    """PyTorch documents Turing for CUDA 13; its linear algebra is built without."""
    found = predict(contents, Capability(7, 5))
    told = [line for line in contradictions(contents) if line.startswith("7.5: ")]
    if name == "torch-2.12.1":
        assert found.answer is Compatibility.PARTLY
        assert "linear algebra" in found.reason
        assert "libtorch_cuda_linalg.so" in found.reason
        assert "documented" in told[0]
    else:
        assert (found.answer, told) == (Compatibility.YES, [])


COST = """
import re, sys
from pathlib import Path
from imagefactory.scan.files import scan_wheel
from imagefactory.progress import QuietProgress

scan_wheel(Path(sys.argv[1]), QuietProgress(), workers=2)
print(re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_a_scan_holds_little_of_a_wheel(wheels: Wheels) -> None:
    """In a process of its own; the memory is that of all of Python.

    getrusage would tell the most of the process that started it too: exec keeps that count.
    """
    argv = [sys.executable, "-c", COST, str(wheels.fetch("torch-2.12.1"))]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    wheels.drop("torch-2.12.1")
    assert int(done.stdout) * 1024 <= 150e6


@pytest.mark.parametrize(
    ("package", "gpu", "answer"),
    [
        ("kornia-rs==0.1.9", "V100", "on the CPU"),
        ("ctranslate2==4.6.0", "RTX 5070 Ti", "through PTX"),
        ("ctranslate2==4.6.0", "GTX 980", "no"),
        ("torch-scatter==2.1.2", "V100", "package-no-wheel"),
        ("torch==99.1", "V100", "release-not-found"),
    ],
)
def test_a_package_of_the_index_is_solved_and_scanned(
    package: str, gpu: str, answer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = str(tmp_path_factory.getbasetemp() / "packages")  # one for all questions
    result = subprocess.run(
        [sys.executable, "-m", "imagefactory", "compat", package, "--gpu", gpu, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "IMAGEFACTORY_CACHE": cache},
    )
    value = json.loads(result.stdout)
    assert answer == (value["errors"][0]["code"] if "errors" in value else value["gpus"][0]["answer"])
