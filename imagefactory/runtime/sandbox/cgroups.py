"""A control group for a run, in which the kernel counts memory and processes, and a watch for the rest.

`find_parent` decides from /proc and the state of directories where a group can be created: below this
process's own group (v1), or next to it (v2, where a group has processes or groups, never both). It moves no
other process, and evades no limit of its own group.

`Watch` measures resources for which the kernel has no limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .streams import forget_stdio, read_file, read_rest, write_file
from .syscalls import close_all_but

PREFIX = "imagefactory-"
WAIT = 5  # seconds at most until the kernel has taken apart the processes of a group that was killed
SLACK = 1 << 20  # bytes: the kernel counts in batches, so a v1 group has reached its limit this near to it
UNLIMITED = 1 << 60  # bytes: v1 says a number just below 2**63 where there is no limit


class CgroupFolder(NamedTuple):
    """Whether this process can create groups in a group, and with which controllers.

    `top` is true for the root of the tree. `limited` is true if limits do not apply to a group next to it.
    """

    writable: bool = False
    controllers: frozenset[str] = frozenset()
    top: bool = False
    limited: bool = False


class CgroupParent(NamedTuple):
    """The parent directories of a run's group: the same for v2; `pids` is empty if v1 has none."""

    version: int
    memory: str
    pids: str


class NoCgroup(NamedTuple):
    """The reason why a run has no group."""

    reason: str


def find_parent(own_group: str, mounts: str, look: Callable[[str], CgroupFolder]) -> CgroupParent | NoCgroup:
    """Return where a run's group can be created, from /proc/self/cgroup and /proc/self/mountinfo."""
    paths = own_groups(own_group, mounts)
    if "memory" in paths:
        memory, pids = paths["memory"], paths.get("pids", "")
        if not look(memory).writable:
            return NoCgroup(f"no permission to create one in {memory}")
        return CgroupParent(1, memory, pids if pids and look(pids).writable else "")
    if "" not in paths:
        return NoCgroup("no cgroup file system is mounted")
    directory, top = paths[""], look(paths[""])
    if not top.top:
        if top.limited:
            return NoCgroup(f"{directory} has limits, which a cgroup next to it would escape")
        if directory in mount_points(mounts):
            return NoCgroup(f"this container sees only {directory}, which has other processes")
        directory = os.path.dirname(directory)
        top = look(directory)
    if not top.writable:
        return NoCgroup(f"no permission to create one in {directory}")
    if "memory" not in top.controllers:
        return NoCgroup(f"{directory} does not count memory")
    return CgroupParent(2, directory, directory if "pids" in top.controllers else "")


def scope_helps(own_group: str, mounts: str, look: Callable[[str], CgroupFolder], uid: int) -> bool:
    """Return whether systemd can start a user's run where a group can be created, in the user's own slice.

    From elsewhere (a batch job, a service) the run would escape the limits and the end of that job.
    """
    if not isinstance(find_parent(own_group, mounts, look), NoCgroup):
        return False
    paths = own_groups(own_group, mounts)
    slice_ = f"/user.slice/user-{uid}.slice/"
    before, inside, _ = paths.get("", "").partition(slice_)
    if "memory" in paths or not inside or look(paths[""]).limited:
        return False
    return look(f"{before}{slice_}user@{uid}.service").writable


def memory_limit(own_group: str, mounts: str) -> int | None:
    """Return the bytes of memory that this process's groups allow, such as a batch job's; None for all."""
    paths, points, limits = own_groups(own_group, mounts), mount_points(mounts), []
    for controller, name in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        directory = paths.get(controller, "")
        while directory not in ("", "/"):
            amount = first_field(f"{directory}/{name}")
            if amount.isdecimal() and int(amount) < UNLIMITED:
                limits.append(int(amount))
            directory = "" if directory in points else os.path.dirname(directory)
    return min(limits, default=None)


