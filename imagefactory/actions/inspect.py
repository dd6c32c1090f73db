"""Find the GPU code in a path, a target, or an image of the store or of a registry."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from imagefactory.access import Access, open_registry, package_index
from imagefactory.actions.images import find_stored, stored_image, stored_sif
from imagefactory.actions.locked import read_target_lock
from imagefactory.actions.verdicts import VerdictReader, local_place
from imagefactory.errors import (
    BuildError,
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
    StoreRepository,
    choose_platform,
    parse_parts,
    read_config,
    read_manifest,
)
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    INDEX_TYPES,
    Image,
    ImageConfig,
    OciLayer,
    SifArtifact,
    images_of,
)
from imagefactory.oci.sif import is_sif, sifs_of
from imagefactory.oci.store import ImageReference, parse_reference, resolve_mirror
from imagefactory.progress import Progress, QuietProgress
from imagefactory.project import Project
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

LARGE = 1 << 20  # bytes; smaller packages have no GPU code of a framework


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult:
    """The contents, and in one line `how` they were found. `digest` is the digest of an image.

    `platform` is the architecture (`amd64`), empty if unknown.
    """

    contents: ScanResult
    how: str
    digest: str = ""
    platform: str = ""


def inspect_place(
    access: Access, recipes: Callable[[], Project], name: str, progress: Progress
) -> InspectResult:
    """Return the contents of a path, a full reference, a digest or tag of the store, or a target.

    `recipes` loads the project if the name may be a target. Raises UsageError for any other name, BuildError
    for a target that is neither built nor known, and errors of reading.
    """
    path = Path(name)
    if not name:
        raise UsageError(
            "argument-missing", "the name is empty", hint="pass a file, a directory, an image or a target"
        )
    if path.exists():
        return _inspect_path(access, path, progress)
    if name.startswith((".", "/", "~")) or path.suffix in (".whl", ".sif", ".so", ".conda"):
        raise UsageError(
            "path-not-found",
            f"{name} does not exist",
            hint="pass an existing file or directory, an image or a target",
        )
    if "/" in name:
        return _inspect_registry(access, parse_reference(name), progress)
    artifact = find_stored(access, name)
    if artifact is None:
        project = recipes()
        target = project.select_single(name)
        artifact = stored_image(project, target) or stored_sif(project, target)
        if artifact is None:
            return _inspect_lock(project, target, progress)
        access = project
    return inspect_artifact(access, artifact, progress)


def inspected_verdicts(
    access: Access, name: str, digest: str, now: datetime
) -> tuple[VerificationResult, ...]:
    """Return the verdicts on the result of `inspect_place`, from its store or registry.

    A file has none: verdicts on the image that it was converted from do not apply to the file.
    """
    if not digest or Path(name).exists():
        return ()
    repo = find_place(access, name)[1] if "/" in name else local_place(access, "")
    return VerdictReader(access, now).there(repo, digest)


def inspect_artifact(access: Access, artifact: Image | SifArtifact, progress: Progress) -> InspectResult:
    """Return the contents of an image or .sif of the store."""
    if isinstance(artifact, Image):
        return _scan_stored(access, artifact, progress)
    result = _inspect_sif(access, artifact.path, progress)
    return replace(result, contents=replace(result.contents, source=artifact.name), digest=artifact.digest)


def _inspect_path(access: Access, path: Path, progress: Progress) -> InspectResult:
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
    contents = scan_path(path, progress, workers=access.settings.worker_count)
    return InspectResult(contents=contents, how=f"scan of the {kind}", platform=wheel_platform(path.name))


def wheel_platform(name: str) -> str:
    """Return `amd64` for `numba-0.60-cp311-cp311-manylinux_2_17_x86_64.whl`; empty for other files."""
    match = re.search(r"_(x86_64|aarch64)\.whl$", name)
    return {"x86_64": "amd64", "aarch64": "arm64"}[match[1]] if match else ""


def _inspect_sif(access: Access, path: Path, progress: Progress) -> InspectResult:
    """Return the contents of a .sif: of its source image if stored, else of the unpacked .sif."""
    image = _origin(access.layout, path)
    if image is not None:
        result = _scan_stored(access, image, progress)
        contents = replace(result.contents, source=path.name)
        return replace(result, contents=contents, how=f"scan of {image.name}, from which it was made")
    layout = access.layout
    with layout.in_use(progress), unpacked_sif(path, layout.tmp, progress) as root:
        contents = scan_directory(root, progress, workers=access.settings.worker_count)
    return InspectResult(contents=replace(contents, source=path.name), how="scan of the unpacked .sif")


def _origin(layout: Layout, path: Path) -> Image | None:
    """Return the stored image that a .sif was converted from, by the sha256 of the file."""
    size, digest = path.stat().st_size, ""
    for name, descriptor in layout.tags().items():
        with contextlib.suppress(StoreError):
            image = layout.load(name, descriptor)
            for sif in sifs_of(layout, image.manifest):
                if sif.file.size == size:
                    if not digest:
                        with path.open("rb") as file:
                            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
                    if sif.file.digest == digest:
                        return image
    return None


def _scan_stored(access: Access, image: Image, progress: Progress) -> InspectResult:
    layout = access.layout
    with layout.in_use(progress):
        cache = layout_scan_cache(layout, access.settings.worker_count)
        contents = scan_image(image.name, image.layers, cache, progress)
    how = f"scan of the image in {layout.path}"
    return InspectResult(contents=contents, how=how, digest=image.digest, platform=image.architecture)


def _inspect_registry(access: Access, reference: ImageReference, progress: Progress) -> InspectResult:
    """Return the contents of an image in a registry. Layers without a cached scan are read but not stored."""
    mirror, repo = find_place(access, str(reference))
    image = image_at(repo, mirror.tag_or_digest)
    with access.layout.in_use(progress):
        cache = ScanCache(
            layout=access.layout,
            read=lambda layer: repo.store.read(repo.repository, layer.descriptor),
            workers=access.settings.worker_count,
        )
        contents = scan_image(str(reference), image.layers, cache, progress)
    how, platform = f"scan of the image in {repo}", image.config.architecture
    return InspectResult(contents=contents, how=how, digest=image.digest, platform=platform)


def find_place(access: Access, name: str) -> tuple[ImageReference, StoreRepository]:
    """Return a full reference and its repository, on a mirror if the site has one."""
    mirror = resolve_mirror(parse_reference(name), access.settings.mirror_map)
    return mirror, StoreRepository(store=open_registry(access, mirror.registry), repository=mirror.repository)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLocation:
    """An image in a repository: the digest of its root and of its own manifest, its config and layers."""

    digest: str
    manifest: str
    config: ImageConfig
    layers: tuple[OciLayer, ...]


def image_at(repo: StoreRepository, reference: str) -> ImageLocation:
    """Return the image of a tag or digest. An index gives its image for linux/amd64.

    Raises RegistryError if there is no image.
    """
    root = read_manifest(repo, choose_platform(read_manifest(repo, reference), "").digest)
    manifest = root
    if root.descriptor.media_type in INDEX_TYPES:
        parse_parts(root)  # raises if it is malformed
        (entry, *_) = images_of(json.loads(root.data)["manifests"])
        manifest = read_manifest(repo, str(entry["digest"]))
    config = read_config(repo, manifest)
    if config is None:
        raise RegistryError(
            "artifact-not-image",
            f"{repo} {manifest.descriptor.digest} is an artifact, not an image",
            hint="if it is a .sif, run imagefactory pull --format sif, then imagefactory compat FILE",
        )
    layers = tuple(
        OciLayer(descriptor=blob, diff_id=diff_id, title="")
        for blob, diff_id in zip(parse_parts(manifest)[1][1:], config.diff_ids, strict=True)
    )
    return ImageLocation(
        digest=root.descriptor.digest, manifest=manifest.descriptor.digest, config=config, layers=layers
    )


def _inspect_lock(project: Project, target: Target, progress: Progress) -> InspectResult:
    """Return the known contents of the locked packages of a target that is not built."""
    lock = read_target_lock(project, target)
    if lock is None:
        raise BuildError(
            "gpu-code-unknown",
            f"{target.name} is neither built nor locked, so its GPU code is unknown",
            hint=f"run imagefactory lock {target.name} && imagefactory build {target.name}",
        )
    cached, tabled, missing = _scanned_packages(project, lock, progress)
    contents = _join_contents(target.name, lock, (*cached, *tabled))
    if not _answers(contents, missing):
        raise BuildError(
            "gpu-code-unknown",
            f"{target.name} is not built, and its GPU code is in neither the cache nor the tables",
            hint=f"build it: imagefactory build {target.name}",
        )
    parts = [f"{len(cached)} from the cache"] if cached else []
    parts += [f"{len(tabled)} from the tables of scanned wheels"] if tabled else []
    parts += [f"{len(missing)} large ones not looked into"] if missing else []
    how = f"its lock, for it is not built: of {len(lock.packages)} packages {', '.join(parts)}"
    return InspectResult(contents=contents, how=how, platform=target.platform.partition("/")[2])


def _answers(contents: ScanResult, missing: list[LockedPackage]) -> bool:
    """Return whether the contents suffice: the framework's own code or all large packages are known."""
    framework = find_framework(contents)
    gates = any(role_of(row.path, framework)[0] is LibraryRole.GATES for row in contents.libraries)
    return gates or not missing


