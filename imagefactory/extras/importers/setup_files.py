"""Read the literal requirements in `setup.py` and `setup.cfg`.

setup.py is parsed, never run. Supported are literals, names of the module, joined lists, and the usual ways
to read a requirements file. Everything else is `unknown`, with its line.
"""

from __future__ import annotations

import ast
import configparser
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import normpath

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from imagefactory.extras.importers.spec import EnvironmentSpec
from imagefactory.model import SourceLocation
from imagefactory.recipes.values import canonical, package_of

_SIZE = 256 * 1024
_STEPS = 200_000
_ITEMS = 5_000
_LONG = 100_000
_CHANGES = ("append", "extend", "insert", "update", "remove", "pop", "clear")


@dataclass(slots=True)
class SetupFacts:
    """The requirements in setup files: `needs` and `extras` are lines for pip, with their locations.

    `unknown` are computed values that are not read: the field (`install_requires`, an extra), location and
    code. If code reads a file, the line is `-r FILE`.
    """

    name: str = ""
    python: str = ""
    needs: list[tuple[str, SourceLocation]] = field(default_factory=list)
    extras: dict[str, list[tuple[str, SourceLocation]]] = field(default_factory=dict)
    unknown: list[tuple[str, SourceLocation, str]] = field(default_factory=list)

    def complete(self, other: SetupFacts) -> None:
        """Add the values of setup.cfg that setup.py does not set, as setuptools does."""
        self.name, self.python = self.name or other.name, self.python or other.python
        if not self.needs and not any(field_name == "install_requires" for field_name, _, _ in self.unknown):
            self.needs = other.needs
        for extra, lines in other.extras.items():
            self.extras.setdefault(extra, lines)


def read_setup(read: Callable[[str], str | None], directory: str) -> SetupFacts | None:
    """Read setup.py and setup.cfg in a directory, None if neither describes a package."""

    def named(file: str) -> tuple[str, str | None]:
        path = normpath(f"{directory or '.'}/{file}")
        return path, read(path)

    script, text = named("setup.py")
    facts = read_setup_py(text, script) if text is not None else None
    config, text = named("setup.cfg")
    declared = read_setup_cfg(text, config) if text is not None else None
    if facts and declared:
        facts.complete(declared)
    return facts or declared


# --- setup.cfg -----------------------------------------------------------------------------------


