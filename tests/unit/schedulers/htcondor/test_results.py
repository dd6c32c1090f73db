"""Logs of jobs, from whole ones to garbage, and what becomes of a node by them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from imagefactory.errors import StatementError
from imagefactory.model import Outcome
from imagefactory.schedulers.htcondor.node.post import ARRIVED, decide, follow, split_events
from imagefactory.schedulers.htcondor.results import (
    JobOutput,
    NodeFiles,
    PostScriptResult,
    classify,
    job_report,
    parse_attempts,
    parse_job_run,
)
from imagefactory.schedulers.pool import JobAttempt, JobEnding, JobLimits, PoolGpu
from imagefactory.settings.choices import HTCONDOR
from imagefactory.trust.verdict import is_simulated, missing_evidence, sign
from imagefactory.verify.report import GpuReport
from tests.made.errors import fails
from tests.made.kit import ASKED, SUBJECT
from tests.made.pool import (
    GPU,
    UUID,
    aborted,
    disconnected,
    event,
    evicted,
    executing,
    failed_start,
    held,
    submitted,
    terminated,
    transferring,
)
from tests.made.sweep import NOTHING_SEEN, pool_gpu, seen, suite_report
from tests.made.sweep import UUID as UUID_SEEN
from tests.made.verdicts import LAB
from tests.services.tier import many

LATEST = datetime(2026, 11, 23, tzinfo=UTC)
WEST = timezone(timedelta(hours=-6))
NO_PULL = "FATAL:   Unable to handle docker://127.0.0.1:1/no/such@sha256:ef uri: failed to get checksum"
MISSING = "Transfer input files failure at access point. Details: reading from file /s/x.sif: (errno 2)"
NO_ROOM = "Transfer output files failure at execution point. Details: writing: (errno 28) No space left"


def attempts(log: str | bytes, latest: datetime = LATEST) -> tuple[JobAttempt, ...]:
    data = log if isinstance(log, bytes) else log.encode()
    return parse_attempts(data, latest, lambda naive: naive.replace(tzinfo=WEST).astimezone(UTC))


def test_a_job_that_ended_tells_whose_gpu_it_had() -> None:
    (one,) = attempts(submitted() + executing() + terminated())
    assert (one.job, one.ending, one.code) == ("12.0", JobEnding.EXITED, 0)
    assert (one.machine, one.slot) == ("gpu01.example.org", "slot1_1@a100")
    assert one.gpu is not None
    assert (one.gpu.id, one.gpu.uuid, one.gpu.capability) == ("GPU-a1b2c3d4", f"GPU-{UUID}", "8.0")
    assert (one.gpu.name, one.gpu.driver, one.gpu.cuda) == ("NVIDIA A100-SXM4-40GB", "550.54.15", "12.4")
    assert one.gpu.memory == 40536 << 20
    assert one.submitted == datetime(2026, 11, 22, 12, 17, 29, tzinfo=UTC)
    assert one.ended == datetime(2026, 11, 22, 12, 18, 2, tzinfo=UTC)


def test_the_gpu_is_that_of_the_last_start() -> None:
    first = executing(gpu='[ Id = "GPU-a1b2c3d4"; Capability = 7.0; DeviceName = "Tesla V100" ]')
    (one,) = attempts(submitted() + first + evicted("preempted") + executing() + terminated())
    assert one.gpu is not None
    assert one.gpu.capability == "8.0"


@pytest.mark.parametrize(
    "log",
    [
        executing(id="GPU-a1b2c3d4,GPU-ffffffff"),
        executing(id=""),
        executing(gpu="[ Capability = 8.0; Id = ]", id="GPU-none").replace("GPUs_Capability", "Other"),
    ],
    ids=["two", "none", "without a capability"],
)
def test_what_is_no_one_gpu_is_none(log: str) -> None:
    (one,) = attempts(submitted() + log)
    assert one.gpu is None


@pytest.mark.parametrize(
    ("log", "ending", "code"),
    [
        (submitted(), JobEnding.WAITING, 0),
        (submitted() + executing(), JobEnding.RUNNING, 0),
        (submitted() + executing() + evicted("gone"), JobEnding.WAITING, 0),
        (submitted() + executing() + disconnected(), JobEnding.DISCONNECTED, 0),
        (submitted() + executing() + disconnected() + event(23, "Job reconnected"), JobEnding.RUNNING, 0),
        (submitted() + executing() + disconnected() + event(24, "Failed"), JobEnding.WAITING, 0),
        (submitted() + executing() + disconnected() + executing(), JobEnding.RUNNING, 0),
        (submitted() + executing() + terminated(255), JobEnding.EXITED, 255),
        (submitted() + executing() + terminated(signal=9), JobEnding.KILLED, 9),
        (submitted() + held(13, MISSING), JobEnding.HELD, 13),
        (submitted() + held(13, MISSING) + aborted(), JobEnding.HELD, 13),
        (submitted() + held(1, "by me") + event(13, "Job was released."), JobEnding.WAITING, 0),
        (submitted() + aborted(), JobEnding.REMOVED, 0),
        (submitted() + executing() + event(5, "Job terminated.", "(3) What"), JobEnding.LOST, 0),
        (executing() + event(40, "Finished transferring input files"), JobEnding.RUNNING, 0),
        (executing() + submitted(), JobEnding.RUNNING, 0),  # told late
        (submitted() + executing() + terminated(0) + terminated(0), JobEnding.EXITED, 0),
        (submitted() + executing() + terminated(0) + aborted("via condor_rm"), JobEnding.EXITED, 0),
        (submitted() + executing() + aborted("via condor_rm") + evicted("gone"), JobEnding.REMOVED, 0),
    ],
)
def test_how_a_job_stands(log: str, ending: JobEnding, code: int) -> None:
    (one,) = attempts(log)
    assert (one.ending, one.code) == (ending, code)


def test_each_job_of_a_node_is_an_attempt() -> None:
    log = submitted(7) + executing(7) + terminated(3, 7) + submitted(8) + executing(8) + terminated(0, 8)
    assert [(one.job, one.code) for one in attempts(log)] == [("7.0", 3), ("8.0", 0)]


def test_the_usage_beside_an_eviction_is_not_its_reason() -> None:
    (one,) = attempts(submitted() + executing() + evicted("The starter went away: no more disk"))
    assert one.text == "The starter went away: no more disk"


@pytest.mark.parametrize(
    ("text", "hour"),
    [
        ("2026-11-22 06:17:29", 12),
        ("2026-11-22T06:17:29", 12),
        ("2026-11-22T06:17:29.123Z", 6),
        ("2026-11-22T06:17:29+01:00", 5),
        ("11/22 06:17:29", 12),
        ("11/22/26 06:17:29", 12),
    ],
)
def test_times_in_all_the_forms_that_a_site_may_set(text: str, hour: int) -> None:
    (one,) = attempts(submitted(at=text))
    assert one.submitted.replace(microsecond=0) == datetime(2026, 11, 22, hour, 17, 29, tzinfo=UTC)


def test_a_time_without_a_year_is_in_the_past() -> None:
    (one,) = attempts(submitted(at="12/31 23:59:59"), datetime(2027, 1, 3, tzinfo=UTC))
    assert one.submitted.year == 2027  # six in the morning of January 1st, in UTC
    assert one.submitted.month == 1
    (one,) = attempts(submitted(at="02/29 01:00:00"), datetime(2027, 1, 3, tzinfo=UTC))
    assert one.submitted == datetime(2024, 2, 29, 7, tzinfo=UTC)


# --- garbage -------------------------------------------------------------------------------------

WHOLE = submitted() + executing() + terminated()


def test_what_is_no_event_is_passed_over() -> None:
    log = f"garbage\n{submitted()}\x00\x01...\nmore\n...\n{executing()}999 (1.2\n...\n{terminated()}"
    assert attempts(log) == attempts(WHOLE)


def test_an_event_that_is_still_being_written_is_not_read() -> None:
    (one,) = attempts(WHOLE[:-10])
    assert one.ending is JobEnding.RUNNING


def test_words_of_a_job_are_no_events() -> None:
    """What HTCondor repeats of an image's words stands behind a tab."""
    said = "\n\t".join(["FATAL", "...", *(submitted(99) + executing(99) + terminated(0, 99)).split("\n")])
    said = said.replace("\n...", "\n\t...")
    assert [one.job for one in attempts(submitted() + event(21, "Error from starter:", said))] == ["12.0"]


