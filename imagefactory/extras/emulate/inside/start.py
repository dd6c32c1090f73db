"""Install the emulated devices in torch after its import."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from . import cuda, dispatch, loader, ranks, summary, tensors
from .machine import Machine, Pinned
from .roofline import parse_profile

EVERY = 2.0
"""Seconds between two summaries, so that a killed run has one."""


def install(torch: Any, path: str) -> None:
    """Install the emulation.

    The JSON file at `path` has the profile, the number of devices and the output directory.
    """
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    machine = Machine(torch, parse_profile(data["profile"]), int(data["gpus"]))
    pinned, directory = Pinned(torch), Path(data["folder"])
    importlib.import_module("torch._meta_registrations")  # shapes, which older versions load late
    cuda.install(machine)
    tensors.install(machine, pinned)
    dispatch.install_attention(machine)
    cuda.install_autocast(machine)
    machine.ranks = ranks.install(machine)
    seen = loader.install(machine)

    def tell() -> None:
        machine.tell_at = time.monotonic() + EVERY
        summary.write(directory, summary.summarize(machine, seen, pinned))

    machine.tell = tell
    machine.mode = dispatch.make_mode(machine)
    machine.mode.dispatch.passing = calibrate(machine)
    _threads(machine)
    machine.enter()
    process_id = os.getpid()

    def ended() -> None:
        if os.getpid() == process_id and machine.operations:
            machine.clock.synchronize()
            machine.leave()
            machine.ended = True
            tell()

    atexit.register(ended)


def calibrate(machine: Machine) -> float:
    """Return the seconds that the dispatch mode adds to one operation on the host."""
    torch, tensor, times = machine.torch, machine.torch.zeros(1), 300

    def once() -> float:
        began = time.perf_counter()
        for _ in range(times):
            torch.neg(tensor)
        return (time.perf_counter() - began) / times

    once()
    plain = min(once() for _ in range(3))
    with machine.mode:
        once()
        through = min(once() for _ in range(3))
    return max(0.0, through - plain)


def _threads(machine: Machine) -> None:
    """Make each new thread enter the mode, because torch's modes apply to one thread."""
    run = threading.Thread.run

    def within(self: threading.Thread) -> None:
        if machine.mode is None or not machine.entered:
            run(self)
            return
        with machine.mode:
            run(self)

    threading.Thread.run = within  # type: ignore[method-assign]
