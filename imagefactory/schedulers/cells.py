"""Which images are to be verified on which capabilities of a pool: stages + inventory -> cells. Pure.

A cell is one image on one capability, and one job. A verdict holds for newer drivers, so the job is for the
machines with the oldest driver first, and then speaks for all GPUs of that capability. Each profile of slices
(MIG) is a row of its own, as is the whole GPU: neither speaks for the other.

What matrix/plan.py prunes is left out under its rule, then what no GPU there can match and what a good
verdict has proven already. A cell comes back by `allow` of its rule, but for `no-gpu`, `no-match`, `avoided`
and `mig`: such a job would wait in vain, or has an option of its own.

    no-gpu     the image is for CPUs alone, or for AMD's GPUs, of which no pool says which processor they are
    newest     an older version than the newest ones that were asked for
    blocked    there is no lock to build from
    no-match   no GPU of the pool has that capability and a driver for the image
    avoided    `sweep-machines` chooses none of the machines that have that capability
    mig        a slice of a GPU, and slices were not asked for
    verified   verdicts that hold say so for all GPUs of that capability in this pool
    budget     it would take more GPU hours than the sweep has: one of the next sweeps takes it

underway.py then leaves out what another sweep has in hand:

    queued       a sweep that is still driven has a job for that very image there
    uncollected  such a job has ended, and `sweep collect` can make a verdict of it

and claims.py what other stores have:

    claimed      another store has queued that very image there, as it says in the registry

Of machines first (schedulers/faults.py), and then of cells that only these could run:

    bad-machine  a machine that failed jobs of the last days, while another one answered them
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.cells import answer_cell
from imagefactory.gpu.drivers import driver_floor, older
from imagefactory.gpu.knowledge import families
from imagefactory.gpu.knowledge.toolkits import native_driver
from imagefactory.gpu.values import row_of
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
from imagefactory.model import Target
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolImage, PoolMachine, SkippedCell
from imagefactory.schedulers.sizes import KB, MB, disk_of, format_size, memory_of
from imagefactory.settings.own_commands import is_machine_selected
from imagefactory.trust.claims import last_verdicts
from imagefactory.trust.verdict import Verdict, VerificationResult
from imagefactory.versions import natural, nearest

NO_GPU, NEWEST, BLOCKED, NO_MATCH, VERIFIED = "no-gpu", "newest", "blocked", "no-match", "verified"
QUEUED, UNCOLLECTED, CLAIMED = "queued", "uncollected", "claimed"
MIG, BUDGET, BAD_MACHINE = "mig", "budget", "bad-machine"
CAPACITY_HINT = (
    "imagefactory gpus shows the machines; jobs ask for memory and disk by the size of their image"
)
"""What the tuples of CHTC's gpu-compatibility-testing call frameworks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRequest:
    """What a person wants verified. `capabilities` are those of the pool where none is named.

    `newest` keeps that many versions of each family, 0 all. `mig`: slices of GPUs too. `allow` are rules
    that leave nothing out. `machines` are patterns of those that may be used, `gpu_hours` the budget; 0 for
    none.
    """

    capabilities: tuple[Capability, ...] = ()
    newest: int = 0
    mig: bool = False
    allow: frozenset[str] = frozenset()
    answer: Answerer = answer_cell
    machines: tuple[str, ...] = ()
    gpu_hours: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedCell:
    """An image to verify on a capability, where `pool` GPUs fit.

    `cuda` is the CUDA that the GPU's driver must take at least, empty where no GPU there tells what it takes.
    `part` is the slice (MIG) that these are, empty for whole GPUs. `first` is the oldest driver, empty where
    all have the same; with `only` no other will do, since a verdict holds for the newer ones.
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
        return row_of(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What is queued, by target and capability, and what is left out and why.

    `notes` say what could not be known of other sweeps, a line each.
    """

    cells: tuple[QueuedCell, ...]
    left_out: tuple[SkippedCell, ...]
    notes: tuple[str, ...] = ()


def choose_machines(inventory: Inventory, patterns: Sequence[str]) -> Inventory:
    """The inventory with those machines alone that the patterns choose."""
    chosen = tuple(machine for machine in inventory.machines if is_machine_selected(machine.name, patterns))
    return replace(inventory, machines=chosen)


