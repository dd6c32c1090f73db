"""The second half of docs/throughput-ml.md: two processes train one network, in a real image of PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.factory import ROOT, Factory
from tests.services.page import codes, read_commands, typed

EXAMPLE = ROOT / "examples/throughput-ml"


def train(factory: Factory, target: str, folder: Path, processes: int, *options: str) -> Any:
    """What as many processes come to, inside the image of `target`."""
    folder.mkdir()
    mounts = (f"--mount={folder}:/work:rw", f"--mount={EXAMPLE}:/app", "--workdir=/work")
    starts = ("torchrun", "--standalone", f"--nproc-per-node={processes}", "/app/train_torch.py", *options)
    for code in (85, 0) if "--leave" in options else (0,):
        factory.run("run", *mounts, target, "--", "/app/leave.sh", *starts, code=code)
    return json.loads((folder / "result.json").read_text())


def compare(factory: Factory, target: str, folder: Path) -> None:
    """Two take the steps of one, and go on where they left. Rounding grows, so the first steps tell."""
    one = train(factory, target, folder / "one", 1, "--steps=40")
    two = train(factory, target, folder / "two", 2, "--steps=40", "--save=20", "--leave")
    assert two["starts"] == [[0, 2], [20, 2]]
    assert [row[:2] for row in two["curve"]] == [pytest.approx(row[:2], abs=0.01) for row in one["curve"]]
    assert two["curve"][-1][2] > 0.6


def follow(factory: Factory, folder: Path) -> None:
    """The page's own commands, from an empty folder, with what is built already."""
    page = read_commands(ROOT / "docs/throughput-ml.md")
    begin = [line for line in page["An image with your code"][0].splitlines() if "catdog-" not in line]
    lines = "\n".join([*begin, *page["Several processes and GPUs"], ""])
    done = subprocess.run(
        ["bash", "-c", typed(lines.replace("~/gpu-imagefactory", str(ROOT)))],
        cwd=folder,
        env=factory.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert set(codes(done.stdout)) == {0}, done.stdout + done.stderr
    assert json.loads((folder / "catdog/two/result.json").read_text())["starts"] == [[0, 2]]
    (job,) = (folder / "catdog").glob("pair-*.sub")
    assert "\nrequest_gpus = 2\n" in job.read_text()
