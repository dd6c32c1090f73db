"""The frozen values of pools: which GPUs there are, what is to run on them, what became of it.

    Inventory + plan -> Sweep (nodes) -> (a DAG on the pool) -> NodeResult -> GpuReport -> Verdict

Capabilities are written `8.0`, memory and disk are bytes, times are aware and in UTC, digests
`sha256:<64 hex>`. A CUDA version of a driver is the newest that it takes (`12.4`).
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

# --- what there is -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGpu:
    """One GPU as the pool tells it. `id` is the pool's short name (`GPU-a0223334`), `uuid` `GPU-...` in full.

    `driver` (`550.54.15`) and `cuda` are empty where the pool does not tell them, `memory` is 0. `mig` says
    that it is a slice of a GPU. `free`: no job has it. `host` is the architecture of its machine's processor
    in OCI's words (`amd64`, `arm64`), empty where the pool does not tell it.
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
        """The profile of a slice, `mig` where its name tells none; empty for a whole GPU."""
        return (slice_of(self.name) or "mig") if self.mig else ""

    @property
    def row(self) -> str:
        return row_of(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMachine:
    """A machine of a pool. `attributes` are the plain values of its ad that jobs may ask for.

    `start` is its START expression, which says whom it takes; empty where it is not known.
    """

    name: str
    attributes: Mapping[str, str | int | float | bool]
    start: str
    gpus: tuple[PoolGpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The machines with GPUs of a pool at one time. `pool` is its name, empty where nobody told it.

    `notes` say what was left out, a line each.
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
        """Those whose capability is told: of another nothing can be said."""
        return tuple(gpu for gpu in self.gpus if gpu.capability)


# --- what is to run ------------------------------------------------------------------------------


class ImageKind(StrEnum):
    """How a job gets its image, in the words of `container_image`."""

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
"""What HTCondor asks of a machine for a job in a container: an attribute that must be true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolImage:
    """An image where jobs find it: `address` as `container_image` takes it, pinned by digest.

    `size` is what is transferred, `unpacked` what lies on the disk of a machine while the job runs. For a
    .sif `sha256` is the file's, else empty.
    """

    kind: ImageKind
    address: str
    subject: VerifiedImage
    size: int
    unpacked: int
    sha256: str = ""


TRANSFERS = timedelta(hours=6)
"""How much longer than it may run a job may be on a machine: its image comes, its result goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """How long a job may wait, be held and run; how often what the pool broke is tried again."""

    idle: timedelta = timedelta(hours=24)
    held: timedelta = timedelta(minutes=10)
    run: timedelta = timedelta(hours=24)
    retries: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepNode:
    """One job: one image on one capability. `name` has letters, digits, `-` and `_` only.

    `cuda` is the lowest that the GPU's driver must take, empty for any. `timeout` is the suite's, in seconds.
    `python` is the absolute path of the image's Python that runs it. `part` is the slice (MIG) that it is
    for, empty for a whole GPU. `processor` is the one that the image is for (`arm64`), empty for amd64.
    `first` is the driver whose machines come before others; no others do where it is `only` there.
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
    """A cell that is not queued, and why: `rule` is a word of plan.PRUNING, or `verified`, `no-match`, ..."""

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
    """The names of the machines that have a GPU of a row, a capability or a slice's; with a `driver` those
    that have that one.
    """

    capability: str
    machines: Annotated[tuple[str, ...], MaxRows(MOST_MACHINES)]
    driver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    """What one `sweep start` asks of `pool`, a row of POOLS.

    `site` is a row of sites.toml, `level` the suite's. `machines` are those of the pool when it was made,
    `own` what the settings add to its jobs (sites.Site). `patterns` choose machines (own_commands.is_chosen);
    `at_once` is how many of its jobs may be in the queue, 0 for all.
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


# --- what became of it ---------------------------------------------------------------------------


RETRIED_OUTCOMES = (Outcome.INFRASTRUCTURE, Outcome.PULL_FAILED)
"""What the pool broke: jobs that end so are tried again."""


class JobEnding(StrEnum):
    """How one attempt of a job ended, by its log."""

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
    """One job of a node. `job` is `12.0`; `code` its exit code, signal or hold code; `text` what was said.

    `gpu` is the pool's word on the GPU of its last start, None where it never started or had none.
    `machine` and `slot` are where that was.
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
    """What is known of a node. `outcome` is None while it waits or runs; attempts are the oldest first."""

    node: str
    outcome: Outcome | None
    reason: str
    attempts: tuple[JobAttempt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node's state. Where `run` is there, the suite ran and ended: the outcome is None and to be told.

    `run`, `report` and `evidence` are the job's files as they came back, for the pool alone to read; the last
    is the host's GPUs, of a pool whose jobs read them outside of the image. `settled`: its last job has ended
    for good, and no other follows.
    """

    result: NodeResult
    settled: bool = False
    run: bytes | None = None
    report: bytes | None = None
    evidence: bytes | None = None


# --- where it runs -------------------------------------------------------------------------------


class Pool(Protocol):
    """Where verification runs: its queue, and what its jobs read and write in a sweep's folder.

    What asks the queue raises ToolError where the pool's commands are missing or fail; the folder is read and
    written without them. One pool, one folder beside this file, one row of POOLS.
    """

    def require(self) -> str:
        """The version of what is there."""

    def inventory(self, now: datetime) -> Inventory:
        """The GPUs there are."""

    def submit(self, folder: Path) -> str:
        """Submits the sweep that lies in `folder`, or goes on with it; the job that drives it."""

    def running(self, folder: Path) -> bool:
        """Whether something still drives that sweep."""

    def driven(self) -> frozenset[Path]:
        """The folders of all sweeps that this user has something at work on, in one look at the queue."""

    def look(self, folder: Path) -> None:
        """Notes in the folder what the queue alone tells of its jobs, where their logs do not tell all."""

    def cancel(self, folder: Path) -> None:
        """Removes its jobs."""

    def run_limit(self, limits: JobLimits, timeout: float, own: Sequence[str]) -> timedelta:
        """How long a job may run whose suite is ended after `timeout` seconds; `own` as a sweep has it."""

    def check_folder(self, folder: Path) -> None:
        """Raises UsageError for a folder that jobs could not name, before anything is made for it."""

    def write(self, folder: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
        """All that the jobs need beside sweep.json, such that a folder that is not whole is known by it.

        `texts` are per node kit.json and expectations.json. Raises UsageError.
        """

    def is_whole(self, folder: Path) -> bool:
        """Whether a sweep lies there that `write` has ended with."""

    def read_node(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeState:
        """What became of a node, by what its jobs left. Raises UsageError for a name that is none."""

    def read_result(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeResult:
        """As `read_node`, with the word of a run that came back; what it signs is collect's to say."""

    def job_report(self, kit: Mapping[str, Any], asked: Mapping[str, Any], found: NodeState) -> GpuReport:
        """The report of a run that came back; `kit` and `asked` are kit.json and expectations.json, believed.

        Raises StatementError for a run that is none, or of another kit or suite.
        """


Pools = Callable[[str], Pool]
"""Opens the pool of a name: a row of POOLS."""


def open_pool(name: str, environ: Mapping[str, str]) -> Pool:
    """The pool of a row; nothing is asked of it yet. Raises UsageError for a name that has none."""
    if name not in POOLS:
        raise UsageError("pool-unknown", f"unknown pool '{name[:40]}'", hint=f"pools: {', '.join(POOLS)}")
    pool: Pool = import_module(POOLS[name].module).make_pool(environ)
    return pool


def local_pool(environ: Mapping[str, str]) -> str:
    """The name of the pool that this machine is of, by its commands; empty where it is of none."""
    return next(iter(local_pools(environ)), "")


def local_pools(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of all pools whose commands this machine has."""
    path = environ.get("PATH")
    return tuple(name for name, row in POOLS.items() if shutil.which(row.command, path=path))
