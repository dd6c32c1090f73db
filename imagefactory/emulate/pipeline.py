"""When the batches of a loader arrive, from how long each took to be made. Pure.

Emulating costs time that the workers of a loader would not have had. So what the program waits for is not how
long it waited here, but when each batch would have come: a worker makes one after the other, begins none
before it is asked for, and the workers share the cores that there are."""

from __future__ import annotations


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
