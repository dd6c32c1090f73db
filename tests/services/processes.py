"""Programs under a keeper: started, waited for, ended; their log is told when a start fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

KEEPER = Path(__file__).with_name("keeper.py")
ENGINES = Path(__file__).parents[2] / ".engines"
OWN = ("docker/usr/sbin", "docker/usr/bin", "apptainer/usr/bin", "cosign/usr/bin")
LIMIT = 300.0
"""Seconds that a service may take to answer, on a loaded machine."""


class ServiceError(Exception):
    """A service is missing or did not start. Tests fail with it; they are never skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    argv: tuple[str, ...]
    ready: Path | None = None
    """The file whose appearance says that the next program may start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Programs that belong together, started in order and ended in reverse."""

    folder: Path
    """Their logs lie here, as `<program>.log`, and stay."""
    programs: tuple[Program, ...]
    ready: Callable[[], bool]
    environ: Mapping[str, str] = field(default_factory=dict)
    before: tuple[tuple[str, ...], ...] = ()
    """Commands that prepare the machine for the programs."""
    afterwards: tuple[tuple[str, ...], ...] = ()
    """Commands that undo it, and what the programs did to the machine."""
    remove: tuple[Path, ...] = ()


def search_path() -> str:
    """PATH with the engines of `install` first and the system's folders for root last."""
    own = [str(ENGINES / part) for part in OWN if (ENGINES / part).is_dir()]
    return os.pathsep.join([*own, os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def find(program: str) -> str:
    for folder in search_path().split(os.pathsep):
        if os.access(Path(folder, program), os.X_OK) and not Path(folder, program).is_dir():
            return str(Path(folder, program))
    raise ServiceError(f"{program} is not on this machine: run ./setup.sh --tests as root")


def flags(values: Mapping[str, object]) -> tuple[str, ...]:
    """`--name=value` of each."""
    return tuple(f"--{name}={value}" for name, value in values.items())


def need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise ServiceError(f"{what} needs root: run the tests as root")


def log_of(folder: Path, program: str) -> Path:
    return folder / f"{Path(program).name}.log"


@contextmanager
def running(job: Job) -> Iterator[None]:
    """The programs of `job`, answering. Raises ServiceError, with the ends of their logs."""
    job.folder.mkdir(parents=True, exist_ok=True)
    order = {
        "programs": [
            {
                "argv": list(program.argv),
                "log": str(log_of(job.folder, program.argv[0])),
                "ready": str(program.ready) if program.ready else None,
            }
            for program in job.programs
        ],
        "before": [list(command) for command in job.before],
        "afterwards": [list(command) for command in job.afterwards],
        "remove": [str(folder) for folder in job.remove],
    }
    keeper = subprocess.Popen(
        [sys.executable, str(KEEPER), json.dumps(order)],
        env={**os.environ, "PATH": search_path(), **job.environ},
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is for the tests; what it ends closes the pipe
    )
    assert keeper.stdin is not None
    try:
        until = time.monotonic() + LIMIT
        while not job.ready():
            ended = keeper.poll() is not None
            if ended or time.monotonic() > until:
                raise ServiceError(_tell(job, "ended at once" if ended else f"no answer in {LIMIT:.0f} s"))
            time.sleep(0.05)
        yield
    finally:
        keeper.stdin.close()
        keeper.wait()


def _tell(job: Job, what: str) -> str:
    lines = [f"{job.programs[-1].argv[0]}: {what}"]
    for program in job.programs:
        log = log_of(job.folder, program.argv[0])
        lines.append(f"--- {' '.join(program.argv)}\n--- {log}")
        lines.extend(log.read_text(errors="replace").splitlines()[-25:] if log.exists() else [])
    return "\n".join(lines)
