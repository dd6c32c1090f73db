"""Before a verdict, what the store has unpacked is looked at; before a mere run, not. What is done stays."""

from __future__ import annotations

import pytest

from imagefactory.actions.build import BuildOptions, build_target
from imagefactory.actions.run import find_built, run_artifact
from imagefactory.model import RunSpec, Target
from imagefactory.progress import QUIET
from imagefactory.project import Project
from imagefactory.settings.choices import ENGINES, EngineRow
from tests.made import engine_of_one_row
from tests.made.pushed import put_base


def test_a_smoke_test_wants_the_store_looked_at(
    factory: Project, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = engine_of_one_row.remember_runners(monkeypatch)
    module = engine_of_one_row.__name__
    monkeypatch.setitem(ENGINES, "one-layer", EngineRow(module=module, extra="build", runner="echo"))
    put_base(factory, target, bytes(10240))  # an archive of nothing
    build_target(factory, target, BuildOptions(engine="one-layer"), QUIET)
    made = find_built(factory, target, "")
    run_artifact(factory, made, RunSpec(argv=("true",)), "echo", QUIET)
    assert [runner.checked for runner in runners] == [True, False]


def test_what_comes_before_the_work_is_not_done_where_there_is_none(
    factory: Project, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_of_one_row.remember_runners(monkeypatch)
    module = engine_of_one_row.__name__
    monkeypatch.setitem(ENGINES, "one-layer", EngineRow(module=module, extra="build", runner="echo"))
    put_base(factory, target, bytes(10240))
    began: list[str] = []

    def build(word: str, *, smoke: bool) -> None:
        options = BuildOptions(engine="one-layer", smoke=smoke, before=lambda: began.append(word))
        build_target(factory, target, options, QUIET)

    build("made", smoke=False)
    build("made already", smoke=False)
    build("tried", smoke=True)
    assert began == ["made", "tried"]
