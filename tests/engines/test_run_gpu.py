"""`tests/run gpu` on the stand-in for libcuda: what it writes and leaves out, and that faults are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from imagefactory.suite.gpu import table
from tests.gpu.measure import FAILED, NOT_RUN, PASSED, Row, held_against
from tests.services import libcuda

ROOT = Path(__file__).parents[2]
Rows = dict[tuple[str, str], dict[str, Any]]


def run(folder: Path, *arguments: str | Path, driver: Path | None, lies: str = "") -> tuple[int, Any, Rows]:
    """The exit code, the document and its rows by part and name; the Markdown file has as many."""
    environ = {"PATH": os.environ["PATH"], libcuda.VARIABLE: lies}
    if driver is not None:
        environ["LD_LIBRARY_PATH"] = str(driver.parent)
    command = [ROOT / "tests/run", "gpu", "--output", folder / "out", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    document = json.loads((folder / "out/report.json").read_text())
    lines = (folder / "out/report.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(document["rows"]) + 1, done.stderr
    return done.returncode, document, {(row["part"], row["name"]): row for row in document["rows"]}


def test_what_is_at_hand_is_run_and_all_else_is_named(tmp_path: Path) -> None:
    """A machine with a driver, a numba that cannot be imported, and a torch for CPUs."""
    driver = libcuda.build_libcuda(tmp_path / "driver")
    place = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    for name, version in (("torch", "2.3.1"), ("numba", "0.68.1")):
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (site / f"{name}.py").write_text("raise ImportError('libcudart.so.12 is not there')\n")
    python = place / "bin/python"
    code, document, rows = run(tmp_path, "--skip", "controls", "--python", python, driver=driver)
    assert (code, document["outcome"]) == (1, "failed")
    assert document["device"]["uuid"] == libcuda.UUID
    assert {rows["driver", check]["state"] for check in table.PARTS["driver"]} == {"passed"}
    assert rows["latencies", "launch and wait"]["numbers"]["p50"] > 0
    left_out = rows["controls", "all"]
    assert (left_out["state"], left_out["detail"]) == ("not-run", "left out by --skip")
    assert rows["predictions", "all"]["state"] == "not-run"
    assert rows["host", "evidence"]["state"] == "failed"  # the stand-in is no GPU of the machine
    assert rows["scan", "compat"]["state"] == "passed"
    # It imports numpy first, which is not there either; what needs code that runs is not asked then.
    broken = rows["numba 0.68.1", "matmul"]
    assert (broken["state"], broken["detail"].partition(":")[0]) == ("failed", "load-failed")
    # Says nothing of the prediction, neither for nor against it.
    assert rows["compat, numba 0.68.1", "numba 0.68.1, CUDA 12"]["state"] == "not-run"
    assert rows["torch 2.3.1", "all"]["state"] == rows["emulated", "all"]["state"] == "not-run"
    assert rows["jax", "all"]["detail"].endswith("has none")


@pytest.mark.parametrize(
    ("lies", "code", "outcome"),
    [("kernel=wrong", 1, "failed"), ("capability=", 9, "no-gpu"), (None, 9, "no-gpu")],
)
def test_a_gpu_that_lies_or_is_not_there(tmp_path: Path, lies: str | None, code: int, outcome: str) -> None:
    """None: no driver at all, where the machine of the tests has none."""
    if lies is None and Path("/proc/driver/nvidia/version").exists():
        return
    driver = libcuda.build_libcuda(tmp_path / "driver") if lies is not None else None
    skipped = [word for part in ("scan", "machine") for word in ("--skip", part)]
    found, document, rows = run(tmp_path, *skipped, driver=driver, lies=lies or "")
    assert (found, document["outcome"]) == (code, outcome)
    if code == 9:
        assert {row["state"] for row in rows.values()} == {"passed", "failed", "not-run"} - (
            {"passed"} if lies is None else set()
        )
        assert rows["controls", "all"]["detail"] == "there is no GPU to ask"
        assert document["device"] is None


@pytest.mark.parametrize(
    ("answer", "driver", "ran", "states"),
    [
        ("yes", "580", (PASSED, ""), [PASSED, FAILED]),
        ("yes", "580", (FAILED, "no-kernel: no kernel image"), [FAILED, PASSED]),
        ("yes", "580", (FAILED, "driver-too-old: 12040"), [FAILED, PASSED]),
        ("yes", "", (FAILED, "driver-too-old: 12040"), [NOT_RUN, NOT_RUN]),
        ("yes", "580", (FAILED, "load-failed: no libcudart"), [NOT_RUN, NOT_RUN]),
        ("unknown", "580", (PASSED, ""), [NOT_RUN, FAILED]),
    ],
)
def test_each_answer_is_held_against_what_ran(
    answer: str, driver: str, ran: tuple[str, str], states: list[str]
) -> None:
    """A table and a scan that says no. What failed for another reason is no evidence."""
    told = {"title": "torch 2.11.0, CUDA 13.0", "runs": True, "answer": answer, "claims": ["documented"]}
    scan = {"runs": False, "answer": "no", "reason": "no code"}
    known = {"driver": driver, "tables": [told], "scan": scan}
    rows = held_against("torch 2.11.0", known, [Row("torch 2.11.0", "matmul", *ran)])
    assert [row.state for row in rows] == states


def test_a_crash_costs_one_answer(tmp_path: Path) -> None:
    """The driver ends the process that allocates memory, and what needs none is answered."""
    driver = libcuda.build_libcuda(tmp_path / "driver")
    code, document, rows = run(tmp_path, "--skip", "scan", driver=driver, lies="crash=cuMemAlloc_v2")
    assert (code, document["outcome"]) == (1, "failed")
    assert rows["driver", "device"]["state"] == "passed"
    assert rows["driver", "vector-add"]["state"] == "failed"
    assert rows["latencies", "all"]["state"] == "failed"
    assert rows["host", "namespaces"]["state"] in ("passed", "failed")
    assert rows["emulated", "all"]["state"] == "not-run"
