"""Seconds of an operation on a GPU by its data sheet: the longer of its arithmetic and its memory traffic.
Pure.

Williams, Waterman, Patterson: Roofline, an insightful visual performance model (2009). It is a lower bound:
kernels reach less than the peak of a data sheet, by how much no data sheet says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KERNEL = 2e-6
"""Seconds that the smallest kernel takes."""
LAUNCH = 5e-6
"""Seconds of the program for handing one kernel to the driver."""

# What is computed in, by which a device may have no rate of its own: the next one that does it instead.
INSTEAD = {"bf16": "fp32", "fp16": "fp32", "tf32": "fp32", "fp64": "fp32"}


@dataclass(frozen=True)
class Profile:
    """A GPU. `memory` are the bytes that a program sees, `context` those that CUDA takes of them.

    `flops` are operations a second by kind (fp64, fp32, tf32, fp16, bf16; the last three of tensor cores,
    without sparsity), `bandwidth` bytes a second of its memory, `link` bytes a second from or to the host,
    `peer` to another GPU.
    """

    name: str
    device: str
    capability: tuple[int, int]
    processors: int
    memory: int
    context: int
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    peer: float
    basis: str

    def rate(self, kind: str) -> float:
        """Operations a second. A kind that the device has no rate for runs at that of fp32."""
        return self.flops.get(kind) or self.flops[INSTEAD.get(kind, "fp32")]


def parse_profile(data: Mapping[str, Any]) -> Profile:
    """A profile as the host writes it. Raises KeyError and ValueError for what is none."""
    major, minor = (int(part) for part in str(data["capability"]).split("."))
    return Profile(
        name=str(data["name"]),
        device=str(data["device"]),
        capability=(major, minor),
        processors=int(data["processors"]),
        memory=int(data["memory"]),
        context=int(data["context"]),
        flops={str(kind): float(rate) for kind, rate in data["flops"].items()},
        bandwidth=float(data["bandwidth"]),
        link=float(data["link"]),
        peer=float(data["peer"]),
        basis=str(data["basis"]),
    )


def seconds(profile: Profile, kind: str, flops: float, moved: float) -> float:
    """How long one kernel takes at least, that computes `flops` operations and moves `moved` bytes."""
    return max(KERNEL, flops / profile.rate(kind), moved / profile.bandwidth)


def exchanging(profile: Profile, moved: float) -> float:
    """How long one GPU takes at least to send so many bytes to another."""
    return max(KERNEL, moved / profile.peer)


def copying(profile: Profile, moved: float) -> float:
    """How long a copy between host and device takes at least."""
    return max(KERNEL, moved / profile.link)
