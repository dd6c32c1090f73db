"""Copy images between the store, registries and .sif files.

Every push first writes a candidate: a tag named after its content, which never moves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.actions.build import (
    BuildOptions,
    BuildResult,
    build_image,
    check_build,
    find_built,
    locked_files,
)
from imagefactory.actions.definition import define_target, promised_image, render_target
from imagefactory.actions.images import (
    ensure_sif,
    image_removed_error,
    not_built_error,
    require_image,
    stored_image,
    stored_sif,
)
from imagefactory.actions.locked import base_locks
from imagefactory.errors import BuildError, LockError, RegistryError, StaleError, StoreError, UsageError
from imagefactory.fs import require_space
from imagefactory.gpu.capability import PLATFORMS, architecture, this_platform
from imagefactory.lock.debian.lock import format_base_lock
from imagefactory.model import DebianPackage, Target
from imagefactory.oci.archive import check_output
from imagefactory.oci.candidates import (
    CANDIDATE,
    DEB_TYPE,
    ENVELOPE_TYPE,
    FILE_TYPE,
    INPUTS_LABEL,
    SOURCES,
    SOURCES_LINK_TYPE,
    SOURCES_TAG,
    candidate_tag,
    check_tag,
    find_by_inputs,
    plain_tag,
    pushed_record,
    read_pushed,
    read_records,
    sources_tag,
)
from imagefactory.oci.graph import (
    EMPTY,
    EMPTY_BLOB,
    ManifestGraph,
    StoreRepository,
    choose_platform,
    lacks_platform,
    make_artifact,
    parse_parts,
    put_artifact,
    read_config,
    read_graph,
    read_manifest,
)
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    MANIFEST_TYPES,
    TITLE,
    Descriptor,
    Image,
    SifArtifact,
    artifact_type,
    canonical_json,
    format_descriptor,
    hash_key,
)
from imagefactory.oci.sif import COMPRESSION, SIF_TYPE, copy_sif, is_sif_manifest, load_sif
from imagefactory.oci.store import ImageReference, parse_reference, resolve_mirror
from imagefactory.oci.transfer import (
    BlobNotFoundError,
    CancelToken,
    TransferRequest,
    TransferResult,
    digests_sent_as,
    no_origins,
    origins_from,
    remember_transfer,
    roots_seen_with,
    send,
)
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.settings.load import NONCE_STORE_KEY, read_nonce_store_key
from imagefactory.trust.audit import SIGN, AuditEntry, append_audit
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import TrustedKey, TrustRules

if TYPE_CHECKING:
    from imagefactory.trust.approval import SourcesArtifact


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """Options of a push. `registry` is `host[:port][/path]`, empty for the setting. `tags` are further tags.

    With `sif` a .sif with that compression (`fast`, `small`) is pushed, converted if needed. `made` is the
    artifact of a build that just ended, and is pushed in place of the target's tag.
    """

    now: datetime
    registry: str = ""
    tags: tuple[str, ...] = ()
    sif: str = ""
    made: Image | SifArtifact | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformIndexPush:
    """The index of a target's images for several platforms: a candidate with the further tags."""

    platforms: tuple[str, ...]
    reference: ImageReference
    sent: TransferResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """The result of a push. `reference` has the tag of the candidate and the digest from the registry.

    `manifest` is the digest of the platform manifest or of the .sif, `file` the name of the .sif. `joined`
    is the index of this image and the stored images for other platforms.
    """

    target: Target
    manifest: str
    reference: ImageReference
    sent: TransferResult
    file: str = ""
    joined: PlatformIndexPush | None = None


def check_push(access: Access, options: PushOptions) -> None:
    """Raise UsageError if no registry is set, RegistryError if the registry fails, before work starts."""
    host, _ = registry_place(access, options.registry)
    open_registry(access, host).check()


