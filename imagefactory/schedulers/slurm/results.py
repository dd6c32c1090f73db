"""From what a node's tasks left to its word: what the cluster broke, what never ran, what is to be judged.

`classify` is pure; `read_node` reads the folder. Sources: Slurm's manual, "Job State Codes"; trials on a
cluster of 24.11.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from imagefactory.errors import StatementError
from imagefactory.model import Outcome
from imagefactory.progress import format_seconds
from imagefactory.schedulers.faults import node_directory
from imagefactory.schedulers.pool import (
    MOST_NODES,
    RETRIED_OUTCOMES,
    JobAttempt,
    JobEnding,
    JobLimits,
    NodeResult,
    NodeState,
    PoolGpu,
)
from imagefactory.schedulers.slurm.batch import LOG, QUEUE, ArraySubmission, read_row, read_tasks
from imagefactory.schedulers.slurm.nodes import capability_of
from imagefactory.serialize import MaxRows
from imagefactory.settings.choices import SLURM
from imagefactory.trust.verdict import missing_evidence
from imagefactory.verify.kit.program import EVIDENCE, RESULT, RUN, read_report
from imagefactory.verify.kit.start import EXIT_IMAGE, REPORT
from imagefactory.verify.kits import ReturnedKit, parse_run, verify_returned_kit
from imagefactory.verify.outcome import clean
from imagefactory.verify.report import GpuReport

# --- What Slurm and its jobs left: a task's log, slurmctld's record of its GPU, what the queue said. Pure
# The log is what task.sh printed, with what slurmstepd wrote between when it ended a job. The record is what
# `scontrol show job --detail` printed on the machine when the job began. Forms as of Slurm 22.05 and 24.11.


ALIVE = frozenset({
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING",
    "RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT",
})  # fmt: skip
"""States of a job that may still run, as squeue writes them; in all others it is over."""
TIME_LIMIT, MEMORY, REMOVED = "TIME LIMIT", "MEMORY", "REMOVED"
"""Why slurmstepd ended a job, beside its own words (`PREEMPTION`, `NODE FAILURE`)."""
SQUEUE = "%K|%T|%r|%j|%Z"
"""What squeue is asked for: index in its array, state, why it waits, name, folder."""

ANSWERS = (0, 2, 9)
"""Exit codes of a kit after which nothing is tried again."""

_KIT_LINE = re.compile(r"imagefactory: (start|end) (.+)")
_STEPD = r"slurmstepd\S*: error: "
_ENDED = re.compile(rf"{_STEPD}\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+?(?: DUE TO (.+?))? \*\*\*")
_MEMORY = re.compile(rf"{_STEPD}.*(?:oom.?kill|memory limit)", re.IGNORECASE)
_NODE = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES(?:_IDX)?=(\S*)")
_GPUS = re.compile(r"gpu(?::([A-Za-z][A-Za-z0-9_.+-]*))?(?::[0-9]+)?\(IDX:([0-9,-]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """One time that a task ran. `code` is its kit's exit code, None where it did not come to an end.

    `again`: it asked to be queued again. `why` is slurmstepd's word where that ended it.
    """

    job: str
    restart: int
    machine: str
    started: datetime
    code: int | None = None
    ended: datetime | None = None
    again: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """What squeue said of the task `index` of the array `batch`."""

    batch: int
    index: int
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The tasks of a sweep that the queue knew when it was asked, and those that it had known to be over."""

    asked: datetime
    tasks: Annotated[tuple[TaskState, ...], MaxRows(8 * MOST_NODES)]


def parse_log(data: bytes) -> tuple[TaskRun, ...]:
    """The times that a task ran, the oldest first; what is no word of these is passed over.

    After an answer it is over, whatever Slurm starts again: a person queued it, or a node was away.
    """
    found: list[TaskRun] = []
    for line in data.decode("utf-8", "replace").splitlines():
        if said := _KIT_LINE.fullmatch(line):
            words = said[2].split(" ")
            if found and found[-1].code in ANSWERS and not found[-1].again:
                break
            if said[1] == "start" and len(words) == 4 and _is_number(words[1]) and _is_number(words[3]):
                job, restart, machine, at = words
                found.append(
                    TaskRun(job=clean(job), restart=int(restart), machine=clean(machine), started=_time(at))
                )
            elif said[1] == "end" and found and len(words) == 3 and all(map(_is_number, words[:2])):
                found[-1] = replace(
                    found[-1], code=int(words[0]), ended=_time(words[1]), again=words[2] == "again"
                )
        elif found and found[-1].code is None:
            if ended := _ENDED.match(line):
                why = ended[1] or REMOVED
                found[-1] = replace(found[-1], why=found[-1].why or why)
            elif _MEMORY.match(line):
                found[-1] = replace(found[-1], why=MEMORY)
    return tuple(found)


