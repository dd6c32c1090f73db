"""Verify statements: decide whether a verdict in a store counts, and if not, why.

    bytes + VerifiedImage + VerificationPolicy -> verify_verdict() -> VerificationResult(standing, why)

Pure functions: clock, trust and revocations are arguments. A verdict without a trusted signature is still
parsed, so that tables can show its claims, but it never counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated

from imagefactory.errors import StatementError
from imagefactory.oci.graph import StoreRepository
from imagefactory.serialize import (
    CAPABILITY,
    Digest,
    MaxRows,
    Pattern,
    format_document,
    format_time,
    invalid_value_error,
    parse_document,
    parse_value,
)
from imagefactory.trust.attached import AttachedStatement, read_revocations, read_verdicts
from imagefactory.trust.envelope import (
    IN_TOTO,
    Envelope,
    EnvelopeForm,
    is_signed_by,
    parse_envelope,
    sign_envelope,
)
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import TrustedKey, TrustRules
from imagefactory.trust.verdict import (
    SKEW,
    Revocation,
    RevokedCell,
    Verdict,
    VerdictStatus,
    VerificationResult,
    format_statement,
    missing_evidence,
    parse_predicate,
    parse_verdict,
)
from imagefactory.verify.report import VerifiedImage
from imagefactory.verify.suite_files import EARLIER_SUITES


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationPolicy:
    """The rules for verdicts: trusted keys, the digest of the current suite, revocations, and the time.

    `vouched` means that a currently trusted key signed the list of these verdicts. Then verdicts by a retired
    key were signed before the key was retired.
    """

    trust: TrustRules
    suite: str
    now: datetime
    revocations: tuple[Revocation, ...] = ()
    vouched: bool = False

    @property
    def suites(self) -> tuple[str, ...]:
        return (self.suite, *EARLIER_SUITES, *self.trust.policy.suites)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedEnvelope:
    """An envelope and the status of its signature: GOOD for a trusted key. `why` is one line."""

    standing: VerdictStatus
    why: str
    envelope: Envelope | None = None
    key: TrustedKey | None = None


def verify_envelope(data: bytes, trust: TrustRules, form: EnvelopeForm = IN_TOTO) -> VerifiedEnvelope:
    """Parse an envelope and verify its signature. The payload is not checked."""
    try:
        envelope = parse_envelope(data, "envelope", form)
    except StatementError as error:
        return VerifiedEnvelope(standing=VerdictStatus.MALFORMED, why=error.message)
    key = trust.key(envelope.keyid)
    if not envelope.signature:
        standing, reason = VerdictStatus.UNSIGNED, "it is not signed"
    elif key is None:
        standing, reason = VerdictStatus.WRONG_KEY, f"no trusted key is {envelope.keyid[:16]}..."
    elif not is_signed_by(envelope, key.keyid, key.public):
        standing, reason = VerdictStatus.EDITED, f"it is not what '{key.name}' signed"
    else:
        reason = f"signed by '{key.name}'"
        return VerifiedEnvelope(envelope=envelope, key=key, standing=VerdictStatus.GOOD, why=reason)
    return VerifiedEnvelope(envelope=envelope, standing=standing, why=reason)


def period_problem(key: TrustedKey, issued: datetime, digest: str = "") -> tuple[VerdictStatus, str] | None:
    """Return the problem if a key is not trusted for a statement issued at that time, or None.

    Times have whole seconds. A payload signed in the second in which the key was retired counts if its
    `digest` was recorded then.
    """
    if issued < key.since:
        return VerdictStatus.WRONG_KEY, f"'{key.name}' is trusted from {format_time(key.since)} on only"
    if issued > key.until or (issued == key.until and digest not in key.signed):
        return VerdictStatus.KEY_RETIRED, f"'{key.name}' was trusted until {format_time(key.until)}"
    return None


def unrecorded_reason(key: TrustedKey, digest: str, now: datetime) -> tuple[VerdictStatus, str] | None:
    """Return the problem if a statement by a retired key is not trusted although its date is in the period,
    or None.

    The owner of the key chooses that date. `digest` is the digest of the payload.
    """
    if now < key.until or digest in key.signed:
        return None
    lacks = "does not have this" if key.signed else "is missing"
    reason = f"'{key.name}' is retired since {format_time(key.until)}, and the record of that day {lacks}"
    return VerdictStatus.KEY_RETIRED, reason


def verify_verdict(
    data: bytes, digest: str, subject: VerifiedImage, policy: VerificationPolicy
) -> VerificationResult:
    """Verify one envelope. `digest` is the digest of its artifact and does not affect the result.

    The first problem decides, in this order: envelope, key, signature, statement, period of the key, subject,
    suite, evidence, revocation, time. Only `verify_verdicts` finds `replayed` verdicts.
    """
    envelope_result = verify_envelope(data, policy.trust)
    if envelope_result.envelope is None:
        return VerificationResult(
            digest=digest, standing=envelope_result.standing, why=envelope_result.why, verdict=None
        )
    try:
        verdict = parse_verdict(envelope_result.envelope.payload, "statement", envelope_result.envelope.keyid)
    except StatementError as error:
        standing, reason = envelope_result.standing, envelope_result.why
        if envelope_result.key:
            standing, reason = VerdictStatus.MALFORMED, error.message
        return VerificationResult(digest=digest, standing=standing, why=reason, verdict=None)
    standing, reason = envelope_result.standing, envelope_result.why
    if envelope_result.key is not None:
        standing, reason = _verify(verdict, envelope_result.key, subject, policy) or (standing, reason)
    revoked = next((revocation for revocation in policy.revocations if revocation.covers(verdict)), None)
    by = revoked if standing is VerdictStatus.REVOKED else None
    return VerificationResult(digest=digest, standing=standing, why=reason, verdict=verdict, revocation=by)


def verify_verdicts(
    envelopes: Mapping[str, bytes], subject: VerifiedImage, policy: VerificationPolicy
) -> tuple[VerificationResult, ...]:
    """Verify all envelopes about a subject, given by the digests of their artifacts.

    Return the earliest issued first.

    A nonce can be used once: of two statements with the same nonce, the later one is `replayed`. A verdict in
    several artifacts is one row.
    """
    judged = [verify_verdict(data, digest, subject, policy) for digest, data in envelopes.items()]
    judged.sort(key=_order)
    first: dict[str, Verdict] = {}
    result = []
    for judgement in judged:
        if judgement.standing is VerdictStatus.GOOD and judgement.verdict is not None:
            known = first.setdefault(judgement.verdict.report.nonce, judgement.verdict)
            if known != judgement.verdict:
                reason = f"its nonce is that of {known.digest}"
                judgement = replace(judgement, standing=VerdictStatus.REPLAYED, why=reason)
        result.append(judgement)
    rows = {
        (row.standing, row.verdict.keyid, row.verdict.digest) if row.verdict else row.digest: row
        for row in reversed(result)
    }
    return tuple(reversed(rows.values()))


def expires(verdict: Verdict, trust: TrustRules) -> datetime:
    """Return when a verdict expires: the earlier of its expiry date and the limit of this project's
    policy.
    """
    return verdict.issued + min(verdict.expires - verdict.issued, timedelta(days=trust.policy.days))


def expiring_cells(
    judged: Iterable[VerificationResult], trust: TrustRules, until: datetime
) -> tuple[tuple[str, datetime], ...]:
    """Return the capability and expiry of each verification that is valid now and expires by `until`."""
    last: dict[str, datetime] = {}
    for judgement in judged:
        if judgement.proves and judgement.verdict and (device := judgement.verdict.report.device):
            end = expires(judgement.verdict, trust)
            last[device.row] = max(end, last.get(device.row, end))
    return tuple((capability, end) for capability, end in sorted(last.items()) if end <= until)


def _verify(
    verdict: Verdict, key: TrustedKey, subject: VerifiedImage, policy: VerificationPolicy
) -> tuple[VerdictStatus, str] | None:
    late = period_problem(key, verdict.issued, verdict.digest)
    if late is None and not policy.vouched:
        late = unrecorded_reason(key, verdict.digest, policy.now)
    if late:
        return late
    report = verdict.report
    # Only the manifest: podman and apptainer unpack layers that do not match the config's diff IDs.
    if report.subject.manifest != subject.manifest:
        return VerdictStatus.OTHER_SUBJECT, f"it speaks of {report.subject.manifest}"
    if report.suite not in policy.suites:
        reason = f"it is of the suite {report.suite[:19]}..., not of {policy.suite[:19]}..."
        return VerdictStatus.OTHER_SUITE, reason
    gap = missing_evidence(report)
    if gap or report.hardware is None:
        return VerdictStatus.EVIDENCE_REFUSED, gap
    kind = report.hardware.kind
    if kind not in policy.trust.policy.evidence or kind not in key.evidence:
        whose = f"'{key.name}'" if kind in policy.trust.policy.evidence else "the policy"
        return VerdictStatus.EVIDENCE_REFUSED, f"{whose} does not accept evidence of type '{kind}'"
    revoked = next((revocation for revocation in policy.revocations if revocation.covers(verdict)), None)
    if revoked:
        return VerdictStatus.REVOKED, revoked.why
    if verdict.issued - policy.now > SKEW:
        return VerdictStatus.NOT_YET, f"it is issued at {format_time(verdict.issued)}, which is still to come"
    end = expires(verdict, policy.trust)
    if policy.now >= end:
        return VerdictStatus.EXPIRED, f"it expired at {format_time(end)}"
    return None


def _order(judged: VerificationResult) -> tuple[bool, str, str]:
    issued = "" if judged.verdict is None else judged.verdict.issued.strftime("%Y%m%d%H%M%S")
    return judged.verdict is None, issued, judged.digest


# --- Revocations: signed statements that verdicts of an image are no longer valid
#     sign_revocation() -> envelope          envelope -> verify_revocations() -> Revocation
# A revocation is about the verdicts of one image that it names, or about all that were signed until then, so
# a later run can verify the image again. It is an in-toto statement like a verdict, about the same manifest,
# attached to it, and parsed as strictly.

REVOCATION = "https://imagefactory.dev/revocation/v1"
FORMAT = 1
MOST_VERDICTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RevocationRequest:
    """A request to revoke verdicts of `subject`.

    `verdicts` are digests of signed payloads. `why` is one line.

    Without `verdicts`, all verdicts signed until now are revoked: on `capability`, or on any if it is empty.
    """

    subject: VerifiedImage
    why: str
    verdicts: Annotated[tuple[Digest, ...], MaxRows(MOST_VERDICTS)] = ()
    capability: Annotated[str, Pattern(CAPABILITY, empty=True)] = ""


def sign_revocation(withdrawal: RevocationRequest, key: SigningKey, now: datetime) -> bytes:
    """Return the envelope of a revocation.

    Raises StatementError for a reason that is not one printable line.
    """
    payload = format_revocation(withdrawal, now)
    parse_revocation(payload, "the revocation to sign", key.keyid)
    return sign_envelope(payload, key)


def format_revocation(withdrawal: RevocationRequest, now: datetime) -> bytes:
    """Return the statement's bytes."""
    predicate = {"issued": format_time(now.replace(microsecond=0)), **format_document(withdrawal, FORMAT)}
    return format_statement(withdrawal.subject, REVOCATION, predicate)


