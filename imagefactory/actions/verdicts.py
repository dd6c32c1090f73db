"""Verdicts of images, in the store on this machine and in registries: where they lie, read and judged.

What a verdict is worth is judged each time it is read, by the trust that the settings name; tags only follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.actions.audit import log_statements
from imagefactory.errors import (
    CheckFailedError,
    ImagefactoryError,
    RegistryError,
    StatementError,
    StoreError,
    UsageError,
)
from imagefactory.model import Target
from imagefactory.oci.candidates import TEST_RESULT_TYPE, VERDICT_TYPE
from imagefactory.oci.graph import StoreRepository, read_manifest
from imagefactory.oci.layout import LayoutStore
from imagefactory.oci.manifests import Descriptor, Image, SifArtifact
from imagefactory.oci.store import ImageReference, parse_reference
from imagefactory.oci.transfer import WORKERS
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.schedulers.pool import ImageKind, SweepNode
from imagefactory.schedulers.sweep_file import VERDICT_MISSING, CollectedNode
from imagefactory.serialize import format_time
from imagefactory.settings.load import read_nonce_store_key
from imagefactory.trust.attached import (
    MAX_REJECTED,
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
from imagefactory.trust.envelope import format_json, is_signed_by, parse_envelope
from imagefactory.trust.judgement import VerdictSet, VerificationPolicy, find_verdicts
from imagefactory.trust.keys import SigningKey, find_key, read_signing_key
from imagefactory.trust.policy import read_trust
from imagefactory.trust.verdict import (
    SignedVerdict,
    Verdict,
    VerificationResult,
    parse_verdict,
    sign,
    signable,
)
from imagefactory.verify.nonces import NonceStore, NonceSubject, NonceUse, ci_run_of
from imagefactory.verify.report import GpuReport, VerifiedImage, format_gpu_report
from imagefactory.verify.suite_files import suite_digest

ANY = "any"
"""A repository of the store on this machine, where all of them share one pool."""


def local_place(access: Access, family: str) -> StoreRepository:
    """A family's repository in the store on this machine."""
    return StoreRepository(store=LayoutStore(access.layout), repository=family)


def registry_of(access: Access, family: str, registry: str = "") -> StoreRepository:
    """A family's repository in a registry (`host[/path]`), without it in that of the settings."""
    host, path = registry_place(access, registry)
    return StoreRepository(store=open_registry(access, host), repository=repository_of(path, family))


def place_of(access: Access, where: ImageReference) -> StoreRepository:
    """Where a reference leads; without a registry, the store on this machine."""
    store = open_registry(access, where.registry) if where.registry else LayoutStore(access.layout)
    return StoreRepository(store=store, repository=where.repository)


def read_verification_policy(access: Access, now: datetime) -> VerificationPolicy:
    """By what this factory judges verdicts. Raises UsageError for a trust that cannot be read."""
    return VerdictReader(access, now).court


def find_in(
    access: Access, place: StoreRepository, subject: VerifiedImage, court: VerificationPolicy
) -> VerdictSet:
    """`find_verdicts`, with what the store here knows was taken back, whatever a registry lists."""
    return find_verdicts(place, subject, court, (local_place(access, ANY),))


def verdicts_of(access: Access, place: StoreRepository, wanted: str, now: datetime) -> VerdictSet:
    """The verdicts about what a tag or digest names. Raises RegistryError where there is no such image."""
    return find_in(access, place, read_subject(place, wanted), read_verification_policy(access, now))


class VerdictReader:
    """Judges verdicts by the trust, policy and suite that the settings name, at one time.

    Where no key is trusted nothing can be relied on, and nothing is read.
    """

    def __init__(self, access: Access, now: datetime) -> None:
        self.access, self.now = access, now

    @cached_property
    def court(self) -> VerificationPolicy:
        """Raises UsageError for rows of trust that cannot be read."""
        trust = read_trust(self.access.settings.files)
        return VerificationPolicy(trust=trust, suite=suite_digest(), now=self.now)

    def stored(self, made: Image | SifArtifact) -> tuple[VerificationResult, ...]:
        """The verdicts in the store on an image or .sif of it."""
        manifest = made.manifest if isinstance(made, Image) else made.digest
        subject = VerifiedImage(target="", index=made.digest, manifest=manifest, config=made.config)
        return self._judge(StoreRepository(store=LayoutStore(self.access.layout), repository=""), subject)

    def there(self, place: StoreRepository, digest: str) -> tuple[VerificationResult, ...]:
        """The verdicts in any store on an image or index of it. Raises RegistryError or StoreError."""
        return self._judge(place, read_subject(place, digest)) if self.court.trust.keys else ()

    def _judge(self, place: StoreRepository, subject: VerifiedImage) -> tuple[VerificationResult, ...]:
        return find_in(self.access, place, subject, self.court).judged if self.court.trust.keys else ()


