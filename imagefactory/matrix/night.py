"""What of a plan one night takes, where it has more jobs than a night can hold. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, date, datetime

from imagefactory.matrix.plan import CellState, Plan, PlannedCell, PlannedTarget

_DUE = (CellState.BUILD, CellState.VERIFY)
_Job = tuple[PlannedTarget, PlannedCell | None]
"""A cell to build or to verify, None for a whole target: one for CPUs, or where no GPU is listed."""


def tonight(plan: Plan, most: int, day: date) -> tuple[Plan, int]:
    """The plan with at most `most` of its jobs, and how many wait for another night.

    A proof that has lapsed comes first, the oldest before all: somebody counts on it. What was never proven
    follows, in an order that changes each day, so that nothing waits for ever behind a runner that is away.
    """
    jobs: list[_Job] = []
    for target in plan.targets:
        cells = target.cells if plan.on_gpus else ()
        jobs += [(target, cell) for cell in cells if cell.state in _DUE]
        if not cells and target.state in _DUE:
            jobs.append((target, None))
    if len(jobs) <= most:
        return plan, 0

    def turn(job: _Job) -> tuple[bool, datetime, bytes]:
        target, cell = job
        proven = cell.proven if cell else None
        told = f"{day} {target.target.name} {cell.device if cell else ''}"
        never = datetime.max.replace(tzinfo=UTC)
        return proven is None, proven or never, hashlib.sha256(told.encode()).digest()

    kept: dict[str, list[PlannedCell]] = {}
    for target, cell in sorted(jobs, key=turn)[:most]:
        kept.setdefault(target.target.name, []).extend([cell] if cell else target.cells)
    targets = tuple(
        replace(target, cells=tuple(cell for cell in target.cells if cell in kept[target.target.name]))
        for target in plan.targets
        if target.target.name in kept
    )
    return replace(plan, targets=targets), len(jobs) - most
