"""From the committed lock to an image in the store that was started and tried.

    definition -> base, packages -> image -> smoke test

Nothing here chooses or draws: the rooms decide, the command line prints.
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
from imagefactory.actions.locked import required_base_hash
from imagefactory.build.base.image import (
    BaseRequest,
    BuiltBase,
    PendingBase,
    as_pending_base,
    begin_base_build,
    find_base,
    get_base,
    warn_unpublished,
)
from imagefactory.build.base.pulled import BasePullRequest, ensure_pulled_base, get_pulled_base
from imagefactory.build.protocol import LEAST_LAYER, LEAST_UNPACKED, BuildInputs, Engine
from imagefactory.errors import DownloadError, LockError, StaleError, UsageError
from imagefactory.fs import require_space, shared_use
from imagefactory.gpu.capability import architecture
from imagefactory.lock.debian.lock import read_base_lock
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
    """`locked`: stop when a locked package of the base is gone. `smoke`: try the image at the end.

    `runner` is what tries it, empty for the engine's own. `before` is called ahead of anything that takes its
    time: not for an image that is made and tried already. `held`: the layers must be what a layer lock says.
    """

    engine: str = "assemble"
    runner: str = ""
    locked: bool = False
    smoke: bool = True
    before: Callable[[], object] = lambda: None
    held: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """One build: `fresh` is false when the store already held the image; `seconds` by stage.

    `published_base` is false when the base was made of newer packages than the locked ones, so that
    the digest is not the published one.
    """

    target: Target
    image: Image | SifArtifact
    fresh: bool
    published_base: bool
    report: Report | None
    seconds: tuple[tuple[str, float], ...]

    @property
    def passed(self) -> bool:
        """Whether the image was tried and passed."""
        return self.report is not None and self.report.passed


def build_target(factory: Project, target: Target, options: BuildOptions, progress: Progress) -> BuildResult:
    """From the committed lock to an image. Raises LockError and StaleError where that does not hold."""
    check_build(options)
    return build_image(factory, define_target(factory, target), options, progress)


def check_build(options: BuildOptions) -> None:
    """Raises UsageError for a runner that cannot start what the engine makes."""
    runner = options.runner or ENGINES[options.engine].runner
    if options.smoke and options.engine == "apptainer" != runner:
        raise UsageError(
            "runner-no-sif",
            f"runner '{runner}' cannot start .sif files",
            hint="use --runner apptainer, or --no-smoke",
        )


def build_image(
    factory: Project, definition: BuildSpec, options: BuildOptions, progress: Progress
) -> BuildResult:
    """An image of that definition in the store, started and tried; what is there already is kept."""
    layout, target = factory.layout, definition.target
    engine = make_engine(factory, options.engine)
    runner_name = options.runner or ENGINES[options.engine].runner
    runner = make_runner(factory, runner_name, target.name, progress)
    clock = _StageTimes()

    @cache
    def emulated() -> str:
        own = all(RUNNERS[name].brings_emulator for name in (ENGINES[options.engine].runner, runner_name))
        return emulation(architecture(target.platform), own=own)

    with layout.in_use(progress), shared_use(cache_lock(factory), progress):
        made = _get_stored_base(factory, definition.base, locked=options.locked)
        image = engine.find(definition, made) if made else None
        if made is None or image is None:
            options.before()
            emulated()
            engine.require()
            if options.smoke:
                runner.require()
            with clock.of("base"):
                made = _find_base(factory, definition.base, progress, locked=options.locked)
            image = engine.find(definition, made) if made else None
        elif not made.published:
            warn_unpublished(definition.base.name, progress)

        @cache
        def base() -> PendingBase:
            if made:
                return as_pending_base(made)
            wanted = _base_request(factory, definition.base, locked=options.locked)
            with clock.of("base"):
                begun = begin_base_build(factory.layout, wanted, progress)
            return replace(begun, make=clock.timing("base", begun.get))

        fresh = image is None
        if image is None:

            @contextmanager
            def packages() -> Iterator[PendingDownloads]:
                _require_space(factory, definition.lock, options)
                with _fetching(factory, definition.lock, clock, progress) as arrivals:
                    yield arrivals

            unpacked = runner.unpacked if options.smoke else None
            supplies = BuildInputs(base=base, packages=packages, unpacked=unpacked)
            with clock.of("assemble"):
                image = engine.build(definition, supplies, progress)
        else:
            engine.tag(definition, image)
        published = base().get().published
        if options.held and published and isinstance(image, Image):
            verify_layer_lock(factory, definition, image, engine.made_with(definition))
        report = None
        if options.smoke:
            records = layout.path / "checks"
            trial = SmokeTest(
                image=image, definition=definition, nonce=secrets.token_hex(16), runner=runner_name
            )
            report = get_smoke_report(trial, records)
            if report is None:
                if not fresh:
                    options.before()
                    runner.require()
                with clock.of("unpack"):
                    runner.prepare(image, checked=True)
                how = ", ".join(word for word in (runner_name, emulated()) if word)
                title = f"{target.name}: smoke test on the CPU, inside the image, by {how}"
                with clock.of("smoke"), progress.stage(title):
                    report = smoke(
                        trial,
                        runner,
                        progress,
                        records=records,
                        scratch=scratch_directory(factory, runner_name),
                    )
    return BuildResult(
        target=target,
        image=image,
        fresh=fresh,
        published_base=published,
        report=report,
        seconds=clock.seconds(),
    )


def find_built(factory: Project, target: Target) -> Image | SifArtifact | None:
    """What `build` would find made already by the engine of the settings. Makes, fetches and unpacks nothing.

    Raises LockError and StaleError as `define_target` does, StoreError for a base that is damaged.
    """
    definition = define_target(factory, target)
    base = _get_stored_base(factory, definition.base, locked=False)
    return make_engine(factory, factory.settings.engine.value).find(definition, base) if base else None


def make_engine(access: Access, name: str) -> Engine:
    """The engine of that row."""
    engine: Engine = import_module(ENGINES[name].module).make_engine(access)
    return engine


def _require_space(access: Access, lock: Lock, options: BuildOptions) -> None:
    """Raises StoreError where what must be fetched cannot lie in the cache, in layers and unpacked at once.

    What the cache has may have its layers too, so only the rest is counted.
    """
    cache, store = access.settings.cache_path, access.layout.path
    missing = PackageCache(cache, package_index(access)).missing(lock.packages)
    fetched = sum(package.size for package in missing)
    made = fetched * (LEAST_LAYER + (LEAST_UNPACKED if options.smoke else 0))
    require_space({cache: fetched, store: round(made)}, f"the build of {lock.target}")


@contextmanager
def _fetching(
    access: Access, lock: Lock, clock: _StageTimes, progress: Progress
) -> Iterator[PendingDownloads]:
    """The packages of a lock on their way into the cache. An error inside ends that, and so does the exit."""
    cache = PackageCache(access.settings.cache_path, package_index(access))
    arrivals = PendingDownloads((package, cache.path(package)) for package in lock.packages)

    def fetch() -> None:
        try:
            with clock.of("fetch"), progress.stage(f"{lock.target}: fetch {len(lock.packages)} packages"):
                _fetch(access, lock, arrivals, progress)
        except DownloadError as error:  # the cache does not know whose lock a file is of
            error.hint = error.hint.replace("TARGET", lock.target)
            arrivals.fail(error)
        except BaseException as error:
            arrivals.fail(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        yield arrivals
    finally:
        arrivals.stop.set()
        thread.join()


def _fetch(access: Access, lock: Lock, arrivals: PendingDownloads, progress: Progress) -> None:
    """Conda's archives from their channels, wheels from the package index."""
    folder = access.settings.cache_path
    if lock.conda:
        channels = conda_channels(access)

        def ask(missing: tuple[LockedCondaPackage, ...]) -> dict[str, str]:
            return {package.filename: channels.address(package.url) for package in missing}

        PackageCache(folder, channels).fetch(lock.conda, ask, progress, arrivals=arrivals)
    if lock.wheels:
        index = package_index(access)

        def look_up(missing: tuple[LockedWheel, ...]) -> dict[str, str]:
            return uv_locker(index).addresses(replace(lock, wheels=missing, conda=()))

        PackageCache(folder, index).fetch(lock.wheels, look_up, progress, arrivals=arrivals)


