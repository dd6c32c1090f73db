"""docs/throughput-ml.md as a newcomer types it: each command of the page, on a real HTCondor and Slurm.

The image is made on this machine, which reaches a package index, and goes to the access point with its store.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.services import slurm
from tests.services.condor import BUILDS, CondorPool
from tests.services.condor import PATH as PLAIN
from tests.services.factory import ROOT, lend
from tests.services.page import codes, read_commands, typed

COMMANDS = read_commands(ROOT / "docs/throughput-ml.md")
IMAGE, RUN, CONDOR, SLURM = (
    "An image with your code",
    "A run that can be ended",
    "An ensemble on HTCondor",
    "A sweep on Slurm",
)
PATH = f"/opt/imagefactory/{BUILDS}/bin:{PLAIN}"
LIMIT = 300.0


def wait_for(what: str, happened: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < until, f"{what} did not come"
        time.sleep(0.2)


def result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def lines_of_plot(folder: Path) -> int:
    plot = ElementTree.parse(folder / "curves.svg")
    return len([one for one in plot.iter("{http://www.w3.org/2000/svg}polyline") if one.get("stroke-width")])


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """Whoever follows the page. `home` is a folder of the access point, seen from here: no other test's
    settings are there."""

    pool: CondorPool
    home: Path

    @property
    def root(self) -> Path:
        return self.home / "catdog"

    def type(self, block: str, folder: Path, **more: str) -> str:
        """What a block says, each line of which ends well."""
        environ = {"PATH": PATH, "HOME": self.pool.there(self.home), **more}
        done = self.pool.run(["bash", "-c", typed(block)], folder=folder, **environ)
        said: str = done.stdout + done.stderr
        assert codes(said) == [0] * len(block.splitlines()), said
        return said


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, base_store: Path) -> Iterator[Path]:
    """A folder with `catdog`, where the image was made and a run of it ended and went on, and its `store`."""
    folder = tmp_path_factory.mktemp("throughput")
    factory = lend(base_store, folder)
    environ = factory.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def type_here(block: str, folder: Path) -> list[int]:
        text = typed(block.replace("~/gpu-imagefactory", str(ROOT)))
        done = subprocess.run(
            ["bash", "-c", text], cwd=folder, env=environ, capture_output=True, text=True, timeout=600
        )
        print(done.stdout, done.stderr)  # shown where a test fails
        return codes(done.stdout)

    assert type_here(COMMANDS[IMAGE][0], folder) == [0] * 4
    assert type_here(COMMANDS[RUN][0], folder / "catdog") == [0, 85, 0]
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def newcomer(made: Path, pool: CondorPool) -> Iterator[Newcomer]:
    home, settings = pool.home / "throughput", pool.home / ".condor/user_config"
    store = home / ".local/share/imagefactory/store"
    shutil.copytree(made / "store", store, symlinks=True, ignore=shutil.ignore_patterns("unpacked"))
    shutil.copytree(made / "catdog", home / "catdog")
    settings.parent.mkdir(exist_ok=True)
    settings.write_text('APPEND_REQUIREMENTS = (Machine =!= "full.pool.test")\n')  # whose disk is full
    pool.own(home, settings)
    yield Newcomer(pool=pool, home=home)
    settings.unlink()
    shutil.rmtree(home)


def test_every_command_of_the_page_is_run() -> None:
    """What is not here, tests/e2e/pairs.py runs."""
    assert {heading: len(blocks) for heading, blocks in COMMANDS.items()} == {
        IMAGE: 1,
        RUN: 1,
        CONDOR: 3,
        SLURM: 3,
        "Several processes and GPUs": 2,
    }


@pytest.fixture(scope="module")
def sweep(newcomer: Newcomer, cluster: CondorPool) -> Path:
    """The folder of a sweep of which a run was evicted: Slurm waits a while before it starts it again."""
    begin, evict, _ = COMMANDS[SLURM]
    folder = newcomer.root / "sweep"
    environ = slurm.environ() | {"PATH": f"{slurm.BIN}:{PATH}"}
    said = newcomer.type(begin, newcomer.root, **environ)
    assert "catdog-0.10.2-cpu.sbatch: no errors" in said
    wait_for("the first checkpoint", (folder / "run-1/checkpoint.npz").exists)
    newcomer.type(evict, folder, **environ)
    return folder


def test_an_ensemble_loses_a_machine_and_goes_on(newcomer: Newcomer, sweep: Path) -> None:
    begin, evict, look = COMMANDS[CONDOR]
    folder = newcomer.root / "ensemble"
    said = newcomer.type(begin, newcomer.root)
    assert "catdog-0.10.2-cpu.sub: no errors" in said
    log = folder / "run-1/job.log"
    sent = "Finished transferring output files"
    wait_for("the first checkpoint", lambda: log.exists() and sent in log.read_text())
    newcomer.type(evict, folder)
    said = newcomer.type(look, folder)
    assert "Job was evicted" in said
    assert [start for start, _ in result(folder / "run-1")["starts"]] == [0, 100]
    # Where it ran and how often it was ended changes nothing of what comes out.
    never = result(newcomer.root / "try")
    assert result(folder / "run-1")["curve"] == [pytest.approx(row, abs=0.02) for row in never["curve"]]
    rows = table(folder)
    assert sorted(row["seed"] for row in rows) == ["1", "2", "3", "4"]
    assert all(float(row["accuracy"]) > 0.8 for row in rows)
    assert "all 4 runs together: 0.9" in said
    assert lines_of_plot(folder) == 4


def test_a_sweep_loses_its_node_and_goes_on(newcomer: Newcomer, sweep: Path) -> None:
    slurm.wait_for_jobs(newcomer.pool, sweep)
    assert "all 3 runs together: 0." in newcomer.type(COMMANDS[SLURM][2], sweep)
    (first, _), (again, _) = result(sweep / "run-1")["starts"]
    assert first == 0
    assert again >= 50
    assert sorted(row["lr"] for row in table(sweep)) == ["0.001", "0.003", "0.01"]
    assert lines_of_plot(sweep) == 3
