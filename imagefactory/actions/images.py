"""Find the image or .sif of a target in the store, and the candidates for its tags."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path

from imagefactory.access import Access, registry_place, repository_of
from imagefactory.actions.verdicts import ANY, VerdictReader, find_in, local_place, read_verification_policy
from imagefactory.build.sif import SifBuilder
from imagefactory.errors import BuildError, NoImageError, NothingSelectedError, RegistryError, StoreError
from imagefactory.fs import user_temporary_directory
from imagefactory.gpu.capability import architecture
from imagefactory.model import Target
from imagefactory.oci.candidates import CANDIDATE, CAPABILITY, plain_tag, read_pushed, read_records
from imagefactory.oci.graph import (
    WITHDRAWN,
    Manifest,
    StoreRepository,
    parse_parts,
    platforms_in,
    read_manifest,
)
from imagefactory.oci.layout import LayoutStore, reference
from imagefactory.oci.manifests import Descriptor, Image, SifArtifact, images_of
from imagefactory.oci.sif import find_sif, is_sif_manifest, load_sif, sif_reference
from imagefactory.oci.store import DIGEST, check_digest
from imagefactory.oci.transfer import WORKERS, was_transferred
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.runtime.apptainer_command import ApptainerCommand
from imagefactory.runtime.protocol import Runner, RunnerSupport
from imagefactory.settings.choices import RUNNERS
from imagefactory.settings.load import read_nonce_store_key
from imagefactory.trust.attached import read_subject
from imagefactory.trust.judgement import VerdictSet, VerificationPolicy, find_verdicts
from imagefactory.trust.tags import TagCandidate, newest_first
from imagefactory.trust.verdict import ImageProgress, Revocation, VerificationResult
from imagefactory.versions import natural

# --- In the store: the image of a target, its .sif, and the runner of either


def stored_image(access: Access, target: Target) -> Image | None:
    """Return the image that the tag of the target points to in the store."""
    return access.layout.image(reference(target))


def stored_sif(access: Access, target: Target) -> SifArtifact | None:
    """Return the .sif that Apptainer built from the definition of the target."""
    return find_sif(access.layout, sif_reference(target))


def load_artifact(access: Access, name: str, descriptor: Descriptor) -> Image | SifArtifact:
    """Return the stored image or .sif with this manifest."""
    layout = access.layout
    if is_sif_manifest(json.loads(layout.read(descriptor))):
        return load_sif(layout, descriptor.digest)
    return layout.load(name, descriptor)


def find_stored(access: Access, name: str) -> Image | SifArtifact | None:
    """Return the stored image or .sif of a tag or digest, None for a name without a tag.

    `name` may also be `NAME@sha256:...`. Raises NothingSelectedError for a tag or digest that the store
    lacks.
    """
    layout = access.layout
    _, separator, digest = name.rpartition("@")
    if separator or DIGEST.fullmatch(name):
        message, near = digest or name, []
        manifest = layout.manifest(check_digest(message))
        if manifest is not None:
            return load_artifact(access, name, manifest[0])
    else:
        tags = layout.tags()
        if name in tags:
            return load_artifact(access, name, tags[name])
        if ":" not in name and "/" not in name:
            return None
        message, near = f"'{name}'", [] if "/" in name else difflib.get_close_matches(name, tags, n=1)
    hint = f"run imagefactory pull {name}" if "/" in name else "see imagefactory image list"
    raise NothingSelectedError(
        "image-not-found",
        f"no image {message} in {layout.path}",
        hint=f"did you mean {near[0]}?" if near else hint,
    )


def require_image(access: Access, name: str) -> Image:
    """Return the image of a tag that was just written. Raises BuildError if another process removed it."""
    image = access.layout.image(name)
    if image is None:
        raise image_removed_error(name)
    return image


def image_removed_error(name: str) -> BuildError:
    return BuildError(
        "image-removed", f"another process removed {name} from the store", hint="run the command again"
    )


def not_built_error(target: Target, more: str = "") -> BuildError:
    return BuildError(
        "image-not-built",
        f"{target.name} is not built",
        hint=f"run imagefactory build {target.name}{more}",
    )


def ensure_sif(
    access: Access, image: Image, target: str, progress: Progress, *, compression: str
) -> SifArtifact:
    """Return the .sif of a stored image, converted if needed. The caller holds the layout's `in_use` lock."""
    maker = SifBuilder(access.layout, ApptainerCommand(access.environ), workers=access.settings.worker_count)
    return maker.make(image, target, compression, progress)