def _is_number(text: str) -> bool:
    """A job may write anything there: `²` is a digit too, and no time has 12."""
    return re.fullmatch(r"[0-9]{1,11}", text) is not None


def _time(text: str) -> datetime:
    return datetime.fromtimestamp(int(text), UTC)


def parse_record(data: bytes, index: int) -> tuple[str, PoolGpu | None]:
    """The node and the one GPU that slurmctld gave to a task; None where it gave it none, or several."""
    for line in data.decode("utf-8", "replace").splitlines():
        node = _NODE.search(line)
        if f" ArrayTaskId={index} " not in line or node is None:
            continue
        given = [(kind, one) for kind, told in _GPUS.findall(node[2]) for one in _numbers(told)]
        if len(given) != 1:
            return clean(node[1]), None
        kind, number = given[0]
        return clean(node[1]), PoolGpu(
            id=f"{node[1]}/{number}",
            uuid="",
            name=kind,
            capability=capability_of(kind),
            memory=0,
            driver="",
            cuda="",
            mig=False,
            free=False,
        )
    return "", None


def _numbers(text: str) -> Iterator[int]:
    """`0,2-3`."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if _is_number(first) and (_is_number(last) or not last):
            yield from range(int(first), min(int(last or first), int(first) + 64) + 1)


def parse_queue(text: str, name: str, folder: str) -> tuple[TaskState, ...]:
    """The tasks of the arrays `<name>-N` that were submitted in `folder`, as squeue printed them."""
    found = []
    for line in text.splitlines():
        index, _, rest = line.partition("|")
        state, _, rest = rest.partition("|")
        reason, _, rest = rest.partition("|")
        job, _, place = rest.partition("|")
        head, _, number = job.rpartition("-")
        if (head, place) == (name, folder) and _is_number(number) and _is_number(index):
            found.append(
                TaskState(batch=int(number), index=int(index), state=clean(state), reason=clean(reason))
            )
    return tuple(found)


def submit_directories(text: str, name: str) -> frozenset[str]:
    """The folders in which arrays of that name were submitted."""
    rows = (line.split("|", 4) for line in text.splitlines())
    return frozenset(row[4] for row in rows if len(row) == 5 and row[3].rpartition("-")[0] == name)


def remember(before: QueueSnapshot | None, told: tuple[TaskState, ...], asked: datetime) -> QueueSnapshot:
    """What the queue says now, and of tasks that it has forgotten how they were seen to end."""
    now = {(one.batch, one.index): one for one in told}
    old = {(one.batch, one.index): one for one in before.tasks} if before else {}
    kept = {key: one for key, one in old.items() if one.state not in ALIVE}
    return QueueSnapshot(asked=asked, tasks=tuple({**kept, **now}[key] for key in sorted({**kept, **now})))


MAX_REASON = 300
HAS_RUN = "the suite has run"
_STATES = {"TIMEOUT": TIME_LIMIT, "OUT_OF_MEMORY": MEMORY, "CANCELLED": REMOVED}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutput:
    """What the last time that a task ran left. `said` is the kit's last line."""

    run: bytes | None = None
    report: bytes | None = None
    evidence: bytes | None = None
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTask:
    """A node's last task: what became of its array, when it ran, what the queue said of it.

    `known` is whether the queue was asked since the task was last heard of. `submitted` is None where nobody
    knows whether its array came to be.
    """

    submitted: ArraySubmission | None
    starts: tuple[TaskRun, ...]
    told: TaskState | None
    known: bool
    files: TaskOutput = TaskOutput()

    @property
    def alive(self) -> bool | None:
        """Whether it is still in the queue; None where that is not known."""
        return (self.told is not None and self.told.state in ALIVE) if self.known else None


# --- deciding --------------------------------------------------------------------------------------


def classify(task: ArrayTask, limits: JobLimits) -> tuple[Outcome | None, str, JobEnding]:
    """The word for a task, a line on why, and how its last run ended. The word is None while it waits or runs
    or is to be tried again, and for a run that is to be judged."""
    if not task.starts:
        return _not_started(task, limits)
    outcome, reason, ending = _task_status(task, limits)
    last = task.starts[-1]
    again = last.again or (outcome in RETRIED_OUTCOMES and last.code is None)
    if again and task.alive is not False:
        told = f"no usable GPU on {last.machine}" if reason == HAS_RUN else reason
        return None, f"to be tried again: {told}", ending
    return outcome, reason, ending


