"""Kept plans and nights, for tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from imagefactory.extras.nightly.changes import NightlyReport, NightlyRow, SavedCell, SavedPlan, SavedTarget
from imagefactory.gpu.capability import Capability
from imagefactory.matrix.plan import CellState, PlanGpu
from imagefactory.trust.claims import VerdictAges

NIGHT = datetime(2026, 11, 25, 2, 17, tzinfo=UTC)
DAY = timedelta(days=1)


def kept_cell(capability: str = "8.0", state: CellState = CellState.VERIFY, **changes: Any) -> SavedCell:
    given = {"required": True, "verified": None, "expires": None, "failure": "", **changes}
    return SavedCell(gpu=f"GPU ({capability})", capability=capability, status=state, **given)


def proven_cell(capability: str = "8.0", days: int = 1, left: int = 80) -> SavedCell:
    times = {"verified": NIGHT - days * DAY, "expires": NIGHT + left * DAY}
    return kept_cell(capability, CellState.UNCHANGED, **times)


def kept_target(
    name: str, *cells: SavedCell, state: CellState = CellState.VERIFY, **changes: Any
) -> SavedTarget:
    given = {"reason": "", "hint": "", "image": "sha256:" + "a" * 64, **changes}
    return SavedTarget(target=name, status=state, cells=cells, **given)


def kept_plan(*targets: SavedTarget) -> SavedPlan:
    device = PlanGpu(capability=Capability(8, 0))
    return SavedPlan(created=NIGHT, registry="r.example/gpu", names=(), devices=(device,), targets=targets)


def night_report(**changes: Any) -> NightlyReport:
    given = {
        "directory": "/store/nights/20261125",
        "started": NIGHT,
        "ended": NIGHT + timedelta(hours=3, minutes=12),
        "place": "r.example/gpu",
        "built": (NightlyRow(what="jax-0.4-cu12", reason="sha256:aa"),),
        "verified": (NightlyRow(what="jax-0.4-cu12", on="8.0, 9.0"),),
        "broken": (
            NightlyRow(
                what="torch-2.3-cu121", reason="its smoke test did not pass", hint="look", exit_code=9
            ),
        ),
        "due": (NightlyRow(what="tf-2.16-cu12", on="7.0", reason="to verify, never verified"),),
        "verdict_ages": VerdictAges(oldest=NIGHT - 80 * DAY, expiring=3),
        **changes,
    }
    exit_code = min((row.exit_code for row in given["broken"]), default=0)
    return NightlyReport(exit_code=exit_code, **given)
