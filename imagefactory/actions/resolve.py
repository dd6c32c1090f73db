"""From what a person names to the image that is verified: its target, its lock, and where it lies.

An image is verified by its digest, with the expectations of the lock that it was made of; where the lock here
is another one, it is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.actions.definition import define_target
from imagefactory.actions.images import load_artifact, stored_image, stored_sif
from imagefactory.actions.transfer import local_name, pull_image, target_reference
from imagefactory.errors import BuildError, NothingSelectedError, StaleError, UsageError
from imagefactory.lock.files import lock_digest
from imagefactory.model import BuildSpec, Target
from imagefactory.oci.graph import StoreRepository, read_manifest
from imagefactory.oci.manifests import Descriptor, Image, SifArtifact
from imagefactory.oci.sif import TARGET
from imagefactory.oci.store import DIGEST, ImageReference, check_digest, parse_reference, resolve_mirror
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.recipes.expand import select_single
from imagefactory.serialize import printable_value
from imagefactory.verify.report import VerifiedImage

TARGET_LABEL, LOCK_LABEL = "imagefactory.target", "imagefactory.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedImage:
    """An image or .sif of the store. `where` names it in a registry, None where it is in the store alone."""

    made: Image | SifArtifact
    subject: VerifiedImage
    definition: BuildSpec
    where: ImageReference | None


def resolve_image(
    factory: Project, name: str, registry: str, progress: Progress, *, gpu: bool = True
) -> ResolvedImage:
    """The image that `name` means: a target, a tag or digest of the store, `TARGET@sha256:...`, a reference.

    What is not in the store is pulled from its registry by digest. With `registry` (`host[/path]`) it must be
    there too. Raises NothingSelectedError and BuildError for what is not to be had, UsageError for an image
    that is none of this factory's targets, StaleError for one that was made of another lock. With `gpu` one
    for CPUs alone is refused too.
    """
    check_name(factory, name, gpu=gpu)
    made, where = _find(factory, name, registry, progress)
    definition = definition_of(factory, made, name)
    if gpu:
        check_not_cpu(definition.target)
    subject = subject_of(made, definition.target.name)
    if registry and where is None:
        where = _in_registry(factory, definition.target, subject, registry)
    return ResolvedImage(made=made, subject=subject, definition=definition, where=where)


def check_not_cpu(target: Target) -> None:
    """Raises UsageError for a target without GPUs: the GPU suite has nothing to verify there."""
    if not target.gpu:
        raise UsageError(
            "target-without-gpu",
            f"{target.name} is only for CPUs, so the GPU suite cannot verify it",
            hint=f"its smoke test is its only check: imagefactory build {target.name}",
        )


def check_name(factory: Project, name: str, *, gpu: bool = True) -> None:
    """Raises for a name that means nothing or, with `gpu`, is for CPUs; no image is fetched or read."""
    plain, at, digest = name.partition("@")
    if "/" in name:
        parse_reference(name)
    elif not DIGEST.fullmatch(name):
        if at:
            check_digest(digest)
        if ":" not in plain:
            target = select_single(factory.targets, plain)
            if gpu:
                check_not_cpu(target)


def subject_of(made: Image | SifArtifact, target: str) -> VerifiedImage:
    """What a verdict on it speaks of."""
    manifest = made.manifest if isinstance(made, Image) else made.digest
    return VerifiedImage(target=target, index=made.digest, manifest=manifest, config=made.config)


def _find(
    factory: Project, name: str, registry: str, progress: Progress
) -> tuple[Image | SifArtifact, ImageReference | None]:
    layout = factory.layout
    if "/" in name:
        return _from_registry(factory, parse_reference(name), progress)
    _, at, digest = name.rpartition("@")
    if at or DIGEST.fullmatch(name):
        found = layout.manifest(digest or name)
        if found is not None:
            return load_artifact(factory, name, found[0]), None
        if at and (registry or factory.settings.registry.value):
            return _from_registry(factory, target_reference(factory, name, registry)[1], progress)
        raise NothingSelectedError(
            "image-not-found",
            f"no image {digest or name} in {layout.path}",
            hint="add its registry: HOST/NAME@sha256:...",
        )
    tags = layout.tags()
    if name in tags:
        return load_artifact(factory, name, tags[name]), None
    if ":" in name:
        raise NothingSelectedError(
            "image-not-found", f"no image '{name}' in {layout.path}", hint="imagefactory store list"
        )
    target = select_single(factory.targets, name)
    made = stored_image(factory, target) or stored_sif(factory, target)
    if made is None:
        raise BuildError(
            "image-not-built",
            f"{target.name} is not built",
            hint=f"imagefactory build {target.name}, or name an image in a registry: HOST/NAME@sha256:...",
        )
    return made, None


def _from_registry(
    access: Access, wanted: ImageReference, progress: Progress
) -> tuple[Image | SifArtifact, ImageReference]:
    """Pulled under a name of its own, made of the digest: what a target's tag points to here stays."""
    asked = resolve_mirror(wanted, access.settings.mirror_map)
    place = StoreRepository(store=open_registry(access, asked.registry), repository=asked.repository)
    digest = read_manifest(place, asked.tag_or_digest).descriptor.digest
    fixed = replace(wanted, tag="", digest=digest)
    found = access.layout.manifest(digest)
    if found is not None:
        return load_artifact(access, str(fixed), found[0]), fixed
    pulled = pull_image(access, fixed, local_name(access, fixed), progress)
    image = access.layout.image(pulled.name)
    if image is None:
        raise BuildError(
            "image-removed", f"another process removed {pulled.name} from the store", hint="run it again"
        )
    return image, fixed


