"""The parts of the GPU suite: each in a process of its own, whose end is told as what it is."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from imagefactory.suite.gpu import suite as gpu_suite
from imagefactory.suite.gpu import table
from imagefactory.suite.gpu.checks import coverage
from imagefactory.suite.gpu.context import Predicted, parse_request
from imagefactory.suite.gpu.part import failed_row, make_row
from imagefactory.suite.gpu.suite import (
    Ended,
    Job,
    Row,
    end_reason,
    environment_of,
    last_log_line,
    run_job,
    settle,
    skip_reason,
)
from tests.made.gpu_suite import Ground, Run, copy_suite, make_expectations
from tests.services import libcuda

NATIVE_ONLY = {"8.0": {"native": True, "ptx": False, "runs": True, "reason": "sm_80, no PTX"}}


# --- what is right -------------------------------------------------------------------------------


def test_all_parts_run_on_the_gpu_that_was_found(run: Run, tmp_path: Path) -> None:
    packages = {"torch": "2.5.1", "onnx": "1.19.0", "onnxruntime-gpu": "1.20.0", "nvidia-cublas-cu12": "12.4"}
    asked = make_expectations(level="full", capability="8.0", packages=packages)
    ran = run(asked, CUDA_FORCE_PTX_JIT="0", CUDA_DISABLE_JIT="1")
    assert ran.code == 0, ran.errors
    assert tuple(ran.rows) == table.checks_of("full")
    assert {row["state"] for row in ran.rows.values()} == {"passed"}
    assert f"on {libcuda.UUID}" in ran.rows["matmul"]["detail"]
    assert ran.rows["native-code"]["numbers"] == {"operations": 1.0, "works": 1.0}
    # What the image sets itself is taken away; of one GPU nothing is chosen.
    assert ran.rows["native-code"]["detail"] == "ran with CUDA_DISABLE_PTX_JIT=1"
    assert ran.rows["ptx-code"]["detail"] == (
        "ran with CUDA_CACHE_DISABLE=1 CUDA_FORCE_PTX_JIT=1 CUDA_MODULE_LOADING=LAZY"
    )
    assert ran.rows["matmul"]["detail"].endswith("ran with ")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["expectations.json", "report.json"]


def test_of_several_gpus_all_parts_see_the_one_that_was_taken() -> None:
    asked = parse_request(json.dumps(make_expectations()))
    device = {"uuid": libcuda.UUID, "capability": "8.0"}
    given = {"HOME": "/", "CUDA_VISIBLE_DEVICES": "0,1"}
    seen = environment_of("jit", asked, {"device": device, "visible": 2}, given)
    assert seen["CUDA_VISIBLE_DEVICES"] == libcuda.UUID
    assert seen["HOME"] == "/"
    assert (
        environment_of("jit", asked, {"device": device, "visible": 1}, given)["CUDA_VISIBLE_DEVICES"] == "0,1"
    )
    assert environment_of("driver", asked, {}, given)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_several_gpus_are_all_that_are_alike(run: Run) -> None:
    ran = run(make_expectations(level="several"), "capability=8.0,9.0,8.0")
    assert ran.code == 0, ran.errors
    assert tuple(ran.rows) == table.checks_of("several")
    assert ran.report["device"]["uuid"] == libcuda.UUID
    third = f"{libcuda.UUID[:-2]}02"
    assert ran.rows["all-reduce"]["detail"].endswith(f"CUDA_VISIBLE_DEVICES={libcuda.UUID},{third}")


def test_a_rehearsal_says_so_and_asks_no_driver(run: Run) -> None:
    ran = run(make_expectations(rehearsal=True), "crash=cuInit")
    assert ran.code == 1
    assert ran.report["rehearsal"] is True
    assert ran.report["device"] is None
    assert {ran.rows[name]["state"] for name in table.PARTS["driver"]} == {"not-run"}
    assert {ran.rows[name]["state"] for name in table.PARTS["numbers"]} == {"passed"}
    assert "works" not in ran.rows["native-code"]["numbers"]
    assert "CUDA_VISIBLE_DEVICES=-1" in ran.rows["native-code"]["detail"]


# --- nothing is asked of a framework without a GPU ------------------------------------------------


def test_without_the_gpu_no_later_part_is_started(run: Run) -> None:
    ran = run(make_expectations(capability="8.0"), "capability=")
    assert ran.code == 1
    assert ran.states()["device"] == ("failed", "no-gpu")
    later = [row for name, row in ran.rows.items() if name not in table.PARTS["driver"]]
    assert {(row["state"], row["detail"]) for row in later} == {("not-run", "'device' failed: no-gpu")}
    assert tuple(ran.rows) == table.checks_of("quick")


@pytest.mark.parametrize(
    ("row", "blocks"),
    [
        (failed_row("driver", "", outcome="driver-too-old"), True),
        (failed_row("device", "", outcome="wrong-gpu"), True),
        (failed_row("vector-add", "", outcome="wrong-numbers"), True),
        (failed_row("memory-returned", ""), False),
        (failed_row("native-code", "", outcome="no-kernel"), False),
        (failed_row("matmul", "", outcome="wrong-numbers"), False),
        (make_row("device", "passed", ""), False),
    ],
)
def test_what_keeps_later_parts_from_being_started(row: Row, blocks: bool) -> None:
    asked = parse_request(json.dumps(make_expectations()))
    assert (skip_reason("jit", asked, [row]) != "") is blocks


def test_what_cannot_apply_is_told_from_what_was_not_run(run: Run) -> None:
    ran = run(make_expectations(framework="numpy", packages={"numpy": "2.0.0"}), "capability=")
    assert ran.states()["matmul"] == ("not-applicable", "")


# --- how a part can end --------------------------------------------------------------------------


def test_a_check_that_fails_leaves_the_others_alone(run: Run) -> None:
    words = {"MATMUL": "wrong-numbers", "REDUCTION": "load-failed", "CONVOLUTION": "end", "TRANSFERS": "nan"}
    ran = run(make_expectations(), **{f"FAKE_{name}": word for name, word in words.items()})
    assert ran.code == 1
    found = {
        name: (row["outcome"], row["detail"]) for name, row in ran.rows.items() if row["state"] == "failed"
    }
    assert found == {
        "matmul": ("wrong-numbers", "1 is not 2"),
        "reduction": ("load-failed", "OSError: libfake.so is not there"),
        "convolution": ("load-failed", "a package ended the process: SystemExit(3)"),
        "transfers": ("wrong-numbers", "speed is not a number; on " + libcuda.UUID + " measured"),
    }
    assert "not-run" not in {row["state"] for row in ran.rows.values()}


def test_a_crash_fails_its_check_and_the_next_part_runs(run: Run) -> None:
    ran = run(make_expectations(), FAKE_CONVOLUTION="abort")
    row = ran.rows["convolution"]
    assert (row["state"], row["outcome"]) == ("failed", "no-kernel")
    assert row["detail"] == (
        "the process ended by signal 6: F1122 no kernel image is available for execution on the device; "
        "Fatal Python error: Aborted"
    )
    assert all(ran.rows[name]["state"] == "passed" for name in ("matmul", "reduction", "jit"))
    assert ran.rows["memory"]["detail"] == "'convolution' came first and took the process down"
    assert ran.states()["memory"] == ("not-run", "")
    assert "Fatal Python error: Aborted" in ran.errors, "what a part says on stderr is kept"


def test_a_pass_is_the_whole_process(run: Run) -> None:
    """All checks passed, and then it dies on its way out."""
    ran = run(make_expectations(), FAKE_MATMUL="die-later", FAKE_JIT="leave")
    assert ran.states()["matmul"] == ("passed", "")
    assert ran.states()["memory"] == ("failed", "load-failed")
    assert "on its way out: the process ended by exit code 7" in ran.rows["memory"]["detail"]
    assert ran.states()["jit"] == ("failed", "load-failed")
    assert ran.rows["jit"]["detail"] == "the process ended by exit code 0 and said nothing"


def test_a_framework_that_cannot_be_prepared_is_not_missing_code(run: Run) -> None:
    ran = run(make_expectations(), FAKE_PREPARE="libcudart.so.12: cannot open shared object file")
    assert ran.states()["native-code"] == ran.states()["ptx-code"] == ("failed", "load-failed")
    assert "ImportError: libcudart.so.12" in ran.rows["ptx-code"]["detail"]
    assert ran.rows["matmul"]["detail"] == "'ptx-code' failed: load-failed"


def test_a_driver_that_hangs_is_ended(stand_in: Path, tmp_path: Path) -> None:
    hasty = copy_suite(tmp_path, seconds=1.0)
    ran = Ground(suite=hasty, library=stand_in, folder=tmp_path / "run").run(
        make_expectations(), "hang=cuInit"
    )
    assert ran.states()["driver"] == ("failed", "timeout")
    assert ran.rows["driver"]["detail"].startswith("stopped: its part had ")
    assert ran.rows["matmul"]["detail"] == "'driver' failed: timeout"


def test_a_part_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its time's end, and at its own."""
    for name, end, timed_out in (("long", "wait", True), ("short", "exit 3", False)):
        script = f"sleep 600 & echo $! > {name}.part; echo alas >&2; mv {name}.part {name}; {end}"
        command = ("sh", "-c", script)
        job = Job(
            part="jit",
            command=("env", "-C", str(tmp_path), *command),
            environment={"PATH": "/usr/bin:/bin"},
            report=str(tmp_path / "report"),
            seconds=60.0,
        )
        # The hour of the one that hangs comes when it has said its words, however slow the machine is.
        monkeypatch.setattr(time, "monotonic", lambda: 60.0 * (tmp_path / "long").exists())
        said, ended = run_job(job, lambda _: None)
        monkeypatch.undo()
        assert (ended.timed_out, ended.log) == (timed_out, "alas\n")
        assert ended.code == (128 + signal.SIGKILL if timed_out else 3)
        assert said == {"running": "", "facts": {}, "checks": []}
        child = int((tmp_path / name).read_text())
        wait_for(lambda pid=child: not is_running(pid))


