"""The stages from a lock on, one function each, in the order the data goes:

    lock -> definition -> base, packages -> image -> smoke test

Nothing here chooses or draws: the rooms decide, the command line prints.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.errors import BuildError, DownloadError, LockError, UsageError
from imagefactory.factory import Factory, conda_channels, debian_mirror, package_index, uv_locker
from imagefactory.files import used, used_by_nobody
from imagefactory.locking import locks_below, read_target_lock, require_lock
from imagefactory.model import (
    Base,
    Completed,
    Definition,
    Lock,
    LockedConda,
    LockedPackage,
    LockedWheel,
    Report,
    RunSpec,
    Target,
)
from imagefactory.oci.layout import reference
from imagefactory.oci.model import Image, Sif
from imagefactory.progress import Progress
from imagefactory.settings.choices import ENGINES, RUNNERS

if TYPE_CHECKING:
    from imagefactory.engines.base_image import BaseImage, BaseWanted
    from imagefactory.engines.protocol import Engine
    from imagefactory.engines.site import BuildSecrets
    from imagefactory.verify.runners.protocol import Runner


# --- definitions ---------------------------------------------------------------------------------


def define_target(factory: Factory, target: Target) -> Definition:
    from imagefactory.render.define import define

    lock, under = require_lock(factory, target), locks_below(factory, target)
    return define(target, factory.base_of(target), lock, under)


def render_target(factory: Factory, target: Target) -> dict[str, str]:
    """The texts of definitions/<target>/, by file name."""
    from imagefactory.render.folders import render

    return render(define_target(factory, target))


# --- images --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """`locked`: stop when a locked package of the base is gone. `smoke`: try the image at the end.

    `runner` is what tries it, empty for the engine's own.
    """

    engine: str = "assemble"
    runner: str = ""
    locked: bool = False
    smoke: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One build: `fresh` is false when the store already held the image; `seconds` by stage.

    `published_base` is false when the base was made of newer packages than the locked ones, so that
    the digest is not the published one.
    """

    target: Target
    image: Image | Sif
    fresh: bool
    published_base: bool
    report: Report | None
    seconds: tuple[tuple[str, float], ...]


def build_target(factory: Factory, target: Target, options: BuildOptions, progress: Progress) -> Built:
    """From the committed lock to an image in the store that was started and tried."""
    from imagefactory.verify.smoke import Trial, smoke

    layout = factory.layout
    engine = _engine(factory, options.engine)
    runner_name = options.runner or ENGINES[options.engine].runner
    if options.smoke and options.engine == "apptainer" != runner_name:
        raise UsageError(f"{runner_name} starts no .sif files", hint="--runner apptainer, or --no-smoke")
    runner = _runner(factory, runner_name, target.name, progress)
    definition = define_target(factory, target)
    clock = _Clock()
    with layout.in_use(progress), used(_cache_lock(factory), progress):
        engine.require()
        if options.smoke:
            runner.require()
        base = _base(factory, definition.base, progress, locked=options.locked)
        clock.lap("base")
        image = engine.find(definition, base)
        fresh = image is None
        if image is None:

            def packages() -> dict[LockedPackage, Path]:
                with progress.stage(f"{target.name}: fetch {len(definition.lock.packages)} packages"):
                    fetched = _packages(factory, definition.lock, progress)
                clock.lap("fetch")
                return fetched

            image = engine.build(definition, base, packages, progress)
        else:
            engine.tag(definition, image)
        clock.lap("assemble")
        report = None
        if options.smoke:
            if runner_name == "unshare" and isinstance(image, Image):
                unpack_image(factory, image, progress)
                clock.lap("unpack")
            trial = Trial(image=image, definition=definition, nonce=secrets.token_hex(16), runner=runner_name)
            with progress.stage(f"{target.name}: smoke test on the CPU, inside the image, by {runner_name}"):
                report = smoke(trial, runner, layout.path / "checks", progress)
            clock.lap("smoke")
    return Built(
        target=target,
        image=image,
        fresh=fresh,
        published_base=base.published,
        report=report,
        seconds=clock.laps(),
    )


