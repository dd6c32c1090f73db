"""What other sweeps have in hand: left out of a plan where it is certain, told where it is not. And a sweep
that forgot what became of its verdicts, which is the other half of it: what was signed is found again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions import collect
from imagefactory.actions.collect import collect_sweep
from imagefactory.actions.sweep import (
    SweepDependencies,
    SweepDraft,
    SweepOptions,
    find_sweeps,
    prepare_sweep,
    read_status,
)
from imagefactory.actions.verdicts import nonce_store
from imagefactory.actions.verify import CollectOptions
from imagefactory.errors import CheckFailedError, ToolError, UsageError
from imagefactory.gpu.capability import Capability
from imagefactory.matrix.plan import TargetStatus
from imagefactory.model import Outcome
from imagefactory.progress import QuietProgress
from imagefactory.schedulers import underway
from imagefactory.schedulers.cells import CellRequest, QueuedCell, SweepPlan, check_allowed
from imagefactory.schedulers.htcondor.pool import HTCondor
from imagefactory.schedulers.htcondor.results import LIMITS_OVER
from imagefactory.schedulers.pool import NodeResult, SkippedCell
from imagefactory.schedulers.sweep_file import (
    NO_KEY,
    UNSIGNED,
    VERDICT_MISSING,
    CollectedNode,
    read_collected,
    read_sweep,
    write_sweep_file,
)
from imagefactory.schedulers.underway import NodeProgress, RunningSweep, skip_underway, state_of
from imagefactory.verify.nonces import LIFETIME
from tests.made.claims import TARGET
from tests.made.command import run
from tests.made.errors import fails
from tests.made.factory import NAME
from tests.made.programs import Program, calls
from tests.made.sweep import (
    ABORTED,
    NOTHING_SEEN,
    STARTED,
    SUBMITTED,
    PoolMadeHere,
    inventory,
    log,
    play,
    pool_gpu,
    suite_report,
)
from tests.made.sweep_site import A100, V100, Site, failed, kept_sif

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
SEVEN, EIGHT = (TARGET.name, "7.0"), (TARGET.name, "8.0")
NOBODY: frozenset[str] = frozenset()


# --- deciding --------------------------------------------------------------------------------------


def seen(name: str = "20261122-120000-aaaa", **changes: Any) -> RunningSweep:
    given = {"name": name, "folder": Path("/s", name), "made": NOON, "driven": True, "cells": {}, **changes}
    return RunningSweep(**given)


def plan(*capabilities: str) -> SweepPlan:
    cells = (
        QueuedCell(
            stage=TargetStatus(target=TARGET),
            capability=Capability(int(one[0]), 0),
            cuda="",
            gpus=1,
            reason="",
        )
        for one in capabilities or ("7.0", "8.0")
    )
    return SweepPlan(cells=tuple(cells), skipped=())


def queued(made: SweepPlan) -> list[str]:
    return [str(cell.capability) for cell in made.cells]


def test_what_a_sweep_has_queued_is_left_out_and_says_where() -> None:
    made = skip_underway(plan(), [seen(cells={EIGHT: NodeProgress.OPEN})], NOBODY)
    assert queued(made) == ["7.0"]
    assert made.skipped == (
        SkippedCell(
            target=TARGET.name,
            capability="8.0",
            rule="queued",
            reason="queued in sweep 20261122-120000-aaaa, since 2026-11-22 12:00 UTC: "
            "imagefactory sweep status 20261122-120000-aaaa",
        ),
    )
    assert made.notes == ()


def test_machines_with_an_older_driver_that_take_no_job_are_not_asked_each_night() -> None:
    cells = [replace(cell, only=str(cell.capability) == "8.0") for cell in plan().cells]
    unmatched = [seen(driven=False, cells={SEVEN: NodeProgress.UNMATCHED, EIGHT: NodeProgress.UNMATCHED})]
    made = skip_underway(SweepPlan(cells=tuple(cells), skipped=()), unmatched, NOBODY)
    assert (queued(made), made.notes) == (["7.0"], ())
    assert [(one.capability, one.rule) for one in made.skipped] == [("8.0", "verified")]


@pytest.mark.parametrize("driven", [True, False, None])
@pytest.mark.parametrize("state", [NodeProgress.ENDED, NodeProgress.NOT_SIGNED, NodeProgress.NOT_ATTACHED])
def test_a_result_that_came_back_holds_whoever_drives_its_sweep(
    state: NodeProgress, driven: bool | None
) -> None:
    made = skip_underway(plan(), [seen(driven=driven, cells={EIGHT: state})], NOBODY)
    assert (queued(made), made.notes) == (["7.0"], ())
    (left,) = made.skipped
    assert left.rule == "uncollected"
    assert (
        left.reason
        == f"ended in sweep 20261122-120000-aaaa, {state}: imagefactory sweep collect " + seen().name
    )


def test_each_rule_can_be_allowed() -> None:
    both = [seen(cells={SEVEN: NodeProgress.ENDED, EIGHT: NodeProgress.OPEN})]
    assert queued(skip_underway(plan(), both, check_allowed(["queued"]))) == ["8.0"]
    assert queued(skip_underway(plan(), both, check_allowed(["uncollected"]))) == ["7.0"]
    made = skip_underway(plan(), both, check_allowed(["queued", "uncollected"]))
    assert (queued(made), made.skipped, made.notes) == (["7.0", "8.0"], (), ())


def test_a_sweep_that_stopped_gives_its_cells_back_and_is_named() -> None:
    made = skip_underway(plan(), [seen(driven=False, cells={EIGHT: NodeProgress.OPEN})], NOBODY)
    assert queued(made) == ["7.0", "8.0"]
    (note,) = made.notes
    assert note.startswith("1 of these cells is queued again: sweep 20261122-120000-aaaa stopped")
    assert note.endswith("imagefactory sweep start --scheduler htcondor --dir /s/20261122-120000-aaaa")


def test_what_nobody_knows_is_queued_and_said() -> None:
    doubt = seen(
        driven=None, why="condor_q failed", cells={SEVEN: NodeProgress.OPEN, EIGHT: NodeProgress.OPEN}
    )
    made = skip_underway(plan(), [doubt], NOBODY)
    assert queued(made) == ["7.0", "8.0"]
    assert made.notes == (
        "2 of these cells are queued, although sweep 20261122-120000-aaaa may have the same: condor_q failed",
    )
    assert skip_underway(plan(), [doubt], frozenset({"queued"})).notes == ()


def test_of_several_sweeps_the_newest_that_is_certain_tells() -> None:
    old = seen("20261120-120000-aaaa", made=NOON - timedelta(days=2), cells={EIGHT: NodeProgress.OPEN})
    middle = seen("20261121-120000-aaaa", made=NOON - timedelta(days=1), cells={EIGHT: NodeProgress.ENDED})
    stopped = seen(driven=False, cells={SEVEN: NodeProgress.OPEN, EIGHT: NodeProgress.OPEN})
    before = seen("20261119-120000-aaaa", made=NOON - timedelta(days=3), driven=False,
                  cells={SEVEN: NodeProgress.OPEN})  # fmt: skip
    made = skip_underway(plan(), [old, stopped, before, middle], NOBODY)
    assert [one.reason.partition(",")[0] for one in made.skipped] == ["ended in sweep 20261121-120000-aaaa"]
    assert [note.partition(" stopped")[0] for note in made.notes] == [
        "1 of these cells is queued again: sweep 20261122-120000-aaaa"
    ]
    allowed = skip_underway(plan(), [old, stopped, middle], frozenset({"uncollected"}))
    assert [one.rule for one in allowed.skipped] == ["queued"]


def known(outcome: Outcome | None, why: str = "", **changes: Any) -> CollectedNode:
    result = NodeResult(node="n", outcome=outcome, reason="", attempts=())
    return CollectedNode(result=result, target="t", capability="8.0", nonce="0", why=why, **changes)


@pytest.mark.parametrize(
    ("outcome", "collected", "state"),
    [
        (Outcome.VERIFIED, None, NodeProgress.ENDED),
        (Outcome.WRONG_NUMBERS, None, NodeProgress.ENDED),
        (Outcome.VERIFIED, known(None), NodeProgress.ENDED),  # collected while it ran
        (Outcome.NO_GPU, None, None),  # nothing would be signed
        (Outcome.INFRASTRUCTURE, None, None),
        (Outcome.VERIFIED, known(Outcome.VERIFIED, NO_KEY), NodeProgress.NOT_SIGNED),
        (Outcome.VERIFIED, known(Outcome.VERIFIED, "signed by 'lab'"), NodeProgress.NOT_ATTACHED),
        (Outcome.VERIFIED, known(Outcome.VERIFIED, f"{UNSIGNED}it tells no driver"), None),
        (Outcome.VERIFIED, known(Outcome.NOT_TESTED, ""), None),  # what was asked was edited
        (Outcome.VERIFIED, known(Outcome.VERIFIED, f"signed on a day, {VERDICT_MISSING}"), None),
    ],
)
def test_a_result_holds_its_cell_while_collect_can_make_a_verdict_of_it(
    outcome: Outcome, collected: CollectedNode | None, state: NodeProgress | None
) -> None:
    assert state_of(outcome, collected) is state


# --- read ------------------------------------------------------------------------------------------


def prepares(site: Site, **changes: Any) -> SweepDraft:
    given = {"pools": site.opens, "user": os.geteuid(), **changes}
    asked, image = given.pop("asked", CellRequest()), given.pop("image", "")
    options = SweepOptions(level="quick", registry=site.registry.host, image=image, asked=asked)
    bench = SweepDependencies(
        **{"clock": lambda: datetime.now(UTC), "random": os.urandom, **given}  # type: ignore[arg-type]
    )
    return prepare_sweep(site.factory, (site.target,), site.pool.gpus, options, bench)


def left(made: SweepDraft) -> dict[str, str]:
    return {one.capability: one.rule for one in made.plan.skipped if one.rule != "no-match"}


def test_two_sweeps_before_a_collect_queue_no_cell_twice(site: Site) -> None:
    folder, site.pool.at_work = site.makes().folder, True
    assert left(prepares(site)) == {"7.0": "queued", "8.0": "queued"}
    play(folder, V100)
    log(folder, A100, SUBMITTED, STARTED)
    assert left(prepares(site)) == {"7.0": "uncollected", "8.0": "queued"}
    play(folder, A100)
    site.pool.at_work = False
    made = prepares(site)
    assert (left(made), made.plan.notes) == ({"7.0": "uncollected", "8.0": "uncollected"}, ())
    site.collects(folder)
    assert left(prepares(site)) == {"7.0": "verified", "8.0": "verified"}
    again = prepares(site, asked=CellRequest(allow=frozenset({"verified"})))
    assert (queued(again.plan), again.plan.notes) == (["7.0", "8.0"], ())


@pytest.mark.parametrize("events", [(), (SUBMITTED, STARTED), (SUBMITTED, STARTED, ABORTED)])
def test_a_cancelled_sweep_or_one_whose_dagman_died_holds_only_what_came_back(
    site: Site,
    events: tuple[str, ...],
) -> None:
    folder = site.makes().folder
    play(folder, V100)
    if events:
        log(folder, A100, *events)
    made = prepares(site)
    assert left(made) == {"7.0": "uncollected"}
    assert queued(made.plan) == ["8.0"]
    assert f"imagefactory sweep start --scheduler htcondor --dir {folder}" in made.plan.notes[0]


def test_a_job_for_an_older_driver_alone_that_no_machine_took_is_remembered(site: Site) -> None:
    folder = site.makes().folder
    play(folder, A100)
    site.collects(folder)
    site.pool.gpus = inventory(pool_gpu("8.0"), pool_gpu("8.0", driver="545.23.06", cuda="12.3"))
    (cell,) = prepares(site).plan.cells
    assert (cell.first, cell.only) == ("545.23.06", True)
    over = ABORTED.replace("DAG Removed: User removed scheduler job from queue. (by user me)", LIMITS_OVER)
    again = site.makes().folder
    log(again, A100, SUBMITTED, over)
    (again / "nodes" / A100 / "post.json").write_text(
        json.dumps({"job": "12.0", "again": False, "left": False, "why": "", "format": 1, "return": -1002})
    )
    assert left(prepares(site)) == {"8.0": "verified"}
    (cell,) = prepares(site, asked=CellRequest(allow=frozenset({"verified"}))).plan.cells
    assert not cell.only


def test_what_ended_without_a_word_on_the_image_is_queued_again(site: Site) -> None:
    """Neither a job that met no GPU nor one that a limit ended gives a verdict, collected or not."""
    folder, site.pool.at_work = site.makes().folder, True
    asked = json.loads((folder / "nodes" / V100 / "expectations.json").read_bytes())
    rows = suite_report(asked)["checks"]
    report = {"device": None, "cuda": "", "checks": [failed(rows[0]["name"], "no-gpu"), *rows[1:]]}
    play(folder, V100, report=report, run={"returncode": 1, **NOTHING_SEEN})
    over = ABORTED.replace("DAG Removed: User removed scheduler job from queue. (by user me)", LIMITS_OVER)
    log(folder, A100, SUBMITTED, over)
    (folder / "nodes" / A100 / "post.json").write_text(
        json.dumps({"job": "12.0", "again": False, "left": False, "why": "", "format": 1, "return": -1002})
    )
    outcomes = [one.outcome for one in read_status(folder, site.opens, queue=False).results]
    assert outcomes == [Outcome.NO_GPU, Outcome.NO_MATCH]
    made = prepares(site)
    assert (queued(made.plan), made.plan.notes) == (["7.0", "8.0"], ())


def test_another_image_of_the_target_is_another_cell(site: Site) -> None:
    folder, site.pool.at_work = site.makes().folder, True
    sweep = read_sweep(folder)
    other = tuple(
        replace(node, image=replace(node.image, address=f"{node.image.address[:-64]}{'e' * 64}"))
        for node in sweep.nodes
    )
    write_sweep_file(folder, replace(sweep, nodes=other))
    made = prepares(site)
    assert (queued(made.plan), made.plan.notes) == (["7.0", "8.0"], ())


def test_a_sif_is_a_cell_of_its_own(site: Site) -> None:
    site.makes(image="docker")
    site.pool.at_work = True
    kept_sif(site)
    assert queued(prepares(site, image="sif").plan) == ["7.0", "8.0"]
    site.makes(image="sif")
    assert left(prepares(site, image="sif")) == {"7.0": "queued", "8.0": "queued"}
    assert left(prepares(site, image="oras")) == {"7.0": "queued", "8.0": "queued"}  # the same file


def test_what_waits_for_a_key_is_not_run_again(site: Site) -> None:
    folder = site.makes().folder
    site.pool.play(folder)
    keyless = replace(site.factory, environ={**site.factory.environ, "HOME": "/nowhere"})
    collect_sweep(keyless, folder, CollectOptions(), datetime.now(UTC), QuietProgress())
    reasons = {one.reason for one in prepares(site).plan.skipped if one.rule == "uncollected"}
    assert reasons == {f"ended in sweep {folder.name}, not signed: imagefactory sweep collect {folder.name}"}


def test_a_queue_that_does_not_answer_stops_nothing(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = site.makes().folder
    play(folder, V100)
    asked = []

    def driven(_: object) -> frozenset[Path]:
        asked.append(1)
        raise ToolError("test-problem", "condor_q did not answer in 120 s")

    monkeypatch.setattr(PoolMadeHere, "driven", driven)
    made = prepares(site)
    assert (left(made), queued(made.plan)) == ({"7.0": "uncollected"}, ["8.0"])
    (note,) = made.plan.notes
    assert "condor_q did not answer in 120 s" in note
    assert asked == [1]


def test_the_queue_is_asked_once_and_only_where_a_sweep_may_have_something(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(PoolMadeHere, "driven", lambda _: asked.append(1) or frozenset())
    prepares(site)
    assert asked == []
    site.makes()
    folder = site.makes().folder
    prepares(site)
    assert asked == [1]
    site.pool.play(folder)
    for one in find_sweeps(site.factory.settings):
        site.pool.play(one)
        site.collects(one)
    prepares(site, asked=CellRequest(allow=frozenset({"verified"})))
    assert asked == [1]


@pytest.mark.parametrize("broken", ["{", '{"format": 1, "sweep": {"nodes": 5}}', '{"format": 1}'])
def test_a_sweep_that_is_broken_is_passed_over_and_said(site: Site, broken: str) -> None:
    first, second = site.makes().folder, site.makes().folder
    site.pool.at_work = True
    (second / "sweep.json").write_text(broken)
    (first.parent / "something else").mkdir()
    (first.parent / "20261122-120000-0000").write_text("a file")
    made = prepares(site)
    assert left(made) == {"7.0": "queued", "8.0": "queued"}
    (note,) = made.plan.notes
    assert note.startswith(f"sweep {second.name} is skipped, and its cells are not known: ")


def test_a_folder_that_cannot_be_listed_stops_nothing(site: Site) -> None:
    place = site.makes().folder.parent
    shutil.rmtree(place)
    place.write_text("")
    made = prepares(site)
    assert queued(made.plan) == ["7.0", "8.0"]
    assert "are skipped: not a directory" in made.plan.notes[0]


def test_a_damaged_memory_of_what_was_collected_stops_nothing(site: Site) -> None:
    folder = site.makes().folder
    site.pool.play(folder)
    site.collects(folder)
    (folder / "collected.json").write_text("{")
    made = prepares(site, asked=CellRequest(allow=frozenset({"verified"})))
    assert left(made) == {"7.0": "uncollected", "8.0": "uncollected"}
    site.collects(folder)
    assert len(prepares(site, asked=CellRequest(allow=frozenset({"verified"}))).plan.cells) == 2


def test_of_another_users_sweep_nothing_is_guessed(site: Site) -> None:
    folder, site.pool.at_work = site.makes().folder, True
    play(folder, V100)
    made = prepares(site, user=os.geteuid() + 12345)
    assert queued(made.plan) == ["7.0", "8.0"]
    (note,) = made.plan.notes
    assert "2 of these cells are queued" in note
    assert "it is a sweep of user " in note


def test_a_folder_of_another_users_that_cannot_be_entered_is_said(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = site.makes().folder

    def refuse(path: Path, *args: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path / "sweep.json"))

    monkeypatch.setattr(underway, "read_sweep", refuse)
    made = prepares(site)
    assert queued(made.plan) == ["7.0", "8.0"]
    assert "permission denied" in made.plan.notes[0]
    assert folder.name in made.plan.notes[0]


def test_a_sweep_whose_nonces_have_expired_holds_nothing(site: Site) -> None:
    folder, site.pool.at_work = site.makes().folder, True
    site.pool.play(folder)
    later = datetime.now(UTC) + LIFETIME + timedelta(minutes=1)
    assert queued(prepares(site, clock=lambda: later).plan) == ["7.0", "8.0"]
    named = folder.rename(folder.parent / "mine")  # its name tells nothing, its content does
    assert queued(prepares(site, clock=lambda: later).plan) == ["7.0", "8.0"]
    reasons = {one.reason for one in prepares(site).plan.skipped if one.rule == "uncollected"}
    assert reasons == {f"ended in sweep {named}, not collected: imagefactory sweep collect {named}"}


def test_the_results_of_another_suite_are_none_that_can_be_collected_here(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = site.makes().folder
    site.pool.play(folder)
    for path in folder.glob("nodes/*/kit.json"):
        kit = json.loads(path.read_bytes())
        path.write_text(json.dumps({**kit, "suite": f"sha256:{'d' * 64}"}))
    assert queued(prepares(site).plan) == ["7.0", "8.0"]


def test_only_wanted_nodes_are_parsed(site: Site) -> None:
    folder = site.makes().folder
    document = json.loads((folder / "sweep.json").read_bytes())
    document["sweep"]["nodes"][0]["memory"] = "broken"
    (folder / "sweep.json").write_text(json.dumps(document))
    with fails("sweep-file-invalid", message="memory"):
        read_sweep(folder)
    found = read_sweep(folder, lambda _, capability: capability == "8.0")
    assert ([node.name for node in found.nodes], found.skipped) == ([A100], ())
    with fails("sweep-file-invalid", message="memory"):
        read_sweep(folder, lambda _, capability: capability == "7.0")


# --- the commands ----------------------------------------------------------------------------------


def test_the_command_says_what_is_queued_already_and_takes_it_back(
    site: Site,
    pool: PoolMadeHere,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("sweep", "start", NAME, "--scheduler", "htcondor", "--inventory", str(tmp_path / "pool.json"),
             "--registry", site.registry.host)  # fmt: skip
    assert run(*asked) == 0
    (folder,) = find_sweeps(site.factory.settings)
    capsys.readouterr()
    pool.at_work = True
    assert run(*asked, "--dry-run") == 0
    said = capsys.readouterr().out
    assert re.search(rf"^{NAME} +7.0, 8.0 +queued +queued in sweep {folder.name}, since ", said, re.MULTILINE)
    assert f"UTC: imagefactory sweep status {folder.name}" in said
    assert "0 jobs of 0 images," in said
    assert "2 queued" in said
    assert run(*asked, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["rule"] for row in found["skipped"]].count("queued") == 2
    assert (found["queued"], found["notes"]) == ([], [])
    assert run(*asked) == 3
    assert "nothing to verify" in capsys.readouterr().err
    assert pool.submitted == [folder]
    pool.at_work = False
    assert run(*asked, "--dry-run") == 0
    assert "2 of these cells are queued again: sweep" in capsys.readouterr().out
    pool.at_work = True
    assert run(*asked, "--json", "--ignore-rule", "queued") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["nodes"], told["notes"]) == (2, [])
    assert {row["rule"] for row in told["skipped"]} == {"no-match"}


def test_the_queue_tells_the_folders_of_all_dagmans_at_once(
    condor: HTCondor,
    program: Program,
    tmp_path: Path,
) -> None:
    ads = [
        {"Iwd": "/s/one", "JobStatus": 2},
        {"Iwd": "/s/held", "JobStatus": 5},
        {"Iwd": "/s/removed", "JobStatus": 3},
        {"JobStatus": 2},
    ]
    program("condor_q", f"{json.dumps(ads)}\n")
    assert condor.driven() == {Path("/s/one"), Path("/s/held")}
    (call,) = calls(tmp_path)
    assert call[1:] == ["condor_q", "-const", "JobUniverse == 7", "-json", "-attributes", "Iwd,JobStatus"]
    program("condor_q", "")
    assert condor.driven() == frozenset()
    program("condor_q", fails="Failed to connect", code=1)
    with pytest.raises(ToolError):
        condor.driven()


# --- collected, and forgotten ----------------------------------------------------------------------


@pytest.fixture
def forgotten(site: Site) -> Path:
    """A sweep that was collected, and whose collected.json is lost."""
    folder = site.makes().folder
    site.pool.play(folder)
    site.collects(folder)
    (folder / "collected.json").unlink()
    return folder


@pytest.mark.parametrize("damage", [None, "", "{", '{"format": 1, "nodes": [{}]}'])
def test_collecting_again_finds_what_was_signed_and_signs_nothing(
    site: Site,
    damage: str | None,
    forgotten: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if damage is not None:
        (forgotten / "collected.json").write_text(damage)
    nonces = [node.nonce for node in read_sweep(forgotten).nodes]
    before = [nonce_store(site.factory).look(nonce) for nonce in nonces]
    monkeypatch.setattr(collect, "sign", lambda *_, **__: pytest.fail("it is signed a second time"))
    done = site.collects(forgotten, promote=True)
    place = (str(site.factory.layout.path), f"{site.registry.host}/pytorch")
    assert [(one.result.outcome, one.attached) for one in done.nodes] == [(Outcome.VERIFIED, place)] * 2
    assert len({one.keyid for one in done.nodes}) == 1
    assert all(one.keyid and one.why.startswith("signed on ") for one in done.nodes)
    assert done.faults == ()
    assert [one.target for one in done.promotions] == [NAME]
    assert read_collected(forgotten) == done.nodes
    assert [nonce_store(site.factory).look(nonce) for nonce in nonces] == before
    assert site.collects(forgotten).nodes == done.nodes


def test_a_verdict_that_is_gone_everywhere_is_said_and_never_signed_again(site: Site) -> None:
    """As where `image prune` removed it when it had expired."""
    kept_sif(site)
    folder = site.makes(image="sif").folder
    site.pool.play(folder)
    site.collects(folder)
    layout = site.factory.layout
    (image,) = {node.image.subject for node in read_sweep(folder).nodes}
    for one, _ in layout.referrers(image.manifest):
        layout.blob_path(one.digest).unlink()
    (folder / "collected.json").unlink()
    done = site.collects(folder)
    assert [(one.attached, one.keyid) for one in done.nodes] == [((), "")] * 2
    assert all(one.why.startswith("signed on ") and one.why.endswith(VERDICT_MISSING) for one in done.nodes)
    assert [type(fault) for _, fault in done.faults] == [CheckFailedError] * 2
    assert f"imagefactory sweep start {NAME}" in done.faults[0][1].hint
    made = prepares(site, image="sif")
    assert (queued(made.plan), made.plan.notes) == (["7.0", "8.0"], ())  # tested anew, by a nonce of its own


def test_a_verdict_of_nobodys_key_is_not_taken_for_what_was_signed(
    site: Site,
    forgotten: Path,
    tmp_path: Path,
) -> None:
    stranger = replace(site.factory, environ={**site.factory.environ, "HOME": str(tmp_path / "nobody")})
    (site.factory.settings.root_path / "imagefactory.toml").write_text("")
    done = collect_sweep(stranger, forgotten, CollectOptions(), datetime.now(UTC), QuietProgress())
    assert {one.attached for one in done.nodes} == {()}
    assert all(one.why.endswith(VERDICT_MISSING) for one in done.nodes)


def test_a_disk_that_is_full_when_the_memory_is_written_loses_nothing(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = site.makes().folder
    site.pool.play(folder)

    def full(*_: object) -> None:
        raise UsageError("test-problem", "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(collect, "write_collected", full)
        with pytest.raises(UsageError):
            site.collects(folder, promote=True)
    done = site.collects(folder, promote=True)
    assert [len(one.attached) for one in done.nodes] == [2, 2]
    assert len(done.promotions) == 1
