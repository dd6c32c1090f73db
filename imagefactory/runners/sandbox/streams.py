"""What the two processes read and write: pipes and small files."""

from __future__ import annotations

import json
import os
from typing import Any

from .syscalls import close_all_but


def read_plan(plan_fd: int, status_fd: int) -> dict[str, Any] | None:
    """The plan that the caller writes, None if it died meanwhile. No other descriptor above 2 stays open."""
    close_all_but(plan_fd, status_fd)
    fill_stdio()
    for fd in (plan_fd, status_fd):
        os.set_inheritable(fd, False)
    try:
        plan: dict[str, Any] = json.loads(read_all(plan_fd))
    except ValueError:
        return None
    return plan


def write_file(path: str, text: str, *, folder: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read_file(path: str, *, folder: int | None = None) -> str:
    """All of a small file, as the kernel shows its settings and counts."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    return read_all(fd).decode()


def read_all(fd: int) -> bytes:
    data = read_rest(fd)
    os.close(fd)
    return data


def read_rest(fd: int) -> bytes:
    data = b""
    while chunk := os.read(fd, 65536):
        data += chunk
    return data


def fill_stdio() -> None:
    """Closed ones would be given to the next files that are opened, and those to the command."""
    while (fd := os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)) < 3:
        os.set_inheritable(fd, True)
    os.close(fd)


def forget_stdio(*kept: int) -> None:
    """The command alone holds the pipes, so that their other ends see it close them."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        if fd not in kept:
            os.dup2(null, fd)
    os.close(null)