def test_no_bytes_break_the_reader() -> None:
    made = random.Random(5)
    whole = (WHOLE + failed_start(NO_PULL, 13) + held(34, "memory", 14) + aborted(job=14)).encode()
    for _ in range(many(100, 4000)):
        data = bytearray(whole)
        for _ in range(made.randrange(1, 60)):
            data[made.randrange(len(data))] = made.randrange(256)
        cut = data[made.randrange(len(data)) :] if made.random() < 0.3 else data
        for one in attempts(bytes(cut)):
            assert one.text.isprintable()
            classify((one,), NodeFiles(), JobLimits())
    assert attempts(made.randbytes(20_000)) == ()
    assert attempts(b"") == ()


def test_a_line_of_megabytes_is_shortened() -> None:
    (one,) = attempts(submitted() + held(12, "x" * 5_000_000))
    assert len(one.text) < 3000


# --- the word for a node -------------------------------------------------------------------------

GOOD = NodeFiles(run=b"{}", report=b"{}")
BAD = NodeFiles(run=b"", broken=True, err="FATAL: stat /opt/nopy: no such file or directory")
LIMITS = JobLimits()


@pytest.mark.parametrize(
    ("log", "files", "outcome", "words"),
    [
        (aborted(), BAD, Outcome.NO_MATCH, "no such GPU took it in 24h00m"),
        (aborted("via condor_rm (by user me)"), BAD, Outcome.NOT_TESTED, "removed: via condor_rm"),
        (executing() + terminated(255), BAD, Outcome.INFRASTRUCTURE, "exit code 255: FATAL: stat"),
        (executing() + terminated(3), BAD, Outcome.INFRASTRUCTURE, "not started: exit code 3"),
        (executing() + terminated(0), BAD, Outcome.INFRASTRUCTURE, "no result that can be read"),
        (executing() + terminated(0), NodeFiles(), Outcome.INFRASTRUCTURE, "no result that can be"),
        (executing() + terminated(signal=9), BAD, Outcome.INFRASTRUCTURE, "killed by signal 9"),
        (held(13, MISSING) + aborted(), BAD, Outcome.PULL_FAILED, r"held \(13\).*x.sif"),
        (held(12, NO_ROOM) + aborted(), BAD, Outcome.INFRASTRUCTURE, r"held \(12\).*No space left"),
        (held(35, "no image") + aborted(), BAD, Outcome.PULL_FAILED, r"held \(35\)"),
        (held(45, "no loop for x.sif") + aborted(), BAD, Outcome.INFRASTRUCTURE, r"held \(45\)"),
        (held(45, NO_PULL) + aborted(), BAD, Outcome.PULL_FAILED, r"held \(45\)"),
        (held(34, "memory") + aborted(), BAD, Outcome.HELD, r"held \(34\), it requested too little"),
        (held(46, "x") + aborted(), BAD, Outcome.TIMEOUT, "stopped after 24h00m"),
        (held(47, "x") + aborted(), BAD, Outcome.TIMEOUT, "stopped after 24h00m"),
        (held(1, "by me") + aborted(), BAD, Outcome.HELD, r"held \(1\): by me"),
        (held(26, "policy") + aborted(), BAD, Outcome.HELD, r"held \(26\)"),
        (executing() + failed_start(NO_PULL) + aborted(), BAD, Outcome.PULL_FAILED, "docker://"),
        (
            executing() + failed_start("no loop for x.sif") + aborted(),
            BAD,
            Outcome.INFRASTRUCTURE,
            "Singularity",
        ),
        (executing() + evicted("") + aborted(), BAD, Outcome.INFRASTRUCTURE, "again and again"),
        (executing() + disconnected() + aborted(), BAD, Outcome.INFRASTRUCTURE, "closed unexpectedly"),
        (executing() + aborted(), BAD, Outcome.TIMEOUT, "stopped after 24h00m, its limit"),
        (executing() + evicted("x") + executing() + aborted(), BAD, Outcome.TIMEOUT, "stopped after"),
        (executing() + aborted() + aborted(), BAD, Outcome.TIMEOUT, "stopped after 24h00m"),  # told twice
        (executing() + aborted() + evicted(""), BAD, Outcome.TIMEOUT, "stopped after 24h00m"),
        (executing() + event(40, ARRIVED) + aborted(), BAD, Outcome.TIMEOUT, "stopped after 24h00m"),
        (event(40, ARRIVED) + aborted(), BAD, Outcome.INFRASTRUCTURE, "Finished transferring"),
        (executing() + event(10, "Job was suspended.") + aborted(), BAD, Outcome.INFRASTRUCTURE, "suspended"),
        (transferring("input") + aborted(), BAD, Outcome.INFRASTRUCTURE, "Started transferring input"),
        (
            transferring("input") + executing() + transferring("output") + aborted(),
            BAD,
            Outcome.INFRASTRUCTURE,
            "Started transferring output",
        ),
        (event(7, "Shadow exception!", "Error: x") + aborted(), BAD, Outcome.INFRASTRUCTURE, "Error: x"),
        (executing(), BAD, Outcome.INFRASTRUCTURE, "does not show how it ended"),
    ],
)
def test_the_word_for_each_way_of_ending(log: str, files: NodeFiles, outcome: Outcome, words: str) -> None:
    """And where it is the pool's fault the POST script said to try it again, else not."""
    found = attempts(submitted() + log)
    again = outcome in (Outcome.INFRASTRUCTURE, Outcome.PULL_FAILED)
    last = follow(split_events((submitted() + log).encode()))
    assert decide(last, 0, not files.broken and files.run is not None)[0] is again
    posted = PostScriptResult(job="12.0", again=again, left=False, why="")
    word, reason = classify(found, with_post(files, posted), LIMITS)
    assert word is outcome
    assert re.search(words, reason), reason
    if again:
        left = PostScriptResult(job="12.0", again=True, left=True, why="")
        word, reason = classify(found, with_post(files, left), LIMITS)
        assert word is None
        assert reason.startswith("to be retried")


