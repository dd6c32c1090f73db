"""What releases are known to need and do not declare, with a solver of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from imagefactory.errors import UnsolvableError
from imagefactory.gpu import knowledge
from imagefactory.lock.pypi.question import PinnedVersions, WheelRequest
from imagefactory.lock.pypi.requirements import read_lock
from imagefactory.lock.pypi.unbuilt import (
    NoCompanionError,
    companion_needs,
    solve_companions,
    solve_with_companions,
)
from imagefactory.model import LockedWheel
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.values import make_lock

ROOT = Path(knowledge.__file__).parents[3]


@dataclass
class Solver:
    """Answers by `answer`, a function of the constraints and requirements."""

    answer: Callable[[tuple[str, ...]], str]
    asked: list[WheelRequest] = field(default_factory=list)

    def solve(self, question: WheelRequest) -> PinnedVersions:
        self.asked.append(question)
        return PinnedVersions(
            lines=tuple(self.answer((*question.requirements, *question.constraints)).split()), lacking=()
        )


class Notes(QuietProgress):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def ask(*requirements: str, **more: object) -> WheelRequest:
    return WheelRequest(lock=make_lock(wheels=()), requirements=requirements, **more)  # type: ignore[arg-type]


def fixed(pin: str) -> LockedWheel:
    name, _, version = pin.partition("==")
    return LockedWheel(name=name, version=version, filename="", sha256="0" * 64, size=1)


@pytest.mark.parametrize(
    ("versions", "needs"),
    [
        ("torch==2.2.2 numpy==2.4.6", {"numpy<2"}),
        ("torch==2.3.0 numpy==2.4.6", set()),
        ("torch==2.2.2", set()),  # nothing needs numpy
        ("torch==2.6.0 triton==3.2.0", {"setuptools"}),
        ("torch==2.7.0 triton==3.3.0", set()),
        ("torch==2.6.0 torchaudio==2.11.0", {"torchaudio==2.6.*"}),
        ("torch==2.6.0+cu124 torchvision==0.21.0", {"torchvision==0.21.*"}),
        ("torch==2.10.0 torchcodec==0.12.0", {"torchcodec<0.11,>=0.10"}),
        ("torch==99.0 torchaudio==2.11.0", set()),  # of which nothing is known
        ("jaxlib==0.4.25 numpy==2.0.0", {"numpy<2"}),
    ],
)
def test_needs_go_by_the_very_versions(versions: str, needs: set[str]) -> None:
    found = companion_needs(dict(pin.split("==") for pin in versions.split()), "3.11")  # type: ignore[misc]
    assert {str(one.wants) for one in found} == needs
    assert all(one.source for one in found)


@pytest.mark.parametrize(
    ("version", "python", "needs"),
    [
        ("2.5.1", "3.13", {"triton==3.1.*"}),
        ("2.5.1+cu118", "3.13", {"triton==3.1.*"}),
        ("2.5.1+cpu", "3.13", set()),
        ("2.5.1", "3.12", set()),  # its wheel asks for Triton itself
        ("2.3.1", "3.12", {"triton==2.3.*"}),
    ],
)
def test_a_need_can_be_of_one_python(version: str, python: str, needs: set[str]) -> None:
    assert {str(one.wants) for one in companion_needs({"torch": version}, python)} == needs


def test_the_shipped_locks_meet_every_need() -> None:
    locks = [read_lock(path) for path in sorted((ROOT / "lockfiles").glob("*.requirements.txt"))]
    assert locks
    for lock in locks:
        versions = {wheel.name: wheel.version for wheel in lock.wheels}
        for need in companion_needs(versions, lock.python):
            assert need.wants.name in versions, (lock.target, need)
            assert need.wants.specifier.contains(versions[need.wants.name]), (lock.target, need)


def test_a_companion_and_a_bound_are_kept_and_told() -> None:
    def answer(asked: tuple[str, ...]) -> str:
        audio = "2.6.0" if "torchaudio==2.6.*" in asked else "2.11.0"
        tools = " setuptools==80.0" if "setuptools" in asked else ""
        return f"torch==2.6.0 triton==3.2.0 torchaudio=={audio}{tools}"

    solver, notes = Solver(answer), Notes()
    question, pins = solve_with_companions(solver, ask("torch==2.6.*", "torchaudio"), notes)
    assert pins.lines == ("torch==2.6.0", "triton==3.2.0", "torchaudio==2.6.0", "setuptools==80.0")
    assert question.requirements == ("torch==2.6.*", "torchaudio", "setuptools")
    assert question.constraints == ("torchaudio==2.6.*",)
    assert len(notes.told) == 2
    assert solve_with_companions(solver, question, notes) == (question, pins)
    assert len(notes.told) == 2  # which changes nothing, so nothing is told


def test_what_is_below_or_of_conda_decides_and_is_not_bounded() -> None:
    """Companions and bounds hold above a target, or conda's packages, that have the framework."""

    def answer(asked: tuple[str, ...]) -> str:
        tools = " setuptools==80.0" if "setuptools" in asked else ""
        return f"torchaudio=={'2.6.0' if 'torchaudio==2.6.*' in asked else '2.11.0'}{tools}"

    below = (fixed("torch==2.6.0"), fixed("torchvision==0.20.0"), fixed("triton==3.2.0"))
    question, pins = solve_with_companions(Solver(answer), ask("torchaudio", fixed=below), QuietProgress())
    assert pins.lines == ("torchaudio==2.6.0", "setuptools==80.0")
    assert question.constraints == ("torchaudio==2.6.*",)  # not the torchvision below, which is as it is
    assert question.requirements == ("torchaudio", "setuptools")
    given = ("torch==2.6.0+given", "torchvision==0.20.0+given")
    question, pins = solve_with_companions(Solver(answer), ask("torchaudio", given=given), QuietProgress())
    assert (pins.lines, question.constraints) == (("torchaudio==2.6.0",), ("torchaudio==2.6.*",))
    plain = ask("numpy", given=("torch==2.5.1+given",))
    question, _ = solve_with_companions(Solver(lambda _: "numpy==2.1.0"), plain, QuietProgress())
    assert question.requirements == ("numpy",)  # conda's torch names its Triton itself


