"""A night on a pool that is made up: its steps in this process, its GPUs nobody's, its key thrown away."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions.read_catalog import cache_published
from imagefactory.actions.sweep import find_sweeps
from imagefactory.errors import NoGpuError, RegistryError, ToolError, UsageError
from imagefactory.extras.nightly import night
from imagefactory.extras.nightly.changes import NightlyReport, SavedPlan, is_news
from imagefactory.extras.nightly.night import (
    EXPIRY,
    NIGHTLY_DIRECTORY,
    NightlyRequest,
    last_commit,
    run_nightly,
)
from imagefactory.extras.nightly.nights import (
    MAX_RUNS,
    NIGHTLY_FILE,
    RESERVE,
    NightlyDependencies,
    allocate_reserve,
    command_of,
    create_nightly,
    has_reserve,
    killed_before,
    last_nightly,
    nightly_directory,
    nightly_lock,
    read_saved_plan,
    write_nightly,
)
from imagefactory.gpu.capability import Capability
from imagefactory.model import Outcome
from imagefactory.progress import QuietProgress
from imagefactory.project import load_lenient
from imagefactory.schedulers.cells import CellRequest
from imagefactory.schedulers.sweep_file import read_sweep
from imagefactory.settings.choices import SettingValue
from imagefactory.trust.catalog import LIFE, sign_catalog
from imagefactory.verify.report import Hardware
from tests.made.catalog import make_catalog
from tests.made.command import run
from tests.made.documents import document_faults
from tests.made.factory import NAME
from tests.made.sweep import PoolMadeHere, inventory, pool_gpu, suite_report
from tests.made.sweep import play as play_node
from tests.made.sweep_site import A100, Site, failed, kept_sif
from tests.made.trusted import write_settings
from tests.made.verdicts import HOST, LAB, LAB_ROW

OTHER = """\
family: other
description: One that is sound
source: pypi
framework: idna
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
checks: [packages]
matrix:
  - version: "3.7"
    cuda: ["12.1"]
