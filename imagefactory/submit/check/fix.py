"""The text of a submit file with all that findings certainly mend. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from imagefactory.extras.lint.findings import Checked
from imagefactory.extras.lint.reader import split_lines

_ROUNDS = 20
"""Edits of the same lines wait for the next round, as their lines are counted anew."""


def fix_text(text: str, check: Callable[[str], Checked]) -> str:
    """`text` mended until no finding mends more; comments within a line that is mended keep it as it is."""
    for _ in range(_ROUNDS):
        mended = _once(text, check(text))
        if mended == text:
            break
        text = mended
    return text


def format_diff(name: str, before: str, after: str) -> str:
    """What changed, as `diff -u` tells it; empty where nothing did."""
    old, new = split_lines(before), split_lines(after)
    return "\n".join(difflib.unified_diff(old, new, name, f"{name} (mended)", lineterm="", n=1))


def _once(text: str, checked: Checked) -> str:
    lines = split_lines(text)
    taken: set[int] = set()
    edits = [edit for finding in checked.all_findings for edit in finding.edits]
    for edit in sorted(edits, key=lambda one: -one.first):
        own = set(range(edit.first, edit.last + 1))
        if own & taken or any(lines[at - 1].lstrip().startswith("#") for at in own):
            continue
        taken |= own
        lines[edit.first - 1 : edit.last] = edit.text
    return ("\r\n" if "\r\n" in text else "\n").join(lines)
