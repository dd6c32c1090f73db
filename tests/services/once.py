"""What is expensive to make and only read: made once a run, by whichever of its processes asks first."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` filled, for all processes of this run; who asks meanwhile waits for it."""
    mine = factory.getbasetemp()
    place = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "once"
    place.mkdir(exist_ok=True)
    folder, made = place / name, place / f"{name}.made"
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed at it
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
