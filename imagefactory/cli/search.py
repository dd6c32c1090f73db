"""The search command, which searches images by framework and GPU."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.gpus import find_inventory, inventory_option
from imagefactory.cli.output import (
    CommandContext,
    json_option,
    print_catalog_notes,
    print_json,
    print_next_command,
    print_result,
    terminal_width,
    write_terminal,
)
from imagefactory.errors import EXIT_CHECK, EXIT_UNKNOWN, ImagefactoryError
from imagefactory.settings.choices import HTCONDOR, SITES

if TYPE_CHECKING:
    from imagefactory.schedulers.pool import Inventory


@click.command(cls=Command)
@click.argument("words", metavar="[WORD]...", nargs=-1)
@click.option(
    "--gpus",
    type=click.IntRange(1, 16),
    metavar="N",
    default=1,
    show_default=True,
    help="Use this number of GPUs for each job.",
)
@click.option("--gpu-memory", default="", metavar="SIZE", help="Require this memory of each GPU: 40GB.")
@click.option("--site", type=click.Choice(SITES), help="The site of the jobs.  [default: the setting `site`]")
@inventory_option
@click.option("--all", "everything", is_flag=True, help="Show all images, not only the best 20.")
@json_option
@click.pass_obj
def search(
    call: CommandContext,
    words: tuple[str, ...],
    *,
    gpus: int,
    gpu_memory: str,
    site: str | None,
    inventory: Path | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Search images that run on the GPUs of this cluster.

    \b
    imagefactory search
    imagefactory search pytorch
    imagefactory search pytorch 2.5 --gpus 2 --gpu-memory 40GB
    imagefactory search cu124

    A WORD is a framework, a version, a CUDA version (cu124), cpu for images without a GPU, or the start of
    a name. Images are those of this project, else of the catalog that you joined.

    STATUS is verified if the suite passed on such a GPU, predicted if a scan of the image's GPU code says
    that it runs, and documented if the framework's documentation says so.

    Exit code 3 if no image matches, 9 if none of them runs on a GPU of this cluster, 11 if that is not known.
    """
    from imagefactory.actions.find import FindRequest, find_images
    from imagefactory.jobs.offer import ResourceRequest
    from imagefactory.schedulers.sizes import parse_size
    from imagefactory.views.catalog import MOST, format_matches, matches_json, next_command

    now = datetime.now(UTC)
    resources = ResourceRequest(gpus=gpus, gpu_memory=parse_size(gpu_memory) if gpu_memory else 0)
    pool = _pool(inventory, now)
    if pool is None and (gpus > 1 or gpu_memory):
        write_terminal(2, "note: no pool is known here, so --gpus and --gpu-memory exclude nothing")
    request = FindRequest(
        words=words,
        resources=resources,
        inventory=pool,
        site=site or "",
        now=now,
        most=0 if everything else MOST,
    )
    result = find_images(call.settings, os.environ, lambda: call.factory_if_any, request)
    print_catalog_notes(result.notes)
    if as_json:
        print_json(matches_json(result))
    else:
        print_result(format_matches(result, terminal_width()))
        print_next_command(*next_command(result))
    if not any(row.gpus or not row.candidate.gpu for row in result.matches):
        unknown = any(row.unknown for row in result.matches)
        raise click.exceptions.Exit(EXIT_UNKNOWN if unknown else EXIT_CHECK)


def _pool(path: Path | None, now: datetime) -> Inventory | None:
    """Return the pool, None if there is none or if it does not answer. A note reports the second case."""
    from imagefactory.settings.choices import local_pool

    if path is not None:
        return find_inventory(path, now)
    if local_pool(os.environ) != HTCONDOR:
        return None
    try:
        return find_inventory(None, now)
    except ImagefactoryError as error:
        write_terminal(2, f"note: the pool is not known: {error.message}")
        return None
