"""imagefactory status."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    Call,
    collecting,
    complain,
    json_option,
    say,
    say_json,
    say_next,
    terminal_width,
)
from imagefactory.cli.sweeps import find_pool
from imagefactory.errors import ToolError
from imagefactory.settings.choices import POOLS

if TYPE_CHECKING:
    from imagefactory.actions.sweep import SweepStatus


@click.command()
@click.argument("sweep", metavar="[SWEEP]", default="")
@json_option
@click.pass_obj
def status(call: Call, sweep: str, as_json: bool) -> None:
    """Show how far the sweeps of `verify --pool` are.

    Exit code 0 whatever became of it: `collect` judges. A sweep whose files cannot be read leaves the others.
    """
    from imagefactory.views.sweeps import format_failed_machines, format_status, headline
    from imagefactory.actions.sweep import find_sweep, find_sweeps, read_status
    from imagefactory.schedulers.sweep_file import format_results

    folders = (find_sweep(call.settings, sweep),) if sweep else find_sweeps(call.settings)
    queue = True
    statuses: list[SweepStatus] = []
    with collecting() as failures:
        for folder in folders:
            with failures.of(folder.name):
                try:
                    statuses.append(read_status(folder, find_pool, queue=queue))
                except ToolError as error:  # the logs tell most of it without the pool's commands
                    complain(error)
                    queue = False
                    statuses.append(read_status(folder, find_pool, queue=queue))
        if as_json:
            rows = [
                _status_json(sweep_status, format_results(sweep_status.results)) for sweep_status in statuses
            ]
            say_json("status", {"sweeps": rows})
        elif not folders:
            say(f"no sweep was made here: imagefactory verify TARGET --pool {'|'.join(POOLS)}")
        elif sweep:
            for sweep_status in statuses:
                say(
                    format_status(
                        sweep_status.sweep, sweep_status.results, sweep_status.driven, datetime.now(UTC)
                    )
                )
                failed = format_failed_machines(sweep_status.machines, terminal_width())
                say(f"\n{failed}\n", unless=not failed)
                say(f"in {sweep_status.folder}")
                say_next("collect", sweep)
        elif statuses:
            say(
                "\n".join(
                    headline(sweep_status.sweep, sweep_status.results, sweep_status.driven)
                    for sweep_status in statuses
                )
            )
            say_next("status", statuses[-1].sweep.id)


def _status_json(sweep_status: SweepStatus, results: object) -> dict[str, object]:
    return {
        "sweep": sweep_status.sweep.id,
        "pool": sweep_status.sweep.pool,
        "folder": str(sweep_status.folder),
        "driven": sweep_status.driven,
        "done": sweep_status.done,
        "jobs": list(sweep_status.jobs),
        "nodes": results,
        "machines": sweep_status.machines,
    }
