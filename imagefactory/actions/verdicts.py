"""Read, verify, sign and attach the verdicts of images.

Each read verifies a verdict again, with the trust of the settings. Tags have no influence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.errors import CheckFailedError, ImagefactoryError, StatementError, StoreError, UsageError
from imagefactory.model import ImageProgress, Target
from imagefactory.oci.candidates import (
    APPROVAL_TYPE,
    BUNDLE_TYPE,
    REVOCATION_TYPE,
    TEST_RESULT_TYPE,
    VERDICT_TYPE,
)
from imagefactory.oci.graph import (
    StoreRepository,
    read_manifest,
)
from imagefactory.oci.layout import LayoutStore, reference
from imagefactory.oci.manifests import Descriptor, Image, SifArtifact
from imagefactory.oci.store import ImageReference
from imagefactory.oci.transfer import WORKERS, was_transferred
from imagefactory.progress import QUIET, Progress
from imagefactory.project import Project
from imagefactory.serialize import format_time
from imagefactory.settings.load import read_nonce_store_key
from imagefactory.trust.approval import parse_approval
from imagefactory.trust.attached import (
    AttachJournal,
    RepairResult,
    SignedStatement,
    attach,
    put_all,
    read_subject,
    read_verdicts,
    repair_referrers,
    stored_statements,
)
from imagefactory.trust.audit import APPROVE, REVOKE, SIGN, AuditEntry, append_audit
from imagefactory.trust.envelope import format_json, is_signed_by, parse_envelope
from imagefactory.trust.judgement import (
    VerdictSet,
    VerificationPolicy,
    find_verdicts,
    parse_revocation,
    period_problem,
)
from imagefactory.trust.keys import SigningKey, find_key, read_signing_key
from imagefactory.trust.policy import TrustRules, read_trust
from imagefactory.trust.verdict import (
    SignedVerdict,
    Verdict,
    VerificationResult,
    parse_verdict,
    sign,
    signable,
)
from imagefactory.verify.nonces import NonceStore, NonceSubject, ci_run_of
from imagefactory.verify.report import GpuReport, VerifiedImage, format_gpu_report
from imagefactory.verify.suite_files import suite_digest
from imagefactory.versions import natural

ANY = "any"
"""The repository name for the local store, where all repositories share one pool of blobs."""


def local_place(access: Access, family: str) -> StoreRepository:
    """Return the repository of a family in the local store."""
    return StoreRepository(store=LayoutStore(access.layout), repository=family)


def registry_of(access: Access, family: str, registry: str = "") -> StoreRepository:
    """Return the repository of a family in a registry (`host[/path]`), by default that of the settings."""
    host, path = registry_place(access, registry)
    return StoreRepository(store=open_registry(access, host), repository=repository_of(path, family))


def place_of(access: Access, reference: ImageReference | None, family: str = ANY) -> StoreRepository:
    """Return the repository of a reference, or the family's repository in the local store without one."""
    if reference is None:
        return local_place(access, family)
    store = open_registry(access, reference.registry) if reference.registry else LayoutStore(access.layout)
    return StoreRepository(store=store, repository=reference.repository)


def subject_name(repo: StoreRepository) -> str:
    """Return the name of a place to show. The local store has one name for all repositories."""
    return repo.store.name if isinstance(repo.store, LayoutStore) else str(repo)


def subject_of(artifact: Image | SifArtifact, target: str) -> VerifiedImage:
    """Return the subject of a verdict on an image or a .sif."""
    manifest = artifact.manifest if isinstance(artifact, Image) else artifact.digest
    return VerifiedImage(target=target, index=artifact.digest, manifest=manifest, config=artifact.config)


# --- Reading


class VerdictReader:
    """Verifies verdicts with the trust, policy and suite of the settings, at one time.

    If no key is trusted, no verdict is valid and nothing is read.
    """

    def __init__(self, access: Access, now: datetime) -> None:
        self.access, self.now = access, now

    @cached_property
    def court(self) -> VerificationPolicy:
        """The trust and policy. Raises UsageError for invalid rows of trust."""
        return read_verification_policy(self.access, self.now)

    def stored(self, artifact: Image | SifArtifact) -> tuple[VerificationResult, ...]:
        """Return the verdicts in the local store on one of its images or .sif files."""
        return self._verify(local_place(self.access, ""), subject_of(artifact, ""))

    def there(self, repo: StoreRepository, digest: str) -> tuple[VerificationResult, ...]:
        """Return the verdicts in a store on one of its images. Raises RegistryError or StoreError."""
        return self._verify(repo, read_subject(repo, digest)) if self.court.trust.keys else ()

    def _verify(self, repo: StoreRepository, subject: VerifiedImage) -> tuple[VerificationResult, ...]:
        return find_in(self.access, repo, subject, self.court).judged if self.court.trust.keys else ()


