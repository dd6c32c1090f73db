"""Which targets a word asks for; a suggestion is never another version."""

from __future__ import annotations

import pytest

from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.recipes.names import FEW, choose_name, choose_names, suggest

KNOWN = {
    name: name.rpartition("-cu")[0].rpartition("-")[0]
    for name in (
        "jax-0.4.30-cu12",
        "pytorch-2.1-cu121",
        "pytorch-2.3-cu118",
        "pytorch-2.3-cu121",
        "pytorch-2.9-cu128",
        "pytorch-2.9-cu128-py313",
        "pytorch-2.10-cu128",
        "pytorch-geometric-2.5-cu121",
    )
}


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("pytorch-2.1-cu121", ["pytorch-2.1-cu121"]),
        ("pytorch-2.1", ["pytorch-2.1-cu121"]),
        ("pytorch-2.10", ["pytorch-2.10-cu128"]),
        ("pytorch-2.9", ["pytorch-2.9-cu128"]),  # what is not the default has a suffix
        ("pytorch-2.9-cu128-py", ["pytorch-2.9-cu128-py313"]),
        ("pytorch-g", ["pytorch-geometric-2.5-cu121"]),
        ("pytorch-geometric", ["pytorch-geometric-2.5-cu121"]),
        ("j", ["jax-0.4.30-cu12"]),
        ("jax-0.4", ["jax-0.4.30-cu12"]),
        ("pytorch", [name for name, family in KNOWN.items() if family == "pytorch"]),
        ("*-cu121", [name for name in KNOWN if name.endswith("-cu121")]),
    ],
)
def test_a_name_a_beginning_a_family_or_a_pattern(word: str, found: list[str]) -> None:
    assert list(choose_names((word,), KNOWN)) == found


def test_several_words_and_none() -> None:
    assert choose_names(("pytorch-2.1", "jax"), KNOWN) == ("jax-0.4.30-cu12", "pytorch-2.1-cu121")
    assert choose_names((), KNOWN) == tuple(KNOWN)
    assert choose_names((), {}) == ()


@pytest.mark.parametrize("word", ["pytorch-2.3", "pytorch-2", "p"])
def test_the_beginning_of_several_lists_them(word: str) -> None:
    with pytest.raises(UsageError, match=f"'{word}' .*[0-9] targets") as caught:
        choose_names((word,), KNOWN)
    assert caught.value.code == "target-ambiguous"
    assert "pytorch-2.3-cu118, pytorch-2.3-cu121" in caught.value.hint
    assert f"'{word}*'" in caught.value.hint
    assert choose_names((f"{word}*",), KNOWN)


def test_one_is_not_several() -> None:
    assert choose_name("jax", KNOWN) == "jax-0.4.30-cu12"
    with pytest.raises(UsageError, match=r"'pytorch' .*6 targets") as caught:
        choose_name("pytorch", KNOWN)
    assert caught.value.code == "target-ambiguous"
    assert "pytorch-2.1-cu121, " in caught.value.hint


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("pytroch-2.1-cu121", "did you mean 'pytorch-2.1-cu121'?"),
        ("pytorch-2.1-cuda121", "did you mean 'pytorch-2.1-cu121'?"),
        ("pytroch-2.1", "did you mean 'pytorch-2.1-cu121'?"),
        ("pytorch2.1-cu121", "did you mean 'pytorch-2.1-cu121'?"),
        ("jaxx", "did you mean 'jax'? jax has jax-0.4.30-cu12"),
        ("jax-0.4.30-cu13", "of jax-0.4.30 there is jax-0.4.30-cu12"),
        ("pytorch-2.3-cu12", "of pytorch-2.3 there is pytorch-2.3-cu118, pytorch-2.3-cu121"),
        ("jax-0.4.3", "jax has jax-0.4.30-cu12"),
        ("zebra-1", "choose from jax, pytorch, pytorch-geometric"),
        ("", "choose from jax, pytorch, pytorch-geometric"),
    ],
)
def test_what_is_proposed_is_no_other_version(word: str, hint: str) -> None:
    with pytest.raises(NothingSelectedError, match="the catalog has no") as caught:
        choose_names((word,), KNOWN, "the catalog has no target")
    assert caught.value.code == "target-unknown"
    assert suggest(word, KNOWN) == hint


def test_of_another_version_it_says_which_there_are() -> None:
    hint = suggest("pytorch-2.4-cu121", KNOWN)
    assert hint.startswith("pytorch has pytorch-2.1-cu121, ")
    assert "pytorch-geometric" not in hint


def test_of_many_the_newest() -> None:
    many = {f"x-1.{number}-cu12": "x" for number in range(40)}
    hint = suggest("x-2.0-cu12", many)
    assert hint.startswith("x has x-1.39-cu12, x-1.38-cu12, ")
    assert hint.endswith(f"x-1.{40 - FEW}-cu12 and {40 - FEW} more")
    assert suggest("x", {}) == ""
