"""A pool's GPUs as a person reads them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from imagefactory.serialize import fields_of
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.views.text import fold, format_table
from imagefactory.verdicts.statement import is_simulated
from imagefactory.versions import natural

_HEADER = ("CAPABILITY", "GPU", "MEMORY", "DRIVER", "CUDA", "MACHINES", "FREE", "GPUS")
_NUMBERS = ("MEMORY", "MACHINES", "FREE", "GPUS")
"""Columns of numbers, which stand at the right."""
_DROP = ("MACHINES", "CUDA", "MEMORY")
UNTOLD = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """GPUs of one model with one driver: `count` in `machines`, `free` of them without a job."""

    capability: str
    name: str
    memory: int
    driver: str
    cuda: str
    mig: bool
    simulated: bool
    machines: tuple[str, ...]
    free: int
    gpus: int


def kinds_of(inventory: Inventory) -> tuple[Kind, ...]:
    """Every kind of GPU, the newest capability first; a MIG slice is a kind of its own."""
    by_kind: dict[tuple[str, str, int, str, str, bool, bool], list[tuple[PoolMachine, PoolGpu]]] = {}
    for machine in inventory.machines:
        for gpu in machine.gpus:
            simulated = is_simulated(gpu.uuid)
            key = (gpu.capability, gpu.name, gpu.memory, gpu.driver, gpu.cuda, gpu.mig, simulated)
            by_kind.setdefault(key, []).append((machine, gpu))
    kinds = [
        Kind(
            capability=capability,
            name=name,
            memory=memory,
            driver=driver,
            cuda=cuda,
            mig=mig,
            simulated=simulated,
            machines=tuple(dict.fromkeys(machine.name for machine, _ in members)),
            free=sum(gpu.free for _, gpu in members),
            gpus=len(members),
        )
        for (capability, name, memory, driver, cuda, mig, simulated), members in by_kind.items()
    ]
    kinds.sort(key=lambda kind: (kind.mig, kind.name, kind.memory, kind.cuda, kind.driver))
    return tuple(sorted(kinds, key=lambda kind: natural(kind.capability), reverse=True))


def kind_json(kind: Kind) -> dict[str, object]:
    return {**fields_of(kind), "machines": len(kind.machines)}


def format_pool(inventory: Inventory, width: int | None = None) -> str:
    """A row for each kind, how many there are in all, and what was left out."""
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
        for kind in kinds_of(inventory)
    ]
    return "\n".join(
        [_table(_HEADER, rows, width), "", *fold([summary(inventory), *_notes(inventory)], width)]
    )


def format_machines(inventory: Inventory, width: int | None = None) -> str:
    """A row for each machine: how many GPUs of which kinds, and how many of them are free."""
    rows = []
    for machine in inventory.machines:
        alike: dict[str, int] = {}
        for gpu in machine.gpus:
            called = _called(gpu.name, mig=gpu.mig, simulated=is_simulated(gpu.uuid))
            text = f"{called} ({gpu.capability})"
            alike[text] = alike.get(text, 0) + 1
        free = sum(gpu.free for gpu in machine.gpus)
        what = ", ".join(f"{number} x {text}" for text, number in sorted(alike.items()))
        rows.append((machine.name, str(free), str(len(machine.gpus)), what))
    table = _table(("MACHINE", "FREE", "GPUS", "KINDS"), rows, width)
    return "\n".join([table, "", *fold([summary(inventory), *_notes(inventory)], width)])


def summary(inventory: Inventory) -> str:
    """`2 machines with 3 GPUs, 1 free; of cm.example.org, 2026-11-22 06:00 UTC`."""
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
    """Columns of numbers stand at the right."""
    numbers = [at for at, name in enumerate(header) if name in _NUMBERS]
    wide = {at: max(len(row[at]) for row in (header, *rows)) for at in numbers}
    placed = [
        tuple(cell.rjust(wide[at]) if at in wide else cell for at, cell in enumerate(row))
        for row in (header, *rows)
    ]
    drop = [placed[0][header.index(name)] for name in _DROP if name in header]
    return format_table(placed[0], placed[1:], width, drop)
