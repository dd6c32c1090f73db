"""Images between this machine and registries: push, pull, copy, list, prune.

The stages of workflow.py end at an image that was tried; from here it reaches other machines. Every
push writes a candidate first, a tag named after its content that never moves.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.errors import BuildError, LockError, RegistryError, StaleError, StoreError, UsageError
from imagefactory.factory import Factory, package_index
from imagefactory.model import Target
from imagefactory.oci.model import Image, Sif
from imagefactory.progress import Progress
from imagefactory.workflow import ensure_sif, find_image, find_sif

if TYPE_CHECKING:
    from datetime import datetime

    from imagefactory.oci.candidates import Tagged
    from imagefactory.oci.graph import Graph, Place
    from imagefactory.oci.model import Descriptor
    from imagefactory.oci.prune import Fate
    from imagefactory.oci.registry.client import Registry
    from imagefactory.oci.store import Reference
    from imagefactory.oci.transfer import Brake, Sent


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
class Pushed:
    """One push. `reference` has the candidate's tag and the digest that the registry confirmed.

    `manifest` is the platform manifest's digest, or a .sif's own. `sent` is None where docker sent it,
    which does not tell what it cost; `file` is the .sif's name.
    """

    target: Target
    manifest: str
    reference: Reference
    sent: Sent | None
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """One pull: `name` is its tag in the store. `whole` is false when, of an index with other platforms,
    only this platform's manifest was kept, so that `digest` is not the index's."""

    name: str
    reference: Reference
    digest: str
    whole: bool
    sent: Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A repository of a registry and what its tags point to."""

    registry: str
    repository: str
    tagged: tuple[Tagged, ...]


def registry_place(factory: Factory, given: str = "") -> tuple[str, str]:
    """(host, path) of the registry to use: what was given, else the setting. Raises UsageError for none."""
    from imagefactory.oci.mirrors import split_place

    place = given or factory.settings.registry.value
    if not place:
        raise UsageError(
            "no registry is set",
            hint='name one: --registry HOST[:PORT][/PATH], or write registry = "..." in imagefactory.toml',
        )
    return split_place(place)


def repository_of(path: str, family: str) -> str:
    return f"{path}/{family}" if path else family


def open_registry(factory: Factory, host: str, brake: Brake | None = None) -> Registry:
    """A registry with this machine's certificates and what `docker login` left for it.

    `brake` cuts its waits between attempts short when the transfer it serves has failed.
    """
    from imagefactory.oci.credentials import find_credentials
    from imagefactory.oci.registry.client import Registry
    from imagefactory.oci.registry.exchange import RegistryOptions

    settings = factory.settings
    options = RegistryOptions(
        credentials=find_credentials(factory.environ),
        certificates=Path(trusted) if (trusted := package_index(factory).certificates) else None,
        plain_hosts=settings.plain_hosts,
        sleep=brake.sleep if brake else time.sleep,
    )
    return Registry(host, options)


def push_target(factory: Factory, target: Target, options: PushOptions, progress: Progress) -> Pushed:
    """What was built, as an immutable candidate in the registry, then its further tags.

    A target that apptainer alone has built is its .sif. Raises BuildError when nothing is built, UsageError
    for a tag that only promotion moves, RegistryError when the registry fails.
    """
    from imagefactory.oci.candidates import candidate_tag

    with factory.layout.in_use(progress):
        made = options.made or find_image(factory, target)
        image = made if isinstance(made, Image) else None
        sif = made if isinstance(made, Sif) else _sif_to_push(factory, target, image, options, progress)
        if sif is not None:
            candidate = candidate_tag(target, sif.file.digest, ".sif")
            root = PushRoot(target=target, digest=sif.digest, candidate=candidate)
        elif image is not None:
            root = PushRoot(target=target, digest=image.digest, candidate=candidate_tag(target, image.digest))
        else:
            raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
        reference, sent = _push(factory, root, options, progress)
    manifest = sif.digest if sif is not None else image.manifest if image is not None else ""
    file = sif.name if sif is not None else ""
    return Pushed(target=target, manifest=manifest, reference=reference, sent=sent, file=file)


def _sif_to_push(
    factory: Factory, target: Target, image: Image | None, options: PushOptions, progress: Progress
) -> Sif | None:
    if image is None:
        return find_sif(factory, target)
    if not options.sif:
        return None
    return ensure_sif(factory, image, target.name, progress, compression=options.sif)


