"""Tags that follow verdicts.

trust/tags.py decides, here it is done. One at a time moves tags from one store; where another store's
promoter was at a tag meanwhile, all is read and decided anew. Where the policy requires approvals
(`promotion-signatures`), a promotion to a registry adds this user's own, and moves what enough keys approved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from imagefactory.access import Access
from imagefactory.actions.audit import log_acts, log_statements
from imagefactory.actions.images import PromotionRequest, belongs, list_verdicts, read_candidates
from imagefactory.actions.verdicts import (
    ANY,
    StatementRequest,
    attach_to,
    check_key_trusted,
    find_in,
    local_place,
    read_verification_policy,
    registry_of,
    signing_key,
    subject_name,
    writing,
)
from imagefactory.errors import CheckFailedError, ImagefactoryError, RegistryError, UsageError, os_problem
from imagefactory.fs import replacing
from imagefactory.model import Target
from imagefactory.oci.candidates import (
    APPROVAL_TYPE,
    CANDIDATE,
    PORTABLE_TYPE,
    REVOCATION_TYPE,
    VERDICT_TYPE,
    plain_tag,
)
from imagefactory.oci.graph import WITHDRAWN, StoreRepository, read_manifest, withdraw_tag
from imagefactory.oci.layout import LayoutStore
from imagefactory.oci.manifests import digest_of
from imagefactory.oci.sif import SIF_TYPE
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.trust.approval import Approvals, ApprovalSubject, others, sign_approval, verify_approvals
from imagefactory.trust.attached import (
    AttachJournal,
    SignedStatement,
    attach,
    put_statement,
    read_statements,
    read_subject,
    stored_statements,
)
from imagefactory.trust.audit import PROMOTE, AuditEntry
from imagefactory.trust.judgement import (
    RevocationRequest,
    VerdictSet,
    VerificationPolicy,
    find_verdicts,
    out_of_period,
    sign_revocation,
    verify_envelope,
    verify_revocations,
)
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import RECORDS, TrustedKey, TrustRules, format_record
from imagefactory.trust.tags import PromotionRule, TagDecision, approve_tag, decide_tags
from imagefactory.trust.verdict import VerdictStatus, VerificationResult
from imagefactory.verify.report import VerifiedImage

TRIES = 3
"""How often tags are decided anew when another promoter moved one meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionResult:
    """What became of the tags. `faults` are those that could not be moved, with why."""

    target: str
    place: str
    fates: tuple[TagDecision, ...]
    faults: tuple[tuple[str, ImagefactoryError], ...] = ()

    @property
    def proven(self) -> bool:
        """Whether any tag points to a candidate that fulfils its rule."""
        return any(fate.proven for fate in self.fates)


def promote(access: Access, promoting: PromotionRequest, progress: Progress) -> PromotionResult:
    """Lets the tags of a target follow the verdicts that can be relied on (promotion.decide_tags).

    Raises RegistryError or StoreError, also when others keep moving the same tags; and what `signing_key` and
    the key raise, where it has to approve.
    """
    place, court = promoting.place, read_verification_policy(access, promoting.now)
    local = isinstance(place.store, LayoutStore)
    rule = PromotionRule(
        plain=plain_tag(promoting.target),
        capabilities=promoting.target.capabilities,
        pointers_only=local and promoting.target.gpu,
    )
    with (
        writing(access, place, progress) as journal,
        progress.stage(f"{promoting.target.name}: tags in {place}"),
    ):
        for _ in range(TRIES):
            read, tags = read_candidates(access, promoting, court, progress)
            fates = decide_tags(rule, [one.candidate for one in read], tags)
            if court.trust.policy.signatures and journal:
                images = {one.candidate.digest: one.verdicts for one in read}
                approver = _Approver(
                    access=access, promoting=promoting, court=court, journal=journal, images=images
                )
                fates = tuple(map(approver.approve, fates))
            faults = () if promoting.dry_run else _move_all(access, place, fates)
            if faults is not None:
                _log(access, promoting, fates, faults)
                return PromotionResult(
                    target=promoting.target.name, place=str(place), fates=fates, faults=faults
                )
    raise RegistryError(
        "tags-contended",
        f"{place}: another process keeps moving the tags of {promoting.target.name}",
        hint="run one promotion at a time: try again when the other has ended",
    )