def with_post(files: NodeFiles, posted: PostScriptResult | None) -> NodeFiles:
    return replace(files, posted=posted)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", "not submitted yet"),
        (submitted(), "waiting"),
        (submitted() + executing(), "running on gpu01.example.org"),
        (submitted() + executing() + disconnected(), "disconnected from gpu01.example.org: Socket"),
        (submitted() + held(26, "policy"), "held (26): policy"),
        (submitted() + executing() + terminated(255), "to be retried"),
    ],
)
def test_while_it_is_not_over_there_is_no_word(log: str, reason: str) -> None:
    outcome, told = classify(attempts(log), NodeFiles(), LIMITS)
    assert outcome is None
    assert told.startswith(reason)


def test_a_run_that_ended_is_to_be_judged() -> None:
    assert classify(attempts(WHOLE), GOOD, LIMITS) == (None, "the suite has run")


def test_a_job_that_was_never_taken_by_the_pool() -> None:
    posted = PostScriptResult(job="", again=True, left=False, why="condor_submit did not take it")
    assert classify((), NodeFiles(posted=posted), LIMITS) == (
        Outcome.INFRASTRUCTURE,
        "condor_submit did not take it",
    )


def test_a_gpu_of_amd_is_none() -> None:
    told = GPU.replace("NVIDIA A100-SXM4-40GB", "AMD Instinct MI210")
    (one,) = attempts(submitted() + executing(gpu=told))
    assert one.gpu is None