def own_groups(own_group: str, mounts: str) -> dict[str, str]:
    """Return this process's groups by controller, "" for v2. Groups that are not visible are missing."""
    groups: dict[str, str] = {}
    for line in own_group.splitlines():
        number, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        for fields in map(str.split, mounts.splitlines()):
            kind, _, options = fields[fields.index("-") + 1 :][:3]
            root, point = unescape(fields[3]), unescape(fields[4])
            if kind != ("cgroup2" if number == "0" else "cgroup"):
                continue
            if number != "0" and not set(names) <= set(options.split(",")):
                continue
            # A path that begins with /.. is outside of what this process's cgroup namespace shows.
            if not path.startswith("/..") and f"{path}/".startswith(root.rstrip("/") + "/"):
                inside = path[len(root.rstrip("/")) :].strip("/")
                groups |= dict.fromkeys(names, os.path.join(point, inside) if inside else point)
    return groups


def mount_points(mounts: str) -> set[str]:
    return {unescape(line.split()[4]) for line in mounts.splitlines()}


def unescape(text: str) -> str:
    """Return a path of mountinfo, in which spaces and some other characters are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_own() -> tuple[str, str]:
    """Return the texts of this process's groups and of the mounts of groups."""
    return read_file("/proc/self/cgroup"), read_file("/proc/self/mountinfo")


def look_at(directory: str) -> CgroupFolder:
    top = not os.path.exists(f"{directory}/cgroup.type")
    offered = "cgroup.controllers" if top else "cgroup.subtree_control"
    limits = (("memory.max", "max"), ("cpu.max", "max"), ("cpuset.cpus", ""))
    return CgroupFolder(
        writable=os.access(directory, os.W_OK) and os.access(f"{directory}/cgroup.procs", os.W_OK),
        controllers=frozenset(read_setting(f"{directory}/{offered}").split()),
        top=top,
        limited=any(first_field(f"{directory}/{name}", default=free) != free for name, free in limits),
    )


def first_field(path: str, *, default: str = "") -> str:
    return next(iter(read_setting(path, default=default).split()), "")


def read_setting(path: str, *, default: str = "") -> str:
    """Return the text of a file, `default` if this kernel or group lacks the file."""
    try:
        return read_file(path)
    except (FileNotFoundError, PermissionError):
        return default


