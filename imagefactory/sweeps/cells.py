"""Which images are to be verified on which capabilities of a pool: stages + inventory -> cells. Pure.

A cell is one image on one capability, and one job: whichever GPU of that capability runs it speaks for all.
What matrix/plan.py prunes is left out under its rule, then what no GPU there can match and what a good
verdict has proven already. A cell comes back by `allow` of its rule, but for `no-gpu` and
`no-match`: such a job would wait in vain.

    no-gpu     the image is for CPUs alone, or for AMD's GPUs, of which no pool says which processor they are
    newest     an older version than the newest ones that were asked for
    blocked    there is no lock to build from
    no-match   no GPU of the pool has that capability and a driver for the image
    verified   a verdict that holds says so for a GPU of that capability in this pool

underway.py then leaves out what another sweep has in hand:

    queued       a sweep that is still driven has a job for that very image there
    uncollected  such a job has ended, and `collect` can make a verdict of it

and claimed.py what other stores have:

    claimed      another store has queued that very image there, as it says in the registry

Of machines, not cells (pools/faults.py):

    bad-machine  a machine that failed jobs of the last days, while another one answered them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from imagefactory.errors import UsageError
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.cells import answer_cell
from imagefactory.gpu.drivers import driver_floor, older
from imagefactory.gpu.knowledge.toolkits import native_driver
from imagefactory.matrix.plan import (
    Answerer,
    CellState,
    PlanGpu,
    PlanInput,
    PlannedCell,
    TargetStatus,
    check_rules,
    make_plan,
)
from imagefactory.pools.model import Inventory, LeftOut, PoolGpu, PoolImage, PoolMachine
from imagefactory.pools.sizes import KB, MB, disk_of, format_size, memory_of
from imagefactory.verdicts.model import Judged, Verdict
from imagefactory.versions import natural

NO_GPU, NEWEST, BLOCKED, NO_MATCH, VERIFIED = "no-gpu", "newest", "blocked", "no-match", "verified"
QUEUED, UNCOLLECTED, CLAIMED = "queued", "uncollected", "claimed"
BAD_MACHINE = "bad-machine"
ROOM = "imagefactory pool shows the machines; jobs ask for memory and disk by the size of their image"
"""What the tuples of CHTC's gpu-compatibility-testing call frameworks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAsk:
    """What a person wants verified. `capabilities` are those of the pool where none is named.

    `newest` keeps that many versions of each family, 0 all. `mig`: slices of GPUs too. `allow` are rules
    that leave nothing out.
    """

    capabilities: tuple[Capability, ...] = ()
    newest: int = 0
    mig: bool = False
    allow: frozenset[str] = frozenset()
    answer: Answerer = answer_cell


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedCell:
    """An image to verify on a capability, where `gpus` GPUs fit.

    `cuda` is the CUDA that the GPU's driver must take at least, empty where no GPU there tells what it takes.
    `mig`: among these are slices.
    """

    stage: TargetStatus
    capability: Capability
    cuda: str
    gpus: int
    reason: str
    mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What is queued, by target and capability, and what is left out and why.

    `notes` say what could not be known of other sweeps, a line each.
    """

    cells: tuple[QueuedCell, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...] = ()


def plan_sweep(stages: Sequence[TargetStatus], inventory: Inventory, asked: SweepAsk) -> SweepPlan:
    """Every stage on every capability that is asked for: queued, or left out under a rule."""
    there = _by_capability(gpu for gpu in inventory.known if asked.mig or not gpu.mig)
    capabilities = asked.capabilities or tuple(sorted(there))
    others = {stage.target.name: why for stage in stages if (why := _for_others(stage))}
    kept, left_out = _newest([stage for stage in stages if stage.target.name not in others], asked)
    left_out += [LeftOut(target=name, capability="", rule=NO_GPU, reason=why) for name, why in others.items()]
    cells: list[QueuedCell] = []
    devices = {
        (capability, driver_of(gpu), gpu.host)
        for capability in capabilities
        for gpu in there.get(capability, ())
    }
    listed = tuple(
        PlanGpu(capability=capability, driver=driver, host=host)
        for capability, driver, host in sorted(devices)
    )
    plan = make_plan(PlanInput(stages=kept, devices=listed, allow=asked.allow, answer=asked.answer))
    for stage, planned in zip(kept, plan.targets, strict=True):
        found = _by_device(planned.cells) if listed else {}
        for capability in capabilities:
            cell = _weigh(stage, capability, there.get(capability, ()), found, asked.allow)
            if isinstance(cell, LeftOut):
                left_out.append(cell)
            else:
                cells.append(cell)
        if not asked.capabilities:
            left_out += _required_elsewhere(stage, there)
    return SweepPlan(cells=tuple(cells), left_out=tuple(left_out), notes=_unknown(inventory))


def _unknown(inventory: Inventory) -> tuple[str, ...]:
    """A note on GPUs of which the pool tells no capability: nothing is asked of them."""
    kinds = sorted({gpu.name or "no type" for gpu in inventory.gpus if not gpu.capability})
    count = len(inventory.gpus) - len(inventory.known)
    return (f"GPUs that tell no capability take no job: {count} of {', '.join(kinds)}",) if kinds else ()


def _by_capability(gpus: Iterable[PoolGpu]) -> dict[Capability, list[PoolGpu]]:
    found: dict[Capability, list[PoolGpu]] = {}
    for gpu in gpus:
        found.setdefault(parse_capability(gpu.capability), []).append(gpu)
    return found


def _by_device(cells: Iterable[PlannedCell]) -> dict[tuple[Capability, str, str], PlannedCell]:
    return {(cell.device.capability, cell.device.driver, cell.device.host): cell for cell in cells}


def _newest(
    stages: Sequence[TargetStatus], asked: SweepAsk
) -> tuple[tuple[TargetStatus, ...], list[LeftOut]]:
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
        LeftOut(
            target=stage.target.name,
            capability="",
            rule=NEWEST,
            reason=f"{stage.target.family} has {asked.newest} newer versions",
        )
        for stage in stages
        if (stage.target.family, stage.target.version) not in kept
    ]
    return tuple(stage for stage in stages if (stage.target.family, stage.target.version) in kept), left


def _required_elsewhere(stage: TargetStatus, there: dict[Capability, list[PoolGpu]]) -> list[LeftOut]:
    """What the recipe requires and this pool has no GPU for: nobody should take it for tested."""
    required = (parse_capability(text) for text in stage.target.capabilities)
    return [_no_gpu(stage, capability, "its recipe requires it, and ") for capability in required
            if capability not in there]  # fmt: skip


def _for_others(stage: TargetStatus) -> str:
    """Why no GPU of a pool is asked about it, empty where they are."""
    if rocm_of(stage.target.cuda):
        return "the image is for AMD's GPUs, and no pool says which processor they are"
    return "" if stage.target.gpu else "the image is for CPUs alone"


def _no_gpu(stage: TargetStatus, capability: Capability, why: str = "") -> LeftOut:
    return LeftOut(
        target=stage.target.name,
        capability=str(capability),
        rule=NO_MATCH,
        reason=f"{why}no GPU of this pool has that capability",
    )


def _weigh(
    stage: TargetStatus,
    capability: Capability,
    gpus: Sequence[PoolGpu],
    planned: dict[tuple[Capability, str, str], PlannedCell],
    allow: frozenset[str],
) -> QueuedCell | LeftOut:
    if not gpus:
        return _no_gpu(stage, capability)

    def left(rule: str, reason: str) -> LeftOut:
        return LeftOut(target=stage.target.name, capability=str(capability), rule=rule, reason=reason)

    cells = {gpu: planned[capability, driver_of(gpu), gpu.host] for gpu in gpus}
    open_ones = [gpu for gpu, cell in cells.items() if cell.state is not CellState.PRUNED]
    if not open_ones:
        ruling = next(iter(cells.values())).ruling
        return left(ruling.claim.rule if ruling.claim else "", ruling.reason)
    floor = driver_floor(stage.target.cuda)
    fitting = [gpu for gpu in open_ones if not gpu.cuda or natural(gpu.cuda) >= natural(floor)]
    if not fitting:
        most = max((gpu.cuda for gpu in open_ones), key=natural)
        return left(NO_MATCH, f"the drivers there take CUDA {most} at most, the image needs {floor}")
    proven = next((one for gpu in fitting if (one := proof(stage.verdicts, gpu))), None)
    if proven and VERIFIED not in allow:
        older_ones = sum(proof(stage.verdicts, gpu) is None for gpu in fitting)
        but = f"; {older_ones} of {len(fitting)} GPUs there have an older driver" if older_ones else ""
        return left(VERIFIED, f"{_told(proven)}{but}")
    if stage.block:
        return left(BLOCKED, f"{stage.block} ({stage.hint})" if stage.hint else stage.block)
    return QueuedCell(
        stage=stage,
        capability=capability,
        cuda=_least_cuda(fitting, floor, narrowed=len(fitting) < len(gpus)),
        gpus=len(fitting),
        reason=cells[fitting[0]].ruling.reason,
        mig=any(gpu.mig for gpu in fitting),
    )


def _least_cuda(fitting: Sequence[PoolGpu], floor: str, *, narrowed: bool) -> str:
    """What the job asks of the driver: enough to keep it off GPUs that were found too old for the image.

    A GPU whose ad tells no DriverVersion matches no such condition, so none is written where all are silent.
    """
    told = sorted((gpu.cuda for gpu in fitting if gpu.cuda), key=natural)
    return (told[0] if narrowed else floor) if told else ""


def check_room(
    cells: Sequence[QueuedCell], image: PoolImage, inventory: Inventory
) -> tuple[tuple[QueuedCell, ...], tuple[LeftOut, ...]]:
    """The cells whose job finds a machine of its capability with memory and disk enough, and the others.

    It is asked when the image is there, since its size decides. A machine that tells neither has enough.
    """
    memory = memory_of(image.unpacked)
    disk = disk_of(image.kind, image.size, image.unpacked)
    fitting, none = [], []
    for cell in cells:
        capability = str(cell.capability)
        there = [
            machine
            for machine in inventory.machines
            if any(gpu.capability == capability for gpu in machine.gpus)
        ]
        if any(
            _has(machine, "Memory", memory // MB) and _has(machine, "Disk", disk // KB) for machine in there
        ):
            fitting.append(cell)
        else:
            reason = f"no machine there has {format_size(memory)} of memory and {format_size(disk)} of disk"
            name = cell.stage.target.name
            none.append(LeftOut(target=name, capability=capability, rule=NO_MATCH, reason=reason))
    return tuple(fitting), tuple(none)


def _has(machine: PoolMachine, name: str, wanted: int) -> bool:
    """Of memory in MB and disk in KB, as ads tell them."""
    told = machine.attributes.get(name)
    return not isinstance(told, int | float) or told >= wanted


def _told(verdict: Verdict) -> str:
    report = verdict.report
    driver = report.hardware.driver if report.hardware else ""
    gpu = report.device.name if report.device else "a GPU"
    return f"on {gpu}, driver {driver}, until {verdict.expires:%Y-%m-%d}"


def proof(judged: Iterable[Judged], gpu: PoolGpu) -> Verdict | None:
    """A verdict that can be relied on and says that the image runs on `gpu`: its capability and its driver.

    A pool that tells no driver but what CUDA it takes is compared by that; one that tells neither holds no
    verdict against its age.
    """
    return next(
        (one.verdict for one in judged if one.proves and one.verdict and _holds(one.verdict, gpu)), None
    )


def _holds(verdict: Verdict, gpu: PoolGpu) -> bool:
    report = verdict.report
    if report.device is None or report.hardware is None or report.device.capability != gpu.capability:
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
    own = (NEWEST, VERIFIED, QUEUED, UNCOLLECTED, CLAIMED, BAD_MACHINE)
    if NO_GPU in rules:
        raise UsageError("--allow no-gpu: an image for CPUs has nothing to verify", hint="leave it out")
    if NO_MATCH in rules:
        raise UsageError(
            "--allow no-match: such a job would wait in vain", hint="leave it out: its GPU is not there"
        )
    return check_rules([rule for rule in rules if rule not in own]) | (frozenset(rules) & frozenset(own))


# --- one tuple -----------------------------------------------------------------------------------
