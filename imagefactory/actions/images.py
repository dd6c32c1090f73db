"""What the tags of a target may point to, each with the verdicts about it, and what they point to now."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime

from imagefactory.access import Access, registry_place, repository_of
from imagefactory.actions.verdicts import ANY, VerdictReader, find_in, local_place, read_verification_policy
from imagefactory.build.sif import SifBuilder
from imagefactory.errors import NoImageError, NothingSelectedError, RegistryError, StoreError
from imagefactory.gpu.capability import architecture
from imagefactory.model import Target
from imagefactory.oci.artifacts import WITHDRAWN
from imagefactory.oci.candidates import CANDIDATE, CAPABILITY, plain_tag, read_pushed, read_records
from imagefactory.oci.graph import Manifest, StoreRepository, parse_parts, platforms_in, read_manifest
from imagefactory.oci.layout import LayoutStore, reference
from imagefactory.oci.manifests import Descriptor, Image, SifArtifact, images_of
from imagefactory.oci.sif import find_sif as find
from imagefactory.oci.sif import is_sif_manifest, load_sif, sif_reference
from imagefactory.oci.transfer import WORKERS, was_transferred
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.runtime.apptainer_command import ApptainerCommand
from imagefactory.settings.load import read_nonce_store_key
from imagefactory.trust.attached import read_subject
from imagefactory.trust.judgement import VerdictSet, VerificationPolicy, find_verdicts
from imagefactory.trust.tags import CapabilityStatus, TagCandidate, capability_status, newest_first
from imagefactory.trust.verdict import ImageProgress, VerificationResult
from imagefactory.versions import natural


def is_capability_verified(judged: Sequence[VerificationResult], capability: str) -> bool:
    """Whether an image with these verdicts is verified for a capability (`8.0`)."""
    return capability_status(judged, capability)[0] is CapabilityStatus.PROVEN


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionRequest:
    """Whose tags follow the verdicts, where, and when. With `dry_run` none moves.

    Without `approve` the key that signs here approves nothing, where the policy requires approvals.
    """

    target: Target
    place: StoreRepository
    now: datetime
    dry_run: bool = False
    approve: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _TagRoot:
    """What a tag may point to. `built` is true where the store's own tag of the target points to it."""

    digest: str
    name: str
    built: bool
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageVerdicts:
    candidate: TagCandidate
    found: VerdictSet


def read_candidates(
    access: Access, promoting: PromotionRequest, court: VerificationPolicy, progress: Progress
) -> tuple[tuple[_ImageVerdicts, ...], dict[str, str]]:
    """All that the target's tags may point to, and what they point to now."""
    place, plain = promoting.place, plain_tag(promoting.target)
    names = [tag for tag in place.store.tags(place.repository) if belongs(tag, plain)]
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="candidates") as pool:
        manifests = pool.map(lambda tag: place.store.manifest(place.repository, tag), names)
        digests = {
            name: manifest[0].digest
            for name, manifest in zip(names, manifests, strict=True)
            if manifest and manifest[0].digest != WITHDRAWN.descriptor.digest
        }
        tags = {name: digest for name, digest in digests.items() if not CANDIDATE.fullmatch(name)}
        named = _untagged(access, promoting.target, court) if isinstance(place.store, LayoutStore) else {}
        for name in sorted(digests, key=lambda name: (name not in tags, name == plain)):  # the best name last
            named[digests[name]] = name
        roots = [
            _TagRoot(
                digest=digest,
                name=name,
                built=tags.get(plain) == digest,
                tags=tuple(tag for tag, there in digests.items() if there == digest),
            )
            for digest, name in named.items()
        ]
        read = list(pool.map(lambda root: _read_candidate(access, promoting, court, root), roots))
    for note in (one for one in read if isinstance(one, str)):
        progress.note(note)
    return tuple(one for one in read if isinstance(one, _ImageVerdicts)), tags


def belongs(tag: str, plain: str) -> bool:
    """Whether a tag is the target's: its own, one of a capability, or a candidate's that is no .sif."""
    if tag == plain:
        return True
    match = CAPABILITY.fullmatch(tag) or CANDIDATE.fullmatch(tag)
    return bool(match and match["plain"] == plain and not tag.endswith(".sif"))


def _read_candidate(
    access: Access, promoting: PromotionRequest, court: VerificationPolicy, root: _TagRoot
) -> _ImageVerdicts | str:
    """The candidate of a root, or what to say of one whose parts are gone or that is no image."""
    place, target = promoting.place, promoting.target
    try:
        subject = read_subject(place, root.digest, target.platform)
    except NoImageError as error:
        return f"{root.name} in {place} is skipped: {error.message}"
    except RegistryError:
        children, _ = parse_parts(read_manifest(place, root.digest))
        if all(place.store.manifest(place.repository, child.digest) for child in children):
            raise
        return f"{root.name} in {place} is skipped: it is not complete"
    index = read_manifest(place, root.digest)
    others = [one for one in platforms_in(index) if one[0] != target.platform]
    parse_parts(index)  # well-formed from here on
    images = images_of(json.loads(index.data).get("manifests") or ())
    if len(images) > 1 + len(others):
        return f"{root.name} in {place} is skipped: it has images for platforms without a target"
    for platform, manifest in others:
        tag = f"{plain_tag(target)}-{architecture(platform)}"
        there = place.store.manifest(place.repository, tag)
        parts = parse_parts(Manifest(descriptor=there[0], data=there[1]))[0] if there else ()
        if manifest not in {part.digest for part in parts}:
            return f"{root.name} in {place} is skipped: its image for {platform} is not the one of {tag}"
    image = find_in(access, place, subject, court)
    # What was verified as another target moves none of this one's tags, whoever calls it a candidate of it.
    judged = tuple(one for one in image.judged if _target_of(one) in ("", promoting.target.name))
    if isinstance(place.store, LayoutStore):
        # The store tells no times: what was built last is the newest, others are as old as their last run.
        times = [one.verdict.report.ended for one in judged if one.verdict]
        pushed = promoting.now if root.built else max(times, default=None)
    else:
        pushed = read_pushed(read_records(place, root.digest, key=read_nonce_store_key(access.environ)))
    candidate = TagCandidate(
        name=root.name,
        digest=root.digest,
        pushed=pushed,
        judged=judged,
        platforms=1 + len(others),
        own=is_own(access, place, root.digest),
    )
    return _ImageVerdicts(candidate=candidate, found=replace(image, tags=root.tags))


