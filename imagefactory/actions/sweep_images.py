"""Images where the jobs of a pool find them: made and sent once, and nothing is done that was done before.

    docker   the candidate in the registry, by digest
    oras     the .sif of it, as an artifact of that registry
    sif      that file in the setting `sif_folder`, else in the sweep's folder, from where it is transferred
    osdf     that file at a place that only the site's own tools write to: a person puts it there

A .sif is verified as itself: no conversion gives the same file twice, so it is a subject of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from imagefactory.actions.build import BuildOptions, build_target, find_built
from imagefactory.actions.images import ensure_sif, stored_image, stored_sif
from imagefactory.actions.plan import PlanLookup, read_stages
from imagefactory.actions.transfer import PushOptions, push_target
from imagefactory.actions.verdicts import VerdictReader, place_of, subject_of
from imagefactory.errors import CheckFailedError, UsageError, os_problem
from imagefactory.matrix.plan import TargetStatus
from imagefactory.model import Target
from imagefactory.oci.graph import StoreRepository, parse_parts, read_manifest
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.sif import copy_sif, sif_name, sifs_of
from imagefactory.oci.store import parse_reference
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.schedulers.pool import ImageKind, PoolImage
from imagefactory.trust.attached import read_subject
from imagefactory.trust.claims import to_renew

OSDF = "osdf://"
CHOICES = (ImageKind.DOCKER, ImageKind.ORAS, ImageKind.SIF)
COMPRESSION = "fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDelivery:
    """How jobs get their images: `registry` is HOST[/PATH] or empty, `folder` is the sweep's own."""

    kind: ImageKind
    registry: str
    folder: Path
    now: datetime


def choose_image_type(factory: Project, requested: str, registry: str) -> ImageKind:
    """The kind that was asked for, else by the settings alone: `sif_folder`, then a registry, else a .sif.

    Not by what the store has: a verdict on a .sif is none on the image, so the kind never changes by itself.

    Raises UsageError for one that needs a registry where none is set.
    """
    folder = factory.settings.sif_folder.value
    sif = ImageKind.OSDF if folder.startswith(OSDF) else ImageKind.SIF
    if requested:
        kind = sif if requested == ImageKind.SIF else ImageKind(requested)
    elif folder or not registry:
        kind = sif
    else:
        kind = ImageKind.DOCKER
    if kind in (ImageKind.DOCKER, ImageKind.ORAS) and not registry:
        raise UsageError(
            "no-registry-set",
            f"--image-format {kind} needs a registry, and none is set",
            hint="pass --registry HOST[/PATH], or --image-format sif",
        )
    return kind


def read_pool_stages(
    factory: Project, targets: Sequence[Target], place: ImageDelivery
) -> tuple[TargetStatus, ...]:
    """How far each target is, with the verdicts on what the pool would run. Raises as `read_stages`."""
    if place.kind is ImageKind.DOCKER:
        return read_stages(factory, targets, PlanLookup(now=place.now, registry=place.registry))
    stages = read_stages(factory, targets, PlanLookup(now=place.now))
    judge = VerdictReader(factory, place.now)

    def of_sif(stage: TargetStatus) -> TargetStatus:
        sif = None if stage.missing else ensure_stored_sif(factory, stage.target)
        return replace(stage, verdicts=to_renew(judge.stored(sif), place.now) if sif else ())

    return tuple(of_sif(stage) for stage in stages)


def ensure_stored_sif(factory: Project, target: Target) -> SifArtifact | None:
    """The .sif that the store has for what the target's tag points to; makes none."""
    image = stored_image(factory, target)
    if image is None:
        return stored_sif(factory, target)
    sifs = sifs_of(factory.layout, image.manifest)
    return min(sifs, key=lambda sif: sif.compression != COMPRESSION, default=None)


def ensure_image(
    factory: Project, stage: TargetStatus, place: ImageDelivery, progress: Progress
) -> PoolImage:
    """The image of a target where jobs find it: built, converted and sent as far as that is still to do.

    Raises what these raise, and CheckFailedError for an image that does not pass its CPU-level checks.
    """
    if place.kind is ImageKind.DOCKER:
        reference = stage.reference or _push(factory, stage.target, place, progress)
        return _in_registry(factory, stage.target, reference)
    sif = _sif(factory, stage.target, progress)
    if place.kind is ImageKind.ORAS:
        return _pushed_sif(factory, stage.target, sif, place, progress)
    return _file(factory, stage.target, sif, place, progress)


