"""Slurm's own commands, as the user runs them: scontrol, squeue, sbatch, scancel, srun."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from imagefactory.errors import ToolError
from imagefactory.verify.suite_report import clean

TIMEOUT = 60.0
AWAY = "run this on a login node of the cluster, or use --inventory FILE"


def run(
    argv: Sequence[str], environ: Mapping[str, str], folder: Path | None = None, timeout: float = TIMEOUT
) -> str:
    """What it printed. Raises ToolError where it is missing, fails or does not answer."""
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={**environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise ToolError("tool-missing", f"{argv[0]} is not installed on this machine", hint=AWAY) from error
    except subprocess.TimeoutExpired as error:
        raise ToolError(
            "slurm-timeout", f"{argv[0]} did not answer within {timeout:.0f} s", hint="try again"
        ) from error
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        words = (done.stderr.decode("utf-8", "replace") or said).strip().splitlines()
        why = clean(words[-1]) if words else f"exit code {done.returncode}"
        raise ToolError(
            "slurm-command-failed",
            f"{argv[0]} failed: {why}",
            hint="check that sinfo works here; if not, " + AWAY,
        )
    return said
