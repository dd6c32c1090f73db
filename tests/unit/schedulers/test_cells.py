"""Which cells of a pool are queued, and why the others are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.cells import CellEvidence, answer_cell
from imagefactory.gpu.values import Cell, CellQuery, Compatibility
from imagefactory.matrix.plan import Answerer, TargetStatus
from imagefactory.model import CheckResult, CheckState, Outcome
from imagefactory.schedulers.cells import (
    CellRequest,
    SweepPlan,
    check_allowed,
    choose_tuple,
    driver_of,
    exclude_bad_machines,
    parse_tuple,
    plan_sweep,
    within_budget,
)
from imagefactory.schedulers.pool import Inventory
from imagefactory.suite.gpu import table
from imagefactory.trust.verdict import Verdict, VerdictStatus, VerificationResult
from tests.made.claims import TARGET, claim
from tests.made.errors import fails
from tests.made.sweep import inventory, pool_gpu
from tests.made.verdicts import DAY, HOST, MADE_UP, NOW, whole_report

STAGE = TargetStatus(target=TARGET, missing="", image="sha256:" + "a" * 64)


def known(answers: dict[str, Compatibility], rule: str = "no-code") -> Answerer:
    def judge(question: CellQuery, _: CellEvidence) -> Cell:
        answer = answers.get(str(question.capability))
        return Cell(question=question, claims=(claim(rule, answer),) if answer else ())

    return judge


def plan(*stages: TargetStatus, gpus: Inventory | None = None, **asked: Any) -> SweepPlan:
    return plan_sweep(stages or (STAGE,), gpus or inventory(), CellRequest(**{"answer": known({}), **asked}))


def queued(made: SweepPlan) -> list[tuple[str, str, str]]:
    return [(cell.stage.target.name, str(cell.capability), cell.cuda) for cell in made.cells]


def left(made: SweepPlan) -> list[tuple[str, str]]:
    return [(one.capability, one.rule) for one in made.skipped]


def verdict(capability: str = "8.0", driver: str = "550.54.15", **changes: Any) -> VerificationResult:
    report = whole_report(
        device=replace(MADE_UP, capability=capability), hardware=replace(HOST, driver=driver), **changes
    )
    made = Verdict(report=report, issued=NOW, expires=NOW + 9 * DAY, keyid="k")
    return VerificationResult(digest="sha256:" + "e" * 64, standing=VerdictStatus.GOOD, why="", verdict=made)


def test_an_image_for_cpus_is_left_out_of_a_sweep() -> None:
    cpu = replace(STAGE, target=replace(TARGET, name="jax-0.10.2-cpu", cuda="none", capabilities=()))
    made = plan(STAGE, cpu)
    assert {name for name, _, _ in queued(made)} == {TARGET.name}
    assert [(one.target, one.rule) for one in made.skipped] == [("jax-0.10.2-cpu", "no-gpu")]
    with fails("rule-not-allowed", message="no-gpu"):
        check_allowed(["no-gpu"])


def test_a_job_on_two_nodes_needs_two_and_a_verdict_of_its_own() -> None:
    two = inventory(pool_gpu("8.0"), pool_gpu("8.0"), pool_gpu("7.0"))
    one = replace(STAGE, verdicts=(verdict(),))
    assert [row[1] for row in queued(plan(one, gpus=two))] == ["7.0"]
    assert [row[1] for row in queued(plan(one, gpus=two, nodes_each=2))] == ["8.0"]
    assert ("7.0", "no-match") in left(plan(one, gpus=two, nodes_each=2))
    assert queued(plan(one, gpus=two, nodes_each=3)) == []

    checks = tuple(
        CheckResult(name=name, state=CheckState.PASSED, detail="", seconds=0.1, numbers=(("nodes", 2.0),))
        for name in table.checks_of("nodes")
    )
    both = verdict(level="nodes", outcome=Outcome.TOGETHER, checks=checks)
    stage = replace(STAGE, verdicts=(both,))
    assert queued(plan(stage, gpus=two, nodes_each=2)) == []
    assert [row[1] for row in queued(plan(stage, gpus=two))] == ["7.0", "8.0"]
    three = inventory(*(pool_gpu("8.0") for _ in range(3)))
    assert [row[1] for row in queued(plan(stage, gpus=three, nodes_each=3))] == ["8.0"]


def test_an_image_for_amd_is_left_out_of_a_sweep() -> None:
    amd = replace(
        STAGE, target=replace(TARGET, name="jax-0.10.2-rocm7", cuda="rocm7", capabilities=("gfx90a",))
    )
    (skipped,) = plan(STAGE, amd).skipped
    assert (skipped.target, skipped.rule) == ("jax-0.10.2-rocm7", "no-gpu")


# --- what is queued --------------------------------------------------------------------------------


def test_a_capability_is_one_job_however_many_gpus_have_it() -> None:
    made = plan(
        gpus=inventory(pool_gpu("7.0"), pool_gpu("8.0"), pool_gpu("8.0", driver="535.54.03", cuda="12.2"))
    )
    assert queued(made) == [(TARGET.name, "7.0", "12.0"), (TARGET.name, "8.0", "12.0")]
    assert [cell.gpus for cell in made.cells] == [1, 2]


def test_gpus_beside_another_processor_are_no_place_for_an_image() -> None:
    """Grace and H100 have one capability; where the pool has both, the job is for the latter's machine."""
    grace = pool_gpu("9.0", name="NVIDIA GH200 480GB", host="arm64")
    made = plan(gpus=inventory(grace), answer=answer_cell)
    assert (queued(made), left(made)[0]) == ([], ("9.0", "architecture"))
    assert "built for amd64, but the processor next to that GPU is arm64" in made.skipped[0].reason
    both = plan(gpus=inventory(grace, pool_gpu("9.0", host="amd64")), answer=answer_cell)
    assert [cell.gpus for cell in both.cells] == [1]


