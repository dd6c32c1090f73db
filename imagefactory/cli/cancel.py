"""imagefactory cancel."""

from __future__ import annotations

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
    """
    from imagefactory.stages.sweep import find_sweep
    from imagefactory.sweeps.sweep_file import read_pool

    folder = find_sweep(call.settings, sweep)
    pool = find_pool(read_pool(folder))
    there = pool.running(folder)
    pool.cancel(folder)
    if as_json:
        return say_json("cancel", {"sweep": folder.name, "folder": str(folder), "canceled": there})
    done = "canceled" if there else "nothing of it was in the queue"
    say(f"{done}; what had come back is in {folder}")
    return say_next("collect", sweep)
