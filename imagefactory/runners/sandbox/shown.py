"""What of the host a command may only read: an overlay over each folder, so that no file is the host's own.

In a read-only bind mount sockets answer, named pipes take writes, and locks hold for all. In an overlay each
is a file of the overlay's: a socket that nobody listens on, a pipe that nobody reads, locks that nobody sees.

An overlay keeps what it has looked up. So `refresh` makes it forget that, again and again, or a file that the
host replaces would stay the old one.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable

from .syscalls import (
    ATTR_NODEV,
    ATTR_NOSUID,
    ATTR_RDONLY,
    LIBC,
    MNT_DETACH,
    SetupError,
    attach,
    check,
    clone_tree,
    new_mount,
    reconfigure,
    step,
)

READ_ONLY = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
INTERVAL = 1.0  # seconds until what the host has changed is seen


def needs_overlay(source: str) -> bool:
    """Return whether it is a folder or a file. Who mounts a socket or pipe itself wants that very one."""
    mode = os.stat(source).st_mode
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def overlay(source: str, empty: str) -> tuple[int, int]:
    """Return a folder or file in an overlay, to be attached, and the overlay's top, to be refreshed.

    `empty` is an empty folder: an overlay without a place for changes has two layers. Raises SetupError where
    the kernel refuses: it takes no layer of some file systems, nor one in which others are mounted.
    """
    source = os.path.realpath(source)
    folder, name = (source, "") if os.path.isdir(source) else os.path.split(source)
    with step("mount-source", source):
        layers = [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in (folder, empty)]
    os.chdir("/proc/self/fd")  # the shortest names there are, without ':' and ','
    try:
        tree = new_mount("overlay", READ_ONLY, lowerdir=":".join(map(str, layers)))
    except OSError as error:
        with open("/proc/self/mountinfo", "rb") as file:
            inner = mounts_below(folder, file)
        unfit = "its file system cannot be under an overlay"
        why = unfit if error.errno == errno.EINVAL else os.strerror(error.errno or 0)
        why = f"{inner[0]} is mounted in it" if inner else why
        raise SetupError("shown", error.errno or 0, f"{source}: {why}") from error
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


def refresh(top: int) -> None:
    """Let an overlay forget what is not in use, by asking for it as it is."""
    reconfigure(top, "ro")


def mounts_below(folder: str, mountinfo: Iterable[bytes]) -> list[str]:
    """Return the mount points in a folder, of the lines of /proc/self/mountinfo."""
    prefix = os.path.join(folder, "")
    points = (re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split()[4])
              for line in mountinfo)  # fmt: skip
    return sorted(
        {point for point in map(os.fsdecode, points) if point.startswith(prefix) and point != prefix}
    )
