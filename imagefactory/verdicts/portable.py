"""Statements of portability: signed like verdicts, with a word of their own, and never one of them.

    PortableReport -> sign_portable() -> envelope        envelope -> judge_portable() -> JudgedPortable

An in-toto Statement v1 about the image that exported the models; its predicate is the report, which names
each model's file by digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from imagefactory.serialize import Fields, fault, format_time
from imagefactory.errors import StatementError
from imagefactory.oci.manifests import digest_of
from imagefactory.trust.envelope import parse_envelope, seal
from imagefactory.trust.judgement import not_witnessed, open_signed, out_of_period
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.verdict import Standing
from imagefactory.verdicts.statement import LONGEST_LIFE, SKEW, format_statement, parse_predicate
from imagefactory.trust.policy import Trust
from imagefactory.verify.model import Subject
from imagefactory.extras.portability.report import PortableReport, format_portable, parse_portable

PORTABLE = "https://imagefactory.dev/portable/v1"

_PERIOD = Fields(issued=datetime, expires=datetime)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableStatement:
    """A report that somebody signed, and until when it counts."""

    report: PortableReport
    issued: datetime
    expires: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedPortable:
    """A statement and its envelope."""

    statement: PortableStatement
    envelope: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPortable:
    """A statement found beside an image: `why` says why it cannot be relied on where it is not GOOD."""

    digest: str
    standing: Standing
    why: str
    statement: PortableStatement | None


def sign_portable(report: PortableReport, key: SigningKey, *, now: datetime, days: int) -> SignedPortable:
    """A statement that is good for `days` days.

    Raises StatementError where a model did not compute the same in a runtime that was asked for.
    """
    if not report.portable:
        raise StatementError(
            "report-not-signable",
            "this report cannot be signed: a model did not compute the same results",
            hint="see the failed rows of the report",
        )
    issued = now.replace(microsecond=0)
    made = PortableStatement(report=report, issued=issued, expires=issued + timedelta(days=days))
    payload = format_statement_of(made)
    parse_statement(payload, "the statement to sign")  # nothing is signed that nobody would read
    envelope = seal(payload, key)
    parse_envelope(envelope, "the statement to sign")
    return SignedPortable(statement=made, envelope=envelope)


def format_statement_of(made: PortableStatement) -> bytes:
    """The statement's bytes."""
    period = {"issued": format_time(made.issued), "expires": format_time(made.expires)}
    return format_statement(made.report.subject, PORTABLE, {**format_portable(made.report), **period})


def parse_statement(payload: bytes, where: str) -> PortableStatement:
    """What `format_statement_of` wrote. Raises StatementError for any other bytes."""
    row = dict(parse_predicate(payload, where, PORTABLE))
    period = _PERIOD.parse({name: row.pop(name, None) for name in ("issued", "expires")}, where)
    made = PortableStatement(report=parse_portable(row, where), **period)
    if not made.report.portable:
        raise fault(where, "a model in it did not compute the same results")
    if not timedelta(0) < made.expires - made.issued <= LONGEST_LIFE:
        raise fault(f"{where}: expires", f"it is not within {LONGEST_LIFE.days} days after it was issued")
    if made.report.ended - made.issued > SKEW:
        raise fault(f"{where}: ended", "it is after the signature")
    if format_statement_of(made) != payload:
        raise fault(where, "its subjects do not match its report, or it is not in canonical form")
    return made


def judge_portable(data: bytes, digest: str, subject: Subject, trust: Trust, now: datetime) -> JudgedPortable:
    """What an envelope found beside `subject` is worth; `digest` is that of the artifact that carries it."""
    opened = open_signed(data, trust)
    made: PortableStatement | None = None
    standing, why = opened.standing, opened.why
    if opened.envelope is not None:
        try:
            made = parse_statement(opened.envelope.payload, "statement")
        except StatementError as error:
            if opened.key:
                standing, why = Standing.MALFORMED, error.message
    if opened.key is not None and made is not None and standing is Standing.GOOD:
        own, payload = made.report.subject, digest_of(opened.envelope.payload) if opened.envelope else ""
        late = out_of_period(opened.key, made.issued, payload) or not_witnessed(opened.key, payload, now)
        if late:
            standing, why = late
        elif own.manifest != subject.manifest:
            standing, why = Standing.OTHER_SUBJECT, f"it speaks of {own.manifest}"
        elif made.issued - now > SKEW:
            standing, why = Standing.NOT_YET, f"it is issued at {format_time(made.issued)}"
        elif now >= (end := min(made.expires, made.issued + timedelta(days=trust.policy.days))):
            standing, why = Standing.EXPIRED, f"it held until {format_time(end)}"
    return JudgedPortable(digest=digest, standing=standing, why=why, statement=made)
