"""The values of pools: the GPUs, the jobs on them, and their results.

    Inventory + plan -> Sweep (nodes) -> (a DAG on the pool) -> NodeResult -> GpuReport -> Verdict

Capabilities are written `8.0`, memory and disk are bytes, times are aware and in UTC, digests `sha256:<64
hex>`. A CUDA version of a driver is the newest that it supports (`12.4`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Protocol

from imagefactory.errors import UsageError
from imagefactory.gpu.values import row_of, slice_of
from imagefactory.model import Outcome
from imagefactory.serialize import MaxRows
from imagefactory.settings.choices import HTCONDOR, POOLS
from imagefactory.verify.report import GpuReport, VerifiedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGpu:
    """One GPU as the pool reports it. `id` is the pool's short name (`GPU-a0223334`), `uuid` `GPU-...` in
    full.

    `driver` (`550.54.15`), `cuda` and `memory` are empty or 0 if the pool does not report them. `mig`: it is
    a slice of a GPU. `free`: no job has it. `host` is the architecture of its machine in OCI's words
    (`amd64`, `arm64`), empty if it is not known.
    """

    id: str
    uuid: str
    name: str
    capability: str
    memory: int
    driver: str
    cuda: str
    mig: bool
    free: bool
    host: str = ""

    @property
    def part(self) -> str:
        """Return the profile of a slice, `mig` if its name has none; empty for a whole GPU."""
        return (slice_of(self.name) or "mig") if self.mig else ""

    @property
    def row(self) -> str:
        return row_of(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMachine:
    """A machine of a pool. `attributes` are the plain values of its ad that jobs may request.

    `start` is its START expression, which selects jobs; empty if it is not known.
    """

    name: str
    attributes: Mapping[str, str | int | float | bool]
    start: str
    gpus: tuple[PoolGpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The machines with GPUs of a pool at one time. `pool` is its name, empty if it is not known.

    `notes` name what was skipped, a line each.
    """

    pool: str
    taken: datetime
    machines: tuple[PoolMachine, ...]
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[PoolGpu, ...]:
        return tuple(gpu for machine in self.machines for gpu in machine.gpus)

    @property
    def known(self) -> tuple[PoolGpu, ...]:
        """Return the GPUs with a known capability."""
        return tuple(gpu for gpu in self.gpus if gpu.capability)


# --- jobs


class ImageKind(StrEnum):
    """The type of a job's image, in the terms of `container_image`."""

    DOCKER = "docker"
    ORAS = "oras"
    SIF = "sif"
    OSDF = "osdf"