def _scanned_packages(
    access: Access, lock: Lock, progress: Progress
) -> tuple[list[ScanResult], list[ScanResult], list[LockedPackage]]:
    """Return the scans of cached packages, the packages in the tables, and the other large packages."""
    cache = PackageCache(access.settings.cache_path, package_index(access))
    absent = set(cache.missing(lock.packages))
    present = [package for package in lock.packages if package not in absent]
    cached, tabled, missing = [], [], []
    if present:
        total = sum(package.size for package in present)
        with progress.task("scan packages of the cache", total=total) as task:
            for package in present:
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
    """Return the scan of a cached package. The scan is stored next to the package."""
    record, known = path.with_name("scan.json"), None
    with contextlib.suppress(ValueError):
        known = parse_scan(json.loads(check_checksum(record) or b"{}"))
    if known is None:
        known = LayerScan(findings=find_in(path, QuietProgress(), workers=workers))
        # Not essential: another user may own the cache.
        with contextlib.suppress(OSError), replacing(record) as file:
            file.write(add_checksum(record, json.dumps(format_scan(known)).encode()))
    return format_contents(path.name, known.findings)


def _join_contents(source: str, lock: Lock, parts: Sequence[ScanResult]) -> ScanResult:
    """Return the joined contents of all packages of the lock."""
    libraries = {library.path: library for part in parts for library in part.libraries}
    packages = {
        InstalledPackage(
            name=row.name, version=row.version, build=row.build if isinstance(row, LockedCondaPackage) else ""
        )
        for row in lock.packages
    }
    return ScanResult(
        source=source,
        libraries=tuple(libraries[path] for path in sorted(libraries)),
        packages=tuple(sorted(packages, key=lambda package: (package.name, package.version))),
        facts=tuple(sorted({fact for part in parts for fact in part.facts})),
        toolkit=tuple(sorted({name for part in parts for name in part.toolkit})),
    )
