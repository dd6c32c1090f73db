"""The changes in a nightly run: the plan before it, the plan after it, and its failures. Pure functions.

    make_plan() -> save_plan() -> a file ... save_plan() -> compare() -> NightlyReport

The report compares two plans and does not depend on a record of the work. So it is also correct for a run
that was killed and repeated, and for work of other processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Annotated, Final, Literal

from imagefactory.errors import EXIT_BUILD, EXIT_CHECK, EXIT_LOCK
from imagefactory.gpu.values import ClaimBasis, Compatibility, capability_row
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

PLAN_FORMAT: Final = "imagefactory.nightly-plan/1"
NIGHTLY_FORMAT: Final = "imagefactory.nightly/1"
MOST = 1_000_000
FEW = 3
"""The number of targets that are named in a merged row."""
QUIET, OFF = 45, 60
"""Days after the last commit of a repository when a warning starts, and when GitHub disables its
schedules.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCell:
    """A cell of a saved plan. `verified` and `expires` are the period of its newest verdict.

    `gpu` is its device. `failure` is the outcome and reason of a negative verdict, empty without one.
    """

    gpu: str
    capability: str
    status: CellState
    required: bool
    verified: datetime | None
    expires: datetime | None
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTarget:
    """A planned target. `image` is the digest of its current image."""

    target: str
    status: CellState
    reason: str
    hint: str
    image: str
    cells: Annotated[tuple[SavedCell, ...], MaxRows(MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """A plan in a file, with its request. Repeating the request shows what changed.

    If `devices` were listed, unchanged cells are verified. `waiting` are targets that wait for another run.
    """

    format: Literal["imagefactory.nightly-plan/1"] = PLAN_FORMAT
    created: datetime
    registry: str
    names: Annotated[tuple[str, ...], MaxRows(MOST)]
    devices: Annotated[tuple[PlanGpu, ...], MaxRows(MOST)]
    targets: Annotated[tuple[SavedTarget, ...], MaxRows(MOST)] = ()
    waiting: Annotated[tuple[str, ...], MaxRows(MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyRow:
    """A row of the report."""

    what: str
    """Targets, or a step of the run."""
    on: str = ""
    """Compute capabilities."""
    reason: str = ""
    """For a built image, its digest."""
    hint: str = ""
    exit_code: int = 0
    machines: tuple[str, ...] = ()
    """The machines of the cluster on which it happened."""


Rows = Annotated[tuple[NightlyRow, ...], MaxRows(MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyReport:
    """What a nightly run built and verified, what is broken and what is due.

    `broken` rows need a person, `due` rows are left for a later run. `notes` are lines for a person.
    """

    format: Literal["imagefactory.nightly/1"] = NIGHTLY_FORMAT
    directory: str
    exit_code: int
    """The exit code of the earliest failed stage, 0 if none failed."""
    started: datetime
    ended: datetime
    place: str
    """The registry."""
    built: Rows
    verified: Rows
    broken: Rows
    due: Rows
    verdict_ages: VerdictAges
    notes: tuple[str, ...] = ()


def is_news(night: NightlyReport, last: NightlyReport | None) -> bool:
    """Return whether to send a message: the run changed something, or the broken rows changed."""
    was = {(row.what, row.on, row.exit_code) for row in last.broken} if last else set()
    is_ = {(row.what, row.on, row.exit_code) for row in night.broken}
    return bool(night.built or night.verified) or was != is_


def save_plan(plan: VerificationPlan, request: SavedPlan) -> SavedPlan:
    """Return the plan to save. `request` has no targets yet."""
    return replace(
        request,
        targets=tuple(
            SavedTarget(
                target=row.target.name,
                status=row.state,
                reason=as_single_line(row.reason),
                hint=as_single_line(row.hint),
                image=row.image,
                cells=tuple(_save_cell(cell) for cell in row.cells),
            )
            for row in plan.targets
        ),
    )


def _save_cell(cell: PlannedCell) -> SavedCell:
    claim = cell.ruling.claim
    no = claim if claim and (claim.basis, claim.answer) == (ClaimBasis.VERIFIED, Compatibility.NO) else None
    return SavedCell(
        gpu=str(cell.device),
        capability=capability_row(cell.device.capability, cell.device.part),
        status=cell.state,
        required=cell.required,
        verified=cell.verified,
        expires=cell.until,
        failure=as_single_line(f"{no.rule}: {no.reason}") if no else "",
    )


def as_single_line(text: str) -> str:
    """Return a message as one printable line of limited length, for a document."""
    return printable_line(text)[:LONGEST_TEXT]


# --- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlySteps:
    """The facts about a run that its two plans lack: its directory, times, registry, failed steps, and notes.

    `ages` are those of the signed catalog. If they are None, the report computes them from the plan.
    """

    directory: str
    started: datetime
    ended: datetime
    place: str
    failures: tuple[NightlyRow, ...] = ()
    notes: tuple[str, ...] = ()
    ages: VerdictAges | None = None


def compare(before: SavedPlan, after: SavedPlan, steps: NightlySteps) -> NightlyReport:
    """Return the changes between two plans, and the remaining work.

    If a step failed, its error is the reason, so its target or GPU gets no other row. Each cause gets one
    row.
    """
    targets_before = {target.target: target for target in before.targets}
    reported = {(row.what, row.on) for row in steps.failures} | {
        (row.what, "") for row in steps.failures if not row.on
    }
    built, verified, due = [], [], []
    broken = [*steps.failures]
    for target in after.targets:
        old = targets_before.get(target.target)
        if target.image and target.image != (old.image if old else ""):
            built.append(NightlyRow(what=target.target, reason=target.image))
        verified_before = (
            {cell.gpu for cell in old.cells if before.devices and _saved_verdicts(cell)} if old else set()
        )
        same = old is not None and old.image == target.image
        new = [
            c
            for c in target.cells
            if after.devices and _saved_verdicts(c) and not (same and c.gpu in verified_before)
        ]
        if new:
            verified.append(NightlyRow(what=target.target, on=_capabilities(new)))
        broken += [row for row in _broken(target, old) if (row.what, row.on) not in reported]
        due += [row for row in _due(target) if (row.what, "") not in reported]
    periods = (
        (cell.verified, cell.expires)
        for target in after.targets
        for cell in target.cells
        if cell.verified and cell.expires
    )
    rows = by_cause(broken)
    return NightlyReport(
        directory=steps.directory,
        exit_code=min((row.exit_code for row in rows), default=0),
        started=steps.started,
        ended=steps.ended,
        place=steps.place,
        built=tuple(built),
        verified=tuple(verified),
        broken=rows,
        due=tuple(due),
        verdict_ages=steps.ages or verdict_ages(periods, steps.ended),
        notes=steps.notes,
    )


def by_cause(rows: Iterable[NightlyRow]) -> tuple[NightlyRow, ...]:
    """Merge rows with the same reason into the first of them, with all their targets and places."""
    alike: dict[tuple[str, int], list[NightlyRow]] = {}
    for row in rows:
        alike.setdefault((row.reason, row.exit_code), []).append(row)
    return tuple(_unite(same) if len(same) > 1 else same[0] for same in alike.values())


def _unite(rows: list[NightlyRow]) -> NightlyRow:
    names = list(dict.fromkeys(row.what for row in rows))
    places = dict.fromkeys(capability for row in rows for capability in row.on.split(", ") if capability)
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
    return cell.status is CellState.UNCHANGED


def _capabilities(cells: Iterable[SavedCell]) -> str:
    return ", ".join(dict.fromkeys(cell.capability for cell in cells))


def _broken(target: SavedTarget, old: SavedTarget | None) -> Iterator[NightlyRow]:
    """Yield a target without a lock, and failed verdicts that are new or for a required capability."""
    if target.status is CellState.BLOCKED:
        yield NightlyRow(what=target.target, reason=target.reason, hint=target.hint, exit_code=EXIT_LOCK)
    known = {(cell.gpu, cell.failure) for cell in old.cells} if old else set()
    for cell in target.cells:
        if cell.failure and (cell.required or (cell.gpu, cell.failure) not in known):
            rule = cell.failure.partition(":")[0]
            hint = f"another version, or `imagefactory sweep start TARGET --ignore-rule {rule}` to try again"
            yield NightlyRow(
                what=target.target, on=cell.capability, reason=cell.failure, hint=hint, exit_code=EXIT_CHECK
            )


def _due(target: SavedTarget) -> Iterator[NightlyRow]:
    if target.status is CellState.BUILD:
        yield NightlyRow(what=target.target, reason=f"to build: {target.reason}")
        return
    cells = [cell for cell in target.cells if cell.status is CellState.VERIFY]
    if cells:
        last = max((cell.verified for cell in cells if cell.verified), default=None)
        reason = f"to verify, last verified {last:%Y-%m-%d}" if last else "to verify, never verified"
        yield NightlyRow(what=target.target, on=_capabilities(cells), reason=reason)


def unbuilt(before: SavedPlan, after: SavedPlan) -> tuple[NightlyRow, ...]:
    """Return targets that are still not built, for a run whose steps were not observed."""
    to_build = {target.target for target in before.targets if target.status is CellState.BUILD}
    to_build -= set(before.waiting)
    reason = "it was due to be built, and is not built"
    hint = "see the log of the job with this name in the nightly run"
    return tuple(
        NightlyRow(what=target.target, reason=reason, hint=hint, exit_code=EXIT_BUILD)
        for target in after.targets
        if target.target in to_build and target.status is CellState.BUILD
    )


def schedule_warning(last_commit: datetime, now: datetime) -> str:
    """Return a warning shortly before GitHub disables the schedule, else ""."""
    days = (now - last_commit).days
    if days <= QUIET:
        return ""
    days_left = max(OFF - days, 0)
    return (
        f"the last commit is {days} days old: GitHub disables schedules after {OFF} days, "
        f"in {days_left}; "
        "merge a pull request of relock.yml, or push any commit (a disabled one is enabled under Actions)"
    )


# --- The selection of jobs for one run, if the plan has more than a run can do. Pure


_DUE = (CellState.BUILD, CellState.VERIFY)
_Job = tuple[PlannedTarget, PlannedCell | None]
"""A cell to build or to verify. None means the whole target, if it is for CPUs or no GPU is listed."""


def oldest_drivers(plan: VerificationPlan) -> VerificationPlan:
    """Return the plan with one cell for each target and row: the one with the oldest driver that is not
    skipped.

    Its verdict is also valid for newer drivers. If all are skipped, the newest stays. Failed cells always
    stay.
    """

    def narrowed(cells: Sequence[PlannedCell]) -> Iterator[PlannedCell]:
        rows: dict[tuple[object, ...], list[PlannedCell]] = {}
        for cell in cells:
            device = cell.device
            rows.setdefault((device.capability, device.part, device.host), []).append(cell)
        for alike in rows.values():
            alike.sort(key=lambda cell: natural(cell.device.oldest_driver))
            chosen = next((cell for cell in alike if cell.state is not CellState.SKIPPED), alike[-1])
            yield from (cell for cell in alike if cell is chosen or _is_rejected(cell))

    targets = tuple(replace(target, cells=tuple(narrowed(target.cells))) for target in plan.targets)
    return replace(plan, targets=targets)


def _is_rejected(cell: PlannedCell) -> bool:
    claim = cell.ruling.claim
    no = claim is not None and (claim.basis, claim.answer) == (ClaimBasis.VERIFIED, Compatibility.NO)
    return no and claim.rule != Outcome.DRIVER_TOO_OLD if claim else False


def cells_for_night(
    plan: VerificationPlan, limit: int, day: date, *, kits: bool = False
) -> tuple[VerificationPlan, int]:
    """Return the plan with at most `limit` of its jobs, and the number of jobs left for another run.

    With `kits`, targets that a kit cannot start are only built, not verified on a GPU.

    Expired verdicts come first, the oldest first, since users rely on them. Cells that were never verified
    follow in an order that changes each day, so that an offline runner does not block the others forever.
    """
    jobs: list[_Job] = []
    for target in plan.targets:
        startable = not kits or starts_by_kit(target.target)
        cells = target.cells if plan.on_gpus and startable else ()
        jobs += [(target, cell) for cell in cells if cell.state in _DUE]
        if not cells and target.state in (_DUE if startable else (CellState.BUILD,)):
            jobs.append((target, None))
    if len(jobs) <= limit:
        return plan, 0

    def turn(job: _Job) -> tuple[object, ...]:
        target, cell = job
        seed = f"{day} {target.target.name} {cell.device if cell else ''}"
        return turn_of(cell.verified if cell else None, seed)

    selected: dict[str, list[PlannedCell]] = {}
    for target, cell in sorted(jobs, key=turn)[:limit]:
        selected.setdefault(target.target.name, []).extend([cell] if cell else target.cells)
    targets = tuple(
        replace(target, cells=tuple(cell for cell in target.cells if cell in selected[target.target.name]))
        for target in plan.targets
        if target.target.name in selected
    )
    return replace(plan, targets=targets), len(jobs) - limit