"""


class NoGpuHere:
    def read(self) -> Hardware:
        raise NoGpuError("no-gpu", "no GPU in this test")


class OneGpu:
    def read(self) -> Hardware:
        return HOST


@dataclass
class Nights:
    """Nights of a site, one after the other; `steps` are what they ran."""

    site: Site
    capsys: pytest.CaptureFixture[str]
    steps: list[tuple[str, ...]] = field(default_factory=list)
    pause: Callable[[float], None] = lambda _: None
    crashes: tuple[str, ...] = ()
    count: int = 0
    said: dict[str, str] = field(default_factory=dict)

    def run(self, **ask: object) -> NightlyReport:
        self.steps.clear()
        self.count += 1
        settings = replace(
            self.site.factory.settings, registry=SettingValue(value=self.site.registry.host, origin="test")
        )
        factory = replace(self.site.factory, settings=settings)
        bench = NightlyDependencies(
            clock=lambda: datetime.now(UTC),
            pause=self.pause,
            pools=self.site.opens,
            evidence=ask.pop("evidence", NoGpuHere()),  # type: ignore[arg-type]
            run=self.step,
        )
        folder = create_nightly(settings, f"20261125-0217{self.count:02}-1")
        asked = NightlyRequest(names=(NAME,), **{"pool": "htcondor", **ask})  # type: ignore[arg-type]
        return run_nightly(factory, asked, bench, folder, QuietProgress())

    def step(self, words: Sequence[str]) -> tuple[int, str]:
        """In this process; what would be built is there, and is pushed."""
        self.steps.append(tuple(words))
        if command_of(words) in self.crashes:
            return -9, ""
        words = ("push", NAME, "--json") if words[0] == "build" else words
        self.capsys.readouterr()
        code = run("-C", str(self.site.factory.settings.root_path), *words)
        self.said[command_of(words)] = self.capsys.readouterr().out
        return code, self.said[command_of(words)]

    @property
    def commands(self) -> list[str]:
        return [command_of(words) for words in self.steps]


@pytest.fixture
def nights(
    site: Site, pool: PoolMadeHere, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Nights:
    monkeypatch.setenv("IMAGEFACTORY_REGISTRY", site.registry.host)
    pool.at_work = True
    made = Nights(site, capsys)

    def play(_: float) -> None:
        for folder in pool.submitted:
            pool.play(folder)
        pool.at_work = False

    made.pause = play
    return made


def test_a_night_on_a_pool_goes_all_the_way_and_the_next_has_nothing_to_do(nights: Nights) -> None:
    first = nights.run()
    assert nights.commands == [
        "build",
        "sweep start",
        "sweep collect",
        "image promote",
        "verdict sync",
        "site publish",
        "image prune",
    ]
    assert [(row.what, row.on) for row in first.verified] == [(NAME, "7.0, 8.0")]
    assert [row.what for row in first.built] == [NAME]
    assert (first.broken, first.due, first.exit_code) == ((), (), 0)
    assert first.verdict_ages.oldest is not None
    assert is_news(first, None)

    second = nights.run()
    assert nights.commands == ["image promote", "verdict sync", "site publish", "image prune"]
    assert (second.built, second.verified, second.broken, second.due) == ((), (), (), ())
    assert not is_news(second, first)
    assert last_nightly(nights.site.factory.settings) == second


def test_a_night_approves_by_its_one_key_and_says_what_waits(nights: Nights) -> None:
    path = nights.site.factory.settings.root_path / "imagefactory.toml"
    write_settings(path.parent, path.read_text() + "\n[policy]\npromotion-signatures = 2\n")
    for _ in range(2):
        report = nights.run()
        (result,) = json.loads(nights.said["image promote"])["results"]
        waiting = [row["tag"] for row in result["tags"] if row["missing"]]
        assert waiting
        assert {(row["missing"], row["moved"]) for row in result["tags"] if row["tag"] in waiting} == {
            (1, False)
        }
        assert sorted(note.split()[1] for note in report.notes if NAME in note) == sorted(waiting)
        assert [row.what for row in report.broken] == ["catalog"]  # there is nothing yet that may be in it
        assert NAME in report.broken[0].reason


def test_a_night_warns_once_a_week_before_the_last_signed_catalog_expires(nights: Nights) -> None:
    settings, now = nights.site.factory.settings, datetime.now(UTC).replace(microsecond=0)
    nights.crashes = ("site publish",)
    write_settings(settings.root_path, LAB_ROW, nights.site.factory.environ)

    def night(left: timedelta) -> tuple[NightlyReport, list[str]]:
        made = now + left - LIFE
        catalog = make_catalog(created=made, expires=made + LIFE)
        cache_published(settings, nights.site.registry.host, sign_catalog(catalog, LAB), made)
        done = nights.run()
        return done, [row.reason for row in done.broken if row.what == EXPIRY]

    well, none = night(timedelta(days=8))
    soon, (why,) = night(timedelta(days=6))
    assert (none, f"{now + timedelta(days=6):%Y-%m-%d}" in why) == ([], True)
    assert is_news(soon, well)
    assert not is_news(night(timedelta(days=5))[0], soon)


def test_where_jobs_run_sif_files_their_verdicts_count(
    nights: Nights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = nights.site
    kept_sif(site)
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("IMAGEFACTORY_SIF_FOLDER", str(tmp_path / "shared"))
    folder = SettingValue(value=str(tmp_path / "shared"), origin="test")
    settings = replace(site.factory.settings, sif_folder=folder)
    nights.site = replace(site, factory=replace(site.factory, settings=settings))
    first = nights.run()
    assert first.broken == ()
    assert [row.what for row in first.built] == [NAME]
    assert [(row.what, row.on) for row in first.verified] == [(NAME, "7.0, 8.0")]
    second = nights.run()
    assert (second.verified, second.due) == ((), ())
    assert "sweep start" not in nights.commands


def test_a_night_that_was_killed_goes_on_with_the_sweep_that_it_made(nights: Nights) -> None:
    play = nights.pause

    def killed(_: float) -> None:
        raise KeyboardInterrupt

    nights.pause = killed
    with pytest.raises(KeyboardInterrupt):
        nights.run()
    assert killed_before(nights.site.factory.settings) is not None
    nights.pause = play
    again = nights.run()
    assert [(row.what, row.on) for row in again.verified] == [(NAME, "7.0, 8.0")]
    assert [row.what for row in again.built] == [NAME]  # by the one that was killed
    assert "build" not in nights.commands
    assert len(nights.site.pool.submitted) == 1
    assert killed_before(nights.site.factory.settings) is None


def test_what_another_store_has_queued_is_noted_and_nothing_is_broken(nights: Nights, tmp_path: Path) -> None:
    site = nights.site
    shutil.copytree(site.factory.layout.path, tmp_path / "other")
    store = SettingValue(value=str(tmp_path / "other"), origin="test")
    settings = replace(site.factory.settings, store=store)
    other = replace(site, factory=replace(site.factory, settings=settings), pool=PoolMadeHere())
    part = other.makes(asked=CellRequest(capabilities=(Capability(8, 0),)))
    first = nights.run(wait=timedelta(0))
    assert len(site.pool.submitted) == 1
    assert [part.sweep.id in note for note in first.notes if "claimed" in note] == [True]
    whole = replace(other, pool=PoolMadeHere()).makes(asked=CellRequest(allow=frozenset({"claimed"})))
    assert len(whole.sweep.nodes) == 2
    site.pool.at_work = False  # ours is gone without an answer
    second = nights.run(wait=timedelta(0))
    assert (len(site.pool.submitted), second.broken) == (1, ())
    assert sum("2 claimed" in note for note in second.notes) == 1


def test_what_the_pool_does_not_bring_in_time_waits_for_the_next_night(nights: Nights) -> None:
    play = nights.pause
    first = nights.run(wait=timedelta(0))
    assert "2 jobs are still on the pool" in first.notes[0]
    assert [(row.what, row.on) for row in first.due] == [(NAME, "7.0, 8.0")]
    assert nights.commands[-4:] == ["image promote", "verdict sync", "site publish", "image prune"]
    play(0)
    second = nights.run()
    assert [(row.what, row.on) for row in second.verified] == [(NAME, "7.0, 8.0")]


def test_what_is_over_the_budget_is_named_and_the_next_night_takes_it(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGEFACTORY_SWEEP_GPU_HOURS", "1")
    first = nights.run()
    (proven,), (due,) = first.verified, first.due
    assert {proven.on, due.on} == {"7.0", "8.0"}
    assert any(
        f"1 cell is over the budget and waits for another nightly run: {NAME} on {due.on}" in note
        for note in first.notes
    )
    nights.site.pool.submitted.clear()
    nights.site.pool.at_work = True
    second = nights.run()
    assert [(row.what, row.on) for row in second.verified] == [(NAME, due.on)]
    assert second.due == ()


def test_machines_that_are_avoided_are_named_and_get_no_job(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGEFACTORY_SWEEP_MACHINES", "!gpu1")
    settings = replace(
        nights.site.factory.settings, sweep_machines=SettingValue(value="!gpu1", origin="test")
    )
    nights.site = replace(nights.site, factory=replace(nights.site.factory, settings=settings))
    done = nights.run()
    assert [(row.what, row.on) for row in done.verified] == [(NAME, "7.0")]
    assert done.due == ()
    assert any("8.0" in note and "gpu1.pool.test" in note for note in done.notes)


def test_a_night_asks_for_the_oldest_driver_that_an_image_takes(nights: Nights, pool: PoolMadeHere) -> None:
    """A GPU with an older driver than was verified is due, but not one that is too old for the image."""
    assert nights.run().due == ()
    older = pool_gpu("8.0", driver="545.23.06", cuda="12.3")
    pool.gpus = inventory(pool_gpu("7.0"), pool_gpu("8.0"), older)
    pool.submitted.clear()
    done = nights.run(wait=timedelta(0))
    assert [row.on for row in done.due] == ["8.0"]
    (node,) = read_sweep(pool.submitted[0]).nodes
    assert (node.capability, node.first, node.only) == ("8.0", older.driver, True)
    pool.gpus = inventory(pool_gpu("7.0"), pool_gpu("8.0"), pool_gpu("8.0", driver="470.57.02", cuda="11.4"))
    assert nights.run(wait=timedelta(0)).due == ()


def test_what_has_come_is_promoted_while_a_gpu_is_away(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(night, "BETWEEN", 2)
    pool = nights.site.pool
    looks: list[int] = []

    def one_answers(_: float) -> None:
        looks.append(len(nights.commands))
        (folder,) = pool.submitted
        play_node(folder, A100)
        pool.at_work = len(looks) < 6

    nights.pause = one_answers
    done = nights.run()
    assert nights.commands.count("sweep collect") == 1
    assert nights.commands.index("sweep collect") < max(looks)  # not at the end
    assert [(row.what, row.on) for row in done.verified] == [(NAME, "8.0")]
    assert [(row.what, row.on) for row in done.due] == [(NAME, "7.0")]


def test_a_sweep_that_cannot_be_read_is_told_and_left_alone(nights: Nights) -> None:
    broken = nights.site.factory.settings.store_path / "sweeps" / "20261124-000000-aaaa"
    broken.mkdir(parents=True)
    (broken / "sweep.json").write_text("{")
    done = nights.run()
    assert [row.what for row in done.broken] == [f"sweep {broken.name}"]
    assert [(row.what, row.on) for row in done.verified] == [(NAME, "7.0, 8.0")]


def test_a_fault_of_machines_is_one_row_that_names_them(nights: Nights, pool: PoolMadeHere) -> None:
    def play(_: float) -> None:
        for folder in pool.submitted:
            pool.play(folder, checks=[failed("device", "no-gpu")])
        pool.at_work = False

    nights.pause = play
    (row,) = nights.run().broken
    assert (row.what, row.on, row.machines) == (NAME, "7.0, 8.0", ("gpu.pool.test",))
    assert row.reason.startswith("no-gpu: device")


def test_ages_do_not_depend_on_the_machines_of_the_night(nights: Nights, pool: PoolMadeHere) -> None:
    first = nights.run()
    assert first.verdict_ages.oldest is not None
    pool.gpus = inventory(pool_gpu("9.0"))
    assert nights.run().verdict_ages == first.verdict_ages


def test_a_verdict_that_says_no_is_broken_until_it_is_mended(nights: Nights) -> None:
    pool = nights.site.pool

    def play(_: float) -> None:
        (folder,) = pool.submitted
        pool.play(folder)
        asked = json.loads((folder / "nodes" / A100 / "expectations.json").read_bytes())
        rows = suite_report(asked)["checks"]
        wrong = {"checks": [failed(rows[0]["name"], Outcome.WRONG_NUMBERS), *rows[1:]]}
        play_node(folder, A100, report=wrong, run={"returncode": 1})
        pool.at_work = False

    nights.pause = play
    first = nights.run()
    assert first.exit_code == 9
    (row,) = first.broken
    assert (row.what, row.on, row.reason.partition(":")[0]) == (NAME, "8.0", Outcome.WRONG_NUMBERS)
    assert [(row.what, row.on) for row in first.verified] == [(NAME, "7.0")]
    second = nights.run()
    assert [(row.what, row.on, row.exit_code) for row in second.broken] == [(NAME, "8.0", 9)]
    assert not is_news(second, first)


def test_a_step_that_is_killed_ends_no_other(nights: Nights) -> None:
    nights.crashes = ("build", "verdict sync")
    done = nights.run()
    assert nights.commands == ["build", "image promote", "verdict sync", "site publish", "image prune"]
    told = {row.what: row.reason for row in done.broken}
    assert told[NAME] == "`imagefactory build` ended with exit code -9"
    assert told["reconcile"] == "`imagefactory verdict sync` ended with exit code -9"
    assert "catalog" in told  # nothing is there to be signed


def test_a_step_that_cannot_be_started_ends_no_other(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is on a full disk, or there is no memory for another process."""
    step = nights.step

    def run(words: Sequence[str]) -> tuple[int, str]:
        if command_of(words) in ("image promote", "verdict sync"):
            raise OSError(errno.ENOSPC, f"No space left for {command_of(words)}")  # two causes: two rows
        return step(words)

    monkeypatch.setattr(nights, "step", run)
    done = nights.run()
    assert nights.commands[-2:] == ["site publish", "image prune"]
    assert [(row.what, row.exit_code) for row in done.broken] == [("tags", 7), ("reconcile", 7)]


