"""Find outdated parts: newer releases, CUDA, Python, locks and verdicts.

Also write the changes that update them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TypedDict

from packaging.metadata import RawMetadata, parse_email
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.access import package_index, uv_locker
from imagefactory.actions.definition import write_definition
from imagefactory.actions.images import stored_image
from imagefactory.actions.lock import (
    LockOptions,
    LockResult,
    conda_locker,
    excluded_reason,
    lock_base,
    lock_target,
    parents_first,
    release_cutoff,
)
from imagefactory.actions.locked import lock_state, orphans, read_target_lock
from imagefactory.actions.new_project import RowAddition, make_addition, plan_addition
from imagefactory.actions.verdicts import VerdictReader
from imagefactory.errors import (
    ImagefactoryError,
    LockError,
    NothingSelectedError,
    OutdatedPackageRow,
    ToolError,
    UsageError,
)
from imagefactory.fs import replace_text
from imagefactory.gpu.knowledge import offered
from imagefactory.gpu.knowledge.tables import covers
from imagefactory.gpu.values import rocm_of
from imagefactory.lock import OutdatedPackage
from imagefactory.lock.changes import PublisherChangeRow, VersionChange, base_moves, lock_moves
from imagefactory.lock.conda.explain import cudas_of, offered_to
from imagefactory.lock.debian.lock import read_base_lock, write_base_lock
from imagefactory.lock.files import write_lock
from imagefactory.lock.pypi.index import files_before
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
from imagefactory.settings.choices import SettingValue
from imagefactory.trust.claims import SOON
from imagefactory.trust.judgement import expiring_cells
from imagefactory.versions import natural, nearest
from imagefactory.views.text import wrap

# --- The search for news; it changes nothing
# Locks are solved again in a copy, so that an interrupted call does not change the project.


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateUnit:
    """Targets that update together: a family with all targets built on it, or a base (`base:debian-12`)."""

    name: str
    targets: tuple[Target, ...] = ()
    base: BaseSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRelease:
    """A framework series without a row, with the command that writes the row.

    `cuda` is set if no table has it. `command` is empty if a person must write the row.
    """

    offer: FrameworkSeries
    command: str
    cuda: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCuda:
    """A CUDA version with builds of the newest series in the recipe, but without a row."""

    series: str
    cuda: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPython:
    """A Python version with wheels of the newest release, but without a row.

    `base` has it, empty for none.
    """

    release: str
    python: str
    base: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLock:
    """The lock of a target or a base that would change if it were solved again."""

    name: str
    moves: tuple[VersionChange, ...]
    target: Target | None
    lock: Lock | BaseLock


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiringVerdict:
    """The last day on which a verdict of an image in the store is valid for this capability."""

    target: str
    capability: str
    day: date


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitNews:
    """The news about the recipes and locks of a unit.

    `faults` are the errors of single targets, for which nothing is known. `excluded` are releases that the
    cooldown excludes.
    """

    unit: UpdateUnit
    releases: tuple[NewRelease, ...] = ()
    cudas: tuple[NewCuda, ...] = ()
    python: NewPython | None = None
    locks: tuple[NewLock, ...] = ()
    expiring: tuple[ExpiringVerdict, ...] = ()
    faults: tuple[ImagefactoryError, ...] = ()
    excluded: tuple[OutdatedPackage, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.releases or self.cudas or self.python or self.locks or self.expiring or self.excluded
        )


def find_units(project: Project, names: Sequence[str]) -> tuple[UpdateUnit, ...]:
    """Return the units of these families and bases, or all. Raises NothingSelectedError."""
    families: dict[str, list[Target]] = {}
    roots = {target.family: _lowest(project, target).family for target in project.targets}
    for target in parents_first(project, project.targets):
        families.setdefault(roots[target.family], []).append(target)
    units = [UpdateUnit(name=name, targets=tuple(targets)) for name, targets in families.items()]
    units += [UpdateUnit(name=f"base:{base.name}", base=base) for base in project.bases if not base.image]
    known = {unit.name: unit for unit in units}
    selected = [roots.get(name, name) for name in names]
    for name in selected:
        if name not in known:
            suggestion = nearest(name, [*known, *roots])
            raise NothingSelectedError(
                "target-unknown",
                f"no family or base '{name}'",
                hint=f"did you mean '{suggestion}'?" if suggestion else f"known: {', '.join(known)}",
            )
    return tuple(known[name] for name in dict.fromkeys(selected)) if names else tuple(units)


def _lowest(project: Project, target: Target) -> Target:
    below = project.target_below(target)
    return _lowest(project, below) if below else target


def watch_unit(project: Project, unit: UpdateUnit, now: datetime, progress: Progress) -> UnitNews:
    """Return the news of a unit. Raises like `lock_base`, and StoreError for a corrupt store."""
    if unit.base:
        return UnitNews(unit=unit, locks=_base_news(project, unit, unit.base, progress))
    own_versions = tuple(
        target
        for target in unit.targets
        if target.gpu and not (target.on or target.frozen or rocm_of(target.cuda))
    )
    news = UnitNews(unit=unit)
    locks, faults, excluded = _lock_news(project, unit, progress)
    try:
        if own_versions:  # for CPUs only and AMD GPUs, only the locks are checked
            news = (_of_the_index if own_versions[0].source == "pypi" else _of_the_channels)(
                project, unit, own_versions
            )
    except LockError as error:
        faults = (*faults, error)
    excluded = tuple(dict.fromkeys((*news.excluded, *excluded)))
    expiring = _expiring(project, unit.targets, now)
    return replace(news, locks=locks, expiring=expiring, faults=faults, excluded=excluded)


# --- the index and the channels -------------------------------------------------------------------


def _newest(targets: tuple[Target, ...]) -> Target:
    return max(targets, key=lambda target: (natural(target.version), natural(target.cuda)))


def _of_the_channels(project: Project, unit: UpdateUnit, targets: tuple[Target, ...]) -> UnitNews:
    """Return the news in the channels of the newest row. Raises LockError for an unreadable channel."""
    newest = _newest(targets)
    cutoff = release_cutoff(project, newest, None, LockOptions(update_all=True))
    locker, pythons = conda_locker(project), {target.python for target in targets}
    versions = {target.version for target in targets}
    builds = locker.builds(newest, cutoff)
    all_pythons = {build.python for build in builds if build.python}
    offers = series_after(offered_to(builds, pythons), versions)
    every = series_after(offered_to(locker.builds(newest), pythons), versions) if cutoff else offers
    return UnitNews(
        unit=unit,
        releases=tuple(NewRelease(offer=row, command="") for row in offers),
        cudas=_new_cudas(targets, cudas_of(builds, newest.version, pythons)),
        python=_new_python(project, pythons, *python_after(offered_to(builds, all_pythons))),
        excluded=_excluded_series(newest, offers, every),
    )


def _excluded_series(
    newest: Target, offers: Sequence[FrameworkSeries], every: Sequence[FrameworkSeries]
) -> tuple[OutdatedPackage, ...]:
    """Return the series among `every` that the cooldown excludes from `offers`."""
    offered_series = {row.series for row in offers}
    return tuple(
        OutdatedPackage(
            name=newest.framework,
            locked=newest.version,
            newest=row.series,
            reason=excluded_reason(datetime(*row.begun.timetuple()[:3], tzinfo=UTC)),
            accept="",
            named=False,
            uploaded=str(row.begun),
        )
        for row in every
        if row.series not in offered_series and row.begun
    )


def _new_cudas(targets: tuple[Target, ...], cudas: Collection[str]) -> tuple[NewCuda, ...]:
    """Return the CUDA versions without a row for the newest series.

    A row with `12` has every minor version.
    """
    newest = _newest(targets)
    row_cudas = [target.cuda for target in targets if target.version == newest.version]
    return tuple(
        NewCuda(
            series=newest.version,
            cuda=cuda,
            command=f"imagefactory recipe add-version {newest.family} {newest.version} --cuda {cuda}"
            if newest.source == "pypi"
            else "",
        )
        for cuda in sorted(cudas, key=natural)
        if not any(covers(row_cuda, cuda) or covers(cuda, row_cuda) for row_cuda in row_cudas)
    )


def _new_python(project: Project, pythons: Collection[str], release: str, python: str) -> NewPython | None:
    if not python or Version(python) <= max(map(Version, pythons)):
        return None
    base = next((row.name for row in project.bases if row.python == python), "")
    return NewPython(release=release, python=python, base=base)


def _of_the_index(project: Project, unit: UpdateUnit, targets: tuple[Target, ...]) -> UnitNews:
    """Return the news on the project page. Raises LockError without a lock or if the page is unreadable."""
    newest = _newest(targets)
    lock = read_target_lock(project, newest)
    name = canonicalize_name(newest.framework)
    wheel = next((package for package in lock.wheels if package.name == name), None) if lock else None
    if lock is None or wheel is None:
        raise LockError(
            "lock-missing",
            f"{newest.name} has no lock to start from",
            hint=f"run imagefactory lock {newest.name}",
        )
    locker = uv_locker(package_index(project))
    all_files = locker.listed([wheel], replace(lock, cutoff=None)).get(wheel, ())
    lock = replace(lock, cutoff=release_cutoff(project, newest, None, LockOptions(update_all=True)))
    files, pythons = files_before(name, all_files, lock), {target.python for target in targets}
    versions = {target.version for target in targets}
    offers = newer_series(name, files, versions, pythons, lock.platform)
    every = newer_series(name, all_files, versions, pythons, lock.platform)
    releases = tuple(_addable(project, locker, newest, lock, row) for row in offers)
    known = {build.cuda for build in offered(newest.framework, newest.version)}
    return UnitNews(
        unit=unit,
        releases=releases,
        cudas=_new_cudas(
            targets,
            known | cuda_extras(_metadata(locker, lock, wheel.version, newest).get("provides_extra", [])),
        ),
        python=_new_python(project, pythons, *newest_python(name, files, lock.platform)),
        excluded=_excluded_series(newest, offers, every),
    )


def _metadata(locker: UvLocker, lock: Lock, release: str, newest: Target) -> RawMetadata:
    """Return the metadata of a release, empty if the index does not serve it (PEP 658)."""
    try:
        return parse_email(locker.metadata(f"{newest.framework}=={release}", lock))[0]
    except LockError:
        return {}


def _addable(
    project: Project, locker: UvLocker, newest: Target, lock: Lock, row: FrameworkSeries
) -> NewRelease:
    """Return a release with its command: with the CUDA version that its wheels pin, else that of the newest
    row.
    """
    command, cuda = f"imagefactory recipe add-version {newest.family} {row.series}", ""
    try:
        plan_addition(project, newest.family, row.series, "")
    except UsageError:  # no table has the CUDA of this series
        needs = _metadata(locker, lock, row.release, newest).get("requires_dist", [])
        cuda = cuda_of(needs) or newest.cuda
        cuda = cuda if "." in newest.cuda else cuda.partition(".")[0]
        command = f"{command} --cuda {cuda}"
    return NewRelease(offer=row, command=command, cuda=cuda)


# --- locks ----------------------------------------------------------------------------------------


@contextmanager
def _copied(project: Project) -> Iterator[Project]:
    """Yield the project with a copy of its locks and wheels, and the same cache."""
    with tempfile.TemporaryDirectory(prefix="imagefactory-watch-") as directory:
        if project.lock_folder.is_dir():
            shutil.copytree(project.lock_folder, Path(directory) / "lockfiles")
        for path in {file for target in project.targets for file in from_files(target.origins).values()}:
            wheel, copy = project.settings.root_path / path, Path(directory) / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            if wheel.is_file():
                shutil.copy2(wheel, copy)
        root = SettingValue(value=directory, origin=project.settings.root.origin)
        yield replace(project, settings=replace(project.settings, root=root))


def _lock_news(
    project: Project, unit: UpdateUnit, progress: Progress
) -> tuple[tuple[NewLock, ...], tuple[ImagefactoryError, ...], tuple[OutdatedPackage, ...]]:
    """Return the locks that would change, parents first, the errors of the others, and excluded releases.

    If a target cannot use its parent's new lock, neither changes.
    """
    offer: list[NewLock] = []
    faults: list[ImagefactoryError] = []
    excluded: list[OutdatedPackage] = []
    stuck: set[str] = set()
    with _copied(project) as copy, progress.task(unit.name, total=len(unit.targets), unit="locks") as task:
        for target in unit.targets:
            try:
                # The packages of a frozen target are those of another tool's lock, which its tool upgrades.
                if not target.frozen and lock_state(copy, target) != Outcome.UNSOLVABLE:
                    result = lock_target(copy, target, LockOptions(update_all=True), progress)
                    offer += _changed(result)
                    excluded += [row for row in result.behind if row.uploaded]
            except (LockError, ToolError) as error:
                faults.append(error)
                stuck |= {_lowest(project, target).name} if target.on else set()
            task.advance(1)
    moving = (lock for lock in offer if lock.target and _lowest(project, lock.target).name not in stuck)
    return tuple(moving), tuple(faults), tuple(excluded)


def _changed(result: LockResult) -> Iterator[NewLock]:
    if result.before != result.after:
        moves, target = lock_moves(result.before, result.after), result.target
        yield NewLock(name=target.name, moves=moves, target=target, lock=result.after)


def _base_news(project: Project, unit: UpdateUnit, base: BaseSpec, progress: Progress) -> tuple[NewLock, ...]:
    before = read_base_lock(project.base_lock_path(base))
    with _copied(project) as copy:
        if not lock_base(copy, base, progress, update=True):
            return ()
        after = read_base_lock(copy.base_lock_path(base))
    if after is None:
        return ()
    return (NewLock(name=unit.name, moves=base_moves(before, after), target=None, lock=after),)


# --- verdicts -------------------------------------------------------------------------------------


def _expiring(project: Project, targets: Sequence[Target], now: datetime) -> tuple[ExpiringVerdict, ...]:
    """Return the verdicts that expire within `SOON`, by target and capability."""
    reader, offer = VerdictReader(project, now), []
    for target in targets:
        image = stored_image(project, target)
        judged = reader.stored(image) if image else ()
        offer += [
            ExpiringVerdict(target=target.name, capability=capability, day=end.date())
            for capability, end in expiring_cells(judged, reader.court.trust, now + SOON)
        ]
    return tuple(offer)


# --- News as text, as JSON, as a commit message and for a workflow. Pure


_MAX_SHOWN = 12
"""The limit of packages of one lock in the text. JSON and commit messages have all."""
_COLUMN = 9
WIDTH = 72
"""The number of columns of a commit message."""


def format_news(news: UnitNews, width: int | None = None) -> str:
    """Return the name of the unit, and lines for each piece of news."""
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
    """Yield (type, summary, further lines) of each piece of news."""
    for release in news.releases:
        yield "release", _release(news, release.offer.series), [_to_have(news, release.command)]
    for row in news.cudas:
        yield "cuda", _cuda(news, row), [_to_have(news, row.command)]
    if news.python:
        yield "python", _python(news), []
    for moves, names in _grouped(news).items():
        more = [f"and {len(moves) - _MAX_SHOWN} more"] if len(moves) > _MAX_SHOWN else []
        kind, unit_text = (
            ("base", _count(moves)) if news.unit.base else ("lock", f"{_count(moves)} in {_locks(names)}")
        )
        lines = [line for move in moves[:_MAX_SHOWN] for line in move.lines]
        yield kind, unit_text, [*lines, *more]
    for excluded in news.excluded:
        yield "cooldown", str(excluded), []
    for verdict in news.expiring:
        text = f"{verdict.target} on {verdict.capability} is valid only until {verdict.day}"
        yield "verdict", text, [f"to verify it again: imagefactory verify {verdict.target}"]


def _grouped(news: UnitNews) -> dict[tuple[VersionChange, ...], list[str]]:
    """Return the names of locks by their version changes."""
    groups: dict[tuple[VersionChange, ...], list[str]] = {}
    for lock in news.locks:
        groups.setdefault(lock.moves, []).append(lock.name)
    return groups


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _locks(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} locks ({', '.join(names)})"


def _count(moves: Sequence[VersionChange]) -> str:
    if not moves:
        return "the same packages, locked again"
    return f"{len(moves)} package{'s move' if len(moves) > 1 else ' moves'}"


def _release(news: UnitNews, series: str) -> str:
    row = next(release.offer for release in news.releases if release.offer.series == series)
    framework = news.unit.targets[0].framework
    newest = f", now {row.release}" if row.release != row.series else ""
    since = f", since {row.begun}" if row.begun else ""
    return f"{framework} {row.series}{since}{newest}, for Python {' and '.join(row.pythons)}"


def _to_have(news: UnitNews, command: str) -> str:
    return f"to have it: {command or f'a row in recipes/{news.unit.name}.yaml'}"


def _cuda(news: UnitNews, row: NewCuda) -> str:
    framework = news.unit.targets[0].framework
    return f"{framework} {row.series} has builds for CUDA {row.cuda}, which no row has"


def _python(news: UnitNews) -> str:
    offer = news.python
    if offer is None:
        return ""
    framework, source = news.unit.targets[0].framework, news.unit.targets[0].source
    unit_text = "wheels" if source == "pypi" else "builds"
    text = f"{framework} {offer.release} has {unit_text} for Python {offer.python}, which no row uses"
    if source != "pypi":  # Python is one of the packages
        return text
    return f"{text}; {f'{offer.base} carries it' if offer.base else 'no base carries it yet'}"


def commit_message(news: UnitNews, rows: Sequence[NewRelease] = (), notes: Sequence[str] = ()) -> str:
    """Return a commit message, empty if no lock changes and no release is in `rows`.

    `notes` are facts in these rows that a person must check.
    """
    added = [_release(news, row.offer.series) for row in rows]
    if not news.locks and not added:
        return ""
    name = f"the base {news.unit.base.name}" if news.unit.base else news.unit.name
    subject = f"Add {_list([row.offer.series for row in rows])} to {name}" if added else ""
    locked = f"Re-lock {name}: {_what(news)}" if news.locks else ""
    if added and locked:
        subject, locked = f"{subject}, and re-lock it", ""
    lines = [subject or locked]
    if added:
        lines += ["", *wrap("A row, its locks and definitions for each series released since:", WIDTH)]
        lines += [f"  {row}" for row in added]
        lines += [line for note in notes for line in ("", *wrap(note, WIDTH))]
    if news.locks:
        lines += ["", *_relocked(news)]
    missing = [(_release(news, row.offer.series), row.command) for row in news.releases if row not in rows]
    missing += [(_cuda(news, row), row.command) for row in news.cudas]
    if missing:
        lines += ["", "Not in here, each a row of its own:"]
        for unit_text, command in missing:
            lines += [f"  {unit_text}", *([f"    {command}"] if command else [])]
    return "\n".join(lines)


def _relocked(news: UnitNews) -> Iterable[str]:
    if news.unit.base:
        reason = "The archive's packages moved on, which is how Debian's security updates come in."
    else:
        reason = "A re-solve within the recipe's bounds gives other packages."
    yield from wrap(reason, WIDTH)
    for moves, names in _grouped(news).items():
        lines = (f"  {line}" for move in moves for line in move.lines)
        yield from ("", *wrap(f"{', '.join(names)}:", WIDTH), *lines)
        yield from () if moves else ("  the same packages, locked again",)


def _what(news: UnitNews) -> str:
    """Return the changed package for the subject, or the number of packages."""
    names = sorted({move.name for lock in news.locks for move in lock.moves})
    if not names:
        return "the same packages"
    return names[0] if len(names) == 1 else f"{len(names)} packages move"


class NewReleaseRow(TypedDict):
    series: str
    release: str
    since: str
    """The day of the first release of the series; empty if it is unknown."""
    pythons: list[str]
    command: str
    """The command that adds a row; empty if it must be written manually."""


class VersionChangeRow(TypedDict):
    name: str
    before: str
    after: str
    publisher: PublisherChangeRow | None
    """The change of a wheel's publisher, null for none."""


