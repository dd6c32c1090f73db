"""imagefactory cancel."""

from __future__ import annotations

import click

from imagefactory.cli.output import Call, write
from imagefactory.cli.sweeps import find_pool


@click.command()
@click.argument("sweep", metavar="SWEEP")
@click.pass_obj
def cancel(call: Call, sweep: str) -> None:
    """Remove the jobs of a sweep from the queue, and what drives them.

    Its files stay: `collect` still takes what had come back, and `verify --pool htcondor --folder DIR` goes
    on.
    """
    from imagefactory.stages.sweep import find_sweep
    from imagefactory.sweeps.sweep_file import read_pool

    folder = find_sweep(call.settings, sweep)
    pool = find_pool(read_pool(folder))
    there = pool.running(folder)
    pool.cancel(folder)
    done = "canceled" if there else "nothing of it was in the queue"
    write(1, f"{done}; what had come back is in {folder}")
