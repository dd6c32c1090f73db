"""What is told about a submit file: one thing with its line, and what certainly mends it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """WRONG: jobs fail, wait for ever or are not what they seem. ADVICE: it can be had better."""

    WRONG = "wrong"
    ADVICE = "advice"


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
    """

    line: int
    rule: str
    severity: Severity
    message: str
    hint: str = ""
    edits: tuple[Edit, ...] = ()


def wrong(
    line: int, rule: str, message: str, hint: str = "", *, edits: tuple[Edit, ...] = ()
) -> SubmitFinding:
    return SubmitFinding(
        line=line, rule=rule, severity=Severity.WRONG, message=message, hint=hint, edits=edits
    )


def advice(
    line: int, rule: str, message: str, hint: str = "", *, edits: tuple[Edit, ...] = ()
) -> SubmitFinding:
    return SubmitFinding(
        line=line, rule=rule, severity=Severity.ADVICE, message=message, hint=hint, edits=edits
    )