class OutdatedLockRow(TypedDict):
    name: str
    changes: list[VersionChangeRow]


class ExpiringVerdictRow(TypedDict):
    target: str
    capability: str
    valid_until: str


class RecipeNewsRow(TypedDict):
    name: str
    """A family, or `base:NAME`."""
    releases: list[NewReleaseRow]
    cudas: list[NewCuda]
    python: NewPython | None
    locks: list[OutdatedLockRow]
    expiring: list[ExpiringVerdictRow]
    excluded: list[OutdatedPackageRow]
    """Releases that the cooldown excludes."""
    message: str
    """The message of a commit with these changes."""
    written: list[str]
    """The files that `recipe update` changed."""


def news_json(news: UnitNews, message: str, written: list[str]) -> RecipeNewsRow:
    return RecipeNewsRow(
        name=news.unit.name,
        releases=[
            NewReleaseRow(
                series=row.offer.series,
                release=row.offer.release,
                since=str(row.offer.begun or ""),
                pythons=list(row.offer.pythons),
                command=row.command,
            )
            for row in news.releases
        ],
        cudas=list(news.cudas),
        python=news.python,
        locks=[
            OutdatedLockRow(
                name=row.name,
                changes=[
                    VersionChangeRow(
                        name=move.name,
                        before=move.before,
                        after=move.after,
                        publisher=move.publisher.as_json() if move.publisher else None,
                    )
                    for move in row.moves
                ],
            )
            for row in news.locks
        ],
        expiring=[
            ExpiringVerdictRow(target=row.target, capability=row.capability, valid_until=str(row.day))
            for row in news.expiring
        ],
        excluded=[row.as_json() for row in news.excluded],
        message=message,
        written=written,
    )


