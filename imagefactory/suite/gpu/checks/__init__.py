"""The GPU checks: a file for each tier. `check_<name>(context)` returns a Finding or raises CheckFailure.

A part loads only its file, so an error in one file does not affect the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ...context import Finding
from .. import table
from ..context import GpuContext

# Part -> the file of its checks.
FILES = {
    "driver": "driver",
    "native": "coverage",
    "ptx": "coverage",
    "numbers": "numbers",
    "jit": "numbers",
    "portability": "portability",
    "profile": "profile",
    "several": "several",
    "nodes": "several",
}


def find_check(name: str) -> Callable[[GpuContext], Finding]:
    """Return the function of a check: `check_vector_add` of checks/driver.py for `vector-add`."""
    module: Any = importlib.import_module(f".{FILES[table.part_of(name)]}", __name__)
    function: Callable[[GpuContext], Finding] = getattr(module, f"check_{name.replace('-', '_')}")
    return function
