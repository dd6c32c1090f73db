"""task.sh as Slurm starts it: what it queues again, and where not. scontrol only notes its arguments."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from imagefactory.model import Outcome
from imagefactory.schedulers.htcondor.node.post import parse_faults
from imagefactory.schedulers.pool import JobLimits
from imagefactory.schedulers.slurm.batch import NODE_PROGRAMS, ArraySubmission, write_row
from imagefactory.schedulers.slurm.results import parse_log, read_node
from tests.made.slurm import run_json

SCONTROL = '#!/bin/sh\necho "$*" >>"$CALLS"\n'
PYTHON = """\
#!/bin/sh
[ "$1" != -c ] || exit 0
[ "$4 $5" = "--runner pyxis" ] || exit 2
place=$RUNS/$SLURMD_NODENAME
[ ! -d "$place/result" ] || cp -R "$place/result" "${3%/run.py}/result"
echo "the last word"
echo "device: not-run - 'driver' failed before it"
echo "bring /tmp/kit back to where it was made"
exit "$(cat "$place/code")"
"""
NO_GPU = json.dumps({"checks": [{"name": "device", "outcome": "no-gpu"}]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A sweep's folder, and what its kit says on each machine: `python3` there plays it."""

    path: Path

    def kit_on(self, machine: str, code: int, report: str = "{}") -> None:
        place = self.path / "runs" / machine
        (place / "result").mkdir(parents=True)
        (place / "code").write_text(str(code))
        if code in (0, 9):
            (place / "result/run.json").write_bytes(run_json())
            (place / "result/report.json").write_text(report)
        else:
            (place / "result").rmdir()

    def runs(
        self,
        machine: str,
        restart: int = 0,
        *,
        node: str = "tiny",
        machines: str = "h1 h2",
        excluded: str = "",
    ) -> list[str]:
        """A task on a machine; what it told scontrol beside showing its job."""
        calls = self.path / "calls"
        calls.write_text("")
        environ = {
            **{"PATH": f"{self.path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls)},
            **{"RUNS": str(self.path / "runs"), "SLURMD_NODENAME": machine, "SLURM_JOB_ID": "77"},
            **{"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": str(restart)},
        }
        done = subprocess.run(
            ["bash", "task.sh", "1", "tiny", "2", machines, excluded],
            cwd=self.path,
            env=environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        with (self.path / "log/1-0").open("a") as file:
            file.write(done.stdout)
        return [line for line in calls.read_text().splitlines() if not line.startswith("show ")]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    for name in ("bin", "log", "kit", "suite", *(f"nodes/{node}" for node in ("tiny", "other"))):
        (tmp_path / name).mkdir(parents=True)
    for name, text in (("scontrol", SCONTROL), ("python3", PYTHON)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "task.sh").write_bytes((NODE_PROGRAMS / "task.sh").read_bytes())
    (tmp_path / "run.py").write_text("")
    (tmp_path / "runner").write_text("pyxis\n")
    for node in ("tiny", "other"):
        for name, text in (("image", "docker://x"), ("kit.json", "{}"), ("expectations.json", "{}")):
            (tmp_path / "nodes" / node / name).write_text(text)
        (tmp_path / "nodes" / node / "tasks").write_text("1 0\n")
    return Folder(path=tmp_path)


def test_a_gpu_that_is_not_there_is_looked_for_on_another_machine(folder: Folder) -> None:
    folder.kit_on("h1", 9, NO_GPU)
    folder.kit_on("h2", 0)
    assert folder.runs("h1") == ["requeue 77_0", "update JobId=77_0 ExcNodeList=h1"]
    (fault,) = parse_faults((folder.path / "faults").read_bytes())
    assert (fault.machine, fault.node, fault.job) == ("h1", "tiny", "77_0-0")
    assert fault.why == "no usable GPU: the last word"
    write_row(folder.path / "batch-1.json", _submitted())
    found = read_node(folder.path, "tiny", JobLimits())
    assert (found.result.outcome, found.run) == (None, None)
    assert found.result.reason == "to be retried: no usable GPU on h1"
    assert folder.runs("h2", 1) == []
    assert read_node(folder.path, "tiny", JobLimits()).run is not None


def _submitted() -> ArraySubmission:
    (start, *_) = parse_log(b"imagefactory: start 77_0 0 h1 1764110000")
    return ArraySubmission(job="77", at=start.started, until=start.started + timedelta(days=1))


@pytest.mark.parametrize("machines", ["h1", ""])
def test_the_only_machine_of_its_kind_gives_the_answer(folder: Folder, machines: str) -> None:
    folder.kit_on("h1", 9, NO_GPU)
    assert folder.runs("h1", machines=machines) == []
    assert "end 9" in (folder.path / "log/1-0").read_text()


def test_an_answer_on_the_image_is_one_anywhere(folder: Folder) -> None:
    folder.kit_on("h1", 9)
    assert folder.runs("h1") == []
    assert not (folder.path / "faults").exists()


def test_what_did_not_start_is_queued_again_as_often_as_it_may(folder: Folder) -> None:
    folder.kit_on("h1", 6)
    folder.kit_on("h2", 6)
    assert folder.runs("h1") == ["requeue 77_0", "update JobId=77_0 ExcNodeList=h1"]
    assert folder.runs("h2", 1) == ["requeue 77_0"]  # no other is left
    assert folder.runs("h1", 2) == []
    (*_, last) = parse_log((folder.path / "log/1-0").read_bytes())
    assert (last.code, last.again) == (6, False)


def test_an_image_that_cannot_be_had_is_no_machines_fault(folder: Folder) -> None:
    folder.kit_on("h1", 8)
    assert folder.runs("h1")[0] == "requeue 77_0"
    assert not (folder.path / "faults").exists()


def test_a_machine_on_which_two_nodes_failed_runs_no_more(folder: Folder) -> None:
    (folder.path / "faults").write_text("h1\ta\t1\t7\tno\nh1\tb\t2\t8\tno\nh2\tb\t3\t9\tno\nodd\n")
    asked = folder.runs("h1", excluded="x1 x2")  # of which the job would know nothing any more
    assert asked == ["requeue 77_0", "update JobId=77_0 ExcNodeList=x1,x2,h1"]
    assert not list((folder.path / "nodes/tiny").glob("1-*"))  # it was no try
    assert (folder.path / "log/1-0").read_text() == ""
    folder.kit_on("h1", 0)
    assert folder.runs("h1", 1, machines="h1") == []  # where it is the only one, it runs
    assert "end 0" in (folder.path / "log/1-0").read_text()


def test_what_has_ended_does_not_run_again(folder: Folder) -> None:
    """An operator queued it again, or its node was away when it ended."""
    folder.kit_on("h1", 0)
    folder.runs("h1")
    told = (folder.path / "log/1-0").read_text()
    assert folder.runs("h1", 1) == []
    assert (folder.path / "log/1-0").read_text() == told


def test_a_job_that_stays_away_keeps_its_last_outcome(folder: Folder) -> None:
    """It was queued again for another machine, and removed before one took it."""
    stopped = run_json(outcome="no-gpu", reason="no GPU: none")
    folder.kit_on("h1", 9)
    (folder.path / "runs/h1/result/run.json").write_bytes(stopped)
    assert folder.runs("h1")[0] == "requeue 77_0"
    write_row(folder.path / "batch-1.json", _submitted())
    (folder.path / "queue.json").write_text(
        json.dumps({"format": 1, "asked": "2099-01-01T00:00:00Z", "tasks": []})
    )
    assert read_node(folder.path, "tiny", JobLimits()).result.outcome is Outcome.NO_GPU
