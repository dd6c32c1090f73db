"""Put images where the jobs of a pool find them. Images are built and sent only if they are missing.

    docker   the candidate in the registry, by digest
    oras     the .sif of the image, as an artifact in that registry
    sif      that file in the setting `sif_folder`, else in the sweep's directory, which jobs transfer
    osdf     that file at a place that only tools of the site can write: a person copies the file

A .sif is verified as its own subject, because no conversion creates the same file twice.
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
from imagefactory.oci.graph import parse_parts, read_manifest
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.sif import copy_sif, sif_name, sifs_of
from imagefactory.oci.store import ImageReference, parse_reference
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.schedulers.pool import ImageKind, PoolImage
from imagefactory.settings.choices import CONTAINERS, EDF, SLURM
from imagefactory.trust.attached import read_subject
from imagefactory.trust.claims import to_renew

OSDF = "osdf://"
COMPRESSION = "fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDelivery:
    """The destination of images for jobs. `registry` is HOST[/PATH] or empty, `folder` that of the sweep."""

    kind: ImageKind
    registry: str
    folder: Path
    now: datetime


def choose_container(project: Project, pool: str) -> str:
    """Return the program that starts the images of a pool's jobs. Raises UsageError for `edf`."""
    container = project.settings.container.value if pool == SLURM else CONTAINERS[0]
    if container == EDF:
        raise UsageError(
            "container-unsupported",
            "sweeps cannot start images by EDF files, which container = 'edf' sets",
            hint="use the pyxis of the Container Engine: set IMAGEFACTORY_CONTAINER=pyxis",
        )
    return container


def choose_image_type(project: Project, requested: str, registry: str, pool: str = "") -> ImageKind:
    """Return the requested type, else one by the settings: `sif_folder`, then a registry, else a .sif.

    The content of the store is ignored: a verdict on a .sif is not one on the image, so the type must not
    change by itself. Raises UsageError for a type that needs a registry if none is set, and for a type that
    the container program of the pool does not start.
    """
    container = choose_container(project, pool)
    if container != CONTAINERS[0]:
        if requested not in ("", ImageKind.DOCKER):
            raise UsageError(
                "image-type-unsupported",
                f"container = '{container}' starts images of a registry only, not --image-format {requested}",
                hint="remove --image-format",
            )
        requested = ImageKind.DOCKER
    directory = project.settings.sif_folder.value
    sif = ImageKind.OSDF if directory.startswith(OSDF) else ImageKind.SIF
    if requested:
        kind = sif if requested == ImageKind.SIF else ImageKind(requested)
    else:
        kind = sif if directory or not registry else ImageKind.DOCKER
    if kind in (ImageKind.DOCKER, ImageKind.ORAS) and not registry:
        raise UsageError(
            "no-registry-set",
            f"--image-format {kind} needs a registry, and none is set",
            hint="pass --registry HOST[/PATH], or --image-format sif",
        )
    return kind


def read_pool_stages(
    project: Project, targets: Sequence[Target], delivery: ImageDelivery
) -> tuple[TargetStatus, ...]:
    """Return the status of each target, with the verdicts on the pool's format of its image."""
    if delivery.kind is ImageKind.DOCKER:
        return read_stages(project, targets, PlanLookup(now=delivery.now, registry=delivery.registry))
    reader = VerdictReader(project, delivery.now)

    def of_sif(stage: TargetStatus) -> TargetStatus:
        sif = None if stage.missing else ensure_stored_sif(project, stage.target)
        return replace(stage, verdicts=to_renew(reader.stored(sif), delivery.now) if sif else ())

    return tuple(map(of_sif, read_stages(project, targets, PlanLookup(now=delivery.now))))


def ensure_stored_sif(project: Project, target: Target) -> SifArtifact | None:
    """Return the stored .sif of the image of a target, or the one that Apptainer built."""
    image = stored_image(project, target)
    return stored_sif(project, target) if image is None else _sif_of(project, image)


def _sif_of(project: Project, image: Image) -> SifArtifact | None:
    sifs = sifs_of(project.layout, image.manifest)
    return min(sifs, key=lambda sif: sif.compression != COMPRESSION, default=None)