def test_what_is_known_to_fail_is_left_out_under_its_rule_and_comes_back_by_it() -> None:
    judge = known({"7.0": Compatibility.NO, "8.0": Compatibility.YES})
    made = plan(answer=judge)
    assert queued(made) == [(TARGET.name, "8.0", "12.0")]
    assert left(made) == [("7.0", "no-code")]
    assert len(plan(answer=judge, allow=frozenset({"no-code"})).cells) == 2


def test_a_capability_that_the_pool_lacks_matches_nothing() -> None:
    made = plan(capabilities=(Capability(9, 0), Capability(8, 0)))
    assert queued(made) == [(TARGET.name, "8.0", "12.0")]
    assert left(made) == [("9.0", "no-match")]
    wide = TargetStatus(target=replace(TARGET, capabilities=("7.0", "9.0")))
    assert left(plan(wide)) == [("9.0", "no-match")]


def test_a_driver_too_old_for_the_image_matches_nothing() -> None:
    old = pool_gpu("7.0", driver="", cuda="11.4")
    made = plan(gpus=inventory(old))
    assert left(made) == [("7.0", "no-match"), ("8.0", "no-match")]
    assert "CUDA 11.4 at most, the image needs 12.0" in made.skipped[0].reason
    both = plan(gpus=inventory(old, pool_gpu("7.0", cuda="12.2")))
    assert [(cell.cuda, cell.gpus) for cell in both.cells] == [("12.2", 1)]


def test_of_gpus_that_tell_no_driver_none_is_asked() -> None:
    made = plan(gpus=inventory(pool_gpu("8.0", driver="", cuda="")))
    assert queued(made) == [(TARGET.name, "8.0", "")]


def test_slices_of_gpus_are_another_class() -> None:
    gpus = inventory(pool_gpu("8.0", mig=True))
    assert [(one.row, one.rule) for one in plan(gpus=gpus).skipped] == [
        ("8.0 mig", "mig"),
        ("7.0", "no-match"),
        ("8.0", "no-match"),
    ]
    assert [cell.row for cell in plan(gpus=gpus, mig=True).cells] == ["8.0 mig"]


def test_each_profile_of_slices_is_a_row_and_proves_nothing_of_another() -> None:
    named = {part: f"NVIDIA H100 80GB HBM3 MIG {part}" for part in ("1g.10gb", "3g.40gb")}
    gpus = inventory(pool_gpu("9.0"), *(pool_gpu("9.0", mig=True, name=name) for name in named.values()))
    rows = ["9.0", "9.0 1g.10gb", "9.0 3g.40gb"]
    assert [cell.row for cell in plan(gpus=gpus, mig=True).cells] == rows
    for proven, name in (("9.0", MADE_UP.name), ("9.0 1g.10gb", named["1g.10gb"])):
        good = verdict("9.0")
        assert good.verdict
        report = good.verdict.report
        assert report.device
        report = replace(report, device=replace(report.device, name=name))
        stage = replace(STAGE, verdicts=(replace(good, verdict=replace(good.verdict, report=report)),))
        made = plan(stage, gpus=gpus, mig=True)
        assert [cell.row for cell in made.cells] == [row for row in rows if row != proven]
        assert [one.row for one in made.skipped if one.rule == "verified"] == [proven]


def test_cells_whose_machines_are_avoided_are_left_out_with_their_names() -> None:
    made = plan(machines=("!gpu1",))
    assert queued(made) == [(TARGET.name, "7.0", "12.0")]
    assert left(made) == [("8.0", "avoided")]
    assert "gpu1.pool.test" in made.skipped[0].reason
    assert plan(machines=("!gpu9",)).notes == ("no machine with a GPU is called !gpu9",)
    for rule in ("avoided", "mig"):
        with fails("rule-has-option", message=rule):
            check_allowed([rule])