# --- Whose GPU a job of a pool met: the startd's word and the suite's; what is never signed. All is made up.


NOW = datetime(2026, 1, 2, 4, tzinfo=UTC)
SUITE = "sha256:" + "d" * 64
QUESTION = {**ASKED, "capability": "8.0"}
KIT = {
    "nonce": ASKED["nonce"],
    "suite": SUITE,
    "sif": True,
    "waive": [],
    "subject": {
        "target": SUBJECT.target,
        "index": SUBJECT.index,
        "manifest": SUBJECT.manifest,
        "config": SUBJECT.config,
    },
}
SIMULATED = "GPU-a0223334-4445-5667-899a-abbccddeeff0"


def run_json(**changes: Any) -> bytes:
    row = {
        "format": 1,
        "nonce": ASKED["nonce"],
        "suite": SUITE,
        "image": "",
        "started": "2026-01-02T03:04:06Z",
        "ended": "2026-01-02T03:04:16Z",
        "returncode": 0,
        "timed_out": False,
        "seconds": 10.0,
        "said": [],
        "hardware": seen(),
        "no_gpu": "",
        **changes,
    }
    return json.dumps(row).encode()


def judged(
    gpu: PoolGpu | None, run: dict[str, Any] | None = None, report: dict[str, Any] | None = None
) -> GpuReport:
    attempt = JobAttempt(
        job="12.0",
        ending=JobEnding.EXITED,
        code=0,
        text="",
        machine="gpu.pool.test",
        slot="slot1_1@gpu.pool.test",
        gpu=gpu,
        submitted=NOW,
        started=NOW,
        ended=NOW,
    )
    told = json.dumps(suite_report(QUESTION, **(report or {}))).encode()
    run_ = parse_job_run(run_json(**(run or {})), "run.json")
    return job_report(KIT, QUESTION, JobOutput(run=run_, report=told, attempt=attempt))


