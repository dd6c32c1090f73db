"""Slurm through its commands: scontrol, sbatch, squeue, scancel.

The jobs of a sweep are found by their submit directory and their name, so no state is stored between calls.
Slurm forgets a job minutes after its end: the logs of the jobs decide, and `look` stores what only the queue
shows. Account, partition and similar options are the setting `sbatch-options`; the variables of sbatch
(SBATCH_ACCOUNT, SBATCH_PARTITION) override it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from imagefactory.errors import ToolError, UsageError, os_problem
from imagefactory.model import Outcome
from imagefactory.schedulers.faults import with_outcome
from imagefactory.schedulers.htcondor.node.post import FAULT_FILES, LARGEST_LOG, parse_faults, read
from imagefactory.schedulers.pool import (
    RETRIED_OUTCOMES,
    Inventory,
    JobLimits,
    NodeResult,
    NodeState,
    Pool,
    SweepNode,
    SweepSpec,
)
from imagefactory.schedulers.slurm.batch import (
    JOBS,
    NAME,
    QUEUE,
    ArraySubmission,
    JobArray,
    SlurmSweepJobs,
    batches_of,
    format_batch,
    next_number,
    note_tasks,
    read_jobs,
    read_options,
    read_row,
    run_limit,
    waiting,
    with_job_shares,
    write_row,
    write_sweep_files,
)
from imagefactory.schedulers.slurm.nodes import fill, query_inventory, read_probed, run
from imagefactory.schedulers.slurm.results import (
    SQUEUE,
    QueueSnapshot,
    job_report,
    parse_queue,
    read_node,
    remember,
    submit_directories,
)
from imagefactory.settings.own_commands import time_of
from imagefactory.verify.outcome import clean
from imagefactory.verify.report import GpuReport

_JOB = re.compile(r"([0-9]{1,10})(?:;\S+)?")
_VERSION = re.compile(r"slurm\S* ([0-9]{1,4}(?:\.[0-9]{1,4}){1,3})")


class SlurmSweepFiles:
    """The files of a sweep on Slurm: what jobs read and write in its directory. It does not need a queue."""

    def run_limit(self, limits: JobLimits, timeout: float, own_options: Sequence[str]) -> timedelta:
        return run_limit(limits, timeout, time_of(own_options))

    def check_folder(self, directory: Path) -> None:
        if not str(directory.resolve()).isprintable():
            raise UsageError(
                "sweep-folder-invalid",
                f"Slurm does not support the sweep directory {str(directory)!r}",
                hint="use a directory with only letters, digits, '-', '_' and '.': --dir DIR",
            )

    def write(self, directory: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
        write_sweep_files(directory, sweep, texts)

    def is_whole(self, directory: Path) -> bool:
        return (directory / JOBS).is_file()

    def read_node(self, directory: Path, node: SweepNode, limits: JobLimits) -> NodeState:
        return read_node(directory, node.name, limits)

    def read_result(self, directory: Path, node: SweepNode, limits: JobLimits) -> NodeResult:
        return with_outcome(directory, read_node(directory, node.name, limits), job_report)

    def job_report(
        self, kit: Mapping[str, Any], expectations: Mapping[str, Any], state: NodeState
    ) -> GpuReport:
        return job_report(kit, expectations, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPool(SlurmSweepFiles):
    """The Slurm cluster in the configuration of this machine.

    `environ` is passed to its commands (SLURM_CONF, PATH).
    """

    environ: Mapping[str, str]

    def require(self) -> str:
        """Return the version of Slurm, such as `24.11.5`.

        Raises ToolError if its commands are missing or fail.
        """
        output = run(["sbatch", "--version"], self.environ)
        version = _VERSION.match(output)
        if not version:
            raise ToolError(
                "slurm-output-invalid",
                f"sbatch printed no version: '{clean(output)[:60]}'",
                hint="check which sbatch is first on PATH",
            )
        return version[1]

    def inventory(self, now: datetime) -> Inventory:
        """Return the nodes with GPUs, with values from their types and earlier probes. Raises ToolError."""
        return fill(query_inventory(self.environ, now), read_probed(self.environ))

    def submit(self, directory: Path) -> str:
        """Submit the jobs of a sweep that are not in the queue. Return the job of the last array.

        If sbatch rejects an array, or no GPU matches, the state of its nodes shows that. Raises UsageError if
        all jobs are in the queue, ToolError if no array is accepted.
        """
        now, directory = datetime.now(UTC), directory.resolve()
        self.look(directory)
        jobs = read_jobs(directory)
        limits = JobLimits(idle=timedelta(seconds=jobs.idle), retries=jobs.retries)
        due = [job for job in jobs.jobs if _needs_submission(read_node(directory, job.node, limits))]
        if not due:
            raise UsageError(
                "sweep-running",
                f"the jobs of the sweep {directory} are already in the queue",
                hint="see imagefactory sweep list, or stop it with imagefactory sweep cancel",
            )
        last, fault = "", None
        faults = parse_faults(read(directory / FAULT_FILES, LARGEST_LOG))
        batches = batches_of(due, self.inventory(now), faults, jobs.patterns, jobs.nodes_each)
        lanes: dict[int, tuple[str, int]] = {}
        for number, batch in enumerate(with_job_shares(batches, jobs.at_once), next_number(directory)):
            before, seconds = lanes.get(batch.lane, ("", 0)) if batch.share else ("", 0)
            seconds += waiting(batch, jobs)
            try:
                job = self._submit(directory, number, batch, jobs, (before, seconds))
                lanes[batch.lane] = (job or before, seconds)
                last = job or last
            except ToolError as error:
                fault = fault or error
        if not last:
            raise fault or ToolError(
                "cluster-gpu-unknown",
                "no known GPU of this cluster has a requested capability",
                hint="query the GPUs with imagefactory gpus --probe 5m, then create a new sweep",
            )
        return last

    def _submit(
        self, directory: Path, number: int, batch: JobArray, jobs: SlurmSweepJobs, after: tuple[str, int]
    ) -> str:
        """Submit an array and return its job. If no GPU of the cluster matches, record that and return "".

        `after` is the job that must end before, empty for none, and the seconds that the array may wait.
        """
        script, row, now = (
            directory / f"batch-{number}.sh",
            directory / f"batch-{number}.json",
            datetime.now(UTC),
        )
        until = now + timedelta(seconds=after[1])
        script.write_text(format_batch(batch, number, jobs, read_options(directory), after), encoding="utf-8")
        note_tasks(directory, number, batch)
        if not batch.options:
            reason = f"this cluster has no usable GPU with capability {batch.jobs[0].row}"
            write_row(row, ArraySubmission(job="", at=now, until=until, refused=reason, unmatched=True))
            return ""
        try:
            output = run(["sbatch", "--parsable", script.name], self.environ, directory).strip()
            if not (job := _JOB.fullmatch(output)):
                raise ToolError(
                    "slurm-output-invalid",
                    f"sbatch printed no job number: {clean(output)[-200:]}",
                    hint="see whether the jobs are queued: squeue --me; if not, submit the sweep again",
                )
        except ToolError as error:
            write_row(row, ArraySubmission(job="", at=now, until=until, refused=clean(error.message)))
            raise
        write_row(row, ArraySubmission(job=job[1], at=now, until=until))
        return job[1]

    def running(self, directory: Path) -> bool:
        """Return whether a job of that directory is in the queue, in any state."""
        return str(directory.resolve()) in submit_directories(self._queue(), NAME)

    def driven(self) -> frozenset[Path]:
        """Return the directories of this user's sweeps that have a job in the queue."""
        return frozenset(Path(directory) for directory in submit_directories(self._queue(), NAME))

    def look(self, directory: Path) -> None:
        """Store the state of its jobs in the queue.

        Raises ToolError, UsageError for a directory without a sweep.
        """
        directory, now = directory.resolve(), datetime.now(UTC)
        tasks = parse_queue(self._queue("--states=all"), NAME, str(directory))
        try:
            write_row(directory / QUEUE, remember(read_row(directory / QUEUE, QueueSnapshot), tasks, now))
        except OSError as error:
            raise UsageError(
                *os_problem("write", directory / QUEUE, error),
                hint="pass the directory of a sweep that you can write to",
            ) from error

    def cancel(self, directory: Path) -> None:
        """Remove the jobs of that directory."""
        directory = directory.resolve()
        rows = (line.partition("|") for line in self._queue(columns=f"%F|{SQUEUE}").splitlines())
        jobs = {job for job, _, row in rows if str(directory) in submit_directories(row, NAME)}
        if jobs:
            run(["scancel", *sorted(jobs)], self.environ)
            self.look(directory)

    def _queue(self, *states: str, columns: str = SQUEUE) -> str:
        return run(["squeue", "--me", "--noheader", "--array", *states, "--format", columns], self.environ)


def make_pool(environ: Mapping[str, str]) -> Pool:
    """Return the pool of this row of POOLS."""
    return SlurmPool(environ=environ)


def _needs_submission(state: NodeState) -> bool:
    """Return whether a node is neither finished nor waiting nor running."""
    outcome = state.result.outcome
    if state.run is not None or outcome not in (None, Outcome.NOT_TESTED, *RETRIED_OUTCOMES):
        return False
    return outcome is not None or not state.result.attempts
