"""Tables, fields and numbered sources as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest

CPUS = "no GPU needed"
"""The text for an image for CPUs, in place of capabilities."""
MIN_FOLDED = 30
"""The minimum width of a wrapped column. A narrower column is printed below its row."""


def format_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    drop: Sequence[str] = (),
) -> str:
    """Return columns as wide as their widest cell, two blanks apart. No line ends with blanks.

    With a `width` the last column is wrapped next to the others, or else below them. The columns of `drop`
    (by their headers) are omitted in order, as few as this needs, and a last line names them. If the others
    are still too wide, each row becomes a block of lines.
    """
    tables = [[tuple(header), *map(tuple, rows)]]
    for name in drop:
        column = tables[-1][0].index(name)
        tables.append([row[:column] + row[column + 1 :] for row in tables[-1]])
    beside = (n for n, table in enumerate(tables) if width is None or _width_beside(table) <= width)
    below = (
        n for n, table in enumerate(tables) if width and table_width([row[:-1] for row in table]) <= width
    )
    count = next(beside, next(below, len(drop)))
    lines = _table_lines(tables[count], width)
    if count:
        names = ", ".join(name.strip() for name in drop[:count])
        lines += fold([f"columns omitted: {names} (a wider terminal or --json shows them)"], width)
    return "\n".join(lines)


def _width_beside(table: Sequence[Sequence[str]]) -> int:
    """Return the least width with the last column wrapped next to the others."""
    return table_width(table) - max(_widths(table)[-1] - MIN_FOLDED, 0)


def _table_lines(table: Sequence[tuple[str, ...]], width: int | None) -> list[str]:
    if width is None or table_width(table) <= width:
        widths = _widths(table)
        return [_line(row, widths) for row in table]
    others = _widths(table)[:-1]
    before = sum(others) + 2 * len(others)
    if before - 2 > width:
        return _stacked(table, width)
    is_wide = width - before >= MIN_FOLDED
    lines = []
    for row in table:
        text = wrap(row[-1], (width - before) if is_wide else max(width - 4, MIN_FOLDED))
        first, more = (text[:1] or [""], text[1:]) if is_wide else ([], text)
        lines.append(_line([*row[:-1], *first], [*others, 0][: len(others) + len(first)]))
        lines += [" " * (before if is_wide else 4) + line for line in more]
    return lines


def format_matrix(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, *, keep: int
) -> str:
    """Return a table with narrow columns after the first `keep` columns. Equal neighbor columns are merged.

    Columns that do not fit into `width` continue in a second table below, with the first columns again.
    """
    table = [tuple(header), *map(tuple, rows)]
    if width is not None and table_width(table) > width:
        table = _merge_rows(table, keep)
    parts: list[list[int]] = [[]]
    widths = _widths(table)
    fixed = sum(widths[:keep]) + 2 * keep
    for column in range(keep, len(table[0])):
        used = fixed + sum(widths[i] + 2 for i in parts[-1]) + widths[column]
        if width is not None and parts[-1] and used > width:
            parts.append([])
        parts[-1].append(column)
    tables = [[[*row[:keep], *(row[i] for i in part)] for row in table] for part in parts]
    return "\n\n".join(format_table(table_part[0], table_part[1:], width) for table_part in tables)


def _merge_rows(table: Sequence[tuple[str, ...]], keep: int) -> list[tuple[str, ...]]:
    """Merge neighbor columns that are equal in every row: `5.0-7.5`."""
    columns = list(zip(*table[1:], strict=True))
    groups = [list(some) for _, some in groupby(range(keep, len(table[0])), key=columns.__getitem__)]
    names = [table[0][some[0]] + (f"-{table[0][some[-1]]}" if len(some) > 1 else "") for some in groups]
    return [
        (*table[0][:keep], *names),
        *((*row[:keep], *(row[some[0]] for some in groups)) for row in table[1:]),
    ]


def _stacked(table: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Return each row as a block: its first cell, then one line for each other cell."""
    head, *rows = table
    indent = max(len(name) for name in head[1:]) + 4
    lines = []
    for row in rows:
        lines.append(row[0])
        for name, cell in zip(head[1:], row[1:], strict=True):
            text = wrap(cell, max(width - indent, MIN_FOLDED))
            lines += [
                f"  {name}".ljust(indent) + line for name, line in zip_longest([name], text, fillvalue="")
            ]
    return [line.rstrip() for line in lines]


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*table, strict=True)]


def table_width(table: Sequence[Sequence[str]]) -> int:
    widths = _widths(table)
    return sum(widths) + 2 * (len(widths) - 1)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def wrap(text: str, width: int) -> list[str]:
    """Return lines of at most `width`, broken only at blanks. A longer word is not broken."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def fold(lines: Iterable[str], width: int | None) -> list[str]:
    """Wrap lines of prose to a `width`, with indented continuation lines."""
    return [
        part
        for line in lines
        for part in (
            textwrap.wrap(
                line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
            )
            if width and len(line) > width
            else [line]
        )
    ]


def format_fields(fields: Sequence[tuple[str, str]], *, indent: str = "  ", width: int | None = None) -> str:
    """Return `name  value` lines. Other lines of a value are below its first line."""
    indent_width = max(len(name) for name, _ in fields) + 2
    lines = []
    for name, value in fields:
        texts = value.splitlines() or [""]
        if width is not None:
            room = max(width - len(indent) - indent_width, MIN_FOLDED)
            texts = [part for line in texts for part in wrap(line, room) or [""]]
        first, *more = texts
        lines.append(f"{indent}{name.ljust(indent_width)}{first}".rstrip())
        lines += [f"{indent}{' ' * indent_width}{line}" for line in more]
    return "\n".join(lines)


class Footnotes:
    """Numbers for lines below a table, in the order of their first use. None if they are not `shown`."""

    def __init__(self, mark: str = "[{}]", *, shown: bool = True) -> None:
        self._mark, self._shown = mark, shown
        self._numbers: dict[str, int] = {}

    def mark(self, sources: Iterable[str]) -> str:
        """Return ` [1][3]` for these sources, without duplicates, with a blank before."""
        known = self._numbers
        if not self._shown:
            return ""
        numbers = [known.setdefault(source, len(known) + 1) for source in sources if source]
        marks = "".join(self._mark.format(number) for number in dict.fromkeys(numbers))
        return f" {marks}" if marks else ""

    def lines(self) -> list[str]:
        return [f"{self._mark.format(number)} {source}" for source, number in self._numbers.items()]
