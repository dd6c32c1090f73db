"""Kits for nodes: does a machine compute as the verdicts of its image say? First with programs in docker's
place, then on the tests' Slurm and HTCondor as docs/site-nodes.md says, with GPUs that are none.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.suite.gpu import table
from tests.made.kit import ASKED, ORDER, UUID, Bench, answer, docker, make_bench, suite_report
from tests.services.gpu_host import Told

GPU = "Test GPU"
PASSED, FAILED, NO_NUMBERS, UNKNOWN = (0, "passed"), (9, "failed"), (3, "no-numbers"), (11, "unknown")
CHECKS: dict[str, dict[str, float]] = {
    **{name: {} for name in table.checks_of(table.NODE)},
    "matmul": {"float32-odd-error": 0.01},
    "transfers": {"pinned-up-gb-per-s": 24.0},
}


def signed(**changes: Any) -> dict[str, Any]:
    """Return signed.json."""
    gpu = {"expires": "2999-01-01T00:00:00Z", "driver": "550.54.15", "checks": CHECKS, **changes}
    checks, alone = table.checks_of(table.NODE), table.PARTS["driver"]
    return {"format": 1, "checks": list(checks), "alone": list(alone), "gpus": {GPU: gpu}}


def node_bench(folder: Path, numbers: dict[str, Any] | None = None, told: Told | None = None) -> Bench:
    order = replace(ORDER, asked={**ASKED, "level": table.NODE}, signed=numbers or signed())
    return make_bench(folder, order, told)


def report(name: str = "", numbers: dict[str, float] | None = None, **row: Any) -> dict[str, Any]:
    """Return a report of the level in which the check `name` has another row."""
    whole = suite_report(table.NODE)
    for each in whole["checks"]:
        each["numbers"] = {
            "matmul": {"float32-odd-error": 2e-6, "float32-odd-bound": 1e-4},
            "transfers": {"pinned-up-gb-per-s": 20.0},
        }.get(each["name"], {})
        if each["name"] == name:
            each.update({"numbers": each["numbers"] | (numbers or {}), **row})
    return whole


def ends(bench: Bench, capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> tuple[int, str]:
    """Return the exit code and the first word of the only line on stdout."""
    code = bench.run(*argv, **environ)
    (line,) = capsys.readouterr().out.splitlines()
    name, _, value = line.partition(" = ")
    assert name == "ImagefactoryNode"
    assert value.count('"') == 2
    assert "\\" not in value
    return code, value[1:].partition(":")[0]


def fails(outcome: str, detail: str = "off by 3") -> dict[str, str]:
    return {"state": table.FAILED, "outcome": outcome, "detail": detail}


CASES = {
    "as in the verdicts": (report(), PASSED),
    "slower, not by much": (report("transfers", {"pinned-up-gb-per-s": 9.0}), PASSED),
    "a slot with four lanes": (report("transfers", {"pinned-up-gb-per-s": 6.0}), FAILED),
    "an error within its limit": (report("matmul", {"float32-odd-error": 9e-6}), PASSED),
    "an error of another kind": (report("matmul", {"float32-odd-error": 2e-5}), FAILED),
    "wrong numbers": (report("matmul", **fails("wrong-numbers")), FAILED),
    "a hostile text": (report("matmul", **fails("wrong-numbers", '"\\ \x1b]0;x\x07\n"')), FAILED),
    "memory with errors": (report("vector-add", **fails("infrastructure")), FAILED),
    "the driver hangs": (report("vector-add", **fails("timeout")), FAILED),
    "a slow disk": (report("matmul", **fails("timeout")), UNKNOWN),
    "a report without a check": ({**report(), "checks": report()["checks"][:-1]}, UNKNOWN),
    "a check that is missing": (report("training", state=table.NOT_RUN), UNKNOWN),
    "not JSON as the suite writes it": ({"checks": [1]}, UNKNOWN),
    "numbers that are none": (report("matmul", {"float32-odd-error": "x"}), UNKNOWN),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_from_the_verdicts_is_the_node(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = node_bench(tmp_path)
    wrote, result = CASES[case]
    docker(bench, {"report": wrote})
    assert ends(bench, capsys) == result
    assert not (bench.kit / "result").exists()
    assert not list(bench.kit.glob(".work-*"))


def test_what_passed_nowhere_may_be_the_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = {name: numbers for name, numbers in CHECKS.items() if name != "collective"}
    bench = node_bench(tmp_path, signed(checks=others))
    docker(bench, {"report": report("collective", **fails("load-failed"))})
    assert ends(bench, capsys) == UNKNOWN


@pytest.mark.parametrize(
    "changes",
    [{"expires": "2026-01-01T00:00:00Z"}, {"driver": "560.28.03"}, {"name": "Another GPU"}],
    ids=str,
)
def test_without_signed_numbers_nothing_is_started(
    changes: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = signed(**{key: value for key, value in changes.items() if key != "name"})
    if "name" in changes:
        numbers["gpus"] = {changes["name"]: numbers["gpus"][GPU]}
    bench = node_bench(tmp_path, numbers)
    docker(bench, {"report": report()})
    assert ends(bench, capsys) == NO_NUMBERS
    assert bench.calls() == []


def test_a_suite_that_does_not_end_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = node_bench(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imagefactory.verify.kit.program.NODE_SECONDS", 5.5)
        docker(bench, {"report": {**report(), "running": "vector-add", "checks": []}, "sleeps": 600})
        assert ends(bench, capsys) == FAILED
        docker(bench, {"report": {**report(), "running": "matmul", "checks": []}, "sleeps": 600})
        assert ends(bench, capsys) == UNKNOWN


HOSTS = {
    "lost": (Told(lost=0), {}, FAILED),
    "one of two lost": (Told(count=2, lost=1), {}, FAILED),
    "one of two lost, of another job": (Told(count=2, lost=1), {"CUDA_VISIBLE_DEVICES": "0"}, PASSED),
    "halves of a driver": (Told(module="535.54.03"), {}, FAILED),
    "in use": (Told(busy=3), {}, UNKNOWN),
    "in use by its own job": (Told(busy=3), {"CUDA_VISIBLE_DEVICES": UUID}, PASSED),
    "no GPU for this job": (Told(), {"CUDA_VISIBLE_DEVICES": ""}, UNKNOWN),
    "two": (Told(count=2), {}, PASSED),
}


@pytest.mark.parametrize("host", HOSTS)
def test_the_machine_and_its_batch_system_say_which_gpus(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, environ, result = HOSTS[host]
    bench = node_bench(tmp_path, told=told)
    docker(bench, {"report": report()})
    assert ends(bench, capsys, **environ) == result
    runs = sum(call[:2] == ["docker", "run"] for call in bench.calls())
    assert runs == {UNKNOWN: 0, FAILED: int("two" in host), PASSED: 1 + (host == "two")}[result]


def test_the_worst_of_several_gpus_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = node_bench(tmp_path, told=Told(count=2))
    docker(bench, {})
    answer(bench, "docker", {"docker run .*": [{"report": report()}, {"code": 1}]})
    assert ends(bench, capsys) == UNKNOWN
    answer(bench, "docker", {"docker run .*": {"report": report("matmul", **fails("wrong-numbers"))}})
    assert ends(bench, capsys) == FAILED


def test_an_image_that_is_not_on_the_node_is_never_pulled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = node_bench(tmp_path)
    docker(bench, {"report": report()})
    answer(bench, "docker", {"docker image inspect .*": {"code": 1}})
    assert ends(bench, capsys) == (8, "unknown")
    assert not any(call[1] == "pull" for call in bench.calls())


def test_a_kit_whose_numbers_are_gone_is_not_a_kit_for_nodes(tmp_path: Path) -> None:
    bench = node_bench(tmp_path)
    (bench.kit / "signed.json").write_text(json.dumps({"format": 2}))
    assert bench.run() == 2
    (bench.kit / "signed.json").unlink()
    assert bench.run() == 2