_Row = tuple[Capability, str]
"""A capability, and the profile of a slice; empty for whole GPUs."""


def plan_sweep(stages: Sequence[TargetStatus], inventory: Inventory, asked: CellRequest) -> SweepPlan:
    """Every stage on every capability that is asked for: queued, or left out under a rule.

    `inventory` has all machines, also those that `asked` does not choose.
    """
    everywhere = _by_row(inventory)
    there = _by_row(choose_machines(inventory, asked.machines))
    rows = _rows(everywhere, asked.capabilities)
    others = {stage.target.name: why for stage in stages if (why := _for_others(stage))}
    kept, left_out = _newest([stage for stage in stages if stage.target.name not in others], asked)
    left_out += [
        SkippedCell(target=name, capability="", rule=NO_GPU, reason=why) for name, why in others.items()
    ]
    cells: list[QueuedCell] = []
    devices = {(row[0], driver_of(gpu), gpu.host, gpu.part) for row in rows for gpu in there.get(row, ())}
    listed = tuple(
        PlanGpu(capability=capability, driver=driver, host=host, part=part)
        for capability, driver, host, part in sorted(devices)
    )
    plan = make_plan(PlanInput(stages=kept, devices=listed, allow=asked.allow, answer=asked.answer))
    for stage, planned in zip(kept, plan.targets, strict=True):
        found = {cell.device: cell for cell in planned.cells} if listed else {}
        for row in rows:
            cell: QueuedCell | SkippedCell
            if row[1] and not asked.mig:
                cell = _remaining(stage, row, MIG, "slices of GPUs are verified on request: --mig")
            elif row in everywhere and row not in there:
                cell = _remaining(stage, row, AVOIDED, avoided_reason(inventory, row_of(*row)))
            else:
                cell = _weigh(stage, row, there.get(row, ()), found, asked.allow)
            if isinstance(cell, SkippedCell):
                left_out.append(cell)
            else:
                cells.append(cell)
        if not asked.capabilities:
            left_out += _required_elsewhere(stage, everywhere)
    notes = (*_unknown_gpu_note(inventory), *_unused(inventory, asked.machines))
    return SweepPlan(cells=tuple(cells), left_out=tuple(left_out), notes=notes)


def _rows(everywhere: Iterable[_Row], capabilities: Sequence[Capability]) -> tuple[_Row, ...]:
    """The rows that are asked for; of a capability that is named the whole GPU, be there none."""
    if not capabilities:
        return tuple(sorted(everywhere))
    parts = {row for row in everywhere if row[0] in capabilities}
    return tuple(sorted(parts | {(capability, "") for capability in capabilities}))


def avoided_reason(inventory: Inventory, row: str) -> str:
    """Why no machine of a row is left."""
    return avoided_machines(
        [one.name for one in inventory.machines if any(gpu.row == row for gpu in one.gpus)]
    )


def _unused(inventory: Inventory, patterns: Sequence[str]) -> tuple[str, ...]:
    """A note on patterns that match no machine."""
    words = ((word, word.removeprefix("!")) for word in patterns)
    return tuple(
        f"no machine with a GPU is called {word}"
        for word, name in words
        if not any(is_machine_selected(machine.name, (name,)) for machine in inventory.machines)
    )


def within_budget(plan: SweepPlan, asked: CellRequest, seconds: float, day: date) -> SweepPlan:
    """A plan with as many cells as its GPU hours allow, at least one; others wait for a later sweep. Pure.

    A cell takes as long as the last run of its image there, or anywhere, did; else `seconds`. A verdict that
    has lapsed or is about to comes first, the oldest before all; last is what a newer driver has one for.
    """
    if not asked.gpu_hours or BUDGET in asked.allow:
        return plan

    def turn(cell: QueuedCell) -> tuple[object, ...]:
        proofs = last_verdicts(cell.stage.verdicts, cell.part)
        proven = proofs[cell.capability][0] if cell.capability in proofs else None
        return cell.only, *turn_of(proven, f"{day} {cell.stage.target.name} {cell.row}")

    kept: set[int] = set()
    left, closed = asked.gpu_hours * 3600.0, False
    for cell in sorted(plan.cells, key=turn):
        cost = last_seconds(cell) or seconds
        closed = closed or (bool(kept) and cost > left)
        if not closed:
            kept.add(id(cell))
            left -= cost
    over = [cell for cell in plan.cells if id(cell) not in kept]
    reason = f"the sweep has {asked.gpu_hours} GPU hours: a later sweep takes it"
    left_out = [_remaining(cell.stage, (cell.capability, cell.part), BUDGET, reason) for cell in over]
    cells = tuple(cell for cell in plan.cells if id(cell) in kept)
    return replace(plan, cells=cells, left_out=(*plan.left_out, *left_out))


