"""Compute the seconds of an operation on a GPU: the maximum of arithmetic and memory traffic. Pure.

Williams, Waterman, Patterson: Roofline, an insightful visual performance model (2009). With a data sheet the
result is a lower bound, because kernels do not reach the peak. With a recorded profile it is the measured
time of kernels of that size.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Any

Curve = tuple[tuple[float, float], ...]
"""Pairs of operations (or bytes) per call and its seconds, the smallest first. A data sheet has one pair."""


@dataclass(frozen=True)
class Profile:
    """A GPU. `memory` are the bytes that a program sees, `context` the part that CUDA uses.

    `kernel` are the seconds of the smallest kernel, `launch` those of the program to launch a kernel.
    `curves` by operations are `product-KIND`, `convolution-KIND`, `backward-KIND` (fp64, fp32, tf32, fp16,
    bf16), and `attention-KIND` and `attention_backward-KIND` if measured. Curves by bytes are `move` (device
    memory), `up-pinned`, `up-pageable`, `down-pinned`, `down-pageable` (host transfers) and `peer` (to
    another GPU).
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

    def curve(self, operation: str, kind: str) -> Curve:
        """Return a curve.

        An unknown operation uses the curve of products, an unknown number type that of fp32.
        """
        names = (f"{operation}-{kind}", f"product-{kind}", f"{operation}-fp32", "product-fp32")
        return next(self.curves[name] for name in names if name in self.curves)


def parse_profile(data: Mapping[str, Any]) -> Profile:
    """Parse a profile that the host wrote. Raises KeyError or ValueError if it is invalid."""
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
    """Return the seconds for an amount of work.

    Between two points, logarithms are interpolated. Outside, the rate of the nearest point is used.
    """
    if work <= 0:
        return 0.0
    position = bisect(curve, (work,))
    if position in (0, len(curve)):
        near, took = curve[min(position, len(curve) - 1)]
        return took * work / near
    (less, sooner), (more, later) = curve[position - 1 : position + 1]
    share = log(work / less) / log(more / less)
    return exp(log(sooner) + share * log(later / sooner))


def seconds(profile: Profile, operation: str, kind: str, flops: float, moved: float) -> float:
    """Return the seconds of a kernel with `flops` operations and `moved` bytes.

    `operation` is `product`, `convolution`, `backward`, `attention` or `attention_backward`.
    """
    arithmetic = read(profile.curve(operation, kind), flops) if flops else 0.0
    return max(profile.kernel, arithmetic, read(profile.curves["move"], moved))


def exchanging(profile: Profile, moved: float) -> float:
    """Return the seconds to send this number of bytes to another GPU."""
    return max(profile.kernel, read(profile.curves["peer"], moved))


def copying(profile: Profile, way: str, moved: float) -> float:
    """Return the seconds of a host transfer. `way` is the name of its curve, such as `up-pinned`."""
    return max(profile.kernel, read(profile.curves[way], moved))