def github_lines(units: Iterable[UnitNews]) -> str:
    """Return `families={"include":[...]}`: a job and branch for each unit whose locks or rows change."""
    jobs = [
        {"family": news.unit.name, "branch": f"relock/{news.unit.name.replace(':', '-')}"}
        for news in units
        if news.locks or any(release.command for release in news.releases)
    ]
    return "families=" + json.dumps({"include": jobs}, separators=(",", ":"))


# --- The change that can be committed: rows, locks and definitions


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchChanges:
    """The written files and directories, and the releases that now have rows.

    `faults` are errors of releases that cannot be locked; their rows were removed again. `notes` are facts in
    the new rows that a person must check.
    """

    paths: tuple[Path, ...]
    rows: tuple[NewRelease, ...] = ()
    notes: tuple[str, ...] = ()
    faults: tuple[ImagefactoryError, ...] = ()


def write_news(project: Project, news: UnitNews, progress: Progress) -> WatchChanges:
    """Write the changed locks of a unit with their definitions, and for each PyPI release a row with its
    locks.

    Raises LockError or UsageError if a file cannot be written.
    """
    paths, rows, faults = list(_written_locks(project, news)), [], []
    notes = list[str]()
    for release in news.releases:
        if release.command:
            try:
                added = plan_addition(project, news.unit.name, release.offer.series, release.cuda)
                paths += _row(project, added, progress)
                rows.append(release)
                notes += (f"{release.offer.series}: {line}" for line in added.addition.notes)
            except ImagefactoryError as error:
                faults.append(error)
    return WatchChanges(
        paths=tuple(dict.fromkeys(paths)), rows=tuple(rows), notes=tuple(notes), faults=tuple(faults)
    )


def _written_locks(project: Project, news: UnitNews) -> tuple[Path, ...]:
    written = []
    for row in news.locks:
        if isinstance(row.lock, BaseLock) and news.unit.base:
            path = project.base_lock_path(news.unit.base)
            write_base_lock(path, row.lock)
            written.append(path)
        elif isinstance(row.lock, Lock):
            write_lock(project.lock_folder, row.lock)
    for target in (row.target for row in news.locks):
        if target:
            write_definition(project, target)
            written.append(project.definition_folder(target))
    return tuple(written)


def _row(project: Project, added: RowAddition, progress: Progress) -> tuple[Path, ...]:
    """Write the row of a release completely or not at all. Raises like `make_addition`."""
    text, strange = added.path.read_text(encoding="utf-8"), set(orphans(project))
    try:
        names = set(make_addition(project, added, progress, lambda _: None))
    except ImagefactoryError:
        replace_text(added.path, text)
        for path in set(orphans(project)) - strange:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise
    return (
        added.path,
        *(project.definition_folder(target) for target in added.targets if target.name in names),
    )
