"""What is told of a solution that is far behind, with a solver and an index of a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from imagefactory.errors import LockError, UnsolvableError
from imagefactory.lock import Behind
from imagefactory.lock.pypi.behind import find_behind
from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.lock.pypi.question import Pins, WheelQuestion
from imagefactory.model import Lock, LockedWheel
from imagefactory.progress import Quiet

LOCK = Lock(
    target="t", content_hash="", python="3.11", platform="manylinux_2_36_x86_64", solver="", wheels=()
)


def wheel(pin: str) -> LockedWheel:
    name, _, version = pin.partition("==")
    filename = f"{name}-{version}-py3-none-any.whl"
    return LockedWheel(name=name, version=version, filename=filename, sha256="0" * 64, size=1)


@dataclass
class Asker:
    """`accounts` by the pin that is asked for, `has` are the releases of the index by name."""

    has: dict[str, tuple[str, ...]]
    accounts: dict[str, Exception | str] = field(default_factory=dict)
    needs: str = ""
    asked: list[str] = field(default_factory=list)

    def solve(self, question: WheelQuestion) -> Pins:
        pin = question.constraints[-1]
        self.asked.append(pin)
        answer = self.accounts[pin]
        if isinstance(answer, Exception):
            raise answer
        return Pins(lines=tuple(answer.split()), lacking=())

    def listed(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, tuple[IndexFile, ...]]:
        return {
            one: tuple(
                IndexFile(filename=f"{one.name}-{version}.tar.gz", url="", sha256="")
                for version in self.has.get(one.name, ())
            )
            for one in wheels
        }

    def metadata(self, pin: str, lock: Lock) -> str:
        if not self.needs:
            raise LockError("no metadata")
        return f"Metadata-Version: 2.1\nName: torch\nVersion: 2\nRequires-Dist: {self.needs}\n"


def ask(asker: Asker, *requirements: str, locked: str, **more: object) -> list[Behind]:
    given = {"lock": LOCK, "requirements": requirements, **more}
    question = WheelQuestion(**given)  # type: ignore[arg-type]
    wheels = [wheel(pin) for pin in locked.split()]
    return list(find_behind(asker, question, wheels, "torch", Quiet()))


def refused(text: str) -> UnsolvableError:
    return UnsolvableError("t: no", tree=f"cause: Because {text}, we can conclude")


def test_what_the_recipe_names_is_told_with_the_reason_and_what_accepts_it() -> None:
    asker = Asker(
        {"demo": ("0.9", "1.0", "1.3")}, {"demo==1.3": LockError("demo==1.3 has no usable wheels and")}
    )
    (one,) = ask(asker, "torch==2.*", "Demo[x]", locked="demo==0.9 torch==2.0")
    assert (one.name, one.locked, one.newest, one.accept, one.asked) == (
        "demo",
        "0.9",
        "1.3",
        "demo<1.0",
        True,
    )
    assert one.reason == "no wheel of demo 1.3 for Python 3.11 on manylinux_2_36_x86_64"


def test_a_bound_of_the_recipe_is_no_surprise() -> None:
    asker = Asker({"demo": ("0.9", "1.0", "1.3"), "torch": ("2.0", "3.0")})
    assert ask(asker, "torch==2.*", "demo", locked="demo==0.9 torch==2.0", constraints=("demo<1",)) == []
    assert asker.asked == []


def test_a_bound_of_the_framework_is_no_surprise() -> None:
    """By its metadata nothing is asked; where the index does not give that, the solver tells it."""
    has, locked = {"demo": ("0.9", "1.0")}, "demo==0.9 torch==2.0"
    asker = Asker(has, needs="demo<1")
    assert ask(asker, "torch==2.*", "demo", locked=locked) == []
    assert asker.asked == []
    asker = Asker(has, {"demo==1.0": refused("torch==2.0 depends on demo<1 and you require demo==1.0")})
    assert ask(asker, "torch==2.*", "demo", locked=locked) == []
    assert asker.asked == ["demo==1.0"]


def test_packages_below_are_told_where_nothing_that_is_named_is_behind() -> None:
    has = {"demo": ("0.9", "1.0"), "under": ("0.9", "1.0")}
    why = {"under==1.0": refused("demo==0.9 depends on under<1 and you require under==1.0")}
    (one,) = ask(Asker(has, why), "torch==2.*", "demo<1", locked="demo==0.9 under==0.9 torch==2.0")
    assert (one.name, one.asked, one.reason) == ("under", False, "demo needs under<1")
    asker = Asker(has, why | {"demo==1.0": LockError("demo==1.0 has no usable wheels and")})
    assert [one.name for one in ask(asker, "torch==2.*", "demo", locked="demo==0.9 under==0.9")] == ["demo"]
    assert asker.asked == ["demo==1.0"]


def test_what_the_solver_passed_over_for_another_package() -> None:
    asker = Asker({"demo": ("0.9", "1.0")}, {"demo==1.0": "demo==1.0 other==1.0"})
    (one,) = ask(asker, "demo", "other", locked="demo==0.9 other==2.0")
    assert one.reason == "it goes with other 1.0 only"


def test_what_the_lock_before_holds_and_what_is_below_stay_unsaid() -> None:
    asker = Asker({"demo": ("0.9", "1.0")}, {"demo==1.0": "demo==1.0"})
    before = replace(LOCK, wheels=(wheel("demo==0.9"),))
    assert ask(asker, "demo", locked="demo==0.9", previous=before) == []
    assert asker.asked == ["demo==1.0"]
    assert ask(asker, "demo", locked="demo==0.9", fixed=before.wheels) == []
    assert asker.asked == ["demo==1.0"]


def test_an_index_that_fails_is_no_reason() -> None:
    asker = Asker({"demo": ("0.9", "1.0")}, {"demo==1.0": LockError("the index is away")})
    with pytest.raises(LockError, match="away"):
        ask(asker, "demo", locked="demo==0.9")


def test_the_companion_of_a_pinned_framework_is_no_surprise() -> None:
    asker = Asker({"torchvision": ("0.18.1", "0.19.0", "1.0")}, {"torchvision==1.0": refused("x")})
    assert ask(asker, "torch==2.3.*", "torchvision", locked="torch==2.3.1 torchvision==0.18.1") == []
    assert asker.asked == []
    assert ask(asker, "torch==2.4.*", "torchvision", locked="torch==9.0 torchvision==0.18.1") != []
