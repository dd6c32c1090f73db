"""The plan command, which shows what to build and test."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.arguments import Command
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
    from imagefactory.matrix.plan import CellRuling, PlannedCell, VerificationPlan
    from imagefactory.matrix.rows import RowRuling


def complete_rules(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    from imagefactory.matrix.plan import PRUNING

    return [rule for rule in PRUNING if rule.startswith(incomplete)]


@click.command(cls=Command)
@targets_argument(required=False)
@click.option(
    "--inventory",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='The GPUs to plan for: a list of {name: V100, driver: "535.129.03"} or capability: "7.0", or '
    "those of a pool, as `imagefactory gpus -o FILE` wrote them.",
)
@click.option(
    "--machine",
    "machines",
    metavar="NAMES",
    help="Only these machines of a pool's inventory, with * and ?, and not those after !: 'gpu*,!gpu07'. "
    "Default: the setting `sweep-machines`.",
)
@click.option(
    "--ignore-rule",
    "allow",
    multiple=True,
    metavar="RULE",
    shell_complete=complete_rules,
    help="Ignore this rule (repeatable): the first word of a pruned cell, or known-bad for all known faults. "
    "A cell that several rules prune needs all of them.",
)
@click.option(
    "--tuples",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Check the rows of a CSV file instead: framework,version,cuda,capability[,driver][,outcome].",
)
@click.option(
    "--recorded",
    is_flag=True,
    help="With --tuples: trust the rows that record that no environment could be solved ('Environment "
    "Resolution Failure', unsolvable). Nothing is solved here.",
)
@click.option(
    "--strict-drivers",
    is_flag=True,
    help="With --tuples and --inventory: a GPU matches only if its driver supports the row's exact CUDA, "
    "as in CHTC's gpu-compatibility-testing.  [default: any driver of the same CUDA major from 11 on]",
)
@only_with(
    "nightly",
    click.option(
        "--github",
        is_flag=True,
        help='Print matrix={"include":[...]}, a line for $GITHUB_OUTPUT: a job for each target and GPU, or '
        "without --inventory for each image to build. GitHub runs 256: the oldest verdicts come first, the "
        "others wait for the next nightly run. The summary goes to stderr.",
    ),
)
@click.option(
    "--registry",
    default="",
    metavar="HOST[/PATH]",
    help="Search candidates and their verdicts only there, as a CI machine has no store. Default: the store "
    'and the setting `registry`. With --github it also prints targets={"include":[...]}, a job for each '
    "target with its kits, and program=SUM: the sha256 of what `sha256sum` prints of a kit's program files.",
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
    as_json: bool,
    github: bool = False,
    keep: Path | None = None,
) -> None:
    """Show what is worth building and testing, and what is not.

    The cells are targets x GPUs. Each pruned cell names a rule, a reason and its source, and comes back with
    --ignore-rule RULE. Unchanged targets are skipped. Without --inventory only builds are planned.

    \b
      imagefactory plan --inventory gpus.yaml 'pytorch-*'
      imagefactory plan --inventory gpus.yaml --github >> "$GITHUB_OUTPUT"
      imagefactory plan --inventory gpus.yaml --registry registry.example.org/gpu
      imagefactory plan --inventory inventory.json     for the GPUs that a pool has
      imagefactory plan --tuples space.csv             any versions, recipes or not

    GitHub fails a job whose matrix is empty, so let that job begin with

    \b
      if: needs.NAME.outputs.matrix != '{"include":[]}'

    Exit code 0 whatever is pruned or blocked.
    """
    from imagefactory.actions.plan import PlanGpus, PlanLookup, read_listed, read_rows, read_stages
    from imagefactory.matrix.plan import PlanInput, check_rules, make_plan, unused_rules
    from imagefactory.matrix.rows import RowsQuery, rule_rows
    from imagefactory.settings.own_commands import parse_machines
    from imagefactory.verify.kits import program_checksum
    from imagefactory.views.plan import MAX_JOBS, format_kits, format_matrix, format_rows, summary

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
            document = {"rows": [_row_json(row) for row in ruled_rows], "unused_rules": unused}
            return print_json({"format": "imagefactory.rows/1", **document})
        return print_result(format_rows(ruled_rows, unused, terminal_width()))
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
        chosen = {row.target.name for row in jobs.targets}
        load_extra("nightly.nights:write_plan")(
            keep,
            whole,
            created=request.now,
            registry=registry,
            names=names,
            devices=listed.devices,
            waiting=tuple(row.target.name for row in whole.targets if row.target.name not in chosen),
        )
    if github:
        print_result(format_matrix(jobs, kits=bool(registry)))
        print_result(f"{format_kits(jobs)}\nprogram={program_checksum()}", unless=not registry)
        return write_terminal(2, summary(whole, waiting))
    return _say_plan(whole, as_json=as_json)


def _say_plan(whole: VerificationPlan, *, as_json: bool) -> None:
    from imagefactory.matrix.plan import CellState
    from imagefactory.views.plan import format_plan

    if as_json:
        return print_json({"format": "imagefactory.plan/1", **_plan_json(whole)})
    print_result(format_plan(whole, terminal_width()))
    for state, name in ((cell.state, row.target.name) for row in whole.targets for cell in row.cells):
        if state in (CellState.BUILD, CellState.VERIFY):
            return print_next_command(state.value, name)
    return None


# --- JSON ----------------------------------------------------------------------------------------


def _plan_json(whole: VerificationPlan) -> dict[str, object]:
    from imagefactory.views.plan import counts

    targets = [
        {
            "target": planned.target.name,
            "state": planned.state,
            "reason": planned.reason,
            "hint": planned.hint,
            "image": planned.image,
            "reference": planned.reference,
            "recipe": str(planned.target.where),
            "cells": [_cell_json(cell) for cell in planned.cells],
        }
        for planned in whole.targets
    ]
    return {"targets": targets, "counts": counts(whole), "unused_rules": whole.unused}


def _cell_json(cell: PlannedCell) -> dict[str, object]:
    from imagefactory.views.plan import device_json

    return {
        **device_json(cell.device),
        "driver_cuda": cell.device.cuda,
        "part": cell.device.part,
        "state": cell.state,
        "required": cell.required,
        **_ruling_json(cell.ruling),
    }


def _row_json(ruled: RowRuling) -> dict[str, object]:
    from imagefactory.views.plan import device_json

    row = ruled.row
    return {
        "where": row.where,
        "framework": row.framework,
        "version": row.version,
        "cuda": row.cuda,
        **device_json(row.device),
        "driver_cuda": row.device.cuda,
        "outcome": row.outcome,
        "state": "pruned" if ruled.ruling.pruned else "accepted",
        **_ruling_json(ruled.ruling),
    }


def _ruling_json(ruling: CellRuling) -> dict[str, object]:
    """Return a ruling as JSON. Unknown `basis` and `rule` are null; `override` are options that undo it."""
    claim = ruling.claim
    return {
        "basis": claim.basis if claim else None,
        "answer": claim.answer if claim else "unknown",
        "rule": claim.rule if claim else None,
        "reason": ruling.reason,
        "source": claim.source if claim else "",
        "override": " ".join(f"--ignore-rule {item.rule}" for item in ruling.against),
        "against": ruling.against,
        "allowed": ruling.allowed,
        "warnings": ruling.warnings,
    }
