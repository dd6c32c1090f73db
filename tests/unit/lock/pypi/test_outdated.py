"""What is told of a solution that is far behind, with a solver and an index of a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

import pytest
from packaging.specifiers import SpecifierSet

from imagefactory.errors import LockError, UnsolvableError
from imagefactory.lock import OutdatedPackage
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.outdated import (
    PypiRelease,
    bounds_of,
    far_newer,
    find_outdated,
    needs_of,
    needs_with,
    newest_source,
    read_account,
    releases,
    to_accept,
)
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
    assert (one.name, one.locked, one.newest, one.accept, one.named) == (
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
    assert (one.name, one.named, one.reason) == ("under", False, "demo needs under<1")
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
    assert (one.name, one.named, one.reason) == ("numpy", False, "numba needs numpy<1.27")
    assert ask(asker, "librosa", locked="librosa==1.0 numba==0.59 numpy==1.26") == []  # which nobody named
    assert asker.asked == []


def test_a_newer_release_without_a_wheel_is_always_told() -> None:
    """As rouge-score 0.0.4 for 0.1.2, however near; without a question to the solver."""
    has, sources = {"rouge-score": ("0.0.4", "0.1.2")}, ("rouge-score==0.1.2",)
    asker = Asker(has, sources=sources)
    (one,) = ask(asker, "rouge-score>=0.0.4", locked="rouge-score==0.0.4")
    assert (one.newest, one.named, one.build) == ("0.1.2", True, "rouge-score==0.1.2")
    (one,) = ask(asker, "evaluate", locked="evaluate==1.0 rouge-score==0.0.4")
    assert (one.newest, one.named, one.build) == ("0.1.2", False, "rouge-score==0.1.2")
    assert ask(asker, "rouge-score", one.accept, locked="rouge-score==0.0.4") == []
    asker = Asker(has, sources=sources, needs={"evaluate": ("rouge-score<0.1",)})
    assert ask(asker, "evaluate", locked="evaluate==1.0 rouge-score==0.0.4") == []
    before = replace(LOCK, wheels=(wheel("rouge-score==0.0.4"),))  # which was accepted once
    asker = Asker(has, sources=sources)
    assert not ask(asker, "rouge-score", locked="rouge-score==0.0.4", previous=before)[0].named


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


LOCK_NEWEST = Lock(
    target="tiny-1-cu121",
    content_hash="",
    python="3.11",
    platform="manylinux_2_36_x86_64",
    solver="",
    wheels=(),
)


ANYTHING = SpecifierSet()


def file(version: str, day: str = "", *, python: str = "", yanked: bool = False) -> IndexFile:
    name = f"demo-{version}-py3-none-any.whl"
    return IndexFile(filename=name, url="", sha256="", python=python, uploaded=day, yanked=yanked)


def known(*versions: str, python: str = "3.11") -> tuple[PypiRelease, ...]:
    """Releases of the first of each year from 2020 on."""
    return releases("demo", [file(v, f"{2020 + n}-01-01") for n, v in enumerate(versions)], python)


def test_a_release_is_final_and_not_yanked() -> None:
    files = [file("1.0", "2026-01-02"), file("2.0rc1"), file("3.0.dev1"), file("4.0", yanked=True)]
    files += [replace(file("1.0", "2026-01-01"), filename="demo-1.0.tar.gz")]
    files += [replace(file("9"), filename=name) for name in ("demo-9.exe", "demo-more-9.tar.gz", "x.whl")]
    (only,) = releases("demo", files, "3.11")
    assert (str(only.version), only.uploaded) == ("1.0", date(2026, 1, 1))


def test_a_release_for_newer_pythons_is_not_missed_and_one_for_older_is() -> None:
    """The recipe chose its Python; but before releases that name their last one are some that name none."""
    files = [
        file("1.0"),
        file("2.0", python=">=3.9,<3.11"),
        file("3.0", python=">=3.12"),
        file("4", python="?"),
    ]
    assert [str(one.version) for one in releases("demo", files, "3.11")] == ["1.0", "2.0", "4"]


@pytest.mark.parametrize(
    ("locked", "versions", "bounds", "newest"),
    [
        ("0.11.3", ("0.11.3", "1.0", "1.3.2"), "", "1.3.2"),
        ("0.11.3", ("0.11.3", "1.0", "1.3.2"), "<1", None),
        ("0.2.2", ("0.2.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8"), "", "0.8"),
        ("0.2.2", ("0.2.2", "0.3", "0.4", "0.5", "0.6", "0.7"), "", None),
        ("0.3.1.dev5", ("0.3.1", "0.4", "0.5", "0.6", "0.7", "0.8"), "", "0.8"),
        ("2.0", ("1.0", "2.0"), "", None),
        ("2.3.1+cu121", ("2.3.1", "2.3.1.post1"), "", None),
        ("2024.1", ("2024.1", "1!1.0"), "", "1!1.0"),
    ],
)
def test_what_is_far_behind(locked: str, versions: tuple[str, ...], bounds: str, newest: str | None) -> None:
    found = far_newer(locked, known(*versions), SpecifierSet(bounds))
    assert (str(found) if found else None) == newest


def test_many_releases_of_one_year_are_near() -> None:
    days = [file(f"0.{n}", f"2026-0{n}-01") for n in range(1, 9)]
    assert far_newer("0.1", releases("demo", days, "3.11"), ANYTHING) is None
    assert far_newer("0.1", releases("demo", [file(f"0.{n}") for n in range(1, 9)], "3.11"), ANYTHING) is None


def test_what_a_recipe_writes_to_accept_lets_nothing_newer_in() -> None:
    versions = known("0.10", "0.11.3", "1.0", "1.3")
    assert to_accept("demo", "0.11.3", versions) == "demo<1.0"
    assert to_accept("demo", "0.9.dev5", versions) == "demo==0.9.dev5"
    for locked in ("0.11.3", "0.9.dev5"):
        bounds = bounds_of("demo", ["other<1", to_accept("demo", locked, versions)])
        assert far_newer(locked, versions, bounds) is None


def test_needs_that_hold_with_extras_and_python() -> None:
    needs = (
        "numpy<2.0.0,>=1.23",
        'cudnn==9; extra == "and-cuda"',
        'old<1; python_version < "3.9"',
        'other; extra == "x"',
        "no requirement !",
    )
    found = [f"{one.name}{one.specifier}" for one in needs_with(needs, {"and-cuda"}, LOCK_NEWEST)]
    assert found == ["numpy<2.0.0,>=1.23", "cudnn==9"]
    arm = replace(LOCK_NEWEST, platform="manylinux_2_36_aarch64")
    machine = ['a; platform_machine == "aarch64"', 'b; platform_machine == "x86_64"']
    assert [one.name for one in needs_with(machine, (), arm)] == ["a"]
    assert [one.name for one in needs_with(machine, (), LOCK_NEWEST)] == ["b"]


def test_needs_are_those_of_packages_that_are_said_to_require_one() -> None:
    required = {
        "a": ("B<2", 'c<1; extra == "x"', 'b<1; extra == "x"'),
        "d": ('b<3; extra == "x"', 'b<4; python_version < "3"'),
        "e": ("b<5",),
    }
    found = [
        (one.by, one.name, str(one.bounds)) for one in needs_of(required, {"b": ("a", "d")}, LOCK_NEWEST)
    ]
    assert found == [("a", "b", "<2"), ("d", "b", "<3")]


@pytest.mark.parametrize(
    ("files", "bounds", "newest"),
    [
        ("demo-0.0.4-py3-none-any.whl demo-0.1.2.tar.gz", "", "0.1.2"),
        ("demo-0.0.4-py3-none-any.whl demo-0.1.2.tar.gz", "<0.1", None),
        ("demo-0.1.2.tar.gz demo-0.1.2-py3-none-any.whl", "", None),
        ("demo-0.1.2.tar.gz demo-0.1.2-cp311-cp311-win_amd64.whl", "", "0.1.2"),
        ("demo-0.1.2-cp311-cp311-win_amd64.whl", "", None),  # which nobody could build here
        ("demo-0.1.2.tar.gz demo-0.2-py3-none-any.whl", "", None),  # another reason holds that back
        ("demo-0.0.3.tar.gz demo-1.0rc1.tar.gz", "", None),
    ],
)
def test_the_newest_release_that_is_a_source_alone(files: str, bounds: str, newest: str | None) -> None:
    held = LockedWheel(name="demo", version="0.0.4", filename="", sha256="", size=1)
    listed = [IndexFile(filename=name, url="", sha256="") for name in files.split()]
    found = newest_source(held, listed, SpecifierSet(bounds), LOCK_NEWEST)
    assert (str(found) if found else None) == newest
    for more in ({"yanked": True}, {"python": ">=3.12"}, {"python": "<3.11"}):
        none = [replace(file, **more) for file in listed]  # type: ignore[arg-type]
        assert newest_source(held, none, SpecifierSet(bounds), LOCK_NEWEST) is None


@pytest.mark.parametrize(
    ("text", "pin", "reason", "by"),
    [
        (
            "cause: Because antlr4-python3-runtime>=4.9,<=4.9.3 has no usable wheels and only the following "
            "versions of antlr4-python3-runtime are available:\n    antlr4-python3-runtime<4.9.dev0\nwe can "
            "conclude that it cannot be used.\n  And because hydra-core==1.3.2 depends on "
            "antlr4-python3-runtime==4.9.* and you require hydra-core==1.3.2, we can conclude",
            "hydra-core==1.3.2",
            "no wheel of antlr4-python3-runtime 4.9.* for Python 3.11 on manylinux_2_36_x86_64",
            "",
        ),
        (
            "cause: Because deepspeed==0.19.2 has no usable wheels and you require deepspeed==0.19.2, we can",
            "deepspeed==0.19.2",
            "no wheel of deepspeed 0.19.2 for Python 3.11 on manylinux_2_36_x86_64",
            "",
        ),
        (
            "cause: Because vllm==0.33.0 depends on torch==2.14.0 and you require torch==2.15.*, we can",
            "vllm==0.33.0",
            "it needs torch==2.14.0, the recipe asks for torch==2.15.*",
            "",
        ),
        (
            "cause: Because tensorflow==2.15.1 depends on numpy>=1.23.5,<2.0.0 and you require numpy==2.4.6",
            "numpy==2.4.6",
            "tensorflow needs numpy>=1.23.5,<2.0.0",
            "tensorflow",
        ),
        (
            "cause: Because demo==2.0 depends on left==2 and other==1 depends on left==1, we can conclude",
            "demo==2.0",
            "it needs left==2, other needs left==1",
            "other",
        ),
        (
            "cause: Because the requested Python version (>=3.14) does not satisfy Python<3.14 and demo==2.0 "
            "depends on Python<3.14, we can conclude",
            "demo==2.0",
            "it needs Python<3.14, the recipe has Python 3.11",
            "",
        ),
        (  # what allows the newest release is not the reason
            "cause: Because diffusers==1.0 depends on accelerate==1.15.0 and torch==2 depends on left==1, we",
            "accelerate==1.15.0",
            "Because diffusers==1.0 depends on accelerate==1.15.0 and torch==2 depends on left==1, we",
            "",
        ),
        ("No solution found\n  cause: something new", "demo==1", "something new", ""),
    ],
)
def test_an_account_in_short(text: str, pin: str, reason: str, by: str) -> None:
    account = read_account(text, pin, {"torch": "the recipe asks for torch==2.15.*"}, LOCK_NEWEST)
    assert (account.reason, account.by) == (reason, by)
