"""A sweep as Slurm takes it: arrays of jobs, one for each kind of GPU and size, and the files they share.

DIR/jobs.json                     what the jobs are to ask for; written last, so with it the folder is whole
DIR/run.py, kit/, suite/          a kit without its question; task.sh runs it on a machine
DIR/options                       what the settings add to sbatch's options, a line each
DIR/batch-N.sh                    an array: which nodes of the sweep its tasks are
DIR/batch-N.json                  when it was submitted and until when it may wait, or why sbatch refused it
DIR/log/N-I                       what the I-th task of that array prints, and slurmstepd of it
DIR/queue.json                    what the queue said last
DIR/faults                        which machines failed which jobs, a line each
DIR/nodes/<node>/                 kit.json, expectations.json and image, tasks (N I, a line each), and
                                  N-RESTART/ for each time that it ran, N-done after the last

Jobs see this folder: it lies where all machines of the cluster see it. Source: Slurm's manual, sbatch(1) and
"Job Array Support".
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from imagefactory.errors import StatementError, UsageError, os_problem
from imagefactory.fs import replace_text
from imagefactory.gpu.values import row_of
from imagefactory.schedulers.faults import NODES, checked_name, node_directory, write_nodes
from imagefactory.schedulers.htcondor.node.post import NodeFault, bad_machines
from imagefactory.schedulers.pool import (
    MOST_NODES,
    ImageKind,
    Inventory,
    JobLimits,
    PoolGpu,
    PoolMachine,
    SweepSpec,
)
from imagefactory.schedulers.sizes import MB
from imagefactory.schedulers.slurm.nodes import FEATURES
from imagefactory.serialize import MaxRows, format_document, parse_document
from imagefactory.settings.own_commands import TIME, is_machine_selected, time_of
from imagefactory.verify.kits import CARRIED, PROGRAM
from imagefactory.verify.kits import KIT_PROGRAMS as KIT_FOLDER
from imagefactory.verify.nonces import LIFETIME
from imagefactory.verify.suite_files import read_suite, write_suite

# --- How Slurm is asked for GPUs of some kinds: by type, by features of nodes, or without other nodes. Pure
# It can never be asked for what a GPU can do. Source: Slurm's manual, sbatch(1) and "Generic Resource (GRES)
# Scheduling".


_FEATURE = re.compile(r"[A-Za-z0-9_.+:-]+")
OptionsAndGpus = tuple[tuple[str, ...], tuple[PoolGpu, ...]]
"""Options of sbatch, and the cluster's GPUs that they reach."""


def request_gpu_count(
    inventory: Inventory, fits: Callable[[PoolGpu], bool], count: int = 1
) -> OptionsAndGpus | None:
    """What to ask for so that a job gets `count` GPUs that fit, and no others.

    By type where one is all there is, by features where some have just these nodes, else without the other
    nodes. None where no node has so many; no options where each that has them has other GPUs too.
    """
    found = [(machine, [gpu for gpu in machine.gpus if fits(gpu)]) for machine in inventory.machines]
    reached = [(machine, gpus) for machine, gpus in found if len(gpus) >= count]
    if not reached:
        return None
    types = {gpu.name for _, gpus in reached for gpu in gpus}
    if len(types) == 1 and all(types):
        every = tuple(gpu for _, gpus in reached for gpu in gpus)
        return (f"--gres=gpu:{types.pop()}:{count}",), every
    whole = [machine for machine, gpus in reached if len(gpus) == len(machine.gpus)]
    if not whole:
        return (), ()
    others = [machine for machine in inventory.machines if machine not in whole]
    narrow: tuple[str, ...] = ()
    if others and (features := _features(whole, others)):
        narrow = (f"--constraint={'|'.join(features)}",)
    elif others:
        narrow = (f"--exclude={','.join(machine.name for machine in others)}",)
    return (f"--gres=gpu:{count}", *narrow), tuple(gpu for machine in whole for gpu in machine.gpus)


def request_any_gpu(inventory: Inventory, fits: Callable[[PoolGpu], bool]) -> tuple[str, ...]:
    """The same for one GPU, whichever: by the commonest type where nodes mix them. Empty for none."""
    asked = request_gpu_count(inventory, fits)
    if asked is None or asked[0]:
        return asked[0] if asked else ()
    types = Counter(gpu.name for gpu in inventory.gpus if gpu.name and fits(gpu))
    return (f"--gres=gpu:{max(sorted(types), key=lambda name: types[name])}:1",) if types else ()