def push_by_docker(factory: Factory, target: Target, options: PushOptions, progress: Progress) -> Pushed:
    """The same image, sent by the docker daemon: where only it has the way or the credentials.

    docker compresses the layers anew, so the registry's digest is not the store's, and the candidate is
    named after the config, which stays. Raises RegistryError also for what docker's client would hide.
    """
    from imagefactory.engines.docker_daemon import DockerDaemon
    from imagefactory.oci.candidates import candidate_tag
    from imagefactory.oci.store import Reference

    if options.tags or options.sif:
        raise UsageError("docker sends an image under its candidate's tag alone", hint="drop --by docker")
    host, path = registry_place(factory, options.registry)
    daemon = DockerDaemon(factory.environ)
    with factory.layout.in_use(progress):
        image = find_image(factory, target)
        if image is None:
            raise BuildError(
                f"{target.name} has no image in the store", hint=f"imagefactory build {target.name}"
            )
        tag = candidate_tag(target, image.config)
        where = Reference(registry=host, repository=repository_of(path, target.family), tag=tag)
        with progress.stage(f"{target.name}: push to {where}, by docker"):
            # Another docker may compress the same content to other bytes: a candidate never changes.
            digest = daemon.published(where) or daemon.push_image(
                (factory.layout, image), where, None, progress
            )
    return Pushed(target=target, manifest=image.manifest, reference=replace(where, digest=digest), sent=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRoot:
    """What is pushed for a target: a manifest or index of the store, and the candidate's tag for it."""

    target: Target
    digest: str
    candidate: str


def _push(
    factory: Factory, root: PushRoot, options: PushOptions, progress: Progress
) -> tuple[Reference, Sent]:
    """The whole graph of `root`, with the record of when it was first pushed."""
    from imagefactory.oci.candidates import check_tag, plain_tag, pushed_record
    from imagefactory.oci.graph import Place, read_graph
    from imagefactory.oci.layout_store import LayoutStore
    from imagefactory.oci.store import Reference
    from imagefactory.oci.transfer import Sending, origins_from, remember, send

    host, path = registry_place(factory, options.registry)
    for tag in options.tags:
        check_tag(tag, {plain_tag(other) for other in factory.targets})
    layout, family = factory.layout, root.target.family
    repository, source = repository_of(path, family), Place(store=LayoutStore(layout), repository=family)
    made = made_from(factory, root.target, root.digest)
    with progress.stage(f"{root.target.name}: push to {host}/{repository}:{root.candidate}"):
        graph = read_graph(source, root.digest)
        families = [repository_of(path, name) for name in sorted({t.family for t in factory.targets})]
        sending = Sending(
            graph=graph,
            repository=repository,
            candidate=root.candidate,
            tags=options.tags,
            attach=(pushed_record(graph.root.descriptor, options.now, made),),
            origins=origins_from(layout.recall("pushed", host) or {}, families),
        )
        registry = open_registry(factory, host, sending.brake)
        sent = send(source, registry, sending, progress)
        place = Place(store=registry, repository=repository)
        _tell_made_from(place, graph.root.descriptor, options.now, made)
        # Read again: another push may have learned something meanwhile.
        layout.record("pushed", host, remember(layout.recall("pushed", host) or {}, repository, graph.blobs))
    where = Reference(registry=host, repository=repository, tag=root.candidate, digest=sent.digest)
    return where, sent


def made_from(factory: Factory, target: Target, digest: str = "") -> str:
    """The digest of all that decides a target's image: its definition, its base's lock, engine and codec.

    With `digest` it is that image's, and empty where the store does not know it for what those give. Raises
    LockError and StaleError without it, as `define_target` does.
    """
    from imagefactory.engines.layer_plan import hash_key
    from imagefactory.workflow import find_built, render_target

    settings, lock = factory.settings, factory.base_lock_path(factory.base_of(target))
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
    base = [lock.read_text(encoding="utf-8")] if lock.exists() else []  # a pulled base is in the definition
    return f"sha256:{hash_key('made-from', settings.engine.value, settings.codec.value, *texts, *base)}"


def _tell_made_from(place: Place, candidate: Descriptor, now: datetime, made: str) -> None:
    """Lets a candidate that was there already say what it is made of, without making it any younger."""
    from imagefactory.oci.candidates import MADE_FROM, pushed_record, read_pushed, read_records
    from imagefactory.oci.transfer import put_artifact

    if not made:
        return
    records = read_records(place, candidate.digest)
    if all(row.get(MADE_FROM) != made for row in records):
        put_artifact(place, pushed_record(candidate, read_pushed(records) or now, made))


def target_reference(factory: Factory, text: str, registry: str = "") -> tuple[Target, Reference]:
    """`TARGET[:TAG][@sha256:...]` as a reference to the registry; without either, the target's own tag."""
    from imagefactory.oci.candidates import plain_tag
    from imagefactory.oci.store import parse_reference
    from imagefactory.recipes.expand import select_one

    rest, at, digest = text.partition("@")
    name, colon, tag = rest.partition(":")
    target = select_one(factory.targets, name)
    host, path = registry_place(factory, registry)
    if not colon and not at:
        tag = plain_tag(target)
    place = f"{host}/{repository_of(path, target.family)}"
    return target, parse_reference(place + (f":{tag}" if colon or tag else "") + at + digest)


def pull_image(factory: Factory, wanted: Reference, name: str, progress: Progress) -> Pulled:
    """Brings an image into the store under the tag `name` (`repository:tag`), checked by its digests.

    Raises RegistryError when the registry has no such image or none for linux/amd64.
    """
    from imagefactory.oci.graph import Place, choose_platform, read_graph, read_manifest
    from imagefactory.oci.layout_store import LayoutStore
    from imagefactory.oci.manifests import PLATFORM
    from imagefactory.oci.mirrors import resolve
    from imagefactory.oci.transfer import Brake, Sending, send

    layout, asked = factory.layout, resolve(wanted, factory.settings.mirror_map)
    repository, _, tag = name.rpartition(":")
    with layout.in_use(progress), progress.stage(f"pull {asked}"):
        brake = Brake()
        source = Place(store=open_registry(factory, asked.registry, brake), repository=asked.repository)
        choice = choose_platform(read_manifest(source, asked.wanted), PLATFORM)
        graph = read_graph(source, choice.digest)
        _insist_on_image(graph, asked)
        sending = Sending(graph=graph, repository=repository, tags=(tag,), brake=brake)
        sent = send(source, LayoutStore(layout), sending, progress)
    return Pulled(name=name, reference=wanted, digest=sent.digest, whole=choice.whole, sent=sent)


def _insist_on_image(graph: Graph, asked: Reference) -> None:
    """Raises RegistryError for a .sif or another artifact, which must not become a target's image."""
    from imagefactory.oci.graph import parse_parts
    from imagefactory.oci.manifests import CONFIG_TYPES, MANIFEST_TYPES

    kinds = [
        parse_parts(one)[1][0].media_type
        for one in graph.manifests
        if one.descriptor.media_type in MANIFEST_TYPES
    ]
    if not set(kinds) & set(CONFIG_TYPES):
        raise RegistryError(f"{asked} is no image, but an artifact", hint="is it a .sif? add --format sif")


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledSif:
    """A .sif that was pulled. `digest` is its sha256; `how` says in a few words where it came from."""

    reference: Reference
    path: Path
    size: int
    digest: str
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SifPull:
    """`name` is the store's tag for what comes, `target` names the file; without `output` it names itself."""

    name: str
    target: str
    output: Path | None = None


def pull_sif(factory: Factory, wanted: Reference, options: SifPull, progress: Progress) -> PulledSif:
    """A .sif file of an image or .sif in a registry.

    Where the registry holds a .sif, itself or made from that image, it is taken as it is; else the image
    is pulled into the store and made into one here. Raises RegistryError and ToolError.
    """
    from imagefactory.oci.archive import check_output
    from imagefactory.oci.graph import Place, choose_platform, read_graph, read_manifest
    from imagefactory.oci.layout_store import LayoutStore
    from imagefactory.oci.manifests import PLATFORM
    from imagefactory.oci.mirrors import resolve
    from imagefactory.oci.sif import copy_sif, load_sif
    from imagefactory.oci.transfer import Sending, send

    check_output(options.output or Path("image.sif"))
    asked = resolve(wanted, factory.settings.mirror_map)
    source = Place(store=open_registry(factory, asked.registry), repository=asked.repository)
    found = _sif_in_registry(source, choose_platform(read_manifest(source, asked.wanted), PLATFORM).digest)
    repository, _, tag = options.name.rpartition(":")
    if found:
        with factory.layout.in_use(progress), progress.stage(f"pull the .sif of {asked}"):
            graph = read_graph(source, found)
            # One of an image is kept by that image; `T.sif` is what apptainer built here of a definition.
            alone = not json.loads(graph.root.data).get("subject")
            tags = (f"{tag.removesuffix('.sif')}.sif",) if alone else (f"{tag}-{found[7:19]}.sif",)
            sending = Sending(graph=graph, repository=repository, tags=tags)
            send(source, LayoutStore(factory.layout), sending, progress)
            sif, how = load_sif(factory.layout, found), "the registry's own"
            copy_sif(sif, output := options.output or Path(sif.name), progress)
    else:
        pull_image(factory, wanted, options.name, progress)
        with factory.layout.in_use(progress):
            image = factory.layout.image(options.name)
            if image is None:
                raise BuildError(f"{options.name} was removed from the store meanwhile", hint="run it again")
            sif = ensure_sif(factory, image, options.target, progress, compression="fast")
            how = "made here of the image: the registry has no .sif of it"
            copy_sif(sif, output := options.output or Path(sif.name), progress)
    return PulledSif(reference=wanted, path=output, size=sif.file.size, digest=sif.file.digest, how=how)


def _sif_in_registry(source: Place, digest: str) -> str:
    """The manifest of the .sif that `digest` is or that was made from it, empty for none."""
    from imagefactory.oci.graph import parse_parts, read_manifest
    from imagefactory.oci.sif import COMPRESSION, SIF_TYPE, is_sif_manifest

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


def pull_by_apptainer(factory: Factory, wanted: Reference, options: SifPull, progress: Progress) -> PulledSif:
    """A .sif that apptainer itself pulls and makes: where only it has the way or the credentials."""
    from imagefactory.engines.apptainer_command import ApptainerCommand, PullOptions
    from imagefactory.oci.archive import check_output
    from imagefactory.oci.mirrors import resolve
    from imagefactory.oci.sif import sif_name

    command = ApptainerCommand(factory.environ)
    command.require(building=False)
    check_output(options.output or Path("image.sif"))
    asked = resolve(wanted, factory.settings.mirror_map)
    # apptainer takes a tag or a digest; the digest decides. It does not say what it is the digest of.
    place = f"{asked.registry}/{asked.repository}" + (f"@{asked.digest}" if asked.digest else f":{asked.tag}")
    kinds = ("oras",) if asked.tag.endswith(".sif") else ("docker",) if asked.tag else ("docker", "oras")
    trust = package_index(factory).certificates
    how = PullOptions(plain_http=open_registry(factory, asked.registry).plain, certificates=trust)
    beside = options.output or Path(f".{options.target}-{os.getpid()}.sif")
    try:
        with progress.stage(f"pull {asked}, by apptainer"):
            for kind in kinds:
                try:
                    command.pull(f"{kind}://{place}", beside, progress.note, how)
                    break
                except RegistryError:
                    if kind == kinds[-1]:
                        raise
        with beside.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        output = options.output or Path(sif_name(options.target, digest))
        beside.replace(output)
    finally:
        if beside != options.output:
            beside.unlink(missing_ok=True)
    size = output.stat().st_size
    return PulledSif(reference=wanted, path=output, size=size, digest=digest, how="pulled by apptainer")


def local_name(factory: Factory, wanted: Reference) -> str:
    """The store's tag for what is pulled by a full reference: `repository:tag`.

    From the site's own registry that is the target's own tag, as for what is built here. What comes from
    elsewhere carries where it is from (`docker.io/library/debian`): a stranger's image never takes the
    place of a target's. What was asked for by digest alone carries the first 12 hex digits of it.
    """
    host = re.sub(r"[^a-z0-9]+", ".", wanted.registry.lower()).strip(".")
    repository = f"{host}/{wanted.repository}"
    if factory.settings.registry.value:
        own, path = registry_place(factory)
        if wanted.registry == own and (not path or wanted.repository.startswith(f"{path}/")):
            repository = wanted.repository.removeprefix(f"{path}/")
    return f"{repository}:{wanted.tag or wanted.digest.removeprefix('sha256:')[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """What to copy where, and when. With `referrers`, verdicts and other artifacts of the image come too."""

    now: datetime
    source: Reference
    destination: Reference
    referrers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """One copy; `destination` has the digest that its registry confirmed."""

    source: Reference
    destination: Reference
    sent: Sent


def copy_image(factory: Factory, wanted: Copying, progress: Progress) -> Copied:
    """From registry to registry; blobs stream through, within one registry they are mounted."""
    from imagefactory.oci.candidates import CANDIDATE, pushed_record
    from imagefactory.oci.graph import Place, read_graph
    from imagefactory.oci.mirrors import resolve
    from imagefactory.oci.transfer import Brake, Sending, no_origins, send

    source, destination = wanted.source, wanted.destination
    if not destination.tag or destination.digest:
        raise UsageError(
            f"'{destination}' names no place to copy to", hint="write HOST/NAME:TAG; the digest comes along"
        )
    asked = resolve(source, factory.settings.mirror_map)
    with progress.stage(f"copy {asked} to {destination}"):
        brake = Brake()
        registry = open_registry(factory, asked.registry, brake)
        place = Place(store=registry, repository=asked.repository)
        same = asked.registry == destination.registry
        graph = read_graph(place, asked.wanted, referrers=wanted.referrers)
        immutable = CANDIDATE.fullmatch(destination.tag) is not None
        record = pushed_record(graph.root.descriptor, wanted.now)
        sending = Sending(
            graph=graph,
            repository=destination.repository,
            candidate=destination.tag if immutable else "",
            tags=() if immutable else (destination.tag,),
            # A candidate's age counts from when it came to this registry.
            attach=(record,) if immutable else (),
            origins=(lambda _: (asked.repository,)) if same else no_origins,
            brake=brake,
        )
        target = registry if same else open_registry(factory, destination.registry, brake)
        sent = send(place, target, sending, progress)
    return Copied(source=source, destination=replace(destination, digest=sent.digest), sent=sent)


def list_registry(
    factory: Factory, targets: Sequence[Target], registry: str, progress: Progress
) -> tuple[Shelf, ...]:
    """The tags of the targets' repositories, with what they point to."""
    from imagefactory.oci.candidates import plain_tag, read_tagged
    from imagefactory.oci.graph import Place

    host, path = registry_place(factory, registry)
    store = open_registry(factory, host)
    plain = {plain_tag(target) for target in factory.targets}
    with progress.stage(f"list {host}"):
        return tuple(
            Shelf(
                registry=host,
                repository=repository_of(path, family),
                tagged=read_tagged(Place(store=store, repository=repository_of(path, family)), plain),
            )
            for family in sorted({target.family for target in targets})
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What became of one repository's candidates."""

    registry: str
    repository: str
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions:
    """Candidates pushed before `before` go, unless something needs them (candidates.plan_prune).

    `now` is when it is judged whether verdicts of theirs are valid.
    """

    before: datetime
    now: datetime
    registry: str = ""
    dry_run: bool = False


def prune_registry(factory: Factory, family: str, options: PruneOptions, progress: Progress) -> Pruned:
    """Removes old candidates from a family's repository.

    The registry's own collection frees their bytes. Raises RegistryError when it refuses to delete.
    """
    from imagefactory.oci.candidates import plain_tag, read_tagged
    from imagefactory.oci.graph import Place
    from imagefactory.oci.prune import plan_prune
    from imagefactory.verdicts import count_valid

    host, path = registry_place(factory, options.registry)
    store, repository = open_registry(factory, host), repository_of(path, family)
    with progress.stage(f"prune {host}/{repository}"):
        plain = {plain_tag(target) for target in factory.targets}
        place = Place(store=store, repository=repository)
        tagged = read_tagged(place, plain, count_valid(factory, place, options.now), records=True)
        fates = plan_prune(tagged, options.before)
        if not options.dry_run:
            fates = tuple(_prune_one(store, repository, fate) for fate in fates)
    return Pruned(registry=host, repository=repository, fates=fates)


def _prune_one(store: Registry, repository: str, fate: Fate) -> Fate:
    from imagefactory.oci.prune import remove_candidate

    tag = remove_candidate(store, repository, fate) if fate.remove else ""
    return replace(fate, remove=False, why=f"{tag} points to it now") if tag else fate