def _not_started(task: ArrayTask, limits: JobLimits) -> tuple[Outcome | None, str, JobEnding]:
    submitted, told = task.submitted, task.told
    in_vain = f"no such GPU took it in {format_seconds(limits.idle.total_seconds())}"
    if submitted and submitted.refused:
        word = Outcome.NO_MATCH if submitted.unmatched else Outcome.INFRASTRUCTURE
        return word, submitted.refused, JobEnding.REMOVED
    if task.alive or (submitted and task.alive is None):
        return (
            None,
            f"waiting: {told.reason}" if told and told.reason != "None" else "waiting",
            JobEnding.WAITING,
        )
    if submitted is None:
        return None, "not submitted yet", JobEnding.LOST
    if told is None or told.state == "CANCELLED":
        return Outcome.NOT_TESTED, "removed before it started", JobEnding.REMOVED
    if told.state == "DEADLINE":
        return Outcome.NO_MATCH, in_vain, JobEnding.REMOVED
    return Outcome.INFRASTRUCTURE, f"it did not start: {told.state} ({told.reason})", JobEnding.LOST


def _task_status(task: ArrayTask, limits: JobLimits) -> tuple[Outcome | None, str, JobEnding]:
    """The word for the last time that a task ran, whatever comes after it."""
    last, files = task.starts[-1], task.files
    if last.code is None:
        return _cut_off(task, limits)
    said = f": {files.said}"[:MAX_REASON] if files.said else ""
    if files.run is None and last.code == EXIT_IMAGE:
        return Outcome.PULL_FAILED, f"{last.machine}{said}", JobEnding.EXITED
    if files.run is None:
        reason = f"the suite was not started: exit code {last.code}{said}"
        return Outcome.INFRASTRUCTURE, reason, JobEnding.EXITED
    try:
        facts = parse_run(files.run, RUN)
    except StatementError:
        return Outcome.INFRASTRUCTURE, f"it brought back no result that can be read{said}", JobEnding.EXITED
    if facts["outcome"]:
        return Outcome(facts["outcome"]), clean(facts["reason"]), JobEnding.EXITED
    return None, HAS_RUN, JobEnding.EXITED


def _cut_off(task: ArrayTask, limits: JobLimits) -> tuple[Outcome | None, str, JobEnding]:
    last = task.starts[-1]
    why = last.why or (_STATES.get(task.told.state, task.told.state) if task.told and not task.alive else "")
    where = f" on {last.machine}" if last.machine else ""
    if not why and task.alive is not False:
        return None, f"running{where}", JobEnding.RUNNING
    if why == TIME_LIMIT:
        run = format_seconds(limits.run.total_seconds())
        return Outcome.TIMEOUT, f"Slurm ended it{where}: its time was over ({run} at most)", JobEnding.KILLED
    if why == MEMORY:
        return Outcome.HELD, f"it asked for too little memory{where}", JobEnding.KILLED
    if why == REMOVED:
        return Outcome.NOT_TESTED, f"removed while it ran{where}", JobEnding.REMOVED
    if why:
        return Outcome.INFRASTRUCTURE, f"Slurm ended it{where}: {why.lower()}", JobEnding.KILLED
    return Outcome.INFRASTRUCTURE, f"it left the queue{where} without a word", JobEnding.LOST


# --- reading ---------------------------------------------------------------------------------------


def read_node(folder: Path, name: str, limits: JobLimits) -> NodeState:
    """The state of a node of the sweep in `folder`. Raises UsageError for a name that is none."""
    place = node_directory(folder, name)
    tasks = list(read_tasks(place))
    if not tasks:
        return NodeState(result=NodeResult(node=name, outcome=None, reason="not submitted yet"))
    attempts = [one for batch, index in tasks for one in _attempts(folder, place, batch, index)]
    task = _read_task(folder, place, *tasks[-1])
    outcome, reason, ending = classify(task, limits)
    if task.starts:
        attempts[-1] = replace(attempts[-1], ending=ending)
    elif task.submitted and not task.submitted.refused:
        attempts.append(_waiting(task.submitted, tasks[-1][1], ending))
    result = NodeResult(node=name, outcome=outcome, reason=clean(reason), attempts=tuple(attempts))
    settled = outcome not in (None, Outcome.NOT_TESTED, *RETRIED_OUTCOMES)
    if reason == HAS_RUN:
        files = task.files
        return NodeState(
            result=result, settled=True, run=files.run, report=files.report, evidence=files.evidence
        )
    return NodeState(result=result, settled=settled)


def _read_task(folder: Path, place: Path, batch: int, index: int) -> ArrayTask:
    queue = _queue(folder / QUEUE)
    submitted = read_row(folder / f"batch-{batch}.json", ArraySubmission)
    starts = parse_log(read_report(folder / LOG, f"{batch}-{index}") or b"")
    last = starts[-1] if starts else None
    heard = (last.ended or last.started) if last else submitted.at if submitted else None
    files = _read_files(place / f"{batch}-{last.restart}") if last else TaskOutput()
    told = queue[1].get((batch, index)) if queue else None
    if submitted is None and queue and told and told.state in ALIVE:  # killed before sbatch's answer was kept
        submitted = ArraySubmission(job=f"{batch}", at=queue[0].asked, until=queue[0].asked)
    return ArrayTask(
        submitted=submitted,
        starts=starts,
        told=told,
        known=queue is not None and (heard is None or queue[0].asked > heard),
        files=files,
    )