def scratch_directory(access: Access, runner: str) -> Path:
    """Return the directory for files that a run writes. `unshare` uses the store's disk, which has limits.

    Docker and Apptainer get a temporary directory: they may work as root, which a store on NFS rejects.
    """
    return access.layout.scratch if runner == "unshare" else user_temporary_directory()


def make_runner(access: Access, name: str, target: str, progress: Progress) -> Runner:
    """Return the runner with this name in RUNNERS. A .sif that it creates is named after `target`."""
    support = RunnerSupport(
        layout=access.layout,
        environ=access.environ,
        progress=progress,
        workers=access.settings.worker_count,
        ensure_sif=lambda image: ensure_sif(access, image, target, progress, compression="fast"),
    )
    runner: Runner = import_module(RUNNERS[name].module).make_runner(support)
    return runner


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


# --- The images that the tags of a target may point to, with the verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionRequest:
    """A request to move the tags of `target` in `place` to verified images. With `dry_run` no tag moves.

    Without `approve` the local key adds no approval, if the policy requires approvals. `revocations` count
    besides those that are attached.
    """

    target: Target
    place: StoreRepository
    now: datetime
    dry_run: bool = False
    approve: bool = True
    revocations: tuple[Revocation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageVerdicts:
    candidate: TagCandidate
    verdicts: VerdictSet


def read_candidates(
    access: Access, promoting: PromotionRequest, court: VerificationPolicy, progress: Progress
) -> tuple[tuple[_ImageVerdicts, ...], dict[str, str]]:
    """Return all images that the tags of the target may point to, and the digest of each tag now."""
    repo, plain = promoting.place, plain_tag(promoting.target)
    names = [tag for tag in repo.store.tags(repo.repository) if belongs(tag, plain)]
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="candidates") as pool:
        manifests = pool.map(lambda tag: repo.store.manifest(repo.repository, tag), names)
        digests = {
            name: manifest[0].digest
            for name, manifest in zip(names, manifests, strict=True)
            if manifest and manifest[0].digest != WITHDRAWN.descriptor.digest
        }
        tags = {name: digest for name, digest in digests.items() if not CANDIDATE.fullmatch(name)}
        roots = _untagged(access, promoting.target, court) if isinstance(repo.store, LayoutStore) else {}
        for name in sorted(digests, key=lambda name: (name not in tags, name == plain)):  # the best name last
            roots[digests[name]] = name
        rows = list(
            pool.map(
                lambda root: _read_candidate(
                    access, promoting, court, *root, built=tags.get(plain) == root[0]
                ),
                roots.items(),
            )
        )
    images = []
    for row in rows:
        if isinstance(row, str):
            progress.note(row)
        else:
            tags_of = tuple(tag for tag, digest in digests.items() if digest == row.candidate.digest)
            images.append(replace(row, verdicts=replace(row.verdicts, tags=tags_of)))
    return tuple(images), tags


def belongs(tag: str, plain: str) -> bool:
    """Return whether a tag belongs to the target: plain, of a capability or of a candidate; not of a .sif."""
    if tag == plain:
        return True
    match = CAPABILITY.fullmatch(tag) or CANDIDATE.fullmatch(tag)
    return bool(match and match["plain"] == plain and not tag.endswith(".sif"))


