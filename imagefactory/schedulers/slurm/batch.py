"""Write a sweep for Slurm: job arrays, one for each type of GPU and memory, and the files that they share.

    DIR/jobs.json             the requests of the jobs; written last, so its presence shows completeness
    DIR/run.py, kit/, suite/  a kit without kit.json; task.sh runs it on a machine
    DIR/runner                the program that starts the image
    DIR/options               additional sbatch options from the settings, one on each line
    DIR/batch-N.sh            an array, with the nodes of its tasks
    DIR/batch-N.json          the time of its submission and how long it may wait, or why sbatch rejected it
    DIR/log/N-I               the output of task I of that array, with messages of slurmstepd
    DIR/queue.json            the last snapshot of the queue
    DIR/faults                the machines that failed jobs, one on each line
    DIR/nodes/<node>/         kit.json, expectations.json and image, tasks (N I, one on each line), and
                              N-RESTART/ for each run, N-done after the last. A job on several nodes of the
                              cluster has machine-R and, but for the first, result-R of each

All machines of the cluster share this directory. GPUs are requested by type, by features of nodes, or by
excluding nodes, because Slurm cannot select by capability. Source: Slurm manual, sbatch(1), "Job Array
Support" and "Generic Resource (GRES) Scheduling".
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
from imagefactory.gpu.values import capability_row
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

_FEATURE = re.compile(r"[A-Za-z0-9_.+:-]+")
OptionsAndGpus = tuple[tuple[str, ...], tuple[PoolGpu, ...]]
"""Options of sbatch, and the GPUs of the cluster that a job with them can get."""


def request_gpu_count(
    inventory: Inventory, fits: Callable[[PoolGpu], bool], count: int = 1
) -> OptionsAndGpus | None:
    """Return the options that give a job `count` matching GPUs and no others.

    They select by type if all matching GPUs have one type, or by features that only their nodes have, or
    exclude the other nodes. Return None if no node has `count` GPUs. Return no options if each such node also
    has other GPUs.
    """
    fitting = [(machine, [gpu for gpu in machine.gpus if fits(gpu)]) for machine in inventory.machines]
    reached = [(machine, gpus) for machine, gpus in fitting if len(gpus) >= count]
    if not reached:
        return None
    types = {gpu.name for _, gpus in reached for gpu in gpus}
    if len(types) == 1 and all(types):
        return (f"--gres=gpu:{types.pop()}:{count}",), tuple(gpu for _, gpus in reached for gpu in gpus)
    whole = [machine for machine, gpus in reached if len(gpus) == len(machine.gpus)]
    if not whole:
        return (), ()
    others = [machine for machine in inventory.machines if machine not in whole]
    options = [f"--gres=gpu:{count}"]
    if others and (features := _features(whole, others)):
        options.append(f"--constraint={'|'.join(features)}")
    elif others:
        options.append(f"{EXCLUDE}{','.join(machine.name for machine in others)}")
    return tuple(options), tuple(gpu for machine in whole for gpu in machine.gpus)


def request_any_gpu(inventory: Inventory, fits: Callable[[PoolGpu], bool]) -> tuple[str, ...]:
    """Return the options for one matching GPU. If nodes mix types, the most common one is requested."""
    request = request_gpu_count(inventory, fits)
    if request is None or request[0]:
        return request[0] if request else ()
    types = Counter(gpu.name for gpu in inventory.gpus if gpu.name and fits(gpu))
    return (f"--gres=gpu:{max(sorted(types), key=lambda name: types[name])}:1",) if types else ()


def _features(machines: Sequence[PoolMachine], others: Sequence[PoolMachine]) -> tuple[str, ...]:
    """Return the fewest features so that each machine has one of them and no other machine has any; or
    none.
    """
    wrong = {name for machine in others for name in _features_of(machine)}
    chosen: list[str] = []
    open_nodes = {machine.name: _features_of(machine) - wrong for machine in machines}
    while open_nodes:
        names = sorted({name for names in open_nodes.values() for name in names})
        best = max(names, key=lambda name: sum(name in row for row in open_nodes.values()), default="")
        if not best:
            return ()
        chosen.append(best)
        open_nodes = {node: row for node, row in open_nodes.items() if best not in row}
    return tuple(sorted(chosen))


def _features_of(machine: PoolMachine) -> set[str]:
    names = str(machine.attributes.get(FEATURES, "")).split(",")
    return {name for name in names if _FEATURE.fullmatch(name)}


FORMAT = 1
JOBS, QUEUE, TASK, TASKS, IMAGE, LOG = "jobs.json", "queue.json", "task.sh", "tasks", "image", "log"
OPTIONS, RUNNER = "options", "runner"
NODE_PROGRAMS = Path(__file__).parent / "node"
NAME = "imagefactory"
EXCLUDE = "--exclude="
MOST_TASKS = 1000
"""The limit of tasks in one array. The default limit of Slurm is 1001."""
FETCH = timedelta(hours=1)
"""The time of a job to get its image, in addition to the time of its suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodeJob:
    """The request of a node's job: `memory` in MB, and the time limit in `seconds`.

    `part`, `first` and `only` are values of the node.
    """

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
        return capability_row(self.capability, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSweepJobs:
    """All jobs of a sweep. A job may wait `idle` seconds and is retried `retries` times.

    `patterns` select machines. `at_once` limits the number of running jobs, 0 for no limit. Each job has
    `nodes_each` nodes of the cluster.
    """

    idle: int
    retries: int
    jobs: Annotated[tuple[SlurmNodeJob, ...], MaxRows(MOST_NODES)]
    patterns: tuple[str, ...] = ()
    at_once: int = 0
    nodes_each: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySubmission:
    """The submission of an array.

    `refused` is why sbatch rejected it, `unmatched` means that no GPU matches.
    """

    job: str
    at: datetime
    until: datetime
    refused: str = ""
    unmatched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArray:
    """An array of jobs with the same sbatch `options`. It has no options if no GPU of the cluster matches.

    `machines` have a matching GPU and may be used, `excluded` machines may not. `busy` means that no matching
    GPU is free. At most `share` of its jobs run at the same time, 0 for no limit. Batches in the same `lane`
    run one after another.
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


def run_limit(limits: JobLimits, timeout: float, own_limit: timedelta | None = None) -> timedelta:
    """Return the time in the settings, or else the time of the suite and its image, at most the run limit."""
    return min(limits.run, own_limit or timedelta(seconds=timeout) + FETCH)


def jobs_of(sweep: SweepSpec) -> SlurmSweepJobs:
    """Return the jobs of a sweep, with the time limits of `run_limit`."""
    limits, own_limit = sweep.limits, time_of(sweep.own)
    return SlurmSweepJobs(
        idle=max(1, round(limits.idle.total_seconds())),
        retries=limits.retries,
        jobs=tuple(
            SlurmNodeJob(
                node=checked_name(node.name),
                capability=node.capability,
                memory=max(1, -(-node.memory // MB)),
                seconds=round(run_limit(limits, node.timeout, own_limit).total_seconds()),
                part=node.part,
                processor=node.processor or "amd64",
                first=node.first,
                only=node.only,
            )
            for node in sweep.nodes
        ),
        patterns=sweep.patterns,
        at_once=sweep.at_once,
        nodes_each=sweep.nodes_each,
    )


def batches_of(
    jobs: Sequence[SlurmNodeJob],
    inventory: Inventory,
    faults: Sequence[NodeFault] = (),
    patterns: Sequence[str] = (),
    nodes_each: int = 1,
) -> tuple[JobArray, ...]:
    """Return the arrays to submit. Jobs that request the same GPUs and memory share an array.

    These machines are excluded while others remain: machines not selected by the patterns, machines with
    another driver than the preferred one, and machines that failed two nodes of the sweep (`faults`). Each
    job needs `nodes_each` machines.
    """
    requests: dict[tuple[object, ...], JobArray] = {}
    groups: dict[tuple[JobArray, int], list[SlurmNodeJob]] = {}
    for job in jobs:
        key = (job.row, job.processor, job.first, job.only)
        if key not in requests:
            requests[key] = _array_request(job, inventory, faults, patterns, nodes_each)
        groups.setdefault((requests[key], job.memory), []).append(job)
    return tuple(
        replace(batch, jobs=tuple(group[start : start + MOST_TASKS]))
        for (batch, _), group in groups.items()
        for start in range(0, len(group), MOST_TASKS)
    )


def _array_request(
    job: SlurmNodeJob,
    inventory: Inventory,
    faults: Sequence[NodeFault],
    patterns: Sequence[str],
    nodes_each: int,
) -> JobArray:
    """Return an array without tasks that requests what `job` needs.

    Slurm has no preferences. If a GPU with the preferred driver is free now, jobs start only on such GPUs.
    Jobs that fail there are queued again for all of `machines`.
    """
    fitting = [machine for machine in inventory.machines if any(fits(job, gpu) for gpu in machine.gpus)]
    selected = [machine for machine in fitting if is_machine_selected(machine.name, patterns)]
    oldest = [
        machine
        for machine in selected
        if any(fits(job, gpu) and gpu.driver == job.first for gpu in machine.gpus)
    ]
    allowed = [machine.name for machine in (oldest if job.only else selected)]
    known = {machine.name for machine in inventory.machines}  # sbatch rejects other names
    bad = [name for name in bad_machines(list(faults), allowed) if name in known]
    if len({*allowed} - {*bad}) < nodes_each:
        bad = []
    free = {machine.name for machine in fitting if any(fits(job, gpu) and gpu.free for gpu in machine.gpus)}
    preferred = [machine.name for machine in oldest if machine.name not in bad] if job.first else []
    first = preferred if free & {*preferred} else allowed

    def request(names: Sequence[str]) -> tuple[str, ...]:
        gpus = {id(gpu) for machine in fitting if machine.name in names for gpu in machine.gpus}
        return request_any_gpu(inventory, lambda gpu: id(gpu) in gpus and fits(job, gpu))

    options = request(allowed)
    if _unexcluded(request(first)) != _unexcluded(options):  # a requeued job keeps its request
        first = allowed
    others = [machine.name for machine in fitting if machine.name not in first]
    options = _without(options, [*others, *bad])
    return JobArray(
        options=options,
        jobs=(),
        machines=tuple(allowed),
        excluded=tuple(name for name in excluded(options) if name not in allowed),
        busy=not free & {*allowed},
    )


def with_job_shares(batches: Sequence[JobArray], at_once: int) -> tuple[JobArray, ...]:
    """Return the batches, each with its share of the limit of running jobs. Pure.

    If there are more batches than that limit, some wait for others. Batches with free GPUs come first.
    """
    if not at_once:
        return tuple(batches)
    batches = sorted(batches, key=lambda batch: batch.busy)
    base, more = divmod(at_once, max(1, len(batches)))
    by_size = sorted(range(len(batches)), key=lambda number: -len(batches[number].jobs))
    shares = {number: base + (order < more) for order, number in enumerate(by_size)}
    return tuple(
        replace(batch, share=max(1, shares[number]), lane=number % at_once if not base else number)
        for number, batch in enumerate(batches)
    )


def _without(options: tuple[str, ...], machines: Sequence[str]) -> tuple[str, ...]:
    """Return the options with these machines excluded: sbatch accepts `--exclude` once."""
    if not options or not machines:
        return options
    return (*_unexcluded(options), f"{EXCLUDE}{','.join(sorted({*excluded(options), *machines}))}")


def _unexcluded(options: Iterable[str]) -> tuple[str, ...]:
    return tuple(option for option in options if not option.startswith(EXCLUDE))


def excluded(options: Iterable[str]) -> tuple[str, ...]:
    """Return the machines that options of sbatch exclude."""
    lists = (option.removeprefix(EXCLUDE) for option in options if option.startswith(EXCLUDE))
    return tuple(name for names in lists for name in names.split(","))


def fits(job: SlurmNodeJob, gpu: PoolGpu) -> bool:
    """Return whether a GPU matches the job, as far as the cluster shows.

    An unknown processor matches any job.
    """
    return gpu.row == job.row and gpu.host in ("", job.processor)


def format_batch(
    batch: JobArray,
    number: int,
    jobs: SlurmSweepJobs,
    own_options: Sequence[str] = (),
    after: tuple[str, int] = ("", 0),
) -> str:
    """Return the text of batch-N.sh.

    `own_options` are sbatch options of the settings. Slurm rounds times up to minutes.

    `after` is the job that must end before this one starts, empty for none, and the seconds that it may wait.
    """
    before, seconds = after[0], after[1] or waiting(batch, jobs)
    throttle = f"%{batch.share}" if batch.share else ""
    options = (
        f"--job-name={NAME}-{number}",
        f"--array=0-{len(batch.jobs) - 1}{throttle}",
        f"--output={LOG}/{number}-%a",
        "--open-mode=append",
        "--requeue",
        f"--nodes={jobs.nodes_each}",
        f"--ntasks={jobs.nodes_each}",
        *(("--ntasks-per-node=1",) if jobs.nodes_each > 1 else ()),
        f"--mem={batch.jobs[0].memory}M",
        f"--time={max(1, -(-batch.seconds // 60))}",
        f"--deadline=now+{seconds}",
        *batch.options,
        *((f"--dependency=afterany:{before}",) if before else ()),
        *(option for option in own_options if not option.startswith(f"{TIME}=")),
    )
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "nodes=("]
    lines += [f"    {shlex.quote(job.node)}" for job in batch.jobs]
    machines, others = shlex.quote(" ".join(batch.machines)), shlex.quote(" ".join(batch.excluded))
    task = f'exec bash {TASK} {number} "${{nodes[SLURM_ARRAY_TASK_ID]}}" {jobs.retries} {machines} {others}'
    lines += [")", task, ""]
    return "\n".join(lines)


def waiting(batch: JobArray, jobs: SlurmSweepJobs) -> int:
    """Return the seconds after which Slurm removes a job that has not started, since it could not end in
    time.

    They include the time of the jobs before it, and end before its nonces expire.
    """
    length = 60 * max(1, -(-batch.seconds // 60))
    rounds = -(-len(batch.jobs) // batch.share) if batch.share else 1
    return min(jobs.idle + rounds * length, max(jobs.idle + length, round(LIFETIME.total_seconds()) - length))


def write_sweep_files(directory: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write all files of a sweep except sweep.json, also into an incomplete directory. Raises UsageError."""
    try:
        (directory / LOG).mkdir(parents=True, exist_ok=True)
        write_suite(directory / "suite", read_suite())
        write_suite(directory / "kit", {name: (KIT_FOLDER / name).read_bytes() for name in CARRIED})
        (directory / PROGRAM).write_bytes((KIT_FOLDER / PROGRAM).read_bytes())
        (directory / TASK).write_bytes((NODE_PROGRAMS / TASK).read_bytes())
        (directory / OPTIONS).write_text("".join(f"{option}\n" for option in sweep.own), encoding="ascii")
        (directory / RUNNER).write_text(f"{sweep.container}\n", encoding="ascii")
        write_nodes(directory, sweep, texts)
        for node in sweep.nodes:
            image = node.image.address
            if node.image.kind in (ImageKind.DOCKER, ImageKind.ORAS):
                image = image.partition("://")[2]
            (node_directory(directory, node.name) / IMAGE).write_text(f"{image}\n", encoding="utf-8")
        write_row(directory / JOBS, jobs_of(sweep))
    except OSError as error:
        raise UsageError(
            *os_problem("write", error.filename or directory, error), hint="use another directory: --dir DIR"
        ) from error


def write_row(path: Path, value: object) -> None:
    """Write a value as JSON. Raises OSError."""
    replace_text(path, json.dumps(format_document(value, FORMAT), indent=1, sort_keys=True) + "\n")


def read_row(path: Path, kind: Any) -> Any:
    """Return the value in a file, None if the file does not exist. Raises UsageError if it is invalid."""
    try:
        return parse_document(json.loads(path.read_bytes()), kind, FORMAT, str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="check its permissions") from error
    except (ValueError, RecursionError, StatementError) as error:
        problem = f"cannot read {path}: it is not valid JSON"
        if isinstance(error, StatementError):
            problem = error.message
        raise UsageError(
            "sweep-file-invalid", problem, hint="start a new sweep: imagefactory sweep start"
        ) from error


def read_jobs(directory: Path) -> SlurmSweepJobs:
    """Return jobs.json. Raises UsageError."""
    jobs = read_row(directory / JOBS, SlurmSweepJobs)
    assert isinstance(jobs, SlurmSweepJobs)
    return jobs


def read_options(directory: Path) -> tuple[str, ...]:
    """Return the sbatch options of the settings at the creation of the sweep."""
    return tuple((directory / OPTIONS).read_text(encoding="ascii").splitlines())


def next_number(directory: Path) -> int:
    """Return the number of the next array."""
    return 1 + max((int(path.stem.partition("-")[2]) for path in directory.glob("batch-*.sh")), default=0)


def note_tasks(directory: Path, number: int, batch: JobArray) -> None:
    """Record the task number of each node before the array is submitted. Raises OSError."""
    for index, job in enumerate(batch.jobs):
        with (directory / NODES / job.node / TASKS).open("a", encoding="ascii") as file:
            file.write(f"{number} {index}\n")
            file.flush()
            os.fsync(file.fileno())


def read_tasks(job_directory: Path) -> Iterator[tuple[int, int]]:
    """Yield the tasks of a node, the oldest first."""
    try:
        lines = (job_directory / TASKS).read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        number, _, index = line.partition(" ")
        yield int(number), int(index)
