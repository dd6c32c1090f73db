"""What is to be seen inside: the image's layers in an overlay, /proc, /sys, /dev and mounts of the host."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from typing import Any

from .seccomp import ARCHITECTURES
from .syscalls import (
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
    new_proc,
    restrict,
    step,
    syscall,
)

# What a process of any user can read about, or do to, the whole machine. Missing ones are passed over.
MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/config.gz", "/proc/dynamic_debug", "/proc/interrupts",
    "/proc/kallsyms", "/proc/kcore", "/proc/key-users", "/proc/keys", "/proc/kmsg", "/proc/kpagecgroup",
    "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
    "/proc/slabinfo", "/proc/sysrq-trigger", "/proc/timer_list", "/proc/timer_stats", "/proc/vmallocinfo",
)  # fmt: skip
# With a GPU all of /sys is shown (NCCL and NVML read the machine's topology there), except these.
MASKED_SYS = ("/sys/firmware", "/sys/fs", "/sys/kernel", "/sys/power", "/sys/hypervisor")
SYS_PARTS = ("/sys/devices/system/cpu", "/sys/devices/system/node")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class Root:
    """The file system of a sandbox, made by its init in a mount namespace of its own."""

    def __init__(self, plan: dict[str, Any], scratch: str) -> None:
        self.plan, self.scratch = plan, scratch
        self.in_memory = False

    def build(self) -> None:
        plan = self.plan
        with step("private-mounts"):
            check(LIBC.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
        closed = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
        mounts = [("/etc/hosts", self.tree(os.path.join(self.scratch, "hosts"), closed))]
        root = os.path.join(self.scratch, "root")
        self.mount_overlay(root)
        with step("proc"):
            proc = new_proc()
        device = ATTR_NOSUID | ATTR_NOEXEC
        devices = [
            (f"/dev/{name}", self.tree(f"/dev/{name}", device))
            for name in DEVICES
            if os.path.exists(f"/dev/{name}")
        ]
        driver = plan["driver"] or {"devices": [], "libraries": [], "programs": [], "links": []}
        # Without noexec: a driver may map memory of its devices as code.
        devices += [(path, self.tree(path, ATTR_NOSUID)) for path in driver["devices"]]
        libraries = [
            (
                f"{driver['folder']}/{part}/{os.path.basename(path)}",
                self.tree(path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV),
            )
            for part in ("libraries", "programs")
            for path in driver[part]
        ]
        parts = ("/sys",) if plan["driver"] else tuple(path for path in SYS_PARTS if os.path.isdir(path))
        system = [(path, self.tree(path, closed | ATTR_NOEXEC)) for path in parts]
        if plan["network"] and os.path.exists("/etc/resolv.conf"):
            mounts.append(("/etc/resolv.conf", self.tree("/etc/resolv.conf", closed)))
        for entry in plan["mounts"]:
            held = ATTR_NOSUID | ATTR_NODEV | (0 if entry["writable"] else ATTR_RDONLY)
            mounts.append((entry["target"], self.tree(entry["source"], held)))
        scratch_tmp = (
            None if self.in_memory else self.tree(os.path.join(self.scratch, "tmp"), ATTR_NOSUID | ATTR_NODEV)
        )
        with step("pivot"):
            os.chdir(root)
            syscall(ARCHITECTURES[plan["machine"]]["pivot_root"], b".", b".")
            check(LIBC.umount2(b".", ctypes.c_int(MNT_DETACH)))
            os.chdir("/")
        # From here on every path is the image's.
        for path in ("/proc", "/sys", "/dev", "/tmp"):
            with step("image", path):
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with step("proc"):
            attach(proc, "/proc")
        with step("dev"):
            self.make_dev(devices)
        with step("sys"):
            self.make_sys(system)
        with step("tmp"):
            if scratch_tmp is None:
                mount("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, "mode=1777")
            else:
                attach(scratch_tmp, "/tmp")
        if plan["driver"]:
            with step("driver"):
                self.make_driver(driver, libraries)
        for target, tree in mounts:
            with step("mount", target):
                self.make_target(target, tree)
                attach(tree, target)

    def tree(self, path: str, attributes: int) -> int:
        with step("mount-source", path):
            cloned = clone_tree(path)
            restrict(cloned, attributes)
            return cloned

    def mount_overlay(self, root: str) -> None:
        """Layers by the shortest names there are: numbers of open folders, read from /proc/self/fd."""
        plan = self.plan
        lower = [*reversed(plan["lower"]), os.path.join(self.scratch, "skeleton")]
        self.in_memory = plan["read_only"]
        with step("layers"):
            opened = [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in lower]
        options = "userxattr,lowerdir=" + ":".join(map(str, opened))
        flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if plan["read_only"] else 0)
        if len(options) > OVERLAY_OPTIONS_LIMIT - 40:
            raise SetupError("layers", errno.E2BIG, f"{len(opened)} layers are too many for one overlay")
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
                    mount("tmpfs", self.scratch, MS_NOSUID | MS_NODEV, "mode=0700")
                    for name in ("root", "upper", "work", "tmp"):
                        os.mkdir(os.path.join(self.scratch, name), 0o755)
                    self.mount_writable(root, flags, options, self.scratch)
            os.chdir("/")
        for fd in opened:
            os.close(fd)

    def mount_writable(self, root: str, flags: int, options: str, folder: str) -> None:
        upper, work = (
            os.open(os.path.join(folder, name), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            for name in ("upper", "work")
        )
        try:
            mount("overlay", root, flags, f"{options},upperdir={upper},workdir={work}")
        finally:
            os.close(upper)
            os.close(work)

    def make_dev(self, devices: list[tuple[str, int]]) -> None:
        mount("tmpfs", "/dev", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k")
        for path, tree in devices:
            self.make_target(path, tree)
            attach(tree, path)
        for name in ("shm", "pts", "mqueue"):
            os.mkdir(f"/dev/{name}", 0o755)
        mount("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777")
        mount("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
        mount("mqueue", "/dev/mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0"}
        links |= {"stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
        for name, target in links.items():
            os.symlink(target, f"/dev/{name}")
        close_folder("/dev")

    def make_sys(self, parts: list[tuple[str, int]]) -> None:
        if self.plan["driver"]:
            for path, tree in parts:
                attach(tree, path)
            for path in MASKED_SYS:
                if os.path.isdir(path):
                    mount("tmpfs", path, MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0555")
            return
        mount("tmpfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0755,size=64k")
        for path, tree in parts:
            os.makedirs(path)
            attach(tree, path)
        close_folder("/sys")

    def make_driver(self, driver: dict[str, Any], files: list[tuple[str, int]]) -> None:
        mount("tmpfs", driver["folder"], MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
        for target, tree in files:
            self.make_target(target, tree)
            attach(tree, target)
        for name, target in driver["links"]:
            with contextlib.suppress(FileExistsError):
                os.symlink(target, f"{driver['folder']}/libraries/{name}")
        close_folder(driver["folder"])

    def make_target(self, target: str, tree: int) -> None:
        """The place for a mount: the skeleton has it, unless a link of the image leads elsewhere."""
        if os.path.exists(target):
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def protect_proc(self) -> None:
        """What is the machine's and not a process's: read-only, or covered. Comes last, as we write there."""
        with step("proc-masks"):
            for name in sorted(os.listdir("/proc")):
                path = f"/proc/{name}"
                found = os.lstat(path)
                if name.isdigit() or stat.S_ISLNK(found.st_mode):
                    continue
                if path in MASKED:
                    if stat.S_ISDIR(found.st_mode):
                        mount("tmpfs", path, MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0555")
                    else:
                        attach(clone_tree("/dev/null"), path)
                elif stat.S_ISDIR(found.st_mode) or found.st_mode & 0o222:
                    tree = clone_tree(path)
                    restrict(tree, ATTR_RDONLY)
                    attach(tree, path)
