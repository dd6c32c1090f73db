"""What the host makes of a GPU suite's report: one word for every way a run can end, no belief for free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from imagefactory.model import CheckState, CommandResult, Outcome
from imagefactory.suite.gpu import table
from imagefactory.verify.outcome import MEASURED, GpuRun, RawResult, not_started, outcome_of
from imagefactory.verify.report import GpuReport, format_gpu_report, parse_gpu_report
from tests.made.gpu_run import DEVICE, make_run, whole
from tests.made.verdicts import HOST, HOST_OF_TWO, MADE_UP, SUITE

UUID = MADE_UP.uuid
PART = "MIG-aaaaaaaa-89ab-cdef-0123-456789abcdef"
GOOD = CommandResult(returncode=0, stdout="PASSED\n", stderr="", seconds=1.0)
Change = Callable[[dict[str, Any]], object]


def row(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in document["checks"] if one["name"] == name)
    return found


def judge(
    change: Change = lambda report: None, run: GpuRun | None = None, completed: CommandResult = GOOD
) -> GpuReport:
    run = run or make_run()
    document = whole(run)
    change(document)
    report = outcome_of(run, RawResult(report=json.dumps(document).encode(), fault="", completed=completed))
    # Whatever an image writes, what becomes of it can be written and read again.
    assert parse_gpu_report(json.loads(json.dumps(format_gpu_report(report))), "here") == report
    assert [check.name for check in report.checks] == list(table.checks_of(run.asked["level"]))
    return report


def states(report: GpuReport) -> dict[str, CheckState]:
    return {check.name: check.state for check in report.checks}


def test_all_well_is_verified() -> None:
    report = judge()
    assert report.outcome is Outcome.VERIFIED
    count = len(table.checks_of("quick"))
    assert report.reason == f"{count} checks passed on A GPU of the tests (8.0)"
    assert report.device == HOST.gpus[0]
    assert (report.cuda, report.hardware, report.waived, report.contradictions) == ("12.4", HOST, (), ())


@pytest.mark.parametrize(
    ("path", "driver", "version", "source"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.535.54.03", "535.54.03", "535.54.03", "host"),
        ("/.singularity.d/libs/libcuda.so.1", "535.54.03", "535.54.03", "host"),
        ("/usr/local/cuda-12.9/compat/libcuda.so.575.57.08", "535.54.03", "575.57.08", "compat"),
        (
            "/usr/lib64/libcuda.so.575.57.08",
            "535.54.03",
            "575.57.08",
            "compat",
        ),  # mounted by NVIDIA's toolkit
        ("/x\x1b[2J/libcuda.so.1", "535.54.03", "535.54.03", "host"),
    ],
)
def test_the_libcuda_that_answered_is_recorded(path: str, driver: str, version: str, source: str) -> None:
    run = replace(make_run(), hardware=replace(HOST, driver=driver))
    report = judge(lambda report: report.update(libcuda=path), run)
    assert report.hardware is not None
    notes = dict(report.hardware.notes)
    assert (notes["libcuda-version"], notes["libcuda-source"]) == (version, source)
    assert notes["libcuda"] == path.replace("\x1b", " ")
    assert replace(report, hardware=run.hardware) == replace(judge(run=run), hardware=run.hardware)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda report: report.update(nonce="old"), "does not contain the nonce"),
        (lambda report: report.pop("nonce"), "'nonce'"),
        (lambda report: report.update(suite=SUITE), "'suite'"),
        (lambda report: report.update(format=2), "the report: format:"),
        (lambda report: report.update(format=True), "the report: format:"),
        (lambda report: report.update(target="pytorch-2.4-cu121"), "another target"),
        (lambda report: report.update(level="full"), "another level"),
        (lambda report: report.update(rehearsal=True), "another rehearsal"),
        (lambda report: report.update(rehearsal=0), "another rehearsal"),
        (lambda report: report.update(cuda="twelve"), "the report: cuda:"),
        (lambda report: report.update(cuda=12.4), "the report: cuda:"),
        (lambda report: report.update(checks={}), "the report: checks:"),
        (lambda report: report.update(running="portability"), "the report: running:"),
        (lambda report: report.update(device="GPU 0"), "the report: device:"),
        (lambda report: report["device"].pop("memory"), "the report: device: 'memory'"),
        (lambda report: report["device"].update(uuid="GPU-0"), "device.uuid:"),
        (lambda report: report["device"].update(capability="sm_80"), "device.capability:"),
        (lambda report: report["device"].update(memory=True), "device.memory:"),
        (lambda report: report["device"].update(memory=1 << 60), "device.memory:"),
        (lambda report: report["checks"].append(report["checks"][0]), "a check twice"),
        (lambda report: row(report, "matmul").update(name="sing"), "].name:"),
        (lambda report: row(report, "matmul").update(name=[]), "].name:"),
        (lambda report: row(report, "matmul").update(outcome="verified"), "].outcome:"),
        (lambda report: row(report, "matmul").update(seconds=-1), "].seconds:"),
        (lambda report: row(report, "matmul").update(state="good"), "].state:"),
        (lambda report: row(report, "matmul").update(numbers={"x": True}), "].numbers.x:"),
        (lambda report: row(report, "matmul").update(numbers={"x": 10**400}), "].numbers.x:"),
        (lambda report: row(report, "matmul").update(numbers={"x": float("nan")}), "].numbers.x:"),
        (
            lambda report: row(report, "matmul").update(numbers={str(n): 1 for n in range(300)}),
            "].numbers:",
        ),
    ],
)
def test_reports_that_are_not_believed(change: Change, words: str) -> None:
    report = judge(change)
    assert report.outcome is Outcome.LOAD_FAILED
    assert words in report.reason
    assert set(states(report).values()) == {CheckState.FAILED}
    assert report.device is None


@pytest.mark.parametrize("data", [b"", b"PASSED", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": 1}'])
def test_junk_instead_of_a_report(data: bytes) -> None:
    report = outcome_of(make_run(), RawResult(report=data, fault="", completed=GOOD))
    assert report.outcome is Outcome.LOAD_FAILED
    assert "PASSED" in report.reason


def test_no_report_at_all_after_a_time_out() -> None:
    completed = replace(GOOD, timed_out=True, returncode=137)
    report = outcome_of(
        make_run(), RawResult(report=b"", fault="the process wrote no report", completed=completed)
    )
    assert report.outcome is Outcome.TIMEOUT
    assert set(states(report).values()) == {CheckState.FAILED}


@pytest.mark.parametrize("name", MEASURED)
def test_a_pass_without_a_number_is_none(name: str) -> None:
    level = next(level for level, parts in table.LEVELS.items() if table.part_of(name) in parts)
    run = replace(make_run(level=level), hardware=HOST_OF_TWO)
    report = judge(lambda document: row(document, name).update(numbers={}), run)
    assert f"{name}: " in report.reason
    assert report.reason.endswith("says it passed and has measured nothing")
    assert report.outcome in (Outcome.LOAD_FAILED, Outcome.APART)


def test_names_of_numbers_that_look_alike_are_one() -> None:
    report = judge(lambda document: row(document, "matmul").update(numbers={"b": 1, "a\t": 2, "a\x1b": 3}))
    assert next(one for one in report.checks if one.name == "matmul").numbers == (("a", 3.0), ("b", 1.0))


def test_a_check_that_only_says_it_does_not_apply() -> None:
    report = judge(lambda document: row(document, "training").update(state="not-applicable"))
    assert report.outcome is Outcome.LOAD_FAILED
    assert states(report)["training"] is CheckState.FAILED


def test_what_the_table_excuses_does_not_apply() -> None:
    names = [name for name in table.checks_of("quick") if table.not_applicable("onnxruntime", name, {})]

    def change(document: dict[str, Any]) -> None:
        for name in names:
            row(document, name).update(state="not-applicable")

    report = judge(change, make_run(framework="onnxruntime-gpu"))
    assert names
    assert report.outcome is Outcome.VERIFIED


@pytest.mark.parametrize(
    ("completed", "outcome"),
    [
        ({"returncode": 1}, Outcome.LOAD_FAILED),
        ({"returncode": 139, "stderr": "Segmentation fault"}, Outcome.LOAD_FAILED),
        ({"returncode": 137, "timed_out": True}, Outcome.TIMEOUT),
    ],
)
def test_a_pass_that_does_not_end_well_is_none(completed: dict[str, Any], outcome: Outcome) -> None:
    report = judge(completed=replace(GOOD, **completed))
    assert report.outcome is outcome
    assert "no check says it failed, but it" in report.reason


def test_no_device_is_no_pass() -> None:
    report = judge(lambda document: document.update(device=None))
    assert report.outcome is Outcome.LOAD_FAILED
    assert "names no GPU" in report.reason


def test_control_characters_of_an_image_reach_nobody() -> None:
    def change(document: dict[str, Any]) -> None:
        document["device"]["name"] = "\x1b[2Jred"
        row(document, "matmul").update(detail="\x1b]0;owned\x07\nnext" + "y" * 9000, numbers={"\x1b[2J": 1})

    text = json.dumps(format_gpu_report(judge(change)), ensure_ascii=False)
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.mark.parametrize("word", table.OUTCOMES)
def test_a_failed_check_gives_its_word(word: str) -> None:
    def change(document: dict[str, Any]) -> None:
        row(document, "device").update(state="failed", outcome=word, detail="so it is")

    report = judge(change, completed=replace(GOOD, returncode=1))
    assert report.outcome is Outcome(word)
    assert report.reason == "device: so it is"


def test_the_first_failure_counts() -> None:
    def change(document: dict[str, Any]) -> None:
        row(document, "matmul").update(state="failed", outcome="wrong-numbers")
        row(document, "training").update(state="failed", outcome="load-failed")

    assert judge(change).outcome is Outcome.WRONG_NUMBERS


def test_a_failure_without_a_word_is_load_failed() -> None:
    assert judge(lambda d: row(d, "jit").update(state="failed", outcome="")).outcome is Outcome.LOAD_FAILED


@pytest.mark.parametrize(
    ("completed", "outcome", "words"),
    [
        ({"returncode": 139}, Outcome.LOAD_FAILED, "it ended by signal 11"),
        ({"returncode": 137, "timed_out": True}, Outcome.TIMEOUT, "stopped after too long"),
    ],
)
def test_the_check_that_was_running_when_all_went_down(
    completed: dict[str, Any], outcome: Outcome, words: str
) -> None:
    def change(document: dict[str, Any]) -> None:
        document.update(running="reduction", checks=document["checks"][:8])

    report = judge(change, completed=replace(GOOD, **completed))
    assert report.outcome is outcome
    assert report.reason.startswith(f"reduction: {words}")
    assert states(report)["reduction"] is CheckState.FAILED
    assert states(report)["matmul"] is CheckState.PASSED
    assert states(report)["training"] is CheckState.NOT_RUN


def test_a_report_that_leaves_checks_out_is_not_verified() -> None:
    report = judge(lambda document: document["checks"].pop())
    assert report.outcome is Outcome.NOT_TESTED
    assert "the report has no result of this check" in report.reason


def test_a_gpu_that_is_none_of_the_hosts() -> None:
    stranger = UUID.replace("0123", "9999")
    report = judge(lambda document: document["device"].update(uuid=stranger))
    assert report.outcome is Outcome.INFRASTRUCTURE
    assert stranger in report.reason


def test_a_gpu_has_the_hosts_name_for_it() -> None:
    report = judge(lambda document: document["device"].update(name="A larger GPU"))
    assert report.device is not None
    assert report.device.name == HOST.gpus[0].name
    assert "A larger GPU" not in report.reason


def test_a_capability_that_the_host_does_not_see() -> None:
    report = judge(lambda document: document["device"].update(capability="9.0"))
    assert report.outcome is Outcome.INFRASTRUCTURE
    assert re.search(r"9\.0.*8\.0", report.reason)


def test_a_host_that_saw_no_gpu() -> None:
    report = judge(run=replace(make_run(), hardware=None))
    assert report.outcome is Outcome.INFRASTRUCTURE


def test_another_capability_than_was_asked_for() -> None:
    report = judge(run=make_run(capability="9.0"))
    assert report.outcome is Outcome.WRONG_GPU
    assert re.search(r"9\.0.*A GPU of the tests \(8\.0\)", report.reason)


def test_an_instance_of_a_gpu_is_its_gpu() -> None:
    host = replace(HOST, notes=((PART, UUID), *HOST.notes))
    run = replace(make_run(), hardware=host)
    for spelling in (PART, PART.replace("MIG-", "GPU-")):
        report = judge(lambda document, told=spelling: document["device"].update(uuid=told), run)  # type: ignore[misc]
        assert report.outcome is Outcome.VERIFIED
        assert report.device is not None
        assert report.device.uuid == PART
    assert judge(lambda document: document["device"].update(uuid=PART)).outcome is Outcome.INFRASTRUCTURE


def judge_several(
    change: Change = lambda report: None, completed: CommandResult = GOOD, **changes: Any
) -> GpuReport:
    run = replace(make_run(level="several", **changes), hardware=HOST_OF_TWO, waive=("all-reduce",))
    return judge(change, run, completed)


def test_what_holds_on_several_is_not_called_verified() -> None:
    report = judge_several()
    assert (report.outcome, report.gpus) == (Outcome.TOGETHER, 2)
    assert report.reason == "10 checks passed on 2 x A GPU of the tests (8.0)"
    assert report.device == HOST.gpus[0]
    assert judge().gpus == 1


def failed(name: str, outcome: str) -> Change:
    return lambda document: row(document, name).update(state="failed", outcome=outcome)


@pytest.mark.parametrize("name", ["vector-add", "all-reduce"])
@pytest.mark.parametrize("word", ["wrong-numbers", "no-kernel", "driver-too-old", "load-failed"])
def test_what_fails_on_several_says_nothing_in_the_words_of_one(name: str, word: str) -> None:
    report = judge_several(failed(name, word), replace(GOOD, returncode=1))
    assert report.outcome is Outcome.APART
    assert report.reason == f"{name}: {word}: {name} held"


@pytest.mark.parametrize("word", ["no-gpu", "wrong-gpu", "timeout", "infrastructure"])
def test_the_machines_faults_keep_their_words(word: str) -> None:
    assert judge_several(failed("gpus", word), replace(GOOD, returncode=1)).outcome is Outcome(word)
    hung = judge_several(
        lambda document: document.update(running="all-reduce"), replace(GOOD, timed_out=True)
    )
    assert hung.outcome is Outcome.TIMEOUT


@pytest.mark.parametrize(
    ("numbers", "outcome"),
    [
        ({"gpus": 3}, Outcome.INFRASTRUCTURE),
        ({"gpus": 1e300}, Outcome.INFRASTRUCTURE),
        ({"gpus": 1}, Outcome.APART),
        ({"gpus": 1.5}, Outcome.APART),
        ({"gpus": -2}, Outcome.APART),
        ({}, Outcome.APART),
    ],
)
def test_no_image_counts_more_gpus_than_its_host_has_or_fewer_than_two(
    numbers: dict[str, float], outcome: Outcome
) -> None:
    report = judge_several(lambda document: row(document, "gpus").update(numbers=numbers))
    assert report.outcome is outcome


def test_only_gpus_that_the_driver_knows_too_and_of_that_capability_are_counted() -> None:
    first, second = HOST_OF_TWO.gpus
    for host in (
        replace(HOST_OF_TWO, known=(first.uuid,)),
        replace(HOST_OF_TWO, gpus=(first, replace(second, capability="9.0"))),
    ):
        run = replace(make_run(level="several"), hardware=host)
        assert judge(run=run).outcome is Outcome.INFRASTRUCTURE


def test_of_several_nothing_is_waived() -> None:
    report = judge_several(not_run("all-reduce"), replace(GOOD, returncode=1))
    assert (report.outcome, report.waived) == (Outcome.NOT_TESTED, ())


def test_a_rehearsal_of_several_is_not_together() -> None:
    run = replace(make_run(level="several", rehearsal=True), hardware=None)
    assert judge(lambda document: row(document, "gpus").update(numbers={}), run).outcome is Outcome.NOT_TESTED


@pytest.mark.parametrize(
    ("name", "native", "change", "contradicts"),
    [
        ("native-code", True, {}, False),
        ("native-code", True, {"state": "failed", "outcome": "no-kernel"}, True),
        ("native-code", True, {"state": "failed", "outcome": "load-failed"}, False),
        ("native-code", False, {"numbers": {"contradiction": 1}}, True),
        ("native-code", False, {"state": "failed", "outcome": "no-kernel"}, False),
        ("ptx-code", True, {"numbers": {"contradiction": 1}}, True),
        ("ptx-code", True, {"numbers": {"contradiction": 0}}, False),
        ("matmul", True, {"numbers": {"contradiction": 1}}, False),
    ],
)
def test_contradictions_either_way(
    name: str, native: bool, change: dict[str, Any], contradicts: bool
) -> None:
    predicted = {"8.0": {"native": native, "ptx": False, "runs": True, "reason": "x"}}
    report = judge(lambda document: row(document, name).update(change), make_run(predicted=predicted))
    assert report.contradictions == ((f"{name}: {name} held",) if contradicts else ())


def not_run(name: str) -> Change:
    return lambda document: row(document, name).update(state="not-run", detail="too little memory")


def test_what_did_not_run_is_not_verified() -> None:
    report = judge(not_run("training"), completed=replace(GOOD, returncode=1))
    assert (report.outcome, report.waived) == (Outcome.NOT_TESTED, ())
    assert report.reason == "training did not run: too little memory"


def test_a_waived_check_need_not_run() -> None:
    run = replace(make_run(), waive=("training",))
    report = judge(not_run("training"), run, replace(GOOD, returncode=1))
    assert (report.outcome, report.waived) == (Outcome.VERIFIED, ("training",))
    assert judge(run=run).waived == ()


def test_a_waived_check_may_not_fail() -> None:
    run = replace(make_run(), waive=("training",))
    report = judge(lambda d: row(d, "training").update(state="failed", outcome="wrong-numbers"), run)
    assert (report.outcome, report.waived) == (Outcome.WRONG_NUMBERS, ())


def test_a_rehearsal_is_never_verified() -> None:
    run = replace(make_run(rehearsal=True), hardware=None)
    report = judge(run=run)
    assert (report.outcome, report.rehearsal) == (Outcome.NOT_TESTED, True)
    with_gpu = judge(lambda document: document.update(device=dict(DEVICE)), run)
    assert with_gpu.outcome is Outcome.INFRASTRUCTURE
    wrong = judge(lambda d: row(d, "matmul").update(state="failed", outcome="wrong-numbers"), run)
    assert wrong.outcome is Outcome.WRONG_NUMBERS


def test_what_never_started_passed_nothing() -> None:
    report = not_started(make_run(), Outcome.NO_GPU, "no GPU: \x1b[2J")
    assert (report.outcome, report.device) == (Outcome.NO_GPU, None)
    assert set(states(report).values()) == {CheckState.NOT_RUN}
    assert "\x1b" not in report.reason
