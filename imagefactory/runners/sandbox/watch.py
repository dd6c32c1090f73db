"""What a run takes of the machine, looked at again and again where no limit of the kernel's own counts it."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .cgroups import Group
from .streams import read_rest

INTERVAL = 100  # milliseconds between two looks
SLICE = 0.02  # seconds of each look that go into counting files: the keeper has terminals to serve too
DEPTH_LIMIT = 200  # folders: each is held open on the way. What lies deeper is left to the disk's reserve
SHARE = 4  # of what the kernel counts by user, the caller too: a run gets one part of so many


class Watch:
    """`shown` are of the sandbox: its /proc, whose folders are its processes, the list of its System V
    segments, and folders whose files are in memory. `folders` are where it writes, the first of them on the
    store's disk.

    `group` is the run's own, in which the kernel counts memory and mostly processes; None without one.
    """

    def __init__(
        self,
        limits: dict[str, Any],
        shown: Sequence[int],
        *,
        folders: Sequence[str],
        group: Group | None = None,
    ) -> None:
        self.limits, self.folders, self.group = limits, folders, group
        proc, self.segments, *self.in_memory = shown
        self.proc = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        os.close(proc)
        self.walk = sizes(*folders)

    def over(self) -> str | None:
        """The limit that is reached now."""
        processes, memory = self.limits["processes"], self.limits["memory"]
        if self.group:
            if over := self.group.over():
                return over
            processes, memory = (None if self.group.pids else processes), None
        if processes is not None or memory is not None:
            pids = [name for name in os.listdir(self.proc) if name.isdigit() and name != "1"]
            if processes is not None and len(pids) >= processes:
                return "processes"
            counted = [self.count(pid) for pid in pids]
            if processes is not None and sum(threads for threads, _ in counted) >= processes:
                return "processes"
            # Pages that processes share are in the size of each: what looks too much is counted exactly.
            shared = self.shared()
            if memory is not None and shared + sum(size for _, size in counted) > memory:
                sizes_ = [self.proportional(pid) for pid in pids]
                # Which files in memory are mapped, nobody says: at least, they are one or the other.
                mapped = max(shared, sum(size for _, size in sizes_))
                if mapped + sum(own for own, _ in sizes_) > memory:
                    return "memory"
        return self.over_scratch()

    def shared(self) -> int:
        """Bytes of files in memory and of System V's segments, whoever has mapped them."""
        disks = [os.fstatvfs(fd) for fd in self.in_memory]
        os.lseek(self.segments, 0, os.SEEK_SET)
        rows = read_rest(self.segments).splitlines()[1:]
        files = sum((disk.f_blocks - disk.f_bfree) * disk.f_frsize for disk in disks)
        return files + sum(sum(map(int, row.split()[14:16])) for row in rows)

    def count(self, pid: str) -> tuple[int, int]:
        """Threads, and bytes in memory and swap with those of page tables; 0 for a process that is gone."""
        found = self.fields(f"{pid}/status")
        size = sum(found.get(name, 0) for name in (b"VmRSS", b"VmSwap", b"VmPTE"))
        return found.get(b"Threads", 0), size * 1024

    def proportional(self, pid: str) -> tuple[int, int]:
        """The same bytes, shared ones divided by those who share them: its own, and of files in memory.

        What may not be looked into, such as a program that none may read, is counted whole.
        """
        found = self.fields(f"{pid}/smaps_rollup")
        if b"Pss" not in found:
            return self.count(pid)[1], 0
        files, tables = found.get(b"Pss_Shmem", 0), self.fields(f"{pid}/status").get(b"VmPTE", 0)
        return (found[b"Pss"] - files + found.get(b"SwapPss", 0) + tables) * 1024, files * 1024

    def fields(self, name: str) -> dict[bytes, int]:
        """The numbers of a file of `NAME: NUMBER` lines; none of a process that is gone."""
        with contextlib.suppress(OSError):
            lines = [line.split() for line in self.read(name).splitlines()]
            return {
                line[0].rstrip(b":"): int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()
            }
        return {}

    def read(self, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc)
        try:
            return os.read(fd, 1 << 16)
        finally:
            os.close(fd)

    def over_scratch(self) -> str | None:
        limit, reserve = self.limits["scratch"], self.limits["reserve"]
        reserve_files = self.limits["reserve_files"]
        if reserve is not None or reserve_files is not None:
            disk = os.statvfs(self.folders[0])
            if reserve is not None and disk.f_bavail * disk.f_frsize < reserve:
                return "reserve"
            if reserve_files is not None and disk.f_favail < reserve_files:
                return "reserve_files"
        if limit is None:
            return None
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
    for kind in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING):  # counted by user, the caller too
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            lower(kind, hard // SHARE)
    for kind in (resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO):  # whoever is to end the run goes before it
        lower(kind, 0)


def lower(kind: int, most: int) -> None:
    def least(value: int) -> int:
        return most if value == resource.RLIM_INFINITY else min(value, most)

    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (least(soft), least(hard)))
