"""From what a task left to its word, and what of a sweep's folder is read for it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import UsageError
from imagefactory.model import Outcome
from imagefactory.schedulers.pool import JobEnding, JobLimits
from imagefactory.schedulers.slurm.batch import LOG, QUEUE, TASKS, ArraySubmission, write_row
from imagefactory.schedulers.slurm.results import (
    HAS_RUN,
    ArrayTask,
    QueueSnapshot,
    TaskOutput,
    TaskRun,
    TaskState,
    classify,
    read_node,
)
from tests.made.slurm import run_json

NOW = datetime(2026, 11, 25, 22, 40, tzinfo=UTC)
LIMITS = JobLimits(idle=timedelta(hours=24), run=timedelta(hours=2), retries=1)
SUBMITTED = ArraySubmission(job="12", at=NOW, until=NOW + timedelta(days=1))
RAN = TaskOutput(run=run_json())


def queued(state: str, reason: str = "None") -> TaskState:
    return TaskState(batch=1, index=3, state=state, reason=reason)


def start(**changes: Any) -> TaskRun:
    row: dict[str, Any] = {"job": "12_3", "restart": 0, "machine": "h1", "started": NOW, **changes}
    return TaskRun(**row)


def word(**changes: Any) -> tuple[Outcome | None, str, JobEnding]:
    row: dict[str, Any] = {"submitted": SUBMITTED, "starts": (), "queued": None, "known": True, **changes}
    return classify(ArrayTask(**row), LIMITS)


OVER = "Slurm ended it on h1: its time was over (2h00m at most)"
REFUSED = ArraySubmission(job="", at=NOW, until=NOW, refused="sbatch cannot do it: no such account")
UNMATCHED = ArraySubmission(job="", at=NOW, until=NOW, refused="no GPU", unmatched=True)


@pytest.mark.parametrize(
    ("task", "outcome", "reason"),
    [
        ({"known": False}, None, "waiting"),
        ({"queued": queued("PENDING", "Resources")}, None, "waiting: Resources"),
        ({"submitted": None}, None, "not submitted yet"),
        ({"submitted": None, "known": False}, None, "not submitted yet"),
        ({"submitted": None, "queued": queued("PENDING")}, None, "waiting"),
        ({"submitted": REFUSED}, Outcome.INFRASTRUCTURE, REFUSED.refused),
        ({"submitted": UNMATCHED}, Outcome.NO_MATCH, "no GPU"),
        ({"queued": queued("DEADLINE", "DeadLine")}, Outcome.NO_MATCH, "no such GPU took it in 24h00m"),
        ({"queued": queued("CANCELLED")}, Outcome.NOT_TESTED, "removed before it started"),
        ({}, Outcome.NOT_TESTED, "removed before it started"),
        (
            {"queued": queued("BOOT_FAIL", "NodeDown")},
            Outcome.INFRASTRUCTURE,
            "it did not start: BOOT_FAIL (NodeDown)",
        ),
    ],
)
def test_a_task_that_has_not_started(task: dict[str, Any], outcome: Outcome | None, reason: str) -> None:
    assert word(**task)[:2] == (outcome, reason)


@pytest.mark.parametrize(
    ("last", "queue", "outcome", "reason"),
    [
        ({}, {"queued": queued("RUNNING")}, None, "running on h1"),
        ({}, {"known": False}, None, "running on h1"),
        ({}, {}, Outcome.INFRASTRUCTURE, "it left the queue on h1 without a word"),
        ({}, {"queued": queued("NODE_FAIL")}, Outcome.INFRASTRUCTURE, "Slurm ended it on h1: node_fail"),
        ({}, {"queued": queued("OUT_OF_MEMORY")}, Outcome.HELD, "it asked for too little memory on h1"),
        ({}, {"queued": queued("TIMEOUT")}, Outcome.TIMEOUT, OVER),
        ({"why": "TIME LIMIT"}, {}, Outcome.TIMEOUT, OVER),
        ({"why": "MEMORY"}, {"known": False}, Outcome.HELD, "it asked for too little memory on h1"),
        ({"why": "REMOVED"}, {}, Outcome.NOT_TESTED, "removed while it ran on h1"),
        ({"why": "PREEMPTION"}, {}, Outcome.INFRASTRUCTURE, "Slurm ended it on h1: preemption"),
        (
            {"why": "PREEMPTION"},
            {"queued": queued("PENDING")},
            None,
            "to be tried again: Slurm ended it on h1: preemption",
        ),
    ],
)
def test_a_task_that_did_not_come_to_its_end(
    last: dict[str, Any], queue: dict[str, Any], outcome: Outcome | None, reason: str
) -> None:
    assert word(starts=(start(**last),), **queue)[:2] == (outcome, reason)


STOPPED = TaskOutput(run=run_json(outcome="pull-failed", reason="no such manifest"))


@pytest.mark.parametrize(
    ("last", "files", "outcome", "reason"),
    [
        ({"code": 0}, RAN, None, HAS_RUN),
        ({"code": 9}, RAN, None, HAS_RUN),
        ({"code": 9, "again": True}, RAN, None, HAS_RUN),  # and its job was removed meanwhile
        ({"code": 8}, STOPPED, Outcome.PULL_FAILED, "no such manifest"),
        (
            {"code": 8},
            TaskOutput(last_line="it does not see x"),
            Outcome.PULL_FAILED,
            "h1: it does not see x",
        ),
        (
            {"code": 6},
            TaskOutput(last_line="no apptainer"),
            Outcome.INFRASTRUCTURE,
            "the suite was not started: exit code 6: no apptainer",
        ),
        (
            {"code": 0},
            TaskOutput(run=b"{{{"),
            Outcome.INFRASTRUCTURE,
            "it brought back no result that can be read",
        ),
    ],
)
def test_a_task_that_has_ended(
    last: dict[str, Any], files: TaskOutput, outcome: Outcome | None, reason: str
) -> None:
    assert word(starts=(start(ended=NOW, **last),), files=files) == (outcome, reason, JobEnding.EXITED)


def test_what_asked_to_be_tried_again_has_its_word_once_the_queue_has_lost_it() -> None:
    again = {"starts": (start(code=8, ended=NOW, again=True),), "files": STOPPED}
    assert word(**again, queued=queued("PENDING", "BeginTime"))[:2] == (
        None,
        "to be tried again: no such manifest",
    )
    assert word(**again, known=False)[0] is None
    assert word(**again)[0] is Outcome.PULL_FAILED


# --- reading ---------------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    (tmp_path / "nodes/tiny").mkdir(parents=True)
    (tmp_path / LOG).mkdir()
    return tmp_path


def ran(sweep: Path, *lines: str, batch: int = 1) -> Path:
    """A task that has printed these lines; the folder of its first run."""
    with (sweep / "nodes/tiny" / TASKS).open("a") as file:
        file.write(f"{batch} 3\n")
    write_row(sweep / f"batch-{batch}.json", SUBMITTED)
    (sweep / LOG / f"{batch}-3").write_text("".join(f"imagefactory: {line}\n" for line in lines))
    place = sweep / f"nodes/tiny/{batch}-0"
    (place / "result").mkdir(parents=True)
    return place


AT = int(NOW.timestamp())


def test_a_node_that_was_never_submitted(sweep: Path) -> None:
    found = read_node(sweep, "tiny", LIMITS)
    assert (found.result.outcome, found.result.attempts, found.settled) == (None, (), False)
    with pytest.raises(UsageError) as caught:
        read_node(sweep, "../tiny", LIMITS)
    assert caught.value.code == "node-name-invalid"
    assert "'../tiny'" in caught.value.message


def test_a_run_comes_back_with_all_its_files(sweep: Path) -> None:
    place = ran(sweep, f"start 12_3 0 h1 {AT}", f"end 0 {AT + 9} done")
    for name, text in (("run.json", run_json()), ("report.json", b"{}"), ("evidence.json", b"[]")):
        (place / "result" / name).write_bytes(text)
    (place / "record").write_text(
        "JobId=15 ArrayJobId=12 ArrayTaskId=3 x  Nodes=h1 CPU_IDs=0 Mem=1 GRES=gpu:h100:1(IDX:0) y\n"
    )
    found = read_node(sweep, "tiny", LIMITS)
    assert (found.run, found.report, found.evidence) == (run_json(), b"{}", b"[]")
    assert (found.result.outcome, found.settled) == (None, True)
    (attempt,) = found.result.attempts
    assert attempt.gpu is not None
    assert (attempt.job, attempt.machine, attempt.slot, attempt.gpu.id) == ("12_3", "h1", "h1", "h1/0")


def test_the_last_array_of_a_sweep_that_was_gone_on_with_counts(sweep: Path) -> None:
    ran(sweep, f"start 12_3 0 h1 {AT}", f"end 6 {AT + 9} done")
    assert read_node(sweep, "tiny", LIMITS).result.outcome is Outcome.INFRASTRUCTURE
    ran(sweep, batch=2)
    waits = read_node(sweep, "tiny", LIMITS).result
    assert (waits.outcome, waits.reason) == (None, "waiting")
    assert [one.ending for one in waits.attempts] == [JobEnding.EXITED, JobEnding.WAITING]
    write_row(sweep / QUEUE, QueueSnapshot(asked=NOW + timedelta(seconds=1), tasks=()))
    gone = read_node(sweep, "tiny", LIMITS)
    assert (gone.result.outcome, gone.settled) == (Outcome.NOT_TESTED, False)


def test_a_queue_that_was_asked_before_says_nothing(sweep: Path) -> None:
    ran(sweep, f"start 12_3 0 h1 {AT + 60}")
    write_row(sweep / QUEUE, QueueSnapshot(asked=NOW, tasks=()))
    assert read_node(sweep, "tiny", LIMITS).result.reason == "running on h1"
    write_row(sweep / QUEUE, QueueSnapshot(asked=NOW + timedelta(minutes=2), tasks=()))
    assert read_node(sweep, "tiny", LIMITS).result.outcome is Outcome.INFRASTRUCTURE


def test_a_file_that_was_changed_is_said(sweep: Path) -> None:
    ran(sweep)
    (sweep / QUEUE).write_text(json.dumps({"format": 9}))
    with pytest.raises(UsageError) as caught:
        read_node(sweep, "tiny", LIMITS)
    assert caught.value.code == "sweep-file-invalid"
    assert "queue.json" in caught.value.message
