"""The stages, one function each, in the order the data goes:

    recipes -> targets -> lock -> definition -> base, wheels -> image -> smoke test

Nothing here chooses or draws: the rooms decide, the command line prints.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.engines import ENGINES
from imagefactory.errors import LockError, NothingSelectedError, StaleError, UsageError
from imagefactory.model import Base, Definition, Image, Lock, LockedWheel, Report, Sif, Target
from imagefactory.oci.layout import Layout, reference, used, used_by_nobody
from imagefactory.progress import Progress
from imagefactory.recipes import BASES_FILE, expand_all, read_bases, read_recipes
from imagefactory.settings import Settings

if TYPE_CHECKING:
    from imagefactory.engines.base_image import BaseImage
    from imagefactory.engines.protocol import Engine
    from imagefactory.lock import Locker
    from imagefactory.lock.base import DebianMirror
    from imagefactory.lock.index import PackageIndex


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
    bases = read_bases(folder)
    targets = expand_all(read_recipes(folder), bases)
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
    """The same words for a base's lock."""
    from imagefactory.lock.base import base_content_hash, read_base_lock

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
    bases = {base.name for base in factory.bases}
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
    after = _locker(_index(factory)).lock(request, progress)
    if after != before:
        write_lock(factory.lock_path(target), after)
    return Relock(target=target, before=before, after=after)


def lock_base(factory: Factory, base: Base, progress: Progress, *, update: bool) -> bool:
    """Solves a base's lock when there is none, when it is stale, or on `update`; True when it changed."""
    from imagefactory.lock import base as bases

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
    """`locked`: stop when a locked package of the base is gone. `smoke`: try the image at the end."""

    engine: str = "assemble"
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
    layout = factory.layout
    engine = _engine(factory, options.engine)
    definition = define_target(factory, target)
    clock = _Clock()
    with layout.in_use(progress), used(_cache_lock(factory), progress):
        engine.require()
        base = _base(factory, definition.base, progress, locked=options.locked)
        clock.lap("base")
        image = engine.find(definition, base)
        fresh = image is None
        if image is None:

            def wheels() -> dict[LockedWheel, Path]:
                with progress.stage(f"{target.name}: fetch {len(definition.lock.wheels)} packages"):
                    fetched = _wheels(factory, definition.lock, progress)
                clock.lap("fetch")
                return fetched

            image = engine.build(definition, base, wheels, progress)
        else:
            engine.tag(definition, image)
        clock.lap("assemble")
        report = None
        if options.smoke:
            if isinstance(image, Image):
                unpack_image(factory, image, progress)
                clock.lap("unpack")
            report = _smoke(factory, definition, image, progress)
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
        )
    }
    assert tuple(makers) == ENGINES
    return makers[name]()


def unpack_image(factory: Factory, image: Image, progress: Progress) -> None:
    """Unpacks what is missing of `image`, layer by layer, shared between images."""
    from imagefactory.oci.unpack import Unpacked

    layout = factory.layout
    workers = factory.settings.worker_count
    Unpacked(layout.path / "unpacked").unpack(image.layers, layout.blob_path, progress, workers=workers)


def _smoke(factory: Factory, definition: Definition, image: Image | Sif, progress: Progress) -> Report:
    from imagefactory.verify.runners.unshare import UnshareRunner
    from imagefactory.verify.smoke import Trial, smoke

    layout = factory.layout
    trial = Trial(image=image, definition=definition, nonce=secrets.token_hex(16))
    with progress.stage(f"{definition.target.name}: smoke test on the CPU, inside the image"):
        return smoke(trial, UnshareRunner(layout, progress=progress), layout.path / "checks", progress)


def _wheels(factory: Factory, lock: Lock, progress: Progress) -> dict[LockedWheel, Path]:
    from imagefactory.wheels import WheelCache

    index = _index(factory)
    cache = WheelCache(factory.settings.cache_path, index)
    return cache.fetch(lock, _locker(index).addresses, progress)


def _base(factory: Factory, base: Base, progress: Progress, *, locked: bool) -> BaseImage:
    from imagefactory.engines.base_image import BaseWanted, ensure_base
    from imagefactory.lock.base import read_base_lock

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


def _index(factory: Factory) -> PackageIndex:
    from imagefactory.lock.index import find_index

    return find_index(factory.settings.index, environ=factory.environ, prefix=Path(sys.prefix))


def _locker(index: PackageIndex) -> Locker:
    from imagefactory.lock.pypi import UvLocker

    return UvLocker(index, python=Path(sys.executable))


def _mirror(factory: Factory) -> DebianMirror:
    from imagefactory.lock.base import find_mirror

    settings = factory.settings
    debs = settings.cache_path / "debs"
    return find_mirror(settings.debian_mirror.value, debs, factory.environ, etc_apt=Path("/etc/apt"))


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