def count_valid(access: Access, place: StoreRepository, now: datetime) -> Callable[[str], int]:
    """How many verdicts about a manifest of `place` say `verified` and can be relied on."""
    court = read_verification_policy(access, now)

    def count(digest: str) -> int:
        if place.store.manifest(place.repository, digest) is None:
            return 0  # an index names it, and it is not there
        if not place.store.referrers(place.repository, digest, VERDICT_TYPE):
            return 0
        found = find_in(access, place, read_subject(place, digest), court)
        return sum(one.proves for one in found.judged)

    return count


def subject_name(place: StoreRepository) -> str:
    """The store on disk is one for all repositories."""
    return place.store.name if isinstance(place.store, LayoutStore) else str(place)


# --- Statements about images brought to where these lie: the store here and registries
# One at a time attaches from one store, and what goes to a registry stands in the journal first.


def attach_signed(
    access: Access, signed: SignedVerdict, where: ImageReference | None, progress: Progress
) -> tuple[str, ...]:
    """Attaches a verdict to its image in the store here, and in a registry where `where` names it there.

    Gives the places that have it now. Raises UsageError where neither has the image, RegistryError and
    StoreError; what a registry did not take stands in the journal, and `reconcile` brings it there.
    """
    places = places_of(access, signed.verdict.report.subject, where)
    return attach_at(access, signed, places, progress)


def places_of(
    access: Access, own: VerifiedImage, where: ImageReference | None
) -> tuple[tuple[StoreRepository, VerifiedImage], ...]:
    """Where verdicts on an image go, each with what is called so there: the store here, and `where`.

    Raises UsageError where neither has the image, RegistryError.
    """
    places = []
    if access.layout.manifest(own.manifest) is not None:
        places.append((local_place(access, ANY), own))
    if where is not None:
        place = place_of(access, where)
        subject = read_subject(place, where.tag_or_digest)
        if own.manifest != subject.manifest:
            raise UsageError(
                "verdict-other-image",
                f"{where} is {subject.manifest}, but the verdict is for {own.manifest}",
                hint="pass the digest of the image that was verified",
            )
        places.append((place, subject))
    if not places:
        raise UsageError(
            "image-not-stored",
            f"{own.manifest} is not in the local store",
            hint="pass where it is stored: HOST/NAME@sha256:...",
        )
    return tuple(places)


def attach_at(
    access: Access,
    signed: SignedVerdict,
    places: Sequence[tuple[StoreRepository, VerifiedImage]],
    progress: Progress,
) -> tuple[str, ...]:
    """Attaches a verdict at what `places_of` gave; gives the places' names. Raises as `attach_signed`."""
    for place, subject in places:
        envelopes = (signed.envelope, signed.test_result)
        for fault in attach_all(
            access, place, attachings(envelopes, signed.verdict.expires, subject), progress
        ):
            if fault:
                raise fault
    return tuple(subject_name(place) for place, _ in places)


def attachings(
    envelopes: tuple[bytes, bytes], until: datetime, subject: VerifiedImage
) -> tuple[StatementRequest, ...]:
    """A verdict's two statements: its own envelope, and that of the test result."""
    kinds = zip((VERDICT_TYPE, TEST_RESULT_TYPE), envelopes, strict=True)
    return tuple(
        StatementRequest(subject=subject, kind=kind, envelope=data, until=until) for kind, data in kinds
    )


