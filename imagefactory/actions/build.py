"""Build a target: from its committed lock to a tested image in the store.

definition -> base, packages -> image -> smoke test
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from imagefactory.access import (
    Access,
    cache_lock,
    conda_channels,
    debian_mirror,
    open_registry,
    package_index,
    repository_of,
    uv_locker,
)
from imagefactory.actions.definition import define_target, verify_layer_lock
from imagefactory.actions.images import make_runner, scratch_directory
from imagefactory.actions.locked import LockedBase, base_locks, locked_base
from imagefactory.build.base.image import (
    BaseRequest,
    PendingBase,
    as_pending_base,
    warn_unpublished,
)
from imagefactory.build.base.pulled import BasePullRequest
from imagefactory.build.protocol import LEAST_LAYER, LEAST_UNPACKED, BuildInputs, Engine
from imagefactory.errors import (
    DownloadError,
    ImagefactoryError,
    RegistryError,
    StoreError,
    UsageError,
    os_problem,
)
from imagefactory.fs import replace_text, require_space, shared_use
from imagefactory.gpu.capability import architecture
from imagefactory.http import RetryPolicy
from imagefactory.lock.debian.lock import downloaded_filename
from imagefactory.model import (
    BaseLock,
    BaseSpec,
    BuildSpec,
    DebianPackage,
    Lock,
    LockedCondaPackage,
    LockedPackage,
    LockedWheel,
    Report,
    Target,
)
from imagefactory.oci.candidates import DEB_TYPE, sources_tag
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.manifests import Descriptor, Image, SifArtifact
from imagefactory.oci.store import ImageReference, resolve_mirror, split_place
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.runtime.emulator import emulation
from imagefactory.settings.choices import ENGINES, RUNNERS
from imagefactory.settings.load import center_settings
from imagefactory.trust.policy import TrustRules, read_trust
from imagefactory.verify.report import SmokeTest
from imagefactory.verify.smoke import get_smoke_report, smoke

if TYPE_CHECKING:
    from imagefactory.build.base.fetch import DebRegistry
    from imagefactory.lock.download import FileOrigin, PendingDownloads
    from imagefactory.trust.approval import SourcesArtifact

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of a build.

    With `locked` a missing package of the base is an error. `smoke` runs the smoke test, with the runner
    `runner` (empty for the engine's own). `before` is called before slow work, so not if the image is
    already built and tested. With `held` the layers must match the layer lock.
    """

    engine: str = "assemble"
    runner: str = ""
    locked: bool = False
    smoke: bool = True
    before: Callable[[], object] = lambda: None
    held: bool = True

    @property
    def runner_name(self) -> str:
        """The runner of the smoke test."""
        return self.runner or ENGINES[self.engine].runner


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """The result of a build. `fresh` is false if the store already had the image, `seconds` are by stage.

    `published_base` is false if the base has newer packages than the locked ones. The image then has another
    digest than the published one.
    """

    target: Target
    image: Image | SifArtifact
    fresh: bool
    published_base: bool
    report: Report | None
    seconds: tuple[tuple[str, float], ...]

    @property
    def passed(self) -> bool:
        """Whether the image passed its smoke test."""
        return self.report is not None and self.report.passed


def build_target(project: Project, target: Target, options: BuildOptions, progress: Progress) -> BuildResult:
    """Build an image from the committed lock. Raises LockError and StaleError if the lock is not current."""
    check_build(options)
    return build_image(project, define_target(project, target), options, progress)


def check_build(options: BuildOptions) -> None:
    """Raise UsageError if the runner cannot start the images of this engine."""
    if options.smoke and options.engine == "apptainer" != options.runner_name:
        raise UsageError(
            "runner-no-sif",
            f"runner '{options.runner_name}' cannot start .sif files",
            hint="use --runner apptainer, or --no-test",
        )