def test_the_newest_versions_of_each_family() -> None:
    stages = [
        TargetStatus(target=replace(TARGET, name=f"{family}-{version}", family=family, version=version))
        for family, version in (("torchy", "2.9"), ("torchy", "2.10"), ("torchy", "1.13"), ("flow", "2.1"))
    ]
    made = plan(*stages, newest=2, capabilities=(Capability(8, 0),))
    assert [name for name, _, _ in queued(made)] == ["torchy-2.9", "torchy-2.10", "flow-2.1"]
    assert [(one.target, one.rule) for one in made.skipped] == [("torchy-1.13", "newest")]


def test_what_cannot_be_built_is_blocked() -> None:
    made = plan(
        TargetStatus(target=TARGET, block="it has no lock", hint="imagefactory lock torchy-2.3-cu121")
    )
    assert left(made) == [("7.0", "blocked"), ("8.0", "blocked")]


# --- what is proven --------------------------------------------------------------------------------


def test_a_verdict_on_the_oldest_driver_there_is_enough() -> None:
    """Of a newer one the older GPUs are left, and only they are asked for."""
    gpus = inventory(pool_gpu("8.0"), pool_gpu("8.0", driver="535.54.03", cuda="12.2"))

    def first(*verdicts: VerificationResult, **asked: Any) -> list[tuple[str, bool, int]]:
        made = plan(replace(STAGE, verdicts=verdicts), gpus=gpus, **asked)
        return [(cell.first, cell.only, cell.gpus) for cell in made.cells]

    assert first() == [("535.54.03", False, 2)]
    assert first(verdict()) == [("535.54.03", True, 1)]
    assert first(verdict(driver="535.54.03")) == []
    assert first(verdict(driver="535.54.03"), allow=frozenset({"verified"})) == [("535.54.03", False, 2)]
    alike = plan(gpus=inventory(pool_gpu("8.0"), pool_gpu("8.0")))
    assert [cell.first for cell in alike.cells] == [""]


def test_bad_machines_do_not_come_first_and_the_next_driver_does() -> None:
    told = {"470.57.02": "11.4", "535.54.03": "12.2", "545.23.06": "12.3", "550.54.15": "12.4"}
    gpus = inventory(*(pool_gpu("8.0", driver=driver, cuda=told[driver]) for driver in told))

    def first(made: SweepPlan, *bad: int) -> list[tuple[str, bool, int]]:
        names = {"8.0": {f"gpu{number}.pool.test" for number in bad}}
        found = exclude_bad_machines(made, gpus, names)
        rules = [one.rule for one in found.skipped if one.capability == "8.0"]
        assert rules == ([] if found.cells else ["bad-machine"])
        return [(cell.first, cell.only, cell.gpus) for cell in found.cells]

    every, only = plan(gpus=gpus), plan(replace(STAGE, verdicts=(verdict(),)), gpus=gpus)
    assert first(every) == first(every, 0, 2) == [("535.54.03", False, 3)]  # gpu0 is too old for the image
    assert first(every, 1) == [("545.23.06", False, 3)]
    assert first(every, 1, 2) == [("", False, 3)]
    assert first(only) == first(only, 3) == [("535.54.03", True, 1)]
    assert first(only, 1) == [("545.23.06", True, 1)]
    assert first(only, 1, 2) == []  # what is left there has been verified


def test_what_is_over_the_budget_waits_and_the_oldest_verdict_comes_first() -> None:
    """A run of an image before says how long it takes; without one the suite's own time does."""
    lapsed = [
        replace(
            found, standing=VerdictStatus.EXPIRED, verdict=replace(found.verdict, issued=NOW - days * DAY)
        )
        for found, days in ((verdict("7.0"), 100), (verdict("8.0"), 200))
        if found.verdict
    ]
    stages = (
        replace(STAGE, target=replace(TARGET, name="torchy-2.4-cu121")),
        replace(STAGE, verdicts=tuple(lapsed)),
    )
    made = plan(*stages, gpu_hours=1)

    def kept(seconds: float, **asked: Any) -> list[tuple[str, str]]:
        cut = within_budget(made, CellRequest(**{"gpu_hours": 1, **asked}), seconds, NOW.date())
        assert len(cut.cells) + len(cut.skipped) == 4
        assert {one.rule for one in cut.skipped} <= {"budget"}
        return [(cell.stage.target.name, str(cell.capability)) for cell in cut.cells]

    assert kept(4000) == [(TARGET.name, "7.0"), (TARGET.name, "8.0")]
    assert len(kept(2000)) == 3
    assert len(kept(1)) == 4
    assert len(kept(4000, allow=frozenset({"budget"}))) == 4
    assert len(kept(4000, gpu_hours=0)) == 4
    only = replace(made, cells=tuple(cell for cell in made.cells if not cell.stage.verdicts))
    cut = within_budget(only, CellRequest(gpu_hours=1), 9000, NOW.date())
    assert len(cut.cells) == 1  # one at least, or it would never be its turn
    long = replace(made, cells=made.cells[2:])
    cut = within_budget(long, CellRequest(gpu_hours=1), 9000, NOW.date())
    assert len(cut.cells) == 2


