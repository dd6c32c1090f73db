"""Revocations: signed statements that verdicts of an image hold no longer.

    format_revocation() -> seal() -> envelope          envelope -> read_revocation() -> Revocation

A revocation speaks of the verdicts of one image that it names, or of all that were signed until then, so a
later run can verify the image again. It is an in-toto statement like a verdict, about the same manifest,
attached to it, and read as strictly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated

from imagefactory.serialize import CAPABILITY, Digest, Matching, Most, fault, format_document, format_time, parse_document, parse_value
from imagefactory.errors import StatementError
from imagefactory.trust.envelope import seal
from imagefactory.trust.judgement import Court, open_signed, out_of_period
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.verdict import Revocation, Standing
from imagefactory.verdicts.statement import SKEW, format_statement, parse_predicate
from imagefactory.verify.model import Subject

REVOCATION = "https://imagefactory.dev/revocation/v1"
FORMAT = 1
MOST_VERDICTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """What is taken back, and why (one line): verdicts of `subject` by the digests of their signed payloads.

    Without `verdicts` all of them that were signed until now, on one `capability` or, where that is empty, on
    any.
    """

    subject: Subject
    why: str
    verdicts: Annotated[tuple[Digest, ...], Most(MOST_VERDICTS)] = ()
    capability: Annotated[str, Matching(CAPABILITY, empty=True)] = ""


def sign_revocation(withdrawal: Withdrawal, key: SigningKey, now: datetime) -> bytes:
    """The envelope of a revocation. Raises StatementError for a reason that is not one printable line."""
    payload = format_revocation(withdrawal, now)
    parse_revocation(payload, "the revocation to sign", key.keyid)
    return seal(payload, key)


def format_revocation(withdrawal: Withdrawal, now: datetime) -> bytes:
    """The statement's bytes."""
    predicate = {"issued": format_time(now.replace(microsecond=0)), **format_document(withdrawal, FORMAT)}
    return format_statement(withdrawal.subject, REVOCATION, predicate)


def parse_revocation(payload: bytes, where: str, keyid: str) -> Revocation:
    """What `format_revocation` wrote. Raises StatementError for any other bytes."""
    row = dict(parse_predicate(payload, where, REVOCATION))
    issued = parse_value(row.pop("issued", None), datetime, f"{where}: issued")
    withdrawal = parse_document(row, Withdrawal, FORMAT, where)
    subject = withdrawal.subject
    if not withdrawal.why.strip():
        raise fault(f"{where}: why", "it gives no reason")
    if format_revocation(withdrawal, issued) != payload:
        raise fault(where, "its subjects do not match, or it is not in canonical form")
    return Revocation(
        subject=subject.manifest,
        verdicts=withdrawal.verdicts,
        capability=withdrawal.capability,
        before=issued,
        why=withdrawal.why,
        keyid=keyid,
        about=subject,
    )


# --- which of them count -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoked:
    """The revocations that count for a subject, and why others do not, one line each."""

    heeded: tuple[Revocation, ...]
    ignored: tuple[str, ...]


def judge_revocations(envelopes: Mapping[str, bytes], subject: Subject, court: Court) -> Revoked:
    """Of the envelopes about `subject`, by the digest of the artifact, those of keys trusted at that time.

    A revocation never expires. Any trusted key may take back what another signed; a retired one only what was
    issued in its time.
    """
    heeded, ignored = [], []
    for digest, data in sorted(envelopes.items()):
        opened = open_signed(data, court.trust)
        if opened.envelope is None or opened.key is None or opened.standing is not Standing.GOOD:
            ignored.append(f"revocation {digest}: {opened.standing}, {opened.why}")
            continue
        try:
            revocation = parse_revocation(opened.envelope.payload, "statement", opened.envelope.keyid)
        except StatementError as error:
            ignored.append(f"revocation {digest}: malformed, {error.message}")
            continue
        # Nobody records revocations. One of the second in which its key was retired takes trust away only.
        last = opened.key.since < revocation.before == opened.key.until
        late = None if last else out_of_period(opened.key, revocation.before)
        if late is None and revocation.before > court.now + SKEW:
            late = Standing.NOT_YET, "it is of a time that is still to come"
        if late is None and revocation.subject != subject.manifest:
            late = Standing.OTHER_SUBJECT, f"it speaks of {revocation.subject}"
        if late:
            ignored.append(f"revocation {digest}: {late[0]}, {late[1]}")
        else:
            retired = opened.key.until <= court.now
            heeded.append(replace(revocation, end=opened.key.until) if retired else revocation)
    return Revoked(heeded=tuple(heeded), ignored=tuple(ignored))