def attach_all(
    access: Access, place: StoreRepository, batch: Sequence[StatementRequest], progress: Progress
) -> tuple[ImagefactoryError | None, ...]:
    """Attaches many statements at one place, under one lock; gives what went wrong with each, or None.

    In a registry some are put at a time, once the journal has all of them.
    """
    statements: dict[int, SignedStatement] = {}
    faults: list[ImagefactoryError | None] = [None] * len(batch)
    with writing(access, place, progress) as journal:
        manifests = dict.fromkeys(attaching.subject.manifest for attaching in batch)
        subjects = {manifest: _subject(place, manifest) for manifest in manifests}
        for number, attaching in enumerate(batch):
            subject = subjects[attaching.subject.manifest]
            if isinstance(subject, ImagefactoryError):
                faults[number] = subject
            else:
                statements[number] = SignedStatement(
                    kind=attaching.kind, subject=subject, envelope=attaching.envelope, until=attaching.until
                )
        if journal and statements:
            try:
                journal.append(place, *statements.values())
            except StoreError as error:  # nothing goes to a registry that the journal does not have
                return tuple(fault or error for fault in faults)
        workers = WORKERS if journal else 1  # a disk does not make anybody wait
        put = put_all(place, tuple(statements.values()), workers=workers)
    for number, fault in zip(statements, put, strict=True):
        faults[number] = fault
    log_statements(
        access,
        subject_name(place),
        [one for one, fault in zip(statements.values(), put, strict=True) if not fault],
    )
    return tuple(faults)


def _subject(place: StoreRepository, manifest: str) -> Descriptor | ImagefactoryError:
    try:
        return read_manifest(place, manifest).descriptor
    except ImagefactoryError as error:
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementRequest:
    """A statement of a kind about an image; `until` is when nobody needs it any more, None for never."""

    subject: VerifiedImage
    kind: str
    envelope: bytes
    until: datetime | None


def attach_to(access: Access, place: StoreRepository, wanted: StatementRequest, progress: Progress) -> str:
    """Attaches it; gives the artifact's digest. Raises RegistryError and StoreError."""
    there = read_manifest(place, wanted.subject.manifest).descriptor
    statement = SignedStatement(kind=wanted.kind, subject=there, envelope=wanted.envelope, until=wanted.until)
    with writing(access, place, progress) as journal:
        digest = attach(place, statement, journal)
    log_statements(access, subject_name(place), (statement,))
    return digest


@contextmanager
def writing(access: Access, place: StoreRepository, progress: Progress) -> Iterator[AttachJournal | None]:
    """One at a time, and no collection meanwhile; gives the journal where `place` is a registry."""
    journal = AttachJournal(access.layout.path)
    with access.layout.in_use(progress), journal.alone(progress):
        yield None if isinstance(place.store, LayoutStore) else journal


# --- What a sweep signed, attached where its images lie: each image looked for once, all of a place at once


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedNode:
    """What is left of a verdict to attach, of thousands at once: its envelopes, not what they say."""

    keyid: str
    expires: datetime
    envelopes: tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingNode:
    """A node on its way: `signed` is to be attached, `spending` comes before that; `fault` ends it here.

    `lost`: it was signed and attached before, and nobody remembers where.
    """

    node: SweepNode
    one: CollectedNode
    signed: SignedNode | None = None
    spending: NonceUse | None = None
    fault: ImagefactoryError | None = None
    lost: bool = False


def reference_of(node: SweepNode) -> str:
    """Where a node's image lies in a registry (HOST/NAME@sha256:...); empty for a file."""
    if node.image.kind in (ImageKind.DOCKER, ImageKind.ORAS):
        return node.image.address.partition("://")[2]
    return ""