def read_verification_policy(access: Access, now: datetime) -> VerificationPolicy:
    """Return the project's policy for verdicts. Raises UsageError if its trust cannot be read."""
    return VerificationPolicy(trust=read_trust(access.settings.files), suite=suite_digest(), now=now)


def find_in(
    access: Access, repo: StoreRepository, subject: VerifiedImage, policy: VerificationPolicy
) -> VerdictSet:
    """Return `find_verdicts` with the revocations of the local store, which a registry may not list."""
    return find_verdicts(repo, subject, policy, (local_place(access, ANY),))


def verdicts_of(access: Access, repo: StoreRepository, name: str, now: datetime) -> VerdictSet:
    """Return the verdicts on the image of a tag or digest. Raises RegistryError if there is none."""
    return find_in(access, repo, read_subject(repo, name), read_verification_policy(access, now))


def count_valid(access: Access, repo: StoreRepository, now: datetime) -> Callable[[str], int]:
    """Return a function that counts the valid `verified` verdicts on a manifest of `repo`."""
    policy = read_verification_policy(access, now)

    def count(digest: str) -> int:
        if repo.store.manifest(repo.repository, digest) is None:
            return 0  # an index lists it, and it is missing
        if not repo.store.referrers(repo.repository, digest, VERDICT_TYPE, BUNDLE_TYPE):
            return 0
        return sum(
            result.proves for result in find_in(access, repo, read_subject(repo, digest), policy).judged
        )

    return count


def read_signed(repo: StoreRepository, manifest: str, keys: Mapping[str, bytes]) -> Mapping[str, Verdict]:
    """Return the verdicts on an image that one of `keys` (by their ids) signed, by the nonce of the run."""
    signed: dict[str, Verdict] = {}
    for attached in read_verdicts(repo, manifest):
        try:
            envelope = parse_envelope(attached.envelope, "a verdict")
            verdict = parse_verdict(envelope.payload, "a verdict", envelope.keyid)
        except StatementError:
            continue
        public = keys.get(envelope.keyid)
        if public and is_signed_by(envelope, envelope.keyid, public):
            signed[verdict.report.nonce] = verdict
    return signed


# --- Attaching: one process at a time attaches from one store, and a statement for a registry is written
# to the journal first


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementRequest:
    """A statement to attach to an image. `until` is its expiry, None for never."""

    subject: VerifiedImage
    kind: str
    envelope: bytes
    until: datetime | None


def attach_signed(
    access: Access, signed: SignedVerdict, reference: ImageReference | None, progress: Progress
) -> tuple[str, ...]:
    """Attach a verdict to its image in the local store and at `reference`. Return the names of the places.

    Raises UsageError if neither has the image, RegistryError and StoreError. Statements that a registry
    rejected stay in the journal, and `verdict sync` sends them again.
    """
    places = places_of(access, signed.verdict.report.subject, reference)
    for repo, subject in places:
        envelopes = (signed.envelope, signed.test_result)
        statements = verdict_statements(access, envelopes, signed.verdict.expires, subject)
        for fault in attach_all(access, repo, statements, progress):
            if fault:
                raise fault
    return tuple(subject_name(repo) for repo, _ in places)


def places_of(
    access: Access, own: VerifiedImage, reference: ImageReference | None
) -> tuple[tuple[StoreRepository, VerifiedImage], ...]:
    """Return the places for verdicts on an image (the local store, and `reference`), each with its subject.

    Raises UsageError if neither has the image, RegistryError.
    """
    places = []
    if access.layout.manifest(own.manifest) is not None:
        places.append((local_place(access, ANY), own))
    if reference is not None:
        repo = place_of(access, reference)
        subject = read_subject(repo, reference.tag_or_digest)
        if own.manifest != subject.manifest:
            raise UsageError(
                "verdict-other-image",
                f"{reference} is {subject.manifest}, but the verdict is for {own.manifest}",
                hint="pass the digest of the image that was verified",
            )
        places.append((repo, subject))
    if not places:
        raise UsageError(
            "image-not-stored",
            f"{own.manifest} is not in the local store",
            hint="pass its registry and name: HOST/NAME@sha256:...",
        )
    return tuple(places)


def verdict_statements(
    access: Access, envelopes: tuple[bytes, bytes], until: datetime, subject: VerifiedImage
) -> tuple[StatementRequest, ...]:
    """Return the two statements of a verdict: its own envelope, and the test result (in-toto).

    With the setting `sigstore-bundles`, both are returned as bundles too.
    """
    rows = list(zip((VERDICT_TYPE, TEST_RESULT_TYPE), envelopes, strict=True))
    if access.settings.with_bundles:
        rows += [(BUNDLE_TYPE, envelope) for envelope in envelopes]
    return tuple(
        StatementRequest(subject=subject, kind=kind, envelope=envelope, until=until)
        for kind, envelope in rows
    )


