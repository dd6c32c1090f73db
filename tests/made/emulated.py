"""What one process of an emulated run tells, as its program writes it."""

from __future__ import annotations

from typing import Any

TOLD: dict[str, Any] = {
    "format": "imagefactory.emulate/1",
    "profile": "A100-SXM4-40GB",
    "device": "NVIDIA A100-SXM4-40GB",
    "basis": "estimated",
    "gpus": 1,
    "ranks": 1,
    "rank": 0,
    "program": "train.py --epochs 1",
    "ended": False,
    "torch": "2.15.0+cu132",
    "seconds": 9.5,
    "wall": 17.0,
    "busy": 3.2,
    "stalled": 6.0,
    "operations": 41440,
    "copied": 224879528,
    "steps": 938,
    "step": 0.0101,
    "loader": {
        "batches": 938,
        "batch_size": 64,
        "workers": 1,
        "pinned": True,
        "epochs": 1,
        "seen": 938,
        "steps": 938,
        "interval": 0.0101,
        "wait": 0.0068,
        "fetch": 0.0103,
        "processor": 0.0077,
        "first_wait": 0.22,
    },
    "memory": {"peak": 317308928, "context": 536870912, "total": 42412802048, "exceeded": False},
    "pinned": 5132288,
    "unlocked": "",
    "host_reads": {"item": 12},
}
