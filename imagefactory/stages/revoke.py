"""Verdicts taken back, and the tags that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from imagefactory.access import Access
from imagefactory.errors import CheckFailedError, UsageError
from imagefactory.model import Target
from imagefactory.oci.candidates import REVOCATION_TYPE, plain_tag
from imagefactory.oci.graph import Place, read_manifest
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.progress import Progress
from imagefactory.actions.images import Promoting, belongs
from imagefactory.actions.promote import Promotion, promote
from imagefactory.stages.statements import Attaching, attach_to, writing
from imagefactory.actions.verdicts import ANY, find_in, local_place, read_court
from imagefactory.trust.attached import Statement, put_statement
from imagefactory.verdicts.found import find_verdicts
from imagefactory.trust.judgement import out_of_period
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.verdict import Judged, Standing
from imagefactory.verdicts.revocation import Withdrawal, judge_revocations, sign_revocation
from imagefactory.verdicts.subject import read_subject
from imagefactory.verify.model import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoking:
    """What is taken back where: `wanted` is a tag or digest of `place`; the rest is as Withdrawal has it.

    Of the digests in `verdicts` the first digits are enough. `target` is what the image is called.
    """

    place: Place
    wanted: str
    why: str
    now: datetime
    capability: str = ""
    verdicts: tuple[str, ...] = ()
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """A revocation that was attached, and the verdicts that it takes back, by their digests."""

    place: str
    subject: Subject
    digest: str
    taken: tuple[str, ...]


def revoke(access: Access, revoking: Revoking, key: SigningKey, progress: Progress) -> Revoke:
    """Signs that verdicts of an image hold no longer, attaches it, and remembers it in the store here.

    Raises CheckFailedError where this factory would not heed that key, and where nothing would be taken back.
    """
    place, court = revoking.place, read_court(access, revoking.now)
    trusted = court.trust.key(key.keyid)
    late = (None, "it is not trusted") if trusted is None else out_of_period(trusted, revoking.now)
    if late:
        raise CheckFailedError(
            "signer-not-trusted",
            f"signatures of the key '{key.name}' are not valid here: {late[1]}",
            hint=f"run imagefactory keys trust {key.name}, or set IMAGEFACTORY_SIGNING_KEY to another key",
        )
    subject = read_subject(place, revoking.wanted)
    judged = find_in(access, place, subject, court).judged
    good = [judgement for judgement in judged if judgement.standing is Standing.GOOD]
    before = {judgement.name for judgement in good}
    # A clock that goes before this one dated some of them ahead, and those are meant as well.
    until = max((judgement.verdict.issued for judgement in good if judgement.verdict), default=revoking.now)
    withdrawal = Withdrawal(
        subject=replace(subject, target=revoking.target),
        why=revoking.why,
        verdicts=tuple(_whole_digest(digits, judged) for digits in revoking.verdicts),
        capability=revoking.capability,
    )
    envelope = sign_revocation(withdrawal, key, max(revoking.now, until))
    known = judge_revocations({"": envelope}, subject, court).heeded
    after = find_verdicts(place, subject, replace(court, revocations=known)).judged
    taken = tuple(
        judgement.name
        for judgement in after
        if judgement.standing is Standing.REVOKED and judgement.name in before
    )
    if not taken:
        raise CheckFailedError(
            "nothing-to-revoke",
            f"no valid verdict of {place}@{subject.manifest} to revoke",
            hint="see imagefactory verdicts",
        )
    attaching = Attaching(subject=subject, kind=REVOCATION_TYPE, envelope=envelope, until=None)
    if not isinstance(place.store, LayoutStore):
        own = local_place(access, ANY)
        there = read_manifest(place, subject.manifest).descriptor
        with writing(access, own, progress):
            put_statement(own, Statement(kind=REVOCATION_TYPE, subject=there, envelope=envelope))
    return Revoke(
        place=str(place), subject=subject, digest=attach_to(access, place, attaching, progress), taken=taken
    )


def _whole_digest(text: str, judged: Sequence[Judged]) -> str:
    digits = text.removeprefix("sha256:")
    names = {one.name for one in judged if one.verdict}
    digests = [one for one in names if digits and one.removeprefix("sha256:").startswith(digits)]
    if len(digests) != 1:
        raise UsageError(
            "verdict-not-unique",
            f"'{text[:80]}' matches {len(digests)} verdicts of this image",
            hint="use a digest that imagefactory verdicts shows",
        )
    return digests[0]


def follow(access: Access, revoked: Revoking, target: Target, progress: Progress) -> tuple[Promotion, ...]:
    """Lets the target's tags follow what was taken back, where that was and in the store here."""
    places, local = [revoked.place], local_place(access, target.family)
    if not isinstance(revoked.place.store, LayoutStore) and any(
        belongs(tag, plain_tag(target)) for tag in local.store.tags(local.repository)
    ):
        places.append(local)
    return tuple(
        promote(access, Promoting(target=target, place=place, now=revoked.now, approve=False), progress)
        for place in places
    )