MACHINE_HAS = {
    ImageKind.DOCKER: "HasDockerURL",
    ImageKind.ORAS: "HasSandboxImage",
    ImageKind.SIF: "HasSIF",
    ImageKind.OSDF: "HasSIF",
}
"""The attribute that must be true of a machine for a job in a container of HTCondor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolImage:
    """An image for jobs: `address` as `container_image` takes it, pinned by digest.

    `size` is transferred, `unpacked` is on the disk of a machine while the job runs. `sha256` is that of a
    .sif file, else empty.
    """

    kind: ImageKind
    address: str
    subject: VerifiedImage
    size: int
    unpacked: int
    sha256: str = ""


TRANSFERS = timedelta(hours=6)
"""The time of a job on a machine for its transfers, besides its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """The time limits of a job to wait, be held and run, and its retries after failures of the pool."""

    idle: timedelta = timedelta(hours=24)
    held: timedelta = timedelta(minutes=10)
    run: timedelta = timedelta(hours=24)
    retries: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepNode:
    """One job: one image on one capability. `name` has letters, digits, `-` and `_` only.

    `cuda` is the lowest that the GPU's driver must take, empty for any. `timeout` is the suite's, in seconds.
    `python` is the absolute path of the image's Python. `part` is the slice (MIG), empty for a whole GPU.
    `processor` is that of the image (`arm64`), empty for amd64. Machines with the driver `first` come before
    others, with `only` no others do.
    """

    name: str
    target: str
    capability: str
    image: PoolImage
    nonce: str
    cuda: str
    memory: int
    disk: int
    timeout: float
    python: str
    part: str = ""
    processor: str = ""
    first: str = ""
    only: bool = False

    @property
    def row(self) -> str:
        return row_of(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCell:
    """A cell that is not queued, and why: `rule` is one of plan.PRUNING, or `verified`, `no-match`, ..."""

    target: str
    capability: str
    part: str = ""
    rule: str
    reason: str

    @property
    def row(self) -> str:
        return row_of(self.capability, self.part)


MOST_NODES = 20_000
MOST_MACHINES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesByCapability:
    """The names of the machines with a GPU of a row (a capability, or a slice's), and of a `driver` if it is
    set."""

    capability: str
    machines: Annotated[tuple[str, ...], MaxRows(MOST_MACHINES)]
    driver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """The request of one `sweep start` to `pool`, a row of POOLS.

    `site` is a row of sites.toml, `level` the suite's. `machines` are those of the pool when it was created,
    `own` the settings' additions to its jobs (sites.Site). `patterns` select machines
    (own_commands.is_machine_selected). At most `at_once` of its jobs are in the queue, 0 for all.
    """

    id: str
    made: datetime
    level: str
    site: str
    nodes: Annotated[tuple[SweepNode, ...], MaxRows(MOST_NODES)]
    left_out: Annotated[tuple[SkippedCell, ...], MaxRows(50 * MOST_NODES)] = ()
    limits: JobLimits = field(default_factory=JobLimits)
    pool: str = HTCONDOR
    machines: Annotated[tuple[MachinesByCapability, ...], MaxRows(1000)] = ()
    own: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    at_once: int = 0


# --- results


RETRIED_OUTCOMES = (Outcome.INFRASTRUCTURE, Outcome.PULL_FAILED)
"""Failures of the pool: jobs that end so are retried."""


class JobEnding(StrEnum):
    """The end of one attempt of a job, from its log."""

    WAITING = "waiting"
    RUNNING = "running"
    DISCONNECTED = "disconnected"
    EXITED = "exited"
    KILLED = "killed"
    HELD = "held"
    REMOVED = "removed"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAttempt:
    """One job of a node. `job` is `12.0`; `code` its exit code, signal or hold code; `text` the pool's
    message.

    `gpu` is the pool's GPU of its last start on `machine` and `slot`, None if it never started or had none.
    """

    job: str
    ending: JobEnding
    code: int
    text: str
    machine: str
    slot: str
    gpu: PoolGpu | None
    submitted: datetime
    started: datetime | None
    ended: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """The result of a node. `outcome` is None while it waits or runs; the oldest attempt is first."""

    node: str
    outcome: Outcome | None
    reason: str
    attempts: tuple[JobAttempt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The state of a node. With `run` the suite ran and ended: the outcome is None, and `job_report` decides
    it.

    `run`, `report` and `evidence` are the job's files as they came back, for the pool to read. `evidence` is
    of a pool whose jobs read the host's GPUs outside the image. `settled`: its last job has ended for good.
    """

    result: NodeResult
    settled: bool = False
    run: bytes | None = None
    report: bytes | None = None
    evidence: bytes | None = None


# --- pools


class Pool(Protocol):
    """A batch system: its queue, and what its jobs read and write in the directory of a sweep.

    Methods that query the queue raise ToolError if the pool's commands are missing or fail; the directory is
    read and written without them. A pool is a directory next to this file, and a row of POOLS.
    """

    def require(self) -> str:
        """Return the version of the batch system."""

    def inventory(self, now: datetime) -> Inventory:
        """Return the GPUs of the pool."""

    def submit(self, folder: Path) -> str:
        """Submit or continue the sweep in `folder`, and return the job that drives it."""

    def running(self, folder: Path) -> bool:
        """Return whether something still drives that sweep."""

    def driven(self) -> frozenset[Path]:
        """Return the directories of all sweeps that this user's jobs drive, by one query of the queue."""

    def look(self, folder: Path) -> None:
        """Store in the directory what only the queue shows of its jobs, if their logs do not show all."""

    def cancel(self, folder: Path) -> None:
        """Remove its jobs."""

    def run_limit(self, limits: JobLimits, timeout: float, own: Sequence[str]) -> timedelta:
        """Return the time limit of a job with a suite of `timeout` seconds; `own` is that of the sweep."""

    def check_folder(self, folder: Path) -> None:
        """Raise UsageError for a directory that jobs could not name, before anything is created."""

    def write(self, folder: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
        """Write all that the jobs need besides sweep.json. Raises UsageError.

        `texts` are kit.json and expectations.json by node. `is_whole` shows whether all is written.
        """

    def is_whole(self, folder: Path) -> bool:
        """Return whether `write` completed the sweep in `folder`."""

    def read_node(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeState:
        """Return the state of a node, by its jobs' files. Raises UsageError for an invalid name."""

    def read_result(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeResult:
        """Return `read_node` with the outcome of a returned run; `sweep collect` decides what it signs."""

    def job_report(
        self, kit: Mapping[str, Any], expectations: Mapping[str, Any], state: NodeState
    ) -> GpuReport:
        """Return the report of a run that came back; `kit` and `expectations` are trusted files.

        Raises StatementError for an invalid run, or one of another kit or suite.
        """


Pools = Callable[[str], Pool]
"""A function that opens the pool of a row of POOLS."""


def open_pool(name: str, environ: Mapping[str, str]) -> Pool:
    """Return the pool of a row of POOLS without a query. Raises UsageError for an unknown name."""
    if name not in POOLS:
        raise UsageError("pool-unknown", f"unknown pool '{name[:40]}'", hint=f"pools: {', '.join(POOLS)}")
    pool: Pool = import_module(POOLS[name].module).make_pool(environ)
    return pool


def local_pool(environ: Mapping[str, str]) -> str:
    """Return the pool of this machine, by its commands; empty if it has none."""
    return next(iter(local_pools(environ)), "")


def local_pools(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return all pools whose commands this machine has."""
    path = environ.get("PATH")
    return tuple(name for name, row in POOLS.items() if shutil.which(row.command, path=path))
