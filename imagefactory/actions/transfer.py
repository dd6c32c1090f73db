"""From the store to a registry.

Every push writes a candidate first, a tag named after its content that never moves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.actions.build import find_built
from imagefactory.actions.definition import promised_image, render_target
from imagefactory.actions.images import ensure_sif, stored_image, stored_sif
from imagefactory.actions.locked import base_locks
from imagefactory.errors import BuildError, LockError, RegistryError, StaleError, StoreError, UsageError
from imagefactory.fs import require_space
from imagefactory.gpu.capability import PLATFORMS, architecture, this_platform
from imagefactory.lock.debian.lock import format_base_lock
from imagefactory.model import Target
from imagefactory.oci.archive import check_output
from imagefactory.oci.artifacts import put_artifact
from imagefactory.oci.candidates import (
    CANDIDATE,
    INPUTS_LABEL,
    candidate_tag,
    check_tag,
    find_by_inputs,
    plain_tag,
    pushed_record,
    read_pushed,
    read_records,
)
from imagefactory.oci.graph import (
    ManifestGraph,
    StoreRepository,
    choose_platform,
    lacks_platform,
    parse_parts,
    read_config,
    read_graph,
    read_manifest,
)
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    MANIFEST_TYPES,
    Descriptor,
    Image,
    SifArtifact,
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
from imagefactory.recipes.expand import select_single
from imagefactory.settings.load import NONCE_STORE_KEY, read_nonce_store_key

# --- One index of the images of a target for several platforms, so that a tag gives each machine its own


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedIndex:
    """An index of the store, of images for `platforms`; `target` is the one that names no platform."""

    target: Target
    digest: str
    platforms: tuple[str, ...]


def on_other_platforms(targets: Iterable[Target], target: Target) -> tuple[Target, ...]:
    """The targets that differ from this one by their platform alone, and itself: the plain name first."""
    plain = plain_name(target)
    same = [one for one in targets if plain_name(one) == plain and one.family == target.family]
    return tuple(sorted(same, key=lambda one: (one.name != plain, PLATFORMS.index(one.platform))))


def plain_name(target: Target) -> str:
    """Its name without a platform."""
    return target.name.removesuffix(f"-{architecture(target.platform)}")


def join_platforms(
    access: Access, targets: Iterable[Target], image: Image, target: Target
) -> JoinedIndex | None:
    """The index of `image` and what the store has of the same target for others; None for nothing else."""
    same = on_other_platforms(targets, target)
    images = {one: image if one == target else stored_image(access, one) for one in same}
    found = [(one.platform, there) for one, there in images.items() if there]
    if len(found) < 2:
        return None
    layout, entries, said = access.layout, [], list[set[tuple[str, str]]]()
    for platform, there in sorted(found):
        descriptor, data = layout.manifest(there.manifest) or _missing_platform_error(there)
        system, _, processor = platform.partition("/")
        entry = {"platform": {"architecture": processor, "os": system}}
        entries.append({**format_descriptor(descriptor), **entry})
        said.append(set((json.loads(data).get("annotations") or {}).items()))
    value = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}
    if agreed := dict(set.intersection(*said)):
        value["annotations"] = agreed
    index = layout.add(canonical_json(value), INDEX_TYPE)
    return JoinedIndex(
        target=same[0], digest=index.digest, platforms=tuple(sorted(name for name, _ in found))
    )


def _missing_platform_error(image: Image) -> NoReturn:
    raise BuildError(
        "image-removed", f"another process removed {image.name} from the store", hint="run the command again"
    )


NO_TIME = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """`registry` is `host[:port][/path]`, empty for the setting. `tags` are set after the candidate's own.

    `now` is the time the record of a first push carries. With `sif` the target's .sif is pushed, made of
    its image in that compression (`fast`, `small`) if it is not there yet. `made` is what is pushed where a
    build just made it, whatever the target's tag points to.
    """

    now: datetime
    registry: str = ""
    tags: tuple[str, ...] = ()
    sif: str = ""
    made: Image | SifArtifact | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformIndexPush:
    """The index of a target's images for several platforms, a candidate that has the further tags."""

    platforms: tuple[str, ...]
    reference: ImageReference
    sent: TransferResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """One push. `reference` has the candidate's tag and the digest that the registry confirmed.

    `manifest` is the platform manifest's digest, or a .sif's own; `file` is the .sif's name. `joined` is the
    index of this one and of what the store has for other platforms, None where that is nothing.
    """

    target: Target
    manifest: str
    reference: ImageReference
    sent: TransferResult
    file: str = ""
    joined: PlatformIndexPush | None = None


