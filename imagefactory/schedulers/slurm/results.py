"""Find the outcome of a node from its tasks: log, record of its GPU, queue, and result files.

Only `read_node` and its helpers read the directory. The log is the output of task.sh, with messages of
slurmstepd if it ended the job. The record is the output of `scontrol show job --detail` on the machine at the
start of the job. Sources: Slurm manual, "Job State Codes"; formats of Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
    MachineFiles,
    NodeResult,
    NodeState,
    PoolGpu,
)
from imagefactory.schedulers.slurm.batch import LOG, QUEUE, ArraySubmission, read_row, read_tasks
from imagefactory.schedulers.slurm.nodes import capability_of
from imagefactory.serialize import MaxRows
from imagefactory.settings.choices import SLURM
from imagefactory.trust.verdict import PASSES, missing_evidence
from imagefactory.verify.kit.program import EVIDENCE, RESULT, RUN, read_report
from imagefactory.verify.kit.start import EXIT_IMAGE, REPORT
from imagefactory.verify.kits import ReturnedKit, parse_run, verify_returned_kit
from imagefactory.verify.outcome import clean
from imagefactory.verify.report import NODES, GpuReport

ALIVE = frozenset({
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING",
    "RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT",
})  # fmt: skip
"""States of a job that may still run, as squeue prints them. In all other states it has ended."""
TIME_LIMIT, MEMORY, REMOVED = "TIME LIMIT", "MEMORY", "REMOVED"
"""Reasons for which slurmstepd ends a job. Other reasons are its messages (`PREEMPTION`, `NODE FAILURE`)."""
SQUEUE = "%K|%T|%r|%j|%Z"
"""The columns of squeue: index in the array, state, reason for waiting, name, directory."""
ANSWERS = (0, 2, 9)
"""Exit codes of a kit after which a job is not retried."""
MAX_REASON = 300
MOST_MACHINES = 64
"""The most nodes of a job: those of `sweep start --nodes`."""
HAS_RUN = "the suite has run"
_STATES = {"TIMEOUT": TIME_LIMIT, "OUT_OF_MEMORY": MEMORY, "CANCELLED": REMOVED}
_KIT_LINE = re.compile(r"imagefactory: (start|end) (.+)")
_STEPD = r"slurmstepd\S*: error: "
_ENDED = re.compile(rf"{_STEPD}\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+?(?: DUE TO (.+?))? \*\*\*")
_MEMORY = re.compile(rf"{_STEPD}.*(?:oom.?kill|memory limit)", re.IGNORECASE)
_NODE = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES(?:_IDX)?=(\S*)")
_GPUS = re.compile(r"gpu(?::([A-Za-z][A-Za-z0-9_.+-]*))?(?::[0-9]+)?\(IDX:([0-9,-]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """One run of a task. `code` is the exit code of its kit, None if it did not end normally.

    `again` means that it requested to be queued again. `why` is the reason if slurmstepd ended it.
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
    """The output of squeue for the task `index` of the array `batch`."""

    batch: int
    index: int
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The tasks of a sweep in the queue at the time `asked`, and the tasks that had ended before."""

    asked: datetime
    tasks: Annotated[tuple[TaskState, ...], MaxRows(8 * MOST_NODES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutput:
    """The files of the last run of a task. `machines` are those of a job on several, else empty."""

    run: bytes | None = None
    report: bytes | None = None
    evidence: bytes | None = None
    last_line: str = ""
    machines: tuple[MachineFiles, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTask:
    """The last task of a node: the submission of its array, its runs, and its state in the queue.

    `known` means that the queue was queried after the last sign of the task. `submitted` is None if there is
    no sign that its array was submitted.
    """

    submitted: ArraySubmission | None
    starts: tuple[TaskRun, ...]
    queued: TaskState | None
    known: bool
    files: TaskOutput = TaskOutput()

    @property
    def alive(self) -> bool | None:
        """Return whether the task is still in the queue, None if unknown."""
        return (self.queued is not None and self.queued.state in ALIVE) if self.known else None


def parse_log(data: bytes) -> tuple[TaskRun, ...]:
    """Return the runs of a task, the oldest first. Other lines are skipped.

    After a final exit code the task is over, even if Slurm starts it again because a person queued it or a
    node was lost.
    """
    runs: list[TaskRun] = []
    for line in data.decode("utf-8", "replace").splitlines():
        if match := _KIT_LINE.fullmatch(line):
            event, words = match[1], match[2].split(" ")
            if runs and runs[-1].code in ANSWERS and not runs[-1].again:
                break
            if event == "start" and len(words) == 4 and _is_number(words[1]) and _is_number(words[3]):
                job, restart, machine, time_text = words
                runs.append(
                    TaskRun(
                        job=clean(job), restart=int(restart), machine=clean(machine), started=_time(time_text)
                    )
                )
            elif event == "end" and runs and len(words) == 3 and all(map(_is_number, words[:2])):
                code, time_text, again = words
                runs[-1] = replace(runs[-1], code=int(code), ended=_time(time_text), again=again == "again")
        elif runs and runs[-1].code is None:
            if ended := _ENDED.match(line):
                runs[-1] = replace(runs[-1], why=runs[-1].why or ended[1] or REMOVED)
            elif _MEMORY.match(line):
                runs[-1] = replace(runs[-1], why=MEMORY)
    return tuple(runs)


def _is_number(text: str) -> bool:
    """Return whether the text is a short ASCII number: job output may contain digits such as `²`, or very
    long numbers.
    """
    return re.fullmatch(r"[0-9]{1,11}", text) is not None


def _time(text: str) -> datetime:
    return datetime.fromtimestamp(int(text), UTC)


def parse_record(data: bytes, index: int) -> tuple[str, PoolGpu | None]:
    """Return the node and the GPU that slurmctld assigned to a task, None if it assigned none or several.

    For a job on several nodes, these are all nodes, and the GPU of each if each has one of the same type.
    """
    for line in data.decode("utf-8", "replace").splitlines():
        nodes = _NODE.findall(line)
        if f" ArrayTaskId={index} " not in line or not nodes:
            continue
        names = ",".join(name for name, _ in nodes)
        rows = [
            [(name, number) for name, text in _GPUS.findall(gres) for number in _numbers(text)]
            for _, gres in nodes
        ]
        if any(len(gpus) != 1 for gpus in rows) or len({gpus[0][0] for gpus in rows}) != 1:
            return clean(names), None
        name, number = rows[0][0]
        return clean(names), PoolGpu(
            id=f"{names}/{number}",
            uuid="",
            name=name,
            capability=capability_of(name),
            memory=0,
            driver="",
            cuda="",
            mig=False,
            free=False,
        )
    return "", None


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers in a list such as `0,2-3`."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if _is_number(first) and (_is_number(last) or not last):
            yield from range(int(first), min(int(last or first), int(first) + 64) + 1)


def parse_queue(text: str, name: str, directory: str) -> tuple[TaskState, ...]:
    """Return the tasks of the arrays `<name>-N` that were submitted in `directory`, from the output of
    squeue.
    """
    tasks = []
    for line in text.splitlines():
        index, state, reason, job, job_directory = (*line.split("|", 4), "", "", "", "")[:5]
        head, _, number = job.rpartition("-")
        if (head, job_directory) == (name, directory) and _is_number(number) and _is_number(index):
            tasks.append(
                TaskState(batch=int(number), index=int(index), state=clean(state), reason=clean(reason))
            )
    return tuple(tasks)


def submit_directories(text: str, name: str) -> frozenset[str]:
    """Return the directories in which arrays of that name were submitted."""
    rows = (line.split("|", 4) for line in text.splitlines())
    return frozenset(row[4] for row in rows if len(row) == 5 and row[3].rpartition("-")[0] == name)


def remember(before: QueueSnapshot | None, tasks: tuple[TaskState, ...], now: datetime) -> QueueSnapshot:
    """Return the current queue, with the ended tasks that Slurm has forgotten."""
    over = (task for task in (before.tasks if before else ()) if task.state not in ALIVE)
    states = {(task.batch, task.index): task for task in (*over, *tasks)}
    return QueueSnapshot(asked=now, tasks=tuple(states[key] for key in sorted(states)))


def classify(task: ArrayTask, limits: JobLimits) -> tuple[Outcome | None, str, JobEnding]:
    """Return the outcome of a task, the reason, and how its last run ended.

    The outcome is None while the task waits, runs or will be retried, and for a run that must be verified.
    """
    if not task.starts:
        return _not_started(task, limits)
    outcome, reason, ending = _task_status(task, limits)
    last = task.starts[-1]
    again = last.again or (outcome in RETRIED_OUTCOMES and last.code is None)
    if again and task.alive is not False:
        cause = f"no usable GPU on {last.machine}" if reason == HAS_RUN else reason
        return None, f"to be retried: {cause}", ending
    return outcome, reason, ending


def _not_started(task: ArrayTask, limits: JobLimits) -> tuple[Outcome | None, str, JobEnding]:
    submitted, queued = task.submitted, task.queued
    if submitted and submitted.refused:
        outcome = Outcome.NO_MATCH if submitted.unmatched else Outcome.INFRASTRUCTURE
        return outcome, submitted.refused, JobEnding.REMOVED
    if task.alive or (submitted and task.alive is None):
        reason = f"waiting: {queued.reason}" if queued and queued.reason != "None" else "waiting"
        return None, reason, JobEnding.WAITING
    if submitted is None:
        return None, "not submitted yet", JobEnding.LOST
    if queued is None or queued.state == "CANCELLED":
        return Outcome.NOT_TESTED, "removed before it started", JobEnding.REMOVED
    if queued.state == "DEADLINE":
        reason = f"no such GPU took it in {format_seconds(limits.idle.total_seconds())}"
        return Outcome.NO_MATCH, reason, JobEnding.REMOVED
    return Outcome.INFRASTRUCTURE, f"it did not start: {queued.state} ({queued.reason})", JobEnding.LOST


def _task_status(task: ArrayTask, limits: JobLimits) -> tuple[Outcome | None, str, JobEnding]:
    """Return the status of the last run of a task, without later runs."""
    last, files = task.starts[-1], task.files
    if last.code is None:
        return _cut_off(task, limits)
    for row in files.machines:  # those that only missed it were ended
        with suppress(StatementError):
            facts = parse_run(row.run, RUN) if row.run is not None else {}
            if facts.get("outcome"):
                reason = f"{row.machine}: {facts['reason']}"
                return Outcome(facts["outcome"]), clean(reason), JobEnding.EXITED
    detail = f": {files.last_line}"[:MAX_REASON] if files.last_line else ""
    culprits = [row.machine for row in files.machines if row.fault]
    missing = culprits or [row.machine for row in files.machines if row.run is None]
    if (files.run is None or missing) and last.code == EXIT_IMAGE:
        return Outcome.PULL_FAILED, f"{', '.join(missing) or last.machine}{detail}", JobEnding.EXITED
    if files.run is None or missing:
        machines = f"{', '.join(missing)}: " if missing else ""
        reason = f"{machines}the suite was not started: exit code {last.code}{detail}"
        return Outcome.INFRASTRUCTURE, reason, JobEnding.EXITED
    try:
        facts = parse_run(files.run, RUN)
    except StatementError:
        return Outcome.INFRASTRUCTURE, f"it brought back no result that can be read{detail}", JobEnding.EXITED
    if facts["outcome"]:
        return Outcome(facts["outcome"]), clean(facts["reason"]), JobEnding.EXITED
    return None, HAS_RUN, JobEnding.EXITED


def _cut_off(task: ArrayTask, limits: JobLimits) -> tuple[Outcome | None, str, JobEnding]:
    last = task.starts[-1]
    state = task.queued.state if task.queued and not task.alive else ""
    reason = last.why or _STATES.get(state, state)
    machines = [row.machine for row in task.files.machines if row.run is None] or [last.machine]
    location = f" on {', '.join(machines)}" if machines[0] else ""
    if not reason and task.alive is not False:
        return None, f"running{location}", JobEnding.RUNNING
    if reason == TIME_LIMIT:
        run = format_seconds(limits.run.total_seconds())
        return (
            Outcome.TIMEOUT,
            f"Slurm ended it{location}: its time was over ({run} at most)",
            JobEnding.KILLED,
        )
    if reason == MEMORY:
        return Outcome.HELD, f"it requested too little memory{location}", JobEnding.KILLED
    if reason == REMOVED:
        return Outcome.NOT_TESTED, f"removed while it ran{location}", JobEnding.REMOVED
    if reason:
        return Outcome.INFRASTRUCTURE, f"Slurm ended it{location}: {reason.lower()}", JobEnding.KILLED
    return Outcome.INFRASTRUCTURE, f"it left the queue{location} and its log shows no end", JobEnding.LOST


# --- reading the directory


def read_node(directory: Path, name: str, limits: JobLimits) -> NodeState:
    """Return the state of a node of the sweep in `directory`. Raises UsageError for an invalid name."""
    job_directory = node_directory(directory, name)
    tasks = list(read_tasks(job_directory))
    if not tasks:
        return NodeState(result=NodeResult(node=name, outcome=None, reason="not submitted yet"))
    attempts = [
        attempt for batch, index in tasks for attempt in _attempts(directory, job_directory, batch, index)
    ]
    task = _read_task(directory, job_directory, *tasks[-1])
    outcome, reason, ending = classify(task, limits)
    if task.starts:
        attempts[-1] = replace(attempts[-1], ending=ending)
    elif task.submitted and not task.submitted.refused:
        attempts.append(
            JobAttempt(
                job=f"{task.submitted.job}_{tasks[-1][1]}",
                ending=ending,
                code=0,
                text="",
                machine="",
                slot="",
                gpu=None,
                submitted=task.submitted.at,
                started=None,
                ended=None,
            )
        )
    result = NodeResult(node=name, outcome=outcome, reason=clean(reason), attempts=tuple(attempts))
    if reason == HAS_RUN:
        files = task.files
        return NodeState(
            result=result,
            settled=True,
            run=files.run,
            report=files.report,
            evidence=files.evidence,
            machines=files.machines,
        )
    settled = outcome not in (None, Outcome.NOT_TESTED, *RETRIED_OUTCOMES)
    return NodeState(result=result, settled=settled)


def _read_task(directory: Path, job_directory: Path, batch: int, index: int) -> ArrayTask:
    snapshot, states = _queue(directory / QUEUE)
    submitted = read_row(directory / f"batch-{batch}.json", ArraySubmission)
    starts = parse_log(read_report(directory / LOG, f"{batch}-{index}") or b"")
    last = starts[-1] if starts else None
    seen = (last.ended or last.started) if last else submitted.at if submitted else None
    queued = states.get((batch, index))
    if submitted is None and snapshot and queued and queued.state in ALIVE:
        # killed before sbatch's answer was written
        submitted = ArraySubmission(job=f"{batch}", at=snapshot.asked, until=snapshot.asked)
    return ArrayTask(
        submitted=submitted,
        starts=starts,
        queued=queued,
        known=snapshot is not None and (seen is None or snapshot.asked > seen),
        files=_read_files(job_directory / f"{batch}-{last.restart}") if last else TaskOutput(),
    )


def _read_files(job_directory: Path) -> TaskOutput:
    lines = (read_report(job_directory, "out") or b"").decode("utf-8", "replace").strip().splitlines()
    lines = [line for line in lines if not line.startswith("srun: ")]
    run, report, evidence = _read_result(job_directory, RESULT)
    last_line = clean(lines[-1]) if lines else ""
    machines = []
    for rank in range(MOST_MACHINES):
        if (name := read_report(job_directory, f"machine-{rank}")) is not None:
            files = _read_result(job_directory, f"{RESULT}-{rank}" if rank else RESULT)
            machine = clean(name.decode("utf-8", "replace"))
            machines.append(
                MachineFiles(
                    machine=machine,
                    fault=(job_directory / f"fault-{rank}").exists(),
                    run=files[0],
                    report=files[1],
                    evidence=files[2],
                )
            )
    return TaskOutput(
        run=run, report=report, evidence=evidence, last_line=last_line, machines=tuple(machines)
    )


def _read_result(job_directory: Path, name: str) -> tuple[bytes | None, bytes | None, bytes | None]:
    run, report, evidence = (read_report(job_directory, f"{name}/{file}") for file in (RUN, REPORT, EVIDENCE))
    return run, report, evidence


def _attempts(directory: Path, job_directory: Path, batch: int, index: int) -> Iterator[JobAttempt]:
    for start in parse_log(read_report(directory / LOG, f"{batch}-{index}") or b""):
        node, gpu = parse_record(read_report(job_directory, f"{batch}-{start.restart}/record") or b"", index)
        yield JobAttempt(
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


_States = Mapping[tuple[int, int], TaskState]


def _queue(path: Path) -> tuple[QueueSnapshot | None, _States]:
    """Return the last snapshot of the queue, read once for all nodes of a sweep."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None, {}
    return _read_queue(path, (stat.st_mtime_ns, stat.st_ino))


