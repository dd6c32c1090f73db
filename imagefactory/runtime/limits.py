"""What one run may take of this machine: what was asked for, and what holds by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.model import RunSpec
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
    """Bounds of a run; None for none. Threads count as processes; `files` holds for each process.

    `reserve` are the free bytes of the store's disk below which the run is ended, `reserve_files` its free
    inodes; both are None where `scratch` is. `reserve_files` is None too where a disk has no fixed number.
    """

    processes: int | None = None
    memory: int | None = None
    files: int | None = None
    scratch: int | None = None
    reserve: int | None = None
    reserve_files: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCapacity:
    """What a machine, or the batch job on it, has: bytes of memory, processors, bytes and inodes of the disk.

    `files` is 0 where a disk has no fixed number of inodes.
    """

    memory: int
    processors: int
    disk: int
    free: int
    files: int = 0
    free_files: int = 0


def parse_limits(texts: Iterable[str]) -> dict[str, int | None]:
    """`memory=16G,time=2h` and the like: bytes, seconds or counts by name. Raises UsageError."""
    asked: dict[str, int | None] = {}
    for text in texts:
        for part in text.split(","):
            name, _, amount = part.partition("=")
            if name not in NAMES:
                raise UsageError("option-invalid", f"--limit {part!r} has no known name", hint=EXAMPLE)
            asked[name] = None if amount == "none" else parse_amount(name, amount)
    return asked


def parse_amount(name: str, amount: str) -> int:
    units = TIMES if name == "time" else SIZES if name in ("memory", "scratch") else {"": 1}
    found = re.fullmatch(r"([0-9]{1,15})([A-Za-z]?)", amount)
    if found is None or found[2] not in units or int(found[1]) == 0:
        raise UsageError("option-invalid", f"--limit {name}={amount} is not a valid amount", hint=EXAMPLE)
    return int(found[1]) * units[found[2]]


def read_capacity(folder: Path) -> MachineCapacity:
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    disk = os.statvfs(there)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineCapacity(
        memory=min(whole, memory_limit(*read_own()) or whole),
        processors=len(os.sched_getaffinity(0)),
        disk=disk.f_blocks * disk.f_frsize,
        free=disk.f_bavail * disk.f_frsize,
        files=disk.f_files,
        free_files=disk.f_favail,
    )


def decide_limits(asked: dict[str, int | None], room: MachineCapacity) -> RunLimits:
    """What was asked for, else what leaves the machine usable."""
    reserve = min(RESERVE, room.disk // 20, room.free // 2)
    scratch = asked.get("scratch", room.free - reserve)
    return RunLimits(
        processes=asked.get("processes", max(FEWEST_PROCESSES, PROCESSES_A_PROCESSOR * room.processors)),
        memory=asked.get("memory", room.memory // 10 * 9),
        files=asked.get("files", FILES),
        scratch=scratch,
        reserve=None if scratch is None else reserve,
        reserve_files=None
        if scratch is None or not room.files
        else min(RESERVE_FILES, room.files // 20, room.free_files // 2),
    )


def check_limits_supported(spec: RunSpec, runner: str, unknown: tuple[str, ...]) -> None:
    """Raises UsageError where a limit is asked for that this runner does not hold."""
    for name, amount in spec.limits:
        if name in unknown and amount is not None:
            raise UsageError(
                "option-conflict",
                f"{runner} cannot limit {name}",
                hint="use --runner unshare, or remove the limit",
            )


def format_amount(name: str, amount: int | None) -> str:
    """As it is written behind `--limit`, in the largest unit below it."""
    if amount is None:
        return f"{name}=none"
    if name not in ("memory", "scratch"):
        return f"{name}={amount}"
    unit = max((unit for unit in SIZES if SIZES[unit] <= amount), key=SIZES.__getitem__, default="")
    return f"{name}={amount // SIZES[unit]}{unit}"


def limit_message(name: str, limits: RunLimits) -> tuple[str, str]:
    """(what happened, what to do) for a run that the watch ended."""
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
    met = format_amount(name, getattr(limits, name))
    return (
        f"the run was stopped: it reached the limit {met}",
        f"set a larger --limit {name}=..., or {name}=none",
    )