def read_setup_cfg(text: str, file: str) -> SetupFacts | None:
    """Read a setup.cfg, None if it describes no package or cannot be parsed."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
    try:
        parser.read_string(text[:_SIZE])
    except configparser.Error:
        return None
    if not (parser.has_section("options") or parser.has_section("metadata")):
        return None
    lines = text.split("\n")

    def listed(section: str, key: str) -> list[tuple[str, SourceLocation]]:
        value = parser.get(section, key, fallback="").strip()
        parts = value.split("\n") if "\n" in value else value.split(";")
        return [line for part in parts if part.strip() for line in _file_or_line(part.strip(), place(part))]

    def place(part: str) -> SourceLocation:
        line_index = next((number for number, line in enumerate(lines) if part.strip() in line), 0)
        return SourceLocation(file=file, line=line_index + 1, column=1)

    extras = parser.options("options.extras_require") if parser.has_section("options.extras_require") else []
    return SetupFacts(
        name=parser.get("metadata", "name", fallback=""),
        python=parser.get("options", "python_requires", fallback=""),
        needs=listed("options", "install_requires"),
        extras={canonical(name): listed("options.extras_require", name) for name in extras},
    )


def _file_or_line(text: str, location: SourceLocation) -> Iterator[tuple[str, SourceLocation]]:
    """Yield the files of `file: a.txt, b.txt` as `-r` lines, or else the line."""
    if match := re.match(r"file:\s*(.*)", text):
        yield from ((f"-r {name.strip()}", location) for name in match[1].split(",") if name.strip())
    else:
        yield text, location


# --- setup.py ------------------------------------------------------------------------------------


class _DynamicValueError(Exception):
    """A value that is known only when the code runs."""


class _SourceText(str):
    """A string with its line."""

    __slots__ = ("line",)
    line: int


@dataclass(frozen=True, slots=True)
class _RequirementLines:
    """The lines of a file, however the code splits them."""

    path: str
    line: int


@dataclass(frozen=True, slots=True)
class _UnknownValue:
    line: int
    code: str


def read_setup_py(text: str, file: str) -> SetupFacts | None:
    """Read the call of `setup` in a script, None if there is none or Python cannot parse the script."""
    if len(text) > _SIZE:
        return None
    try:
        tree = ast.parse(text)
        script = _SetupScript(tree)
        fields = script.setup()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return None if fields is None else _facts(fields, file)


def _facts(fields: Mapping[str, object], file: str) -> SetupFacts:
    facts = SetupFacts()

    def place(line: int) -> SourceLocation:
        return SourceLocation(file=file, line=line, column=1)

    def listed(value: object, field_name: str) -> list[tuple[str, SourceLocation]]:
        lines: list[tuple[str, SourceLocation]] = []
        if isinstance(value, str):
            at = getattr(value, "line", 1)
            value = [_text(part, at) for part in value.split("\n") if part.strip()]
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, _RequirementLines):
                lines.append((f"-r '{item.path}'", place(item.line)))
            elif isinstance(item, str):
                lines.append((str(item), place(getattr(item, "line", 1))))
            elif item is not None:
                line, code = (
                    (item.line, item.code) if isinstance(item, _UnknownValue) else (1, str(type(item)))
                )
                facts.unknown.append((field_name, place(line), code))
        return lines

    facts.name = str(name) if isinstance(name := fields.get("name"), str) else ""
    facts.python = str(bounds) if isinstance(bounds := fields.get("python_requires"), str) else ""
    facts.needs = listed(fields.get("install_requires"), "install_requires")
    if fields.get("pbr"):
        facts.needs.append(("-r requirements.txt", place(1)))
    extras = fields.get("extras_require")
    if isinstance(extras, dict):
        for name, value in extras.items():
            extra, _, marker = str(name).partition(":")
            lines = listed(value, f"extra {canonical(extra)}")
            lines = [(f"{line} ; {marker}", location) for line, location in lines] if marker else lines
            known = facts.extras.setdefault(canonical(extra), []) if extra else facts.needs
            known += lines
    elif isinstance(extras, _UnknownValue):
        facts.unknown.append(("extras_require", place(extras.line), extras.code))
    if (more := fields.get("**")) is not None:
        unknown = more if isinstance(more, _UnknownValue) else _UnknownValue(1, "")
        facts.unknown.append(("install_requires", place(unknown.line), unknown.code))
    return facts


def _text(text: str, line: int) -> _SourceText:
    if len(text) > _LONG:
        raise _DynamicValueError
    source = _SourceText(text)
    source.line = line
    return source


def _unknown_value(node: ast.AST) -> _UnknownValue:
    return _UnknownValue(getattr(node, "lineno", 1), ast.unparse(node)[:200])


def _called(node: ast.expr) -> str:
    """Return the last name of a call: `setup` for `setuptools.setup(...)`."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


