"""Orders and spellings of names that come from anywhere."""

from __future__ import annotations

from imagefactory.versions import natural


def test_only_plain_digits_are_numbers() -> None:
    assert sorted(["10", "9", "\u00b2", "\u0663"], key=natural) == ["\u00b2", "\u0663", "9", "10"]
