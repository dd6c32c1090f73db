"""What is told of a solution that is far behind, with a solver and an index of a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from imagefactory.errors import LockError, UnsolvableError
from imagefactory.lock import OutdatedPackage
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.outdated import find_outdated
from imagefactory.lock.pypi.question import PinnedVersions, WheelRequest
from imagefactory.model import Lock, LockedWheel
from imagefactory.progress import Progress, QuietProgress
from imagefactory.recipes.values import package_of

LOCK = Lock(
    target="t", content_hash="", python="3.11", platform="manylinux_2_36_x86_64", solver="", wheels=()
)


def wheel(pin: str) -> LockedWheel:
    name, _, version = pin.partition("==")
    filename = f"{name}-{version}-py3-none-any.whl"
    return LockedWheel(name=name, version=version, filename=filename, sha256="0" * 64, size=1)


@dataclass
class Asker:
    """`accounts` by the pin that is asked for, `has` are the releases of the index by name.

    Those in `sources` have no wheel. `needs` is what wheels require, by name or pin.
    """

    has: dict[str, tuple[str, ...]]
    accounts: dict[str, Exception | str] = field(default_factory=dict)
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)

    def solve(self, question: WheelRequest) -> PinnedVersions:
        pin = question.constraints[-1]
        self.asked.append(pin)
        answer = self.accounts[pin]
        if isinstance(answer, Exception):
            raise answer
        return PinnedVersions(lines=tuple(answer.split()), lacking=())

    def listed(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, tuple[IndexFile, ...]]:
        return {
            one: tuple(
                IndexFile(
                    filename=f"{one.name}-{version}.tar.gz"
                    if f"{one.name}=={version}" in self.sources
                    else f"{one.name}-{version}-py3-none-any.whl",
                    url="",
                    sha256="",
                )
                for version in self.has.get(one.name, ())
            )
            for one in wheels
        }

    def required(
        self, wheels: Sequence[LockedWheel], listed: Mapping[LockedWheel, Sequence[IndexFile]], lock: Lock
    ) -> dict[str, tuple[str, ...]]:
        assert {*wheels} <= {*listed}
        return {wheel.name: self.needs[wheel.name] for wheel in wheels}

    def requirers(self, question: WheelRequest, wheels: Sequence[LockedWheel]) -> dict[str, tuple[str, ...]]:
        pairs = [
            (package_of(need), by) for by, needs in self.needs.items() for need in needs if "=" not in by
        ]
        return {name: tuple(by for one, by in pairs if one == name) for name, _ in pairs}

    def metadata(self, pin: str, lock: Lock) -> str:
        if pin not in self.needs:
            raise LockError("test-problem", "no metadata")
        needs = "".join(f"Requires-Dist: {need}\n" for need in self.needs[pin])
        return f"Metadata-Version: 2.1\nName: torch\nVersion: 2\n{needs}"


class Notes(QuietProgress):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def ask(
    asker: Asker, *requirements: str, locked: str, progress: Progress | None = None, **more: object
) -> list[OutdatedPackage]:
    given = {"lock": LOCK, "requirements": requirements, **more}
    question = WheelRequest(**given)  # type: ignore[arg-type]
    wheels = [wheel(pin) for pin in locked.split()]
    return list(find_outdated(asker, question, wheels, "torch", progress or QuietProgress()))


def refused(text: str) -> UnsolvableError:
    return UnsolvableError("test-problem", "t: no", tree=f"cause: Because {text}, we can conclude")


def test_what_the_recipe_names_is_told_with_the_reason_and_what_accepts_it() -> None:
    asker = Asker(
        {"demo": ("0.9", "1.0", "1.3")},
        {"demo==1.3": LockError("test-problem", "demo==1.3 has no usable wheels and")},
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
    asker = Asker(has, needs={"torch": ("demo<1",)})
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
    asker = Asker(has, why | {"demo==1.0": LockError("test-problem", "demo==1.0 has no usable wheels and")})
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


def test_an_index_that_fails_is_noted_and_never_fails_a_lock() -> None:
    asker, notes = (
        Asker({"demo": ("0.9", "1.0")}, {"demo==1.0": LockError("test-problem", "the index is away")}),
        Notes(),
    )
    assert ask(asker, "demo", locked="demo==0.9", progress=notes) == []
    assert "the index is away" in notes.told[0]

    class Away(Asker):
        def listed(
            self, wheels: Sequence[LockedWheel], lock: Lock
        ) -> dict[LockedWheel, tuple[IndexFile, ...]]:
            raise LockError("test-problem", "t: no page")

    notes = Notes()
    assert ask(Away({}), "demo", locked="demo==0.9", progress=notes) == []
    assert "no page" in notes.told[0]


def test_an_account_of_wheels_is_a_reason_and_no_failure_of_the_index() -> None:
    """uv says it with a capital letter where sources are left over at the end."""
    said = (
        "Because all of: demo<2 depend on other<1. Wheels are required for `x` because building is disabled"
    )
    asker, notes = Asker({"demo": ("0.9", "1.0")}, {"demo==1.0": LockError("test-problem", said)}), Notes()
    assert [one.name for one in ask(asker, "demo", locked="demo==0.9", progress=notes)] == ["demo"]
    assert notes.told == []


def test_what_another_named_package_bounds_is_not_behind() -> None:
    """As numpy with the file's own numba: no question, no word."""
    has = {"numpy": ("1.26", "2.4"), "numba": ("0.59",)}
    asker = Asker(has, needs={"numba": ("numpy<1.27",)})
    assert ask(asker, "torch", "numba", "numpy", locked="numba==0.59 numpy==1.26 torch==2.0") == []
    below = (wheel("numba==0.59"),)
    locked = "numba==0.59 numpy==1.26 torch==2.0"
    assert ask(asker, "torch", "numpy", locked=locked, fixed=below) == []  # of the target below
    assert asker.asked == []


