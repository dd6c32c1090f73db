"""Sort versions and names naturally, and find the known word that is nearest to an unknown one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache

_NUMBER = re.compile(r"[0-9]+")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word with the most similar spelling, empty if none is similar.

    Its numbers must be the same, because other numbers are another version, not a misspelling.
    """
    word = word[:100]
    alike = [candidate for candidate in known if _NUMBER.findall(candidate) == _NUMBER.findall(word)]
    return next(iter(difflib.get_close_matches(word, alike, n=1, cutoff=0.6)), "")


@lru_cache(maxsize=4096)
def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that reads runs of digits as numbers."""
    return tuple(
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part)
        for part in re.split(r"([0-9]+)", text)
        if part
    )
