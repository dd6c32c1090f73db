"""A pool that is none, for unit tests: its jobs are text, their GPUs made up, results laid out by a test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imagefactory.schedulers.htcondor.pool import HTCondorSweepFiles
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sweep_file import read_sweep
from tests.made import kit

UUID = "GPU-11111111-2222-3333-4444-555555555555"
DRIVER, CUDA = "550.90.07", "12.4"


def pool_gpu(capability: str = "8.0", **changes: Any) -> PoolGpu:
    told = {
        "id": "GPU-11111111",
        "uuid": UUID,
        "name": "NVIDIA Test GPU",
        "capability": capability,
        "memory": 16 << 30,
        "driver": DRIVER,
        "cuda": CUDA,
        "mig": False,
        "free": True,
    }
    return PoolGpu(**{**told, **changes})


def inventory(*gpus: PoolGpu) -> Inventory:
    """A machine for each GPU."""
    machines = (
        PoolMachine(name=f"gpu{number}.pool.test", attributes={}, start="", gpus=(gpu,))
        for number, gpu in enumerate(gpus or (pool_gpu("7.0"), pool_gpu("8.0")))
    )
    return Inventory(pool="pool.test", taken=datetime(2026, 1, 2, tzinfo=UTC), machines=tuple(machines))


SUBMITTED = """000 ({job}.000.000) {time} Job submitted from host: <127.0.0.1:9618>
    DAG Node: {node}
...
"""
STARTED = """001 ({job}.000.000) {time} Job executing on host: <127.0.0.1:9618>
\tSlotName: slot1_1@gpu.pool.test
\tAssignedGPUs = "GPU-11111111"
\tGPUs_Capability = {capability}
\tGPUs_DeviceName = "NVIDIA Test GPU"
\tGPUs_DeviceUuid = "11111111-2222-3333-4444-555555555555"
\tGPUs_DriverVersion = 12.4
\tGPUs_GlobalMemoryMb = 16384
\tGPUs_NvidiaDriver = "550.90.07"
\tMachine = "gpu.pool.test"
...
"""
ENDED = """005 ({job}.000.000) {time} Job terminated.
\t(1) Normal termination (return value {code})
...
"""
ABORTED = """009 ({job}.000.000) {time} Job was aborted.
\tDAG Removed: User removed scheduler job from queue. (by user me)
...
"""


@dataclass
class PoolMadeHere(HTCondorSweepFiles):
    """Takes sweeps; `play` runs the jobs of one. `held` and the like are a test's own lines of a log."""

    gpus: Inventory = field(default_factory=inventory)
    submitted: list[Path] = field(default_factory=list)
    canceled: list[Path] = field(default_factory=list)
    at_work: bool = False

    def require(self) -> str:
        return "23.9.6"

    def inventory(self, now: datetime) -> Inventory:
        return self.gpus

    def submit(self, folder: Path) -> str:
        self.submitted.append(folder)
        return f"{len(self.submitted)}.0"

    def running(self, folder: Path) -> bool:
        return self.at_work

    def look(self, folder: Path) -> None:
        """Its jobs' logs tell all."""

    def driven(self) -> frozenset[Path]:
        return frozenset(self.submitted if self.at_work else ())

    def cancel(self, folder: Path) -> None:
        self.canceled.append(folder)

    def play(self, folder: Path, **changes: Any) -> None:
        """Runs every job: each starts on its capability, and all holds but for `changes` of its report."""
        for node in read_sweep(folder).nodes:
            play(folder, node.name, report=changes)


def log(folder: Path, node: str, *events: str, **more: Any) -> None:
    """Writes a node's log, of its first job."""
    given = {
        "job": "012",
        "time": "2026-01-02 03:04:05",
        "node": node,
        "capability": "8.0",
        "code": 0,
        **more,
    }
    (folder / "nodes" / node / "job.log").write_text("".join(one.format(**given) for one in events))


def play(
    folder: Path, node: str, *, report: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None
) -> None:
    """A job that started, ran the suite and brought back what it wrote."""
    place = folder / "nodes" / node
    kit = json.loads((place / "kit.json").read_bytes())
    asked = json.loads((place / "expectations.json").read_bytes())
    log(folder, node, SUBMITTED, STARTED, ENDED, capability=kit["capability"])
    (place / "result").mkdir(exist_ok=True)
    facts = {
        "format": 1,
        "nonce": kit["nonce"],
        "suite": kit["suite"],
        "image": kit["subject"]["config"] if kit["sif"] else "",
        "started": "2026-01-02T03:04:06Z",
        "ended": "2026-01-02T03:04:16Z",
        "returncode": 0,
        "timed_out": False,
        "seconds": 10.0,
        "said": ["all holds"],
        "hardware": seen(kit["capability"]),
        "no_gpu": "",
        **(run or {}),
    }
    (place / "result" / "run.json").write_text(json.dumps(facts))
    (place / "result" / "report.json").write_text(json.dumps(suite_report(asked, **(report or {}))))


def seen(capability: str = "8.0") -> dict[str, Any]:
    """What hardware.py reads in a job on a GPU."""
    gpu = {"name": "NVIDIA Test GPU", "capability": capability, "uuid": UUID, "memory": 16 << 30}
    return {
        "format": 1,
        "driver": DRIVER,
        "gpus": [gpu],
        "known": [UUID],
        "nodes": ["/dev/nvidia0"],
        "notes": {"nvml-driver": DRIVER},
    }


NOTHING_SEEN = {
    "hardware": None,
    "no_gpu": "no GPU: the NVIDIA driver is not loaded (there is no /proc/driver/nvidia)",
}


def suite_report(asked: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the report of a suite whose checks all pass, on the pool's made-up GPU."""
    device = {
        "name": "NVIDIA Test GPU",
        "capability": asked["capability"],
        "uuid": UUID,
        "memory": 16 << 30,
    }
    fields = {"nonce": asked["nonce"], "target": asked["target"], "cuda": CUDA, "device": device}
    return kit.suite_report(asked["level"], **{**fields, **changes})