def ensure_image(
    project: Project, stage: TargetStatus, delivery: ImageDelivery, progress: Progress
) -> PoolImage:
    """Build, convert and send the image of a target, as far as needed. Return its location for jobs.

    Raises the errors of these steps, and CheckFailedError for an image that fails its CPU checks.
    """
    target = stage.target
    if delivery.kind is ImageKind.DOCKER:
        reference = stage.reference
        if not reference:
            image = _locked_image(project, target, progress)
            if isinstance(image, SifArtifact):
                raise UsageError(
                    "image-only-sif",
                    f"Apptainer built {target.name} as a .sif, so it has no image for --image-format docker",
                    hint="pass --image-format oras or --image-format sif",
                )
            reference = str(replace(_push(project, target, image, delivery, progress), tag=""))
        return _in_registry(project, target, reference)
    sif = _locked_sif(project, target, progress)
    if delivery.kind is ImageKind.ORAS:
        location = _push(project, target, sif, delivery, progress)
        address = f"oras://{location.registry}/{location.repository}@{location.digest}"
    else:
        address = _place_file(project, target, sif, delivery, progress)
    return PoolImage(
        kind=delivery.kind,
        address=address,
        subject=subject_of(sif, target.name),
        size=sif.file.size,
        unpacked=unpacked_of(sif.file.size),
        sha256=sif.file.digest,
    )


def _locked_image(project: Project, target: Target, progress: Progress) -> Image | SifArtifact:
    """Return the image of the lock, built if the store lacks it."""
    artifact = find_built(project, target)
    if artifact is None:
        settings = project.settings
        options = BuildOptions(engine=settings.engine.value, runner=settings.runner.value)
        built = build_target(project, target, options, progress)
        if built.report is not None and not built.report.passed:
            raise CheckFailedError(
                "smoke-test-failed",
                f"{target.name} does not pass its CPU checks",
                hint=f"to see the failed checks, run imagefactory build {target.name}",
            )
        artifact = built.image
    return artifact


def _locked_sif(project: Project, target: Target, progress: Progress) -> SifArtifact:
    artifact = _locked_image(project, target, progress)
    if isinstance(artifact, SifArtifact):
        return artifact
    if sif := _sif_of(project, artifact):
        return sif
    with project.layout.in_use(progress), progress.stage(f"{target.name}: .sif for the pool"):
        return ensure_sif(project, artifact, target.name, progress, compression=COMPRESSION)


def _push(
    project: Project,
    target: Target,
    artifact: Image | SifArtifact,
    delivery: ImageDelivery,
    progress: Progress,
) -> ImageReference:
    options = PushOptions(now=delivery.now, registry=delivery.registry, made=artifact)
    return push_target(project, target, options, progress).reference


def _in_registry(project: Project, target: Target, reference: str) -> PoolImage:
    """Return an image from its registry, for a machine that never had the image."""
    destination = parse_reference(reference)
    repo = place_of(project, destination)
    subject = replace(read_subject(repo, destination.tag_or_digest), target=target.name)
    _, blobs = parse_parts(read_manifest(repo, subject.manifest))
    size = sum(blob.size for blob in blobs)
    return PoolImage(
        kind=ImageKind.DOCKER,
        address=f"docker://{destination.registry}/{destination.repository}@{subject.index}",
        subject=subject,
        size=size,
        unpacked=unpacked_of(size),
    )


def unpacked_of(size: int) -> int:
    """Return the estimated bytes of unpacked layers: zstd packs frameworks to about a third."""
    return 3 * size


def _place_file(
    project: Project, target: Target, sif: SifArtifact, delivery: ImageDelivery, progress: Progress
) -> str:
    """Return the path of the .sif for jobs, copied if needed. Its name contains its digest."""
    name, shared = sif_name(target.name, sif.file.digest), project.settings.sif_folder.value
    if delivery.kind is ImageKind.OSDF:
        return f"{shared.rstrip('/')}/{name}"
    path = (Path(shared) if shared else delivery.folder.absolute() / "images") / name
    if not (path.is_file() and path.stat().st_size == sif.file.size):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                *os_problem("create", path.parent, error),
                hint="set sif-folder to a directory that you can write",
            ) from error
        if shared or not _link(sif.path, path):
            copy_sif(sif, path, progress)
    return str(path)


def _link(source: Path, path: Path) -> bool:
    """Create a hard link to the stored file. Return False if another file system or owner prevents it."""
    try:
        os.link(source, path)
    except OSError:
        return False
    return True