def check_push(access: Access, options: PushOptions) -> None:
    """Before the work, not after it: raises UsageError for no registry, RegistryError for one that fails.

    A push of what is made asks the registry first, and needs no such question.
    """
    host, _ = registry_place(access, options.registry)
    open_registry(access, host).check()


def push_target(factory: Project, target: Target, options: PushOptions, progress: Progress) -> PushResult:
    """What was built, as an immutable candidate in the registry, then its further tags.

    A target that apptainer alone has built is its .sif. One that is not built is what its layer lock says, of
    layers that the registry has. Raises BuildError when nothing is built and the registry lacks layers,
    UsageError for a tag that only promotion moves, RegistryError when the registry fails.
    """
    with factory.layout.in_use(progress):
        made = options.made or stored_image(factory, target)
        image = made if isinstance(made, Image) else None
        sif = (
            made if isinstance(made, SifArtifact) else _sif_to_push(factory, target, image, options, progress)
        )
        unmade: Image | None = None
        if image is None and sif is None and not options.sif:
            image = unmade = promised_image(factory, target, factory.layout)
        if sif is not None:
            candidate = candidate_tag(target, sif.file.digest, ".sif")
            root = PushRoot(target=target, digest=sif.digest, candidate=candidate)
        elif image is not None:
            candidate = candidate_tag(target, image.digest)
            root = PushRoot(target=target, digest=image.digest, candidate=candidate, unmade=unmade)
        else:
            raise BuildError(
                "image-not-built", f"{target.name} is not built", hint=f"run imagefactory build {target.name}"
            )
        joined = join_platforms(factory, factory.targets, image, target) if image and not unmade else None
        plain = replace(options, tags=()) if joined else options
        reference, sent = _push(factory, root, plain, progress)
        both = _push_joined(factory, joined, options, progress) if joined else None
    manifest = sif.digest if sif is not None else image.manifest if image is not None else ""
    file = sif.name if sif is not None else ""
    return PushResult(
        target=target, manifest=manifest, reference=reference, sent=sent, file=file, joined=both
    )


def _push_joined(
    factory: Project, joined: JoinedIndex, options: PushOptions, progress: Progress
) -> PlatformIndexPush:
    """The index of several platforms as a candidate of the target without a platform in its name."""
    candidate = candidate_tag(joined.target, joined.digest)
    root = PushRoot(target=joined.target, digest=joined.digest, candidate=candidate)
    reference, sent = _push(factory, root, options, progress)
    return PlatformIndexPush(platforms=joined.platforms, reference=reference, sent=sent)


def _sif_to_push(
    access: Access, target: Target, image: Image | None, options: PushOptions, progress: Progress
) -> SifArtifact | None:
    if image is None:
        return stored_sif(access, target)
    if not options.sif:
        return None
    return ensure_sif(access, image, target.name, progress, compression=options.sif)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRoot:
    """What is pushed for a target: a manifest or index of the store, and the candidate's tag for it.

    `unmade` is an image whose layers only its layer lock knows.
    """

    target: Target
    digest: str
    candidate: str
    unmade: Image | None = None


