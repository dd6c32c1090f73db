"""Which machines failed the jobs of a sweep, and which of them get no more of it, nor of those that follow.

What failed a job writes a line to `faults` in the sweep's folder: post.py on HTCondor, task.sh on Slurm. Both
keep to one rule, `bad_machines`. A sweep that is made begins with the faults of the days before, so this rule
excludes a bad machine from the first job on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from imagefactory.model import Outcome
from imagefactory.schedulers.htcondor.node.post import FAULTS, LARGEST_LOG, Fault, bad_machines, parse_faults, read
from imagefactory.schedulers.pool import CapableMachines, NodeResult, Sweep
from imagefactory.verdicts.statement import SIGNABLE

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
class FailedMachine:
    """A machine with its faults, the oldest first. `left_out`: it gets no more jobs of the sweep."""

    machine: str
    left_out: bool
    faults: tuple[MachineFault, ...]


def read_failed_machines(folder: Path, sweep: Sweep) -> tuple[FailedMachine, ...]:
    """The machines that failed jobs of the sweep in `folder`, by name."""
    faults = read_faults(folder)
    bad = _bad(faults, sweep.machines)
    return tuple(
        FailedMachine(
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


def read_faults(folder: Path) -> tuple[Fault, ...]:
    """The faults that a sweep's folder has."""
    return tuple(parse_faults(read(folder / FAULTS, LARGEST_LOG)))


def blamed(
    faults: Iterable[Fault], sweep: Sweep, results: Mapping[str, NodeResult], now: datetime
) -> tuple[Fault, ...]:
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


def of_bad_machines(faults: Sequence[Fault], machines: Iterable[CapableMachines]) -> tuple[Fault, ...]:
    """The faults of those machines that get no job, while another one of that row is left. Pure."""
    known = tuple(machines)
    bad = _bad(faults, known) & {name for one in known for name in one.machines}
    return tuple(fault for fault in faults if fault.machine in bad)


def bad_by_row(faults: Sequence[Fault], machines: Sequence[CapableMachines]) -> Mapping[str, frozenset[str]]:
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


def _bad(faults: Sequence[Fault], machines: Sequence[CapableMachines]) -> frozenset[str]:
    return frozenset().union(*bad_by_row(faults, machines).values())


def format_faults(faults: Iterable[Fault]) -> str:
    """The lines that `parse_faults` reads."""
    rows = ((one.machine, one.node, one.job, str(one.at), one.why) for one in faults)
    return "".join("\t".join(row) + "\n" for row in rows)


def format_excluded(faults: Sequence[Fault]) -> tuple[str, ...]:
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
