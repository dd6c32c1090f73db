"""Parse YAML text to a tree in which every value keeps its location.

The text is limited in size and checked for invisible characters before it is parsed. The tree is built from
the parser's events, with limits on depth and number of values. No objects are created. Tags, anchors,
aliases, directives and further documents are rejected.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from imagefactory.errors import Diagnostic, RecipeError
from imagefactory.model import SourceLocation

MAX_BYTES = 256 * 1024
MAX_NODES = 5_000
MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlLimits:
    """Limits for one type of file: its `size` in bytes, its number of values, their depth."""

    size: int = MAX_BYTES
    nodes: int = MAX_NODES
    depth: int = MAX_DEPTH


RECIPE = YamlLimits()

_SCALAR_TYPES = {"null": "nothing", "bool": "true or false", "int": "a number", "float": "a number"}
_RESOLVER: Any = yaml.resolver.Resolver()
# Invisible or unassigned: control, format (bidirectional marks, BOM), surrogates, private, separators.
_REJECTED_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


@dataclass(slots=True)
class YamlNode:
    """A value and its location. By `kind` it has `text` (text), `items` (list) or `pairs` (map).

    `made` is YAML's type of an unquoted text ("a number"), empty if it stays text.
    """

    where: SourceLocation
    kind: str
    text: str = ""
    made: str = ""
    items: list[YamlNode] = field(default_factory=list)
    pairs: list[tuple[YamlNode, YamlNode]] = field(default_factory=list)

    @property
    def keys(self) -> tuple[str, ...]:
        """The texts of a map's keys."""
        return tuple(key.text for key, _ in self.pairs if key.kind == "text")

    def get(self, key: str) -> YamlNode | None:
        """Return the first value of a map under `key`."""
        return next((value for name, value in self.pairs if name.kind == "text" and name.text == key), None)

    @property
    def called(self) -> str:
        """The name of this type of value in errors."""
        if self.kind == "text":
            return self.made or "text"
        return {"list": "a list", "map": "keys and values"}[self.kind]


def parse_tree(text: str, file: str, limits: YamlLimits = RECIPE) -> YamlNode:
    """Return the tree of a YAML text, built from the parser's events within fixed limits.

    Raises RecipeError with the first problem, because the rest of the text cannot be trusted.
    """
    _check_characters(text, file, limits)
    try:
        return _build(_events(text, fast=True), file, limits)
    except (yaml.YAMLError, ValueError) as fast_error:
        error: Exception = fast_error
    try:  # the pure parser's message, so that errors do not depend on how PyYAML was installed
        _build(_events(text, fast=False), file, limits)
    except (yaml.YAMLError, ValueError) as pure_error:
        error = pure_error
    mark = getattr(error, "problem_mark", None)
    location = _place_of(file, mark) if mark else first_place(file)
    problem = getattr(error, "problem", None) or "a value that YAML does not have"
    write = "fix the line"
    if "mapping values are not allowed" in problem:
        write += "; put text with a colon and a space in quotes"
    message = f"not valid YAML: {show(problem, limit=120)[1:-1]}"
    raise recipe_problem(location, "yaml-invalid", message, write) from error


def _events(text: str, *, fast: bool) -> Iterator[Any]:
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if fast else yaml.SafeLoader
    return iter(yaml.parse(text, Loader=loader))


def _check_characters(text: str, file: str, limits: YamlLimits) -> None:
    if len(text) > limits.size or len(text.encode("utf-8", "surrogatepass")) > limits.size:
        raise too_large(file, limits)
    for match in re.finditer(r"[^\n\t -~]", text):
        character = match[0]
        if character == "\r" and text[match.end() : match.end() + 1] == "\n":
            continue
        if unicodedata.category(character) in _REJECTED_CATEGORIES:
            line_start = text.rfind("\n", 0, match.start()) + 1
            location = SourceLocation(
                file=file, line=text.count("\n", 0, match.start()) + 1, column=match.start() - line_start + 1
            )
            message = f"the line has the invisible character {character!a}"
            raise recipe_problem(location, "hidden-character", message, "remove it")


def _build(events: Iterator[Any], file: str, limits: YamlLimits) -> YamlNode:
    open_nodes: list[YamlNode] = []
    keys: list[YamlNode | None] = []  # the key that waits for its value, per open node
    root: YamlNode | None = None
    count = documents = 0
    for event in events:
        location = _place_of(file, event.start_mark)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                message = "a second document starts here"
                raise recipe_problem(location, "yaml-unsupported", message, "keep one document per file")
            if event.version or event.tags:
                message = "directives (%YAML, %TAG) are not supported"
                raise recipe_problem(first_place(file), "yaml-unsupported", message, "remove the line")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            open_nodes.pop()
            keys.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        _check_no_references(event, location)
        count += 1
        if count > limits.nodes:
            message = f"the file has more than {limits.nodes} values"
            raise recipe_problem(location, "too-many-values", message, "split the file")
        if isinstance(event, yaml.ScalarEvent):
            node = YamlNode(location, "text", text=event.value, made=_scalar_type(event))
        else:
            node = YamlNode(location, "map" if isinstance(event, yaml.MappingStartEvent) else "list")
        if not open_nodes:
            root = node
        elif open_nodes[-1].kind == "list":
            open_nodes[-1].items.append(node)
        elif (key := keys[-1]) is None:
            keys[-1] = node
        else:
            open_nodes[-1].pairs.append((key, node))
            keys[-1] = None
        if node.kind != "text":
            open_nodes.append(node)
            keys.append(None)
            if len(open_nodes) > limits.depth:
                message = f"values are nested more than {limits.depth} deep"
                raise recipe_problem(location, "nesting-too-deep", message, "use fewer levels")
    if root is None:
        write = "create a recipe: imagefactory recipe new FAMILY"
        raise recipe_problem(first_place(file), "empty-file", "the file is empty", write)
    return root


def _check_no_references(event: Any, location: SourceLocation) -> None:
    if isinstance(event, yaml.AliasEvent) or event.anchor:
        message = "anchors and aliases (&, *) are not supported"
        raise recipe_problem(location, "yaml-unsupported", message, "repeat the value")
    if event.tag is not None:
        message = f"the tag {show(event.tag)} is not supported"
        raise recipe_problem(location, "yaml-unsupported", message, "remove it; put text in quotes")


def _scalar_type(event: Any) -> str:
    """Return YAML's type of a plain scalar that is not text."""
    if not event.implicit[0]:
        return ""
    tag: str = _RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False)).rpartition(":")[2]
    return "" if tag == "str" else _SCALAR_TYPES.get(tag, f"a {tag}")


def _place_of(file: str, mark: Any) -> SourceLocation:
    return SourceLocation(file=file, line=mark.line + 1, column=mark.column + 1)


def first_place(file: str) -> SourceLocation:
    return SourceLocation(file=file, line=1, column=1)


def too_large(file: str, limits: YamlLimits = RECIPE) -> RecipeError:
    message = f"the file is larger than {limits.size // 1024} kB"
    return recipe_problem(first_place(file), "file-too-large", message, "split the file")


def recipe_problem(location: SourceLocation, code: str, message: str, write: str) -> RecipeError:
    """Return an error with one problem: its location, code, message and fix."""
    return RecipeError([Diagnostic(code, str(location), message, write)])


def show(text: str, *, limit: int = 60) -> str:
    """Return external text, safe to print on one line."""
    return ascii(text if len(text) <= limit else text[:limit] + "...")