class Group:
    """The group of a run. Creating it may raise OSError. A process outside of every namespace removes it.

    That process waits until its creator closes `alive`, or is killed.
    """

    def __init__(self, parent: CgroupParent, *, memory: int | None, processes: int | None) -> None:
        self.version, self.bytes, self.processes = parent.version, memory, processes
        parents = [directory for directory in dict.fromkeys((parent.memory, parent.pids)) if directory]
        for directory in parents:
            remove_stale(directory)
        name = f"{PREFIX}{pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}"
        self.folders = [f"{directory}/{name}" for directory in parents]
        self.memory = f"{parent.memory}/{name}"
        self.pids = f"{parent.pids}/{name}" if parent.pids and processes is not None else ""
        try:
            for directory in parents:
                if not os.path.exists(f"{directory}/cgroup.type") and self.version == 2:
                    write_file(f"{directory}/cgroup.subtree_control", "+memory +pids")
                os.mkdir(f"{directory}/{name}")
            self.set_limits()
            # Now, while this process has all its permissions.
            self.join = [os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for path in self.folders]
            self.start_sweeper()
        except OSError:
            remove(self.folders)
            raise

    def set_limits(self) -> None:
        if self.pids and self.processes is not None:
            write_file(f"{self.pids}/pids.max", str(self.processes + 1))  # process 1 too
        if self.bytes is None:
            return
        if self.version == 2:
            write_file(f"{self.memory}/memory.max", str(self.bytes))
            others = {"memory.oom.group": 1, "memory.swap.max": 0}
        else:  # TCP has an account of its own there
            write_file(f"{self.memory}/memory.limit_in_bytes", str(self.bytes))
            others = {
                "memory.memsw.limit_in_bytes": self.bytes,
                "memory.kmem.tcp.limit_in_bytes": self.bytes // 2,
            }
        for name, amount in others.items():
            if os.path.exists(f"{self.memory}/{name}"):  # a kernel without swap has not all
                write_file(f"{self.memory}/{name}", str(amount))

    def add(self, pid: int) -> None:
        for fd in self.join:
            os.write(fd, str(pid).encode())
            os.close(fd)

    def over(self) -> str | None:
        """Return the limit that the run has reached, `machine` if the kernel ended it for another limit."""
        if self.pids and self.processes is not None:
            # The peak, if the kernel counts it.
            most = read_setting(f"{self.pids}/pids.peak") or read_setting(f"{self.pids}/pids.current")
            if int(most or 0) > self.processes:
                return "processes"
        return self.over_memory()

    def over_memory(self) -> str | None:
        if self.bytes is None:
            return None
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        events = dict(line.split() for line in read_setting(f"{self.memory}/{name}").splitlines())
        if not int(events.get("oom_kill", 0)):
            return None
        if self.version == 2:
            out_of_memory = int(events.get("oom", 0)) > 0
        else:
            most = max(
                int(read_setting(f"{self.memory}/memory.{kind}max_usage_in_bytes", default="0"))
                for kind in ("", "memsw.")
            )
            out_of_memory = most > self.bytes - SLACK
        return "memory" if out_of_memory else "machine"

    def start_sweeper(self) -> None:
        over, self.alive = os.pipe()
        self.sweeper = os.fork()
        if self.sweeper == 0:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                os.setsid()
                forget_stdio()
                close_all_but(over)
                os.read(over, 1)
                remove(self.folders)
            finally:
                os._exit(0)
        os.close(over)

    def end(self) -> None:
        os.close(self.alive)
        os.waitpid(self.sweeper, 0)


def remove(directories: list[str], *, seconds: float = WAIT) -> None:
    """End the processes of these groups, and remove the groups. A later run removes those that remain."""
    until = time.monotonic() + seconds
    for directory in directories:
        while os.path.exists(directory):
            with contextlib.suppress(OSError):
                end_all(directory)
                os.rmdir(directory)
                break
            if time.monotonic() >= until:
                break
            time.sleep(0.01)


def end_all(directory: str) -> None:
    if os.path.exists(f"{directory}/cgroup.kill"):
        write_file(f"{directory}/cgroup.kill", "1")
        return
    for pid in map(int, read_file(f"{directory}/cgroup.procs").split()):
        if pid:  # 0 is one of another namespace's
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def remove_stale(parent: str) -> None:
    """Remove groups whose creator has ended: its process id, with that start time, in this pid namespace."""
    name = re.compile(f"{PREFIX}{pid_namespace()}-([0-9]+)-([0-9]+)")
    entries = [match for entry in os.listdir(parent) if (match := name.fullmatch(entry))]
    remove(
        [f"{parent}/{entry[0]}" for entry in entries if start_time(int(entry[1])) != int(entry[2])], seconds=0
    )


def pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def start_time(pid: int) -> int:
    """Return the start time of a process in ticks since boot, 0 if it has ended."""
    fields = read_setting(f"/proc/{pid}/stat").rpartition(") ")[2].split()
    return int(fields[19]) if fields else 0


INTERVAL = 100  # milliseconds between two looks
SLICE = 0.02  # seconds of each look that go into counting files: the keeper has terminals to serve too
DEPTH_LIMIT = 200  # folders: each is held open on the way. What lies deeper is left to the disk's reserve
SHARE = 4  # of what the kernel counts by user, the caller too: a run gets one part of so many


