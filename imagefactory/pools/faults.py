"""Which machines failed the jobs of a sweep, and which of them get no more of it.

What failed a job writes a line to `faults` in the sweep's folder: post.py on HTCondor, task.sh on Slurm. Both
keep to one rule, `bad_machines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.pools.htcondor.node.post import FAULTS, LARGEST_LOG, bad_machines, parse_faults, read
from imagefactory.pools.model import Sweep


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
    faults = parse_faults(read(folder / FAULTS, LARGEST_LOG))
    bad = {
        name for one in sweep.machines if not one.driver for name in bad_machines(faults, list(one.machines))
    }
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


def machines_json(machines: Sequence[FailedMachine]) -> list[dict[str, object]]:
    """The same for programs."""
    return [
        {
            "machine": one.machine,
            "left_out": one.left_out,
            "faults": [
                {
                    "node": fault.node,
                    "job": fault.job,
                    "at": f"{fault.at:%Y-%m-%dT%H:%M:%SZ}",
                    "why": fault.why,
                }
                for fault in one.faults
            ],
        }
        for one in machines
    ]
