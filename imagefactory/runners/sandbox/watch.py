"""What a run takes of the machine, looked at again and again where no limit of the kernel's own counts it."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

INTERVAL = 100  # milliseconds between two looks
SLICE = 0.02  # seconds of each look that go into counting files: the keeper has terminals to serve too
DEPTH_LIMIT = 200  # folders: each is held open on the way. What lies deeper is left to the disk's reserve
PAGE = resource.getpagesize()


class Watch:
    """`proc` is the sandbox's own /proc, whose folders are its processes; `folders` are where it writes, the
    first of them on the store's disk."""

    def __init__(self, limits: dict[str, Any], proc: int, folders: Sequence[str]) -> None:
        self.limits, self.folders = limits, folders
        self.proc = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        os.close(proc)
        self.walk = sizes(*folders)

    def over(self) -> str | None:
        """The limit that is reached now."""
        processes, memory = self.limits["processes"], self.limits["memory"]
        if processes is not None or memory is not None:
            pids = [name for name in os.listdir(self.proc) if name.isdigit() and name != "1"]
            if processes is not None and len(pids) >= processes:
                return "processes"
            counted = [found for pid in pids if (found := self.count(pid))]
            if processes is not None and sum(threads for threads, _ in counted) >= processes:
                return "processes"
            # Pages that processes share are in the size of each: what looks too much is counted exactly.
            looks_over = memory is not None and sum(size for _, size in counted) > memory
            if looks_over and sum(map(self.proportional, pids)) > memory:
                return "memory"
        return self.over_scratch()

    def count(self, pid: str) -> tuple[int, int] | None:
        """Threads, and bytes in memory; None for a process that is gone."""
        with contextlib.suppress(OSError):
            fields = self.read(f"{pid}/stat").rpartition(b") ")[2].split()
            return int(fields[17]), int(fields[21]) * PAGE  # num_threads and rss of proc(5)
        return None

    def proportional(self, pid: str) -> int:
        """Bytes in memory, shared pages divided by those who share them."""
        with contextlib.suppress(OSError):
            for line in self.read(f"{pid}/smaps_rollup").splitlines():
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
        return 0

    def read(self, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc)
        try:
            return os.read(fd, 4096)
        finally:
            os.close(fd)

    def over_scratch(self) -> str | None:
        limit, reserve = self.limits["scratch"], self.limits["reserve"]
        if limit is None:
            return None
        disk = os.statvfs(self.folders[0])
        if disk.f_bavail * disk.f_frsize < reserve:
            return "reserve"
        until = time.monotonic() + SLICE
        for size in self.walk:
            if size > limit:
                return "scratch"
            if time.monotonic() > until:
                return None
        self.walk = sizes(*self.folders)
        return None


def sizes(*tops: str) -> Iterator[int]:
    """The bytes found so far, after each file below `tops`, a stranger's trees that change meanwhile."""
    total = 0
    opened: list[tuple[int, list[str]]] = []

    def enter(name: str, above: int | None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=above)
        try:
            opened.append((fd, os.listdir(fd)))
        except OSError:
            os.close(fd)
            raise

    try:
        for top in tops:
            with contextlib.suppress(OSError):  # closed by who fills it: the disk's reserve bounds that
                enter(top, None)
        while opened:
            fd, names = opened[-1]
            if not names:
                os.close(fd)
                opened.pop()
                continue
            name = names.pop()
            with contextlib.suppress(OSError):  # gone again
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                # An empty file takes an inode, of which a disk has not more without end.
                total += max(found.st_blocks, 1) * 512 // max(found.st_nlink, 1)
                if found.st_mode & 0o170000 == 0o040000 and len(opened) < DEPTH_LIMIT:
                    enter(name, fd)
            yield total
    finally:
        for fd, _ in opened:
            os.close(fd)


def run_before_others() -> None:
    """Lets this process, and the init that it forks, run whenever they can, where root may.

    Else a command that forks without end, which as root no limit of the kernel's binds, takes all process
    numbers of the machine: a look needs its turn among thousands, and so does the init, with which they end.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def let_children_run_as_others() -> None:
    os.sched_setscheduler(0, os.sched_getscheduler(0) | os.SCHED_RESET_ON_FORK, os.sched_getparam(0))


def run_as_others() -> None:
    """Undoes `run_before_others`. A caller's own policy stays: no user may leave SCHED_IDLE."""
    if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR:
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def set_limits(limits: dict[str, Any]) -> None:
    """Those that the kernel holds for a process and its children, whatever the caller's own are above."""
    if limits["processes"] is not None:
        # By user and user namespace (Linux 5.14), keeper and process 1 too. It binds no root of the host.
        lower(resource.RLIMIT_NPROC, limits["processes"] + 2)
    if limits["files"] is not None:
        lower(resource.RLIMIT_NOFILE, limits["files"])


def lower(kind: int, most: int) -> None:
    def least(value: int) -> int:
        return most if value == resource.RLIM_INFINITY else min(value, most)

    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (least(soft), least(hard)))