def test_a_companion_without_a_release_for_the_framework_stops() -> None:
    solver = Solver(lambda _: "torch==2.15.0 torchaudio==2.11.0")
    with fails(UnsolvableError, "companion-not-released") as caught:
        solve_with_companions(solver, ask("torch==2.15.*", "torchaudio"), QuietProgress())
    assert caught.value.message.startswith("pytorch-2.3-cu121: torchaudio ")
    assert "torch 2.15.0" in caught.value.message
    assert "2.11" in caught.value.hint


def test_an_open_framework_is_as_old_as_its_companions_need_it() -> None:
    def answer(asked: tuple[str, ...]) -> str:
        return f"torch=={'2.11.0' if 'torch<2.12' in asked else '2.15.0'} torchaudio==2.11.0"

    notes = Notes()
    question, pins = solve_with_companions(Solver(answer), ask("torchaudio"), notes)
    assert (pins.lines, question.constraints) == (("torch==2.11.0", "torchaudio==2.11.0"), ("torch<2.12",))
    assert len(notes.told) == 1
    assert solve_companions(Solver(answer), ask("torchaudio"))[:2] == (question, pins)

    def pinned(asked: tuple[str, ...]) -> str:
        if "torch<2.12" in asked:
            raise UnsolvableError("no-solution", "t: No solution found")
        return answer(asked)

    with pytest.raises(NoCompanionError):
        solve_with_companions(Solver(pinned), ask("torch==2.15.*", "torchaudio"), notes)
    with pytest.raises(NoCompanionError):
        solve_with_companions(Solver(answer), ask("torchaudio", fixed=(fixed("torch==2.15.0"),)), notes)


def test_a_recipe_that_asks_for_the_contrary_has_no_solution() -> None:
    def answer(asked: tuple[str, ...]) -> str:
        if {"numpy<2", "numpy==2.1.0"} <= {*asked}:
            raise UnsolvableError("no-solution", "t: No solution found", tree="tree")
        return "torch==2.2.2 numpy==2.1.0"

    with fails(UnsolvableError, "requirements-conflict") as caught:
        solve_with_companions(Solver(answer), ask("torch==2.2.*", "numpy==2.1.0"), QuietProgress())
    for word in ("torch 2.2.2", "numpy<2", "numpy==2.1.0"):
        assert word in caught.value.message
    assert "numpy==2.1.0" in caught.value.hint
    assert caught.value.tree == "tree"
