"""From what a person names to what is in it: a path, a target, an image of the store or of a registry.

scan.py reads the bytes; here is what the name means, and which word says where the answer comes from.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from imagefactory.access import Access, open_registry, package_index
from imagefactory.actions.images import stored_image, stored_sif
from imagefactory.actions.locked import read_target_lock
from imagefactory.actions.verdicts import VerdictReader
from imagefactory.errors import (
    BuildError,
    NothingSelectedError,
    RegistryError,
    StoreError,
    UsageError,
    os_problem,
)
from imagefactory.fs import add_checksum, check_checksum, replacing
from imagefactory.gpu.frameworks import LibraryRole, find_framework, role_of
from imagefactory.gpu.knowledge import scanned
from imagefactory.gpu.values import InstalledPackage, ScanResult
from imagefactory.lock.download import PackageCache
from imagefactory.model import Lock, LockedCondaPackage, LockedPackage, Target
from imagefactory.oci.graph import (
    Manifest,
    StoreRepository,
    choose_platform,
    parse_parts,
    read_config,
    read_manifest,
)
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import (
    INDEX_TYPES,
    Descriptor,
    Image,
    ImageConfig,
    OciLayer,
    SifArtifact,
    images_of,
)
from imagefactory.oci.sif import is_sif, is_sif_manifest, load_sif, sifs_of
from imagefactory.oci.store import DIGEST, ImageReference, parse_reference, resolve_mirror
from imagefactory.progress import Progress, QuietProgress
from imagefactory.project import Project
from imagefactory.recipes.expand import select_single
from imagefactory.scan.files import find_in, scan_directory, scan_path
from imagefactory.scan.findings import format_contents
from imagefactory.scan.layers import (
    LayerScan,
    ScanCache,
    format_scan,
    layout_scan_cache,
    parse_scan,
    scan_image,
    unpacked_sif,
)
from imagefactory.trust.verdict import VerificationResult

# --- The GPU code in a file, an image of the store or one of a registry: which bytes are scanned


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult:
    """What was looked at. `how` says in a line where its contents come from; `digest` is an image's.

    `platform` is the architecture that it is made for (`amd64`), empty where it does not say.
    """

    contents: ScanResult
    how: str
    digest: str = ""
    platform: str = ""


def inspect_artifact(access: Access, artifact: Image | SifArtifact, progress: Progress) -> InspectResult:
    """What an image or a .sif of the store holds."""
    if isinstance(artifact, SifArtifact):
        return inspect_stored_sif(access, artifact, progress)
    return scan_stored(access, artifact, progress)


def inspect_path(access: Access, path: Path, progress: Progress) -> InspectResult:
    workers = access.settings.worker_count
    if path.is_file():
        try:
            sif = is_sif(path)
        except OSError as error:
            raise UsageError(
                *os_problem("read", path, error), hint="pass a file that you can read"
            ) from error
        if sif:
            return _inspect_sif(access, path, progress)
    kind = "folder" if path.is_dir() else "wheel" if path.suffix == ".whl" else "file"
    contents = scan_path(path, progress, workers=workers)
    return InspectResult(contents=contents, how=f"scan of the {kind}", platform=wheel_platform(path.name))


def wheel_platform(name: str) -> str:
    """`amd64` for `numba-0.60-cp311-cp311-manylinux_2_17_x86_64.whl`; empty for what is no such wheel."""
    match = re.search(r"_(x86_64|aarch64)\.whl$", name)
    return {"x86_64": "amd64", "aarch64": "arm64"}[match[1]] if match else ""


def _inspect_sif(access: Access, path: Path, progress: Progress) -> InspectResult:
    """By the image it was made from, where the store has that; else unpacked."""
    image = _origin(access.layout, path)
    if image is not None:
        result = scan_stored(access, image, progress)
        contents = replace(result.contents, source=path.name)
        return replace(result, contents=contents, how=f"scan of {image.name}, from which it was made")
    layout = access.layout
    with layout.in_use(progress), unpacked_sif(path, layout.tmp, progress) as root:
        contents = scan_directory(root, progress, workers=access.settings.worker_count)
    return InspectResult(contents=replace(contents, source=path.name), how="scan of the unpacked .sif")


def _origin(layout: Layout, path: Path) -> Image | None:
    """The image of the store that the .sif at `path` was made from, told by the file's sha256."""
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


def inspect_stored_sif(access: Access, sif: SifArtifact, progress: Progress) -> InspectResult:
    result = _inspect_sif(access, sif.path, progress)
    return replace(result, contents=replace(result.contents, source=sif.name), digest=sif.digest)


def scan_stored(access: Access, image: Image, progress: Progress) -> InspectResult:
    layout = access.layout
    with layout.in_use(progress):
        shelf = layout_scan_cache(layout, access.settings.worker_count)
        contents = scan_image(image.name, image.layers, shelf, progress)
    return InspectResult(
        contents=contents,
        how=f"scan of the image in {layout.path}",
        digest=image.digest,
        platform=image.architecture,
    )


