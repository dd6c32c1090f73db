"""One image of a report: its verdicts, layers, packages and version changes.

A report shows one image of each target: the image of the current lock, or an earlier one if only that is
verified. The history includes the verdicts of all images of the target.
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
from imagefactory.actions.resolve import LOCK_LABEL
from imagefactory.extras.site.tables import TargetSurvey
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.values import CellClaim
from imagefactory.lock.changes import VersionChange, lock_moves
from imagefactory.lock.files import LockRevision, lock_digest
from imagefactory.matrix.combos import ComboCell, family_label
from imagefactory.model import NO_CUDA, Lock, LockedCondaPackage
from imagefactory.oci.graph import Manifest, StoreRepository, parse_parts, read_manifest
from imagefactory.oci.layout import LayoutStore
from imagefactory.oci.manifests import CONFIG_TYPES, MALFORMED, MANIFEST_LIMIT, TITLE
from imagefactory.oci.sif import is_sif_manifest
from imagefactory.project import Project
from imagefactory.scan.layers import cached_contents
from imagefactory.trust.catalog import CatalogImage, CatalogSif, ImageOffer, SifOffer
from imagefactory.trust.judgement import VerdictSet
from imagefactory.trust.verdict import VerdictStatus, VerificationResult
from imagefactory.verify.report import VerifiedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLayer:
    """A layer of an image. `unchanged` means that the image before this one has the same layer."""

    title: str
    digest: str
    size: int
    unchanged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPackage:
    """A package of an image. `size` is the size of the installed file in bytes, 0 if unknown."""

    name: str
    version: str
    build: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSubmit:
    """A submit file, or why there is none. `predicted` means that it relies on a scan, not on a verdict."""

    text: str = ""
    why: str = ""
    predicted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportImage:
    """A target with its image (None if there is none) on every capability in the report.

    `framework` is the label of the family. `predicted` is the strongest claim that is not a verdict, by
    capability. `history` are all verdicts on images of the target, each with its subject, the newest first.
    `packages` are those of the image, or of the lock if there is no image. `moves` are the version changes
    `since` a date, which is empty if no earlier lock is known. `commands` fetch or start the image. `block`
    is why there is no image.
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
        """Return whether the image is for GPUs. Images for CPUs have no combos."""
        return self.cuda != NO_CUDA

    @property
    def image(self) -> CatalogImage | None:
        return self.offer.image if self.offer else None


def describe(project: Project, surveyed: TargetSurvey, former: LockRevision | None) -> ReportImage:
    """Describe a target in a project. Raises RegistryError and StoreError for unreadable manifests."""
    stage, target = surveyed.stage, surveyed.stage.target
    selection = _displayed_packages(surveyed)
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
    if selection is None:
        claims = predicted_claims(project, target, stage.lock, None)
        return replace(plain, predicted=_weightiest(claims), block=stage.block or stage.missing)
    repository, verdicts = selection
    manifest = read_manifest(repository, verdicts.subject.manifest)
    lock = (
        stage.lock if verdicts.subject.index == stage.image else _own_lock(stage.lock, repository, manifest)
    )
    before = _before(surveyed, verdicts)
    offer = _offer(project, surveyed, (repository, verdicts, manifest), lock)
    plain = replace(
        plain,
        offer=offer,
        version=offer.image.version,
        predicted=_weightiest(offer.image.predicted),
        layers=_layers(manifest, before),
    )
    return plain if lock is not None else _with_scanned(project, plain, verdicts)


def describe_offer(offer: ImageOffer) -> ReportImage:
    """Describe an image of a catalog, which has neither layers nor packages. Pure."""
    image = offer.image
    subjects = ((image.subject, offer.judged), *((row.sif.subject, row.judged) for row in offer.sifs))
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
        history=_newest_first((subject, verdict) for subject, judged in subjects for verdict in judged),
    )


# --- which image ---------------------------------------------------------------------------------


def _displayed_packages(surveyed: TargetSurvey) -> tuple[StoreRepository, VerdictSet] | None:
    artifacts = (*surveyed.images, *surveyed.sifs)
    ordered = sorted(artifacts, key=lambda row: row[1].subject.index != surveyed.stage.image)
    verified = (row for row in ordered if any(judged.proves for judged in row[1].judged))
    return next(verified, next(iter(ordered), None))


def _before(surveyed: TargetSurvey, verdicts: VerdictSet) -> Manifest | None:
    """Return the manifest of the newest older image with other content."""
    images = list(surveyed.images)
    index = next((i for i, (_, previous) in enumerate(images) if previous is verdicts), len(images))
    older = (row for row in images[index + 1 :] if row[1].subject.manifest != verdicts.subject.manifest)
    previous = next(older, None)
    return read_manifest(previous[0], previous[1].subject.manifest) if previous else None


