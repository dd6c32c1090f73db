"""Move tags to verified images: promotions, approvals, revocations, and the record of a retired key.

trust/tags.py decides which tags move. A lock ensures that one process moves tags of a store at a time. If
another store moved a tag meanwhile, everything is read and decided again. If the policy requires approvals
(`promotion-signatures`), a promotion to a registry adds the user's own approval, and moves the tags with
enough approvals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from imagefactory.access import Access
from imagefactory.actions.verdicts import (
    ANY,
    StatementRequest,
    attach_to,
    check_key_trusted,
    find_in,
    local_place,
    log_acts,
    log_statements,
    read_verification_policy,
    registry_of,
    signing_key,
    subject_name,
    writing,
)
from imagefactory.errors import (
    CheckFailedError,
    ImagefactoryError,
    NoImageError,
    NothingSelectedError,
    RecipeError,
    RegistryError,
    UsageError,
    os_problem,
)
from imagefactory.fs import replacing
from imagefactory.gpu.capability import architecture
from imagefactory.model import Target
from imagefactory.oci.candidates import (
    APPROVAL_TYPE,
    CANDIDATE,
    CAPABILITY,
    PORTABLE_TYPE,
    REVOCATION_TYPE,
    SOURCES,
    VERDICT_TYPE,
    plain_tag,
    read_pushed,
    read_records,
)
from imagefactory.oci.graph import (
    WITHDRAWN,
    Manifest,
    StoreRepository,
    parse_parts,
    platforms_in,
    read_manifest,
    withdraw_tag,
)
from imagefactory.oci.layout import LayoutStore
from imagefactory.oci.manifests import digest_of, images_of
from imagefactory.oci.sif import SIF_TYPE
from imagefactory.oci.transfer import WORKERS, was_transferred
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.settings.load import read_nonce_store_key
from imagefactory.trust.approval import (
    Approvals,
    ApprovalSubject,
    other_trusted_keys,
    read_sources,
    sign_approval,
    verify_approvals,
)
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
    format_revocation,
    parse_revocation,
    period_problem,
    sign_revocation,
    verify_envelope,
)
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import RECORDS, TrustedKey, TrustRules, format_record
from imagefactory.trust.tags import (
    PromotionRule,
    TagCandidate,
    TagDecision,
    approve_tag,
    decide_tags,
    newest_first,
)
from imagefactory.trust.verdict import Revocation, VerdictStatus, VerificationResult
from imagefactory.verify.report import VerifiedImage

TRIES = 3
"""The most attempts to move tags while another process moves them too."""
_STATEMENT_TYPES = (VERDICT_TYPE, PORTABLE_TYPE, APPROVAL_TYPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionResult:
    """The decision for each tag. `faults` are the tags that could not be moved, with their errors."""

    target: str
    place: str
    fates: tuple[TagDecision, ...]
    faults: tuple[tuple[str, ImagefactoryError], ...] = ()

    @property
    def proven(self) -> bool:
        """Whether at least one tag points to a candidate that fulfills its rule."""
        return any(decision.proven for decision in self.fates)


def promote(access: Access, promoting: PromotionRequest, progress: Progress) -> PromotionResult:
    """Move the tags of a target to the images with valid verdicts (trust/tags.py).

    Raises RegistryError or StoreError, also if other processes keep moving the same tags. Raises the errors
    of `signing_key` and of the key, if it has to approve.
    """
    repo, policy = promoting.place, read_verification_policy(access, promoting.now)
    policy = replace(policy, revocations=promoting.revocations)
    rule = PromotionRule(
        plain=plain_tag(promoting.target),
        capabilities=promoting.target.capabilities,
        pointers_only=isinstance(repo.store, LayoutStore) and promoting.target.gpu,
    )
    with (
        writing(access, repo, progress) as journal,
        progress.stage(f"{promoting.target.name}: tags in {repo}"),
    ):
        for _ in range(TRIES):
            images, tags = read_candidates(access, promoting, policy, progress)
            fates = decide_tags(rule, [image.candidate for image in images], tags)
            if policy.trust.policy.signatures and journal:
                approver = _Approver(
                    access=access,
                    promoting=promoting,
                    trust=policy.trust,
                    journal=journal,
                    images={image.candidate.digest: image.verdicts for image in images},
                )
                fates = tuple(map(approver.approve, fates))
            faults = () if promoting.dry_run else _move_all(access, repo, fates)
            if faults is not None:
                if not promoting.dry_run:
                    failed = {tag for tag, _ in faults}
                    _log_moves(access, repo, (decision for decision in fates if decision.tag not in failed))
                return PromotionResult(
                    target=promoting.target.name, place=str(repo), fates=fates, faults=faults
                )
    raise RegistryError(
        "tags-contended",
        f"{repo}: another process keeps moving the tags of {promoting.target.name}",
        hint="run one promotion at a time: try again when the other has ended",
    )


@dataclass(kw_only=True)
class _Approver:
    """Reads the approvals for new images of tags, and adds the user's own. The caller holds the lock."""

    access: Access
    promoting: PromotionRequest
    trust: TrustRules
    journal: AttachJournal
    images: Mapping[str, VerdictSet]
    envelopes: dict[str, list[bytes]] = field(default_factory=dict)

    def approve(self, decision: TagDecision) -> TagDecision:
        """Return the decision for a tag by its approvals, with the user's own if this machine has a key."""
        if decision.after not in self.images:  # the tag is removed, or keeps an image that was not promoted
            return decision
        now, needed = self.promoting.now, self.trust.policy.signatures
        approvals = self._approvals(decision.tag, decision.after)
        approved = approvals.best()
        if decision.moved and not self._may_go_back(decision, needed):
            approved = approvals.by(now)
        if not decision.proven:  # the tag stays: an image without a valid verdict gets no approval
            lacks = f"; {len(approved)} of {needed} keys approved it" if len(approved) < needed else ""
            return replace(decision, why=f"{decision.why}{lacks}")
        may_sign = self.promoting.approve and not self.promoting.dry_run
        if len(approved) < needed and may_sign and self._sign(decision, approvals.by(now)):
            approved = self._approvals(decision.tag, decision.after).by(now)
        return approve_tag(decision, needed, approved, other_trusted_keys(self.trust, approved, now))

    def _may_go_back(self, decision: TagDecision, needed: int) -> bool:
        """Return whether expired approvals can move a tag, because its current image must lose the tag."""
        if not decision.before:
            return False
        known = decision.before in self.images
        return (
            decision.withdrawn
            or not known
            or len(self._approvals(decision.tag, decision.before).best()) < needed
        )

    def _subject(self, tag: str, digest: str) -> ApprovalSubject:
        subject = replace(self.images[digest].subject, target=self.promoting.target.name)
        return ApprovalSubject(subject=subject, place=str(self.promoting.place), tag=tag)

    def _approvals(self, tag: str, digest: str) -> Approvals:
        approval = self._subject(tag, digest)
        manifest = approval.subject.manifest
        if manifest not in self.envelopes:
            self.envelopes[manifest] = list(_envelopes(self.promoting.place, manifest, APPROVAL_TYPE))
        revoked = self.images[digest].revoked
        return verify_approvals(self.envelopes[manifest], approval, self.trust, self.promoting.now, revoked)

    def _sign(self, decision: TagDecision, approved: Sequence[str]) -> bool:
        """Attach the user's approval. Return whether a trusted key added one that it had not given before."""
        repo, now, approval = (
            self.promoting.place,
            self.promoting.now,
            self._subject(decision.tag, decision.after),
        )
        key = signing_key(self.access, now)
        trusted = self.trust.key(key.keyid) if key else None
        if key is None or trusted is None or period_problem(trusted, now):
            who = f"the key '{key.name}' is not trusted here" if key else "there is no signing key"
            self.access.tell(f"{approval.tag} is not approved by you: {who}")
            return False
        if trusted.name in approved:
            return False
        envelope = sign_approval(approval, key, now)
        manifest = read_manifest(repo, approval.subject.manifest).descriptor
        statement = SignedStatement(kind=APPROVAL_TYPE, subject=manifest, envelope=envelope)
        attach(repo, statement, self.journal)
        log_statements(self.access, subject_name(repo), (statement,))
        self.envelopes[approval.subject.manifest].append(envelope)
        return True


