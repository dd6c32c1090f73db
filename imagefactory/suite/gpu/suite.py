"""Run the parts of the GPU suite one after the other and write the report.

Each part is a process in a separate process group. A crash is a failure of the check that ran. A hang ends at
the time limit of the part, and its children end with it. A part writes its report again after every check.
The next part runs after any result, unless T0 found no usable GPU or no code of the image runs on it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..context import write_json
from . import table
from .checks import coverage
from .context import SuiteRequest, parse_request
from .part import DEVICE_VARIABLE, failed_row, make_row

LOOK_SECONDS = 0.05
LOG_BYTES = 64 * 1024
LONGEST_WORDS = 600

VISIBLE_DEVICES, VISIBLE_AMD = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
REHEARSED = "a rehearsal on the CPU: the driver was not used"

# The facts of T0 in the report.
REPORTED = ("cuda", "libcuda", "device")

# Without these a framework has nothing to run on.
NEEDED = ("driver", "device", "vector-add")

# The driver's own text (cuGetErrorString) in the log of a process that dies -> outcome.
LAST_WORDS = (
    ("no kernel image is available", table.NO_KERNEL),
    ("driver version is insufficient", table.DRIVER_TOO_OLD),
    ("compiled with an unsupported toolchain", table.DRIVER_TOO_OLD),
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """The end of a part's process. `code` is 128 + N for signal N, `log` the end of its stderr."""

    code: int
    log: str
    seconds: float
    timed_out: bool


@dataclass(frozen=True)
class Job:
    """A part to start: its command, the path of its report, its time limit in seconds."""

    part: str
    command: Sequence[str]
    environment: Mapping[str, str]
    report: str
    seconds: float


def main(expectations: str, report: str) -> int:
    """Return 0 when every check of the level passed or cannot apply, 1 otherwise."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with open(expectations, encoding="utf-8") as file:
        request = parse_request(file.read())
    document: dict[str, Any] = {
        "format": table.FORMAT,
        "nonce": request.expected.nonce,
        "target": request.expected.target,
        "python": ".".join(map(str, sys.version_info[:3])),
        "level": request.level,
        "rehearsal": request.rehearsal,
        "cuda": "",
        "libcuda": "",
        "device": None,
        "running": "",
        "checks": [],
    }
    verify = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "verify.py")
    rows: list[Row] = []
    facts: dict[str, Any] = {}

    def show(answer: Mapping[str, Any]) -> None:
        """Write the report while a part runs, with its results so far."""
        facts.update(answer["facts"])
        document.update({key: facts[key] for key in REPORTED if key in facts})
        checks = [*rows, *answer["checks"]]
        write_json(report, {**document, "running": answer["running"], "checks": checks})

    for part in table.LEVELS[request.level]:
        names = table.PARTS[part]
        expected = request.expected
        excuses = {name: table.not_applicable(expected.framework, name, expected.locked) for name in names}
        reason = skip_reason(part, request, rows)
        if reason or all(excuses.values()):
            rows += [
                make_row(name, table.NOT_APPLICABLE if excuse else table.NOT_RUN, excuse or reason)
                for name, excuse in excuses.items()
            ]
            continue
        path = f"{report}.{part}"
        job = Job(
            part=part,
            command=(sys.executable, "-I", "-B", verify, "--part", part, expectations, path),
            environment=environment_of(part, request, facts, os.environ),
            report=path,
            seconds=table.SECONDS[request.level],
        )
        show({"running": names[0], "facts": {}, "checks": []})
        answer, ended = run_job(job, show)
        results = settle(names, answer, ended)
        if part in coverage.CLAIMS and not request.rehearsal:
            device = document["device"]
            predicted = request.predicted.get(device["capability"]) if device else None
            results = coverage.judge(part, results, predicted)
            results = coverage.neither(rows, coverage.spare(rows, results))
        rows += results
    write_json(report, {**document, "checks": rows})
    return 0 if all(row["state"] in (table.PASSED, table.NOT_APPLICABLE) for row in rows) else 1


def skip_reason(part: str, request: SuiteRequest, rows: Sequence[Row]) -> str:
    """Return why the part is not started, else "". `rows` are the results of the previous parts."""
    if request.rehearsal and part == "driver":
        return REHEARSED
    for row in rows:
        if row["state"] == table.FAILED and (row["name"] in NEEDED or "neither" in row["numbers"]):
            return f"'{row['name']}' failed: {row['outcome']}"
    return ""


def environment_of(
    part: str, request: SuiteRequest, facts: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a part. With several GPUs, later parts see only the GPU of T0.

    The part `several` sees all GPUs of that capability. `facts` are those of T0, `environ` is the environment
    of the suite. A rehearsal sees no GPU.
    """
    environment = {name: value for name, value in environ.items() if name not in table.JIT_VARIABLES}
    environment.update(table.PART_ENVIRONMENT.get(part, {}))
    if "device" in facts:
        environment[DEVICE_VARIABLE] = json.dumps(facts["device"])
    if request.rehearsal:
        environment[VISIBLE_DEVICES] = "-1"
    elif facts.get("visible", 0) > 1:
        seen = facts["alike"] if part == table.SEVERAL else [facts["device"]["uuid"]]
        environment[VISIBLE_AMD if request.expected.rocm else VISIBLE_DEVICES] = ",".join(seen)
    return environment


