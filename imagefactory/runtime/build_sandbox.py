"""The sandbox for mmdebstrap and scripts of Debian packages, as root of separate ids (sandbox/build.py)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from imagefactory.errors import BuildError, ImagefactoryError, ToolError
from imagefactory.runtime.emulator import Emulator
from imagefactory.runtime.limits import RunLimits, decide_limits, format_amount, read_capacity
from imagefactory.runtime.sandbox.syscalls import ARCHITECTURES
from imagefactory.runtime.unshare import SANDBOX, explain, read_caller

TREE, INPUT = "tree", "input"
"""Directories of a build. Inside, the first is /tmp, and the second is /input, read-only."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdMaps:
    """The lines for a user namespace's uid_map and gid_map. If `delegated`, newuidmap must write them."""

    uid_map: str
    gid_map: str
    delegated: bool


def prepare_directory(directory: Path) -> None:
    """Create the directories of a build, for ids that belong to no user and cannot reach its files."""
    directory.chmod(0o700)
    for name, mode in ((TREE, 0o1777), (INPUT, 0o755)):
        (directory / name).mkdir(exist_ok=True)
        (directory / name).chmod(mode)  # whatever the umask


class BuildProcess:
    """A running build in a prepared `folder`. Its stdout and stderr are pipes."""

    def __init__(
        self,
        directory: Path,
        argv: tuple[str, ...],
        *,
        environment: Mapping[str, str],
        ids: IdMaps,
        emulator: Emulator | None = None,
    ) -> None:
        caller = read_caller()
        if caller.machine not in ARCHITECTURES:
            raise ToolError(
                "processor-unsupported",
                f"the build sandbox does not support the processor '{caller.machine}'",
                hint=f"build on {' or '.join(sorted(ARCHITECTURES))}",
            )
        # The disk's reserve limits what is written: counting the files of a whole base would slow it down.
        self.limits = replace(decide_limits({}, read_capacity(directory)), scratch=None)
        plan = {
            "argv": argv,
            "environment": tuple(environment.items()),
            **asdict(ids),
            "limits": asdict(self.limits),
            "caller": caller.pid,
            "machine": caller.machine,
            "emulator": asdict(emulator) if emulator and emulator.own else None,
        }
        plan_out, plan_in = os.pipe()
        status_out, status_in = os.pipe()
        inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SANDBOX), str(plan_out), str(status_in), "build"],
                cwd=directory,
                env={**inherited, "PATH": SYSTEM_PATH},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(plan_out, status_in),
                start_new_session=True,  # the caller handles the terminal's Ctrl-C
            )
        except BaseException:
            os.close(plan_in)
            os.close(status_out)
            raise
        finally:
            os.close(plan_out)
            os.close(status_in)
        with contextlib.suppress(BrokenPipeError), os.fdopen(plan_in, "wb") as file:
            file.write(json.dumps(plan).encode())
        self._status = os.fdopen(status_out, "rb")

    def wait(self) -> int:
        """Return the exit code. Raises ToolError if there is no sandbox, BuildError at a limit."""
        with self._status as file:
            text = file.read()
        code = self.process.wait()
        if text:
            raise explain_failure(json.loads(text), self.limits)
        return code

    def kill(self) -> None:
        """End the build with all its processes."""
        self.process.kill()
        self.process.wait()
        self._status.close()


def explain_failure(report: Mapping[str, Any], limits: RunLimits) -> ImagefactoryError:
    """Return the error for the sandbox's report: a limit, or a failed step."""
    name = str(report.get("over", ""))
    if name.startswith("reserve"):
        return BuildError(
            "build-disk-full",
            "the build was stopped: its disk is nearly full",
            hint="free some space, or set TMPDIR to a directory on another disk",
        )
    if name:
        return BuildError(
            "build-limit-reached",
            f"the build was stopped: it reached the limit {format_amount(name, getattr(limits, name))}",
            hint="build on a machine with more resources; if they should suffice, the package is suspicious",
        )
    return explain(str(report["step"]), int(report["errno"]), str(report["detail"]))
