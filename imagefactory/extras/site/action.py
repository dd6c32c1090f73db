"""The contents of a report: each image with its verdicts, read once for the tables and the pages.

    project + targets   -> survey()          -> images, verdicts, rulings ┐
    a signed catalog    -> survey_catalog()  -> offers ───────────────────┴-> ReportContents -> pages, badges

pages.py formats them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from imagefactory.actions.centers import only_center
from imagefactory.errors import CheckFailedError, NothingSelectedError, UsageError, os_reason
from imagefactory.extras.site.images import ReportImage, ReportSubmit, describe, describe_offer
from imagefactory.extras.site.tables import TableData, TableRequest, survey, survey_catalog
from imagefactory.fs import replace_text
from imagefactory.gpu.capability import Capability
from imagefactory.jobs.make import resolve_job, write_job
from imagefactory.jobs.offer import forms_of
from imagefactory.jobs.spec import JobParameters
from imagefactory.lock.files import former_locks
from imagefactory.matrix.combos import ComboCell
from imagefactory.model import Target
from imagefactory.plugins import load_extra
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import site_of
from imagefactory.settings.load import Settings
from imagefactory.trust.audit import PUBLISH, read_audit
from imagefactory.trust.policy import TrustRules, read_trust

MOST_ACTS = 10_000
"""The limit of log entries of the store in a report."""
_REGISTRY_PLACE = re.compile(
    r"(?=[^/]*[.:])[A-Za-z0-9.-]+(?::[0-9]+)?(?:/[a-z0-9._-]+)+(?P<tag>[:@][\w.:-]+)?"
)
MARK_FILE = ".imagefactory-report"
"""A file that marks a directory as a report of imagefactory, whose files may be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicLogEntry:
    """An entry in the log of the store without private data: users, machines and paths.

    `key` is the name of a trusted key, or the first digits of its ID. `where` is a repository in a registry.
    Both may be empty.
    """

    time: str
    action: str
    what: str
    where: str
    key: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContents:
    """The contents of a report.

    `keys` are names of trusted keys by ID. `trusted` means that a key is trusted here.

    `night` are the values for the page of the last nightly run, None if there was none. `acts` are entries in
    the log of the store, the oldest first.
    """

    made: datetime
    place: str
    capabilities: tuple[Capability, ...]
    images: tuple[ReportImage, ...]
    keys: Mapping[str, str]
    trusted: bool = True
    notes: tuple[str, ...] = ()
    night: Mapping[str, Any] | None = None
    acts: tuple[PublicLogEntry, ...] = ()


def read_report(
    project: Project, targets: Sequence[Target], request: TableRequest, progress: Progress
) -> ReportContents:
    """Return the report of a project. Raises like `survey`."""
    tables, surveyed = survey(project, targets, request, progress)
    former = former_locks(project.lock_folder, targets)
    images = [describe(project, row, former.get(row.stage.target.name)) for row in surveyed]
    trust = read_trust(project.settings.files)
    reported = _reported(tables, images, project.settings, trust)
    if last_page := load_extra("nightly.view:last_page"):
        reported = replace(reported, night=last_page(project.settings))
    try:
        return replace(reported, acts=read_acts(project.settings.store_path, reported.keys))
    except OSError as error:
        note = f"the log of this store cannot be read: {os_reason(error)}"
        return replace(reported, notes=(*reported.notes, note))


def read_acts(store: Path, keys: Mapping[str, str]) -> tuple[PublicLogEntry, ...]:
    """Return the public part of the store's log. `keys` are names by key ID. Raises OSError."""
    return tuple(_public(row, keys) for row in deque(read_audit(store), maxlen=MOST_ACTS))


def _public(row: Mapping[str, str], keys: Mapping[str, str]) -> PublicLogEntry:
    keyid, location = row.get("key", ""), row.get("where", "")
    repository = _REGISTRY_PLACE.fullmatch(location)
    if repository is None or (row.get("action") == PUBLISH and not repository["tag"]):
        location = ""  # a path of this machine
    return PublicLogEntry(
        time=row.get("time", ""),
        action=row.get("action", ""),
        what=row.get("what", ""),
        where=location,
        key=keys.get(keyid) or keyid[:16],
        why=row.get("why", ""),
    )


def read_cataloged_report(
    settings: Settings, environ: Mapping[str, str], names: Sequence[str], request: TableRequest
) -> ReportContents:
    """Return the report of a signed catalog, without layers and packages. Raises like `survey_catalog`."""
    center, names = only_center(settings, names)
    tables, offers = survey_catalog(center, environ, names, request)
    return _reported(tables, [describe_offer(offer) for offer in offers], center.settings, center.trust)


