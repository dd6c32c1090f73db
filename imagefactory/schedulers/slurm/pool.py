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

    def run_limit(self, limits: JobLimits, timeout: float, own: Sequence[str]) -> timedelta:
        return run_limit(limits, timeout, time_of(own))

    def check_folder(self, folder: Path) -> None:
        if not str(folder.resolve()).isprintable():
            raise UsageError(
                "sweep-folder-invalid",
                f"Slurm does not support the sweep directory {str(folder)!r}",
                hint="use a directory with only letters, digits, '-', '_' and '.': --dir DIR",
            )

    def write(self, folder: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
        write_sweep_files(folder, sweep, texts)

    def is_whole(self, folder: Path) -> bool:
        return (folder / JOBS).is_file()

    def read_node(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeState:
        return read_node(folder, node.name, limits)

    def read_result(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeResult:
        return with_outcome(folder, read_node(folder, node.name, limits), job_report)

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

    def submit(self, folder: Path) -> str:
        """Submit the jobs of a sweep that are not in the queue. Return the job of the last array.

        If sbatch rejects an array, or no GPU matches, the state of its nodes shows that. Raises UsageError if
        all jobs are in the queue, ToolError if no array is accepted.
        """
        now, folder = datetime.now(UTC), folder.resolve()
        self.look(folder)
        jobs = read_jobs(folder)
        limits = JobLimits(idle=timedelta(seconds=jobs.idle), retries=jobs.retries)
        due = [job for job in jobs.jobs if _needs_submission(read_node(folder, job.node, limits))]
        if not due:
            raise UsageError(
                "sweep-running",
                f"the jobs of the sweep {folder} are already in the queue",
                hint="see imagefactory sweep list, or stop it with imagefactory sweep cancel",
            )
        last, fault = "", None
        faults = parse_faults(read(folder / FAULT_FILES, LARGEST_LOG))
        batches = batches_of(due, self.inventory(now), faults, jobs.patterns)
        lanes: dict[int, tuple[str, int]] = {}
        for number, batch in enumerate(with_job_shares(batches, jobs.at_once), next_number(folder)):
            before, seconds = lanes.get(batch.lane, ("", 0)) if batch.share else ("", 0)
            seconds += waiting(batch, jobs)
            try:
                job = self._submit(folder, number, batch, jobs, (before, seconds))
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
        self, folder: Path, number: int, batch: JobArray, jobs: SlurmSweepJobs, after: tuple[str, int]
    ) -> str:
        """Submit an array and return its job. If no GPU of the cluster matches, record that and return "".

        `after` is the job that must end before, empty for none, and the seconds that the array may wait.
        """
        script, row, now = folder / f"batch-{number}.sh", folder / f"batch-{number}.json", datetime.now(UTC)
        until = now + timedelta(seconds=after[1])
        script.write_text(format_batch(batch, number, jobs, read_options(folder), after), encoding="utf-8")
        note_tasks(folder, number, batch)
        if not batch.options:
            why = f"this cluster has no usable GPU with capability {batch.jobs[0].row}"
            write_row(row, ArraySubmission(job="", at=now, until=until, refused=why, unmatched=True))
            return ""
        try:
            output = run(["sbatch", "--parsable", script.name], self.environ, folder).strip()
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

    def running(self, folder: Path) -> bool:
        """Return whether a job of that directory is in the queue, in any state."""
        return str(folder.resolve()) in submit_directories(self._queue(), NAME)

    def driven(self) -> frozenset[Path]:
        """Return the directories of this user's sweeps that have a job in the queue."""
        return frozenset(Path(folder) for folder in submit_directories(self._queue(), NAME))

    def look(self, folder: Path) -> None:
        """Store the state of its jobs in the queue.

        Raises ToolError, UsageError for a directory without a sweep.
        """
        folder, now = folder.resolve(), datetime.now(UTC)
        tasks = parse_queue(self._queue("--states=all"), NAME, str(folder))
        try:
            write_row(folder / QUEUE, remember(read_row(folder / QUEUE, QueueSnapshot), tasks, now))
        except OSError as error:
            raise UsageError(
                *os_problem("write", folder / QUEUE, error),
                hint="pass the directory of a sweep that you can write to",
            ) from error

    def cancel(self, folder: Path) -> None:
        """Remove the jobs of that directory."""
        folder = folder.resolve()
        rows = (line.partition("|") for line in self._queue(columns=f"%F|{SQUEUE}").splitlines())
        jobs = {job for job, _, row in rows if str(folder) in submit_directories(row, NAME)}
        if jobs:
            run(["scancel", *sorted(jobs)], self.environ)
            self.look(folder)

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
