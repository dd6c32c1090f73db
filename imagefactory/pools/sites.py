"""What sites want to see in a submit file: one row a site. Adding one touches this table alone.

Every row has its source. `generic` is any HTCondor pool: what a site's own pages ask for is not known there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from imagefactory.errors import UsageError
from imagefactory.pools.model import ImageKind

GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLength:
    """A class of jobs by time: `line` is how a submit file says so of jobs that run for `longest` at most."""

    longest: timedelta
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place that jobs are submitted at.

    `kinds` are the kinds of image that its pages let a job use, what they advise first. `commands` stand in
    every submit file of a GPU job; `lengths`, the shortest first, say how long it runs, `usual` is the one
    that counts where nobody says. `staging` pairs beginnings of an image's address and what a machine must
    have then. `advice` are lines of comments on what a person may want.
    """

    name: str
    title: str
    kinds: tuple[ImageKind, ...]
    commands: tuple[str, ...]
    lengths: tuple[JobLength, ...]
    usual: int
    staging: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]
    source: str

    def lines(self, time: timedelta | None) -> tuple[str, ...]:
        """The site's own lines, for a job that runs that long. Raises UsageError where it is too long."""
        return (*self.commands, *self._length(time))

    def requirements(self, address: str) -> tuple[str, ...]:
        """What a machine must have so that an image at `address` (of `container_image`) is got there."""
        return tuple(dict.fromkeys(needs for start, needs in self.staging if address.startswith(start)))

    def _length(self, time: timedelta | None) -> tuple[str, ...]:
        if not self.lengths:
            return () if time is None else (f"allowed_execute_duration = {int(time.total_seconds())}",)
        if time is None:
            return (self.lengths[self.usual].line,)
        for one in self.lengths:
            if time <= one.longest:
                return (one.line,)
        hours = int(self.lengths[-1].longest.total_seconds() // 3600)
        raise UsageError(
            f"{self.title} takes no jobs that run longer than {hours} hours",
            hint="write checkpoints, so that one job is several shorter ones, or ask the site",
        )


SITES = (
    Site(
        name="chtc",
        title="CHTC",
        kinds=(ImageKind.OSDF, ImageKind.DOCKER, ImageKind.ORAS, ImageKind.SIF),
        commands=("+WantGPULab = true",),
        lengths=(
            JobLength(longest=timedelta(hours=12), line='+GPUJobLength = "short"'),
            JobLength(longest=timedelta(hours=24), line='+GPUJobLength = "medium"'),
            JobLength(longest=timedelta(days=7), line='+GPUJobLength = "long"'),
        ),
        usual=1,
        staging=(
            ("osdf:///chtc/staging/", "(HasCHTCStaging == true)"),
            ("file:///staging/", "(HasCHTCStaging == true)"),
            ("/staging/", "(HasCHTCStaging == true)"),
        ),
        advice=("a job of a few hours, or with checkpoints, gets more GPUs with:", "+is_resumable = true"),
        source="CHTC's guides 'Use GPUs' and 'Use Custom Software in Jobs Using Apptainer' (2026-08); oras: "
        "CHTC/templates-GPUs, containers/pixi",
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
    ),
)

SITE_NAMES = tuple(site.name for site in SITES)


def find_site(name: str) -> Site:
    """The row of a site. Raises UsageError for one that is not known."""
    for site in SITES:
        if site.name == name:
            return site
    raise UsageError(f"the site '{name[:40]}' is not known", hint=f"write {', '.join(SITE_NAMES)}")
