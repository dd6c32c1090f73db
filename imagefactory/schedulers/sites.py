"""The requirements of sites for submit files. The rows are in sites.toml, each with a source."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.schedulers.pool import ImageKind
from imagefactory.serialize import ObjectSchema
from imagefactory.settings.choices import CONTAINERS, HTCONDOR, SLURM
from imagefactory.settings.load import Settings
from imagefactory.settings.own_commands import (
    names_of,
    parse_commands,
    parse_mounts,
    parse_options,
    split_requirements,
)

GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLengthClass:
    """A class of jobs by length: `line` is the submit line of jobs of at most `hours`."""

    hours: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCommand:
    """A line in the submit file of every GPU job. `why` explains it.

    `agreed` means that all documentation of the site requires it.
    """

    line: str
    agreed: bool
    why: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRequirement:
    """A command that jobs should have, and the reason.

    `refused` means that the site rejects jobs without it.
    """

    key: str
    write: str
    why: str
    refused: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredAddress:
    """The beginning of an address that no longer works. `gone` means that its owner announced the end.

    Write `instead`. `same` means that both are names of the same location.
    """

    start: str
    instead: str
    why: str
    gone: bool
    same: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A site where people submit jobs.

    `kinds` are the image types that its documentation supports, the recommended one first. `commands` are in
    every submit file of a GPU job. `lengths` are the classes of jobs by length, the shortest first; `usual`
    is the index of the default. `staging` pairs the beginning of an image address with the attribute that
    must then be true of a machine. `advice` are comment lines for people. `resumable` is the line for a GPU
    job that can continue after an eviction and gets more GPUs for that, empty for none.

    With `gpus_alone`, `lengths` and `advice` apply only to GPU jobs, as `commands` always do. `needs` are
    commands that any job should have. `nested` means that GPUs have only nested ads, `migrated` that its
    documentation replaced +SingularityImage by container_image. `getenv` is the reason why `getenv = true` is
    rejected, empty if it is not. `batch` is the scheduler: HTCONDOR, SLURM or KUBERNETES; for the last two,
    only `kinds` applies. `own` are additions of the settings to every job: submit commands or sbatch options.
    `container` starts the images of Slurm jobs, with the `mounts` (`SOURCE:TARGET`) of the settings. `lowest`
    is the lowest compute capability of its GPUs, empty if unknown.
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
    container: str = CONTAINERS[0]
    mounts: tuple[str, ...] = ()
    lowest: str = ""

    def lines(self, time: timedelta | None, *, gpus: bool = True, resumes: bool = False) -> tuple[str, ...]:
        """Return the lines of the site for a job of that length. Raises UsageError if it is too long.

        `resumes` means that the job continues after an eviction.
        """
        added, _ = split_requirements(self.own)
        lines = [command.line for command in self.commands] if gpus else []
        if self.lengths and (gpus or not self.gpus_alone):
            lines.append(self._length(time))
        elif time is not None:
            lines.append(f"allowed_execute_duration = {int(time.total_seconds())}")
        lines += [self.resumable] if self.resumable and resumes and gpus else []
        return (*(line for line in lines if not names_of((line,)) & names_of(added)), *added)

    def comments(self, *, gpus: bool, resumes: bool = False) -> tuple[str, ...]:
        """Return the advice for a job, as comment lines."""
        if self.gpus_alone and not gpus:
            return ()
        advice = () if "accounting_group" in names_of(self.own) else self.advice
        if not self.resumable or not gpus or resumes:
            return advice
        return (*advice, "a job of a few hours, or with checkpoints, gets more GPUs with:", self.resumable)

    def requirements(self, address: str) -> tuple[str, ...]:
        """Return the expressions that a machine must match to get an image from `address` (of
        `container_image`).
        """
        _, needs = split_requirements(self.own)
        return (*(f"({name} == true)" for name in self.attributes(address)), *needs)

    def attributes(self, address: str) -> tuple[str, ...]:
        """Return the attributes in `requirements`."""
        return tuple(dict.fromkeys(name for start, name in self.staging if address.startswith(start)))

    def _length(self, time: timedelta | None) -> str:
        if time is None:
            return self.lengths[self.usual].line
        for row in self.lengths:
            if time <= timedelta(hours=row.hours):
                return row.line
        raise UsageError(
            "job-too-long",
            f"{self.title} does not run jobs longer than {self.lengths[-1].hours} hours",
            hint="write checkpoints and split the job into shorter ones",
        )


def read_sites(text: str) -> tuple[tuple[Site, ...], tuple[RetiredAddress, ...]]:
    """Return the sites and the retired addresses in sites.toml.

    Raises StatementError for unknown or missing keys.
    """
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


def site_of(name: str, settings: Settings, container: str = "") -> Site:
    """Return a site with the additions of the settings to its jobs. Raises like `find_site`.

    `container` overrides the setting.
    """
    site = find_site(name)
    own, container = job_additions(site.batch, settings), container or settings.container.value
    if site.batch != SLURM:
        return replace(site, own=own)
    site = replace(site, own=own, mounts=parse_mounts(settings.site_mounts.value))
    if container == CONTAINERS[0]:
        return site
    return replace(site, container=container, kinds=(ImageKind.DOCKER,))


def job_additions(batch: str, settings: Settings) -> tuple[str, ...]:
    """Return the additions of the settings to jobs of a batch system."""
    if batch == SLURM:
        return parse_options(settings.sbatch_options.value)
    return parse_commands(settings.submit_commands.value) if batch == HTCONDOR else ()


def check_needs(site: Site, written: Collection[str]) -> None:
    """Raise UsageError if the site rejects jobs without a command that is not in `written`."""
    missing = next((need for need in site.needs if need.refused and need.key not in written), None)
    if missing:
        raise UsageError(
            "site-command-missing",
            f"{site.title} rejects jobs without {missing.key}: {missing.why}",
            hint=f'add it to imagefactory.toml: submit-commands = "{missing.key} = ..."',
        )


def find_site(name: str) -> Site:
    """Return the row of a site. Raises UsageError for an unknown site."""
    site = next((site for site in SITES if site.name == name), None)
    if site is None:
        raise UsageError(
            "site-unknown", f"unknown site '{name[:40]}'", hint=f"sites: {', '.join(SITE_NAMES)}"
        )
    return site
