"""On which GPUs an image may run: what verdicts prove, from which driver on, and what predictions add."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.values import ClaimBasis, Compatibility
from imagefactory.jobs.offer import (
    ImageEvidence,
    all_capabilities,
    cuda_of_driver,
    verified_evidence,
    with_predictions,
)
from imagefactory.model import Outcome
from imagefactory.trust.verdict import VerdictStatus
from tests.made.offers import expired, failed, prediction, verdict


def said(grounds: ImageEvidence) -> dict[str, str]:
    return {str(one.capability): one.cuda for one in grounds.classes}


def not_for(grounds: ImageEvidence) -> dict[str, str]:
    return {str(capability): why.partition(":")[0] for capability, why in grounds.refused}


def test_each_verdict_speaks_of_its_capability_alone() -> None:
    grounds = verified_evidence([verdict("8.0"), verdict("7.0", "535.54.03", "12.2")])
    assert said(grounds) == {"7.0": "12.2", "8.0": "12.4"}
    assert grounds.proven
    assert all(one.claim.basis is ClaimBasis.VERIFIED for one in grounds.classes)


def test_drivers_of_amd_take_no_cuda_and_are_proven_all_the_same() -> None:
    grounds = verified_evidence([verdict("gfx90a", "6.12.12", cuda="")])
    assert said(grounds) == {"gfx90a": ""}


def test_the_oldest_driver_that_passed_is_the_floor() -> None:
    verdicts = [verdict("8.0", "550.54.15", "12.4"), verdict("8.0", "525.60.13", "12.0", days=40)]
    assert said(verified_evidence(verdicts)) == {"8.0": "12.0"}


def test_a_failure_on_a_newer_driver_takes_the_capability_out() -> None:
    verdicts = [verdict("8.0", "535.54.03", "12.2"), failed("8.0", Outcome.WRONG_NUMBERS)]
    grounds = verified_evidence(verdicts)
    assert said(grounds) == {}
    assert not_for(grounds) == {"8.0": "wrong-numbers"}


def test_a_failure_on_an_older_driver_raises_the_floor() -> None:
    verdicts = [
        verdict("8.0", "550.54.15", "12.4"),
        failed("8.0", Outcome.NO_KERNEL, "535.54.03", "12.2"),
        verdict("8.0", "525.60.13", "12.0"),
    ]
    assert said(verified_evidence(verdicts)) == {"8.0": "12.4"}


def test_drivers_that_a_pool_cannot_tell_apart_are_one() -> None:
    """550.40 failed and 550.54 passed, and both take CUDA 12.4: a pool could give either."""
    verdicts = [verdict("8.0", "550.54.15", "12.4"), failed("8.0", Outcome.LOAD_FAILED, "550.40.07", "12.4")]
    grounds = verified_evidence(verdicts)
    assert said(grounds) == {}
    assert not_for(grounds) == {"8.0": "load-failed"}


@pytest.mark.parametrize("standing", [one for one in VerdictStatus if one is not VerdictStatus.GOOD])
def test_what_cannot_be_relied_on_proves_nothing(standing: VerdictStatus) -> None:
    grounds = verified_evidence([replace(verdict("8.0"), standing=standing)])
    assert grounds == ImageEvidence(classes=(), refused=())


@pytest.mark.parametrize(
    "outcome", [Outcome.NO_GPU, Outcome.TIMEOUT, Outcome.INFRASTRUCTURE, Outcome.WRONG_GPU, Outcome.HELD]
)
def test_outcomes_that_say_nothing_of_the_image_prove_nothing(outcome: Outcome) -> None:
    assert verified_evidence([failed("8.0", outcome)]).classes == ()


@pytest.mark.parametrize("cuda", ["", "12.4; queue 100", "12", "12.10"])
def test_a_driver_whose_cuda_no_pool_can_be_asked_for(cuda: str) -> None:
    grounds = verified_evidence([verdict("8.0", "550.54.14", cuda)])
    assert said(grounds) == {}
    assert not_for(grounds) == {"8.0": "the CUDA of its driver is not known"}


def test_predictions_fill_what_verdicts_leave_open() -> None:
    grounds = verified_evidence([verdict("8.0"), failed("7.0", Outcome.NO_KERNEL)])
    predicted = [
        ("7.0", prediction()),
        ("8.0", prediction()),
        ("8.6", prediction()),
        ("9.0", prediction(Compatibility.NO)),
    ]
    whole = with_predictions(grounds, predicted)
    assert said(whole) == {"8.0": "12.4", "8.6": "12.0"}
    assert [one.proven for one in whole.classes] == [True, False]
    assert not_for(whole) == {"7.0": "no-kernel", "9.0": "predicted no"}


@pytest.mark.parametrize("answer", [Compatibility.NO, Compatibility.PARTLY, Compatibility.UNKNOWN])
def test_no_half_prediction_is_taken(answer: Compatibility) -> None:
    assert (
        with_predictions(ImageEvidence(classes=(), refused=()), [("8.6", prediction(answer))]).classes == ()
    )


def test_a_projects_page_alone_is_no_prediction() -> None:
    claim = prediction(basis=ClaimBasis.DOCUMENTED)
    assert with_predictions(ImageEvidence(classes=(), refused=()), [("8.6", claim)]).classes == ()


def test_a_known_fault_beside_a_prediction_counts_against_it() -> None:
    claims = [("8.6", prediction()), ("8.6", replace(prediction(Compatibility.NO), rule="known-bad:x"))]
    assert with_predictions(ImageEvidence(classes=(), refused=()), claims).classes == ()


def test_a_fault_that_some_calls_meet_is_borne_where_that_is_asked_for() -> None:
    nothing = ImageEvidence(classes=(), refused=())
    fault = replace(prediction(Compatibility.PARTLY), rule="known-bad:x")
    claims = [("6.1", prediction()), ("6.1", fault), ("8.6", prediction())]
    careful = with_predictions(nothing, claims)
    assert (list(said(careful)), list(not_for(careful))) == (["8.6"], ["6.1"])
    bold = with_predictions(nothing, claims, faulty=True)
    assert [(str(one.capability), one.faults) for one in bold.classes] == [("6.1", (fault,)), ("8.6", ())]
    grave = replace(fault, answer=Compatibility.NO)
    assert with_predictions(nothing, [("6.1", prediction()), ("6.1", grave)], faulty=True).classes == ()


def test_a_fault_where_a_verdict_speaks_is_told_and_refuses_nothing() -> None:
    fault = replace(prediction(Compatibility.PARTLY), rule="known-bad:x")
    (found,) = with_predictions(
        verified_evidence([verdict("8.0")]), [("8.0", prediction()), ("8.0", fault)]
    ).classes
    assert (found.proven, found.faults) == (True, (fault,))


def test_the_floor_of_a_prediction_is_the_highest_that_is_known() -> None:
    nothing = ImageEvidence(classes=(), refused=())
    assert said(with_predictions(nothing, [("8.6", prediction(driver="525"))], "12.1")) == {"8.6": "12.1"}
    assert said(with_predictions(nothing, [("8.6", prediction(driver="550.54.14"))], "12.1")) == {
        "8.6": "12.4"
    }
    assert said(with_predictions(nothing, [("8.6", prediction(driver=""))], "12.1")) == {"8.6": "12.1"}


@pytest.mark.parametrize(("driver", "least"), [("", ""), ("9999", ""), ("9999", "12.1"), ("525", "12.10")])
def test_a_prediction_whose_driver_cannot_be_asked_for_is_not_taken(driver: str, least: str) -> None:
    """Without a floor it would match every driver; a newer factory than this program knows newer ones."""
    found = with_predictions(
        ImageEvidence(classes=(), refused=()), [("8.6", prediction(driver=driver))], least
    )
    assert found.classes == ()
    ((_, why),) = found.refused
    assert why.startswith("which drivers are new enough is not known")


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("530.30.02", "12.1"),
        ("525", "12.0"),
        ("545.10", "12.3"),
        ("550.54.15", "12.5"),
        ("580", "13.0"),
        ("9999", ""),
        ("", ""),
        ("mine", ""),
    ],
)
def test_cuda_of_driver(driver: str, cuda: str) -> None:
    assert cuda_of_driver(driver) == cuda


def test_known_capabilities_are_of_gpus_and_of_compilers() -> None:
    known = all_capabilities()
    assert {Capability(7, 0), Capability(8, 7), Capability(8, 8), Capability(9, 0)} <= set(known)
    assert list(known) == sorted(known)


def test_expired_verdicts_are_no_refusals_either() -> None:
    assert verified_evidence([expired("8.0")]) == ImageEvidence(classes=(), refused=())
