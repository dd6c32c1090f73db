"""The find command, which searches images by what they can do."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    Call,
    json_option,
    say,
    say_json,
    say_next,
    say_notes,
    terminal_width,
    write,
)
from imagefactory.cli.pool import find_inventory, inventory_option
from imagefactory.errors import EXIT_CHECK, FactoryError
from imagefactory.settings.choices import HTCONDOR

if TYPE_CHECKING:
    from imagefactory.schedulers.pool import Inventory


@click.command()
@click.argument("words", metavar="[WORD]...", nargs=-1)
@click.option("--gpus", type=click.IntRange(1, 16), default=1, show_default=True, help="GPUs of one job.")
@click.option(
    "--gpu-memory", "--memory", "memory", default="", metavar="SIZE", help="What each GPU must have: 40GB."
)
@inventory_option
@json_option
@click.pass_obj
def find(
    call: Call, words: tuple[str, ...], gpus: int, memory: str, inventory: Path | None, as_json: bool
) -> None:
    """Find an image for what you want to run, on this pool's GPUs.

    It is told on which GPUs it runs, how many of them are free, and how well that is known.

    \b
    imagefactory find pytorch
    imagefactory find pytorch 2.5 --gpus 2 --memory 40GB
    imagefactory find cu124

    A WORD is a framework, a version, a CUDA (cu124), cpu for what needs no GPU, or the beginning of a name.
    verified: the suite ran in that very image on such a GPU. predicted: a scan of its GPU code says so.
    documented: a page says so. Images are those of this factory, else of the catalogue that you joined;
    without either nothing is verified. GPUs are those of the pool, where it can be asked, or of --inventory.

    Exit code 3 where there is no such image, 9 where it needs a GPU and runs on none that you may have, or
    nothing is known of it there.
    """
    from imagefactory.schedulers.sizes import parse_size
    from imagefactory.report.find import format_found, found_json, next_command
    from imagefactory.actions.find import FindAsk, find_images
    from imagefactory.submit.places import Wish

    now = datetime.now(UTC)
    resources = Wish(gpus=gpus, gpu_memory=parse_size(memory) if memory else 0)
    pool = _pool(inventory, now)
    if pool is None and (gpus > 1 or memory):
        write(2, "note: no pool is known here, so --gpus and --memory leave nothing out")
    ask = FindAsk(words=words, wish=resources, inventory=pool, now=now)
    result = find_images(call.settings, os.environ, lambda: call.factory_if_any, ask)
    say_notes(result.notes)
    if as_json:
        say_json("find", found_json(result))
    else:
        say(format_found(result, terminal_width()))
        say_next(*next_command(result))
    if not any(row.gpus or not row.findable.gpu for row in result.found):
        raise click.exceptions.Exit(EXIT_CHECK)


def _pool(path: Path | None, now: datetime) -> Inventory | None:
    """Return the pool, None if there is none or if it does not answer; a note reports the latter."""
    from imagefactory.schedulers.pool import pool_here

    if path is not None:
        return find_inventory(path, now)
    if pool_here(os.environ) != HTCONDOR:
        return None
    try:
        return find_inventory(None, now)
    except FactoryError as error:
        write(2, f"note: the pool is not known: {error.message}")
        return None
