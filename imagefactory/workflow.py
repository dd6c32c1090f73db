"""The stages, one function each, in the order the data goes:

    recipes -> targets -> lock -> definition -> base, wheels -> image -> smoke test

Nothing here chooses or draws: the rooms decide, the command line prints.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.engines import ENGINES
from imagefactory.errors import BuildError, LockError, NothingSelectedError, StaleError, UsageError
from imagefactory.model import (
    Base,
    Completed,
    Definition,
    Image,
    Lock,
    LockedPackage,
    Report,
    RunSpec,
    Sif,
    Target,
)
from imagefactory.oci.layout import Layout, reference, used, used_by_nobody
from imagefactory.progress import Progress
from imagefactory.recipes import BASES_FILE, all_bases, expand_all, read_bases, read_recipes
from imagefactory.settings import Settings
from imagefactory.verify.runners import OWN_RUNNER, RUNNERS

if TYPE_CHECKING:
    from imagefactory.engines.base_image import BaseImage
    from imagefactory.engines.protocol import Engine
    from imagefactory.lock import Locker
    from imagefactory.lock.base import DebianMirror
    from imagefactory.lock.index import PackageIndex
    from imagefactory.verify.runners.protocol import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """The recipes of a root, expanded, and the settings and environment of this call."""

    settings: Settings
    environ: Mapping[str, str]
    bases: tuple[Base, ...]
    targets: tuple[Target, ...]

    def base_of(self, target: Target) -> Base:
        return next(base for base in self.bases if base.name == target.base)

    def lock_path(self, target: Target) -> Path:
        return self.settings.root_path / "lockfiles" / f"{target.name}.requirements.txt"

    def base_lock_path(self, base: Base) -> Path:
        return self.settings.root_path / "lockfiles" / "bases" / f"{base.name}.lock"

    def definition_folder(self, target: Target) -> Path:
        return self.settings.root_path / "definitions" / target.name

    @property
    def layout(self) -> Layout:
        return Layout(self.settings.store_path)


def read_factory(settings: Settings, environ: Mapping[str, str]) -> Factory:
    """All recipes and bases below the root. Raises RecipeError with every fault of every file."""
    folder = settings.root_path / "recipes"
    if not (folder / BASES_FILE).exists():
        raise UsageError(
            f"{settings.root_path} is no factory: it has no recipes/{BASES_FILE}",
            hint="go to one, or name it: imagefactory -C DIR ...",
        )
    recipes = read_recipes(folder)
    bases = all_bases(read_bases(folder), recipes)
    targets = expand_all(recipes, bases)
    return Factory(settings=settings, environ=environ, bases=bases, targets=targets)


# --- locks ---------------------------------------------------------------------------------------


def read_target_lock(factory: Factory, target: Target) -> Lock | None:
    """The committed lock of a target, or None. Raises LockError when it is malformed."""
    from imagefactory.lock.pypi import read_lock

    path = factory.lock_path(target)
    try:
        return read_lock(path) if path.exists() else None
    except LockError as error:
        # A file whose head is damaged does not say whose lock it is; here it is known.
        raise LockError(error.message, hint=error.hint.replace("TARGET", target.name)) from error


def require_lock(factory: Factory, target: Target) -> Lock:
    """The committed lock.

    Raises LockError when there is none or it does not hold the framework and CUDA that the target
    names, StaleError when the recipe has moved on.
    """
    from imagefactory.lock.pypi import check_facts

    lock, hint = read_target_lock(factory, target), f"imagefactory lock {target.name}"
    if lock is None:
        raise LockError(f"{target.name} has no lock ({factory.lock_path(target)})", hint=hint)
    if lock.content_hash != wanted_hash(factory, target):
        raise StaleError(f"the lock of {target.name} is stale: the recipe has changed since", hint=hint)
    check_facts(lock, target)
    return lock


def wanted_hash(factory: Factory, target: Target) -> str:
    from imagefactory.lock.pypi import content_hash

    return content_hash(target, factory.base_of(target))


def lock_state(factory: Factory, target: Target) -> str:
    """`ok`, `stale`, `none`, or `malformed`, for tables."""
    try:
        lock = read_target_lock(factory, target)
    except LockError:
        return "malformed"
    if lock is None:
        return "none"
    return "ok" if lock.content_hash == wanted_hash(factory, target) else "stale"


def base_state(factory: Factory, base: Base) -> str:
    """The same words for a base's lock. A base that is pulled is locked by its digest."""
    from imagefactory.lock.base import base_content_hash, read_base_lock

    if base.image:
        return "ok"
    try:
        lock = read_base_lock(factory.base_lock_path(base))
    except LockError:
        return "malformed"
    if lock is None:
        return "none"
    return "ok" if lock.content_hash == base_content_hash(base) else "stale"


