"""What sites want in a submit file. The rows are in sites.toml, each with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.schedulers.pool import ImageKind
from imagefactory.serialize import ObjectSchema
from imagefactory.settings.choices import HTCONDOR, SLURM
from imagefactory.settings.load import Settings
from imagefactory.settings.own_commands import names_of, parse_commands, parse_options, split_requirements

GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLengthClass:
    """A class of jobs by time: jobs that run for at most `hours` say so by `line`."""

    hours: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCommand:
    """A line of every GPU job's submit file. `why` says what it does; `agreed` is whether all of the site's
    own pages ask for it."""

    line: str
    agreed: bool
    why: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRequirement:
    """A command that jobs should have, and `why`; `refused` is whether jobs without it are."""

    key: str
    write: str
    why: str
    refused: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredAddress:
    """Where data was, by the beginning of its address. `gone` is whether its owner says that it is off.

    `instead` is what to write; where `same` is true it is the same place by another name.
    """

    start: str
    instead: str
    why: str
    gone: bool
    same: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place that jobs are submitted at.

    `kinds` are the kinds of image that its pages let a job use, what they advise first. `commands` stand in
    every submit file of a GPU job; `lengths`, the shortest first, say how long it runs, `usual` is the one
    that counts where nobody says. `staging` pairs beginnings of an image's address and the attribute that
    must be true of a machine then. `advice` are lines of comments on what a person may want.

    `resumable` is the line of a GPU job that may be evicted for GPUs that it then gets too; empty for none.

    With `gpus_alone` `lengths` and `advice` are those of GPU jobs alone, as `commands` always are.
    `needs` are commands that any job should have. `nested` is whether GPUs tell of themselves in ads of
    their own alone, and `migrated` whether its pages put container_image in the place of +SingularityImage.
    `getenv` says why `getenv = true` is refused, empty where it is not known to be. `batch` is what runs its
    jobs: HTCONDOR, or SLURM or KUBERNETES, of which `kinds` alone counts. `own` are what the settings add to
    every job: submit commands, of SLURM options of sbatch.
    """

    name: str
    title: str
    kinds: tuple[ImageKind, ...]
    source: str
    needs: tuple[SiteRequirement, ...]
    commands: tuple[SiteCommand, ...] = ()
    lengths: tuple[JobLengthClass, ...] = ()
    usual: int = 0
    staging: tuple[tuple[str, str], ...] = ()
    advice: tuple[str, ...] = ()
    resumable: str = ""
    gpus_alone: bool = False
    nested: bool = False
    migrated: bool = False
    getenv: str = ""
    batch: str = HTCONDOR
    own: tuple[str, ...] = ()

    def lines(self, time: timedelta | None, *, gpus: bool = True, resumes: bool = False) -> tuple[str, ...]:
        """The site's own lines, for a job that runs that long. Raises UsageError where it is too long.

        `resumes` is whether the job goes on after an eviction.
        """
        added, _ = split_requirements(self.own)
        if gpus or not self.gpus_alone:
            commands = (command.line for command in self.commands if gpus)
            again = (self.resumable,) if self.resumable and resumes and gpus else ()
            given = (*commands, *self._length(time), *again)
        else:
            given = _longest(time)
        return (*(line for line in given if not names_of((line,)) & names_of(added)), *added)

    def comments(self, *, gpus: bool, resumes: bool = False) -> tuple[str, ...]:
        """The advice for a job."""
        more = ("a job of a few hours, or with checkpoints, gets more GPUs with:", self.resumable)
        tagged = "accounting_group" in names_of(self.own)
        advice = (
            *(() if tagged else self.advice),
            *(more if self.resumable and gpus and not resumes else ()),
        )
        return advice if gpus or not self.gpus_alone else ()

    def requirements(self, address: str) -> tuple[str, ...]:
        """What a machine must have so that an image at `address` (of `container_image`) is got there."""
        _, needs = split_requirements(self.own)
        return (*(f"({name} == true)" for name in self.attributes(address)), *needs)

    def attributes(self, address: str) -> tuple[str, ...]:
        """The attributes of `requirements`."""
        return tuple(dict.fromkeys(name for start, name in self.staging if address.startswith(start)))

    def _length(self, time: timedelta | None) -> tuple[str, ...]:
        if not self.lengths:
            return _longest(time)
        if time is None:
            return (self.lengths[self.usual].line,)
        for one in self.lengths:
            if time <= timedelta(hours=one.hours):
                return (one.line,)
        raise UsageError(
            "job-too-long",
            f"{self.title} does not run jobs longer than {self.lengths[-1].hours} hours",
            hint="write checkpoints and split the job into shorter ones, or ask the site",
        )


def _longest(time: timedelta | None) -> tuple[str, ...]:
    return () if time is None else (f"allowed_execute_duration = {int(time.total_seconds())}",)


def read_sites(text: str) -> tuple[tuple[Site, ...], tuple[RetiredAddress, ...]]:
    """Return the rows of sites.toml: sites, and addresses that moved. Raises StatementError for an unknown
    or missing key."""
    table = tomllib.loads(text)
    needs = [(row.pop("sites"), row) for row in table.pop("need", ())]
    usual = {
        field.name: [] if field.default == () else field.default
        for field in fields(Site)
        if field.default is not MISSING
    }
    for row in table["site"]:
        row["needs"] = [need for names, need in needs if row["name"] in names]
    table["site"] = [usual | row for row in table["site"]]
    rows = ObjectSchema(site=tuple[Site, ...], retired=tuple[RetiredAddress, ...]).parse(table, "sites.toml")
    return rows["site"], rows["retired"]


SITES, RETIRED = read_sites(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SITE_NAMES = tuple(site.name for site in SITES)


def site_of(name: str, settings: Settings) -> Site:
    """The row of a site with what the settings add to its jobs. Raises as `find_site`."""
    site = find_site(name)
    return replace(site, own=own_of(site.batch, settings))


def own_of(batch: str, settings: Settings) -> tuple[str, ...]:
    """What the settings add to the jobs of a batch system."""
    if batch == SLURM:
        return parse_options(settings.sbatch_options.value)
    return parse_commands(settings.submit_commands.value) if batch == HTCONDOR else ()


def check_needs(site: Site, written: Collection[str]) -> None:
    """Raises UsageError where the site refuses jobs for a command that is not among those `written`."""
    lacking = next((one for one in site.needs if one.refused and one.key not in written), None)
    if lacking:
        raise UsageError(
            "site-command-missing",
            f"{site.title} rejects jobs without {lacking.key}: {lacking.why}",
            hint=f'add it to imagefactory.toml: submit-commands = "{lacking.key} = ..."',
        )


def find_site(name: str) -> Site:
    """The row of a site. Raises UsageError for one that is not known."""
    for site in SITES:
        if site.name == name:
            return site
    raise UsageError("site-unknown", f"unknown site '{name[:40]}'", hint=f"sites: {', '.join(SITE_NAMES)}")
