"""Sweeps and the GPUs of a pool, as text and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal, TypedDict

from imagefactory.progress import format_seconds
from imagefactory.schedulers.cells import QueuedCell, SweepPlan
from imagefactory.schedulers.faults import MachineFaults
from imagefactory.schedulers.inventory import InventoryContent, inventory_json
from imagefactory.schedulers.pool import (
    Inventory,
    JobEnding,
    JobLimits,
    NodeResult,
    PoolGpu,
    SkippedCell,
    SweepSpec,
)
from imagefactory.schedulers.sweep_file import CollectedNode
from imagefactory.trust.verdict import is_simulated
from imagefactory.versions import natural
from imagefactory.views.text import fold, format_table

FEW = 3
"""The number of targets in the line of a sweep."""
_UNDERWAY = (JobEnding.WAITING, JobEnding.RUNNING, JobEnding.DISCONNECTED, JobEnding.HELD)


def format_sweep_plan(plan: SweepPlan, limits: JobLimits, width: int | None = None) -> str:
    """Return the jobs to queue, the skipped cells by rule, and the unknown facts about other sweeps."""
    blocks = []
    if plan.cells:
        header = ("TARGET", "CAPABILITY", "GPUS", "DRIVER", "WHY")
        blocks.append(format_table(header, [_cell(cell) for cell in plan.cells], width, ("DRIVER",)))
    if plan.skipped:
        blocks.append(format_skipped(plan.skipped, width))
    blocks += ["\n".join(plan.notes)] if plan.notes else []
    blocks.append(summary(plan, limits))
    return "\n\n".join(blocks)


def _cell(cell: QueuedCell) -> tuple[str, ...]:
    driver = f"CUDA {cell.cuda} or newer" if cell.cuda else "any"
    driver += f", {'only' if cell.only else 'first'} {cell.first}" if cell.first else ""
    doing = "to build or push; " if cell.stage.missing else ""
    return cell.stage.target.name, cell.row, str(cell.gpus), driver, f"{doing}{cell.reason}"


def format_skipped(skipped: Iterable[SkippedCell], width: int | None = None) -> str:
    """Return a row for each target and rule, with all its capabilities."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for cell in skipped:
        rows.setdefault((cell.target, cell.rule, cell.reason), []).append(cell.row)
    header = ("SKIPPED", "CAPABILITY", "RULE", "WHY")
    table = [(target, ", ".join(there), rule, reason) for (target, rule, reason), there in rows.items()]
    return format_table(header, table, width)


def summary(plan: SweepPlan, limits: JobLimits) -> str:
    """Return one line: the number of jobs, and of cells skipped by each rule."""
    rules = Counter(cell.rule for cell in plan.skipped)
    by_rule = ", ".join(f"{count} {rule}" for rule, count in sorted(rules.items()))
    jobs = len(plan.cells)
    idle = format_seconds(limits.idle.total_seconds())
    run = format_seconds(limits.run.total_seconds())
    images = len({cell.stage.target.name for cell in plan.cells})
    queued = f"{jobs} job{'' if jobs == 1 else 's'} of {images} image{'' if images == 1 else 's'}"
    return f"{queued}, each idle for {idle} and running for {run} at most; skipped: {by_rule or 'none'}"


def format_status(
    sweep: SweepSpec,
    results: Sequence[NodeResult],
    driven: bool | None,
    now: datetime,
    width: int | None = None,
) -> str:
    """Return a line for the sweep, then a row for each node, unfinished ones first."""
    nodes = {node.name: node for node in sweep.nodes}
    rows = [
        (
            nodes[result.node].target,
            nodes[result.node].row,
            result.outcome.value if result.outcome else _state(result),
            _attempts(result),
            result.attempts[-1].machine if result.attempts else "",
            "" if result.outcome else _since(result, now),
        )
        for result in sorted(results, key=lambda result: result.outcome is not None)
        if result.node in nodes
    ]
    header = ("TARGET", "CAPABILITY", "STATUS", "ATTEMPT", "MACHINE", "STARTED")
    head = "\n".join(fold([headline(sweep, results, driven)], width))
    return "\n\n".join([head, format_table(header, rows, width, ("MACHINE",))])


def format_failed_machines(machines: Sequence[MachineFaults], width: int | None = None) -> str:
    """Return a row for each machine that failed jobs, with the last reason; empty if there is none."""
    if not machines:
        return ""
    rows = [
        (
            row.machine,
            str(len(row.faults)),
            "excluded" if row.excluded else "used last",
            f"{row.faults[-1].at:%Y-%m-%d %H:%M}, {row.faults[-1].node}: {row.faults[-1].reason}",
        )
        for row in machines
    ]
    return format_table(("MACHINE", "FAULTS", "STATUS", "LAST FAULT"), rows, width)