def test_a_full_disk_is_told_and_gets_the_reserve(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each night keeps a reserve if there is room for it, and gives it back before its last steps."""
    settings, free = nights.site.factory.settings, shutil.disk_usage("/")
    assert nights.run().broken == ()
    assert not has_reserve(settings)
    allocate_reserve(settings)
    assert has_reserve(settings)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=RESERVE - 1))
    done = nights.run()
    assert [(row.what, row.exit_code) for row in done.broken] == [(NIGHTLY_DIRECTORY, 7)]
    assert nights.commands == ["image promote", "verdict sync", "site publish", "image prune"]
    assert not has_reserve(settings)


def test_a_night_without_room_for_its_folder_takes_a_temporary_one(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = nights.site.factory.settings
    create_nightly(settings, "20261125-021700-1")
    mkdir = Path.mkdir

    def full(path: Path, *rest: Any, **more: Any) -> None:
        if path.parent == nightly_directory(settings):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        mkdir(path, *rest, **more)

    monkeypatch.setattr(Path, "mkdir", full)
    folder = create_nightly(settings, "20261126-021700-1")
    assert folder.is_dir()
    assert folder.parent == Path(tempfile.gettempdir())
    folder.rmdir()


def test_a_recipe_with_faults_keeps_nothing_else_from_being_published(nights: Nights) -> None:
    """And its family stays in the catalog as it was: people use it."""
    play = nights.pause
    nights.run(wait=timedelta(0))
    play(0)
    recipe = nights.site.factory.settings.root_path / "recipes" / "pytorch.yaml"
    other = recipe.with_name("other.yaml")
    other.write_text("family: other\nnonsense: 1\n")
    factory = load_lenient(nights.site.factory.settings, nights.site.factory.environ)
    assert factory.faults
    nights.site = replace(nights.site, factory=factory)
    second = nights.run()
    assert second.exit_code == 2
    assert {row.what.split(":")[0] for row in second.broken} == {"recipes/other.yaml"}
    assert nights.commands == [
        "sweep start",
        "sweep collect",
        "image promote",
        "verdict sync",
        "site publish",
        "image prune",
    ]
    assert [(row.what, row.on) for row in second.verified] == [(NAME, "7.0, 8.0")]
    assert '"exit_code": 2' in nights.said["site publish"]
    assert json.loads(nights.said["site publish"])["written"]
    other.unlink()

    text = recipe.read_text()
    recipe.write_text(f"{text}nonsense: 1\n")
    other.write_text(OTHER)
    nights.step(("site", "publish", "--json"))
    told = json.loads(nights.said["site publish"])
    assert (told["unchanged"], told["images"][0]["target"]) == ([NAME], NAME)
    assert told["images"][0]["verified"] == ["7.0", "8.0"]


def test_a_pool_that_does_not_answer_is_told_and_the_catalog_signed(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.run()

    def silent(now: datetime) -> None:
        raise ToolError("pool-unreachable", "no collector", hint="condor_status")

    monkeypatch.setattr(nights.site.pool, "inventory", silent)
    done = nights.run()
    assert [(row.what, row.reason, row.exit_code) for row in done.broken] == [("pool", "no collector", 6)]
    assert nights.commands[-2:] == ["site publish", "image prune"]
    assert (done.built, done.verified) == ((), ())


def test_without_the_registry_one_cause_is_told_and_the_catalog_tried(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, hurried: bool = False) -> None:
        raise RegistryError("registry-unreachable", "no answer", hint="is it running?")

    for module in ("actions.plan", "extras.nightly.night"):
        monkeypatch.setattr(f"imagefactory.{module}.open_answering", away)
    done = nights.run()
    assert [(row.what, row.exit_code) for row in done.broken] == [("plan", 8), ("catalog", 3)]
    assert nights.commands == ["site publish", "image prune"]
    assert len(done.notes) == 1


def test_a_pool_that_falls_silent_is_not_waited_for_for_ever(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def running(folder: Path) -> bool:
        raise ToolError("pool-unreachable", "no schedd")

    monkeypatch.setattr(nights.site.pool, "running", running)
    monkeypatch.setattr(night, "QUEUE_WAIT_SECONDS", 2)
    nights.pause = lambda _: None
    done = nights.run()
    assert ("pool", "no schedd") in [(row.what, row.reason) for row in done.broken]
    assert nights.commands[-2:] == ["site publish", "image prune"]


def test_without_a_pool_this_machines_gpu_is_asked_or_none(nights: Nights) -> None:
    done = nights.run(pool="")
    assert done.notes == ("nothing is verified: no GPU in this test",)
    assert nights.commands == ["build", "image promote", "verdict sync", "site publish", "image prune"]

    nights.crashes = ("verify",)
    done = nights.run(pool="", evidence=OneGpu())
    (step,) = (words for words in nights.steps if words[0] == "verify")
    assert step[1:4] == ("--registry", nights.site.registry.host, "--promote")
    assert step[4].startswith(f"{NAME}@sha256:")  # what is there is not built again
    assert [row.what for row in done.broken] == [NAME]


def test_without_a_registry_there_is_no_night(site: Site) -> None:
    bench = NightlyDependencies(
        clock=lambda: datetime.now(UTC),
        pause=lambda _: None,
        pools=site.opens,
        evidence=NoGpuHere(),
        run=lambda _: (0, ""),
    )
    with pytest.raises(UsageError) as caught:
        run_nightly(site.factory, NightlyRequest(), bench, Path("/nowhere"), QuietProgress())
    assert caught.value.code == "no-registry-set"


# --- what is kept ----------------------------------------------------------------------------------


def test_one_night_at_a_time(site: Site) -> None:
    settings = site.factory.settings
    with nightly_lock(settings), pytest.raises(UsageError) as caught, nightly_lock(settings):
        pass
    assert caught.value.code == "night-in-progress"
    with nightly_lock(settings):
        pass


def test_old_nights_go_with_the_sweeps_that_they_made(nights: Nights) -> None:
    nights.run()
    settings = nights.site.factory.settings
    (sweep,) = find_sweeps(settings)
    other = sweep.with_name("20261124-000000-aaaa")  # which somebody made by hand
    shutil.copytree(sweep, other)
    for number in range(MAX_RUNS):
        create_nightly(settings, f"20261126-{number:06}-1")
    assert len([one for one in (settings.store_path / "nights").iterdir() if one.is_dir()]) == MAX_RUNS
    assert find_sweeps(settings) == (other,)
    assert not sweep.exists()


def test_what_is_kept_is_read_back_and_nothing_else_is(nights: Nights, tmp_path: Path) -> None:
    done = nights.run()
    (folder,) = (
        path.parent for path in (nights.site.factory.settings.store_path / "nights").glob("*/night.json")
    )
    plan = read_saved_plan(folder / "before.json")
    assert isinstance(plan, SavedPlan)
    assert plan.names == (NAME,)
    (tmp_path / "x").write_text("{")
    for path, code in (
        (folder / NIGHTLY_FILE, "night-file-invalid"),
        (tmp_path / "x", "night-file-not-json"),
        (tmp_path / "none", "cannot-read-file"),
    ):
        with pytest.raises(UsageError) as caught:
            read_saved_plan(path)
        assert (caught.value.code, str(path) in caught.value.message) == (code, True)
    write_nightly(tmp_path / NIGHTLY_FILE, done)
    row = json.loads((tmp_path / NIGHTLY_FILE).read_text())
    assert (document_faults(row), row["format"]) == ([], "imagefactory.nightly/1")
    assert Path(row["directory"]) == folder
    assert document_faults(json.loads((folder / "before.json").read_text())) == []
    (folder / NIGHTLY_FILE).write_text("{}")
    assert last_nightly(nights.site.factory.settings) is None


def test_the_last_commit_is_told_where_there_is_a_repository(tmp_path: Path) -> None:
    assert last_commit(tmp_path) is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org")
    dates = {**os.environ, "GIT_COMMITTER_DATE": "2026-11-01T02:03:04Z"}
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "one")):
        subprocess.run((*git, *words), check=True, env=dates)
    assert last_commit(tmp_path) == datetime(2026, 11, 1, 2, 3, 4, tzinfo=UTC)
