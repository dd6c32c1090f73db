"""A pool beside HTCondor, as one row of POOLS names it: all that sweeps need of one is here.

Its queue is a file in the sweep's folder. Its jobs run when `run_jobs` is called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from imagefactory.errors import StatementError, UsageError
from imagefactory.model import CommandResult, Outcome
from imagefactory.schedulers.faults import node_directory, write_nodes
from imagefactory.schedulers.pool import (
    Inventory,
    JobAttempt,
    JobEnding,
    JobLimits,
    NodeResult,
    NodeState,
    Pool,
    SweepNode,
    SweepSpec,
)
from imagefactory.verify.outcome import GpuRun, RawResult, outcome_of
from imagefactory.verify.report import GpuIdentity, GpuReport, Hardware, VerifiedImage
from tests.made.sweep import DRIVER, UUID, inventory, pool_gpu, suite_report

BATCH, QUEUE = "jobs.batch", "queue"
THEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class OneRow:
    def require(self) -> str:
        return "1.0"

    def inventory(self, now: datetime) -> Inventory:
        return inventory(pool_gpu("8.0"))

    def submit(self, folder: Path) -> str:
        (folder / QUEUE).touch()
        return "4711"

    def running(self, folder: Path) -> bool:
        return (folder / QUEUE).exists()

    def look(self, folder: Path) -> None:
        """Its jobs' logs tell all."""

    def driven(self) -> frozenset[Path]:
        return frozenset()

    def cancel(self, folder: Path) -> None:
        (folder / QUEUE).unlink(missing_ok=True)

    def run_limit(self, limits: JobLimits, timeout: float, own: Sequence[str]) -> timedelta:
        return limits.run

    def check_folder(self, folder: Path) -> None:
        if " " in str(folder):
            raise UsageError("sweep-folder-invalid", f"{folder} has a space", hint="name another: --dir DIR")

    def write(self, folder: Path, sweep: SweepSpec, texts: Mapping[str, Mapping[str, bytes]]) -> None:
        write_nodes(folder, sweep, texts)
        (folder / BATCH).write_text("".join(f"{node.name}\n" for node in sweep.nodes))

    def is_whole(self, folder: Path) -> bool:
        return (folder / BATCH).exists()

    def read_node(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeState:
        try:
            report = (node_directory(folder, node.name) / "answer").read_bytes()
        except FileNotFoundError:
            return NodeState(result=NodeResult(node=node.name, outcome=None, reason="waiting"))
        attempt = JobAttempt(
            job="4711", ending=JobEnding.EXITED, code=0, text="", machine="one", slot="", gpu=pool_gpu(),
            submitted=THEN, started=THEN, ended=THEN,
        )  # fmt: skip
        result = NodeResult(node=node.name, outcome=None, reason="the suite has run", attempts=(attempt,))
        return NodeState(result=result, settled=True, run=b"0", report=report)

    def read_result(self, folder: Path, node: SweepNode, limits: JobLimits) -> NodeResult:
        found = self.read_node(folder, node, limits)
        outcome = Outcome.VERIFIED if found.run is not None else None
        return NodeResult(
            node=node.name, outcome=outcome, reason=found.result.reason, attempts=found.result.attempts
        )

    def job_report(self, kit: Mapping[str, Any], asked: Mapping[str, Any], found: NodeState) -> GpuReport:
        if found.report is None or json.loads(found.report)["nonce"] != kit["nonce"]:
            raise StatementError("report-mismatch", "it is of another node", hint="make a new sweep")
        gpu = GpuIdentity(name="NVIDIA Test GPU", capability=kit["capability"], uuid=UUID, memory=16 << 30)
        run = GpuRun(
            subject=VerifiedImage(**kit["subject"]),
            suite=kit["suite"],
            asked=asked,
            waive=tuple(kit["waive"]),
            runner="one-row",
            hardware=Hardware(
                kind="one-row", driver=DRIVER, gpus=(gpu,), known=(UUID,), nodes=("/dev/nvidia0",)
            ),
            started=THEN,
            ended=THEN,
        )
        ended = CommandResult(returncode=int(found.run or b"1"), stdout="", stderr="", seconds=1.0)
        return outcome_of(run, RawResult(report=found.report, fault="", completed=ended))


def make_pool(environ: Mapping[str, str]) -> Pool:
    return OneRow()


def run_jobs(folder: Path) -> None:
    for name in (folder / BATCH).read_text().splitlines():
        place = node_directory(folder, name)
        asked = json.loads((place / "expectations.json").read_bytes())
        (place / "answer").write_text(json.dumps(suite_report(asked)))
    (folder / QUEUE).unlink()
