"""Signed statements that a tag may point to an image, or that packages are those of Debian.

    sign_approval() -> envelope          envelopes -> verify_approvals() -> Approvals

An approval names the tag, its repository and the digest of the image. So it is not valid for another tag,
repository or image. A policy can require several of them. It is an in-toto statement like a verdict,
attached to the same manifest, and parsed as strictly. Several approvals by one key count once. If the image's
verdicts are revoked, approvals that were signed before the revocation are no longer valid.

    sign_sources() -> envelope           envelopes -> find_sources_signer() -> name of the key

A statement about sources names the manifest of locked files in a registry, and so each of them by its sha256.
It says that the files of type DEB_TYPE come from an index that Debian signed. Its envelope is a layer of the
same artifact. So it stays where a registry deletes manifests without a tag.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from imagefactory.errors import RegistryError, StatementError
from imagefactory.oci.candidates import ENVELOPE_TYPE, SOURCES_TYPE
from imagefactory.oci.graph import Manifest, StoreRepository, artifact_of, parse_parts, read_manifest
from imagefactory.oci.manifests import Descriptor, artifact_type, digest_of
from imagefactory.oci.store import TAG
from imagefactory.serialize import (
    Pattern,
    format_document,
    format_time,
    invalid_value_error,
    parse_document,
    parse_value,
)
from imagefactory.trust.envelope import LARGEST, sign_envelope
from imagefactory.trust.judgement import period_problem, unrecorded_reason, verify_envelope
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import SKEW, RevokedCell, VerdictStatus, format_statement, parse_predicate
from imagefactory.verify.report import VerifiedImage

APPROVAL = "https://imagefactory.dev/approval/v1"
FORMAT = 1
LIFE = timedelta(days=14)
"""The period of validity of an approval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalSubject:
    """The subject of an approval: `tag` in the repository `place` (HOST/NAME) points to `subject.index`."""

    subject: VerifiedImage
    place: str
    tag: Annotated[str, Pattern(TAG)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """An approval by the trusted key `keyid`. It is valid from `issued` until just before `expires`."""

    name: str
    keyid: str
    issued: datetime
    expires: datetime


def sign_approval(subject: ApprovalSubject, key: SigningKey, now: datetime) -> bytes:
    """Return the envelope of a new approval.

    Raises StatementError, and ToolError if a signing program fails.
    """
    payload = format_approval(subject, now.replace(microsecond=0))
    parse_approval(payload, "the approval to sign")
    return sign_envelope(payload, key)


def format_approval(subject: ApprovalSubject, issued: datetime) -> bytes:
    """Return the statement's bytes."""
    times = {"issued": format_time(issued), "expires": format_time(issued + LIFE)}
    return format_statement(subject.subject, APPROVAL, {**times, **format_document(subject, FORMAT)})


def parse_approval(payload: bytes, location: str) -> tuple[ApprovalSubject, datetime]:
    """Parse a payload into the subject of an approval and its time. Raises StatementError for other bytes."""
    row = dict(parse_predicate(payload, location, APPROVAL))
    row.pop("expires", None)
    issued = parse_value(row.pop("issued", None), datetime, f"{location}: issued")
    subject: ApprovalSubject = parse_document(row, ApprovalSubject, FORMAT, location)
    try:
        same = format_approval(subject, issued) == payload
    except OverflowError:  # at the end of the calendar
        same = False
    if not same:
        raise invalid_value_error(
            location, "its times or subjects do not match, or it is not in canonical form"
        )
    return subject, issued


@dataclass(frozen=True, slots=True, kw_only=True)
class Approvals:
    """The approvals of trusted keys for one tag and one image."""

    valid: tuple[Approval, ...] = ()

    def by(self, now: datetime) -> tuple[str, ...]:
        """Return the names of the keys with an approval that is valid at `now`, without duplicates."""
        keys = {
            grant.keyid: grant.name
            for grant in self.valid
            if grant.issued - now <= SKEW and now < grant.expires
        }
        return tuple(sorted(keys.values()))

    def best(self) -> tuple[str, ...]:
        """Return the largest set of keys whose approvals were valid at the same time.

        A tag that was moved at that time stays approved: expired approvals move no tag.
        """
        return max((self.by(grant.issued) for grant in self.valid), key=len, default=())


def verify_approvals(
    envelopes: Iterable[bytes],
    tag_subject: ApprovalSubject,
    trust: TrustRules,
    now: datetime,
    revoked: Iterable[RevokedCell] = (),
) -> Approvals:
    """Return the approvals of `tag_subject` whose key was trusted when they were issued.

    Approvals by a retired key count if they were recorded when the key was retired. The same applies to
    verdicts.
    """
    return Approvals(
        valid=tuple(
            approval
            for subject, approval in read_approvals(envelopes, trust, now, revoked)
            if (subject.subject.index, subject.subject.manifest)
            == (tag_subject.subject.index, tag_subject.subject.manifest)
            and (subject.place, subject.tag) == (tag_subject.place, tag_subject.tag)
        )
    )


def read_approvals(
    envelopes: Iterable[bytes], trust: TrustRules, now: datetime, revoked: Iterable[RevokedCell] = ()
) -> tuple[tuple[ApprovalSubject, Approval], ...]:
    """Return the valid approvals, each with its subject."""
    approvals, ended = [], max((row.when for row in revoked), default=None)
    for data in envelopes:
        envelope_result = verify_envelope(data, trust)
        if (
            envelope_result.envelope is None
            or envelope_result.key is None
            or envelope_result.standing is not VerdictStatus.GOOD
        ):
            continue
        try:
            subject, issued = parse_approval(envelope_result.envelope.payload, "statement")
        except StatementError:  # of another type or version
            continue
        key, digest = envelope_result.key, digest_of(envelope_result.envelope.payload)
        if period_problem(key, issued, digest) or unrecorded_reason(key, digest, now) or issued - now > SKEW:
            continue
        if ended and issued <= ended:
            continue
        approval = Approval(name=key.name, keyid=key.keyid, issued=issued, expires=issued + LIFE)
        approvals.append((subject, approval))
    return tuple(approvals)


def other_trusted_keys(trust: TrustRules, names: Iterable[str], now: datetime) -> tuple[str, ...]:
    """Return the currently trusted keys that are not among `names`."""
    valid = {key.name for key in trust.keys if key.since <= now < key.until}
    return tuple(sorted(valid - set(names)))


# --- Locked packages in a registry

SOURCES = "https://imagefactory.dev/sources/v1"
MOST_SIGNERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcesArtifact:
    """An artifact whose layers are locked files, and envelopes of statements about them."""

    files: tuple[Descriptor, ...]
    envelopes: tuple[Descriptor, ...] = ()

    @property
    def manifest(self) -> Manifest:
        return artifact_of(SOURCES_TYPE, None, (*self.files, *self.envelopes))

    @property
    def subject(self) -> str:
        """The digest that statements are about: that of the manifest without envelopes."""
        return artifact_of(SOURCES_TYPE, None, self.files).descriptor.digest

    def read_envelopes(self, repo: StoreRepository) -> list[bytes]:
        """Return the envelopes, not verified. Raises RegistryError."""
        return [b"".join(repo.store.read(repo.repository, blob)) for blob in self.envelopes]


def read_sources(repo: StoreRepository, tag: str) -> SourcesArtifact:
    """Return the artifact with this tag. Raises RegistryError if there is none, and for other artifacts."""
    manifest = read_manifest(repo, tag)
    _, blobs = parse_parts(manifest)
    kind = artifact_type(json.loads(manifest.data))
    layers = blobs[1:]
    envelopes = tuple(blob for blob in layers if blob.media_type == ENVELOPE_TYPE)
    too_large = any(not 0 < blob.size <= LARGEST for blob in envelopes) or len(envelopes) > MOST_SIGNERS
    if kind != SOURCES_TYPE or too_large:
        raise RegistryError(
            "artifact-malformed",
            f"{repo}:{tag} is not of type {SOURCES_TYPE}, or has more than {MOST_SIGNERS} signatures",
            hint="delete this tag, and push the packages again: imagefactory push --with-sources",
        )
    files = tuple(blob for blob in layers if blob.media_type != ENVELOPE_TYPE)
    return SourcesArtifact(files=files, envelopes=envelopes)


def sign_sources(digest: str, key: SigningKey, now: datetime) -> bytes:
    """Return the envelope of a statement about the manifest `digest` of locked files. Raises ToolError."""
    return sign_envelope(_format_sources(digest, now.replace(microsecond=0)), key)


def _format_sources(digest: str, issued: datetime) -> bytes:
    subject = VerifiedImage(target="sources", index=digest, manifest=digest, config=digest)
    return format_statement(subject, SOURCES, {"format": FORMAT, "issued": format_time(issued)})


def find_sources_signer(
    envelopes: Iterable[bytes], digest: str, trust: TrustRules, now: datetime
) -> tuple[str, str]:
    """Return the name of a trusted key that signed a statement about this manifest, else "" and the reason.

    The key must be trusted for the time of the statement. A statement by a retired key counts if it was
    recorded when the key was retired.
    """
    reasons = []
    for data in envelopes:
        result = verify_envelope(data, trust)
        if result.envelope is None or result.key is None or result.standing is not VerdictStatus.GOOD:
            reasons.append(result.why)
            continue
        payload, key = result.envelope.payload, result.key
        try:
            row = dict(parse_predicate(payload, "statement", SOURCES))
            issued = parse_value(row.get("issued"), datetime, "statement: issued")
            same = _format_sources(digest, issued) == payload
        except (StatementError, OverflowError) as error:
            reasons.append(str(error))
            continue
        problem = period_problem(key, issued, digest_of(payload)) or unrecorded_reason(
            key, digest_of(payload), now
        )
        if not same:
            reasons.append("the statement is about other files")
        elif problem:
            reasons.append(problem[1])
        elif issued - now > SKEW:
            reasons.append("the statement is of a later time than now")
        else:
            return key.name, ""
    return "", reasons[0] if reasons else "it is not signed"
