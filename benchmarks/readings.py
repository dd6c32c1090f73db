"""What was measured, by name: seconds, CPU seconds, bytes. Kept in a file, so cases can run one by one."""

from __future__ import annotations

import json
import os
import resource
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path


@dataclass(slots=True)
class Readings:
    """One value a trial under each name."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Seconds as `name`, and as `name cpu` those of the whole machine's CPUs: docker works in daemons.

        What was written before goes to disk before, not during.
        """
        os.sync()
        time.sleep(2)
        cpu, began = _cpu_seconds(), time.monotonic()
        yield
        self.add(name, time.monotonic() - began)
        self.add(f"{name} cpu", _cpu_seconds() - cpu)

    def middle(self, name: str) -> float:
        return statistics.median(self.values[name])


def _cpu_seconds() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    idle = int(fields[4]) + int(fields[5])
    return (sum(map(int, fields[1:9])) - idle) / os.sysconf("SC_CLK_TCK")


def cpu_of_children(but: str) -> float:
    """CPU seconds so far of this process's descendants, ended ones too, without programs named `but`."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = usage.ru_utime + usage.ru_stime
    for pid in _descendants(os.getpid())[1:]:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        if not name.endswith(but[:15]):  # the kernel's limit
            seconds += sum(map(int, rest.split()[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


def keep(file: Path, case: str, readings: Readings) -> None:
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept[case] = {"day": date.today().isoformat(), "values": readings.values}
    file.write_text(json.dumps(kept, indent=1))


def kept_in(file: Path, cases: Sequence[str]) -> tuple[Readings, tuple[str, ...]]:
    """Return the values of those of these cases that are measured, and the days of their measurement."""
    kept = {case: row for case, row in json.loads(file.read_text()).items() if case in cases}
    values = {name: numbers for row in kept.values() for name, numbers in row["values"].items()}
    return Readings(values), tuple(sorted({row["day"] for row in kept.values()}))


class PeakMemory:
    """Samples the proportional set size of a process and all its descendants, 20 times a second.

    Proportional: a page that several share counts once. Looking takes a third of a core: never while timing.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.bytes, self._ended = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.bytes = max(self.bytes, sum(_pss(pid) for pid in _descendants(self.pid)))

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def _descendants(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                todo += map(int, children.read_text().split())
            except OSError:  # it ended meanwhile
                continue
    return found


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
