"""Who waits for a container, as a label of it: what a killed process left can be told from the rest."""

from __future__ import annotations

import os
import re

OWNER = "imagefactory.owner"
"""Label of our containers: who waits for them, so that what a killed runner left is found."""


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
        return file.read().strip()


def this_process() -> str:
    """The label's value: this machine since it was booted, and this process by id and beginning."""
    return f"{boot_id()}/{os.getpid()}/{_began(os.getpid())}"


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks since boot; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(owner: str, boot: str) -> bool:
    """Whether a container's owner still runs. Owners of another machine, and none of ours, count as alive."""
    found = re.fullmatch(r"([0-9a-f-]{36})/(\d+)/(\d+)", owner)
    if not found or found[1] != boot:
        return True
    return _began(int(found[2])) == found[3]
