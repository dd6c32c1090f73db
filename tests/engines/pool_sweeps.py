"""Sweeps of a PoolGround by the real command: submitted, looked at, waited for, collected."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.pool_ground import PoolGround
from tests.services.condor import OTHER, CondorPool

LONG = 600.0
"""Seconds after which a test gives up on what it waits for."""
BAD = 9


def wait_for(what: str, happened: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < until, f"{what}: not within {LONG:.0f} s"
        time.sleep(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """A sweep that was submitted, and what the command line says of it."""

    ground: PoolGround
    id: str
    folder: Path

    @property
    def pool(self) -> CondorPool:
        return self.ground.pool

    @property
    def dag(self) -> str:
        """The job of DAGMan."""
        return str(self.status()["jobs"][-1])

    def status(self) -> dict[str, Any]:
        document = json.loads(self.ground.run("sweep", "status", "--json", self.id, err=False))
        (found,) = document["sweeps"]
        assert isinstance(found, dict)
        return found

    def ends(self) -> dict[str, dict[str, Any]]:
        """By target and capability, once all nodes have an outcome and DAGMan is gone."""
        return {node["node"]: node for node in self.end()["nodes"]}

    def end(self) -> dict[str, Any]:
        """What `sweep status` says of it then."""
        last: dict[str, Any] = {}

        def is_over() -> bool:
            last.update(self.status())
            return bool(last["done"]) and last["running"] is False

        wait_for(f"sweep {self.id}", is_over)
        return last

    def is_left_alone(self) -> bool:
        """No DAGMan is in the queue. (None: the queue did not answer.)"""
        return self.status()["running"] is False

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["node"]: node for node in self.status()["nodes"]}

    def job(self, node: str) -> str:
        """The job of a node that runs now."""

        def runs() -> bool:
            last = self.nodes()[node]["attempts"][-1:]
            return bool(last) and last[0]["ending"] == "running"

        wait_for(f"{node} to run", runs)
        return str(self.nodes()[node]["attempts"][-1]["job"])

    def collect(self, *, code: int) -> dict[str, dict[str, Any]]:
        document = json.loads(self.ground.run("sweep", "collect", "--json", self.id, code=code, err=False))
        return {row["kit"].rpartition("/")[2]: row for row in document["results"]}


def submit(
    ground: PoolGround, tricks: tuple[str, ...], *options: str, to: str = "htcondor", code: int = 0
) -> SweepRun:
    """A sweep of the images that do these tricks, by the real command."""
    names = [ground.name(trick) for trick in tricks]
    told = ground.run(
        "sweep",
        "start",
        *names,
        "--scheduler",
        to,
        "--suite",
        "quick",
        *options,
        "--json",
        err=False,
        code=code,
    )
    row = json.loads(told)
    assert row["errors"] == []
    return SweepRun(ground=ground, id=row["sweep"], folder=ground.pool.here(row["directory"]))


def node(ground: PoolGround, trick: str, capability: str = "9.0") -> str:
    return f"{ground.name(trick)}-sm{capability.replace('.', '')}".replace(".", "_")


def at_once(nodes: Iterable[dict[str, Any]], since: str) -> int:
    """How many of their jobs were there at the same time, from `submitted` or `started` to their end."""
    attempts = [one for row in nodes for one in row["attempts"] if one[since] and one["ended"]]
    begun = sorted(one[since] for one in attempts)
    ended = sorted(one["ended"] for one in attempts)
    return max(bisect_right(begun, at) - bisect_right(ended, at) for at in begun)


BLOCKS = """\
universe = vanilla
executable = /bin/sleep
transfer_executable = false
arguments = 3600
request_cpus = 1
request_memory = 64MB
request_disk = 1MB
request_gpus = 1
require_gpus = Capability == {capability}
queue
"""


@contextmanager
def somebody_else(pool: CondorPool, capability: str = "7.0") -> Iterator[Callable[[], None]]:
    """Another user's job keeps the only GPU with that capability, until what this gives is called."""
    path = pool.homes / OTHER / "blocks.sub"
    path.write_text(BLOCKS.format(capability=capability))
    job = pool.run(["condor_submit", "-terse", path.name], user=OTHER).stdout.split()[0]
    status = ["condor_q", job, "-af", "JobStatus"]
    wait_for("the other's job to run", lambda: pool.run(status, user=OTHER).stdout.strip() == "2")
    yield lambda: pool.run(["condor_rm", job], user=OTHER) and None
    pool.run(["condor_rm", job], user=OTHER, code=None)
