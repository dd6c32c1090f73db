"""A run of the GPU suite as a person reads it."""

from __future__ import annotations

from dataclasses import replace

from imagefactory.model import CheckResult, CheckState, Outcome
from imagefactory.views.verdicts import format_gpu_run, format_number
from tests.made.verdicts import HOST, SUBJECT, whole_report

HOLDS = "capability 8.0, driver 550.54.15 and newer"


def check(name: str, **numbers: float) -> CheckResult:
    told = tuple((key.replace("_", "-"), value) for key, value in numbers.items())
    return CheckResult(name=name, state=CheckState.PASSED, detail="it held", seconds=0.5, numbers=told)


def test_the_first_line_says_what_ran_on_what() -> None:
    def first(**changes: object) -> str:
        return format_gpu_run(whole_report(**changes)).splitlines()[0]

    on = "A GPU of the tests (8.0, 16 GiB), driver 550.54.15, CUDA 12.4, by unshare"
    assert first() == f"pytorch-2.3-cu121  quick suite on {on}"
    assert first(subject=replace(SUBJECT, target="")).startswith(f"{SUBJECT.manifest}  quick suite on")
    assert "on no GPU was met, driver 550.54.15" in first(device=None)
    assert "on a rehearsal on the CPU, CUDA" in first(rehearsal=True, hardware=None)
    assert first(cuda="", hardware=None).endswith("(8.0, 16 GiB), by unshare")


def test_the_images_own_libcuda_is_named() -> None:
    notes = {"libcuda": "/usr/local/cuda/compat/libcuda.so.575.57.08", "libcuda-version": "575.57.08"}
    for source, count in (("compat", 1), ("host", 0)):
        hardware = replace(HOST, notes=tuple({**notes, "libcuda-source": source}.items()))
        assert format_gpu_run(whole_report(hardware=hardware)).count(notes["libcuda"]) == count


def test_what_a_verdict_holds_for_is_said_of_verified_runs_alone() -> None:
    assert HOLDS in format_gpu_run(whole_report())
    for change in ({"outcome": Outcome.WRONG_NUMBERS}, {"device": None}, {"hardware": None}):
        assert "holds for" not in format_gpu_run(whole_report(**change))


def test_what_was_waived_and_what_contradicts() -> None:
    text = format_gpu_run(whole_report(waived=("nccl",), contradictions=("8.0 was not to run",)))
    assert "nccl did not run, which the recipe waives" in text
    assert "8.0 was not to run" in text
    assert "waive" not in format_gpu_run(whole_report())


def test_checks_with_their_numbers_below() -> None:
    lines = format_gpu_run(whole_report(checks=(check("vector-add", elements=3.0), check("x")))).splitlines()
    assert lines[2] == "vector-add  passed             0.5 s  it held"
    assert lines[3] == " " * lines[2].index("it held") + "elements 3"
    assert lines[4] == "x           passed             0.5 s  it held"


def test_latencies_have_a_table_of_their_own() -> None:
    resnet = {
        "resnet_gpu_torch_p50_ms": 1.25,
        "resnet_gpu_torch_p95_ms": 2.0,
        "resnet_cpu_torch_p50_ms": 90.0,
    }
    text = format_gpu_run(whole_report(checks=(check("models", **resnet, error=0.5),)))
    rows = [line.split() for line in text.splitlines()]
    assert ["resnet", "torch", "gpu", "1.250", "2.000"] in rows
    assert ["resnet", "torch", "cpu", "90.000"] in rows
    assert ["error", "0.5"] in rows
    assert "p95 ms" not in format_gpu_run(whole_report())


def test_numbers_as_people_write_them() -> None:
    assert format_number("elements", 30011.0) == "elements 30011"
    assert format_number("error", 1.5e-07) == "error 1.5e-07"
    assert format_number("taken-bytes", 268_400_000.0) == "taken 268.4 MB"
    assert format_number("taken-bytes", -1.0) == "taken-bytes -1"
    assert format_number("rate", 1e9) == "rate 1e+09"


def test_a_long_reason_is_folded_to_the_terminal() -> None:
    def longest(width: int) -> int:
        text = format_gpu_run(whole_report(reason="word " * 60), width)
        folded, _, _ = text.rpartition("\n\n")[2].partition("\nmanifest")  # a digest is one word
        return max(map(len, folded.splitlines()))

    assert 100 < longest(200) <= 110
    assert 65 < longest(75) <= 75