def push_target(project: Project, target: Target, options: PushOptions, progress: Progress) -> PushResult:
    """Push a built artifact as an immutable candidate, then set its further tags.

    A target that only Apptainer has built is pushed as its .sif. A target that is not built is pushed by its
    layer lock, if the registry has the layers. Raises BuildError if the registry lacks layers, UsageError
    for a tag that only promotion moves, RegistryError.
    """
    promised: Image | None = None
    with project.layout.in_use(progress):
        artifact = options.made or stored_image(project, target)
        if artifact is None:
            artifact = stored_sif(project, target)
            if artifact is None and not options.sif:
                artifact = promised = promised_image(project, target, project.layout)
        elif options.sif and isinstance(artifact, Image):
            artifact = ensure_sif(project, artifact, target.name, progress, compression=options.sif)
        if artifact is None:
            raise not_built_error(target)
        platforms: tuple[str, ...] = ()
        index, plain = "", target
        if isinstance(artifact, SifArtifact):
            manifest, file, candidate = artifact.digest, artifact.name, artifact.file.digest
        else:
            manifest, file, candidate = artifact.manifest, "", artifact.digest
            if promised is None:
                platforms, index, plain = _join_platforms(project, artifact, target)
        reference, sent = _push(
            project,
            target,
            artifact.digest,
            candidate_tag(target, candidate, ".sif" if file else ""),
            replace(options, tags=()) if index else options,
            progress,
            promised=promised,
        )
        joined = None
        if index:
            location, sent_index = _push(
                project, plain, index, candidate_tag(plain, index), options, progress
            )
            joined = PlatformIndexPush(platforms=platforms, reference=location, sent=sent_index)
    return PushResult(
        target=target, manifest=manifest, reference=reference, sent=sent, file=file, joined=joined
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcesPush:
    """The locked files of a target in a registry, `size` bytes in all.

    `base` is the image of a pulled base, which is not among them, empty for none. `debs` counts the Debian
    packages, `signer` is the key that signed the statement about them, empty for none.
    """

    reference: ImageReference
    files: int
    debs: int
    size: int
    sent: TransferResult
    base: str
    signer: str


class _FilesLayout(Layout):
    """A store on disk that has other files of this machine as blobs too, by their digests."""

    def __init__(self, path: Path, files: Mapping[str, Path]) -> None:
        super().__init__(path)
        self._files = files

    def blob_path(self, digest: str) -> Path:
        return self._files.get(digest) or super().blob_path(digest)


def push_sources(
    project: Project, pushed: PushResult, key: SigningKey | None, now: datetime, progress: Progress
) -> SourcesPush:
    """Push the locked files of a target next to its image, and a link from the image to them.

    The artifact depends on its files only. It is not a referrer of the image, so that it stays if a registry
    deletes the image. `key` signs a statement about it, unless it signed one before. Raises BuildError and
    DownloadError for locked files that no place has, and RegistryError.
    """
    from imagefactory.trust.approval import SourcesArtifact

    host, repository = pushed.reference.registry, pushed.reference.repository
    target, layout = pushed.target, project.layout
    with locked_files(project, target, progress) as (definition, files), layout.in_use(progress):
        blobs = {
            f"sha256:{row.package.sha256}": Descriptor(
                media_type=DEB_TYPE if isinstance(row.package, DebianPackage) else FILE_TYPE,
                digest=f"sha256:{row.package.sha256}",
                size=row.package.size,
                annotations=((TITLE, row.name),),
            )
            for row in files
        }
        tag = sources_tag(row.package.sha256 for row in files)
        paths = {f"sha256:{row.package.sha256}": row.path for row in files}
        repo = StoreRepository(store=open_registry(project, host), repository=repository)
        artifact = SourcesArtifact(files=tuple(blobs[digest] for digest in sorted(blobs)))
        debs = sum(blob.media_type == DEB_TYPE for blob in artifact.files)
        envelopes = _sources_envelopes(repo, tag, artifact, key if debs else None, now)
        added = tuple(layout.add(data, ENVELOPE_TYPE) for data in envelopes)
        artifact, manifest = replace(artifact, envelopes=added), replace(artifact, envelopes=added).manifest
        layout.add(EMPTY, EMPTY_BLOB.media_type)
        layers = (EMPTY_BLOB, *artifact.files, *artifact.envelopes)
        source = StoreRepository(
            store=LayoutStore(_FilesLayout(layout.path, paths)), repository=target.family
        )
        graph = ManifestGraph(root=manifest, manifests=(manifest,), blobs=layers)
        with progress.stage(f"{target.name}: push its locked files to {host}/{repository}:{tag}"):
            memory = layout.recall("pushed", host) or {}
            prefix = repository.removesuffix(target.family)
            families = [f"{prefix}{name}" for name in sorted({t.family for t in project.targets})]
            sending = TransferRequest(
                graph=graph, repository=repository, tags=(tag,), origins=origins_from(memory, families)
            )
            sent = send(source, open_registry(project, host, sending.brake), sending, progress)
            memory = layout.recall("pushed", host) or {}
            layout.record("pushed", host, remember_transfer(memory, repository, graph))
            image = read_manifest(repo, pushed.manifest).descriptor
            put_artifact(repo, make_artifact(SOURCES_LINK_TYPE, image, {SOURCES_TAG: tag}))
        digest = manifest.descriptor.digest
        if key and debs and sent.sent:
            why = "locked packages"
            entry = AuditEntry(action=SIGN, what=digest, where=str(repo), key=key.keyid, why=why)
            append_audit(layout.path, (entry,), now)
    return SourcesPush(
        reference=ImageReference(registry=host, repository=repository, tag=tag, digest=digest),
        files=len(artifact.files),
        debs=debs,
        size=sum(blob.size for blob in artifact.files),
        sent=sent,
        base=definition.base.image,
        signer=key.name if key and debs else "",
    )


def _sources_envelopes(
    repo: StoreRepository, tag: str, artifact: SourcesArtifact, key: SigningKey | None, now: datetime
) -> list[bytes]:
    """Return the statements about `artifact` that the registry has, and one by `key` if it has none by it."""
    from imagefactory.trust.approval import MOST_SIGNERS, find_sources_signer, read_sources, sign_sources

    envelopes: list[bytes] = []
    if repo.store.manifest(repo.repository, tag):
        known = read_sources(repo, tag)
        envelopes = known.read_envelopes(repo) if known.files == artifact.files else []
    if key is None:
        return envelopes
    own = TrustedKey(
        name=key.name,
        keyid=key.keyid,
        public=key.public,
        since=datetime.min.replace(tzinfo=UTC),
        until=datetime.max.replace(tzinfo=UTC),
        evidence=(),
    )
    if find_sources_signer(envelopes, artifact.subject, TrustRules(keys=(own,)), now)[0]:
        return envelopes
    return [*envelopes[1 - MOST_SIGNERS :], sign_sources(artifact.subject, key, now)]


def on_other_platforms(targets: Iterable[Target], target: Target) -> tuple[Target, ...]:
    """Return the targets that differ only by platform, the one with the plain name first."""
    plain = plain_name(target)
    same = [row for row in targets if plain_name(row) == plain and row.family == target.family]
    return tuple(sorted(same, key=lambda row: (row.name != plain, PLATFORMS.index(row.platform))))


def plain_name(target: Target) -> str:
    """Return the name of a target without its platform."""
    return target.name.removesuffix(f"-{architecture(target.platform)}")


def _join_platforms(project: Project, image: Image, target: Target) -> tuple[tuple[str, ...], str, Target]:
    """Store an index of `image` and the stored images of the same target for other platforms.

    Return the platforms, the digest of the index (empty if there is only one image), and the plain target.
    """
    same = on_other_platforms(project.targets, target)
    images = {row.platform: image if row == target else stored_image(project, row) for row in same}
    layout, entries, platforms = project.layout, [], []
    annotations: list[set[tuple[str, str]]] = []
    for platform, stored in sorted(images.items()):
        if stored is None:
            continue
        manifest = layout.manifest(stored.manifest)
        if manifest is None:
            raise image_removed_error(stored.name)
        system, _, processor = platform.partition("/")
        entry = {"platform": {"architecture": processor, "os": system}}
        platforms.append(platform)
        entries.append({**format_descriptor(manifest[0]), **entry})
        annotations.append(set((json.loads(manifest[1]).get("annotations") or {}).items()))
    if len(entries) < 2:
        return (), "", target
    value = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}
    if common := dict(set.intersection(*annotations)):
        value["annotations"] = common
    return tuple(platforms), layout.add(canonical_json(value), INDEX_TYPE).digest, same[0]


