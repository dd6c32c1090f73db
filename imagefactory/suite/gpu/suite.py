"""Runs the parts of the GPU suite one after the other and writes the report.

Each part is a process of its own in a group of its own: a crash is told as a failure of the check that ran,
a hang ends with the part's time, and what a part leaves running is ended with it. The report is written again
after every check. Whatever a part says, the next one runs, unless T0 found no GPU that is worth asking or no
code of the image runs on it.
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
from functools import partial
from typing import Any

from . import table
from .checks import coverage
from .context import Asked, Predicted, parse_asked
from .part import DEVICE_VARIABLE, failed_row, make_row, write_json

LOOK_SECONDS = 0.05
LOG_BYTES = 64 * 1024
LONGEST_WORDS = 600

VISIBLE_DEVICES, VISIBLE_AMD = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
REHEARSED = "a rehearsal on the CPU: the driver was not asked"

# The facts of T0 that stand in the report.
REPORTED = ("cuda", "device")

# Without these there is nothing that a framework could run on.
NEEDED = ("driver", "device", "vector-add")

# What a process that dies says of why, where it says it: the driver's own words (cuGetErrorString).
DYING_WORDS = (
    ("no kernel image is available", table.NO_KERNEL),
    ("driver version is insufficient", table.DRIVER_TOO_OLD),
    ("compiled with an unsupported toolchain", table.DRIVER_TOO_OLD),
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """How a part's process ended: `code` is 128 + N for signal N, `log` the end of its stderr."""

    code: int
    log: str
    seconds: float
    timed_out: bool


@dataclass(frozen=True)
class Job:
    """A part to start. `command` is what starts it, `report` where it writes, `seconds` its time."""

    part: str
    command: Sequence[str]
    environment: Mapping[str, str]
    report: str
    seconds: float


def main(expectations: str, report: str) -> int:
    """Exit code 0 when every check of the level passed or cannot apply, 1 otherwise."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with open(expectations, encoding="utf-8") as file:
        asked = parse_asked(file.read())
    document = make_document(asked)
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    for part in table.LEVELS[asked.level]:
        names = table.PARTS[part]
        reason = why_blocked(part, asked, rows)
        if reason or not any(applies(name, asked) for name in names):
            rows += [idle_row(name, asked, reason) for name in names]
            continue
        job = Job(
            part=part,
            command=command_of(part, expectations, f"{report}.{part}"),
            environment=environment_of(part, asked, facts, os.environ),
            report=f"{report}.{part}",
            seconds=table.SECONDS[asked.level],
        )
        live = {**document, "running": names[0], "checks": tuple(rows)}
        write_json(report, live)
        said, ended = run_job(job, partial(show, report, live))
        facts.update(said["facts"])
        document.update({key: facts[key] for key in REPORTED if key in facts})
        found = settle(names, said, ended)
        if part in coverage.CLAIMS and not asked.rehearsal:
            found = coverage.judge(part, found, predicted_for(document["device"], asked))
            found = coverage.neither(rows, coverage.spare(rows, found))
        rows += found
    write_json(report, {**document, "checks": rows})
    return 0 if all(row["state"] in (table.PASSED, table.NOT_APPLICABLE) for row in rows) else 1


def show(report: str, live: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Writes the report as it stands while a part runs: `live` from before it, what the part has said."""
    found = {key: said["facts"][key] for key in REPORTED if key in said["facts"]}
    checks = [*live["checks"], *said["checks"]]
    write_json(report, {**live, **found, "running": said["running"], "checks": checks})


def predicted_for(device: Mapping[str, Any] | None, asked: Asked) -> Predicted | None:
    return asked.predicted.get(device["capability"]) if device else None


def make_document(asked: Asked) -> dict[str, Any]:
    return {
        "format": table.FORMAT,
        "nonce": asked.expected.nonce,
        "target": asked.expected.target,
        "python": ".".join(map(str, sys.version_info[:3])),
        "level": asked.level,
        "rehearsal": asked.rehearsal,
        "cuda": "",
        "device": None,
        "running": "",
        "checks": [],
    }


# --- what to run ---------------------------------------------------------------------------------


def applies(name: str, asked: Asked) -> bool:
    return not table.not_applicable(asked.expected.framework, name, asked.expected.locked)


def idle_row(name: str, asked: Asked, reason: str) -> Row:
    """The row of a check whose part is not started."""
    excuse = table.not_applicable(asked.expected.framework, name, asked.expected.locked)
    return make_row(name, table.NOT_APPLICABLE if excuse else table.NOT_RUN, excuse or reason)


def why_blocked(part: str, asked: Asked, rows: Sequence[Row]) -> str:
    """Why the part is not started; empty when it is. `rows` are those of the parts before it."""
    if asked.rehearsal and part == "driver":
        return REHEARSED
    for row in rows:
        if row["state"] == table.FAILED and (row["name"] in NEEDED or "neither" in row["numbers"]):
            return f"'{row['name']}' failed: {row['outcome']}"
    return ""