def inspect_registry(access: Access, reference: ImageReference, progress: Progress) -> InspectResult:
    """An image of a registry: of its layers those not known are read through, none is kept."""
    mirror, place = find_place(access, str(reference))
    image = image_at(place, mirror.tag_or_digest)
    with access.layout.in_use(progress):
        shelf = ScanCache(
            layout=access.layout,
            read=lambda layer: place.store.read(place.repository, layer.descriptor),
            workers=access.settings.worker_count,
        )
        contents = scan_image(str(reference), image.layers, shelf, progress)
    return InspectResult(
        contents=contents,
        how=f"scan of the image in {place}",
        digest=image.digest,
        platform=image.config.architecture,
    )


def find_place(access: Access, name: str) -> tuple[ImageReference, StoreRepository]:
    """What a full reference asks for, and where: a mirror, if the site has one."""
    mirror = resolve_mirror(parse_reference(name), access.settings.mirror_map)
    return mirror, StoreRepository(store=open_registry(access, mirror.registry), repository=mirror.repository)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLocation:
    """An image where it lies: the digest of its root and of its own manifest, its config and layers."""

    digest: str
    manifest: str
    config: ImageConfig
    layers: tuple[OciLayer, ...]


def image_at(place: StoreRepository, reference: str) -> ImageLocation:
    """The image that a tag or digest names, of several the one for linux/amd64.

    Raises RegistryError for what is none.
    """
    root = read_manifest(place, reference)
    root = read_manifest(place, choose_platform(root, "").digest)
    manifest = _image_manifest(place, root)
    config, layers = _layers(place, manifest)
    return ImageLocation(
        digest=root.descriptor.digest, manifest=manifest.descriptor.digest, config=config, layers=layers
    )


def _image_manifest(place: StoreRepository, root: Manifest) -> Manifest:
    """The image's own manifest, also where its index is the root."""
    if root.descriptor.media_type not in INDEX_TYPES:
        return root
    parse_parts(root)  # well-formed from here on
    entries = json.loads(root.data)["manifests"]
    (digest, *_) = (str(entry["digest"]) for entry in images_of(entries))
    return read_manifest(place, digest)


def _layers(place: StoreRepository, manifest: Manifest) -> tuple[ImageConfig, tuple[OciLayer, ...]]:
    config = read_config(place, manifest)
    if config is None:
        raise RegistryError(
            "artifact-not-image",
            f"{place} {manifest.descriptor.digest} is an artifact, not an image",
            hint="if it is a .sif, run imagefactory pull --format sif and inspect the file",
        )
    return config, tuple(
        OciLayer(descriptor=blob, diff_id=diff_id, title="")
        for blob, diff_id in zip(parse_parts(manifest)[1][1:], config.diff_ids, strict=True)
    )


LARGE = 1 << 20  # bytes; the GPU code of a framework is in no package smaller than that


def inspect_place(
    access: Access, recipes: Callable[[], Project], name: str, progress: Progress
) -> InspectResult:
    """What `name` holds: a path that exists, a reference with its registry, a digest or tag, a target.

    `recipes` gives the factory, where a name may be a target's. Raises UsageError for a name that is
    nothing of these, BuildError for a target of which nothing is at hand, and what reading raises.
    """
    path = Path(name)
    if not name:
        raise UsageError(
            "argument-missing", "the name is empty", hint="name a file, a directory, an image or a target"
        )
    if path.exists():
        return inspect_path(access, path, progress)
    if name.startswith((".", "/", "~")) or path.suffix in (".whl", ".sif", ".so", ".conda"):
        raise UsageError(
            "path-not-found",
            f"{name} does not exist",
            hint="name an existing file or directory, an image or a target",
        )
    if "/" in name:
        return inspect_registry(access, parse_reference(name), progress)
    if DIGEST.fullmatch(name):
        return _inspect_digest(access, name, progress)
    tags = access.layout.tags()
    if name in tags:
        return _inspect_stored(access, name, tags[name], progress)
    if ":" in name:
        near = _near(name, tags)
        hint = f"did you mean {near}?" if near else "imagefactory store list"
        raise NothingSelectedError("image-not-found", f"no image '{name}' in {access.layout.path}", hint=hint)
    return _inspect_target(recipes(), name, progress)


def inspected_verdicts(
    access: Access, name: str, digest: str, now: datetime
) -> tuple[VerificationResult, ...]:
    """The judged verdicts on what `inspect_place` found under `name`, from the store or registry it is in.

    A file's are none: those of the image that it was made from are not about the file.
    """
    judge = VerdictReader(access, now)
    if not digest or Path(name).exists():
        return ()
    if "/" not in name:
        return judge.there(StoreRepository(store=LayoutStore(access.layout), repository=""), digest)
    return judge.there(find_place(access, name)[1], digest)


def _near(name: str, known: Iterable[str]) -> str:
    return "".join(difflib.get_close_matches(name, known, n=1))


