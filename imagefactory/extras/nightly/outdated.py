"""What is outdated: newer releases, CUDA, Python, locks and verdicts; and the change that updates them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path

from packaging.metadata import RawMetadata, parse_email
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.access import package_index, uv_locker
from imagefactory.actions.definition import write_definition
from imagefactory.actions.images import stored_image
from imagefactory.actions.lock import LockOptions, conda_locker, lock_base, lock_target, parents_first
from imagefactory.actions.locked import lock_state, orphans, read_target_lock
from imagefactory.actions.new_project import RowAddition, make_addition, plan_addition
from imagefactory.actions.verdicts import VerdictReader
from imagefactory.errors import ImagefactoryError, LockError, NothingSelectedError, ToolError, UsageError
from imagefactory.fs import replace_text
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.knowledge import offered
from imagefactory.gpu.knowledge.tables import covers
from imagefactory.lock.conda.explain import cudas_of, offered_to
from imagefactory.lock.debian.lock import read_base_lock, write_base_lock
from imagefactory.lock.files import VersionChange, base_moves, lock_moves, write_lock
from imagefactory.lock.pypi.requirements import from_files
from imagefactory.lock.pypi.series import (
    FrameworkSeries,
    cuda_extras,
    cuda_of,
    newer_series,
    newest_python,
    python_after,
    series_after,
)
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import BaseLock, BaseSpec, Lock, Outcome, Target
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.serialize import fields_of
from imagefactory.settings.choices import SettingValue
from imagefactory.trust.claims import SOON
from imagefactory.trust.judgement import ending
from imagefactory.versions import natural, nearest
from imagefactory.views.text import wrap

# --- The stage from what the catalogue has to what the world has beyond it; nothing is changed unless asked
# What a re-solve would give is found in a copy of the locks, so that a call that is cut short leaves the
# factory as it was.


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateUnit:
    """What moves together: a family with all that is built on it, or a base (`base:debian-12`)."""

    name: str
    targets: tuple[Target, ...] = ()
    base: BaseSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRelease:
    """A series that no row has, its CUDA where no table knows it, and the command that writes its row: empty
    where only a person can."""

    found: FrameworkSeries
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
    moves: tuple[VersionChange, ...]
    target: Target | None
    lock: Lock | BaseLock


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiringVerdict:
    """No verdict of an image in the store holds longer than `day` for this capability."""

    target: str
    capability: str
    day: date


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitNews:
    """What the world has of a unit that the catalogue has not.

    `faults` are those of single targets: nothing is known of them.
    """

    unit: UpdateUnit
    releases: tuple[NewRelease, ...] = ()
    cudas: tuple[NewCuda, ...] = ()
    python: NewPython | None = None
    locks: tuple[NewLock, ...] = ()
    expiring: tuple[ExpiringVerdict, ...] = ()
    faults: tuple[ImagefactoryError, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.releases or self.cudas or self.python or self.locks or self.expiring)


def find_units(factory: Project, names: Sequence[str]) -> tuple[UpdateUnit, ...]:
    """The units of these families and bases, all of both without names. Raises NothingSelectedError."""
    families: dict[str, list[Target]] = {}
    roots = {target.family: _lowest(factory, target).family for target in factory.targets}
    for target in parents_first(factory, factory.targets):
        families.setdefault(roots[target.family], []).append(target)
    units = [UpdateUnit(name=name, targets=tuple(targets)) for name, targets in families.items()]
    units += [UpdateUnit(name=f"base:{base.name}", base=base) for base in factory.bases if not base.image]
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


def _lowest(factory: Project, target: Target) -> Target:
    below = factory.target_below(target)
    return _lowest(factory, below) if below else target


def watch_unit(factory: Project, unit: UpdateUnit, now: datetime, progress: Progress) -> UnitNews:
    """All that is new of a unit. Raises as `lock_base` does, and StoreError for a damaged store."""
    if unit.base:
        return UnitNews(unit=unit, locks=_base_news(factory, unit, unit.base, progress))
    own = tuple(one for one in unit.targets if one.gpu and not one.on and not rocm_of(one.cuda))
    world = UnitNews(unit=unit)
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


def _of_the_channels(factory: Project, unit: UpdateUnit, targets: tuple[Target, ...]) -> UnitNews:
    """What the newest row's channels have of its framework. Raises LockError where one cannot be read."""
    newest = _newest(targets)
    builds, pythons = conda_locker(factory).builds(newest), {target.python for target in targets}
    every = {build.python for build in builds if build.python}
    found = series_after(offered_to(builds, pythons), {target.version for target in targets})
    return UnitNews(
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
            command=f"imagefactory recipe add-version {newest.family} {newest.version} --cuda {cuda}"
            if newest.source == "pypi"
            else "",
        )
        for cuda in sorted(cudas, key=natural)
        if not any(covers(one, cuda) or covers(cuda, one) for one in held)
    )


