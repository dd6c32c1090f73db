"""HTCondor by the site's own commands: condor_status, condor_submit_dag, condor_q, condor_rm, condor_submit.

Never through its Python bindings: the commands fit the site's pool and its configuration, a package from an
index may not. A sweep's DAGMan is found by the folder in which it was submitted (its `Iwd`), so nothing must
be remembered from one call to the next.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from imagefactory.errors import ToolError, UsageError
from imagefactory.schedulers.faults import with_outcome
from imagefactory.schedulers.htcondor.ads import parse_ads, parse_status
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
"""JobStatus of what was removed and what is completed, while it is still in the queue."""
DIRECTORY_PATTERN = r"/[A-Za-z0-9_./@%+=:,~-]{1,1000}"
"""What may stand in an expression, a submit file and a DAG without being quoted."""
TIMEOUT = 120.0
"""Seconds for one command. A schedd that is busy answers within its own timeouts, which are shorter."""
TAIL = 6
AWAY = (
    "run this on an access point of the pool, or use an inventory that was saved there: imagefactory gpus "
    "-o FILE, then --inventory FILE"
)


class HTCondorSweepFiles:
    """The half of the pool that asks nobody: what its jobs read and write in a sweep's folder."""

    def run_limit(self, limits: JobLimits, timeout: float, own: Sequence[str]) -> timedelta:  # noqa: ARG002
        return limits.run

    def check_folder(self, folder: Path) -> None:
        check_dag_directory(folder)

    def write(self, folder: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
        write_sweep(folder, sweep, texts)

    def is_whole(self, folder: Path) -> bool:
        return (folder / DAG).is_file()

    def read_node(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeState:
        return read_node(folder, node.name, limits)

    def read_result(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeResult:
        return with_outcome(folder, read_node(folder, node.name, limits), self.job_report)

    def job_report(self, kit: Mapping[str, Any], asked: Mapping[str, Any], found: NodeState) -> GpuReport:
        run = parse_job_run(found.run or b"", f"{found.result.node}/{RUN}")
        answer = JobOutput(run=run, report=found.report, attempt=found.result.attempts[-1])
        return job_report(kit, asked, answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class HTCondor(HTCondorSweepFiles):
    """The pool of this machine's configuration. `environ` is what its commands see (CONDOR_CONFIG, PATH)."""

    environ: Mapping[str, str]
    timeout: float = TIMEOUT

    def require(self) -> str:
        """HTCondor's version: `23.9.6`. Raises ToolError where its commands are missing or fail."""
        said = self._run(["condor_version"])
        found = re.search(r"CondorVersion: ([0-9]{1,4}(?:\.[0-9]{1,4}){1,3})\b", said)
        if not found:
            raise ToolError(
                "condor-output-invalid",
                f"condor_version printed no version: '{clean(said)[:60]}'",
                hint="check which condor_version is first on PATH",
            )
        return found[1]

    def inventory(self, now: datetime) -> Inventory:
        """The GPUs that the pool's collector knows. Raises ToolError where it cannot be asked."""
        return parse_ads(parse_status(self._run(["condor_status", "-const", GPU_SLOTS, "-json"])), now)

    def submit(self, folder: Path) -> str:
        """Submits the DAG of a sweep's folder; DAGMan's job, `12.0`.

        A rescue DAG that an earlier DAGMan left there is gone on with, and one that ended without a word is
        recovered from its jobs' logs. Raises UsageError where one is at work already, ToolError.
        """
        folder = _checked(folder)
        if at_work := self.jobs(folder):
            raise UsageError(
                "sweep-running",
                f"job {at_work[0]} already runs the sweep {folder}",
                hint="see imagefactory sweep list, or stop it with imagefactory sweep cancel",
            )
        name = ["-batch-name", f"imagefactory+{folder.name}"]  # what condor_q shows it as
        argv = ["condor_submit_dag", *name, *_resumed_dag(folder), DAG]
        said = self._run(argv, folder)
        match = re.search(r"submitted to cluster ([0-9]{1,10})", said)
        if not match:
            raise ToolError(
                "condor-output-invalid",
                f"condor_submit_dag printed no job number: {clean(said)[-200:]}",
                hint=f"see {folder}/{DAG}.dagman.out",
            )
        return f"{match[1]}.0"

    def jobs(self, folder: Path) -> tuple[str, ...]:
        """The DAGMan jobs in the queue that were submitted in this folder."""
        return tuple(self._states(folder))

    def running(self, folder: Path) -> bool:
        """Whether a DAGMan of that folder is in the queue, be it held or idle."""
        return bool(self.jobs(folder))

    def look(self, folder: Path) -> None:
        """The schedd writes all of it into the jobs' logs."""

    def driven(self) -> frozenset[Path]:
        """The folders of this user's DAGMans, but for those that were removed or are done."""
        wanted = f"JobUniverse == {SCHEDULER_UNIVERSE}"
        said = self._run(["condor_q", "-const", wanted, "-json", "-attributes", "Iwd,JobStatus"])
        return frozenset(
            Path(ad["Iwd"])
            for ad in parse_status(said)
            if isinstance(ad.get("Iwd"), str) and ad.get("JobStatus") not in LEAVING
        )

    def cancel(self, folder: Path) -> None:
        """Removes the DAGMan of that folder, if any: it removes its jobs and leaves a rescue DAG.

        condor_rm refuses what is on its way out already, and what ends meanwhile: there is nothing to do.
        """
        if found := self._staying(folder):
            try:
                self._run(["condor_rm", *found])
            except ToolError:
                if self._staying(folder):
                    raise

    def _staying(self, folder: Path) -> list[str]:
        return [job for job, state in self._states(folder).items() if state not in LEAVING]

    def _states(self, folder: Path) -> dict[str, object]:
        """JobStatus of the DAGMan jobs in the queue that were submitted in this folder."""
        wanted = f'JobUniverse == {SCHEDULER_UNIVERSE} && Iwd == "{_checked(folder)}"'
        said = self._run(["condor_q", "-const", wanted, "-json", "-attributes", "ClusterId,ProcId,JobStatus"])
        return {
            f"{ad['ClusterId']}.{ad['ProcId']}": ad.get("JobStatus")
            for ad in parse_status(said)
            if isinstance(ad.get("ClusterId"), int) and isinstance(ad.get("ProcId"), int)
        }

    def dry_run(self, file: Path) -> str:
        """The ads that `condor_submit -dry-run` makes of a submit file. Raises ToolError."""
        return self._run(["condor_submit", "-dry-run", "-", file.name], file.resolve().parent)

    def _run(self, argv: Sequence[str], folder: Path | None = None) -> str:
        """What it printed. Raises ToolError where it is missing, takes too long or fails."""
        try:
            done = subprocess.run(
                argv,
                cwd=folder,
                env={**self.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout,
                check=False,
            )
        except FileNotFoundError as error:
            if folder is not None and not folder.is_dir():
                raise UsageError(
                    "sweep-not-found",
                    f"{folder} does not exist",
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
            raise ToolError("tool-missing", f"cannot start {argv[0]}: {error.strerror}", hint=AWAY) from error
        said = done.stdout.decode("utf-8", "replace")
        if done.returncode:
            words = done.stderr.decode("utf-8", "replace") or said
            raise ToolError(
                "condor-command-failed",
                f"{argv[0]} failed (exit code {done.returncode}): {_tail(words)}",
                hint=_hint(argv[0], words),
            )
        return said


def make_pool(environ: Mapping[str, str]) -> Pool:
    """The row of POOLS."""
    return HTCondor(environ=environ)


def _checked(folder: Path) -> Path:
    """The folder as DAGMan's job names it. Raises UsageError for a name that an expression cannot hold."""
    path = folder.resolve()
    if not re.fullmatch(DIRECTORY_PATTERN, str(path), re.ASCII):
        raise UsageError(
            "sweep-folder-invalid",
            f"{clean(str(path))} cannot be the directory of a sweep in HTCondor",
            hint="use only letters, digits, '-', '_' and '.' in --dir",
        )
    return path


def _resumed_dag(folder: Path) -> list[str]:
    """The options that make condor_submit_dag go on with what lies there.

    A rescue DAG is taken without any. Where there is none, DAGMan ended without a word: the next one catches
    up from the log of its jobs before it submits more. (Tried with 23.9: killed, and removed with -forcex.)
    """
    if any(folder.glob(f"{DAG}.rescue[0-9][0-9][0-9]")) or not (folder / f"{DAG}.condor.sub").exists():
        return []
    return ["-update_submit", *(["-DoRecovery"] if (folder / f"{DAG}.nodes.log").exists() else [])]


def _tail(words: str) -> str:
    lines = [clean(line) for line in words.splitlines() if line.strip()]
    return " / ".join(lines[-TAIL:])[:600] or "it printed nothing"


def _hint(program: str, words: str) -> str:
    if "Cannot allocate a cluster id" in words:
        return "submit as another user than root, or ask for permission to submit on this access point"
    if re.search(r"[Ff]ailed to connect|[Cc]an't (find|connect)|communication|unreachable", words):
        return f"the pool does not answer; {AWAY}"
    return f"run {program} and check its output"