def test_the_last_report_of_a_part_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file system gives it the number and the time of the one before."""
    monkeypatch.setattr(gpu_suite, "stamp_of", lambda path: int(Path(path).exists()))
    script = """
        tell() { echo "{\\"running\\": \\"$1\\", \\"facts\\": {}, \\"checks\\": []}" > new; mv new report; }
        tell jit
        until [ -e seen ]; do :; done
        tell ""
    """
    job = Job(
        part="jit",
        command=("env", "-C", str(tmp_path), "sh", "-c", script),
        environment={"PATH": "/usr/bin:/bin"},
        report=str(tmp_path / "report"),
        seconds=60.0,
    )
    shown: list[str] = []

    def show(said: Mapping[str, Any]) -> None:
        shown.append(said["running"])
        (tmp_path / "seen").touch()

    said, ended = run_job(job, show)
    assert not ended.timed_out
    assert said["running"] == ""
    assert shown == ["jit", ""]


def test_a_suite_that_is_ended_ends_its_part(suite: Path, stand_in: Path, tmp_path: Path) -> None:
    """And leaves a report that says where it was."""
    child = tmp_path / "child"
    process, report = Ground(suite=suite, library=stand_in, folder=tmp_path / "run").start(
        make_expectations(), FAKE_REDUCTION="hang-with-children", FAKE_CHILD=str(child)
    )
    wait_for(lambda: child.exists() and child.read_text() != "")
    wait_for(lambda: json.loads(report.read_text())["running"] == "reduction")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    document = json.loads(report.read_text())
    assert [row["name"] for row in document["checks"]][-2:] == ["ptx-code", "matmul"]
    assert document["device"]["uuid"] == libcuda.UUID
    wait_for(lambda: not is_running(int(child.read_text())))


def test_the_words_of_a_process_that_dies() -> None:
    ended = Ended(
        code=134, log="a\nwhy it is\nFatal Python error: Aborted\n\n  File x\n", seconds=1, timed_out=False
    )
    assert end_reason(ended) == (
        "load-failed",
        "the process ended by signal 6: why it is; Fatal Python error: Aborted",
    )
    assert last_log_line("") == ""
    assert len(last_log_line("x" * 5000)) < 1000


def test_a_process_that_dies_before_its_first_word() -> None:
    ended = Ended(code=1, log="ModuleNotFoundError: ctypes\n", seconds=1, timed_out=False)
    rows = settle(("driver", "device"), {"running": "", "facts": {}, "checks": []}, ended)
    assert [row["state"] for row in rows] == ["failed", "not-run"]
    assert "ModuleNotFoundError: ctypes" in rows[0]["detail"]


# --- T1: code and what was predicted of it --------------------------------------------------------

RAN = make_row("", "passed", "ran")
YES = Predicted(native=True, ptx=True, runs=True, reason="sm_80 and PTX")
NO = Predicted(native=False, ptx=False, runs=False, reason="only sm_90")


@pytest.mark.parametrize(
    ("predicted", "row", "state", "works", "contradicts"),
    [
        (YES, RAN, "passed", 1.0, False),
        (NO, RAN, "passed", 1.0, True),
        (None, RAN, "passed", 1.0, False),
        (YES, failed_row("", "", outcome="no-kernel"), "failed", 0.0, True),
        (YES, failed_row("", "", outcome="load-failed"), "failed", 0.0, False),
        (YES, failed_row("", "", outcome="timeout"), "failed", 0.0, False),
        (YES, failed_row("", "", outcome="wrong-numbers"), "failed", 0.0, False),
        (NO, failed_row("", "", outcome="no-kernel"), "passed", 0.0, False),
        (NO, failed_row("", "", outcome="load-failed"), "passed", 0.0, False),
        (NO, failed_row("", "", outcome="timeout"), "passed", 0.0, False),
        (NO, failed_row("", "", outcome="wrong-numbers"), "failed", 0.0, False),
        (NO, failed_row("", "", outcome="driver-too-old"), "failed", 0.0, False),
        (None, failed_row("", "", outcome="no-kernel"), "passed", 0.0, False),
    ],
)
@pytest.mark.parametrize("part", ["native", "ptx"])
def test_code_against_the_prediction(
    part: str, predicted: Predicted | None, row: Row, state: str, works: float, contradicts: bool
) -> None:
    (judged,) = coverage.judge(part, [row], predicted)
    assert judged["state"] == state
    assert (judged["outcome"] == "") is (state == "passed")
    assert judged["numbers"]["works"] == works
    assert ("contradiction" in judged["numbers"]) is contradicts
    assert ("contradicts the prediction" in judged["detail"]) is contradicts
    assert row["numbers"] == {}, "the part's own row is left alone"


def test_each_claim_is_its_own() -> None:
    native = Predicted(native=True, ptx=False, runs=True, reason="sm_80, no PTX")
    lacks = failed_row("", "CUDA error 209", outcome="no-kernel")
    assert coverage.judge("native", [lacks], native)[0]["state"] == "failed"
    (row,) = coverage.judge("ptx", [lacks], native)
    assert (row["state"], row["detail"]) == ("passed", "no PTX, as predicted (no-kernel: CUDA error 209)")


@pytest.mark.parametrize(
    ("native", "ptx", "outcome"),
    [
        ("no-kernel", "no-kernel", "no-kernel"),
        ("load-failed", "no-kernel", "no-kernel"),
        ("no-kernel", "timeout", "no-kernel"),
        ("load-failed", "load-failed", "load-failed"),
        ("wrong-numbers", "load-failed", "wrong-numbers"),
    ],
)
def test_where_neither_kind_of_code_runs(native: str, ptx: str, outcome: str) -> None:
    first = coverage.judge("native", [failed_row("native-code", "", outcome=native)], NO)
    (row,) = coverage.neither(first, coverage.judge("ptx", [failed_row("ptx-code", "", outcome=ptx)], NO))
    assert (row["state"], row["outcome"]) == ("failed", outcome)
    assert row["detail"].startswith("neither machine code nor PTX of the image runs here")


def test_where_one_kind_of_code_runs() -> None:
    ran, lacks = coverage.judge("native", [RAN], YES), failed_row("ptx-code", "", outcome="no-kernel")
    judged = coverage.judge("ptx", [lacks], NO)
    assert coverage.neither([{**ran[0], "name": "native-code"}], judged) == judged


@pytest.mark.parametrize("predicted", [YES, NO, None])
def test_ptx_that_is_newer_than_the_driver_where_machine_code_runs(predicted: Predicted | None) -> None:
    """Within a major version of CUDA an older driver need not compile it."""
    too_new = failed_row("ptx-code", "unsupported toolchain", outcome="driver-too-old")
    (native,) = coverage.judge("native", [{**RAN, "name": "native-code"}], YES)
    judged = coverage.judge("ptx", [too_new], predicted)
    (row,) = coverage.spare([native], judged)
    assert (row["state"], row["outcome"], row["numbers"]["works"]) == ("passed", "", 0.0)
    assert "unsupported toolchain" in row["detail"]
    assert coverage.neither([native], [row]) == [row]


def test_ptx_that_is_newer_than_the_driver_where_nothing_else_runs() -> None:
    too_new = failed_row("ptx-code", "", outcome="driver-too-old")
    native = coverage.judge("native", [failed_row("native-code", "", outcome="no-kernel")], NO)
    judged = coverage.judge("ptx", [too_new], YES)
    assert coverage.spare(native, judged) == judged
    assert coverage.neither(native, judged)[0]["state"] == "failed"
    for outcome in ("no-kernel", "wrong-numbers"):
        other = coverage.judge("ptx", [failed_row("ptx-code", "", outcome=outcome)], YES)
        assert coverage.spare([{**RAN, "name": "native-code", "numbers": {"works": 1.0}}], other) == other
    machine_code = coverage.judge("native", [failed_row("native-code", "", outcome="driver-too-old")], YES)
    assert coverage.spare([], machine_code) == machine_code


@pytest.mark.parametrize("outcome", ["load-failed", "timeout"])
def test_a_library_that_fails_without_the_code_it_always_runs(outcome: str) -> None:
    """Told as different from the prediction, and no reason against an image whose machine code runs."""
    judged = coverage.judge("ptx", [failed_row("ptx-code", "cuBLAS says 1", outcome=outcome)], YES)
    (row,) = coverage.spare([{**RAN, "name": "native-code", "numbers": {"works": 1.0}}], judged)
    assert (row["state"], row["outcome"]) == ("passed", "")
    assert (row["numbers"]["works"], row["numbers"]["contradiction"]) == (0.0, 1.0)
    assert "cuBLAS says 1" in row["detail"]
    assert coverage.spare([], judged) == judged


def test_a_driver_that_cannot_compile_the_images_ptx(run: Run) -> None:
    ran = run(make_expectations(), FAKE_PTX="too-new")
    assert ran.code == 0, ran.errors
    assert ran.rows["ptx-code"]["detail"].startswith("machine code runs, and the PTX is newer than this")


def test_a_crash_of_what_was_not_claimed_is_no_failure(run: Run) -> None:
    ran = run(make_expectations(predicted=NATIVE_ONLY), FAKE_PTX="abort")
    assert ran.code == 0
    assert ran.rows["ptx-code"]["detail"].startswith(
        "no PTX, as predicted (no-kernel: the process ended by signal 6"
    )


def test_an_image_without_code_for_the_gpu(run: Run) -> None:
    ran = run(make_expectations(), FAKE_NATIVE="no-kernel", FAKE_PTX="no-kernel")
    assert ran.states()["native-code"] == ran.states()["ptx-code"] == ("failed", "no-kernel")
    assert "contradicts the prediction: PTX was found (sm_80 and PTX)" in ran.rows["ptx-code"]["detail"]
    assert ran.rows["matmul"]["detail"] == "'ptx-code' failed: no-kernel"


def is_running(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_for(holds: Callable[[], bool]) -> None:
    """Returns as soon as it holds; after a minute it is a failure."""
    end = time.monotonic() + 60
    while True:
        try:
            if holds():
                return
        except FileNotFoundError:
            pass
        assert time.monotonic() < end
        time.sleep(0.02)