@functools.lru_cache(maxsize=4)
def _read_queue(path: Path, _stamp: tuple[int, int]) -> tuple[QueueSnapshot, _States]:
    snapshot: QueueSnapshot = read_row(path, QueueSnapshot)
    return snapshot, {(task.batch, task.index): task for task in snapshot.tasks}


# --- the report of a run. The job reads NVML, /proc and the device nodes of its machine outside the image, as
# a kit does; slurmctld's record names the machine and the GPU that it gave to the job. If they differ, the
# run is `infrastructure` and says nothing about the image.


def job_report(kit: Mapping[str, Any], expectations: Mapping[str, Any], state: NodeState) -> GpuReport:
    """Return the report of a returned run, by the rules of a kit and the record of slurmctld.

    `kit` and `expectations` are the trusted files with these names. A run is never `verified` without
    evidence of the GPU. Raises StatementError for an invalid run, or for a run of another kit or suite.
    """
    attempt = state.result.attempts[-1]
    if expectations["level"] == NODES:
        report = _report_of_nodes(kit, expectations, state)
    else:
        files = MachineFiles(
            machine=attempt.machine, run=state.run, report=state.report, evidence=state.evidence
        )
        report = _report_of(kit, expectations, files, state.result.node)
    if report.hardware is not None:
        notes = (*report.hardware.notes, *_notes(attempt))
        report = replace(report, hardware=replace(report.hardware, notes=notes))
    if cause := disagreement(attempt, report):
        return replace(report, outcome=Outcome.INFRASTRUCTURE, reason=clean(cause))
    if report.outcome not in PASSES:
        return report
    gap = missing_evidence(report) if attempt.gpu else "Slurm does not show that the job had one GPU"
    if gap:
        reason = f"the suite passed, and nothing shows that it ran on a GPU: {gap}"
        return replace(report, outcome=Outcome.NOT_TESTED, reason=clean(reason))
    return report


