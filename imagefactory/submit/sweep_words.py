"""What a shell makes of a sweep: arrays of the columns' values, and words that take one of them. Pure.

Runs count from 1, so the first element of an array stands for no run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from imagefactory.errors import UsageError
from imagefactory.jobs.htcondor import RUN, SubmitRun, checked_value

_MACRO = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_WIDTH = 100


def value_arrays(run: SubmitRun, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """An array for each column. Raises UsageError, naming the run, for a row that does not fit."""
    for number, row in enumerate(rows, start=1):
        if len(row) != len(run.columns) - 1:
            raise UsageError(
                "sweep-values-invalid",
                f"run {number} has {len(row)} values, not {len(run.columns) - 1}",
                hint=f"write one value for each of {', '.join(run.columns[1:])}",
            )
    for place, name in enumerate(run.columns[1:]):
        words = (shlex.quote(checked_value(row[place], number)) for number, row in enumerate(rows, start=1))
        yield f"value_{name}=(none\n{_folded(words)}\n)"


def _folded(words: Iterable[str]) -> str:
    lines, line = [], "   "
    for word in words:
        if len(line) + len(word) + 1 > _WIDTH and line.strip():
            lines.append(line)
            line = "   "
        line += f" {word}"
    return "\n".join([*lines, line])


def run_word(word: str, columns: Sequence[str], index: str) -> str:
    """One argument, in which `$(run)` and a sweep's columns are filled in when the job runs.

    `index` is the shell's variable that counts the runs. Raises UsageError for what cannot stand there.
    """
    known = {name.lower(): name for name in columns}
    parts, at = [], 0
    for found in _MACRO.finditer(word):
        name = known.get(found[1].lower())
        if name is None:
            raise no_macro(word, columns)
        parts.append(shlex.quote(word[at : found.start()]) if found.start() > at else "")
        parts.append(f'"${index}"' if name == RUN else f'"${{value_{name}[{index}]}}"')
        at = found.end()
    rest = word[at:]
    if not (word.isascii() and word.isprintable()):
        raise UsageError(
            "argument-not-ascii",
            f"{word[:80]!a} cannot be an argument in a script",
            hint="use printable ASCII",
        )
    return "".join([*parts, shlex.quote(rest) if rest or not parts else ""])


def no_macro(word: str, columns: Sequence[str]) -> UsageError:
    known = ", ".join(f"$({name})" for name in columns)
    return UsageError(
        "macro-unknown",
        f"unknown macro in '{word[:80]}'",
        hint=f"use one of {known}" if known else "macros require a sweep: --dag N|FILE",
    )