def _in_registry(access: Access, target: Target, subject: VerifiedImage, registry: str) -> ImageReference:
    host, path = registry_place(access, registry)
    repository = repository_of(path, target.family)
    if open_registry(access, host).manifest(repository, subject.index) is None:
        raise UsageError(
            "image-not-in-registry",
            f"{host}/{repository} has no image {subject.index}",
            hint=f"imagefactory push {target.name} --registry {registry}",
        )
    return ImageReference(registry=host, repository=repository, digest=subject.index)


def definition_of(factory: Project, made: Image | SifArtifact, name: str) -> BuildSpec:
    """What the image must be, by the target and lock that it says it was made of."""
    told = _labels(factory, made)
    target = next((target for target in factory.targets if target.name == told.get(TARGET_LABEL)), None)
    if target is None:
        whose = printable_value(told.get(TARGET_LABEL, ""))
        what = f"this project has no target '{whose}'" if whose else "it has no label of a target"
        raise UsageError(
            "image-target-unknown",
            f"cannot verify {name}: {what}",
            hint="verify it in the project that built it (-C DIR)",
        )
    wanted, at, digest = name.partition("@")
    if at and wanted != target.name and wanted in {one.name for one in factory.targets}:
        raise UsageError(
            "image-target-mismatch",
            f"{name} is an image of {target.name}",
            hint=f"use only its digest, or {target.name}@{digest}",
        )
    definition = define_target(factory, target)
    # Of a .sif the manifest tells the target alone; the packages inside are checked all the same.
    here = lock_digest(definition.lock)
    if told.get(LOCK_LABEL, here if isinstance(made, SifArtifact) else "") != here:
        raise StaleError(
            "image-outdated",
            f"{name} was built from another lock of {target.name} than the present one",
            hint=f"imagefactory build {target.name}, or check out the revision that has its lock",
        )
    return definition


def _labels(access: Access, made: Image | SifArtifact) -> dict[str, str]:
    """What an image says of itself in its config, a .sif in its manifest: the target's name there alone."""
    layout = access.layout
    if isinstance(made, Image):
        config = json.loads(layout.read(Descriptor(media_type="", digest=made.config, size=0)))
        return _texts(config, "config", "Labels")
    found = layout.manifest(made.digest)
    annotations = _texts(json.loads(found[1]), "annotations") if found else {}
    return {TARGET_LABEL: annotations[TARGET]} if TARGET in annotations else {}


def _texts(value: object, *names: str) -> dict[str, str]:
    """The texts of an object of objects, whatever a stranger wrote in its place."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    rows = value.items() if isinstance(value, dict) else ()
    return {key: text for key, text in rows if isinstance(text, str)}
