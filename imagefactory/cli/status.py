"""imagefactory status."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import Call, collecting, complain, json_option, say, say_json
from imagefactory.cli.sweeps import find_pool
from imagefactory.errors import ToolError

if TYPE_CHECKING:
    from imagefactory.stages.sweep import SweepStatus


@click.command()
@click.argument("sweep", metavar="[SWEEP]", default="")
@json_option
@click.pass_obj
def status(call: Call, sweep: str, as_json: bool) -> None:
    """Show how far the sweeps of `verify --on` are, or one of them by its id or folder.

    Exit code 0 whatever became of it: `collect` judges. A sweep whose files cannot be read leaves the others.
    """
    from imagefactory.report.sweep import format_status, headline
    from imagefactory.stages.sweep import find_sweep, find_sweeps, read_status
    from imagefactory.sweeps.sweep_file import format_results

    folders = (find_sweep(call.settings, sweep),) if sweep else find_sweeps(call.settings)
    queue = True
    found: list[SweepStatus] = []
    with collecting() as failures:
        for folder in folders:
            with failures.of(folder.name):
                try:
                    found.append(read_status(folder, find_pool, queue=queue))
                except ToolError as error:  # the logs tell most of it without the pool's commands
                    complain(error)
                    queue = False
                    found.append(read_status(folder, find_pool, queue=queue))
        if as_json:
            rows = [_status_json(one, format_results(one.results)) for one in found]
            say_json("status", {"sweeps": rows})
        elif not folders:
            say("no sweep was made here: imagefactory verify TARGET --on htcondor")
        elif sweep:
            for one in found:
                say(format_status(one.sweep, one.results, one.driven, datetime.now(UTC)))
                say(f"in {one.folder}\ncollect what is done: imagefactory collect {sweep}")
        elif found:
            say("\n".join(headline(one.sweep, one.results, one.driven) for one in found))


def _status_json(one: SweepStatus, results: object) -> dict[str, object]:
    return {
        "sweep": one.sweep.id,
        "folder": str(one.folder),
        "driven": one.driven,
        "done": one.done,
        "jobs": list(one.jobs),
        "nodes": results,
    }
