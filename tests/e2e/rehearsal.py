"""Parts of the GPU suite on the CPU, inside a real image: what `rehearsal` in the expectations is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from imagefactory.actions.definition import define_target
from imagefactory.project import load_project
from imagefactory.recipes.expand import select_single
from imagefactory.settings.load import load_settings
from imagefactory.verify.gpu_run import GpuRequest, gpu_expectations
from imagefactory.verify.report import FULL, QUICK
from imagefactory.verify.suite_files import read_suite, write_suite
from tests.services.factory import Factory
from tests.services.tier import many

NONCE = "5eed"
# On one processor the full level's matrices of 2048 rows cost two minutes, and the same code runs.
LEVEL = many(QUICK, FULL)


def prepare(factory: Factory, target: str, folder: Path) -> None:
    """The suite and its expectations for a rehearsal of `target`, below `folder`."""
    settings = load_settings(directory=factory.root, start=factory.root, environ=factory.environ)
    made = load_project(settings, factory.environ)
    definition = define_target(made, select_single(made.targets, target))
    asked = gpu_expectations(definition, GpuRequest(nonce=NONCE, level=LEVEL, predicted={}, rehearsal=True))
    write_suite(folder / "suite", read_suite())
    (folder / "out").mkdir()
    (folder / "out" / "expectations.json").write_text(json.dumps(asked))


def in_earnest(folder: Path) -> None:
    """What is below `folder` is from here on no rehearsal: it asks for a GPU."""
    path = folder / "out" / "expectations.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rehearsal": False}))


def rehearse(factory: Factory, target: str, part: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of one part by check, as it wrote them inside the image of `target`."""
    inside = ("python", "-I", "-B", "/suite/verify.py", "--part", part)
    run_inside(factory, target, folder, *inside, "/out/expectations.json", f"/out/{part}.json")
    return rows_of(folder / "out" / f"{part}.json")


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a part's report, that came to its end."""
    report = json.loads(path.read_text())
    assert report["running"] == "", report
    return {row["name"]: row for row in report["checks"]}


def run_inside(factory: Factory, target: str, folder: Path, *argv: str) -> str:
    """What a command says inside the image, that sees the suite of `folder` and may write to its `out`."""
    mounts = (f"--mount={folder}/suite:/suite", f"--mount={folder}/out:/out:rw")
    done = factory.run("run", *mounts, target, "--", *argv, code=None)
    return done.stdout + done.stderr
