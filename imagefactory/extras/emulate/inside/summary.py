"""Write the summary of a run as JSON, atomically: at intervals, and at the end."""

from __future__ import annotations

import json
import os
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from .loader import Loader, Seen
from .machine import Machine, Pinned

FORMAT = "imagefactory.emulate/1"


def summarize(machine: Machine, seen: Seen, pinned: Pinned) -> dict[str, Any]:
    """Return the summary, in seconds and bytes. Unknown values are null."""
    profile = machine.profile
    trained = _training(seen)
    return {
        "format": FORMAT,
        "profile": profile.name,
        "device": profile.device,
        "basis": profile.basis,
        "gpus": machine.count,
        "ranks": machine.ranks.count,
        "rank": int(os.environ.get("RANK", "0")),
        "program": " ".join(sys.argv)[:500],
        "ended": machine.ended and not hasattr(sys, "last_value"),  # set where a traceback was printed
        "torch": str(machine.torch.__version__),
        "seconds": max(machine.clock.host(), machine.clock.through),
        "wall": machine.clock.wall(),
        "busy": sum(clock.busy for clock in machine.clocks),
        "stalled": sum(clock.stalled for clock in machine.clocks),
        "operations": machine.operations,
        "copied": machine.copied,
        "steps": seen.steps,
        "step": _median_step(seen),
        "loader": None if trained is None else _loader(trained),
        "memory": {
            "peak": max(memory.peak for memory in machine.memories),
            "context": profile.context,
            "total": profile.memory,
            "exceeded": machine.out_of_memory,
        },
        "pinned": pinned.most,
        "unlocked": pinned.refused,
        "host_reads": dict(machine.host_reads.most_common(20)),
    }


def _training(seen: Seen) -> Loader | None:
    """Return the loader of the training loop: the one with the most optimizer steps."""
    return max(seen.loaders.values(), key=lambda loader: (loader.steps, loader.seen), default=None)


def _loader(loader: Loader) -> dict[str, Any]:
    steady = loader.intervals[1:] or loader.intervals
    waits = loader.waits[1:] or loader.waits
    return {
        "batches": loader.batches,
        "batch_size": loader.batch_size,
        "workers": loader.workers,
        "pinned": loader.pinned,
        "epochs": loader.epochs,
        "seen": loader.seen,
        "steps": loader.steps,
        "interval": statistics.fmean(steady) if steady else None,
        "wait": statistics.fmean(waits) if waits else None,
        "fetch": loader.fetch_seconds / loader.seen if loader.seen else None,
        "processor": loader.processor / loader.seen if loader.seen else None,
        "first_wait": loader.first_wait / max(1, loader.epochs),
    }


def _median_step(seen: Seen) -> float | None:
    times = seen.step_times
    between = [after - before for before, after in pairwise(times)]
    return statistics.median(between[1:] or between) if between else None


def write(directory: Path, summary: dict[str, Any]) -> None:
    """Write the file of this process."""
    path = directory / f"{os.getpid()}.json"
    temporary = path.with_suffix(".part")
    try:
        temporary.write_text(json.dumps(summary), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        print(f"imagefactory: what was emulated is not written: {error}", file=sys.stderr)
