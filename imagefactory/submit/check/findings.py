"""What is told about a submit file: one thing with its line, and what certainly mends it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """WRONG: jobs fail, wait for ever or are not what they seem. ADVICE: it can be had better."""

    WRONG = "wrong"
    ADVICE = "advice"


class Spot(NamedTuple):
    """Where in a file a finding is; columns count from 1, and 0 is the whole line."""

    line: int
    column: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Lines `first` to `last` of a file become `text`; where `last` is before `first`, it is put there."""

    first: int
    last: int
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFinding:
    """One thing about a file. `rule` is a word for tables, `hint` what to write.

    `edits` do what the hint says where that is certain to be what the file means; else there are none.
    `column` counts from 1; 0 is the whole line.
    """

    line: int
    rule: str
    severity: Severity
    message: str
    hint: str = ""
    edits: tuple[Edit, ...] = ()
    column: int = 0


def wrong(
    line: int, rule: str, message: str, hint: str = "", *, edits: tuple[Edit, ...] = (), column: int = 0
) -> SubmitFinding:
    return SubmitFinding(
        line=line,
        rule=rule,
        severity=Severity.WRONG,
        message=message,
        hint=hint,
        edits=edits,
        column=column,
    )


def advice(
    line: int, rule: str, message: str, hint: str = "", *, edits: tuple[Edit, ...] = (), column: int = 0
) -> SubmitFinding:
    return replace(wrong(line, rule, message, hint, edits=edits, column=column), severity=Severity.ADVICE)