@dataclass(kw_only=True)
class _Approver:
    """Asks for approvals of what tags would point to, and gives this user's own. The caller is alone."""

    access: Access
    promoting: PromotionRequest
    court: VerificationPolicy
    journal: AttachJournal
    images: Mapping[str, VerdictSet]
    read: dict[str, list[bytes]] = field(default_factory=dict)

    def approve(self, fate: TagDecision) -> TagDecision:
        """The fate of a tag by the approvals that there are, with one of our own where a key signs here."""
        if fate.after not in self.images:  # it goes away, or stays where nobody put it by promotion
            return fate
        now, trust = self.promoting.now, self.court.trust
        needed, counted = trust.policy.signatures, self._approvals(fate.tag, fate.after)
        approved = counted.best()
        if fate.moved and not self._may_go_back(fate, needed):
            approved = counted.by(now)
        if not fate.proven:  # it stays, and nobody approves what no verdict verifies now
            lacks = f"; {len(approved)} of {needed} keys approved it" if len(approved) < needed else ""
            return replace(fate, why=f"{fate.why}{lacks}")
        may_sign = self.promoting.approve and not self.promoting.dry_run
        if len(approved) < needed and may_sign and self._sign(fate, counted.by(now)):
            approved = self._approvals(fate.tag, fate.after).by(now)
        return approve_tag(fate, needed, approved, others(trust, approved, now))

    def _may_go_back(self, fate: TagDecision, needed: int) -> bool:
        """Whether approvals that have ended serve to move a tag: where what it points to must not keep it."""
        if not fate.before:
            return False
        known = fate.before in self.images
        return fate.withdrawn or not known or len(self._approvals(fate.tag, fate.before).best()) < needed

    def _wanted(self, tag: str, digest: str) -> ApprovalSubject:
        subject = replace(self.images[digest].subject, target=self.promoting.target.name)
        return ApprovalSubject(subject=subject, place=str(self.promoting.place), tag=tag)

    def _approvals(self, tag: str, digest: str) -> Approvals:
        wanted, trust = self._wanted(tag, digest), self.court.trust
        manifest = wanted.subject.manifest
        if manifest not in self.read:
            found = read_statements(self.promoting.place, manifest, APPROVAL_TYPE)
            self.read[manifest] = [one.envelope for one in found if one.envelope]
        revoked = self.images[digest].revoked
        return verify_approvals(self.read[manifest], wanted, trust, self.promoting.now, revoked)

    def _sign(self, fate: TagDecision, approved: Sequence[str]) -> bool:
        """Attach our own approval; return whether one was added: by a trusted key that had not approved."""
        place, now, wanted = self.promoting.place, self.promoting.now, self._wanted(fate.tag, fate.after)
        key = signing_key(self.access, now)
        trusted = self.court.trust.key(key.keyid) if key else None
        if key is None or trusted is None or out_of_period(trusted, now):
            who = f"the key '{key.name}' is not trusted here" if key else "there is no signing key"
            self.access.tell(f"{wanted.tag} is not approved by you: {who}")
            return False
        if trusted.name in approved:
            return False
        envelope = sign_approval(wanted, key, now)
        there = read_manifest(place, wanted.subject.manifest).descriptor
        statement = SignedStatement(kind=APPROVAL_TYPE, subject=there, envelope=envelope)
        attach(place, statement, self.journal)
        log_statements(self.access, subject_name(place), (statement,))
        self.read[wanted.subject.manifest].append(envelope)
        return True


def _log(
    access: Access,
    promoting: PromotionRequest,
    fates: Sequence[TagDecision],
    faults: Sequence[tuple[str, ImagefactoryError]],
) -> None:
    failed = {tag for tag, _ in faults}
    moved = [fate for fate in fates if fate.moved and fate.tag not in failed and not promoting.dry_run]
    log_acts(
        access,
        [
            AuditEntry(
                action=PROMOTE,
                what=f"{fate.tag} -> {fate.after or 'removed'}",
                where=subject_name(promoting.place),
                why=fate.why,
            )
            for fate in moved
        ],
    )


