"""Slurm's commands where they are missing, fail or do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.errors import ToolError
from imagefactory.pools.slurm.commands import run
from tests.made.programs import Program


def test_what_it_prints_or_why_not(programs: Path, program: Program) -> None:
    environ = {"PATH": str(programs)}
    with pytest.raises(ToolError, match="squeue is not here") as missing:
        run(["squeue"], environ)
    assert "login node" in missing.value.hint
    program("squeue", "1|RUNNING\n")
    assert run(["squeue"], environ) == "1|RUNNING\n"
    program("squeue", fails="first\nsqueue: error: \x1b[2JUnable to contact slurm controller\n", code=1)
    with pytest.raises(ToolError, match=r"squeue cannot do it: squeue: error: .*Unable to contact"):
        run(["squeue"], environ)
    program("squeue", code=3)
    with pytest.raises(ToolError, match="it ended with 3"):
        run(["squeue"], environ)


def test_one_that_does_not_answer(programs: Path) -> None:
    (programs / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    (programs / "squeue").chmod(0o755)
    with pytest.raises(ToolError, match="squeue does not answer within 0 s"):
        run(["squeue"], {"PATH": f"{programs}:/bin:/usr/bin"}, timeout=0.2)