def attach_all(
    access: Access, repo: StoreRepository, batch: Sequence[StatementRequest], progress: Progress
) -> tuple[ImagefactoryError | None, ...]:
    """Attach statements at one place, under one lock. Return the error of each, or None.

    A registry gets several at a time, after the journal has all of them.
    """
    statements: dict[int, SignedStatement] = {}
    faults: list[ImagefactoryError | None] = [None] * len(batch)
    with writing(access, repo, progress) as journal:
        manifests = dict.fromkeys(request.subject.manifest for request in batch)
        subjects = {manifest: _descriptor(repo, manifest) for manifest in manifests}
        for number, request in enumerate(batch):
            subject = subjects[request.subject.manifest]
            if isinstance(subject, ImagefactoryError):
                faults[number] = subject
            else:
                statements[number] = _statement(request, subject)
        if journal and statements:
            try:
                journal.append(repo, *statements.values())
            except StoreError as error:  # a registry gets nothing that the journal does not have
                return tuple(fault or error for fault in faults)
        workers = WORKERS if journal else 1  # a disk is fast enough
        errors = put_all(repo, tuple(statements.values()), workers=workers)
    for number, fault in zip(statements, errors, strict=True):
        faults[number] = fault
    log_statements(
        access, subject_name(repo), [row for number, row in statements.items() if not faults[number]]
    )
    return tuple(faults)


def _descriptor(repo: StoreRepository, manifest: str) -> Descriptor | ImagefactoryError:
    try:
        return read_manifest(repo, manifest).descriptor
    except ImagefactoryError as error:
        return error


def _statement(request: StatementRequest, subject: Descriptor) -> SignedStatement:
    return SignedStatement(kind=request.kind, subject=subject, envelope=request.envelope, until=request.until)


def attach_to(access: Access, repo: StoreRepository, request: StatementRequest, progress: Progress) -> str:
    """Attach one statement. Return the digest of its artifact. Raises RegistryError and StoreError."""
    statement = _statement(request, read_manifest(repo, request.subject.manifest).descriptor)
    with writing(access, repo, progress) as journal:
        digest = attach(repo, statement, journal)
    log_statements(access, subject_name(repo), (statement,))
    return digest


@contextmanager
def writing(access: Access, repo: StoreRepository, progress: Progress) -> Iterator[AttachJournal | None]:
    """Lock out other writers and garbage collection. Yields the journal if `repo` is in a registry."""
    journal = AttachJournal(access.layout.path)
    with access.layout.in_use(progress), journal.alone(progress):
        yield None if isinstance(repo.store, LayoutStore) else journal


def repair_all_referrers(
    project: Project, registry: str, now: datetime, progress: Progress
) -> tuple[RepairResult, ...]:
    """Repair the referrers lists in every repository of a registry, from the statements in this store.

    Covers the repositories of all families, and those in the journal. Raises RegistryError.
    """
    host, path = registry_place(project, registry)
    journal, store = AttachJournal(project.layout.path), open_registry(project, host)
    repositories = {repository_of(path, target.family) for target in project.targets}
    repositories |= {repository for known, repository in journal.places() if known == host}
    results = []
    with project.layout.in_use(progress), journal.alone(progress):
        local = stored_statements(project.layout)
        for repository in sorted(repositories):
            repo = StoreRepository(store=store, repository=repository)
            with progress.stage(f"reconcile {host}/{repository}"):
                results.append(repair_referrers(repo, journal, local, now))
    return tuple(results)


# --- The audit log of this store


def log_acts(access: Access, entries: Iterable[AuditEntry], now: datetime | None = None) -> None:
    """Add entries to the log of the local store."""
    rows = tuple(entries)
    if not rows:
        return
    try:
        with access.layout.in_use(QUIET):
            append_audit(access.layout.path, rows, now or datetime.now(UTC))
    except (ImagefactoryError, OSError) as error:
        access.tell(f"cannot write to the log of the store ({rows[0].action} {rows[0].what}): {error}")


def log_statements(access: Access, location: str, statements: Iterable[SignedStatement]) -> None:
    """Log statements that were attached at `location`."""
    log_acts(access, (entry for statement in statements if (entry := _entry(location, statement))))