def _offer(
    project: Project,
    surveyed: TargetSurvey,
    selection: tuple[StoreRepository, VerdictSet, Manifest],
    lock: Lock | None,
) -> ImageOffer:
    repository, verdicts, manifest = selection
    target = surveyed.stage.target
    root = CatalogRoot(
        lock=lock,
        subject=replace(verdicts.subject, target=target.name),
        judged=verdicts.judged,
        revoked=verdicts.revoked,
    )
    image = describe_image(project, target, root, manifest)
    sifs = tuple(_sifs(surveyed, verdicts))
    return ImageOffer(
        image=replace(
            image,
            reference=reference_of(_host(repository), repository, root.subject),
            sifs=tuple(row.sif for row in sifs),
        ),
        judged=verdicts.judged,
        sifs=sifs,
    )


def _host(repository: StoreRepository) -> str:
    """Return the host of a registry, empty for the store on this machine."""
    return "" if isinstance(repository.store, LayoutStore) else repository.store.name


def _sifs(surveyed: TargetSurvey, verdicts: VerdictSet) -> Iterator[SifOffer]:
    """Return the .sif files that were built from the image, or the image itself if it is a .sif."""
    seen = set()
    for repository, row in surveyed.sifs:
        manifest = json.loads(read_manifest(repository, row.subject.manifest).data)
        made_from = (manifest.get("subject") or {}).get("digest")
        same_manifest = row.subject.manifest == verdicts.subject.manifest
        if row.subject.manifest in seen or not (same_manifest or made_from == verdicts.subject.manifest):
            continue
        seen.add(row.subject.manifest)
        sif = CatalogSif(
            sha256=row.subject.config,
            size=manifest["layers"][0]["size"],
            reference=reference_of(_host(repository), repository, row.subject),
            subject=row.subject,
        )
        yield SifOffer(sif=sif, judged=row.judged)


def _own_lock(lock: Lock | None, repository: StoreRepository, manifest: Manifest) -> Lock | None:
    """Return the current lock if the config of the image names it, else None."""
    blobs = parse_parts(manifest)[1]
    if lock is None or not blobs or blobs[0].media_type not in CONFIG_TYPES or blobs[0].size > MANIFEST_LIMIT:
        return None
    try:
        config = json.loads(b"".join(repository.store.read(repository.repository, blobs[0])))
        label = config["config"]["Labels"][LOCK_LABEL]
    except MALFORMED:  # the config has no readable lock label
        return None
    return lock if label == lock_digest(lock) else None


# --- contents ------------------------------------------------------------------------------------


def _layers(manifest: Manifest, before: Manifest | None) -> tuple[ReportLayer, ...]:
    blobs = parse_parts(manifest)[1]
    layers = blobs if is_sif_manifest(json.loads(manifest.data)) else blobs[1:]
    unchanged = {blob.digest for blob in parse_parts(before)[1]} if before else frozenset()
    return tuple(
        ReportLayer(
            title=dict(layer.annotations).get(TITLE, ""),
            digest=layer.digest,
            size=layer.size,
            unchanged=layer.digest in unchanged,
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


def _with_scanned(project: Project, plain: ReportImage, verdicts: VerdictSet) -> ReportImage:
    """Replace the packages by those in an earlier scan, since the lock does not describe this image."""
    image = stored_as(project, verdicts.subject)
    contents = cached_contents(project.layout, image) if image else None
    packages = tuple(
        ReportPackage(name=package.name, version=package.version, build=package.build)
        for package in (contents.packages if contents else ())
    )
    return replace(plain, packages=packages, moves=(), since="")


# --- verdicts and claims ------------------------------------------------------------------------


def _history(
    artifacts: Sequence[tuple[StoreRepository, VerdictSet]],
) -> tuple[tuple[VerifiedImage, VerificationResult], ...]:
    return _newest_first(
        (verdicts.subject, result) for _, verdicts in artifacts for result in verdicts.judged
    )


def _newest_first(
    rows: Iterable[tuple[VerifiedImage, VerificationResult]],
) -> tuple[tuple[VerifiedImage, VerificationResult], ...]:
    """Return each verdict once, even if both store and registry have it.

    It is revoked if one of them says so.
    """
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
    claims_by_capability: dict[Capability, CellClaim] = {}
    for capability, claim in chain(claims):
        claims_by_capability.setdefault(parse_capability(capability), claim)
    return claims_by_capability
