"""From the store to a registry.

Every push writes a candidate first, a tag named after its content that never moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.errors import BuildError, LockError, StaleError, StoreError
from imagefactory.project import Factory
from imagefactory.lock.debian.lock import format_base_lock
from imagefactory.model import Target
from imagefactory.oci.artifacts import put_artifact
from imagefactory.oci.candidates import (
    MADE_FROM,
    candidate_tag,
    check_tag,
    find_made,
    plain_tag,
    pushed_record,
    read_pushed,
    read_records,
)
from imagefactory.oci.graph import Place, read_graph
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.manifests import hash_key
from imagefactory.oci.model import Descriptor, Image, Sif
from imagefactory.oci.store import Reference
from imagefactory.oci.transfer import (
    NowhereError,
    Sending,
    Sent,
    origins_from,
    remember,
    send,
    sent_as,
    told_of,
)
from imagefactory.progress import Progress
from imagefactory.settings.load import LEDGER_KEY, read_ledger_key
from imagefactory.actions.build import find_built
from imagefactory.actions.definition import render_target
from imagefactory.stages.layers import promised_image
from imagefactory.actions.locked import base_locks
from imagefactory.stages.platforms import Joined, join_platforms
from imagefactory.stages.stored import ensure_sif, stored_image, stored_sif

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
    made: Image | Sif | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedPlatforms:
    """The index of a target's images for several platforms, a candidate that has the further tags."""

    platforms: tuple[str, ...]
    reference: Reference
    sent: Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """One push. `reference` has the candidate's tag and the digest that the registry confirmed.

    `manifest` is the platform manifest's digest, or a .sif's own; `file` is the .sif's name. `joined` is the
    index of this one and of what the store has for other platforms, None where that is nothing.
    """

    target: Target
    manifest: str
    reference: Reference
    sent: Sent
    file: str = ""
    joined: PushedPlatforms | None = None


def check_push(access: Access, options: PushOptions) -> None:
    """Before the work, not after it: raises UsageError for no registry, RegistryError for one that fails.

    A push of what is made asks the registry first, and needs no such question.
    """
    host, _ = registry_place(access, options.registry)
    open_registry(access, host).check()


def push_target(factory: Factory, target: Target, options: PushOptions, progress: Progress) -> Pushed:
    """What was built, as an immutable candidate in the registry, then its further tags.

    A target that apptainer alone has built is its .sif. One that is not built is what its layer lock says, of
    layers that the registry has. Raises BuildError when nothing is built and the registry lacks layers,
    UsageError for a tag that only promotion moves, RegistryError when the registry fails.
    """
    with factory.layout.in_use(progress):
        made = options.made or stored_image(factory, target)
        image = made if isinstance(made, Image) else None
        sif = made if isinstance(made, Sif) else _sif_to_push(factory, target, image, options, progress)
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
    return Pushed(target=target, manifest=manifest, reference=reference, sent=sent, file=file, joined=both)


def _push_joined(
    factory: Factory, joined: Joined, options: PushOptions, progress: Progress
) -> PushedPlatforms:
    """The index of several platforms as a candidate of the target without a platform in its name."""
    candidate = candidate_tag(joined.target, joined.digest)
    root = PushRoot(target=joined.target, digest=joined.digest, candidate=candidate)
    reference, sent = _push(factory, root, options, progress)
    return PushedPlatforms(platforms=joined.platforms, reference=reference, sent=sent)


def _sif_to_push(
    access: Access, target: Target, image: Image | None, options: PushOptions, progress: Progress
) -> Sif | None:
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
    factory: Factory, root: PushRoot, options: PushOptions, progress: Progress
) -> tuple[Reference, Sent]:
    """The whole graph of `root`, with the record of when it was first pushed."""
    host, path = registry_place(factory, options.registry)
    for tag in options.tags:
        check_tag(tag, {plain_tag(other) for other in factory.targets})
    layout, family = factory.layout, root.target.family
    repository, source = repository_of(path, family), Place(store=LayoutStore(layout), repository=family)
    made = made_from(factory, root.target, "" if root.unmade else root.digest)
    layers, key = root.unmade.layers if root.unmade else (), read_ledger_key(factory.environ)
    lacks = {one.descriptor.digest: one.title for one in layers if not layout.has(one.descriptor)}
    with progress.stage(f"{root.target.name}: push to {host}/{repository}:{root.candidate}"):
        graph = read_graph(source, root.digest)
        memory = layout.recall("pushed", host) or {}
        known = told_of(memory, repository, graph)
        families = [repository_of(path, name) for name in sorted({t.family for t in factory.targets})]
        sending = Sending(
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
        except NowhereError as error:
            titles = ", ".join(title for digest, title in lacks.items() if digest in error.digests)
            raise BuildError(
                "image-not-built",
                f"{root.target.name} is not built, and {host} lacks layers of it: {titles}",
                hint=f"run imagefactory build {root.target.name}, then push again",
            ) from error
        # What was pushed without this key does not count for other stores.
        mark = {f"{repository}@{graph.root.descriptor.digest} key": hash_key("mac", made, key)} if key else {}
        if known != made or not mark.items() <= memory.items():
            place = Place(store=registry, repository=repository)
            if not lacks:
                _tell_made_from(place, graph.root.descriptor, (options.now, made, key))
            # Read again: another push may have learned something meanwhile.
            memory = layout.recall("pushed", host) or {}
            layout.record("pushed", host, remember(memory, repository, graph, made) | mark)
    where = Reference(registry=host, repository=repository, tag=root.candidate, digest=sent.digest)
    return where, sent


def made_from(factory: Factory, target: Target, digest: str = "") -> str:
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


def _tell_made_from(place: Place, candidate: Descriptor, record: tuple[datetime, str, str]) -> None:
    """Lets a candidate that was there already say what it is made of, without making it any younger."""
    now, made, key = record
    if not made:
        return
    records = read_records(place, candidate.digest, key=key)
    if all(row.get(MADE_FROM) != made for row in records):
        put_artifact(place, pushed_record(candidate, read_pushed(records) or now, made, key=key))


def explain_no_candidate(factory: Factory, place: Place) -> str:
    """Return why `find_candidate` found none; without the key, pushes of other stores do not count."""
    said = f"{place} has no image of what the lock gives"
    if read_ledger_key(factory.environ):
        return said
    return f"{said} that this store pushed ({LEDGER_KEY} is not set, so pushes of other stores do not count)"


def find_candidate(factory: Factory, target: Target, place: Place) -> Descriptor | None:
    """The candidate in a registry of what the present lock gives, None where nobody trusted says so.

    Trusted are this store's memory of its pushes, and records with the MAC of IMAGEFACTORY_LEDGER_KEY.
    Raises LockError and StaleError as `define_target` does.
    """
    made = made_from(factory, target)
    memory = factory.layout.recall("pushed", place.store.name) or {}
    sent = (place.store.manifest(place.repository, one) for one in sent_as(memory, place.repository, made))
    there = [one[0] for one in sent if one is not None]
    if len(there) == 1:
        return there[0]
    if there:  # an engine that does not give the same bytes twice
        return max(there, key=lambda one: read_pushed(read_records(place, one.digest)) or NO_TIME)
    return find_made(place, plain_tag(target), made, read_ledger_key(factory.environ))
