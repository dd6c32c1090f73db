"""Plans: what is built, verified, blocked, unchanged or skipped, and why; rows of a space; the matrix."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory import errors
from imagefactory.errors import RecipeError
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.cells import CellEvidence, answer_cell
from imagefactory.gpu.knowledge import capabilities, only_host
from imagefactory.gpu.values import Cell, CellClaim, CellQuery, ClaimBasis, Compatibility
from imagefactory.matrix.plan import (
    GPU_NOT_LISTED,
    NO_MATCH,
    SKIP_RULES,
    Answerer,
    CellState,
    PlanGpu,
    PlanInput,
    TargetStatus,
    VerificationPlan,
    check_rules,
    make_plan,
    weigh_claims,
)
from imagefactory.matrix.rows import MAX_ROWS, RowRuling, RowsQuery, VersionSpaceRow, parse_rows, rule_rows
from imagefactory.views.plan import format_kits, format_matrix, format_overview, format_plan, format_rows
from tests.made.claims import BUILT, TARGET, claim
from tests.made.command import Call
from tests.made.errors import fails

DATA = Path(__file__).parents[2] / "data"
V100 = PlanGpu(capability=Capability(7, 0), name="V100", driver="535")
A100 = PlanGpu(capability=Capability(8, 0), name="A100")
L40 = PlanGpu(capability=Capability(8, 9), name="L40")


CODE = claim("code", Compatibility.YES)


def judging(
    known: dict[str, Sequence[CellClaim]], warnings: dict[str, Sequence[CellClaim]] | None = None
) -> Answerer:
    """A judge with claims and warnings by capability."""

    def answer(question: CellQuery, evidence: CellEvidence) -> Cell:
        key = str(question.capability)
        claims = (*evidence.verified.values(), *known.get(key, ()))
        return Cell(question=question, claims=claims, warnings=tuple((warnings or {}).get(key, ())))

    return answer


def planned(stage: TargetStatus, judge: Answerer, *devices: PlanGpu, allow: str = "") -> VerificationPlan:
    allowed = frozenset(allow.split())
    return make_plan(PlanInput(stages=(stage,), devices=devices, allow=allowed, answer=judge))


def states(plan: VerificationPlan) -> dict[str, CellState]:
    return {str(cell.device.capability): cell.state for cell in plan.cells}


def test_without_gpus_the_recipes_capabilities_are_planned() -> None:
    plan = planned(TargetStatus(target=TARGET), judging({}))
    assert states(plan) == {"7.0": CellState.BUILD, "8.0": CellState.BUILD}
    assert all(cell.required for cell in plan.cells)
    assert plan.targets[0].reason == "not in the store"


def test_what_nothing_is_known_of_stays_in() -> None:
    (cell,) = planned(TargetStatus(target=TARGET), judging({}), A100).cells
    assert (cell.state, cell.ruling.claim) == (CellState.BUILD, None)
    assert "no evidence" in cell.ruling.reason


def test_an_image_that_is_what_the_lock_gives_is_not_built() -> None:
    there = TargetStatus(target=TARGET, missing="", image=BUILT)
    judge = judging({"8.0": [CODE]})
    assert states(planned(there, judge)) == {"7.0": CellState.UNCHANGED, "8.0": CellState.UNCHANGED}
    (target,) = planned(there, judge, A100).targets
    assert (target.state, target.cells[0].state, target.image) == (CellState.VERIFY, CellState.VERIFY, BUILT)
    assert "matches the lock" in target.reason


def test_what_is_verified_in_the_very_image_is_unchanged_and_elsewhere_it_is_not() -> None:
    passed = claim("suite", Compatibility.YES, ClaimBasis.VERIFIED)
    evidence = CellEvidence(verified={Capability(8, 0): passed})
    there = TargetStatus(target=TARGET, missing="", image=BUILT, evidence=evidence)
    assert states(planned(there, judging({}), A100))["8.0"] is CellState.UNCHANGED
    assert states(planned(replace(there, missing="gone"), judging({}), A100))["8.0"] is CellState.BUILD


def test_without_a_lock_a_cell_is_blocked_unless_it_is_pruned() -> None:
    stuck = TargetStatus(target=TARGET, block="it has no lock", hint="imagefactory lock it")
    (target,) = planned(stuck, judging({"7.0": [claim("no-code")]})).targets
    assert [cell.state for cell in target.cells] == [CellState.SKIPPED, CellState.BLOCKED]
    assert (target.state, target.reason, target.hint) == (
        CellState.BLOCKED,
        "it has no lock",
        "imagefactory lock it",
    )


def test_a_target_for_cpus_has_no_cell_and_is_built_or_there() -> None:
    cpu = replace(TARGET, name="jax-0.10.2-cpu", cuda="none", capabilities=())
    for stage, state in (
        (TargetStatus(target=cpu), CellState.BUILD),
        (TargetStatus(target=cpu, missing="", image=BUILT), CellState.UNCHANGED),
        (TargetStatus(target=cpu, block="it has no lock"), CellState.BLOCKED),
    ):
        for devices in ((), (A100,)):
            made = planned(stage, judging({}), *devices)
            assert (made.cells, made.targets[0].state) == ((), state)
    to_build = planned(TargetStatus(target=cpu), judging({}), A100)
    (job,) = json.loads(format_kits(to_build).partition("=")[2])["include"]
    assert job == {"target": "jax-0.10.2-cpu", "status": "build", "digest": "", "gpu": "none", "kits": ""}
    assert format_matrix(to_build, kits=True) == 'matrix={"include":[]}'
    assert format_kits(
        planned(TargetStatus(target=cpu, missing="", image=BUILT), judging({}), A100)
    ).endswith("[]}")


def test_a_target_whose_cells_are_all_pruned_is_not_built() -> None:
    no = [claim("no-code")]
    (target,) = planned(TargetStatus(target=TARGET), judging({"7.0": no, "8.0": no})).targets
    assert (target.state, target.image, target.hint) == (CellState.SKIPPED, "", "")


def test_a_gpu_beyond_the_recipe_is_planned_and_said_so() -> None:
    plan = planned(TargetStatus(target=TARGET), judging({}), L40)
    assert not plan.cells[0].required
    assert "L40 (8.9) beyond the recipe" in format_plan(plan)


def test_the_question_carries_driver_and_capability() -> None:
    asked: list[CellQuery] = []

    def listen(question: CellQuery, _: CellEvidence) -> Cell:
        asked.append(question)
        return Cell(question=question, claims=())

    planned(TargetStatus(target=TARGET), listen, V100)
    (question,) = asked
    assert (question.framework, question.version, question.cuda) == ("torch", "2.3", "12.1")
    assert (question.capability, question.driver) == (Capability(7, 0), "535")


def test_a_listed_gpu_stands_beside_no_arm_processor_unless_somebody_says_so() -> None:
    arm = replace(TARGET, platform="linux/arm64", capabilities=("9.0",))
    asked: list[CellQuery] = []

    def listen(question: CellQuery, _: CellEvidence) -> Cell:
        asked.append(question)
        return Cell(question=question, claims=())

    gpus = tuple(PlanGpu(capability=Capability(9, 0), host=host) for host in ("", "arm64"))
    for target, devices, on_machines in (
        (arm, gpus, True),
        (arm, (), True),
        (arm, gpus, False),
        (TARGET, gpus, True),
    ):
        stages = (TargetStatus(target=target),)
        make_plan(PlanInput(stages=stages, devices=devices, answer=listen, on_machines=on_machines))
    hosts = [question.host for question in asked]
    assert hosts == ["amd64", "arm64", "", "", "arm64", "", "arm64"]


NO, DOCUMENTED_NO = claim("no-code"), claim("not-documented", basis=ClaimBasis.DOCUMENTED)
OLD, BAD = claim("driver-floor"), claim("known-bad:cublas-blackwell", basis=ClaimBasis.DOCUMENTED)


@pytest.mark.parametrize(
    ("claims", "warnings", "allow", "rule", "allowed"),
    [
        ([CODE], [], "", None, []),
        ([NO], [], "", "no-code", []),
        ([NO], [], "no-code", None, ["no-code"]),
        ([NO], [], "partly", "no-code", []),
        ([claim("partly", Compatibility.PARTLY)], [], "", "partly", []),
        ([claim("through", Compatibility.PTX)], [], "", None, []),
        # A scan outweighs a page; what weighs the same must all be allowed.
        ([CODE, DOCUMENTED_NO], [], "", None, []),
        ([NO, DOCUMENTED_NO], [], "no-code", None, ["no-code"]),
        ([NO, OLD], [], "no-code", "driver-floor", ["no-code"]),
        ([OLD, NO], [], "no-code driver-floor", None, ["driver-floor", "no-code"]),
        # A known fault skips what would run.
        ([CODE], [BAD], "", "known-bad:cublas-blackwell", []),
        ([CODE], [BAD], "known-bad:cublas-blackwell", None, ["known-bad:cublas-blackwell"]),
        ([CODE], [BAD], "known-bad", None, ["known-bad:cublas-blackwell"]),
        ([CODE], [BAD], "known-bad:another", "known-bad:cublas-blackwell", []),
        ([], [BAD], "", "known-bad:cublas-blackwell", []),
    ],
)
def test_what_prunes_and_what_is_allowed(
    claims: list[CellClaim], warnings: list[CellClaim], allow: str, rule: str | None, allowed: list[str]
) -> None:
    question = CellQuery(framework="torch", version="2.3", cuda="12.1", capability=Capability(8, 0))
    cell = Cell(question=question, claims=tuple(claims), warnings=tuple(warnings))
    ruling = weigh_claims(cell, frozenset(allow.split()))
    assert ruling.skipped is (rule is not None)
    assert rule in (None, ruling.claim.rule if ruling.claim else "")
    assert [claim.rule for claim in ruling.allowed] == allowed


def test_an_override_is_shown_and_one_that_changes_nothing_too() -> None:
    plan = planned(
        TargetStatus(target=TARGET), judging({"7.0": [NO]}), allow="no-code driver-floor known-bad"
    )
    assert states(plan) == {"7.0": CellState.BUILD, "8.0": CellState.BUILD}
    assert plan.unused == ("driver-floor", "known-bad")
    text = format_plan(plan)
    assert "  build     7.0: included, although no-code: because of no-code" in text
    assert "--ignore-rule driver-floor changed nothing" in text
    assert "--ignore-rule no-code changed nothing" not in text


def test_what_runs_in_part_is_tested_where_the_recipe_asks_for_it() -> None:
    part = claim("partly", Compatibility.PARTLY)
    plan = planned(TargetStatus(target=TARGET), judging({"8.0": [part], "8.9": [part]}), A100, L40)
    assert states(plan) == {"8.0": CellState.BUILD, "8.9": CellState.SKIPPED}
    text = format_plan(plan, show_sources=True)
    assert "  build     A100 (8.0): predicted to run in part [1]\n" in text
    assert "            warning for A100 (8.0): because of partly [1]\n" in text
    assert "  skipped   L40 (8.9): partly, predicted: because of partly" in text


@pytest.mark.parametrize(
    ("rule", "skips"),
    [
        ("cublas-tensor-memory", False),  # frameworks only warn of it
        ("ort-1.23.0-hopper-ptx", True),  # does not run there
        ("cudnn-9.10.0-enums", True),  # does not run anywhere
        ("conv3d-bfloat16", False),  # wrong results on every GPU
        ("cudnn-before-turing", False),  # some calls fail
        ("conv3d-bfloat16-memory", False),  # slow
    ],
)
def test_what_a_known_fault_prunes(rule: str, skips: bool) -> None:
    fault = claim(f"known-bad:{rule}", basis=ClaimBasis.DOCUMENTED)
    question = CellQuery(framework="torch", version="2.3", cuda="12.1", capability=Capability(8, 0))
    cell = Cell(question=question, claims=(CODE,), warnings=(fault,))
    for required in (True, False):
        ruling = weigh_claims(cell, frozenset(), required=required)
        assert ruling.skipped is skips
        assert ruling.warnings == (() if skips else (fault,))


def test_a_pruned_cell_says_rule_reason_source_and_how_to_override() -> None:
    plan = planned(TargetStatus(target=TARGET), judging({"7.0": [NO]}))
    text = format_plan(plan, show_sources=True)
    assert "  skipped   7.0: no-code, predicted: because of no-code [1]" in text
    assert "to include skipped cells: --ignore-rule no-code" in text
    assert "\n1 target: 1 to build; 2 cells: 1 to build, 1 skipped\n" in text
    assert text.endswith("\nSources\n  [1] a test")
    assert "[1]" not in format_plan(plan)


def test_an_overview_has_one_line_for_each_target() -> None:
    text = format_overview(planned(TargetStatus(target=TARGET), judging({"7.0": [NO]})))
    heading, line, *_ = text.splitlines()
    assert heading.startswith("to build: ")
    assert line.split()[0] == TARGET.name
    assert " 7.0; " in line


def test_rules_that_do_not_exist_are_refused_with_the_nearest() -> None:
    assert check_rules(("no-code", "known-bad:x")) == {"no-code", "known-bad:x"}
    with fails("rule-unknown") as refused:
        check_rules(("nocode",))
    assert "nocode" in refused.value.message
    assert "no-code" in refused.value.hint


def test_the_matrix_is_one_line_of_text_values_with_what_is_to_be_done() -> None:
    no_v100 = judging({"7.0": [NO]})
    line = format_matrix(planned(TargetStatus(target=TARGET), no_v100, V100, A100))
    assert "\n" not in line
    name, _, value = line.partition("=")
    (job,) = json.loads(value)["include"]
    assert name == "matrix"
    assert job == {
        "target": "torchy-2.3-cu121",
        "family": "torchy",
        "framework": "torch",
        "version": "2.3",
        "cuda": "12.1",
        "python": "3.11",
        "platform": "linux/amd64",
        "gpu": "A100",
        "capability": "8.0",
        "driver": "",
        "status": "build",
    }
    unchanged = planned(TargetStatus(target=TARGET, missing="", image=BUILT), no_v100)
    assert format_matrix(unchanged) == 'matrix={"include":[]}'


def test_gpus_that_jobs_cannot_tell_apart_are_one_job() -> None:
    """Of a pool that tells what CUDA drivers take, and no drivers."""
    devices = tuple(PlanGpu(capability=Capability(8, 0), name="A100", cuda=cuda) for cuda in ("12.2", "12.4"))
    made = planned(TargetStatus(target=TARGET), judging({}), *devices)
    assert len(made.cells) == 2
    (job,) = json.loads(format_matrix(made).partition("=")[2])["include"]
    assert (job["gpu"], job["driver"]) == ("A100", "")
    both = json.loads(format_matrix(made, kits=True).partition("=")[2])["include"]
    assert [one["kit"] for one in both] == ["sm80-a100-cuda12.2", "sm80-a100-cuda12.4"]


def test_without_gpus_the_matrix_has_a_job_for_each_image_to_build() -> None:
    stages = (
        TargetStatus(target=TARGET),
        TargetStatus(target=replace(TARGET, name="there"), missing="", image=BUILT),
    )
    made = make_plan(PlanInput(stages=stages, answer=judging({"7.0": [NO]})))
    (job,) = json.loads(format_matrix(made).partition("=")[2])["include"]
    assert (job["target"], job["status"]) == ("torchy-2.3-cu121", "build")
    assert (job["gpu"], job["capability"], job["driver"]) == ("", "", "")


def test_a_plan_of_nothing_says_so() -> None:
    assert format_plan(make_plan(PlanInput(stages=()))) == "0 targets; 0 cells"


@pytest.mark.parametrize("width", [None, 70, 300])
def test_a_plan_fits_the_terminal(width: int | None) -> None:
    long = replace(NO, reason="word " * 60 + "end")
    plan = planned(TargetStatus(target=TARGET), judging({"7.0": [long]}))
    lines = format_plan(plan, width).splitlines()
    assert max(map(len, lines)) <= min(width or 110, 110)
    assert "            word " in "\n".join(lines)


HEADER = "framework,framework_version,cuda,capability,outcome\n"


def rows(text: str) -> tuple[VersionSpaceRow, ...]:
    return parse_rows(text, "space.csv")


def test_rows_are_read_by_either_name_and_in_any_order_of_columns() -> None:
    found = rows(
        "# a comment\n\nCapability,driver, framework_version,framework,cuda\n"
        '8.6,535,2.3,PyTorch,12.1\nsm_70,,"2.15",tensorflow,12\n'
    )
    assert [(row.where, row.framework, row.version, row.cuda, str(row.device)) for row in found] == [
        ("space.csv:4", "torch", "2.3", "12.1", "8.6 (driver 535)"),
        ("space.csv:5", "tensorflow", "2.15", "12", "7.0"),
    ]
    assert rows("\ufeff" + HEADER + "torch,2.3,12.1,8.0,valid\n")[0].outcome == "valid"
    assert rows(HEADER) == ()


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("", "column-missing", "space.csv:1: the column framework"),
        ("framework,version,cuda\n", "column-missing", "space.csv:1: the column capability"),
        (
            "framework,version,cuda,capabillity\n",
            "column-unknown",
            "unknown column 'capabillity' (did you mean 'capability'?)",
        ),
        ("framework,version,version,cuda,capability\n", "duplicate-column", "space.csv:1: "),
        (
            "framework,vers\x1b[31mion,cuda,capability\n",
            "column-unknown",
            r"unknown column 'vers\x1b[31mion'",
        ),
        (HEADER + "torch,2.3,12.1\n", "columns-mismatch", "space.csv:2: 3 values for 5 columns"),
        (
            HEADER + "pytorh,2.3,12.1,8.0,\n",
            "framework-unknown",
            "space.csv:2: unknown framework 'pytorh' (did you mean 'pytorch'",
        ),
        (
            HEADER + "\npytorch,two,12.1,8.0,\n",
            "value-invalid",
            "space.csv:3: version cannot be 'two' (write a version such as 2.3)",
        ),
        (HEADER + "pytorch,2.3,cu121,8.0,\n", "value-invalid", "space.csv:2: cuda cannot be 'cu121'"),
        (HEADER + "pytorch,2.3,,8.0,\n", "value-invalid", "space.csv:2: cuda cannot be ''"),
        (HEADER + "pytorch,2.3,12.1,big,\n", "capability-invalid", "space.csv:2: 'big'"),
        (HEADER + 'pytorch,2.3,12.1,"8.0,\n', "csv-invalid", "space.csv:2: "),
        (HEADER + 'pytorch,2.3,12.1,"8.0"x,\n', "csv-invalid", "space.csv:2: "),
        (HEADER + "pytorch,2.3,12.1,8.0,\x00\n", "hidden-character", "space.csv:2"),
        (
            "framework,version,cuda,capability,driver\ntorch,2.3,12.1,8.0,new\n",
            "value-invalid",
            "space.csv:2: 'new' is not a driver version",
        ),
    ],
)
def test_a_fault_of_a_row_is_told_with_file_and_line(text: str, code: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        rows(text)
    assert code in [one.code for one in error.value.diagnostics]
    assert told in error.value.message
    assert error.value.message.startswith("space.csv:")


@given(st.text(st.characters(codec="utf-8"), max_size=200), st.booleans())
def test_any_text_is_read_or_refused(text: str, headed: bool) -> None:
    found: list[VersionSpaceRow] = []
    faults: list[str] = []
    try:
        found = list(rows(HEADER + text if headed else text))
    except RecipeError as error:
        faults = list(error.faults)
    assert all(fault.startswith("space.csv:") for fault in faults)
    assert all(row.version and row.cuda for row in found)


def test_all_faults_are_told_up_to_a_number_and_rows_are_bounded() -> None:
    with pytest.raises(RecipeError) as error:
        rows(HEADER + "torch,2.3,12.1,8.0\n" * 30)
    assert len(error.value.faults) == 21
    assert (error.value.diagnostics[-1].code, error.value.faults[-1].split()[1]) == ("more-problems", "10")
    with pytest.raises(RecipeError) as caught:
        rows(HEADER + "torch,2.3,12.1,8.0,\n" * (MAX_ROWS + 1))
    assert [one.code for one in caught.value.diagnostics] == ["too-many-rows"]


def test_rows_meet_the_listed_gpus_of_their_capability_and_their_drivers() -> None:
    (first, second) = rows(HEADER + "torch,2.3,12.1,7.0,\ntorch,2.3,12.1,9.0,\n")
    judged = rule_rows(RowsQuery(rows=(first, second), devices=(V100, A100), answer=judging({})))
    assert [(str(one.row.device), one.ruling.skipped) for one in judged] == [
        ("V100 (7.0, driver 535)", False),
        ("9.0", True),
    ]
    assert judged[1].ruling.claim is not None
    assert judged[1].ruling.claim.rule == "gpu-not-listed"
    allowed = rule_rows(
        RowsQuery(rows=(second,), devices=(V100,), allow=frozenset({"gpu-not-listed"}), answer=judging({}))
    )
    assert not allowed[0].ruling.skipped
    own = replace(first, device=replace(first.device, driver="470"))
    assert (
        rule_rows(RowsQuery(rows=(own,), devices=(V100,), answer=judging({})))[0].row.device.driver == "470"
    )


def in_a_pool(text: str, *devices: PlanGpu, **how: bool) -> list[tuple[bool, str]]:
    """Whether each row is skipped in a pool of such GPUs, and why."""
    given = RowsQuery(
        rows=rows(HEADER + text), devices=devices, answer=judging({}), pool="the inventory", **how
    )
    return [(one.ruling.skipped, one.ruling.reason) for one in rule_rows(given)]


def test_rows_meet_a_pool_once_by_the_newest_driver_of_their_capability() -> None:
    old, new = (PlanGpu(capability=Capability(8, 0), cuda=cuda) for cuda in ("11.4", "12.2"))
    assert [skipped for skipped, _ in in_a_pool("torch,2.3,12.1,8.0,\n", new, old)] == [False]
    assert in_a_pool("torch,2.3,12.1,9.0,\n", new, old) == [(True, "no GPU there has capability 9.0")]
    assert in_a_pool("torch,2.3,12.1,8.0,\n", old) == [
        (True, "the drivers of GPUs with 8.0 take CUDA 11.4 at most, and CUDA 12.0 is needed")
    ]


def test_one_driver_in_a_pool_is_enough_be_it_newer_than_any_that_is_known() -> None:
    text = "torch,2.9,13.0,8.0,\n"
    known, newer, untold = (PlanGpu(capability=Capability(8, 0), cuda=cuda) for cuda in ("12.4", "13.99", ""))
    assert newer.oldest_driver == ""  # no table has it
    for pool in ((known, newer), (newer, known), (known, untold)):
        assert [skipped for skipped, _ in in_a_pool(text, *pool)] == [False], pool
    assert [skipped for skipped, _ in in_a_pool(text, known)] == [True]


def test_a_driver_of_the_same_major_is_enough_unless_one_asks_for_the_very_cuda() -> None:
    device = PlanGpu(capability=Capability(8, 0), cuda="12.2")
    assert [skipped for skipped, _ in in_a_pool("torch,2.6,12.4,8.0,\n", device)] == [False]
    assert in_a_pool("torch,2.6,12.4,8.0,\n", device, strict=True) == [
        (True, "the drivers of GPUs with 8.0 take CUDA 12.2 at most, and CUDA 12.4 is needed")
    ]
    told = PlanGpu(capability=Capability(8, 0), driver="535.129.03")
    assert [skipped for skipped, _ in in_a_pool("torch,2.6,12.2,8.0,\n", told, strict=True)] == [False]
    assert in_a_pool("torch,2.6,12.4,8.0,\n", told, strict=True) == [
        (True, "the drivers of GPUs with 8.0 are 535.129.03 at most, and CUDA 12.4 is needed")
    ]
    untold = PlanGpu(capability=Capability(8, 0))
    assert [skipped for skipped, _ in in_a_pool("torch,2.6,12.4,8.0,\n", untold, strict=True)] == [False]


def test_recorded_outcomes_stand_for_a_solver_where_they_are_asked_to() -> None:
    text = "torch,2.3,12.1,8.0,Environment Resolution Failure\ntorch,2.3,12.1,8.0,Failure to Match\n"
    assert [skipped for skipped, _ in in_a_pool(text)] == [False, False]
    assert in_a_pool(text, recorded=True)[0] == (
        True,
        "recorded as 'Environment Resolution Failure', not solved here",
    )
    given = RowsQuery(rows=rows(HEADER + text), answer=judging({}), recorded=True)
    assert "unsolvable: recorded as" in format_rows(rule_rows(given), ())  # no page documents that
    allowed = replace(given, allow=frozenset({"unsolvable"}))
    assert not any(one.ruling.skipped for one in rule_rows(allowed))


def test_a_table_of_rows_says_why_and_what_became_of_them() -> None:
    found = rows(HEADER + "pytorch,2.3,12.1,7.0,valid\npytorch,2.3,12.1,8.0,\n")
    text = format_rows(
        rule_rows(RowsQuery(rows=found, answer=judging({"8.0": [NO]}))), ("partly",), show_sources=True
    )
    assert "OUTCOME" in text
    assert "no-code, predicted: because of no-code [1]" in text
    assert "2 rows: 1 accepted (1 unknown), 1 skipped (1 no-code)\n  valid: 1 accepted" in text
    assert "--ignore-rule partly changed nothing" in text


def read_table(name: str) -> list[dict[str, str]]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def judged_space(
    framework: str, versions: Sequence[tuple[str, str]]
) -> dict[tuple[str, str, str], RowRuling]:
    """Every (version, CUDA) on every known capability, judged by what the tree knows."""
    lines = [f"{framework},{v},{cuda},{one}," for v, cuda in versions for one in capabilities()]
    judged = rule_rows(RowsQuery(rows=rows(HEADER + "\n".join(lines))))
    assert len(judged) == len(lines) > 0
    return {(one.row.version, one.row.cuda, str(one.row.device.capability)): one for one in judged}


def assert_explained(judged: RowRuling) -> None:
    """A row is accepted on a ground or skipped by a rule, with a reason and a source; or nothing is known."""
    claim = judged.ruling.claim
    if claim is None:
        assert not judged.ruling.skipped
        return
    assert claim.reason
    assert claim.source
    if judged.ruling.skipped:
        assert claim.rule in SKIP_RULES or claim.rule.startswith("known-bad:")


INTEGRATED = {"5.3", "6.2", "7.2", "8.7", "11.0"}


def runs_on(capability: Capability, targets: str) -> bool:
    """The rule of the CUDA programming guide, spelled again: same major, same or lower minor; PTX upwards."""
    for word in targets.split():
        target = parse_capability(word.removesuffix("+PTX"))
        integrated = {str(capability), str(target)} & INTEGRATED
        if target == capability or (
            target.major == capability.major and target <= capability and not integrated
        ):
            return True
        if word.endswith("+PTX") and capability >= target:
            return True
    return False


DISCRETE = tuple(capability for capability in capabilities() if not only_host(capability))
"""Those of GPUs next to an amd64 processor, for which these tables are."""


def test_pytorchs_tables_are_accepted_or_pruned_row_by_row() -> None:
    table = read_table("pytorch_releases.csv")
    judged = judged_space("pytorch", [(row["torch"], row["cuda"]) for row in table])
    for row in table:
        for capability in DISCRETE:
            one = judged[row["torch"], row["cuda"], str(capability)]
            assert_explained(one)
            claim, where = one.ruling.claim, f"torch {row['torch']} CUDA {row['cuda']} on {capability}"
            # The project has this build, so no rule may say that it has not.
            assert claim is None or claim.rule != "cuda-not-offered", where
            if claim is None:
                pytest.fail(f"{where}: documented, and nothing is known")
            elif claim.basis is ClaimBasis.DOCUMENTED and not claim.rule.startswith("known-bad:"):
                assert one.ruling.skipped is not runs_on(capability, row["targets"]), where
    # Documented and scanned differ where the project's own pages do not hold: Turing in 2.11 to 2.14.
    hole = judged["2.12", "13.0", "7.5"].ruling
    assert hole.claim is not None
    assert (hole.skipped, hole.claim.rule, hole.claim.basis) == (True, "partly", ClaimBasis.PREDICTED)


def test_cogs_tensorflow_table_is_accepted_or_pruned_row_by_row() -> None:
    table = read_table("cog_tensorflow.csv")
    judged = judged_space("tensorflow", [(row["tf"], row["cuda"]) for row in table])
    for row in table:
        for capability in DISCRETE:
            one = judged[row["tf"], row["cuda"], str(capability)]
            assert_explained(one)
            claim = one.ruling.claim
            assert claim is None or claim.rule != "cuda-not-offered", (row, capability)
        # A data-center GPU that every one of these was made for.
        known_bad = row["tf"] == "2.16.1"  # it does not find its CUDA wheels
        assert judged[row["tf"], row["cuda"], "7.0"].ruling.skipped is known_bad, row
    wrong = [(row["tf"], "12.1" if row["cuda"].startswith("11.") else "11.2") for row in table]
    for (version, cuda, capability), one in judged_space("tensorflow", wrong).items():
        if parse_capability(capability) not in DISCRETE:
            continue
        assert_explained(one)
        assert one.ruling.skipped, (version, cuda)
        rules = {claim.rule for claim in answer_cell(question_of(one), CellEvidence()).claims}
        assert "cuda-not-offered" in rules, (version, cuda)


def question_of(one: RowRuling) -> CellQuery:
    row = one.row
    return CellQuery(
        framework=row.framework, version=row.version, cuda=row.cuda, capability=row.device.capability
    )


GPUS = """\
- {name: V100, driver: "535", count: 4}
- {name: RTX 5090, driver: "575"}
- {capability: 8.6}
"""


@pytest.fixture
def gpus(tmp_path: Path) -> str:
    path = tmp_path / "gpus.yaml"
    path.write_text(GPUS)
    return str(path)


def test_plan_shows_every_target_and_explains_every_cell(call: Call) -> None:
    said = call("plan", "--json").json()
    assert said["format"] == "imagefactory.plan/1"
    targets: Any = said["targets"]
    listed: Any = call("list", "--json").json()["targets"]
    assert [row["target"] for row in targets] == [row["target"] for row in listed]
    for row in targets:
        assert row["reason"]
        for cell in row["cells"]:
            assert cell["reason"]
            assert bool(cell["override"]) is (cell["status"] == "skipped")
            assert cell["source"] or cell["answer"] == "unknown"


def test_what_the_recipes_require_is_not_pruned(call: Call) -> None:
    """The committed recipes ask for nothing that is known to fail."""
    targets: Any = call("plan", "--json").json()["targets"]
    skipped = [
        (row["target"], cell["capability"], cell["rule"], cell["reason"])
        for row in targets
        for cell in row["cells"]
        if cell["status"] == "skipped"
    ]
    assert skipped == []


def test_plan_for_listed_gpus_prunes_and_allows(call: Call, gpus: str) -> None:
    said = call("plan", "pytorch-2.3-cu121", "pytorch-2.9-cu128", "--inventory", gpus)
    assert said.code == 0
    old, new = said.out.split("pytorch-2.9-cu128")
    assert "V100 (7.0, driver 535)" in old
    assert "skipped   RTX 5090 (12.0, driver 575): no-code, predicted: " in old
    (line,) = [line for line in new.splitlines() if line.startswith("to include skipped cells: ")]
    overrides = line.partition(": ")[2].split()
    assert "no-code" in overrides
    again = call("plan", "pytorch-2.3-cu121", "--inventory", gpus, *overrides)
    assert "skipped" not in again.out
    assert "RTX 5090 (12.0, driver 575) beyond the recipe: included, although no-code: " in again.out


def test_an_old_driver_prunes(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text('- {name: A100, driver: "470.57"}\n')
    said: Any = call("plan", "pytorch-2.9-cu128", "--inventory", str(path), "--json").json()
    (cell,) = said["targets"][0]["cells"]
    assert (cell["status"], cell["rule"], cell["driver"]) == ("skipped", "driver-floor", "470.57")


def test_the_matrix_goes_to_stdout_and_the_summary_to_stderr(call: Call, gpus: str) -> None:
    said = call("plan", "pytorch-2.3-cu121", "--inventory", gpus, "--github")
    assert said.code == 0
    assert said.out.count("\n") == 1
    jobs = json.loads(said.out.removeprefix("matrix="))["include"]
    assert {job["gpu"] for job in jobs} == {"V100", ""}
    assert said.err.startswith("1 target: 1 to build; 3 cells: 2 to build, 1 skipped")


def test_without_a_lock_a_target_is_blocked(call: Call, root: Path) -> None:
    (root / "lockfiles" / "pytorch-2.3-cu121.requirements.txt").unlink()
    said = call("plan", "pytorch-2.3-cu121", root=root)
    assert said.code == 0
    assert "pytorch-2.3-cu121  blocked: pytorch-2.3-cu121 has no lock" in said.out
    assert "hint: run imagefactory lock pytorch-2.3-cu121" in said.out
    assert json.loads(call("plan", "pytorch-2.3-cu121", "--github", root=root).out[7:])["include"] == []


def test_wrong_files_are_told_with_file_and_line(call: Call, tmp_path: Path) -> None:
    gpus_file, csv_file = tmp_path / "gpus.yaml", tmp_path / "space.csv"
    gpus_file.write_text("- name: V100\n- nme: A100\n")
    said = call("plan", "--inventory", str(gpus_file))
    assert said.code == errors.EXIT_USAGE
    assert "gpus.yaml:2:3" in said.err
    csv_file.write_bytes(b"framework,version,cuda,capability\ntorch,2.3,12.1,\xff\n")
    said = call("plan", "--tuples", str(csv_file))
    assert said.code == errors.EXIT_USAGE
    assert "space.csv:2: " in said.err
    assert call("plan", "--tuples", str(tmp_path / "none.csv")).code == errors.EXIT_USAGE
    assert call("plan", "--inventory", str(tmp_path / "none.yaml")).code == errors.EXIT_USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        ("--github", "--json"),
        ("--ignore-rule", "everything"),
        ("pytorch-2.3-cu121", "--tuples", "x.csv"),
        ("--tuples", "x.csv", "--github"),
    ],
)
def test_contradictions_are_exit_code_2(call: Call, arguments: tuple[str, ...]) -> None:
    assert call("plan", *arguments).code == errors.EXIT_USAGE


def test_nothing_selected_is_exit_code_3(call: Call) -> None:
    assert call("plan", "no-such-target").code == errors.EXIT_NOTHING_SELECTED


def test_rows_are_judged_from_the_command_line(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "space.csv"
    path.write_text(HEADER + "pytorch,2.3,12.1,7.0,valid\npytorch,2.3,9.0,7.0,\npytorch,2.3,12.1,12.0,\n")
    said = call("plan", "--tuples", str(path))
    assert said.code == 0
    found: Any = call("plan", "--tuples", str(path), "--json").json()
    assert found["format"] == "imagefactory.plan-tuples/1"
    assert [(row["status"], row["location"]) for row in found["rows"]] == [
        ("accepted", "space.csv:2"),
        ("skipped", "space.csv:3"),
        ("skipped", "space.csv:4"),
    ]
    assert found["rows"][1]["rule"] == "cuda-not-offered"
    assert found["rows"][1]["override"] == "--ignore-rule cuda-not-offered"


def test_every_rule_that_prunes_is_one_that_a_judge_gives() -> None:
    """Else `--allow` would take a word that can change nothing."""
    told = re.findall(
        r"^    ([a-z-]+)(?::ID)?  ", sys.modules[answer_cell.__module__].__doc__ or "", re.MULTILINE
    )
    assert {*SKIP_RULES} - {GPU_NOT_LISTED, NO_MATCH} == {*told}
