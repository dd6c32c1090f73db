"""Processes that work together: what each says, and that none outlives one that fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imagefactory.suite.context import CheckFailure
from imagefactory.suite.gpu import ranks
from imagefactory.suite.gpu.suite import Job, run_job
from imagefactory.verify.suite_files import SUITE_DIRECTORY
from tests.services.children import wait_for

# What each process does is by its rank. Whoever waits, waits for one that never comes.
FAKE = """
import os, signal, sys, time
from ...context import CheckFailure

def run(job, rank, folder):
    open(os.path.join(job["seen"], str(os.getpid())), "w").close()
    word = job["words"][rank]
    if word == "wait":
        time.sleep(600)
    while len(os.listdir(job["seen"])) < job["ranks"]:
        time.sleep(0.01)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "abort":
        print("no kernel image is available for execution on the device", file=sys.stderr, flush=True)
        os.abort()
    if word == "raise":
        raise RuntimeError("CUDA error: no kernel image is available")
    if word == "refuse":
        raise CheckFailure("it is elsewhere", outcome="wrong-numbers")
    return {"rank": rank, "group": os.getpgid(0), "meets": os.environ["NCCL_SOCKET_IFNAME"]}
"""


def is_running(pid: str) -> bool:
    """A zombie has no command line any more."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """With a framework whose processes do what their words say. Their ids are the names in `seen`."""
    suite = tmp_path / "suite"
    shutil.copytree(SUITE_DIRECTORY, suite, ignore=shutil.ignore_patterns("__pycache__"))
    (suite / "gpu/frameworks/fake_ranks.py").write_text(FAKE)
    (tmp_path / "seen").mkdir()
    return suite


@pytest.fixture
def run(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """A process for each word."""
    monkeypatch.setattr(ranks, "PROGRAM", str(suite / "verify.py"))
    job = {"framework": "fake", "seen": str(tmp_path / "seen")}
    return lambda *words: ranks.run_ranks({**job, "words": words}, len(words))


def test_each_says_its_own_and_belongs_to_the_part(run: Callable[..., list[dict[str, Any]]]) -> None:
    """One that hangs ends with its part, whose group it is in: `suite.run_job` kills that."""
    said = run("", "", "")
    assert [one["rank"] for one in said] == [0, 1, 2]
    assert {one["group"] for one in said} == {os.getpgid(0)}
    assert {one["meets"] for one in said} == {"lo"}


@pytest.mark.parametrize(
    ("word", "outcome", "said"),
    [
        ("die", "load-failed", "process 1 of 2: the process ended by signal 9 and said nothing"),
        ("abort", "no-kernel", "process 1 of 2: the process ended by signal 6: no kernel image is available"),
        ("raise", "no-kernel", "process 1 of 2: RuntimeError: CUDA error: no kernel image is available"),
        ("refuse", "wrong-numbers", "process 1 of 2: it is elsewhere"),
    ],
)
def test_one_that_fails_ends_those_that_wait_for_it(
    run: Callable[..., list[dict[str, Any]]], tmp_path: Path, word: str, outcome: str, said: str
) -> None:
    with pytest.raises(CheckFailure) as caught:
        run("wait", word)
    assert caught.value.outcome == outcome
    assert caught.value.detail.startswith(said)
    assert not any(is_running(one.name) for one in (tmp_path / "seen").iterdir())


PART = """
import json, sys
from pathlib import Path
from imagefactory.suite.gpu import ranks
ranks.PROGRAM = sys.argv[1]
ranks.run_ranks(json.loads(sys.argv[2]), 2)
"""


def test_those_that_wait_for_ever_end_with_the_parts_time(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    asked = json.dumps({"framework": "fake", "seen": str(seen), "words": ["wait", "wait"]})
    command = (sys.executable, "-c", PART, str(suite / "verify.py"), asked)
    job = Job(
        part="several",
        command=command,
        environment={"TMPDIR": str(tmp_path), "PYTHONPATH": str(SUITE_DIRECTORY.parents[1])},
        report=str(tmp_path / "report"),
        seconds=60.0,
    )
    # Their hour comes when all wait, however slow the machine is.
    monkeypatch.setattr(time, "monotonic", lambda: 60.0 * (len(list(seen.iterdir())) == 2))
    _, ended = run_job(job, lambda _: None)
    monkeypatch.undo()
    assert (ended.timed_out, ended.code) == (True, 128 + signal.SIGKILL)
    for one in seen.iterdir():
        wait_for(lambda pid=one.name: not is_running(pid), "its end")  # type: ignore[misc]


def test_the_first_to_die_is_told_not_those_that_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        def __init__(self, code: int | None) -> None:
            self.code = code

        def poll(self) -> int | None:
            return self.code

    def first(*codes: int | None) -> int | None:
        return ranks.wait([Ended(code) for code in codes])  # type: ignore[misc]

    assert first(1, -9) == 1
    assert first(None, 1) == 1
    assert first(1, 1) == 0
    assert first(0, 0) is None