class VerdictAttacher:
    """Attaches verdicts; each image is looked for once. `registry` (host[/path]) is where they go too."""

    def __init__(self, factory: Project, registry: str, progress: Progress) -> None:
        self.factory, self.registry, self.progress = factory, registry, progress
        self._places: dict[str, tuple[tuple[StoreRepository, VerifiedImage], ...] | ImagefactoryError] = {}
        self._down: list[RegistryError] = []
        self._signed: dict[tuple[str, str], Mapping[str, Verdict]] = {}

    def attach_all(self, drafts: Sequence[PendingNode]) -> list[PendingNode]:
        """Each draft with the places that have its verdict now, or with what went wrong."""
        drafts = list(drafts)
        waiting: dict[str, list[tuple[int, StatementRequest]]] = {}
        places: dict[str, StoreRepository] = {}
        for number, draft in enumerate(drafts):
            if draft.signed is None:
                continue
            try:
                subjects = self.places(draft)
            except ImagefactoryError as error:
                drafts[number] = replace(draft, fault=error)
                continue
            keyid, names = draft.signed.keyid, tuple(subject_name(place) for place, _ in subjects)
            drafts[number] = replace(draft, one=replace(draft.one, keyid=keyid, attached=names))
            for place, subject in subjects:
                places[subject_name(place)] = place
                rows = waiting.setdefault(subject_name(place), [])
                own = attachings(draft.signed.envelopes, draft.signed.expires, subject)
                rows += [(number, attaching) for attaching in own]
        for name, rows in waiting.items():
            faults = attach_all(
                self.factory, places[name], [attaching for _, attaching in rows], self.progress
            )
            for (number, _), fault in zip(rows, faults, strict=True):
                if fault:
                    one = replace(drafts[number].one, keyid="", attached=())
                    drafts[number] = replace(drafts[number], one=one, fault=fault)
        return drafts

    def find_again(self, drafts: Sequence[PendingNode], keys: Mapping[str, bytes]) -> list[PendingNode]:
        """The lost ones with the places that have their verdict, signed by one of `keys` (by their ids).

        Nothing is signed in place of one that is found nowhere, since its nonce is spent: that is a fault.
        """
        return [self._find_again(draft, keys) if draft.lost else draft for draft in drafts]

    def _find_again(self, draft: PendingNode, keys: Mapping[str, bytes]) -> PendingNode:
        nonce, keyids = draft.node.nonce, {}
        try:
            for place, subject in self.places(draft):
                key = (str(place), subject.manifest)
                if key not in self._signed:
                    self._signed[key] = read_signed(place, subject.manifest, keys)
                if verdict := self._signed[key].get(nonce):
                    keyids[subject_name(place)] = verdict.keyid
        except ImagefactoryError as error:
            return replace(draft, fault=error)
        if not keyids:
            why = f"{draft.one.why}, {VERDICT_MISSING}"
            hint = f"imagefactory verify {draft.node.target} --pool POOL: a nonce is never signed twice"
            fault = CheckFailedError("verdict-lost", f"{draft.node.name}: {why}", hint=hint)
            return replace(draft, one=replace(draft.one, why=why), fault=fault)
        keyid = next(iter(keyids.values()))
        return replace(draft, one=replace(draft.one, keyid=keyid, attached=tuple(keyids)))

    def places(self, draft: PendingNode) -> tuple[tuple[StoreRepository, VerifiedImage], ...]:
        """Where a verdict goes. Raises UsageError and RegistryError.

        After MOST_REFUSED images in a row that a registry did not show, each asked for again and again, no
        other is asked for.
        """
        own = draft.node.image.subject
        if own.manifest not in self._places:
            if len(self._down) >= MAX_REJECTED:
                raise self._down[-1]
            try:
                self._places[own.manifest] = places_of(self.factory, own, self.where(draft.node))
                self._down.clear()
            except ImagefactoryError as error:
                self._places[own.manifest] = error
                self._down += [error] if isinstance(error, RegistryError) else []
        found = self._places[own.manifest]
        if isinstance(found, ImagefactoryError):
            raise found
        return found

    def where(self, node: SweepNode) -> ImageReference | None:
        if not self.registry:
            reference = reference_of(node)
            return parse_reference(reference) if reference else None
        host, path = registry_place(self.factory, self.registry)
        target = find_target(self.factory, node.target)
        return ImageReference(
            registry=host,
            repository=repository_of(path, target.family),
            digest=node.image.subject.index,
        )


def read_signed(place: StoreRepository, manifest: str, keys: Mapping[str, bytes]) -> Mapping[str, Verdict]:
    """The verdicts about an image that one of `keys` (by their ids) signed, by the run's nonce."""
    signed: dict[str, Verdict] = {}
    for attached in read_verdicts(place, manifest):
        try:
            envelope = parse_envelope(attached.envelope, "a verdict")
            verdict = parse_verdict(envelope.payload, "a verdict", envelope.keyid)
        except StatementError:
            continue
        public = keys.get(envelope.keyid)
        if public and is_signed_by(envelope, envelope.keyid, public):
            signed[verdict.report.nonce] = verdict
    return signed


