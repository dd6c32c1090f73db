"""The JSON Schemas of all documents that imagefactory prints or writes, generated from their types.

The type of a document is a TypedDict, or a dataclass for `format_value`. Its `format` is a literal such as
`Literal["imagefactory.build/1"]`. mypy compares the values with it, the site publishes its schema, and each
test validates what it prints.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from imagefactory.serialize import (
    AnyText,
    Choices,
    FormattedAs,
    NumberRange,
    PairsAsObject,
    Pattern,
    TupleAsObject,
)

PACKAGE = Path(__file__).parents[1] / "imagefactory"
FORMAT = re.compile(r"imagefactory\.[a-z-]+/[0-9]+")
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SIMPLE: dict[object, dict[str, Any]] = {
    str: {"type": "string"},
    Path: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    timedelta: {"type": "number"},
    object: {},
}


@functools.cache
def document_types() -> Mapping[str, tuple[str, str]]:
    """Return the module and the class of each format. Raises ValueError if two classes have one format."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if 'Literal["imagefactory.' not in text:
            continue
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for name, document_format in _formats(ast.parse(text)):
            if document_format in found:
                raise ValueError(f"{module}.{name} has the format of {found[document_format]}")
            found[document_format] = module, name
    return found


def _formats(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        for row in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(row, ast.AnnAssign) and ast.unparse(row.target) == "format":
                yield node.name, FORMAT.findall(ast.unparse(row.annotation))[0]


def file_name(document_format: str) -> str:
    """Return `build-1.json` for `imagefactory.build/1`."""
    return document_format.removeprefix("imagefactory.").replace("/", "-") + ".json"


def document_type(document_format: str) -> type:
    """Raises KeyError for a format without a type."""
    module, name = document_types()[document_format]
    kind: type = getattr(importlib.import_module(module), name)
    return kind


@functools.cache
def schema_of(document_format: str, *, strict: bool = False) -> dict[str, Any]:
    """Return the schema of a format. Keys may be added later; with `strict`, only today's are valid.

    Raises KeyError for a format without a type, and TypeError for a type without a schema.
    """
    parts = _Parts(strict)
    kind = document_type(document_format)
    parts.formatted = dataclasses.is_dataclass(kind)
    top = parts.object(kind)
    head = {"$schema": DIALECT, "title": document_format}
    return head | top | ({"$defs": dict(sorted(parts.parts.items()))} if parts.parts else {})


class _Parts:
    """The schemas of the objects in one document, by their names."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.formatted = False
        """`format_value` writes the fields of each dataclass. Others are printed as their text."""
        self.parts: dict[str, dict[str, Any]] = {}
        self.kinds: dict[str, object] = {}

    def object(self, kind: type) -> dict[str, Any]:
        texts = _key_texts(kind)
        keys: dict[str, Any] = {}
        required = []
        for name, hint in _hints(kind).items():
            if get_origin(hint) is NotRequired:
                (hint,) = get_args(hint)
            else:
                required.append(name)
            keys[name] = self.value(hint) | ({"description": texts[name]} if name in texts else {})
        schema: dict[str, Any] = {"type": "object", "properties": keys, "required": required}
        if kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):  # dataclass() adds such a text
            schema = {"description": " ".join(kind.__doc__.split())} | schema
        return self.closed(schema)

    def closed(self, schema: dict[str, Any]) -> dict[str, Any]:
        return schema | ({"additionalProperties": False} if self.strict else {})

    def value(self, hint: Any) -> dict[str, Any]:
        origin, arguments = get_origin(hint), get_args(hint)
        if hint in _SIMPLE:
            return dict(_SIMPLE[hint])
        if origin is Annotated:
            return self.annotated(hint, arguments[0], arguments[1:])
        if origin is Literal:
            return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.value(item) for item in arguments]}
        if origin is tuple and arguments[-1] is not ...:
            return {
                "type": "array",
                "prefixItems": [self.value(item) for item in arguments],
                "items": False,
                "minItems": len(arguments),
            }
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.value(arguments[1])}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.value(arguments[0])}
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            return {"enum": [member.value for member in hint]}
        if dataclasses.is_dataclass(hint) and hint.__str__ is not object.__str__ and not self.formatted:
            return {"type": "string"}
        if is_typeddict(hint) or dataclasses.is_dataclass(hint):
            return self.part(hint)
        raise TypeError(f"{hint} has no JSON Schema")

    def annotated(self, hint: Any, kind: Any, notes: tuple[object, ...]) -> dict[str, Any]:
        for note in notes:
            match note:
                case FormattedAs():
                    return self.formatted_as(note)
                case TupleAsObject():
                    keys = {
                        name: self.value(item) for name, item in zip(note.names, get_args(kind), strict=True)
                    }
                    return self.closed({"type": "object", "properties": keys, "required": [*note.names]})
                case PairsAsObject():
                    return {
                        "type": "object",
                        "additionalProperties": self.value(get_args(get_args(kind)[0])[1]),
                    }
                case Choices():
                    return {"enum": [*note.words]}
                case NumberRange():
                    return self.value(kind) | {"minimum": note.least, "maximum": note.most}
                case Pattern() if hint is not AnyText:
                    pattern = f"^(?:{note.pattern.pattern}){'?' if note.empty else ''}$"
                    return self.value(kind) | {"pattern": pattern}
        return self.value(kind)

    def formatted_as(self, note: FormattedAs) -> dict[str, Any]:
        before, self.formatted = self.formatted, True
        schema = self.value(note.kind)
        if note.version:
            part = self.parts[schema["$ref"].rpartition("/")[2]]
            part["properties"] = {"format": {"const": note.version}} | part["properties"]
            part["required"] = sorted({"format", *part["required"]})
        self.formatted = before
        return schema

    def part(self, kind: type) -> dict[str, Any]:
        name = kind.__name__.lstrip("_")
        if self.kinds.setdefault(name, kind) is not kind:
            raise TypeError(f"two objects of one document are called {name}")
        if name not in self.parts:
            self.parts[name] = {}  # an object may contain itself
            self.parts[name] = self.object(kind)
        return {"$ref": f"#/$defs/{name}"}


def _hints(kind: type) -> dict[str, Any]:
    """Return the types of the keys. Types that are imported for mypy only are imported now."""
    module = sys.modules[kind.__module__]
    names: dict[str, Any] = {}
    while True:
        try:
            return get_type_hints(kind, localns=names, include_extras=True)
        except NameError as error:
            names[error.name] = _typing_import(module, error.name)


def _typing_import(module: types.ModuleType, name: str) -> Any:
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for row in node.names:
                if (row.asname or row.name) == name:
                    return getattr(importlib.import_module(node.module), row.name)
    raise TypeError(f"{module.__name__} does not import {name}")


def _key_texts(kind: type) -> dict[str, str]:
    """Return the text below each key in the source of a type."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        ast.unparse(key.target): " ".join(text.value.value.split())
        for key, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(key, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
