"""Judging: whether a verdict found in a store can be relied on, in one word.

    bytes + Subject + Court -> judge_verdict() -> Judged(standing, why)

Pure: clock, trust and revocations are given. What no trusted key signed is still read, so that tables can
show what it claims, and never counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from imagefactory.serialize import format_time
from imagefactory.errors import StatementError
from imagefactory.trust.envelope import IN_TOTO, Envelope, EnvelopeForm, is_signed_by, parse_envelope
from imagefactory.trust.verdict import Judged, Revocation, Standing, Verdict
from imagefactory.verdicts.statement import SKEW, missing_evidence, parse_verdict
from imagefactory.trust.policy import Trust, TrustedKey
from imagefactory.verify.model import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Court:
    """By what a verdict is judged: whom to believe, the present suite's digest, what was revoked, and now.

    `vouched`: a key that is trusted now signed the list of these verdicts, so what a retired key issued in
    its time was there in its time.
    """

    trust: Trust
    suite: str
    now: datetime
    revocations: tuple[Revocation, ...] = ()
    vouched: bool = False

    @property
    def suites(self) -> tuple[str, ...]:
        return (self.suite, *self.trust.policy.suites)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An envelope and what its signature is worth: `standing` is GOOD for a trusted key's, `why` one line."""

    envelope: Envelope | None
    key: TrustedKey | None
    standing: Standing
    why: str


def open_signed(data: bytes, trust: Trust, form: EnvelopeForm = IN_TOTO) -> Opened:
    """Reads an envelope of ours and checks its signature; nothing of the payload is looked at."""
    try:
        envelope = parse_envelope(data, "envelope", form)
    except StatementError as error:
        return Opened(envelope=None, key=None, standing=Standing.MALFORMED, why=error.message)
    if not envelope.signature:
        return Opened(envelope=envelope, key=None, standing=Standing.UNSIGNED, why="nobody signed it")
    key = trust.key(envelope.keyid)
    if key is None:
        why = f"no trusted key is {envelope.keyid[:16]}..."
        return Opened(envelope=envelope, key=None, standing=Standing.WRONG_KEY, why=why)
    if not is_signed_by(envelope, key.keyid, key.public):
        why = f"it is not what '{key.name}' signed"
        return Opened(envelope=envelope, key=None, standing=Standing.EDITED, why=why)
    return Opened(envelope=envelope, key=key, standing=Standing.GOOD, why=f"signed by '{key.name}'")


def out_of_period(key: TrustedKey, issued: datetime, digest: str = "") -> tuple[Standing, str] | None:
    """Why a key is not believed for what it issued then; None where it is.

    Times have whole seconds: what it signed in the second in which it was retired counts if its payload, by
    `digest`, was recorded then.
    """
    if issued < key.since:
        return Standing.WRONG_KEY, f"'{key.name}' is trusted from {format_time(key.since)} on only"
    if issued > key.until or (issued == key.until and digest not in key.signed):
        return Standing.KEY_RETIRED, f"'{key.name}' was trusted until {format_time(key.until)}"
    return None


def not_witnessed(key: TrustedKey, digest: str, now: datetime) -> tuple[Standing, str] | None:
    """Why a statement of a retired key is not believed though its date fits; None where it is.

    Who holds the key writes that date. `digest` is that of the payload.
    """
    if now < key.until or digest in key.signed:
        return None
    lacks = "does not have this" if key.signed else "is missing"
    since = format_time(key.until)
    return Standing.KEY_RETIRED, f"'{key.name}' is retired since {since}, and the record of that day {lacks}"


def judge_verdict(data: bytes, digest: str, subject: Subject, court: Court) -> Judged:
    """One word for one envelope. `digest` is that of the artifact that carries it, and decides nothing.

    The first that fails decides: envelope, key, signature, statement, the key's period, subject, suite,
    evidence, revocation, time. `replayed` needs the others beside it: `judge_verdicts`.
    """
    opened = open_signed(data, court.trust)
    if opened.envelope is None:
        return Judged(digest=digest, standing=opened.standing, why=opened.why, verdict=None)
    try:
        verdict = parse_verdict(opened.envelope.payload, "statement", opened.envelope.keyid)
    except StatementError as error:
        standing, why = (Standing.MALFORMED, error.message) if opened.key else (opened.standing, opened.why)
        return Judged(digest=digest, standing=standing, why=why, verdict=None)
    standing, why = opened.standing, opened.why
    if opened.key is not None:
        standing, why = _judge(verdict, opened.key, subject, court) or (standing, why)
    revoked = next((one for one in court.revocations if one.covers(verdict)), None)
    by = revoked if standing is Standing.REVOKED else None
    return Judged(digest=digest, standing=standing, why=why, verdict=verdict, revocation=by)