def _log_moves(access: Access, repo: StoreRepository, fates: Iterable[TagDecision]) -> None:
    name = subject_name(repo)
    log_acts(
        access,
        [
            AuditEntry(
                action=PROMOTE,
                what=f"{decision.tag} -> {decision.after or 'removed'}",
                where=name,
                why=decision.why,
            )
            for decision in fates
            if decision.moved
        ],
    )


def _move_all(
    access: Access, repo: StoreRepository, fates: Sequence[TagDecision]
) -> tuple[tuple[str, ImagefactoryError], ...] | None:
    """Move the tags. Return the faults, or None if another process moved one of them meanwhile."""
    faults: list[tuple[str, ImagefactoryError]] = []
    for decision in (decision for decision in fates if decision.moved):
        manifest = repo.store.manifest(repo.repository, decision.tag)
        digest = manifest[0].digest if manifest else ""
        if ("" if digest == WITHDRAWN.descriptor.digest else digest) != decision.before:
            return None
        if decision.after:
            root = read_manifest(repo, decision.after)
            put = repo.store.put_manifest(
                repo.repository, root.data, root.descriptor.media_type, decision.tag
            )
            if put.digest != decision.after:
                return None
            continue
        try:
            if not withdraw_tag(repo, decision.tag):
                access.tell(
                    f"note: {repo.store.name} removes no tags: {decision.tag} names an empty image, "
                    "which nothing runs"
                )
        except RegistryError as error:
            faults.append((decision.tag, error))
    return tuple(faults)


