"""Processes that a test starts and waits for: none outlives it, and no wait is without a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LIMIT = 300.0
"""Seconds after which a wait is given up, on a loaded machine."""


@contextmanager
def child(argv: Sequence[str], *, limit: float = LIMIT, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process, leader of a session of its own, that is killed with its group when the block ends.

    The same happens after `limit` seconds, so that who reads from it comes to an end.
    """
    process = subprocess.Popen(argv, start_new_session=True, **options)
    watch = threading.Timer(limit, kill_group, (process,))
    watch.daemon = True
    watch.start()
    try:
        yield process
    finally:
        watch.cancel()
        kill_group(process)
        process.wait(timeout=LIMIT)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was written and nobody has read
                    pipe.close()


def stdout_of(argv: Sequence[str | os.PathLike[str]], **options: Any) -> str:
    """Return what a command printed. AssertionError with all of its output if it fails."""
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, **options)
    assert ended.returncode == 0, f"{argv}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Not where it was waited for already: its number may be another's by now."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(holds: Callable[[], object], what: str, *, limit: float = LIMIT) -> None:
    """Looks until it holds. `holds` raises where it never will."""
    end = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < end, f"not within {limit:.0f} s: {what}"
        time.sleep(0.02)
