"""Which of two versions of a Debian package is the newer one. Pure."""

from __future__ import annotations

import re

Part = tuple[tuple[tuple[int, ...], int], ...]
Key = tuple[int, Part, Part]


def debian_key(version: str) -> Key:
    """What versions are sorted by: epoch, upstream version, Debian's revision.

    Source: Debian Policy 5.6.12, "Version". Raises ValueError for an epoch that is no number.
    """
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "")
    return int(epoch), _part_key(upstream), _part_key(revision or "0")


def _part_key(text: str) -> Part:
    """Texts and numbers in turn. A text's end counts less than any letter, a tilde less than the end."""
    found = re.findall(r"([^0-9]*)([0-9]*)", text)
    return tuple(((*map(_weight, words), 0), int(digits or 0)) for words, digits in found)


def _weight(letter: str) -> int:
    if letter == "~":
        return -1
    return ord(letter) if letter.isalpha() else ord(letter) + 256
