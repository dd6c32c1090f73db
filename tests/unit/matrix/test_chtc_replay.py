"""CHTC's own run of its gpu-compatibility-testing, planned again: no valid tuple is lost.

The run is recorded in chtc_tuples_2022.csv of the folder that FACTORY_TEST_FACTS names: 240 tuples, 240 GPU
jobs, 60 valid. Two things are not found out here, and the tests say so by how they ask:

- Where tables say nothing of a version, the recorded "Environment Resolution Failure" stands for the solver
  (`--recorded`): a plan of rows solves nothing.
- The pool of 2022 is known by that run alone. Of each capability its inventory here has one GPU, whose driver
  takes the newest CUDA that the run recorded as matched there; so what "Failure to Match" skips is its own
  record, asked as the tool asked (`--strict-drivers`): it is restated and not foretold. On a pool of today an
  inventory of today says it.

The pages give these figures: 155 skipped by what tables know, 15 and 10 by the record, 60 left.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from imagefactory.schedulers.inventory import write_inventory
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.versions import natural
from tests.made.command import Call

VARIABLE = "FACTORY_TEST_FACTS"
VALID, UNSOLVED, UNMATCHED = "valid", "Environment Resolution Failure", "Failure to Match"


@pytest.fixture
def recorded() -> Path:
    named = os.environ.get(VARIABLE, "")
    if not named:
        pytest.skip(f"not run: ${VARIABLE} names no folder with recorded runs")
    file = Path(named) / "chtc_tuples_2022.csv"
    if not file.is_file():
        pytest.fail(f"${VARIABLE}: there is no {file}")
    return file


@pytest.fixture
def pool_of_2022(recorded: Path, tmp_path: Path) -> Path:
    """What the recorded matches show of the pool, as an inventory."""
    newest: dict[str, str] = {}
    with recorded.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["outcome"] != UNMATCHED:
                known = newest.get(row["capability"], "0")
                newest[row["capability"]] = max(known, row["cuda"], key=natural)
    machines = tuple(
        PoolMachine(name=f"sm{capability}", attributes={}, start="", gpus=(_gpu(capability, cuda),))
        for capability, cuda in newest.items()
    )
    place = tmp_path / "pool-of-2022.json"
    write_inventory(place, Inventory(pool="", taken=datetime(2022, 8, 1, tzinfo=UTC), machines=machines))
    return place


def _gpu(capability: str, cuda: str) -> PoolGpu:
    return PoolGpu(
        id="", uuid="", name="", capability=capability, memory=0, driver="", cuda=cuda, mig=False, free=True
    )


def test_at_most_sixty_of_the_240_are_queued_and_no_valid_one_is_lost(
    recorded: Path,
    pool_of_2022: Path,
    call: Call,
) -> None:
    said = call(
        "plan",
        "--tuples",
        str(recorded),
        "--inventory",
        str(pool_of_2022),
        "--recorded",
        "--strict-drivers",
        "--json",
    )
    rows = said.json()["rows"]
    queued = [row for row in rows if row["status"] == "accepted"]
    assert len(rows) == 240
    assert len(queued) <= 60
    assert Counter(row["outcome"] for row in rows)[VALID] == 60
    assert Counter(row["outcome"] for row in queued)[VALID] == 60
    stood_in = [row for row in rows if row["rule"] == "unsolvable"]
    assert stood_in
    assert {row["outcome"] for row in stood_in} == {UNSOLVED}
    assert {row["reason"] for row in stood_in} == {f"recorded as '{UNSOLVED}', not solved here"}
    assert {row["outcome"] for row in rows if row["rule"] == "no-match"} == {UNMATCHED}
    skipped = Counter(row["rule"] for row in rows if row["status"] == "skipped")
    assert (skipped["unsolvable"], skipped["no-match"], len(queued)) == (16, 10, 60)


def test_what_tables_know_prunes_most_of_it_before_any_record_is_believed(
    recorded: Path,
    call: Call,
) -> None:
    rows = call("plan", "--tuples", str(recorded), "--json").json()["rows"]
    skipped = [row for row in rows if row["status"] == "skipped"]
    assert VALID not in {row["outcome"] for row in skipped}
    assert len(skipped) >= 150
    assert not any("recorded" in row["reason"] for row in rows)
