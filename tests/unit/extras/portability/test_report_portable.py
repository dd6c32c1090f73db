"""Statements of portability: what is signed, what is read again, and what one found is worth."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from imagefactory.errors import StatementError
from imagefactory.extras.portability.report import (
    PORTABLE,
    format_portable,
    parse_statement,
    sign_portable,
    verify_portable,
)
from imagefactory.model import CheckState
from imagefactory.trust.envelope import parse_envelope
from imagefactory.trust.verdict import VERDICT, VerdictStatus, parse_verdict, sign
from imagefactory.verify.report import VerifiedImage
from tests.made.documents import part_faults
from tests.made.portable import make_portable, make_row
from tests.made.verdicts import (
    DAY,
    LAB,
    NOW,
    STRANGER,
    SUBJECT,
    TRUST,
    digest,
    payload_of,
    sealed,
    whole_report,
    with_payload,
)

SIGNED = sign_portable(make_portable(), LAB, now=NOW, days=90)


def test_what_is_signed_reads_back_and_is_no_verdict() -> None:
    payload = parse_envelope(SIGNED.envelope, "x").payload
    assert parse_statement(payload, "x") == SIGNED.statement
    assert SIGNED.statement.report == make_portable()
    assert SIGNED.statement.expires - SIGNED.statement.issued == timedelta(days=90)
    assert payload_of(SIGNED.envelope)["predicateType"] == PORTABLE
    with pytest.raises(StatementError) as caught:
        parse_verdict(payload, "x", LAB.keyid)
    assert caught.value.code == "document-invalid"
    assert VERDICT in caught.value.message
    verdict = parse_envelope(sign(whole_report(), LAB, now=NOW, days=90).envelope, "x").payload
    with pytest.raises(StatementError) as caught:
        parse_statement(verdict, "x")
    assert caught.value.code == "document-invalid"
    assert PORTABLE in caught.value.message


def test_a_report_as_json_matches_its_schema() -> None:
    report = format_portable(make_portable())
    assert part_faults("imagefactory.model-check/1", "PortableReport", report) == []
    assert part_faults("imagefactory.model-check/1", "PortableReport", {**report, "rows": [{}]}) != []


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": make_portable().rows[:-1]},
        {"rows": (*make_portable().rows[:-1], make_row("vae", "openvino-cpu", state=CheckState.FAILED))},
        {"models": (), "rows": ()},
        {"served": ()},
    ],
    ids=["untried", "differs", "no-model", "no-runtime"],
)
def test_what_is_not_the_same_everywhere_is_not_signed(changes: dict[str, object]) -> None:
    with pytest.raises(StatementError) as caught:
        sign_portable(replace(make_portable(), **changes), LAB, now=NOW, days=90)  # type: ignore[arg-type]
    assert caught.value.code == "report-not-signable"


def test_a_report_of_the_future_is_not_signed() -> None:
    with pytest.raises(StatementError) as caught:
        sign_portable(make_portable(ended=NOW + DAY), LAB, now=NOW, days=90)
    assert caught.value.code == "document-invalid"
    assert "ended" in caught.value.message


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda row: row["predicate"].update(expires="2099-01-01T00:00:00Z"), "expires"),
        (lambda row: row["predicate"].update(more=1), "'more'"),
        (lambda row: row["predicate"].pop("issued"), "issued"),
        (lambda row: row["subject"].clear(), "subjects"),
        (
            lambda row: row["predicate"]["models"].append(row["predicate"]["models"][0]),
            ": models",
        ),
        (lambda row: row["predicate"]["rows"].append(row["predicate"]["rows"][0]), ": rows"),
        (lambda row: row["predicate"]["rows"][0].update(detail="a\nb"), "detail"),
        (lambda row: row["predicate"]["rows"].pop(), "a model in it"),
    ],
)
def test_what_this_program_would_not_have_written_is_refused(change: object, value: str) -> None:
    row = payload_of(SIGNED.envelope)
    change(row)  # type: ignore[operator]
    payload = json.dumps(row, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(StatementError) as caught:
        parse_statement(payload, "x")
    assert caught.value.code == "document-invalid"
    assert value in caught.value.message
    judged = verify_portable(sealed(payload), digest("9"), SUBJECT, TRUST, NOW)
    assert (judged.standing, judged.statement) == (VerdictStatus.MALFORMED, None)


OTHER = VerifiedImage(target="other", index=digest("4"), manifest=digest("5"), config=digest("6"))


@pytest.mark.parametrize(
    ("envelope", "subject", "when", "standing"),
    [
        (SIGNED.envelope, SUBJECT, NOW, VerdictStatus.GOOD),
        (SIGNED.envelope, replace(OTHER, config=SUBJECT.config), NOW, VerdictStatus.OTHER_SUBJECT),
        (SIGNED.envelope, OTHER, NOW, VerdictStatus.OTHER_SUBJECT),
        (SIGNED.envelope, SUBJECT, NOW + 90 * DAY, VerdictStatus.EXPIRED),
        (SIGNED.envelope, SUBJECT, NOW - DAY, VerdictStatus.NOT_YET),
        (
            sign_portable(make_portable(), STRANGER, now=NOW, days=9).envelope,
            SUBJECT,
            NOW,
            VerdictStatus.WRONG_KEY,
        ),
        (
            sign_portable(make_portable(), LAB, now=NOW + 301 * DAY, days=9).envelope,
            SUBJECT,
            NOW + 301 * DAY,
            VerdictStatus.KEY_RETIRED,
        ),
        (with_payload(SIGNED.envelope, b"{}"), SUBJECT, NOW, VerdictStatus.EDITED),
        (b"{}", SUBJECT, NOW, VerdictStatus.MALFORMED),
    ],
)
def test_what_one_is_worth(
    envelope: bytes, subject: VerifiedImage, when: object, standing: VerdictStatus
) -> None:
    judged = verify_portable(envelope, digest("9"), subject, TRUST, when)  # type: ignore[arg-type]
    assert judged.standing is standing, judged.why
    assert judged.digest == digest("9")
    assert judged.why