def _read_candidate(
    access: Access,
    promoting: PromotionRequest,
    court: VerificationPolicy,
    digest: str,
    name: str,
    *,
    built: bool,
) -> _ImageVerdicts | str:
    """Return a candidate with its verdicts, or the reason to skip it.

    `built` is true if the tag of the target in the local store points to the candidate.
    """
    repo, target = promoting.place, promoting.target
    try:
        subject = read_subject(repo, digest, target.platform)
    except NoImageError as error:
        return f"{name} in {repo} is skipped: {error.message}"
    except RegistryError:
        children, _ = parse_parts(read_manifest(repo, digest))
        if all(repo.store.manifest(repo.repository, child.digest) for child in children):
            raise
        return f"{name} in {repo} is skipped: it is not complete"
    index = read_manifest(repo, digest)
    others = [row for row in platforms_in(index) if row[0] != target.platform]
    parse_parts(index)  # raises if it is malformed
    if len(images_of(json.loads(index.data).get("manifests") or ())) > 1 + len(others):
        return f"{name} in {repo} is skipped: it has images for platforms without a target"
    for platform, manifest in others:
        tag = f"{plain_tag(target)}-{architecture(platform)}"
        tagged = repo.store.manifest(repo.repository, tag)
        parts = parse_parts(Manifest(descriptor=tagged[0], data=tagged[1]))[0] if tagged else ()
        if manifest not in {part.digest for part in parts}:
            return f"{name} in {repo} is skipped: its image for {platform} is not the one of {tag}"
    verdicts = find_in(access, repo, subject, court)
    # A verdict for another target moves no tag of this one, whoever tags the image as a candidate of it.
    judged = tuple(row for row in verdicts.judged if _target_of(row) in ("", target.name))
    if isinstance(repo.store, LayoutStore):
        # The store has no times: what was built last is the newest, others are as old as their last run.
        times = [row.verdict.report.ended for row in judged if row.verdict]
        pushed = promoting.now if built else max(times, default=None)
    else:
        pushed = read_pushed(read_records(repo, digest, key=read_nonce_store_key(access.environ)))
    candidate = TagCandidate(
        name=name,
        digest=digest,
        pushed=pushed,
        judged=judged,
        platforms=1 + len(others),
        own=is_own(access, repo, digest),
    )
    return _ImageVerdicts(candidate=candidate, verdicts=verdicts)


def is_own(access: Access, repo: StoreRepository, digest: str) -> bool:
    """Return whether this store pushed the image, or IMAGEFACTORY_NONCE_KEY has signed its push record."""
    if isinstance(repo.store, LayoutStore):
        return True
    if was_transferred(access.layout.recall("pushed", repo.store.name) or {}, repo.repository, digest):
        return True
    key = read_nonce_store_key(access.environ)
    return bool(key and read_records(repo, digest, key=key))


def _target_of(judged: VerificationResult) -> str:
    return judged.verdict.report.subject.target if judged.verdict else ""


def _untagged(access: Access, target: Target, court: VerificationPolicy) -> dict[str, str]:
    """Return names, by digest, for untagged images of the target that the store keeps because of verdicts."""
    layout, repo, names = access.layout, local_place(access, ANY), {}
    for digest in layout.subjects():
        if layout.manifest(digest) is None:
            continue
        try:
            judged = find_verdicts(repo, read_subject(repo, digest), court).judged
        except NoImageError:
            continue
        for row in judged:
            subject = row.verdict.report.subject if row.verdict else None
            if row.proves and subject and (subject.target, subject.manifest) == (target.name, digest):
                root = digest if layout.manifest(subject.index) is None else subject.index
                names[root] = f"{target.name}@{root[:19]}"
    return names


def target_at(project: Project, repo: StoreRepository, digest: str) -> Target:
    """Return the target with a tag on `digest` in the repository. Raises NothingSelectedError without one."""
    family = repo.repository.rpartition("/")[2]
    for target in (target for target in project.targets if target.family == family):
        for tag in repo.store.tags(repo.repository):
            if belongs(tag, plain_tag(target)):
                manifest = repo.store.manifest(repo.repository, tag)
                if manifest and manifest[0].digest == digest:
                    return target
    raise NothingSelectedError(
        "image-not-tagged",
        f"no tag of a target in {repo} points to {digest}",
        hint="pass the target instead, and --registry HOST/PATH",
    )


def list_verdicts(access: Access, request: PromotionRequest, progress: Progress) -> tuple[VerdictSet, ...]:
    """Return the verdicts on all images of a target in a place, the newest image first."""
    images, _ = read_candidates(access, request, read_verification_policy(access, request.now), progress)
    order = newest_first([image.candidate for image in images])
    return tuple(sorted((image.verdicts for image in images), key=lambda row: order.index(row.subject.index)))
