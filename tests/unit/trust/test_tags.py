"""Which tags move where, and which never: the rules alone, and any order of events against what must hold."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import pytest

from imagefactory.model import Outcome
from imagefactory.trust.claims import last_verdicts, verified_claims
from imagefactory.trust.tags import (
    CapabilityStatus,
    PromotionRule,
    TagCandidate,
    TagDecision,
    capability_status,
    capability_tag,
    decide_tags,
    newest_first,
)
from imagefactory.trust.verdict import Verdict, VerdictStatus, VerificationResult
from tests.made.verdicts import DAY, HOST, LAB, MADE_UP, NOW, digest, together_report, whole_report
from tests.services.tier import many

RULE = PromotionRule(plain="2.3-cu121", capabilities=("8.0", "9.0"))
PLAIN, SM80, SM90 = "2.3-cu121", "2.3-cu121-sm80", "2.3-cu121-sm90"
A, B, C = digest("1"), digest("2"), digest("3")


def judged(
    capability: str,
    standing: VerdictStatus = VerdictStatus.GOOD,
    outcome: Outcome = Outcome.VERIFIED,
    *,
    driver: str = "550.54.15",
    minutes: int = 0,
) -> VerificationResult:
    report = whole_report(
        device=replace(MADE_UP, capability=capability),
        hardware=replace(HOST, driver=driver),
        outcome=outcome,
        ended=NOW + timedelta(minutes=minutes),
    )
    verdict = Verdict(report=report, issued=NOW, expires=NOW + 90 * DAY, keyid=LAB.keyid)
    return VerificationResult(digest=digest("f"), standing=standing, why="", verdict=verdict)


def candidate(where: str, day: int | None, *found: VerificationResult) -> TagCandidate:
    pushed = None if day is None else NOW + day * DAY
    return TagCandidate(name=f"{PLAIN}-{where[7:19]}", digest=where, pushed=pushed, judged=found)


def fates(
    tags: dict[str, str], *candidates: TagCandidate, rule: PromotionRule = RULE
) -> dict[str, TagDecision]:
    return {fate.tag: fate for fate in decide_tags(rule, candidates, tags)}


def after(tags: dict[str, str], *candidates: TagCandidate, rule: PromotionRule = RULE) -> dict[str, str]:
    found = fates(tags, *candidates, rule=rule)
    return {tag: fate.after for tag, fate in found.items() if fate.after}


BOTH = (judged("8.0"), judged("9.0"))


def test_a_verdict_on_a_slice_moves_no_tag_and_none_on_a_whole_gpu_speaks_of_it() -> None:
    whole = judged("9.0")
    assert whole.verdict
    report = replace(whole.verdict.report, device=replace(MADE_UP, capability="9.0", name="H100 MIG 1g.10gb"))
    part = replace(whole, verdict=replace(whole.verdict, report=report))
    assert capability_status([part], "9.0")[0] is CapabilityStatus.OPEN
    assert after({}, candidate(A, 1, part)) == {}
    for found, claimed in ((part, "1g.10gb"), (whole, "")):
        parts = [one for one in ("", "1g.10gb", "3g.40gb") if verified_claims([found], part=one)]
        assert (
            parts == [one for one in ("", "1g.10gb", "3g.40gb") if last_verdicts([found], one)] == [claimed]
        )


def of_several(outcome: Outcome) -> VerificationResult:
    verdict = Verdict(
        report=together_report(outcome=outcome, ended=NOW + DAY),
        issued=NOW,
        expires=NOW + 90 * DAY,
        keyid=LAB.keyid,
    )
    return VerificationResult(digest=digest("e"), standing=VerdictStatus.GOOD, why="", verdict=verdict)


@pytest.mark.parametrize("outcome", [Outcome.TOGETHER, Outcome.APART])
def test_what_several_gpus_say_moves_and_holds_up_no_tag(outcome: Outcome) -> None:
    assert not of_several(outcome).proves
    assert capability_status([of_several(outcome)], "8.0") == (CapabilityStatus.OPEN, "not-tested")
    assert capability_status([judged("8.0"), of_several(outcome)], "8.0") == (
        CapabilityStatus.PROVEN,
        "verified",
    )
    no = judged("8.0", outcome=Outcome.WRONG_NUMBERS)
    assert capability_status([no, of_several(outcome)], "8.0") == (CapabilityStatus.DENIED, "wrong-numbers")
    assert after({}, candidate(A, 1, of_several(outcome))) == {}


def test_names() -> None:
    assert capability_tag(PLAIN, "8.0") == SM80
    assert capability_tag(PLAIN, "12.0") == "2.3-cu121-sm120"


def test_the_plain_tag_moves_when_all_capabilities_are_verified() -> None:
    assert after({}, candidate(A, 1, *BOTH)) == {PLAIN: A, SM80: A, SM90: A}


def test_a_capability_moves_alone() -> None:
    found = fates({}, candidate(A, 1, judged("8.0")))
    assert {tag: fate.after for tag, fate in found.items()} == {SM80: A, SM90: "", PLAIN: ""}
    assert "lacks 9.0 (not-tested)" in found[PLAIN].why
    assert not found[PLAIN].moved


def test_a_capability_that_nobody_requires_has_its_tag_too() -> None:
    assert after({}, candidate(A, 1, judged("8.6")))[capability_tag(PLAIN, "8.6")] == A


def test_capabilities_of_two_candidates_do_not_add_up() -> None:
    one, two = candidate(A, 1, judged("8.0")), candidate(B, 2, judged("9.0"))
    assert after({}, one, two) == {SM80: A, SM90: B}


def test_the_newest_wins_in_whatever_order_they_come() -> None:
    old, new = candidate(A, 1, *BOTH), candidate(B, 2, *BOTH)
    assert after({}, old, new) == after({}, new, old) == {PLAIN: B, SM80: B, SM90: B}
    assert newest_first([old, new]) == (B, A)


def test_a_tag_never_goes_to_an_older_one() -> None:
    old, new = candidate(A, 1, *BOTH), candidate(B, 2)
    assert after({PLAIN: B}, old, new)[PLAIN] == B
    for standing in (
        VerdictStatus.EXPIRED,
        VerdictStatus.OTHER_SUITE,
        VerdictStatus.KEY_RETIRED,
        VerdictStatus.EVIDENCE_REFUSED,
    ):
        late = candidate(B, 2, judged("8.0", standing), judged("9.0", standing))
        found = fates({PLAIN: B, SM80: B}, old, late)
        assert not found[PLAIN].moved
        assert not found[PLAIN].proven
        assert standing.value in found[PLAIN].why
        assert found[SM80].after == B


def test_an_unknown_time_counts_as_older() -> None:
    assert after({}, candidate(A, None, *BOTH), candidate(B, 1, *BOTH))[PLAIN] == B
    assert after({PLAIN: B}, candidate(A, None, *BOTH), candidate(B, 1))[PLAIN] == B


def test_what_a_stranger_tagged_is_replaced() -> None:
    assert after({PLAIN: digest("9")}, candidate(A, 1, *BOTH))[PLAIN] == A
    assert after({PLAIN: digest("9")}, candidate(A, 1))[PLAIN] == digest("9")


@pytest.mark.parametrize(
    "speaks",
    [
        judged("9.0", VerdictStatus.REVOKED),
        judged("9.0", outcome=Outcome.WRONG_NUMBERS, minutes=5),
        judged("9.0", outcome=Outcome.NO_KERNEL, minutes=5),
        judged("9.0", outcome=Outcome.LOAD_FAILED, minutes=5),
    ],
    ids=["revoked", "wrong-numbers", "no-kernel", "load-failed"],
)
def test_what_is_taken_back_moves_tags_back(speaks: VerificationResult) -> None:
    passed = () if speaks.standing is VerdictStatus.REVOKED else (judged("9.0"),)
    found = (judged("8.0"), *passed, speaks)
    old, new = candidate(A, 1, *BOTH), candidate(B, 2, *found)
    tags = {PLAIN: B, SM80: B, SM90: B}
    assert after(tags, old, new) == {PLAIN: A, SM80: B, SM90: A}
    assert after(tags, new) == {SM80: B}
    assert "no other candidate" in fates(tags, new)[PLAIN].why
    assert after(tags, candidate(A, 1, judged("8.0")), new) == {SM80: B}


def test_a_later_pass_outweighs_a_denial_and_an_older_driver_denies_nothing() -> None:
    denial = judged("8.0", outcome=Outcome.WRONG_NUMBERS, minutes=5)
    assert capability_status([judged("8.0"), denial], "8.0") == (CapabilityStatus.DENIED, "wrong-numbers")
    assert (
        capability_status([judged("8.0"), denial, judged("8.0", minutes=9)], "8.0")[0]
        is CapabilityStatus.PROVEN
    )
    old = judged("8.0", outcome=Outcome.NO_KERNEL, driver="470.82", minutes=5)
    assert capability_status([judged("8.0"), old], "8.0")[0] is CapabilityStatus.PROVEN


@pytest.mark.parametrize("outcome", [Outcome.DRIVER_TOO_OLD, Outcome.TIMEOUT])
def test_what_speaks_of_the_machine_denies_nothing(outcome: Outcome) -> None:
    late = judged("8.0", outcome=outcome, minutes=5)
    assert capability_status([judged("8.0"), late], "8.0")[0] is CapabilityStatus.PROVEN
    assert capability_status([late], "8.0") == (CapabilityStatus.OPEN, outcome.value)


@pytest.mark.parametrize("standing", [one for one in VerdictStatus if one is not VerdictStatus.GOOD])
def test_only_what_can_be_relied_on_proves_or_denies(standing: VerdictStatus) -> None:
    assert after({}, candidate(A, 1, judged("8.0", standing), judged("9.0", standing))) == {}
    denial = judged("8.0", standing, Outcome.WRONG_NUMBERS, minutes=5)
    assert capability_status([judged("8.0"), denial], "8.0")[0] is CapabilityStatus.PROVEN


def test_a_malformed_one_is_no_reason_to_fall_over() -> None:
    broken = VerificationResult(digest=digest("e"), standing=VerdictStatus.MALFORMED, why="", verdict=None)
    assert after({}, candidate(A, 1, broken, *BOTH))[PLAIN] == A


def test_sm_86_is_never_inferred_from_sm_80() -> None:
    rule = PromotionRule(plain=PLAIN, capabilities=("8.6",))
    assert after({}, candidate(A, 1, judged("8.0")), rule=rule) == {SM80: A}


def test_in_the_store_here_the_plain_tag_is_the_builds() -> None:
    rule = replace(RULE, pointers_only=True)
    assert after({PLAIN: B}, candidate(A, 1, *BOTH), candidate(B, 2), rule=rule) == {SM80: A, SM90: A}


HISTORIES = many(1000, 4000)


def test_whatever_happens_what_must_hold_holds() -> None:
    """Random histories: nothing moves to what is not proven, and back only from what was taken back."""
    rng, digests = random.Random(4711), [digest(letter) for letter in "12345"]
    words = [
        VerdictStatus.GOOD,
        VerdictStatus.GOOD,
        VerdictStatus.EXPIRED,
        VerdictStatus.REVOKED,
        VerdictStatus.WRONG_KEY,
    ]
    outcomes = [Outcome.VERIFIED, Outcome.VERIFIED, Outcome.WRONG_NUMBERS, Outcome.TIMEOUT]
    moves = back = 0
    for _ in range(HISTORIES):
        candidates = [
            candidate(
                where,
                rng.choice([None, rng.randrange(9)]),
                *(
                    judged(
                        rng.choice(["8.0", "9.0"]),
                        rng.choice(words),
                        rng.choice(outcomes),
                        minutes=rng.randrange(9),
                    )
                    for _ in range(rng.randrange(4))
                ),
            )
            for where in rng.sample(digests, rng.randrange(1, 5))
        ]
        tags = {tag: rng.choice(digests) for tag in (PLAIN, SM80, SM90) if rng.random() < 0.7}
        found = decide_tags(RULE, candidates, tags)
        order, by_digest = newest_first(candidates), {one.digest: one for one in candidates}
        rng.shuffle(candidates)
        assert decide_tags(RULE, candidates, tags) == found
        for fate in found:
            needs = {PLAIN: ("8.0", "9.0"), SM80: ("8.0",), SM90: ("9.0",)}[fate.tag]
            stands = {
                where: [capability_status(one.judged, need)[0] for need in needs]
                for where, one in by_digest.items()
            }
            proven = fate.after in stands and set(stands[fate.after]) == {CapabilityStatus.PROVEN}
            assert fate.proven is proven
            assert fate.before == tags.get(fate.tag, "")
            if not fate.moved:
                continue
            moves += 1
            taken = bool(
                {CapabilityStatus.REVOKED, CapabilityStatus.DENIED} & set(stands.get(fate.before, []))
            )
            assert proven or (not fate.after and taken)
            if fate.before in order and fate.after and order.index(fate.after) > order.index(fate.before):
                back += 1
                assert taken
        again = {**tags, **{fate.tag: fate.after for fate in found}}
        settled = decide_tags(RULE, candidates, {tag: where for tag, where in again.items() if where})
        assert [fate.after for fate in settled] == [fate.after for fate in found]
    assert moves > HISTORIES // 3
    assert back > HISTORIES // 200


def test_where_no_gpu_is_required_the_newest_candidate_has_the_plain_tag() -> None:
    rule = PromotionRule(plain="2.3-cpu", capabilities=())
    made = fates({"2.3-cpu": A}, candidate(A, 1), candidate(B, 2), rule=rule)
    assert {tag: (fate.after, fate.proven) for tag, fate in made.items()} == {"2.3-cpu": (B, True)}
    assert made["2.3-cpu"].why.endswith("is the newest, and no GPU is required")
    assert not fates({}, rule=rule)["2.3-cpu"].proven


def test_where_no_gpu_is_required_only_our_own_candidates_get_the_plain_tag() -> None:
    """Anyone who may push can tag a candidate and say that it is the newest."""
    rule = PromotionRule(plain="2.3-cpu", capabilities=())
    foreign = replace(candidate(B, 2), own=False)
    assert after({}, foreign, rule=rule) == {}
    assert after({}, candidate(A, 1), foreign, rule=rule) == {"2.3-cpu": A}
    assert after({"2.3-cpu": A}, candidate(A, 1), foreign, rule=rule) == {"2.3-cpu": A}
    assert after({"2.3-cpu": B}, candidate(A, 1), foreign, rule=rule) == {"2.3-cpu": A}