def _move_all(
    access: Access, place: StoreRepository, fates: Sequence[TagDecision]
) -> tuple[tuple[str, ImagefactoryError], ...] | None:
    """Moves what moves; gives the faults, or None where another was at one of the tags meanwhile."""
    faults: list[tuple[str, ImagefactoryError]] = []
    for fate in (one for one in fates if one.moved):
        there = place.store.manifest(place.repository, fate.tag)
        if there and there[0].digest == WITHDRAWN.descriptor.digest:
            there = None
        if (there[0].digest if there else "") != fate.before:
            return None
        if fate.after:
            root = read_manifest(place, fate.after)
            put = place.store.put_manifest(place.repository, root.data, root.descriptor.media_type, fate.tag)
            if put.digest != fate.after:
                return None
            continue
        try:
            if not withdraw_tag(place, fate.tag):
                what = (
                    f"{place.store.name} removes no tags: {fate.tag} names an empty image, which nothing runs"
                )
                access.tell(f"note: {what}")
        except RegistryError as error:
            faults.append((fate.tag, error))
    return tuple(faults)


# --- Verdicts taken back, and the tags that follow


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeRequest:
    """What is taken back where: `wanted` is a tag or digest of `place`; the rest is as Withdrawal has it.

    Of the digests in `verdicts` the first digits are enough. `target` is what the image is called.
    """

    place: StoreRepository
    wanted: str
    why: str
    now: datetime
    capability: str = ""
    verdicts: tuple[str, ...] = ()
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeResult:
    """A revocation that was attached, and the verdicts that it takes back, by their digests."""

    place: str
    subject: VerifiedImage
    digest: str
    taken: tuple[str, ...]


def revoke(access: Access, revoking: RevokeRequest, key: SigningKey, progress: Progress) -> RevokeResult:
    """Signs that verdicts of an image hold no longer, attaches it, and remembers it in the store here.

    Raises CheckFailedError where this factory would not heed that key, and where nothing would be taken back.
    """
    place, court = revoking.place, read_verification_policy(access, revoking.now)
    check_key_trusted(key, court.trust, revoking.now)
    subject = read_subject(place, revoking.wanted)
    judged = find_in(access, place, subject, court).judged
    good = [judgement for judgement in judged if judgement.standing is VerdictStatus.GOOD]
    before = {judgement.name for judgement in good}
    # A clock that goes before this one dated some of them ahead, and those are meant as well.
    until = max((judgement.verdict.issued for judgement in good if judgement.verdict), default=revoking.now)
    withdrawal = RevocationRequest(
        subject=replace(subject, target=revoking.target),
        why=revoking.why,
        verdicts=tuple(_full_digest(digits, judged) for digits in revoking.verdicts),
        capability=revoking.capability,
    )
    envelope = sign_revocation(withdrawal, key, max(revoking.now, until))
    known = verify_revocations({"": envelope}, subject, court).heeded
    after = find_verdicts(place, subject, replace(court, revocations=known)).judged
    taken = tuple(
        judgement.name
        for judgement in after
        if judgement.standing is VerdictStatus.REVOKED and judgement.name in before
    )
    if not taken:
        raise CheckFailedError(
            "nothing-to-revoke",
            f"no valid verdict of {place}@{subject.manifest} to revoke",
            hint="see imagefactory verdict list",
        )
    attaching = StatementRequest(subject=subject, kind=REVOCATION_TYPE, envelope=envelope, until=None)
    if not isinstance(place.store, LayoutStore):
        own = local_place(access, ANY)
        there = read_manifest(place, subject.manifest).descriptor
        with writing(access, own, progress):
            put_statement(own, SignedStatement(kind=REVOCATION_TYPE, subject=there, envelope=envelope))
    return RevokeResult(
        place=str(place), subject=subject, digest=attach_to(access, place, attaching, progress), taken=taken
    )


def _full_digest(text: str, judged: Sequence[VerificationResult]) -> str:
    digits = text.removeprefix("sha256:")
    names = {one.name for one in judged if one.verdict}
    digests = [one for one in names if digits and one.removeprefix("sha256:").startswith(digits)]
    if len(digests) != 1:
        raise UsageError(
            "verdict-not-unique",
            f"'{text[:80]}' matches {len(digests)} verdicts of this image",
            hint="use a digest that imagefactory verdict list shows",
        )
    return digests[0]


