"""Trials of images that are a folder of this machine, or a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagefactory.model import BuildSpec, CommandResult, LockedWheel, RunSpec
from imagefactory.oci.manifests import Image
from imagefactory.suite import table
from imagefactory.verify import report, suite_files
from tests.made.values import make_base, make_lock, make_target
from tests.services.children import LIMIT, child, kill_group

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
PREFIX = "/opt/env"
PLAIN_CHECKS = tuple(c for c in table.CHECKS if c not in ("unprivileged", *table.ASKED_CHECKS))


def make_definition(**changes: Any) -> BuildSpec:
    given = {
        "name": "pytorch-1.13-cu117",
        "version": "1.13",
        "cuda": "11.7",
        "python": VERSION,
        "checks": PLAIN_CHECKS,
        "requirements": ("torch==1.13.1",),
        **changes,
    }
    wheel = LockedWheel(name="torch", version="1.13.1", filename="torch-1.13.1.whl", sha256="0" * 64, size=1)
    return BuildSpec(
        target=make_target(**given),
        base=make_base(python=VERSION),
        lock=make_lock(python=VERSION, wheels=(wheel,)),
        prefix=PREFIX,
        environment=(),
        labels=(),
    )


def make_trial(
    nonce: str = "5eed", *, timeout: float = 60.0, digest: str = "a", **changes: Any
) -> report.SmokeTest:
    image = Image(
        name="pytorch-1.13-cu117",
        digest="sha256:" + digest * 64,
        manifest="sha256:" + "b" * 64,
        config="sha256:" + "c" * 64,
        size=1,
        layers=(),
        environment=(),
    )
    return report.SmokeTest(image=image, definition=make_definition(**changes), nonce=nonce, timeout=timeout)


@dataclass
class ProcessRunner:
    """Runs a spec as a process of this machine, the mounts as plain paths; `seen` keeps what was asked.

    The time of one that `hangs` is over when its import has begun, however slow the machine is.
    """

    environment: Path
    seen: list[RunSpec] = field(default_factory=list)
    hangs: bool = False

    def require(self) -> str:
        return "1"

    def stop(self) -> None: ...

    def run(self, image: Image, spec: RunSpec) -> CommandResult:
        self.seen.append(spec)
        places = {PREFIX: self.environment, **{mount.target: mount.source for mount in spec.mounts}}
        argv = [self._place(argument, places) for argument in spec.argv]
        began = time.monotonic()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with child(argv, text=True, env={"PATH": os.environ["PATH"]}, **pipes) as process:
            report = places["/imagefactory/report"] / "report.json"
            while self.hangs and process.poll() is None:
                if report.exists() and json.loads(report.read_text())["running"] == "import":
                    break
                time.sleep(0.02)
            try:
                out, err = process.communicate(timeout=0 if self.hangs else spec.timeout)
                timed_out = False
            except subprocess.TimeoutExpired:
                kill_group(process)
                out, err = process.communicate(timeout=LIMIT)
                timed_out = True
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return CommandResult(
            returncode=code, stdout=out, stderr=err, seconds=time.monotonic() - began, timed_out=timed_out
        )

    @staticmethod
    def _place(argument: str, places: dict[str, Path]) -> str:
        for inside, outside in places.items():
            if argument.startswith(inside + "/"):
                return str(outside) + argument[len(inside) :]
        return argument


@dataclass
class ScriptedRunner:
    """An image that writes what `write` makes of the expectations instead of doing any work."""

    write: Callable[[Path, dict[str, Any]], None]
    completed: CommandResult = field(
        default_factory=lambda: CommandResult(returncode=0, stdout="PASSED\n", stderr="", seconds=0.1)
    )
    asked: list[dict[str, Any]] = field(default_factory=list)

    def require(self) -> str:
        return "1"

    def stop(self) -> None: ...

    def run(self, image: Image, spec: RunSpec) -> CommandResult:
        mounts = {mount.target: mount.source for mount in spec.mounts}
        asked = json.loads((mounts[suite_files.EXPECT_MOUNT] / suite_files.EXPECTATIONS_NAME).read_text())
        self.asked.append(asked)
        self.write(mounts[suite_files.REPORT_MOUNT] / suite_files.REPORT_NAME, asked)
        return self.completed
