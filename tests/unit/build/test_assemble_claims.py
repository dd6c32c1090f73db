"""Several packages that claim one path: one wheel's file is kept, what is no wheel's gives way to none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.build.assemble import describe_path_conflicts, settle_claims
from imagefactory.build.definition import define, rank_wheels
from imagefactory.errors import BuildError
from imagefactory.model import LockedWheel
from tests.made.errors import fails
from tests.made.values import make_base, make_lock, make_target

A, B, C = "a-1-py3-none-any.whl", "b-1-py3-none-any.whl", "c-1-py3-none-any.whl"
RANKS = {A: (0, True, "a"), B: (0, False, "b"), C: (0, True, "c")}


def wheel(name: str) -> LockedWheel:
    return LockedWheel(
        name=name, version="1", filename=f"{name}-1-py3-none-any.whl", sha256=name * 64, size=1
    )


def test_the_same_file_of_several_is_no_conflict() -> None:
    settled = settle_claims(
        [(A, "sha256=x", "s/nvidia/__init__.py"), (B, "sha256=x", "s/nvidia/__init__.py")], RANKS
    )
    assert settled.lost == {}
    assert list(settled.image_files()) == [(A, "sha256=x", "s/nvidia/__init__.py")]


@pytest.mark.parametrize("order", [(A, B, C), (C, B, A), (B, C, A)])
def test_the_named_package_is_kept_else_the_first_name(order: tuple[str, ...]) -> None:
    three = settle_claims([(each, f"sha256={each}", "s/same.py") for each in order], RANKS)
    assert three.owners == {"s/same.py": (B, f"sha256={B}")}
    assert three.lost == {(B, A): {"s/same.py"}, (B, C): {"s/same.py"}}
    assert three.excluded(A) == three.excluded(C) == {"s/same.py"}
    assert three.excluded(B) == frozenset()
    two = settle_claims([(each, f"sha256={each}", "s/same.py") for each in order if each != B], RANKS)
    assert two.lost == {(A, C): {"s/same.py"}}


def test_who_brings_the_kept_content_too_loses_nothing() -> None:
    rows = [(A, "sha256=x", "s/f"), (B, "sha256=y", "s/f"), (C, "sha256=y", "s/f")]
    assert settle_claims(rows, RANKS).lost == {(B, A): {"s/f"}}


def test_each_pair_is_told_with_the_number_of_files() -> None:
    rows = [(each, f"sha256={each}", path) for each in (A, B) for path in ("s/f", "s/g", "s/h")]
    (line,) = describe_path_conflicts(settle_claims(rows, RANKS), RANKS)
    assert line.startswith("b and a both bring /s/f and 2 more files")
    assert "exclude: [a]" in line


def test_what_the_recipe_names_itself_cannot_be_excluded_as_advice() -> None:
    ranks = {A: (0, False, "a"), B: (0, False, "b")}
    rows = [(each, f"sha256={each}", "s/f") for each in (A, B)]
    (line,) = describe_path_conflicts(settle_claims(rows, ranks), ranks)
    assert "exclude" not in line


@pytest.mark.parametrize("package", ["the environment", "tinytool-1.0-py_0"])
def test_what_is_no_wheel_gives_way_to_none(package: str) -> None:
    with fails(BuildError, "file-conflict", match="/s/f"):
        settle_claims([(package, "", "s/f"), (A, "sha256=x", "s/f")], RANKS)


def test_a_file_of_one_and_a_folder_of_another_are_rejected() -> None:
    with fails(BuildError, "file-conflict", match=r"/s/x .* a.* b"):
        settle_claims([(A, "sha256=x", "s/x"), (B, "sha256=y", "s/x/deep/file")], RANKS)


def test_what_is_built_upon_stays_as_it_is() -> None:
    """Its wheels come first whatever the recipe above names; theirs are ranked by its own recipe."""
    a, b, c, d = map(wheel, "abcd")
    alone = make_target(framework="a", requirements=("d", "b<2"))
    target = replace(alone, on="lower-1.0-cu121")
    below = make_lock(target="lower-1.0-cu121", wheels=(a, b))
    lock = make_lock(target=target.name, wheels=(a, b, c, d))
    definition = replace(
        define(alone, make_base(), lock),
        target=target,
        under=(below,),
        named_below=(frozenset({"a"}),),
    )
    ranks = rank_wheels(definition)
    assert sorted(ranks, key=lambda name: ranks[name]) == [one.filename for one in (a, b, d, c)]
