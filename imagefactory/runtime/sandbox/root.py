"""The file system of a command: the image's layers in an overlay, /proc, /sys, /dev and host mounts.

Targets (`open_target`) are mount points in an untrusted tree. They are found and created without following a
link out of that tree.

Each read-only directory of the host gets an overlay (`overlay`). In a read-only bind mount sockets answer,
named pipes accept writes, and locks are shared. In an overlay each is a file of the overlay: a socket
without a listener, a pipe without a reader, locks that no other process sees. An overlay caches its lookups.
So the keeper empties that cache every second, or a file that the host replaces would stay the old one.

qemu starts programs of another processor (`bring_emulator`), registered for this sandbox or the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterable
from typing import Any

from .cgroups import SHARE
from .forward import FORWARD_DIRECTORY, FORWARD_LIBRARY, HEAD, forward_directory
from .streams import read_file, write_file
from .syscalls import (
    ARCHITECTURES,
    ATTR_NODEV,
    ATTR_NOEXEC,
    ATTR_NOSUID,
    ATTR_RDONLY,
    LIBC,
    MNT_DETACH,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    OVERLAY_OPTIONS_LIMIT,
    SetupError,
    attach,
    check,
    clone_tree,
    close_folder,
    mount,
    move,
    new_mount,
    open_beneath,
    open_root,
    restrict,
    step,
    syscall,
)
from .trees import list_names, open_file

# As many links as the kernel follows, and folders deeper than any image's: each is held open on the way.
LINKS_LIMIT, DEPTH_LIMIT = 40, 200
MOST_NAMES, LARGEST_LIBRARY = 1000, 1 << 32  # of a directory with NVIDIA's libcuda


def open_target(root: int, path: str, *, directory: bool, closed: tuple[str, ...] = ()) -> int:
    """Open `path` below the open directory `root` as a mount point, created if missing.

    The kernel resolves one name at a time and no link. A link is read as text, and followed from `root` as
    its processes will. So '..', an absolute link or /proc cannot lead outside, and the final path is known.
    Raises SetupError if it ends in `root` itself or enters a directory of `root` in `closed`, OSError if the
    tree has no such path and it cannot be created.
    """
    ahead = path.split("/")[::-1]
    open_fds: list[int] = []
    links = 0
    try:
        while ahead:
            name = ahead.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if open_fds:
                    os.close(open_fds.pop())
                continue
            if not open_fds and name in closed:
                raise led_to(path, f"/{name}")
            if len(open_fds) == DEPTH_LIMIT:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            above = open_fds[-1] if open_fds else root
            entry = open_or_make(
                above, name, directory=directory or any(part not in ("", ".") for part in ahead)
            )
            open_fds.append(entry)
            if stat.S_ISLNK(os.fstat(entry).st_mode):
                links += 1
                if links > LINKS_LIMIT:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                text = os.readlink("", dir_fd=entry)
                os.close(open_fds.pop())
                if text.startswith("/"):
                    while open_fds:
                        os.close(open_fds.pop())
                ahead += text.split("/")[::-1]
        if not open_fds:
            raise led_to(path, "/")
        return open_fds.pop()
    finally:
        for fd in open_fds:
            os.close(fd)


def led_to(path: str, location: str) -> SetupError:
    """Return the error. `location` is our own text, because an image's link must not reach a terminal."""
    return SetupError("target", errno.EXDEV, f"a link of the image leads {path} to {location}")


def open_or_make(above: int, name: str, *, directory: bool) -> int:
    with contextlib.suppress(FileNotFoundError):
        return open_beneath(above, name)
    with contextlib.suppress(FileExistsError):  # created by another process, or a link: opened next
        if directory:
            os.mkdir(name, 0o755, dir_fd=above)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(name, flags, 0o644, dir_fd=above))
    return open_beneath(above, name)


READ_ONLY = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
REFRESH = 1.0  # seconds until what the host has changed is seen


