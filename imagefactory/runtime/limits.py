"""The limits of a run on this machine: requested ones and defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.runtime.sandbox.cgroups import memory_limit, read_own

NAMES = ("processes", "memory", "files", "scratch", "time")
SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
TIMES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
EXAMPLE = "write processes=4096, memory=16G, files=65536, scratch=50G or time=2h; NAME=none removes a limit"
FEWEST_PROCESSES, PROCESSES_A_PROCESSOR = 4096, 256  # ranks, their threads, and the workers that feed them
FILES = 65536
RESERVE = 5 << 30  # bytes of the store's disk that no run takes, a twentieth of a small one
RESERVE_FILES = 100_000  # inodes of it, in the same way


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of a run, None for no limit. Threads count as processes. `files` applies to each process.

    The run is ended below `reserve` free bytes or `reserve_files` free inodes of the store's disk. Both are
    None if `scratch` is. `reserve_files` is also None on a disk without a fixed number of inodes.
    """

    processes: int | None = None
    memory: int | None = None
    files: int | None = None
    scratch: int | None = None
    reserve: int | None = None
    reserve_files: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCapacity:
    """The resources of a machine, or of a batch job: bytes of memory, processors, bytes and inodes of disk.

    `files` is 0 on a disk without a fixed number of inodes.
    """

    memory: int
    processors: int
    disk: int
    free: int
    files: int = 0
    free_files: int = 0


def parse_limits(texts: Iterable[str]) -> dict[str, int | None]:
    """Return bytes, seconds or counts by name for `memory=16G,time=2h`. Raises UsageError."""
    limits: dict[str, int | None] = {}
    for text in texts:
        for part in text.split(","):
            name, _, amount = part.partition("=")
            if name not in NAMES:
                raise UsageError("option-invalid", f"--limit {part!r} is not a known limit", hint=EXAMPLE)
            limits[name] = None if amount == "none" else parse_amount(name, amount)
    return limits


def parse_amount(name: str, amount: str) -> int:
    units = TIMES if name == "time" else SIZES if name in ("memory", "scratch") else {"": 1}
    match = re.fullmatch(r"([0-9]{1,15})([A-Za-z]?)", amount)
    if match is None or match[2] not in units or int(match[1]) == 0:
        raise UsageError("option-invalid", f"--limit {name}={amount} is not a valid amount", hint=EXAMPLE)
    return int(match[1]) * units[match[2]]


def read_capacity(directory: Path) -> MachineCapacity:
    disk = os.statvfs(next(path for path in (directory, *directory.parents) if path.is_dir()))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineCapacity(
        memory=min(whole, memory_limit(*read_own()) or whole),
        processors=len(os.sched_getaffinity(0)),
        disk=disk.f_blocks * disk.f_frsize,
        free=disk.f_bavail * disk.f_frsize,
        files=disk.f_files,
        free_files=disk.f_favail,
    )


def decide_limits(requested: dict[str, int | None], capacity: MachineCapacity) -> RunLimits:
    """Return the requested limits, and defaults that keep the machine usable."""
    reserve = min(RESERVE, capacity.disk // 20, capacity.free // 2)
    scratch = requested.get("scratch", capacity.free - reserve)
    processes = max(FEWEST_PROCESSES, PROCESSES_A_PROCESSOR * capacity.processors)
    inodes = min(RESERVE_FILES, capacity.files // 20, capacity.free_files // 2)
    return RunLimits(
        processes=requested.get("processes", processes),
        memory=requested.get("memory", capacity.memory // 10 * 9),
        files=requested.get("files", FILES),
        scratch=scratch,
        reserve=None if scratch is None else reserve,
        reserve_files=None if scratch is None or not capacity.files else inodes,
    )


def format_amount(name: str, amount: int | None) -> str:
    """Return the text for `--limit`, in the largest unit that fits."""
    if amount is None:
        return f"{name}=none"
    if name not in ("memory", "scratch"):
        return f"{name}={amount}"
    unit = max((unit for unit in SIZES if SIZES[unit] <= amount), key=SIZES.__getitem__, default="")
    return f"{name}={amount // SIZES[unit]}{unit}"


def limit_message(name: str, limits: RunLimits) -> tuple[str, str]:
    """Return the problem and the fix for a run that reached a limit."""
    if name == "reserve":
        return (
            "the run was stopped: the disk of the store is nearly full "
            f"(less than {format_amount('scratch', limits.reserve).removeprefix('scratch=')} free)",
            "free space there or set another store; with --limit scratch=none a run may fill the disk",
        )
    if name == "reserve_files":
        return (
            "the run was stopped: the disk of the store has few free inodes "
            f"(less than {limits.reserve_files})",
            "delete files there or set another store; with --limit scratch=none a run may fill the disk",
        )
    if name == "machine":
        return (
            "the kernel stopped the run: this machine, or the batch job around it, is out of memory",
            "set a smaller --limit memory=..., or request a job with more",
        )
    return (
        f"the run was stopped: it reached the limit {format_amount(name, getattr(limits, name))}",
        f"set a larger --limit {name}=..., or {name}=none",
    )
