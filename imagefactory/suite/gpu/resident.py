"""How much memory this process has: what a rehearsal measures in place of the GPU's."""

from __future__ import annotations

import os


def read() -> int:
    """Bytes, of proc(5)'s statm."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