def find_image(factory: Factory, target: Target) -> Image | None:
    """The image the target's tag points to in the store, or None."""
    return factory.layout.image(reference(target))


def find_built(factory: Factory, target: Target) -> Image | Sif | None:
    """What `build` would find made already by the engine of the settings. Makes, fetches and unpacks nothing.

    Raises LockError and StaleError as `define_target` does, StoreError for a base that is damaged.
    """
    definition = define_target(factory, target)
    base = _recalled_base(factory, definition.base)
    return _engine(factory, factory.settings.engine.value).find(definition, base) if base else None


def collect_cache(factory: Factory, progress: Progress, *, dry_run: bool) -> int:
    """Removes from the cache what no committed lock names, all segments and what lies there unpacked.

    Gives the bytes freed. Waits for running builds, as `store gc` does.
    """
    from imagefactory.engines.conda_prefix import remove_extracted
    from imagefactory.lock.debian.file import read_base_lock

    locks = [lock for target in factory.targets if (lock := read_target_lock(factory, target))]
    bases = [found for base in factory.bases if (found := read_base_lock(factory.base_lock_path(base)))]
    needed = {package.sha256 for lock in locks for package in lock.packages}
    # Also the newer packages that a base was made of when the mirror no longer had the locked ones.
    folder = factory.settings.store_path / "bases"
    bases += [found for path in sorted(folder.glob("*.lock")) if (found := read_base_lock(path))]
    needed |= {package.sha256 for found in bases for package in found.packages}
    cache, freed = factory.settings.cache_path, 0
    with used_by_nobody(_cache_lock(factory), progress):
        kinds = ("wheels", "conda", "debs", "segments")
        for path in [p for kind in kinds for p in (cache / kind).rglob("*")]:
            if path.is_file() and path.parent.name not in needed and not path.name.startswith("."):
                freed += path.stat().st_size
                if not dry_run:
                    path.unlink(missing_ok=True)
        freed += remove_extracted(cache, dry_run=dry_run)
    return freed


def _cache_lock(factory: Factory) -> Path:
    """Several stores may share a cache, so it has a lock of its own."""
    return factory.settings.cache_path / "lock"


def _engine(factory: Factory, name: str) -> Engine:
    from imagefactory.engines.assemble import AssembleEngine

    settings = factory.settings
    makers: dict[str, Callable[[], Engine]] = {
        "assemble": lambda: AssembleEngine(
            factory.layout, settings.cache_path, codec=settings.codec.value, workers=settings.worker_count
        ),
        "docker": lambda: _docker_engine(factory),
        "apptainer": lambda: _apptainer_engine(factory),
    }
    assert tuple(makers) == tuple(ENGINES)
    return makers[name]()


def _docker_engine(factory: Factory) -> Engine:
    from imagefactory.engines.docker import DockerEngine
    from imagefactory.engines.docker_daemon import DockerDaemon

    return DockerEngine(
        factory.layout,
        DockerDaemon(factory.environ),
        codec=factory.settings.codec.value,
        secrets=lambda channels: _build_secrets(factory, channels),
    )


def _apptainer_engine(factory: Factory) -> Engine:
    from imagefactory.engines.apptainer import ApptainerEngine
    from imagefactory.engines.apptainer_command import ApptainerCommand

    return ApptainerEngine(
        factory.layout,
        ApptainerCommand(factory.environ),
        secrets=lambda channels: _build_secrets(factory, channels),
    )


def _build_secrets(factory: Factory, channels: tuple[str, ...]) -> BuildSecrets:
    """What a build in a container gets to know of this machine; `channels` are those that it asks."""
    from imagefactory.engines.site import find_secrets

    site = conda_channels(factory).site(channels) if channels else None
    return find_secrets(package_index(factory), factory.environ, site)


