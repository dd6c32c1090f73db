"""What Slurm tells of its nodes, and what its jobs bring back, for unit tests."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from tests.made.kit import ASKED

SUITE = "sha256:" + "d" * 64
NOW = datetime(2026, 11, 25, tzinfo=UTC)


def node(name: str = "a1", gres: str = "gpu:a100:2", used: str = "gpu:a100:1(IDX:0)", **more: str) -> str:
    told = {
        "NodeName": name, "Arch": "x86_64", "CPUTot": "64", "CPULoad": "4.12",
        "AvailableFeatures": "a100,zen3,off", "ActiveFeatures": "a100,zen3",
        "Gres": gres, "GresDrain": "N/A", "GresUsed": used, "Version": "22.05.8",
        "OS": "Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0 ", "RealMemory": "515000", "State": "MIXED", **more,
    }  # fmt: skip
    return " ".join(f"{key}={value}" for key, value in told.items())


def run_json(**changes: Any) -> bytes:
    row = {
        "format": 1,
        "nonce": ASKED["nonce"],
        "suite": SUITE,
        "runner": "apptainer",
        "actions": None,
        "outcome": "",
        "reason": "",
        "started": "2026-01-02T03:04:06Z",
        "ended": "2026-01-02T03:04:16Z",
        "returncode": 0,
        "timed_out": False,
        "seconds": 10.0,
        "said": [],
        **changes,
    }
    return json.dumps(row).encode()
