"""Approvals: what they are of, whose count, and when."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime

import pytest

from imagefactory.errors import StatementError, UsageError
from imagefactory.oci.manifests import digest_of
from imagefactory.serialize import format_time
from imagefactory.trust.approval import (
    APPROVAL,
    LIFE,
    ApprovalSubject,
    format_approval,
    other_trusted_keys,
    parse_approval,
    sign_approval,
    verify_approvals,
)
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import MOST_SIGNATURES, TrustedKey, TrustRules, parse_trust
from imagefactory.trust.tags import TagDecision, approve_tag
from imagefactory.trust.verdict import SKEW
from tests.made.verdicts import (
    DAY,
    LAB,
    LAB_TRUSTED,
    NOW,
    STRANGER,
    SUBJECT,
    digest,
    make_signing_key,
    payload_of,
    sealed,
    with_payload,
)

MIA = make_signing_key("mia")
MIA_TRUSTED = replace(LAB_TRUSTED, name="mia", keyid=MIA.keyid, public=MIA.public)
TEAM = TrustRules(keys=(LAB_TRUSTED, MIA_TRUSTED))
WANTED = ApprovalSubject(subject=SUBJECT, place="registry.example.org/gpu/pytorch", tag="2.3-cu121")


def approval(key: SigningKey = LAB, *, wanted: ApprovalSubject = WANTED, now: datetime = NOW) -> bytes:
    return sign_approval(wanted, key, now)


def names(*envelopes: bytes, trust: TrustRules = TEAM, now: datetime = NOW) -> tuple[str, ...]:
    return verify_approvals(envelopes, WANTED, trust, now).by(now)


def test_an_approval_is_read_as_it_was_written() -> None:
    data = approval()
    assert payload_of(data)["predicateType"] == APPROVAL
    assert payload_of(data)["predicate"]["expires"] == format_time(NOW + LIFE)
    assert parse_approval(format_approval(WANTED, NOW), "x") == (WANTED, NOW)
    assert names(data, approval(MIA)) == ("lab", "mia")


def test_what_one_key_signs_counts_once() -> None:
    assert names(approval(), approval(now=NOW - DAY), approval()) == ("lab",)


@pytest.mark.parametrize(
    "other",
    [
        replace(WANTED, tag="2.3-cu121-sm80"),
        replace(WANTED, place="staging.example.org/gpu/pytorch"),
        replace(WANTED, subject=replace(SUBJECT, index=digest("1"))),
        replace(WANTED, subject=replace(SUBJECT, manifest=digest("1"))),
    ],
)
def test_an_approval_of_something_else_is_none(other: ApprovalSubject) -> None:
    assert names(approval(wanted=other), approval(MIA)) == ("mia",)


def test_only_trusted_keys_approve_and_in_their_time() -> None:
    assert names(approval(STRANGER), b"{}", sealed(b"{}")) == ()
    assert names(approval(now=LAB_TRUSTED.since - DAY), now=LAB_TRUSTED.since) == ()
    assert names(approval(now=NOW + 2 * SKEW)) == ()
    swapped = with_payload(approval(MIA), format_approval(WANTED, NOW - DAY))
    assert names(swapped) == ()


def test_an_approval_ends() -> None:
    first = approval()
    assert names(first, approval(MIA, now=NOW + LIFE), now=NOW + LIFE) == ("mia",)
    assert names(first, now=NOW + LIFE - SKEW) == ("lab",)
    # What was moved in their time stays approved; what never was together is not.
    later = NOW + 10 * LIFE
    together = verify_approvals((first, approval(MIA, now=NOW + DAY)), WANTED, TEAM, later)
    assert (together.by(later), together.best()) == ((), ("lab", "mia"))
    apart = verify_approvals((first, approval(MIA, now=NOW + LIFE + SKEW + SKEW)), WANTED, TEAM, later)
    assert len(apart.best()) == 1


def test_of_a_retired_key_what_was_recorded_counts() -> None:
    data = approval(now=NOW - DAY)
    retired = replace(LAB_TRUSTED, until=NOW)
    recorded = replace(retired, signed=frozenset({digest_of(format_approval(WANTED, NOW - DAY))}))

    def of(key: TrustedKey) -> tuple[str, ...]:
        return names(data, trust=TrustRules(keys=(key, MIA_TRUSTED)), now=NOW + DAY)

    assert (of(retired), of(recorded)) == ((), ("lab",))
    assert other_trusted_keys(TrustRules(keys=(retired, MIA_TRUSTED)), (), NOW + DAY) == ("mia",)


def test_any_other_bytes_are_refused() -> None:
    payload = format_approval(WANTED, NOW)
    longer = payload.replace(format_time(NOW + LIFE).encode(), format_time(NOW + 2 * LIFE).encode())
    assert longer != payload
    for data in (
        longer,
        payload.replace(b'"format":1', b'"format":2'),
        payload.replace(b'"tag"', b'"tags"'),
        b"",
    ):
        with pytest.raises(StatementError):
            parse_approval(data, "x")
    with pytest.raises(StatementError):
        parse_approval(format_approval(replace(WANTED, tag="a/b"), NOW), "x")
    last = re.sub(rb'"(issued|expires)":"[^"]+"', rb'"\1":"9999-12-31T00:00:00Z"', payload)
    with pytest.raises(StatementError):
        parse_approval(last, "x")


FATE = TagDecision(tag="t", before=digest("1"), after=digest("2"), proven=True, why="verified")


def test_a_tag_waits_for_enough_keys() -> None:
    waits = approve_tag(FATE, 2, ("lab",), ("mia", "noor"))
    assert (waits.after, waits.missing, waits.wanted, waits.proven) == (FATE.before, 1, FATE.after, False)
    moves = approve_tag(FATE, 2, ("lab", "mia"), ("noor",))
    assert (moves.after, moves.missing, moves.proven) == (FATE.after, 0, True)
    assert moves.approved == ("lab", "mia")
    gone = approve_tag(replace(FATE, withdrawn=True), 2, (), ("mia",))  # nobody waits at a revoked image
    assert (gone.after, gone.missing) == ("", 2)


@pytest.mark.parametrize("value", ["true", '"2"', "-1", str(MOST_SIGNATURES + 1), "2.0"])
def test_the_policy_counts_keys(value: str) -> None:
    assert parse_trust("[policy]\npromotion-signatures = 2\n", "x").policy.signatures == 2
    assert parse_trust("", "x").policy.signatures == 0
    with pytest.raises(UsageError):
        parse_trust(f"[policy]\npromotion-signatures = {value}\n", "x")
