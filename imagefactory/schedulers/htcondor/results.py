"""From a node's log and files to its word: what the pool broke, what it never ran, and what is to be judged.

`classify` is pure; `read_node` reads the folder of a node with care, since jobs write there. Sources:
HTCondor's manual, "Hold Reason Codes" and "Job Event Log Codes"; trials on a pool of 23.9.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from imagefactory.model import Outcome
from imagefactory.pools.folder import node_folder
from imagefactory.schedulers.htcondor.dag import JOB_LOG
from imagefactory.pools.htcondor.events import LIMITS_OVER, RAN_OUT, parse_attempts
from imagefactory.schedulers.htcondor.node.post import LARGEST_FILE, LARGEST_LOG, PULLED, TRY_AGAIN, is_result, parse_object, read
from imagefactory.schedulers.pool import TRIED_AGAIN, Ending, JobAttempt, JobLimits, NodeFound, NodeResult
from imagefactory.progress import format_seconds
from imagefactory.verify.kit.program import KIT, RESULT, RUN, read_report
from imagefactory.verify.kit.start import REPORT
from imagefactory.verify.suite_report import clean

POSTED, ERR = "post.json", "err"
LONGEST_WORDS = 300
TRANSFER, RESOURCES, BAD_IMAGE, NO_CONTAINER, DURATION, EXECUTION = (12, 13), 34, 35, 45, 46, 47
_JOB = re.compile(r"[0-9]{1,10}\.[0-9]{1,10}")
_SIF = re.compile(r"\.sif\b")
_NOT_HAD = re.compile(r"FATAL: +Unable to handle ((?:docker|oras|library)://\S+) uri: (.*)")
"""Apptainer's last line where it cannot have one: the address, then why, often with the address again."""
CUT = "HTCondor kept no more of what apptainer said"


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """What the POST script said of the job `job`. `left`: DAGMan will try again; `again`: it should be."""

    job: str
    again: bool
    left: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """What lies in a node's folder of its last attempt. `err` is the end of its stderr, one line.

    `run` and `report` are None where they are missing; `broken` says that they cannot be read.
    """

    run: bytes | None = None
    report: bytes | None = None
    broken: bool = False
    err: str = ""
    posted: Posted | None = None


# --- deciding ------------------------------------------------------------------------------------


def classify(
    attempts: Sequence[JobAttempt], files: NodeFiles, limits: JobLimits
) -> tuple[Outcome | None, str]:
    """The word for a node and a line on why. None while it waits, runs or is to be tried again, and for a run
    that is to be judged.
    """
    posted = files.posted
    given_up = posted is not None and posted.again and not posted.left
    if not attempts:
        if posted and given_up:
            return Outcome.INFRASTRUCTURE, clean(posted.why)
        return None, "not submitted yet"
    last = attempts[-1]
    mine = posted if posted and posted.job == last.job else None
    if mine and last.ended is None:  # DAGMan saw its end, and the log did not
        last = replace(last, ending=Ending.LOST)
    outcome, reason = _word(last, files, limits)
    if mine and mine.left and mine.why:
        reason = clean(mine.why)
    if outcome in TRIED_AGAIN and (mine is None or mine.left):
        if posted and given_up and posted.job not in [one.job for one in attempts]:
            return Outcome.INFRASTRUCTURE, clean(posted.why)  # the next job never came to be
        return None, f"to be tried again: {reason}"
    if outcome is Outcome.NO_MATCH and len(attempts) > 1:
        before = attempts[-2].machine or "a machine"
        return Outcome.INFRASTRUCTURE, f"{before} failed it, and then {reason}"
    return outcome, reason


def _word(last: JobAttempt, files: NodeFiles, limits: JobLimits) -> tuple[Outcome | None, str]:
    """The word for one job, whatever comes after it."""
    match last.ending:
        case Ending.WAITING:
            return None, f"waiting: {last.text}" if last.text else "waiting"
        case Ending.RUNNING:
            return None, f"running on {last.machine}" if last.machine else "running"
        case Ending.DISCONNECTED:
            return None, f"disconnected from {last.machine or 'its machine'}: {last.text}"[:LONGEST_WORDS]
        case Ending.HELD:
            return _held(last, limits)
        case Ending.REMOVED:
            return _removed(last, limits)
        case Ending.KILLED:
            return Outcome.INFRASTRUCTURE, f"killed by signal {last.code}{_said(files)}"
        case Ending.LOST:
            return Outcome.INFRASTRUCTURE, "its log does not tell how it ended"
    if last.code and _NOT_HAD.search(files.err):
        return Outcome.PULL_FAILED, _not_had(files.err, last.machine)
    if last.code:
        return Outcome.INFRASTRUCTURE, f"the suite was not started: exit code {last.code}{_said(files)}"
    if files.broken or files.run is None:
        return Outcome.INFRASTRUCTURE, f"it brought back no result that can be read{_said(files)}"
    return None, "the suite has run"


def _held(last: JobAttempt, limits: JobLimits) -> tuple[Outcome | None, str]:
    text = _not_had(last.text, last.machine) if _NOT_HAD.search(last.text) else last.text[:LONGEST_WORDS]
    told = f"held ({last.code}): {text}"
    if last.ended is None:
        return None, told
    if last.code in (DURATION, EXECUTION):
        return Outcome.TIMEOUT, f"stopped after {_time(limits.run)}, its limit on the pool"
    about = (*TRANSFER, NO_CONTAINER)
    if last.code == BAD_IMAGE or (last.code in about and PULLED.search(last.text)):
        return Outcome.PULL_FAILED, told
    if last.code in TRANSFER and _SIF.search(last.text):
        return Outcome.PULL_FAILED, told
    if last.code in TRY_AGAIN:
        return Outcome.INFRASTRUCTURE, told
    if last.code == RESOURCES:
        return Outcome.HELD, f"held (34), it asked for too little memory or disk: {last.text}"[:LONGEST_WORDS]
    return Outcome.HELD, told


