"""The plan command, which shows what to build and test."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.gpus import inventory_option
from imagefactory.cli.output import (
    CommandContext,
    json_option,
    only_with,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
    targets_argument,
    terminal_width,
    write_terminal,
)
from imagefactory.plugins import load_extra

if TYPE_CHECKING:
    from imagefactory.matrix.plan import VerificationPlan


def complete_rules(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    from imagefactory.matrix.plan import SKIP_RULES

    return [rule for rule in SKIP_RULES if rule.startswith(incomplete)]


@click.command(cls=Command)
@targets_argument(required=False)
@section("What to plan")
@inventory_option
@click.option(
    "--machine",
    "machines",
    metavar="NAMES",
    help=(
        "Only these machines of the inventory, and not those after !: 'gpu*,!gpu07'.  [default: the "
        "setting `sweep-machines`]"
    ),
)
@click.option(
    "--ignore-rule",
    "allow",
    multiple=True,
    metavar="RULE",
    shell_complete=complete_rules,
    help="Include the cells that this rule skips (repeatable). known-bad stands for all known faults.",
)
@click.option(
    "--registry",
    default="",
    metavar="HOST[/PATH]",
    help=(
        "Search images and verdicts only in this registry.  [default: the store, and the setting `registry`]"
    ),
)
@section("Tuples")
@click.option(
    "--tuples",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Check the rows of a CSV file: framework,version,cuda,capability[,driver][,outcome].",
)
@click.option(
    "--recorded",
    is_flag=True,
    help="With --tuples: trust rows whose outcome says that no environment could be solved.",
)
@click.option(
    "--strict-drivers",
    is_flag=True,
    help=(
        "With --tuples and --inventory: require a driver that supports the exact CUDA version of the "
        "row.  [default: from CUDA 11 on, the same major version]"
    ),
)
@section("Output")
@only_with(
    "nightly",
    click.option(
        "--github",
        is_flag=True,
        help=(
            'Print matrix={"include":[...]} for $GITHUB_OUTPUT: one job for each cell, at most 256, or '
            "without --inventory for each image. The summary goes to stderr."
        ),
    ),
)
@only_with(
    "nightly",
    click.option(
        "--keep",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Also write the plan to a file, for `imagefactory site nightly --kept FILE`.",
    ),
)
@click.option("--sources", is_flag=True, help="Show the sources of the reasons. --json always has them.")
@json_option
@click.pass_obj
def plan(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    inventory: Path | None,
    machines: str | None,
    allow: tuple[str, ...],
    tuples: Path | None,
    recorded: bool,
    strict_drivers: bool,
    registry: str,
    sources: bool,
    as_json: bool,
    github: bool = False,
    keep: Path | None = None,
) -> None:
    """Show which images to build and which GPUs to verify them on.

    \b
    imagefactory plan 'pytorch-*'                        what to build
    imagefactory plan 'pytorch-*' --inventory gpus.yaml  and where to test it
    imagefactory plan --inventory inventory.json         the GPUs of a cluster
    imagefactory plan --tuples space.csv                 any versions

    A cell is one target on one GPU. Cells that cannot work, or whose answer is known, are skipped with a
    rule and a reason. --ignore-rule RULE includes them again. Targets that did not change are not built
    again.

    The exit code is 0 whatever the plan skips.
    """
    from imagefactory.actions.plan import PlanGpus, PlanLookup, read_listed, read_rows, read_stages
    from imagefactory.matrix.plan import PlanInput, check_rules, make_plan, unused_rules
    from imagefactory.matrix.rows import RowsQuery, rule_rows
    from imagefactory.settings.own_commands import parse_machines
    from imagefactory.verify.kits import program_checksum
    from imagefactory.views.plan import MAX_JOBS, format_kits, format_matrix, format_rows, rows_json, summary

    reject_conflict(github and as_json, "--github and --json both write to stdout", "remove one of them")
    reject_conflict(recorded and not tuples, "--recorded requires --tuples", "add --tuples FILE")
    reject_conflict(
        strict_drivers and not (tuples and inventory),
        "--strict-drivers requires --tuples and --inventory",
        "add --tuples FILE --inventory FILE",
    )
    reject_conflict(tuples and names, "--tuples and targets exclude each other", f"remove {' '.join(names)}")
    for option, value in (("--github", github), ("--keep", keep), ("--registry", registry)):
        reject_conflict(
            tuples and value,
            f"--tuples and {option} exclude each other: rows are not built",
            f"remove {option}",
        )
    rules = check_rules(allow)
    pattern = machines or ""
    if machines is None and inventory and not tuples:  # rows are no jobs of sweeps
        pattern = call.settings.sweep_machines.value
    listed = read_listed(inventory, parse_machines(pattern)) if inventory else PlanGpus()
    reject_conflict(
        machines is not None and not listed.pool, "--machine requires --inventory", "add --inventory FILE"
    )
    if tuples:
        devices = tuple(gpu for gpu in listed.devices if gpu not in listed.avoided and not gpu.part)
        rows = RowsQuery(
            rows=read_rows(tuples),
            devices=devices,
            allow=rules,
            pool=listed.pool,
            strict=strict_drivers,
            recorded=recorded,
        )
        ruled_rows = rule_rows(rows)
        unused = unused_rules(rules, (row.ruling for row in ruled_rows))
        if as_json:
            return print_json(rows_json(ruled_rows, unused))
        return print_result(format_rows(ruled_rows, unused, terminal_width(), show_sources=sources))
    factory = call.factory
    request = PlanLookup(now=datetime.now(UTC), registry=registry, also=factory.settings.registry.value)
    stages = read_stages(factory, factory.select(names), request)
    whole = make_plan(
        PlanInput(
            stages=stages, devices=listed.devices, allow=rules, on_machines=True, avoided=listed.avoided
        )
    )
    jobs, waiting = whole, 0
    if github:
        jobs, waiting = load_extra("nightly.changes:cells_for_night")(
            whole, MAX_JOBS, request.now.date(), kits=bool(registry)
        )
    if keep:
        selection = {row.target.name for row in jobs.targets}
        load_extra("nightly.nights:write_plan")(
            keep,
            whole,
            created=request.now,
            registry=registry,
            names=names,
            devices=listed.devices,
            waiting=tuple(row.target.name for row in whole.targets if row.target.name not in selection),
        )
    if github:
        print_result(format_matrix(jobs, kits=bool(registry)))
        print_result(f"{format_kits(jobs)}\nprogram={program_checksum()}", unless=not registry)
        return write_terminal(2, summary(whole, waiting))
    return _print_plan(whole, overview=not (names or inventory or sources), sources=sources, as_json=as_json)


def _print_plan(whole: VerificationPlan, *, overview: bool, sources: bool, as_json: bool) -> None:
    from imagefactory.matrix.plan import CellState
    from imagefactory.views.plan import format_overview, format_plan, plan_json

    if as_json:
        return print_json(plan_json(whole))
    if overview:
        print_result(format_overview(whole, terminal_width()))
    else:
        print_result(format_plan(whole, terminal_width(), show_sources=sources))
    for state, name in ((cell.state, row.target.name) for row in whole.targets for cell in row.cells):
        if state in (CellState.BUILD, CellState.VERIFY):
            return print_next_command(state.value, name)
    return None
