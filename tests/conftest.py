"""For every suite."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell starts what it puts into the background with SIGINT ignored, and programs inherit that: tests that
# interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Byte code is kept, whatever the machine says of it: else each process of a run compiles all tests and all of
# imagefactory anew, which takes a quarter of the time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The same examples each time and everywhere: a change is judged by what it changes. How long one takes says
# something of the machine alone.
settings.register_profile(
    "any-machine", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Stretches of the tests, so that mostly one worker makes what the tests of a file share."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None