def _removed(last: JobAttempt, limits: JobLimits) -> tuple[Outcome | None, str]:
    if last.ended is None or not last.text.startswith(LIMITS_OVER):
        return Outcome.NOT_TESTED, f"removed: {last.text}"[:LONGEST_WORDS]
    if last.text == RAN_OUT:
        return Outcome.TIMEOUT, f"stopped after {_time(limits.run)}, its limit on the pool"
    if last.started is None and last.text == LIMITS_OVER:
        return Outcome.NO_MATCH, f"no such GPU took it in {_time(limits.idle)}"
    why = last.text.removeprefix(LIMITS_OVER).removeprefix(": ") or "it was started again and again"
    if _NOT_HAD.search(why):
        return Outcome.PULL_FAILED, _not_had(why, last.machine)
    word = Outcome.PULL_FAILED if PULLED.search(why) else Outcome.INFRASTRUCTURE
    return word, f"it did not come to an end: {why}"[:LONGEST_WORDS]


def _not_had(text: str, machine: str) -> str:
    """Which machine could not have which image, and why: HTCondor (tried with 23.9) keeps 255
    bytes of apptainer's words, in which a name with a digest stands twice before the reason.
    """
    address, words = _NOT_HAD.findall(text)[-1]
    _, twice, why = words.partition(f"{address}: ")
    why = why if twice else CUT if f" {address[:12]}" in words else words
    return f"{machine or 'the machine'} could not pull {address}: {why or CUT}"[: 2 * LONGEST_WORDS]


def _said(files: NodeFiles) -> str:
    return f": {files.err}"[:LONGEST_WORDS] if files.err else ""


def _time(time: timedelta) -> str:
    return format_seconds(time.total_seconds())


# --- reading -------------------------------------------------------------------------------------


def read_node(folder: Path, name: str, limits: JobLimits) -> NodeFound:
    """The state of a node of the sweep in `folder`. Raises UsageError for a name that is none."""
    place = node_folder(folder, name)
    attempts, files = _read_both(place)
    outcome, reason = classify(attempts, files, limits)
    result = NodeResult(node=name, outcome=outcome, reason=clean(reason), attempts=attempts)
    last, posted = attempts[-1] if attempts else None, files.posted
    settled = bool(last and posted and posted.job == last.job and not posted.again)
    if outcome is None and last and last.ending is Ending.EXITED and not last.code and not files.broken:
        return NodeFound(result=result, settled=settled, run=files.run, report=files.report)
    return NodeFound(result=result, settled=settled)


def _read_both(place: Path) -> tuple[tuple[JobAttempt, ...], NodeFiles]:
    """The jobs, and the files of the last of them. A job may end while both are read, and the next one too:
    what lies there is of the jobs that the log tells only where the log is the same before and after.
    """
    path = place / JOB_LOG
    log = read(path, LARGEST_LOG)
    while True:
        files = read_files(place)
        before, log = log, read(path, LARGEST_LOG)
        if log == before:
            return _attempts(path, log), files


def _attempts(path: Path, log: bytes | None) -> tuple[JobAttempt, ...]:
    """The jobs in a log; none where there is no log yet."""
    if log is None:
        return ()
    latest = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return parse_attempts(log, latest, lambda naive: naive.astimezone(UTC))


def read_files(place: Path) -> NodeFiles:
    """The files of the last attempt: in the node's folder, or moved away where it is to be tried again."""
    posted = parse_posted(read(place / POSTED, LARGEST_FILE))
    if posted is None:
        numbered = sorted(place.glob("attempt-*"), key=lambda path: (len(path.name), path.name))
        if numbered and not (place / RESULT).exists():
            posted = parse_posted(read(numbered[-1] / POSTED, LARGEST_FILE))
            return replace(_read_attempt(numbered[-1], b""), posted=posted)
    return replace(_read_attempt(place, read(place / KIT, LARGEST_FILE)), posted=posted)


def _read_attempt(place: Path, kit: bytes | None) -> NodeFiles:
    run, report = (read_report(place, f"{RESULT}/{name}") for name in (RUN, REPORT))
    nonce = str((parse_object(kit) or {}).get("nonce", ""))
    there = (place / RESULT / REPORT).is_symlink() or (place / RESULT / REPORT).exists()
    broken = not is_result(run, nonce) or (there and parse_object(report) is None)
    lines = (read(place / ERR, LARGEST_FILE) or b"").decode("utf-8", "replace").strip().splitlines()
    return NodeFiles(run=run, report=report, broken=broken, err=clean(lines[-1]) if lines else "")


def parse_posted(data: bytes | None) -> Posted | None:
    """post.json, None for anything but what the POST script writes."""
    row = parse_object(data)
    if row is None:
        return None
    job, again, left, why = (row.get(name) for name in ("job", "again", "left", "why"))
    if not (isinstance(job, str) and isinstance(again, bool) and isinstance(left, bool)):
        return None
    if not isinstance(why, str):
        return None
    return Posted(job=job if _JOB.fullmatch(job) else "", again=again, left=left, why=why)
