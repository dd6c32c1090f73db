"""Parse and evaluate ClassAd expressions for a job and a machine, with classad2.

Expressions are untrusted, so length, brackets and quotes are checked before the library parses them. HTCondor
functions (`stringListMember`, `countMatches`) require an import of `htcondor2`. The extra `condor` installs
both modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imagefactory.errors import UsageError

if TYPE_CHECKING:
    import classad2

Plain = str | int | float | bool

MAX_EXPRESSION = 4096
MAX_NESTED = 100
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"'
    r"|'(?:[^'\\]|\\.)*'"
    r"|(?:[A-Za-z_][A-Za-z0-9_]*)(?:\s*\.\s*[A-Za-z_][A-Za-z0-9_]*)*(\s*\()?"
    r"|[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?[A-Za-z]?"
    r"|\.[0-9]+"
    r"|/[/*]"
    r"|[][(){};\"']"
    r"|.",
    re.DOTALL,
)
_KEYWORDS = {"true", "false", "undefined", "error", "is", "isnt", "and", "or", "not", "parent"}
_SCOPES = {"my", "target"}


@dataclass(frozen=True, slots=True)
class ClassAdExpression:
    """A valid expression, created only by `parse_expression`."""

    text: str
    names: tuple[str, ...]
    """The attributes in the expression in their original spelling, without `MY.`, `TARGET.` and duplicates.


    """
    tree: Any

    def names_any(self, *attributes: str) -> bool:
        """Return whether the expression contains one of these attributes. ClassAds ignore case."""
        attribute_names = {name.lower() for name in self.names}
        return any(attribute.lower() in attribute_names for attribute in attributes)

    def value(self, my: classad2.ClassAd, target: classad2.ClassAd) -> Plain | None:
        """Return the value, None if it is undefined, an error, or not a plain value."""
        import classad2

        try:
            result = self.tree.eval(my, target)
        except classad2.ClassAdException:
            return None
        if isinstance(result, classad2.Value) or not isinstance(result, bool | int | float | str):
            return None
        return result

    def holds(self, my: classad2.ClassAd, target: classad2.ClassAd) -> bool | None:
        """Return whether the expression is true, None if it is undefined or an error.

        Numbers count as booleans.
        """
        value = self.value(my, target)
        return None if value is None or isinstance(value, str) else bool(value)


def parse_expression(text: str) -> ClassAdExpression:
    """Parse an expression. Raises UsageError if it is invalid or too long."""
    import classad2
    import htcondor2  # noqa: F401 - brings HTCondor's own functions into the language

    excerpt = f"'{text[:60]}{'...' if len(text) > 60 else ''}'"
    if len(text) > MAX_EXPRESSION or not text.isprintable():
        raise UsageError(
            "expression-too-long",
            f"{excerpt} is longer than {MAX_EXPRESSION} characters or not one printable line",
            hint="write a shorter expression on one line",
        )
    names = _scan(text)
    if names is None:
        raise UsageError(
            "expression-invalid",
            f"{excerpt} is not a ClassAd expression",
            hint="check its brackets and quotes",
        )
    try:
        tree = classad2.ExprTree(text)
    except (classad2.ClassAdException, ValueError) as error:
        raise UsageError(
            "expression-invalid",
            f"{excerpt} is not a ClassAd expression",
            hint="compare with ==, join with && and ||",
        ) from error
    return ClassAdExpression(text, names, tree)


def conjuncts(text: str) -> tuple[str, ...]:
    """Return the operands of &&, without brackets.

    An expression without && is returned as the only operand.
    """
    text = _unwrapped(text.strip())
    depth, start, parts = 0, 0, list[str]()
    for token in _TOKEN.finditer(text):
        at, end = token.span()
        if token[0] in "([{" or token[1]:
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif depth == 0 and (
            text.startswith("||", at) or (token[0] == "?" and text[at - 1 : end + 1] != "=?=")
        ):
            return (text,)
        elif depth == 0 and text.startswith("&&", at):
            parts.append(text[start:at])
            start = end + 1
    if not parts:
        return (text,)
    return tuple(conjunct for part in [*parts, text[start:]] for conjunct in conjuncts(part))


def _unwrapped(text: str) -> str:
    """Return the text without its outer brackets."""
    while text.startswith("(") and text.endswith(")"):
        depth = 0
        for token in _TOKEN.finditer(text):
            depth += 1 if token[0] == "(" or token[1] else -1 if token[0] == ")" else 0
            if depth == 0 and token.end() < len(text):
                return text
        text = text[1:-1].strip()
    return text


def renamed(text: str, name: Callable[[str], str]) -> str:
    """Return the expression with its attributes renamed by `name`. Renamed attributes lose their scope."""

    def of(token: re.Match[str]) -> str:
        if token[1] or not (token[0][0].isalpha() or token[0][0] == "_"):
            return token[0]
        attribute = token[0].split(".")[-1].strip()
        return name(attribute) if name(attribute) != attribute else token[0]

    return _TOKEN.sub(of, text)


def make_ad(values: Mapping[str, Plain]) -> classad2.ClassAd:
    """Return an ad of plain values. Skips names that are not valid attributes."""
    import classad2

    return classad2.ClassAd({name: value for name, value in values.items() if _NAME.fullmatch(name)})


def literal(text: str) -> Plain | None:
    """Return the value of an expression without attributes (`"short"`, `true`, `3 * 2`), else None."""
    try:
        expression = parse_expression(text)
    except UsageError:
        return None
    empty = make_ad({})
    return None if expression.names else expression.value(empty, empty)


def _scan(text: str) -> tuple[str, ...] | None:
    """Return the attributes in the text, None for unbalanced brackets or quotes, and for comments."""
    names: dict[str, None] = {}
    open_: list[str] = []
    for token in _TOKEN.finditer(text):
        first = token[0][0]
        if first in "([{":
            open_.append({"(": ")", "[": "]", "{": "}"}[first])
        elif first in ")]}":
            if not open_ or open_.pop() != first:
                return None
        elif (first == ";" and not open_) or token[0] in ('"', "'", "//", "/*"):
            return None
        elif token[1]:  # a function's name, and its bracket
            open_.append(")")
        elif first.isalpha() or first == "_":
            parts = [part.strip() for part in token[0].split(".")]
            name = parts[1] if parts[0].lower() in _SCOPES and len(parts) > 1 else parts[0]
            if name.lower() not in _KEYWORDS:
                names[name] = None
        elif first == "'":
            names[token[0][1:-1]] = None
        if len(open_) > MAX_NESTED:
            return None
    return None if open_ else tuple(names)
