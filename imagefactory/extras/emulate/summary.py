"""What an emulated run measured, as a person reads it, and what to request for a job. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from imagefactory.jobs.resources import (
    ESTIMATED,
    RECORDED,
    EmulatedLoader,
    EmulatedRun,
    ResourceAdvice,
    advise,
    computing,
)
from imagefactory.schedulers.sizes import GB, format_size
from imagefactory.views.text import fold, format_fields


def main_run(runs: Sequence[EmulatedRun]) -> EmulatedRun | None:
    """Of the processes of a run the one that did most on a device."""
    return max(runs, key=lambda run: run.operations, default=None)


def stall_share(loader: EmulatedLoader) -> float | None:
    """The part of a batch's time that the program waited for it."""
    if not loader.interval or loader.wait is None:
        return None
    return min(1.0, loader.wait / loader.interval)


def epoch_seconds(loader: EmulatedLoader) -> float | None:
    """An epoch at the pace that was seen, its first batch included."""
    if loader.interval is None or not loader.batches:
        return None
    return loader.first_wait + loader.interval * (loader.batches - 1)


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