def follow(
    access: Access, revoked: RevokeRequest, target: Target, progress: Progress
) -> tuple[PromotionResult, ...]:
    """Lets the target's tags follow what was taken back, where that was and in the store here."""
    places, local = [revoked.place], local_place(access, target.family)
    if not isinstance(revoked.place.store, LayoutStore) and any(
        belongs(tag, plain_tag(target)) for tag in local.store.tags(local.repository)
    ):
        places.append(local)
    return tuple(
        promote(
            access, PromotionRequest(target=target, place=place, now=revoked.now, approve=False), progress
        )
        for place in places
    )


# --- A key that ends: what it signed in its time is recorded before it is retired
# A signature has no clock of its own: who holds a key writes any date. So a record is made of what lies in
# the
# store, in its journal and in the registry now; later nothing enters it any more.


_STATEMENT_TYPES = (VERDICT_TYPE, PORTABLE_TYPE, APPROVAL_TYPE)


def record_of(factory: Project, key: TrustedKey, now: datetime, progress: Progress) -> bytes:
    """The record of what a key has signed so far: verdicts, statements of portability and approvals.

    Raises RegistryError if the registry of the settings does not answer: what lies there would be lost.
    """
    trust = TrustRules(keys=(key,))
    envelopes = {*_stored(factory), *_registered(factory, now, progress)}
    opened = [one for data in envelopes if (one := verify_envelope(data, trust)).key]
    return format_record(digest_of(one.envelope.payload) for one in opened if one.envelope)


def _stored(factory: Project) -> Iterator[bytes]:
    """What the store here has, and what was attached to registries from it."""
    statements = (*stored_statements(factory.layout), *AttachJournal(factory.layout.path).read_all())
    return (one.envelope for one in statements if one.kind in _STATEMENT_TYPES)


def _registered(factory: Project, now: datetime, progress: Progress) -> Iterator[bytes]:
    """What the registry of the settings has of all targets, and of their .sif files."""
    if not factory.settings.registry.value:
        return
    for target in factory.targets:
        place = registry_of(factory, target.family)
        images = list_verdicts(factory, PromotionRequest(target=target, place=place, now=now), progress)
        manifests = [image.subject.manifest for image in images]
        for manifest in dict.fromkeys((*manifests, *sifs_of(place, target, images))):
            yield from _attached(place, manifest)


def _attached(place: StoreRepository, manifest: str) -> Iterator[bytes]:
    for kind in _STATEMENT_TYPES:
        yield from (one.envelope for one in read_statements(place, manifest, kind) if one.envelope)


def write_record(folder: Path, name: str, record: bytes) -> Path:
    """Write the record of a key beside imagefactory.toml. Raises UsageError."""
    path = folder / RECORDS / f"{name}.txt"
    try:
        path.parent.mkdir(exist_ok=True)
        if path.parent.is_symlink():
            raise UsageError(
                "directory-is-link",
                f"{path.parent} is a symbolic link, so it is not read",
                hint="replace it by a directory",
            )
        with replacing(path, durable=True) as file:
            file.write(record)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    return path


def next_name(name: str, taken: set[str]) -> str:
    """The name of the key that takes the place of another: `lab` becomes `lab-2`, `lab-2` `lab-3`."""
    found = re.fullmatch(r"(.*?)(?:-([0-9]{1,4}))?", name)
    base, number = (found[1], int(found[2] or 1)) if found else (name, 1)
    while (new := f"{base}-{number + 1}") in taken:
        number += 1
    return new


def sifs_of(place: StoreRepository, target: Target, found: Sequence[VerdictSet]) -> list[str]:
    """The .sif files that were made of these images, and those that have tags of the target."""
    store, plain = place.store, plain_tag(target)
    made = [
        one.digest
        for image in found
        for one in store.referrers(place.repository, image.subject.manifest, SIF_TYPE)
    ]
    for tag in store.tags(place.repository):
        match = CANDIDATE.fullmatch(tag)
        if tag == f"{plain}.sif" or (match and match["plain"] == plain and match["suffix"]):
            there = store.manifest(place.repository, tag)
            made += [there[0].digest] if there else []
    return list(dict.fromkeys(made))
