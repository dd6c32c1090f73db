"""Tables, fields and numbered sources as text, for all that is told to a person. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

MIN_FOLDED = 40
"""A folded column is not narrower: it goes below its row instead."""


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns as wide as their widest cell, two blanks between, no blanks at line ends.

    With a `width` the last column is folded to fit, beside the others or, where that is no room, below them.
    """
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
        return "\n".join(_line(row, widths) for row in table)
    *others, _ = widths
    left = sum(others) + 2 * len(others)
    beside = width - left >= MIN_FOLDED
    lines = []
    for row in table:
        text = wrap(row[-1], (width - left) if beside else max(width - 4, MIN_FOLDED))
        first, more = (text[:1] or [""], text[1:]) if beside else ([], text)
        lines.append(_line([*row[:-1], *first], [*others, 0][: len(others) + len(first)]))
        lines += [" " * (left if beside else 4) + line for line in more]
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken at blanks alone; a longer word stays whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def format_fields(fields: Sequence[tuple[str, str]], *, indent: str = "  ") -> str:
    """`name  value` lines; a value's further lines stand under its first."""
    width = max(len(name) for name, _ in fields) + 2
    lines = []
    for name, value in fields:
        first, *more = value.splitlines() or [""]
        lines.append(f"{indent}{name.ljust(width)}{first}".rstrip())
        lines += [f"{indent}{' ' * width}{line}" for line in more]
    return "\n".join(lines)


class Sources:
    """Numbers for lines below a table, in the order in which they are first named."""

    def __init__(self, mark: str = "[{}]") -> None:
        self._mark = mark
        self._numbers: dict[str, int] = {}

    def mark(self, sources: Iterable[str]) -> str:
        """`[1][3]` of these sources, each once."""
        known = self._numbers
        numbers = [known.setdefault(source, len(known) + 1) for source in sources if source]
        return "".join(self._mark.format(number) for number in dict.fromkeys(numbers))

    def lines(self) -> list[str]:
        return [f"{self._mark.format(number)} {source}" for source, number in self._numbers.items()]
