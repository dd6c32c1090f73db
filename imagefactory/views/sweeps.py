"""A sweep as a person reads it: what is queued and left out, how far it is, what became of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from imagefactory.schedulers.faults import FailedMachine
from imagefactory.schedulers.pool import Ending, JobLimits, LeftOut, NodeResult, Sweep
from imagefactory.progress import format_seconds
from imagefactory.views.text import format_table
from imagefactory.schedulers.cells import QueuedCell, SweepPlan
from imagefactory.schedulers.sweep_file import CollectedNode

FEW = 3
"""Targets that a sweep's line names."""
_UNDERWAY = (Ending.WAITING, Ending.RUNNING, Ending.DISCONNECTED, Ending.HELD)


def format_sweep_plan(plan: SweepPlan, limits: JobLimits, width: int | None = None) -> str:
    """What would be queued, then what is left out, by rule, then what is not known of other sweeps."""
    blocks = []
    if plan.cells:
        header = ("TARGET", "CAPABILITY", "GPUS", "DRIVER", "WHY")
        blocks.append(format_table(header, [_cell(cell) for cell in plan.cells], width, ("DRIVER",)))
    if plan.left_out:
        blocks.append(format_left_out(plan.left_out, width))
    blocks += ["\n".join(plan.notes)] if plan.notes else []
    blocks.append(summary(plan, limits))
    return "\n\n".join(blocks)


def _cell(cell: QueuedCell) -> tuple[str, ...]:
    driver = f"CUDA {cell.cuda} or newer" if cell.cuda else "any"
    driver += f", {'only' if cell.only else 'first'} {cell.first}" if cell.first else ""
    doing = "to build or push; " if cell.stage.missing else ""
    return cell.stage.target.name, cell.row, str(cell.gpus), driver, f"{doing}{cell.reason}"


def format_left_out(left_out: Iterable[LeftOut], width: int | None = None) -> str:
    """A row for each target and rule; capabilities that fare alike share it."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for one in left_out:
        rows.setdefault((one.target, one.rule, one.reason), []).append(one.row)
    header = ("LEFT OUT", "CAPABILITY", "RULE", "WHY")
    table = [(target, ", ".join(there), rule, why) for (target, rule, why), there in rows.items()]
    return format_table(header, table, width)


def summary(plan: SweepPlan, limits: JobLimits) -> str:
    """One line: jobs, and what is left out by rule."""
    rules = Counter(one.rule for one in plan.left_out)
    told = ", ".join(f"{count} {rule}" for rule, count in sorted(rules.items()))
    jobs = len(plan.cells)
    idle = format_seconds(limits.idle.total_seconds())
    run = format_seconds(limits.run.total_seconds())
    images = len({cell.stage.target.name for cell in plan.cells})
    queued = f"{jobs} job{'' if jobs == 1 else 's'} of {images} image{'' if images == 1 else 's'}"
    return f"{queued}, each idle for {idle} and running for {run} at most; left out: {told or 'none'}"


def format_status(sweep: Sweep, results: Sequence[NodeResult], driven: bool | None, now: datetime) -> str:
    """One line on the sweep, then a row for each node, those that are not done first."""
    nodes = {node.name: node for node in sweep.nodes}
    rows = [
        (
            nodes[one.node].target,
            nodes[one.node].row,
            one.outcome.value if one.outcome else _state(one),
            _attempts(one),
            one.attempts[-1].machine if one.attempts else "",
            "" if one.outcome else _since(one, now),
        )
        for one in sorted(results, key=lambda one: one.outcome is not None)
        if one.node in nodes
    ]
    header = ("TARGET", "CAPABILITY", "STATE", "TRY", "MACHINE", "SINCE")
    return "\n\n".join([headline(sweep, results, driven), format_table(header, rows)])


def format_failed_machines(machines: Sequence[FailedMachine], width: int | None = None) -> str:
    """A row for each machine that failed jobs, with the last reason; empty where none did."""
    if not machines:
        return ""
    rows = [
        (
            one.machine,
            str(len(one.faults)),
            "left out" if one.left_out else "tried last",
            f"{one.faults[-1].at:%Y-%m-%d %H:%M}, {one.faults[-1].node}: {one.faults[-1].why}",
        )
        for one in machines
    ]
    return format_table(("MACHINE", "FAULTS", "NOW", "LAST FAULT"), rows, width)


def headline(sweep: Sweep, results: Sequence[NodeResult], driven: bool | None) -> str:
    ended = Counter(one.outcome.value for one in results if one.outcome)
    doing = Counter(_state(one) for one in results if one.outcome is None)
    told = ", ".join(f"{count} {word}" for word, count in (*sorted(ended.items()), *sorted(doing.items())))
    left = sum(doing.values())
    state = "done" if not left else "at work" if driven else "stopped" if driven is False else "not asked"
    of = _targets(sweep)
    made = f"{sweep.made.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return f"{sweep.id}  {sweep.pool}  {state}: {told}  ({of}, made {made})"


def _targets(sweep: Sweep) -> str:
    """`pytorch-2.3-cu121, jax-0.4-cu121 and 3 more`."""
    names = list(dict.fromkeys(node.target for node in sweep.nodes))
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"{', '.join(names[:FEW])}{more}"


def _state(result: NodeResult) -> str:
    if not result.attempts:
        return "not submitted"
    ending = result.attempts[-1].ending
    return ending.value if ending in _UNDERWAY else "between tries"


def _attempts(result: NodeResult) -> str:
    return str(len(result.attempts)) if result.attempts else ""


def _since(result: NodeResult, now: datetime) -> str:
    if not result.attempts:
        return ""
    last = result.attempts[-1]
    return format_seconds(max((now - (last.started or last.submitted)).total_seconds(), 0.0))


def format_collected(nodes: Sequence[CollectedNode], width: int | None = None) -> str:
    """A row for each node: the word, on which GPU, and why."""
    rows = [
        (
            node.target,
            node.capability,
            node.result.outcome.value if node.result.outcome else "not done",
            ", ".join(part for part in (node.gpu, node.driver) if part),
            f"{node.result.reason}; {node.why}" if node.why else node.result.reason,
        )
        for node in nodes
    ]
    return format_table(("TARGET", "CAPABILITY", "OUTCOME", "GPU", "WHY"), rows, width, ("GPU",))


# --- JSON ----------------------------------------------------------------------------------------


def plan_json(plan: SweepPlan, limits: JobLimits) -> Mapping[str, object]:
    return {
        "idle_seconds": round(limits.idle.total_seconds()),
        "run_seconds": round(limits.run.total_seconds()),
        "queued": [
            {
                "target": cell.stage.target.name,
                "capability": str(cell.capability),
                "gpus": cell.gpus,
                "cuda": cell.cuda,
                "part": cell.part,
                "driver": cell.first,
                "only": cell.only,
                "build": bool(cell.stage.missing),
                "reason": cell.reason,
            }
            for cell in plan.cells
        ],
        "left_out": plan.left_out,
        "notes": list(plan.notes),
    }