def orphans(factory: Factory) -> tuple[Path, ...]:
    """Locks and definitions of targets and bases that no recipe makes any more."""
    root = factory.settings.root_path
    names = {target.name for target in factory.targets}
    bases = {base.name for base in factory.bases if not base.image}
    left = [
        p for p in (root / "lockfiles").glob("*.txt") if p.name.removesuffix(".requirements.txt") not in names
    ]
    left += [p for p in (root / "lockfiles" / "bases").glob("*.lock") if p.stem not in bases]
    left += [p for p in (root / "definitions").glob("*") if p.is_dir() and p.name not in names]
    return tuple(sorted(left))


def holding(factory: Factory, targets: Sequence[Target], packages: Sequence[str]) -> tuple[Target, ...]:
    """The targets whose locks hold all of `packages`. Raises NothingSelectedError when none does."""
    from packaging.utils import canonicalize_name

    wanted = {canonicalize_name(package) for package in packages}
    locks = ((target, read_target_lock(factory, target)) for target in targets)
    chosen = tuple(t for t, lock in locks if lock and wanted <= {wheel.name for wheel in lock.wheels})
    if not chosen:
        raise NothingSelectedError(f"no lock holds {' and '.join(packages)}", hint="imagefactory show TARGET")
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Relock:
    """What `lock` did: `before` and `after` are the same object when nothing was solved."""

    target: Target
    before: Lock | None
    after: Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOptions:
    """`update` names packages that may move, `update_all` lets every one move."""

    update: tuple[str, ...] = ()
    update_all: bool = False


def lock_target(factory: Factory, target: Target, options: LockOptions, progress: Progress) -> Relock:
    """Solves the target's lock if anything that decides it has changed, and writes it."""
    from imagefactory.lock import LockRequest
    from imagefactory.lock.pypi import write_lock

    try:
        before = read_target_lock(factory, target)
    except LockError as error:
        progress.note(f"{error.message}: locking {target.name} anew")
        before = None
    request = LockRequest(
        target=target,
        base=factory.base_of(target),
        previous=before,
        update=options.update,
        update_all=options.update_all,
    )
    after = _locker(package_index(factory)).lock(request, progress)
    if after != before:
        write_lock(factory.lock_path(target), after)
    return Relock(target=target, before=before, after=after)


def lock_base(factory: Factory, base: Base, progress: Progress, *, update: bool) -> bool:
    """Solves a base's lock when there is none, when it is stale, or on `update`; True when it changed.

    A base that is pulled has no lock but its digest, which only its recipe changes.
    """
    from imagefactory.lock import base as bases

    if base.image:
        return False
    path = factory.base_lock_path(base)
    try:
        before = bases.read_base_lock(path)
    except LockError as error:
        progress.note(f"{error.message}: locking {base.name} anew")
        before = None
    if before is not None and before.content_hash == bases.base_content_hash(base) and not update:
        return False
    after = bases.lock_base(base, before, _mirror(factory), progress, update=update)
    if after == before:
        return False
    bases.write_base_lock(path, after)
    return True


# --- definitions ---------------------------------------------------------------------------------


def define_target(factory: Factory, target: Target) -> Definition:
    from imagefactory.render.define import define

    return define(target, factory.base_of(target), require_lock(factory, target))


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
    runner_name = options.runner or OWN_RUNNER[options.engine]
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


def collect_cache(factory: Factory, progress: Progress, *, dry_run: bool) -> int:
    """Removes from the cache what no committed lock names, and all segments; gives the bytes freed.

    Waits for running builds, as `store gc` does.
    """
    from imagefactory.lock.base import read_base_lock

    locks = [lock for target in factory.targets if (lock := read_target_lock(factory, target))]
    bases = [found for base in factory.bases if (found := read_base_lock(factory.base_lock_path(base)))]
    needed = {wheel.sha256 for lock in locks for wheel in lock.wheels}
    # Also the newer packages that a base was made of when the mirror no longer had the locked ones.
    folder = factory.settings.store_path / "bases"
    bases += [found for path in sorted(folder.glob("*.lock")) if (found := read_base_lock(path))]
    needed |= {package.sha256 for found in bases for package in found.packages}
    cache, freed = factory.settings.cache_path, 0
    with used_by_nobody(_cache_lock(factory), progress):
        for path in [p for kind in ("wheels", "debs", "segments") for p in (cache / kind).rglob("*")]:
            if path.is_file() and path.parent.name not in needed and not path.name.startswith("."):
                freed += path.stat().st_size
                if not dry_run:
                    path.unlink(missing_ok=True)
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
    assert tuple(makers) == ENGINES
    return makers[name]()


