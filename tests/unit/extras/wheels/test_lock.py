"""What is built for a lock, in which order, and what the target is with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions import lock as stages_lock
from imagefactory.actions.lock import LockOptions
from imagefactory.errors import UnbuiltError
from imagefactory.extras.wheels import lock
from imagefactory.extras.wheels.lock import ProjectWheel, build_and_lock, in_order, with_wheel
from imagefactory.lock import LockRequest, PublisherReport
from imagefactory.lock.changes import content_hash
from imagefactory.lock.files import read_lock
from imagefactory.model import Lock, Target
from imagefactory.progress import QUIET
from imagefactory.project import load_project
from imagefactory.settings.load import load_settings
from tests.made.values import make_target
from tests.made.wheels import locked, make_wheel

RECIPE = """\
family: lab
description: on top
on: pytorch-2.3-cu121
packages: [./src/ops, more==1.0]
"""


def row(name: str, *requires: str) -> dict[str, Any]:
    return {"name": name, "requires": list(requires)}


def test_each_is_built_after_what_it_requires() -> None:
    rows = [row("", "a"), row("a", "b", "numpy"), row("c", "a"), row("b", "b")]
    assert [one["name"] for one in in_order(rows)] == ["b", "a", "c", ""]


def test_packages_that_require_each_other_are_built_all_the_same() -> None:
    rows = [row("a", "b"), row("b", "a"), row("c", "b")]
    assert sorted(one["name"] for one in in_order(rows)) == ["a", "b", "c"]


def test_a_target_with_a_wheel_asks_for_it_and_keeps_extras() -> None:
    wheel = ProjectWheel(
        name="ops", version="1.2", path="./wheels/ops-1.2-py3-none-any.whl", source="./src/ops"
    )
    target = make_target(requirements=("torch==2.3.*", "Ops>=1", "ops[gpu]"), sources=("./src/ops", "./lab"))
    found = with_wheel(target, wheel)
    assert found.requirements == ("torch==2.3.*", "ops[gpu]", "ops==1.2")
    assert found.sources == ("./lab",)
    assert found.origins == (("ops", wheel.path),)
    conda = with_wheel(replace(target, source="conda", pip=("ops",)), wheel)
    assert (conda.requirements, conda.pip) == (target.requirements, ("ops==1.2",))


@dataclass
class Solver:
    """Solves a target once its wheel of ops is there, with the wheels of `folder`."""

    folder: Path
    solved: list[Target] = field(default_factory=list)
    compared: list[Lock] = field(default_factory=list)

    def lock(self, request: LockRequest, _: object) -> Lock:
        self.solved.append(request.target)
        if "ops" not in dict(request.target.origins):
            missing = {**row("ops"), "version": "1.0", "source": "./src/ops", "possible": True}
            raise UnbuiltError("wheel-missing", "ops has no wheel", packages=(missing,), pins=("more==1.0",))
        assert request.under
        wheels = (*request.under.wheels, *map(locked, self.folder.glob("*.whl")))
        return replace(
            request.under,
            target=request.target.name,
            content_hash=content_hash(request.target, request.base, request.under),
            wheels=tuple(sorted(wheels, key=lambda one: one.name)),
            origins=request.target.origins,
        )

    def behind(self, _: LockRequest, lock: Lock, __: object) -> tuple[()]:
        self.compared.append(lock)
        return ()

    def publishers(self, *_: object) -> PublisherReport:
        return PublisherReport(known={}, attests=False)


def test_the_solution_that_lacks_no_wheel_is_the_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of the recipe as it is written, whose order decides, and is not solved a second time."""
    (root / "src/ops").mkdir(parents=True)
    (root / "recipes/lab.yaml").write_text(RECIPE)
    folder = root / "wheels"
    folder.mkdir()
    make_wheel(folder, "more", {})
    solver = Solver(folder)

    def build(*_: object) -> tuple[ProjectWheel, bool]:
        made = make_wheel(folder, "ops", {})
        path = f"./wheels/{made.name}"
        return ProjectWheel(name="ops", version="1.0", path=path, source="./src/ops"), True

    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: solver)
    monkeypatch.setattr(lock, "_build_image", lambda *_: None)
    monkeypatch.setattr(lock, "_build_wheel", build)
    environ: Mapping[str, str] = {"HOME": str(root), "IMAGEFACTORY_STORE": str(root / "store")}
    factory = load_project(load_settings(directory=root, start=root, environ=environ), environ)
    (target,) = (one for one in factory.targets if one.family == "lab")
    done = build_and_lock(factory, target, LockOptions(), QUIET)
    (written,) = (one for one in load_project(factory.settings, environ).targets if one.family == "lab")
    assert [one.requirements for one in solver.solved[1:]] == [written.requirements]
    assert solver.compared == [done.relock.after]
    assert read_lock(root / "lockfiles", written) == done.relock.after
