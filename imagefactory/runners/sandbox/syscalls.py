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
SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE = -100, 0x1000, 0x8000, 1
MOVE_FROM_FD, MOVE_FOLLOWS_LINKS = 4, 0x10
FSCONFIG_CREATE, FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC = 6, 1, 1
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
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


def prctl(option: int, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    check(LIBC.prctl(ctypes.c_int(option), *(ctypes.c_ulong(value) for value in padded)))


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    source = kind.encode()
    check(LIBC.mount(source, os.fsencode(target), source, ctypes.c_ulong(flags), os.fsencode(options)))


def clone_tree(path: str) -> int:
    """A detached copy of the mounts at `path`."""
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    return syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)


def restrict(tree: int, attributes: int) -> None:
    """Adds attributes to every mount of a tree: what was read-only before stays so."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = AT_EMPTY_PATH | AT_RECURSIVE
    syscall(SYS_MOUNT_SETATTR, tree, b"", flags, wanted, len(wanted))


def attach(tree: int, target: str) -> None:
    flags = MOVE_FROM_FD | MOVE_FOLLOWS_LINKS
    syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(target), flags)
    os.close(tree)


def new_proc() -> int:
    """A detached /proc of this pid namespace."""
    context = syscall(SYS_FSOPEN, b"proc", FSOPEN_CLOEXEC)
    try:
        syscall(SYS_FSCONFIG, context, FSCONFIG_CREATE, None, None, 0)
        return syscall(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC)
    finally:
        os.close(context)


def close_folder(path: str) -> None:
    """Makes the mount at `path` read-only; mounts below it keep their own state."""
    wanted = struct.pack("=QQQQ", ATTR_RDONLY, 0, 0, 0)
    syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(path), 0, wanted, len(wanted))


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
