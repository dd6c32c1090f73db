"""The options of `verify --pool`, and what they mean where they stand without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import click

from imagefactory.cli.pool import inventory_option
from imagefactory.cli.times import Duration
from imagefactory.errors import UsageError
from imagefactory.settings.choices import POOLS, SITES

P = ParamSpec("P")
IMAGES = ("docker", "oras", "sif")
OWN = {
    "newest": None,
    "mig": False,
    "machines": None,
    "gpu_hours": None,
    "at_once": None,
    "wanted": None,
    "allow": (),
    "inventory": None,
    "image": None,
    "site": None,
    "idle": None,
    "held": None,
    "run": None,
    "retries": None,
    "wait": False,
    "folder": None,
    "dry_run": False,
}
"""The options that go with --pool, as they are where nobody writes them."""


def sweep_options(command: Callable[P, None]) -> Callable[P, None]:
    """The options of `verify --pool`, below its own."""
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
            "wanted",
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
            "machines",
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
            "at_once",
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
        click.option("--idle-limit", "idle", type=Duration(), metavar="TIME", help="Default: 24h."),
        click.option(
            "--held-limit", "held", type=Duration(), metavar="TIME", help="Default: 10m; not on Slurm."
        ),
        click.option("--run-limit", "run", type=Duration(), metavar="TIME", help="Default: 24h."),
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


def refuse_alone(given: dict[str, Any]) -> None:
    """Raises UsageError where an option of --pool stands without it."""
    for option in _given(given, OWN):
        raise UsageError(
            "option-conflict",
            f"{option} requires --pool",
            hint=f"imagefactory verify TARGET --pool {'|'.join(POOLS)}",
        )


def refuse_again(names: tuple[str, ...], given: dict[str, Any]) -> None:
    """Raises UsageError where a sweep is gone on with and a target or an option wants it to be another."""
    unset = {**OWN, "capability": (), "wait": given["wait"], "folder": given["folder"]}
    for word in (*names, *_given(given, unset)):
        raise UsageError(
            "option-conflict",
            f"{given['folder']} is already a sweep, and {word[:80]} would change it",
            hint=f"remove {word[:80]} to continue the sweep, or pass another --folder",
        )


def _given(given: dict[str, Any], unset: Mapping[str, object]) -> list[str]:
    """The options that a person has written, as they are spelt."""
    names = {
        "idle": "idle-limit",
        "held": "held-limit",
        "run": "run-limit",
        "wanted": "tuple",
        "at_once": "jobs",
    }
    found = [name for name, value in unset.items() if given[name] != value]
    return [f"--{names.get(name, name).replace('_', '-')}" for name in found]
