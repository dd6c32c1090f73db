"""The values of pools: GPUs, the jobs on them, and their results.

    Inventory + plan -> Sweep (nodes) -> (a DAG on the pool) -> NodeResult -> GpuReport -> Verdict

Capabilities are written `8.0`. Memory and disk are in bytes. Times are aware and in UTC. Digests are
`sha256:<64 hex>`. The CUDA version of a driver is the newest that it supports (`12.4`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Protocol

from imagefactory.errors import UsageError
from imagefactory.gpu.values import capability_row, mig_profile
from imagefactory.model import Outcome
from imagefactory.serialize import MaxRows
from imagefactory.settings.choices import CONTAINERS, HTCONDOR, POOLS
from imagefactory.verify.report import GpuReport, VerifiedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGpu:
    """One GPU as the pool reports it.

    `id` is the short name in the pool (`GPU-a0223334`), `uuid` the full `GPU-...`.

    `driver` (`550.54.15`), `cuda` and `memory` are empty or 0 if the pool does not report them. `mig` means
    that it is a MIG slice, `free` that no job uses it. `host` is the OCI architecture of its machine
    (`amd64`, `arm64`), empty if unknown.
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
        """Return the MIG profile of a slice, `mig` if its name has none, empty for a whole GPU."""
        return (mig_profile(self.name) or "mig") if self.mig else ""

    @property
    def row(self) -> str:
        return capability_row(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMachine:
    """A machine of a pool. `attributes` are the plain values in its ad that jobs may request.

    `start` is its START expression, which selects jobs. It is empty if unknown.
    """

    name: str
    attributes: Mapping[str, str | int | float | bool]
    start: str
    gpus: tuple[PoolGpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The machines with GPUs in a pool at one time. `pool` is the name of the pool, empty if unknown.

    `notes` are lines about skipped GPUs and machines. `listed`: the file lists types of GPUs, no machines.
    """

    pool: str
    taken: datetime
    machines: tuple[PoolMachine, ...]
    notes: tuple[str, ...] = ()
    listed: bool = False

    @property
    def gpus(self) -> tuple[PoolGpu, ...]:
        return tuple(gpu for machine in self.machines for gpu in machine.gpus)

    @property
    def known(self) -> tuple[PoolGpu, ...]:
        """Return the GPUs with a known capability."""
        return tuple(gpu for gpu in self.gpus if gpu.capability)


# --- jobs


class ImageKind(StrEnum):
    """The type of an image for a job, in the terms of `container_image`."""

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
"""The machine attribute that must be true for a job in a container of HTCondor, by type of image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolImage:
    """An image for jobs. `address` is the value of `container_image`, pinned by digest.

    `size` is the transfer size in bytes, `unpacked` the size on the disk of a machine during the job.
    `sha256` is the digest of a .sif file, else empty.
    """

    kind: ImageKind
    address: str
    subject: VerifiedImage
    size: int
    unpacked: int
    sha256: str = ""


TRANSFERS = timedelta(hours=6)
"""The time of a job for transfers, in addition to its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """The time limits of a job (waiting, on hold, running), and its retries after failures of the pool."""

    idle: timedelta = timedelta(hours=24)
    held: timedelta = timedelta(minutes=10)
    run: timedelta = timedelta(hours=24)
    retries: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepNode:
    """One job: one image on one capability. `name` has only letters, digits, `-` and `_`.

    `cuda` is the lowest CUDA version that the driver must support, empty for any. `timeout` is the time limit
    of the suite in seconds. `python` is the absolute path of Python in the image. `part` is the MIG profile,
    empty for a whole GPU. `processor` is the architecture of the image (`arm64`), empty for amd64. Machines
    with the driver `first` are preferred; with `only`, the job runs only there.
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
        return capability_row(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCell:
    """A cell that is not queued. `rule` is one of plan.SKIP_RULES, or `verified`, `no-match`, ..."""

    target: str
    capability: str
    part: str = ""
    rule: str
    reason: str

    @property
    def row(self) -> str:
        return capability_row(self.capability, self.part)


MOST_NODES = 20_000
MOST_MACHINES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesByCapability:
    """The names of the machines with a GPU of a row (a capability, or a slice), and with `driver` if it is
    set.
    """

    capability: str
    machines: Annotated[tuple[str, ...], MaxRows(MOST_MACHINES)]
    driver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """The request of one `sweep start` to `scheduler`, a row of POOLS.

    `site` is a row of sites.toml, `level` the level of the suite. `machines` are those of the pool at
    creation, `own` the additions of the settings to its jobs (sites.Site). `patterns` select machines
    (own_commands.is_machine_selected). At most `at_once` of its jobs are in the queue, 0 for no limit.
    `container` starts the images of Slurm jobs, each of which has `nodes_each` nodes of the cluster.
    """

    id: str
    created: datetime
    level: str
    site: str
    nodes: Annotated[tuple[SweepNode, ...], MaxRows(MOST_NODES)]
    skipped: Annotated[tuple[SkippedCell, ...], MaxRows(50 * MOST_NODES)] = ()
    limits: JobLimits = field(default_factory=JobLimits)
    scheduler: str = HTCONDOR
    machines: Annotated[tuple[MachinesByCapability, ...], MaxRows(1000)] = ()
    own: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    at_once: int = 0
    container: str = CONTAINERS[0]
    nodes_each: int = 1


# --- results


RETRIED_OUTCOMES = (Outcome.INFRASTRUCTURE, Outcome.PULL_FAILED)
"""Outcomes of failures of the pool. Jobs with them are retried."""


class JobEnding(StrEnum):
    """The way in which an attempt of a job ended, from its log."""

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
    """One job of a node.

    `job` is `12.0`, `code` its exit code, signal or hold code, `text` the message of the pool.

    `gpu` is the GPU that the pool assigned for the last start on `machine` and `slot`, None if there was
    none.
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
    """The result of a node. `outcome` is None while the node waits or runs. The oldest attempt is first."""

    node: str
    outcome: Outcome | None
    reason: str
    attempts: tuple[JobAttempt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFiles:
    """The returned files of a machine. `fault` means that it could not start the suite."""

    machine: str
    fault: bool = False
    run: bytes | None
    report: bytes | None
    evidence: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The state of a node.

    If `run` is set, the suite ran and ended; then `outcome` is None, and `job_report` sets it.

    `run`, `report` and `evidence` are the returned files of the job, for the pool to parse. `evidence` exists
    in pools whose jobs read the GPUs of the host outside the image. `settled` means that the last job has
    ended and is not retried. `machines` are those of a job on several, else empty.
    """

    result: NodeResult
    settled: bool = False
    run: bytes | None = None
    report: bytes | None = None
    evidence: bytes | None = None
    machines: tuple[MachineFiles, ...] = ()


# --- pools


class Pool(Protocol):
    """A batch system: its queue, and the files that jobs read and write in the directory of a sweep.

    Methods that query the queue raise ToolError if the commands of the pool are missing or fail. The other
    methods need only the directory. A pool is a directory next to this file, and a row of POOLS.
    """

    def require(self) -> str:
        """Return the version of the batch system."""

    def inventory(self, now: datetime) -> Inventory:
        """Return the GPUs of the pool."""

    def submit(self, directory: Path) -> str:
        """Submit or continue the sweep in `directory`. Return the job that runs it."""

    def running(self, directory: Path) -> bool:
        """Return whether a job that runs the sweep is in the queue."""

    def driven(self) -> frozenset[Path]:
        """Return the directories of all sweeps that jobs of this user run, by one query of the queue."""

    def look(self, directory: Path) -> None:
        """Store the state of the queue in the directory, if the logs of the jobs do not show all of it."""

    def cancel(self, directory: Path) -> None:
        """Remove the jobs of the sweep in `directory`."""

    def run_limit(self, limits: JobLimits, timeout: float, own_options: Sequence[str]) -> timedelta:
        """Return the time limit of a job with a suite of `timeout` seconds.

        `own_options` are the additions of the settings.
        """

    def check_folder(self, directory: Path) -> None:
        """Raise UsageError for a directory that jobs cannot use, before any file is created."""

    def write(self, directory: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
        """Write all files that the jobs need, except sweep.json. Raises UsageError.

        `texts` are kit.json and expectations.json by node. `is_whole` returns whether all files are written.
        """

    def is_whole(self, directory: Path) -> bool:
        """Return whether `write` completed the sweep in `directory`."""

    def read_node(self, directory: Path, node: SweepNode, limits: JobLimits) -> NodeState:
        """Return the state of a node from the files of its jobs. Raises UsageError for an invalid name."""

    def read_result(self, directory: Path, node: SweepNode, limits: JobLimits) -> NodeResult:
        """Return `read_node` with the outcome of a returned run.

        `sweep collect` decides which outcomes it signs.
        """

    def job_report(
        self, kit: Mapping[str, Any], expectations: Mapping[str, Any], state: NodeState
    ) -> GpuReport:
        """Return the report of a returned run. `kit` and `expectations` are trusted files.

        Raises StatementError for an invalid run, or for a run of another kit or suite.
        """


Pools = Callable[[str], Pool]
"""A function that opens the pool of a row of POOLS."""


def open_pool(name: str, environ: Mapping[str, str]) -> Pool:
    """Return the pool of a row of POOLS, without a query. Raises UsageError for an unknown name."""
    if name not in POOLS:
        raise UsageError("pool-unknown", f"unknown pool '{name[:40]}'", hint=f"pools: {', '.join(POOLS)}")
    pool: Pool = import_module(POOLS[name].module).make_pool(environ)
    return pool
