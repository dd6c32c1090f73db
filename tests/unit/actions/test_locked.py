"""A lock with a wheel of the factory holds as long as that file is as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.actions import lock as stages_lock
from imagefactory.actions.definition import define_target, write_definition
from imagefactory.actions.lock import LockOptions, lock_target
from imagefactory.actions.locked import TO_BUILD, lock_state, require_lock
from imagefactory.extras.nightly.outdated import _copied
from imagefactory.lock import PublisherReport
from imagefactory.lock.changes import content_hash
from imagefactory.lock.files import read_lock, write_lock
from imagefactory.model import Lock, Target
from imagefactory.progress import QUIET
from imagefactory.project import Project, load_project
from imagefactory.settings.load import load_settings
from tests.made.errors import fails
from tests.made.wheels import locked, make_wheel

PLACE = "./wheels/mylib-1.0-py3-none-any.whl"
RECIPE = f"""\
family: lab
description: on top
on: pytorch-2.3-cu121
packages: [{PLACE}]
"""


@pytest.fixture
def wheel(root: Path) -> Path:
    (root / "wheels").mkdir()
    (root / "recipes/lab.yaml").write_text(RECIPE)
    return make_wheel(root / "wheels", "mylib", {"mylib.py": b"x = 1\n"})


@pytest.fixture
def made(root: Path, wheel: Path) -> tuple[Project, Target]:
    settings = load_settings(directory=root, start=root, environ={"HOME": str(root)})
    factory = load_project(settings, {})
    (target,) = (one for one in factory.targets if one.family == "lab")
    write_lock(factory.lock_folder, lock_of(factory, target, wheel))
    return factory, target


def lock_of(factory: Project, target: Target, wheel: Path) -> Lock:
    below = factory.target_below(target)
    assert below
    under = require_lock(factory, below)
    wheels = sorted((*under.wheels, locked(wheel)), key=lambda one: one.name)
    decided = content_hash(target, factory.base_of(target), under)
    return replace(
        under, target=target.name, content_hash=decided, wheels=tuple(wheels), origins=(("mylib", PLACE),)
    )


def test_it_is_rendered_with_a_copy(made: tuple[Project, Target], wheel: Path, root: Path) -> None:
    factory, target = made
    assert lock_state(factory, target) == "ok"
    assert write_definition(factory, target)
    copy = root / "definitions/lab-2.3-cu121" / PLACE
    assert copy.read_bytes() == wheel.read_bytes()
    assert write_definition(factory, target) == ()


def test_a_changed_file_makes_the_lock_stale_and_is_locked_anew(
    made: tuple[Project, Target], wheel: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory, target = made
    before = require_lock(factory, target)
    make_wheel(root / "wheels", "mylib", {"mylib.py": b"x = 22\n"})
    assert lock_state(factory, target) == "stale"
    with fails("lock-outdated", PLACE):
        require_lock(factory, target)

    class Solver:
        def lock(self, request: object, _: object) -> Lock:
            return lock_of(factory, target, wheel)

        def behind(self, *_: object) -> tuple[()]:
            return ()

        def publishers(self, *_: object) -> PublisherReport:
            return PublisherReport(known={}, attests=False)

    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: Solver())
    done = lock_target(factory, target, LockOptions(), QUIET)
    assert (done.before is done.after, lock_state(factory, target)) == (False, "ok")
    assert require_lock(factory, target) != before
    wheel.unlink()
    with fails("lock-outdated", PLACE):
        require_lock(factory, target)


def test_a_copy_of_the_locks_to_watch_has_the_wheels(made: tuple[Project, Target]) -> None:
    factory, target = made
    with _copied(factory) as copy:
        assert lock_state(copy, target) == "ok"


def test_a_target_with_sources_is_to_build(made: tuple[Project, Target]) -> None:
    factory, locked_target = made
    target = replace(locked_target, sources=("./src/lab",))
    assert lock_state(factory, target) == TO_BUILD
    with fails("source-not-built") as caught:
        require_lock(factory, target)
    assert caught.value.hint == f"run imagefactory lock {target.name} --build"


def test_a_definition_reads_each_lock_of_a_chain_once(
    made: tuple[Project, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def counted(folder: Path, target: Target) -> Lock | None:
        names.append(target.name)
        return read_lock(folder, target)

    monkeypatch.setattr("imagefactory.actions.locked.read_lock", counted)
    define_target(*made)
    assert names == ["pytorch-2.3-cu121", "lab-2.3-cu121"]