def device(**changes: Any) -> dict[str, Any]:
    gpu = {"name": "NVIDIA Test GPU", "capability": "8.0", "uuid": UUID_SEEN, "memory": 16 << 30}
    return {"device": {**gpu, **changes}}


# --- agreeing --------------------------------------------------------------------------------------


def test_a_job_whose_gpu_everybody_tells_is_verified_and_can_be_signed() -> None:
    report = judged(pool_gpu())
    assert report.outcome is Outcome.VERIFIED
    assert report.hardware is not None
    assert (report.hardware.kind, report.hardware.nodes) == (HTCONDOR, ())
    assert report.hardware.known == (UUID_SEEN,)
    assert dict(report.hardware.notes) == {
        "driver-told-by": "startd",
        "job": "12.0",
        "machine": "gpu.pool.test",
        "slot": "slot1_1@gpu.pool.test",
        "startd-cuda": "12.4",
        "startd-gpu": "GPU-11111111",
    }
    assert missing_evidence(report) == ""
    assert sign(report, LAB, now=NOW, days=9).verdict.report == report


def test_a_startd_that_tells_no_driver_leaves_it_to_the_job() -> None:
    report = judged(pool_gpu(driver="", cuda=""))
    assert report.outcome is Outcome.VERIFIED
    assert report.hardware is not None
    assert (report.hardware.driver, dict(report.hardware.notes)["driver-told-by"]) == ("550.90.07", "job")


@pytest.mark.parametrize("name", ["Test GPU", "nvidia  test gpu", ""])
def test_a_name_with_or_without_its_maker_is_one_name(name: str) -> None:
    assert judged(pool_gpu(name=name)).outcome is Outcome.VERIFIED


def test_a_short_name_stands_for_a_gpu_that_begins_so() -> None:
    report = judged(pool_gpu(uuid=""))
    assert report.outcome is Outcome.VERIFIED
    assert report.hardware is not None
    assert report.hardware.known == (UUID_SEEN,)


# --- not agreeing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "report", "said"),
    [
        (
            {"uuid": UUID_SEEN.replace("1", "9"), "id": "GPU-99999999"},
            {},
            "the startd assigned GPU-99999999",
        ),
        ({"uuid": "", "id": "GPU-99999999"}, {}, "the startd assigned GPU-99999999"),
        ({"capability": "7.0"}, {}, "has capability 8.0, the startd 7.0"),
        ({"name": "Tesla V100"}, {}, "calls .* 'NVIDIA Test GPU', the startd 'Tesla V100'"),
        ({"cuda": "12.2"}, {}, "takes CUDA 12.4, the startd's 12.2"),
        ({"driver": "535.54.03"}, {}, "the job's driver is 550.90.07, the startd's 535.54.03"),
        ({}, device(uuid=UUID_SEEN.replace("1", "8")), "the suite ran on GPU-88888888"),
    ],
)
def test_two_words_on_one_gpu_are_the_pools_fault(
    gpu: dict[str, Any], report: dict[str, Any], said: str
) -> None:
    import re

    found = judged(pool_gpu(**gpu), report=report)
    assert found.outcome is Outcome.INFRASTRUCTURE
    assert re.search(said, found.reason)
    with pytest.raises(StatementError):
        sign(found, LAB, now=NOW, days=9)


