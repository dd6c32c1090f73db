"""A real HTCondor pool from its access point, as an ordinary user: what it has, sweeps by the real command,
and every way in which a job can end. No job meets a GPU, so none is verified. Where one is wanted, the image
brings the tests' libcuda and the pool is told to have that device; nobody's settings trust who signs.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions.verdicts import find_in, local_place, read_verification_policy
from imagefactory.schedulers.inventory import read_inventory
from imagefactory.schedulers.sweep_file import read_sweep
from imagefactory.trust.verdict import VerdictStatus
from tests.engines.pool_ground import PoolGround, make_ground
from tests.engines.pool_sweeps import BAD, SweepRun, at_once, node, somebody_else, submit, wait_for
from tests.services import libcuda
from tests.services.condor import CondorPool


@pytest.fixture(scope="module")
def ground(pool: CondorPool) -> PoolGround:
    made = make_ground(pool)
    made.run("key", "create", "throwaway")
    return made


WORDS = {
    "plain": "no-gpu",
    "good": "not-tested",  # all of the suite passed, and the machine has no driver
    "wrong-numbers": "wrong-numbers",
    "no-kernel": "no-kernel",
    "driver-too-old": "driver-too-old",
    "load-failed": "load-failed",
    "another-gpu": "infrastructure",
    "garbage": "infrastructure",
    "empty": "infrastructure",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """All that need nobody, at once, as each waits for its machine alone.

    `words`: all that ends by itself, on the machine whose device the images' libcuda plays. `simulated`:
    images on a GPU that HTCondor simulates. `waiting`: another's job has its GPU. `full`: its machine's disk
    is full. `hanging`: over its run limit. `failing`: to be gone on with.
    """

    words: SweepRun
    simulated: SweepRun
    waiting: SweepRun
    full: SweepRun
    hanging: SweepRun
    failing: SweepRun


@pytest.fixture(scope="module")
def sweeps(ground: PoolGround) -> Iterator[Sweeps]:
    a100, only = ("--capability", "8.0"), ("--machine", "stand*,!a100", "--jobs", "3")
    with somebody_else(ground.pool) as leaves:
        yield Sweeps(
            words=submit(ground, tuple(WORDS), "--capability", "9.0", "--retries", "1", *only),
            simulated=submit(ground, ("plain", "good"), *a100),
            waiting=submit(ground, ("plain",), "--capability", "7.0", "--idle-limit", "3s"),
            full=submit(ground, ("plain",), "--capability", "7.5", "--retries", "1", "--held-limit", "1s"),
            hanging=submit(ground, ("hang",), *a100, "--run-limit", "5s"),
            failing=submit(ground, ("plain", "garbage"), *a100, "--retries", "0", "--ignore-rule", "queued"),
        )
        leaves()


@pytest.fixture(scope="module")
def words(sweeps: Sweeps) -> SweepRun:
    return sweeps.words


def test_an_ordinary_user_sees_the_pool_as_it_is(pool: CondorPool) -> None:
    folder = pool.home / "looks"
    folder.mkdir()
    pool.own(folder)
    table = pool.imagefactory("gpus", "-o", "inventory.json", folder=folder).stdout
    assert re.search(r"^8\.0 .*A100-SXM4-40GB.* 1 +1 +1$", table, re.MULTILINE), table
    inventory = read_inventory(folder / "inventory.json")
    found = {machine.name: machine.gpus for machine in inventory.machines}
    assert {name: {(gpu.capability, gpu.cuda) for gpu in gpus} for name, gpus in found.items()} == {
        "v100.pool.test": {("7.0", "12.2")},
        "full.pool.test": {("7.5", "12.4")},
        "a100.pool.test": {("8.0", "12.4")},
        "standin.pool.test": {("9.0", "12.4")},
    }
    (device,) = found["standin.pool.test"]
    assert (device.name, device.driver, device.mig) == (libcuda.NAME, "550.54.15", False)
    again = pool.imagefactory("gpus", "--inventory", "inventory.json", folder=folder).stdout
    assert again.splitlines()[:6] == table.splitlines()[:6]


def test_every_word_comes_back_from_a_job(words: SweepRun) -> None:
    found = words.ends()
    outcomes = {trick: found[node(words.ground, trick)]["outcome"] for trick in WORDS}
    assert outcomes == WORDS, json.dumps(found, indent=1)
    assert at_once(found.values(), "submitted") <= 3


def test_what_the_pool_broke_is_tried_again_and_kept(words: SweepRun) -> None:
    found = words.ends()
    for trick in ("garbage", "empty"):
        name = node(words.ground, trick)
        assert len(found[name]["attempts"]) == 2
        for kept in ("attempt-1", "attempt-2"):
            assert (words.folder / "nodes" / name / kept / "result/run.json").exists()
            assert (words.folder / "nodes" / name / kept / "out").exists()
    answered = [trick for trick in WORDS if trick not in ("garbage", "empty")]
    assert {len(found[node(words.ground, trick)]["attempts"]) for trick in answered} == {1}


def test_collected_once_and_believed_by_nobody(words: SweepRun) -> None:
    words.ends()
    rows = words.collect(code=BAD)
    signed = {name for name, row in rows.items() if row["keyid"]}
    spoken = ("wrong-numbers", "no-kernel", "load-failed")  # where a device was met
    assert signed == {node(words.ground, trick) for trick in spoken}
    again = words.collect(code=BAD)
    assert {name: row["keyid"] for name, row in again.items()} == {
        name: row["keyid"] for name, row in rows.items()
    }
    assert {row["outcome"] for row in rows.values()}.isdisjoint({"verified"})
    factory = words.ground.factory
    court = read_verification_policy(factory, datetime.now(UTC) + timedelta(minutes=1))
    for one in read_sweep(words.folder).nodes:
        judged = find_in(factory, local_place(factory, "tiny"), one.image.subject, court).judged
        standing = [(found.standing, found.proves) for found in judged]
        assert standing == ([(VerdictStatus.WRONG_KEY, False)] if one.name in signed else [])


def test_a_simulated_gpu_proves_nothing(sweeps: Sweeps) -> None:
    """Several sweeps at once, and none takes another's results."""
    ground, found = sweeps.simulated.ground, sweeps.simulated.ends()
    plain, good = node(ground, "plain", "8.0"), node(ground, "good", "8.0")
    assert {name: row["outcome"] for name, row in found.items()} == {
        plain: "no-gpu",
        good: "infrastructure",  # its libcuda speaks of another GPU than the startd
    }
    rows = sweeps.simulated.collect(code=BAD)
    assert [row["keyid"] for row in rows.values()] == ["", ""]
    assert found[plain]["attempts"][-1]["machine"] == "a100.pool.test"


