"""The codes of all errors, read from the source: for the page docs/reference/errors.md and its test."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "imagefactory"
DIAGNOSTIC = "Diagnostic"
"""A problem in a recipe: its code comes first, then its location and its message."""


@dataclass(frozen=True, slots=True)
class ErrorCall:
    """A place that creates an error with a code of its own."""

    code: str
    error: str
    file: str
    line: int
    message: str


def find_errors(package: Path = PACKAGE) -> list[ErrorCall]:
    """Return every place in `package` that creates an error with a code of its own."""
    files = _nodes(package)
    classes = error_classes(package)
    own = {file: tuple(_own_codes(nodes, classes)) for file, nodes in files.items()}
    with_own_code = {name for calls in own.values() for name, call in calls if _first(call)}
    found = []
    for file, nodes in files.items():
        calls = [(name, call) for name, call in _calls(nodes, classes) if name not in with_own_code]
        for name, call in (*calls, *own[file]):
            if (row := _read(call, diagnostic=name == DIAGNOSTIC)) is not None:
                found.append(ErrorCall(row[0], name, file, call.lineno, row[1]))
    return found


@functools.cache
def error_classes(package: Path = PACKAGE) -> dict[str, str]:
    """Return the name of each class below ImagefactoryError, and the name of its parent class."""
    parents = {
        node.name: base.id
        for nodes in _nodes(package).values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }

    def is_error(name: str) -> bool:
        return name == "ImagefactoryError" or (name in parents and is_error(parents[name]))

    return {name: parents.get(name, "") for name in (*parents, "ImagefactoryError") if is_error(name)}


@functools.cache
def _nodes(package: Path) -> dict[str, tuple[ast.AST, ...]]:
    """Return all nodes of the modules of `package` by their paths below its parent directory."""
    return {
        path.relative_to(package.parent).as_posix(): tuple(ast.walk(ast.parse(path.read_text("utf-8"))))
        for path in sorted(package.rglob("*.py"))
    }


def _calls(nodes: Iterable[ast.AST], classes: dict[str, str]) -> Iterator[tuple[str, ast.Call]]:
    for node in nodes:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
            if (name in classes or name == DIAGNOSTIC) and (node.args or node.keywords):
                yield name, node


def _own_codes(nodes: Iterable[ast.AST], classes: dict[str, str]) -> Iterator[tuple[str, ast.Call]]:
    """The calls of `super().__init__` in classes of errors."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                    yield node.name, call


def _first(call: ast.Call) -> str:
    first = call.args[0] if call.args else None
    if len(call.args) > 1 and isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    return ""


def _read(call: ast.Call, *, diagnostic: bool) -> tuple[str, str] | None:
    """Return the code and the message's template; None if the caller or another error provides the code."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Starred):
        if not isinstance(first.value, ast.Call):
            return None  # the texts of the subclass's caller
        verb = ast.literal_eval(first.value.args[0])  # os_problem(verb, path, error)
        return f"cannot-{verb}-file", f"cannot {verb} {{path}}: {{reason}}"
    code, at = _first(call), 2 if diagnostic else 1
    return (code, _template(call.args[at])) if code and len(call.args) > at else None


def _template(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(map(_template, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left) + _template(right)
        case ast.IfExp(body=body):
            return _template(body)
        case ast.FormattedValue(value=value):
            return _field(value)
    return _field(node)


def _field(node: ast.expr) -> str:
    """The name of what is filled in: `{name}` of `', '.join(name)`, `{path}` of `layout.path`."""
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return f"{{{name}}}"
        case ast.Constant(value=value):
            return str(value)
        case ast.Call(args=[*_, last]):
            return _field(last)
        case ast.Subscript(value=value) | ast.Call(func=value):
            return _field(value)
        case ast.IfExp(body=body):
            return _field(body)
    last_name = names[-1] if names else None
    return f"{{{getattr(last_name, 'id', None) or getattr(last_name, 'attr', 'text')}}}"