class _SetupScript:
    """The names of a module, as its statements set them from top to bottom."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.names: dict[str, object] = {"__file__": _text("", 1), "__name__": _text("__main__", 1)}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.calling: set[str] = set()  # functions that call setup
        self.steps = 0
        self.fields: dict[str, object] | None = None
        self.depth = 0

    def setup(self) -> dict[str, object] | None:
        self._block(self.tree.body)
        if self.fields is None:  # in a function that nothing here calls
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Call) and _called(node) == "setup":
                    self._setup(node)
                    break
        return self.fields

    # --- statements

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._step()
            self._statement(statement)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise ValueError(f"it has more than {_STEPS} statements and expressions")

    def _nodes(self, function: ast.FunctionDef) -> Iterator[ast.AST]:
        for node in ast.walk(function):
            self._step()
            yield node

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef():
                self.functions[node.name] = node
                if any(isinstance(item, ast.Call) and _called(item) == "setup" for item in self._nodes(node)):
                    self.calling.add(node.name)
            case (
                ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr())
            ):
                self.names[name] = self._value(node.value)  # type: ignore[arg-type]
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=key)]):
                self._put(name, key, node.value)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()):
                self._join(name, self._value(node.value), node)
            case ast.With():
                for item in node.items:
                    if isinstance(item.optional_vars, ast.Name):
                        self.names[item.optional_vars.id] = self._value(item.context_expr)
                self._block(node.body)
            case ast.Expr(value=ast.Call() as call):
                self._call(call)
            case ast.If(test=test):
                known = self._test(test)
                if known is None:
                    self._forget([*node.body, *node.orelse], node)
                else:
                    self._block(node.body if known else node.orelse)
            case ast.Try():
                self._block(node.body)
                for handler in node.handlers:
                    self._forget(handler.body, node)
                self._block([*node.orelse, *node.finalbody])
            case ast.For(iter=over) if isinstance(lines := self._value(over), _RequirementLines):
                for name in _changed(node.body):
                    if isinstance(self.names.get(name), list):
                        self._join(name, lines, node)
            case _:
                self._forget([node], node)

    def _call(self, call: ast.Call) -> None:
        name = _called(call)
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name == "setup":
            self._setup(call)
        elif isinstance(of, ast.Name) and name in ("remove", "pop", "clear"):
            self._forget([ast.Expr(call)], call)
        elif isinstance(of, ast.Name) and name in ("append", "extend", "insert", "update") and call.args:
            value = self._value(call.args[-1])
            there = self.names.get(of.id)
            if name == "update" and isinstance(there, dict) and isinstance(value, dict):
                there.update(value)
            else:
                self._join(of.id, [value] if name in ("append", "insert") else value, call)
        elif name in self.calling and self.depth < 3:
            self.depth += 1
            self._block(self.functions[name].body)
            self.depth -= 1

    def _setup(self, call: ast.Call) -> None:
        fields: dict[str, object] = {}
        for keyword in call.keywords:
            value = self._value(keyword.value)
            if keyword.arg:
                fields[keyword.arg] = value
            elif isinstance(value, dict):
                fields |= {str(key): item for key, item in value.items()}
            else:
                fields["**"] = value
        self.fields = fields

    def _put(self, name: str, key: ast.expr, value: ast.expr) -> None:
        there, key_value = self.names.get(name), self._value(key)
        if isinstance(there, dict) and isinstance(key_value, str):
            there[str(key_value)] = self._value(value)
        else:
            self.names[name] = _unknown_value(value)

    def _join(self, name: str, value: object, node: ast.AST) -> None:
        there = self.names.get(name)
        more = value if isinstance(value, list) else [value]
        if isinstance(there, list) and len(there) + len(more) <= _ITEMS:
            self.names[name] = [*there, *more]
        elif isinstance(there, _RequirementLines) and more:
            self.names[name] = [there, *more]
        else:
            self.names[name] = _unknown_value(node)

    def _forget(self, body: Sequence[ast.stmt], node: ast.stmt | ast.expr) -> None:
        """Mark names as unknown that code changes only under an unknown condition."""
        for name in _changed(body):
            code = _UnknownValue(node.lineno, ast.unparse(node).partition("\n")[0][:200])
            there = self.names.get(name)
            self.names[name] = [*there, code] if isinstance(there, list) else code

    # --- conditions

    def _test(self, node: ast.expr) -> bool | None:
        match node:
            case ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()]):
                return True
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
                code = ast.unparse(left)
                known = {"sys.platform": "linux", "os.name": "posix", "platform.system()": "Linux"}.get(code)
                value = self._value(right)
                if known is None or not isinstance(value, str):
                    return None
                return (known == value) == isinstance(op, ast.Eq)
            case ast.Compare(left=ast.Constant(), ops=[ast.In()], comparators=[right]):
                # a build gives the script no options of a person
                return False if ast.unparse(right).startswith("sys.argv") else None
        return None

    # --- values

    def _value(self, node: ast.expr) -> object:
        try:
            return self._evaluate(node)
        except _DynamicValueError:
            return _unknown_value(node)

    def _evaluate(self, node: ast.expr) -> object:
        self._step()
        match node:
            case ast.Constant(value=str() as text):
                return _text(text, node.lineno)
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return self._list(items)
            case ast.Dict():
                return self._dict(node)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._sum(self._evaluate(left), self._evaluate(right), node)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self._path([left, right], node)
            case ast.BinOp(left=left, op=ast.Mod(), right=right):
                arguments = self._evaluate(right)
                text = self._string(left).replace("%s", "{}")
                return self._format(text, arguments if isinstance(arguments, list) else [arguments], node)
            case ast.JoinedStr(values=parts):
                return _text("".join(self._part(part) for part in parts), node.lineno)
            case ast.Subscript(value=of, slice=key):
                there, key_value = self._evaluate(of), self._evaluate(key)
                if isinstance(there, _RequirementLines):
                    return there
                if isinstance(there, dict) and isinstance(key_value, str) and str(key_value) in there:
                    return there[str(key_value)]
            case (
                ast.ListComp(generators=[generator])
                | ast.GeneratorExp(generators=[generator])
                | ast.SetComp(generators=[generator])
            ):
                values = self._evaluate(generator.iter)
                if isinstance(values, _RequirementLines):
                    return values
                if isinstance(values, list) and isinstance(generator.target, ast.Name) and not generator.ifs:
                    return [self._with(generator.target.id, value, node.elt) for value in values]
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._flattened(node)
            case ast.DictComp(generators=[generator]):
                return self._by_name(generator.iter)
            case ast.IfExp():
                return self._either(node)
            case ast.Call():
                return self._result(node)
            case ast.Attribute(value=of, attr="parent"):
                return self._evaluate(of)
        raise _DynamicValueError

    def _either(self, node: ast.IfExp) -> object:
        """Return one of two values. If the condition is unknown, return only the keys of two tables."""
        if (known := self._test(node.test)) is not None:
            return self._evaluate(node.body if known else node.orelse)
        tables = [self._evaluate(node.body), self._evaluate(node.orelse)]
        if not all(isinstance(table, dict) for table in tables):
            raise _DynamicValueError
        return {key: _unknown_value(node) for table in tables if isinstance(table, dict) for key in table}

    def _list(self, items: Sequence[ast.expr]) -> list[object]:
        values: list[object] = []
        for item in items:
            value = self._value(item.value if isinstance(item, ast.Starred) else item)
            values += value if isinstance(item, ast.Starred) and isinstance(value, list) else [value]
            if len(values) > _ITEMS:
                raise _DynamicValueError
        return values

    def _dict(self, node: ast.Dict) -> dict[str, object]:
        table: dict[str, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                inner = self._evaluate(value)
                if not isinstance(inner, dict):
                    raise _DynamicValueError
                table |= inner
            else:
                table[self._string(key)] = self._value(value)
        return table

    def _sum(self, first: object, second: object, node: ast.expr) -> object:
        if isinstance(first, str) and isinstance(second, str):
            return _text(first + second, node.lineno)
        if isinstance(first, list | _RequirementLines) and isinstance(second, list | _RequirementLines):
            joined = [
                *(first if isinstance(first, list) else [first]),
                *(second if isinstance(second, list) else [second]),
            ]
            if len(joined) <= _ITEMS:
                return joined
        raise _DynamicValueError

    def _string(self, node: ast.expr) -> str:
        value = self._evaluate(node)
        if isinstance(value, str):
            return str(value)
        raise _DynamicValueError

    def _part(self, node: ast.expr) -> str:
        match node:
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._string(value)
            case ast.Constant(value=str() as text):
                return text
        raise _DynamicValueError

    def _format(self, text: str, values: Sequence[object], node: ast.expr) -> _SourceText:
        if text.count("{}") != len(values) or len(re.findall(r"[{}%]", text)) != 2 * len(values):
            raise _DynamicValueError
        for value in values:
            if not isinstance(value, str):
                raise _DynamicValueError
            text = text.replace("{}", value, 1)
        return _text(text, node.lineno)

    def _path(self, parts: Sequence[ast.expr], node: ast.expr) -> _SourceText:
        """Join the names of a path. The script's directory is empty."""
        names = [self._string(part).strip("/") for part in parts]
        return _text("/".join(name for name in names if name not in ("", ".")), node.lineno)

    def _flattened(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> list[object]:
        """Return the value of `[one for some in LISTS for one in some]`."""
        match node:
            case ast.ListComp(
                elt=ast.Name(id=last),
                generators=[
                    ast.comprehension(target=ast.Name(id=first), iter=lists, ifs=[]),
                    ast.comprehension(target=ast.Name(id=second), iter=ast.Name(id=inner), ifs=[]),
                ],
            ) if (last, first) == (second, inner):
                return self._concatenated(self._evaluate(lists))
        raise _DynamicValueError

    def _with(self, name: str, value: object, node: ast.expr) -> object:
        before = self.names
        try:
            self.names = {**before, name: value}
            return self._evaluate(node)
        finally:
            self.names = before

    def _by_name(self, over: ast.expr) -> dict[str, object]:
        """Return one literal list's requirements by name, for any pattern that splits them.

        Example: `{b: a for a, b in (re.findall(..., x)[0] for x in _deps)}`.
        """
        match over:
            case ast.GeneratorExp(generators=[one]) if "findall" in ast.unparse(over.elt):
                rows = self._evaluate(one.iter)
                if isinstance(rows, list):
                    named = {re.split(r"[!=<>~ \[;]", row)[0]: row for row in rows if isinstance(row, str)}
                    if len(named) == len(rows):
                        return dict(named)
        raise _DynamicValueError

    def _concatenated(self, lists: object) -> list[object]:
        if not isinstance(lists, list):
            raise _DynamicValueError
        values: list[object] = []
        for item in lists:
            values += item if isinstance(item, list) else [item]
            if len(values) > _ITEMS:
                raise _DynamicValueError
        return values

    def _result(self, node: ast.Call) -> object:
        name, arguments = _called(node), node.args
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name in ("open", "parse_requirements"):
            first = self._value(arguments[0]) if arguments else None
            if isinstance(first, _RequirementLines):
                return first
            return _RequirementLines(self._path(arguments[:1], node), node.lineno)
        if name == "join" and of is not None and ast.unparse(of) in ("os.path", "path", "osp"):
            return self._path(arguments, node)
        if name in (
            "dirname",
            "abspath",
            "realpath",
            "Path",
            "resolve",
            "normpath",
            "getcwd",
            "expanduser",
            "absolute",
            "fspath",
        ):
            return self._path([*arguments, *([of] if name in ("resolve", "absolute") and of else [])], node)
        if name in ("joinpath",) and of is not None:
            return self._path([of, *arguments], node)
        if (
            name in ("list", "set", "tuple", "sorted", "str", "map", "filter", "frozenset")
            and of is None
            and arguments
        ):
            value = self._evaluate(arguments[-1])
            if name in ("map", "filter") and not isinstance(value, _RequirementLines):
                raise _DynamicValueError
            return value
        if name == "dict" and of is None and not arguments:
            return {word.arg: self._value(word.value) for word in node.keywords if word.arg}
        if (name, len(arguments)) in (("sum", 2), ("from_iterable", 1)):
            return self._concatenated(self._evaluate(arguments[0]))
        if name == "chain" and arguments:
            return self._concatenated(self._list(arguments))
        if of is None and (inner := self.functions.get(name)):
            return self._of_function(inner, node)
        if of is not None:
            return self._method(name, of, node)
        raise _DynamicValueError

    def _method(self, name: str, of: ast.expr, node: ast.Call) -> object:
        value = self._evaluate(of)
        if name in ("read_text", "open", "read_bytes") and isinstance(value, str):
            return _RequirementLines(str(value), node.lineno)
        if isinstance(value, _RequirementLines):  # read, splitlines, split, strip, decode, readlines ...
            return value
        if isinstance(value, dict) and name == "values":
            return list(value.values())
        if isinstance(value, list) and name == "copy":
            return list(value)
        if (
            isinstance(value, dict)
            and name == "get"
            and node.args
            and (key := self._string(node.args[0])) in value
        ):
            return value[key]
        if isinstance(value, str) and name == "format" and not node.keywords:
            return self._format(str(value), self._list(node.args), node)
        if isinstance(value, str) and name in ("splitlines", "split") and not node.args:
            parts = value.splitlines() if name == "splitlines" else value.split()
            return [_text(part, node.lineno) for part in parts if part.strip()]
        if isinstance(value, str) and name == "strip" and not node.args:
            return _text(value.strip(), node.lineno)
        raise _DynamicValueError

    def _of_function(self, function: ast.FunctionDef, node: ast.Call) -> object:
        """Return the value of a function in the script: its only expression, or the file that it reads."""
        if self.depth >= 3:
            raise _DynamicValueError
        before, self.depth = self.names, self.depth + 1
        names = [child.arg for child in function.args.args]
        defaults = dict(zip(reversed(names), reversed(function.args.defaults), strict=False))
        arguments = dict(zip(names, node.args, strict=False)) | {
            word.arg: word.value for word in node.keywords if word.arg
        }
        bound = {name: self._value(value) for name, value in {**defaults, **arguments}.items() if name}
        try:
            self.names = {**before, **bound}
            if function.args.vararg:
                self.names[function.args.vararg.arg] = self._list(node.args[len(names) :])
            body = [child for child in function.body if not _is_text(child)]
            if len(body) == 1 and isinstance(only := body[0], ast.Return) and only.value:
                return self._evaluate(only.value)
            for inner in body:
                if (
                    isinstance(inner, ast.Assign)
                    and len(inner.targets) == 1
                    and isinstance(inner.targets[0], ast.Name)
                ):
                    self.names[inner.targets[0].id] = self._value(inner.value)
            read = [
                child
                for child in self._nodes(function)
                if isinstance(child, ast.Call)
                and _called(child) in ("open", "read_text", "parse_requirements")
            ]
            files = {value for child in read if isinstance(value := self._value(child), _RequirementLines)}
            if len({child.path for child in files}) == 1:
                return _RequirementLines(files.pop().path, node.lineno)
        finally:
            self.names, self.depth = before, self.depth - 1
        raise _DynamicValueError


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changed(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements set, or whose lists they change."""
    seen: dict[str, None] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                seen[node.id] = None
            elif (
                isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
            ):
                seen[node.value.id] = None
            elif _called(node) in _CHANGES if isinstance(node, ast.Call) else False:
                of = node.func.value if isinstance(node.func, ast.Attribute) else None  # type: ignore[attr-defined]
                if isinstance(of, ast.Name):
                    seen[of.id] = None
    yield from seen


# --- Requirements of a project's own code on Python and setuptools, if its files do not state them
# Old research code imports modules that Python and its environments no longer have. Only the files of the
# project are read, and none is run.


# Sources: the changelog of setuptools, 82.0.0, and its folder _distutils; PEP 632; PEP 594; for asynchat,
# asyncore, imp and smtpd "What's New In Python 3.12".
PROVIDED_BY = {"pkg_resources": "setuptools<82", "distutils": "setuptools"}
FITTING = "81.0.0"
"""A release of setuptools that has pkg_resources."""
REMOVED = {
    **dict.fromkeys(("asynchat", "asyncore", "imp", "smtpd"), "3.12"),
    **dict.fromkeys(("cgi", "cgitb", "crypt", "imghdr", "pipes", "sndhdr", "telnetlib", "xdrlib"), "3.13"),
}
PYTHONS = ("3.9", "3.10", "3.11", "3.12")
OTHERS = {
    *("test", "tests", "example", "examples", "benchmark", "benchmarks", "doc", "docs", "build", "dist"),
    *("node_modules", "site-packages"),
}
"""Directories whose code is not part of the program."""
MOST_ENTRIES, LARGEST = 50_000, 1 << 20
# An import that is not indented is not within `try`, `if` or a function.
_IMPORT = re.compile(
    rb"^(?:import|from)[ \t]+(" + "|".join((*PROVIDED_BY, *REMOVED)).encode() + rb")\b", re.MULTILINE
)


def add_needs(spec: EnvironmentSpec, root: Path) -> None:
    """Add the requirements of the code below `root`, with notes. Locks and conda files are skipped."""
    if spec.locked or spec.conda:
        return
    imports = find_imports(root)
    _add_setuptools(spec, {name: location for name, location in imports.items() if name in PROVIDED_BY})
    for name, location in imports.items():
        if name in REMOVED:
            _bound_python(spec, name, location)


def _add_setuptools(spec: EnvironmentSpec, imports: Mapping[str, SourceLocation]) -> None:
    if not imports:
        return
    name = min(imports, key=list(PROVIDED_BY).index)
    text, location = PROVIDED_BY[name], imports[name]
    setuptools_requirements = [
        Requirement(row) for row in (*spec.pip, *spec.constraints) if package_of(row) == "setuptools"
    ]
    if name != "pkg_resources" and setuptools_requirements:
        return
    if not all(row.specifier.contains(FITTING) for row in setuptools_requirements):
        spec.note(location, f"the code imports {name}, which the file's own setuptools no longer has")
    elif setuptools_requirements:
        spec.constraints.append(text)
        spec.note(location, f"{text} is a constraint: the code imports {name}, which setuptools 82 removed")
    else:
        spec.pip.append(text)
        spec.note(location, f"{text} is added: the code imports {name}, and the file names no setuptools")


def _bound_python(spec: EnvironmentSpec, module: str, location: SourceLocation) -> None:
    bounds = f"<{REMOVED[module]}"
    try:
        both = SpecifierSet(",".join(filter(None, (spec.python, bounds))))
    except InvalidSpecifier:  # a match spec of one version, such as 3.11.*
        return
    if any(both.contains(f"{python}.9") for python in PYTHONS) and str(both) != spec.python:
        spec.bound_python(str(both), location)
        spec.note(location, f"Python {bounds}: the code imports {module}, which {bounds[1:]} removed")


def find_imports(root: Path) -> dict[str, SourceLocation]:
    """Return the first import of each module in the tables, by module name."""
    imports: dict[str, SourceLocation] = {}
    for path in _files(root):
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST)
        except OSError:
            continue
        for match in _IMPORT.finditer(data):
            line = data.count(b"\n", 0, match.start()) + 1
            imports.setdefault(
                match[1].decode(), SourceLocation(file=str(path.relative_to(root)), line=line, column=1)
            )
    return imports


def _files(root: Path) -> Iterator[Path]:
    entries = 0
    for directory, directories, names in os.walk(root):
        directories[:] = sorted(
            entry for entry in directories if entry.lower() not in OTHERS and not entry.startswith(".")
        )
        if "pyvenv.cfg" in names:
            directories[:] = []
            continue
        entries += len(names)
        if entries > MOST_ENTRIES:
            return
        for name in sorted(names):
            path = Path(directory, name)
            if (
                name.endswith(".py")
                and name != "setup.py"
                and not name.startswith("test_")
                and path.is_file()
            ):
                yield path
