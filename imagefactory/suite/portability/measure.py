"""Latencies: how long one pass takes, as the median and the 95th percentile of many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

WARM, LEAST, MOST = 5, 20, 300
SECONDS = 0.5


def latencies(call: Callable[[], None]) -> tuple[float, float]:
    """p50 and p95 of `call` in milliseconds: of 20 to 300 passes in about half a second, after 5 more."""
    for _ in range(WARM):
        call()
    passes: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(passes) < LEAST or (len(passes) < MOST and time.perf_counter() < end):
        began = time.perf_counter()
        call()
        passes.append((time.perf_counter() - began) * 1000)
    return percentile(passes, 50), percentile(passes, 95)


def percentile(values: Sequence[float], percent: int) -> float:
    """By nearest rank: the smallest value that `percent` of all are not above."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]
