"""How long the program waits in `next()` of a DataLoader, and how long its workers need for a batch.

The loader is torch's own, with its processes and files. A worker computes only on the host, so it sees no
device.

Emulating takes time that workers of a loader would not have had. So the wait is not what passed here but when
each batch would have come (`Pipeline`, pure). A worker makes one batch after the other, starts none before it
is requested, and the workers share the cores.
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

from .machine import Machine, kept_waiting


class Pipeline:
    """One pass over a loader. `ahead` batches are asked for at the start, one more as each is taken."""

    def __init__(self, workers: int, ahead: int, cores: int, began: float) -> None:
        self._ahead, self._cores = ahead, cores
        self._free = [began] * workers
        self._cores_free = began
        self._asked = [began] * ahead
        self._taken = 0

    @property
    def worker(self) -> int:
        """Whose batch comes next."""
        return self._taken % len(self._free)

    def arrival(self, seconds: float, processor: float) -> float:
        """When the next batch is there, that took so many seconds, and so many of a processor's."""
        asked = self._asked[self._taken % self._ahead]
        made = max(self._free[self.worker], asked) + seconds
        self._cores_free = max(self._cores_free, asked) + processor / self._cores
        self._free[self.worker] = made = max(made, self._cores_free)
        return made

    def take(self, time: float) -> None:
        """The program has it, at this time."""
        self._asked[self._taken % self._ahead] = time
        self._taken += 1


ENTRIES = 4096
"""Batches of one worker that are remembered: more than a loader has asked for at once."""
_ENTRY = struct.Struct("dd")  # seconds, seconds of a processor


class FetchTimes:
    """How long each batch of each worker took, in memory that their processes share with this one."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._shared = mmap.mmap(-1, workers * ENTRIES * _ENTRY.size)
        self._written = [0] * workers
        self._read = [0] * workers

    def add(self, worker: int, seconds: float, processor: float) -> None:
        """Called in the worker's process."""
        _ENTRY.pack_into(self._shared, self._place(worker, self._written[worker]), seconds, processor)
        self._written[worker] += 1

    def following(self, worker: int) -> tuple[float, float]:
        """Of a worker's next batch; called where the batches arrive."""
        found = _ENTRY.unpack_from(self._shared, self._place(worker, self._read[worker]))
        self._read[worker] += 1
        return float(found[0]), float(found[1])

    def _place(self, worker: int, number: int) -> int:
        return (worker * ENTRIES + number % ENTRIES) * _ENTRY.size


@dataclass
class Loader:
    """One DataLoader of the program. Times are the program's, in seconds; `intervals` between two batches.

    `made` and `processor` are what the batches took to be made, all together.
    """

    batches: int | None
    batch_size: int | None
    workers: int
    pinned: bool
    epochs: int = 0
    seen: int = 0
    steps: int = 0
    made: float = 0.0
    processor: float = 0.0
    first_wait: float = 0.0
    intervals: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    last: float | None = None


@dataclass
class Seen:
    """All that was seen of the program's loop. `fetches` are of the loader whose workers start now."""

    loaders: dict[int, Loader] = field(default_factory=dict)
    steps: int = 0
    step_times: list[float] = field(default_factory=list)
    running: Loader | None = None
    fetches: FetchTimes = field(default_factory=lambda: FetchTimes(1))


MOST = 100_000
"""Intervals that are kept of one loader."""


def install(machine: Machine) -> Seen:
    """Watches torch's loaders and optimizers."""
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
    """A pass over a loader begins: with its own workers, or with those of the pass before."""
    kind, many = data._BaseDataLoaderIter, data._MultiProcessingDataLoaderIter
    made, reset = kind.__init__, many._reset

    def start(self: Any, loader: Any) -> None:
        seen.fetches = self._emulated_fetches = FetchTimes(max(1, loader.num_workers))
        made(self, loader)
        found = seen.loaders.get(id(loader))
        if found is None:
            found = seen.loaders[id(loader)] = Loader(
                batches=_length(loader),
                batch_size=loader.batch_size,
                workers=loader.num_workers,
                pinned=bool(self._pin_memory),
            )
        found.last, found.epochs = None, found.epochs + 1
        self._emulated_loader = found

    def again(self: Any, loader: Any, first_iter: bool = False) -> None:
        reset(self, loader, first_iter)
        ahead = self._prefetch_factor * self._num_workers
        cores = len(os.sched_getaffinity(0))
        self._emulated_pipeline = Pipeline(self._num_workers, ahead, cores, machine.clock.host())
        if not first_iter:
            self._emulated_loader.last = None
            self._emulated_loader.epochs += 1

    kind.__init__, many._reset = start, again


def _watch_batches(machine: Machine, data: Any, seen: Seen) -> None:
    kind = data._BaseDataLoaderIter
    following = kind.__next__

    def follow(self: Any) -> Any:
        found: Loader = self._emulated_loader
        clock = machine.clock
        clock.settle()
        began = clock.host()
        with clock.loading():
            batch = following(self)
            clock.settle()
            _arrive(self, machine, found, began)
        now = clock.host()
        found.seen += 1
        if found.last is None:
            found.first_wait += max(0.0, now - began)
        elif len(found.intervals) < MOST:
            found.intervals.append(max(0.0, now - found.last))
            found.waits.append(max(0.0, now - began))
        found.last, seen.running = now, found
        return batch

    kind.__next__ = follow


def _arrive(iterator: Any, machine: Machine, loader: Loader, asked: float) -> None:
    """The batch of a worker is there when it would have been, however long it was waited for here.

    `asked` is when it was asked for. Of workers that share no memory nothing is known.
    """
    fetches: FetchTimes = iterator._emulated_fetches
    pipeline: Pipeline | None = getattr(iterator, "_emulated_pipeline", None)
    seconds, processor = fetches.following(pipeline.worker if pipeline else 0)
    loader.made, loader.processor = loader.made + seconds, loader.processor + processor
    if pipeline is None:
        return
    if seconds:
        machine.hide(machine.clock.host() - max(asked, pipeline.arrival(seconds, processor)))
    pipeline.take(machine.clock.host())


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _timed(fetch: Any, seen: Seen, worker_info: Callable[[], Any]) -> Any:
    def timed(self: Any, indices: Any) -> Any:
        began, processor, delayed = time.perf_counter(), time.process_time(), kept_waiting()
        batch = fetch(self, indices)
        spent = time.perf_counter() - began - (kept_waiting() - delayed)
        info = worker_info()
        seen.fetches.add(info.id if info else 0, max(spent, 0.0), time.process_time() - processor)
        return batch

    return timed


def _workers_alone(machine: Machine, worker: Any) -> None:
    loop = worker._worker_loop

    def alone(*args: Any) -> None:
        machine.leave()
        loop(*args)

    # By its name a process that does not share this one's memory finds it.
    alone.__module__, alone.__qualname__, alone.__name__ = worker.__name__, "_worker_loop", "_worker_loop"
    worker._worker_loop = alone