def _entry(location: str, statement: SignedStatement) -> AuditEntry | None:
    if statement.kind not in (VERDICT_TYPE, REVOCATION_TYPE, APPROVAL_TYPE):
        return None
    try:
        opened = parse_envelope(statement.envelope, "a statement")
        if statement.kind == REVOCATION_TYPE:
            revocation = parse_revocation(opened.payload, "a statement", opened.keyid)
            action, reason = REVOKE, revocation.why
        elif statement.kind == APPROVAL_TYPE:
            request, _ = parse_approval(opened.payload, "a statement")
            action, reason = APPROVE, f"{request.tag} -> {request.subject.index}"
        else:
            report = parse_verdict(opened.payload, "a statement", opened.keyid).report
            action = SIGN
            reason = f"{report.outcome} on {report.device.capability if report.device else 'no GPU'}"
    except StatementError:
        return None
    return AuditEntry(
        action=action, what=statement.subject.digest, where=location, key=opened.keyid, why=reason
    )


# --- Signing: the key of this machine, and the nonce that a report spends


def nonce_store(access: Access, directory: Path | None = None) -> NonceStore:
    """Return the nonce store of the local store, or of a directory, with its key from the environment.

    A named directory may travel between the jobs of a CI run, and belongs to that run. Raises UsageError for
    a weak key, which others could guess.
    """
    if directory:
        return NonceStore(directory, read_nonce_store_key(access.environ), ci_run=ci_run_of(access.environ))
    return NonceStore(access.layout.path / "nonces")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedReport:
    """A report and its verdict. `signed` is None without a signature, and `why` is the reason."""

    signed: SignedVerdict | None
    why: str


def signing_key(access: Access, now: datetime) -> SigningKey | None:
    """Return the key that signs on this machine at `now`, None if there is none.

    Raises CheckFailedError for a retired key, UsageError and StatementError for one that cannot be used.
    """
    trust, setting = read_trust(access.settings.files), access.settings.signing_key
    path = find_key(setting.value, access.environ, trust.periods, now)
    if path is None:
        return None
    key = read_signing_key(path)
    trusted = trust.key(key.keyid)
    if trusted and trusted.until <= now:
        hint = "replace it by a new key: imagefactory key rotate"
        if setting.value:
            hint = f"name the new key in signing-key ({setting.origin}), or remove that setting"
        raise CheckFailedError(
            "signing-key-retired",
            f"the key '{key.name}' is retired since {format_time(trusted.until)} and cannot sign",
            hint=hint,
        )
    return key


def check_key_trusted(key: SigningKey, trust: TrustRules, now: datetime) -> None:
    """Raise CheckFailedError if this project does not accept signatures of the key at `now`."""
    trusted = trust.key(key.keyid)
    late = (None, "it is not trusted") if trusted is None else period_problem(trusted, now)
    if late:
        raise CheckFailedError(
            "signer-not-trusted",
            f"signatures of the key '{key.name}' are not valid here: {late[1]}",
            hint=f"run imagefactory key trust {key.name}, or set IMAGEFACTORY_SIGNING_KEY to another key",
        )


def sign_report(access: Access, report: GpuReport, key: SigningKey | None, now: datetime) -> SignedReport:
    """Spend the nonce of a run on this machine and sign its report.

    A report stays unsigned without a key, or if the host does not know the GPU. Raises NonceError.
    """
    if not signable(report):
        return SignedReport(signed=None, why=f"unsigned: '{report.outcome}' says nothing of the image")
    if key is None:
        return SignedReport(signed=None, why="unsigned: no key (imagefactory key create NAME)")
    run = NonceSubject(subject=report.subject, suite=report.suite, level=report.level)
    result = hashlib.sha256(format_json(format_gpu_report(report))).hexdigest()
    days = read_trust(access.settings.files).policy.days
    try:
        signed = sign(report, key, now=now, days=days)
    except StatementError as error:
        return SignedReport(signed=None, why=f"unsigned: {error.message}")
    nonce_store(access).spend(report.nonce, run, result=f"sha256:{result}", now=now)
    return SignedReport(signed=signed, why=f"signed by '{key.name}'")


def find_marks(access: Access, targets: Iterable[Target], now: datetime) -> dict[str, ImageProgress]:
    """Return the status of each target's image in the store. A corrupt image counts as built."""
    tags, reader = access.layout.tags(), VerdictReader(access, now)
    pushes, path = {}, ""
    if access.settings.registry.value:
        host, path = registry_place(access, "")
        pushes = access.layout.recall("pushed", host) or {}

    def marks(target: Target) -> ImageProgress:
        name = reference(target)
        if name not in tags:
            return ImageProgress(built=f"{name}.sif" in tags)
        try:
            image = access.layout.load(name, tags[name])
            capabilities = {
                result.verdict.report.device.row
                for result in reader.stored(image)
                if result.proves and result.verdict and result.verdict.report.device
            }
        except StoreError:
            return ImageProgress(built=True)
        pushed = was_transferred(pushes, repository_of(path, target.family), image.digest)
        return ImageProgress(built=True, pushed=pushed, verified=tuple(sorted(capabilities, key=natural)))

    return {target.name: marks(target) for target in targets}
