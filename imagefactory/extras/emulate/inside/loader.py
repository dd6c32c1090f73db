"""Measure how long the program waits in `next()` of a DataLoader, and how long workers take for a batch.

The loader is that of torch, with its processes and files. A worker computes only on the host, so it sees no
device.

Emulation takes extra time, in which real workers would not have run. So `Pipeline` (pure) computes when each
batch would have arrived, and the wait follows from that. A worker loads one batch after the other, starts
none before it is requested, and the workers share the cores.
"""

from __future__ import annotations

import importlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .machine import Machine, core_wait_seconds


class Pipeline:
    """One pass over a loader.

    `ahead` batches are requested at the start, and another one after each batch.
    """

    def __init__(self, workers: int, ahead: int, cores: int, began: float) -> None:
        self._ahead, self._cores = ahead, cores
        self._free = [began] * workers
        self._cores_free = began
        self._request_times = [began] * ahead
        self._position = 0

    @property
    def worker(self) -> int:
        """Return the index of the worker that loads the next batch."""
        return self._position % len(self._free)

    def arrival(self, seconds: float, processor: float) -> float:
        """Return when the next batch arrives, given its seconds and its processor seconds."""
        request_time = self._request_times[self._position % self._ahead]
        arrival_time = max(self._free[self.worker], request_time) + seconds
        self._cores_free = max(self._cores_free, request_time) + processor / self._cores
        self._free[self.worker] = arrival_time = max(arrival_time, self._cores_free)
        return arrival_time

    def take(self, time: float) -> None:
        """Record that the program received the batch at this time."""
        self._request_times[self._position % self._ahead] = time
        self._position += 1


ENTRIES = 4096
"""The number of batches stored for one worker, more than a loader requests at once."""
_ENTRY = struct.Struct("dd")  # seconds, seconds of a processor


class FetchTimes:
    """The seconds of each batch of each worker, in memory shared between the processes."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._shared = mmap.mmap(-1, workers * ENTRIES * _ENTRY.size)
        self._written = [0] * workers
        self._read = [0] * workers

    def add(self, worker: int, seconds: float, processor: float) -> None:
        """Add the times of a batch. The worker process calls this."""
        _ENTRY.pack_into(self._shared, self._place(worker, self._written[worker]), seconds, processor)
        self._written[worker] += 1

    def following(self, worker: int) -> tuple[float, float]:
        """Return the seconds and processor seconds of a worker's next batch, in arrival order."""
        entry = _ENTRY.unpack_from(self._shared, self._place(worker, self._read[worker]))
        self._read[worker] += 1
        return float(entry[0]), float(entry[1])

    def _place(self, worker: int, number: int) -> int:
        return (worker * ENTRIES + number % ENTRIES) * _ENTRY.size


@dataclass
class Loader:
    """One DataLoader of the program. Times are in seconds of the program; `intervals` are between batches.

    `fetch_seconds` and `processor` are the total times for loading all batches.
    """

    batches: int | None
    batch_size: int | None
    workers: int
    pinned: bool
    epochs: int = 0
    seen: int = 0
    steps: int = 0
    fetch_seconds: float = 0.0
    processor: float = 0.0
    first_wait: float = 0.0
    intervals: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    last: float | None = None


@dataclass
class Seen:
    """The observations of the program's loop. `fetches` belong to the loader whose workers start now."""

    loaders: dict[int, Loader] = field(default_factory=dict)
    steps: int = 0
    step_times: list[float] = field(default_factory=list)
    running: Loader | None = None
    fetches: FetchTimes = field(default_factory=lambda: FetchTimes(1))


MOST = 100_000
"""The limit of intervals stored for one loader."""


def install(machine: Machine) -> Seen:
    """Observe torch's loaders and optimizers."""
    seen = Seen()
    data = importlib.import_module("torch.utils.data.dataloader")
    _watch_starts(machine, data, seen)
    _watch_batches(machine, data, seen)
    fetch = importlib.import_module("torch.utils.data._utils.fetch")
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        kind.fetch = _timed(kind.fetch, seen, importlib.import_module("torch.utils.data").get_worker_info)
    _workers_alone(machine, data._utils.worker)

    def stepped(*_: Any) -> None:
        seen.steps += 1
        if seen.running is not None:
            seen.running.steps += 1
        machine.clock.settle()
        if len(seen.step_times) < MOST:
            seen.step_times.append(machine.clock.host())

    importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook(stepped)
    return seen


