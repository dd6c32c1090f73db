"""For every suite."""

from __future__ import annotations

import gc
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, WorkStealingScheduling

from tests.made.documents import documents_match_their_schemas  # noqa: F401
from tests.services.factory import base_store, small_store, tiny_root  # noqa: F401
from tests.services.fixtures import (  # noqa: F401
    apptainer,
    cluster,
    dockerd,
    nothing_big_stays,
    podman,
    podman_session,
    pool,
    pool_at_rest,
    registry,
    run,
    services_environment,
    services_folder,
    stand_in,
    suite,
)
from tests.services.tier import many
from tests.services.wheels import wheels  # noqa: F401

PRINTED = 10_000  # characters of a failed program's output in a report
CPU = "processor seconds"
_counted = sum(os.times()[:4])

# A shell starts what it puts into the background with SIGINT ignored, and programs inherit that: tests that
# interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Byte code is kept, whatever the machine says of it: else each process of a run compiles all tests and all of
# imagefactory anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The same examples each time and everywhere: a change is judged by what it changes. How long one takes says
# something of the machine alone.
settings.register_profile(
    "any-machine",
    max_examples=many(40, 2000),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any-machine")


# The garbage collector would look at all that is imported, collected and parsed again and again: half of the
# time of collecting, four fifths of parsing. Few objects of these tests are in cycles.
gc.set_threshold(200_000, 20, 20)


def pytest_collection_finish() -> None:
    """All that was imported and collected stays: the garbage collector need not look at it again."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """The process ends: pytest collects garbage five times then, in what tests keep as well."""
    gc.freeze()


class Lanes(LoadFileScheduling):
    """Files are dealt to the lanes in order. Those of HTCondor's pool go to one, which starts it once."""

    def _split_scope(self, nodeid: str) -> str:
        return "pool" if re.search("/test_(pool|year)", nodeid) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes | WorkStealingScheduling:
    """Where nothing is asked workers get stretches of the tests: one makes what those of a file share."""
    return (
        Lanes(config, log) if config.getoption("dist") == "loadfile" else WorkStealingScheduling(config, log)
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A program that failed is reported with what it printed: its exception has no more than an exit code.

    Each report has the processor time since the one before: of this process and of programs that ended.
    """
    global _counted
    report = yield
    times = os.times()
    before, _counted = _counted, sum(times[:4])
    report.user_properties.append((CPU, _counted - before))
    error = call.excinfo and call.excinfo.value
    if isinstance(error, subprocess.SubprocessError):
        for name in ("stdout", "stderr"):
            printed = getattr(error, name, None)
            text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
            if text:
                report.sections.append((f"{name} of the program", text[-PRINTED:]))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Last, the files that took most, and the command line of each test that failed, to type it alone."""
    yield
    stats = terminalreporter.stats
    files, tests = Counter[str](), Counter[str]()
    for report in [
        one for name in ("", "passed", "failed", "error", "skipped") for one in stats.get(name, ())
    ]:
        used = sum(value for name, value in report.user_properties if name == CPU)
        files[report.nodeid.partition("::")[0]] += used
        tests[report.nodeid] += used
    if len(files) > 1 and files.total() > 60:
        terminalreporter.section("processor seconds of files and of their long tests, services apart")
        for file, used in files.most_common(40):
            terminalreporter.write_line(f"{used:8.1f} {file}")
            for nodeid, part in tests.most_common():
                if nodeid.startswith(f"{file}::") and part >= 10:
                    terminalreporter.write_line(f"{part:16.1f} {nodeid.partition('::')[2]}")
    failed = {report.nodeid: None for report in [*stats.get("failed", ()), *stats.get("error", ())]}
    settings = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("FACTORY_TEST_")]
    for nodeid in failed:
        alone = [*settings, os.path.relpath(sys.executable), "-m", "pytest", nodeid]
        terminalreporter.write_line("alone: " + shlex.join(alone))
