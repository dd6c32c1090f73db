"""Choose the images to verify on the capabilities of a pool: stages + inventory -> cells. Pure functions.

A cell is one image on one capability, and one job. A verdict is also valid for newer drivers. So the job
requests the machines with the oldest driver, and its verdict covers all GPUs of that capability. Each MIG
profile is a separate row, as a verdict about a slice does not cover the whole GPU, nor the reverse.

First, matrix/plan.py skips cells by its rules. Then cells are skipped that no GPU can match or that a valid
verdict covers. `allow` of a rule includes its cells again, except for `no-gpu`, `no-match`, `avoided` and
`mig`: these jobs would never start, or the rule has another option.

    no-gpu     the image is for CPUs, or for AMD GPUs, on which sweeps do not verify
    newest     older than the newest versions that were requested
    blocked    there is no lock to build from
    no-match   no GPU of the pool has that capability and a driver for the image
    avoided    `sweep-machines` selects no machine with that capability
    mig        a slice of a GPU, and slices were not requested
    verified   verdicts cover all GPUs of that capability in this pool
    budget     the sweep has too few GPU hours; a later sweep includes the cell

Then underway.py skips the cells that another sweep has:

    queued       a running sweep has a job for that image there
    uncollected  such a job has ended, and `sweep collect` can sign its verdict
    claimed      another store has queued that image there, as its claims in the registry show

Bad machines (faults.py) are excluded, and then cells that only these could run:

    bad-machine  a machine that recently failed jobs which another machine could run
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.cells import answer_cell
from imagefactory.gpu.drivers import driver_floor, older
from imagefactory.gpu.knowledge import families
from imagefactory.gpu.knowledge.toolkits import native_driver
from imagefactory.gpu.values import capability_row, rocm_of
from imagefactory.matrix.plan import (
    AVOIDED,
    Answerer,
    CellState,
    PlanGpu,
    PlanInput,
    PlannedCell,
    TargetStatus,
    avoided_machines,
    check_rules,
    few,
    make_plan,
    turn_of,
)
from imagefactory.model import Outcome, Target
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolImage, PoolMachine, SkippedCell
from imagefactory.schedulers.sizes import KB, MB, disk_of, format_size, memory_of
from imagefactory.settings.own_commands import is_machine_selected
from imagefactory.trust.claims import last_verdicts
from imagefactory.trust.verdict import Verdict, VerdictStatus, VerificationResult
from imagefactory.verify.report import NODES
from imagefactory.versions import natural, nearest

NO_GPU, NEWEST, BLOCKED, NO_MATCH, VERIFIED = "no-gpu", "newest", "blocked", "no-match", "verified"
QUEUED, UNCOLLECTED, CLAIMED = "queued", "uncollected", "claimed"
MIG, BUDGET, BAD_MACHINE = "mig", "budget", "bad-machine"
CAPACITY_HINT = (
    "imagefactory gpus shows the machines; jobs ask for memory and disk by the size of their image"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRequest:
    """The cells that a user requests. Empty `capabilities` means all of the pool.

    `newest` is the number of versions of each family, 0 for all. `mig` includes MIG slices. `allow` are rules
    to ignore. `machines` are patterns of usable machines. `gpu_hours` is the budget, 0 for no limit.
    Each job has `nodes_each` machines.
    """

    capabilities: tuple[Capability, ...] = ()
    newest: int = 0
    mig: bool = False
    allow: frozenset[str] = frozenset()
    answer: Answerer = answer_cell
    machines: tuple[str, ...] = ()
    gpu_hours: int = 0
    nodes_each: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedCell:
    """An image to verify on a capability for which the pool has `gpus` matching GPUs.

    `cuda` is the lowest CUDA version that the driver must support, empty if no GPU there reports it. `part`
    is the MIG profile, empty for whole GPUs. `first` is the oldest driver, empty if all are equal. With
    `only`, the job cannot use other drivers, since a verdict covers the newer ones.
    """

    stage: TargetStatus
    capability: Capability
    cuda: str
    gpus: int
    reason: str
    part: str = ""
    first: str = ""
    only: bool = False

    @property
    def row(self) -> str:
        return capability_row(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The queued cells by target and capability, and the skipped cells. `notes` are lines to print."""

    cells: tuple[QueuedCell, ...]
    skipped: tuple[SkippedCell, ...]
    notes: tuple[str, ...] = ()


