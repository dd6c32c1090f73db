"""The programs that travel with a sweep, run as the image's Python and DAGMan run them."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from imagefactory.model import Outcome
from imagefactory.schedulers.htcondor import dag, results
from imagefactory.schedulers.htcondor.node import inside, post
from imagefactory.schedulers.htcondor.pool import HTCondorSweepFiles
from imagefactory.schedulers.htcondor.results import read_node
from imagefactory.schedulers.pool import JobEnding, JobLimits, MachinesByCapability
from imagefactory.verify.kits import format_kit
from imagefactory.verify.suite_files import suite_digest
from tests.made.kit import ASKED, NONCE, ORDER
from tests.made.pool import (
    MADE,
    aborted,
    event,
    evicted,
    executing,
    failed_start,
    held,
    node,
    submitted,
    sweep,
    terminated,
    transferring,
)

SUITE_ARGV = (
    sys.executable,
    "-I",
    "-B",
    "/imagefactory/suite/verify.py",
    "/imagefactory/expect/expectations.json",
    "/imagefactory/report/report.json",
)
NODE = "tiny-8_0"
WHOLE = submitted() + executing() + terminated()


def texts(*argv: str, timeout: float = 60.0) -> dict[str, bytes]:
    asked = {**ASKED, "capability": "8.0"}
    order = replace(ORDER, asked=asked, argv=argv or SUITE_ARGV, timeout=timeout)
    kit = format_kit(order, suite_digest(), MADE + timedelta(days=1))
    return {"kit.json": json.dumps(kit).encode(), "expectations.json": json.dumps(asked).encode()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dag.write_sweep(tmp_path / "sweep", sweep(node()), {NODE: texts()})
    return tmp_path / "sweep"


# --- in the image --------------------------------------------------------------------------------


def in_the_job(folder: Path, files: dict[str, bytes]) -> Path:
    """The folder of a job as HTCondor fills it: by name, without what lies above."""
    job = folder / "job"
    job.mkdir()
    for name in ("suite.tar", "inside.py"):
        (job / name).write_bytes((folder / name).read_bytes())
    for name, data in files.items():
        (job / name).write_bytes(data)
    (job / "result").mkdir()
    return job


def run_inside(job: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", "-B", "inside.py"]
    return subprocess.run(argv, cwd=job, capture_output=True, text=True, timeout=120)


def facts(job: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((job / "result/run.json").read_bytes())
    return row


def test_the_real_suite_runs_and_leaves_its_report(folder: Path) -> None:
    job = in_the_job(folder, texts())
    done = run_inside(job)
    assert done.returncode == 0, done.stderr
    row = facts(job)
    assert (row["nonce"], row["suite"], row["timed_out"]) == (NONCE, suite_digest(), False)
    report = json.loads((job / "result/report.json").read_bytes())
    assert report["nonce"] == NONCE
    assert set(row) == {"format", "nonce", "suite", "image", "started", "ended", "returncode"} | {
        "timed_out", "seconds", "said", "hardware", "no_gpu"
    }  # fmt: skip
    assert (row["hardware"] is None) is bool(row["no_gpu"])
    assert sorted(path.name for path in (job / "result").iterdir()) == ["report.json", "run.json"]


def test_a_suite_that_hangs_is_ended_with_what_it_started(folder: Path) -> None:
    hang = "import os, time; os.fork(); time.sleep(600)"
    job = in_the_job(folder, texts(sys.executable, "-c", hang, timeout=1.0))
    assert run_inside(job).returncode == 0
    assert facts(job)["timed_out"] is True
    assert not (job / "result/report.json").exists()


def test_a_report_that_is_a_link_is_none(folder: Path) -> None:
    link = f"import os; os.symlink({str(folder / 'sweep.dag')!r}, 'report/report.json')"
    job = in_the_job(folder, texts(sys.executable, "-c", link))
    assert run_inside(job).returncode == 0
    assert [path.name for path in (job / "result").iterdir()] == ["run.json"]


def test_the_sif_beside_the_job_is_told_by_its_digest(folder: Path) -> None:
    job = in_the_job(folder, texts(sys.executable, "-c", "pass"))
    (job / "a-link.sif").symlink_to("/etc/hostname")
    (job / "tiny-0123.sif").write_bytes(b"no image")
    assert run_inside(job).returncode == 0
    assert facts(job)["image"] == f"sha256:{hashlib.sha256(b'no image').hexdigest()}"
    (job / "tiny-0123.sif").unlink()
    assert run_inside(job).returncode == 0
    assert facts(job)["image"] == ""


def cut_archive(job: Path) -> None:
    (job / "suite.tar").write_bytes((job / "suite.tar").read_bytes()[:5000])


def other_suite(job: Path) -> None:
    data = (job / "suite.tar").read_bytes()
    (job / "suite.tar").write_bytes(data.replace(b"Start the GPU suite", b"Start another one!!"))


def no_kit(job: Path) -> None:
    (job / "kit.json").write_bytes(b"{}")


def no_python(job: Path) -> None:
    row = json.loads((job / "kit.json").read_bytes())
    (job / "kit.json").write_text(json.dumps({**row, "argv": ["/no/python", "-I"]}))


def a_file_where_the_result_goes(job: Path) -> None:
    (job / "result").rmdir()
    (job / "result").write_bytes(b"")


@pytest.mark.parametrize("spoil", [cut_archive, other_suite, no_kit, no_python, a_file_where_the_result_goes])
def test_what_cannot_be_started_is_said_so(folder: Path, spoil: Callable[[Path], None]) -> None:
    job = in_the_job(folder, texts())
    spoil(job)
    done = run_inside(job)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("not started: ")
    assert not (job / "result/run.json").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../out.py", tarfile.REGTYPE),
        ("/suite/a.py", tarfile.REGTYPE),
        ("suite/../../a.py", tarfile.REGTYPE),
        ("suite/a.py", tarfile.SYMTYPE),
        ("suite/a.so", tarfile.REGTYPE),
        ("other/a.py", tarfile.REGTYPE),
    ],
)
def test_an_archive_cannot_leave_its_folder(tmp_path: Path, name: str, kind: bytes) -> None:
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    (tmp_path / "suite.tar").write_bytes(packed.getvalue())
    with pytest.raises(inside.NotStarted):
        inside.unpack(tmp_path / "suite.tar", tmp_path / "job")


def test_the_programs_speak_old_pythons() -> None:
    for program, version in ((inside, (3, 9)), (post, (3, 6))):
        assert program.__file__
        ast.parse(Path(program.__file__).read_text(), feature_version=version)


# --- after the job -------------------------------------------------------------------------------


def after(folder: Path, log: str, returned: int, retry: tuple[int, int] = (0, 2)) -> int:
    """DAGMan's call of the POST script, after the job has left `log`."""
    place = folder / "nodes" / NODE
    with (place / "job.log").open("a") as file:
        file.write(log)
    job = f"{int(log[5:8])}.0"
    return post_script(folder, NODE, str(returned), job, *map(str, retry))


