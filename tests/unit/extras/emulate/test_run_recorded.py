"""What verdicts hold of how fast a GPU is, and which of them may be asked."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from imagefactory.extras.emulate.run import find_recorded, recorded_curves
from imagefactory.model import CheckState
from imagefactory.trust.verdict import Verdict, VerdictStatus, VerificationResult
from imagefactory.verify.report import FULL
from tests.made.report import gpu_report
from tests.made.verdicts import DAY, LAB, NOW, SUBJECT, together_report

NAME = "Tesla T4"
REPORT = gpu_report(SUBJECT, ("7.5", NAME), 0)
VERDICT = Verdict(report=REPORT, issued=NOW, expires=NOW + 60 * DAY, keyid=LAB.keyid)


def judged(verdict: Verdict = VERDICT, standing: VerdictStatus = VerdictStatus.GOOD) -> VerificationResult:
    return VerificationResult(digest="sha256:1", standing=standing, why="", verdict=verdict)


def with_profile(state: CheckState = CheckState.PASSED, without: str = "") -> Verdict:
    checks = tuple(
        replace(check, state=state, numbers=tuple(row for row in check.numbers if row[0] != without))
        if check.name == "profile"
        else check
        for check in REPORT.checks
    )
    return replace(VERDICT, report=replace(REPORT, checks=checks))


def test_the_whole_of_it() -> None:
    assert REPORT.level == FULL
    found = find_recorded([judged()], NAME)
    assert found is not None
    assert (found.driver, found.processors, found.context) == ("550.54.15", 30, 300 << 20)
    assert (found.kernel, found.launch, found.memory) == (4e-6, 7e-6, 1 << 34)
    assert found.curves["product-fp16"] == ((1 << 24, 1e-5), (1 << 34, 5e-3))
    assert "step-bert-fp32-8" not in found.curves


def test_the_newest_counts() -> None:
    older = replace(VERDICT, issued=NOW - timedelta(days=3))
    found = find_recorded([judged(older), judged(), judged(replace(older, issued=NOW - DAY))], NAME)
    assert found is not None
    assert found.when == NOW


def test_several_of_them_tell_what_they_send_each_other() -> None:
    whole = together_report(subject=SUBJECT)
    gpus = tuple(replace(one, name=NAME) for one in whole.hardware.gpus) if whole.hardware else ()
    numbers = (("all-reduce-1024-s", 2e-5), ("all-reduce-1048576-s", 4e-4), ("processes", 2.0))
    checks = tuple(
        replace(check, numbers=numbers) if check.name == "all-reduce" else check for check in whole.checks
    )
    report = replace(whole, device=gpus[0], checks=checks)
    assert report.gpus == 2
    verdict = replace(VERDICT, report=report)
    found = find_recorded([judged(verdict), judged()], NAME)
    assert found is not None
    assert found.curves["peer"] == ((1024.0, 2e-5), (1048576.0, 4e-4))
    assert find_recorded([judged(verdict)], NAME) is None  # how fast one is nobody measured
    assert "peer" not in (find_recorded([judged()], NAME) or found).curves


@pytest.mark.parametrize(
    ("one", "device"),
    [
        (judged(), "NVIDIA A100-SXM4-40GB"),
        (judged(standing=VerdictStatus.REVOKED), NAME),
        (judged(standing=VerdictStatus.UNSIGNED), NAME),
        (judged(with_profile(CheckState.FAILED)), NAME),
        (judged(with_profile(without="launch-s")), NAME),
        (judged(replace(VERDICT, report=replace(REPORT, checks=()))), NAME),
    ],
)
def test_what_says_nothing_of_such_a_gpu(one: VerificationResult, device: str) -> None:
    assert find_recorded([one], device) is None


def test_a_profile_without_a_way_is_none() -> None:
    rows = {f"up-pinned-{size}-s" for size in (1 << 12, 1 << 27)}
    verdict = VERDICT
    for name in rows:
        report = verdict.report
        checks = tuple(
            replace(check, numbers=tuple(row for row in check.numbers if row[0] != name))
            for check in report.checks
        )
        verdict = replace(verdict, report=replace(report, checks=checks))
    assert find_recorded([judged(verdict)], NAME) is None


def test_numbers_that_are_no_times_by_an_amount_are_left_out() -> None:
    numbers = {
        "a-2": 2.0,
        "a-1": 1.0,
        "kernel": 1.0,
        "step-a-8-whole": 1.0,
        "b-0": 1.0,
        "c-1": 0.0,
        "-1": 1.0,
    }
    assert recorded_curves(numbers) == {"a": ((1.0, 1.0), (2.0, 2.0))}
