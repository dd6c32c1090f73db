"""What a night changed, by the plans before and after it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from imagefactory.extras.nightly.changes import (
    OFF,
    QUIET,
    NightlyReport,
    NightlyRow,
    NightlySteps,
    SavedPlan,
    compare,
    is_news,
    save_plan,
    schedule_warning,
    unbuilt,
)
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.matrix.plan import (
    CellRuling,
    CellState,
    PlanGpu,
    PlannedCell,
    PlannedTarget,
    VerificationPlan,
)
from imagefactory.serialize import format_value, parse_value
from imagefactory.trust.claims import VerdictAges
from tests.made.night import DAY, NIGHT, kept_cell, kept_plan, kept_target, night_report, proven_cell
from tests.made.values import make_target

TOLD = NightlySteps(directory="/nights/1", started=NIGHT, ended=NIGHT + DAY / 4, place="r.example/gpu")
BUILD, VERIFY, UNCHANGED = CellState.BUILD, CellState.VERIFY, CellState.UNCHANGED
OTHER = "sha256:" + "b" * 64


def told(rows: tuple[NightlyRow, ...]) -> list[tuple[str, str]]:
    return [(row.what, row.on) for row in rows]


def changed(before: SavedPlan, after: SavedPlan, *failures: NightlyRow) -> NightlyReport:
    return compare(before, after, replace(TOLD, failures=failures))


def test_where_nothing_changed_nothing_is_told() -> None:
    plan = kept_plan(kept_target("a", proven_cell(), state=UNCHANGED))
    night = changed(plan, plan)
    assert (night.built, night.verified, night.broken, night.due, night.exit_code) == ((), (), (), (), 0)


def test_what_was_built_and_proven_is_what_the_second_plan_finds_done() -> None:
    before = kept_plan(
        kept_target("a", kept_cell("8.0", BUILD), kept_cell("9.0", BUILD), state=BUILD, image=""),
        kept_target("b", kept_cell("8.0"), proven_cell("9.0"), kept_cell("7.0")),
    )
    after = kept_plan(
        kept_target("a", proven_cell("8.0"), kept_cell("9.0")),
        kept_target("b", proven_cell("8.0"), proven_cell("9.0"), kept_cell("7.0", verified=NIGHT - 99 * DAY)),
    )
    night = changed(before, after)
    assert told(night.built) == [("a", "")]
    assert told(night.verified) == [("a", "8.0"), ("b", "8.0")]
    assert [(row.what, row.on, row.reason) for row in night.due] == [
        ("a", "9.0", "to verify, never verified"),
        ("b", "7.0", "to verify, last verified 2026-08-18"),
    ]


def test_a_new_image_is_proven_anew_where_the_old_one_was() -> None:
    before = kept_plan(kept_target("a", proven_cell(), state=UNCHANGED))
    night = changed(before, kept_plan(kept_target("a", proven_cell(), state=UNCHANGED, image=OTHER)))
    assert (told(night.built), told(night.verified)) == ([("a", "")], [("a", "8.0")])


def test_where_no_gpu_is_listed_nothing_is_called_proven() -> None:
    before = replace(kept_plan(kept_target("a", kept_cell("8.0", BUILD), state=BUILD, image="")), devices=())
    after = replace(kept_plan(kept_target("a", kept_cell("8.0", UNCHANGED), state=UNCHANGED)), devices=())
    night = changed(before, after)
    assert (told(night.built), told(night.verified)) == ([("a", "")], [])


def test_a_failure_tells_why_and_is_told_once() -> None:
    failed = NightlyRow(what="a", reason="no space left", exit_code=7)
    plan = kept_plan(kept_target("a", state=BUILD, image="", reason="nothing there"))
    night = changed(plan, plan, failed)
    assert (night.broken, night.due, night.exit_code) == ((failed,), (), 7)
    assert told(changed(plan, plan).due) == [("a", "")]


def test_what_cannot_be_built_and_what_a_verdict_refused_is_broken() -> None:
    no = kept_cell("8.0", CellState.SKIPPED, failure="no-kernel: none for sm_80")
    also = kept_cell("9.0", CellState.SKIPPED, failure="load-failed: no", required=False)
    blocked = kept_target("b", state=CellState.BLOCKED, reason="stale", hint="imagefactory lock b")
    after = kept_plan(kept_target("a", no, also), blocked)
    night = changed(kept_plan(kept_target("a", kept_cell(), kept_cell("9.0")), blocked), after)
    assert [(row.what, row.on, row.exit_code) for row in night.broken] == [
        ("a", "8.0", 9),
        ("a", "9.0", 9),
        ("b", "", 5),
    ]
    assert night.exit_code == 5
    # What the recipe does not ask for is news once; what it asks for is broken until it is mended.
    assert told(changed(after, after).broken) == [("a", "8.0"), ("b", "")]
    signed = NightlyRow(what="a", on="8.0", reason="no-kernel: said the sweep", exit_code=9)
    assert told(changed(after, after, signed).broken) == [("a", "8.0"), ("b", "")]


def test_the_ages_are_those_of_proofs_that_hold() -> None:
    cells = (proven_cell("7.0", days=89, left=3), proven_cell("8.0", days=9), proven_cell("9.0", left=-1))
    ages = changed(kept_plan(), kept_plan(kept_target("a", *cells))).verdict_ages
    assert (ages.oldest, ages.expiring) == (NIGHT - 89 * DAY, 1)
    assert changed(kept_plan(), kept_plan()).verdict_ages.oldest is None


def test_news_is_what_was_done_and_what_broke_or_was_mended() -> None:
    quiet = night_report(built=(), verified=(), broken=())
    broken = night_report(built=(), verified=())
    assert is_news(night_report(broken=()), quiet)
    assert not is_news(quiet, quiet)
    assert not is_news(quiet, None)
    assert is_news(broken, quiet)
    assert is_news(quiet, broken)
    (row,) = broken.broken
    again = replace(broken, broken=(replace(row, reason="in other words"),))
    assert not is_news(again, broken)


def test_what_nobody_saw_fail_is_told_by_what_is_left() -> None:
    before = kept_plan(
        kept_target("a", state=BUILD), kept_target("b", state=BUILD), kept_target("c", state=VERIFY)
    )
    after = kept_plan(kept_target("a", state=BUILD), kept_target("b"), kept_target("c", state=BUILD))
    assert [(row.what, row.exit_code) for row in unbuilt(before, after)] == [("a", 7)]
    assert unbuilt(replace(before, waiting=("a",)), after) == ()  # it was left for another night


def test_a_schedule_that_will_be_switched_off_is_told_in_time() -> None:
    assert schedule_warning(NIGHT - QUIET * DAY, NIGHT) == ""
    said = schedule_warning(NIGHT - (QUIET + 1) * DAY, NIGHT)
    assert said.startswith("the last commit is 46 days old")
    assert f"after {OFF} days, in 14" in said
    assert "in 0;" in schedule_warning(NIGHT - 400 * DAY, NIGHT)


def test_a_plan_is_kept_in_words_and_read_back() -> None:
    refused = CellClaim(
        basis=ClaimBasis.VERIFIED,
        answer=Compatibility.NO,
        rule="no-kernel",
        reason="on\na GPU",
        source="x",
        driver="",
    )
    hoped = replace(refused, basis=ClaimBasis.PREDICTED)
    device = PlanGpu(capability=Capability(9, 0, "gfx90a"), name="MI250X")
    cells = tuple(
        PlannedCell(
            device=device,
            state=CellState.SKIPPED,
            ruling=CellRuling(claim=claim, against=(claim,)),
            required=True,
            verified=NIGHT,
            until=NIGHT + timedelta(days=80),
        )
        for claim in (refused, hoped)
    )
    one = PlannedTarget(
        target=make_target(name="a"),
        state=CellState.BLOCKED,
        reason="a\tlock\nthat is \u202estale",
        hint="",
        image="",
        reference="",
        cells=cells,
    )
    asked = SavedPlan(created=NIGHT, registry="", names=("a*",), devices=(device,))
    kept = save_plan(VerificationPlan(targets=(one,), on_gpus=True), asked)
    assert kept.targets[0].reason == "a lock that is stale"
    assert [cell.failure for cell in kept.targets[0].cells] == ["no-kernel: on a GPU", ""]
    assert parse_value(format_value(kept), SavedPlan, "x") == kept
    night = night_report()
    assert parse_value(format_value(night), NightlyReport, "x") == night


def test_one_cause_is_one_row_with_all_machines() -> None:
    row = NightlyRow(
        what="a", on="8.0", reason="no-gpu: none", hint="its logs: /1", exit_code=9, machines=("gpu07",)
    )
    rows = [
        row,
        NightlyRow(what="b", reason="it cannot be built", exit_code=7),
        replace(row, on="9.0", machines=("gpu08",), hint="its logs: /2"),
        *(replace(row, what=name) for name in "cdef"),
    ]
    done = compare(kept_plan(), kept_plan(), replace(TOLD, failures=tuple(rows)))
    first, second = done.broken
    assert (first.what, first.on, first.machines) == ("a, c, d and 2 more", "8.0, 9.0", ("gpu07", "gpu08"))
    assert (first.hint, first.exit_code) == ("its logs: /1 (and 1 more)", 9)
    assert second == rows[1]


def test_ages_are_the_catalogs_where_there_is_one() -> None:
    """The plan's own speak of the machines that are there tonight alone."""
    ages = VerdictAges(oldest=NIGHT - 80 * DAY, expiring=3)
    assert compare(kept_plan(), kept_plan(), TOLD).verdict_ages == VerdictAges(oldest=None, expiring=0)
    assert compare(kept_plan(), kept_plan(), replace(TOLD, ages=ages)).verdict_ages == ages
