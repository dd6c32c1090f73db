"""TOML text -> the same plain tree as YAML's, in which every value keeps its place.

The standard library's parser tells no places, so each name and value is searched for from where its table
begins; what is not found there (a key that is written in parts) has the place of its table.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from imagefactory.model import Where
from imagefactory.recipes.yaml_tree import Limits, YamlNode, first_place, refused, show, too_large

_HEADER = re.compile(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")


def parse_toml(text: str, file: str, limits: Limits) -> YamlNode:
    """The tree of a TOML text. Raises RecipeError for what is none, too large or too deep."""
    if len(text) > limits.size:
        raise too_large(file, limits)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line ([0-9]+), column ([0-9]+)\)", str(error))
        where = Where(file=file, line=int(found[1]), column=int(found[2])) if found else first_place(file)
        what = re.sub(r" \(at .*\)$", "", str(error))
        raise refused(
            where, "toml-invalid", f"is not valid TOML: {show(what, limit=120)[1:-1]}", "fix the line"
        ) from error
    except RecursionError as error:
        raise refused(
            first_place(file),
            "nesting-too-deep",
            f"is nested more than {limits.depth} deep",
            "nest it less deeply",
        ) from error
    return _Places(text, file, limits).tree(data)


class _Places:
    """One text, and where its tables begin."""

    def __init__(self, text: str, file: str, limits: Limits) -> None:
        self.lines = text.split("\n")
        self.file = file
        self.limits = limits
        self.count = 0
        self.headers: dict[tuple[str, ...], list[int]] = {}
        self.first: dict[tuple[str, ...], int] = {}
        for number, line in enumerate(self.lines):
            if found := _HEADER.match(line):
                path = tuple(
                    part.strip(" \"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.\"']+", found[1])
                )
                self.headers.setdefault(path, []).append(number)
                for length in range(1, len(path)):
                    self.first.setdefault(path[:length], number)

    def tree(self, data: dict[str, Any]) -> YamlNode:
        return self._node(data, (), 0, 0)

    def _where(self, line: int, text: str = "") -> Where:
        at = self.lines[line].find(text) if text and line < len(self.lines) else 0
        return Where(file=self.file, line=line + 1, column=max(at, 0) + 1)

    def _node(self, value: Any, path: tuple[str, ...], line: int, depth: int) -> YamlNode:
        self.count += 1
        if self.count > self.limits.nodes:
            raise refused(
                self._where(line),
                "too-many-values",
                f"has more than {self.limits.nodes} values",
                "split it",
            )
        if depth > self.limits.depth:
            raise refused(
                self._where(line),
                "nesting-too-deep",
                f"is nested more than {self.limits.depth} deep",
                "nest it less deeply",
            )
        if isinstance(value, dict):
            node = YamlNode(self._where(line), "map")
            for key, one in value.items():
                at = self._of_key((*path, key), line)
                name = YamlNode(self._where(at, key), "text", text=key)
                node.pairs.append((name, self._node(one, (*path, key), at, depth + 1)))
            return node
        if isinstance(value, list):
            node = YamlNode(self._where(line), "list")
            starts = self.headers.get(path, []) if all(isinstance(one, dict) for one in value) else []
            for number, one in enumerate(value):
                at = starts[number] if number < len(starts) else self._of_text(one, line)
                line = max(line, at)
                node.items.append(self._node(one, path, at, depth + 1))
            return node
        made = {bool: "true or false", int: "a number", float: "a number"}.get(type(value), "")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return YamlNode(self._where(line, text), "text", text=text, made=made)

    def _of_key(self, path: tuple[str, ...], line: int) -> int:
        """The line of a table's header, or of a key below the header at `line`."""
        if (starts := self.headers.get(path)) and len(starts) == 1:
            return starts[0]
        key = re.compile(
            rf"\s*[\"']?{re.escape(path[-1])}[\"']?\s*[=.]|.*[{{,]\s*[\"']?{re.escape(path[-1])}[\"']?\s*="
        )
        found = next((at for at in self._below(line) if key.match(self.lines[at])), None)
        return self.first.get(path, line) if found is None else found

    def _of_text(self, value: Any, line: int) -> int:
        if not isinstance(value, str):
            return line
        return next((at for at in self._below(line) if value in self.lines[at]), line)

    def _below(self, line: int) -> range:
        """The lines from one to the next header."""
        end = line + 1
        while end < len(self.lines) and not _HEADER.match(self.lines[end]):
            end += 1
        return range(line, end)