def _push(
    project: Project,
    target: Target,
    digest: str,
    candidate: str,
    options: PushOptions,
    progress: Progress,
    *,
    promised: Image | None = None,
) -> tuple[ImageReference, TransferResult]:
    """Push a manifest with its blobs, and the record of the first push.

    `promised` is the image of the layer lock, if the image is not built.
    """
    host, path = registry_place(project, options.registry)
    for tag in options.tags:
        check_tag(tag, {plain_tag(other) for other in project.targets})
    layout, repository = project.layout, repository_of(path, target.family)
    source = StoreRepository(store=LayoutStore(layout), repository=target.family)
    inputs = inputs_digest(project, target, "" if promised else digest)
    layers, key = promised.layers if promised else (), read_nonce_store_key(project.environ)
    lacks = {row.descriptor.digest: row.title for row in layers if not layout.has(row.descriptor)}
    with progress.stage(f"{target.name}: push to {host}/{repository}:{candidate}"):
        graph = read_graph(source, digest)
        memory = layout.recall("pushed", host) or {}
        known = roots_seen_with(memory, repository, graph)
        families = [repository_of(path, name) for name in sorted({t.family for t in project.targets})]
        sending = TransferRequest(
            graph=graph,
            repository=repository,
            candidate=candidate,
            tags=options.tags,
            attach=(pushed_record(graph.root.descriptor, options.now, inputs, key=key),),
            origins=origins_from(memory, families, lacks),
            known=known is not None or bool(lacks),
            lacks=lacks,
        )
        registry = open_registry(project, host, sending.brake)
        try:
            sent = send(source, registry, sending, progress)
        except BlobNotFoundError as error:
            titles = ", ".join(title for layer, title in lacks.items() if layer in error.digests)
            raise BuildError(
                "image-not-built",
                f"{target.name} is not built, and {host} lacks layers of it: {titles}",
                hint=f"run imagefactory build {target.name}, then push again",
            ) from error
        # Pushes without this key do not count for other stores.
        root = graph.root.descriptor
        mark = {f"{repository}@{root.digest} key": hash_key("mac", inputs, key)} if key else {}
        if known != inputs or not mark.items() <= memory.items():
            repo = StoreRepository(store=registry, repository=repository)
            if not lacks:
                _annotate_inputs(repo, root, options.now, inputs, key)
            # Read again: another push may have changed it.
            memory = layout.recall("pushed", host) or {}
            layout.record("pushed", host, remember_transfer(memory, repository, graph, inputs) | mark)
    reference = ImageReference(registry=host, repository=repository, tag=candidate, digest=sent.digest)
    return reference, sent


