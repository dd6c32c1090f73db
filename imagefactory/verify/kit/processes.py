"""Programs that a kit starts: followed, shown as printable lines, ended. Standard library alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

EXIT_USAGE, EXIT_TOOL, EXIT_IMAGE = 2, 6, 8
LARGEST_LINE = 2000
MOST_LINES = 4000


class Stop(Exception):
    """The run cannot go on. `code` is the exit code, `outcome` the word of the tables, empty for none."""

    def __init__(self, message: str, code: int, outcome: str = "") -> None:
        super().__init__(message)
        self.code, self.outcome = code, outcome


class EndedProcess(NamedTuple):
    """How the run inside ended. `said` are its last lines."""

    returncode: int
    timed_out: bool
    seconds: float
    said: Sequence[str]


def follow(argv: Sequence[str], environ: Mapping[str, str], timeout: float) -> EndedProcess:
    """Runs a command, shows its lines as printable ones, and ends it and all below it when time is over."""
    began, timed_out = time.monotonic(), False
    said: deque[str] = deque(maxlen=40)
    process = subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

    def show() -> None:
        shown = 0
        assert process.stdout is not None
        while line := process.stdout.readline(LARGEST_LINE * 4):
            text = clean(line)
            if not text:
                continue
            said.append(text)
            shown += 1
            if shown <= MOST_LINES:
                say(text)

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    try:
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
    finally:
        end_group(process)
    reader.join(10)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return EndedProcess(code, timed_out, round(time.monotonic() - began, 3), tuple(said))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and what it started. apptainer's own processes stay in its session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ask(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    done = subprocess.run(
        argv, env=dict(environ), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise Stop(f"`{' '.join(argv)}` says: {clean((done.stderr or done.stdout).encode())}", EXIT_TOOL)
    return done.stdout


def must(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(argv, env=dict(environ), capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [text for line in (done.stderr or done.stdout).splitlines() if (text := clean(line))]
        said = lines[-1] if lines else f"it ended with {done.returncode}"
        raise Stop(f"the image cannot be pulled: {said}{_login(said)}", EXIT_IMAGE, "pull-failed")


def _login(said: str) -> str:
    """What mends a pull that a registry refuses to strangers."""
    if not re.search(r"\b(40[13]|denied|unauthorized|forbidden|authentication)\b", said, re.IGNORECASE):
        return ""
    return (
        " (make the repository public, as a new one of ghcr.io is not, or let this machine log in with a "
        "token that may read it: `docker login`, for apptainer `apptainer registry login`)"
    )


def clean(line: bytes) -> str:
    """One printable line: nothing of a stranger steers a terminal."""
    text = "".join(one if one.isprintable() else " " for one in line.decode("utf-8", "replace"))
    return " ".join(text.split())[:LARGEST_LINE]


def say(text: str) -> None:
    """The one place that prints: nothing in a text steers a terminal."""
    shown = "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)
    print(shown, file=sys.stderr, flush=True)