# --- Verdicts revoked, and the tags that follow


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeRequest:
    """The verdicts to revoke, on the image with the tag or digest `wanted` in `place`.

    `verdicts` are digests or their first digits. `target` is the name of the image. With `dry_run` nothing is
    signed and no tag moves.
    """

    place: StoreRepository
    wanted: str
    why: str
    now: datetime
    capability: str = ""
    verdicts: tuple[str, ...] = ()
    target: str = ""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeResult:
    """A revocation, and the digests of the verdicts that it revokes.

    `digest` is the artifact of the revocation; empty if it was not attached.
    """

    place: str
    subject: VerifiedImage
    revocation: Revocation
    digest: str
    taken: tuple[str, ...]


def revoke(access: Access, revoking: RevokeRequest, key: SigningKey, progress: Progress) -> RevokeResult:
    """Sign a revocation of verdicts, attach it to the image, and store it locally, unless it is a dry run.

    Raises CheckFailedError if this project does not trust the key, or if there is nothing to revoke.
    """
    repo, policy = revoking.place, read_verification_policy(access, revoking.now)
    check_key_trusted(key, policy.trust, revoking.now)
    subject = read_subject(repo, revoking.wanted)
    judged = find_in(access, repo, subject, policy).judged
    valid = [row for row in judged if row.standing is VerdictStatus.GOOD]
    # Includes verdicts with a later date, from a machine whose clock is ahead.
    until = max((row.verdict.issued for row in valid if row.verdict), default=revoking.now)
    request = RevocationRequest(
        subject=replace(subject, target=revoking.target),
        why=revoking.why,
        verdicts=tuple(_full_digest(digits, judged) for digits in revoking.verdicts),
        capability=revoking.capability,
    )
    issued = max(revoking.now, until)
    check_key_trusted(key, policy.trust, issued)
    revocation = parse_revocation(format_revocation(request, issued), "the revocation to sign", key.keyid)
    after = find_verdicts(repo, subject, replace(policy, revocations=(revocation,))).judged
    before = {row.name for row in valid}
    revoked = tuple(row.name for row in after if row.standing is VerdictStatus.REVOKED and row.name in before)
    if not revoked:
        raise CheckFailedError(
            "nothing-to-revoke",
            f"no valid verdict of {repo}@{subject.manifest} to revoke",
            hint="to see its verdicts, run imagefactory verdict list",
        )
    result = RevokeResult(place=str(repo), subject=subject, revocation=revocation, digest="", taken=revoked)
    if revoking.dry_run:
        return result
    envelope = sign_revocation(request, key, issued)
    if not isinstance(repo.store, LayoutStore):
        local_repository = local_place(access, ANY)
        manifest = read_manifest(repo, subject.manifest).descriptor
        with writing(access, local_repository, progress):
            put_statement(
                local_repository, SignedStatement(kind=REVOCATION_TYPE, subject=manifest, envelope=envelope)
            )
    statement = StatementRequest(subject=subject, kind=REVOCATION_TYPE, envelope=envelope, until=None)
    return replace(result, digest=attach_to(access, repo, statement, progress))


