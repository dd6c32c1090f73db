"""A catalogue of what this factory has in a registry, or in the store on this machine.

    Factory + Making -> catalogue_of() -> Made(catalogue, left_out)

Of each target one image: the candidate of the present lock, or what the target's own tag points to where that
alone is verified, so that a lock that was solved anew does not take away what people use. Where the policy
requires approvals, an image that has a tag to promote needs them for one of its tags. Its verdicts are those
of the registry and of the store here that can be relied on; predictions are those of the lock's wheels,
or of a scan of the image where it was scanned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypedDict

from imagefactory.access import open_answering, registry_place, repository_of
from imagefactory.actions.build import find_built
from imagefactory.actions.images import belongs, is_own
from imagefactory.actions.locked import require_lock
from imagefactory.actions.plan import cached_contents
from imagefactory.actions.transfer import explain_no_candidate, find_candidate
from imagefactory.actions.verdicts import ANY, find_in, local_place, read_verification_policy
from imagefactory.errors import (
    ImagefactoryError,
    LockError,
    NoImageError,
    NothingSelectedError,
    RegistryError,
    StaleError,
    StoreError,
    ToolError,
)
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.cells import CellEvidence, answer_cell, cell_query
from imagefactory.gpu.drivers import cuda_floor, older, parse_driver
from imagefactory.gpu.frameworks import cuda_of
from imagefactory.gpu.knowledge.gpus import capabilities, processors
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility, InstalledPackage, ScanResult
from imagefactory.matrix.plan import weigh_claims
from imagefactory.model import Lock, LockedCondaPackage, Target
from imagefactory.oci.candidates import APPROVAL_TYPE, plain_tag
from imagefactory.oci.graph import Manifest, StoreRepository, parse_parts, read_manifest
from imagefactory.oci.inflate import CorruptDataError, plain_layer
from imagefactory.oci.layers import CHUNK
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import Image, OciLayer
from imagefactory.oci.sif import SIF_TYPE, is_sif_manifest
from imagefactory.oci.store import ImageReference
from imagefactory.oci.transfer import WORKERS
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.trust.approval import Approval, Approvals, read_approvals
from imagefactory.trust.attached import read_revocations, read_statements, read_subject
from imagefactory.trust.catalog import LIFE, Catalog, CatalogImage, CatalogSif, Envelopes
from imagefactory.trust.envelope import parse_envelope
from imagefactory.trust.judgement import (
    VerificationPolicy,
    cell_of,
    find_verdicts,
    merge_revoked,
    revoked_cells,
    verify_revocations,
)
from imagefactory.trust.verdict import RevokedCell, VerdictStatus, VerificationResult
from imagefactory.verify.report import VerifiedImage

# --- What a catalogue says of an image beside its digests: versions, driver, predictions, its unpacked size


SIZES = "sizes"
"""Records of the store: what a layer has unpacked, by the digest of the packed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """`version` of the framework and `runtime`, the CUDA that came, `driver` and `minor_compat` as
    CatalogImage has them."""

    version: str
    runtime: str
    driver: str
    minor_compat: bool


def facts_of(target: Target, lock: Lock | None, predicted: Sequence[tuple[str, CellClaim]]) -> ImageFacts:
    """What is known of an image by its lock, without one by its target alone.

    Programs of a CUDA major start on the first driver of that major (gpu/drivers.py, rule R6), unless their
    code is packed so that older drivers cannot read it (R7); what must be compiled from PTX needs more, and
    its claim says so. `driver` is the lowest of what runs as machine code, and `minor_compat` says whether
    that is the major's first.
    """
    packages = lock.packages if lock else ()
    names = {target.framework, target.framework.replace("_", "-").lower()}
    version = next((package.version for package in packages if package.name in names), target.version)
    contents = ScanResult(
        source="the lock",
        libraries=(),
        packages=tuple(
            InstalledPackage(
                name=package.name,
                version=package.version,
                build=package.build if isinstance(package, LockedCondaPackage) else "",
            )
            for package in packages
        ),
    )
    if not target.gpu or rocm_of(target.cuda):
        return ImageFacts(version=version, runtime="", driver="", minor_compat=False)
    runtime = cuda_of(contents) or target.cuda
    floor = cuda_floor(runtime).driver
    native = [claim.driver for _, claim in predicted if claim.answer is Compatibility.YES and claim.driver]
    driver = min(native, key=parse_driver, default=floor)
    return ImageFacts(
        version=version,
        runtime=runtime,
        driver=driver,
        minor_compat=bool(floor and driver and not older(floor, driver)),
    )