def _report_of(
    kit: Mapping[str, Any], expectations: Mapping[str, Any], files: MachineFiles, node: str
) -> GpuReport:
    returned = ReturnedKit(
        kit=b"",
        expectations=json.dumps(expectations).encode(),
        suite=kit["suite"],
        run=files.run or b"",
        evidence=files.evidence,
        report=files.report,
    )
    return verify_returned_kit(returned, kit, node, SLURM)


def _report_of_nodes(kit: Mapping[str, Any], expectations: Mapping[str, Any], state: NodeState) -> GpuReport:
    """Return the report of the first machine, or of one on which it failed, with the GPU of each as a note.

    A failure of the image (`apart`) comes first. Raises StatementError if not all machines returned a result.
    """
    count: int = expectations["nodes"]
    if len(state.machines) != count:
        problem = f"{len(state.machines)} of {count} nodes returned a result"
        raise StatementError(
            "sweep-machine-lost", problem, hint="start a new sweep: imagefactory sweep start"
        )
    reports = {
        row.machine: _report_of(kit, expectations, row, f"{state.result.node}/{row.machine}")
        for row in state.machines
    }
    failed = [name for name, report in reports.items() if report.outcome is not Outcome.TOGETHER]
    failed.sort(key=lambda name: reports[name].outcome is not Outcome.APART)
    name = failed[0] if failed else state.machines[0].machine
    report, reason = reports[name], ""
    notes, uuids = [], set()
    for number, (machine, row) in enumerate(reports.items()):
        if row.device and row.hardware:
            uuids.add(row.device.uuid)
            text = f"{machine} {row.device.uuid} {row.device.capability} {row.hardware.driver}"
            notes.append((f"node-{number}", clean(text)))
        gap = missing_evidence(row) or (
            "" if row.gpus == count else f"it counted {row.gpus} of {count} nodes"
        )
        reason = reason or (gap and f"{machine}: {gap}")
    if report.hardware:
        report = replace(report, hardware=replace(report.hardware, notes=(*report.hardware.notes, *notes)))
    if failed:
        return replace(report, reason=clean(f"{name}: {report.reason}"))
    if len(uuids) != count:
        reason = reason or f"{count} nodes used {len(uuids)} GPUs"
    return replace(report, outcome=Outcome.INFRASTRUCTURE, reason=clean(reason)) if reason else report


def disagreement(attempt: JobAttempt, report: GpuReport) -> str:
    """Return how the machine or GPU of Slurm differs from that of the report, empty if they agree."""
    gpu, device = attempt.gpu, report.device
    if attempt.slot and report.level != NODES and attempt.slot != attempt.machine:
        return f"the job ran on {attempt.machine}, Slurm assigned {attempt.slot}"
    if gpu and device and gpu.capability not in ("", device.capability):
        assigned = f"Slurm assigned a GPU of type {gpu.name} ({gpu.capability})"
        return f"the suite says {device.uuid} has capability {device.capability}, {assigned}"
    return ""


def _notes(attempt: JobAttempt) -> tuple[tuple[str, str], ...]:
    gpu = attempt.gpu
    notes = {
        "job": attempt.job,
        "machine": attempt.machine,
        "slurm-gpu": gpu.id if gpu else "",
        "slurm-type": gpu.name if gpu else "",
    }
    return tuple((name, clean(text)) for name, text in notes.items() if text)