def _full_digest(text: str, judged: Sequence[VerificationResult]) -> str:
    digits = text.removeprefix("sha256:")
    names = {row.name for row in judged if row.verdict}
    digests = [name for name in names if digits and name.removeprefix("sha256:").startswith(digits)]
    if len(digests) != 1:
        raise UsageError(
            "verdict-not-unique",
            f"'{text[:80]}' matches {len(digests)} verdicts of this image",
            hint="use more digits of a digest from imagefactory verdict list",
        )
    return digests[0]


def follow(
    access: Access, revoked: RevokeRequest, revocation: Revocation, target: Target, progress: Progress
) -> tuple[PromotionResult, ...]:
    """Move the tags of the target after a revocation, in its place and in the local store."""
    places, local = [revoked.place], local_place(access, target.family)
    if not isinstance(revoked.place.store, LayoutStore) and any(
        belongs(tag, plain_tag(target)) for tag in local.store.tags(local.repository)
    ):
        places.append(local)
    return tuple(
        promote(
            access,
            PromotionRequest(
                target=target,
                place=repo,
                now=revoked.now,
                dry_run=revoked.dry_run,
                approve=False,
                revocations=(revocation,),
            ),
            progress,
        )
        for repo in places
    )


# --- Retiring a key: a record of all that it signed is written first
# A signature has no clock: the owner of a key can write any date. So the record lists the statements now in
# the store, in its journal and in the registry, and nothing is added later.


def record_of(project: Project, key: TrustedKey, now: datetime, progress: Progress) -> bytes:
    """Return the record of everything that a key signed: verdicts, approvals and other statements.

    The record must be complete. So this raises RecipeError if a registry is set and a recipe is invalid, and
    RegistryError if the registry does not answer.
    """
    registry = project.settings.registry.value
    if registry and project.faults:
        scope = f"all its signatures in {registry}, for the targets of all recipes"
        raise RecipeError(
            project.faults, hint=f"fix them first: the record of '{key.name}' must list {scope}"
        )
    trust = TrustRules(keys=(key,))
    statements = (*stored_statements(project.layout), *AttachJournal(project.layout.path).read_all())
    envelopes = {row.envelope for row in statements if row.kind in _STATEMENT_TYPES}
    for target in project.targets if registry else ():
        repo = registry_of(project, target.family)
        images = list_verdicts(project, PromotionRequest(target=target, place=repo, now=now), progress)
        manifests = [image.subject.manifest for image in images]
        for tag in repo.store.tags(repo.repository):
            if SOURCES.fullmatch(tag):
                envelopes.update(read_sources(repo, tag).read_envelopes(repo))
        for manifest in dict.fromkeys((*manifests, *sifs_of(repo, target, images))):
            for kind in _STATEMENT_TYPES:
                envelopes.update(_envelopes(repo, manifest, kind))
    opened = [row for envelope in envelopes if (row := verify_envelope(envelope, trust)).key]
    return format_record(digest_of(row.envelope.payload) for row in opened if row.envelope)


def _envelopes(repo: StoreRepository, manifest: str, kind: str) -> Iterator[bytes]:
    return (row.envelope for row in read_statements(repo, manifest, kind) if row.envelope)


def write_record(directory: Path, name: str, record: bytes) -> Path:
    """Write the record of a key next to imagefactory.toml. Return the path. Raises UsageError."""
    path = directory / RECORDS / f"{name}.txt"
    try:
        path.parent.mkdir(exist_ok=True)
        if path.parent.is_symlink():
            raise UsageError(
                "directory-is-link",
                f"{path.parent} is a symbolic link, expected a directory",
                hint="replace the link by a directory",
            )
        with replacing(path, durable=True) as file:
            file.write(record)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    return path


