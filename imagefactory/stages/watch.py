"""The stage from what the catalogue has to what the world has beyond it; nothing is changed unless asked.

What a re-solve would give is found in a copy of the locks, so that a call that is cut short leaves the
factory as it was.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path

from packaging.metadata import RawMetadata, parse_email
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.access import package_index, uv_locker
from imagefactory.errors import FactoryError, LockError, NothingSelectedError, ToolError, UsageError
from imagefactory.project import Factory
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.knowledge import offered
from imagefactory.gpu.knowledge.tables import covers
from imagefactory.lock.conda.builds import cudas_of, offered_to
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.lock.moves import Move, base_moves, lock_moves
from imagefactory.lock.pypi.origins import from_files
from imagefactory.lock.pypi.series import (
    NewSeries,
    cuda_extras,
    cuda_of,
    newer_series,
    newest_python,
    python_after,
    series_after,
)
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import Base, BaseLock, Lock, Outcome, Target
from imagefactory.progress import Progress
from imagefactory.settings.choices import Setting
from imagefactory.stages.add import plan_addition
from imagefactory.actions.lock import LockOptions, below_first, conda_locker, lock_base, lock_target
from imagefactory.actions.locked import lock_state, read_target_lock
from imagefactory.stages.stored import stored_image
from imagefactory.actions.verdicts import Judge
from imagefactory.trust.claims import SOON
from imagefactory.trust.judgement import ending
from imagefactory.versions import natural, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What moves together: a family with all that is built on it, or a base (`base:debian-12`)."""

    name: str
    targets: tuple[Target, ...] = ()
    base: Base | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRelease:
    """A series that no row has, its CUDA where no table knows it, and the command that writes its row: empty
    where only a person can."""

    found: NewSeries
    command: str
    cuda: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCuda:
    """A CUDA for which the newest series of the rows has builds, and no row has it."""

    series: str
    cuda: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPython:
    """The newest release has wheels for `python`, which no row uses; `base` carries it, empty for none."""

    release: str
    python: str
    base: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLock:
    """A lock that a re-solve changes: of a target, or of a base."""

    name: str
    moves: tuple[Move, ...]
    target: Target | None
    lock: Lock | BaseLock


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiring:
    """No verdict of an image in the store holds longer than `day` for this capability."""

    target: str
    capability: str
    day: date


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What the world has of a unit that the catalogue has not.

    `faults` are those of single targets: nothing is known of them.
    """

    unit: Unit
    releases: tuple[NewRelease, ...] = ()
    cudas: tuple[NewCuda, ...] = ()
    python: NewPython | None = None
    locks: tuple[NewLock, ...] = ()
    expiring: tuple[Expiring, ...] = ()
    faults: tuple[FactoryError, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.releases or self.cudas or self.python or self.locks or self.expiring)


def find_units(factory: Factory, names: Sequence[str]) -> tuple[Unit, ...]:
    """The units of these families and bases, all of both without names. Raises NothingSelectedError."""
    families: dict[str, list[Target]] = {}
    roots = {target.family: _lowest(factory, target).family for target in factory.targets}
    for target in below_first(factory, factory.targets):
        families.setdefault(roots[target.family], []).append(target)
    units = [Unit(name=name, targets=tuple(targets)) for name, targets in families.items()]
    units += [Unit(name=f"base:{base.name}", base=base) for base in factory.bases if not base.image]
    known = {unit.name: unit for unit in units}
    wanted = [roots.get(name, name) for name in names]
    for name in wanted:
        if name not in known:
            near = nearest(name, [*known, *roots])
            raise NothingSelectedError(
                "target-unknown",
                f"no family or base '{name}'",
                hint=f"did you mean '{near}'?" if near else f"known: {', '.join(known)}",
            )
    return tuple(known[name] for name in dict.fromkeys(wanted)) if names else tuple(units)


def _lowest(factory: Factory, target: Target) -> Target:
    below = factory.target_below(target)
    return _lowest(factory, below) if below else target


def watch_unit(factory: Factory, unit: Unit, now: datetime, progress: Progress) -> News:
    """All that is new of a unit. Raises as `lock_base` does, and StoreError for a damaged store."""
    if unit.base:
        return News(unit=unit, locks=_base_news(factory, unit, unit.base, progress))
    own = tuple(one for one in unit.targets if one.gpu and not one.on and not rocm_of(one.cuda))
    world = News(unit=unit)
    locks, faults = _lock_news(factory, unit, progress)
    try:
        if own:  # of builds for CPUs alone or AMD's GPUs nothing but their locks is watched
            world = (_of_the_index if own[0].source == "pypi" else _of_the_channels)(factory, unit, own)
    except LockError as error:
        faults = (*faults, error)
    return replace(world, locks=locks, expiring=_expiring(factory, unit.targets, now), faults=faults)


# --- the index and the channels -------------------------------------------------------------------


def _newest(targets: tuple[Target, ...]) -> Target:
    return max(targets, key=lambda target: (natural(target.version), natural(target.cuda)))


def _of_the_channels(factory: Factory, unit: Unit, targets: tuple[Target, ...]) -> News:
    """What the newest row's channels have of its framework. Raises LockError where one cannot be read."""
    newest = _newest(targets)
    builds, pythons = conda_locker(factory).builds(newest), {target.python for target in targets}
    every = {build.python for build in builds if build.python}
    found = series_after(offered_to(builds, pythons), {target.version for target in targets})
    return News(
        unit=unit,
        releases=tuple(NewRelease(found=one, command="") for one in found),
        cudas=_new_cudas(targets, cudas_of(builds, newest.version, pythons)),
        python=_new_python(factory, pythons, *python_after(offered_to(builds, every))),
    )


