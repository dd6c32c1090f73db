"""Programs of another processor: qemu starts them, in this sandbox alone or as the machine has it."""

from __future__ import annotations

import fcntl
import os
from typing import Any

from .syscalls import ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY, clone_tree, new_mount, restrict, step


def bring_emulator(emulator: dict[str, Any]) -> int:
    """An open descriptor of the emulator's file, which commands must be allowed to start.

    Where it is the sandbox's own it is registered in this user namespace, by a copy of its mount that nothing
    can be written through, since programs find it as /proc/PID/exe. What is registered is forgotten with the
    last mount of binfmt_misc, so this process keeps one open.
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
    """The same, where a command's own streams and the report of its start, 0 to 3, do not fall on it."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 4)
    os.close(fd)
    return moved
