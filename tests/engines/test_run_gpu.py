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
    """A machine with a driver, and a torch that cannot be imported."""
    driver = libcuda.build_libcuda(tmp_path / "driver")
    place = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "torch-2.3.1.dist-info").mkdir()
    (site / "torch-2.3.1.dist-info/METADATA").write_text("Name: torch\nVersion: 2.3.1\n")
    (site / "torch.py").write_text("raise ImportError('libcudart.so.12 is not there')\n")
    python = place / "bin/python"
    code, document, rows = run(tmp_path, "--skip", "image", "--python", python, driver=driver)
    assert (code, document["outcome"]) == (1, "failed")
    assert document["device"]["uuid"] == libcuda.UUID
    assert {rows["driver", check]["state"] for check in table.PARTS["driver"]} == {"passed"}
    assert rows["controls", "a wrong kernel"]["detail"] == "the suite says wrong-numbers"
    assert rows["latencies", "launch and wait"]["numbers"]["p50"] > 0
    assert rows["image", "all"] == {
        **rows["image", "all"],
        "state": "not-run",
        "detail": "left out by --skip",
    }
    assert rows["predictions", "all"]["state"] == "not-run"
    # It imports numpy first, which is not there either; what needs code that runs is not asked then.
    broken = rows["torch 2.3.1", "ptx-code"]
    assert broken["state"] == "failed"
    assert broken["detail"].startswith("load-failed: neither machine code nor PTX of the image runs here")
    assert rows["torch 2.3.1", "matmul"]["state"] == "not-run"
    assert rows["emulated", "profile"]["state"] == "failed"
    assert rows["emulated", "profile"]["detail"].startswith("load-failed: ModuleNotFoundError")
    assert rows["jax", "all"]["detail"].endswith("has none")
    assert ("torch", "all") not in rows


@pytest.mark.parametrize(
    ("lies", "code", "outcome"),
    [("kernel=wrong", 1, "failed"), ("capability=", 9, "no-gpu"), (None, 9, "no-gpu")],
)
def test_a_gpu_that_lies_or_is_not_there(tmp_path: Path, lies: str | None, code: int, outcome: str) -> None:
    """None: no driver at all, where the machine of the tests has none."""
    if lies is None and Path("/proc/driver/nvidia/version").exists():
        return
    driver = libcuda.build_libcuda(tmp_path / "driver") if lies is not None else None
    skipped = [word for part in ("image", "machine") for word in ("--skip", part)]
    found, document, rows = run(tmp_path, *skipped, driver=driver, lies=lies or "")
    assert (found, document["outcome"]) == (code, outcome)
    if code == 9:
        assert {row["state"] for row in rows.values()} == {"passed", "failed", "not-run"} - (
            {"passed"} if lies is None else set()
        )
        assert rows["controls", "all"]["detail"] == "there is no GPU to ask"
        assert document["device"] is None