def make_image(
    project: Project,
    target: Target,
    options: BuildOptions,
    push: PushOptions | None,
    report: Callable[[BuildResult], None],
    progress: Progress,
) -> PushResult | None:
    """Build and test the image of a lock, call `report`, and with `push` push the image if it passed."""
    check_build(options)
    built = build_image(project, define_target(project, target), options, progress)
    report(built)
    if push is None or not built.passed:
        return None
    return push_target(project, target, replace(push, made=built.image), progress)


def inputs_digest(project: Project, target: Target, digest: str = "") -> str:
    """Return the digest of all inputs of an image: its definition, the lock of its base, engine and codec.

    With `digest` the result is empty if the store does not know that this image was built from them.
    Raises LockError and StaleError as `define_target` does, without `digest`.
    """
    settings = project.settings
    try:
        if digest:
            built = find_built(project, target)
            if built is None or built.digest != digest:
                return ""
        files = render_target(project, target)
    except (LockError, StaleError, StoreError):
        if not digest:
            raise
        return ""
    texts = [text for name in sorted(files) for text in (name, files[name])]
    # A pulled base is in the definition.
    base = [format_base_lock(lock) for lock in base_locks(project, project.base_of(target))]
    return f"sha256:{hash_key('made-from', settings.engine.value, settings.codec.value, *texts, *base)}"


def _annotate_inputs(
    repo: StoreRepository, candidate: Descriptor, now: datetime, inputs: str, key: str
) -> None:
    """Add the inputs to the record of a candidate that was pushed before. Its time stays."""
    if not inputs:
        return
    records = read_records(repo, candidate.digest, key=key)
    if all(row.get(INPUTS_LABEL) != inputs for row in records):
        put_artifact(repo, pushed_record(candidate, read_pushed(records) or now, inputs, key=key))


