"""Compute the resources to request for a job from the summary file of an emulated run. Pure functions.

All values are emulated. Times are *recorded* on such a GPU, or *estimated* from its data sheet: a step takes
at least that long, because no kernel is faster than the data sheet. Emulated values never become a verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from imagefactory.schedulers.sizes import GB
from imagefactory.serialize import (
    LARGEST_NUMBER,
    Choices,
    Count,
    NumberRange,
    PairsAsObject,
    invalid_value_error,
    parse_json,
    parse_value,
)

LONGEST = 1 << 20
"""The limit in bytes of the summary of one process."""
ESTIMATED, RECORDED = "estimated", "recorded"
MARGIN = 1.1
"""The factor on measured memory and time.

The allocator of torch leaves gaps, and libraries need workspace.
"""
MOST_WORKERS = 64
SLOWER = {ESTIMATED: 2.5, RECORDED: 1.25}
"""The factor by which a real kernel may be slower. For data sheets, see docs/emulation.md."""
STARTING = 300.0
"""Seconds to transfer and start an image on a machine."""

Seconds = Annotated[float, NumberRange(0, LARGEST_NUMBER)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedLoader:
    """The DataLoader of the training loop. `batches` is the number per epoch, None if unknown.

    Times are means per batch in seconds: `interval` from one batch to the next, `wait` for the next batch,
    `fetch` and `processor` the real time and the core time of a worker, `first_wait` the wait for the first
    batch of an epoch.
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
    fetch: Seconds | None
    processor: Seconds | None
    first_wait: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedMemory:
    """The GPU memory in bytes: the peak of tensors, the memory of CUDA, the total, and whether the run needed
    more.
    """

    peak: Count
    context: Count
    total: Count
    exceeded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """The summary of one process of an emulated run, written by extras/emulate/inside/summary.py.

    `ended` means that the program ended without an error. `ranks` are the processes that trained together.
    `seconds` is the emulated time of the run, `wall` the real time on this machine, `busy` the time of the
    GPUs, `step` the median time between steps of the optimizer. `host_reads` counts the reads of values that
    were not computed, by the function that read them.
    """

    format: Literal["imagefactory.emulate/1"]
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
    host_reads: Annotated[tuple[tuple[str, int], ...], PairsAsObject()]


def parse_emulated(text: bytes | str, location: str) -> EmulatedRun:
    """Parse a summary. Raises StatementError; its messages begin with `location`."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise invalid_value_error(location, f"it is not JSON: {error}") from error
    run = parse_value(value, EmulatedRun, location)
    assert isinstance(run, EmulatedRun)
    return run


def computing(loader: EmulatedLoader) -> float | None:
    """Return the seconds for one batch without the wait for the next one."""
    if loader.interval is None or loader.wait is None:
        return None
    return max(0.0, loader.interval - loader.wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAdvice:
    """The resources to request for a job.

    `gpu_memory` is in bytes, None if the run needed more than the GPU has. `workers` is the number of loader
    workers with which the program never waits, None without a loader. `cpus` are the cores for the program
    and these workers. `time` is None if the program did not end normally. `retry_memory` is the RAM in bytes
    to request in addition, if a job needed more than was requested for its libraries.
    """

    time: timedelta | None
    gpus: int
    gpu_memory: int | None
    workers: int | None
    cpus: int
    retry_memory: int


def advise(run: EmulatedRun) -> ResourceAdvice:
    """Return the resources to request for a job of the same program."""
    memory = run.memory
    gpu_memory = math.ceil((memory.peak * MARGIN + memory.context) / GB) * GB
    workers = None if run.loader is None else recommended_workers(run.loader)
    cpus = 1
    if workers and run.loader is not None and run.loader.fetch and run.loader.processor is not None:
        cpus += math.ceil(workers * min(1.0, run.loader.processor / run.loader.fetch))
    gpus = max(1, run.ranks)
    return ResourceAdvice(
        time=recommended_time(run),
        gpus=gpus,
        gpu_memory=None if memory.exceeded else gpu_memory,
        workers=workers,
        cpus=cpus * gpus,
        # Each process may prepare all tensors of its GPU in RAM, as torch.load does with a checkpoint.
        retry_memory=math.ceil(gpus * memory.peak * MARGIN / GB) * GB,
    )


def recommended_time(run: EmulatedRun) -> timedelta | None:
    """Return the time to request for the whole program in whole minutes, None if it did not end.

    It includes the factors SLOWER and MARGIN, and the start of the image.
    """
    if not run.ended:
        return None
    seconds = run.seconds + (SLOWER[run.basis] - 1) * run.busy
    return timedelta(minutes=math.ceil((seconds * MARGIN + STARTING) / 60))


def recommended_workers(loader: EmulatedLoader) -> int | None:
    """Return the number of workers that load a batch while the program computes one, None if not measured."""
    compute_time = computing(loader)
    if not loader.fetch or not compute_time:
        return None
    return min(MOST_WORKERS, max(1, math.ceil(loader.fetch / compute_time)))