def _new_cudas(targets: tuple[Target, ...], cudas: Collection[str]) -> tuple[NewCuda, ...]:
    """Those of the newest series that no row of it has; a row of `12` has every minor version of it."""
    newest = _newest(targets)
    held = [target.cuda for target in targets if target.version == newest.version]
    return tuple(
        NewCuda(
            series=newest.version,
            cuda=cuda,
            command=f"imagefactory add {newest.family} {newest.version} --cuda {cuda}"
            if newest.source == "pypi"
            else "",
        )
        for cuda in sorted(cudas, key=natural)
        if not any(covers(one, cuda) or covers(cuda, one) for one in held)
    )


def _new_python(factory: Factory, pythons: Collection[str], release: str, python: str) -> NewPython | None:
    if not python or Version(python) <= max(map(Version, pythons)):
        return None
    base = next((one.name for one in factory.bases if one.python == python), "")
    return NewPython(release=release, python=python, base=base)


def _of_the_index(factory: Factory, unit: Unit, targets: tuple[Target, ...]) -> News:
    """What the framework's project page has. Raises LockError where it cannot be read, or without a lock."""
    newest = _newest(targets)
    lock = read_target_lock(factory, newest)
    name = canonicalize_name(newest.framework)
    wheel = next((one for one in lock.wheels if one.name == name), None) if lock else None
    if lock is None or wheel is None:
        raise LockError(
            "lock-missing",
            f"{newest.name} has no lock to start from",
            hint=f"run imagefactory lock {newest.name}",
        )
    locker = uv_locker(package_index(factory))
    files = locker.listed([wheel], lock).get(wheel, ())
    pythons = {target.python for target in targets}
    found = newer_series(name, files, {target.version for target in targets}, pythons, lock.platform)
    releases = tuple(_addable(factory, locker, newest, lock, one) for one in found)
    known = {one.cuda for one in offered(newest.framework, newest.version)}
    return News(
        unit=unit,
        releases=releases,
        cudas=_new_cudas(
            targets,
            known | cuda_extras(_metadata(locker, lock, wheel.version, newest).get("provides_extra", [])),
        ),
        python=_new_python(factory, pythons, *newest_python(name, files, lock.platform)),
    )


