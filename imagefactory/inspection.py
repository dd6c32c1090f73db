"""From what a person names to what is in it: a path, a target, an image of the store or of a registry.

The scan is gpu/'s; here is which bytes are scanned, and which word says where the answer comes from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagefactory.errors import BuildError, NothingSelectedError, RegistryError, StoreError, UsageError
from imagefactory.gpu.model import Contents, Package
from imagefactory.model import LockedConda, LockedPackage, Target
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import MANIFEST_LIMIT
from imagefactory.oci.model import Image, Layer, Sif
from imagefactory.oci.store import DIGEST
from imagefactory.progress import Progress, Quiet

if TYPE_CHECKING:
    from datetime import datetime

    from imagefactory.factory import Factory
    from imagefactory.model import Lock
    from imagefactory.oci.graph import Manifest, Place
    from imagefactory.oci.model import Descriptor
    from imagefactory.oci.store import Reference
    from imagefactory.verify.model import Judged

LARGE = 1 << 20  # bytes; the GPU code of a framework is in no package smaller than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """What was looked at. `how` says in a line where its contents come from; `digest` is an image's."""

    contents: Contents
    how: str
    digest: str = ""


def inspect_place(
    factory: Factory, recipes: Callable[[], Factory], name: str, progress: Progress
) -> Inspected:
    """What `name` holds: a path that exists, a reference with its registry, a digest or tag, a target.

    `factory` needs to know no recipes; `recipes` gives one that does. Raises UsageError for a name that is
    nothing of these, BuildError for a target of which nothing is at hand, and what reading raises.
    """
    path = Path(name)
    if not name:
        raise UsageError("nothing is named", hint="name a file or folder, an image or a target")
    if path.exists():
        return _inspect_path(factory, path, progress)
    if name.startswith((".", "/", "~")) or path.suffix in (".whl", ".sif", ".so", ".conda"):
        raise UsageError(
            f"{name} does not exist", hint="name a file or folder that does, an image or a target"
        )
    if "/" in name:
        from imagefactory.oci.store import parse_reference

        return _inspect_registry(factory, parse_reference(name), progress)
    if DIGEST.fullmatch(name):
        return _inspect_digest(factory, name, progress)
    tags = factory.layout.tags()
    if name in tags:
        return _inspect_stored(factory, name, tags[name], progress)
    if ":" in name:
        near = _near(name, tags)
        hint = f"did you mean {near}?" if near else "imagefactory store list"
        raise NothingSelectedError(f"no image '{name}' in {factory.layout.path}", hint=hint)
    return _inspect_target(recipes(), name, progress)


def find_verdicts(factory: Factory, name: str, digest: str, now: datetime) -> tuple[Judged, ...]:
    """The judged verdicts on what `inspect_place` found under `name`, from the store or registry it is in.

    A file's are none: those of the image that it was made from are not about the file.
    """
    from imagefactory.oci.graph import Place
    from imagefactory.oci.layout_store import LayoutStore
    from imagefactory.verify.judging import Judge

    judge = Judge(factory, now)
    if not digest or Path(name).exists():
        return ()
    if "/" not in name:
        return judge.there(Place(store=LayoutStore(factory.layout), repository=""), digest)
    return judge.there(_registry(factory, name)[1], digest)


def inspect_made(factory: Factory, made: Image | Sif, progress: Progress) -> Inspected:
    """What an image or a .sif of the store holds."""
    if isinstance(made, Sif):
        return _inspect_kept_sif(factory, made, progress)
    return _scan_stored(factory, made, progress)


def _near(name: str, known: Iterable[str]) -> str:
    import difflib

    return "".join(difflib.get_close_matches(name, known, n=1))


# --- paths ---------------------------------------------------------------------------------------


def _inspect_path(factory: Factory, path: Path, progress: Progress) -> Inspected:
    from imagefactory.scan.files import scan_path
    from imagefactory.scan.sif import is_sif

    workers = factory.settings.worker_count
    if path.is_file():
        try:
            sif = is_sif(path)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", hint="name what this user may read") from error
        if sif:
            return _inspect_sif(factory, path, progress)
    kind = "folder" if path.is_dir() else "wheel" if path.suffix == ".whl" else "file"
    return Inspected(contents=scan_path(path, progress, workers=workers), how=f"scan of the {kind}")


def _inspect_sif(factory: Factory, path: Path, progress: Progress) -> Inspected:
    """By the image it was made from, where the store has that; else unpacked."""
    from imagefactory.scan.files import scan_folder
    from imagefactory.scan.sif import unpacked_sif

    image = _origin(factory.layout, path)
    if image is not None:
        found = _scan_stored(factory, image, progress)
        contents = replace(found.contents, source=path.name)
        return replace(found, contents=contents, how=f"scan of {image.name}, from which it was made")
    layout = factory.layout
    with layout.in_use(progress), unpacked_sif(path, layout.tmp, progress) as root:
        contents = scan_folder(root, progress, workers=factory.settings.worker_count)
    return Inspected(contents=replace(contents, source=path.name), how="scan of the unpacked .sif")


