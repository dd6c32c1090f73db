"""imagefactory cancel."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from imagefactory.cli.output import Call, json_option, say, say_json, say_next
from imagefactory.cli.sweeps import find_pool


@click.command()
@click.argument("sweep", metavar="SWEEP")
@json_option
@click.pass_obj
def cancel(call: Call, sweep: str, as_json: bool) -> None:
    """Remove the jobs of a sweep from the queue.

    Its files stay: `collect` still takes what had come back, and `verify --pool POOL --folder DIR` goes on.
    Other stores may queue its cells from then on.
    """
    from imagefactory.errors import UsageError
    from imagefactory.actions.claim import release_claim
    from imagefactory.actions.sweep import find_sweep
    from imagefactory.schedulers.sweep_file import ID, read_pool, read_sweep

    folder = find_sweep(call.settings, sweep)
    pool = find_pool(read_pool(folder))
    there = pool.running(folder)
    pool.cancel(folder)
    access, name = call.access, folder.name
    if not ID.fullmatch(name):
        try:
            name = read_sweep(folder).id
        except UsageError as error:  # its jobs are gone, and its claim ends by itself
            access.tell(f"note: what it has claimed is not known: {error.message}")
    release_claim(access, name, (), datetime.now(UTC), call.progress)
    if as_json:
        return say_json("cancel", {"sweep": folder.name, "folder": str(folder), "canceled": there})
    status = "canceled" if there else "nothing of it was in the queue"
    say(f"{status}; what had come back is in {folder}")
    return say_next("collect", sweep)
