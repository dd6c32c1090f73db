"""Sweeps and logs of jobs as a pool of HTCondor 23.9 writes them, made for unit tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from imagefactory.schedulers.pool import ImageKind, JobLimits, PoolImage, SweepNode, SweepSpec
from tests.made.kit import NONCE, SUBJECT

MADE = datetime(2026, 11, 22, 6, 0, tzinfo=UTC)
UUID = "a1b2c3d4-4445-5667-899a-abbccddee001"
DOCKER = f"docker://127.0.0.1:5000/tiny@sha256:{'a' * 64}"
PYTHON = "/opt/env/bin/python"


def node(name: str = "tiny-8_0", **more: Any) -> SweepNode:
    image = PoolImage(kind=ImageKind.DOCKER, address=DOCKER, subject=SUBJECT, size=1, unpacked=1)
    given: dict[str, Any] = {
        "name": name,
        "target": "tiny-12.1-cu121",
        "capability": "8.0",
        "image": image,
        "nonce": NONCE,
        "cuda": "",
        "memory": 1 << 30,
        "disk": (1 << 30) + 1,
        "timeout": 600.0,
        "python": PYTHON,
    }
    return SweepNode(**{**given, **more})


def sweep(*nodes: SweepNode, **limits: Any) -> SweepSpec:
    return SweepSpec(
        id="20261122-060000-abcd",
        created=MADE,
        level="quick",
        site="generic",
        nodes=nodes,
        limits=JobLimits(**limits),
    )


# --- a job's log ---------------------------------------------------------------------------------

GPU = (
    '[ Id = "GPU-a1b2c3d4"; Capability = 8.0; DeviceName = "NVIDIA A100-SXM4-40GB"; '
    f'DeviceUuid = "{UUID}"; ECCEnabled = true; DevicePciBusId = "0000:40:00.0"; '
    "DriverVersion = 12.4; GlobalMemoryMb = 40536 ]"
)


def event(number: int, first: str, *lines: str, job: int = 12, at: str = "2026-11-22 06:17:29") -> str:
    rest = "".join(f"\t{line}\n" for line in lines)
    return f"{number:03} ({job:03}.000.000) {at} {first}\n{rest}...\n"


def submitted(job: int = 12, at: str = "2026-11-22 06:17:29") -> str:
    return event(0, "Job submitted from host: <127.0.0.1:9618>", "DAG Node: tiny", job=job, at=at)


def executing(job: int = 12, gpu: str = GPU, id: str = "GPU-a1b2c3d4", **more: Any) -> str:
    return event(
        1,
        "Job executing on host: <127.0.0.1:9618?sock=a100>",
        "SlotName: slot1_1@a100",
        f'AssignedGPUs = "{id}"',
        "AvailableGPUs = { GPUs_GPU_a1b2c3d4 }",
        'CondorScratchDir = "/var/lib/condor/execute/dir_53337"',
        "GPUs = 1",
        "GPUs_Capability = 8.0",
        'GPUs_NvidiaDriver = "550.54.15"',
        f"GPUs_GPU_a1b2c3d4 = {gpu}",
        'Machine = "gpu01.example.org"',
        job=job,
        **more,
    )


def terminated(code: int = 0, job: int = 12, signal: int = 0) -> str:
    how = f"(0) Abnormal termination (signal {signal})" if signal else ""
    return event(
        5,
        "Job terminated.",
        how or f"(1) Normal termination (return value {code})",
        "\tUsr 0 00:00:00, Sys 0 00:00:00  -  Run Remote Usage",
        "4813  -  Run Bytes Sent By Job",
        "Partitionable Resources :    Usage  Request Allocated Assigned",
        "   Cpus                 :        0        1         1 ",
        job=job,
        at="2026-11-22 06:18:02",
    )


def transferring(what: str, job: int = 12) -> str:
    return event(40, f"Started transferring {what} files", "Transferring to host: <127.0.0.1:9618>", job=job)


def held(code: int, why: str, job: int = 12, subcode: int = 0) -> str:
    return event(12, "Job was held.", why, f"Code {code} Subcode {subcode}", job=job)


LIMITS = "The job attribute PeriodicRemove expression '(JobStatus == 1 && ...)' evaluated to TRUE"


def aborted(why: str = LIMITS, job: int = 12) -> str:
    return event(9, "Job was aborted.", why, job=job, at="2026-11-22 06:20:24")


def evicted(why: str, job: int = 12) -> str:
    return event(
        4,
        "Job was evicted.",
        "(0) CPU times",
        "\tUsr 0 00:00:00, Sys 0 00:00:00  -  Run Remote Usage",
        "0  -  Run Bytes Sent By Job",
        why,
        "Partitionable Resources :    Usage  Request Allocated Assigned",
        "   Cpus                 :                 1         1 ",
        '   GPUs                 :                 1         1 "GPU-a1b2c3d4"',
        job=job,
    )


def disconnected(job: int = 12) -> str:
    return event(
        22,
        "Job disconnected, attempting to reconnect",
        "Socket between submit and execute hosts closed unexpectedly",
        "Trying to reconnect to slot1_1@a100 <127.0.0.1:9618>",
        job=job,
    )


def failed_start(why: str, job: int = 12) -> str:
    return event(
        21, "Error from starter on slot1_1@a100:", f"Singularity test failed:{why}", job=job
    ) + evicted(f"Error from slot1_1@a100: Singularity test failed:{why}", job=job)
