"""The command that says what is worth building and testing: plan."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from imagefactory.cli.output import (
    Call,
    json_option,
    say,
    say_json,
    say_next,
    targets_argument,
    terminal_width,
    write,
)
from imagefactory.errors import UsageError

if TYPE_CHECKING:
    from imagefactory.matrix.plan import Plan, PlanGpu, PlannedCell, Ruling
    from imagefactory.matrix.rows import RuledRow
    from imagefactory.stages.plan import Listed


def _complete_rules(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    from imagefactory.matrix.plan import PRUNING

    return [rule for rule in PRUNING if rule.startswith(incomplete)]


@click.command()
@targets_argument(required=False)
@click.option(
    "--inventory",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='The GPUs to plan for: a list of {name: V100, driver: "535.129.03"} or capability: "7.0", or '
    "those of a pool, as `imagefactory pool -o FILE` wrote them.",
)
@click.option(
    "--machine",
    "machines",
    metavar="NAMES",
    help="Of a pool's inventory: these machines only, with * and ?, and none of those after !: "
    "'gpu*,!gpu07'. Default: the setting `sweep-machines`.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="RULE",
    shell_complete=_complete_rules,
    help="Let this rule prune nothing (repeatable): the word that a pruned cell begins with, or known-bad "
    "for all known faults. A cell that several rules prune needs them all.",
)
@click.option(
    "--tuples",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Judge the rows of a CSV instead: framework,version,cuda,capability[,driver][,outcome].",
)
@click.option(
    "--recorded",
    is_flag=True,
    help="With --tuples: believe the outcomes that the rows record where they say that no environment could "
    "be solved ('Environment Resolution Failure', unsolvable). Nothing is solved here.",
)
@click.option(
    "--strict-drivers",
    is_flag=True,
    help="With --tuples and --inventory: a GPU matches where its driver takes the row's very CUDA, as CHTC's "
    "gpu-compatibility-testing asked.  [default: any driver of the same CUDA major from 11 on]",
)
@click.option(
    "--github",
    is_flag=True,
    help='Print matrix={"include":[...]}, a line for $GITHUB_OUTPUT: a job for each target and GPU, or '
    "without --inventory for each image to build. Of more than the 256 that GitHub runs, those whose proof "
    "is oldest; the others wait for another night. The summary goes to stderr.",
)
@click.option(
    "--registry",
    default="",
    metavar="HOST[/PATH]",
    help="Look for candidates and their verdicts there only, as a CI machine has no store. Default: in the "
    "store and the setting `registry`. With "
    '--github also targets={"include":[...]}, a job for each target with the kits to make, and program=SUM: '
    "the sha256 of what `sha256sum` prints of the kits' program files.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also keep it in a file, for `imagefactory night --kept FILE`.",
)
@json_option
@click.pass_obj
def plan(call: Call, /, names: tuple[str, ...], **given: Any) -> None:
    """Say what is worth building and testing, and what is not.

    Targets x GPUs, pruned by what is known.

    Each pruned cell names a rule, a reason and its source, and comes back by --allow RULE. What is unchanged
    is skipped. Without --inventory nothing is planned but builds: there is nothing to verify on.

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
    from imagefactory.matrix.plan import check_rules
    from imagefactory.settings.own_commands import parse_machines
    from imagefactory.stages.plan import Listed, read_listed

    asked = _PlanAsk(**given)
    asked.refuse_contradictions(names)
    allow = check_rules(asked.allow)
    machines = asked.machines or ""
    if asked.machines is None and asked.inventory and not asked.tuples:  # rows are no jobs of sweeps
        machines = call.settings.sweep_machines.value
    listed = read_listed(asked.inventory, parse_machines(machines)) if asked.inventory else Listed()
    if asked.machines is not None and not listed.pool:
        raise UsageError("option-conflict", "--machine requires --inventory", hint="add --inventory FILE")
    if asked.tuples:
        devices = tuple(one for one in listed.devices if one not in listed.avoided and not one.part)
        _rows(asked, asked.tuples, (devices, listed.pool), allow)
    else:
        _targets(call, asked, (names, listed, allow))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanAsk:
    """The options of `plan`."""

    inventory: Path | None
    machines: str | None
    allow: tuple[str, ...]
    tuples: Path | None
    recorded: bool
    strict_drivers: bool
    github: bool
    registry: str
    keep: Path | None
    as_json: bool

    def refuse_contradictions(self, names: tuple[str, ...]) -> None:
        if self.github and self.as_json:
            raise UsageError(
                "option-conflict", "--github and --json both write to stdout", hint="remove one of them"
            )
        if self.recorded and not self.tuples:
            raise UsageError("option-conflict", "--recorded requires --tuples", hint="add --tuples FILE")
        if self.strict_drivers and not (self.tuples and self.inventory):
            raise UsageError(
                "option-conflict",
                "--strict-drivers requires --tuples and --inventory",
                hint="add --tuples FILE --inventory FILE",
            )
        if self.tuples and names:
            raise UsageError(
                "option-conflict", "--tuples and targets exclude each other", hint=f"remove {' '.join(names)}"
            )
        if self.tuples and self.github:
            raise UsageError(
                "option-conflict",
                "--tuples and --github exclude each other: rows are not built",
                hint="remove --github",
            )
        if self.tuples and self.keep:
            raise UsageError(
                "option-conflict",
                "--tuples and --keep exclude each other: rows are not built",
                hint="remove --keep",
            )
        if self.tuples and self.registry:
            raise UsageError(
                "option-conflict",
                "--tuples and --registry exclude each other: rows are not built",
                hint="remove --registry",
            )


