"""Wheels that were built from source, written into the text of a recipe in place of their sources.

Pure. All other text stays as it is, comments too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imagefactory.errors import UsageError
from imagefactory.model import Target, Where
from imagefactory.recipes.values import is_source, package_of
from imagefactory.recipes.yaml_tree import YamlNode, parse_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltWheel:
    """A wheel of the project: its `path` (`./wheels/NAME.whl`), and `source`, what it was built from.

    `source` is a file of the index, or an entry of the recipe.
    """

    name: str
    version: str
    path: str
    source: str

    @property
    def pure(self) -> bool:
        """Whether it fits every target."""
        return self.path.endswith("-py3-none-any.whl") or self.path.endswith("-py2.py3-none-any.whl")


@dataclass(frozen=True, slots=True)
class _Edit:
    at: int
    length: int
    text: str


def write_wheels(text: str, target: Target, wheels: Sequence[BuiltWheel], family: Sequence[Target]) -> str:
    """`text` with the wheels in place of the entries that they were built from; others are added.

    `family` are all targets of the recipe. Raises UsageError for an entry that other targets share and whose
    wheel is only for `target`, and for one that is escaped or spread over lines.
    """
    root = parse_tree(text, target.where.file)
    row = _row_at(root, target.where)
    of_row = [one.name for one in family if one.where == target.where and one.name != target.name]
    of_root = [one.name for one in family if one.name != target.name]
    sections = [(row, of_row)] if row is root else [(row, of_row), (root, of_root)]
    lists = [
        (found, others)
        for section, others in sections
        for name in ("packages", "pip")
        if (found := section.get(name)) and found.kind == "list"
    ]
    place, edits, more = _Text(text), list[_Edit](), list[BuiltWheel]()
    for wheel in wheels:
        replaced = False
        for found, others in lists:
            for item in (one for one in found.items if _stands_for(one, wheel)):
                if others and not wheel.pure:
                    raise UsageError(
                        "wheel-fits-one-target",
                        f"{item.where}: '{item.text}' is also for {', '.join(others)}, and {wheel.path} fits "
                        f"only {target.name}",
                        hint="write it in the rows of the matrix, each in its own packages:",
                    )
                edits += place.replace(item, wheel, flow=place.is_flow(found))
                replaced = True
        if not replaced:
            more.append(wheel)
    if more:
        key = "pip" if target.source == "conda" else "packages"
        shared = root.get(key) if not of_root or all(wheel.pure for wheel in more) else None
        edits += place.append(row.get(key) or shared, row, key, more)
    return place.apply(edits)


def _stands_for(item: YamlNode, wheel: BuiltWheel) -> bool:
    if item.kind != "text":
        return False
    if is_source(item.text):
        return item.text == wheel.source
    return not item.text.endswith(".whl") and package_of(item.text) == wheel.name


def _row_at(root: YamlNode, where: Where) -> YamlNode:
    matrix = root.get("matrix")
    rows = matrix.items if matrix and matrix.kind == "list" else []
    return next((row for row in rows if row.where == where), root)


class _Text:
    """The text of a recipe, and the places of its values."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.split("\n")
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line) + 1)
        self._starts = starts

    def offset(self, where: Where) -> int:
        return self._starts[where.line - 1] + where.column - 1

    def line(self, where: Where) -> str:
        return self._lines[where.line - 1]

    def is_flow(self, found: YamlNode) -> bool:
        """Whether a list is written in brackets."""
        return self._text[self.offset(found.where)] == "["

    def span(self, item: YamlNode) -> int:
        """The length of a value as it is written. Raises UsageError for one in another form than its text."""
        at = self.offset(item.where)
        quote = self._text[at] if self._text[at] in "'\"" else ""
        written = f"{quote}{item.text}{quote}"
        if self._text[at : at + len(written)] != written:
            raise UsageError(
                "entry-not-plain",
                f"{item.where}: '{item.text}' is escaped or spread over lines",
                hint="write it on one line",
            )
        return len(written)

    def replace(self, item: YamlNode, wheel: BuiltWheel, *, flow: bool) -> Iterator[_Edit]:
        comment = (
            f"{item.text}: built from {wheel.source}"
            if item.text != wheel.source
            else f"built from {item.text}"
        )
        yield self._comment(item.where, comment)
        written = f'"{wheel.path}"'
        extras = re.fullmatch(r"[^\[]*\[[^\]]+\].*", item.text)
        if extras and flow:  # the wheel's extras are asked for by name alone
            yield _Edit(self.offset(item.where), 0, f"{written}, ")
        elif extras:
            yield _Edit(self._starts[item.where.line - 1], 0, f"{self._lead(item.where)}{written}\n")
        else:
            yield _Edit(self.offset(item.where), self.span(item), written)

    def append(
        self, own: YamlNode | None, row: YamlNode, key: str, wheels: Sequence[BuiltWheel]
    ) -> Iterator[_Edit]:
        written = [f'"{wheel.path}"' for wheel in wheels]
        notes = [f"required by others, built from {wheel.source}" for wheel in wheels]
        if own and own.kind == "list" and own.items and not self.is_flow(own):
            last = own.items[-1].where
            lead = self._lead(last)
            indent = " " * (len(lead) - len(lead.lstrip()))
            added = "".join(
                f"{indent}# {note}\n{lead}{one}\n" for note, one in zip(notes, written, strict=True)
            )
            line_end = self._starts[last.line]
            ended = line_end <= len(self._text)
            yield _Edit(min(line_end, len(self._text)), 0, added if ended else f"\n{added}")
        elif own and own.kind == "list":
            at = (
                self.offset(own.items[-1].where) + self.span(own.items[-1])
                if own.items
                else self.offset(own.where) + 1
            )
            for note in notes:
                yield self._comment(own.where, note)
            yield _Edit(at, 0, (", " if own.items else "") + ", ".join(written))
        else:
            yield from self._new_list(row, key, notes, written)

    def _new_list(
        self, row: YamlNode, key: str, notes: Sequence[str], written: Sequence[str]
    ) -> Iterator[_Edit]:
        """A list of its own after the first key of a section."""
        first = row.pairs[0][0].where
        value = f"{key}: [{', '.join(written)}]"
        if self._text[self.offset(row.where)] == "{":
            for note in notes:
                yield self._comment(first, note)
            yield _Edit(self.offset(first), 0, f"{value}, ")
            return
        indent = " " * (first.column - 1)
        at = (
            self.offset(row.pairs[1][0].where) - (first.column - 1) if len(row.pairs) > 1 else len(self._text)
        )
        comments = "".join(f"{indent}# {note}\n" for note in notes)
        yield _Edit(at, 0, f"{comments}{indent}{value}\n")

    def _lead(self, where: Where) -> str:
        """What stands before a value in its line."""
        return self.line(where)[: where.column - 1]

    def _comment(self, where: Where, text: str) -> _Edit:
        line = self.line(where)
        indent = line[: len(line) - len(line.lstrip())]
        return _Edit(self._starts[where.line - 1], 0, f"{indent}# {text}\n")

    def apply(self, edits: Sequence[_Edit]) -> str:
        text = self._text
        numbered = sorted(enumerate(edits), key=lambda one: (one[1].at, one[0]), reverse=True)
        for _, edit in numbered:
            text = text[: edit.at] + edit.text + text[edit.at + edit.length :]
        return text