def test_one_that_hangs_is_ended_by_the_run_limit(sweeps: Sweeps) -> None:
    (found,) = sweeps.hanging.ends().values()
    assert (found["outcome"], found["reason"]) == ("timeout", "stopped after 5s, its limit on the pool")
    assert len(found["attempts"]) == 1


def test_waiting_in_vain_ends_as_no_match(sweeps: Sweeps) -> None:
    (found,) = sweeps.waiting.ends().values()
    assert found["outcome"] == "no-match", found
    assert len(found["attempts"]) == 1


def test_a_full_disk_on_the_slot_is_no_word_on_the_image(sweeps: Sweeps) -> None:
    (found,) = sweeps.full.ends().values()
    assert found["outcome"] in ("infrastructure", "held"), found
    assert len(found["attempts"]) == 2
    assert "No space left" in found["reason"] or "space" in found["reason"], found


def test_a_black_hole_is_left_out_and_decides_no_cell(ground: PoolGround) -> None:
    """It takes both jobs, since its driver is said to be the oldest, and fails them."""
    tricks = ("no-kernel", "wrong-numbers")
    with ground.pool.black_hole() as hole:
        ground.run("gpus", "-o", "inventory.json")
        path = ground.root / "inventory.json"
        document = json.loads(path.read_text())
        (machine,) = (one for one in document["machines"] if one["name"] == hole)
        machine["gpus"][0] |= {"driver": "535.54.03", "cuda": "12.2"}
        path.write_text(json.dumps(document))
        options = ("--inventory", "inventory.json", "--ignore-rule", "uncollected")
        sweep = submit(ground, tricks, "--capability", "9.0", *options)
        found = sweep.ends()
    assert {trick: found[node(ground, trick)]["outcome"] for trick in tricks} == {one: one for one in tricks}
    machines = {tuple(one["machine"] for one in row["attempts"]) for row in found.values()}
    assert machines == {(hole, "standin.pool.test")}
    (told,) = sweep.status()["machines"]
    assert (told["machine"], told["excluded"]) == (hole, True)
    assert {one["node"] for one in told["faults"]} == set(found)
    assert all("No space left" in one["reason"] for one in told["faults"])