def leave_out_bad(plan: SweepPlan, inventory: Inventory, bad: Mapping[str, Collection[str]]) -> SweepPlan:
    """A plan of which no cell is for bad machines first, by the names of these for each row. Pure.

    Its cells are for the next driver then; what needs an older driver than was verified waits.
    """
    cells, left_out = [], list(plan.left_out)
    for cell in plan.cells:
        machines = [one for one in inventory.machines if any(gpu.row == cell.row for gpu in one.gpus)]
        names = bad.get(cell.row, ())
        good = [
            gpu
            for machine in machines
            for gpu in machine.gpus
            if gpu.row == cell.row and machine.name.rpartition("@")[2] not in names
        ]
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
        there = [one.name for one in machines if any(driver_of(gpu) == cell.first for gpu in one.gpus)]
        reason = f"only machines that failed jobs have an older driver than verified: {few(there)}"
        left_out.append(_remaining(cell.stage, (cell.capability, cell.part), BAD_MACHINE, reason))
    return replace(plan, cells=tuple(cells), left_out=tuple(left_out))


def last_seconds(cell: QueuedCell) -> float:
    """How long the last run of a cell's image took, there if it ever ran there; 0 where it ran nowhere."""
    reports = [one.verdict.report for one in cell.stage.verdicts if one.verdict]
    here = [one for one in reports if one.device and one.device.row == cell.row]
    last = max(here or reports, key=lambda report: report.ended, default=None)
    return max(1.0, (last.ended - last.started).total_seconds()) if last else 0.0


def _unknown_gpu_note(inventory: Inventory) -> tuple[str, ...]:
    """A note on GPUs of which the pool tells no capability: nothing is asked of them."""
    kinds = sorted({gpu.name or "no type" for gpu in inventory.gpus if not gpu.capability})
    count = len(inventory.gpus) - len(inventory.known)
    return (f"GPUs that tell no capability take no job: {count} of {', '.join(kinds)}",) if kinds else ()


def _by_row(inventory: Inventory) -> dict[_Row, list[PoolGpu]]:
    found: dict[_Row, list[PoolGpu]] = {}
    for gpu in inventory.known:
        found.setdefault((parse_capability(gpu.capability), gpu.part), []).append(gpu)
    return found


def _newest(
    stages: Sequence[TargetStatus], asked: CellRequest
) -> tuple[tuple[TargetStatus, ...], list[SkippedCell]]:
    if not asked.newest or NEWEST in asked.allow:
        return tuple(stages), []
    versions: dict[str, set[str]] = {}
    for stage in stages:
        versions.setdefault(stage.target.family, set()).add(stage.target.version)
    kept = {
        (family, version)
        for family, known in versions.items()
        for version in sorted(known, key=natural, reverse=True)[: asked.newest]
    }
    left = [
        SkippedCell(
            target=stage.target.name,
            capability="",
            rule=NEWEST,
            reason=f"{stage.target.family} has {asked.newest} newer versions",
        )
        for stage in stages
        if (stage.target.family, stage.target.version) not in kept
    ]
    return tuple(stage for stage in stages if (stage.target.family, stage.target.version) in kept), left


def _required_elsewhere(stage: TargetStatus, there: Iterable[_Row]) -> list[SkippedCell]:
    """What the recipe requires and this pool has no GPU for: nobody should take it for tested."""
    required = ((parse_capability(text), "") for text in stage.target.capabilities)
    known = set(there)
    return [_no_gpu(stage, row, "its recipe requires it, and ") for row in required if row not in known]