def _new_python(factory: Project, pythons: Collection[str], release: str, python: str) -> NewPython | None:
    if not python or Version(python) <= max(map(Version, pythons)):
        return None
    base = next((one.name for one in factory.bases if one.python == python), "")
    return NewPython(release=release, python=python, base=base)


def _of_the_index(factory: Project, unit: UpdateUnit, targets: tuple[Target, ...]) -> UnitNews:
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
    return UnitNews(
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


def _addable(
    factory: Project, locker: UvLocker, newest: Target, lock: Lock, one: FrameworkSeries
) -> NewRelease:
    """With the call of `add`: with the CUDA that a series' wheels pin, else that of the newest row."""
    command, cuda = f"imagefactory recipe add-version {newest.family} {one.series}", ""
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
def _copied(factory: Project) -> Iterator[Project]:
    """The factory with a copy of its locks and wheels, to solve in; the cache is the same."""
    with tempfile.TemporaryDirectory(prefix="imagefactory-watch-") as folder:
        if factory.lock_folder.is_dir():
            shutil.copytree(factory.lock_folder, Path(folder) / "lockfiles")
        for path in {one for target in factory.targets for one in from_files(target.origins).values()}:
            wheel, copy = factory.settings.root_path / path, Path(folder) / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            if wheel.is_file():
                shutil.copy2(wheel, copy)
        root = SettingValue(value=folder, origin=factory.settings.root.origin)
        yield replace(factory, settings=replace(factory.settings, root=root))


def _lock_news(
    factory: Project, unit: UpdateUnit, progress: Progress
) -> tuple[tuple[NewLock, ...], tuple[ImagefactoryError, ...]]:
    """The locks that a re-solve changes, those that others are built on first; and the faults of the others.

    Where a target cannot follow the one that it is built on, neither moves.
    """
    found: list[NewLock] = []
    faults: list[ImagefactoryError] = []
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


def _resolved(copy: Project, target: Target, progress: Progress) -> Iterator[NewLock]:
    done = lock_target(copy, target, LockOptions(update_all=True), progress)
    if done.before != done.after:
        moves = lock_moves(done.before, done.after)
        yield NewLock(name=target.name, moves=moves, target=target, lock=done.after)


def _base_news(factory: Project, unit: UpdateUnit, base: BaseSpec, progress: Progress) -> tuple[NewLock, ...]:
    before = read_base_lock(factory.base_lock_path(base))
    with _copied(factory) as copy:
        if not lock_base(copy, base, progress, update=True):
            return ()
        after = read_base_lock(copy.base_lock_path(base))
    if after is None:
        return ()
    return (NewLock(name=unit.name, moves=base_moves(before, after), target=None, lock=after),)


# --- verdicts -------------------------------------------------------------------------------------


def _expiring(factory: Project, targets: Sequence[Target], now: datetime) -> tuple[ExpiringVerdict, ...]:
    """What is proven now and not after `SOON`, by target and capability."""
    judge, found = VerdictReader(factory, now), []
    for target in targets:
        image = stored_image(factory, target)
        judged = judge.stored(image) if image else ()
        found += [
            ExpiringVerdict(target=target.name, capability=capability, day=end.date())
            for capability, end in ending(judged, judge.court.trust, now + SOON)
        ]
    return tuple(found)


# --- What is new, as a person reads it, as JSON, as a commit message and as a workflow takes it. Pure


_MAX_SHOWN = 12
"""Packages of one lock that the text names; JSON and messages name all."""
_COLUMN = 9
WIDTH = 72
"""Of a commit message."""


def format_news(news: UnitNews, width: int | None = None) -> str:
    """The unit's name, and a line or more for each thing that is new."""
    nothing = "nothing new in what could be solved" if news.faults else "nothing new"
    lines = [news.unit.name if news else f"{news.unit.name}: {nothing}"]
    for kind, first, more in _rows(news):
        room = (width or 110) - 2 - _COLUMN
        head, *rest = wrap(first, room)
        lines.append(f"  {kind.ljust(_COLUMN)}{head}")
        lines += [" " * (2 + _COLUMN) + line for line in rest]
        for text in more:
            lines += [" " * (4 + _COLUMN) + line for line in wrap(text, room - 2)]
    return "\n".join(lines)


def _rows(news: UnitNews) -> Iterable[tuple[str, str, Sequence[str]]]:
    """(kind, what is so, lines below it)."""
    for release in news.releases:
        yield "release", _release(news, release.found.series), [_to_have(news, release.command)]
    for one in news.cudas:
        yield "cuda", _cuda(news, one), [_to_have(news, one.command)]
    if news.python:
        yield "python", _python(news), []
    for moves, names in _grouped(news).items():
        more = [f"and {len(moves) - _MAX_SHOWN} more"] if len(moves) > _MAX_SHOWN else []
        kind, what = (
            ("base", _count(moves)) if news.unit.base else ("lock", f"{_count(moves)} in {_locks(names)}")
        )
        yield kind, what, [*map(str, moves[:_MAX_SHOWN]), *more]
    for verdict in news.expiring:
        text = f"{verdict.target} on {verdict.capability} holds until {verdict.day} only"
        yield "verdict", text, [f"to prove it again: imagefactory verify {verdict.target}"]


def _grouped(news: UnitNews) -> dict[tuple[VersionChange, ...], list[str]]:
    """The locks in which the same moves happen, by these."""
    groups: dict[tuple[VersionChange, ...], list[str]] = {}
    for one in news.locks:
        groups.setdefault(one.moves, []).append(one.name)
    return groups


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _locks(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} locks ({', '.join(names)})"


def _count(moves: Sequence[VersionChange]) -> str:
    if not moves:
        return "the same packages, written anew"
    return f"{len(moves)} package{'s move' if len(moves) > 1 else ' moves'}"


def _release(news: UnitNews, series: str) -> str:
    one = next(release.found for release in news.releases if release.found.series == series)
    framework = news.unit.targets[0].framework
    newest = f", now {one.release}" if one.release != one.series else ""
    since = f", since {one.begun}" if one.begun else ""
    return f"{framework} {one.series}{since}{newest}, for Python {' and '.join(one.pythons)}"


def _to_have(news: UnitNews, command: str) -> str:
    return f"to have it: {command or f'a row in recipes/{news.unit.name}.yaml'}"


def _cuda(news: UnitNews, one: NewCuda) -> str:
    framework = news.unit.targets[0].framework
    return f"{framework} {one.series} has builds for CUDA {one.cuda}, which no row has"


def _python(news: UnitNews) -> str:
    found = news.python
    if found is None:
        return ""
    framework, source = news.unit.targets[0].framework, news.unit.targets[0].source
    what = "wheels" if source == "pypi" else "builds"
    told = f"{framework} {found.release} has {what} for Python {found.python}, which no row uses"
    if source != "pypi":  # Python is one of the packages
        return told
    return f"{told}; {f'{found.base} carries it' if found.base else 'no base carries it yet'}"


def commit_message(news: UnitNews, rows: Sequence[NewRelease] = (), notes: Sequence[str] = ()) -> str:
    """Subject, empty line, why; empty where no lock changes and no release got one of the `rows`.

    `notes` are what a person must check in those rows.
    """
    added = [_release(news, one.found.series) for one in rows]
    if not news.locks and not added:
        return ""
    name = f"the base {news.unit.base.name}" if news.unit.base else news.unit.name
    subject = f"Add {_list([one.found.series for one in rows])} to {name}" if added else ""
    locked = f"Lock {name} anew: {_what(news)}" if news.locks else ""
    if added and locked:
        subject, locked = f"{subject}, and lock it anew", ""
    lines = [subject or locked]
    if added:
        lines += ["", *wrap("A row, its locks and definitions for each series released since:", WIDTH)]
        lines += [f"  {one}" for one in added]
        lines += [line for note in notes for line in ("", *wrap(note, WIDTH))]
    if news.locks:
        lines += ["", *_relocked(news)]
    missing = [(_release(news, one.found.series), one.command) for one in news.releases if one not in rows]
    missing += [(_cuda(news, one), one.command) for one in news.cudas]
    if missing:
        lines += ["", "Not in here, each a row of its own:"]
        for what, command in missing:
            lines += [f"  {what}", *([f"    {command}"] if command else [])]
    return "\n".join(lines)


def _relocked(news: UnitNews) -> Iterable[str]:
    if news.unit.base:
        why = "The archive's packages moved on, which is how Debian's security updates come in."
    else:
        why = "A re-solve within the recipe's bounds gives other packages."
    yield from wrap(why, WIDTH)
    for moves, names in _grouped(news).items():
        yield from ("", *wrap(f"{', '.join(names)}:", WIDTH), *(f"  {move}" for move in moves))
        yield from () if moves else ("  the same packages, written anew",)


def _what(news: UnitNews) -> str:
    """Whose move the subject names: the one package's, else how many."""
    names = sorted({move.name for one in news.locks for move in one.moves})
    if not names:
        return "the same packages"
    return names[0] if len(names) == 1 else f"{len(names)} packages move"


def news_json(news: UnitNews) -> dict[str, object]:
    return {
        "name": news.unit.name,
        "releases": [
            {
                "series": one.found.series,
                "release": one.found.release,
                "since": str(one.found.begun or ""),
                "pythons": one.found.pythons,
                "command": one.command,
            }
            for one in news.releases
        ],
        "cudas": news.cudas,
        "python": news.python,
        "locks": [{"name": one.name, "moves": [fields_of(move) for move in one.moves]} for one in news.locks],
        "expiring": [
            {"target": one.target, "capability": one.capability, "until": str(one.day)}
            for one in news.expiring
        ],
        "message": commit_message(news),
    }


def github_lines(every: Iterable[UnitNews]) -> str:
    """`families={"include":[...]}`: a job for each unit in which a lock or a row changes, with its branch."""
    jobs = [
        {"family": news.unit.name, "branch": f"relock/{news.unit.name.replace(':', '-')}"}
        for news in every
        if news.locks or any(one.command for one in news.releases)
    ]
    return "families=" + json.dumps({"include": jobs}, separators=(",", ":"))


# --- The stage from what is new to a change that can be committed: rows, locks and definitions


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchChanges:
    """What was written: files and folders, and the releases that have rows now.

    `faults` are of releases that cannot be locked, whose rows were taken out again. `notes` are what a
    person must check in the new rows.
    """

    paths: tuple[Path, ...]
    rows: tuple[NewRelease, ...] = ()
    notes: tuple[str, ...] = ()
    faults: tuple[ImagefactoryError, ...] = ()


def write_news(factory: Project, news: UnitNews, progress: Progress) -> WatchChanges:
    """Writes the changed locks of a unit and the definitions that follow from them, and for each release of a
    family of PyPI a row, its locks and definitions.

    Raises LockError or UsageError for what cannot be written.
    """
    paths, rows, faults = list(_written_locks(factory, news)), [], []
    notes = list[str]()
    for release in news.releases:
        if release.command:
            try:
                added = plan_addition(factory, news.unit.name, release.found.series, release.cuda)
                paths += _row(factory, added, progress)
                rows.append(release)
                notes += (f"{release.found.series}: {line}" for line in added.addition.notes)
            except ImagefactoryError as error:
                faults.append(error)
    return WatchChanges(
        paths=tuple(dict.fromkeys(paths)), rows=tuple(rows), notes=tuple(notes), faults=tuple(faults)
    )


def _written_locks(factory: Project, news: UnitNews) -> tuple[Path, ...]:
    written = []
    for one in news.locks:
        if isinstance(one.lock, BaseLock) and news.unit.base:
            path = factory.base_lock_path(news.unit.base)
            write_base_lock(path, one.lock)
            written.append(path)
        elif isinstance(one.lock, Lock):
            write_lock(factory.lock_folder, one.lock)
    for target in (one.target for one in news.locks):
        if target:
            write_definition(factory, target)
            written.append(factory.definition_folder(target))
    return tuple(written)


def _row(factory: Project, added: RowAddition, progress: Progress) -> tuple[Path, ...]:
    """Writes the row of a release, all of it or nothing. Raises as `make_addition` does."""
    text, strange = added.path.read_text(encoding="utf-8"), set(orphans(factory))
    try:
        made = set(make_addition(factory, added, progress, lambda _: None))
    except ImagefactoryError:
        replace_text(added.path, text)
        for path in set(orphans(factory)) - strange:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise
    return (added.path, *(factory.definition_folder(one) for one in added.targets if one.name in made))
