"""Two times side by side: the program's and the device's. Pure but for `sleep`.

The program's time is the machine's without what emulating cost: a program would not have spent that. The
device's runs ahead of it, as kernels are queued; who asks for a result waits until the device is there. So
the real loader and the emulated device overlap as they would."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUEUE = 1024
"""Kernels that may be queued on a device before the program waits (CUDA's launch queue)."""


class Clock:
    """Seconds since the start. One device; each of its streams is through with its work at its own time."""

    def __init__(
        self, now: Callable[[], float], sleep: Callable[[float], None], kept: Callable[[], float]
    ) -> None:
        self._now, self._sleep, self._kept = now, sleep, kept
        self._settled = kept()
        self._began = now()
        self._hidden = 0.0
        self._queue: deque[float] = deque()
        self._waits: list[tuple[float, float]] = []
        self._loading: float | None = None
        self.slept = 0.0
        self.streams: dict[int, float] = {}
        self.through = 0.0
        self.busy = 0.0
        self.idle = 0.0
        self.stalled = 0.0

    def host(self) -> float:
        """The program's time."""
        return self._now() - self._began - self._hidden

    def wall(self) -> float:
        """The machine's time."""
        return self._now() - self._began

    def hide(self, seconds: float) -> None:
        """Takes what emulating cost out of the program's time; a negative amount puts some in."""
        self._hidden += seconds

    def settle(self) -> None:
        """Takes out of the program's time in which it had no core: on a machine of its own it would have one.

        Before the program waits for something, since what it waits for goes on meanwhile.
        """
        kept = self._kept()
        self._hidden += kept - self._settled
        self._settled = kept

    def charge(self, stream: int, seconds: float) -> None:
        """A kernel of so many seconds is queued on a stream. Waits where the queue is full."""
        self._queue.append(self.through)
        if len(self._queue) > QUEUE:
            self.wait_until(self._queue.popleft())
        begins = max(self.host(), self.streams.get(stream, 0.0))
        if begins > self.through:
            self.idle += begins - self.through
            self.stalled += self._loaded(self.through, begins)
        ends = begins + seconds
        self.busy += max(0.0, ends - max(begins, self.through))
        self.streams[stream] = ends
        self.through = max(self.through, ends)

    def hold(self, stream: int, until: float) -> None:
        """What comes next on a stream begins no earlier."""
        self.streams[stream] = max(self.streams.get(stream, 0.0), until)

    def wait_until(self, time: float) -> None:
        """The program waits for the device."""
        self.settle()
        left = time - self.host()
        if left > 0:
            before = self._now()
            self._sleep(left)
            self.slept += self._now() - before

    def synchronize(self) -> None:
        self.wait_until(self.through)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The program waits for its loader meanwhile."""
        if self._loading is not None:  # a loader within a loader
            yield
            return
        self._loading = self.host()
        try:
            yield
        finally:
            self._waits.append((self._loading, self.host()))
            self._loading = None

    def _loaded(self, since: float, until: float) -> float:
        """How long of an idle time of the device the program waited for its loader."""
        found = sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in self._waits)
        self._waits.clear()
        return found


def kept_waiting() -> float:
    """Seconds that the process's first thread was ready to run and had no core; 0 where nobody counts them.

    What else runs on this machine is no part of how long a batch takes: how many cores there are is
    reckoned with where batches meet.
    """
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
