"""Keeps programs running for as long as a test needs them. Run as a file, with a JSON job as its argument.

Standard input is a pipe that nobody writes to: its other end lies in the process of the tests. When that one
closes it, or dies in whatever way, the keeper ends its programs in reverse order, undoes what they did to the
machine and removes their folders. So an orderly end and a killed test run take one way.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PATIENCE = 30.0
"""Seconds for a program to end by itself."""
STARTING = 120.0
"""Seconds for the file that says that a program is ready."""


def die_with_parent() -> None:
    """In the child: the kernel ends it when even the keeper is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def act(command: list[str], log: Path) -> bool:
    """Whether `command` succeeded."""
    with log.open("ab") as file:
        return subprocess.run(command, stdout=file, stderr=file).returncode == 0


def start(program: dict[str, Any]) -> subprocess.Popen[bytes]:
    with Path(program["log"]).open("ab") as log:
        child = subprocess.Popen(
            program["argv"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )
    ready = program.get("ready")
    until = time.monotonic() + STARTING
    while ready and child.poll() is None and time.monotonic() < until and not Path(ready).exists():
        time.sleep(0.02)
    return child


def unmount(folder: str) -> None:
    """Everything mounted below `folder`, the deepest first; lazily, as its users are gone."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [place for place in mounts if place == folder or place.startswith(f"{folder}/")]
    for place in sorted(inside, key=len, reverse=True):
        subprocess.run(["umount", "--lazy", place], stderr=subprocess.DEVNULL)


def keep(job: dict[str, Any]) -> int:
    """Returns 1 when a program ended by itself before it was asked to."""
    asked = False
    children: list[subprocess.Popen[bytes]] = []

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, ask)
    for command in job["before"]:
        if not act(command, Path(job["programs"][0]["log"])):
            break
    else:
        children.extend(start(program) for program in job["programs"])
    while children and not asked and all(child.poll() is None for child in children):
        readable, _, _ = select.select([0], [], [], 0.2)
        asked = asked or bool(readable)
    for child in reversed(children):
        child.terminate()
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for command in job["afterwards"]:
        act(command, Path(os.devnull))
    for folder in job["remove"]:
        unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if asked else 1


if __name__ == "__main__":
    os.chdir("/")
    sys.exit(keep(json.loads(sys.argv[1])))