def parse_revocation(payload: bytes, location: str, keyid: str) -> Revocation:
    """Parse the output of `format_revocation`. Raises StatementError for other bytes."""
    row = dict(parse_predicate(payload, location, REVOCATION))
    issued = parse_value(row.pop("issued", None), datetime, f"{location}: issued")
    withdrawal = parse_document(row, RevocationRequest, FORMAT, location)
    subject = withdrawal.subject
    if not withdrawal.why.strip():
        raise invalid_value_error(f"{location}: why", "it gives no reason")
    if format_revocation(withdrawal, issued) != payload:
        raise invalid_value_error(location, "its subjects do not match, or it is not in canonical form")
    return Revocation(
        subject=subject.manifest,
        verdicts=withdrawal.verdicts,
        capability=withdrawal.capability,
        before=issued,
        why=withdrawal.why,
        keyid=keyid,
        about=subject,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRevocations:
    """The valid revocations of a subject, and a line for each invalid one."""

    heeded: tuple[Revocation, ...]
    ignored: tuple[str, ...]


def verify_revocations(
    envelopes: Mapping[str, bytes], subject: VerifiedImage, policy: VerificationPolicy
) -> SubjectRevocations:
    """Verify the revocations about `subject`, given by the digests of their artifacts.

    Revocations never expire. Each trusted key can revoke verdicts signed by any key. A retired key can revoke
    only verdicts that were issued in its period.
    """
    heeded, ignored = [], []
    for digest, data in sorted(envelopes.items()):
        envelope_result = verify_envelope(data, policy.trust)
        if (
            envelope_result.envelope is None
            or envelope_result.key is None
            or envelope_result.standing is not VerdictStatus.GOOD
        ):
            ignored.append(f"revocation {digest}: {envelope_result.standing}, {envelope_result.why}")
            continue
        try:
            revocation = parse_revocation(
                envelope_result.envelope.payload, "statement", envelope_result.envelope.keyid
            )
        except StatementError as error:
            ignored.append(f"revocation {digest}: malformed, {error.message}")
            continue
        # Revocations are not recorded. One from the second in which its key was retired only removes trust.
        last = envelope_result.key.since < revocation.before == envelope_result.key.until
        late = None if last else period_problem(envelope_result.key, revocation.before)
        if late is None and revocation.before > policy.now + SKEW:
            late = VerdictStatus.NOT_YET, "it is of a time that is still to come"
        if late is None and revocation.subject != subject.manifest:
            late = VerdictStatus.OTHER_SUBJECT, f"it speaks of {revocation.subject}"
        if late:
            ignored.append(f"revocation {digest}: {late[0]}, {late[1]}")
        else:
            retired = envelope_result.key.until <= policy.now
            heeded.append(replace(revocation, end=envelope_result.key.until) if retired else revocation)
    return SubjectRevocations(heeded=tuple(heeded), ignored=tuple(ignored))


# --- Revoked verdicts as rows: who revoked them, when, why, and of which image

MOST = 200
"""The limit of rows for one target; older ones are skipped."""


def cell_of(
    revocation: Revocation, subject: VerifiedImage, capability: str, trust: TrustRules
) -> RevokedCell:
    """Return the row of a revocation signed by a key in `trust`."""
    key = trust.key(revocation.keyid)
    return RevokedCell(
        subject=subject,
        capability=capability,
        by=key.name if key else "unknown",
        keyid=revocation.keyid,
        when=revocation.before,
        why=revocation.why,
    )


def revoked_cells(
    judged: Iterable[VerificationResult], subject: VerifiedImage, trust: TrustRules
) -> tuple[RevokedCell, ...]:
    """Return a row for each revoked verdict of one image, without duplicate capabilities."""
    rows = (
        cell_of(
            judgement.revocation,
            subject,
            device.capability if (device := judgement.verdict.report.device) else "",
            trust,
        )
        for judgement in judged
        if judgement.standing is VerdictStatus.REVOKED and judgement.revocation and judgement.verdict
    )
    return tuple(dict.fromkeys(rows))


def merge_revoked(*sources: Iterable[RevokedCell]) -> tuple[RevokedCell, ...]:
    """Merge rows of several sources, the newest first.

    A row for any GPU is included only if no other row has its GPUs.
    """
    rows = list(dict.fromkeys(row for source in sources for row in source))
    exact = {(row.subject.manifest, row.keyid, row.when) for row in rows if row.capability}
    rows = [row for row in rows if row.capability or (row.subject.manifest, row.keyid, row.when) not in exact]
    rows.sort(key=lambda row: (row.when, row.subject.manifest, row.capability), reverse=True)
    return tuple(rows[:MOST])


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSet:
    """The verified verdicts of one image. `ignored` lists revocations that are not valid, and why.

    `tags` are the tags of the target that point to the image, if requested. The keys of `envelopes` and
    `revocations` are the digests of the artifacts. `revoked` lists revoked verdicts and the keys that revoked
    them.
    """

    place: str
    subject: VerifiedImage
    judged: tuple[VerificationResult, ...]
    ignored: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    envelopes: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    revocations: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    revoked: tuple[RevokedCell, ...] = ()


def find_verdicts(
    repository: StoreRepository,
    subject: VerifiedImage,
    policy: VerificationPolicy,
    also: Sequence[StoreRepository] = (),
) -> VerdictSet:
    """Return all verdicts on an image in `repository`, with its revocations and those in `also` applied.

    Verdicts are attached to the manifest of a platform. A verdict about the same content in another packaging
    can be revoked only at the other manifest. A bundle with a certificate is a result only if no key signed
    the same verdict. Raises RegistryError or StoreError.
    """
    verdicts = read_verdicts(repository, subject.manifest)
    envelopes = _envelopes(verdicts)
    first = verify_verdicts(envelopes, subject, policy)
    good = [
        judgement.verdict
        for judgement in first
        if judgement.verdict and judgement.standing is VerdictStatus.GOOD
    ]
    manifests = sorted({subject.manifest, *(verdict.report.subject.manifest for verdict in good)})
    against = [
        attached
        for each in (repository, *also)
        for manifest in manifests
        for attached in read_revocations(each, manifest)
    ]
    revocations = _envelopes(against)
    revoked = verify_revocations(revocations, subject, policy)
    faults = {attached.digest: attached.fault for attached in verdicts if attached.fault}
    judged = verify_verdicts(
        envelopes, subject, replace(policy, revocations=policy.revocations + revoked.heeded)
    )
    signed = {judgement.name for judgement in judged if judgement.digest not in faults}
    explained = tuple(
        replace(judgement, why=faults.get(judgement.digest, judgement.why))
        for judgement in judged
        if judgement.digest not in faults or judgement.name not in signed
    )
    return VerdictSet(
        place=str(repository),
        subject=subject,
        judged=explained,
        ignored=revoked.ignored,
        envelopes=envelopes,
        revocations=revocations,
        revoked=revoked_cells(explained, subject, policy.trust),
    )


def _envelopes(attached: Sequence[AttachedStatement]) -> Mapping[str, bytes]:
    return {statement.digest: statement.envelope for statement in attached}