def _for_others(stage: TargetStatus) -> str:
    """Why no GPU of a pool is asked about it, empty where they are."""
    if rocm_of(stage.target.cuda):
        return "the image is for AMD's GPUs, and no pool says which processor they are"
    return "" if stage.target.gpu else "the image is for CPUs alone"


def _remaining(stage: TargetStatus, row: _Row, rule: str, reason: str) -> SkippedCell:
    return SkippedCell(
        target=stage.target.name, capability=str(row[0]), rule=rule, reason=reason, part=row[1]
    )


def _no_gpu(stage: TargetStatus, row: _Row, why: str = "") -> SkippedCell:
    return _remaining(stage, row, NO_MATCH, f"{why}no GPU of this pool has that capability")


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
    open_ones = [gpu for gpu in gpus if cells[gpu].state is not CellState.PRUNED]
    if not open_ones:
        ruling = next(iter(cells.values())).ruling
        return _remaining(stage, row, ruling.claim.rule if ruling.claim else "", ruling.reason)
    floor = driver_floor(stage.target.cuda)
    fitting = [gpu for gpu in open_ones if not gpu.cuda or natural(gpu.cuda) >= natural(floor)]
    if not fitting:
        most = max((gpu.cuda for gpu in open_ones), key=natural)
        return _remaining(
            stage, row, NO_MATCH, f"the drivers there take CUDA {most} at most, the image needs {floor}"
        )
    proofs = {gpu: find_valid_verdict(stage.verdicts, gpu) for gpu in fitting}
    proven = next(filter(None, proofs.values()), None) if VERIFIED not in allow else None
    unproven = [gpu for gpu in fitting if not (proven and proofs[gpu])]
    if proven and not unproven:
        return _remaining(stage, row, VERIFIED, _skip_note(proven))
    if stage.block:
        return _remaining(stage, row, BLOCKED, f"{stage.block} ({stage.hint})" if stage.hint else stage.block)
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


def _least_cuda(fitting: Sequence[PoolGpu], floor: str, *, narrowed: bool) -> str:
    """What the job asks of the driver: enough to keep it off GPUs that were found too old for the image.

    A GPU whose ad tells no DriverVersion matches no such condition, so none is written where all are silent.
    """
    told = sorted((gpu.cuda for gpu in fitting if gpu.cuda), key=natural)
    return (told[0] if narrowed else floor) if told else ""


