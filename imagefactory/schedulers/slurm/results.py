"""From what a node's tasks left to its word: what the cluster broke, what never ran, what is to be judged.

`classify` is pure; `read_node` reads the folder. Sources: Slurm's manual, "Job State Codes"; trials on a
cluster of 24.11.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import StatementError
from imagefactory.model import Outcome
from imagefactory.pools.folder import node_folder
from imagefactory.schedulers.pool import TRIED_AGAIN, Ending, JobAttempt, JobLimits, NodeFound, NodeResult
from imagefactory.schedulers.slurm.batch import LOG, QUEUE, Submitted, read_row, read_tasks
from imagefactory.pools.slurm.log import (
    ALIVE,
    MEMORY,
    REMOVED,
    TIME_LIMIT,
    Queue,
    Start,
    Told,
    parse_log,
    parse_record,
)
from imagefactory.progress import format_seconds
from imagefactory.verify.kit.program import EVIDENCE, RESULT, RUN, read_report
from imagefactory.verify.kit.start import EXIT_IMAGE, REPORT
from imagefactory.verify.kits import parse_run
from imagefactory.verify.suite_report import clean

LONGEST_WORDS = 300
HAS_RUN = "the suite has run"
_STATES = {"TIMEOUT": TIME_LIMIT, "OUT_OF_MEMORY": MEMORY, "CANCELLED": REMOVED}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFiles:
    """What the last time that a task ran left. `said` is the kit's last line."""

    run: bytes | None = None
    report: bytes | None = None
    evidence: bytes | None = None
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A node's last task: what became of its array, when it ran, what the queue said of it.

    `known` is whether the queue was asked since the task was last heard of. `submitted` is None where nobody
    knows whether its array came to be.
    """

    submitted: Submitted | None
    starts: tuple[Start, ...]
    told: Told | None
    known: bool
    files: TaskFiles = TaskFiles()

    @property
    def alive(self) -> bool | None:
        """Whether it is still in the queue; None where that is not known."""
        return (self.told is not None and self.told.state in ALIVE) if self.known else None


# --- deciding --------------------------------------------------------------------------------------


def classify(task: Task, limits: JobLimits) -> tuple[Outcome | None, str, Ending]:
    """The word for a task, a line on why, and how its last run ended. The word is None while it waits or runs
    or is to be tried again, and for a run that is to be judged."""
    if not task.starts:
        return _not_started(task, limits)
    outcome, reason, ending = _word(task, limits)
    last = task.starts[-1]
    again = last.again or (outcome in TRIED_AGAIN and last.code is None)
    if again and task.alive is not False:
        told = f"no usable GPU on {last.machine}" if reason == HAS_RUN else reason
        return None, f"to be tried again: {told}", ending
    return outcome, reason, ending


def _not_started(task: Task, limits: JobLimits) -> tuple[Outcome | None, str, Ending]:
    submitted, told = task.submitted, task.told
    in_vain = f"no such GPU took it in {format_seconds(limits.idle.total_seconds())}"
    if submitted and submitted.refused:
        word = Outcome.NO_MATCH if submitted.unmatched else Outcome.INFRASTRUCTURE
        return word, submitted.refused, Ending.REMOVED
    if task.alive or (submitted and task.alive is None):
        return (
            None,
            f"waiting: {told.reason}" if told and told.reason != "None" else "waiting",
            Ending.WAITING,
        )
    if submitted is None:
        return None, "not submitted yet", Ending.LOST
    if told is None or told.state == "CANCELLED":
        return Outcome.NOT_TESTED, "removed before it started", Ending.REMOVED
    if told.state == "DEADLINE":
        return Outcome.NO_MATCH, in_vain, Ending.REMOVED
    return Outcome.INFRASTRUCTURE, f"it did not start: {told.state} ({told.reason})", Ending.LOST


def _word(task: Task, limits: JobLimits) -> tuple[Outcome | None, str, Ending]:
    """The word for the last time that a task ran, whatever comes after it."""
    last, files = task.starts[-1], task.files
    if last.code is None:
        return _cut_off(task, limits)
    said = f": {files.said}"[:LONGEST_WORDS] if files.said else ""
    if files.run is None and last.code == EXIT_IMAGE:
        return Outcome.PULL_FAILED, f"{last.machine}{said}", Ending.EXITED
    if files.run is None:
        reason = f"the suite was not started: exit code {last.code}{said}"
        return Outcome.INFRASTRUCTURE, reason, Ending.EXITED
    try:
        facts = parse_run(files.run, RUN)
    except StatementError:
        return Outcome.INFRASTRUCTURE, f"it brought back no result that can be read{said}", Ending.EXITED
    if facts["outcome"]:
        return Outcome(facts["outcome"]), clean(facts["reason"]), Ending.EXITED
    return None, HAS_RUN, Ending.EXITED


def _cut_off(task: Task, limits: JobLimits) -> tuple[Outcome | None, str, Ending]:
    last = task.starts[-1]
    why = last.why or (_STATES.get(task.told.state, task.told.state) if task.told and not task.alive else "")
    where = f" on {last.machine}" if last.machine else ""
    if not why and task.alive is not False:
        return None, f"running{where}", Ending.RUNNING
    if why == TIME_LIMIT:
        run = format_seconds(limits.run.total_seconds())
        return Outcome.TIMEOUT, f"Slurm ended it{where}: its time was over ({run} at most)", Ending.KILLED
    if why == MEMORY:
        return Outcome.HELD, f"it asked for too little memory{where}", Ending.KILLED
    if why == REMOVED:
        return Outcome.NOT_TESTED, f"removed while it ran{where}", Ending.REMOVED
    if why:
        return Outcome.INFRASTRUCTURE, f"Slurm ended it{where}: {why.lower()}", Ending.KILLED
    return Outcome.INFRASTRUCTURE, f"it left the queue{where} without a word", Ending.LOST


# --- reading ---------------------------------------------------------------------------------------


def read_node(folder: Path, name: str, limits: JobLimits) -> NodeFound:
    """The state of a node of the sweep in `folder`. Raises UsageError for a name that is none."""
    place = node_folder(folder, name)
    tasks = list(read_tasks(place))
    if not tasks:
        return NodeFound(result=NodeResult(node=name, outcome=None, reason="not submitted yet"))
    attempts = [one for batch, index in tasks for one in _attempts(folder, place, batch, index)]
    task = _read_task(folder, place, *tasks[-1])
    outcome, reason, ending = classify(task, limits)
    if task.starts:
        attempts[-1] = replace(attempts[-1], ending=ending)
    elif task.submitted and not task.submitted.refused:
        attempts.append(_waiting(task.submitted, tasks[-1][1], ending))
    result = NodeResult(node=name, outcome=outcome, reason=clean(reason), attempts=tuple(attempts))
    settled = outcome not in (None, Outcome.NOT_TESTED, *TRIED_AGAIN)
    if reason == HAS_RUN:
        files = task.files
        return NodeFound(
            result=result, settled=True, run=files.run, report=files.report, evidence=files.evidence
        )
    return NodeFound(result=result, settled=settled)


def _read_task(folder: Path, place: Path, batch: int, index: int) -> Task:
    queue = _queue(folder / QUEUE)
    submitted = read_row(folder / f"batch-{batch}.json", Submitted)
    starts = parse_log(read_report(folder / LOG, f"{batch}-{index}") or b"")
    last = starts[-1] if starts else None
    heard = (last.ended or last.started) if last else submitted.at if submitted else None
    files = _read_files(place / f"{batch}-{last.restart}") if last else TaskFiles()
    told = queue[1].get((batch, index)) if queue else None
    if submitted is None and queue and told and told.state in ALIVE:  # killed before sbatch's answer was kept
        submitted = Submitted(job=f"{batch}", at=queue[0].asked, until=queue[0].asked)
    return Task(
        submitted=submitted,
        starts=starts,
        told=told,
        known=queue is not None and (heard is None or queue[0].asked > heard),
        files=files,
    )


def _read_files(place: Path) -> TaskFiles:
    lines = (read_report(place, "out") or b"").decode("utf-8", "replace").strip().splitlines()
    run, report, evidence = (read_report(place, f"{RESULT}/{name}") for name in (RUN, REPORT, EVIDENCE))
    return TaskFiles(run=run, report=report, evidence=evidence, said=clean(lines[-1]) if lines else "")


def _attempts(folder: Path, place: Path, batch: int, index: int) -> Sequence[JobAttempt]:
    return [
        _attempt(start, read_report(place, f"{batch}-{start.restart}/record") or b"", index)
        for start in parse_log(read_report(folder / LOG, f"{batch}-{index}") or b"")
    ]


def _attempt(start: Start, record: bytes, index: int) -> JobAttempt:
    node, gpu = parse_record(record, index)
    return JobAttempt(
        job=start.job,
        ending=Ending.LOST if start.code is None else Ending.EXITED,
        code=start.code or 0,
        text=start.why.lower(),
        machine=start.machine,
        slot=node,
        gpu=gpu,
        submitted=start.started,
        started=start.started,
        ended=start.ended,
    )


def _waiting(submitted: Submitted, index: int, ending: Ending) -> JobAttempt:
    return JobAttempt(
        job=f"{submitted.job}_{index}",
        ending=ending,
        code=0,
        text="",
        machine="",
        slot="",
        gpu=None,
        submitted=submitted.at,
        started=None,
        ended=None,
    )


Known = tuple[Queue, dict[tuple[int, int], Told]]


def _queue(path: Path) -> Known | None:
    """What the queue said last: read once for all nodes of a sweep."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return _read_queue(path, (found.st_mtime_ns, found.st_ino))


@functools.lru_cache(maxsize=4)
def _read_queue(path: Path, _stamp: tuple[int, int]) -> Known:
    queue: Queue = read_row(path, Queue)
    return queue, {(one.batch, one.index): one for one in queue.tasks}
