"""From what a task left to its word, and what of a sweep's folder is read for it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import StatementError
from imagefactory.model import Outcome
from imagefactory.schedulers.pool import (
    JobAttempt,
    JobEnding,
    JobLimits,
    MachineFiles,
    NodeResult,
    NodeState,
    PoolGpu,
)
from imagefactory.schedulers.slurm.batch import LOG, QUEUE, TASKS, ArraySubmission, write_row
from imagefactory.schedulers.slurm.results import (
    HAS_RUN,
    MEMORY,
    REMOVED,
    TIME_LIMIT,
    ArrayTask,
    QueueSnapshot,
    TaskOutput,
    TaskRun,
    TaskState,
    classify,
    job_report,
    parse_log,
    parse_queue,
    parse_record,
    read_node,
    remember,
    submit_directories,
)
from imagefactory.settings.choices import SLURM
from imagefactory.trust.claims import multi_gpu_capabilities, verified_claims
from imagefactory.trust.verdict import VerdictStatus, VerificationResult, nodes_of, sign, signable
from imagefactory.verify.report import GpuReport
from tests.made.errors import fails
from tests.made.kit import ASKED, SUBJECT
from tests.made.slurm import SUITE, run_json
from tests.made.sweep import UUID, pool_gpu, seen, suite_report
from tests.made.verdicts import LAB

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
        ({}, {}, Outcome.INFRASTRUCTURE, "it left the queue on h1 and its log shows no end"),
        ({}, {"queued": queued("NODE_FAIL")}, Outcome.INFRASTRUCTURE, "Slurm ended it on h1: node_fail"),
        ({}, {"queued": queued("OUT_OF_MEMORY")}, Outcome.HELD, "it requested too little memory on h1"),
        ({}, {"queued": queued("TIMEOUT")}, Outcome.TIMEOUT, OVER),
        ({"why": "TIME LIMIT"}, {}, Outcome.TIMEOUT, OVER),
        ({"why": "MEMORY"}, {"known": False}, Outcome.HELD, "it requested too little memory on h1"),
        ({"why": "REMOVED"}, {}, Outcome.NOT_TESTED, "removed while it ran on h1"),
        ({"why": "PREEMPTION"}, {}, Outcome.INFRASTRUCTURE, "Slurm ended it on h1: preemption"),
        (
            {"why": "PREEMPTION"},
            {"queued": queued("PENDING")},
            None,
            "to be retried: Slurm ended it on h1: preemption",
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
        "to be retried: no such manifest",
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
    with fails("node-name-invalid", message="'../tiny'"):
        read_node(sweep, "../tiny", LIMITS)


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
    with fails("sweep-file-invalid", message="queue.json"):
        read_node(sweep, "tiny", LIMITS)


# --- What Slurm and a sweep's jobs leave, as Slurm 24.11 and 22.05 write it.


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


# --- Whose GPU a job met: the machine's word and slurmctld's; what is never signed. All is made up.


WHEN = datetime(2026, 1, 2, 4, tzinfo=UTC)
QUESTION = {**ASKED, "capability": "8.0"}
KIT = {"nonce": ASKED["nonce"], "suite": SUITE, "waive": [], "subject": asdict(SUBJECT)}
GIVEN = pool_gpu(id="a1/0", uuid="", name="a100", driver="", cuda="", memory=0)


def judged(gpu: PoolGpu | None = GIVEN, slot: str = "a1", **changes: Any) -> GpuReport:
    attempt = JobAttempt(
        job="12_3",
        ending=JobEnding.EXITED,
        code=0,
        text="",
        machine="a1",
        slot=slot,
        gpu=gpu,
        submitted=WHEN,
        started=WHEN,
        ended=WHEN,
    )
    found = NodeState(
        result=NodeResult(node="tiny", outcome=None, reason="", attempts=(attempt,)),
        run=run_json(),
        report=json.dumps(suite_report(QUESTION)).encode(),
        evidence=json.dumps(seen()).encode(),
    )
    return job_report(KIT, QUESTION, replace(found, **changes))


def test_a_job_whose_gpu_both_tell_is_verified_and_can_be_signed() -> None:
    report = judged()
    assert report.outcome is Outcome.VERIFIED
    assert report.hardware is not None
    assert (report.hardware.kind, report.hardware.known) == (SLURM, (UUID,))
    notes = dict(report.hardware.notes)
    assert (notes["job"], notes["machine"], notes["slurm-gpu"], notes["slurm-type"]) == (
        "12_3",
        "a1",
        "a1/0",
        "a100",
    )
    assert sign(report, LAB, now=WHEN, days=9).verdict.report == report


def test_a_type_that_tells_no_capability_says_nothing_against_it() -> None:
    assert judged(replace(GIVEN, name="ours", capability="")).outcome is Outcome.VERIFIED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"gpu": replace(GIVEN, name="v100", capability="7.0")},
            "Slurm assigned a GPU of type v100 (7.0)",
        ),
        ({"slot": "a2"}, "the job ran on a1, Slurm assigned a2"),
    ],
)
def test_two_words_on_one_gpu_are_the_clusters_fault(changes: dict[str, Any], said: str) -> None:
    report = judged(**changes)
    assert report.outcome is Outcome.INFRASTRUCTURE
    assert said in report.reason
    with pytest.raises(StatementError):
        sign(report, LAB, now=WHEN, days=9)


def test_without_slurms_word_nothing_is_verified() -> None:
    report = judged(None)
    assert report.outcome is Outcome.NOT_TESTED
    assert "Slurm does not show that the job had one GPU" in report.reason


def test_without_the_machines_word_it_is_no_run() -> None:
    with pytest.raises(StatementError, match="evidence"):
        judged(evidence=None)
    with pytest.raises(StatementError, match="another kit"):
        judged(run=run_json(nonce="f" * 32))
    other = "GPU-99999999-2222-3333-4444-555555555555"
    told = {**seen(), "known": [other], "gpus": [{**seen()["gpus"][0], "uuid": other}]}
    assert judged(evidence=json.dumps(told).encode()).outcome is not Outcome.VERIFIED


# --- a job on two nodes ---------------------------------------------------------------------------

OTHER = UUID[:-1] + ("1" if UUID[-1] != "1" else "2")
OF_TWO = {**ASKED, "framework": "torch", "level": "nodes", "nodes": 2, "capability": "8.0"}
BOTH = replace(GIVEN, id="a[1-2]/0")


def on_node(name: str, uuid: str = UUID, run: bytes | None = run_json(), **changes: Any) -> MachineFiles:
    """A node on which all checks passed, or with `failed`, the outcome of the last."""
    failed, numbers = changes.pop("failed", ""), changes.pop("numbers", {"nodes": 2.0})
    report = suite_report(OF_TWO)
    report["device"]["uuid"] = uuid
    for row in report["checks"]:
        row["numbers"] = {"nodes": 2.0, "elements": 1.0}
    if failed:
        report["checks"][-1].update(state="failed", outcome=failed, numbers=numbers)
    gpu = {**seen()["gpus"][0], "uuid": uuid}
    return MachineFiles(
        machine=name,
        run=run,
        report=json.dumps({**report, **changes}).encode() if run else None,
        evidence=json.dumps({**seen(), "gpus": [gpu], "known": [uuid]}).encode() if run else None,
    )


def judged_nodes(*machines: MachineFiles, gpu: PoolGpu | None = BOTH) -> GpuReport:
    attempt = JobAttempt(
        job="12_3",
        ending=JobEnding.EXITED,
        code=0,
        text="",
        machine="a1",
        slot="a[1-2]",
        gpu=gpu,
        submitted=WHEN,
        started=WHEN,
        ended=WHEN,
    )
    result = NodeResult(node="tiny", outcome=None, reason="", attempts=(attempt,))
    return job_report(KIT, OF_TWO, NodeState(result=result, run=machines[0].run, machines=machines))


def test_two_nodes_are_signed_with_the_gpu_of_each_and_prove_nothing_of_one() -> None:
    report = judged_nodes(on_node("a1"), on_node("a2", OTHER))
    assert (report.outcome, report.level, report.gpus) == (Outcome.TOGETHER, "nodes", 2)
    assert nodes_of(report) == {UUID: "a1", OTHER: "a2"}
    verdict = sign(report, LAB, now=WHEN, days=9).verdict
    assert verdict.report == report
    good = VerificationResult(digest="", standing=VerdictStatus.GOOD, why="", verdict=verdict)
    assert (dict(verified_claims([good])), multi_gpu_capabilities([good], 2), good.proves) == ({}, (), False)


@pytest.mark.parametrize(
    ("machines", "outcome", "said"),
    [
        ((on_node("a1"), on_node("a2")), Outcome.INFRASTRUCTURE, "2 nodes used 1 GPUs"),
        ((on_node("a1", failed="infrastructure"), on_node("a2", OTHER)), Outcome.INFRASTRUCTURE, "a1: "),
        (
            (on_node("a1", failed="infrastructure"), on_node("a2", OTHER, failed="wrong-numbers")),
            Outcome.APART,
            "a2: ",
        ),
        ((on_node("a1"), on_node("a2", OTHER, running="nodes", checks=[])), Outcome.INFRASTRUCTURE, "a2: "),
        (
            (on_node("a1"), on_node("a2", OTHER, failed="load-failed", numbers={})),
            Outcome.INFRASTRUCTURE,
            "a2: ",
        ),
        ((on_node("a1"), on_node("a2", OTHER, failed="load-failed")), Outcome.APART, "a2: "),
        (
            (on_node("a1"), on_node("a2", OTHER, run_json(timed_out=True, returncode=137))),
            Outcome.TIMEOUT,
            "a2: ",
        ),
    ],
)
def test_a_node_that_failed(machines: tuple[MachineFiles, ...], outcome: Outcome, said: str) -> None:
    report = judged_nodes(*machines)
    assert (report.outcome, report.reason[: len(said)]) == (outcome, said)
    assert signable(report) == (outcome is Outcome.APART)
    if outcome is Outcome.APART:
        assert sign(report, LAB, now=WHEN, days=9).verdict.report == report


def test_all_nodes_of_the_kit_must_return_a_result_and_slurm_must_know_them() -> None:
    with fails("sweep-machine-lost"):
        judged_nodes(on_node("a1"))
    assert judged_nodes(on_node("a1"), on_node("a2", OTHER), gpu=None).outcome is Outcome.NOT_TESTED


@pytest.mark.parametrize(
    ("machines", "code", "outcome", "said"),
    [
        (
            (on_node("a1"), on_node("a2", run=run_json(outcome="no-gpu", reason="no driver"))),
            9,
            Outcome.NO_GPU,
            "a2: no driver",
        ),
        ((on_node("a1"), on_node("a2", run=None)), 143, Outcome.INFRASTRUCTURE, "a2: the suite was not"),
        (
            (on_node("a1", run=None), replace(on_node("a2", run=None), fault=True)),
            6,
            Outcome.INFRASTRUCTURE,
            "a2: the suite was not",
        ),
        (
            (on_node("a1", run=None), replace(on_node("a2", run=None), fault=True)),
            8,
            Outcome.PULL_FAILED,
            "a2",
        ),
        ((on_node("a1"), on_node("a2", OTHER)), 0, None, HAS_RUN),
    ],
)
def test_the_node_that_ended_a_job_is_named(
    machines: tuple[MachineFiles, ...], code: int, outcome: Outcome | None, said: str
) -> None:
    files = TaskOutput(run=machines[0].run, machines=machines)
    found = word(starts=(start(code=code),), files=files)
    assert (found[0], found[1][: len(said)]) == (outcome, said)


def test_a_node_that_hangs_until_the_job_ends_is_named() -> None:
    files = TaskOutput(run=run_json(), machines=(on_node("a1"), on_node("a2", run=None)))
    outcome, reason, _ = word(starts=(start(code=None, why=TIME_LIMIT),), files=files)
    assert outcome is Outcome.TIMEOUT
    assert " on a2:" in reason


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("Nodes=h[1-2] CPU_IDs=0 Mem=100 GRES=gpu:h100:1(IDX:0)", "h[1-2]/0"),
        (
            "Nodes=h1 CPU_IDs=0 Mem=1 GRES=gpu:h100:1(IDX:0) "
            "  Nodes=h2 CPU_IDs=0 Mem=1 GRES=gpu:h100:1(IDX:3)",
            "h1,h2/0",
        ),
        ("Nodes=h1 CPU_IDs=0 Mem=1 GRES=gpu:h100:1(IDX:0)   Nodes=h2 CPU_IDs=0 Mem=1 GRES=", ""),
    ],
)
def test_the_record_of_two_nodes(gres: str, found: str) -> None:
    _, gpu = parse_record(f"JobId=1 ArrayTaskId=0 JobName=x   {gres} MinCPUsNode=1\n".encode(), 0)
    assert (gpu.id if gpu else "") == found
