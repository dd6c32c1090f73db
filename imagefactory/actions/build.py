"""Build a target: from its committed lock to a tested image in the store.

definition -> base, packages -> image -> smoke test
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TypeVar

from imagefactory.access import (
    Access,
    cache_lock,
    conda_channels,
    debian_mirror,
    open_registry,
    package_index,
    uv_locker,
)
from imagefactory.actions.definition import define_target, verify_layer_lock
from imagefactory.actions.images import make_runner, scratch_directory
from imagefactory.actions.locked import LockedBase, locked_base
from imagefactory.build.base.image import (
    BaseRequest,
    PendingBase,
    as_pending_base,
    warn_unpublished,
)
from imagefactory.build.base.pulled import BasePullRequest
from imagefactory.build.protocol import LEAST_LAYER, LEAST_UNPACKED, BuildInputs, Engine
from imagefactory.errors import DownloadError, UsageError
from imagefactory.fs import require_space, shared_use
from imagefactory.gpu.capability import architecture
from imagefactory.lock.download import PackageCache, PendingDownloads
from imagefactory.model import BaseSpec, BuildSpec, Lock, LockedCondaPackage, LockedWheel, Report, Target
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.runtime.emulator import emulation
from imagefactory.settings.choices import ENGINES, RUNNERS
from imagefactory.verify.report import SmokeTest
from imagefactory.verify.smoke import get_smoke_report, smoke

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
    request = base_request(project, definition.base, locked=options.locked)

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
            with clock.of("base"):
                pending = request.begin(layout, progress)
            return replace(pending, make=clock.timing("base", pending.get))

        fresh = image is None
        if image is None:

            @contextmanager
            def packages() -> Iterator[PendingDownloads]:
                _require_space(project, definition.lock, options)
                with _fetching(project, definition.lock, clock, progress) as arrivals:
                    yield arrivals

            unpacked = runner.unpacked if options.smoke else None
            inputs = BuildInputs(base=base, packages=packages, unpacked=unpacked)
            with clock.of("assemble"):
                image = engine.build(definition, inputs, progress)
        else:
            engine.tag(definition, image)
        published = base().get().published
        if options.held and published and isinstance(image, Image):
            toolchain = engine.toolchain(definition)
            verify_layer_lock(project, definition, image, toolchain, bases=request.locks)
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
    # Packages in the cache may have their layers too, so only the rest counts.
    cache, store = access.settings.cache_path, access.layout.path
    missing = PackageCache(cache, package_index(access)).missing(lock.packages)
    fetched = sum(package.size for package in missing)
    built = fetched * (LEAST_LAYER + (LEAST_UNPACKED if options.smoke else 0))
    require_space({cache: fetched, store: round(built)}, f"the build of {lock.target}")


@contextmanager
def _fetching(
    access: Access, lock: Lock, clock: _StageTimes, progress: Progress
) -> Iterator[PendingDownloads]:
    """Fetch the packages of a lock into the cache while the caller's block runs."""
    cache = PackageCache(access.settings.cache_path, package_index(access))
    arrivals = PendingDownloads((package, cache.path(package)) for package in lock.packages)

    def fetch() -> None:
        try:
            with clock.of("fetch"), progress.stage(f"{lock.target}: fetch {len(lock.packages)} packages"):
                _fetch(access, lock, arrivals, progress)
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


def _fetch(access: Access, lock: Lock, arrivals: PendingDownloads, progress: Progress) -> None:
    """Fetch conda packages from their channels, wheels from the package index."""
    directory = access.settings.cache_path
    if lock.conda:
        channels = conda_channels(access)

        def channel_addresses(missing: tuple[LockedCondaPackage, ...]) -> dict[str, str]:
            return {package.filename: channels.address(package.url) for package in missing}

        PackageCache(directory, channels).fetch(lock.conda, channel_addresses, progress, arrivals=arrivals)
    if lock.wheels:
        index = package_index(access)

        def look_up(missing: tuple[LockedWheel, ...]) -> dict[str, str]:
            return uv_locker(index).addresses(replace(lock, wheels=missing, conda=()))

        PackageCache(directory, index).fetch(lock.wheels, look_up, progress, arrivals=arrivals)


def base_request(project: Project, base: BaseSpec, *, locked: bool = False) -> BaseRequest | BasePullRequest:
    """Return the request to build or pull a base.

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
            mirror=lambda: debian_mirror(project),
            environ=project.environ,
            locked=locked,
            below=request(row.parent) if row.parent else None,
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
