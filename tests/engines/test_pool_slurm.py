"""Sweeps on a real Slurm by the real command, and every way in which a job can end. The GPU of h1 is made up,
and what comes of it is signed by a key that nobody's settings trust; the other nodes have no driver.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from imagefactory.actions.verdicts import find_in, local_place, read_verification_policy
from imagefactory.schedulers.slurm.nodes import ProbedGpu, write_probed
from imagefactory.schedulers.sweep_file import read_sweep
from imagefactory.settings.choices import SLURM
from imagefactory.trust.verdict import VerdictStatus, nodes_of
from tests.engines.pool_ground import PoolGround, make_ground
from tests.engines.pool_sweeps import BAD, SweepRun, at_once, node, submit, wait_for
from tests.services import libcuda, slurm
from tests.services.condor import CondorPool
from tests.services.gpu_host import make_host
from tests.services.tier import many

TRICKS = {
    "plain": "no-gpu",
    "good": "verified",
    "wrong-numbers": "wrong-numbers",
    "no-kernel": "no-kernel",
    "driver-too-old": "driver-too-old",
    "another-gpu": "infrastructure",
}
COPIES = many(4, 200)
"""How many targets more there are, each tried on three kinds of GPU at once: by night 600 cells."""


@pytest.fixture(scope="module")
def ground(cluster: CondorPool) -> Iterator[PoolGround]:
    made = make_ground(cluster, cluster.home / "slurm", (*TRICKS, "hang", "nodes"), COPIES)
    made = replace(made, environ={**made.environ, **slurm.environ()})
    made.run("key", "create", "throwaway")
    yield made
    cluster.run(["scancel", "--me"], folder=made.root, **slurm.environ())
    slurm.wait_for_jobs(cluster, made.root)


@pytest.fixture(scope="module")
def in_vain(ground: PoolGround) -> SweepRun:
    """Waits for the only v100, which another job has: Slurm looks for such every half minute."""
    holds = ("sbatch", "--gres=gpu:v100:1", "--mem=100M", "--time=30", "--wrap=sleep 1800")
    ground.pool.run([*holds], folder=ground.pool.home, **slurm.environ())
    return submit(ground, ("plain",), "--capability", "7.0", "--idle-limit", "1s", to=SLURM)


@pytest.fixture(scope="module")
def words(ground: PoolGround, in_vain: SweepRun) -> SweepRun:
    only = ("--machine", "!h2", "--jobs", "9")
    return submit(ground, tuple(TRICKS), "--capability", "9.0", "--retries", "0", *only, to=SLURM)


@pytest.fixture(scope="module")
def without_driver(ground: PoolGround, in_vain: SweepRun) -> SweepRun:
    return submit(ground, ("plain", "good"), "--capability", "8.0", to=SLURM)


def test_every_word_comes_back_from_a_job(words: SweepRun, without_driver: SweepRun) -> None:
    found = words.ends()
    outcomes = {trick: found[node(words.ground, trick)]["outcome"] for trick in TRICKS}
    assert outcomes == TRICKS, json.dumps(found, indent=1)
    (attempt,) = found[node(words.ground, "good")]["attempts"]
    assert (attempt["machine"], attempt["slot"], attempt["gpu"]["name"]) == ("h1", "h1", "h100")


def test_collected_once_with_slurms_word_and_believed_by_nobody(words: SweepRun) -> None:
    words.ends()
    rows = words.collect(code=BAD)
    signed = {name for name, row in rows.items() if row["keyid"]}
    assert signed == {node(words.ground, trick) for trick in ("good", "wrong-numbers", "no-kernel")}
    again = words.collect(code=BAD)
    assert [row["keyid"] for row in again.values()] == [row["keyid"] for row in rows.values()]
    factory = words.ground.factory
    court = read_verification_policy(factory, datetime.now(UTC) + timedelta(minutes=1))
    for one in read_sweep(words.folder).nodes:
        judged = find_in(factory, local_place(factory, "tiny"), one.image.subject, court).judged
        standing = [(found.standing, found.proves) for found in judged]
        assert standing == ([(VerdictStatus.WRONG_KEY, False)] if one.name in signed else [])
        for found in judged:
            assert found.verdict is not None
            hardware = found.verdict.report.hardware
            assert hardware is not None
            assert hardware.kind == SLURM
            assert ("slurm-gpu", "h1/0") in hardware.notes


def test_a_node_without_a_driver_is_no_word_on_the_image(without_driver: SweepRun) -> None:
    found = without_driver.ends()
    assert {row["outcome"] for row in found.values()} == {"no-gpu"}
    assert {row["attempts"][-1]["machine"] for row in found.values()} == {"a1"}


def test_a_black_hole_is_left_out_and_decides_no_cell(ground: PoolGround) -> None:
    """h2 is said to have the oldest driver, so it takes both jobs; it has none, and tells of no GPU."""
    tricks, home = ("good", "no-kernel"), ground.pool.home / "slurm"
    told = {"h1": "550.54.15", "h2": "535.54.03"}
    write_probed(
        {"HOME": str(home)},
        [ProbedGpu(node=one, type="h100", capability="9.0", memory=0, driver=told[one]) for one in told],
    )
    ground.pool.own(home / ".local")
    with slurm.awake(ground.pool):
        sweep = submit(ground, tricks, "--capability", "9.0", "--ignore-rule", "uncollected", to=SLURM)
        found = sweep.ends()
    assert {trick: found[node(ground, trick)]["outcome"] for trick in tricks} == {
        trick: TRICKS[trick] for trick in tricks
    }
    machines = {tuple(one["machine"] for one in row["attempts"]) for row in found.values()}
    assert machines == {("h2", "h1")}
    (told,) = sweep.status()["machines"]
    assert (told["machine"], told["excluded"]) == ("h2", True)


def test_an_image_that_a_node_does_not_see_is_tried_again_then_gone_on_with(ground: PoolGround) -> None:
    sweep = submit(ground, ("hang",), "--capability", "9.0", "--retries", "1", to=SLURM)
    ground.run("sweep", "cancel", sweep.id)
    wait_for("an empty queue", sweep.is_left_alone)
    (found,) = sweep.nodes().values()
    assert found["outcome"] == "not-tested", found
    (image,) = (sweep.folder / "images").glob("*.sif")
    image.rename(image.with_suffix(".away"))
    go_on = ("sweep", "start", "--scheduler", SLURM, "--dir", ground.pool.there(sweep.folder))
    ground.run(*go_on)
    (found,) = sweep.ends().values()
    assert found["outcome"] == "pull-failed", found
    assert "this machine does not see" in found["reason"]
    assert [one["ending"] for one in found["attempts"]][-2:] == ["exited", "exited"]
    image.with_suffix(".away").rename(image)
    ground.run(*go_on)
    sweep.job(node(ground, "hang"))
    said = ground.run(*go_on, code=2)
    assert "already in the queue" in said
    ground.run("sweep", "cancel", sweep.id)
    wait_for("an empty queue", sweep.is_left_alone)
    (found,) = sweep.nodes().values()
    assert (found["outcome"], found["reason"]) == ("not-tested", "removed while it ran on h1")


def test_waiting_in_vain_ends_as_no_match(in_vain: SweepRun) -> None:
    (found,) = in_vain.ends().values()
    assert (found["outcome"], found["reason"]) == ("no-match", "no such GPU took it in 1s")


def test_what_no_node_tells_is_said_and_can_be_found_out(ground: PoolGround, in_vain: SweepRun) -> None:
    told = ground.run("sweep", "start", ground.name("plain"), "--scheduler", SLURM, "--dry-run")
    assert "GPUs without a known capability get no job: 1 of old" in told
    assert "tiny-1.0-cu121  8.0         2     any" in told
    table = ground.run("gpus", "--probe", "5s")
    assert re.search(r"^7.5 +old .* 16 GiB +550\.54\.15 ", table, re.MULTILINE), table
    assert "note: type v100 did not answer: " in table  # another job has it
    told = ground.run("sweep", "start", ground.name("plain"), "--scheduler", SLURM, "--dry-run")
    assert "tiny-1.0-cu121  7.5         1     any" in told


def test_many_cells_at_once(ground: PoolGround, in_vain: SweepRun) -> None:
    few = ("--jobs", str(max(2, COPIES // 4)))  # fewer than there are arrays, and one GPU is busy
    told = json.loads(
        ground.run(
            "sweep", "start", "tiny-2.*", "--scheduler", SLURM, "--suite", "quick", *few, "--json", err=False
        )
    )
    kinds = told["nodes"] // COPIES  # one more where it was found out before
    sweep = SweepRun(ground=ground, id=told["sweep"], folder=ground.pool.here(told["directory"]))

    def open_ones() -> set[str]:
        return {row["node"].rpartition("-")[2] for row in sweep.nodes().values() if row["outcome"] is None}

    wait_for("all but the busy GPU's", lambda: open_ones() <= {"sm70"})
    words = Counter(row["outcome"] for row in sweep.nodes().values())
    assert words == {"no-gpu": (kinds - 1) * COPIES, None: COPIES}
    assert at_once(sweep.nodes().values(), "started") <= int(few[1])
    ground.run("sweep", "cancel", sweep.id)
    wait_for("an empty queue", sweep.is_left_alone)
    words = Counter(row["outcome"] for row in sweep.nodes().values())
    assert words == {"no-gpu": (kinds - 1) * COPIES, "not-tested": COPIES}


@contextmanager
def two_nodes(pool: CondorPool) -> Iterator[None]:
    """h2 awake, and with a GPU as h1 has."""
    host = pool.folder / "pool/slurm/hosts/h2"
    make_host(host, replace(slurm.HOST, uuid=libcuda.UUID.replace("fe00", "ff00")))
    try:
        with slurm.awake(pool):
            yield
    finally:
        shutil.rmtree(host)


def on_two(ground: PoolGround) -> SweepRun:
    told = ground.run(
        "sweep", "start", ground.name("nodes"), "--scheduler", SLURM, "--nodes", "2", "--json", err=False
    )
    row = json.loads(told)
    assert (row["errors"], row["nodes"]) == ([], 1)
    return SweepRun(ground=ground, id=row["sweep"], folder=ground.pool.here(row["directory"]))


def test_two_nodes_sum_together_and_that_is_a_claim_of_its_own(ground: PoolGround) -> None:
    with two_nodes(ground.pool):
        sweep = on_two(ground)
        (found,) = sweep.ends().values()
    assert found["outcome"] == "together", json.dumps(found, indent=1)
    (row,) = sweep.collect(code=0).values()
    assert row["keyid"], row
    (one,) = read_sweep(sweep.folder).nodes
    court = read_verification_policy(ground.factory, datetime.now(UTC) + timedelta(minutes=1))
    (judged,) = find_in(ground.factory, local_place(ground.factory, "pair"), one.image.subject, court).judged
    assert judged.verdict is not None
    report = judged.verdict.report
    assert (report.level, report.outcome, report.gpus) == ("nodes", "together", 2)
    assert nodes_of(report) == {libcuda.UUID: "h1", libcuda.UUID.replace("fe00", "ff00"): "h2"}
    told = ground.run("sweep", "start", ground.name("nodes"), "--scheduler", SLURM, "--dry-run")
    assert "verified" not in told


def test_a_node_without_a_gpu_is_told_and_not_the_image(ground: PoolGround) -> None:
    with slurm.awake(ground.pool):
        sweep = on_two(ground)
        (found,) = sweep.ends().values()
    assert found["outcome"] == "no-gpu", json.dumps(found, indent=1)
    assert found["reason"].startswith("h2: ")
    (row,) = sweep.collect(code=BAD).values()
    assert not row["keyid"]
