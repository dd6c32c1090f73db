"""The gpus command, and `--inventory` for commands that use a saved pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import click

from imagefactory.cli.arguments import Command, DurationType
from imagefactory.cli.output import (
    json_option,
    print_json,
    print_next_command,
    print_result,
    terminal_width,
    write_terminal,
)
from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.settings.choices import HTCONDOR, POOLS, SLURM

if TYPE_CHECKING:
    from imagefactory.schedulers.pool import Inventory

P = ParamSpec("P")


def inventory_option(command: Callable[P, None]) -> Callable[P, None]:
    """Add the option `--inventory FILE`. Its value is a path, or None to query the pool."""
    return click.option(
        "--inventory",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="The GPUs, in place of those of the cluster: a file of `imagefactory gpus -o FILE`, or a YAML "
        "list such as - {name: V100, count: 4}.",
    )(command)


def find_inventory(path: Path | None, now: datetime, pool: str = HTCONDOR) -> Inventory:
    """Return the inventory of a file or of the pool.

    Raises UsageError for the file, ToolError for the pool, NothingSelectedError without a GPU.
    """
    from imagefactory.schedulers.inventory import read_inventory
    from imagefactory.schedulers.pool import open_pool

    inventory = read_inventory(path) if path else open_pool(pool, os.environ).inventory(now)
    if not inventory.machines:
        location = str(path) if path else f"the pool {inventory.pool}".rstrip()
        notes = f" ({'; '.join(inventory.notes[:3])})" if inventory.notes else ""
        raise NothingSelectedError(
            "pool-without-gpu",
            f"{location} has no machine with a GPU that jobs can request{notes}",
            hint="`sinfo -o '%N %G %T'` lists what the nodes report"
            if pool == SLURM
            else "`condor_status -const 'TotalGPUs > 0'` lists the slots that report GPUs",
        )
    return inventory


@click.command(cls=Command)
@inventory_option
@click.option(
    "--scheduler",
    type=click.Choice(tuple(POOLS)),
    help="The scheduler to query.  [default: the one of this machine, htcondor if it has both]",
)
@click.option("--machines", is_flag=True, help="Show a row for each machine instead of each type of GPU.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the inventory to a file, for `--inventory` here and elsewhere.",
)
@click.option(
    "--probe",
    type=DurationType(),
    metavar="TIME",
    help="On Slurm: run a small job on one GPU of each type, wait this long for it, and save the answers.",
)
@json_option
def gpus(
    inventory: Path | None,
    scheduler: str | None,
    machines: bool,
    output: Path | None,
    probe: timedelta | None,
    as_json: bool,
) -> None:
    """Show the GPUs of the cluster, and how many are free.

    \b
    imagefactory gpus
    imagefactory gpus --probe 5m                     query GPUs with small jobs
    imagefactory gpus -o inventory.json              save them for other commands
    imagefactory plan --inventory inventory.json

    The GPUs come from HTCondor (condor_status) or Slurm (scontrol). Slurm knows only the types of its GPUs;
    --probe runs small jobs that report the rest. CUDA is the newest version that the driver supports. A
    dash means unknown. GPUs that no job can request are excluded, with a note.

    Exit code 3 without a GPU, 6 if the scheduler does not answer.
    """
    from imagefactory.schedulers.inventory import write_inventory
    from imagefactory.views.sweeps import format_machines, format_pool, gpus_json

    name = HTCONDOR if inventory else _choose(scheduler, probe=probe is not None)
    if probe:
        _probe(probe)
    pool_inventory = find_inventory(inventory, datetime.now(UTC), name)
    if output:
        write_inventory(output, pool_inventory)
    if as_json:
        print_json(gpus_json(pool_inventory, None if inventory else name))
    else:
        print_result((format_machines if machines else format_pool)(pool_inventory, terminal_width()))
        print_result(f"saved as {output}", unless=not output)
        if output:
            print_next_command("plan", "--inventory", str(output))
        else:
            print_next_command("search")


def _choose(system: str | None, *, probe: bool) -> str:
    """Return the pool to query. If there are two, use HTCondor and print a note.

    Raises UsageError for --probe with HTCondor.
    """
    from imagefactory.settings.choices import local_pools

    if probe and system == HTCONDOR:
        raise UsageError(
            "option-conflict", "--probe applies to Slurm only", hint="remove --scheduler htcondor"
        )
    if system or probe:
        return system or SLURM
    selection, *others = local_pools(os.environ) or (HTCONDOR,)
    for other in others:
        title = POOLS[selection].title
        write_terminal(
            2,
            f"note: these are the GPUs of {title}; for {POOLS[other].title} add --scheduler {other}",
        )
    return selection


def _probe(wait: timedelta) -> None:
    """Probe the GPUs. Notes list GPUs that did not answer. Raises ToolError without a Slurm cluster."""
    from imagefactory.schedulers.slurm.nodes import gpu_types_of, probe_all, query_inventory, write_probed

    kinds = gpu_types_of(query_inventory(os.environ, datetime.now(UTC)))
    results, faults = probe_all(kinds, os.environ, wait)
    write_probed(os.environ, results)
    for kind, fault in faults:
        write_terminal(2, f"note: {kind} did not answer: {fault.message}")
