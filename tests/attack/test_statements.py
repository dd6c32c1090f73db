"""What is signed, and changed: nothing counts that the key's owner did not sign, and nothing breaks."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from imagefactory.actions.verify import format_signed, parse_signed
from imagefactory.errors import ImagefactoryError, StatementError, StoreError
from imagefactory.extras.portability.report import sign_portable, verify_portable
from imagefactory.oci.manifests import MALFORMED, parse_config
from imagefactory.schedulers.underway import FORM, StoreClaims, claim_of, open_claims, sign_claims
from imagefactory.trust.approval import ApprovalSubject, sign_approval, verify_approvals
from imagefactory.trust.attached import parse_row
from imagefactory.trust.envelope import format_bundle, parse_bundle, parse_envelope, sign_envelope
from imagefactory.trust.judgement import parse_revocation, verify_verdict
from imagefactory.trust.keys import parse_public
from imagefactory.trust.verdict import VerdictStatus, parse_verdict, sign
from tests.made.mutants import changed_bytes, changed_text
from tests.made.portable import make_portable
from tests.made.verdicts import COURT, LAB, NOW, STRANGER, SUBJECT, digest, sealed, whole_report, with_payload

SIGNED = sign(whole_report(), LAB, now=NOW, days=90)
ENVELOPE = SIGNED.envelope
PAYLOAD = base64.b64decode(json.loads(ENVELOPE)["payload"])


def judged(data: bytes) -> VerdictStatus:
    return verify_verdict(data, digest("9"), SUBJECT, COURT).standing


@given(
    changed_bytes(ENVELOPE)
    | changed_text(ENVELOPE.decode()).map(lambda text: text.encode("utf-8", "replace"))
)
def test_an_envelope_that_changed_counts_only_where_it_says_the_same(data: bytes) -> None:
    if judged(data) is VerdictStatus.GOOD:
        assert parse_envelope(data, "x").payload == PAYLOAD


@given(
    changed_bytes(format_bundle(ENVELOPE))
    | changed_text(format_bundle(ENVELOPE).decode()).map(lambda text: text.encode("utf-8", "replace"))
)
def test_a_bundle_that_changed_counts_only_where_it_says_the_same(data: bytes) -> None:
    with suppress(StatementError):
        envelope = parse_bundle(data, "x")
        if judged(envelope) is VerdictStatus.GOOD:
            assert parse_envelope(envelope, "x").payload == PAYLOAD


@given(
    changed_bytes(PAYLOAD) | changed_text(PAYLOAD.decode()).map(lambda text: text.encode("utf-8", "replace"))
)
def test_another_payload_under_the_same_signature_is_refused(payload: bytes) -> None:
    if payload != PAYLOAD:
        assert judged(with_payload(ENVELOPE, payload)) is not VerdictStatus.GOOD
        assert judged(sealed(payload, STRANGER)) is not VerdictStatus.GOOD


@given(changed_text(PAYLOAD.decode()))
def test_what_the_owner_signs_unseen_breaks_nothing(text: str) -> None:
    payload = text.encode("utf-8", "replace")
    judged(sealed(payload))
    for parse in (parse_verdict, parse_revocation):
        with suppress(ImagefactoryError):
            parse(payload, "a statement", LAB.keyid)


PORTABLE = sign_portable(make_portable(), LAB, now=NOW, days=90).envelope
MOVED = base64.b64decode(json.loads(PORTABLE)["payload"])


@given(
    changed_bytes(PORTABLE) | changed_text(MOVED.decode()).map(lambda text: text.encode("utf-8", "replace"))
)
def test_a_statement_of_portability_counts_only_where_it_says_the_same(data: bytes) -> None:
    """Changed as a whole, or under its own signature, or signed unseen by its owner."""
    envelopes = (data, with_payload(PORTABLE, data), sealed(data))
    found = [verify_portable(one, digest("9"), SUBJECT, COURT.trust, NOW) for one in envelopes]
    for one, judged_ in zip(envelopes[:2], found, strict=False):
        assert judged_.standing is not VerdictStatus.GOOD or parse_envelope(one, "x").payload == MOVED


WANTED = ApprovalSubject(subject=SUBJECT, place="registry.example.org/gpu/pytorch", tag="2.3-cu121")
APPROVAL = sign_approval(WANTED, LAB, NOW)
APPROVED = base64.b64decode(json.loads(APPROVAL)["payload"])


@given(
    changed_bytes(APPROVAL)
    | changed_bytes(APPROVED)
    | changed_text(APPROVED.decode()).map(lambda text: text.encode("utf-8", "replace"))
)
def test_an_approval_counts_only_where_it_says_the_same(data: bytes) -> None:
    for one in (data, with_payload(APPROVAL, data), sealed(data, STRANGER)):
        if verify_approvals((one,), WANTED, COURT.trust, NOW).valid:
            assert parse_envelope(one, "x").payload == APPROVED
    verify_approvals((sealed(data),), WANTED, COURT.trust, NOW).best()


CELL = (digest("a"), "8.0")
CLAIM = claim_of("20261122-000000-aaaa", {CELL}, NOW, NOW + timedelta(hours=1))
CLAIMS = sign_claims(StoreClaims(store="0" * 16, issued=NOW, sweeps=(CLAIM,)), LAB)
QUEUED = base64.b64decode(json.loads(CLAIMS)["payload"])


@given(
    changed_bytes(CLAIMS) | changed_text(QUEUED.decode()).map(lambda text: text.encode("utf-8", "replace"))
)
def test_claims_count_only_where_they_say_the_same(data: bytes) -> None:
    """Changed as a whole, or under their own signature, or signed unseen by their owner."""
    for one, foreign in (
        (data, True),
        (with_payload(CLAIMS, data), True),
        (sign_envelope(data, LAB, FORM), False),
    ):
        with suppress(StatementError):
            found = open_claims(one, "0" * 16, COURT.trust, NOW)
            assert not foreign or [other.claim for other in found] == [CLAIM]


@given(st.data())
def test_what_lies_about_is_read_or_refused(data: st.DataObject) -> None:
    row = json.dumps({
        "format": 1,
        "kind": "application/vnd.in-toto+json",
        "subject": {"mediaType": "x", "digest": digest("a"), "size": 1},
        "envelope": base64.b64encode(ENVELOPE).decode(),
        "until": (NOW + timedelta(days=1)).isoformat(),
    })  # fmt: skip
    config = json.dumps({"config": {"Env": ["A=b"]}, "rootfs": {"type": "layers", "diff_ids": [digest("a")]}})
    signed = format_signed(SIGNED, "registry.example.org/a@" + digest("a"))
    with suppress(*MALFORMED, StoreError):
        parse_row(data.draw(changed_text(row)).encode("utf-8", "replace"))
    with suppress(*MALFORMED, StoreError):
        parse_config(data.draw(changed_text(config)).encode("utf-8", "replace"), 1)
    with suppress(ImagefactoryError):
        parse_public(data.draw(changed_bytes(base64.b64encode(LAB.public))), "a key")
    with suppress(*MALFORMED, ImagefactoryError):  # of the nonce store, whose entries carry a MAC
        parse_signed(data.draw(changed_bytes(signed)))