def _targets(call: Call, asked: _PlanAsk, given: tuple[tuple[str, ...], Listed, frozenset[str]]) -> None:
    from imagefactory.matrix.changes import KeptPlan, keep_plan
    from imagefactory.matrix.night import tonight
    from imagefactory.matrix.plan import CellState, PlanInput, make_plan
    from imagefactory.recipes.expand import select
    from imagefactory.report.plan import MAX_JOBS, format_kits, format_matrix, format_plan, summary
    from imagefactory.stages.nights import write_kept_plan
    from imagefactory.stages.plan import Asking, read_stages
    from imagefactory.verify.kit_make import program_sum

    names, listed, allow = given
    devices = listed.devices
    factory = call.factory
    also = factory.settings.registry.value
    asking = Asking(now=datetime.now(UTC), registry=asked.registry, also=also)
    stages = read_stages(factory, select(factory.targets, names), asking)
    made = make_plan(
        PlanInput(stages=stages, devices=devices, allow=allow, on_machines=True, avoided=listed.avoided)
    )
    now, waiting = made, 0
    if asked.github:
        now, waiting = tonight(made, MAX_JOBS, asking.now.date(), kits=bool(asked.registry))
    if asked.keep:
        chosen = {one.target.name for one in now.targets}
        kept = KeptPlan(
            made=asking.now,
            registry=asked.registry,
            names=names,
            devices=devices,
            waiting=tuple(one.target.name for one in made.targets if one.target.name not in chosen),
        )
        write_kept_plan(asked.keep, keep_plan(made, kept))
    if asked.github:
        say(format_matrix(now, kits=bool(asked.registry)))
        say(f"{format_kits(now)}\nprogram={program_sum()}", unless=not asked.registry)
        write(2, summary(made, waiting))
    elif asked.as_json:
        say_json("plan", _plan_json(made))
    else:
        say(format_plan(made, terminal_width()))
        doing = [(cell.state, one.target.name) for one in made.targets for cell in one.cells]
        for state, name in doing:
            if state in (CellState.BUILD, CellState.VERIFY):
                return say_next(state.value, name)
    return None


def _rows(
    asked: _PlanAsk, path: Path, listed: tuple[tuple[PlanGpu, ...], str], allow: frozenset[str]
) -> None:
    from imagefactory.matrix.plan import unused_rules
    from imagefactory.matrix.rows import RowsInput, rule_rows
    from imagefactory.report.plan import format_rows
    from imagefactory.stages.plan import read_rows

    devices, pool = listed
    given = RowsInput(
        rows=read_rows(path),
        devices=devices,
        allow=allow,
        pool=pool,
        strict=asked.strict_drivers,
        recorded=asked.recorded,
    )
    judged = rule_rows(given)
    unused = unused_rules(allow, (one.ruling for one in judged))
    if asked.as_json:
        say_json("rows", {"rows": [_row_json(one) for one in judged], "unused_rules": unused})
    else:
        say(format_rows(judged, unused, terminal_width()))


# --- JSON ----------------------------------------------------------------------------------------


def _plan_json(made: Plan) -> dict[str, object]:
    from imagefactory.report.plan import counts

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
        for planned in made.targets
    ]
    return {"targets": targets, "counts": counts(made), "unused_rules": made.unused}


def _cell_json(cell: PlannedCell) -> dict[str, object]:
    from imagefactory.report.plan import device_json

    return {
        **device_json(cell.device),
        "driver_cuda": cell.device.cuda,
        "part": cell.device.part,
        "state": cell.state,
        "required": cell.required,
        **_ruling_json(cell.ruling),
    }


def _row_json(ruled: RuledRow) -> dict[str, object]:
    from imagefactory.report.plan import device_json

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


def _ruling_json(ruling: Ruling) -> dict[str, object]:
    """`basis` and `rule` are null where nothing is known; `override` are the options that bring it back."""
    claim = ruling.claim
    return {
        "basis": claim.basis if claim else None,
        "answer": claim.answer if claim else "unknown",
        "rule": claim.rule if claim else None,
        "reason": ruling.reason,
        "source": claim.source if claim else "",
        "override": " ".join(f"--allow {one.rule}" for one in ruling.against),
        "against": ruling.against,
        "allowed": ruling.allowed,
        "warnings": ruling.warnings,
    }