def post_script(folder: Path, *arguments: str) -> int:
    with contextlib.chdir(folder):
        return post.main(list(arguments))


def brings(folder: Path, run: bytes | None = None, report: bytes | None = b"{}") -> None:
    place = folder / "nodes" / NODE
    (place / "result").mkdir(exist_ok=True)
    row = {"nonce": NONCE}
    (place / "result/run.json").write_bytes(json.dumps(row).encode() if run is None else run)
    if report is not None:
        (place / "result/report.json").write_bytes(report)
    (place / "err").write_text("FATAL: something\n")
    (place / "out").write_text("")


def test_a_run_that_came_back_is_done(folder: Path) -> None:
    brings(folder)
    assert after(folder, WHOLE, 0) == 0
    found = read_node(folder, NODE, JobLimits())
    assert found.result.outcome is None
    assert (found.run, found.report) == (json.dumps({"nonce": NONCE}).encode(), b"{}")
    assert not list((folder / "nodes" / NODE).glob("attempt-*"))


# --- machines ------------------------------------------------------------------------------------

HERE, THERE = "gpu01.example.org", "gpu02.example.org"
NO_GPU = {"name": "device", "state": "failed", "outcome": "no-gpu", "detail": "cuInit says 100"}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A sweep of two nodes, on a pool of two machines."""
    machines = (MachinesByCapability(capability="8.0", machines=(HERE, THERE)),)
    made = replace(sweep(node(), node("other")), machines=machines)
    dag.write_sweep(tmp_path / "two", made, dict.fromkeys((NODE, "other"), texts()))
    return tmp_path / "two"


def elsewhere(folder: Path, name: str = NODE) -> str:
    row, where, first, *rest = (folder / "nodes" / name / "job.sub").read_text().splitlines()
    assert (row, first, rest) == ("# 8.0", "first = true", ["include : sweep.sub", "queue"])
    return where.removeprefix("elsewhere = ")


def reports(*checks: Mapping[str, Any], capability: str = "8.0") -> bytes:
    return json.dumps({"device": {"capability": capability}, "checks": checks}).encode()


@pytest.mark.parametrize("report", [reports(NO_GPU), reports(capability="7.0")], ids=["none", "another"])
def test_a_gpu_that_is_not_there_is_looked_for_on_another_machine_first(two: Path, report: bytes) -> None:
    brings(two, report=report)
    assert after(two, WHOLE, 0) == 1
    assert elsewhere(two) == f'(!member(TARGET.Machine, {{"{HERE}"}}) || time() - QDate > 3600)'
    found = read_node(two, NODE, JobLimits())
    assert (found.result.outcome, found.run, found.settled) == (None, None, False)
    assert re.match("to be retried: (no-gpu: cuInit|wrong-gpu: it met)", found.result.reason)
    brings(two, report=report)
    there = WHOLE.replace("(012.", "(013.").replace(HERE, THERE)
    assert after(two, there, 0, (1, 2)) == 0  # it was on both: that is the answer
    assert read_node(two, NODE, JobLimits()).run is not None


@pytest.mark.parametrize("retry", [(2, 2), (0, 0)])
def test_the_last_try_is_an_answer(two: Path, retry: tuple[int, int]) -> None:
    brings(two, report=reports(NO_GPU))
    assert after(two, WHOLE, 0, retry) == 0
    assert read_node(two, NODE, JobLimits()).run is not None


def test_what_the_suite_says_of_the_image_is_an_answer_anywhere(two: Path) -> None:
    brings(two, report=reports({**NO_GPU, "outcome": "no-kernel"}, NO_GPU))
    assert after(two, WHOLE, 0) == 0
    assert not (two / "faults").exists()


def test_the_only_machine_of_its_kind_is_not_asked_twice(folder: Path) -> None:
    brings(folder, report=reports(NO_GPU))
    assert after(folder, WHOLE, 0) == 0
    (fault,) = post.parse_faults((folder / "faults").read_bytes())
    assert (fault.machine, fault.node, fault.job) == (HERE, NODE, "12.0")


@pytest.mark.parametrize(
    ("only", "first"), [(False, "true"), (True, f'member(TARGET.Machine, {{"{HERE}"}})')]
)
def test_where_the_oldest_drivers_machine_fails_another_will_do_or_none(
    tmp_path: Path, only: bool, first: str
) -> None:
    """One that is there for that driver alone has no other machine to go to: its word is the answer."""
    rows = (("8.0", "", (HERE, THERE)), ("8.0", "535", (HERE,)))
    machines = tuple(MachinesByCapability(capability=row, driver=old, machines=on) for row, old, on in rows)
    made = replace(sweep(node(first="535", only=only)), machines=machines)
    dag.write_sweep(tmp_path / "two", made, {NODE: texts()})
    folder = tmp_path / "two"
    brings(folder, report=reports(NO_GPU))
    assert after(folder, WHOLE, 0) == (0 if only else 1)
    job = (folder / "nodes" / NODE / "job.sub").read_text().splitlines()
    assert job[2] == f"first = {first}"


FULL = "Transfer input files failure at execution point slot1_2@gpu01.example.org: No space left on device"


def test_a_machine_on_which_two_nodes_failed_is_left_out_of_the_sweep(two: Path) -> None:
    """One is held before it starts, so only the reason names its machine."""
    assert after(two, submitted() + held(13, FULL, subcode=28) + aborted(), -1002) == 1
    assert "3600" in elsewhere(two)
    (two / "nodes/other/job.log").write_text(submitted(20) + executing(20) + terminated(255, 20))
    assert post_script(two, "other", "255", "20.0", "0", "2") == 1
    assert elsewhere(two, "other") == f'!member(TARGET.Machine, {{"{HERE}"}})'
    (attempt,) = read_node(two, NODE, JobLimits()).result.attempts
    assert attempt.machine == HERE
    faults = post.parse_faults((two / "faults").read_bytes())
    assert post.bad_machines(faults, [HERE, THERE]) == [HERE]
    assert post.bad_machines(faults, [HERE]) == []  # no other one is left
    assert post.bad_machines(faults, [THERE]) == [HERE]  # it came to the pool after the sweep was made


@pytest.mark.parametrize(
    "log",
    [
        submitted() + aborted("via condor_rm (by user me)"),
        submitted() + executing() + evicted("preempted") + aborted(),
        submitted() + held(35, "slot1_1@gpu01.example.org: no image") + aborted(),
        submitted() + executing() + failed_start(" FATAL: docker://x: no route") + aborted(),
        submitted() + held(1, "by me") + aborted(),
    ],
    ids=["removed", "preempted", "no image", "no registry", "held by a person"],
)
def test_what_is_not_a_machines_fault_is_not_noted(two: Path, log: str) -> None:
    after(two, log, -1002)
    assert not (two / "faults").exists()


def test_a_script_that_runs_twice_notes_a_fault_once(two: Path) -> None:
    log = submitted() + executing() + terminated(255)
    assert after(two, log, 255) == post_script(two, NODE, "255", "12.0", "0", "2") == 1
    assert len(post.parse_faults((two / "faults").read_bytes())) == 1


def test_no_machine_after_a_fault_is_not_called_no_match(two: Path) -> None:
    after(two, submitted() + executing() + terminated(255), 255)
    assert after(two, submitted(13) + aborted(job=13), -1002, (1, 2)) == 0
    found = read_node(two, NODE, JobLimits()).result
    assert found.outcome is Outcome.INFRASTRUCTURE
    assert HERE in found.reason


def test_lines_that_are_no_faults_are_skipped() -> None:
    assert post.parse_faults(b"\n\xff\t\t\t\t\na\tb\tc\t\xc2\xb2\td\na\tb\tc\t7\n") == []
    assert post.parse_faults(None) == []


def test_without_a_report_it_is_the_suites_fault_not_the_pools(folder: Path) -> None:
    brings(folder, report=None)
    assert after(folder, WHOLE, 0) == 0
    found = read_node(folder, NODE, JobLimits())
    assert found.run is not None
    assert found.report is None


@pytest.mark.parametrize(
    ("run", "report"),
    [
        (b"", b"{}"),
        (b"\xff\x00garbage", b"{}"),
        (b"[" * 100_000, b"{}"),
        (b'{"nonce": "of another run"}', b"{}"),
        (None, b""),
        (None, b"\x00" * 5000),
        (None, b"[]"),
    ],
)
def test_garbage_is_tried_again_and_kept(folder: Path, run: bytes | None, report: bytes) -> None:
    brings(folder, run, report)
    assert after(folder, WHOLE, 0) == 1
    place = folder / "nodes" / NODE
    assert sorted(path.name for path in (place / "attempt-1").iterdir()) == [
        "err",
        "out",
        "post.json",
        "result",
    ]
    assert (place / "attempt-1/result/report.json").read_bytes() == report
    found = read_node(folder, NODE, JobLimits()).result
    assert found.outcome is None
    assert found.reason.startswith("to be retried: it brought back no result that can be read")
    brings(folder, run, report)
    again = WHOLE.replace("(012.", "(013.")
    assert after(folder, again, 0, (2, 2)) == 1
    found = read_node(folder, NODE, JobLimits()).result
    assert (found.outcome, len(found.attempts)) == (Outcome.INFRASTRUCTURE, 2)


@pytest.mark.parametrize("name", ["run.json", "report.json"])
def test_what_is_no_plain_file_is_not_read(folder: Path, name: str) -> None:
    for spoil in (
        Path.mkdir,
        lambda path: path.symlink_to("/etc/hostname"),
        lambda path: os.mkfifo(path),
        lambda path: path.write_bytes(b"{" + b" " * post.LARGEST_FILE),
    ):
        brings(folder)
        place = folder / "nodes" / NODE / "result" / name
        place.unlink()
        spoil(place)
        shutil.rmtree(folder / "nodes" / NODE / "attempt-1", ignore_errors=True)
        assert after(folder, WHOLE, 0) == 1
        assert read_node(folder, NODE, JobLimits()).run is None


def test_what_broke_and_then_held_has_the_last_word(folder: Path) -> None:
    assert after(folder, submitted() + executing() + terminated(255), 255) == 1
    brings(folder)
    assert after(folder, WHOLE.replace("(012.", "(013."), 0, (1, 2)) == 0
    found = read_node(folder, NODE, JobLimits())
    assert [one.code for one in found.result.attempts] == [255, 0]
    assert found.run is not None


def test_a_script_that_runs_twice_for_a_job_keeps_once(folder: Path) -> None:
    """DAGMan was killed before it knew that the script had ended."""
    brings(folder, b"garbage")
    assert after(folder, WHOLE, 0) == 1
    assert post_script(folder, NODE, "0", "12.0", "0", "2") == 1
    place = folder / "nodes" / NODE
    assert [path.name for path in place.glob("attempt-*")] == ["attempt-1"]


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (submitted() + aborted(), 0),
        (submitted() + aborted("via condor_rm (by user me)"), 0),
        (submitted() + held(13, "reading from file /s/x.sif") + aborted(), 1),
        (submitted() + held(34, "memory") + aborted(), 0),
        (submitted() + held(47, "time") + aborted(), 0),
        (submitted() + executing() + aborted(), 0),  # longer than it may run
        (submitted() + executing() + transferring("output") + aborted(), 1),
        (submitted() + transferring("input") + aborted(), 1),
        (submitted() + event(7, "Shadow exception!", "Error: no starter") + aborted(), 1),
    ],
)
def test_a_removed_job_is_tried_again_only_where_the_pool_broke_it(folder: Path, log: str, code: int) -> None:
    assert after(folder, log, -1002) == code


def test_a_next_job_that_never_came_to_be_is_the_last_word(folder: Path) -> None:
    assert after(folder, submitted() + executing() + terminated(255), 255) == 1
    assert read_node(folder, NODE, JobLimits()).result.outcome is None
    assert post_script(folder, NODE, "-1001", "0.0", "2", "2") == 1
    found = read_node(folder, NODE, JobLimits()).result
    assert (found.outcome, found.reason) == (Outcome.INFRASTRUCTURE, "condor_submit did not take it")
    with (folder / "nodes" / NODE / "job.log").open("a") as file:  # gone on with
        file.write(submitted(13) + executing(13))
    assert read_node(folder, NODE, JobLimits()).result.outcome is None


def test_what_condor_submit_refuses_is_tried_again(folder: Path) -> None:
    arguments = [NODE, "-1001", "0.0", "2", "2"]  # as DAGMan starts it
    assert subprocess.run([folder / "post.py", *arguments], cwd=folder, timeout=60).returncode == 1
    found = read_node(folder, NODE, JobLimits()).result
    assert (found.outcome, found.reason) == (Outcome.INFRASTRUCTURE, "condor_submit did not take it")


@pytest.mark.parametrize("arguments", [[], ["../x", "0", "1.0", "0", "2"], [NODE, "0"]])
def test_other_arguments_touch_nothing(folder: Path, arguments: list[str]) -> None:
    before = sorted(folder.rglob("*"))
    assert post_script(folder, *arguments) == 2
    assert sorted(folder.rglob("*")) == before


def test_a_job_whose_end_the_log_does_not_tell_is_lost(folder: Path, monkeypatch: Any) -> None:
    """The script waits for the log; here it does not get what it waits for."""
    monkeypatch.setattr(post, "LOG_SECONDS", 0.0)
    assert after(folder, submitted() + executing(), 0, (2, 2)) == 1
    found = read_node(folder, NODE, JobLimits()).result
    assert found.attempts[-1].ending is JobEnding.RUNNING
    assert found.outcome is Outcome.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("before", "between"),
    [
        (submitted() + executing(), terminated()),
        (submitted() + executing() + terminated(255), submitted(13) + executing(13) + terminated(0, 13)),
    ],
    ids=["it ends", "the next one is there and ends"],
)
def test_what_ends_while_it_is_read_is_told_of_one_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: str, between: str
) -> None:
    """The log is read, then a job brings its result and the POST script speaks, then the files are read."""
    if "005 (" in before:
        assert after(folder, before, 255) == 1
    else:
        (folder / "nodes" / NODE / "job.log").write_text(before)
    reading = results.read_files

    def slowly(place: Path) -> results.NodeFiles:
        if not (place / "result").exists():
            brings(folder)
            assert after(folder, between, 0) == 0
        return reading(place)

    monkeypatch.setattr(results, "read_files", slowly)
    found = read_node(folder, NODE, JobLimits())
    assert found.result.outcome is None, found.result.reason
    assert found.run is not None
    assert found.result.attempts[-1].job == ("13.0" if "(013" in between else "12.0")
    assert found.settled


def test_a_result_that_answers_nothing_is_no_word_on_the_image(folder: Path) -> None:
    brings(folder)
    after(folder, WHOLE, 0)
    found = HTCondorSweepFiles().read_result(folder, node(), JobLimits())
    assert found.outcome is Outcome.INFRASTRUCTURE


def test_a_run_without_a_gpu_is_told_as_the_suite_tells_it(folder: Path) -> None:
    job = in_the_job(folder, texts())
    run_inside(job)
    (job / "result").rename(folder / "nodes" / NODE / "result")
    assert after(folder, WHOLE, 0) == 0
    found = HTCondorSweepFiles().read_result(folder, node(), JobLimits())
    assert found.outcome is not Outcome.VERIFIED
    assert found.outcome is not None
