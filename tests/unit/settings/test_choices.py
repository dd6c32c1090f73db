"""The seam of engines and runners: what a row of a table names builds and starts images."""

from __future__ import annotations

import pytest

from imagefactory.actions.build import BuildOptions, build_target
from imagefactory.actions.run import find_built, run_artifact
from imagefactory.model import RunSpec, Target
from imagefactory.oci.manifests import Image
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.settings.choices import ENGINES, RUNNERS, EngineRow, RunnerRow
from imagefactory.settings.load import load_settings
from tests.made import engine_of_one_row
from tests.made.pushed import put_base
from tests.made.trusted import write_settings


def test_an_engine_and_a_runner_of_one_row_each_build_and_start_an_image(
    factory: Project, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = engine_of_one_row.__name__
    monkeypatch.setitem(ENGINES, "one-layer", EngineRow(module=module, extra="build", runner="echo"))
    monkeypatch.setitem(RUNNERS, "echo", RunnerRow(module=module, extra="build"))
    put_base(factory, target, bytes(10240))  # an archive of nothing
    options = BuildOptions(engine="one-layer", smoke=False)
    built = build_target(factory, target, options, QuietProgress())
    assert isinstance(built.image, Image)
    assert built.fresh
    assert not build_target(factory, target, options, QuietProgress()).fresh
    made = find_built(factory, target, "")
    done = run_artifact(factory, made, RunSpec(argv=("echo", "it runs")), "echo", QuietProgress())
    assert done.stdout == f"{built.image.manifest} echo it runs"


def test_settings_take_the_words_of_the_rows(factory: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    root = factory.settings.root_path
    write_settings(root, 'engine = "one-layer"\n', factory.environ)
    monkeypatch.setitem(ENGINES, "one-layer", EngineRow(module="m", extra="build", runner="unshare"))
    assert load_settings(directory=root, start=root, environ=factory.environ).engine.value == "one-layer"
