"""Revocations: signed statements that verdicts of an image hold no longer.

    format_revocation() -> seal() -> envelope          envelope -> read_revocation() -> Revocation

A revocation speaks of the verdicts of one image that were signed until then, so a later run can verify the
image again. It is an in-toto statement like a verdict, about the same two digests, attached to the same
manifest, and read as strictly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from imagefactory.errors import StatementError
from imagefactory.verdicts.envelope import seal
from imagefactory.verdicts.judgement import Court, open_signed, out_of_period
from imagefactory.verdicts.keys import SigningKey
from imagefactory.verdicts.model import Revocation, Standing
from imagefactory.verdicts.statement import SKEW, format_statement, parse_predicate
from imagefactory.verify.model import Subject
from imagefactory.verify.report import (
    CAPABILITY,
    DIGEST,
    NAME,
    fault,
    fields,
    format_time,
    line,
    parse_time,
    word,
)

REVOCATION = "https://imagefactory.dev/revocation/v1"
FORMAT = 1
MOST_VERDICTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """What is taken back, and why (one line): verdicts of `subject` by their artifacts' digests.

    Without `verdicts` all of them that were signed until now, on one `capability` or, where that is empty, on
    any.
    """

    subject: Subject
    why: str
    verdicts: tuple[str, ...] = ()
    capability: str = ""


def sign_revocation(withdrawal: Withdrawal, key: SigningKey, now: datetime) -> bytes:
    """The envelope of a revocation. Raises StatementError for a reason that is not one printable line."""
    payload = format_revocation(withdrawal, now)
    parse_revocation(payload, "the revocation to sign", key.keyid)
    return seal(payload, key)


def format_revocation(withdrawal: Withdrawal, now: datetime) -> bytes:
    """The statement's bytes."""
    subject = withdrawal.subject
    predicate = {
        "format": FORMAT,
        "subject": {
            "target": subject.target,
            "index": subject.index,
            "manifest": subject.manifest,
            "config": subject.config,
        },
        "verdicts": list(withdrawal.verdicts),
        "capability": withdrawal.capability,
        "why": withdrawal.why,
        "issued": format_time(now.replace(microsecond=0)),
    }
    return format_statement(subject, REVOCATION, predicate)


def parse_revocation(payload: bytes, where: str, keyid: str) -> Revocation:
    """What `format_revocation` wrote. Raises StatementError for any other bytes."""
    row = fields(
        parse_predicate(payload, where, REVOCATION), where, "format subject verdicts capability why issued"
    )
    if row["format"] != FORMAT or isinstance(row["format"], bool):
        raise fault(f"{where}: format", f"this version reads {FORMAT}")
    part = fields(row["subject"], f"{where}: subject", "target index manifest config")
    subject = Subject(
        target=word(part["target"], f"{where}: subject.target", NAME, empty=True),
        index=word(part["index"], f"{where}: subject.index", DIGEST),
        manifest=word(part["manifest"], f"{where}: subject.manifest", DIGEST),
        config=word(part["config"], f"{where}: subject.config", DIGEST),
    )
    withdrawal = Withdrawal(
        subject=subject,
        why=_why(row["why"], f"{where}: why"),
        verdicts=_digests(row["verdicts"], f"{where}: verdicts"),
        capability=word(row["capability"], f"{where}: capability", CAPABILITY, empty=True),
    )
    issued = parse_time(row["issued"], f"{where}: issued")
    if format_revocation(withdrawal, issued) != payload:
        raise fault(where, "its subjects are not what it says, or it is spelt in another way")
    return Revocation(
        subjects=(subject.manifest, subject.config),
        verdicts=withdrawal.verdicts,
        capability=withdrawal.capability,
        before=issued,
        why=withdrawal.why,
        keyid=keyid,
    )


def _why(value: Any, where: str) -> str:
    text = line(value, where)
    if not text.strip():
        raise fault(where, "it gives no reason")
    return text


def _digests(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MOST_VERDICTS:
        raise fault(where, f"that is no list of at most {MOST_VERDICTS}")
    return tuple(word(one, where, DIGEST) for one in value)


# --- which of them count -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoked:
    """The revocations that count for a subject, and why others do not, one line each."""

    heeded: tuple[Revocation, ...]
    ignored: tuple[str, ...]


def judge_revocations(found: Mapping[str, bytes], subject: Subject, court: Court) -> Revoked:
    """Of the envelopes about `subject`, by their artifacts' digests, those of keys trusted at that time.

    A revocation never expires. Any trusted key may take back what another signed.
    """
    heeded, ignored = [], []
    for digest, data in sorted(found.items()):
        opened = open_signed(data, court.trust)
        if opened.envelope is None or opened.key is None or opened.standing is not Standing.GOOD:
            ignored.append(f"revocation {digest}: {opened.standing}, {opened.why}")
            continue
        try:
            one = parse_revocation(opened.envelope.payload, "statement", opened.envelope.keyid)
        except StatementError as error:
            ignored.append(f"revocation {digest}: malformed, {error.message}")
            continue
        late = out_of_period(opened.key, one.before)
        if late is None and one.before > court.now + SKEW:
            late = Standing.NOT_YET, "it is of a time that is still to come"
        if late is None and not {subject.manifest, subject.config} & set(one.subjects):
            late = Standing.OTHER_SUBJECT, f"it speaks of {one.subjects[0]}"
        if late:
            ignored.append(f"revocation {digest}: {late[0]}, {late[1]}")
        else:
            heeded.append(one)
    return Revoked(heeded=tuple(heeded), ignored=tuple(ignored))