def _find_base(factory: Project, base: BaseSpec, progress: Progress, *, locked: bool) -> BuiltBase | None:
    if base.image:  # what is on it is made with what its config says
        return _pulled_base(factory, base, progress)
    return find_base(factory.layout, _base_request(factory, base, locked=locked), progress)


def _get_stored_base(factory: Project, base: BaseSpec, *, locked: bool) -> BuiltBase | None:
    if base.image:
        return get_pulled_base(factory.layout, base)
    return get_base(factory.layout, _base_request(factory, base, locked=locked))


def _base_request(factory: Project, base: BaseSpec, *, locked: bool) -> BaseRequest:
    path = factory.base_lock_path(base)
    lock = read_base_lock(path)
    if lock is None:
        raise LockError(
            "lock-missing",
            f"base {base.name} has no lock ({path})",
            hint=f"imagefactory lock base:{base.name}",
        )
    if base.on and lock.content_hash != required_base_hash(factory, base):
        what = f"the recipe or the lock of base {base.on} has changed"
        raise StaleError(
            "lock-outdated", f"{path} is outdated: {what}", hint=f"imagefactory lock base:{base.name}"
        )
    return BaseRequest(
        base=base,
        lock=lock,
        codec=factory.settings.codec.value,
        mirror=lambda: debian_mirror(factory),
        environ=factory.environ,
        locked=locked,
        below=_base_request(factory, below, locked=locked) if (below := factory.base_below(base)) else None,
    )


def _pulled_base(access: Access, base: BaseSpec, progress: Progress) -> BuiltBase:
    order = BasePullRequest(
        base=base,
        mirrors=access.settings.mirror_map,
        open_registry=lambda host: open_registry(access, host),
    )
    return ensure_pulled_base(access.layout, order, progress)


class _StageTimes:
    """Seconds by stage. Stages run side by side, and some more than once."""

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
