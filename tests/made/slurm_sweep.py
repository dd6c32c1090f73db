"""Sweeps of Slurm's that nobody made, for unit tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from imagefactory.schedulers.pool import ImageKind, JobLimits, PoolImage, SweepNode, SweepSpec
from tests.made.kit import SUBJECT


def sweep_node(name: str = "tiny-sm80", address: str = "/shared/tiny.sif", **changes: Any) -> SweepNode:
    kind = ImageKind.DOCKER if address.startswith("docker") else ImageKind.SIF
    image = PoolImage(kind=kind, address=address, subject=SUBJECT, size=1, unpacked=3)
    row: dict[str, Any] = {
        "name": name,
        "target": SUBJECT.target,
        "capability": "8.0",
        "image": image,
        "nonce": "0" * 32,
        "cuda": "",
        "memory": (5 << 30) + 1,
        "disk": 1,
        "timeout": 1000.0,
        "python": "/opt/env/bin/python",
        **changes,
    }
    return SweepNode(**row)


def sweep(*nodes: SweepNode, **limits: Any) -> SweepSpec:
    return SweepSpec(
        id="20261125-224924-2f45",
        created=datetime(2026, 11, 25, tzinfo=UTC),
        level="quick",
        site="generic",
        nodes=nodes,
        limits=JobLimits(**limits),
        scheduler="slurm",
    )
