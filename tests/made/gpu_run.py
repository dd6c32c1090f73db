"""Runs of the GPU suite as the host sees them. No GPU is behind them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from imagefactory.suite.gpu import table
from imagefactory.verify.outcome import GpuRun
from tests.made.gpu_suite import make_expectations
from tests.made.trial import ScriptedRunner
from tests.made.verdicts import HOST, MADE_UP, NOW, SUBJECT, SUITE

DEVICE = {"name": "A GPU of the tests", "capability": "8.0", "uuid": MADE_UP.uuid, "memory": 1 << 34}


def make_run(**changes: Any) -> GpuRun:
    asked = make_expectations(
        **{
            "nonce": "0123456789abcdef0123456789abcdef",
            "predicted": {"8.0": {"native": True, "ptx": False, "runs": True, "reason": "sm_80 code"}},
            **changes,
        }
    )
    return GpuRun(
        subject=SUBJECT,
        suite=SUITE,
        asked=asked,
        waive=(),
        runner="unshare",
        hardware=HOST,
        started=NOW,
        ended=NOW,
    )


def whole(run: GpuRun) -> dict[str, Any]:
    """The report of an image in which all is well."""
    return {
        "format": table.FORMAT,
        "nonce": run.asked["nonce"],
        "target": run.asked["target"],
        "python": "3.11.2",
        "level": run.asked["level"],
        "rehearsal": run.asked["rehearsal"],
        "cuda": "12.4",
        "libcuda": "",
        "device": None if run.asked["rehearsal"] else dict(DEVICE),
        "running": "",
        "checks": [
            {
                "name": name,
                "state": "passed",
                "detail": f"{name} held",
                "outcome": "",
                "seconds": 0.5,
                "numbers": {"gpus": 2.0} if name == "gpus" else {"n": 1.5},
            }
            for name in table.checks_of(run.asked["level"])
        ],
    }


def well_behaved(change: Callable[[dict[str, Any]], Any] = lambda report: None) -> ScriptedRunner:
    """An image whose report says that all is well, as far as it was asked."""

    def write(path: Path, asked: dict[str, Any]) -> None:
        report = whole(make_run(**asked))
        change(report)
        path.write_text(json.dumps(report))

    return ScriptedRunner(write=write)


def never(path: Path, asked: dict[str, Any]) -> None:
    raise AssertionError("something was started")