def test_what_a_package_below_bounds_is_told_without_a_question_and_stops_nothing() -> None:
    asker = Asker({"numpy": ("1.26", "2.4")}, needs={"numba": ("numpy<1.27",), "librosa": ("numba",)})
    (one,) = ask(asker, "librosa", "numpy", locked="librosa==1.0 numba==0.59 numpy==1.26")
    assert (one.name, one.asked, one.reason) == ("numpy", False, "numba needs numpy<1.27")
    assert ask(asker, "librosa", locked="librosa==1.0 numba==0.59 numpy==1.26") == []  # which nobody named
    assert asker.asked == []


def test_a_newer_release_without_a_wheel_is_always_told() -> None:
    """As rouge-score 0.0.4 for 0.1.2, however near; without a question to the solver."""
    has, sources = {"rouge-score": ("0.0.4", "0.1.2")}, ("rouge-score==0.1.2",)
    asker = Asker(has, sources=sources)
    (one,) = ask(asker, "rouge-score>=0.0.4", locked="rouge-score==0.0.4")
    assert (one.newest, one.asked, one.build) == ("0.1.2", True, "rouge-score==0.1.2")
    (one,) = ask(asker, "evaluate", locked="evaluate==1.0 rouge-score==0.0.4")
    assert (one.newest, one.asked, one.build) == ("0.1.2", False, "rouge-score==0.1.2")
    assert ask(asker, "rouge-score", one.accept, locked="rouge-score==0.0.4") == []
    asker = Asker(has, sources=sources, needs={"evaluate": ("rouge-score<0.1",)})
    assert ask(asker, "evaluate", locked="evaluate==1.0 rouge-score==0.0.4") == []
    before = replace(LOCK, wheels=(wheel("rouge-score==0.0.4"),))  # which was accepted once
    asker = Asker(has, sources=sources)
    assert not ask(asker, "rouge-score", locked="rouge-score==0.0.4", previous=before)[0].asked


def test_the_reason_is_what_the_newest_release_requires() -> None:
    """By its metadata: what uv's account says first need not be the reason."""
    has = {"vllm": ("0.2", "1.0"), "left": ("1.0", "2.0")}
    refusal = refused("other==1 depends on vllm>=0.2 and other==1 depends on left<2")
    asker = Asker(has, {"vllm==1.0": refusal}, needs={"vllm==1.0": ("left>=2",)})
    (one,) = ask(asker, "vllm", "left==1.0", locked="vllm==0.2 left==1.0")
    assert one.reason == "it needs left>=2, the recipe asks for left==1.0"
    asker.needs["third"] = ("left<2",)
    (one,) = ask(asker, "vllm", "third", locked="vllm==0.2 left==1.0 third==1")
    assert one.reason == "it needs left>=2, third needs left<2"
