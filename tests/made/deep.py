"""Folders nested deeper than Python recurses and paths are long."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

DEEP = 1100  # more than Python recurses; by their names more than 25 times as long as a path may be


class MakeDeep(Protocol):
    """`make_deep`, as a test asks for it by fixture."""

    def __call__(self, top: Path) -> Path: ...


def make_deep(top: Path) -> Path:
    """`DEEP` folders in the new folder `top`, made by descriptors, and a file at the bottom."""
    top.mkdir(parents=True)
    name = "d" * 100
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(DEEP):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    file = os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=here)
    os.write(file, b"bottom")
    os.close(file)
    os.close(here)
    return top
