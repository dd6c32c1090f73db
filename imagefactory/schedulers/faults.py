"""Which machines failed the jobs of a sweep, and which of them get no more of it, nor of those that follow.

What failed a job writes a line to `faults` in the sweep's folder: post.py on HTCondor, task.sh on Slurm. Both
keep to one rule, `bad_machines`. A sweep that is made begins with the faults of the days before, so this rule
excludes a bad machine from the first job on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from imagefactory.errors import StatementError, UsageError
from imagefactory.model import Outcome
from imagefactory.schedulers.htcondor.node.post import (
    FAULT_FILES,
    LARGEST_LOG,
    NodeFault,
    bad_machines,
    parse_faults,
    read,
)
from imagefactory.schedulers.pool import MachinesByCapability, NodeResult, NodeState, SweepSpec
from imagefactory.serialize import parse_json
from imagefactory.trust.verdict import SIGNABLE
from imagefactory.verify.kit.program import EXPECTATIONS, KIT, read_report
from imagefactory.verify.outcome import clean
from imagefactory.verify.report import GpuReport

REMEMBERED = timedelta(days=7)
"""How long a machine that failed two jobs gets none of new sweeps."""
ANSWERS = frozenset(SIGNABLE) - {Outcome.TIMEOUT}
"""Outcomes that say something of the image, and so that its earlier failure was a machine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFault:
    """A job that failed on a machine, and why."""

    node: str
    job: str
    at: datetime
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFaults:
    """A machine with its faults, the oldest first. `left_out`: it gets no more jobs of the sweep."""

    machine: str
    left_out: bool
    faults: tuple[MachineFault, ...]


def read_failed_machines(folder: Path, sweep: SweepSpec) -> tuple[MachineFaults, ...]:
    """The machines that failed jobs of the sweep in `folder`, by name."""
    faults = read_machine_faults(folder)
    bad = _bad(faults, sweep.machines)
    return tuple(
        MachineFaults(
            machine=name,
            left_out=name in bad,
            faults=tuple(
                MachineFault(node=one.node, job=one.job, at=datetime.fromtimestamp(one.at, UTC), why=one.why)
                for one in faults
                if one.machine == name
            ),
        )
        for name in sorted({one.machine for one in faults})
    )


def read_machine_faults(folder: Path) -> tuple[NodeFault, ...]:
    """The faults that a sweep's folder has."""
    return tuple(parse_faults(read(folder / FAULT_FILES, LARGEST_LOG)))


def blamed_machines(
    faults: Iterable[NodeFault], sweep: SweepSpec, results: Mapping[str, NodeResult], now: datetime
) -> tuple[NodeFault, ...]:
    """The faults of REMEMBERED in which the machine was at fault: another one answered the same job. Pure.

    Faults from before the sweep are of other sweeps.
    """
    since = max(sweep.made, now - REMEMBERED).timestamp()
    return tuple(
        fault
        for fault in faults
        if fault.at >= int(since)
        and (result := results.get(fault.node))
        and result.outcome in ANSWERS
        and result.attempts
        and result.attempts[-1].machine != fault.machine
    )


def of_bad_machines(
    faults: Sequence[NodeFault], machines: Iterable[MachinesByCapability]
) -> tuple[NodeFault, ...]:
    """The faults of those machines that get no job, while another one of that row is left. Pure."""
    known = tuple(machines)
    bad = _bad(faults, known) & {name for one in known for name in one.machines}
    return tuple(fault for fault in faults if fault.machine in bad)


def bad_by_row(
    faults: Sequence[NodeFault], machines: Sequence[MachinesByCapability]
) -> Mapping[str, frozenset[str]]:
    """The bad machines of each row: those that it lists, or that no row does. Pure."""
    listed = {name for one in machines for name in one.machines}
    return {
        one.capability: frozenset(
            name
            for name in bad_machines(list(faults), list(one.machines))
            if name in one.machines or name not in listed
        )
        for one in machines
        if not one.driver
    }


def _bad(faults: Sequence[NodeFault], machines: Sequence[MachinesByCapability]) -> frozenset[str]:
    return frozenset().union(*bad_by_row(faults, machines).values())


def format_machine_faults(faults: Iterable[NodeFault]) -> str:
    """The lines that `parse_faults` reads."""
    rows = ((one.machine, one.node, one.job, str(one.at), one.why) for one in faults)
    return "".join("\t".join(row) + "\n" for row in rows)


def format_excluded(faults: Sequence[NodeFault]) -> tuple[str, ...]:
    """A line for each machine that gets no job because of these faults."""
    lines = []
    for name in sorted({one.machine for one in faults}):
        own = [one for one in faults if one.machine == name]
        last = max(own, key=lambda one: one.at)
        lines.append(
            f"{name} gets no job: it failed {len(own)} within {REMEMBERED.days} days, the last on "
            f"{datetime.fromtimestamp(last.at, UTC):%Y-%m-%d %H:%M} UTC: {last.why[:200]}"
        )
    return tuple(lines)


# --- What lies in the folder of any pool's sweep, beside sweep.json: a folder a node, with what is asked
# there
# DIR/nodes/<node>/    kit.json and expectations.json, and what the pool's jobs write


NODES = "nodes"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


def checked_name(name: str) -> str:
    """The name of a node. Raises UsageError for one that could be more than that."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            "node-name-invalid",
            f"{name!r} is not a node name",
            hint=f"use a name that matches {_NAME.pattern}",
        )
    return name


def node_directory(folder: Path, name: str) -> Path:
    """Raises UsageError for a name that could leave the folder."""
    return folder / NODES / checked_name(name)


def with_outcome(
    folder: Path, found: NodeState, job_report: Callable[[Any, Any, NodeState], GpuReport]
) -> NodeResult:
    """What is known of a node, with the word of a run that came back, as `job_report` of its pool has it.

    What it signs is collect's to say: here its files are believed to be as they were written.
    """
    if found.run is None:
        return found.result
    place = node_directory(folder, found.result.node)
    try:
        kit, asked = (parse_json(read_report(place, name) or b"") for name in (KIT, EXPECTATIONS))
        report = job_report(kit, asked, found)
    except (StatementError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = error.message if isinstance(error, StatementError) else "its files were changed"
        return replace(found.result, outcome=Outcome.INFRASTRUCTURE, reason=clean(said))
    return replace(found.result, outcome=report.outcome, reason=report.reason)


def write_nodes(folder: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
    """Each node's folder; `texts` are per node kit.json and expectations.json. Raises OSError."""
    for node in sweep.nodes:
        place = node_directory(folder, node.name)
        place.mkdir(parents=True, exist_ok=True)
        for name in (KIT, EXPECTATIONS):
            (place / name).write_bytes(texts[node.name][name])