class Watch:
    """A watch of the resources of a run.

    `visible` are the sandbox's /proc, its list of System V segments, and directories with files in memory.
    The run writes to `folders`, the first of them on the store's disk. In the run's own `group`, if any, the
    kernel counts memory and mostly processes.
    """

    def __init__(
        self,
        limits: dict[str, Any],
        visible: Sequence[int],
        *,
        directories: Sequence[str],
        group: Group | None = None,
    ) -> None:
        self.limits, self.folders, self.group = limits, directories, group
        proc, self.segments, *self.in_memory = visible
        self.proc = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
        os.close(proc)
        self.walk = sizes(*directories)

    def over(self) -> str | None:
        """Return the limit that the run has reached now."""
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
            # Shared pages are in the size of each process: a sum beyond the limit is counted exactly.
            shared = self.shared()
            if memory is not None and shared + sum(size for _, size in counted) > memory:
                process_sizes = [self.proportional(pid) for pid in pids]
                # It is unknown which files in memory are mapped: at least the larger of both counts.
                mapped = max(shared, sum(size for _, size in process_sizes))
                if mapped + sum(own_size for own_size, _ in process_sizes) > memory:
                    return "memory"
        return self.over_scratch()

    def shared(self) -> int:
        """Return the bytes of files in memory and of System V segments."""
        disks = [os.fstatvfs(fd) for fd in self.in_memory]
        os.lseek(self.segments, 0, os.SEEK_SET)
        rows = read_rest(self.segments).splitlines()[1:]
        files = sum((disk.f_blocks - disk.f_bfree) * disk.f_frsize for disk in disks)
        return files + sum(sum(map(int, row.split()[14:16])) for row in rows)

    def count(self, pid: str) -> tuple[int, int]:
        """Return threads, and bytes in memory, swap and page tables; 0 for an ended process."""
        fields = self.fields(f"{pid}/status")
        size = sum(fields.get(name, 0) for name in (b"VmRSS", b"VmSwap", b"VmPTE"))
        return fields.get(b"Threads", 0), size * 1024

    def proportional(self, pid: str) -> tuple[int, int]:
        """Return these bytes with shared ones divided by their users.

        They are the process's own, and those of files in memory. An unreadable process, such as one of an
        unreadable program, counts fully.
        """
        fields = self.fields(f"{pid}/smaps_rollup")
        if b"Pss" not in fields:
            return self.count(pid)[1], 0
        files, tables = fields.get(b"Pss_Shmem", 0), self.fields(f"{pid}/status").get(b"VmPTE", 0)
        return (fields[b"Pss"] - files + fields.get(b"SwapPss", 0) + tables) * 1024, files * 1024

    def fields(self, name: str) -> dict[bytes, int]:
        """Return the numbers of a file of `NAME: NUMBER` lines, none for an ended process."""
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
    """Yield the sum of bytes after each file below `tops`, which are untrusted and change meanwhile."""
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
            with contextlib.suppress(OSError):  # unreadable: the disk's reserve limits that
                enter(top, None)
        while opened:
            fd, names = opened[-1]
            if not names:
                os.close(fd)
                opened.pop()
                continue
            name = names.pop()
            with contextlib.suppress(OSError):  # gone again
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                # An empty file takes an inode, of which a disk has a limited number.
                total += max(status.st_blocks, 1) * 512 // max(status.st_nlink, 1)
                if status.st_mode & 0o170000 == 0o040000 and len(opened) < DEPTH_LIMIT:
                    enter(name, fd)
            yield total
    finally:
        for fd, _ in opened:
            os.close(fd)


def run_before_others() -> None:
    """Give this process and its future init a higher scheduling priority, where root may.

    Otherwise a command of root that forks without end, which no kernel limit stops, takes all process ids of
    the machine. Watch and init would wait among thousands of processes, which only the end of the init ends.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def let_children_run_as_others() -> None:
    os.sched_setscheduler(0, os.sched_getscheduler(0) | os.SCHED_RESET_ON_FORK, os.sched_getparam(0))


def run_as_others() -> None:
    """Undo `run_before_others`. A caller's own policy stays, because no user may leave SCHED_IDLE."""
    if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR:
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def set_limits(limits: dict[str, Any]) -> None:
    """Set the kernel's limits for a process and its children, at most at the caller's own."""
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