def _push(
    factory: Project, root: PushRoot, options: PushOptions, progress: Progress
) -> tuple[ImageReference, TransferResult]:
    """The whole graph of `root`, with the record of when it was first pushed."""
    host, path = registry_place(factory, options.registry)
    for tag in options.tags:
        check_tag(tag, {plain_tag(other) for other in factory.targets})
    layout, family = factory.layout, root.target.family
    repository, source = (
        repository_of(path, family),
        StoreRepository(store=LayoutStore(layout), repository=family),
    )
    made = inputs_digest(factory, root.target, "" if root.unmade else root.digest)
    layers, key = root.unmade.layers if root.unmade else (), read_nonce_store_key(factory.environ)
    lacks = {one.descriptor.digest: one.title for one in layers if not layout.has(one.descriptor)}
    with progress.stage(f"{root.target.name}: push to {host}/{repository}:{root.candidate}"):
        graph = read_graph(source, root.digest)
        memory = layout.recall("pushed", host) or {}
        known = roots_seen_with(memory, repository, graph)
        families = [repository_of(path, name) for name in sorted({t.family for t in factory.targets})]
        sending = TransferRequest(
            graph=graph,
            repository=repository,
            candidate=root.candidate,
            tags=options.tags,
            attach=(pushed_record(graph.root.descriptor, options.now, made, key=key),),
            origins=origins_from(memory, families, lacks),
            known=known is not None or bool(lacks),
            lacks=lacks,
        )
        registry = open_registry(factory, host, sending.brake)
        try:
            sent = send(source, registry, sending, progress)
        except BlobNotFoundError as error:
            titles = ", ".join(title for digest, title in lacks.items() if digest in error.digests)
            raise BuildError(
                "image-not-built",
                f"{root.target.name} is not built, and {host} lacks layers of it: {titles}",
                hint=f"run imagefactory build {root.target.name}, then push again",
            ) from error
        # What was pushed without this key does not count for other stores.
        mark = {f"{repository}@{graph.root.descriptor.digest} key": hash_key("mac", made, key)} if key else {}
        if known != made or not mark.items() <= memory.items():
            place = StoreRepository(store=registry, repository=repository)
            if not lacks:
                _annotate_inputs(place, graph.root.descriptor, (options.now, made, key))
            # Read again: another push may have learned something meanwhile.
            memory = layout.recall("pushed", host) or {}
            layout.record("pushed", host, remember_transfer(memory, repository, graph, made) | mark)
    where = ImageReference(registry=host, repository=repository, tag=root.candidate, digest=sent.digest)
    return where, sent


def inputs_digest(factory: Project, target: Target, digest: str = "") -> str:
    """The digest of all that decides a target's image: its definition, its base's lock, engine and codec.

    With `digest` it is that image's, and empty where the store does not know it for what those give. Raises
    LockError and StaleError without it, as `define_target` does.
    """
    settings = factory.settings
    try:
        if digest:
            built = find_built(factory, target)
            if built is None or built.digest != digest:
                return ""
        files = render_target(factory, target)
    except (LockError, StaleError, StoreError):
        if not digest:
            raise
        return ""
    texts = [text for name in sorted(files) for text in (name, files[name])]
    # A pulled base is in the definition.
    base = [format_base_lock(lock) for lock in base_locks(factory, factory.base_of(target))]
    return f"sha256:{hash_key('made-from', settings.engine.value, settings.codec.value, *texts, *base)}"


def _annotate_inputs(
    place: StoreRepository, candidate: Descriptor, record: tuple[datetime, str, str]
) -> None:
    """Lets a candidate that was there already say what it is made of, without making it any younger."""
    now, made, key = record
    if not made:
        return
    records = read_records(place, candidate.digest, key=key)
    if all(row.get(INPUTS_LABEL) != made for row in records):
        put_artifact(place, pushed_record(candidate, read_pushed(records) or now, made, key=key))


def explain_no_candidate(factory: Project, place: StoreRepository) -> str:
    """Return why `find_candidate` found none; without the key, pushes of other stores do not count."""
    said = f"{place} has no image of what the lock gives"
    if read_nonce_store_key(factory.environ):
        return said
    return (
        f"{said} that this store pushed ({NONCE_STORE_KEY} is not set, so pushes of other stores "
        f"do not count)"
    )