def command_of(part: str, expectations: str, report: str) -> tuple[str, ...]:
    verify = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "verify.py")
    return (sys.executable, "-I", "-B", verify, "--part", part, expectations, report)


def environment_of(
    part: str, asked: Asked, facts: Mapping[str, Any], given: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a part: of several GPUs the later parts see the one that T0 took, of one no choice.

    The part `several` sees all that are like it. `facts` are those that T0 found, `given` the suite's own
    environment. A rehearsal sees no GPU.
    """
    environment = {name: value for name, value in given.items() if name not in table.JIT_VARIABLES}
    environment.update(table.PART_ENVIRONMENT.get(part, {}))
    if "device" in facts:
        environment[DEVICE_VARIABLE] = json.dumps(facts["device"])
    if asked.rehearsal:
        environment[VISIBLE_DEVICES] = "-1"
    elif facts.get("visible", 0) > 1:
        seen = facts["alike"] if part == table.SEVERAL else [facts["device"]["uuid"]]
        environment[VISIBLE_AMD if asked.expected.rocm else VISIBLE_DEVICES] = ",".join(seen)
    return environment


# --- running it ----------------------------------------------------------------------------------


def run_job(job: Job, show: Callable[[Mapping[str, Any]], None]) -> tuple[dict[str, Any], Ended]:
    """Starts a part, shows what it says as it says it, ends it and all that it started."""
    began = time.monotonic()
    said: dict[str, Any] = {"running": "", "facts": {}, "checks": []}
    stamp = 0
    over = False
    with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(job.report))) as log:
        process = subprocess.Popen(
            job.command,
            env=dict(job.environment),
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        try:
            while not over and time.monotonic() - began < job.seconds:
                # It stays a zombie until its group is ended, or the group's number could become another's.
                over = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
                new = stamp_of(job.report)
                if new != stamp:
                    stamp, said = new, read_part(job.report)
                    show(said)
                if not over:
                    time.sleep(LOOK_SECONDS)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        # Read in any case: two reports within one tick of the clock may look like one.
        if os.path.exists(job.report) and (last := read_part(job.report)) != said:
            said = last
            show(said)
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
    return said, ended


def stamp_of(path: str) -> int:
    """Changes whenever another file stands at `path`."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0
    return hash((found.st_ino, found.st_mtime_ns))


def read_part(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        said: dict[str, Any] = json.load(file)
    return said


def read_end(log: Any) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - LOG_BYTES))
    text: str = log.read().decode("utf-8", "replace")
    return text


# --- what came of it -----------------------------------------------------------------------------


def settle(names: Sequence[str], said: Mapping[str, Any], ended: Ended) -> list[Row]:
    """Every check of the part, once and in order: the one that ran when the process ended has failed."""
    done = {row["name"]: row for row in said["checks"]}
    outcome, reason = why_ended(ended)
    rows: list[Row] = []
    culprit = ""
    for name in names:
        if name in done:
            rows.append(done[name])
        elif culprit:
            rows.append(make_row(name, table.NOT_RUN, f"'{culprit}' came first and took the process down"))
        else:
            culprit = name
            rows.append(failed_row(name, reason, outcome=outcome))
            spent = sum(row["seconds"] for row in rows)
            rows[-1]["seconds"] = round(max(0.0, ended.seconds - spent), 3)
    fine = all(row["state"] in (table.PASSED, table.NOT_APPLICABLE) for row in rows)
    if fine and (ended.timed_out or ended.code != 0):
        # A pass is the whole process's: one that hangs or dies on its way out is none.
        last = rows[-1]
        rows[-1] = {**last, "state": table.FAILED, "outcome": outcome}
        rows[-1]["detail"] = f"{last['detail']}; then, on its way out: {reason}"
    return rows


def why_ended(ended: Ended) -> tuple[str, str]:
    """The word and the reason for a check in which the process ended."""
    if ended.timed_out:
        return table.TIMEOUT, f"stopped: its part had {ended.seconds:.0f} s"
    how = f"signal {ended.code - 128}" if ended.code > 128 else f"exit code {ended.code}"
    words = last_words(ended.log)
    outcome = next((word for text, word in DYING_WORDS if text in ended.log), table.LOAD_FAILED)
    return outcome, f"the process ended by {how}" + (f": {words}" if words else " and said nothing")


def last_words(log: str) -> str:
    """The last line; of a crash the interpreter's line for it and the one before, where libraries say why."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    fatal = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    chosen = lines[-1:] if fatal is None else lines[max(0, fatal - 1) : fatal + 1]
    return "; ".join(chosen)[-LONGEST_WORDS:]