def is_own(access: Access, place: StoreRepository, digest: str) -> bool:
    """Whether this store pushed it, or a record with the MAC of IMAGEFACTORY_LEDGER_KEY says so."""
    if isinstance(place.store, LayoutStore):
        return True
    if was_transferred(access.layout.recall("pushed", place.store.name) or {}, place.repository, digest):
        return True
    key = read_nonce_store_key(access.environ)
    return bool(key and read_records(place, digest, key=key))


def _target_of(judged: VerificationResult) -> str:
    return judged.verdict.report.subject.target if judged.verdict else ""


def _untagged(access: Access, target: Target, court: VerificationPolicy) -> dict[str, str]:
    """Images of the target that the store keeps for their verdicts, by digest; what a person calls them."""
    layout, place, names = access.layout, local_place(access, ANY), {}
    for digest in layout.subjects():
        if layout.manifest(digest) is None:
            continue
        try:
            found_here = find_verdicts(place, read_subject(place, digest), court)
        except NoImageError:
            continue
        for one in found_here.judged:
            subject = one.verdict.report.subject if one.verdict else None
            if one.proves and subject and (subject.target, subject.manifest) == (target.name, digest):
                root = digest if layout.manifest(subject.index) is None else subject.index
                names[root] = f"{target.name}@{root[:19]}"
    return names


def target_at(factory: Project, place: StoreRepository, digest: str) -> Target:
    """The target whose candidate or tag is `digest` in that repository. Raises NothingSelectedError."""
    family = place.repository.rpartition("/")[2]
    for target in (one for one in factory.targets if one.family == family):
        for tag in place.store.tags(place.repository):
            if belongs(tag, plain_tag(target)):
                there = place.store.manifest(place.repository, tag)
                if there and there[0].digest == digest:
                    return target
    raise NothingSelectedError(
        "image-not-tagged",
        f"no tag of a target in {place} points to {digest}",
        hint="name the target, and its registry with --registry",
    )


def list_verdicts(access: Access, wanted: PromotionRequest, progress: Progress) -> tuple[VerdictSet, ...]:
    """The verdicts about all images of a target in a place, the newest image first."""
    read, _ = read_candidates(access, wanted, read_verification_policy(access, wanted.now), progress)
    order = newest_first([one.candidate for one in read])
    return tuple(sorted((one.found for one in read), key=lambda one: order.index(one.subject.index)))


# --- What the store has of a target: its image, and the .sif that is made of it or that apptainer built


def stored_image(access: Access, target: Target) -> Image | None:
    """The image the target's tag points to in the store, or None."""
    return access.layout.image(reference(target))


def stored_sif(access: Access, target: Target) -> SifArtifact | None:
    """The .sif that apptainer built from the target's definition, or None."""
    return find(access.layout, sif_reference(target))


def load_artifact(access: Access, name: str, descriptor: Descriptor) -> Image | SifArtifact:
    """The image or .sif of the store behind a manifest."""
    layout = access.layout
    if is_sif_manifest(json.loads(layout.read(descriptor))):
        return load_sif(layout, descriptor.digest)
    return layout.load(name, descriptor)


def ensure_sif(
    access: Access, image: Image, target: str, progress: Progress, *, compression: str
) -> SifArtifact:
    """The kept .sif of an image of the store, made if need be. The caller holds the layout's `in_use`."""
    maker = SifBuilder(access.layout, ApptainerCommand(access.environ), workers=access.settings.worker_count)
    return maker.make(image, target, compression, progress)


# --- How far the images of targets are, by what the store knows: for lists, no registry is asked


def find_marks(access: Access, targets: Iterable[Target], now: datetime) -> dict[str, ImageProgress]:
    """The marks of targets by name. An image that is damaged has none but that it is there."""
    tags, judge = access.layout.tags(), VerdictReader(access, now)
    sent, path = {}, ""
    if access.settings.registry.value:
        host, path = registry_place(access, "")
        sent = access.layout.recall("pushed", host) or {}

    def marks(target: Target) -> ImageProgress:
        name = reference(target)
        if name not in tags:
            return ImageProgress(built=f"{name}.sif" in tags)
        try:
            image = access.layout.load(name, tags[name])
            proven = {
                one.verdict.report.device.row
                for one in judge.stored(image)
                if one.proves and one.verdict and one.verdict.report.device
            }
        except StoreError:
            return ImageProgress(built=True)
        pushed = was_transferred(sent, repository_of(path, target.family), image.digest)
        return ImageProgress(built=True, pushed=pushed, verified=tuple(sorted(proven, key=natural)))

    return {target.name: marks(target) for target in targets}
