"""Linux's system calls that Python has no function for, and the step in which one failed."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
MNT_DETACH = 2
# System calls newer than most C libraries; their numbers are the same on every architecture.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 428, 429, 430, 431, 432
SYS_FSPICK = 433
SYS_CLOSE_RANGE, SYS_OPENAT2, SYS_MOUNT_SETATTR = 436, 437, 442
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE = -100, 0x1000, 0x8000, 1
AT_SYMLINK_NOFOLLOW = 0x100
MOVE_FROM_FD, MOVE_TO_FD = 4, 0x40
FSCONFIG_FLAG, FSCONFIG_STRING, FSCONFIG_CREATE, FSCONFIG_RECONFIGURE = 0, 1, 6, 7
FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC, FSPICK_CLOEXEC, FSPICK_EMPTY_PATH = 1, 1, 1, 8
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 2, 4, 8, 0x10
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP = 1, 4, 15, 22
PR_SET_CHILD_SUBREAPER = 36
PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 28, 38, 47
SECUREBITS_LOCKED = (
    0b11101111  # no privileges by uid 0, no fix-ups, no ambient ones; keep_caps off; all locked
)
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
KEYCTL_JOIN_SESSION_KEYRING = 1
OVERLAY_OPTIONS_LIMIT = 4095  # bytes: mount(2) takes one page


class SetupError(Exception):
    """A step that failed before the command was started."""

    def __init__(self, step: str, number: int, detail: str) -> None:
        super().__init__(f"{step}: {detail}")
        self.step, self.number, self.detail = step, number, detail


@contextlib.contextmanager
def step(name: str, about: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = os.strerror(error.errno) if error.errno else str(error)
        raise SetupError(name, error.errno or 0, f"{about}: {text}" if about else text) from error


def check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def syscall(number: int, *arguments: Any) -> int:
    passed = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return check(LIBC.syscall(ctypes.c_long(number), *passed))


def unshare(flags: int) -> None:
    check(LIBC.unshare(ctypes.c_int(flags)))


def tee(source: int, target: int, count: int) -> int:
    """Copy bytes from pipe to pipe that stay in the first. Raises BlockingIOError where there are none."""
    return check(LIBC.tee(source, target, ctypes.c_size_t(count), ctypes.c_uint(os.SPLICE_F_NONBLOCK)))


def prctl(option: int, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    check(LIBC.prctl(ctypes.c_int(option), *(ctypes.c_ulong(value) for value in padded)))


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    source = kind.encode()
    check(LIBC.mount(source, os.fsencode(target), source, ctypes.c_ulong(flags), os.fsencode(options)))


def clone_tree(path: str, *, follow: bool = True) -> int:
    """A detached copy of the mounts at `path`; without `follow` of a link itself."""
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC | (0 if follow else AT_SYMLINK_NOFOLLOW)
    return syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)


def restrict(tree: int, attributes: int) -> None:
    """Adds attributes to every mount of a tree: what was read-only before stays so."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = AT_EMPTY_PATH | AT_RECURSIVE
    syscall(SYS_MOUNT_SETATTR, tree, b"", flags, wanted, len(wanted))


def attach(tree: int, place: int) -> None:
    """Mounts a detached tree on an open file or folder; both descriptors are closed."""
    move(tree, place)
    os.close(tree)


def move(tree: int, place: int) -> None:
    """The same, and `tree` stays open: it is then the mounted tree's top."""
    syscall(SYS_MOVE_MOUNT, tree, b"", place, b"", MOVE_FROM_FD | MOVE_TO_FD)
    os.close(place)


def new_mount(kind: str, attributes: int, **options: str) -> int:
    """A detached file system, seen by nobody yet; a new proc is that of this pid namespace."""
    context = syscall(SYS_FSOPEN, kind.encode(), FSOPEN_CLOEXEC)
    try:
        for name, value in options.items():
            syscall(SYS_FSCONFIG, context, FSCONFIG_STRING, name.encode(), value.encode(), 0)
        syscall(SYS_FSCONFIG, context, FSCONFIG_CREATE, None, None, 0)
        return syscall(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def reconfigure(top: int, *flags: str) -> None:
    """Sets options of the file system whose mount has this top."""
    context = syscall(SYS_FSPICK, top, b"", FSPICK_EMPTY_PATH | FSPICK_CLOEXEC)
    try:
        for flag in flags:
            syscall(SYS_FSCONFIG, context, FSCONFIG_FLAG, flag.encode(), None, 0)
        syscall(SYS_FSCONFIG, context, FSCONFIG_RECONFIGURE, None, None, 0)
    finally:
        os.close(context)


def close_folder(place: int) -> None:
    """Makes the mount whose top is open read-only; mounts below it keep their own state."""
    wanted = struct.pack("=QQQQ", ATTR_RDONLY, 0, 0, 0)
    syscall(SYS_MOUNT_SETATTR, place, b"", AT_EMPTY_PATH, wanted, len(wanted))


def open_root() -> int:
    """This process's root. As it asks for what may fail alone, only a kernel without openat2 refuses."""
    return open_resolved(AT_FDCWD, "/", RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)


def open_beneath(folder: int, name: str) -> int:
    """What `name` in an open folder is, to be looked at; a link is opened itself."""
    return open_resolved(folder, name, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)


def open_resolved(folder: int, name: str, resolve: int) -> int:
    how = struct.pack("=QQQ", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, 0, resolve)
    return syscall(SYS_OPENAT2, folder, os.fsencode(name), how, len(how))


def close_all_but(*kept: int) -> None:
    """Closes every descriptor above 2 but these. Python's closerange counts where its C library is old."""
    first = 3
    for fd in (*sorted(kept), 0xFFFFFFFF):
        if first < fd:
            syscall(SYS_CLOSE_RANGE, first, fd - 1, 0)
        first = max(first, fd + 1)


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | IFF_UP))


def wipe_arguments() -> None:
    """Overwrites this process's command line: any process inside can read it, and it names host paths."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), after pid and comm
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
