"""Slurm's commands as the adapter calls them, played by small programs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from imagefactory.model import Outcome
from imagefactory.schedulers.pool import JobLimits, SweepNode, SweepSpec, open_pool
from imagefactory.schedulers.slurm.pool import SlurmPool
from imagefactory.settings.choices import SLURM
from imagefactory.verify.kit.program import EXPECTATIONS, KIT
from tests.made.errors import fails
from tests.made.programs import Program, calls
from tests.made.slurm import NOW, node
from tests.made.slurm_sweep import sweep, sweep_node

NODES = (sweep_node(), sweep_node("tiny-sm70", capability="7.0"), sweep_node("tiny-sm90", capability="9.0"))
LIMITS = JobLimits(retries=1)


@pytest.fixture
def slurm(programs: Path, program: Program) -> SlurmPool:
    program("scontrol", f"{node('a1')}\n{node('v1', gres='gpu:v100:1', used='gpu:0')}\n")
    program("squeue")
    program("sbatch", "12\n")
    return SlurmPool(environ={"PATH": f"{programs}:{os.defpath}"})


@pytest.fixture
def made(slurm: SlurmPool, tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    whole: SweepSpec = sweep(*NODES, retries=1, idle=timedelta(hours=1))
    slurm.write(folder, whole, {one.name: {KIT: b"{}", EXPECTATIONS: b"{}"} for one in NODES})
    assert slurm.is_whole(folder)
    return folder


def state(slurm: SlurmPool, folder: Path, one: SweepNode) -> tuple[Outcome | None, str]:
    result = slurm.read_result(folder, one, LIMITS)
    return result.outcome, result.reason


def test_it_is_a_row_of_the_table(programs: Path) -> None:
    assert isinstance(open_pool(SLURM, {"PATH": str(programs)}), SlurmPool)


def test_the_version_is_told(slurm: SlurmPool, program: Program) -> None:
    program("sbatch", "slurm-wlm 24.11.5\n")
    assert slurm.require() == "24.11.5"
    program("sbatch", "slurm 22.05.8\n")
    assert slurm.require() == "22.05.8"
    program("sbatch", "hello\n")
    with fails("slurm-output-invalid", message="'hello'"):
        slurm.require()


def test_a_sweep_is_submitted_once_and_what_no_gpu_takes_is_said(
    slurm: SlurmPool, made: Path, tmp_path: Path, program: Program
) -> None:
    assert slurm.submit(made) == "12"
    asked = [call[1:] for call in calls(tmp_path) if call[1] == "sbatch"]
    assert asked == [["sbatch", "--parsable", f"batch-{number}.sh"] for number in (1, 2)]
    assert {call[0] for call in calls(tmp_path) if call[1] == "sbatch"} == {str(made)}
    assert state(slurm, made, NODES[0]) == (None, "waiting")
    assert state(slurm, made, NODES[2]) == (
        Outcome.NO_MATCH,
        "this cluster has no usable GPU with capability 9.0",
    )
    program("squeue", "".join(f"0|PENDING|Priority|imagefactory-{number}|{made}\n" for number in (1, 2)))
    with fails("sweep-running", message=str(made)):
        slurm.submit(made)
    assert state(slurm, made, NODES[0]) == (None, "waiting: Priority")
    assert slurm.running(made)
    assert slurm.driven() == {made}


def test_a_cluster_without_such_a_gpu_is_given_nothing(
    slurm: SlurmPool, made: Path, program: Program
) -> None:
    program("scontrol", f"{node('q1', gres='gpu:ours:1', used='gpu:0')}\n")
    with fails("cluster-gpu-unknown", hint="gpus --probe"):
        slurm.submit(made)
    assert {state(slurm, made, one)[0] for one in NODES} == {Outcome.NO_MATCH}


def test_what_left_the_queue_without_a_run_is_submitted_again(
    slurm: SlurmPool, made: Path, program: Program
) -> None:
    slurm.submit(made)
    slurm.look(made)
    assert state(slurm, made, NODES[0]) == (Outcome.NOT_TESTED, "removed before it started")
    assert not slurm.running(made)
    program("sbatch", "13;cluster\n")
    assert slurm.submit(made) == "13"
    assert (made / "batch-5.sh").read_text().count("tiny-sm") == 1
    assert state(slurm, made, NODES[0]) == (None, "waiting")


def test_a_killed_submission_is_gone_on_with(slurm: SlurmPool, made: Path, program: Program) -> None:
    """Killed between sbatch and the note of it: the queue tells."""
    slurm.submit(made)
    (made / "batch-1.json").unlink()
    program("squeue", f"0|PENDING|Priority|imagefactory-1|{made}\n0|RUNNING|None|imagefactory-2|{made}\n")
    with fails("sweep-running"):
        slurm.submit(made)
    program("squeue", f"0|RUNNING|None|imagefactory-2|{made}\n")
    slurm.look(made)
    assert state(slurm, made, NODES[0]) == (None, "not submitted yet")
    slurm.submit(made)
    assert (made / "batch-4.sh").read_text().count("tiny-sm80") == 1


def test_one_that_sbatch_refuses_says_why_and_can_be_gone_on_with(
    slurm: SlurmPool, made: Path, program: Program
) -> None:
    program("sbatch", fails="sbatch: error: Invalid account or account/partition combination\n", code=1)
    with fails("slurm-command-failed", message="Invalid account"):
        slurm.submit(made)
    outcome, reason = state(slurm, made, NODES[0])
    assert outcome is Outcome.INFRASTRUCTURE
    assert "Invalid account" in reason
    program("sbatch", "14\n")
    assert slurm.submit(made) == "14"


def test_cancel_removes_the_arrays_of_its_folder(
    slurm: SlurmPool, made: Path, program: Program, tmp_path: Path
) -> None:
    slurm.submit(made)
    program("scancel")
    program("squeue")
    slurm.cancel(made)
    assert not [call for call in calls(tmp_path) if call[1] == "scancel"]
    program("squeue", f"12|0|PENDING|None|imagefactory-1|{made}\n13|0|RUNNING|None|imagefactory-1|/other\n")
    slurm.cancel(made)
    assert [call[1:] for call in calls(tmp_path) if call[1] == "scancel"] == [["scancel", "12"]]


def test_a_folder_that_no_queue_could_show(slurm: SlurmPool, tmp_path: Path) -> None:
    slurm.check_folder(tmp_path / "a b|c")
    with fails("sweep-folder-invalid"):
        slurm.check_folder(tmp_path / "a\nb")
    with fails("cannot-write-file", message="queue.json"):
        slurm.look(tmp_path / "none")


def test_the_nodes_are_the_clusters(slurm: SlurmPool) -> None:
    assert [machine.name for machine in slurm.inventory(NOW).machines] == ["a1", "v1"]