def predicted_claims(
    factory: Project, target: Target, lock: Lock | None, image: Image | None
) -> tuple[tuple[str, CellClaim], ...]:
    """What one expects of each known capability, by rule plan.weigh: a reason against it comes first, and
    behind it known faults that some calls meet there. Nothing of an image whose lock is not known, or
    that is for CPUs.
    """
    if lock is None or not target.gpu:
        return ()
    evidence = CellEvidence(contents=cached_contents(factory.layout, image) if image else None)
    found = []
    for capability in processors() if rocm_of(target.cuda) else capabilities():
        ruling = weigh_claims(answer_cell(cell_query(target, lock, capability), evidence), frozenset())
        if ruling.claim is not None and ruling.claim.basis is not ClaimBasis.VERIFIED:
            faults = (claim for claim in ruling.warnings if claim.is_fault)
            found += [(str(capability), claim) for claim in (ruling.claim, *faults)]
    return tuple(found)


def unpacked_size(layout: Layout, image: Image) -> int:
    """Bytes of the layers' tars together, 0 where one cannot be read here. Each is read once, then known."""
    try:
        return sum(_plain_size(layout, layer) for layer in image.layers)
    except (StoreError, ToolError, CorruptDataError, OSError):
        return 0


def _plain_size(layout: Layout, layer: OciLayer) -> int:
    key = layer.descriptor.digest.removeprefix("sha256:")
    known = layout.recall(SIZES, key)
    if known and isinstance(known.get("size"), int):
        return int(known["size"])
    with layout.blob_path(layer.descriptor.digest).open("rb") as file:
        chunks = iter(lambda: file.read(CHUNK), b"")
        size = sum(map(len, plain_layer(layer.descriptor.media_type, chunks)))
    with suppress(StoreError):  # a full disk: it is measured again
        layout.record(SIZES, key, {"size": size})
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRequest:
    """What a catalogue is made of, and when. `registry` (`host[/path]`) is empty for the setting's; where
    that is empty too, it is made of the store on this machine. `named`: each target must be there.
    `hurried`: a registry that does not answer is not waited for long.
    """

    targets: tuple[Target, ...]
    now: datetime
    registry: str = ""
    named: bool = False
    hurried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogResult:
    """A catalogue, and why targets are not in it: pairs of name and one line. `kept` are targets that stand
    there as the last catalogue has them. `revoked` is what this store remembers of that, by target.
    `waiting` are the targets whose images too few keys approved."""

    catalogue: Catalog
    left_out: tuple[tuple[str, str], ...]
    kept: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    revoked: Mapping[str, tuple[RevokedCell, ...]] = field(default_factory=dict)


