"""What is known of one image of a report: which of a target's images it is, its layers, packages and moves.

Of a target one image is shown: what the present lock gives, or another where that alone is verified, as in
a catalogue. The verdicts of all of them are its history.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from imagefactory.actions.catalog import (
    CatalogRoot,
    describe_image,
    predicted_claims,
    reference_of,
    stored_as,
)
from imagefactory.actions.plan import cached_contents
from imagefactory.actions.resolve import LOCK_LABEL
from imagefactory.extras.site.tables import TargetSurvey
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.values import CellClaim
from imagefactory.lock.files import LockRevision, VersionChange, lock_digest, lock_moves
from imagefactory.matrix.combos import ComboCell, family_label
from imagefactory.model import NO_CUDA, Lock, LockedCondaPackage
from imagefactory.oci.graph import Manifest, StoreRepository, parse_parts, read_manifest
from imagefactory.oci.layout import LayoutStore
from imagefactory.oci.manifests import CONFIG_TYPES, MALFORMED, MANIFEST_LIMIT, TITLE
from imagefactory.oci.sif import is_sif_manifest
from imagefactory.project import Project
from imagefactory.trust.catalog import CatalogImage, CatalogSif, ImageOffer, SifOffer
from imagefactory.trust.judgement import VerdictSet
from imagefactory.trust.verdict import VerdictStatus, VerificationResult
from imagefactory.verify.report import VerifiedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLayer:
    """`kept`: the image before this one has it too."""

    title: str
    digest: str
    size: int
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPackage:
    """`size` is that of the file that was installed, 0 where nobody says."""

    name: str
    version: str
    build: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSubmit:
    """A submit file, or why there is none. `predicted`: no verdict speaks for it, a scan alone does."""

    text: str = ""
    why: str = ""
    predicted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportImage:
    """A target with its image, None where there is none, on every capability of the report.

    `framework` is the family's word. `predicted` is the weightiest claim without a verdict by capability.
    `history` are all verdicts on images of the target with what each is of, the newest first. `packages` are
    those of the image, of the lock where there is no image; `moves` is what changed `since`, which is empty
    where nothing earlier is known. `commands` fetch or start it. `block` says why there is no image.
    """

    target: str
    family: str
    framework: str
    version: str
    cuda: str
    python: str
    platform: str
    description: str = ""
    offer: ImageOffer | None = None
    predicted: Mapping[Capability, CellClaim] = field(default_factory=dict)
    history: tuple[tuple[VerifiedImage, VerificationResult], ...] = ()
    layers: tuple[ReportLayer, ...] = ()
    packages: tuple[ReportPackage, ...] = ()
    moves: tuple[VersionChange, ...] = ()
    since: str = ""
    block: str = ""
    combos: tuple[ComboCell, ...] = ()
    submit: ReportSubmit = field(default_factory=ReportSubmit)
    commands: tuple[str, ...] = ()

    @property
    def gpu(self) -> bool:
        """Whether it is for GPUs, not for CPUs alone: then it has no combos."""
        return self.cuda != NO_CUDA

    @property
    def image(self) -> CatalogImage | None:
        return self.offer.image if self.offer else None


def describe(factory: Project, surveyed: TargetSurvey, former: LockRevision | None) -> ReportImage:
    """Of a target of a factory. Raises RegistryError and StoreError for manifests that cannot be read."""
    stage, target = surveyed.stage, surveyed.stage.target
    shown = _displayed_packages(surveyed)
    plain = ReportImage(
        target=target.name,
        family=target.family,
        framework=family_label(target.framework),
        version=target.version,
        cuda=target.cuda,
        python=target.python,
        platform=target.platform,
        description=target.description,
        history=_history((*surveyed.images, *surveyed.sifs)),
        packages=_packages(stage.lock),
    )
    if former is not None and stage.lock is not None:
        moves = lock_moves(former.lock, stage.lock)
        plain = replace(plain, moves=moves, since=f"the lock before {former.day}")
    if shown is None:
        claims = predicted_claims(factory, target, stage.lock, None)
        return replace(plain, predicted=_weightiest(claims), block=stage.block or stage.missing)
    place, found = shown
    manifest = read_manifest(place, found.subject.manifest)
    lock = stage.lock if found.subject.index == stage.image else _own_lock(stage.lock, place, manifest)
    before = _before(surveyed, found)
    offer = _offer(factory, surveyed, (place, found, manifest), lock)
    plain = replace(
        plain,
        offer=offer,
        version=offer.image.version,
        predicted=_weightiest(offer.image.predicted),
        layers=_layers(manifest, before),
    )
    return plain if lock is not None else _with_scanned(factory, plain, found)


def describe_offer(offer: ImageOffer) -> ReportImage:
    """Of a catalogue, which tells neither layers nor packages. Pure."""
    image = offer.image
    subjects = ((image.subject, offer.judged), *((one.sif.subject, one.judged) for one in offer.sifs))
    return ReportImage(
        target=image.target,
        family=image.family,
        framework=family_label(image.framework),
        version=image.version,
        cuda=image.cuda,
        python=image.python,
        platform=image.platform,
        offer=offer,
        predicted=_weightiest(image.predicted),
        history=_newest_first((subject, one) for subject, judged in subjects for one in judged),
    )


# --- which image ---------------------------------------------------------------------------------


def _displayed_packages(surveyed: TargetSurvey) -> tuple[StoreRepository, VerdictSet] | None:
    every = (*surveyed.images, *surveyed.sifs)
    ordered = sorted(every, key=lambda one: one[1].subject.index != surveyed.stage.image)
    proven = (one for one in ordered if any(judged.proves for judged in one[1].judged))
    return next(proven, next(iter(ordered), None))


def _before(surveyed: TargetSurvey, shown: VerdictSet) -> Manifest | None:
    """The manifest of the image before the one that is shown: the next older of other content."""
    images = list(surveyed.images)
    at = next((i for i, (_, found) in enumerate(images) if found is shown), len(images))
    older = (one for one in images[at + 1 :] if one[1].subject.manifest != shown.subject.manifest)
    found = next(older, None)
    return read_manifest(found[0], found[1].subject.manifest) if found else None


def _offer(
    factory: Project,
    surveyed: TargetSurvey,
    shown: tuple[StoreRepository, VerdictSet, Manifest],
    lock: Lock | None,
) -> ImageOffer:
    place, found, manifest = shown
    target = surveyed.stage.target
    root = CatalogRoot(
        lock=lock,
        subject=replace(found.subject, target=target.name),
        judged=found.judged,
        revoked=found.revoked,
    )
    image = describe_image(factory, target, root, manifest)
    sifs = tuple(_sifs(surveyed, found))
    return ImageOffer(
        image=replace(
            image,
            reference=reference_of(_host(place), place, root.subject),
            sifs=tuple(one.sif for one in sifs),
        ),
        judged=found.judged,
        sifs=sifs,
    )


def _host(place: StoreRepository) -> str:
    """Empty for the store on this machine."""
    return "" if isinstance(place.store, LayoutStore) else place.store.name


def _sifs(surveyed: TargetSurvey, shown: VerdictSet) -> Iterator[SifOffer]:
    """The .sif files that were made of the image, or the one that it is."""
    seen = set()
    for place, found in surveyed.sifs:
        manifest = json.loads(read_manifest(place, found.subject.manifest).data)
        made_from = (manifest.get("subject") or {}).get("digest")
        own = found.subject.manifest == shown.subject.manifest
        if found.subject.manifest in seen or not (own or made_from == shown.subject.manifest):
            continue
        seen.add(found.subject.manifest)
        sif = CatalogSif(
            sha256=found.subject.config,
            size=manifest["layers"][0]["size"],
            reference=reference_of(_host(place), place, found.subject),
            subject=found.subject,
        )
        yield SifOffer(sif=sif, judged=found.judged)


def _own_lock(lock: Lock | None, place: StoreRepository, manifest: Manifest) -> Lock | None:
    """The present lock, of an image that says in its config that it was made of it; else None."""
    blobs = parse_parts(manifest)[1]
    if lock is None or not blobs or blobs[0].media_type not in CONFIG_TYPES or blobs[0].size > MANIFEST_LIMIT:
        return None
    try:
        config = json.loads(b"".join(place.store.read(place.repository, blobs[0])))
        told = config["config"]["Labels"][LOCK_LABEL]
    except MALFORMED:  # it says nothing of its lock, or nothing that can be read
        return None
    return lock if told == lock_digest(lock) else None


# --- what is in it -------------------------------------------------------------------------------


def _layers(manifest: Manifest, before: Manifest | None) -> tuple[ReportLayer, ...]:
    blobs = parse_parts(manifest)[1]
    layers = blobs if is_sif_manifest(json.loads(manifest.data)) else blobs[1:]
    kept = {blob.digest for blob in parse_parts(before)[1]} if before else frozenset()
    return tuple(
        ReportLayer(
            title=dict(layer.annotations).get(TITLE, ""),
            digest=layer.digest,
            size=layer.size,
            kept=layer.digest in kept,
        )
        for layer in layers
    )


def _packages(lock: Lock | None) -> tuple[ReportPackage, ...]:
    return tuple(
        ReportPackage(
            name=package.name,
            version=package.version,
            build=package.build if isinstance(package, LockedCondaPackage) else "",
            size=package.size,
        )
        for package in (lock.packages if lock else ())
    )


def _with_scanned(factory: Project, plain: ReportImage, found: VerdictSet) -> ReportImage:
    """Of an image that is not what the lock gives: the packages that a scan saw in it, if it was scanned."""
    image = stored_as(factory, found.subject)
    contents = cached_contents(factory.layout, image) if image else None
    packages = tuple(
        ReportPackage(name=package.name, version=package.version, build=package.build)
        for package in (contents.packages if contents else ())
    )
    return replace(plain, packages=packages, moves=(), since="")


# --- what is said of it --------------------------------------------------------------------------


def _history(
    artifacts: Sequence[tuple[StoreRepository, VerdictSet]],
) -> tuple[tuple[VerifiedImage, VerificationResult], ...]:
    return _newest_first((found.subject, one) for _, found in artifacts for one in found.judged)


def _newest_first(
    rows: Iterable[tuple[VerifiedImage, VerificationResult]],
) -> tuple[tuple[VerifiedImage, VerificationResult], ...]:
    """Each verdict once, though it lies in store and registry; taken back where one of them knows that."""
    by_digest: dict[str, tuple[VerifiedImage, VerificationResult]] = {}
    for subject, judged in rows:
        known = by_digest.get(judged.name)
        if known is None or judged.standing is VerdictStatus.REVOKED:
            by_digest[judged.name] = (subject, judged)
    return tuple(sorted(by_digest.values(), key=_when, reverse=True))


def _when(row: tuple[VerifiedImage, VerificationResult]) -> tuple[float, str]:
    verdict = row[1].verdict
    return (verdict.issued.timestamp() if verdict else 0.0), row[1].name


def _weightiest(claims: Iterable[tuple[str, CellClaim]]) -> Mapping[Capability, CellClaim]:
    found: dict[Capability, CellClaim] = {}
    for capability, claim in chain(claims):
        found.setdefault(parse_capability(capability), claim)
    return found