def choose_machines(inventory: Inventory, patterns: Sequence[str]) -> Inventory:
    """Return the inventory with only the machines selected by the patterns."""
    chosen = tuple(machine for machine in inventory.machines if is_machine_selected(machine.name, patterns))
    return replace(inventory, machines=chosen)


_Row = tuple[Capability, str]
"""A capability, and the MIG profile of a slice, empty for whole GPUs."""


def plan_sweep(stages: Sequence[TargetStatus], inventory: Inventory, request: CellRequest) -> SweepPlan:
    """Return every stage on every requested capability, either queued or skipped with a rule.

    `inventory` has all machines, including those that the request does not select.
    """
    everywhere = _by_row(inventory)
    chosen = choose_machines(inventory, request.machines)
    allowed = _by_row(chosen)
    rows = _rows(everywhere, request.capabilities)
    others = {stage.target.name: reason for stage in stages if (reason := _for_others(stage))}
    recent, skipped = _newest([stage for stage in stages if stage.target.name not in others], request)
    skipped += [
        SkippedCell(target=name, capability="", rule=NO_GPU, reason=reason) for name, reason in others.items()
    ]
    cells: list[QueuedCell] = []
    devices = {(row[0], driver_of(gpu), gpu.host, gpu.part) for row in rows for gpu in allowed.get(row, ())}
    listed = tuple(
        PlanGpu(capability=capability, driver=driver, host=host, part=part)
        for capability, driver, host, part in sorted(devices)
    )
    plan = make_plan(PlanInput(stages=recent, devices=listed, allow=request.allow, answer=request.answer))
    for stage, target in zip(recent, plan.targets, strict=True):
        planned = {cell.device: cell for cell in target.cells} if listed else {}
        for row in rows:
            cell: QueuedCell | SkippedCell
            if row[1] and not request.mig:
                cell = _skip(stage, row, MIG, "slices of GPUs are verified on request: --mig")
            elif row in everywhere and row not in allowed:
                cell = _skip(stage, row, AVOIDED, avoided_reason(inventory, capability_row(*row)))
            elif request.nodes_each > 1:
                cell = _weigh_nodes(stage, row, chosen, planned, request)
            else:
                cell = _weigh(stage, row, allowed.get(row, ()), planned, request.allow)
            if isinstance(cell, SkippedCell):
                skipped.append(cell)
            else:
                cells.append(cell)
        if not request.capabilities:  # these were not tested
            required = [(parse_capability(text), "") for text in stage.target.capabilities]
            skipped += [
                _no_gpu(stage, row, "its recipe requires it, and ")
                for row in required
                if row not in everywhere
            ]
    notes = (*_unknown_gpu_note(inventory), *_unused(inventory, request.machines))
    return SweepPlan(cells=tuple(cells), skipped=tuple(skipped), notes=notes)


def _rows(everywhere: Iterable[_Row], capabilities: Sequence[Capability]) -> tuple[_Row, ...]:
    """Return the requested rows.

    For a requested capability this includes the whole GPU, even if the pool has none.
    """
    if not capabilities:
        return tuple(sorted(everywhere))
    parts = {row for row in everywhere if row[0] in capabilities}
    return tuple(sorted(parts | {(capability, "") for capability in capabilities}))


def avoided_reason(inventory: Inventory, row: str) -> str:
    """Return why a row has no usable machine."""
    machines = (machine for machine in inventory.machines if any(gpu.row == row for gpu in machine.gpus))
    return avoided_machines([machine.name for machine in machines])