def _reported(
    tables: TableData, images: Sequence[ReportImage], settings: Settings, trust: TrustRules
) -> ReportContents:
    rows = _by_target(tables)
    return ReportContents(
        made=tables.made,
        place=tables.place,
        capabilities=tuple(sorted({combo.capability for combo in tables.combos})),
        images=tuple(
            replace(
                image,
                combos=rows.get(image.target, ()),
                submit=_submit(image, trust, settings, tables.made),
                commands=_commands(image, settings),
            )
            for image in images
        ),
        keys={key.keyid: key.name for key in trust.keys},
        trusted=tables.trusted and bool(trust.keys),
        notes=tables.notes,
    )


def _by_target(tables: TableData) -> dict[str, tuple[ComboCell, ...]]:
    rows: dict[str, list[ComboCell]] = {}
    for combo in tables.combos:
        rows.setdefault(combo.target, []).append(combo)
    return {name: tuple(some) for name, some in rows.items()}


def _submit(image: ReportImage, trust: TrustRules, settings: Settings, now: datetime) -> ReportSubmit:
    """Return the file that `imagefactory job write` would write.

    Predictions are used only without verdicts.
    """
    offer = image.offer
    if offer is None:
        return ReportSubmit(why=image.block)
    request = JobParameters(
        target=image.target,
        site=site_of(settings.site.value, settings),
        sif_folder=settings.sif_folder.value,
    )
    for predicted in (False, True):
        try:
            job = resolve_job(offer, replace(request, predicted=predicted), trust, now)
            return ReportSubmit(text=next(iter(write_job(job).values())), predicted=predicted)
        except CheckFailedError as error:
            reason = error.message
        except (NothingSelectedError, UsageError) as error:
            return ReportSubmit(why=f"{error.message}: {error.hint}" if error.hint else error.message)
    return ReportSubmit(why=reason)


def _commands(image: ReportImage, settings: Settings) -> tuple[str, ...]:
    """Return commands that fetch the image by digest, or commands for this machine without a registry."""
    offer, name = image.offer, image.target
    if offer is None:
        return (f"imagefactory build {name}",)
    commands = []
    for form in forms_of(offer, settings.sif_folder.value):
        if form.image.kind is ImageKind.DOCKER:
            commands += [
                f"docker pull {offer.image.reference}",
                f"apptainer pull {name}.sif {form.image.address}",
            ]
        elif form.fetch:
            commands.append(form.fetch)
    commands += [] if offer.image.reference else [f"imagefactory run {name} -- python"]
    return tuple(dict.fromkeys(commands))


MANY_FILES = 100
"""A report of more files is formatted and written by several processes: each file takes 2 ms."""


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes every `step`-th file of a report, from `start`. Lives in processes that share its memory."""

    directory: Path
    files: Mapping[str, str]
    step: int

    def write(self, start: int) -> None:
        for name in islice(self.files, start, None, self.step):
            replace_text(self.directory / name, self.files[name])


_writers: list[_Writer] = []


def _write_files(directory: Path, files: Mapping[str, str], workers: int) -> None:
    if workers == 1 or len(files) <= MANY_FILES:
        _Writer(directory, files, 1).write(0)
        return
    # Forked, so that nothing of the report is copied to them, and it reaches them before any task.
    context, writer = get_context("fork"), _Writer(directory, files, workers)
    with ProcessPoolExecutor(workers, context, _writers.append, (writer,)) as pool:
        for _ in pool.map(_write_part, range(workers)):
            pass


def _write_part(start: int) -> None:
    _writers[-1].write(start)


def write_report(directory: Path, files: Mapping[str, str], *, force: bool = False, workers: int = 1) -> int:
    """Write the pages, remove outdated pages of an earlier report, and return the number of pages.

    Many are written by that number of processes. Raises UsageError for a directory with other files in it,
    unless `force` is set.
    """
    mark = directory / MARK_FILE
    there = set(mark.read_text("utf-8").splitlines()) if mark.is_file() else set()
    others = directory.is_dir() and any(
        not path.name.startswith((MARK_FILE, f".{MARK_FILE}")) for path in directory.iterdir()
    )
    if others and not mark.is_file() and not force:
        raise UsageError(
            "output-foreign-files",
            f"{directory} contains files of other programs",
            hint="choose another directory with --output, or overwrite them with --force",
        )
    directory.mkdir(parents=True, exist_ok=True)
    # First, so that an interrupted run leaves a directory that the next run recognizes as a report.
    replace_text(mark, "".join(f"{name}\n" for name in sorted(there | set(files))))
    for name in {str(Path(name).parent) for name in files}:
        (directory / name).mkdir(parents=True, exist_ok=True)
    _write_files(directory, files, workers)
    for name in there - set(files):
        path = directory / name
        if directory.resolve() in path.resolve().parents:
            path.unlink(missing_ok=True)
    replace_text(mark, "".join(f"{name}\n" for name in sorted(files)))
    return len(files)