def _runner(factory: Factory, name: str, target: str, progress: Progress) -> Runner:
    """The runner called `name`; `target` is what a .sif that has to be made is named after."""
    from imagefactory.engines.apptainer_command import ApptainerCommand
    from imagefactory.engines.docker_daemon import DockerDaemon
    from imagefactory.verify.runners.apptainer import ApptainerRunner
    from imagefactory.verify.runners.docker import DockerRunner
    from imagefactory.verify.runners.unshare import UnshareRunner

    layout, environ = factory.layout, factory.environ
    makers: dict[str, Callable[[], Runner]] = {
        "unshare": lambda: UnshareRunner(layout, progress=progress),
        "docker": lambda: DockerRunner(layout, DockerDaemon(environ), progress=progress),
        "apptainer": lambda: ApptainerRunner(
            ApptainerCommand(environ),
            lambda image: ensure_sif(factory, image, target, progress, compression="fast"),
        ),
    }
    assert tuple(makers) == tuple(RUNNERS)
    return makers[name]()


def run_target(factory: Factory, target: Target, spec: RunSpec, runner: str, progress: Progress) -> Completed:
    """Runs a command in what was built of a target.

    That is its image, or the .sif that apptainer built where there is no image or the setting `engine` is
    apptainer. `runner` is empty for the setting, or for what fits. Raises BuildError when nothing is built.
    """
    wanted, settings = runner or factory.settings.runner.value, factory.settings
    made: Image | Sif | None = find_image(factory, target)
    if made is None or (settings.engine.value == "apptainer" and wanted in ("", "apptainer")):
        made = find_sif(factory, target) or made
    if made is None:
        raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
    name = wanted or (ENGINES[settings.engine.value].runner if isinstance(made, Image) else "apptainer")
    with factory.layout.in_use(progress):
        chosen, made = ready_runner(factory, made, name, target.name, progress)
    return chosen.run(made, spec)


def ready_runner(
    factory: Factory, made: Image | Sif, name: str, target: str, progress: Progress
) -> tuple[Runner, Image | Sif]:
    """The runner called `name`, and `made` as it starts it, brought to where it starts things from.

    The caller holds the layout's `in_use`. Raises ToolError where that runner cannot run here.
    """
    runner = _runner(factory, name, target, progress)
    runner.require()
    if name == "unshare" and isinstance(made, Image):
        unpack_image(factory, made, progress)
    elif name == "apptainer" and isinstance(made, Image):
        made = ensure_sif(factory, made, target, progress, compression="fast")
    elif name == "docker" and isinstance(made, Image):
        from imagefactory.engines.docker_daemon import DockerDaemon, run_name

        # Here, where no collection can take what the daemon is still loading.
        DockerDaemon(factory.environ).ensure(factory.layout, made, run_name(made), progress)
    return runner, made


def unpack_image(factory: Factory, image: Image, progress: Progress) -> None:
    """Unpacks what is missing of `image`, layer by layer, shared between images."""
    from imagefactory.oci.unpack import Unpacked

    layout = factory.layout
    workers = factory.settings.worker_count
    Unpacked(layout.path / "unpacked").unpack(image.layers, layout.blob_path, progress, workers=workers)


def _packages(factory: Factory, lock: Lock, progress: Progress) -> dict[LockedPackage, Path]:
    """The files of a lock: conda's archives from their channels, wheels from the package index."""
    try:
        return _fetched(factory, lock, progress)
    except DownloadError as error:  # the cache does not know whose lock a file is of
        raise DownloadError(error.message, hint=error.hint.replace("TARGET", lock.target)) from error


def _fetched(factory: Factory, lock: Lock, progress: Progress) -> dict[LockedPackage, Path]:
    from imagefactory.lock.download import PackageCache

    folder = factory.settings.cache_path
    fetched: list[tuple[LockedPackage, Path]] = []
    if lock.conda:
        channels = conda_channels(factory)

        def ask(missing: tuple[LockedConda, ...]) -> dict[str, str]:
            return {package.filename: channels.address(package.url) for package in missing}

        archives = PackageCache(folder, channels).fetch(lock.conda, ask, progress)
        fetched += archives.items()
    if lock.wheels:
        index = package_index(factory)

        def look_up(missing: tuple[LockedWheel, ...]) -> dict[str, str]:
            return uv_locker(index).addresses(replace(lock, wheels=missing, conda=()))

        wheels = PackageCache(folder, index).fetch(lock.wheels, look_up, progress)
        fetched += wheels.items()
    return dict(fetched)