def _unused(inventory: Inventory, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return a note for each pattern that matches no machine."""
    words = ((word, word.removeprefix("!")) for word in patterns)
    return tuple(
        f"no machine with a GPU is called {word}"
        for word, name in words
        if not any(is_machine_selected(machine.name, (name,)) for machine in inventory.machines)
    )


def within_budget(plan: SweepPlan, request: CellRequest, seconds: float, day: date) -> SweepPlan:
    """Return a plan with as many cells as its GPU hours allow, at least one.

    A later sweep includes the others. Pure.

    A cell is expected to take as long as the last run of its image on that row, or on any row, or else
    `seconds`. Cells with expired verdicts and those that expire soon come first, the oldest first. Cells that
    a verdict on a newer driver covers come last.
    """
    if not request.gpu_hours or BUDGET in request.allow:
        return plan

    def turn(cell: QueuedCell) -> tuple[object, ...]:
        periods = last_verdicts(cell.stage.verdicts, cell.part)
        verified = periods[cell.capability][0] if cell.capability in periods else None
        return cell.only, *turn_of(verified, f"{day} {cell.stage.target.name} {cell.row}")

    chosen: set[int] = set()
    budget = request.gpu_hours * 3600.0
    for cell in sorted(plan.cells, key=turn):
        cost = (last_seconds(cell) or seconds) * request.nodes_each
        if chosen and cost > budget:
            break
        chosen.add(id(cell))
        budget -= cost
    reason = f"the sweep has {request.gpu_hours} GPU hours: a later sweep takes it"
    skipped = [
        _skip(cell.stage, (cell.capability, cell.part), BUDGET, reason)
        for cell in plan.cells
        if id(cell) not in chosen
    ]
    cells = tuple(cell for cell in plan.cells if id(cell) in chosen)
    return replace(plan, cells=cells, skipped=(*plan.skipped, *skipped))


def exclude_bad_machines(
    plan: SweepPlan, inventory: Inventory, bad: Mapping[str, Collection[str]]
) -> SweepPlan:
    """Return a plan whose cells do not start on bad machines.

    `bad` has the names of bad machines for each row. Pure.

    Such a cell uses the next driver. A cell that needs an older driver than the verified one is skipped.
    """
    cells, skipped = [], list(plan.skipped)
    for cell in plan.cells:
        gpus = [
            (machine.name, gpu)
            for machine in inventory.machines
            for gpu in machine.gpus
            if gpu.row == cell.row
        ]
        names = bad.get(cell.row, ())
        good = [gpu for name, gpu in gpus if name.rpartition("@")[2] not in names]
        if not cell.first or any(driver_of(gpu) == cell.first for gpu in good):
            cells.append(cell)
            continue
        newer = [gpu for gpu in good if natural(driver_of(gpu)) > natural(cell.first)]
        due = [gpu for gpu in newer if not (cell.only and find_valid_verdict(cell.stage.verdicts, gpu))]
        drivers = sorted({driver_of(gpu) for gpu in due}, key=natural)
        first = drivers[0] if drivers and (cell.only or len(drivers) > 1) else ""
        if first or not cell.only:
            count = sum(driver_of(gpu) == first for gpu in due) if cell.only else cell.gpus
            cells.append(replace(cell, first=first, gpus=count))
            continue
        machines = tuple(dict.fromkeys(name for name, gpu in gpus if driver_of(gpu) == cell.first))
        reason = f"only machines that failed jobs have an older driver than verified: {few(machines)}"
        skipped.append(_skip(cell.stage, (cell.capability, cell.part), BAD_MACHINE, reason))
    return replace(plan, cells=tuple(cells), skipped=tuple(skipped))


def last_seconds(cell: QueuedCell) -> float:
    """Return the seconds of the last run of a cell's image, on the cell's row if it ran there; 0 without a
    run.
    """
    reports = [row.verdict.report for row in cell.stage.verdicts if row.verdict]
    here = [report for report in reports if report.device and report.device.row == cell.row]
    last = max(here or reports, key=lambda report: report.ended, default=None)
    return max(1.0, (last.ended - last.started).total_seconds()) if last else 0.0


def _unknown_gpu_note(inventory: Inventory) -> tuple[str, ...]:
    """Return a note about GPUs of unknown capability, which get no job."""
    kinds = sorted({gpu.name or "no type" for gpu in inventory.gpus if not gpu.capability})
    count = len(inventory.gpus) - len(inventory.known)
    return (f"GPUs without a known capability get no job: {count} of {', '.join(kinds)}",) if kinds else ()


def _by_row(inventory: Inventory) -> dict[_Row, list[PoolGpu]]:
    """Return the NVIDIA GPUs of a pool by what verdicts are about."""
    rows: dict[_Row, list[PoolGpu]] = {}
    for gpu in inventory.known:
        if not (capability := parse_capability(gpu.capability)).processor:
            rows.setdefault((capability, gpu.part), []).append(gpu)
    return rows


def _newest(
    stages: Sequence[TargetStatus], request: CellRequest
) -> tuple[tuple[TargetStatus, ...], list[SkippedCell]]:
    if not request.newest or NEWEST in request.allow:
        return tuple(stages), []
    versions: dict[str, set[str]] = {}
    for stage in stages:
        versions.setdefault(stage.target.family, set()).add(stage.target.version)
    newest = {
        family: sorted(known, key=natural, reverse=True)[: request.newest]
        for family, known in versions.items()
    }
    recent, skipped = [], []
    for stage in stages:
        if stage.target.version in newest[stage.target.family]:
            recent.append(stage)
            continue
        reason = f"{stage.target.family} has {request.newest} newer versions"
        skipped.append(SkippedCell(target=stage.target.name, capability="", rule=NEWEST, reason=reason))
    return tuple(recent), skipped


def _for_others(stage: TargetStatus) -> str:
    """Return why an image cannot run on the GPUs of a pool, empty if it can."""
    if rocm_of(stage.target.cuda):
        return "the image is for AMD GPUs, and sweeps verify only on NVIDIA GPUs"
    return "" if stage.target.gpu else "the image is only for CPUs"


def _skip(stage: TargetStatus, row: _Row, rule: str, reason: str) -> SkippedCell:
    return SkippedCell(
        target=stage.target.name, capability=str(row[0]), rule=rule, reason=reason, part=row[1]
    )


def _no_gpu(stage: TargetStatus, row: _Row, reason: str = "") -> SkippedCell:
    return _skip(stage, row, NO_MATCH, f"{reason}no GPU of this pool has that capability")


def _weigh(
    stage: TargetStatus,
    row: _Row,
    gpus: Sequence[PoolGpu],
    planned: dict[PlanGpu, PlannedCell],
    allow: frozenset[str],
) -> QueuedCell | SkippedCell:
    if not gpus:
        return _no_gpu(stage, row)
    cells = {
        gpu: planned[PlanGpu(capability=row[0], driver=driver_of(gpu), host=gpu.host, part=row[1])]
        for gpu in gpus
    }
    open_ones = [gpu for gpu in gpus if cells[gpu].state is not CellState.SKIPPED]
    if not open_ones:
        ruling = next(iter(cells.values())).ruling
        return _skip(stage, row, ruling.claim.rule if ruling.claim else "", ruling.reason)
    floor = driver_floor(stage.target.cuda)
    fitting = [gpu for gpu in open_ones if not gpu.cuda or natural(gpu.cuda) >= natural(floor)]
    if not fitting:
        most = max((gpu.cuda for gpu in open_ones), key=natural)
        return _skip(
            stage, row, NO_MATCH, f"the drivers there take CUDA {most} at most, the image needs {floor}"
        )
    proofs = {gpu: find_valid_verdict(stage.verdicts, gpu) for gpu in fitting}
    proven = next(filter(None, proofs.values()), None) if VERIFIED not in allow else None
    unproven = [gpu for gpu in fitting if not (proven and proofs[gpu])]
    if proven and not unproven:
        return _skip(stage, row, VERIFIED, _skip_note(proven))
    if stage.block:
        return _skip(stage, row, BLOCKED, f"{stage.block} ({stage.hint})" if stage.hint else stage.block)
    drivers = sorted({driver_of(gpu) for gpu in unproven} - {""}, key=natural)
    first = drivers[0] if drivers and (proven or len({driver_of(gpu) for gpu in fitting}) > 1) else ""
    older_ones = [gpu for gpu in unproven if driver_of(gpu) == first]
    reason = cells[fitting[0]].ruling.reason
    return QueuedCell(
        stage=stage,
        capability=row[0],
        cuda=_least_cuda(fitting, floor, narrowed=len(fitting) < len(gpus)),
        gpus=len(older_ones if proven else fitting),
        reason=f"{reason}; an older driver than verified {_skip_note(proven)}" if proven else reason,
        part=row[1],
        first=first,
        only=bool(proven and first),
    )


def _weigh_nodes(
    stage: TargetStatus,
    row: _Row,
    inventory: Inventory,
    planned: dict[PlanGpu, PlannedCell],
    request: CellRequest,
) -> QueuedCell | SkippedCell:
    """Return a cell for a job on several machines. Verdicts on a single GPU do not cover it."""
    gpus, count = _by_row(inventory).get(row, []), request.nodes_each
    cell = _weigh(stage, row, gpus, planned, request.allow | {VERIFIED})
    if isinstance(cell, SkippedCell):
        return cell
    machines = sum(any(gpu.row == cell.row for gpu in machine.gpus) for machine in inventory.machines)
    if machines < count:
        return _skip(stage, row, NO_MATCH, f"nodes with such a GPU: {machines}, and --nodes needs {count}")
    verdict = next(
        (
            result.verdict
            for result in stage.verdicts
            if result.standing is VerdictStatus.GOOD
            and result.verdict
            and result.verdict.report.level == NODES
            and result.verdict.report.outcome is Outcome.TOGETHER
            and result.verdict.report.gpus >= count
            and all(_verdict_applies(result.verdict, gpu) for gpu in gpus)
        ),
        None,
    )
    if verdict and VERIFIED not in request.allow:
        return _skip(stage, row, VERIFIED, _skip_note(verdict))
    return replace(cell, first="", only=False)


def _least_cuda(fitting: Sequence[PoolGpu], floor: str, *, narrowed: bool) -> str:
    """Return the CUDA version that the job requires of the driver, to exclude GPUs with too old drivers.

    The result is empty if no ad has a DriverVersion, because a GPU without it matches no such condition.
    """
    cudas = sorted((gpu.cuda for gpu in fitting if gpu.cuda), key=natural)
    return (cudas[0] if narrowed else floor) if cudas else ""


def check_capacity(
    cells: Sequence[QueuedCell], image: PoolImage, inventory: Inventory
) -> tuple[tuple[QueuedCell, ...], tuple[SkippedCell, ...]]:
    """Divide the cells: those that have a machine with enough memory and disk, and the others.

    The size of the image decides. A machine that reports neither value counts as large enough.
    """
    memory = memory_of(image.unpacked)
    disk = disk_of(image.kind, image.size, image.unpacked)
    rows = {
        gpu.row
        for machine in inventory.machines
        if _has(machine, "Memory", memory // MB) and _has(machine, "Disk", disk // KB)
        for gpu in machine.gpus
    }
    reason = f"no machine there has {format_size(memory)} of memory and {format_size(disk)} of disk"
    fitting = tuple(cell for cell in cells if cell.row in rows)
    others = (cell for cell in cells if cell.row not in rows)
    return fitting, tuple(
        _skip(cell.stage, (cell.capability, cell.part), NO_MATCH, reason) for cell in others
    )


def _has(machine: PoolMachine, name: str, amount: int) -> bool:
    """Return whether a machine has enough memory (MB) or disk (KB), in the units of ads."""
    value = machine.attributes.get(name)
    return not isinstance(value, int | float) or value >= amount


def _skip_note(verdict: Verdict) -> str:
    report = verdict.report
    driver = report.hardware.driver if report.hardware else ""
    gpu = report.device.name if report.device else "a GPU"
    return f"on {gpu}, driver {driver}, until {verdict.expires:%Y-%m-%d}"


def find_valid_verdict(judged: Iterable[VerificationResult], gpu: PoolGpu) -> Verdict | None:
    """Return a valid verdict that applies to `gpu`: to its capability and its driver.

    If the pool reports only the CUDA version of a driver, that is compared. If it reports neither, any
    verdict applies.
    """
    return next(
        (row.verdict for row in judged if row.proves and row.verdict and _verdict_applies(row.verdict, gpu)),
        None,
    )


def _verdict_applies(verdict: Verdict, gpu: PoolGpu) -> bool:
    report = verdict.report
    if report.device is None or report.hardware is None:
        return False
    if report.device.row != gpu.row:
        return False
    if gpu.driver:
        try:
            return not older(gpu.driver, report.hardware.driver)
        except ValueError:
            return False
    return not (gpu.cuda and report.cuda) or natural(gpu.cuda) >= natural(report.cuda)


def driver_of(gpu: PoolGpu) -> str:
    """Return the driver that the pool reports, or else the branch of the first driver for its CUDA version.

    `DriverVersion` in a GPU's ad is the newest CUDA version that its driver supports. Each CUDA version came
    with one branch of the driver (NVIDIA, CUDA Toolkit release notes, table of drivers). Empty if neither is
    known.
    """
    if gpu.driver or not gpu.cuda:
        return gpu.driver
    return native_driver(gpu.cuda).partition(".")[0]


def check_allowed(rules: Sequence[str]) -> frozenset[str]:
    """Return the rules to ignore, of plans and of sweeps. Raises UsageError for an unknown rule."""
    ignorable_rules = (NEWEST, VERIFIED, QUEUED, UNCOLLECTED, CLAIMED, BAD_MACHINE, BUDGET)
    if NO_GPU in rules:
        raise UsageError(
            "rule-not-allowed",
            "--ignore-rule no-gpu: an image for CPUs has no GPU test to run",
            hint="remove --ignore-rule no-gpu",
        )
    if NO_MATCH in rules:
        raise UsageError(
            "rule-not-allowed",
            "--ignore-rule no-match: no GPU in this pool can run such a job",
            hint="remove --ignore-rule no-match",
        )
    for rule, hint in ((MIG, "use --mig"), (AVOIDED, "use --machine, or change the setting sweep-machines")):
        if rule in rules:
            raise UsageError(
                "rule-has-option",
                f"--ignore-rule {rule} is not supported: {rule} has its own option",
                hint=hint,
            )
    return check_rules([rule for rule in rules if rule not in ignorable_rules]) | (
        frozenset(rules) & frozenset(ignorable_rules)
    )


# --- One framework, version, CUDA and capability in place of targets: its target. Pure


SHORT_NAMES = {"pt": "pytorch", "tf": "tensorflow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkTuple:
    """A framework, its version, CUDA and compute capability, with the names of CHTC's
    gpu-compatibility-testing.
    """

    framework: str
    version: str
    cuda: str
    capability: Capability


def parse_tuple(framework: str, version: str, cuda: str, capability: str) -> FrameworkTuple:
    """Parse the values `pytorch`, `2.3`, `12.1` and `8.0`. Raises UsageError that names the option."""
    for option, word, example in (("--version", version, "2.3"), ("--cuda", cuda, "12.1, or 12")):
        if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6}){0,3}", word, re.ASCII):
            raise UsageError(
                "option-invalid", f"{option}: '{word[:40]}' is not a version", hint=f"write {example}"
            )
    try:
        device = parse_capability(capability)
    except ValueError as error:
        raise UsageError(
            "option-invalid", f"--capability: {error}", hint="write, for example, --capability 8.0"
        ) from error
    name = framework.lower()
    return FrameworkTuple(
        framework=SHORT_NAMES.get(name, name), version=version, cuda=cuda, capability=device
    )


def choose_tuple(targets: Sequence[Target], request: FrameworkTuple) -> Target:
    """Return the target of a tuple.

    Raises NothingSelectedError if there is none, UsageError if there are several.
    """
    known = {target.family for target in targets} | {target.framework for target in targets}
    if request.framework not in known:
        suggestion = nearest(request.framework, known)
        raise NothingSelectedError(
            "target-unknown",
            f"no recipe has the framework '{request.framework[:40]}'",
            hint=f"did you mean '{suggestion}'?" if suggestion else f"frameworks: {', '.join(sorted(known))}",
        )
    distribution = families().get(request.framework, request.framework)
    ranks = [target for target in targets if target.family == request.framework] or [
        target for target in targets if request.framework in (target.framework, distribution)
    ]
    fitting = [
        target
        for target in ranks
        if _is_of(target.version, request.version) and _is_of(request.cuda, target.cuda)
    ]
    shortest = min((len(target.name) for target in fitting), default=0)
    # Targets other than the default have a suffix.
    plain = [target for target in fitting if len(target.name) == shortest]
    if not plain:
        offered = ", ".join(f"{target.version} cu{target.cuda}" for target in ranks)
        raise NothingSelectedError(
            "target-unknown",
            f"no recipe has {request.framework} {request.version} with CUDA {request.cuda}",
            hint=f"versions: {offered}",
        )
    if len(plain) > 1:
        raise UsageError(
            "target-ambiguous",
            f"{request.framework} {request.version} with CUDA {request.cuda} matches {len(plain)} targets",
            hint=f"pass one of them: {', '.join(target.name for target in plain)}",
        )
    return plain[0]


def _is_of(version: str, prefix: str) -> bool:
    """Return whether a version starts with the components of `prefix`: 2.3.1 with 2.3, and 12.1 with 12."""
    return version == prefix or version.startswith(f"{prefix}.")