def headline(sweep: SweepSpec, results: Sequence[NodeResult], driven: bool | None) -> str:
    ended = Counter(result.outcome.value for result in results if result.outcome)
    doing = Counter(_state(result) for result in results if result.outcome is None)
    states = ", ".join(f"{count} {word}" for word, count in (*sorted(ended.items()), *sorted(doing.items())))
    open_nodes = sum(doing.values())
    state = "done" if not open_nodes else "running" if driven else "stopped" if driven is False else "unknown"
    of = _targets(sweep)
    created = f"{sweep.created.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return f"{sweep.id}  {sweep.scheduler}  {state}: {states}  ({of}, made {created})"


def _targets(sweep: SweepSpec) -> str:
    """Return `pytorch-2.3-cu121, jax-0.4-cu121 and 3 more`."""
    names = list(dict.fromkeys(node.target for node in sweep.nodes))
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"{', '.join(names[:FEW])}{more}"


def _state(result: NodeResult) -> str:
    if not result.attempts:
        return "not submitted"
    ending = result.attempts[-1].ending
    return ending.value if ending in _UNDERWAY else "between tries"


def _attempts(result: NodeResult) -> str:
    return str(len(result.attempts)) if result.attempts else ""


def _since(result: NodeResult, now: datetime) -> str:
    if not result.attempts:
        return ""
    last = result.attempts[-1]
    age = format_seconds(max((now - (last.started or last.submitted)).total_seconds(), 0.0))
    return f"{age} ago" if last.started else f"queued {age} ago"


def format_collected(nodes: Sequence[CollectedNode], width: int | None = None) -> str:
    """Return a row for each node: the outcome, the GPU, and why."""
    rows = [
        (
            node.target,
            node.capability,
            node.result.outcome.value if node.result.outcome else "not done",
            ", ".join(part for part in (node.gpu, node.driver) if part),
            f"{node.result.reason}; {node.why}" if node.why else node.result.reason,
        )
        for node in nodes
    ]
    return format_table(("TARGET", "CAPABILITY", "OUTCOME", "GPU", "WHY"), rows, width, ("GPU",))


class QueuedCellRow(TypedDict):
    target: str
    capability: str
    gpus: int
    cuda: str
    """The lowest CUDA version of the machine; empty for any."""
    part: str
    driver: str
    """The driver of the machines that are preferred; empty for none."""
    only: bool
    """Whether other drivers are excluded."""
    build: bool
    """Whether the image must be built or pushed first."""
    reason: str


class SweepPlanDocument(TypedDict):
    """What `sweep start` would queue."""

    format: Literal["imagefactory.sweep-plan/1"]
    image_type: str
    idle_seconds: int
    run_seconds: int
    queued: list[QueuedCellRow]
    skipped: list[SkippedCell]
    notes: list[str]


def plan_json(plan: SweepPlan, limits: JobLimits, image_type: str) -> SweepPlanDocument:
    return SweepPlanDocument(
        format="imagefactory.sweep-plan/1",
        image_type=image_type,
        idle_seconds=round(limits.idle.total_seconds()),
        run_seconds=round(limits.run.total_seconds()),
        queued=[
            QueuedCellRow(
                target=cell.stage.target.name,
                capability=str(cell.capability),
                gpus=cell.gpus,
                cuda=cell.cuda,
                part=cell.part,
                driver=cell.first,
                only=cell.only,
                build=bool(cell.stage.missing),
                reason=cell.reason,
            )
            for cell in plan.cells
        ],
        skipped=list(plan.skipped),
        notes=list(plan.notes),
    )


# --- The GPUs of a pool


_HEADER = ("CAPABILITY", "GPU", "MEMORY", "DRIVER", "CUDA", "MACHINES", "FREE", "TOTAL")
_NUMBERS = ("MEMORY", "MACHINES", "FREE", "TOTAL")
"""Columns of numbers, which are aligned to the right."""
_DROP = ("MACHINES", "CUDA", "MEMORY")
UNTOLD = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGpuGroup:
    """GPUs of one model with one driver in `machines`, `free` of them without a job."""

    capability: str
    name: str
    memory: int
    driver: str
    cuda: str
    mig: bool
    simulated: bool
    machines: tuple[str, ...] = ()
    free: int = 0
    gpus: int = 0


def gpu_groups(inventory: Inventory) -> tuple[PoolGpuGroup, ...]:
    """Return every type of GPU, the newest capability first. A MIG slice is a separate type."""
    members: dict[PoolGpuGroup, list[tuple[str, PoolGpu]]] = {}
    for machine in inventory.machines:
        for gpu in machine.gpus:
            group = PoolGpuGroup(
                capability=gpu.capability,
                name=gpu.name,
                memory=gpu.memory,
                driver=gpu.driver,
                cuda=gpu.cuda,
                mig=gpu.mig,
                simulated=is_simulated(gpu.uuid),
            )
            members.setdefault(group, []).append((machine.name, gpu))
    groups = [
        replace(
            group,
            machines=tuple(dict.fromkeys(name for name, _ in rows)),
            free=sum(gpu.free for _, gpu in rows),
            gpus=len(rows),
        )
        for group, rows in members.items()
    ]
    groups.sort(key=lambda row: (row.mig, row.name, row.memory, row.cuda, row.driver))
    return tuple(sorted(groups, key=lambda row: natural(row.capability), reverse=True))