def _base(factory: Factory, base: Base, progress: Progress, *, locked: bool) -> BaseImage:
    from imagefactory.engines.base_image import ensure_base

    if base.image:
        return _pulled_base(factory, base, progress)
    return ensure_base(factory.layout, _wanted_base(factory, base, locked=locked), progress)


def _recalled_base(factory: Factory, base: Base) -> BaseImage | None:
    from imagefactory.engines.base_image import recall_base
    from imagefactory.engines.pulled_base import recall_pulled_base

    if base.image:
        return recall_pulled_base(factory.layout, base)
    return recall_base(factory.layout, _wanted_base(factory, base, locked=False))


def _wanted_base(factory: Factory, base: Base, *, locked: bool) -> BaseWanted:
    from imagefactory.engines.base_image import BaseWanted
    from imagefactory.lock.debian.file import read_base_lock

    path = factory.base_lock_path(base)
    lock = read_base_lock(path)
    if lock is None:
        raise LockError(f"base {base.name} has no lock ({path})", hint=f"imagefactory lock base:{base.name}")
    return BaseWanted(
        base=base,
        lock=lock,
        codec=factory.settings.codec.value,
        mirror=lambda: debian_mirror(factory),
        environ=factory.environ,
        locked=locked,
    )


def _pulled_base(factory: Factory, base: Base, progress: Progress) -> BaseImage:
    from imagefactory.engines.pulled_base import PullWanted, ensure_pulled_base
    from imagefactory.publish import open_registry

    wanted = PullWanted(
        base=base,
        mirrors=factory.settings.mirror_map,
        open_registry=lambda host: open_registry(factory, host),
    )
    return ensure_pulled_base(factory.layout, wanted, progress)


class _Clock:
    def __init__(self) -> None:
        self._last = time.monotonic()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps.append((name, round(now - self._last, 3)))
        self._last = now

    def laps(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._laps)


# --- .sif files ----------------------------------------------------------------------------------


def find_sif(factory: Factory, target: Target) -> Sif | None:
    """The .sif that apptainer built from the target's definition, or None."""
    from imagefactory.oci.sif import find_sif as find
    from imagefactory.oci.sif import sif_reference

    return find(factory.layout, sif_reference(target))


def ensure_sif(factory: Factory, image: Image, target: str, progress: Progress, *, compression: str) -> Sif:
    """The kept .sif of an image of the store, made if need be. The caller holds the layout's `in_use`."""
    from imagefactory.engines.apptainer import SifMaker
    from imagefactory.engines.apptainer_command import ApptainerCommand

    return SifMaker(factory.layout, ApptainerCommand(factory.environ)).make(
        image, target, compression, progress
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SifExport:
    """`compression` is empty for that of the .sif at hand, else `fast`; `output` is None for its own name."""

    compression: str = ""
    output: Path | None = None


def export_sif(factory: Factory, target: Target, options: SifExport, progress: Progress) -> tuple[Sif, Path]:
    """Writes the target's .sif, of its image or as apptainer built it, beside and renamed; gives where.

    Raises BuildError when there is neither, UsageError for a compression that a built one has not.
    """
    from imagefactory.oci.sif import copy_sif

    with factory.layout.in_use(progress):
        image = find_image(factory, target)
        sif = find_sif(factory, target) if image is None else None
        if image is not None:
            compression = options.compression or "fast"
            sif = ensure_sif(factory, image, target.name, progress, compression=compression)
        if sif is None:
            raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
        if options.compression not in ("", sif.compression):
            raise UsageError(
                f"the .sif that apptainer built of {target.name} is compressed '{sif.compression}'",
                hint=f"leave it out, or `imagefactory build {target.name} --engine assemble` first",
            )
        output = options.output or Path(sif.name)
        copy_sif(sif, output, progress)
    return sif, output
