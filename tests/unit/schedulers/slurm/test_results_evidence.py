"""Whose GPU a job met: the machine's word and slurmctld's; what is never signed. All is made up."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from imagefactory.errors import StatementError
from imagefactory.model import Outcome
from imagefactory.schedulers.pool import JobAttempt, JobEnding, NodeResult, NodeState, PoolGpu
from imagefactory.schedulers.slurm.results import job_report
from imagefactory.settings.choices import SLURM
from imagefactory.trust.verdict import sign
from imagefactory.verify.report import GpuReport
from tests.made.kit import ASKED, SUBJECT
from tests.made.slurm import SUITE, run_json
from tests.made.sweep import UUID, pool_gpu, seen, suite_report
from tests.made.verdicts import LAB

NOW = datetime(2026, 1, 2, 4, tzinfo=UTC)
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
        submitted=NOW,
        started=NOW,
        ended=NOW,
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
    assert sign(report, LAB, now=NOW, days=9).verdict.report == report


def test_a_type_that_tells_no_capability_says_nothing_against_it() -> None:
    assert judged(replace(GIVEN, name="ours", capability="")).outcome is Outcome.VERIFIED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"gpu": replace(GIVEN, name="v100", capability="7.0")},
            "Slurm gave the job a GPU of type v100 (7.0)",
        ),
        ({"slot": "a2"}, "the job ran on a1, Slurm gave it a2"),
    ],
)
def test_two_words_on_one_gpu_are_the_clusters_fault(changes: dict[str, Any], said: str) -> None:
    report = judged(**changes)
    assert report.outcome is Outcome.INFRASTRUCTURE
    assert said in report.reason
    with pytest.raises(StatementError):
        sign(report, LAB, now=NOW, days=9)


def test_without_slurms_word_nothing_is_verified() -> None:
    report = judged(None)
    assert report.outcome is Outcome.NOT_TESTED
    assert "Slurm does not tell that it gave the job one GPU" in report.reason


def test_without_the_machines_word_it_is_no_run() -> None:
    with pytest.raises(StatementError, match="evidence"):
        judged(evidence=None)
    with pytest.raises(StatementError, match="another kit"):
        judged(run=run_json(nonce="f" * 32))
    other = "GPU-99999999-2222-3333-4444-555555555555"
    told = {**seen(), "known": [other], "gpus": [{**seen()["gpus"][0], "uuid": other}]}
    assert judged(evidence=json.dumps(told).encode()).outcome is not Outcome.VERIFIED