def explain_no_candidate(project: Project, repo: StoreRepository) -> str:
    """Return why `find_candidate` found none. Without the key, pushes of other stores are ignored."""
    if isinstance(repo.store, LayoutStore):
        return "the image is not built"
    reason = f"no image of the current lock is in {repo}"
    if read_nonce_store_key(project.environ) or not repo.store.tags(repo.repository):
        return reason
    return (
        f"{reason} that this store pushed ({NONCE_STORE_KEY} is not set, so pushes of other stores "
        f"do not count)"
    )


def find_candidate(project: Project, target: Target, repo: StoreRepository) -> Descriptor | None:
    """Return the candidate of the current lock in a registry, None without one.

    Only the local record of pushes counts, and records with the MAC of IMAGEFACTORY_NONCE_KEY. Raises
    LockError and StaleError as `define_target` does.
    """
    inputs = inputs_digest(project, target)
    memory = project.layout.recall("pushed", repo.store.name) or {}
    digests = digests_sent_as(memory, repo.repository, inputs)
    manifests = [repo.store.manifest(repo.repository, digest) for digest in digests]
    if present := [manifest[0] for manifest in manifests if manifest]:
        if len(present) == 1:
            return present[0]
        oldest = datetime.min.replace(tzinfo=UTC)  # several if the engine is not reproducible
        return max(present, key=lambda row: read_pushed(read_records(repo, row.digest)) or oldest)
    return find_by_inputs(repo, plain_tag(target), inputs, read_nonce_store_key(project.environ))


# --- From a registry into the store, or into a .sif file


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """The result of a pull. `name` is the tag in the store.

    If only the manifest of one platform of an index was pulled, `alone` is that manifest. Then `digest` is
    not the digest of the index.
    """

    name: str
    reference: ImageReference
    digest: str
    alone: str
    sent: TransferResult

    @property
    def whole(self) -> bool:
        """Whether the requested index itself was pulled."""
        return not self.alone


def target_reference(project: Project, text: str, registry: str = "") -> tuple[Target, ImageReference]:
    """Return the registry reference of `TARGET[:TAG][@sha256:...]`, by default with the target's tag."""
    rest, separator, digest = text.partition("@")
    name, colon, tag = rest.partition(":")
    target = project.select_single(name)
    host, path = registry_place(project, registry)
    if not colon and not separator:
        tag = plain_tag(target)
    address = f"{host}/{repository_of(path, target.family)}"
    return target, parse_reference(address + (f":{tag}" if colon or tag else "") + separator + digest)


def pull_image(
    access: Access, reference: ImageReference, name: str, progress: Progress, *, platform: str = ""
) -> PullResult:
    """Pull an image into the store under the tag `name` (`repository:tag`), checked by its digests.

    `platform` is by default that of this machine. Raises RegistryError if the registry has no such image.
    """
    platform = platform or this_platform()
    layout, mirror = access.layout, resolve_mirror(reference, access.settings.mirror_map)
    repository, _, tag = name.rpartition(":")
    with layout.in_use(progress), progress.stage(f"pull {mirror}"):
        brake = CancelToken()
        store = open_registry(access, mirror.registry, brake)
        source = StoreRepository(store=store, repository=mirror.repository)
        root = read_manifest(source, mirror.tag_or_digest)
        choice = choose_platform(root, platform)
        graph = read_graph(source, choice.digest)
        unnamed = not choice.whole and lacks_platform(root, choice.digest)
        _check_image(source, graph, mirror, platform if unnamed else "")
        # Before the first byte: fetch nothing that does not fit on the disk.
        missing = sum(blob.size for blob in graph.blobs if not layout.has(blob))
        require_space({layout.path: missing}, str(mirror))
        sending = TransferRequest(graph=graph, repository=repository, tags=(tag,), brake=brake)
        sent = send(source, LayoutStore(layout, every_byte=True), sending, progress)
    alone = "" if choice.whole else platform
    return PullResult(name=name, reference=reference, digest=sent.digest, alone=alone, sent=sent)


