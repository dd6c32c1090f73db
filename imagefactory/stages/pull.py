"""From a registry into the store, or into a .sif file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from imagefactory.access import Access, open_registry, registry_place, repository_of
from imagefactory.errors import BuildError, RegistryError
from imagefactory.project import Factory
from imagefactory.fs import insist_on_room
from imagefactory.gpu.platforms import architecture, this_platform
from imagefactory.model import Target
from imagefactory.oci.archive import check_output
from imagefactory.oci.candidates import plain_tag
from imagefactory.oci.graph import (
    Graph,
    Place,
    choose_platform,
    parse_parts,
    read_config,
    read_graph,
    read_manifest,
    says_no_platform,
)
from imagefactory.oci.layout import Layout
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.manifests import MANIFEST_TYPES
from imagefactory.oci.mirrors import resolve
from imagefactory.oci.sif import COMPRESSION, SIF_TYPE, copy_sif, is_sif_manifest, load_sif
from imagefactory.oci.store import Reference, parse_reference
from imagefactory.oci.transfer import Brake, Sending, Sent, send
from imagefactory.progress import Progress
from imagefactory.recipes.expand import select_one
from imagefactory.stages.stored import ensure_sif


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """One pull: `name` is its tag in the store. Of an index with several platforms
    one manifest was kept, that for `alone`, so that `digest` is not the index's; else it is empty.
    """

    name: str
    reference: Reference
    digest: str
    alone: str
    sent: Sent

    @property
    def whole(self) -> bool:
        """Whether it is the very index that was asked for."""
        return not self.alone


def target_reference(factory: Factory, text: str, registry: str = "") -> tuple[Target, Reference]:
    """`TARGET[:TAG][@sha256:...]` as a reference to the registry; without either, the target's own tag."""
    rest, at, digest = text.partition("@")
    name, colon, tag = rest.partition(":")
    target = select_one(factory.targets, name)
    host, path = registry_place(factory, registry)
    if not colon and not at:
        tag = plain_tag(target)
    place = f"{host}/{repository_of(path, target.family)}"
    return target, parse_reference(place + (f":{tag}" if colon or tag else "") + at + digest)


def pull_image(
    access: Access, reference: Reference, name: str, progress: Progress, *, platform: str = ""
) -> Pulled:
    """Brings an image into the store under the tag `name` (`repository:tag`), checked by its digests.

    `platform` is this machine's where it is empty. Raises RegistryError when the registry has no such image,
    or none for it.
    """
    platform = platform or this_platform()
    layout, asked = access.layout, resolve(reference, access.settings.mirror_map)
    repository, _, tag = name.rpartition(":")
    with layout.in_use(progress), progress.stage(f"pull {asked}"):
        brake = Brake()
        source = Place(store=open_registry(access, asked.registry, brake), repository=asked.repository)
        root = read_manifest(source, asked.wanted)
        choice = choose_platform(root, platform)
        graph = read_graph(source, choice.digest)
        unnamed = not choice.whole and says_no_platform(root, choice.digest)
        _insist_on_image(source, graph, asked, platform if unnamed else "")
        _insist_on_room(layout, graph, asked)
        sending = Sending(graph=graph, repository=repository, tags=(tag,), brake=brake)
        sent = send(source, LayoutStore(layout, every_byte=True), sending, progress)
    whole = "" if choice.whole else platform
    return Pulled(name=name, reference=reference, digest=sent.digest, alone=whole, sent=sent)


def _insist_on_image(source: Place, graph: Graph, asked: Reference, platform: str) -> None:
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


def _insist_on_room(layout: Layout, graph: Graph, asked: Reference) -> None:
    """Raises StoreError before the first byte comes of what the disk cannot hold."""
    missing = sum(blob.size for blob in graph.blobs if not layout.has(blob))
    insist_on_room({layout.path: missing}, str(asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledSif:
    """A .sif that was pulled. `how` says in a few words where it came from."""

    reference: Reference
    path: Path
    sha256: str
    size: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SifPull:
    """`name` is the store's tag for what comes, `target` names the file; without `output` it names itself."""

    name: str
    target: str
    output: Path | None = None
    platform: str = ""


def pull_sif(access: Access, reference: Reference, options: SifPull, progress: Progress) -> PulledSif:
    """A .sif file of an image or .sif in a registry.

    Where the registry holds a .sif, itself or made from that image, it is taken as it is; else the image
    is pulled into the store and made into one here. Raises RegistryError and ToolError.
    """
    check_output(options.output or Path("image.sif"))
    asked = resolve(reference, access.settings.mirror_map)
    source = Place(store=open_registry(access, asked.registry), repository=asked.repository)
    platform = options.platform or this_platform()
    digest = _sif_in_registry(source, choose_platform(read_manifest(source, asked.wanted), platform).digest)
    repository, _, tag = options.name.rpartition(":")
    if digest:
        with access.layout.in_use(progress), progress.stage(f"pull the .sif of {asked}"):
            graph = read_graph(source, digest)
            # One of an image is kept by that image; `T.sif` is what apptainer built here of a definition.
            alone = not json.loads(graph.root.data).get("subject")
            tags = (f"{tag.removesuffix('.sif')}.sif",) if alone else (f"{tag}-{digest[7:19]}.sif",)
            sending = Sending(graph=graph, repository=repository, tags=tags)
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
    return PulledSif(reference=reference, path=output, sha256=sif.file.digest, size=sif.file.size, how=how)


def _sif_in_registry(source: Place, digest: str) -> str:
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


def local_name(access: Access, reference: Reference) -> str:
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