def _inspect_digest(access: Access, digest: str, progress: Progress) -> InspectResult:
    manifest = access.layout.manifest(digest)
    if manifest is None:
        raise NothingSelectedError(
            "image-not-found", f"no image {digest} in {access.layout.path}", hint="imagefactory store list"
        )
    return _inspect_stored(access, digest, manifest[0], progress)


def _inspect_stored(access: Access, name: str, descriptor: Descriptor, progress: Progress) -> InspectResult:
    """An image of the store, or a .sif that is kept there."""
    layout = access.layout
    if is_sif_manifest(json.loads(layout.read(descriptor))):
        return inspect_stored_sif(access, load_sif(layout, descriptor.digest), progress)
    return scan_stored(access, layout.load(name, descriptor), progress)


def _inspect_target(factory: Project, name: str, progress: Progress) -> InspectResult:
    """The target's image; else the .sif apptainer built; else what is known of its lock's packages."""
    target = select_single(factory.targets, name)
    image = stored_image(factory, target)
    if image is not None:
        return scan_stored(factory, image, progress)
    sif = stored_sif(factory, target)
    if sif is not None:
        return inspect_stored_sif(factory, sif, progress)
    return _inspect_lock(factory, target, progress)


def _inspect_lock(factory: Project, target: Target, progress: Progress) -> InspectResult:
    lock = read_target_lock(factory, target)
    if lock is None:
        raise BuildError(
            "gpu-code-unknown",
            f"{target.name} is neither built nor locked, so its GPU code is not known",
            hint=f"imagefactory lock {target.name} && imagefactory build {target.name}",
        )
    cached, tabled, missing = _scanned_packages(factory, lock, progress)
    contents = join_contents(target.name, lock, (*cached, *tabled))
    if not _answers(contents, missing):
        raise BuildError(
            "gpu-code-unknown",
            f"{target.name} is not built, and neither the cache nor the tables have its GPU code",
            hint=f"imagefactory build {target.name}, "
            f"or see what is documented: imagefactory compat {target.name}",
        )
    known = [f"{len(cached)} from the cache"] if cached else []
    known += [f"{len(tabled)} from the tables of scanned wheels"] if tabled else []
    known += [f"{len(missing)} large ones not looked into"] if missing else []
    how = f"its lock, for it is not built: of {len(lock.packages)} packages {', '.join(known)}"
    return InspectResult(contents=contents, how=how, platform=target.platform.partition("/")[2])


def _scanned_packages(
    access: Access, lock: Lock, progress: Progress
) -> tuple[list[ScanResult], list[ScanResult], list[LockedPackage]]:
    """What is known of a lock's packages: those scanned in the cache, those in the tables, the others."""
    cache = PackageCache(access.settings.cache_path, package_index(access))
    absent = set(cache.missing(lock.packages))
    here = [package for package in lock.packages if package not in absent]
    cached, tabled, missing = [], [], []
    if here:
        with progress.task("scan packages of the cache", total=sum(package.size for package in here)) as task:
            for package in here:
                cached.append(_scan_cached(cache.path(package), access.settings.worker_count))
                task.advance(package.size)
    for package in lock.packages:
        known = scanned(package.sha256) if package in absent else None
        if known is not None:
            tabled.append(known)
        elif package in absent and package.size >= LARGE:
            missing.append(package)
    return cached, tabled, missing


def _scan_cached(path: Path, workers: int) -> ScanResult:
    """A package of the cache. What it tells is kept beside it, and goes with it."""
    record, known = path.with_name("scan.json"), None
    with contextlib.suppress(ValueError):
        known = parse_scan(json.loads(check_checksum(record) or b"{}"))
    if known is None:
        known = LayerScan(found=find_in(path, QuietProgress(), workers=workers))
        # Only a memory: the cache may be one that others fill.
        with contextlib.suppress(OSError), replacing(record) as file:
            file.write(add_checksum(record, json.dumps(format_scan(known)).encode()))
    return format_contents(path.name, known.found)


def join_contents(source: str, lock: Lock, parts: Iterable[ScanResult]) -> ScanResult:
    """What packages hold together. The lock says which packages there are. Pure."""
    every = tuple(parts)
    libraries = {library.path: library for part in every for library in part.libraries}
    packages = {
        InstalledPackage(
            name=own.name, version=own.version, build=own.build if isinstance(own, LockedCondaPackage) else ""
        )
        for own in lock.packages
    }
    return ScanResult(
        source=source,
        libraries=tuple(libraries[path] for path in sorted(libraries)),
        packages=tuple(sorted(packages, key=lambda package: (package.name, package.version))),
        facts=tuple(sorted({fact for part in every for fact in part.facts})),
        toolkit=tuple(sorted({name for part in every for name in part.toolkit})),
    )


def _answers(contents: ScanResult, missing: list[LockedPackage]) -> bool:
    """Whether what is known decides: the framework's own code is there, or nothing large is unknown."""
    framework = find_framework(contents)
    gates = any(role_of(library.path, framework)[0] is LibraryRole.GATES for library in contents.libraries)
    return gates or not missing
