"""Whose GPU a job of a pool met: the startd's word and the suite's; what is never signed. All is made up."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from imagefactory.errors import StatementError
from imagefactory.model import Outcome
from imagefactory.schedulers.htcondor.results import JobOutput, job_report, parse_job_run
from imagefactory.schedulers.pool import JobAttempt, JobEnding, PoolGpu
from imagefactory.settings.choices import HTCONDOR
from imagefactory.trust.verdict import is_simulated, missing_evidence, sign
from imagefactory.verify.report import GpuReport
from tests.made.kit import ASKED, SUBJECT
from tests.made.sweep import NOTHING_SEEN, UUID, pool_gpu, seen, suite_report
from tests.made.verdicts import LAB

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
    gpu = {"name": "NVIDIA Test GPU", "capability": "8.0", "uuid": UUID, "memory": 16 << 30}
    return {"device": {**gpu, **changes}}


# --- agreeing --------------------------------------------------------------------------------------


def test_a_job_whose_gpu_everybody_tells_is_verified_and_can_be_signed() -> None:
    report = judged(pool_gpu())
    assert report.outcome is Outcome.VERIFIED
    assert report.hardware is not None
    assert (report.hardware.kind, report.hardware.nodes) == (HTCONDOR, ())
    assert report.hardware.known == (UUID,)
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
    assert report.hardware.known == (UUID,)


# --- not agreeing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "report", "said"),
    [
        ({"uuid": UUID.replace("1", "9"), "id": "GPU-99999999"}, {}, "the startd gave the job GPU-99999999"),
        ({"uuid": "", "id": "GPU-99999999"}, {}, "the startd gave the job GPU-99999999"),
        ({"capability": "7.0"}, {}, "has capability 8.0, the startd 7.0"),
        ({"name": "Tesla V100"}, {}, "calls .* 'NVIDIA Test GPU', the startd 'Tesla V100'"),
        ({"cuda": "12.2"}, {}, "takes CUDA 12.4, the startd's 12.2"),
        ({"driver": "535.54.03"}, {}, "the job's driver is 550.90.07, the startd's 535.54.03"),
        ({}, device(uuid=UUID.replace("1", "8")), "the suite met GPU-88888888"),
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


def test_a_job_without_a_gpu_of_the_startd_is_none() -> None:
    report = judged(None)
    assert report.outcome is Outcome.INFRASTRUCTURE
    assert "the host did not see one" in report.reason


def test_without_a_driver_that_the_job_saw_nothing_is_verified() -> None:
    report = judged(pool_gpu(), run=NOTHING_SEEN)
    assert report.outcome is Outcome.NOT_TESTED
    assert "the NVIDIA driver is not loaded" in report.reason
    report = judged(pool_gpu(driver=""), run=NOTHING_SEEN)
    assert "nobody told the driver" in report.reason


def test_a_short_name_of_a_simulated_gpu_stands_for_none() -> None:
    """Where the startd tells no UUID, an image may give the rest of it as it likes."""
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
    assert not is_simulated(UUID)


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
    with pytest.raises(StatementError) as caught:
        judged(pool_gpu(), run={"nonce": "f" * 32})
    assert caught.value.code == "job-run-mismatch"