@pytest.mark.parametrize(
    "judged",
    [
        verdict(driver="560.28.03"),  # newer than any driver of the pool
        verdict("8.6"),  # 8.6 says nothing of 8.0
        verdict(outcome=Outcome.TIMEOUT),
        replace(verdict(), standing=VerdictStatus.EXPIRED),
    ],
)
def test_a_verdict_that_does_not_hold_there_proves_nothing(judged: VerificationResult) -> None:
    made = plan(replace(STAGE, verdicts=(judged,)), capabilities=(Capability(8, 0),))
    assert queued(made) == [(TARGET.name, "8.0", "12.0")]


def test_what_a_suite_said_against_an_image_prunes() -> None:
    from imagefactory.gpu.cells import answer_cell

    refused = verdict(outcome=Outcome.WRONG_NUMBERS)
    made = plan(replace(STAGE, verdicts=(refused,)), answer=answer_cell, capabilities=(Capability(8, 0),))
    assert left(made) == [("8.0", "wrong-numbers")]


def test_a_pool_that_tells_what_cuda_its_drivers_take_is_compared_by_that() -> None:
    stage = replace(STAGE, verdicts=(verdict(),))  # of a driver that takes CUDA 12.4
    for cuda, rules in (("12.6", ["verified"]), ("12.4", ["verified"]), ("12.2", [])):
        gpus = inventory(pool_gpu("8.0", driver="", cuda=cuda))
        made = plan(stage, gpus=gpus, capabilities=(Capability(8, 0),))
        assert [one.rule for one in made.skipped] == rules


def test_the_driver_of_a_gpu_that_tells_only_its_cuda_is_a_branch() -> None:
    assert driver_of(pool_gpu(driver="535.104.05", cuda="12.2")) == "535.104.05"
    assert driver_of(pool_gpu(driver="", cuda="12.4")) == "550"
    assert driver_of(pool_gpu(driver="", cuda="")) == ""


# --- one tuple -------------------------------------------------------------------------------------


TARGETS = (
    TARGET,
    replace(TARGET, name="torchy-2.3-cu121-py313", python="3.13"),
    replace(TARGET, name="torchy-2.5-cu12", version="2.5", cuda="12"),
    replace(TARGET, name="pytorch-2.3-cu118", family="pytorch", cuda="11.8"),
)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("torchy", "2.3", "12.1", "8.0"), "torchy-2.3-cu121"),
        (("torchy", "2.5", "12.4", "80"), "torchy-2.5-cu12"),
        (("torch", "2.3", "11.8", "8.0"), "pytorch-2.3-cu118"),
        (("pt", "2.3", "11.8", "sm_80"), "pytorch-2.3-cu118"),
    ],
)
def test_a_tuple_names_one_target(words: tuple[str, ...], name: str) -> None:
    wanted = parse_tuple(*words)
    assert choose_tuple(TARGETS, wanted).name == name
    assert wanted.capability == Capability(8, 0)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("torchy", "2.x", "12.1", "8.0"), "option-invalid", "'2.x'"),
        (("torchy", "2.3", "cu121", "8.0"), "option-invalid", "'cu121'"),
        (("torchy", "2.3", "12.1", "A100"), "option-invalid", "'A100'"),
        (("torchi", "2.3", "12.1", "8.0"), "target-unknown", "'torchi'"),
        (("torchy", "2.3", "12.4", "8.0"), "target-unknown", "torchy 2.3 with CUDA 12.4"),
    ],
)
def test_a_tuple_that_cannot_be(words: tuple[str, ...], code: str, said: str) -> None:
    with pytest.raises((UsageError, NothingSelectedError)) as caught:
        choose_tuple(TARGETS, parse_tuple(*words))
    assert caught.value.code == code
    assert said in caught.value.message


def test_rules_that_can_be_allowed() -> None:
    assert check_allowed(["verified", "no-code"]) == {"verified", "no-code"}
    for word, code in (("no-match", "rule-not-allowed"), ("verifed", "rule-unknown")):
        with fails(code):
            check_allowed([word])