def _features(right: Sequence[PoolMachine], others: Sequence[PoolMachine]) -> tuple[str, ...]:
    """The fewest features that all of the nodes to the `right` have one of, and none of the others has; empty
    where there are none."""
    wrong = {name for machine in others for name in _features_of(machine)}
    chosen: list[str] = []
    left = {machine.name: _features_of(machine) - wrong for machine in right}
    while left:
        counted = sorted({name for names in left.values() for name in names})
        best = max(counted, key=lambda name: sum(name in names for names in left.values()), default="")
        if not best:
            return ()
        chosen.append(best)
        left = {node: names for node, names in left.items() if best not in names}
    return tuple(sorted(chosen))


def _features_of(machine: PoolMachine) -> set[str]:
    told = str(machine.attributes.get(FEATURES, "")).split(",")
    return {name for name in told if _FEATURE.fullmatch(name)}


FORMAT = 1
JOBS, QUEUE, TASK, TASKS, IMAGE, LOG = "jobs.json", "queue.json", "task.sh", "tasks", "image", "log"
OPTIONS = "options"
NODE_PROGRAMS = Path(__file__).parent / "node"
NAME = "imagefactory"
EXCLUDE = "--exclude="
MOST_TASKS = 1000
"""Of one array; Slurm's own default is 1001."""
FETCH = timedelta(hours=1)
"""How much longer than its suite may run a job is given to get its image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodeJob:
    """What the job of a node asks for. `memory` is in MB, `seconds` how long it may run; `part`, `first` and
    `only` as the node has them."""

    node: str
    capability: str
    memory: int
    seconds: int
    part: str
    processor: str
    first: str = ""
    only: bool = False

    @property
    def row(self) -> str:
        return row_of(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSweepJobs:
    """All of a sweep. `idle` is how many seconds a job may wait, `retries` how often one is tried again.

    `patterns` choose machines, `at_once` is how many jobs may be started at once, 0 for all.
    """

    idle: int
    retries: int
    jobs: Annotated[tuple[SlurmNodeJob, ...], MaxRows(MOST_NODES)]
    patterns: tuple[str, ...] = ()
    at_once: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySubmission:
    """What became of an array: `refused` is why there is none, and `unmatched` that no GPU would do."""

    job: str
    at: datetime
    until: datetime
    refused: str = ""
    unmatched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArray:
    """An array of jobs that ask alike, by `options` of sbatch; none where no GPU of the cluster fits.

    `machines` are those with a GPU that fits, and may be used, `excluded` those that may not; `busy`: none of
    these GPUs is free. `share` is how many of its jobs may run at once, 0 for all; of batches in one `lane`
    each waits for the one before.
    """

    options: tuple[str, ...]
    jobs: tuple[SlurmNodeJob, ...]
    machines: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    busy: bool = False
    share: int = 0
    lane: int = 0

    @property
    def seconds(self) -> int:
        return max(job.seconds for job in self.jobs)


# --- deciding --------------------------------------------------------------------------------------


def run_limit(limits: JobLimits, timeout: float, own: timedelta | None = None) -> timedelta:
    """The time of the settings, else the suite's and that in which the image comes; never longer than the run
    limit.
    """
    return min(limits.run, own or timedelta(seconds=timeout) + FETCH)


def jobs_of(sweep: SweepSpec) -> SlurmSweepJobs:
    """A job is as long as the settings say, else as its suite may be and its image takes to come; never
    longer than the run limit.
    """
    limits, own = sweep.limits, time_of(sweep.own)
    return SlurmSweepJobs(
        idle=max(1, round(limits.idle.total_seconds())),
        retries=limits.retries,
        jobs=tuple(
            SlurmNodeJob(
                node=checked_name(node.name),
                capability=node.capability,
                memory=max(1, -(-node.memory // MB)),
                seconds=round(run_limit(limits, node.timeout, own).total_seconds()),
                part=node.part,
                processor=node.processor or "amd64",
                first=node.first,
                only=node.only,
            )
            for node in sweep.nodes
        ),
        patterns=sweep.patterns,
        at_once=sweep.at_once,
    )


def batches_of(
    jobs: Sequence[SlurmNodeJob],
    inventory: Inventory,
    faults: Sequence[NodeFault] = (),
    patterns: Sequence[str] = (),
) -> tuple[JobArray, ...]:
    """The arrays to submit: jobs that ask for the same GPUs and memory share one.

    Machines that the patterns do not choose get none, nor those with another driver than comes first; nor
    machines that failed two nodes of the sweep, by its `faults`, while others are left.
    """
    kinds: dict[tuple[object, ...], JobArray] = {}
    groups: dict[tuple[JobArray, int], list[SlurmNodeJob]] = {}
    for job in jobs:
        kind = (job.row, job.processor, job.first, job.only)
        if kind not in kinds:
            kinds[kind] = _array_request(job, inventory, faults, patterns)
        groups.setdefault((kinds[kind], job.memory), []).append(job)
    return tuple(
        replace(batch, jobs=tuple(group[start : start + MOST_TASKS]))
        for (batch, _), group in groups.items()
        for start in range(0, len(group), MOST_TASKS)
    )


def _array_request(
    job: SlurmNodeJob, inventory: Inventory, faults: Sequence[NodeFault], patterns: Sequence[str]
) -> JobArray:
    """A batch without jobs, that asks for what `job` needs.

    Slurm has no wishes: where a GPU with the driver that comes first is free now, jobs start on no other.
    What fails there is queued again for all of `machines`.
    """
    fitting = [one for one in inventory.machines if any(fits(job, gpu) for gpu in one.gpus)]
    chosen = [one for one in fitting if is_machine_selected(one.name, patterns)]
    oldest = [one for one in chosen if any(fits(job, gpu) and gpu.driver == job.first for gpu in one.gpus)]
    allowed = [one.name for one in (oldest if job.only else chosen)]
    known = {one.name for one in inventory.machines}  # sbatch refuses other names
    bad = [name for name in bad_machines(list(faults), allowed) if name in known]
    free = {one.name for one in fitting if any(fits(job, gpu) and gpu.free for gpu in one.gpus)}
    preferred = [one.name for one in oldest if one.name not in bad] if job.first else []
    first = preferred if free & {*preferred} else allowed

    def ask(names: Sequence[str]) -> tuple[str, ...]:
        places = {id(gpu) for one in fitting if one.name in names for gpu in one.gpus}
        return request_any_gpu(inventory, lambda gpu: id(gpu) in places and fits(job, gpu))

    options = ask(allowed)
    if _unexcluded(ask(first)) != _unexcluded(options):  # what is queued again asks for the same GPUs
        first = allowed
    others = [one.name for one in fitting if one.name not in first]
    options = _without(options, [*others, *bad])
    never = [name for name in excluded(options) if name not in allowed]
    busy = not free & {*allowed}
    return JobArray(options=options, jobs=(), machines=tuple(allowed), excluded=tuple(never), busy=busy)


def throttled(batches: Sequence[JobArray], at_once: int) -> tuple[JobArray, ...]:
    """The batches with their share of the jobs at once; where there are more of them than that, some wait for
    others, those first whose GPUs are free. Pure.
    """
    if not at_once:
        return tuple(batches)
    batches = sorted(batches, key=lambda batch: batch.busy)
    base, more = divmod(at_once, max(1, len(batches)))
    by_size = sorted(range(len(batches)), key=lambda number: -len(batches[number].jobs))
    shares = {number: base + (place < more) for place, number in enumerate(by_size)}
    return tuple(
        replace(batch, share=max(1, shares[number]), lane=number % at_once if not base else number)
        for number, batch in enumerate(batches)
    )


def _without(options: tuple[str, ...], machines: Sequence[str]) -> tuple[str, ...]:
    """The options, and that no job runs on these machines: sbatch takes `--exclude` once."""
    if not options or not machines:
        return options
    return (*_unexcluded(options), f"{EXCLUDE}{','.join(sorted({*excluded(options), *machines}))}")


def _unexcluded(options: Iterable[str]) -> tuple[str, ...]:
    return tuple(one for one in options if not one.startswith(EXCLUDE))


def excluded(options: Iterable[str]) -> tuple[str, ...]:
    """The machines that options of sbatch exclude."""
    return tuple(
        word for one in options if one.startswith(EXCLUDE) for word in one.removeprefix(EXCLUDE).split(",")
    )


def fits(job: SlurmNodeJob, gpu: PoolGpu) -> bool:
    """Whether a GPU will do, as far as the cluster tells: a machine that names no processor is any."""
    return gpu.row == job.row and gpu.host in ("", job.processor)


def format_batch(
    batch: JobArray,
    number: int,
    jobs: SlurmSweepJobs,
    own: Sequence[str] = (),
    after: tuple[str, int] = ("", 0),
) -> str:
    """The text of batch-N.sh, with `own` options of the settings. A part of a minute is a minute to Slurm.

    `after` is the job that ends before this starts, empty for none, and the seconds that it may wait in all.
    """
    before, seconds = after[0], after[1] or waiting(batch, jobs)
    throttle = f"%{batch.share}" if batch.share else ""
    options = (
        f"--job-name={NAME}-{number}",
        f"--array=0-{len(batch.jobs) - 1}{throttle}",
        f"--output={LOG}/{number}-%a",
        "--open-mode=append",
        "--requeue",
        "--nodes=1",
        "--ntasks=1",
        f"--mem={batch.jobs[0].memory}M",
        f"--time={max(1, -(-batch.seconds // 60))}",
        f"--deadline=now+{seconds}",
        *batch.options,
        *((f"--dependency=afterany:{before}",) if before else ()),
        *(option for option in own if not option.startswith(f"{TIME}=")),
    )
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "nodes=("]
    lines += [f"    {shlex.quote(job.node)}" for job in batch.jobs]
    machines, others = shlex.quote(" ".join(batch.machines)), shlex.quote(" ".join(batch.excluded))
    task = f'exec bash {TASK} {number} "${{nodes[SLURM_ARRAY_TASK_ID]}}" {jobs.retries} {machines} {others}'
    lines += [")", task, ""]
    return "\n".join(lines)


def waiting(batch: JobArray, jobs: SlurmSweepJobs) -> int:
    """Seconds after which a job that has not started cannot end in time any more: Slurm removes it then.

    Jobs that wait for others of the batch have their time too, as long as their nonces hold.
    """
    length = 60 * max(1, -(-batch.seconds // 60))
    rounds = -(-len(batch.jobs) // batch.share) if batch.share else 1
    return min(jobs.idle + rounds * length, max(jobs.idle + length, round(LIFETIME.total_seconds()) - length))


# --- files -----------------------------------------------------------------------------------------


def write_sweep_files(folder: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
    """Writes all of a sweep but sweep.json. May be called again for a folder that is not whole.

    Raises UsageError where the folder cannot be written.
    """
    try:
        (folder / LOG).mkdir(parents=True, exist_ok=True)
        write_suite(folder / "suite", read_suite())
        write_suite(folder / "kit", {name: (KIT_FOLDER / name).read_bytes() for name in CARRIED})
        (folder / PROGRAM).write_bytes((KIT_FOLDER / PROGRAM).read_bytes())
        (folder / TASK).write_bytes((NODE_PROGRAMS / TASK).read_bytes())
        (folder / OPTIONS).write_text("".join(f"{one}\n" for one in sweep.own), encoding="ascii")
        write_nodes(folder, sweep, texts)
        for node in sweep.nodes:
            of_registry = node.image.kind in (ImageKind.DOCKER, ImageKind.ORAS)
            named = node.image.address.partition("://")[2] if of_registry else node.image.address
            (node_directory(folder, node.name) / IMAGE).write_text(f"{named}\n", encoding="utf-8")
        write_row(folder / JOBS, jobs_of(sweep))
    except OSError as error:
        raise UsageError(
            *os_problem("write", error.filename or folder, error), hint="use another directory: --dir DIR"
        ) from error


def write_row(path: Path, value: object) -> None:
    """Raises OSError."""
    replace_text(path, json.dumps(format_document(value, FORMAT), indent=1, sort_keys=True) + "\n")


def read_row(path: Path, kind: Any, upgraded: Callable[[Any], Any] = lambda value: value) -> Any:
    """The value of a file, None where there is none. Raises UsageError for what is none of these."""
    try:
        return parse_document(upgraded(json.loads(path.read_bytes())), kind, FORMAT, str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="check its permissions") from error
    except (ValueError, RecursionError, StatementError) as error:
        problem = (
            error.message
            if isinstance(error, StatementError)
            else f"cannot read {path}: it is not valid JSON"
        )
        raise UsageError(
            "sweep-file-invalid", problem, hint="create a new sweep: this file was changed"
        ) from error


def read_jobs(folder: Path) -> SlurmSweepJobs:
    """jobs.json, with the fields that it lacks where an older version wrote it. Raises UsageError."""

    def upgraded(value: Any) -> Any:
        try:
            jobs = [{"first": "", "only": False, **job} for job in value["jobs"]]
            for job in jobs:
                slices = job.pop("mig", False)
                job.setdefault("part", "mig" if slices is True else "")
            return {"patterns": [], "at_once": 0, **value, "jobs": jobs}
        except (KeyError, TypeError, AttributeError):
            return value

    found = read_row(folder / JOBS, SlurmSweepJobs, upgraded)
    assert isinstance(found, SlurmSweepJobs)
    return found


def read_options(folder: Path) -> tuple[str, ...]:
    """What the settings added when the sweep was made; nothing where an older version made it."""
    try:
        return tuple((folder / OPTIONS).read_text(encoding="ascii").splitlines())
    except FileNotFoundError:
        return ()


def next_number(folder: Path) -> int:
    """The number of the array that comes next."""
    return 1 + max((int(path.stem.partition("-")[2]) for path in folder.glob("batch-*.sh")), default=0)


def note_tasks(folder: Path, number: int, batch: JobArray) -> None:
    """Tells each node which task of which array it is, before that array is submitted. Raises OSError."""
    for index, job in enumerate(batch.jobs):
        with (folder / NODES / job.node / TASKS).open("a", encoding="ascii") as file:
            file.write(f"{number} {index}\n")
            file.flush()
            os.fsync(file.fileno())


def read_tasks(place: Path) -> Iterator[tuple[int, int]]:
    """The tasks that a node has been, the oldest first."""
    try:
        lines = (place / TASKS).read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        number, _, index = line.partition(" ")
        yield int(number), int(index)
