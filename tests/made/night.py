"""Kept plans and nights, for tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from imagefactory.extras.nightly.changes import KeptCell, KeptPlan, KeptTarget, NightReport, NightRow
from imagefactory.gpu.capability import Capability
from imagefactory.matrix.plan import CellState, PlanGpu
from imagefactory.trust.claims import ProofAges

NIGHT = datetime(2026, 11, 25, 2, 17, tzinfo=UTC)
DAY = timedelta(days=1)


def kept_cell(capability: str = "8.0", state: CellState = CellState.VERIFY, **changes: Any) -> KeptCell:
    given = {"required": True, "proven": None, "until": None, "refused": "", **changes}
    return KeptCell(gpu=f"GPU ({capability})", capability=capability, state=state, **given)


def proven_cell(capability: str = "8.0", days: int = 1, left: int = 80) -> KeptCell:
    times = {"proven": NIGHT - days * DAY, "until": NIGHT + left * DAY}
    return kept_cell(capability, CellState.UNCHANGED, **times)


def kept_target(
    name: str, *cells: KeptCell, state: CellState = CellState.VERIFY, **changes: Any
) -> KeptTarget:
    given = {"reason": "", "hint": "", "image": "sha256:" + "a" * 64, **changes}
    return KeptTarget(name=name, state=state, cells=cells, **given)


def kept_plan(*targets: KeptTarget) -> KeptPlan:
    device = PlanGpu(capability=Capability(8, 0))
    return KeptPlan(made=NIGHT, registry="r.example/gpu", names=(), devices=(device,), targets=targets)


def night_report(**changes: Any) -> NightReport:
    given = {
        "started": NIGHT,
        "ended": NIGHT + timedelta(hours=3, minutes=12),
        "place": "r.example/gpu",
        "built": (NightRow(what="jax-0.4-cu12", why="sha256:aa"),),
        "proven": (NightRow(what="jax-0.4-cu12", on="8.0, 9.0"),),
        "broken": (NightRow(what="torch-2.3-cu121", why="its smoke test did not pass", hint="look", code=9),),
        "due": (NightRow(what="tf-2.16-cu12", on="7.0", why="to verify, never verified"),),
        "ages": ProofAges(oldest=NIGHT - 80 * DAY, lapsing=3),
        **changes,
    }
    return NightReport(**given)