def check_capacity(
    cells: Sequence[QueuedCell], image: PoolImage, inventory: Inventory
) -> tuple[tuple[QueuedCell, ...], tuple[SkippedCell, ...]]:
    """The cells whose job finds a machine of its capability with memory and disk enough, and the others.

    It is asked when the image is there, since its size decides. A machine that tells neither has enough.
    """
    memory = memory_of(image.unpacked)
    disk = disk_of(image.kind, image.size, image.unpacked)
    fitting, none = [], []
    for cell in cells:
        there = [
            machine for machine in inventory.machines if any(gpu.row == cell.row for gpu in machine.gpus)
        ]
        if any(
            _has(machine, "Memory", memory // MB) and _has(machine, "Disk", disk // KB) for machine in there
        ):
            fitting.append(cell)
        else:
            reason = f"no machine there has {format_size(memory)} of memory and {format_size(disk)} of disk"
            none.append(_remaining(cell.stage, (cell.capability, cell.part), NO_MATCH, reason))
    return tuple(fitting), tuple(none)


def _has(machine: PoolMachine, name: str, wanted: int) -> bool:
    """Of memory in MB and disk in KB, as ads tell them."""
    told = machine.attributes.get(name)
    return not isinstance(told, int | float) or told >= wanted


def _skip_note(verdict: Verdict) -> str:
    report = verdict.report
    driver = report.hardware.driver if report.hardware else ""
    gpu = report.device.name if report.device else "a GPU"
    return f"on {gpu}, driver {driver}, until {verdict.expires:%Y-%m-%d}"


def find_valid_verdict(judged: Iterable[VerificationResult], gpu: PoolGpu) -> Verdict | None:
    """A verdict that can be relied on and says that the image runs on `gpu`: its capability and its driver.

    A pool that tells no driver but what CUDA it takes is compared by that; one that tells neither holds no
    verdict against its age.
    """
    return next(
        (one.verdict for one in judged if one.proves and one.verdict and _verdict_applies(one.verdict, gpu)),
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
    """The driver that a plan goes by: the pool's word, else the branch of the first that takes its CUDA.

    `DriverVersion` in a GPU's ad is the newest CUDA that its driver takes; each such version came with one
    branch of the driver (NVIDIA, CUDA Toolkit release notes, table of drivers). Empty where neither is told.
    """
    if gpu.driver or not gpu.cuda:
        return gpu.driver
    return native_driver(gpu.cuda).partition(".")[0]


def check_allowed(rules: Sequence[str]) -> frozenset[str]:
    """The rules to allow: those of plans, and the ones of sweeps. Raises UsageError for another word."""
    own = (NEWEST, VERIFIED, QUEUED, UNCOLLECTED, CLAIMED, BAD_MACHINE, BUDGET)
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
    return check_rules([rule for rule in rules if rule not in own]) | (frozenset(rules) & frozenset(own))


# --- one tuple -----------------------------------------------------------------------------------


# --- One framework, version, CUDA and capability in place of targets: its target. Pure


SHORT_NAMES = {"pt": "pytorch", "tf": "tensorflow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkTuple:
    """Framework, its version, CUDA and compute capability: what CHTC's old tool tested, one at a time."""

    framework: str
    version: str
    cuda: str
    capability: Capability


def parse_tuple(framework: str, version: str, cuda: str, capability: str) -> FrameworkTuple:
    """Parse `pytorch`, `2.3`, `12.1` and `8.0`. Raises UsageError naming the option."""
    for option, word, example in (("--version", version, "2.3"), ("--cuda", cuda, "12.1, or 12")):
        if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6}){0,3}", word, re.ASCII):
            raise UsageError(
                "option-invalid", f"{option}: '{word[:40]}' is not a version", hint=f"write {example}"
            )
    try:
        wanted = parse_capability(capability)
    except ValueError as error:
        raise UsageError(
            "option-invalid", f"--capability: {error}", hint="write, for example, --capability 8.0"
        ) from error
    name = framework.lower()
    return FrameworkTuple(
        framework=SHORT_NAMES.get(name, name), version=version, cuda=cuda, capability=wanted
    )


def choose_tuple(targets: Sequence[Target], asked: FrameworkTuple) -> Target:
    """The target of a tuple. Raises NothingSelectedError where no recipe has it, UsageError for several."""
    known = {target.family for target in targets} | {target.framework for target in targets}
    if asked.framework not in known:
        near = nearest(asked.framework, known)
        raise NothingSelectedError(
            "target-unknown",
            f"no recipe has the framework '{asked.framework[:40]}'",
            hint=f"did you mean '{near}'?" if near else f"frameworks: {', '.join(sorted(known))}",
        )
    distribution = families().get(asked.framework, asked.framework)
    ranks = [target for target in targets if target.family == asked.framework] or [
        target for target in targets if asked.framework in (target.framework, distribution)
    ]
    fitting = [
        target
        for target in ranks
        if _is_of(target.version, asked.version) and _is_of(asked.cuda, target.cuda)
    ]
    shortest = min((len(target.name) for target in fitting), default=0)
    # A suffix names what is not the default.
    plain = [target for target in fitting if len(target.name) == shortest]
    if not plain:
        offered = ", ".join(f"{target.version} cu{target.cuda}" for target in ranks)
        raise NothingSelectedError(
            "target-unknown",
            f"no recipe has {asked.framework} {asked.version} with CUDA {asked.cuda}",
            hint=f"versions: {offered}",
        )
    if len(plain) > 1:
        raise UsageError(
            "target-ambiguous",
            f"{asked.framework} {asked.version} with CUDA {asked.cuda} matches {len(plain)} targets",
            hint=f"pass one of them: {', '.join(target.name for target in plain)}",
        )
    return plain[0]


def _is_of(version: str, prefix: str) -> bool:
    """By whole parts: 2.3.1 is of 2.3, and 12.1 of 12."""
    return version == prefix or version.startswith(f"{prefix}.")
