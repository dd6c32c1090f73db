"""The stage from what is new to a change that can be committed: rows, locks and definitions."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import FactoryError
from imagefactory.project import Factory
from imagefactory.fs import replace_text
from imagefactory.lock.debian.lock import write_base_lock
from imagefactory.lock.files import write_lock
from imagefactory.model import BaseLock, Lock
from imagefactory.progress import Progress
from imagefactory.stages.add import Added, make_addition, plan_addition
from imagefactory.actions.definition import write_definition
from imagefactory.actions.locked import orphans
from imagefactory.stages.watch import NewRelease, News


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written: files and folders, and the releases that have rows now.

    `faults` are of releases that cannot be locked, whose rows were taken out again. `notes` are what a
    person must check in the new rows.
    """

    paths: tuple[Path, ...]
    rows: tuple[NewRelease, ...] = ()
    notes: tuple[str, ...] = ()
    faults: tuple[FactoryError, ...] = ()


def write_news(factory: Factory, news: News, progress: Progress) -> Written:
    """Writes the changed locks of a unit and the definitions that follow from them, and for each release of a
    family of PyPI a row, its locks and definitions.

    Raises LockError or UsageError for what cannot be written.
    """
    paths, rows, faults = list(_locks(factory, news)), [], []
    notes = list[str]()
    for release in news.releases:
        if release.command:
            try:
                added = plan_addition(factory, news.unit.name, release.found.series, release.cuda)
                paths += _row(factory, added, progress)
                rows.append(release)
                notes += (f"{release.found.series}: {line}" for line in added.addition.told)
            except FactoryError as error:
                faults.append(error)
    return Written(
        paths=tuple(dict.fromkeys(paths)), rows=tuple(rows), notes=tuple(notes), faults=tuple(faults)
    )


def _locks(factory: Factory, news: News) -> tuple[Path, ...]:
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


def _row(factory: Factory, added: Added, progress: Progress) -> tuple[Path, ...]:
    """Writes the row of a release, all of it or nothing. Raises as `make_addition` does."""
    text, strange = added.path.read_text(encoding="utf-8"), set(orphans(factory))
    try:
        made = set(make_addition(factory, added, progress, lambda _: None))
    except FactoryError:
        replace_text(added.path, text)
        for path in set(orphans(factory)) - strange:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise
    return (added.path, *(factory.definition_folder(one) for one in added.targets if one.name in made))