def judge_verdicts(envelopes: Mapping[str, bytes], subject: Subject, court: Court) -> tuple[Judged, ...]:
    """All envelopes of a subject, by the digest of their artifact, the earliest issued first.

    A nonce is spent once: of two statements that bring the same one, the later is `replayed`. A verdict that
    several artifacts carry is one row.
    """
    judged = [judge_verdict(data, digest, subject, court) for digest, data in envelopes.items()]
    judged.sort(key=_order)
    first: dict[str, Verdict] = {}
    result = []
    for judgement in judged:
        if judgement.standing is Standing.GOOD and judgement.verdict is not None:
            known = first.setdefault(judgement.verdict.report.nonce, judgement.verdict)
            if known != judgement.verdict:
                why = f"its nonce is that of {known.digest}"
                judgement = replace(judgement, standing=Standing.REPLAYED, why=why)
        result.append(judgement)
    rows = {
        (row.standing, row.verdict.keyid, row.verdict.digest) if row.verdict else row.digest: row
        for row in reversed(result)
    }
    return tuple(reversed(rows.values()))


def expires(verdict: Verdict, trust: Trust) -> datetime:
    """When it stops to count here: by its own word or by this factory's policy, whichever is earlier."""
    return verdict.issued + min(verdict.expires - verdict.issued, timedelta(days=trust.policy.days))


def ending(judged: Iterable[Judged], trust: Trust, until: datetime) -> tuple[tuple[str, datetime], ...]:
    """(capability, when) of what is proven now and not after `until`: the last of its verdicts decides."""
    last: dict[str, datetime] = {}
    for one in judged:
        if one.proves and one.verdict and (device := one.verdict.report.device):
            end = expires(one.verdict, trust)
            last[device.row] = max(end, last.get(device.row, end))
    return tuple((capability, end) for capability, end in sorted(last.items()) if end <= until)


def _judge(verdict: Verdict, key: TrustedKey, subject: Subject, court: Court) -> tuple[Standing, str] | None:
    late = out_of_period(key, verdict.issued, verdict.digest)
    if late is None and not court.vouched:
        late = not_witnessed(key, verdict.digest, court.now)
    if late:
        return late
    report = verdict.report
    # The manifest alone: podman and apptainer unpack layers that do not match the config's diff IDs.
    if report.subject.manifest != subject.manifest:
        return Standing.OTHER_SUBJECT, f"it speaks of {report.subject.manifest}"
    if report.suite not in court.suites:
        return (
            Standing.OTHER_SUITE,
            f"it is of the suite {report.suite[:19]}..., not of {court.suite[:19]}...",
        )
    gap = missing_evidence(report)
    if gap or report.hardware is None:
        return Standing.EVIDENCE_REFUSED, gap
    kind = report.hardware.kind
    if kind not in court.trust.policy.evidence or kind not in key.evidence:
        whose = f"'{key.name}'" if kind in court.trust.policy.evidence else "the policy"
        return Standing.EVIDENCE_REFUSED, f"{whose} takes no evidence of kind '{kind}'"
    revoked = next((one for one in court.revocations if one.covers(verdict)), None)
    if revoked:
        return Standing.REVOKED, revoked.why
    if verdict.issued - court.now > SKEW:
        return Standing.NOT_YET, f"it is issued at {format_time(verdict.issued)}, which is still to come"
    end = expires(verdict, court.trust)
    if court.now >= end:
        return Standing.EXPIRED, f"it held until {format_time(end)}"
    return None


def _order(judged: Judged) -> tuple[bool, str, str]:
    issued = "" if judged.verdict is None else judged.verdict.issued.strftime("%Y%m%d%H%M%S")
    return judged.verdict is None, issued, judged.digest
