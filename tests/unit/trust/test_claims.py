"""What verdicts say of cells: which speak, of which capability and driver, and how tables show it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.values import CellQuery, ClaimBasis, Compatibility
from imagefactory.matrix.compat import CompatGpu, CoverCandidate, cell, cover, serves
from imagefactory.matrix.plan import SKIP_RULES, CellState, PlanGpu, PlanInput, TargetStatus, make_plan
from imagefactory.model import Outcome
from imagefactory.trust.claims import REFUSALS, last_verdicts, to_renew, verified_claims
from imagefactory.trust.verdict import VerdictStatus, VerificationResult
from imagefactory.views.compat import cell_code
from tests.made.claims import BUILT, NOW, TARGET, judged

AMPERE, ADA = Capability(8, 0), Capability(8, 9)
QUESTION = CellQuery(framework="torch", version="2.3", cuda="12.1", capability=AMPERE)


def test_a_good_verdict_is_a_claim_with_its_gpu_its_driver_and_its_source() -> None:
    ((capability, claim),) = verified_claims([judged()]).items()
    assert capability == AMPERE
    assert (claim.basis, claim.answer, claim.rule) == (ClaimBasis.VERIFIED, Compatibility.YES, "suite")
    assert claim.driver == "535.54.03"
    assert claim.reason == "passed the full suite on NVIDIA A100-SXM4-40GB, driver 535.54.03, 2026-11-22"
    assert claim.source == f"verdict sha256:{0:064x} of key {'k' * 12}"


def test_the_last_proof_is_the_newest_one_that_holds_or_has_expired() -> None:
    expired = judged(days=100, standing=VerdictStatus.EXPIRED)
    (proof,) = last_verdicts([expired, judged(days=120)]).values()
    assert expired.verdict is not None
    assert proof == (NOW - timedelta(days=100), expired.verdict.expires)
    others = [
        judged(standing=one)
        for one in VerdictStatus
        if one not in (VerdictStatus.GOOD, VerdictStatus.EXPIRED)
    ]
    unread = VerificationResult(digest=BUILT, standing=VerdictStatus.EXPIRED, why="", verdict=None)
    assert last_verdicts([*others, judged(Outcome.WRONG_NUMBERS), unread]) == {}
    there = TargetStatus(target=TARGET, missing="", image=BUILT, verdicts=(expired,))
    (cell,) = make_plan(PlanInput(stages=(there,), devices=(PlanGpu(capability=AMPERE),))).cells
    assert (cell.state, cell.verified) == (CellState.VERIFY, NOW - timedelta(days=100))


@pytest.mark.parametrize(("outcome", "left", "standing"), [
    (Outcome.VERIFIED, timedelta(days=10), VerdictStatus.GOOD),
    (Outcome.VERIFIED, timedelta(days=8), VerdictStatus.EXPIRED),
    (Outcome.WRONG_NUMBERS, timedelta(days=8), VerdictStatus.GOOD),  # tried again only when it has expired
])  # fmt: skip
def test_a_verdict_is_renewed_in_the_last_tenth_of_its_time(
    outcome: Outcome, left: timedelta, standing: VerdictStatus
) -> None:
    one = judged(outcome)
    assert one.verdict is not None
    verdict = replace(one.verdict, expires=one.verdict.issued + timedelta(days=90))
    (found,) = to_renew([replace(one, verdict=verdict)], verdict.expires - left)
    assert found.standing is standing


@pytest.mark.parametrize("standing", [one for one in VerdictStatus if one is not VerdictStatus.GOOD])
def test_what_cannot_be_relied_on_says_nothing(standing: VerdictStatus) -> None:
    assert verified_claims([judged(standing=standing)]) == {}
    assert verified_claims([VerificationResult(digest=BUILT, standing=standing, why="", verdict=None)]) == {}


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_says_yes_or_no_or_nothing(outcome: Outcome) -> None:
    found = verified_claims([judged(outcome)], "535.54.03")
    if outcome is Outcome.VERIFIED:
        assert found[AMPERE].answer is Compatibility.YES
    elif outcome in REFUSALS:
        assert (found[AMPERE].answer, found[AMPERE].rule) == (Compatibility.NO, outcome.value)
        assert f"the reason of {outcome}" in found[AMPERE].reason
        assert outcome.value in SKIP_RULES
    else:
        assert found == {}


@pytest.mark.parametrize("outcome", [Outcome.TOGETHER, Outcome.APART])
def test_what_several_gpus_say_is_no_claim_about_one(outcome: Outcome) -> None:
    assert last_verdicts([judged(outcome)]) == {}
    assert states(judged(outcome), driver="535") is states(driver="535") is CellState.VERIFY
    assert states(judged(days=1), judged(outcome), driver="535") is CellState.UNCHANGED
    assert outcome not in SKIP_RULES


def test_a_rehearsal_and_a_run_that_no_host_saw_say_nothing() -> None:
    whole = judged()
    assert whole.verdict is not None
    for change in ({"rehearsal": True}, {"hardware": None}, {"device": None}):
        report = replace(whole.verdict.report, **change)  # type: ignore[arg-type]
        assert verified_claims([replace(whole, verdict=replace(whole.verdict, report=report))]) == {}


def test_a_verdict_speaks_of_its_own_capability_alone() -> None:
    assert set(verified_claims([judged(), judged(capability="8.9", days=1)])) == {AMPERE, ADA}


@pytest.mark.parametrize(
    ("asked", "holds"),
    [("", True), ("535.54.03", True), ("535", True), ("550", True), ("535.43", False), ("525.60.13", False)],
)
def test_a_pass_holds_for_its_driver_and_newer_ones(asked: str, holds: bool) -> None:
    assert bool(verified_claims([judged()], asked)) is holds


@pytest.mark.parametrize(
    ("asked", "holds"), [("", False), ("535.54.03", True), ("470", True), ("535", True), ("550", False)]
)
def test_a_driver_that_was_too_old_says_so_of_older_ones(asked: str, holds: bool) -> None:
    assert bool(verified_claims([judged(Outcome.DRIVER_TOO_OLD)], asked)) is holds


def test_the_nearest_driver_speaks_before_the_newest_verdict() -> None:
    mixed = [judged(driver="535.54.03"), judged(Outcome.WRONG_NUMBERS, driver="550.54.15", days=3)]
    assert verified_claims(mixed, "560")[AMPERE].answer is Compatibility.NO
    assert verified_claims(mixed, "545")[AMPERE].answer is Compatibility.YES
    assert verified_claims(mixed)[AMPERE].answer is Compatibility.YES
    later = [judged(days=3), judged(Outcome.NO_KERNEL)]
    assert verified_claims(later)[AMPERE].rule == verified_claims(later, "550")[AMPERE].rule == "no-kernel"


def test_a_driver_that_is_no_version_is_not_compared() -> None:
    assert verified_claims([judged(driver="unknown")], "550") == {}


def states(*verdicts: VerificationResult, driver: str = "", allow: str = "", missing: str = "") -> CellState:
    stage = TargetStatus(target=TARGET, missing=missing, image=BUILT, verdicts=verdicts)
    given = PlanInput(
        stages=(stage,),
        devices=(PlanGpu(capability=AMPERE, driver=driver),),
        allow=frozenset(allow.split()),
    )
    return make_plan(given).cells[0].state


def test_what_is_proven_is_unchanged_until_its_image_is_another() -> None:
    assert states(judged()) is CellState.UNCHANGED
    assert states(judged(), driver="525") is CellState.VERIFY
    assert states(judged(capability="8.6")) is CellState.VERIFY
    assert states(judged(standing=VerdictStatus.EXPIRED)) is CellState.VERIFY
    assert states(judged(), missing="its lock is new") is CellState.BUILD


@pytest.mark.parametrize("outcome", REFUSALS)
def test_what_failed_there_is_pruned_and_tried_again_when_that_is_allowed(outcome: Outcome) -> None:
    assert states(judged(outcome), driver="535") is CellState.SKIPPED
    assert states(judged(outcome), driver="535", allow=outcome.value) is CellState.VERIFY


def test_tables_show_what_was_verified_before_all_else() -> None:
    candidate = CoverCandidate(name="t", group="torch", question=QUESTION, verdicts=(judged(),))
    proven = cell(candidate, CompatGpu(name="A100", capability=AMPERE))
    assert cell_code(proven).startswith("Yv")
    assert serves(proven)
    assert not cell_code(cell(candidate, CompatGpu(name="L40", capability=ADA))).startswith("Yv")
    failed = replace(candidate, verdicts=(judged(Outcome.WRONG_NUMBERS),))
    refused = cell(failed, CompatGpu(name="A100", capability=AMPERE))
    assert cell_code(refused) == "-v"
    assert not serves(refused)


def test_a_cover_takes_what_is_verified_before_what_is_newer() -> None:
    old, new = (
        CoverCandidate(name=name, group="torch", question=replace(QUESTION, version=version))
        for name, version in (("old", "2.1"), ("new", "2.3"))
    )
    gpus = (CompatGpu(name="A100", capability=AMPERE),)
    assert [one.candidate.name for one in cover("torch", (old, new), gpus).images] == ["new"]
    proven = replace(old, verdicts=(judged(),))
    assert [one.candidate.name for one in cover("torch", (proven, new), gpus).images] == ["old"]
