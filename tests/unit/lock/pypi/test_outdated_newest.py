"""How far a lock is behind the index, and why: pages and accounts of uv as they were seen, made short."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest
from packaging.specifiers import SpecifierSet

from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.outdated import (
    PypiRelease,
    bounds_of,
    far_newer,
    needs_of,
    needs_with,
    newest_source,
    read_account,
    releases,
    to_accept,
)
from imagefactory.model import Lock, LockedWheel

LOCK = Lock(
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
    found = [f"{one.name}{one.specifier}" for one in needs_with(needs, {"and-cuda"}, LOCK)]
    assert found == ["numpy<2.0.0,>=1.23", "cudnn==9"]
    arm = replace(LOCK, platform="manylinux_2_36_aarch64")
    machine = ['a; platform_machine == "aarch64"', 'b; platform_machine == "x86_64"']
    assert [one.name for one in needs_with(machine, (), arm)] == ["a"]
    assert [one.name for one in needs_with(machine, (), LOCK)] == ["b"]


def test_needs_are_those_of_packages_that_are_said_to_require_one() -> None:
    required = {
        "a": ("B<2", 'c<1; extra == "x"', 'b<1; extra == "x"'),
        "d": ('b<3; extra == "x"', 'b<4; python_version < "3"'),
        "e": ("b<5",),
    }
    found = [(one.by, one.name, str(one.bounds)) for one in needs_of(required, {"b": ("a", "d")}, LOCK)]
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
    found = newest_source(held, listed, SpecifierSet(bounds), LOCK)
    assert (str(found) if found else None) == newest
    for more in ({"yanked": True}, {"python": ">=3.12"}, {"python": "<3.11"}):
        none = [replace(file, **more) for file in listed]  # type: ignore[arg-type]
        assert newest_source(held, none, SpecifierSet(bounds), LOCK) is None


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
    account = read_account(text, pin, {"torch": "the recipe asks for torch==2.15.*"}, LOCK)
    assert (account.reason, account.by) == (reason, by)