class GpuTypeRow(TypedDict):
    """GPUs of one model with one driver."""

    capability: str
    name: str
    memory: int
    """In bytes."""
    driver: str
    cuda: str
    """The newest CUDA version that the driver supports."""
    mig: bool
    simulated: bool
    machines: int
    total: int
    free: int


class GpusDocument(InventoryContent):
    """The GPUs of a pool, by machine and by type."""

    format: Literal["imagefactory.gpus/1"]
    scheduler: str | None
    """Null for an inventory from a file."""
    types: list[GpuTypeRow]


def gpus_json(inventory: Inventory, scheduler: str | None) -> GpusDocument:
    return GpusDocument(
        format="imagefactory.gpus/1",
        scheduler=scheduler,
        **inventory_json(inventory),
        types=[
            GpuTypeRow(
                capability=group.capability,
                name=group.name,
                memory=group.memory,
                driver=group.driver,
                cuda=group.cuda,
                mig=group.mig,
                simulated=group.simulated,
                machines=len(group.machines),
                total=group.gpus,
                free=group.free,
            )
            for group in gpu_groups(inventory)
        ],
    )


def format_pool(inventory: Inventory, width: int | None = None) -> str:
    """Return a row for each type of GPU, the total, and the skipped machines."""
    rows = [
        (
            kind.capability,
            _called(kind.name, mig=kind.mig, simulated=kind.simulated),
            _memory(kind.memory),
            kind.driver or UNTOLD,
            kind.cuda or UNTOLD,
            str(len(kind.machines)),
            str(kind.free),
            str(kind.gpus),
        )
        for kind in gpu_groups(inventory)
    ]
    return "\n".join(
        [_table(_HEADER, rows, width), "", *fold([pool_summary(inventory), *_notes(inventory)], width)]
    )


def format_machines(inventory: Inventory, width: int | None = None) -> str:
    """Return a row for each machine: its GPUs by type, and how many are free."""
    rows = []
    for machine in inventory.machines:
        alike: dict[str, int] = {}
        for gpu in machine.gpus:
            called = _called(gpu.name, mig=gpu.mig, simulated=is_simulated(gpu.uuid))
            text = f"{called} ({gpu.capability})"
            alike[text] = alike.get(text, 0) + 1
        free = sum(gpu.free for gpu in machine.gpus)
        machine_text = ", ".join(f"{number} x {text}" for text, number in sorted(alike.items()))
        rows.append((machine.name, str(free), str(len(machine.gpus)), machine_text))
    table = _table(("MACHINE", "FREE", "TOTAL", "GPUS"), rows, width)
    return "\n".join([table, "", *fold([pool_summary(inventory), *_notes(inventory)], width)])


def pool_summary(inventory: Inventory) -> str:
    """Return `2 machines with 3 GPUs, 1 free; of cm.example.org, 2026-11-22 06:00 UTC`."""
    gpus, machines = inventory.gpus, len(inventory.machines)
    slices = sum(gpu.mig for gpu in gpus)
    text = f"{machines} machine{'s' * (machines != 1)} with {len(gpus)} GPU{'s' * (len(gpus) != 1)}"
    text += f" ({slices} of them MIG slices)" if slices else ""
    of = f"of {inventory.pool}, " if inventory.pool else ""
    return f"{text}, {sum(gpu.free for gpu in gpus)} free; {of}{inventory.taken:%Y-%m-%d %H:%M} UTC"


def _notes(inventory: Inventory) -> list[str]:
    return ["", *inventory.notes] if inventory.notes else []


def _called(name: str, *, mig: bool, simulated: bool) -> str:
    slices = " (MIG slice)" if mig and "MIG" not in name else ""
    return f"{name or UNTOLD}{slices}{' (simulated)' if simulated else ''}"


def _memory(memory: int) -> str:
    return f"{memory / 2**30:.0f} GiB" if memory else UNTOLD


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Return a table with columns of numbers aligned to the right."""
    numbers = [column for column, name in enumerate(header) if name in _NUMBERS]
    wide = {column: max(len(row[column]) for row in (header, *rows)) for column in numbers}
    placed = [
        tuple(cell.rjust(wide[column]) if column in wide else cell for column, cell in enumerate(row))
        for row in (header, *rows)
    ]
    drop = [placed[0][header.index(name)] for name in _DROP if name in header]
    return format_table(placed[0], placed[1:], width, drop)