def build_image(
    project: Project, definition: BuildSpec, options: BuildOptions, progress: Progress
) -> BuildResult:
    """Build and test the image of a definition, unless the store has it."""
    layout, target, runner_name = project.layout, definition.target, options.runner_name
    engine = make_engine(project, options.engine)
    runner = make_runner(project, runner_name, target.name, progress)
    clock = _StageTimes()
    sources = RegistrySources(project, target, definition.lock)
    request = base_request(project, definition.base, locked=options.locked, registry=sources)

    @cache
    def emulated() -> str:
        own_emulator = all(
            RUNNERS[name].brings_emulator for name in (ENGINES[options.engine].runner, runner_name)
        )
        return emulation(architecture(target.platform), include_own=own_emulator)

    with layout.in_use(progress), shared_use(cache_lock(project), progress):
        built = request.stored(layout)
        image = engine.find(definition, built) if built else None
        if built is None or image is None:
            options.before()
            emulated()
            engine.require()
            if options.smoke:
                runner.require()
            with clock.of("base"):
                built = request.find(layout, progress)
            image = engine.find(definition, built) if built else None
        elif not built.published:
            warn_unpublished(definition.base.name, progress)

        @cache
        def base() -> PendingBase:
            if built:
                return as_pending_base(built)
            adopt_sources(project, request.locks, (), progress)
            with clock.of("base"):
                pending = request.begin(layout, progress)
            return replace(pending, make=clock.timing("base", pending.get))

        fresh = image is None
        if image is None:

            @contextmanager
            def packages() -> Iterator[PendingDownloads]:
                adopt_sources(project, (), definition.lock.packages, progress)
                _require_space(project, definition.lock, options)
                with _fetching(project, definition.lock, clock, progress, sources) as arrivals:
                    yield arrivals

            unpacked = runner.unpacked if options.smoke else None
            inputs = BuildInputs(base=base, packages=packages, unpacked=unpacked)
            with clock.of("assemble"):
                image = engine.build(definition, inputs, progress)
        else:
            engine.tag(definition, image)
        published = base().get().published
        if options.held and published and isinstance(image, Image):
            verify_layer_lock(project, definition, image, engine.toolchain, bases=request.locks)
        report = None
        if options.smoke:
            records = layout.path / "checks"
            nonce = secrets.token_hex(16)
            test = SmokeTest(image=image, definition=definition, nonce=nonce, runner=runner_name)
            report = get_smoke_report(test, records)
            if report is None:
                if not fresh:
                    options.before()
                    runner.require()
                with clock.of("unpack"):
                    runner.prepare(image, checked=True)
                how = ", ".join(word for word in (runner_name, emulated()) if word)
                title = f"{target.name}: smoke test on the CPU, inside the image, by {how}"
                scratch = scratch_directory(project, runner_name)
                with clock.of("smoke"), progress.stage(title):
                    report = smoke(test, runner, progress, records=records, scratch=scratch)
    return BuildResult(
        target=target,
        image=image,
        fresh=fresh,
        published_base=published,
        report=report,
        seconds=clock.seconds(),
    )


def find_built(project: Project, target: Target) -> Image | SifArtifact | None:
    """Return the image that `build` would return without building. Builds and fetches nothing.

    Raises LockError and StaleError as `define_target` does, StoreError for a corrupt base.
    """
    definition = define_target(project, target)
    base = base_request(project, definition.base).stored(project.layout)
    return make_engine(project, project.settings.engine.value).find(definition, base) if base else None


def make_engine(access: Access, name: str) -> Engine:
    """Return the engine with this name in ENGINES."""
    engine: Engine = import_module(ENGINES[name].module).make_engine(access)
    return engine


def _require_space(access: Access, lock: Lock, options: BuildOptions) -> None:
    """Raise StoreError if the disks have no space for fetched packages, layers and unpacked files."""
    from imagefactory.lock.download import PackageCache

    # Packages in the cache may have their layers too, so only the rest counts.
    cache, store = access.settings.cache_path, access.layout.path
    missing = PackageCache(cache, package_index(access)).missing(lock.packages)
    fetched = sum(package.size for package in missing)
    built = fetched * (LEAST_LAYER + (LEAST_UNPACKED if options.smoke else 0))
    require_space({cache: fetched, store: round(built)}, f"the build of {lock.target}")


