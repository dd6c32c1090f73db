"""What of a plan one night takes, where it has more jobs than a night can hold. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime

from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.values import Answer, Basis
from imagefactory.matrix.plan import CellState, Plan, PlannedCell, PlannedTarget
from imagefactory.model import Outcome, Target
from imagefactory.versions import natural

_DUE = (CellState.BUILD, CellState.VERIFY)
_Job = tuple[PlannedTarget, PlannedCell | None]
"""A cell to build or to verify, None for a whole target: one for CPUs, or where no GPU is listed."""


def starts_by_kit(target: Target) -> bool:
    """Whether a kit can start its image: it is for GPUs, and not for AMD's."""
    return target.gpu and not rocm_of(target.cuda)


def turn_of(proven: datetime | None, told: str) -> tuple[object, ...]:
    """What cells are sorted by: the oldest proof first, then what was never proven, by a sum of `told`."""
    never = datetime.max.replace(tzinfo=UTC)
    return proven is None, proven or never, hashlib.sha256(told.encode()).digest()


def oldest_drivers(plan: Plan) -> Plan:
    """A plan with one cell for each target and row: that of the oldest driver which is not pruned.

    Its verdict holds for newer ones. Where all are pruned the newest's stays, and what a verdict says against
    the image always does.
    """

    def narrowed(cells: Sequence[PlannedCell]) -> Iterator[PlannedCell]:
        rows: dict[tuple[object, ...], list[PlannedCell]] = {}
        for cell in cells:
            device = cell.device
            rows.setdefault((device.capability, device.part, device.host), []).append(cell)
        for alike in rows.values():
            alike.sort(key=lambda cell: natural(cell.device.oldest_driver))
            chosen = next((cell for cell in alike if cell.state is not CellState.PRUNED), alike[-1])
            yield from (cell for cell in alike if cell is chosen or _is_refused(cell))

    targets = tuple(replace(one, cells=tuple(narrowed(one.cells))) for one in plan.targets)
    return replace(plan, targets=targets)


def _is_refused(cell: PlannedCell) -> bool:
    claim = cell.ruling.claim
    no = claim is not None and (claim.basis, claim.answer) == (Basis.VERIFIED, Answer.NO)
    return no and claim.rule != Outcome.DRIVER_TOO_OLD if claim else False


def tonight(plan: Plan, most: int, day: date, *, kits: bool = False) -> tuple[Plan, int]:
    """The plan with at most `most` of its jobs, and how many wait for another night.

    With `kits` what no kit starts is built alone, and on no GPU a job.

    A proof that has lapsed comes first, the oldest before all: somebody counts on it. What was never proven
    follows, in an order that changes each day, so that nothing waits for ever behind a runner that is away.
    """
    jobs: list[_Job] = []
    for target in plan.targets:
        startable = not kits or starts_by_kit(target.target)
        cells = target.cells if plan.on_gpus and startable else ()
        jobs += [(target, cell) for cell in cells if cell.state in _DUE]
        if not cells and target.state in (_DUE if startable else (CellState.BUILD,)):
            jobs.append((target, None))
    if len(jobs) <= most:
        return plan, 0

    def turn(job: _Job) -> tuple[object, ...]:
        target, cell = job
        told = f"{day} {target.target.name} {cell.device if cell else ''}"
        return turn_of(cell.proven if cell else None, told)

    kept: dict[str, list[PlannedCell]] = {}
    for target, cell in sorted(jobs, key=turn)[:most]:
        kept.setdefault(target.target.name, []).extend([cell] if cell else target.cells)
    targets = tuple(
        replace(target, cells=tuple(cell for cell in target.cells if cell in kept[target.target.name]))
        for target in plan.targets
        if target.target.name in kept
    )
    return replace(plan, targets=targets), len(jobs) - most
