"""Seconds of an operation on a GPU: the longer of its arithmetic and its memory traffic. Pure.

Williams, Waterman, Patterson: Roofline, an insightful visual performance model (2009). By a data sheet it is
a lower bound: kernels reach less than the peak, by how much no data sheet says. By a recorded profile the
roof is what kernels of such a size were seen to take.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Any

Curve = tuple[tuple[float, float], ...]
"""(operations or bytes of one call, its seconds), the smallest first; a data sheet's has one point."""


@dataclass(frozen=True)
class Profile:
    """A GPU. `memory` are the bytes that a program sees, `context` those that CUDA takes of them.

    `kernel` are the seconds that the smallest kernel takes, `launch` those of the program for handing one to
    the driver. `curves` are by name: `product-KIND`, `convolution-KIND` and `backward-KIND` by operations
    (fp64, fp32, tf32, fp16, bf16), `attention-KIND` and `attention_backward-KIND` where they were measured,
    `move` by bytes of its memory; `up-pinned`, `up-pageable`, `down-pinned`
    and `down-pageable` by bytes from the host and to it, `peer` by bytes to another GPU.
    """

    name: str
    device: str
    capability: tuple[int, int]
    processors: int
    memory: int
    context: int
    kernel: float
    launch: float
    curves: Mapping[str, Curve]
    basis: str

    def curve(self, what: str, kind: str) -> Curve:
        """What has no rate of its own runs at that of products, and a kind that has none at that of fp32."""
        names = (f"{what}-{kind}", f"product-{kind}", f"{what}-fp32", "product-fp32")
        return next(self.curves[name] for name in names if name in self.curves)


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
        kernel=float(data["kernel"]),
        launch=float(data["launch"]),
        curves={
            str(name): tuple((float(work), float(took)) for work, took in points)
            for name, points in data["curves"].items()
        },
        basis=str(data["basis"]),
    )


def read(curve: Curve, work: float) -> float:
    """Seconds of so much work: between two points on the line through their logarithms, beyond them at the
    pace of the nearest.
    """
    if work <= 0:
        return 0.0
    at = bisect(curve, (work,))
    if at in (0, len(curve)):
        near, took = curve[min(at, len(curve) - 1)]
        return took * work / near
    (less, sooner), (more, later) = curve[at - 1 : at + 1]
    share = log(work / less) / log(more / less)
    return exp(log(sooner) + share * log(later / sooner))


def seconds(profile: Profile, what: str, kind: str, flops: float, moved: float) -> float:
    """How long one kernel takes that computes `flops` operations and moves `moved` bytes.

    `what` is `product`, `convolution`, `backward`, `attention` or `attention_backward`.
    """
    arithmetic = read(profile.curve(what, kind), flops) if flops else 0.0
    return max(profile.kernel, arithmetic, read(profile.curves["move"], moved))


def exchanging(profile: Profile, moved: float) -> float:
    """How long one GPU takes to send so many bytes to another."""
    return max(profile.kernel, read(profile.curves["peer"], moved))


def copying(profile: Profile, way: str, moved: float) -> float:
    """How long a copy takes. `way` is the curve's name: `up-pinned`."""
    return max(profile.kernel, read(profile.curves[way], moved))
