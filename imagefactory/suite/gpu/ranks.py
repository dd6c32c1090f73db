"""Start processes that work together, one for each GPU, wait for all, and end the others if one fails.

Each is `verify.py --rank FOLDER RANK`: it reads FOLDER/job.json and writes FOLDER/RANK.json. They belong to
the process group of the part, so they end with it. The part itself opens no GPU, since some GPUs allow only
one program at a time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..context import CheckFailure, write_json
from .frameworks import nccl, results
from .suite import LOOK_SECONDS, Ended, end_reason, read_end

JOB = "job.json"
PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "verify.py")

Answer = dict[str, Any]


def run_ranks(job: Mapping[str, Any], count: int) -> list[Answer]:
    """Return the answers of `count` processes to `job`, by rank.

    Raises CheckFailure for the first process that fails. The others would wait for it, so they are ended.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="suite-"))
        write_json(os.path.join(folder, JOB), {**job, "ranks": count})
        logs = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(count)]
        began = time.monotonic()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, "-I", "-B", PROGRAM, "--rank", folder, str(rank)]
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log))
            failed = wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [read_end(log) for log in logs]
        sys.stderr.write("".join(texts))
        answers = [read_answer(os.path.join(folder, f"{rank}.json")) for rank in range(count)]
    if failed is None:
        return answers
    if "error" in answers[failed]:
        outcome, reason = answers[failed]["outcome"], answers[failed]["error"]
    else:
        code, seconds = processes[failed].returncode, time.monotonic() - began
        ended = Ended(128 - code if code < 0 else code, texts[failed], seconds, timed_out=False)
        outcome, reason = end_reason(ended)
    raise CheckFailure(f"process {failed} of {count}: {reason}", outcome=outcome)


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the first process that failed, or None after all have succeeded."""
    while True:
        codes = [process.poll() for process in processes]
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad:
            # The others fail after it, with errors of their own: one that a signal ended is the first.
            return next((rank for rank in bad if (codes[rank] or 0) < 0), bad[0])
        if None not in codes:
            return None
        time.sleep(LOOK_SECONDS)


def read_answer(path: str) -> Answer:
    """Return the answer of a process, empty without one."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        answer: Answer = json.load(file)
    return answer


def main(folder: str, rank: str) -> NoReturn:
    """Run one of the processes, and end it.

    It exits immediately, since a library may wait for the others.
    """
    faulthandler.enable()
    place = os.path.join(folder, f"{rank}.json")
    try:
        with open(os.path.join(folder, JOB), encoding="utf-8") as file:
            job = json.load(file)
        os.environ.update({} if "meeting" in job else nccl.MEETING)
        worker: Any = importlib.import_module(f"{__package__}.frameworks.{job['framework']}_ranks")
        write_json(place, worker.run(job, int(rank), folder))
    except Exception as error:  # whatever an image's package raises
        detail = error.detail if isinstance(error, CheckFailure) else f"{type(error).__name__}: {error}"
        outcome = error.outcome if isinstance(error, CheckFailure) else results.classify(error)
        write_json(place, {"error": detail, "outcome": outcome})
        leave(1)
    leave(0)


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
