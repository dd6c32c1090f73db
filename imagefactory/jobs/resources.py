"""The resources to request for a job after an emulated run, by its summary file. Pure.

The values are emulated. Times are *recorded* on such a GPU or *estimated* from its data sheet: a step takes
at least that long, because no kernel is faster than a data sheet. They never become a verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from imagefactory.schedulers.sizes import GB
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

FORMAT = 1
"""The format of a summary, as extras/emulate/inside/summary.py writes it."""
LONGEST = 1 << 20
"""The largest summary of a process, in bytes."""
ESTIMATED, RECORDED = "estimated", "recorded"
MARGIN = 1.1
"""The factor on measured memory and time: torch's allocator leaves gaps, and libraries need workspace."""
MOST_WORKERS = 64
SLOWER = {ESTIMATED: 2.5, RECORDED: 1.25}
"""How many times longer a real kernel may take. For data sheets see docs/emulation.md."""
STARTING = 300.0
"""Seconds for the transfer and start of an image on a machine."""

Seconds = Annotated[float, NumberRange(0, LARGEST_NUMBER)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedLoader:
    """The DataLoader of the training loop. `batches` are those of an epoch, None if unknown.

    Means over its batches, in seconds: `interval` from one to the next, `wait` for the next, `made` and
    `processor` are the real time and the core time of a worker; `first_wait` for the first of an epoch.
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
    """Bytes of a GPU's memory: the peak of tensors, CUDA's own, all of it; did the run need more?"""

    peak: Count
    context: Count
    total: Count
    exceeded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """One process of an emulated run, as the process writes it.

    `ended`: the program ended without an error. `ranks` are the processes that trained together. `seconds` is
    the emulated time of the run, `wall` the real time here, `busy` the time of the devices, `step` the median
    from one step of the optimizer to the next. `asked` are values that nothing computed, by what read them.
    """

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
    """Return the run of a summary. Raises StatementError; messages begin with `where`."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise invalid_value_error(where, f"it is not JSON: {error}") from error
    run = parse_document(value, EmulatedRun, FORMAT, where)
    assert isinstance(run, EmulatedRun)
    return run


def computing(loader: EmulatedLoader) -> float | None:
    """Return the seconds of a batch without the wait for the next one."""
    if loader.interval is None or loader.wait is None:
        return None
    return max(0.0, loader.interval - loader.wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAdvice:
    """The resources to request for a job.

    `gpu_memory` in bytes is None if the run needed more than the GPU has. `workers` is the number for which
    the program never waits, None without a loader. `cpus` are the cores that they and the program use.
    `time` is None if the program did not end by itself.
    """

    time: timedelta | None
    gpus: int
    gpu_memory: int | None
    workers: int | None
    cpus: int


def advise(run: EmulatedRun) -> ResourceAdvice:
    """Return the resources to request for a job of the same program."""
    memory = run.memory
    gpu_memory = math.ceil((memory.peak * MARGIN + memory.context) / GB) * GB
    workers = None if run.loader is None else enough_workers(run.loader)
    cpus = 1
    if workers and run.loader is not None and run.loader.made and run.loader.processor is not None:
        cpus += math.ceil(workers * min(1.0, run.loader.processor / run.loader.made))
    gpus = max(1, run.ranks)
    return ResourceAdvice(
        time=enough_time(run),
        gpus=gpus,
        gpu_memory=None if memory.exceeded else gpu_memory,
        workers=workers,
        cpus=cpus * gpus,
    )


def enough_time(run: EmulatedRun) -> timedelta | None:
    """Return the time to request for the whole program, in whole minutes; None if it did not end.

    It includes slower kernels (SLOWER), MARGIN, and the start of the image.
    """
    if not run.ended:
        return None
    seconds = run.seconds + (SLOWER[run.basis] - 1) * run.busy
    return timedelta(minutes=math.ceil((seconds * MARGIN + STARTING) / 60))


def enough_workers(loader: EmulatedLoader) -> int | None:
    """Return the workers that load a batch while the program computes one. None if nothing was measured."""
    own = computing(loader)
    if not loader.made or not own:
        return None
    return min(MOST_WORKERS, max(1, math.ceil(loader.made / own)))
