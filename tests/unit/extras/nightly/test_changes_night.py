"""What one night takes of a plan that is larger."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

from imagefactory.extras.nightly.changes import cells_for_night, oldest_drivers
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
from imagefactory.views.plan import format_kits, format_matrix, summary
from tests.made.values import make_target

DAY = date(2026, 11, 25)
NOW = datetime(2026, 11, 25, tzinfo=UTC)
STATES = (CellState.VERIFY, CellState.UNCHANGED, CellState.SKIPPED)


def cell(minor: int, days: int | None = None, state: CellState = CellState.VERIFY) -> PlannedCell:
    """On 8.`minor`, last verified `days` ago."""
    return PlannedCell(
        device=PlanGpu(capability=Capability(8, minor)),
        state=state,
        ruling=CellRuling(claim=None),
        required=True,
        verified=None if days is None else NOW - timedelta(days=days),
    )


def target(
    name: str, *cells: PlannedCell, state: CellState = CellState.VERIFY, gpu: bool = True
) -> PlannedTarget:
    made = make_target(name=name, **({} if gpu else {"cuda": "none", "capabilities": ()}))
    return PlannedTarget(target=made, state=state, reason="", hint="", image="", reference="", cells=cells)


def chosen(plan: VerificationPlan) -> list[str]:
    return [f"{one.target.name} {cell.device.capability}" for one in plan.targets for cell in one.cells]


def test_a_plan_that_fits_stays_whole() -> None:
    plan = VerificationPlan(targets=(target("a", *(cell(0, state=state) for state in STATES)),), on_gpus=True)
    assert cells_for_night(plan, 1, DAY) == (plan, 0)


def test_the_oldest_proof_comes_first_and_none_comes_last() -> None:
    cells = (cell(0), cell(1, days=91), cell(2, days=120), cell(3, days=5, state=CellState.UNCHANGED))
    plan = VerificationPlan(targets=(target("a", *cells), target("b", cell(0, days=100))), on_gpus=True)
    for most, names in ((1, ["a 8.2"]), (2, ["a 8.2", "b 8.0"]), (3, ["a 8.1", "a 8.2", "b 8.0"])):
        now, waiting = cells_for_night(plan, most, DAY)
        assert (sorted(chosen(now)), waiting) == (sorted(names), 4 - most)


def test_of_each_row_the_oldest_driver_that_the_image_takes_stays() -> None:
    """A slice is a row of its own. A verdict against the image stays, unless it is about the driver."""

    def on(driver: str, state: CellState = CellState.VERIFY, part: str = "", no: str = "") -> PlannedCell:
        device = PlanGpu(capability=Capability(8, 0), driver=driver, part=part)
        claim = CellClaim(basis=ClaimBasis.VERIFIED, answer=Compatibility.NO, rule=no, reason="", source="")
        return replace(cell(0, state=state), device=device, ruling=CellRuling(claim=claim if no else None))

    def kept(*cells: PlannedCell) -> list[str]:
        made = oldest_drivers(VerificationPlan(targets=(target("a", *cells),), on_gpus=True))
        return [f"{one.device.driver} {one.device.part}".strip() for one in made.cells]

    skipped = CellState.SKIPPED
    assert kept(on("550.54.15"), on("535.54.03"), on("99.1", skipped)) == ["535.54.03"]
    assert kept(on("550.54.15"), on("535.54.03", part="1g.10gb")) == ["550.54.15", "535.54.03 1g.10gb"]
    assert kept(on("550.54.15", skipped), on("535.54.03", skipped)) == ["550.54.15"]
    assert kept(on("550.54.15"), on("535.54.03", skipped, no="wrong-numbers")) == ["535.54.03", "550.54.15"]
    assert kept(on("550.54.15"), on("535.54.03", skipped, no="driver-too-old")) == ["550.54.15"]


def test_nothing_that_was_never_proven_waits_for_ever() -> None:
    """Whatever the runner of some of them does: on enough days each has had its turn."""
    plan = VerificationPlan(
        targets=tuple(target(f"t{n}", cell(0), cell(1)) for n in range(300)), on_gpus=True
    )
    seen: set[str] = set()
    for day in range(30):
        now, waiting = cells_for_night(plan, 256, DAY + timedelta(days=day))
        assert (len(chosen(now)), waiting) == (256, 344)
        assert now == cells_for_night(plan, 256, DAY + timedelta(days=day))[0]
        seen |= set(chosen(now))
    assert len(seen) == 600


def test_both_matrices_hold_what_was_chosen() -> None:
    cpu = target("cpu", state=CellState.BUILD, gpu=False)
    lapsed = replace(target("late", cell(0, days=99)), image="sha256:" + "0" * 64)
    plan = VerificationPlan(
        targets=(cpu, lapsed, *(target(f"t{n}", cell(0)) for n in range(9))), on_gpus=True
    )
    now, waiting = cells_for_night(plan, 4, DAY)
    jobs = json.loads(format_matrix(now, kits=True).partition("=")[2])["include"]
    kits = json.loads(format_kits(now).partition("=")[2])["include"]
    assert len(jobs) + sum(not kit["kits"] for kit in kits) == 4
    assert "late" in {job["target"] for job in jobs}
    assert {kit["target"] for kit in kits if kit["kits"]} == {job["target"] for job in jobs}
    assert summary(plan, waiting).endswith("; 7 jobs wait for the next nightly run: GitHub runs at most 256")


def test_where_no_gpu_is_listed_whole_targets_wait() -> None:
    plan = VerificationPlan(
        targets=tuple(target(f"t{n}", cell(0), cell(1), state=CellState.BUILD) for n in range(3))
    )
    now, waiting = cells_for_night(plan, 2, DAY)
    assert (len(now.targets), waiting) == (2, 1)
    assert all(len(one.cells) == 2 for one in now.targets)


def test_what_no_kit_starts_takes_no_place_on_a_gpu() -> None:
    """AMD's GPUs: such an image is a job to build, and none to verify."""
    amd = make_target(name="amd", cuda="rocm7", capabilities=("gfx90a",))
    waits = replace(target("amd", cell(0), cell(1)), target=amd)
    plan = VerificationPlan(targets=(waits, target("a", cell(0, days=99))), on_gpus=True)
    assert cells_for_night(plan, 1, DAY, kits=True) == (plan, 0)
    assert cells_for_night(plan, 1, DAY)[1] == 2
    built = replace(waits, state=CellState.BUILD)
    now, waiting = cells_for_night(
        VerificationPlan(targets=(built, *plan.targets[1:]), on_gpus=True), 1, DAY, kits=True
    )
    assert (chosen(now), waiting) == (["a 8.0"], 1)
    kits = json.loads(format_kits(VerificationPlan(targets=(built,), on_gpus=True)).partition("=")[2])[
        "include"
    ]
    assert [(kit["gpu"], kit["kits"]) for kit in kits] == [("amd", "")]
