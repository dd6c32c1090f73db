"""How a value enters a Dockerfile, a definition or a shell: the only doors, and what they refuse.

Recipes have allow-lists of their own; this is the second line. A template prints nothing that has
not passed one of these functions: each returns `Written`, and the templates' environment refuses
every other value.

What single quotes do is the same in a POSIX shell and in a Dockerfile's ENV and LABEL: no `$`, no
backslash, no escape inside them. What they cannot hold in a Dockerfile is a line's end, which is why
control characters are refused and not quoted.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable

from imagefactory.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]*")


class Written(str):
    """Text that is fit for the file it goes to."""

    __slots__ = ()


def _refuse(value: str, why: str) -> UsageError:
    return UsageError(
        "value-not-quotable",
        f"{value!r} cannot be in a Dockerfile or definition: {why}",
        hint="change the recipe's value",
    )


def line(value: str) -> Written:
    """`value` as part of a comment or another line of text.

    Refuses what is not printable (line ends of every alphabet, control and direction characters),
    a trailing backslash (it swallows the next line) and `{{` (Apptainer's own substitution).
    """
    if not value.isprintable():
        raise _refuse(value, "it has a line end or a control character")
    if value.endswith("\\"):
        raise _refuse(value, "a trailing backslash would swallow the next line")
    if "{{" in value:
        raise _refuse(value, "Apptainer would replace '{{ }}'")
    return Written(value)


def word(value: str) -> Written:
    """`value` as one word of a shell, or as the value of an ENV or LABEL."""
    return Written(shlex.quote(line(value)))


def words(values: Iterable[str]) -> Written:
    """Words of a shell with blanks between them."""
    return Written(" ".join(word(value) for value in values))


def variable(name: str) -> Written:
    """The name of an environment variable."""
    if not _NAME.fullmatch(name):
        raise _refuse(name, "a variable's name is letters, digits and '_', no digit first")
    return Written(name)


def label(key: str) -> Written:
    """The key of a label: dotted lower-case words."""
    if not _LABEL.fullmatch(key):
        raise _refuse(key, "a label's key is lower-case words with '.', '-' or '_' between them")
    return Written(key)


def trimmed(value: str) -> Written:
    """The value of a label in `%labels`, which has no quotes and cuts blanks off both ends."""
    if value != value.strip():
        raise _refuse(value, "spaces at its ends would be lost")
    return line(value)


def reference(value: str) -> Written:
    """An image reference such as docker.io/library/debian:12-slim."""
    if not _REFERENCE.fullmatch(value):
        raise _refuse(value, "an image reference is name:tag or name@sha256:digest")
    return Written(value)


def array(values: Iterable[str]) -> Written:
    """The exec form of CMD: a JSON array, which no shell reads."""
    return Written(json.dumps([line(value) for value in values], ensure_ascii=False))


def pairs(values: Iterable[tuple[str, str]], indent: int) -> Written:
    """The names and values of one ENV, a line each."""
    return Written(f" \\\n{' ' * indent}".join(f"{variable(name)}={word(value)}" for name, value in values))


def labels(values: Iterable[tuple[str, str]], indent: int) -> Written:
    """The keys and values of one LABEL, a line each."""
    return Written(f" \\\n{' ' * indent}".join(f"{label(key)}={word(value)}" for key, value in values))


def run(commands: Iterable[str]) -> Written:
    """Shell commands as one RUN, every line of it but the last continued.

    A line end inside a command means a blank. The commands are our own text; values inside them came
    through `word`.
    """
    return Written("; \\\n    ".join(" \\\n    ".join(_parts(command)) for command in commands))


def _parts(command: str) -> list[Written]:
    return [line(part) for part in command.split("\n")]


FILTERS = {
    "array": array,
    "label": label,
    "labels": labels,
    "line": line,
    "pairs": pairs,
    "reference": reference,
    "run": run,
    "trimmed": trimmed,
    "variable": variable,
    "word": word,
    "words": words,
}


def insist(value: object) -> Written:
    """What the templates do with every value they print: let `Written` through, refuse the rest."""
    if not isinstance(value, Written):
        raise TypeError(f"a template prints {value!r} without a filter of imagefactory.render.quoting")
    return value