def _origin(layout: Layout, path: Path) -> Image | None:
    """The image of the store that the .sif at `path` was made from, told by the file's sha256."""
    from imagefactory.oci.sif import sifs_of

    size, digest = path.stat().st_size, ""
    for name, descriptor in layout.tags().items():
        with contextlib.suppress(StoreError):
            image = layout.load(name, descriptor)
            for sif in sifs_of(layout, image.manifest):
                if sif.file.size == size:
                    digest = digest or _sha256(path)
                    if sif.file.digest == digest:
                        return image
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


# --- images --------------------------------------------------------------------------------------


def _inspect_digest(factory: Factory, digest: str, progress: Progress) -> Inspected:
    found = factory.layout.manifest(digest)
    if found is None:
        raise NothingSelectedError(
            f"no image {digest} in {factory.layout.path}", hint="imagefactory store list"
        )
    return _inspect_stored(factory, digest, found[0], progress)


def _inspect_stored(factory: Factory, name: str, descriptor: Descriptor, progress: Progress) -> Inspected:
    """An image of the store, or a .sif that is kept there."""
    from imagefactory.oci.sif import is_sif_manifest, load_sif

    layout = factory.layout
    if is_sif_manifest(json.loads(layout.read(descriptor))):
        return _inspect_kept_sif(factory, load_sif(layout, descriptor.digest), progress)
    return _scan_stored(factory, layout.load(name, descriptor), progress)


def _inspect_kept_sif(factory: Factory, sif: Sif, progress: Progress) -> Inspected:
    found = _inspect_sif(factory, sif.path, progress)
    return replace(found, contents=replace(found.contents, source=sif.name), digest=sif.digest)


def _scan_stored(factory: Factory, image: Image, progress: Progress) -> Inspected:
    from imagefactory.scan.layers import layout_shelf, scan_image

    layout = factory.layout
    with layout.in_use(progress):
        shelf = layout_shelf(layout, factory.settings.worker_count)
        contents = scan_image(image.name, image.layers, shelf, progress)
    return Inspected(contents=contents, how=f"scan of the image in {layout.path}", digest=image.digest)


def _inspect_registry(factory: Factory, wanted: Reference, progress: Progress) -> Inspected:
    """An image of a registry: of its layers those not known are read through, none is kept."""
    from imagefactory.oci.graph import choose_platform, read_manifest
    from imagefactory.oci.manifests import PLATFORM
    from imagefactory.scan.layers import ScanShelf, scan_image

    asked, place = _registry(factory, str(wanted))
    root = read_manifest(place, asked.wanted)
    root = read_manifest(place, choose_platform(root, PLATFORM).digest)
    layers = _registry_layers(place, _image_manifest(place, root))
    with factory.layout.in_use(progress):
        shelf = ScanShelf(
            layout=factory.layout,
            read=lambda layer: place.store.read(place.repository, layer.descriptor),
            workers=factory.settings.worker_count,
        )
        contents = scan_image(str(wanted), layers, shelf, progress)
    return Inspected(contents=contents, how=f"scan of the image in {place}", digest=root.descriptor.digest)


def _registry(factory: Factory, name: str) -> tuple[Reference, Place]:
    """What a full reference asks for, and where: a mirror, if the site has one."""
    from imagefactory.oci.graph import Place
    from imagefactory.oci.mirrors import resolve
    from imagefactory.oci.store import parse_reference
    from imagefactory.publish import open_registry

    asked = resolve(parse_reference(name), factory.settings.mirror_map)
    return asked, Place(store=open_registry(factory, asked.registry), repository=asked.repository)


def _image_manifest(place: Place, root: Manifest) -> Manifest:
    """The image's own manifest, also where its index is the root."""
    from imagefactory.oci.graph import ATTESTATION, parse_parts, read_manifest
    from imagefactory.oci.manifests import INDEX_TYPES

    if root.descriptor.media_type not in INDEX_TYPES:
        return root
    parse_parts(root)  # well-formed from here on
    entries = json.loads(root.data)["manifests"]
    (digest, *_) = (
        str(entry["digest"]) for entry in entries if ATTESTATION not in (entry.get("annotations") or {})
    )
    return read_manifest(place, digest)