def find_target(factory: Project, name: str) -> Target:
    target = next((one for one in factory.targets if one.name == name), None)
    if target is None:
        raise UsageError(
            "target-not-in-project",
            f"this project has no target '{name}'",
            hint="collect the sweep in the project that created it (-C DIR)",
        )
    return target


# --- From a report to a verdict: the key that signs here, and the nonce that is spent on it


def nonce_store(access: Access, named: Path | None = None) -> NonceStore:
    """The nonces of this store, or those of a named folder, with the key that the environment has for it.

    A ledger that is named may travel between the jobs of a CI run, and belongs to that run. Raises UsageError
    for a key that can be guessed: everybody may read what it has signed.
    """
    if named:
        return NonceStore(named, read_nonce_store_key(access.environ), ci_run=ci_run_of(access.environ))
    return NonceStore(access.layout.path / "nonces")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedReport:
    """`signed` is None where the report stays one; `why` says so in a line."""

    signed: SignedVerdict | None
    why: str


def signing_key(access: Access, now: datetime) -> SigningKey | None:
    """Return the key that signs on this machine at `now`, None if there is none.

    Raises CheckFailedError for a retired key, UsageError and StatementError for one that cannot be used.
    """
    trust, named = read_trust(access.settings.files), access.settings.signing_key
    path = find_key(named.value, access.environ, trust.periods, now)
    if path is None:
        return None
    key = read_signing_key(path)
    trusted = trust.key(key.keyid)
    if trusted and trusted.until <= now:
        hint = "replace it by a new key: imagefactory keys rotate"
        if named.value:
            hint = f"name the new key in signing-key ({named.origin}), or remove that setting"
        raise CheckFailedError(
            "signing-key-retired",
            f"the key '{key.name}' is retired since {format_time(trusted.until)} and cannot sign",
            hint=hint,
        )
    return key


def sign_report(access: Access, report: GpuReport, key: SigningKey | None, now: datetime) -> SignedReport:
    """Spends the nonce of a run of this machine and signs its report.

    What cannot be signed (no key, no run on a GPU that the host knows) stays a report. Raises NonceError.
    """
    if not signable(report):
        return SignedReport(signed=None, why=f"unsigned: '{report.outcome}' says nothing of the image")
    if key is None:
        return SignedReport(signed=None, why="unsigned: no key (imagefactory keys new NAME)")
    run = NonceSubject(subject=report.subject, suite=report.suite, level=report.level)
    result = hashlib.sha256(format_json(format_gpu_report(report))).hexdigest()
    days = read_trust(access.settings.files).policy.days
    try:
        signed = sign(report, key, now=now, days=days)
    except StatementError as error:
        return SignedReport(signed=None, why=f"unsigned: {error.message}")
    nonce_store(access).spend(report.nonce, run, result=f"sha256:{result}", now=now)
    return SignedReport(signed=signed, why=f"signed by '{key.name}'")


# --- Registries mended: they list again what was attached to them from here, or is known here


def repair_all_referrers(
    factory: Project, registry: str, now: datetime, progress: Progress
) -> tuple[RepairResult, ...]:
    """Lets every repository of a registry list what was attached to it from here, or is known here.

    Those of the families, and those of that host that the journal knows. Raises RegistryError.
    """
    host, path = registry_place(factory, registry)
    journal, store = AttachJournal(factory.layout.path), open_registry(factory, host)
    repositories = {repository_of(path, target.family) for target in factory.targets}
    repositories |= {repository for known, repository in journal.places() if known == host}
    with factory.layout.in_use(progress), journal.alone(progress):
        local = stored_statements(factory.layout)
        done = []
        for repository in sorted(repositories):
            with progress.stage(f"reconcile {host}/{repository}"):
                done.append(
                    repair_referrers(StoreRepository(store=store, repository=repository), journal, local, now)
                )
    return tuple(done)
