"""What Slurm and its jobs left: a task's log, slurmctld's record of its GPU, what the queue said. Pure.

The log is what task.sh printed, with what slurmstepd wrote between when it ended a job. The record is what
`scontrol show job --detail` printed on the machine when the job began. Forms as of Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

from imagefactory.serialize import Most
from imagefactory.schedulers.pool import MOST_NODES, PoolGpu
from imagefactory.pools.slurm.nodes import capability_of
from imagefactory.verify.suite_report import clean

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

_SAID = re.compile(r"imagefactory: (start|end) (.+)")
_STEPD = r"slurmstepd\S*: error: "
_ENDED = re.compile(rf"{_STEPD}\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+?(?: DUE TO (.+?))? \*\*\*")
_MEMORY = re.compile(rf"{_STEPD}.*(?:oom.?kill|memory limit)", re.IGNORECASE)
_NODE = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES(?:_IDX)?=(\S*)")
_GPUS = re.compile(r"gpu(?::([A-Za-z][A-Za-z0-9_.+-]*))?(?::[0-9]+)?\(IDX:([0-9,-]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
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
class Told:
    """What squeue said of the task `index` of the array `batch`."""

    batch: int
    index: int
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The tasks of a sweep that the queue knew when it was asked, and those that it had known to be over."""

    asked: datetime
    tasks: Annotated[tuple[Told, ...], Most(8 * MOST_NODES)]


def parse_log(data: bytes) -> tuple[Start, ...]:
    """The times that a task ran, the oldest first; what is no word of these is passed over.

    After an answer it is over, whatever Slurm starts again: a person queued it, or a node was away.
    """
    found: list[Start] = []
    for line in data.decode("utf-8", "replace").splitlines():
        if said := _SAID.fullmatch(line):
            words = said[2].split(" ")
            if found and found[-1].code in ANSWERS and not found[-1].again:
                break
            if said[1] == "start" and len(words) == 4 and _is_number(words[1]) and _is_number(words[3]):
                job, restart, machine, at = words
                found.append(
                    Start(job=clean(job), restart=int(restart), machine=clean(machine), started=_time(at))
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


def parse_queue(text: str, name: str, folder: str) -> tuple[Told, ...]:
    """The tasks of the arrays `<name>-N` that were submitted in `folder`, as squeue printed them."""
    found = []
    for line in text.splitlines():
        index, _, rest = line.partition("|")
        state, _, rest = rest.partition("|")
        reason, _, rest = rest.partition("|")
        job, _, place = rest.partition("|")
        head, _, number = job.rpartition("-")
        if (head, place) == (name, folder) and _is_number(number) and _is_number(index):
            found.append(Told(batch=int(number), index=int(index), state=clean(state), reason=clean(reason)))
    return tuple(found)


def folders_of(text: str, name: str) -> frozenset[str]:
    """The folders in which arrays of that name were submitted."""
    rows = (line.split("|", 4) for line in text.splitlines())
    return frozenset(row[4] for row in rows if len(row) == 5 and row[3].rpartition("-")[0] == name)


def remember(before: Queue | None, told: tuple[Told, ...], asked: datetime) -> Queue:
    """What the queue says now, and of tasks that it has forgotten how they were seen to end."""
    now = {(one.batch, one.index): one for one in told}
    old = {(one.batch, one.index): one for one in before.tasks} if before else {}
    kept = {key: one for key, one in old.items() if one.state not in ALIVE}
    return Queue(asked=asked, tasks=tuple({**kept, **now}[key] for key in sorted({**kept, **now})))
