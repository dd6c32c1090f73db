"""Slurm's commands where they are missing, fail or do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.errors import ToolError
from imagefactory.schedulers.slurm.nodes import run
from tests.made.programs import Program


def test_what_it_prints_or_why_not(programs: Path, program: Program) -> None:
    environ = {"PATH": str(programs)}
    with pytest.raises(ToolError) as missing:
        run(["squeue"], environ)
    assert missing.value.code == "tool-missing"
    assert "squeue" in missing.value.message
    assert "login node" in missing.value.hint
    program("squeue", "1|RUNNING\n")
    assert run(["squeue"], environ) == "1|RUNNING\n"
    program("squeue", fails="first\nsqueue: error: \x1b[2JUnable to contact slurm controller\n", code=1)
    with pytest.raises(ToolError) as caught:
        run(["squeue"], environ)
    assert caught.value.code == "slurm-command-failed"
    assert "Unable to contact" in caught.value.message
    program("squeue", code=3)
    with pytest.raises(ToolError) as caught:
        run(["squeue"], environ)
    assert caught.value.code == "slurm-command-failed"
    assert "exit code 3" in caught.value.message


def test_one_that_does_not_answer(programs: Path) -> None:
    (programs / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    (programs / "squeue").chmod(0o755)
    with pytest.raises(ToolError) as caught:
        run(["squeue"], {"PATH": f"{programs}:/bin:/usr/bin"}, timeout=0.2)
    assert caught.value.code == "slurm-timeout"
    assert "squeue" in caught.value.message
