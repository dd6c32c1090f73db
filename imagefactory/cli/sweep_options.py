"""The options of `verify --pool`, and the errors if --pool is missing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec

import click

from imagefactory.cli.output import reject_conflicts
from imagefactory.cli.pool import inventory_option
from imagefactory.cli.times import Duration
from imagefactory.settings.choices import POOLS, SITES

P = ParamSpec("P")
IMAGES = ("docker", "oras", "sif")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """The options of `verify` that a sweep uses. Those with a default need --pool, except --capability."""

    pool: str
    level: str
    registry: str
    promote: bool
    newest: int | None = None
    mig: bool = False
    machine: str | None = None
    gpu_hours: int | None = None
    jobs: int | None = None
    combination: tuple[str, ...] | None = None
    allow: tuple[str, ...] = ()
    inventory: Path | None = None
    image: str | None = None
    site: str | None = None
    idle_limit: timedelta | None = None
    held_limit: timedelta | None = None
    run_limit: timedelta | None = None
    retries: int | None = None
    wait: bool = False
    folder: Path | None = None
    dry_run: bool = False
    capability: tuple[str, ...] = ()

    def written(self, *, but: Collection[str]) -> list[str]:
        """Return the options that differ from their defaults, as a person writes them."""
        names = [
            field.name
            for field in fields(self)
            if field.default not in (MISSING, getattr(self, field.name)) and field.name not in but
        ]
        return [f"--{name.replace('combination', 'tuple').replace('_', '-')}" for name in names]


def sweep_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add the options of `verify --pool` after the command's own."""
    options = (
        click.option(
            "--pool",
            "pool",
            type=click.Choice(tuple(POOLS)),
            help="Verify on a pool: one job for each image and capability.",
        ),
        click.option("--newest", type=click.IntRange(1), metavar="N", help="The N newest versions alone."),
        click.option(
            "--tuple",
            "combination",
            nargs=4,
            metavar="FRAMEWORK VERSION CUDA X.Y",
            help="Test just one: pytorch 2.3 12.1 8.0.",
        ),
        click.option(
            "--allow",
            multiple=True,
            metavar="RULE",
            help="Let this rule leave nothing out, as plan has it; `verified` tests again, `queued` and "
            "`uncollected` what another sweep has in hand, `claimed` what another store has, "
            "`bad-machine` also on machines that failed. May be repeated.",
        ),
        click.option(
            "--mig", is_flag=True, help="Verify on slices of GPUs (MIG) too: a row for each profile."
        ),
        click.option(
            "--machine",
            metavar="NAMES",
            help="Run on these machines only, with * and ?, and on none of those after !: 'gpu*,!gpu07'. "
            "Default: the setting `sweep-machines`.",
        ),
        click.option(
            "--gpu-hours",
            type=click.IntRange(1),
            metavar="N",
            help="Queue no more than this takes; a later sweep takes the rest, those whose verdict is oldest "
            "first. Default: the setting `sweep-gpu-hours`.",
        ),
        click.option(
            "--jobs",
            type=click.IntRange(1),
            metavar="N",
            help="Have no more jobs in the queue at once. Default: the setting `sweep-jobs`.",
        ),
        inventory_option,
        click.option(
            "--image",
            type=click.Choice(IMAGES),
            help="How jobs get the image. Default: sif where sif-folder or no registry is set, else docker.",
        ),
        click.option("--site", type=click.Choice(SITES), help="Default: the setting `site`."),
        click.option("--idle-limit", type=Duration(), metavar="TIME", help="Default: 24h."),
        click.option("--held-limit", type=Duration(), metavar="TIME", help="Default: 10m; not on Slurm."),
        click.option("--run-limit", type=Duration(), metavar="TIME", help="Default: 24h."),
        click.option(
            "--retries",
            type=click.IntRange(0, 20),
            metavar="N",
            help="How often what the pool broke is tried again. Default: 2.",
        ),
        click.option("--wait", is_flag=True, help="Stay until all is done, then collect."),
        click.option(
            "--folder",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="Where the sweep is written; of one that is there already, go on with it.",
        ),
        click.option("--dry-run", is_flag=True, help="Say what would be queued, and do nothing."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def reject_without_pool(request: SweepRequest) -> None:
    """Raises UsageError for an option that requires --pool."""
    hint = f"imagefactory verify TARGET --pool {'|'.join(POOLS)}"
    reject_conflicts(
        *((option, f"{option} requires --pool", hint) for option in request.written(but=("capability",)))
    )


def reject_changes(names: tuple[str, ...], request: SweepRequest) -> None:
    """Raises UsageError for targets and options that would change the sweep to continue."""
    reject_conflicts(
        *(
            (
                word,
                f"{request.folder} is already a sweep, and {word[:80]} would change it",
                f"remove {word[:80]} to continue the sweep, or pass another --folder",
            )
            for word in (*names, *request.written(but=("wait", "folder")))
        )
    )
