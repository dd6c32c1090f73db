"""The report of both programs: a row for each model and runtime, written after each, so a crash keeps the
others.

Latencies are the median and the 95th percentile of many passes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..context import write_json
from ..table import FAILED, NOT_RUN

WARM, LEAST, MOST = 5, 20, 300
SECONDS = 0.5


def latencies(call: Callable[[], None]) -> tuple[float, float]:
    """Return the median and 95th percentile of `call` in milliseconds: 20 to 300 passes in half a second,
    after 5 others.
    """
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
    """Return the percentile by nearest rank: the smallest value that is at least as large as `percent` of
    all.
    """
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


FORMAT = 1
# The most of the CPU: small batches cannot use more, and numbers of machines compare.
THREADS = 8

Row = dict[str, Any]


def threads() -> int:
    return min(THREADS, len(os.sched_getaffinity(0)))


def processor() -> str:
    """Return the name of the CPU from the kernel, or else its architecture."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        named = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(named, "") or os.uname().machine


def make_row(model: str, by: str, version: str = "") -> Row:
    """Return an empty row. `error` is None until it is measured."""
    return {
        "model": model,
        "by": by,
        "version": version,
        "state": NOT_RUN,
        "outcome": "",
        "detail": "",
        "error": None,
        "kernels": 0,
        "seconds": 0.0,
        "latencies": [],
    }


def failed(row: Row, error: BaseException, outcome: str) -> Row:
    """Return the row with an exception in one line. For a CheckFailure, the type is omitted."""
    words = getattr(error, "detail", "") or f"{type(error).__name__}: {error}"
    off = getattr(error, "error", None)
    far = off if isinstance(off, float) and math.isfinite(off) else row["error"]
    word = getattr(error, "outcome", outcome)
    return {**row, "state": FAILED, "outcome": word, "detail": " ".join(words.split()), "error": far}


def clock(calls: Iterable[tuple[int, Callable[[], None]]]) -> list[dict[str, float]]:
    """Return the milliseconds of a pass by batch size."""
    milliseconds = []
    for batch, call in calls:
        p50, p95 = latencies(call)
        milliseconds.append({"batch": batch, "p50": p50, "p95": p95})
    return milliseconds


def write(path: str, nonce: str, document: Mapping[str, Any]) -> None:
    write_json(path, {"format": FORMAT, "nonce": nonce, **document})