def next_name(name: str, names: set[str]) -> str:
    """Return the name of the next key: `lab` becomes `lab-2`, `lab-2` becomes `lab-3`."""
    match = re.fullmatch(r"(.*?)(?:-([0-9]{1,4}))?", name)
    base, number = (match[1], int(match[2] or 1)) if match else (name, 1)
    while (new := f"{base}-{number + 1}") in names:
        number += 1
    return new


def sifs_of(repo: StoreRepository, target: Target, images: Sequence[VerdictSet]) -> list[str]:
    """Return the .sif files converted from these images, and those with tags of the target."""
    store, plain = repo.store, plain_tag(target)
    digests = [
        sif.digest
        for image in images
        for sif in store.referrers(repo.repository, image.subject.manifest, SIF_TYPE)
    ]
    for tag in store.tags(repo.repository):
        match = CANDIDATE.fullmatch(tag)
        if tag == f"{plain}.sif" or (match and match["plain"] == plain and match["suffix"]):
            manifest = store.manifest(repo.repository, tag)
            digests += [manifest[0].digest] if manifest else []
    return list(dict.fromkeys(digests))


# --- The images that the tags of a target may point to, with the verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionRequest:
    """A request to move the tags of `target` in `place` to verified images. With `dry_run` no tag moves.

    Without `approve` the local key adds no approval, if the policy requires approvals. `revocations` count
    besides those that are attached.
    """

    target: Target
    place: StoreRepository
    now: datetime
    dry_run: bool = False
    approve: bool = True
    revocations: tuple[Revocation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageVerdicts:
    candidate: TagCandidate
    verdicts: VerdictSet


def read_candidates(
    access: Access, promoting: PromotionRequest, policy: VerificationPolicy, progress: Progress
) -> tuple[tuple[_ImageVerdicts, ...], dict[str, str]]:
    """Return all images that the tags of the target may point to, and the digest of each tag now."""
    repo, plain = promoting.place, plain_tag(promoting.target)
    names = [tag for tag in repo.store.tags(repo.repository) if belongs(tag, plain)]
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="candidates") as pool:
        manifests = pool.map(lambda tag: repo.store.manifest(repo.repository, tag), names)
        digests = {
            name: manifest[0].digest
            for name, manifest in zip(names, manifests, strict=True)
            if manifest and manifest[0].digest != WITHDRAWN.descriptor.digest
        }
        tags = {name: digest for name, digest in digests.items() if not CANDIDATE.fullmatch(name)}
        roots = _untagged(access, promoting.target, policy) if isinstance(repo.store, LayoutStore) else {}
        for name in sorted(digests, key=lambda name: (name not in tags, name == plain)):  # the best name last
            roots[digests[name]] = name
        rows = list(
            pool.map(
                lambda root: _read_candidate(
                    access, promoting, policy, *root, built=tags.get(plain) == root[0]
                ),
                roots.items(),
            )
        )
    images = []
    for row in rows:
        if isinstance(row, str):
            progress.note(row)
        else:
            tags_of = tuple(tag for tag, digest in digests.items() if digest == row.candidate.digest)
            images.append(replace(row, verdicts=replace(row.verdicts, tags=tags_of)))
    return tuple(images), tags


def belongs(tag: str, plain: str) -> bool:
    """Return whether a tag belongs to the target: plain, of a capability or of a candidate; not of a .sif."""
    if tag == plain:
        return True
    match = CAPABILITY.fullmatch(tag) or CANDIDATE.fullmatch(tag)
    return bool(match and match["plain"] == plain and not tag.endswith(".sif"))


