"""Find the GPU code in a path, a target, a package of the index, or an image of a store or registry."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from imagefactory.access import Access, open_registry, package_index, uv_locker
from imagefactory.actions.images import find_stored, stored_image, stored_sif
from imagefactory.actions.locked import read_target_lock
from imagefactory.actions.verdicts import VerdictReader, local_place
from imagefactory.errors import (
    BuildError,
    DownloadError,
    LockError,
    NothingSelectedError,
    RegistryError,
    StatementError,
    StoreError,
    UnknownAnswerError,
    UnreachableError,
    UsageError,
    os_problem,
    redact,
)
from imagefactory.fs import add_checksum, check_checksum, replacing
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.drivers import older
from imagefactory.gpu.frameworks import (
    LibraryRole,
    cpu_only,
    cuda_of,
    find_framework,
    frameworks,
    gates_of,
    ptx_compiler,
    role_of,
)
from imagefactory.gpu.knowledge import families, scanned, scanned_release
from imagefactory.gpu.knowledge.packages import source_build
from imagefactory.gpu.knowledge.tables import covers
from imagefactory.gpu.predict import optional, predict, predict_all, predict_run_time_code
from imagefactory.gpu.values import Compatibility, InstalledPackage, Prediction, ScanResult, platform_of
from imagefactory.http import HttpError, HttpSession, local_path
from imagefactory.lock.download import PackageCache
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.lock.pypi.question import WheelRequest
from imagefactory.lock.pypi.requirements import fitting_set
from imagefactory.lock.pypi.series import wheel_tags
from imagefactory.matrix.compat import CompatGpu, cell, exact_releases, serves
from imagefactory.model import Lock, LockedCondaPackage, LockedPackage, LockedWheel, ReleaseCutoff, Target
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
from imagefactory.progress import Progress, QuietProgress, format_bytes, format_seconds
from imagefactory.project import Project
from imagefactory.scan.files import (
    NoRangesError,
    RemoteWheel,
    compilers,
    find_in,
    open_remote_wheel,
    scan_directory,
    scan_path,
    scan_run,
)
from imagefactory.scan.findings import FileFinding, format_contents, stopping_pool
from imagefactory.scan.layers import (
    LayerScan,
    ScanCache,
    format_scan,
    layout_scan_cache,
    parse_scan,
    scan_image,
    unpacked_sif,
)
from imagefactory.serialize import format_value, parse_value
from imagefactory.trust.verdict import VerificationResult
from imagefactory.versions import natural

if TYPE_CHECKING:
    from imagefactory.lock.pypi.index import IndexFile, PackageIndex
    from imagefactory.lock.pypi.uv import UvLocker

LARGE = 1 << 20  # bytes; smaller packages have no GPU code of a framework
_SMALL = 1 << 15  # bytes; smaller wheels for one platform have no GPU code


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult:
    """The contents, and in one line `how` they were found. `digest` is the digest of an image.

    `platform` is the architecture (`amd64`), empty if unknown. `package` is the name and version of a package
    of the index. Its `contents` are those of its whole solution, its `parts` those of each wheel with
    relevant GPU code. `compilers` are names of files and packages that make GPU code at run time.
    `own_compilers` are those in the wheel of the package. `replaceable` are frameworks (`torch`) of which the
    package also accepts older releases. `oldest` and
    `newest` are the first and the last release of the package on the index.
    """

    contents: ScanResult
    how: str
    digest: str = ""
    platform: str = ""
    package: str = ""
    parts: tuple[ScanResult, ...] = ()
    compilers: tuple[str, ...] = ()
    own_compilers: tuple[str, ...] = ()
    replaceable: tuple[str, ...] = ()
    oldest: str = ""
    newest: str = ""


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
        contents = scan_image(image.name, image.layers, cache, progress, environment=image.environment)
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
        variables = image.config.environment
        contents = scan_image(str(reference), image.layers, cache, progress, environment=variables)
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
    packages = {
        InstalledPackage(
            name=row.name, version=row.version, build=row.build if isinstance(row, LockedCondaPackage) else ""
        )
        for row in lock.packages
    }
    return _join_scans(source, packages, parts)


def _join_scans(source: str, packages: Iterable[InstalledPackage], parts: Sequence[ScanResult]) -> ScanResult:
    libraries = {library.path: library for part in parts for library in part.libraries}
    return ScanResult(
        source=source,
        libraries=tuple(libraries[path] for path in sorted(libraries)),
        packages=tuple(sorted(packages, key=lambda package: (package.name, package.version))),
        facts=tuple(sorted({fact for part in parts for fact in part.facts})),
        toolkit=tuple(sorted({name for part in parts for name in part.toolkit})),
    )


# --- A package of the index: uv solves it, and its wheels are scanned as they stream


_SOLVED_DAYS = 7  # then it is solved again, since packages that it does not pin have new releases
_FAILED_MINUTES = 60  # then the index is queried again for what it did not have
_PYTHONS = tuple(f"3.{minor}" for minor in range(14, 5, -1))
_TRIES = 4  # Pythons to solve for, the newest first
_ROUNDS = 5  # solutions, each without further packages that have no wheel
_THREADS = 4
_RELEASES_SHOWN = 12
_COMPILER_PACKAGES = re.compile(
    r"triton|numba-cuda|cuda-(?:bindings|core|python)|nvidia-(?:cuda-)?(?:nvrtc|nvcc|nvvm)(?:-cu[0-9]+)?"
)
_OF_ITS_TIME = 60  # days: a framework's next release comes later
_RUNTIME_PACKAGES = re.compile(r"(?:nvidia|cuda)-.*")
_WITHDRAWN = re.compile(
    r"there (?:is|are) no versions? of ([A-Za-z0-9._-]+)"
    r"|([A-Za-z0-9._-]+)(?:\{[^}]*\})?==\S+\s+has\s+no\s+usable\s+wheels"
)
_OTHER_EXTRAS = re.compile(
    r"(?:.*[-_])?(?:cpu|rocm|hip|xpu|hpu|npu|tpu|musa|mps|dev|test|tests|testing|docs?)(?:[-_].*)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSolution:
    """The wheels that uv pins for a package on `python`, its own first. `absent` have no wheel.

    `replaceable` are frameworks of which the package also accepts older releases. `extra` is its extra that
    requires a framework, if nothing in the solution is one. `oldest` and `newest` are its releases. `until`
    is the day of the newest release that was allowed, empty for any.
    """

    python: str
    solved: datetime
    wheels: tuple[LockedWheel, ...]
    absent: tuple[str, ...]
    replaceable: tuple[str, ...]
    extra: str
    oldest: str
    newest: str
    until: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLookup:
    """The error of a lookup: what the index does not have."""

    failed: datetime
    exit_code: int
    code: str
    message: str
    hint: str


def inspect_package(
    access: Access, text: str, platform: str, progress: Progress, *, cuda: str = "", offline: bool = False
) -> InspectResult:
    """Return the GPU code of a package of the index (`vllm==0.10.0`) and of what it pins on a platform.

    Nothing is installed. Only scans are stored, in the cache. If nothing has GPU code, the extra of the
    package that requires a framework is added. Raises UsageError for an invalid requirement,
    NothingSelectedError for an unknown package or version, and UnknownAnswerError for a package without a
    wheel or for another CUDA version than `cuda`, for an index that does not answer, or if `offline` and not
    cached.
    """
    requirement = parse_package(text)
    inspected, extra = _inspect_requirement(access, requirement, platform, progress, offline=offline)
    if extra and cpu_reason(inspected):
        requirement.extras.add(extra)
        more, _ = _inspect_requirement(access, requirement, platform, progress, offline=offline)
        how = f"{more.how}; with the extra '{extra}', because there is no GPU code without it"
        inspected = replace(more, how=how)
    built = cuda_of(inspected.contents)
    compiler = "" if "." in built else ptx_compiler(inspected.contents)
    if "." in cuda and natural(compiler) > natural(cuda):
        built = compiler
    if inspected.replaceable:
        return inspected  # its framework may be one for that CUDA
    if cuda and (built or cpu_only(inspected.contents)) and not (covers(built, cuda) or covers(cuda, built)):
        other = f"for CUDA {built}" if built else "for CPUs"
        raise UnknownAnswerError(
            "cuda-not-on-index",
            f"the package index has {inspected.package} {other}, not for {platform_of(cuda)}",
            hint="remove --cuda, or scan the wheel of the other build: imagefactory compat FILE.whl",
        )
    return inspected


def _inspect_requirement(
    access: Access, requirement: Requirement, platform: str, progress: Progress, *, offline: bool
) -> tuple[InspectResult, str]:
    """Return the GPU code of a requirement, and the extra to add if there is none."""
    index, text = package_index(access), str(requirement)
    cache = PackageCache(access.settings.cache_path, index)
    key = json.dumps([text, platform, redact(index.url)]).encode()
    record = access.settings.cache_path / "packages" / f"{hashlib.sha256(key).hexdigest()}.json"
    solution, urls = _read_solution(record), dict[LockedWheel, str]()
    scans = _known_scans(access, cache, solution) if solution else {}
    if solution is None or None in scans.values():
        failure = record.with_suffix(".failed.json")
        if solution is None and (known := _read_failure(failure)):
            raise known
        if offline:
            raise _offline_error(text, platform, solution, scans)
        try:
            solution, urls = _solve_package(index, requirement, platform, progress)
        except UnreachableError as error:
            raise UnknownAnswerError(
                "release-unknown",
                f"{text} is in no table, and the package index does not answer: {error.message}",
                hint=error.hint,
            ) from error
        except (NothingSelectedError, UnknownAnswerError) as error:
            failed = FailedLookup(
                failed=datetime.now(UTC),
                exit_code=error.exit_code,
                code=error.code,
                message=error.message,
                hint=error.hint,
            )
            _write_record(failure, format_value(failed))
            raise
        _write_record(record, format_value(solution))
        scans = _known_scans(access, cache, solution)
    missing = {wheel: urls[wheel] for wheel, scan in scans.items() if scan is None}
    if missing:
        scans |= _stream_wheels(access, missing, solution.wheels[0], progress)
    inspected = _join_package(text, platform, solution, [scan for scan in scans.values() if scan])
    return inspected, "" if requirement.extras else solution.extra


def parse_package(text: str) -> Requirement:
    """Return the requirement in `vllm==0.10.0`. Raises UsageError without a name or version."""
    with contextlib.suppress(InvalidRequirement):
        requirement = Requirement(text)
        if requirement.specifier and not requirement.url and not requirement.marker:
            return requirement
    raise UsageError(
        "release-invalid", f"'{text[:60]}' has no version", hint="write, for example, torch==2.6"
    )


def _read_solution(record: Path) -> PackageSolution | None:
    with contextlib.suppress(ValueError, StatementError):
        value = json.loads(check_checksum(record) or b"")
        solution: PackageSolution = parse_value(value, PackageSolution, "solution")
        if solution.wheels and datetime.now(UTC) - solution.solved < timedelta(days=_SOLVED_DAYS):
            return solution
    return None


def _read_failure(record: Path) -> NothingSelectedError | UnknownAnswerError | None:
    """Return the error of an earlier lookup, if it is recent."""
    with contextlib.suppress(ValueError, StatementError):
        value = json.loads(check_checksum(record) or b"")
        known: FailedLookup = parse_value(value, FailedLookup, "failed lookup")
        if datetime.now(UTC) - known.failed < timedelta(minutes=_FAILED_MINUTES):
            selected = known.exit_code == NothingSelectedError.exit_code
            error = NothingSelectedError if selected else UnknownAnswerError
            return error(known.code, known.message, hint=known.hint)
    return None


def _write_record(record: Path, value: object) -> None:
    # Not essential: another user may own the cache.
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        with replacing(record) as file:
            file.write(add_checksum(record, json.dumps(value).encode()))


def _offline_error(
    text: str, platform: str, solution: PackageSolution | None, scans: Mapping[LockedWheel, object]
) -> UnknownAnswerError:
    work = f"would solve {text} for {platform} on the package index, and scan the wheels of the solution"
    if solution:
        wheels = sorted((wheel for wheel, scan in scans.items() if scan is None), key=lambda w: -w.size)
        names = ", ".join(wheel.filename for wheel in wheels[:3]) + (", ..." if len(wheels) > 3 else "")
        work = (
            f"would read at most {format_bytes(sum(w.size for w in wheels))} of {len(wheels)} wheels: {names}"
        )
    return UnknownAnswerError(
        "lookup-offline",
        f"neither a table nor a cached scan knows {text}: without --offline, imagefactory {work}",
        hint="remove --offline",
    )


def _solve_package(
    index: PackageIndex, requirement: Requirement, platform: str, progress: Progress
) -> tuple[PackageSolution, dict[LockedWheel, str]]:
    """Return the solution for the newest Python that works, and the URLs of its wheels."""
    locker, name = uv_locker(index), canonicalize_name(requirement.name)
    with progress.stage(f"solve {requirement} for {platform}"):
        files = locker.project(name, locker.empty_lock(name, _PYTHONS[0], platform))
        if not files:
            locker.reach()
            raise NothingSelectedError(
                "package-not-found", f"the package index has no package '{name}'", hint="check the name"
            )
        version, of_version, listed = _choose_release(requirement, files)
        locks = {python: locker.empty_lock(name, python, platform) for python in _PYTHONS}
        pythons = [python for python, lock in locks.items() if _fits(of_version, lock)]
        if not pythons:
            raise _no_wheel_error(name, version, platform, of_version)
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        requests = [
            WheelRequest(lock=locks[python], requirements=(f"{name}{extras}=={version}",))
            for python in pythons[:_TRIES]
        ]
        request, urls = _first_solution(locker, requests)
        replaceable = _replaceable(locker, request, [wheel for wheel in urls if wheel.name != name])
        until = None
        if replaceable and not any(file.filename.endswith("-any.whl") for file in of_version):
            earlier = _of_its_time(locker, request, of_version)
            if earlier:
                request, urls, until = earlier
                replaceable = ()
        extra = "" if requirement.extras else _gpu_extra(locker, request, list(urls))
    own = [wheel for wheel in urls if wheel.name == name]
    wheels = (*own, *(wheel for wheel in urls if wheel.name != name))
    solution = PackageSolution(
        python=request.lock.python,
        solved=datetime.now(UTC),
        wheels=wheels,
        absent=request.exclude,
        replaceable=replaceable,
        extra=extra,
        oldest=str(min(listed)),
        newest=str(max(listed)),
        until=f"{until:%Y-%m-%d}" if until else "",
    )
    return solution, urls


def _of_its_time(
    locker: UvLocker, request: WheelRequest, files: Sequence[IndexFile]
) -> tuple[WheelRequest, dict[LockedWheel, str], datetime] | None:
    """Return the solution with releases until shortly after a compiled package, and the last day.

    A library that is linked to a framework works with the releases that it was built for, and few packages
    say which. None if the package is new, the index has no times, or there is no such solution. Raises
    UnreachableError.
    """
    uploads = [time for file in files if (time := file.upload_time)]
    until = min(uploads).replace(microsecond=0) + timedelta(days=_OF_ITS_TIME) if uploads else None
    if until is None or until > datetime.now(UTC):
        return None
    dated = replace(request, lock=replace(request.lock, cutoff=ReleaseCutoff(time=until)))
    try:
        return dated, locker.located(dated), until
    except UnreachableError:
        raise
    except LockError:
        return None


def _gpu_extra(locker: UvLocker, request: WheelRequest, wheels: Sequence[LockedWheel]) -> str:
    """Return the extra of a package that requires a framework, empty if it needs none or there is none.

    Extras for NVIDIA GPUs by name come first, then those for PyTorch. Raises UnreachableError.
    """
    names = {name for framework in frameworks() for name in framework.packages}
    if any(wheel.name in names for wheel in wheels):
        return ""
    try:
        metadata, _ = parse_email(locker.metadata(request.requirements[0], request.lock))
    except UnreachableError:
        raise
    except LockError:
        return ""
    extras: dict[str, set[str]] = {}
    for text in metadata.get("requires_dist", ()):
        with contextlib.suppress(InvalidRequirement):
            requirement = Requirement(text)
            match = re.search(r"extra\s*==\s*[\"']([^\"']+)[\"']", str(requirement.marker or ""))
            if match and canonicalize_name(requirement.name) in names:
                extras.setdefault(match[1], set()).add(canonicalize_name(requirement.name))
    usable = [extra for extra in extras if not _OTHER_EXTRAS.fullmatch(extra.lower())]
    return min(
        usable,
        key=lambda extra: (not re.search("cuda|gpu", extra.lower()), "torch" not in extras[extra]),
        default="",
    )


def _replaceable(locker: UvLocker, request: WheelRequest, wheels: Sequence[LockedWheel]) -> tuple[str, ...]:
    """Return the frameworks among the wheels of which an older release is a solution too.

    Raises UnreachableError.
    """
    frameworks = set(families().values())
    names = []
    for wheel in wheels:
        if wheel.name not in frameworks:
            continue
        try:
            locker.solve(replace(request, constraints=(f"{wheel.name}<{wheel.version}",)))
        except UnreachableError:
            raise
        except LockError:
            continue
        names.append(wheel.name)
    return tuple(names)


def _first_solution(
    locker: UvLocker, requests: Sequence[WheelRequest]
) -> tuple[WheelRequest, dict[LockedWheel, str]]:
    """Return the first request that has a solution, else the first one without packages that have no wheel.

    A framework is never left out.

    Raises UnknownAnswerError without a solution, and UnreachableError.
    """
    failures: dict[str, LockError] = {}
    for request in requests:
        try:
            return request, locker.located(request)
        except UnreachableError:
            raise
        except LockError as error:
            failures[request.lock.python] = error
    needed = {requests[0].lock.target, *(name for row in frameworks() for name in row.packages)}
    for request in requests:
        reduced, failure = request, failures[request.lock.python]
        for _ in range(_ROUNDS):
            names = _missing(failure)
            if not names - {*reduced.exclude} or names & needed:
                break
            reduced = replace(reduced, exclude=tuple(sorted({*reduced.exclude, *names})))
            try:
                return reduced, locker.located(reduced)
            except UnreachableError:
                raise
            except LockError as error:
                failure = error
    failure = failures[requests[0].lock.python]
    raise UnknownAnswerError(
        "release-unknown",
        f"{requests[0].requirements[0]} has no solution: {failure.message}",
        hint="try another version",
    ) from failure


def _missing(error: LockError) -> set[str]:
    """Return the packages that the index does not have as required: without a wheel, or withdrawn."""
    names = set(error.names) if isinstance(error, NoWheelError) else set()
    pairs = _WITHDRAWN.findall(getattr(error, "tree", "") or error.message)
    return names | {canonicalize_name(name) for pair in pairs for name in pair if name}


def _choose_release(
    requirement: Requirement, files: Sequence[IndexFile]
) -> tuple[Version, tuple[IndexFile, ...], tuple[Version, ...]]:
    """Return the newest release of a requirement (`==2.6` is also 2.6.1), its files, and all releases.

    Raises NothingSelectedError without one.
    """
    releases: dict[Version, list[IndexFile]] = {}
    for file in files:
        with contextlib.suppress(InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
            parse = parse_wheel_filename if file.filename.endswith(".whl") else parse_sdist_filename
            releases.setdefault(parse(file.filename)[1], []).append(file)
    matching = list(requirement.specifier.filter(releases))
    if not matching and re.fullmatch(r"==[0-9.]+", str(requirement.specifier)):
        matching = list(SpecifierSet(f"{requirement.specifier}.*").filter(releases))
    if not matching:
        newest = sorted(releases, reverse=True)
        listed = ", ".join(map(str, newest[:_RELEASES_SHOWN]))
        more = f" and {len(newest) - _RELEASES_SHOWN} older ones" if len(newest) > _RELEASES_SHOWN else ""
        raise NothingSelectedError(
            "release-not-found",
            f"the package index has no release {requirement}",
            hint=f"its releases are {listed}{more}" if newest else "use another package: it has no releases",
        )
    final = tuple(version for version in releases if not version.is_prerelease) or tuple(releases)
    return max(matching), tuple(releases[max(matching)]), final


def _fits(files: Sequence[IndexFile], lock: Lock) -> bool:
    """Return whether a wheel of `files` installs on the Python and platform of `lock`."""
    fitting = fitting_set(lock.python, lock.platform)
    for file in files:
        allowed = True
        with contextlib.suppress(InvalidSpecifier):
            pythons = SpecifierSet(file.python)
            allowed = any(pythons.contains(f"{lock.python}.{patch}") for patch in (0, 99))
        if allowed and not fitting.isdisjoint(wheel_tags(file.filename)):
            return True
    return False


def _no_wheel_error(
    name: str, version: Version, platform: str, files: Sequence[IndexFile]
) -> UnknownAnswerError:
    tags = {tag.platform for file in files for tag in wheel_tags(file.filename)}
    only = (
        f"no wheel for {platform}, only for {', '.join(sorted(tags)[:4])}"
        if tags
        else "no wheel, only sources"
    )
    row = source_build(name)
    values = sorted({int(value) for _, some in row.architectures for value in some}) if row else []
    least = f", for capability {values[0] // 10}.{values[0] % 10} and newer" if values else ""
    needs = (
        f"; its build needs compilers of {' and '.join(sorted(row.code))}{least}" if row and row.code else ""
    )
    return UnknownAnswerError(
        "package-no-wheel",
        f"{name} {version} has {only}, so its GPU code depends on how it is built{needs}",
        hint=f"build it for your GPU: imagefactory recipe build-wheel {name}=={version} --in TARGET",
    )


def _known_scans(
    access: Access, cache: PackageCache, solution: PackageSolution
) -> dict[LockedWheel, ScanResult | None]:
    """Return the scan of each wheel: from the tables, or from the cache; None if it must be read."""
    own = solution.wheels[0]
    return {wheel: _known_scan(access, cache, wheel, own=wheel == own) for wheel in solution.wheels}


def _known_scan(access: Access, cache: PackageCache, wheel: LockedWheel, *, own: bool) -> ScanResult | None:
    package = InstalledPackage(name=wheel.name, version=wheel.version)
    machine = wheel.filename.removesuffix(".whl").rpartition("-")[2].partition(".")[0]
    architecture = wheel_platform(wheel.filename)
    if row := scanned(wheel.sha256) or (
        scanned_release(wheel.name, wheel.version, architecture) if architecture else None
    ):
        return row
    if not own and wheel.size < (LARGE if machine == "any" else _SMALL):
        return ScanResult(source=wheel.filename, libraries=(), packages=(package,))
    if not cache.missing((wheel,)):
        return _scan_cached(cache.path(wheel), access.settings.worker_count)
    with contextlib.suppress(ValueError):
        if scan := parse_scan(json.loads(check_checksum(_streamed(cache, wheel, own=own)) or b"{}")):
            return _package_contents(wheel, scan.findings)
    return None


def _streamed(cache: PackageCache, wheel: LockedWheel, *, own: bool) -> Path:
    """Return the path of a streamed scan. That of a dependency lacks libraries that only report."""
    return cache.path(wheel).with_name("streamed.json" if own else "streamed-dependency.json")


def _package_contents(wheel: LockedWheel, findings: Sequence[FileFinding]) -> ScanResult:
    package = InstalledPackage(name=wheel.name, version=wheel.version)
    contents = format_contents(wheel.filename, findings)
    return replace(contents, packages=tuple({*contents.packages, package}))


def _stream_wheels(
    access: Access, missing: Mapping[LockedWheel, str], own: LockedWheel, progress: Progress
) -> dict[LockedWheel, ScanResult]:
    """Scan wheels of the index as they arrive, and store the scans. Raises DownloadError."""
    index, began, scans = package_index(access), time.monotonic(), dict[LockedWheel, ScanResult]()
    cache = PackageCache(access.settings.cache_path, index)

    def put(wheel: LockedWheel, findings: tuple[FileFinding, ...]) -> None:
        _write_record(_streamed(cache, wheel, own=wheel == own), format_scan(LayerScan(findings=findings)))
        scans[wheel] = _package_contents(wheel, findings)

    def open_wheel(wheel: LockedWheel) -> RemoteWheel | None:
        try:
            return open_remote_wheel(web, missing[wheel], wheel.filename, wheel.size, every=wheel == own)
        except NoRangesError:
            return None

    remote = [wheel for wheel in missing if local_path(missing[wheel]) is None]
    whole = [wheel for wheel in missing if wheel not in remote]
    total = 0
    try:
        with (
            HttpSession(index) as web,
            progress.task(f"scan {len(missing)} wheels") as task,
            stopping_pool(_THREADS) as pool,
        ):
            opened = dict(zip(remote, pool.map(open_wheel, remote), strict=True))
            whole += [wheel for wheel, ranges in opened.items() if ranges is None]
            total = sum(ranges.size for ranges in opened.values() if ranges)
            total += sum(wheel.size for wheel in whole)
            task.expect(total)
            runs = {
                wheel: (ranges, [pool.submit(scan_run, web, ranges, run, task) for run in ranges.runs])
                for wheel, ranges in opened.items()
                if ranges
            }
            for wheel, (ranges, futures) in runs.items():
                put(wheel, (*ranges.named, *(row for future in futures for row in future.result())))
    except HttpError as error:
        raise DownloadError(
            "download-failed",
            f"cannot scan the wheels of {own.name} {own.version}: {error}",
            hint="run the same command again later: complete scans are in the cache",
        ) from error
    for wheel in whole:
        put(wheel, _scan_whole(access, wheel, missing[wheel], progress))
    size = sum(wheel.size for wheel in missing)
    seconds = format_seconds(time.monotonic() - began)
    progress.note(
        f"scanned {len(missing)} wheels: read {format_bytes(total)} of {format_bytes(size)} in {seconds}"
    )
    return scans


def _scan_whole(access: Access, wheel: LockedWheel, url: str, progress: Progress) -> tuple[FileFinding, ...]:
    """Return the findings of a wheel whose server sends no ranges. The file is deleted after the scan."""
    if path := local_path(url):
        return find_in(path, progress, workers=access.settings.worker_count)
    with tempfile.TemporaryDirectory(prefix="imagefactory-scan-") as directory:
        cache = PackageCache(Path(directory), package_index(access))
        (path,) = cache.fetch((wheel,), lambda _: {wheel.filename: url}, progress).values()
        return find_in(path, progress, workers=access.settings.worker_count)


def _join_package(
    text: str, platform: str, solution: PackageSolution, scans: Sequence[ScanResult]
) -> InspectResult:
    """Return the joined contents, with a part for each wheel with relevant GPU code.

    Libraries that choose their own code are relevant only if there are no others, as in a target.
    """
    contents = _join_scans(
        text, [InstalledPackage(name=w.name, version=w.version) for w in solution.wheels], scans
    )
    runtime = tuple(package for package in contents.packages if _RUNTIME_PACKAGES.fullmatch(package.name))
    parts = []
    for wheel, scan in zip(solution.wheels, scans, strict=True):
        counted = [row for row in scan.libraries if role_of(row.path, None)[0] is not LibraryRole.REPORT]
        if counted or (wheel == solution.wheels[0] and scan.libraries):
            package = InstalledPackage(name=wheel.name, version=wheel.version)
            parts.append(replace(scan, source=f"{wheel.name} {wheel.version}", packages=(package, *runtime)))
    first = solution.wheels[0]
    tools = {*compilers(contents), *(w.name for w in solution.wheels if _COMPILER_PACKAGES.fullmatch(w.name))}
    absent = (
        f"; not judged, because the index has no wheel: {', '.join(solution.absent)}"
        if solution.absent
        else ""
    )
    dated = f" with releases until {solution.until}" if solution.until else ""
    how = (
        f"the package index, solved on {solution.solved:%Y-%m-%d} for Python {solution.python} "
        f"on {platform}{dated}; {len(parts)} of {len(solution.wheels)} wheels have relevant GPU code{absent}"
    )
    return InspectResult(
        contents=contents,
        how=how,
        platform=platform.partition("/")[2],
        package=f"{first.name} {first.version}",
        parts=tuple(parts),
        compilers=tuple(sorted(tools)),
        own_compilers=compilers(scans[0]),
        replaceable=solution.replaceable,
        oldest=solution.oldest,
        newest=solution.newest,
    )


_SEVERITY = (
    Compatibility.NO,
    Compatibility.UNKNOWN,
    Compatibility.PARTLY,
    Compatibility.PTX,
    Compatibility.YES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAnswer:
    """The answer of one package of a solution, and its reason."""

    package: str
    answer: Compatibility
    reason: str


def predict_inspected(
    inspected: InspectResult, capability: Capability, driver: str = "", *, gpu: str = ""
) -> tuple[Prediction, tuple[PartAnswer, ...]]:
    """Return the prediction, and for a package of the index that of each part, the worst first.

    The worst part decides. If the package has GPU code itself, a part without code for the GPU leaves the
    rest usable (PARTLY), and a part that scans cannot judge is a warning, unless it is a framework. A
    framework that runs in part or not at all is only a warning if another build or an older release may;
    without other GPU code, that build or *unknown* is the answer. Known faults of the whole count as in a
    target.
    """
    whole = predict(inspected.contents, capability, driver, gpu=gpu)
    if not inspected.package:
        return whole, ()
    framework = find_framework(inspected.contents)
    if not inspected.parts:
        if framework and inspected.package.partition(" ")[0] in framework.packages:
            return _elsewhere(whole, inspected), ()
        return _without_code(inspected, capability), ()
    own = inspected.parts[0].source == inspected.package
    rows: list[tuple[Prediction, PartAnswer]] = []
    warnings, undecided, replaceable = [], set(), False
    for part in inspected.parts:
        prediction = predict(part, capability, driver, gpu=gpu)
        name = part.source.partition(" ")[0]
        decides = not own or part.source == inspected.package or find_framework(part) is not None
        answer, reason, other = prediction.answer, prediction.reason, None
        if answer is Compatibility.NO:
            if name == "torch":
                other = _other_torch(part.packages[0].version, capability, driver, inspected.platform)
            if other is None and name in inspected.replaceable:
                other = Compatibility.UNKNOWN, f"{inspected.package} also accepts older releases of {name}"
        if other:
            replaceable, decides = True, not own
            reason = f"{reason}; {other[1]}"
            answer = answer if own else other[0]
        elif answer is Compatibility.NO and not decides and not optional(part):
            answer, decides = Compatibility.PARTLY, True
        if answer is Compatibility.PARTLY and name in inspected.replaceable:
            warnings.append(f"{part.source}: {reason}; {inspected.package} also accepts older releases")
            answer, replaceable = Compatibility.YES, True
        if not decides and answer in (Compatibility.NO, Compatibility.UNKNOWN):
            undecided.add(part.source)
            warnings.append(f"{part.source}: {reason}")
        rows.append(
            (
                replace(prediction, answer=answer, reason=reason),
                PartAnswer(package=part.source, answer=answer, reason=reason),
            )
        )
    if framework is not None and not replaceable and gates_of(inspected.contents, framework):
        title = f"all {len(inspected.contents.packages)} packages together"
        rows.append((whole, PartAnswer(package=title, answer=whole.answer, reason=whole.reason)))
    rows.sort(key=lambda row: (row[1].package in undecided, _SEVERITY.index(row[0].answer)))
    worst, first = rows[0]
    answers = tuple(row for _, row in rows if row.package in {part.source for part in inspected.parts})
    if not own and inspected.own_compilers and worst.answer in (Compatibility.YES, Compatibility.PTX):
        makers = ", ".join(inspected.own_compilers[:3])
        reason = f"what {makers} of {inspected.package} compiles at run time is not known"
        return replace(worst, answer=Compatibility.UNKNOWN, reason=reason), answers
    itself = "" if own else f"{inspected.package} has no GPU code itself; "
    if not worst.reason.startswith(first.package):
        itself += f"{first.package}: "
    prediction = replace(
        worst,
        reason=f"{itself}{worst.reason}",
        libraries=whole.libraries,
        warnings=tuple(dict.fromkeys((*warnings, *worst.warnings, *whole.warnings))),
    )
    return prediction, answers


def _elsewhere(prediction: Prediction, inspected: InspectResult) -> Prediction:
    """Return UNKNOWN for a framework of which the package index has only a build for CPUs on arm64.

    NVIDIA and PyTorch have builds for arm64 in indexes of their own.
    """
    if inspected.platform != "arm64" or not cpu_only(inspected.contents):
        return prediction
    reason = f"the package index has {inspected.package} for arm64 only without GPU code; others may have it"
    return replace(prediction, answer=Compatibility.UNKNOWN, reason=reason)


def _other_torch(
    version: str, capability: Capability, driver: str, host: str
) -> tuple[Compatibility, str] | None:
    """Return the answer of a build of torch for another CUDA that runs on a GPU, and what to install."""
    gpu = CompatGpu(name="", capability=capability, driver=driver, host=host)
    for build in exact_releases(f"torch=={version}"):
        answer = cell(build, gpu)
        if build.question.cuda and serves(answer):
            local = f"cu{build.question.cuda.replace('.', '')}"
            return answer.answer, f"install torch=={version}+{local} from PyTorch's index"
    return None


def fix_inspected(inspected: InspectResult, prediction: Prediction, driver: str, *, gpu: str = "") -> str:
    """Return what may work instead of a package of the index that does not run, empty if unknown.

    Another driver, else its last release for a GPU that is newer than its code, an earlier one for an older
    GPU.
    """
    if not inspected.package or prediction.answer not in (Compatibility.NO, Compatibility.PARTLY):
        return ""
    capability = prediction.capability
    if driver and prediction.answer is Compatibility.NO:
        bare, _ = predict_inspected(inspected, capability, gpu=gpu)
        if bare.answer in (Compatibility.YES, Compatibility.PTX, Compatibility.PARTLY):
            return (
                f"driver {bare.driver} or newer"
                if bare.driver and older(driver, bare.driver)
                else "another driver"
            )
    name, version = inspected.package.split(" ")
    modules = [row for part in inspected.parts for library in part.libraries for row in library.modules]
    codes = {code.architecture for row in modules for code in row.codes}
    known = sorted(code for code in codes if code)
    if not known or capability.processor:
        return ""
    if capability >= known[-1] and inspected.newest not in ("", version):
        return f"{name} {inspected.newest}, its newest release"
    if capability < known[0] and inspected.oldest not in ("", version):
        return f"an older release of {name}, whose first is {inspected.oldest}"
    return ""


def predict_everywhere(inspected: InspectResult, driver: str = "") -> tuple[Prediction, ...]:
    """Return the prediction for every known capability, the oldest first."""
    everywhere = predict_all(inspected.contents, driver)
    if not inspected.package:
        return everywhere
    return tuple(predict_inspected(inspected, row.capability, driver)[0] for row in everywhere)


def _without_code(inspected: InspectResult, capability: Capability) -> Prediction:
    """Return the prediction for packages without GPU code in their files: the worst of their compilers."""
    contents, rows = inspected.contents, list[tuple[Compatibility, str]]()
    pins = [(package.name, package.version) for package in contents.packages]
    for name, version in pins:
        if code := predict_run_time_code(name, version, cuda_of(contents), pins, capability):
            rows.append((code.answer, f"{name} {version}: {code.reason}"))
    answer, reason = Compatibility.CPU, cpu_reason(inspected)
    if rows:
        answer, reason = min(rows, key=lambda row: _SEVERITY.index(row[0]))
    elif not reason:
        makers = ", ".join(inspected.compilers[:3])
        answer = Compatibility.UNKNOWN
        reason = f"no file has GPU code, and what {makers} compiles at run time is not known"
    return Prediction(
        capability=capability, answer=answer, reason=reason, driver="", driver_reason="", libraries=()
    )


def cpu_reason(inspected: InspectResult) -> str:
    """Return why a package of the index runs on the CPU only; empty if it has or makes GPU code."""
    if not inspected.package or inspected.parts or inspected.compilers:
        return ""
    count = len(inspected.contents.packages) - 1
    return f"nothing in it and in the {count} packages that it pins has GPU code"
