"""Reading what an image wrote: bytes of a stranger, taken by a strict parser and shown without surprises."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagefactory.documents import parse_json
from imagefactory.model import CheckResult, CheckState, Completed
from imagefactory.suite import table
from imagefactory.trees import read_file

LARGEST_REPORT = 1 << 20
LONGEST_DETAIL = 2000
LARGEST_NUMBER = 1e300
_STATES = tuple(CheckState)


class ReportFault(Exception):
    """A report that cannot be believed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteCheck:
    """A row of the suite's report: the result and the word it gave for a failure."""

    result: CheckResult
    outcome: str


def read_report(path: Path) -> bytes:
    """Return the report's bytes. Raises ReportFault unless it is a regular file of at most LARGEST_REPORT."""
    try:
        return read_file(path.parent, path.name, LARGEST_REPORT)
    except FileNotFoundError:
        raise ReportFault("it wrote no report") from None
    except OSError as error:
        raise ReportFault(f"its report cannot be read: {error.strerror}") from error


def parse_fields(data: bytes, keys: Collection[str]) -> dict[str, Any]:
    """The one JSON object that a report is, with exactly these fields. Raises ReportFault."""
    try:
        document = parse_json(data)
    except ValueError as error:
        raise ReportFault("its report is not JSON") from error
    if not isinstance(document, dict) or set(document) != set(keys):
        raise ReportFault("its report has not the fields of the suite's")
    return document


def parse_row(row: object, names: Collection[str], outcomes: Collection[str]) -> SuiteCheck:
    """One check of a report. `names` are the suite's checks, `outcomes` its words for a failure.

    Raises ReportFault for anything else.
    """
    keys = {"name", "state", "detail", "outcome", "seconds", "numbers"}
    if not isinstance(row, dict) or set(row) != keys:
        raise ReportFault("a check in its report has not the fields of the suite's")
    name, state, outcome, numbers = row["name"], row["state"], row["outcome"], row["numbers"]
    if not isinstance(name, str) or name not in names:
        raise ReportFault("its report has a check that this suite does not have")
    if state not in _STATES or outcome not in ("", *outcomes):
        raise ReportFault(f"its report has a state of '{name}' that is none")
    if not isinstance(row["detail"], str) or not is_number(row["seconds"]) or row["seconds"] < 0:
        raise ReportFault(f"its report has a value of '{name}' that is none")
    if not isinstance(numbers, dict) or not all(is_number(value) for value in numbers.values()):
        raise ReportFault(f"its report has a number of '{name}' that is none")
    result = CheckResult(
        name=name,
        state=CheckState(state),
        detail=clean(row["detail"]),
        seconds=float(row["seconds"]),
        numbers=tuple(sorted({clean(key): float(value) for key, value in numbers.items()}.items())),
    )
    return SuiteCheck(result=result, outcome=outcome)


def format_row(check: CheckResult) -> dict[str, Any]:
    """A check as reports, records and statements write it."""
    return {
        "name": check.name,
        "state": check.state.value,
        "detail": check.detail,
        "seconds": check.seconds,
        "numbers": dict(check.numbers),
    }


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST_NUMBER  # false for NaN as well


def how_it_ended(completed: Completed) -> str:
    """One line: exit code or signal, and the last line on stderr."""
    code = completed.returncode
    ended = f"it ended by signal {code - 128}" if 128 < code < 192 else f"its exit code was {code}"
    lines = [line for line in (completed.stderr or completed.stdout).splitlines() if line.strip()]
    return clean(f"{ended}, its last words were: {lines[-1]}" if lines else f"{ended} and it said nothing")


def clean(text: str) -> str:
    """One printable line: no control characters of a stranger reach a terminal."""
    line = text[: 4 * LONGEST_DETAIL]
    if not line.isprintable():
        line = "".join(letter if letter.isprintable() else " " for letter in line)
    line = " ".join(line.split())
    return line if len(line) <= LONGEST_DETAIL else line[:LONGEST_DETAIL] + " ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeReport:
    """What the suite wrote. `running` names the check it was in when it last wrote, empty at the end."""

    running: str
    rows: tuple[SuiteCheck, ...]


def parse_smoke_report(data: bytes, nonce: str) -> SmokeReport:
    """Raises ReportFault for anything but a report of this suite's format with this nonce."""
    document = parse_fields(data, ("format", "nonce", "target", "python", "running", "checks"))
    if document["format"] != table.FORMAT:
        raise ReportFault("its report has another format")
    if document["nonce"] != nonce:
        raise ReportFault("its report does not bring back the nonce of this run")
    running, rows = document["running"], document["checks"]
    if not isinstance(rows, list) or not isinstance(running, str) or running not in ("", *table.CHECKS):
        raise ReportFault("its report names no checks")
    words = (table.LOAD_FAILED, table.WRONG_NUMBERS)
    return SmokeReport(running=running, rows=tuple(parse_row(row, table.CHECKS, words) for row in rows))
