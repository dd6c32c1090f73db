"""Machines that failed jobs of a sweep, and the directories of its nodes, for all pools.

A failed job appends a line to `faults` in the directory of the sweep: post.py on HTCondor, task.sh on Slurm.
Both use the rule `bad_machines`; such machines get no more jobs. A new sweep starts with the faults of the
last days, so bad machines are excluded from its first job on.

    DIR/nodes/<node>/    kit.json and expectations.json, and what the pool's jobs write
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
"""The time for which new sweeps exclude a machine that failed two jobs."""
ANSWERS = frozenset(SIGNABLE) - {Outcome.TIMEOUT}
"""Outcomes that describe the image. If a retry has one, the machine caused the earlier failure."""
NODES = "nodes"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFault:
    """A job that failed on a machine, and the reason."""

    node: str
    job: str
    at: datetime
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFaults:
    """The faults of a machine, the oldest first. `excluded` means that it gets no more jobs of the sweep."""

    machine: str
    excluded: bool
    faults: tuple[MachineFault, ...]


def read_failed_machines(directory: Path, sweep: SweepSpec) -> tuple[MachineFaults, ...]:
    """Return the machines that failed jobs of the sweep in `directory`, sorted by name."""
    faults = read_machine_faults(directory)
    bad = _bad(faults, sweep.machines)
    return tuple(
        MachineFaults(
            machine=name,
            excluded=name in bad,
            faults=tuple(
                MachineFault(
                    node=fault.node, job=fault.job, at=datetime.fromtimestamp(fault.at, UTC), reason=fault.why
                )
                for fault in machine_faults
            ),
        )
        for name, machine_faults in _by_machine(faults)
    )


def _by_machine(faults: Sequence[NodeFault]) -> list[tuple[str, list[NodeFault]]]:
    names = sorted({fault.machine for fault in faults})
    return [(name, [fault for fault in faults if fault.machine == name]) for name in names]


def read_machine_faults(directory: Path) -> tuple[NodeFault, ...]:
    """Return the faults in the directory of a sweep."""
    return tuple(parse_faults(read(directory / FAULT_FILES, LARGEST_LOG)))


def blamed_machines(
    faults: Iterable[NodeFault], sweep: SweepSpec, results: Mapping[str, NodeResult], now: datetime
) -> tuple[NodeFault, ...]:
    """Return the faults since REMEMBERED for which another machine could run the same job. Pure.

    Faults from before the sweep belong to other sweeps.
    """
    since = max(sweep.created, now - REMEMBERED).timestamp()
    return tuple(
        fault
        for fault in faults
        if fault.at >= int(since)
        and (result := results.get(fault.node))
        and result.outcome in ANSWERS
        and result.attempts
        and result.attempts[-1].machine != fault.machine
    )


def faults_of_bad_machines(
    faults: Sequence[NodeFault], machines: Iterable[MachinesByCapability]
) -> tuple[NodeFault, ...]:
    """Return the faults of machines that get no job while another machine of that row remains. Pure."""
    rows = tuple(machines)
    bad = _bad(faults, rows) & {name for row in rows for name in row.machines}
    return tuple(fault for fault in faults if fault.machine in bad)


def bad_by_row(
    faults: Sequence[NodeFault], machines: Sequence[MachinesByCapability]
) -> Mapping[str, frozenset[str]]:
    """Return the bad machines of each row: those in the list of the row, or in no list. Pure."""
    listed = {name for row in machines for name in row.machines}
    return {
        row.capability: frozenset(
            name
            for name in bad_machines(list(faults), list(row.machines))
            if name in row.machines or name not in listed
        )
        for row in machines
        if not row.driver
    }


def _bad(faults: Sequence[NodeFault], machines: Sequence[MachinesByCapability]) -> frozenset[str]:
    return frozenset().union(*bad_by_row(faults, machines).values())


def format_machine_faults(faults: Iterable[NodeFault]) -> str:
    """Return the text of a `faults` file, which `parse_faults` reads."""
    rows = ((fault.machine, fault.node, fault.job, str(fault.at), fault.why) for fault in faults)
    return "".join("\t".join(row) + "\n" for row in rows)


def format_excluded(faults: Sequence[NodeFault]) -> tuple[str, ...]:
    """Return a line for each machine that these faults exclude."""
    lines = []
    for name, machine_faults in _by_machine(faults):
        last = max(machine_faults, key=lambda fault: fault.at)
        lines.append(
            f"{name} gets no job: it failed {len(machine_faults)} within {REMEMBERED.days} days, the last on "
            f"{datetime.fromtimestamp(last.at, UTC):%Y-%m-%d %H:%M} UTC: {last.why[:200]}"
        )
    return tuple(lines)


# --- the directories of nodes


def checked_name(name: str) -> str:
    """Return the name of a node. Raises UsageError for an unsafe name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            "node-name-invalid",
            f"{name!r} is not a node name",
            hint=f"use a name that matches {_NAME.pattern}",
        )
    return name


def node_directory(directory: Path, name: str) -> Path:
    """Return the directory of a node.

    Raises UsageError for a name that would leave the directory of the sweep.
    """
    return directory / NODES / checked_name(name)


def with_outcome(
    directory: Path, state: NodeState, job_report: Callable[[Any, Any, NodeState], GpuReport]
) -> NodeResult:
    """Return the result of a node. If a run was returned, `job_report` of the pool sets its outcome.

    The files are trusted here. `sweep collect` decides which outcomes it signs.
    """
    if state.run is None:
        return state.result
    job_directory = node_directory(directory, state.result.node)
    try:
        kit, expectations = (
            parse_json(read_report(job_directory, name) or b"") for name in (KIT, EXPECTATIONS)
        )
        report = job_report(kit, expectations, state)
    except (StatementError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.message if isinstance(error, StatementError) else "its files were changed"
        return replace(state.result, outcome=Outcome.INFRASTRUCTURE, reason=clean(reason))
    return replace(state.result, outcome=report.outcome, reason=report.reason)


def write_nodes(directory: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write the directory of each node.

    `texts` are kit.json and expectations.json by node. Raises OSError.
    """
    for node in sweep.nodes:
        job_directory = node_directory(directory, node.name)
        job_directory.mkdir(parents=True, exist_ok=True)
        for name in (KIT, EXPECTATIONS):
            (job_directory / name).write_bytes(texts[node.name][name])