def needs_overlay(source: str) -> bool:
    """Return whether the path is a directory or a file. A mounted socket or pipe must stay the host's own."""
    mode = os.stat(source).st_mode
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def overlay(source: str, empty: str) -> tuple[int, int]:
    """Return a directory or file in an overlay, to be attached, and the overlay's top, to be refreshed.

    `empty` is an empty directory, because an overlay without changes needs two layers. Raises SetupError if
    the kernel rejects the layer, as for some file systems, and directories with mounts inside.
    """
    source = os.path.realpath(source)
    directory, name = (source, "") if os.path.isdir(source) else os.path.split(source)
    with step("mount-source", source):
        layers = [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in (directory, empty)]
    os.chdir("/proc/self/fd")  # the shortest names there are, without ':' and ','
    try:
        tree = new_mount("overlay", READ_ONLY, lowerdir=":".join(map(str, layers)))
    except OSError as error:
        with open("/proc/self/mountinfo", "rb") as file:
            inner = mounts_below(directory, file)
        unfit = "its file system cannot be under an overlay"
        reason = unfit if error.errno == errno.EINVAL else os.strerror(error.errno or 0)
        reason = f"{inner[0]} is mounted in it" if inner else reason
        raise SetupError("shown", error.errno or 0, f"{source}: {reason}") from error
    finally:
        os.chdir("/")
        for fd in layers:
            os.close(fd)
    top = os.dup(tree)
    if not name:
        return tree, top
    with step("mount-source", source):
        attach(tree, os.open(empty, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            return clone_tree(os.path.join(empty, name), follow=False), top
        finally:
            check(LIBC.umount2(os.fsencode(empty), MNT_DETACH))


def mounts_below(directory: str, mountinfo: Iterable[bytes]) -> list[str]:
    """Return the mount points in a directory, from the lines of /proc/self/mountinfo."""
    prefix = os.path.join(directory, "")
    points = (re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split()[4])
              for line in mountinfo)  # fmt: skip
    return sorted(
        {point for point in map(os.fsdecode, points) if point.startswith(prefix) and point != prefix}
    )


def bring_emulator(emulator: dict[str, Any]) -> int:
    """Return an open descriptor of the emulator's file, which commands must be able to start.

    The sandbox's own emulator is registered in this user namespace, from a read-only copy of its mount,
    since programs find it as /proc/PID/exe. The last mount of binfmt_misc keeps the registration, so this
    process has a mount open.
    """
    with step("emulator", emulator["program"]):
        if not emulator["own"]:
            return _above_streams(os.open(emulator["program"], os.O_PATH | os.O_CLOEXEC))
        program = clone_tree(emulator["program"])
        restrict(program, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
        table = new_mount("binfmt_misc", ATTR_NOSUID | ATTR_NODEV)
        line = f":emulator:{emulator['files']}:/proc/self/fd/{program}:PF"
        register = os.open("register", os.O_WRONLY | os.O_CLOEXEC, dir_fd=table)
        try:
            os.write(register, line.encode())
        finally:
            os.close(register)
        return _above_streams(program)


def _above_streams(fd: int) -> int:
    """Move a descriptor above a command's own streams and the report of its start, 0 to 3."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 4)
    os.close(fd)
    return moved


# Files by which any user's process can read or change the whole machine. Missing ones are skipped.
MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/config.gz", "/proc/dynamic_debug", "/proc/interrupts",
    "/proc/kallsyms", "/proc/kcore", "/proc/key-users", "/proc/keys", "/proc/kmsg", "/proc/kpagecgroup",
    "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
    "/proc/slabinfo", "/proc/sysrq-trigger", "/proc/timer_list", "/proc/timer_stats", "/proc/vmallocinfo",
)  # fmt: skip
# With a GPU all of /sys is shown (NCCL and NVML read the machine's topology there), except these.
MASKED_SYS = ("/sys/firmware", "/sys/fs", "/sys/kernel", "/sys/power", "/sys/hypervisor")
CLOSED = ("proc", "sys", "dev")  # directories of the image that we cover, without other mounts
SYS_PARTS = ("/sys/devices/system/cpu", "/sys/devices/system/node")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
TERMINALS = 256  # the machine has 4096, 1024 of them for no sandbox
# Of the kernel's own memory: 256,000 semaphores and 1024 message queues; by itself it allows a thousand times
# more. Below Linux 6.10 root alone may say so.
SYSTEM_V = {"sem": "32000 256000 500 1024", "msgmni": "1024"}


class Root:
    """The file system of a sandbox, built by its init in its own mount namespace."""

    def __init__(self, plan: dict[str, Any], scratch: str) -> None:
        self.plan, self.scratch = plan, scratch
        self.in_memory = False
        self.shown: list[int] = []  # to the watch: /proc, System V's segments, and folders of files in memory
        self.overlays: list[int] = []  # over the host's files, for the keeper to refresh
        scratch_limit, memory = plan["limits"]["scratch"], plan["limits"]["memory"]
        self.size = {} if scratch_limit is None else tmpfs_size(scratch_limit)
        self.shared = {} if memory is None else tmpfs_size(memory // 2)  # as a tmpfs has half of a machine's

    def build(self) -> None:
        plan = self.plan
        with step("private-mounts"):
            check(LIBC.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
        closed = READ_ONLY
        mounts = [("/etc/hosts", self.tree(os.path.join(self.scratch, "hosts"), closed))]
        root = os.path.join(self.scratch, "root")
        self.mount_overlay(root)
        with step("proc"):
            proc = new_mount("proc", ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC)
        # Read-only mounts: devices take writes all the same, but no other mode, owner or time.
        device = ATTR_RDONLY | ATTR_NOSUID | ATTR_NOEXEC
        devices = [
            (f"/dev/{name}", self.tree(f"/dev/{name}", device))
            for name in DEVICES
            if os.path.exists(f"/dev/{name}")
        ]
        driver = plan["driver"] or {"devices": [], "libraries": [], "programs": [], "links": []}
        # Without noexec: a driver may map memory of its devices as code.
        devices += [(path, self.tree(path, ATTR_RDONLY | ATTR_NOSUID)) for path in driver["devices"]]
        libraries = [
            (
                f"{part}/{os.path.basename(path)}",
                self.tree(path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV),
            )
            for part in ("libraries", "programs")
            for path in driver[part]
        ]
        parts = ("/sys",) if plan["driver"] else tuple(path for path in SYS_PARTS if os.path.isdir(path))
        system = [(path, self.tree(path, closed | ATTR_NOEXEC)) for path in parts]
        if plan["network"] and os.path.exists("/etc/resolv.conf"):
            mounts.append(("/etc/resolv.conf", self.tree("/etc/resolv.conf", closed)))
        mounts += [(entry["target"], self.host_tree(entry)) for entry in plan["mounts"]]
        scratch_tmp = (
            None if self.in_memory else self.tree(os.path.join(self.scratch, "tmp"), ATTR_NOSUID | ATTR_NODEV)
        )
        with step("pivot"):
            os.chdir(root)
            syscall(ARCHITECTURES[plan["machine"]]["pivot_root"], b".", b".")
            check(LIBC.umount2(b".", ctypes.c_int(MNT_DETACH)))
            os.chdir("/")
        # From here on every path is the image's, and its files are no modules of ours.
        sys.path.clear()
        sys.meta_path.clear()
        with step("openat2"):
            self.root = open_root()
        own_mounts = {name: self.open_own(name) for name in ("proc", "sys", "dev", "tmp")}
        with step("tmp"):
            if scratch_tmp is None:
                scratch_tmp = new_mount("tmpfs", ATTR_NOSUID | ATTR_NODEV, mode="1777", **self.size)
            attach(scratch_tmp, own_mounts["tmp"])
        if plan["driver"]:
            with step("driver"):
                self.make_driver(driver, libraries)
        for target, tree in mounts:
            with step("mount", target):
                attach(tree, self.target(target, directory=is_folder(tree)))
        if driver["libraries"]:
            self.choose_libcuda(driver)
        # After all that an image's links lead to: until now they find no device, no setting and no process.
        with step("dev"):
            self.make_dev(own_mounts["dev"], devices)
        with step("sys"):
            self.make_sys(own_mounts["sys"], system)
        with step("proc"):
            directories = ["/dev/shm", *(["/tmp"] if self.in_memory else [])]
            if self.in_memory and not plan["read_only"]:
                directories.append("/")
            self.shown = [os.dup(proc), open_segments(proc)]
            self.shown += [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in directories]
            attach(proc, own_mounts["proc"])
        os.close(self.root)

    def open_own(self, name: str) -> int:
        with step("image", f"/{name}"):
            target_fd = open_beneath(self.root, name)
            if not is_folder(target_fd):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            return target_fd

    def target(self, path: str, *, directory: bool) -> int:
        target_fd = open_target(self.root, path, directory=directory, closed=CLOSED)
        if is_folder(target_fd) != directory:
            number = errno.ENOTDIR if directory else errno.EISDIR
            raise OSError(number, os.strerror(number))
        return target_fd

    def tree(self, path: str, attributes: int) -> int:
        with step("mount-source", path):
            cloned = clone_tree(path)
            restrict(cloned, attributes)
            return cloned

    def host_tree(self, entry: dict[str, Any]) -> int:
        """Return a mount of the caller: unchanged if it is `bind`, else in its own overlay."""
        source = entry["source"]
        if entry["writable"]:
            return self.tree(source, ATTR_NOSUID | ATTR_NODEV)
        with step("mount-source", source):
            as_it_is = entry["bind"] or not needs_overlay(source)
        if as_it_is:
            return self.tree(source, READ_ONLY)
        tree, top = overlay(source, os.path.join(self.scratch, "empty"))
        self.overlays.append(top)
        return tree

    def mount_overlay(self, root: str) -> None:
        """Mount the layers with the shortest names: numbers of open directories, read from /proc/self/fd."""
        plan = self.plan
        lower = [*reversed(plan["lower"]), os.path.join(self.scratch, "skeleton")]
        self.in_memory = plan["read_only"]
        with step("layers"):
            open_fds = [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in lower]
        options = "userxattr,lowerdir=" + ":".join(map(str, open_fds))
        flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if plan["read_only"] else 0)
        if len(options) > OVERLAY_OPTIONS_LIMIT - 40:
            raise SetupError("layers", errno.E2BIG, f"{len(open_fds)} layers are too many for one overlay")
        with step("overlay"):
            os.chdir("/proc/self/fd")
            if plan["read_only"]:
                mount("overlay", root, flags, options)
            else:
                try:
                    self.mount_writable(root, flags, options, self.scratch)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EREMOTE):
                        raise
                    # This file system cannot be an upper one (NFS, overlay): keep the changes in memory.
                    self.in_memory = True
                    mount("tmpfs", self.scratch, MS_NOSUID | MS_NODEV, join(mode="0700", **self.size))
                    for name in ("root", "upper", "work", "tmp", "empty"):
                        os.mkdir(os.path.join(self.scratch, name), 0o755)
                    self.mount_writable(root, flags, options, self.scratch)
            os.chdir("/")
        for fd in open_fds:
            os.close(fd)

    def mount_writable(self, root: str, flags: int, options: str, directory: str) -> None:
        upper, work = (
            os.open(os.path.join(directory, name), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            for name in ("upper", "work")
        )
        try:
            mount("overlay", root, flags, f"{options},upperdir={upper},workdir={work}")
        finally:
            os.close(upper)
            os.close(work)

    def make_dev(self, target_fd: int, devices: list[tuple[str, int]]) -> None:
        dev = new_mount("tmpfs", ATTR_NOSUID | ATTR_NOEXEC, mode="0755", size="64k")
        move(dev, target_fd)
        for path, tree in devices:
            attach(tree, open_target(dev, path.removeprefix("/dev/"), directory=is_folder(tree)))
        for name in ("shm", "pts", "mqueue"):
            os.mkdir(name, 0o755, dir_fd=dev)
        mount("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, join(mode="1777", **self.shared))
        terminals = f"newinstance,ptmxmode=0666,mode=0620,max={TERMINALS}"
        mount("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, terminals)
        mount("mqueue", "/dev/mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0"}
        links |= {"stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
        for name, target in links.items():
            os.symlink(target, name, dir_fd=dev)
        close_folder(dev)
        os.close(dev)

    def make_sys(self, target_fd: int, parts: list[tuple[str, int]]) -> None:
        if self.plan["driver"]:
            ((_, tree),) = parts
            attach(tree, target_fd)
            for path in MASKED_SYS:
                if os.path.isdir(path):
                    mount("tmpfs", path, MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0555")
            return
        system = new_mount("tmpfs", ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, mode="0755", size="64k")
        move(system, target_fd)
        for path, tree in parts:
            attach(tree, open_target(system, path.removeprefix("/sys/"), directory=True))
        close_folder(system)
        os.close(system)

    def make_driver(self, driver: dict[str, Any], files: list[tuple[str, int]]) -> None:
        directory = new_mount("tmpfs", ATTR_NOSUID | ATTR_NODEV, mode="0755", size="1m")
        move(directory, self.target(driver["folder"], directory=True))
        for path, tree in files:
            attach(tree, open_target(directory, path, directory=is_folder(tree)))
        for name, target in driver["links"]:
            with contextlib.suppress(FileExistsError):
                os.symlink(target, f"libraries/{name}", dir_fd=directory)
        close_folder(directory)
        os.close(directory)

    def choose_libcuda(self, driver: dict[str, Any]) -> None:
        """Put the image's libcuda for older drivers first in the library path, where NVIDIA's hook would."""
        names, head = read_forward()
        if first := forward_directory(names, head, driver["driver"], driver["models"]):
            variables = dict(self.plan["environment"])
            variables["LD_LIBRARY_PATH"] = f"{first}:{variables['LD_LIBRARY_PATH']}"
            self.plan["environment"] = list(variables.items())

    def protect_proc(self) -> None:
        """Cover the machine's files in /proc, and make all of /proc read-only.

        Otherwise any process inside could lower its `oom_score_adj`, and a full memory would end other
        processes.
        """
        with step("proc-masks"):
            proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            for path in MASKED:
                name = os.path.basename(path)
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISDIR(os.lstat(path).st_mode):
                        mount("tmpfs", path, MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0555")
                    else:
                        attach(clone_tree("/dev/null"), open_beneath(proc, name))
            with step("limits"):
                limit_namespaces(proc)
            close_folder(proc)
            os.close(proc)


def read_forward(directory: str = FORWARD_DIRECTORY) -> tuple[list[str], bytes]:
    """Return the names of the libcuda files in a directory of the image, and the first bytes of the only
    one.

    Like NVIDIA's hook, it ignores links among them, and a directory that it cannot read has none.
    """
    directory = os.path.realpath(directory)
    try:
        names = [
            name
            for name in list_names(directory, MOST_NAMES)
            if FORWARD_LIBRARY.fullmatch(name) and not os.path.islink(os.path.join(directory, name))
        ]
        if len(names) != 1:
            return names, b""
        with open_file(directory, names[0], LARGEST_LIBRARY) as fd:
            return names, os.pread(fd, HEAD, 0)
    except OSError:
        return [], b""


def limit_namespaces(proc: int) -> None:
    """Allow no nested namespace and no fanotify, a share of the user's inotify, few System V objects.

    Call it after all mounts, because the kernel counts each detached tree as a mount namespace.
    """
    directory = os.open("sys/user", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    for name in os.listdir(directory):
        if name.endswith("_namespaces") or "_fanotify_" in name:
            write_file(name, "0", directory=directory)
    for name, whole in (("instances", "max_user_instances"), ("watches", "max_user_watches")):
        with contextlib.suppress(FileNotFoundError):  # a kernel without inotify
            most = int(read_file(f"sys/fs/inotify/{whole}", directory=proc))
            write_file(f"max_inotify_{name}", str(most // SHARE), directory=directory)
    os.close(directory)
    for name, text in SYSTEM_V.items():
        with contextlib.suppress(FileNotFoundError, PermissionError):
            write_file(f"sys/kernel/{name}", text, directory=proc)


def open_segments(proc: int) -> int:
    """Open the list of System V segments of a /proc; an empty file on a kernel without them."""
    try:
        return os.open("sysvipc/shm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except FileNotFoundError:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def tmpfs_size(amount: int) -> dict[str, str]:
    """Return options with as many files as pages, because each file takes memory outside of the size."""
    return {"size": str(amount), "nr_inodes": str(max(amount // 4096, 64))}


def join(**options: str) -> str:
    return ",".join(f"{name}={value}" for name, value in options.items())


def is_folder(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)