def _check_image(
    source: StoreRepository, graph: ManifestGraph, reference: ImageReference, platform: str
) -> None:
    """Raise RegistryError for an artifact, such as a .sif, which must not become the image of a target.

    Also for a malformed config, and for a config of another platform if the index names no platforms.
    """
    manifests = [row for row in graph.manifests if row.descriptor.media_type in MANIFEST_TYPES]
    configs = [read_config(source, manifest) for manifest in manifests]
    if not any(configs):
        raise RegistryError(
            "artifact-not-image",
            f"{reference} is an artifact, not an image",
            hint="if it is a .sif, add --format sif",
        )
    others = [row.architecture for row in configs if row and row.architecture != architecture(platform)]
    if platform and others:
        raise RegistryError(
            "platform-ambiguous",
            f"{reference} does not label its image for {platform}; its first image is for {others[0][:40]!r}",
            hint="pull by the digest of the image's manifest: HOST/NAME@sha256:...",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SifPullResult:
    """A pulled .sif. `how` is its origin in a few words."""

    reference: ImageReference
    path: Path
    sha256: str
    size: int
    how: str


def pull_sif(
    access: Access,
    reference: ImageReference,
    name: str,
    file: str,
    progress: Progress,
    *,
    output: Path | None = None,
    platform: str = "",
) -> SifPullResult:
    """Write the .sif of an image or .sif in a registry to `output`, by default named after `file`.

    `name` is the tag in the store. If the registry has a .sif of the image, the .sif is pulled; otherwise
    the image is pulled and converted. Raises RegistryError and ToolError.
    """
    check_output(output or Path("image.sif"))
    mirror = resolve_mirror(reference, access.settings.mirror_map)
    source = StoreRepository(store=open_registry(access, mirror.registry), repository=mirror.repository)
    platform = platform or this_platform()
    digest = _sif_in_registry(
        source, choose_platform(read_manifest(source, mirror.tag_or_digest), platform).digest
    )
    repository, _, tag = name.rpartition(":")
    if not digest:
        pull_image(access, reference, name, progress, platform=platform)
    with access.layout.in_use(progress):
        if digest:
            with progress.stage(f"pull the .sif of {mirror}"):
                graph = read_graph(source, digest)
                # The .sif of an image is stored with that image; `T.sif` is one that Apptainer built here.
                alone = not json.loads(graph.root.data).get("subject")
                tags = (f"{tag.removesuffix('.sif')}.sif",) if alone else (f"{tag}-{digest[7:19]}.sif",)
                sending = TransferRequest(graph=graph, repository=repository, tags=tags)
                send(source, LayoutStore(access.layout, every_byte=True), sending, progress)
                sif, how = load_sif(access.layout, digest), "the registry's own"
        else:
            sif = ensure_sif(access, require_image(access, name), file, progress, compression="fast")
            how = "made here of the image: the registry has no .sif of it"
        copy_sif(sif, output := output or Path(sif.name), progress)
    return SifPullResult(
        reference=reference, path=output, sha256=sif.file.digest, size=sif.file.size, how=how
    )


def _sif_in_registry(source: StoreRepository, digest: str) -> str:
    """Return the manifest of `digest` itself if a .sif, or of the .sif converted from it; empty for none."""
    manifest = read_manifest(source, digest)
    if is_sif_manifest(json.loads(manifest.data)):
        return digest
    children, _ = parse_parts(manifest)
    for subject in (*(child.digest for child in children), digest):
        sifs = source.store.referrers(source.repository, subject, SIF_TYPE)
        if sifs:
            fast = [row for row in sifs if dict(row.annotations).get(COMPRESSION) == "fast"]
            return min(row.digest for row in fast or sifs)
    return ""


def local_name(access: Access, reference: ImageReference) -> str:
    """Return the tag in the store for a pull by a full reference: `repository:tag`.

    An image from the site's own registry gets the tag of its target. Other tags begin with the host
    (`docker.io/library/debian`), so an untrusted image never replaces the image of a target. A reference by
    digest gets the first 12 hex digits as its tag.
    """
    host = re.sub(r"[^a-z0-9]+", ".", reference.registry.lower()).strip(".")
    repository = f"{host}/{reference.repository}"
    if access.settings.registry.value:
        own_registry, path = registry_place(access)
        if reference.registry == own_registry and (not path or reference.repository.startswith(f"{path}/")):
            repository = reference.repository.removeprefix(f"{path}/")
    return f"{repository}:{reference.tag or reference.digest.removeprefix('sha256:')[:12]}"


# --- From registry to registry, without a copy on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """The result of a copy. `destination` has the digest that its registry confirmed.

    `before` is the digest that its tag pointed to, empty for none. `sources` are the copies of its locked
    files.
    """

    source: ImageReference
    destination: ImageReference
    before: str
    sent: TransferResult
    sources: tuple[CopyResult, ...] = ()


def copy_image(
    access: Access,
    source: ImageReference,
    destination: ImageReference,
    now: datetime,
    progress: Progress,
    *,
    referrers: bool = False,
    dry_run: bool = False,
) -> CopyResult:
    """Copy an image, with `referrers` also its verdicts, other artifacts and locked files.

    Blobs are streamed through this machine. Within one registry they are mounted. With `dry_run` nothing is
    written.
    """
    if not destination.tag or destination.digest:
        raise UsageError(
            "reference-invalid",
            f"the destination '{destination}' must have a tag and no digest",
            hint="use HOST/NAME:TAG: the copy has the same digest",
        )
    mirror = resolve_mirror(source, access.settings.mirror_map)
    with progress.stage(f"copy {mirror} to {destination}"):
        brake = CancelToken()
        registry = open_registry(access, mirror.registry, brake)
        repo = StoreRepository(store=registry, repository=mirror.repository)
        same = mirror.registry == destination.registry
        graph = read_graph(repo, mirror.tag_or_digest, referrers=referrers)
        immutable = CANDIDATE.fullmatch(destination.tag) is not None
        record = pushed_record(graph.root.descriptor, now, key=read_nonce_store_key(access.environ))
        sending = TransferRequest(
            graph=graph,
            repository=destination.repository,
            candidate=destination.tag if immutable else "",
            tags=() if immutable else (destination.tag,),
            # The age of a candidate counts from its arrival in this registry.
            attach=(record,) if immutable else (),
            origins=(lambda _: (mirror.repository,)) if same else no_origins,
            brake=brake,
            dry_run=dry_run,
        )
        store = registry if same else open_registry(access, destination.registry, brake)
        tagged = store.manifest(destination.repository, destination.tag)
        sent = send(repo, store, sending, progress)
    sources = []
    for tag in _linked_sources(graph) if referrers else ():
        if registry.manifest(mirror.repository, tag) is None:
            progress.note(f"{mirror} had locked packages in {tag}, which were deleted")
            continue
        ends = [replace(place, tag=tag, digest="") for place in (source, destination)]
        sources.append(copy_image(access, ends[0], ends[1], now, progress, referrers=True, dry_run=dry_run))
    return CopyResult(
        source=source,
        destination=replace(destination, digest=sent.digest),
        before=tagged[0].digest if tagged else "",
        sent=sent,
        sources=tuple(sources),
    )


def _linked_sources(graph: ManifestGraph) -> tuple[str, ...]:
    """Return the tags of locked files in the links of a graph."""
    values = [json.loads(manifest.data) for manifest in graph.manifests]
    links = [value for value in values if artifact_type(value) == SOURCES_LINK_TYPE]
    tags = (dict(value.get("annotations") or {}).get(SOURCES_TAG) for value in links)
    return tuple(sorted({tag for tag in tags if isinstance(tag, str) and SOURCES.fullmatch(tag)}))


def export_sif(
    access: Access, target: Target, progress: Progress, *, compression: str = "", output: Path | None = None
) -> tuple[SifArtifact, Path]:
    """Write the .sif of a target, converted or built by Apptainer. Return the .sif and its path.

    `compression` is by default `fast`, or that of the built .sif. Raises BuildError if nothing is built,
    UsageError for another compression than that of a built .sif.
    """
    with access.layout.in_use(progress):
        image, sif = stored_image(access, target), None
        if image is not None:
            sif = ensure_sif(access, image, target.name, progress, compression=compression or "fast")
        elif (sif := stored_sif(access, target)) is None:
            raise not_built_error(target)
        if compression not in ("", sif.compression):
            raise UsageError(
                "compression-fixed",
                f"Apptainer built the .sif of {target.name} with compression '{sif.compression}'",
                hint=f"omit --compression, or run imagefactory build {target.name} --engine assemble",
            )
        output = output or Path(sif.name)
        copy_sif(sif, output, progress)
    return sif, output