def run_job(job: Job, show: Callable[[Mapping[str, Any]], None]) -> tuple[dict[str, Any], Ended]:
    """Start a part, pass its reports to `show` as they come, and end the part with all its children."""
    began = time.monotonic()
    answer: dict[str, Any] = {"running": "", "facts": {}, "checks": []}
    stamp = 0
    over = False
    with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(job.report))) as log:
        null, environment = subprocess.DEVNULL, dict(job.environment)
        process = subprocess.Popen(
            job.command, env=environment, stdin=null, stderr=log, start_new_session=True
        )
        try:
            while not over and time.monotonic() - began < job.seconds:
                # It stays a zombie until its group is ended, or the group's number could become another's.
                over = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
                new = stamp_of(job.report)
                if new != stamp:
                    stamp, answer = new, read_part(job.report)
                    show(answer)
                if not over:
                    time.sleep(LOOK_SECONDS)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        # Read in any case: two reports within one tick of the clock may look like one.
        if os.path.exists(job.report) and (last := read_part(job.report)) != answer:
            answer = last
            show(answer)
        text = read_end(log)
    sys.stderr.write(text)
    sys.stderr.flush()
    if os.path.exists(job.report):
        os.remove(job.report)
    ended = Ended(
        code=code if code >= 0 else 128 - code,
        log=text,
        seconds=time.monotonic() - began,
        timed_out=not over,
    )
    return answer, ended


def stamp_of(path: str) -> int:
    """Return a value that changes when the file at `path` is replaced."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0
    return hash((status.st_ino, status.st_mtime_ns))


def read_part(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        answer: dict[str, Any] = json.load(file)
    return answer


def read_end(log: Any) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - LOG_BYTES))
    text: str = log.read().decode("utf-8", "replace")
    return text


def settle(names: Sequence[str], answer: Mapping[str, Any], ended: Ended) -> list[Row]:
    """Return a row for each check of the part, in order.

    The check that ran when the process ended has failed.
    """
    finished = {row["name"]: row for row in answer["checks"]}
    outcome, reason = end_reason(ended)
    rows: list[Row] = []
    culprit = ""
    for name in names:
        if name in finished:
            rows.append(finished[name])
        elif culprit:
            rows.append(make_row(name, table.NOT_RUN, f"'{culprit}' came first and took the process down"))
        else:
            culprit = name
            rows.append(failed_row(name, reason, outcome=outcome))
            spent = sum(row["seconds"] for row in rows)
            rows[-1]["seconds"] = round(max(0.0, ended.seconds - spent), 3)
    fine = all(row["state"] in (table.PASSED, table.NOT_APPLICABLE) for row in rows)
    if fine and (ended.timed_out or ended.code != 0):
        # A pass needs the whole process: one that hangs or dies at exit has failed.
        last = rows[-1]
        rows[-1] = {**last, "state": table.FAILED, "outcome": outcome}
        rows[-1]["detail"] = f"{last['detail']}; then, on its way out: {reason}"
    return rows


def end_reason(ended: Ended) -> tuple[str, str]:
    """Return the outcome and the reason for a check in which the process ended."""
    if ended.timed_out:
        return table.TIMEOUT, f"stopped: its part had {ended.seconds:.0f} s"
    how = f"signal {ended.code - 128}" if ended.code > 128 else f"exit code {ended.code}"
    words = last_log_line(ended.log)
    outcome = next((word for text, word in LAST_WORDS if text in ended.log), table.LOAD_FAILED)
    return outcome, f"the process ended by {how}" + (f": {words}" if words else " and said nothing")


def last_log_line(log: str) -> str:
    """Return the last line.

    After a crash, return the interpreter's line and the line before, often of a library.
    """
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    fatal = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    chosen = lines[-1:] if fatal is None else lines[max(0, fatal - 1) : fatal + 1]
    return "; ".join(chosen)[-LONGEST_WORDS:]