def test_held_by_a_person(ground: PoolGround) -> None:
    sweep = submit(ground, ("hang",), "--capability", "9.0", "--held-limit", "1s")
    job = sweep.job(node(ground, "hang"))
    ground.pool.run(["condor_hold", "-reason", "a look at it", job])
    (found,) = sweep.ends().values()
    assert found["outcome"] == "held", found
    assert "a look at it" in found["reason"]


def test_dagman_is_killed_and_the_sweep_goes_on(ground: PoolGround) -> None:
    """The schedd starts it again; a job that a person removes has not been tested."""
    sweep = submit(ground, ("hang",), "--capability", "9.0")
    job = sweep.job(node(ground, "hang"))
    before = dagmans(ground.pool)
    for pid in before:
        with suppress(ProcessLookupError):  # what it starts is called so too until it is another program
            os.kill(pid, signal.SIGKILL)
    wait_for("another dagman", lambda: bool(set(dagmans(ground.pool)) - set(before)))
    assert sweep.job(node(ground, "hang")) == job
    ground.pool.run(["condor_rm", job])
    (found,) = sweep.ends().values()
    assert found["outcome"] == "not-tested", found
    assert "removed" in found["reason"]


def dagmans(pool: CondorPool) -> list[int]:
    """Process ids of the pool's dagmans, on this machine."""
    mine = Path(f"/proc/{pool.pid}/ns/mnt").readlink()

    def is_one(path: Path) -> bool:
        try:
            return (path / "comm").read_text().strip() == "condor_dagman" and (
                path / "ns/mnt"
            ).readlink() == mine
        except OSError:  # it has just ended
            return False

    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_one(path)]


def test_what_failed_is_taken_up_again_and_nothing_else(sweeps: Sweeps) -> None:
    """A rescue DAG: what has its outcome is not run a second time."""
    sweep, ground = sweeps.failing, sweeps.failing.ground
    plain, garbage = node(ground, "plain", "8.0"), node(ground, "garbage", "8.0")
    found = sweep.ends()
    assert {name: row["outcome"] for name, row in found.items()} == {
        plain: "no-gpu",
        garbage: "infrastructure",
    }
    assert (sweep.folder / "sweep.dag.rescue001").exists()
    first = sweep.dag
    ground.run("sweep", "start", "--scheduler", "htcondor", "--dir", ground.pool.there(sweep.folder))
    assert sweep.dag != first
    found = sweep.ends()
    assert {name: len(row["attempts"]) for name, row in found.items()} == {plain: 1, garbage: 2}
    assert {name: row["outcome"] for name, row in found.items()} == {
        plain: "no-gpu",
        garbage: "infrastructure",
    }


def planned(ground: PoolGround) -> dict[str, Any]:
    asked = (
        *("sweep", "start"),
        ground.name("hang"),
        "--scheduler",
        "htcondor",
        "--image-format",
        "sif",
        "--capability",
        "9.0",
    )
    found = json.loads(ground.run(*asked, "--dry-run", "--json", err=False))
    assert isinstance(found, dict)
    return found


def test_cancelled_jobs_leave_the_queue(ground: PoolGround) -> None:
    """What a sweep has queued is not queued again until it is cancelled."""
    sweep = submit(ground, ("hang",), "--capability", "9.0")
    sweep.job(node(ground, "hang"))
    made = planned(ground)
    (left,) = (row for row in made["skipped"] if row["capability"] == "9.0")
    assert left["rule"] == "queued"
    assert left["reason"].startswith(f"queued in sweep {sweep.id}, since ")
    assert made["queued"] == []
    ground.run("sweep", "cancel", sweep.id)
    wait_for("the end of dagman", sweep.is_left_alone)
    made = planned(ground)
    assert [row["capability"] for row in made["queued"]] == ["9.0"]
    assert any(f"sweep {sweep.id} stopped without an answer" in note for note in made["notes"])
    jobs = ["condor_q", "-af", "ClusterId"]
    wait_for("an empty queue", lambda: not ground.pool.run(jobs).stdout.split())
    (found,) = sweep.nodes().values()
    assert found["outcome"] == "not-tested", found
    ground.run("sweep", "start", "--scheduler", "htcondor", "--dir", ground.pool.there(sweep.folder))
    sweep.job(node(ground, "hang"))
    assert len(sweep.nodes()[node(ground, "hang")]["attempts"]) == 2
    ground.run("sweep", "cancel", sweep.id)
    wait_for("the end of dagman", sweep.is_left_alone)