def _read_files(place: Path) -> TaskOutput:
    lines = (read_report(place, "out") or b"").decode("utf-8", "replace").strip().splitlines()
    run, report, evidence = (read_report(place, f"{RESULT}/{name}") for name in (RUN, REPORT, EVIDENCE))
    return TaskOutput(run=run, report=report, evidence=evidence, said=clean(lines[-1]) if lines else "")


def _attempts(folder: Path, place: Path, batch: int, index: int) -> Sequence[JobAttempt]:
    return [
        _attempt(start, read_report(place, f"{batch}-{start.restart}/record") or b"", index)
        for start in parse_log(read_report(folder / LOG, f"{batch}-{index}") or b"")
    ]


def _attempt(start: TaskRun, record: bytes, index: int) -> JobAttempt:
    node, gpu = parse_record(record, index)
    return JobAttempt(
        job=start.job,
        ending=JobEnding.LOST if start.code is None else JobEnding.EXITED,
        code=start.code or 0,
        text=start.why.lower(),
        machine=start.machine,
        slot=node,
        gpu=gpu,
        submitted=start.started,
        started=start.started,
        ended=start.ended,
    )


def _waiting(submitted: ArraySubmission, index: int, ending: JobEnding) -> JobAttempt:
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


TaskReports = tuple[QueueSnapshot, dict[tuple[int, int], TaskState]]


def _queue(path: Path) -> TaskReports | None:
    """What the queue said last: read once for all nodes of a sweep."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return _read_queue(path, (found.st_mtime_ns, found.st_ino))


@functools.lru_cache(maxsize=4)
def _read_queue(path: Path, _stamp: tuple[int, int]) -> TaskReports:
    queue: QueueSnapshot = read_row(path, QueueSnapshot)
    return queue, {(one.batch, one.index): one for one in queue.tasks}


# --- What a job of a sweep says and whose GPU it met: the machine's own word, and slurmctld's must fit it.
# Pure
# The job reads NVML, /proc and the device nodes of its machine outside of the image, as a kit does;
# slurmctld
# says which GPU of which machine it gave to the job. Where one of them is about another GPU the run is
# `infrastructure`: no word on the image.


def job_report(kit: Mapping[str, Any], asked: Mapping[str, Any], found: NodeState) -> GpuReport:
    """The report of a run that came back: a kit's rules, and slurmctld's word on the GPU beside the suite's.

    `kit` and `asked` are kit.json and expectations.json, believed. A run is never `verified` where a word on
    the GPU is missing. Raises StatementError for a run that is none, or of another kit or suite.
    """
    attempt = found.result.attempts[-1]
    files = ReturnedKit(
        kit=b"",
        expectations=json.dumps(asked).encode(),
        suite=kit["suite"],
        run=found.run or b"",
        evidence=found.evidence,
        report=found.report,
    )
    report = verify_returned_kit(files, kit, found.result.node, SLURM)
    if report.hardware is not None:
        report = replace(
            report, hardware=replace(report.hardware, notes=(*report.hardware.notes, *_notes(attempt)))
        )
    if why := disagreement(attempt, report):
        return replace(report, outcome=Outcome.INFRASTRUCTURE, reason=clean(why))
    gap = missing_evidence(report) if report.outcome is Outcome.VERIFIED else ""
    if report.outcome is Outcome.VERIFIED and attempt.gpu is None:
        gap = "Slurm does not tell that it gave the job one GPU"
    if gap:
        reason = f"the suite passed, and nothing shows that it ran on a GPU: {gap}"
        return replace(report, outcome=Outcome.NOT_TESTED, reason=clean(reason))
    return report


def disagreement(attempt: JobAttempt, report: GpuReport) -> str:
    """Where Slurm and the machine speak of two machines or GPUs, with both values; empty where they agree."""
    gpu, device = attempt.gpu, report.device
    if attempt.slot and attempt.slot != attempt.machine:
        return f"the job ran on {attempt.machine}, Slurm gave it {attempt.slot}"
    if gpu and device and gpu.capability not in ("", device.capability):
        told = f"Slurm gave the job a GPU of type {gpu.name} ({gpu.capability})"
        return f"the suite says {device.uuid} has capability {device.capability}, {told}"
    return ""


def _notes(attempt: JobAttempt) -> tuple[tuple[str, str], ...]:
    gpu = attempt.gpu
    told = {
        "machine": attempt.machine,
        "job": attempt.job,
        "slurm-gpu": gpu.id if gpu else "",
        "slurm-type": gpu.name if gpu else "",
    }
    return tuple((name, clean(text)) for name, text in sorted(told.items()) if text)
