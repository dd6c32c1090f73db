"""What an emulated run told, and what to ask of a pool after it. Pure.

Every number of it is *emulated*. Its times are by what was *recorded* on such a GPU, or *estimated*: a step
takes at least that long then, since no kernel is faster than a data sheet; so the loader has at least that
much time for a batch. It never becomes a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from imagefactory.extras.emulate.inside.summary import FORMAT
from imagefactory.schedulers.sizes import GB, format_size
from imagefactory.serialize import (
    LARGEST_NUMBER,
    Choices,
    Count,
    NumberRange,
    PairsAsObject,
    invalid_value_error,
    parse_document,
    parse_json,
)
from imagefactory.views.text import fold, format_fields

LONGEST = 1 << 20
"""Bytes of what a process writes of its run."""
ESTIMATED, RECORDED = "estimated", "recorded"
MARGIN = 1.1
"""How much more memory is asked for than was seen: torch's allocator leaves gaps, and libraries take work
space.
"""
MOST_WORKERS = 64
SLOWER = {ESTIMATED: 2.5, RECORDED: 1.25}
"""How many times longer a kernel may take than is told: of data sheets see docs/emulate.md."""
STARTING = 300.0
"""Seconds until an image has come to a machine and started."""

Seconds = Annotated[float, NumberRange(0, LARGEST_NUMBER)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedLoader:
    """The DataLoader of the training loop. `batches` are those of an epoch, None where it does not know.

    Means over its batches, in seconds: `interval` from one to the next, `wait` for the next, `made` and
    `processor` what its worker took, of a clock and of a core; `first_wait` for the first of an epoch.
    """

    batches: Count | None
    batch_size: Count | None
    workers: Count
    pinned: bool
    epochs: Count
    seen: Count
    steps: Count
    interval: Seconds | None
    wait: Seconds | None
    made: Seconds | None
    processor: Seconds | None
    first_wait: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedMemory:
    """Bytes of a GPU: the most that tensors took, what CUDA takes itself, all of it; was that too little?"""

    peak: Count
    context: Count
    total: Count
    exceeded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """One process of an emulated run, as `emulate/summary.py` writes it.

    `ended` says that the program came to its end, with no error. `ranks` are the processes that trained
    together. `seconds` is the run's length as emulated and `wall` as it was here, `busy` the devices' time,
    `step` the median from one step of the optimizer to the next. `asked` are values that nobody computed, by
    who asked for them."""

    profile: str
    device: str
    basis: Annotated[str, Choices((ESTIMATED, RECORDED))]
    gpus: Count
    ranks: Count
    rank: Count
    program: str
    ended: bool
    torch: str
    seconds: Seconds
    wall: Seconds
    busy: Seconds
    stalled: Seconds
    operations: Count
    copied: Count
    steps: Count
    step: Seconds | None
    loader: EmulatedLoader | None
    memory: EmulatedMemory
    pinned: Count
    unlocked: str
    asked: Annotated[tuple[tuple[str, int], ...], PairsAsObject()]


def parse_emulated(text: bytes | str, where: str) -> EmulatedRun:
    """Raises StatementError for what is none; `where` is what messages begin with."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise invalid_value_error(where, f"it is not JSON: {error}") from error
    run = parse_document(value, EmulatedRun, FORMAT, where)
    assert isinstance(run, EmulatedRun)
    return run


def main_run(runs: Sequence[EmulatedRun]) -> EmulatedRun | None:
    """Of the processes of a run the one that did most on a device."""
    return max(runs, key=lambda run: run.operations, default=None)


def stall_share(loader: EmulatedLoader) -> float | None:
    """The part of a batch's time that the program waited for it."""
    if not loader.interval or loader.wait is None:
        return None
    return min(1.0, loader.wait / loader.interval)


def computing(loader: EmulatedLoader) -> float | None:
    """Seconds of a batch without waiting for the next."""
    if loader.interval is None or loader.wait is None:
        return None
    return max(0.0, loader.interval - loader.wait)