@pytest.mark.parametrize(
    ("cuda", "libcuda", "agree"),
    [
        ("12.2", "/usr/local/cuda/compat/libcuda.so.575.57.08", True),
        ("12.6", "/usr/local/cuda/compat/libcuda.so.575.57.08", False),  # the driver is newer than it says
        ("12.2", "/usr/lib/libcuda.so.550.90.07", False),
        ("12.2", "/.singularity.d/libs/libcuda.so.1", False),
    ],
)
def test_the_images_libcuda_takes_newer_cuda_than_the_driver(cuda: str, libcuda: str, agree: bool) -> None:
    report = judged(pool_gpu(cuda=cuda), report={"libcuda": libcuda})
    assert report.outcome is (Outcome.VERIFIED if agree else Outcome.INFRASTRUCTURE)
    assert report.hardware is not None
    assert dict(report.hardware.notes)["libcuda"] == libcuda


def test_a_job_without_a_gpu_of_the_startd_is_none() -> None:
    report = judged(None)
    assert report.outcome is Outcome.INFRASTRUCTURE
    assert "the host did not see one" in report.reason


def test_without_a_driver_that_the_job_saw_nothing_is_verified() -> None:
    report = judged(pool_gpu(), run=NOTHING_SEEN)
    assert report.outcome is Outcome.NOT_TESTED
    assert "the NVIDIA driver is not loaded" in report.reason
    report = judged(pool_gpu(driver=""), run=NOTHING_SEEN)
    assert "the driver is unknown" in report.reason


def test_a_short_name_of_a_simulated_gpu_stands_for_none() -> None:
    """Where the startd tells no UUID_SEEN, an image may give the rest of it as it likes."""
    uuid = "GPU-a0223334-1111-2222-3333-444444444444"
    there = {**seen(), "known": [uuid], "gpus": [{**seen()["gpus"][0], "uuid": uuid}]}
    report = judged(pool_gpu(uuid="", id=uuid[:12]), run={"hardware": there}, report=device(uuid=uuid))
    assert not is_simulated(uuid)
    assert report.outcome is Outcome.INFRASTRUCTURE


@pytest.mark.parametrize("uuid", [SIMULATED, SIMULATED.replace("a0", "b1")])
def test_a_simulated_gpu_is_never_verified_nor_signed(uuid: str) -> None:
    there = {**seen(), "known": [uuid], "gpus": [{**seen()["gpus"][0], "uuid": uuid}]}
    report = judged(pool_gpu(uuid=uuid, id=uuid[:12]), run={"hardware": there}, report=device(uuid=uuid))
    assert is_simulated(uuid)
    assert report.outcome is Outcome.NOT_TESTED
    assert "simulates" in report.reason
    assert missing_evidence(report) == "the pool simulates that GPU"
    assert not is_simulated(UUID_SEEN)


# --- the image -------------------------------------------------------------------------------------


def test_another_sif_at_the_place_of_the_nodes_says_nothing_of_it() -> None:
    other = f"sha256:{'e' * 64}"
    report = judged(pool_gpu(), run={"image": other})
    assert report.outcome is Outcome.INFRASTRUCTURE
    assert f"the job's .sif was {other}, the node's is {SUBJECT.config}" in report.reason
    with pytest.raises(StatementError):
        sign(report, LAB, now=NOW, days=9)
    assert judged(pool_gpu(), run={"image": SUBJECT.config}).outcome is Outcome.VERIFIED


# --- run.json --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": True},
        {"returncode": 256},
        {"returncode": True},
        {"seconds": -1},
        {"seconds": float("nan")},
        {"said": ["a"] * 99},
        {"said": ["\x1b[2J"]},
        {"said": [1]},
        {"nonce": "no"},
        {"suite": "sha256:no"},
        {"image": "sha256:no"},
        {"image": None},
        {"started": "yesterday"},
        {"timed_out": 1},
        {"no_gpu": None},
        {"hardware": {}},
        {"more": 1},
    ],
)
def test_what_no_job_writes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StatementError):
        parse_job_run(run_json(**changes), "run.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(StatementError):
        parse_job_run(data, "run.json")


def test_a_run_of_another_node_is_refused() -> None:
    with fails("job-run-mismatch"):
        judged(pool_gpu(), run={"nonce": "f" * 32})