def find_candidate(factory: Project, target: Target, place: StoreRepository) -> Descriptor | None:
    """The candidate in a registry of what the present lock gives, None where nobody trusted says so.

    Trusted are this store's memory of its pushes, and records with the MAC of IMAGEFACTORY_LEDGER_KEY.
    Raises LockError and StaleError as `define_target` does.
    """
    made = inputs_digest(factory, target)
    memory = factory.layout.recall("pushed", place.store.name) or {}
    sent = (
        place.store.manifest(place.repository, one) for one in digests_sent_as(memory, place.repository, made)
    )
    there = [one[0] for one in sent if one is not None]
    if len(there) == 1:
        return there[0]
    if there:  # an engine that does not give the same bytes twice
        return max(there, key=lambda one: read_pushed(read_records(place, one.digest)) or NO_TIME)
    return find_by_inputs(place, plain_tag(target), made, read_nonce_store_key(factory.environ))


# --- From a registry into the store, or into a .sif file


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """One pull: `name` is its tag in the store. Of an index with several platforms
    one manifest was kept, that for `alone`, so that `digest` is not the index's; else it is empty.
    """

    name: str
    reference: ImageReference
    digest: str
    alone: str
    sent: TransferResult

    @property
    def whole(self) -> bool:
        """Whether it is the very index that was asked for."""
        return not self.alone


def target_reference(factory: Project, text: str, registry: str = "") -> tuple[Target, ImageReference]:
    """`TARGET[:TAG][@sha256:...]` as a reference to the registry; without either, the target's own tag."""
    rest, at, digest = text.partition("@")
    name, colon, tag = rest.partition(":")
    target = select_single(factory.targets, name)
    host, path = registry_place(factory, registry)
    if not colon and not at:
        tag = plain_tag(target)
    place = f"{host}/{repository_of(path, target.family)}"
    return target, parse_reference(place + (f":{tag}" if colon or tag else "") + at + digest)


def pull_image(
    access: Access, reference: ImageReference, name: str, progress: Progress, *, platform: str = ""
) -> PullResult:
    """Brings an image into the store under the tag `name` (`repository:tag`), checked by its digests.

    `platform` is this machine's where it is empty. Raises RegistryError when the registry has no such image,
    or none for it.
    """
    platform = platform or this_platform()
    layout, asked = access.layout, resolve_mirror(reference, access.settings.mirror_map)
    repository, _, tag = name.rpartition(":")
    with layout.in_use(progress), progress.stage(f"pull {asked}"):
        brake = CancelToken()
        source = StoreRepository(
            store=open_registry(access, asked.registry, brake), repository=asked.repository
        )
        root = read_manifest(source, asked.tag_or_digest)
        choice = choose_platform(root, platform)
        graph = read_graph(source, choice.digest)
        unnamed = not choice.whole and lacks_platform(root, choice.digest)
        _require_image(source, graph, asked, platform if unnamed else "")
        _require_space(layout, graph, asked)
        sending = TransferRequest(graph=graph, repository=repository, tags=(tag,), brake=brake)
        sent = send(source, LayoutStore(layout, every_byte=True), sending, progress)
    whole = "" if choice.whole else platform
    return PullResult(name=name, reference=reference, digest=sent.digest, alone=whole, sent=sent)


def _require_image(
    source: StoreRepository, graph: ManifestGraph, asked: ImageReference, platform: str
) -> None:
    """Raises RegistryError for a .sif or another artifact, which must not become a target's image.

    Also for an image whose config is malformed: it must not get a name here. And for one of an index that
    does not say what it is for, where its config says that it is not for `platform`.
    """
    manifests = [one for one in graph.manifests if one.descriptor.media_type in MANIFEST_TYPES]
    configs = [read_config(source, one) for one in manifests]
    if not any(configs):
        raise RegistryError(
            "artifact-not-image",
            f"{asked} is an artifact, not an image",
            hint="if it is a .sif, add --format sif",
        )
    others = [one.architecture for one in configs if one and one.architecture != architecture(platform)]
    if platform and others:
        first = others[0][:40]
        raise RegistryError(
            "platform-ambiguous",
            f"{asked} does not say which image is for {platform}, and the first is for {first!r}",
            hint="pull by the digest of the image's manifest: HOST/NAME@sha256:...",
        )