def _registry_layers(place: Place, manifest: Manifest) -> tuple[Layer, ...]:
    from imagefactory.oci.graph import parse_parts
    from imagefactory.oci.manifests import CONFIG_TYPES

    config, *blobs = parse_parts(manifest)[1]
    if config.media_type not in CONFIG_TYPES:
        raise RegistryError(
            f"{place} {manifest.descriptor.digest} is no image, but an artifact",
            hint="a .sif? `imagefactory pull --format sif`, then inspect the file",
        )
    if config.size > MANIFEST_LIMIT:
        raise RegistryError(f"the config of {manifest.descriptor.digest} has {config.size} bytes")
    try:
        value: Any = json.loads(b"".join(place.store.read(place.repository, config)))
        diff_ids = [str(each) for each in value["rootfs"]["diff_ids"]]
        return tuple(
            Layer(descriptor=blob, diff_id=diff_id, title="")
            for blob, diff_id in zip(blobs, diff_ids, strict=True)
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RegistryError(
            f"the config of {manifest.descriptor.digest} is malformed: {type(error).__name__}: {error}"
        ) from error


# --- targets -------------------------------------------------------------------------------------


def _inspect_target(factory: Factory, name: str, progress: Progress) -> Inspected:
    """The target's image; else the .sif apptainer built; else what is known of its lock's packages."""
    from imagefactory.recipes.expand import select_one
    from imagefactory.workflow import find_image, find_sif

    target = select_one(factory.targets, name)
    image = find_image(factory, target)
    if image is not None:
        return _scan_stored(factory, image, progress)
    sif = find_sif(factory, target)
    if sif is not None:
        return _inspect_kept_sif(factory, sif, progress)
    return _inspect_lock(factory, target, progress)


def _inspect_lock(factory: Factory, target: Target, progress: Progress) -> Inspected:
    from imagefactory.locking import read_target_lock

    lock = read_target_lock(factory, target)
    if lock is None:
        raise BuildError(
            f"{target.name} is neither built nor locked: nothing is known of its GPU code",
            hint=f"imagefactory lock {target.name}, then imagefactory build {target.name}",
        )
    cached, tabled, missing = _known_packages(factory, lock, progress)
    contents = join_contents(target.name, lock, (*cached, *tabled))
    if not _answers(contents, missing):
        raise BuildError(
            f"{target.name} is not built, and neither the cache nor the tables know its GPU code",
            hint=f"imagefactory build {target.name}; "
            f"what is documented of it says `imagefactory compat {target.name}`",
        )
    known = [f"{len(cached)} from the cache"] if cached else []
    known += [f"{len(tabled)} from the tables of scanned wheels"] if tabled else []
    known += [f"{len(missing)} large ones not looked into"] if missing else []
    how = f"its lock, for it is not built: of {len(lock.packages)} packages {', '.join(known)}"
    return Inspected(contents=contents, how=how)


def _known_packages(
    factory: Factory, lock: Lock, progress: Progress
) -> tuple[list[Contents], list[Contents], list[LockedPackage]]:
    """What is known of a lock's packages: those scanned in the cache, those in the tables, the others."""
    from imagefactory.factory import package_index
    from imagefactory.gpu.knowledge import scanned
    from imagefactory.lock.download import PackageCache

    cache = PackageCache(factory.settings.cache_path, package_index(factory))
    absent = set(cache.missing(lock.packages))
    here = [package for package in lock.packages if package not in absent]
    cached, tabled, missing = [], [], []
    if here:
        with progress.task("scan packages of the cache", total=sum(one.size for one in here)) as task:
            for package in here:
                cached.append(_scan_cached(cache.path(package), factory.settings.worker_count))
                task.advance(package.size)
    for package in lock.packages:
        known = scanned(package.sha256) if package in absent else None
        if known is not None:
            tabled.append(known)
        elif package in absent and package.size >= LARGE:
            missing.append(package)
    return cached, tabled, missing


def _scan_cached(path: Path, workers: int) -> Contents:
    """A package of the cache. What it tells is kept beside it, and goes with it."""
    from imagefactory.scan.files import find_in
    from imagefactory.scan.findings import format_contents
    from imagefactory.scan.records import LayerScan, format_scan, parse_scan

    kept, known = path.with_name("scan.json"), None
    with contextlib.suppress(OSError, ValueError):
        known = parse_scan(json.loads(kept.read_bytes()))
    if known is None:
        known = LayerScan(found=find_in(path, Quiet(), workers=workers))
        beside = kept.with_name(f".scan.{os.getpid()}")
        with contextlib.suppress(OSError):  # only a memory: the cache may be one that others fill
            beside.write_text(json.dumps(format_scan(known)), encoding="utf-8")
            beside.replace(kept)
    return format_contents(path.name, known.found)


def join_contents(source: str, lock: Lock, parts: Iterable[Contents]) -> Contents:
    """What packages hold together. The lock says which packages there are. Pure."""
    every = tuple(parts)
    libraries = {one.path: one for part in every for one in part.libraries}
    packages = {
        Package(name=one.name, version=one.version, build=one.build if isinstance(one, LockedConda) else "")
        for one in lock.packages
    }
    return Contents(
        source=source,
        libraries=tuple(libraries[path] for path in sorted(libraries)),
        packages=tuple(sorted(packages, key=lambda one: (one.name, one.version))),
        facts=tuple(sorted({fact for part in every for fact in part.facts})),
        toolkit=tuple(sorted({name for part in every for name in part.toolkit})),
    )


def _answers(contents: Contents, missing: list[LockedPackage]) -> bool:
    """Whether what is known decides: the framework's own code is there, or nothing large is unknown."""
    from imagefactory.gpu.frameworks import Role, find_framework, role_of

    framework = find_framework(contents)
    gates = any(role_of(one.path, framework)[0] is Role.GATES for one in contents.libraries)
    return gates or not missing