def epoch_seconds(loader: EmulatedLoader) -> float | None:
    """An epoch at the pace that was seen, its first batch included."""
    if loader.interval is None or not loader.batches:
        return None
    return loader.first_wait + loader.interval * (loader.batches - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAdvice:
    """What to ask for: `gpu_memory` in bytes, None where the run needed more than the GPU has. `workers` of
    the loader that none is waited for, None without a loader, and the `cpus` that they and the program keep
    busy. `time` is None where the program was ended before it was through.
    """

    time: timedelta | None
    gpus: int
    gpu_memory: int | None
    workers: int | None
    cpus: int


def advise(run: EmulatedRun) -> ResourceAdvice:
    """See Advice."""
    memory = run.memory
    wanted = math.ceil((memory.peak * MARGIN + memory.context) / GB) * GB
    workers = None if run.loader is None else enough_workers(run.loader)
    cpus = 1
    if workers and run.loader is not None and run.loader.made and run.loader.processor is not None:
        cpus += math.ceil(workers * min(1.0, run.loader.processor / run.loader.made))
    gpus = max(1, run.ranks)
    return ResourceAdvice(
        time=enough_time(run),
        gpus=gpus,
        gpu_memory=None if memory.exceeded else wanted,
        workers=workers,
        cpus=cpus * gpus,
    )


def enough_time(run: EmulatedRun) -> timedelta | None:
    """So long takes a job of the whole program, in minutes: where its kernels take as long as SLOWER lets one
    expect, with a tenth more, and time for its image to start.
    """
    if not run.ended:
        return None
    seconds = run.seconds + (SLOWER[run.basis] - 1) * run.busy
    return timedelta(minutes=math.ceil((seconds * MARGIN + STARTING) / 60))


def enough_workers(loader: EmulatedLoader) -> int | None:
    """So many make a batch in the time in which the program computes one. None where nothing was measured."""
    own = computing(loader)
    if not loader.made or not own:
        return None
    return min(MOST_WORKERS, max(1, math.ceil(loader.made / own)))


# --- What an emulated run told, as a person reads it. Pure


NONE = (
    "emulated: no program of this run used a GPU through torch, so there is nothing to tell",
    "what starts python with -I or -E, or is no Python, sees no emulated GPU",
)
BASES = {ESTIMATED: "estimated from its data sheet", RECORDED: "by times recorded on one"}
SLOWER_NOTE = (
    "Kernels are slower than a data sheet: steps take this long at least, stalls are this share at most."
)
UNTOLD = "not measured: fewer than two batches were seen"


def format_emulated(run: EmulatedRun, processes: int, width: int | None) -> str:
    """The numbers of the process that did most, and what to write."""
    memory, loader, advice = run.memory, run.loader, advise(run)
    head = f"emulated: {run.device}, {BASES[run.basis]}; no GPU was used, this is no verdict"
    fields = []
    if loader is not None:
        share, own, epoch = stall_share(loader), computing(loader), epoch_seconds(loader)
        if share is None or own is None or loader.interval is None:
            fields.append(("data stalls", UNTOLD))
        else:
            waited = f"{_time(loader.wait or 0)} of {_time(loader.interval)} a batch"
            fields.append(("data stalls", f"{share:.0%} of the time: {waited}"))
            fields.append(("step", f"{_time(own)} without waiting for data"))
        if epoch is not None and loader.batches:
            size = f" of {loader.batch_size}" if loader.batch_size else ""
            fields.append(("epoch", f"{_time(epoch)} for {loader.batches} batches{size}"))
    elif run.step is not None:
        fields.append(("step", f"{_time(run.step)} from one of the optimizer to the next"))
    most = (
        f"{_gigabytes(memory.peak + memory.context)} at most, {_gigabytes(memory.context)} of it CUDA's own"
    )
    fields.append(("GPU memory", f"{most}, of {_gigabytes(memory.total)}"))
    fields.append(("write", _write(run, advice)))
    notes = ["Nothing is computed on such a GPU: a loss or an accuracy that the program told means nothing."]
    if run.basis == ESTIMATED:
        notes.append(SLOWER_NOTE)
    if advice.time is None:
        notes.append("It did not come to its end, so how long a job takes follows from its epochs alone.")
    if processes > 1:
        notes.append(f"{processes} processes used a GPU each; this is the one that did most.")
    if run.unlocked:
        notes.append(
            f"Pinned memory could not be locked here ({run.unlocked}): a loader may be faster for it."
        )
    return "\n".join([*fold([head], width), format_fields(fields, width=width), *fold(notes, width)])


def _write(run: EmulatedRun, advice: ResourceAdvice) -> str:
    if advice.gpu_memory is None:
        return "it ran out of memory: take a GPU that has more, or a smaller batch"
    several = f"--gpus {advice.gpus} " if advice.gpus > 1 else ""
    words = f"{several}--gpu-memory {format_size(advice.gpu_memory)} --cpus {advice.cpus}"
    if advice.time:
        words += f" --time {math.ceil(advice.time.total_seconds() / 60)}m"
    if advice.workers is None or run.loader is None:
        return words
    return f"{words}, and num_workers={advice.workers} in the DataLoader ({run.loader.workers} now)"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _gigabytes(size: int) -> str:
    return f"{size / GB:.1f} GB"
