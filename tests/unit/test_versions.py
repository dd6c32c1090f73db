"""Orders and spellings of names that come from anywhere."""

from __future__ import annotations

from imagefactory.versions import natural, nearest


def test_only_plain_digits_are_numbers() -> None:
    assert sorted(["10", "9", "\u00b2", "\u0663"], key=natural) == ["\u00b2", "\u0663", "9", "10"]


def test_the_nearest_word_has_the_same_numbers_and_may_be_none() -> None:
    known = ["pytorch-2.3", "pytorch-2.5", "numba"]
    assert [nearest(word, known) for word in ("pytroch-2.5", "pytorch-2.4", "xyz")] == ["pytorch-2.5", "", ""]
