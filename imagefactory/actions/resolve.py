"""Resolve a name to one image: its target, its lock, and its places.

An image is verified by its digest, with the expectations of the lock that it was built from. It is rejected
if the current lock is a different one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.actions.definition import define_target
from imagefactory.actions.images import (
    find_stored,
    load_artifact,
    not_built_error,
    require_image,
    stored_image,
    stored_sif,
)
from imagefactory.actions.transfer import local_name, pull_image, target_reference
from imagefactory.actions.verdicts import subject_of
from imagefactory.errors import StaleError, UsageError
from imagefactory.lock.files import lock_digest
from imagefactory.model import BuildSpec, Target
from imagefactory.oci.graph import StoreRepository, read_manifest
from imagefactory.oci.manifests import Descriptor, Image, SifArtifact
from imagefactory.oci.sif import TARGET
from imagefactory.oci.store import DIGEST, ImageReference, check_digest, parse_reference, resolve_mirror
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.serialize import printable_value
from imagefactory.verify.report import VerifiedImage

TARGET_LABEL, LOCK_LABEL = "imagefactory.target", "imagefactory.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedImage:
    """An image or .sif of the store. `where` is its reference in a registry, None if only stored here."""

    made: Image | SifArtifact
    subject: VerifiedImage
    definition: BuildSpec
    where: ImageReference | None


def resolve_image(
    project: Project, name: str, registry: str, progress: Progress, *, gpu: bool = True
) -> ResolvedImage:
    """Return the image of a target, a tag or digest of the store, `TARGET@sha256:...`, or a reference.

    The caller has checked the name. An image that is not in the store is pulled by digest. With `registry`
    (`host[/path]`) that registry must have the image too. Raises NothingSelectedError and BuildError without
    an image, UsageError for an image that is not of this project's targets or, with `gpu`, only for CPUs,
    and StaleError for an image of another lock.
    """
    artifact, reference = _find(project, name, registry, progress)
    definition = definition_of(project, artifact, name)
    if gpu:
        check_not_cpu(definition.target)
    subject = subject_of(artifact, definition.target.name)
    if registry and reference is None:
        reference = _in_registry(project, definition.target, subject, registry)
    return ResolvedImage(made=artifact, subject=subject, definition=definition, where=reference)


def check_not_cpu(target: Target) -> None:
    """Raise UsageError for a target without GPUs, which the GPU suite cannot verify."""
    if not target.gpu:
        raise UsageError(
            "target-without-gpu",
            f"{target.name} is only for CPUs, so the GPU suite cannot verify it",
            hint=f"run its smoke test instead: imagefactory build {target.name}",
        )


def check_name(project: Project, name: str, *, gpu: bool = True) -> None:
    """Raise an error for an invalid name or, with `gpu`, a CPU target. Fetches and reads no image."""
    plain, separator, digest = name.partition("@")
    if "/" in name:
        parse_reference(name)
    elif not DIGEST.fullmatch(name):
        if separator:
            check_digest(digest)
        if ":" not in plain:
            target = project.select_single(plain)
            if gpu:
                check_not_cpu(target)


def _find(
    project: Project, name: str, registry: str, progress: Progress
) -> tuple[Image | SifArtifact, ImageReference | None]:
    if "/" in name:
        return _from_registry(project, parse_reference(name), progress)
    _, separator, digest = name.rpartition("@")
    if (
        separator
        and (registry or project.settings.registry.value)
        and project.layout.manifest(digest) is None
    ):
        return _from_registry(project, target_reference(project, name, registry)[1], progress)
    artifact = find_stored(project, name)
    if artifact is None:
        target = project.select_single(name)
        artifact = stored_image(project, target) or stored_sif(project, target)
        if artifact is None:
            raise not_built_error(target, ", or name an image in a registry: HOST/NAME@sha256:...")
    return artifact, None


def _from_registry(
    access: Access, reference: ImageReference, progress: Progress
) -> tuple[Image | SifArtifact, ImageReference]:
    """Pull an image under a name derived from its digest, so that the tag of the target does not move."""
    mirror = resolve_mirror(reference, access.settings.mirror_map)
    repo = StoreRepository(store=open_registry(access, mirror.registry), repository=mirror.repository)
    digest = read_manifest(repo, mirror.tag_or_digest).descriptor.digest
    pinned = replace(reference, tag="", digest=digest)
    manifest = access.layout.manifest(digest)
    if manifest is not None:
        return load_artifact(access, str(pinned), manifest[0]), pinned
    name = pull_image(access, pinned, local_name(access, pinned), progress).name
    return require_image(access, name), pinned


def _in_registry(access: Access, target: Target, subject: VerifiedImage, registry: str) -> ImageReference:
    host, path = registry_place(access, registry)
    repository = repository_of(path, target.family)
    if open_registry(access, host).manifest(repository, subject.index) is None:
        raise UsageError(
            "image-not-in-registry",
            f"{host}/{repository} has no image {subject.index}",
            hint=f"run imagefactory push {target.name} --registry {registry}",
        )
    return ImageReference(registry=host, repository=repository, digest=subject.index)


def definition_of(project: Project, artifact: Image | SifArtifact, name: str) -> BuildSpec:
    """Return the expected definition of the image, by the target and lock in its labels."""
    labels = _labels(project, artifact)
    target = project.target(labels.get(TARGET_LABEL, ""))
    if target is None:
        label = printable_value(labels.get(TARGET_LABEL, ""))
        message = f"this project has no target '{label}'" if label else "it has no label of a target"
        raise UsageError(
            "image-target-unknown",
            f"cannot verify {name}: {message}",
            hint="verify it in the project that built it (-C DIR)",
        )
    plain, separator, digest = name.partition("@")
    if separator and plain != target.name and project.target(plain):
        raise UsageError(
            "image-target-mismatch",
            f"{name} is an image of {target.name}, not of the target in this name",
            hint=f"use {target.name}@{digest}",
        )
    definition = define_target(project, target)
    # The manifest of a .sif names only the target; the suite checks the packages inside all the same.
    digest = lock_digest(definition.lock)
    if labels.get(LOCK_LABEL, digest if isinstance(artifact, SifArtifact) else "") != digest:
        raise StaleError(
            "image-outdated",
            f"{name} was not built from the current lock of {target.name}",
            hint=f"run imagefactory build {target.name}, or check out the revision that has its lock",
        )
    return definition


def _labels(access: Access, artifact: Image | SifArtifact) -> dict[str, str]:
    """Return the labels of an image. A .sif has only the label of its target."""
    layout = access.layout
    if isinstance(artifact, Image):
        config = json.loads(layout.read(Descriptor(media_type="", digest=artifact.config, size=0)))
        return _texts(config, "config", "Labels")
    manifest = layout.manifest(artifact.digest)
    annotations = _texts(json.loads(manifest[1]), "annotations") if manifest else {}
    return {TARGET_LABEL: annotations[TARGET]} if TARGET in annotations else {}


def _texts(value: object, *names: str) -> dict[str, str]:
    """Return the texts of an object of untrusted JSON."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    rows = value.items() if isinstance(value, dict) else ()
    return {key: text for key, text in rows if isinstance(text, str)}
