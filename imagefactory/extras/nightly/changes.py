"""What a night changed: the plan before it, the plan after it, and what went wrong. Pure.

    make_plan() -> keep_plan() -> a file ... keep_plan() -> compare() -> NightlyReport

Nothing is remembered of the work itself: what was built and proven is what the second plan finds done, so a
night that was killed and run again, or that others helped, is told as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Annotated

from imagefactory.errors import EXIT_BUILD, EXIT_CHECK, EXIT_LOCK
from imagefactory.gpu.values import ClaimBasis, Compatibility, row_of
from imagefactory.matrix.plan import (
    CellState,
    PlanGpu,
    PlannedCell,
    PlannedTarget,
    VerificationPlan,
    starts_by_kit,
    turn_of,
)
from imagefactory.model import Outcome
from imagefactory.serialize import LONGEST_TEXT, MaxRows, printable_line
from imagefactory.trust.claims import VerdictAges, verdict_ages
from imagefactory.versions import natural

MOST = 1_000_000
FEW = 3
"""Targets that a row of several names."""
QUIET, OFF = 45, 60
"""Days after a repository's last commit: it is said, and GitHub switches its schedules off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCell:
    """`gpu` tells its device, `proven` and `until` the newest proof; `refused` is what a verdict said against
    it, beginning with its word, empty where none did."""

    gpu: str
    capability: str
    state: CellState
    required: bool
    proven: datetime | None
    until: datetime | None
    refused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTarget:
    """A planned target, in words. `image` is the digest of what is there."""

    name: str
    state: CellState
    reason: str
    hint: str
    image: str
    cells: Annotated[tuple[SavedCell, ...], MaxRows(MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """A plan in a file, with what it was asked: the same is asked again to see what changed.

    Where `devices` were listed, what is unchanged is proven. `waiting` are targets that are left for another
    night.
    """

    made: datetime
    registry: str
    names: Annotated[tuple[str, ...], MaxRows(MOST)]
    devices: Annotated[tuple[PlanGpu, ...], MaxRows(MOST)]
    targets: Annotated[tuple[SavedTarget, ...], MaxRows(MOST)] = ()
    waiting: Annotated[tuple[str, ...], MaxRows(MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyRow:
    """A line of the page: what, on which capabilities (joined), why, and what to do about it.

    `machines` are those of a pool on which it happened.
    """

    what: str
    on: str = ""
    why: str = ""
    hint: str = ""
    code: int = 0
    machines: tuple[str, ...] = ()


Rows = Annotated[tuple[NightlyRow, ...], MaxRows(MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyReport:
    """A night. What is `broken` stays so until somebody does something; what is `due` waits for its turn.

    `notes` are lines that a person should read; `place` is the registry.
    """

    started: datetime
    ended: datetime
    place: str
    built: Rows
    proven: Rows
    broken: Rows
    due: Rows
    ages: VerdictAges
    notes: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The exit code: of what broke the earliest stage's, 0 where nothing did."""
        return min((row.code for row in self.broken), default=0)


def is_news(night: NightlyReport, last: NightlyReport | None) -> bool:
    """Whether somebody should hear of it: things were done, or what is broken is not what was."""
    was = {(row.what, row.on, row.code) for row in last.broken} if last else set()
    is_ = {(row.what, row.on, row.code) for row in night.broken}
    return bool(night.built or night.proven) or was != is_


def save_plan(plan: VerificationPlan, asked: SavedPlan) -> SavedPlan:
    """A plan as it is kept; `asked` has no targets yet."""
    return replace(
        asked,
        targets=tuple(
            SavedTarget(
                name=one.target.name,
                state=one.state,
                reason=as_single_line(one.reason),
                hint=as_single_line(one.hint),
                image=one.image,
                cells=tuple(_save_cell(cell) for cell in one.cells),
            )
            for one in plan.targets
        ),
    )


def _save_cell(cell: PlannedCell) -> SavedCell:
    claim = cell.ruling.claim
    no = claim if claim and (claim.basis, claim.answer) == (ClaimBasis.VERIFIED, Compatibility.NO) else None
    return SavedCell(
        gpu=str(cell.device),
        capability=row_of(cell.device.capability, cell.device.part),
        state=cell.state,
        required=cell.required,
        proven=cell.proven,
        until=cell.until,
        refused=as_single_line(f"{no.rule}: {no.reason}") if no else "",
    )


def as_single_line(text: str) -> str:
    """A message of several lines as one that may stand in a document."""
    return printable_line(text)[:LONGEST_TEXT]


# --- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlySteps:
    """What the two plans do not say: when it was, where, what steps said of their `failures`, and notes.

    `ages` are those of the signed catalog; None where there is none, then the plan's own devices tell them.
    """

    started: datetime
    ended: datetime
    place: str
    failures: tuple[NightlyRow, ...] = ()
    notes: tuple[str, ...] = ()
    ages: VerdictAges | None = None


def compare(before: SavedPlan, after: SavedPlan, told: NightlySteps) -> NightlyReport:
    """What came to be between two plans, and what is still to be done.

    A failure of a step tells why; a target or GPU that one speaks of is not told of twice, nor a cause.
    """
    was = {target.name: target for target in before.targets}
    told_of = {(row.what, row.on) for row in told.failures} | {
        (row.what, "") for row in told.failures if not row.on
    }
    built, proven, due = [], [], []
    broken = [*told.failures]
    for target in after.targets:
        old = was.get(target.name)
        if target.image and target.image != (old.image if old else ""):
            built.append(NightlyRow(what=target.name, why=target.image))
        held = {cell.gpu for cell in old.cells if before.devices and _saved_verdicts(cell)} if old else set()
        same = old is not None and old.image == target.image
        new = [
            c for c in target.cells if after.devices and _saved_verdicts(c) and not (same and c.gpu in held)
        ]
        if new:
            proven.append(NightlyRow(what=target.name, on=_capabilities(new)))
        broken += [row for row in _broken(target, old) if (row.what, row.on) not in told_of]
        due += [row for row in _due(target) if (row.what, "") not in told_of]
    proofs = (
        (cell.proven, cell.until)
        for target in after.targets
        for cell in target.cells
        if cell.proven and cell.until
    )
    return NightlyReport(
        started=told.started,
        ended=told.ended,
        place=told.place,
        built=tuple(built),
        proven=tuple(proven),
        broken=by_cause(broken),
        due=tuple(due),
        ages=told.ages or verdict_ages(proofs, told.ended),
        notes=told.notes,
    )


def by_cause(rows: Iterable[NightlyRow]) -> tuple[NightlyRow, ...]:
    """Rows with one reason as one row, in the place of the first: what and where it was is of all of them."""
    alike: dict[tuple[str, int], list[NightlyRow]] = {}
    for row in rows:
        alike.setdefault((row.why, row.code), []).append(row)
    return tuple(_unite(same) if len(same) > 1 else same[0] for same in alike.values())


def _unite(rows: list[NightlyRow]) -> NightlyRow:
    names = list(dict.fromkeys(row.what for row in rows))
    places = dict.fromkeys(one for row in rows for one in row.on.split(", ") if one)
    hints = dict.fromkeys(row.hint for row in rows if row.hint)
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return replace(
        rows[0],
        what=as_single_line(f"{', '.join(names[:FEW])}{more}"),
        on=as_single_line(", ".join(places)),
        hint=as_single_line(f"{rows[0].hint} (and {len(hints) - 1} more)")
        if len(hints) > 1
        else rows[0].hint,
        machines=tuple(dict.fromkeys(name for row in rows for name in row.machines)),
    )


def _saved_verdicts(cell: SavedCell) -> bool:
    return cell.state is CellState.UNCHANGED


def _capabilities(cells: Iterable[SavedCell]) -> str:
    return ", ".join(dict.fromkeys(cell.capability for cell in cells))


def _broken(target: SavedTarget, old: SavedTarget | None) -> Iterator[NightlyRow]:
    """Nothing to build from; or a verdict that says no where the recipe asks for yes, or that is new."""
    if target.state is CellState.BLOCKED:
        yield NightlyRow(what=target.name, why=target.reason, hint=target.hint, code=EXIT_LOCK)
    known = {(cell.gpu, cell.refused) for cell in old.cells} if old else set()
    for cell in target.cells:
        if cell.refused and (cell.required or (cell.gpu, cell.refused) not in known):
            rule = cell.refused.partition(":")[0]
            hint = f"another version, or `imagefactory sweep start TARGET --ignore-rule {rule}` to try again"
            yield NightlyRow(
                what=target.name, on=cell.capability, why=cell.refused, hint=hint, code=EXIT_CHECK
            )


def _due(target: SavedTarget) -> Iterator[NightlyRow]:
    if target.state is CellState.BUILD:
        yield NightlyRow(what=target.name, why=f"to build: {target.reason}")
        return
    cells = [cell for cell in target.cells if cell.state is CellState.VERIFY]
    if cells:
        last = max((cell.proven for cell in cells if cell.proven), default=None)
        why = f"to verify, last verified {last:%Y-%m-%d}" if last else "to verify, never verified"
        yield NightlyRow(what=target.name, on=_capabilities(cells), why=why)


def unbuilt(before: SavedPlan, after: SavedPlan) -> tuple[NightlyRow, ...]:
    """What was to be built and still is, where nobody saw the steps: their logs say why."""
    was = {target.name for target in before.targets if target.state is CellState.BUILD}
    was -= set(before.waiting)
    why = "it was to be built, and still is"
    hint = "the night's run has a job of that name, whose log says why"
    return tuple(
        NightlyRow(what=target.name, why=why, hint=hint, code=EXIT_BUILD)
        for target in after.targets
        if target.name in was and target.state is CellState.BUILD
    )


def dormant(last_commit: datetime, now: datetime) -> str:
    """What to do before GitHub switches the nights off, empty where there is time."""
    days = (now - last_commit).days
    if days <= QUIET:
        return ""
    left = max(OFF - days, 0)
    return (
        f"the last commit is {days} days old: GitHub switches schedules off after {OFF} days, in {left}; "
        "merge a pull request of relock.yml, or push any commit (switched off, Actions enables it again)"
    )


# --- What of a plan one night takes, where it has more jobs than a night can hold. Pure


_DUE = (CellState.BUILD, CellState.VERIFY)
_Job = tuple[PlannedTarget, PlannedCell | None]
"""A cell to build or to verify, None for a whole target: one for CPUs, or where no GPU is listed."""


def oldest_drivers(plan: VerificationPlan) -> VerificationPlan:
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
            yield from (cell for cell in alike if cell is chosen or _is_rejected(cell))

    targets = tuple(replace(one, cells=tuple(narrowed(one.cells))) for one in plan.targets)
    return replace(plan, targets=targets)


def _is_rejected(cell: PlannedCell) -> bool:
    claim = cell.ruling.claim
    no = claim is not None and (claim.basis, claim.answer) == (ClaimBasis.VERIFIED, Compatibility.NO)
    return no and claim.rule != Outcome.DRIVER_TOO_OLD if claim else False


def cells_for_night(
    plan: VerificationPlan, most: int, day: date, *, kits: bool = False
) -> tuple[VerificationPlan, int]:
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