def build_catalog(factory: Project, making: CatalogRequest, progress: Progress) -> CatalogResult:
    """Raises RegistryError and StoreError, UsageError for a trust that cannot be read.

    Where `named` is set, NothingSelectedError for the first target that is not there.
    """
    court = read_verification_policy(factory, making.now)
    shelves = replace(_image_sources(factory, making), revoked=stored_revocations(factory, court))
    images, left_out, waiting = [], [], []
    with (
        progress.stage(f"catalogue of {shelves.name}"),
        ThreadPoolExecutor(WORKERS, thread_name_prefix="catalogue") as pool,
    ):
        found = pool.map(lambda one: _catalog_target(factory, one, shelves, court), making.targets)
        for target, image in zip(making.targets, found, strict=True):
            if isinstance(image, CatalogImage):
                images.append(image)
                continue
            if making.named:
                build = f"build --push {target.name}" if shelves.host else f"build {target.name}"
                raise NothingSelectedError(
                    "catalog-image-missing",
                    f"{target.name}: {image.why}",
                    hint=f"imagefactory {f'promote {target.name}' if image.waits else build}",
                )
            left_out.append((target.name, image.why))
            waiting += [target.name] if image.waits else []
    made = making.now.replace(microsecond=0)
    catalogue = Catalog(made=made, expires=made + LIFE, images=tuple(images), suites=court.suites)
    return CatalogResult(
        catalogue=catalogue,
        left_out=tuple(left_out),
        waiting=tuple(waiting),
        revoked=shelves.revoked,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageSources:
    """Where images are looked for: `host` is empty for the store on this machine."""

    places: Mapping[str, StoreRepository]
    host: str
    name: str
    revoked: Mapping[str, tuple[RevokedCell, ...]] = field(default_factory=dict)


def stored_revocations(factory: Project, court: VerificationPolicy) -> Mapping[str, tuple[RevokedCell, ...]]:
    """What this store remembers of verdicts that were taken back, by target, wherever the images are."""
    rows: dict[str, tuple[RevokedCell, ...]] = {}
    place = local_place(factory, ANY)
    for manifest in factory.layout.subjects():
        there = {one.digest: one.envelope for one in read_revocations(place, manifest)}
        subject = VerifiedImage(target="", index=manifest, manifest=manifest, config=manifest)
        for one in verify_revocations(there, subject, court).heeded if there else ():
            if one.about:
                row = cell_of(one, one.about, one.capability, court.trust)
                rows[one.about.target] = (*rows.get(one.about.target, ()), row)
    return rows


def _image_sources(factory: Project, making: CatalogRequest) -> _ImageSources:
    families = sorted({target.family for target in making.targets})
    if not (making.registry or factory.settings.registry.value):
        places = {family: local_place(factory, family) for family in families}
        return _ImageSources(places=places, host="", name=str(factory.layout.path))
    host, path = registry_place(factory, making.registry)
    store = open_answering(factory, host, hurried=making.hurried)
    places = {
        family: StoreRepository(store=store, repository=repository_of(path, family)) for family in families
    }
    return _ImageSources(places=places, host=host, name=f"{host}/{path}" if path else host)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRoot:
    """An image that a target may be: with its lock where it is what that lock gives."""

    digest: str
    lock: Lock | None
    subject: VerifiedImage
    judged: tuple[VerificationResult, ...]
    envelopes: Envelopes
    revocations: Envelopes
    revoked: tuple[RevokedCell, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _SkippedTarget:
    """Why a target has no image in the catalogue; `waits`: too few keys approved those that it has."""

    why: str
    waits: bool = False


def _catalog_target(
    factory: Project, target: Target, shelves: _ImageSources, court: VerificationPolicy
) -> CatalogImage | _SkippedTarget:
    """The image of a target, or why there is none."""
    place, why, roots = shelves.places[target.family], "", []
    try:
        lock = require_lock(factory, target)
        made = _expected_digest(factory, target, place)
    except (LockError, StaleError) as error:
        lock, made, why = None, "", error.message
    except ModuleNotFoundError as error:  # a light install does not know what the lock gives
        lock, made, why = None, "", f"its image cannot be told from others without {error.name}"
    tagged = place.store.manifest(place.repository, plain_tag(target))
    for digest in dict.fromkeys(digest for digest in (made, tagged[0].digest if tagged else "") if digest):
        try:
            root = _read_root(factory, target, (place, digest, lock if digest == made else None), court)
        except NoImageError as error:
            why = f"{digest} is left out: {error.message}"
            continue
        # Anyone who may push can move a tag.
        if digest == made or any(one.proves for one in root.judged) or is_own(factory, place, digest):
            roots.append(root)
        else:
            why = f"{digest} is left out: no verdict verifies it, and this store did not push it"
    offered = []
    for one in roots:
        if _waits(target, (place, shelves.host), one, court):
            why = f"{one.digest} waits, too few keys approved it: imagefactory image promote {target.name}"
            factory.tell(f"{target.name}: {why}")
        else:
            offered.append(one)
    if not offered:
        why = why or explain_no_candidate(factory, place)
        return _SkippedTarget(why=why, waits=bool(roots))
    root = next((root for root in offered if any(judged.proves for judged in root.judged)), offered[0])
    image = _describe(factory, target, (place, shelves.host, root), court)
    revoked = (image.revoked, *(one.revoked for one in roots), shelves.revoked.get(target.name, ()))
    return replace(image, revoked=merge_revoked(*revoked))


def _waits(
    target: Target, where: tuple[StoreRepository, str], root: CatalogRoot, court: VerificationPolicy
) -> bool:
    """Whether too few keys approved that any tag of the target points to it.

    An image of which only a .sif is verified has no tag to promote, and does not wait.
    """
    place, host = where
    if not host or (target.gpu and not any(one.proves for one in root.judged)):
        return False
    return lacks_approvals(place, root.subject, plain_tag(target), root.revoked, court)


def lacks_approvals(
    place: StoreRepository,
    subject: VerifiedImage,
    plain: str,
    revoked: Sequence[RevokedCell],
    court: VerificationPolicy,
) -> bool:
    """Whether the policy wants more approvals of an image than any tag of the target (`plain`) has."""
    if not (needed := court.trust.policy.signatures):
        return False
    found = read_statements(place, subject.manifest, APPROVAL_TYPE)
    tags: dict[str, list[Approval]] = {}
    envelopes = [one.envelope for one in found]
    for wanted, approval in read_approvals(envelopes, court.trust, court.now, revoked):
        known = (wanted.place, wanted.subject.index, wanted.subject.manifest)
        if known == (str(place), subject.index, subject.manifest) and belongs(wanted.tag, plain):
            tags.setdefault(wanted.tag, []).append(approval)
    return all(len(Approvals(valid=tuple(given)).best()) < needed for given in tags.values())


def _expected_digest(factory: Project, target: Target, place: StoreRepository) -> str:
    """The digest of what the present lock gives, empty where it is not there."""
    if isinstance(place.store, LayoutStore):
        built = find_built(factory, target)
        return built.digest if built else ""
    found = find_candidate(factory, target, place)
    return found.digest if found else ""


def _read_root(
    factory: Project,
    target: Target,
    where: tuple[StoreRepository, str, Lock | None],
    court: VerificationPolicy,
) -> CatalogRoot:
    place, digest, lock = where
    subject = replace(read_subject(place, digest), target=target.name)
    return CatalogRoot(digest=digest, lock=lock, subject=subject, **_verdicts(factory, place, subject, court))


class _Verdicts(TypedDict):
    judged: tuple[VerificationResult, ...]
    envelopes: Envelopes
    revocations: Envelopes
    revoked: tuple[RevokedCell, ...]


def _verdicts(
    factory: Project, place: StoreRepository, subject: VerifiedImage, court: VerificationPolicy
) -> _Verdicts:
    """What can be relied on, in the registry and in the store here, and what was taken back."""
    if not court.trust.keys:
        return _Verdicts(judged=(), envelopes=(), revocations=(), revoked=())
    images = [find_in(factory, place, subject, court)]
    if not isinstance(place.store, LayoutStore):
        images.append(find_verdicts(local_place(factory, ANY), subject, court, (place,)))
    good: dict[str, tuple[VerificationResult, bytes]] = {}
    bad = set()
    for image in images:
        for judged in image.judged:
            if judged.standing is VerdictStatus.REVOKED or _of_another(judged, subject):
                bad.add(judged.name)
            elif judged.standing is VerdictStatus.GOOD:
                good[judged.name] = (judged, image.envelopes[judged.digest])
    kept = {digest: good[digest] for digest in sorted(good) if digest not in bad}
    revocations = {digest: data for image in images for digest, data in image.revocations.items() if data}
    return _Verdicts(
        judged=tuple(judged for judged, _ in kept.values()),
        envelopes=tuple((judged.digest, data) for judged, data in kept.values()),
        revocations=tuple(sorted(readable_envelopes(revocations))),
        revoked=revoked_cells([one for image in images for one in image.judged], subject, court.trust),
    )


def _of_another(judged: VerificationResult, subject: VerifiedImage) -> bool:
    """Whether it was verified as another target, which says nothing of what this one asks for."""
    return judged.verdict is not None and judged.verdict.report.subject.target not in ("", subject.target)


def readable_envelopes(envelopes: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    for digest, data in envelopes.items():
        try:
            parse_envelope(data, digest)
        except ImagefactoryError:  # a stranger's: nobody would heed it
            continue
        yield digest, data


# --- describing ----------------------------------------------------------------------------------


def _describe(
    factory: Project,
    target: Target,
    where: tuple[StoreRepository, str, CatalogRoot],
    court: VerificationPolicy,
) -> CatalogImage:
    place, host, root = where
    manifest = read_manifest(place, root.subject.manifest)
    described = describe_image(factory, target, root, manifest)
    revoked: list[RevokedCell] = []
    stored = stored_as(factory, root.subject)
    is_sif = is_sif_manifest(json.loads(manifest.data))
    return replace(
        described,
        reference=reference_of(host, place, root.subject),
        unpacked=unpacked_size(factory.layout, stored) if stored else 0,
        sifs=tuple(_sifs(factory, where, court, described.size if is_sif else 0, revoked)),
        revoked=tuple(revoked),
    )


def describe_image(factory: Project, target: Target, root: CatalogRoot, manifest: Manifest) -> CatalogImage:
    """What is said of an image by its target, its lock and its manifest: not where it lies, nor what .sif
    files there are of it, nor its unpacked size."""
    blobs = parse_parts(manifest)[1]
    is_sif = is_sif_manifest(json.loads(manifest.data))
    predicted = predicted_claims(factory, target, root.lock, stored_as(factory, root.subject))
    facts = facts_of(target, root.lock, predicted)
    return CatalogImage(
        target=target.name,
        family=target.family,
        framework=target.framework,
        version=facts.version,
        cuda=target.cuda,
        python=target.python,
        platform=target.platform,
        reference="",
        subject=root.subject,
        size=sum(blob.size for blob in (blobs[-1:] if is_sif else blobs[1:])),
        unpacked=0,
        runtime=facts.runtime,
        minor_compat=facts.minor_compat,
        driver=facts.driver,
        required=target.capabilities,
        predicted=predicted,
        envelopes=root.envelopes,
        revocations=root.revocations,
        revoked=root.revoked,
    )


def reference_of(host: str, place: StoreRepository, subject: VerifiedImage) -> str:
    """HOST/NAME@sha256:... of an image in a registry, empty where `host` is: it is in the store here."""
    if not host:
        return ""
    return str(ImageReference(registry=host, repository=place.repository, digest=subject.index))


def stored_as(factory: Project, subject: VerifiedImage) -> Image | None:
    """The image in the store here, None where it is not there whole."""
    found = factory.layout.manifest(subject.index) or factory.layout.manifest(subject.manifest)
    if found is None:
        return None
    try:
        return factory.layout.load(subject.target, found[0])
    except (StoreError, RegistryError):
        return None


def _sifs(
    factory: Project,
    where: tuple[StoreRepository, str, CatalogRoot],
    court: VerificationPolicy,
    own: int,
    revoked: list[RevokedCell],
) -> Iterator[CatalogSif]:
    """The .sif files of an image, in the registry and in the store here; of one that is a .sif, itself.

    `own` is its size in that case. What was taken back of the files is added to `revoked`.
    """
    place, host, root = where
    if own:
        yield CatalogSif(
            sha256=root.subject.config,
            size=own,
            reference=reference_of(host, place, root.subject),
            subject=root.subject,
            envelopes=root.envelopes,
            revocations=root.revocations,
        )
        return
    seen = set()
    for there, name in ((place, host), (local_place(factory, ANY), "")):
        for referrer in there.store.referrers(there.repository, root.subject.manifest, SIF_TYPE):
            manifest = there.store.manifest(there.repository, referrer.digest)
            if referrer.digest in seen or manifest is None or not is_sif_manifest(json.loads(manifest[1])):
                continue
            seen.add(referrer.digest)
            subject = replace(read_subject(there, referrer.digest), target=root.subject.target)
            found = _verdicts(factory, there, subject, court)
            revoked += found["revoked"]
            if not any(one.proves for one in found["judged"]) and not is_own(factory, there, referrer.digest):
                factory.tell(
                    f"{referrer.digest} is skipped: no verdict verifies it, and this store did not push it"
                )
                continue
            yield CatalogSif(
                sha256=subject.config,
                size=json.loads(manifest[1])["layers"][0]["size"],
                reference=reference_of(name, there, subject),
                subject=subject,
                envelopes=found["envelopes"],
                revocations=found["revocations"],
            )
