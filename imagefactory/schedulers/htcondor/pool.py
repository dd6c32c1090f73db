"""HTCondor through the commands of the site: condor_status, condor_submit_dag, condor_q, condor_rm,
condor_submit.

The Python bindings are not used: commands match the pool and the configuration of the site, a package from an
index may not. The DAGMan job of a sweep is found by the directory in which it was submitted (its `Iwd`), so
no state is stored between calls.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from imagefactory.errors import ToolError, UsageError, os_reason
from imagefactory.schedulers.faults import with_outcome
from imagefactory.schedulers.htcondor.ads import Ad, parse_ads, parse_status
from imagefactory.schedulers.htcondor.dag import DAG, check_dag_directory, write_sweep
from imagefactory.schedulers.htcondor.results import JobOutput, job_report, parse_job_run, read_node
from imagefactory.schedulers.pool import (
    Inventory,
    JobLimits,
    NodeResult,
    NodeState,
    Pool,
    SweepNode,
    SweepSpec,
)
from imagefactory.verify.kit.program import RUN
from imagefactory.verify.outcome import clean
from imagefactory.verify.report import GpuReport

GPU_SLOTS = "TotalGPUs > 0 && DynamicSlot =!= true"
SCHEDULER_UNIVERSE = 7
LEAVING = (3, 4)
"""JobStatus of removed and completed jobs that are still in the queue."""
DIRECTORY_PATTERN = r"/[A-Za-z0-9_./@%+=:,~-]{1,1000}"
"""A path that needs no quotes in an expression, a submit file and a DAG."""
TIMEOUT = 120.0
"""The time limit of one command in seconds. The time limits of a busy schedd are shorter."""
TAIL = 6
AWAY = (
    "run this on an access point of the pool, or use an inventory that was saved there: imagefactory gpus "
    "-o FILE, then --inventory FILE"
)


class HTCondorSweepFiles:
    """The files of a sweep on HTCondor: what jobs read and write in its directory.

    It does not need a queue.
    """

    def run_limit(self, limits: JobLimits, timeout: float, own_options: Sequence[str]) -> timedelta:  # noqa: ARG002
        return limits.run

    def check_folder(self, directory: Path) -> None:
        check_dag_directory(directory)

    def write(self, directory: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
        write_sweep(directory, sweep, texts)

    def is_whole(self, directory: Path) -> bool:
        return (directory / DAG).is_file()

    def read_node(self, directory: Path, node: SweepNode, limits: JobLimits) -> NodeState:
        return read_node(directory, node.name, limits)

    def read_result(self, directory: Path, node: SweepNode, limits: JobLimits) -> NodeResult:
        return with_outcome(directory, read_node(directory, node.name, limits), self.job_report)

    def job_report(
        self, kit: Mapping[str, Any], expectations: Mapping[str, Any], state: NodeState
    ) -> GpuReport:
        run = parse_job_run(state.run or b"", f"{state.result.node}/{RUN}")
        output = JobOutput(run=run, report=state.report, attempt=state.result.attempts[-1])
        return job_report(kit, expectations, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class HTCondor(HTCondorSweepFiles):
    """The HTCondor pool in the configuration of this machine.

    `environ` is passed to its commands (CONDOR_CONFIG, PATH).
    """

    environ: Mapping[str, str]
    timeout: float = TIMEOUT

    def require(self) -> str:
        """Return the version of HTCondor, such as `23.9.6`.

        Raises ToolError if its commands are missing or fail.
        """
        output = self._run(["condor_version"])
        version = re.search(r"CondorVersion: ([0-9]{1,4}(?:\.[0-9]{1,4}){1,3})\b", output)
        if not version:
            raise ToolError(
                "condor-output-invalid",
                f"condor_version printed no version: '{clean(output)[:60]}'",
                hint="check which condor_version is first on PATH",
            )
        return version[1]

    def inventory(self, now: datetime) -> Inventory:
        """Return the GPUs known to the collector of the pool. Raises ToolError if it does not answer."""
        return parse_ads(parse_status(self._run(["condor_status", "-const", GPU_SLOTS, "-json"])), now)

    def submit(self, directory: Path) -> str:
        """Submit the DAG of a sweep and return the job of DAGMan, such as `12.0`.

        A rescue DAG is continued. If an earlier DAGMan ended silently, the new one recovers from the logs of
        its jobs. Raises UsageError if a DAGMan already runs the sweep, ToolError if the command fails.
        """
        directory = _checked(directory)
        if jobs := self.jobs(directory):
            raise UsageError(
                "sweep-running",
                f"the sweep {directory} already runs as job {jobs[0]}",
                hint="see imagefactory sweep list, or stop it with imagefactory sweep cancel",
            )
        name = ["-batch-name", f"imagefactory+{directory.name}"]  # what condor_q shows it as
        argv = ["condor_submit_dag", *name, *_resumed_dag(directory), DAG]
        output = self._run(argv, directory)
        match = re.search(r"submitted to cluster ([0-9]{1,10})", output)
        if not match:
            raise ToolError(
                "condor-output-invalid",
                f"condor_submit_dag printed no job number: {clean(output)[-200:]}",
                hint=f"read {directory}/{DAG}.dagman.out, and submit the sweep again",
            )
        return f"{match[1]}.0"

    def jobs(self, directory: Path) -> tuple[str, ...]:
        """Return the DAGMan jobs in the queue that were submitted in this directory."""
        return tuple(self._states(directory))

    def running(self, directory: Path) -> bool:
        """Return whether a DAGMan job of that directory is in the queue, in any state."""
        return bool(self.jobs(directory))

    def look(self, directory: Path) -> None:
        """Do nothing: the schedd writes everything to the logs of the jobs."""

    def driven(self) -> frozenset[Path]:
        """Return the directories of this user's DAGMans that are not removed or completed."""
        return frozenset(
            Path(ad["Iwd"])
            for ad in self._dagmans("Iwd,JobStatus")
            if isinstance(ad.get("Iwd"), str) and ad.get("JobStatus") not in LEAVING
        )

    def cancel(self, directory: Path) -> None:
        """Remove the DAGMan job of that directory, if there is one.

        It removes its jobs and writes a rescue DAG.

        Errors of condor_rm about jobs that are being removed, or that end in the meantime, are ignored.
        """
        if jobs := self._staying(directory):
            try:
                self._run(["condor_rm", *jobs])
            except ToolError:
                if self._staying(directory):
                    raise

    def _staying(self, directory: Path) -> list[str]:
        return [job for job, state in self._states(directory).items() if state not in LEAVING]

    def _states(self, directory: Path) -> dict[str, object]:
        """Return JobStatus of the DAGMan jobs in the queue that were submitted in this directory."""
        return {
            f"{ad['ClusterId']}.{ad['ProcId']}": ad.get("JobStatus")
            for ad in self._dagmans("ClusterId,ProcId,JobStatus", f' && Iwd == "{_checked(directory)}"')
            if isinstance(ad.get("ClusterId"), int) and isinstance(ad.get("ProcId"), int)
        }

    def _dagmans(self, attributes: str, condition: str = "") -> Iterator[Ad]:
        expression = f"JobUniverse == {SCHEDULER_UNIVERSE}{condition}"
        return parse_status(self._run(["condor_q", "-const", expression, "-json", "-attributes", attributes]))

    def dry_run(self, file: Path) -> str:
        """Return the ads that `condor_submit -dry-run` creates from a submit file. Raises ToolError."""
        return self._run(["condor_submit", "-dry-run", "-", file.name], file.resolve().parent)

    def _run(self, argv: Sequence[str], directory: Path | None = None) -> str:
        """Return the output of a command. Raises ToolError if it is missing, takes too long or fails."""
        try:
            ended = subprocess.run(
                argv,
                cwd=directory,
                env={**self.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout,
                check=False,
            )
        except FileNotFoundError as error:
            if directory is not None and not directory.is_dir():
                raise UsageError(
                    "sweep-not-found",
                    f"{directory} does not exist",
                    hint="pass the directory of a sweep; see imagefactory sweep list",
                ) from error
            raise ToolError(
                "tool-missing", f"{argv[0]} is not installed on this machine", hint=AWAY
            ) from error
        except subprocess.TimeoutExpired as error:
            raise ToolError(
                "condor-timeout",
                f"{argv[0]} did not answer within {self.timeout:.0f} s",
                hint="run condor_status to check whether the daemons of the pool answer",
            ) from error
        except OSError as error:
            raise ToolError(
                "tool-missing", f"cannot start {argv[0]}: {os_reason(error)}", hint=AWAY
            ) from error
        output = ended.stdout.decode("utf-8", "replace")
        if ended.returncode:
            text = ended.stderr.decode("utf-8", "replace") or output
            lines = [clean(line) for line in text.splitlines() if line.strip()]
            raise ToolError(
                "condor-command-failed",
                f"{argv[0]} failed (exit code {ended.returncode}): "
                + (" / ".join(lines[-TAIL:])[:600] or "it printed nothing"),
                hint=_hint(argv[0], text),
            )
        return output


def make_pool(environ: Mapping[str, str]) -> Pool:
    """Return the pool of this row of POOLS."""
    return HTCondor(environ=environ)


def _checked(directory: Path) -> Path:
    """Return the directory as the job of DAGMan writes it. Raises UsageError for unsupported characters."""
    path = directory.resolve()
    if not re.fullmatch(DIRECTORY_PATTERN, str(path), re.ASCII):
        raise UsageError(
            "sweep-folder-invalid",
            f"HTCondor does not support the sweep directory {clean(str(path))}",
            hint="use only letters, digits, '-', '_' and '.' in --dir",
        )
    return path


def _resumed_dag(directory: Path) -> list[str]:
    """Return the options with which condor_submit_dag continues a sweep.

    A rescue DAG needs no options. Without a rescue DAG, DAGMan ended silently: the next one first reads the
    log of its jobs and then submits more. (Tested with 23.9: killed, and removed with -forcex.)
    """
    if any(directory.glob(f"{DAG}.rescue[0-9][0-9][0-9]")) or not (directory / f"{DAG}.condor.sub").exists():
        return []
    return ["-update_submit", *(["-DoRecovery"] if (directory / f"{DAG}.nodes.log").exists() else [])]


def _hint(program: str, text: str) -> str:
    if "Cannot allocate a cluster id" in text:
        return "submit as another user than root, or ask for permission to submit on this access point"
    if re.search(r"[Ff]ailed to connect|[Cc]an't (find|connect)|communication|unreachable", text):
        return f"the pool does not answer; {AWAY}"
    return f"run {program} and check its output"
