"""What sites want to see in a submit file: one row a site. Adding one touches this table alone.

Every row and every rule has its source. `generic` is any HTCondor pool: what a site's own pages ask for is
not known there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta

from imagefactory.errors import UsageError
from imagefactory.pools.model import ImageKind
from imagefactory.settings.choices import HTCONDOR, KUBERNETES, SLURM
from imagefactory.settings.load import Settings
from imagefactory.settings.own_commands import names_of, parse_commands, parse_options, split_requirements

GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLength:
    """A class of jobs by time: `line` is how a submit file says so of jobs that run for `longest` at most."""

    longest: timedelta
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
class SiteNeed:
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
    commands: tuple[SiteCommand, ...]
    lengths: tuple[JobLength, ...]
    usual: int
    staging: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]
    source: str
    needs: tuple[SiteNeed, ...]
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

    def told(self, *, gpus: bool, resumes: bool = False) -> tuple[str, ...]:
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
            if time <= one.longest:
                return (one.line,)
        hours = int(self.lengths[-1].longest.total_seconds() // 3600)
        raise UsageError(
            "job-too-long",
            f"{self.title} does not run jobs longer than {hours} hours",
            hint="write checkpoints and split the job into shorter ones, or ask the site",
        )


def _longest(time: timedelta | None) -> tuple[str, ...]:
    return () if time is None else (f"allowed_execute_duration = {int(time.total_seconds())}",)


MEMORY = SiteNeed(
    key="request_memory",
    write="request_memory = 8GB, or what the job uses",
    why="HTCondor gives 128 MB where the pool sets nothing else",
    refused=False,
    source="(documented): HTCondor's manual, JOB_DEFAULT_REQUESTMEMORY (2026-08)",
)
DISK = SiteNeed(
    key="request_disk",
    write="request_disk = 10GB, or what image, input and results take",
    why="HTCondor gives 1 GB, or a quarter more than the input where that is larger",
    refused=False,
    source="(documented): HTCondor's manual, JOB_DEFAULT_REQUESTDISK (2026-08)",
)
RETIRED = (
    RetiredAddress(
        start="/mnt/gluster",
        instead="/staging/... once the file is there",
        why="CHTC's Gluster share was taken away, and /staging is in its place",
        gone=True,
        same=False,
        source="(documented): CHTC's guide 'Using Gluster for Large Data and Software', archived (2026-08)",
    ),
    RetiredAddress(
        start="http://proxy.chtc.wisc.edu/SQUID/",
        instead="osdf:///chtc/staging/... once the file is in /staging",
        why="CHTC's guide to SQUID is in its archive, and points to file transfer and /staging instead",
        gone=False,
        same=False,
        source="(documented): CHTC's guide 'Transfer Large Input Files Via Squid', archived in 2025-03",
    ),
    RetiredAddress(
        start="stash:///",
        instead="osdf:///",
        why="stash:// is the old name of osdf://, and taken for a while still",
        gone=False,
        same=True,
        source="(documented): the OSPool's guide to the OSDF, 'Phase out of stash' (2026-08)",
    ),
    RetiredAddress(
        start="/ospool/ap20/",
        instead="the name of your access point of today",
        why="the access point ap20 was shut down in December 2025",
        gone=False,
        same=False,
        source="(documented): the OSPool's page on the migration of ap20, ap21 and ap23 (2025-12)",
    ),
    RetiredAddress(
        start="/ospool/ap21/",
        instead="the name of your access point of today",
        why="the access point ap21 was shut down in December 2025",
        gone=False,
        same=False,
        source="(documented): the OSPool's page on the migration of ap20, ap21 and ap23 (2025-12)",
    ),
)
"""Of every site: a file is copied from one to another with the addresses in it."""

SITES = (
    Site(
        name="chtc",
        title="CHTC",
        kinds=(ImageKind.OSDF, ImageKind.DOCKER, ImageKind.ORAS, ImageKind.SIF),
        commands=(
            SiteCommand(
                line="+WantGPULab = true",
                agreed=False,
                why="CHTC's guide to GPUs took it out of its list in May 2026, but its sample file and "
                "its known issues still have it",
                source="(documented): CHTC's guide 'Use GPUs', change of 2026-05-07, and 'Known Issues' "
                "(2026-08)",
            ),
        ),
        lengths=(
            JobLength(longest=timedelta(hours=12), line='+GPUJobLength = "short"'),
            JobLength(longest=timedelta(hours=24), line='+GPUJobLength = "medium"'),
            JobLength(longest=timedelta(days=7), line='+GPUJobLength = "long"'),
        ),
        usual=1,
        staging=(
            ("osdf:///chtc/staging/", "HasCHTCStaging"),
            ("file:///staging/", "HasCHTCStaging"),
            ("/staging/", "HasCHTCStaging"),
        ),
        advice=(),
        resumable="+is_resumable = true",
        source="CHTC's guides 'Use GPUs' and 'Use Custom Software in Jobs Using Apptainer' (2026-08); oras: "
        "CHTC/templates-GPUs, containers/pixi",
        needs=(MEMORY, DISK),
        gpus_alone=True,
        nested=True,
    ),
    Site(
        name="ospool",
        title="the OSPool",
        kinds=(ImageKind.OSDF, ImageKind.SIF, ImageKind.DOCKER),
        commands=(),
        lengths=(
            JobLength(longest=timedelta(hours=10), line='+JobDurationCategory = "Medium"'),
            JobLength(longest=timedelta(hours=20), line='+JobDurationCategory = "Long"'),
        ),
        usual=0,
        staging=(),
        advice=(),
        source="the OSPool's guides 'Indicate the Duration Category of Your Jobs' and 'Containers' (2026-08)",
        needs=(
            SiteNeed(
                key="request_memory",
                write="request_memory = 8GB, or what the job uses",
                why="the OSPool gives 2 GB",
                refused=False,
                source="(documented): the OSPool's guide 'Large Memory Jobs' (2026-08)",
            ),
            DISK,
        ),
        nested=True,
        migrated=True,
    ),
    Site(
        name="igwn",
        title="the IGWN grid",
        kinds=(ImageKind.OSDF, ImageKind.SIF, ImageKind.DOCKER),
        commands=(),
        lengths=(),
        usual=0,
        staging=(),
        advice=(
            "a job without its group's tag is refused; the collaboration tells yours:",
            "accounting_group = igwn.dev...",
        ),
        source="the IGWN computing guide, 'Job submission' and 'Accessing software with HTCondor' (2026-08); "
        "getenv: its roadmap, 'Disabling getenv = true' (2025-11)",
        needs=(
            MEMORY,
            SiteNeed(
                key="request_disk",
                write="request_disk = 10GB, or what image, input and results take",
                why="its access points refuse jobs that do not say it",
                refused=True,
                source="(reported): public notes on submitting at its Caltech access point (2026-09)",
            ),
            SiteNeed(
                key="accounting_group",
                write="accounting_group = and the tag of the analysis",
                why="jobs without a tag fail at once",
                refused=True,
                source="(documented): the IGWN computing guide, 'Job submission' (2026-08)",
            ),
        ),
        getenv="its access points refuse it since November 2025",
    ),
    Site(
        name=GENERIC,
        title="a pool",
        kinds=(ImageKind.DOCKER, ImageKind.OSDF, ImageKind.SIF, ImageKind.ORAS),
        commands=(),
        lengths=(),
        usual=0,
        staging=(),
        advice=(),
        source="HTCondor's manual, Container Universe Jobs",
        needs=(MEMORY, DISK),
    ),
    Site(
        name=SLURM,
        title="a Slurm cluster",
        kinds=(ImageKind.SIF, ImageKind.DOCKER, ImageKind.ORAS),
        commands=(),
        lengths=(),
        usual=0,
        staging=(),
        advice=(),
        source="Slurm's manual, sbatch(1); Apptainer's user guide, Support for Docker and OCI Containers",
        needs=(),
        batch=SLURM,
    ),
    Site(
        name=KUBERNETES,
        title="a Kubernetes cluster",
        kinds=(ImageKind.DOCKER,),
        commands=(),
        lengths=(),
        usual=0,
        staging=(),
        advice=(),
        source="Kubernetes' documentation, Jobs and Schedule GPUs; NVIDIA's k8s-device-plugin, GPU feature "
        "discovery (2026-11)",
        needs=(),
        batch=KUBERNETES,
    ),
)

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
