"""What Slurm and a sweep's jobs leave, as Slurm 24.11 and 22.05 write it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from imagefactory.schedulers.slurm.results import (
    MEMORY,
    REMOVED,
    TIME_LIMIT,
    QueueSnapshot,
    TaskState,
    parse_log,
    parse_queue,
    parse_record,
    remember,
    submit_directories,
)

NOW = datetime(2026, 11, 25, 22, 40, tzinfo=UTC)
START = "imagefactory: start 12_3 0 h1 1795647218\n"
ENDED = "*** JOB 20 ON h1 CANCELLED AT 2026-11-25T22:54:45"
RECORD = (
    "JobId=2 ArrayJobId=12 ArrayTaskId=0 JobName=imagefactory-1 NodeList=a1 Reason=None JOB_GRES=gpu:a100:1"
    "   Nodes=a1 CPU_IDs=0 Mem=100 GRES=gpu:a100:1(IDX:0) MinCPUsNode=1 WorkDir=/home/x\n"
    "JobId=12 ArrayJobId=12 ArrayTaskId=3 JobName=imagefactory-1 NodeList=h1 Reason=None JOB_GRES=gpu:h100:1"
    "   Nodes=h1 CPU_IDs=0-3 Mem=100 GRES={given} MinCPUsNode=1 WorkDir=/home/x\n"
)


def test_a_task_that_was_tried_again() -> None:
    log = (
        START + "imagefactory: end 8 1795647220 again\n"
        "slurmstepd-h1: error: *** JOB 12 ON h1 CANCELLED AT 2026-11-25T22:40:28 DUE TO JOB REQUEUE ***\n"
        "imagefactory: start 12_3 1 h2 1795647300\nimagefactory: end 0 1795647310 done\n"
    )
    first, second = parse_log(log.encode())
    assert (first.job, first.machine, first.code, first.again, first.why) == ("12_3", "h1", 8, True, "")
    assert (second.restart, second.machine, second.code, second.again) == (1, "h2", 0, False)
    assert second.ended is not None
    assert (second.ended - second.started).total_seconds() == 10


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"slurmstepd-h1: error: {ENDED} DUE TO TIME LIMIT ***", TIME_LIMIT),
        (f"slurmstepd: error: {ENDED} ***", REMOVED),
        (f"slurmstepd: error: {ENDED} DUE TO NODE FAILURE ***", "NODE FAILURE"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=20.batch. Some of the ...", MEMORY),
        ("imagefactory: end x y z", ""),
        (f"{ENDED} DUE TO TIME LIMIT ***", ""),
    ],
)
def test_why_a_task_was_ended_is_slurmstepds_word(line: str, why: str) -> None:
    (start,) = parse_log(f"{START}{line}\n\xff\n".encode("latin-1"))
    assert (start.why, start.code) == (why, None)


def test_a_log_of_another_kind_is_none() -> None:
    assert parse_log(b"imagefactory: start 12_3 zero h1 now\nimagefactory: end 0 1 done\n") == ()
    for restart, at in (("\u00b2", "1764110000"), ("0", "9" * 99), ("9" * 5000, "1")):
        assert parse_log(f"imagefactory: start 12_3 {restart} h1 {at}\n".encode()) == ()


@pytest.mark.parametrize(
    ("given", "name", "gpu", "capability"),
    [
        ("gpu:h100:1(IDX:0)", "h100", "h1/0", "9.0"),
        ("gpu:1(IDX:2)", "", "h1/2", ""),
        ("gpu:ours:1(IDX:1)", "ours", "h1/1", ""),
    ],
)
def test_the_record_tells_the_tasks_own_gpu(given: str, name: str, gpu: str, capability: str) -> None:
    node, found = parse_record(RECORD.format(given=given).encode(), 3)
    assert found is not None
    assert (node, found.id, found.name, found.capability) == ("h1", gpu, name, capability)


@pytest.mark.parametrize(
    "given", ["", "(null)", "gpu:h100:2(IDX:0-1)", "gpu:h100:1(IDX:0),gpu:a100:1(IDX:1)"]
)
def test_none_or_several_are_no_gpu(given: str) -> None:
    assert parse_record(RECORD.format(given=given).encode(), 3) == ("h1", None)


def test_a_record_of_another_job_tells_nothing() -> None:
    assert parse_record(RECORD.format(given="gpu:h100:1(IDX:0)").encode(), 7) == ("", None)


SQUEUE = (
    "0|RUNNING|None|imagefactory-1|/s/one\n1|PENDING|Resources|imagefactory-1|/s/one\n"
    "0|PENDING|Priority|imagefactory-2|/s/two|odd\nN/A|RUNNING|None|train|/s/one\nrubbish\n"
)


def test_the_queue_knows_sweeps_by_folder_and_name() -> None:
    assert parse_queue(SQUEUE, "imagefactory", "/s/one") == (
        TaskState(batch=1, index=0, state="RUNNING", reason="None"),
        TaskState(batch=1, index=1, state="PENDING", reason="Resources"),
    )
    assert [one.batch for one in parse_queue(SQUEUE, "imagefactory", "/s/two|odd")] == [2]
    assert submit_directories(SQUEUE, "imagefactory") == {"/s/one", "/s/two|odd"}


def test_how_a_task_ended_is_remembered_when_slurm_has_forgotten_it() -> None:
    over, waits = (
        TaskState(batch=1, index=0, state="TIMEOUT", reason=""),
        TaskState(batch=1, index=1, state="PENDING", reason=""),
    )
    before = QueueSnapshot(asked=NOW, tasks=(over, waits))
    assert remember(before, (), NOW).tasks == (over,)
    again = TaskState(batch=1, index=0, state="PENDING", reason="BeginTime")
    assert remember(before, (again,), NOW).tasks == (again,)
    assert remember(None, (waits,), NOW).tasks == (waits,)