def _metadata(locker: UvLocker, lock: Lock, release: str, newest: Target) -> RawMetadata:
    """What a release says of itself; nothing where the index has no metadata beside its wheels (PEP 658)."""
    try:
        return parse_email(locker.metadata(f"{newest.framework}=={release}", lock))[0]
    except LockError:
        return {}


def _addable(factory: Factory, locker: UvLocker, newest: Target, lock: Lock, one: NewSeries) -> NewRelease:
    """With the call of `add`: with the CUDA that a series' wheels pin, else that of the newest row."""
    command, cuda = f"imagefactory add {newest.family} {one.series}", ""
    try:
        plan_addition(factory, newest.family, one.series, "")
    except UsageError:  # what it comes with is not known here yet
        needs = _metadata(locker, lock, one.release, newest).get("requires_dist", [])
        cuda = cuda_of(needs) or newest.cuda
        cuda = cuda if "." in newest.cuda else cuda.partition(".")[0]
        command = f"{command} --cuda {cuda}"
    return NewRelease(found=one, command=command, cuda=cuda)


# --- locks ----------------------------------------------------------------------------------------


@contextmanager
def _copied(factory: Factory) -> Iterator[Factory]:
    """The factory with a copy of its locks and wheels, to solve in; the cache is the same."""
    with tempfile.TemporaryDirectory(prefix="imagefactory-watch-") as folder:
        if factory.lock_folder.is_dir():
            shutil.copytree(factory.lock_folder, Path(folder) / "lockfiles")
        for path in {one for target in factory.targets for one in from_files(target.origins).values()}:
            wheel, copy = factory.settings.root_path / path, Path(folder) / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            if wheel.is_file():
                shutil.copy2(wheel, copy)
        root = Setting(value=folder, origin=factory.settings.root.origin)
        yield replace(factory, settings=replace(factory.settings, root=root))


def _lock_news(
    factory: Factory, unit: Unit, progress: Progress
) -> tuple[tuple[NewLock, ...], tuple[FactoryError, ...]]:
    """The locks that a re-solve changes, those that others are built on first; and the faults of the others.

    Where a target cannot follow the one that it is built on, neither moves.
    """
    found: list[NewLock] = []
    faults: list[FactoryError] = []
    stuck: set[str] = set()
    with _copied(factory) as copy, progress.task(unit.name, total=len(unit.targets), unit="locks") as task:
        for target in unit.targets:
            try:
                if lock_state(copy, target) != Outcome.UNSOLVABLE:
                    found += _resolved(copy, target, progress)
            except (LockError, ToolError) as error:
                faults.append(error)
                stuck |= {_lowest(factory, target).name} if target.on else set()
            task.advance(1)
    moving = (one for one in found if one.target and _lowest(factory, one.target).name not in stuck)
    return tuple(moving), tuple(faults)


def _resolved(copy: Factory, target: Target, progress: Progress) -> Iterator[NewLock]:
    done = lock_target(copy, target, LockOptions(update_all=True), progress)
    if done.before != done.after:
        moves = lock_moves(done.before, done.after)
        yield NewLock(name=target.name, moves=moves, target=target, lock=done.after)


def _base_news(factory: Factory, unit: Unit, base: Base, progress: Progress) -> tuple[NewLock, ...]:
    before = read_base_lock(factory.base_lock_path(base))
    with _copied(factory) as copy:
        if not lock_base(copy, base, progress, update=True):
            return ()
        after = read_base_lock(copy.base_lock_path(base))
    if after is None:
        return ()
    return (NewLock(name=unit.name, moves=base_moves(before, after), target=None, lock=after),)


# --- verdicts -------------------------------------------------------------------------------------


def _expiring(factory: Factory, targets: Sequence[Target], now: datetime) -> tuple[Expiring, ...]:
    """What is proven now and not after `SOON`, by target and capability."""
    judge, found = Judge(factory, now), []
    for target in targets:
        image = stored_image(factory, target)
        judged = judge.stored(image) if image else ()
        found += [
            Expiring(target=target.name, capability=capability, day=end.date())
            for capability, end in ending(judged, judge.court.trust, now + SOON)
        ]
    return tuple(found)