def _locked_image(factory: Project, target: Target, progress: Progress) -> Image | SifArtifact:
    """What the lock gives, from the store where it is there."""
    artifact = find_built(factory, target)
    if artifact is None:
        settings = factory.settings
        options = BuildOptions(engine=settings.engine.value, runner=settings.runner.value)
        built = build_target(factory, target, options, progress)
        if built.report is not None and not built.report.passed:
            raise CheckFailedError(
                "smoke-test-failed",
                f"{target.name} does not pass its CPU checks",
                hint=f"imagefactory build {target.name} shows them; a GPU does not change them",
            )
        artifact = built.image
    return artifact


def _push(factory: Project, target: Target, place: ImageDelivery, progress: Progress) -> str:
    artifact = _locked_image(factory, target, progress)
    if isinstance(artifact, SifArtifact):
        raise UsageError(
            "image-only-sif",
            f"Apptainer built {target.name} as a .sif, so --image-format docker has no image of it",
            hint="pass --image-format oras or --image-format sif",
        )
    options = PushOptions(now=place.now, registry=place.registry, made=artifact)
    return str(replace(push_target(factory, target, options, progress).reference, tag=""))


def _in_registry(factory: Project, target: Target, reference: str) -> PoolImage:
    """Of an image that this machine may have never seen: its registry tells what it is and how large."""
    where = parse_reference(reference)
    place = place_of(factory, where)
    subject = replace(read_subject(place, where.tag_or_digest), target=target.name)
    size = _size(place, subject.manifest)
    return PoolImage(
        kind=ImageKind.DOCKER,
        address=f"docker://{where.registry}/{where.repository}@{subject.index}",
        subject=subject,
        size=size,
        unpacked=unpacked_of(size),
    )


def _size(place: StoreRepository, manifest: str) -> int:
    _, blobs = parse_parts(read_manifest(place, manifest))
    return sum(blob.size for blob in blobs)


def unpacked_of(size: int) -> int:
    """What layers of that size unpack to, where nobody knows: frameworks' own shrink to a third by zstd."""
    return 3 * size


def _sif(factory: Project, target: Target, progress: Progress) -> SifArtifact:
    artifact = _locked_image(factory, target, progress)
    if isinstance(artifact, SifArtifact):
        return artifact
    known = sifs_of(factory.layout, artifact.manifest)
    fast = [sif for sif in known if sif.compression == COMPRESSION]
    if known:
        return next(iter(fast or known))
    with factory.layout.in_use(progress), progress.stage(f"{target.name}: .sif for the pool"):
        return ensure_sif(factory, artifact, target.name, progress, compression=COMPRESSION)


def _of_sif(target: Target, sif: SifArtifact, kind: ImageKind, address: str) -> PoolImage:
    return PoolImage(
        kind=kind,
        address=address,
        subject=subject_of(sif, target.name),
        size=sif.file.size,
        unpacked=unpacked_of(sif.file.size),
        sha256=sif.file.digest,
    )


def _pushed_sif(
    factory: Project, target: Target, sif: SifArtifact, place: ImageDelivery, progress: Progress
) -> PoolImage:
    options = PushOptions(now=place.now, registry=place.registry, made=sif)
    where = push_target(factory, target, options, progress).reference
    address = f"oras://{where.registry}/{where.repository}@{where.digest}"
    return _of_sif(target, sif, ImageKind.ORAS, address)


def _file(
    factory: Project, target: Target, sif: SifArtifact, place: ImageDelivery, progress: Progress
) -> PoolImage:
    """The name carries the digest, so a file that is there whole is the one."""
    name, shared = sif_name(target.name, sif.file.digest), factory.settings.sif_folder.value
    if place.kind is ImageKind.OSDF:
        return _of_sif(target, sif, ImageKind.OSDF, f"{shared.rstrip('/')}/{name}")
    path = (Path(shared) if shared else place.folder.absolute() / "images") / name
    if not (path.is_file() and path.stat().st_size == sif.file.size):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                *os_problem("create", path.parent, error), hint="set another sif-folder"
            ) from error
        if shared or not _linked(sif.path, path):
            copy_sif(sif, path, progress)
    return _of_sif(target, sif, ImageKind.SIF, str(path))


def _linked(source: Path, path: Path) -> bool:
    """A second name for the store's file costs nothing; another file system or owner takes none."""
    try:
        os.link(source, path)
    except OSError:
        return False
    return True
