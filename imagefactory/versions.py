"""How versions and names are put in order, and which known word is nearest to one that is not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"[0-9]+")


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is spelled most like this one, empty where none is.

    Its numbers are the same: what has others is no misspelling but another version.
    """
    word = word[:100]
    alike = [one for one in known if _NUMBER.findall(one) == _NUMBER.findall(word)]
    return next(iter(difflib.get_close_matches(word, alike, n=1, cutoff=0.6)), "")


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Sort key that reads runs of digits as numbers."""
    return tuple(
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part)
        for part in re.split(r"([0-9]+)", text)
        if part
    )