def _watch_starts(machine: Machine, data: Any, seen: Seen) -> None:
    """Observe the start of passes over a loader, with new workers or those of the previous pass."""
    kind, worker_iterator = data._BaseDataLoaderIter, data._MultiProcessingDataLoaderIter
    initialize, reset = kind.__init__, worker_iterator._reset

    def start(self: Any, loader: Any) -> None:
        seen.fetches = self._emulated_fetches = FetchTimes(max(1, loader.num_workers))
        initialize(self, loader)
        record = seen.loaders.get(id(loader))
        if record is None:
            record = seen.loaders[id(loader)] = Loader(
                batches=_length(loader),
                batch_size=loader.batch_size,
                workers=loader.num_workers,
                pinned=bool(self._pin_memory),
            )
        record.last, record.epochs = None, record.epochs + 1
        self._emulated_loader = record

    def again(self: Any, loader: Any, first_iter: bool = False) -> None:
        reset(self, loader, first_iter)
        ahead = self._prefetch_factor * self._num_workers
        cores = len(os.sched_getaffinity(0))
        self._emulated_pipeline = Pipeline(self._num_workers, ahead, cores, machine.clock.host())
        if not first_iter:
            self._emulated_loader.last = None
            self._emulated_loader.epochs += 1

    kind.__init__, worker_iterator._reset = start, again


def _watch_batches(machine: Machine, data: Any, seen: Seen) -> None:
    kind = data._BaseDataLoaderIter
    following = kind.__next__

    def follow(self: Any) -> Any:
        record: Loader = self._emulated_loader
        clock = machine.clock
        clock.settle()
        began = clock.host()
        with clock.loading():
            batch = following(self)
            clock.settle()
            _arrive(self, machine, record, began)
        now = clock.host()
        record.seen += 1
        if record.last is None:
            record.first_wait += max(0.0, now - began)
        elif len(record.intervals) < MOST:
            record.intervals.append(max(0.0, now - record.last))
            record.waits.append(max(0.0, now - began))
        record.last, seen.running = now, record
        return batch

    kind.__next__ = follow


def _arrive(iterator: Any, machine: Machine, loader: Loader, request_time: float) -> None:
    """Set the program's time to when the batch would have arrived without emulation.

    `request_time` is when the program requested the batch. Workers without shared memory report no times.
    """
    fetches: FetchTimes = iterator._emulated_fetches
    pipeline: Pipeline | None = getattr(iterator, "_emulated_pipeline", None)
    seconds, processor = fetches.following(pipeline.worker if pipeline else 0)
    loader.fetch_seconds, loader.processor = loader.fetch_seconds + seconds, loader.processor + processor
    if pipeline is None:
        return
    if seconds:
        machine.hide(machine.clock.host() - max(request_time, pipeline.arrival(seconds, processor)))
    pipeline.take(machine.clock.host())


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _timed(fetch: Any, seen: Seen, worker_info: Callable[[], Any]) -> Any:
    def timed(self: Any, indices: Any) -> Any:
        began, processor, delayed = time.perf_counter(), time.process_time(), core_wait_seconds()
        batch = fetch(self, indices)
        spent = time.perf_counter() - began - (core_wait_seconds() - delayed)
        info = worker_info()
        seen.fetches.add(info.id if info else 0, max(spent, 0.0), time.process_time() - processor)
        return batch

    return timed


def _workers_alone(machine: Machine, worker: Any) -> None:
    loop = worker._worker_loop

    def alone(*args: Any) -> None:
        machine.leave()
        loop(*args)

    # A process without shared memory finds the function by its name.
    alone.__module__, alone.__qualname__, alone.__name__ = worker.__name__, "_worker_loop", "_worker_loop"
    worker._worker_loop = alone