def _read_candidate(
    access: Access,
    promoting: PromotionRequest,
    policy: VerificationPolicy,
    digest: str,
    name: str,
    *,
    built: bool,
) -> _ImageVerdicts | str:
    """Return a candidate with its verdicts, or the reason to skip it.

    `built` is true if the tag of the target in the local store points to the candidate.
    """
    repo, target = promoting.place, promoting.target
    try:
        subject = read_subject(repo, digest, target.platform)
    except NoImageError as error:
        return f"{name} in {repo} is skipped: {error.message}"
    except RegistryError:
        children, _ = parse_parts(read_manifest(repo, digest))
        if all(repo.store.manifest(repo.repository, child.digest) for child in children):
            raise
        return f"{name} in {repo} is skipped: it is not complete"
    index = read_manifest(repo, digest)
    others = [row for row in platforms_in(index) if row[0] != target.platform]
    parse_parts(index)  # raises if it is malformed
    if len(images_of(json.loads(index.data).get("manifests") or ())) > 1 + len(others):
        return f"{name} in {repo} is skipped: it has images for platforms without a target"
    for platform, manifest in others:
        tag = f"{plain_tag(target)}-{architecture(platform)}"
        tagged = repo.store.manifest(repo.repository, tag)
        parts = parse_parts(Manifest(descriptor=tagged[0], data=tagged[1]))[0] if tagged else ()
        if manifest not in {part.digest for part in parts}:
            return f"{name} in {repo} is skipped: its image for {platform} is not the one of {tag}"
    verdicts = find_in(access, repo, subject, policy)
    # A verdict for another target moves no tag of this one, whoever tags the image as a candidate of it.
    judged = tuple(row for row in verdicts.judged if _target_of(row) in ("", target.name))
    if isinstance(repo.store, LayoutStore):
        # The store has no times: what was built last is the newest, others are as old as their last run.
        times = [row.verdict.report.ended for row in judged if row.verdict]
        pushed = promoting.now if built else max(times, default=None)
    else:
        pushed = read_pushed(read_records(repo, digest, key=read_nonce_store_key(access.environ)))
    candidate = TagCandidate(
        name=name,
        digest=digest,
        pushed=pushed,
        judged=judged,
        platforms=1 + len(others),
        own=is_own(access, repo, digest),
    )
    return _ImageVerdicts(candidate=candidate, verdicts=verdicts)


def is_own(access: Access, repo: StoreRepository, digest: str) -> bool:
    """Return whether this store pushed the image, or IMAGEFACTORY_NONCE_KEY has signed its push record."""
    if isinstance(repo.store, LayoutStore):
        return True
    if was_transferred(access.layout.recall("pushed", repo.store.name) or {}, repo.repository, digest):
        return True
    key = read_nonce_store_key(access.environ)
    return bool(key and read_records(repo, digest, key=key))


def _target_of(judged: VerificationResult) -> str:
    return judged.verdict.report.subject.target if judged.verdict else ""


def _untagged(access: Access, target: Target, policy: VerificationPolicy) -> dict[str, str]:
    """Return names, by digest, for untagged images of the target that the store keeps because of verdicts."""
    layout, repo, names = access.layout, local_place(access, ANY), {}
    for digest in layout.subjects():
        if layout.manifest(digest) is None:
            continue
        try:
            judged = find_verdicts(repo, read_subject(repo, digest), policy).judged
        except NoImageError:
            continue
        for row in judged:
            subject = row.verdict.report.subject if row.verdict else None
            if row.proves and subject and (subject.target, subject.manifest) == (target.name, digest):
                root = digest if layout.manifest(subject.index) is None else subject.index
                names[root] = f"{target.name}@{root[:19]}"
    return names


def target_at(project: Project, repo: StoreRepository, digest: str) -> Target:
    """Return the target with a tag on `digest` in the repository. Raises NothingSelectedError without one."""
    family = repo.repository.rpartition("/")[2]
    for target in (target for target in project.targets if target.family == family):
        for tag in repo.store.tags(repo.repository):
            if belongs(tag, plain_tag(target)):
                manifest = repo.store.manifest(repo.repository, tag)
                if manifest and manifest[0].digest == digest:
                    return target
    raise NothingSelectedError(
        "image-not-tagged",
        f"no tag of a target in {repo} points to {digest}",
        hint="pass the target instead, and --registry HOST/PATH",
    )


def list_verdicts(access: Access, request: PromotionRequest, progress: Progress) -> tuple[VerdictSet, ...]:
    """Return the verdicts on all images of a target in a place, the newest image first."""
    images, _ = read_candidates(access, request, read_verification_policy(access, request.now), progress)
    order = newest_first([image.candidate for image in images])
    return tuple(sorted((image.verdicts for image in images), key=lambda row: order.index(row.subject.index)))