def _require_space(layout: Layout, graph: ManifestGraph, asked: ImageReference) -> None:
    """Raises StoreError before the first byte comes of what the disk cannot hold."""
    missing = sum(blob.size for blob in graph.blobs if not layout.has(blob))
    require_space({layout.path: missing}, str(asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class SifPullResult:
    """A .sif that was pulled. `how` says in a few words where it came from."""

    reference: ImageReference
    path: Path
    sha256: str
    size: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SifPullRequest:
    """`name` is the store's tag for what comes, `target` names the file; without `output` it names itself."""

    name: str
    target: str
    output: Path | None = None
    platform: str = ""


def pull_sif(
    access: Access, reference: ImageReference, options: SifPullRequest, progress: Progress
) -> SifPullResult:
    """A .sif file of an image or .sif in a registry.

    Where the registry holds a .sif, itself or made from that image, it is taken as it is; else the image
    is pulled into the store and made into one here. Raises RegistryError and ToolError.
    """
    check_output(options.output or Path("image.sif"))
    asked = resolve_mirror(reference, access.settings.mirror_map)
    source = StoreRepository(store=open_registry(access, asked.registry), repository=asked.repository)
    platform = options.platform or this_platform()
    digest = _sif_in_registry(
        source, choose_platform(read_manifest(source, asked.tag_or_digest), platform).digest
    )
    repository, _, tag = options.name.rpartition(":")
    if digest:
        with access.layout.in_use(progress), progress.stage(f"pull the .sif of {asked}"):
            graph = read_graph(source, digest)
            # One of an image is kept by that image; `T.sif` is what apptainer built here of a definition.
            alone = not json.loads(graph.root.data).get("subject")
            tags = (f"{tag.removesuffix('.sif')}.sif",) if alone else (f"{tag}-{digest[7:19]}.sif",)
            sending = TransferRequest(graph=graph, repository=repository, tags=tags)
            send(source, LayoutStore(access.layout, every_byte=True), sending, progress)
            sif, how = load_sif(access.layout, digest), "the registry's own"
            copy_sif(sif, output := options.output or Path(sif.name), progress)
    else:
        pull_image(access, reference, options.name, progress, platform=platform)
        with access.layout.in_use(progress):
            image = access.layout.image(options.name)
            if image is None:
                raise BuildError(
                    "image-removed",
                    f"another process removed {options.name} from the store",
                    hint="run the command again",
                )
            sif = ensure_sif(access, image, options.target, progress, compression="fast")
            how = "made here of the image: the registry has no .sif of it"
            copy_sif(sif, output := options.output or Path(sif.name), progress)
    return SifPullResult(
        reference=reference, path=output, sha256=sif.file.digest, size=sif.file.size, how=how
    )


def _sif_in_registry(source: StoreRepository, digest: str) -> str:
    """The manifest of the .sif that `digest` is or that was made from it, empty for none."""
    manifest = read_manifest(source, digest)
    if is_sif_manifest(json.loads(manifest.data)):
        return digest
    children, _ = parse_parts(manifest)
    for subject in (*(child.digest for child in children), digest):
        found = source.store.referrers(source.repository, subject, SIF_TYPE)
        if found:
            fast = [one for one in found if dict(one.annotations).get(COMPRESSION) == "fast"]
            return min(one.digest for one in fast or found)
    return ""


def local_name(access: Access, reference: ImageReference) -> str:
    """The store's tag for what is pulled by a full reference: `repository:tag`.

    From the site's own registry that is the target's own tag, as for what is built here. What comes from
    elsewhere carries where it is from (`docker.io/library/debian`): a stranger's image never takes the
    place of a target's. What was asked for by digest alone carries the first 12 hex digits of it.
    """
    host = re.sub(r"[^a-z0-9]+", ".", reference.registry.lower()).strip(".")
    repository = f"{host}/{reference.repository}"
    if access.settings.registry.value:
        own, path = registry_place(access)
        if reference.registry == own and (not path or reference.repository.startswith(f"{path}/")):
            repository = reference.repository.removeprefix(f"{path}/")
    return f"{repository}:{reference.tag or reference.digest.removeprefix('sha256:')[:12]}"


# --- From registry to registry; nothing lies on this machine in between


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRequest:
    """What to copy where, and when. With `referrers`, verdicts and other artifacts of the image come too."""

    now: datetime
    source: ImageReference
    destination: ImageReference
    referrers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """One copy; `destination` has the digest that its registry confirmed."""

    source: ImageReference
    destination: ImageReference
    sent: TransferResult


def copy_image(access: Access, copying: CopyRequest, progress: Progress) -> CopyResult:
    """From registry to registry; blobs stream through, within one registry they are mounted."""
    source, destination = copying.source, copying.destination
    if not destination.tag or destination.digest:
        raise UsageError(
            "reference-invalid",
            f"the destination '{destination}' must have a tag, and no digest",
            hint="use HOST/NAME:TAG; the digest is copied with the image",
        )
    asked = resolve_mirror(source, access.settings.mirror_map)
    with progress.stage(f"copy {asked} to {destination}"):
        brake = CancelToken()
        registry = open_registry(access, asked.registry, brake)
        place = StoreRepository(store=registry, repository=asked.repository)
        same = asked.registry == destination.registry
        graph = read_graph(place, asked.tag_or_digest, referrers=copying.referrers)
        immutable = CANDIDATE.fullmatch(destination.tag) is not None
        record = pushed_record(graph.root.descriptor, copying.now, key=read_nonce_store_key(access.environ))
        sending = TransferRequest(
            graph=graph,
            repository=destination.repository,
            candidate=destination.tag if immutable else "",
            tags=() if immutable else (destination.tag,),
            # A candidate's age counts from when it came to this registry.
            attach=(record,) if immutable else (),
            origins=(lambda _: (asked.repository,)) if same else no_origins,
            brake=brake,
        )
        target = registry if same else open_registry(access, destination.registry, brake)
        sent = send(place, target, sending, progress)
    return CopyResult(source=source, destination=replace(destination, digest=sent.digest), sent=sent)


# --- From the store to one file that other programs read


@dataclass(frozen=True, slots=True, kw_only=True)
class SifExport:
    """`compression` is empty for that of the .sif at hand, else `fast`; `output` is None for its own name."""

    compression: str = ""
    output: Path | None = None


def export_sif(
    access: Access, target: Target, options: SifExport, progress: Progress
) -> tuple[SifArtifact, Path]:
    """Writes the target's .sif, of its image or as apptainer built it, beside and renamed; gives where.

    Raises BuildError when there is neither, UsageError for a compression that a built one has not.
    """
    with access.layout.in_use(progress):
        image = stored_image(access, target)
        sif = stored_sif(access, target) if image is None else None
        if image is not None:
            compression = options.compression or "fast"
            sif = ensure_sif(access, image, target.name, progress, compression=compression)
        if sif is None:
            raise BuildError(
                "image-not-built", f"{target.name} is not built", hint=f"imagefactory build {target.name}"
            )
        if options.compression not in ("", sif.compression):
            raise UsageError(
                "compression-fixed",
                f"Apptainer built the .sif of {target.name} with compression '{sif.compression}'",
                hint=f"omit --compression, or run imagefactory build {target.name} --engine assemble",
            )
        output = options.output or Path(sif.name)
        copy_sif(sif, output, progress)
    return sif, output