@contextmanager
def _fetching(
    access: Access, lock: Lock, clock: _StageTimes, progress: Progress, sources: RegistrySources
) -> Iterator[PendingDownloads]:
    """Fetch the packages of a lock into the cache while the caller's block runs."""
    from imagefactory.lock.download import PackageCache, PendingDownloads

    cache = PackageCache(access.settings.cache_path, package_index(access))
    arrivals = PendingDownloads((package, cache.path(package)) for package in lock.packages)

    def fetch() -> None:
        try:
            with clock.of("fetch"), progress.stage(f"{lock.target}: fetch {len(lock.packages)} packages"):
                _fetch(access, lock, arrivals, progress, sources)
        except BaseException as error:
            if isinstance(error, DownloadError):  # the cache does not know the lock of a file
                error.hint = error.hint.replace("TARGET", lock.target)
            arrivals.fail(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        yield arrivals
    finally:
        arrivals.stop.set()
        thread.join()


def _fetch(
    access: Access, lock: Lock, arrivals: PendingDownloads, progress: Progress, sources: RegistrySources
) -> None:
    """Fetch conda packages from their channels, wheels from the package index, else all from a registry."""
    from imagefactory.lock.download import PackageCache

    directory = access.settings.cache_path

    def fallback(sizes: Mapping[str, int], error: ImagefactoryError) -> Mapping[str, FileOrigin]:
        origins = sources.packages(sizes, progress)
        if origins:
            progress.note(error.message)
        for name, count in sorted(Counter(origin.name for origin in origins.values()).items()):
            progress.note(f"{count} of {len(sizes)} missing packages are from {name}")
        return origins

    if lock.conda:
        channels = conda_channels(access)

        def channel_addresses(missing: tuple[LockedCondaPackage, ...]) -> dict[str, str]:
            return {package.filename: channels.address(package.url) for package in missing}

        PackageCache(directory, channels).fetch(
            lock.conda, channel_addresses, progress, arrivals=arrivals, fallback=fallback
        )
    if lock.wheels:
        index = package_index(access)

        def look_up(missing: tuple[LockedWheel, ...]) -> dict[str, str]:
            return uv_locker(index).addresses(replace(lock, wheels=missing, conda=()))

        PackageCache(directory, index).fetch(
            lock.wheels, look_up, progress, arrivals=arrivals, fallback=fallback
        )


# --- Locked files from a directory or a registry, and to a directory


def adopt_sources(
    access: Access, locks: Sequence[BaseLock], packages: Sequence[LockedPackage], progress: Progress
) -> None:
    """Copy locked files that the cache lacks from the directory of the setting `sources`, if it is set.

    Raises DownloadError for a file that differs from its lock, and for a missing directory.
    """
    directory, cache = access.settings.sources_path, access.settings.cache_path
    if directory is None:
        return
    from imagefactory.build.base.fetch import adopt_debs
    from imagefactory.lock.download import PackageCache

    if not directory.is_dir():
        raise DownloadError(
            "sources-missing",
            f"{directory} (sources) is not a directory",
            hint="mount it, or remove the setting: imagefactory config shows where it is set",
        )
    copied = sum(adopt_debs(lock, cache / "debs", directory / "debs", progress) for lock in locks)
    copied += PackageCache(cache, package_index(access)).adopt(packages, directory, progress)
    if copied:
        progress.note(f"{copied} files are from {directory}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSources:
    """The locked files of a target in a registry.

    `blobs` are the files by sha256. `trust` decides who can vouch for .debs there.
    """

    reference: ImageReference
    repo: StoreRepository
    artifact: SourcesArtifact
    blobs: Mapping[str, Descriptor]
    trust: TrustRules

    def origin(self, sha256: str) -> FileOrigin:
        """Return the bytes of a file."""
        from imagefactory.lock.download import FileOrigin

        blob = self.blobs[sha256]
        return FileOrigin(str(self.reference), partial(self.repo.store.read, self.repo.repository, blob))


def locked_digests(locks: Iterable[BaseLock], packages: Iterable[LockedPackage]) -> list[str]:
    """Return the sha256 of each locked file of a target."""
    debs = [package.sha256 for lock in locks for package in lock.packages]
    return [*debs, *(package.sha256 for package in packages)]


class RegistrySources:
    """The locked files of a target in registries, where `push --with-sources` put them.

    Registries are queried once, and only if no other place has a file. They are those of the settings
    `registry` and `catalog`, and of joined centers. Thread-safe.
    """

    def __init__(self, project: Project, target: Target, lock: Lock) -> None:
        self._project, self._target, self._lock = project, target, lock
        self._mutex = threading.Lock()
        self._stored: tuple[StoredSources, ...] | None = None
        self._debs: dict[str, FileOrigin] = {}

    def stored(self, progress: Progress) -> tuple[StoredSources, ...]:
        """Return the files in each registry that has them. Reports registries that do not."""
        with self._mutex:
            if self._stored is None:
                project, target = self._project, self._target
                locks = base_locks(project, project.base_of(target))
                tag = sources_tag(locked_digests(locks, self._lock.packages))
                rows = [self._read(place, trust, tag, progress) for place, trust in _sources_places(project)]
                self._stored = tuple(row for row in rows if row)
            return self._stored

    def _read(self, place: str, trust: TrustRules, tag: str, progress: Progress) -> StoredSources | None:
        from imagefactory.trust.approval import read_sources

        access, (host, path) = self._project, split_place(place)
        repository = repository_of(path, self._target.family)
        reference = ImageReference(registry=host, repository=repository, tag=tag)
        mirror = resolve_mirror(reference, access.settings.mirror_map)
        repo = StoreRepository(store=open_registry(access, mirror.registry), repository=mirror.repository)
        try:
            artifact = read_sources(repo, tag)
        except RegistryError as error:
            progress.note(f"{self._target.name}: no locked packages in a registry: {error.message}")
            return None
        blobs = {blob.digest.removeprefix("sha256:"): blob for blob in artifact.files}
        return StoredSources(reference=mirror, repo=repo, artifact=artifact, blobs=blobs, trust=trust)

    def packages(self, sizes: Mapping[str, int], progress: Progress) -> Mapping[str, FileOrigin]:
        """Return the bytes of wheels and conda archives with these sizes, by sha256. Their hash is enough."""
        origins: dict[str, FileOrigin] = {}
        for stored in self.stored(progress):
            here = [
                sha256
                for sha256, size in sizes.items()
                if sha256 in stored.blobs and stored.blobs[sha256].size == size and sha256 not in origins
            ]
            origins |= {sha256: stored.origin(sha256) for sha256 in here}
        return origins

    def usable(
        self, packages: Sequence[DebianPackage], listed: Collection[DebianPackage], progress: Progress
    ) -> list[DebianPackage]:
        """Return the .debs that a registry has, and that count.

        Those in `listed` are in an index that Debian signed. For the others, a key that is trusted for that
        registry must have signed the manifest that names them.
        """
        usable: list[DebianPackage] = []
        for stored in self.stored(progress):
            here = [
                package
                for package in packages
                if (blob := stored.blobs.get(package.sha256))
                and (blob.size, blob.media_type) == (package.size, DEB_TYPE)
                and package not in usable
            ]
            signer, reason = "", ""
            if any(package not in listed for package in here):
                signer, reason = self._signer(stored)
            counting = here if signer else [package for package in here if package in listed]
            if len(counting) < len(here):
                count = len(here) - len(counting)
                progress.note(f"{count} Debian packages in {stored.reference} do not count: {reason}")
            if counting:
                by = f", signed by '{signer}'" if signer else ""
                progress.note(f"{len(counting)} Debian packages are from {stored.reference}{by}")
            usable += counting
            self._debs |= {package.sha256: stored.origin(package.sha256) for package in counting}
        return usable

    def _signer(self, stored: StoredSources) -> tuple[str, str]:
        from imagefactory.trust.approval import find_sources_signer

        if not stored.trust.keys:
            return "", "you trust no key (imagefactory key trust FILE)"
        envelopes = stored.artifact.read_envelopes(stored.repo)
        return find_sources_signer(envelopes, stored.artifact.subject, stored.trust, datetime.now(UTC))

    def download(self, packages: Sequence[DebianPackage], directory: Path, progress: Progress) -> None:
        """Fetch .debs that `usable` returned into `directory`."""
        from imagefactory.build.base.fetch import package_copy
        from imagefactory.lock.download import LocalFiles, fetch_files

        files = [
            replace(
                package_copy(package, Path(), directory / downloaded_filename(package)),
                url=self._debs[package.sha256].name,
                read=self._debs[package.sha256].read,
            )
            for package in packages
        ]
        label = f"{len(files)} Debian packages of a registry"
        fetch_files(files, LocalFiles(), progress, label=label, retry_policy=RetryPolicy())


def _sources_places(access: Access) -> tuple[tuple[str, TrustRules], ...]:
    """Return the registries (`HOST[/PATH]`) that may have locked files, each with the keys trusted there."""
    from imagefactory.trust.catalog_package import REPOSITORY, catalog_repository

    settings, places = access.settings, dict[str, TrustRules]()
    if registry := settings.registry.value:
        places[registry] = read_trust(settings.files)
    for center in (settings, *(center_settings(settings, path) for path in settings.centers)):
        catalog = center.catalog.value
        if catalog and not catalog.startswith(("/", ".", "~")):  # those are files
            reference = catalog_repository(catalog)
            path = reference.repository.removesuffix(REPOSITORY).rstrip("/")
            place = "/".join(filter(None, (reference.registry, path)))
            places.setdefault(place, read_trust(center.files, center.limits))
    return tuple(places.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedFile:
    """A locked file of a target in the cache. `name` is its path in a directory of sources."""

    package: DebianPackage | LockedPackage
    path: Path
    name: str


@contextmanager
def locked_files(
    project: Project, target: Target, progress: Progress
) -> Iterator[tuple[BuildSpec, tuple[LockedFile, ...]]]:
    """Yield the definition of a target and its locked files. What the cache lacks is fetched.

    Nothing removes the files during the block. A base by digest has none.
    """
    definition, cache = define_target(project, target), project.settings.cache_path
    sources = RegistrySources(project, target, definition.lock)
    request = base_request(project, definition.base, locked=True, registry=sources)
    lock, files = definition.lock, list[tuple[DebianPackage | LockedPackage, Path]]()
    with shared_use(cache_lock(project), progress):
        adopt_sources(project, request.locks, lock.packages, progress)
        part = request if isinstance(request, BaseRequest) else None
        while part:
            fetched = part.fetch(progress)
            files += zip(fetched.lock.packages, fetched.debs, strict=True)
            part = part.below
        with _fetching(project, lock, _StageTimes(), progress, sources) as arrivals:
            files += arrivals.wait_for_all().items()
        yield (
            definition,
            tuple(
                LockedFile(package=package, path=path, name=path.relative_to(cache).as_posix())
                for package, path in files
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSources:
    """The locked files of a target in a directory. `files` and `size` count all, `copied` the new ones.

    `base` is the image of a pulled base, which is not in the directory; empty for a base of Debian packages.
    """

    target: str
    directory: Path
    files: int
    copied: int
    size: int
    base: str


def export_sources(project: Project, target: Target, directory: Path, progress: Progress) -> ExportedSources:
    """Copy the Debian packages, wheels and conda archives of a target to `directory`, each by its hash.

    The directory has the layout of a cache, so several targets may share it. TARGET.sha256 lists the files
    of a target, for sha256sum. What the cache lacks is fetched.
    """
    from imagefactory.build.base.fetch import package_copy
    from imagefactory.lock.download import copy_files, is_complete

    with locked_files(project, target, progress) as (definition, locked):
        files = [package_copy(row.package, row.path, directory / row.name) for row in locked]
        missing = [file for file in files if not is_complete(file)]
        copy_files(missing, progress)
    rows = sorted(f"{file.sha256}  {file.path.relative_to(directory)}\n" for file in files)
    try:
        for file in missing:
            (file.path.parent / ".lock").unlink(missing_ok=True)
        replace_text(directory / f"{target.name}.sha256", "".join(rows))
    except OSError as error:
        raise StoreError(*os_problem("write", directory, error), hint="check its permissions") from error
    return ExportedSources(
        target=target.name,
        directory=directory,
        files=len(files),
        copied=len(missing),
        size=sum(file.size for file in files),
        base=definition.base.image,
    )


def base_request(
    project: Project, base: BaseSpec, *, locked: bool = False, registry: DebRegistry | None = None
) -> BaseRequest | BasePullRequest:
    """Return the request to build or pull a base. `registry` has .debs that no archive has.

    Raises LockError without a lock, StaleError for an outdated one.
    """
    if base.image:
        return BasePullRequest(
            base=base,
            mirrors=project.settings.mirror_map,
            open_registry=lambda host: open_registry(project, host),
        )

    def request(row: LockedBase) -> BaseRequest:
        return BaseRequest(
            base=row.base,
            lock=row.require(project.base_lock_path(row.base)),
            codec=project.settings.codec.value,
            debs=project.settings.cache_path / "debs",
            mirror=lambda: debian_mirror(project),
            environ=project.environ,
            locked=locked,
            below=request(row.parent) if row.parent else None,
            registry=registry,
        )

    return request(locked_base(project, base))


class _StageTimes:
    """Seconds by stage. Stages overlap, and a stage can run more than once."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def timing(self, name: str, call: Callable[[], Result]) -> Callable[[], Result]:
        def timed() -> Result:
            with self.of(name):
                return call()

        return timed

    def seconds(self) -> tuple[tuple[str, float], ...]:
        return tuple((name, round(seconds, 3)) for name, seconds in self._seconds.items())
