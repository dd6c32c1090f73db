"""The suite against real frameworks from the machine's Python index, in their small builds for the CPU.

What the CPU can do must pass; a build without CUDA must be recognised, with what to install instead.
The CUDA builds are gigabytes: the whole images of tests/e2e try those.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from imagefactory.suite import table
from imagefactory.verify import outcome as suite_report
from imagefactory.verify import suite_files
from tests.services.environments import Environment

# distribution of the recipe -> (operations that must have numbers, hint)
BUILDS = {
    "onnxruntime-gpu": ({"matmul", "total", "convolution"}, "install onnxruntime-gpu"),
    "jax": (set(table.OPERATIONS), "install jax[cuda12]"),
}


@pytest.fixture(scope="module", params=list(BUILDS))
def outcome(
    request: pytest.FixtureRequest,
    environment_of: Callable[[str], Environment],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict[str, Any]]:
    """The framework's name and the rows of the suite's report by check."""
    framework, folder = request.param, tmp_path_factory.mktemp("framework")
    environment = environment_of(framework)
    expectations = {
        "format": table.FORMAT,
        "nonce": "5eed",
        "target": "t",
        "framework": framework,
        "version": "",
        "cuda": "12",
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "packages": environment.packages,
        "conda": {},
        "named": [],
        "checks": ["packages", "libraries", "cuda-version", "compute"],
        "uid": None,
    }
    (folder / "expectations.json").write_text(json.dumps(expectations))
    suite = folder / "suite"
    suite_files.write_suite(suite, suite_files.read_suite())
    command = [environment.python, "-I", "-B", suite / "smoke.py"]
    done = subprocess.run(
        [*command, folder / "expectations.json", folder / "report.json"], capture_output=True, timeout=1200
    )
    assert done.returncode == 1, done.stderr[-2000:]
    report = suite_report.parse_smoke_report((folder / "report.json").read_bytes(), "5eed")
    return framework, {row.result.name: row.result for row in report.rows}


def test_the_cpu_computes_right(outcome: tuple[str, dict[str, Any]]) -> None:
    framework, rows = outcome
    assert rows["compute"].state == "passed", rows["compute"].detail
    operations, _ = BUILDS[framework]
    assert {name.partition("-")[0] for name, _ in rows["compute"].numbers} == operations


def test_the_packages_are_as_installed(outcome: tuple[str, dict[str, Any]]) -> None:
    _, rows = outcome
    assert rows["packages"].state == "passed", rows["packages"].detail


def test_a_build_without_cuda_is_recognised(outcome: tuple[str, dict[str, Any]]) -> None:
    framework, rows = outcome
    _, hint = BUILDS[framework]
    assert rows["cuda-version"].state == "failed"
    assert hint in rows["cuda-version"].detail


def test_the_libraries_of_a_build_without_cuda(outcome: tuple[str, dict[str, Any]]) -> None:
    """ONNX Runtime's CPU build needs nothing more; jax without its plugin would open no GPU library."""
    framework, rows = outcome
    assert rows["libraries"].state == ("failed" if framework == "jax" else "passed"), rows["libraries"].detail