def _docker_engine(factory: Factory) -> Engine:
    from imagefactory.engines.docker import DockerEngine
    from imagefactory.engines.docker_daemon import DockerDaemon
    from imagefactory.engines.site import find_secrets

    return DockerEngine(
        factory.layout,
        DockerDaemon(factory.environ),
        codec=factory.settings.codec.value,
        secrets=lambda: find_secrets(package_index(factory), factory.environ),
    )


def _apptainer_engine(factory: Factory) -> Engine:
    from imagefactory.engines.apptainer import ApptainerEngine
    from imagefactory.engines.apptainer_command import ApptainerCommand
    from imagefactory.engines.site import find_secrets

    return ApptainerEngine(
        factory.layout,
        ApptainerCommand(factory.environ),
        secrets=lambda: find_secrets(package_index(factory), factory.environ),
    )


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
    assert tuple(makers) == RUNNERS
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
    name = wanted or (OWN_RUNNER[settings.engine.value] if isinstance(made, Image) else "apptainer")
    chosen = _runner(factory, name, target.name, progress)
    chosen.require()
    with factory.layout.in_use(progress):
        if name == "unshare" and isinstance(made, Image):
            unpack_image(factory, made, progress)
        elif name == "apptainer" and isinstance(made, Image):
            made = ensure_sif(factory, made, target.name, progress, compression="fast")
        elif name == "docker" and isinstance(made, Image):
            from imagefactory.engines.docker_daemon import DockerDaemon, run_name

            # Here, where no collection can take what the daemon is still loading.
            DockerDaemon(factory.environ).ensure(factory.layout, made, run_name(made), progress)
    return chosen.run(made, spec)


def unpack_image(factory: Factory, image: Image, progress: Progress) -> None:
    """Unpacks what is missing of `image`, layer by layer, shared between images."""
    from imagefactory.oci.unpack import Unpacked

    layout = factory.layout
    workers = factory.settings.worker_count
    Unpacked(layout.path / "unpacked").unpack(image.layers, layout.blob_path, progress, workers=workers)


def _packages(factory: Factory, lock: Lock, progress: Progress) -> dict[LockedPackage, Path]:
    from imagefactory.wheels import WheelCache

    index = package_index(factory)
    cache = WheelCache(factory.settings.cache_path, index)
    return dict(cache.fetch(lock, _locker(index).addresses, progress).items())


def _base(factory: Factory, base: Base, progress: Progress, *, locked: bool) -> BaseImage:
    from imagefactory.engines.base_image import BaseWanted, ensure_base
    from imagefactory.lock.base import read_base_lock

    if base.image:
        return _pulled_base(factory, base, progress)
    path = factory.base_lock_path(base)
    lock = read_base_lock(path)
    if lock is None:
        raise LockError(f"base {base.name} has no lock ({path})", hint=f"imagefactory lock base:{base.name}")
    wanted = BaseWanted(
        base=base,
        lock=lock,
        codec=factory.settings.codec.value,
        mirror=lambda: _mirror(factory),
        environ=factory.environ,
        locked=locked,
    )
    return ensure_base(factory.layout, wanted, progress)


def _pulled_base(factory: Factory, base: Base, progress: Progress) -> BaseImage:
    from imagefactory.engines.pulled_base import PullWanted, ensure_pulled_base
    from imagefactory.publish import open_registry

    wanted = PullWanted(
        base=base,
        mirrors=factory.settings.mirror_map,
        open_registry=lambda host: open_registry(factory, host),
    )
    return ensure_pulled_base(factory.layout, wanted, progress)


def package_index(factory: Factory) -> PackageIndex:
    from imagefactory.lock.index import find_index, trusting

    found = find_index(factory.settings.index, environ=factory.environ, prefix=Path(sys.prefix))
    return trusting(found, factory.settings.certificates_path)


def _locker(index: PackageIndex) -> Locker:
    from imagefactory.lock.pypi import UvLocker

    return UvLocker(index, python=Path(sys.executable))


def _mirror(factory: Factory) -> DebianMirror:
    from imagefactory.lock.base import find_mirror

    settings = factory.settings
    debs = settings.cache_path / "debs"
    found = find_mirror(settings.debian_mirror.value, debs, factory.environ, etc_apt=Path("/etc/apt"))
    return replace(found, certificates=settings.certificates.value)


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
