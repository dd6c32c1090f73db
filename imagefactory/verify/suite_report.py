"""Reading what an image wrote: bytes of a stranger, taken by a strict parser and shown without surprises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from imagefactory.serialize import LARGEST_NUMBER, Among, AnyText, Fields, Fixed, Most, Pairs, Within, parse_json
from imagefactory.errors import StatementError
from imagefactory.model import CheckResult, CheckState, Completed
from imagefactory.suite import table
from imagefactory.trees import read_file

LARGEST_REPORT = 1 << 20
LONGEST_DETAIL = 2000


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


def parse_fields(data: bytes, fields: Fields) -> dict[str, Any]:
    """Return the one JSON object that a report is. Raises ReportFault unless it has exactly these fields."""
    try:
        return fields.parse(parse_json(data), "its report")
    except ValueError as error:
        raise ReportFault("its report is not JSON") from error
    except StatementError as error:
        raise ReportFault(error.message) from error


def checks_kind(names: Iterable[str], outcomes: Iterable[str], most: int = LARGEST_REPORT) -> Any:
    """Return the type of a report's checks, for `Fields`.

    `names` are the suite's checks, `outcomes` its labels for a failure. A check has at most `most` numbers.
    """
    row = Fields(
        name=Annotated[str, Among(tuple(names))],
        state=CheckState,
        detail=AnyText,
        outcome=Annotated[str, Among(("", *outcomes))],
        seconds=Annotated[float, Within(0, LARGEST_NUMBER)],
        numbers=Annotated[tuple[tuple[AnyText, float], ...], Pairs(), Most(most)],
    )
    return Annotated[tuple[Annotated[object, row], ...], Most(LARGEST_REPORT)]


def clean_check(row: Mapping[str, Any]) -> SuiteCheck:
    """Return a check of `checks_kind` with printable texts."""
    numbers = {clean(name): value for name, value in row["numbers"]}
    return SuiteCheck(
        result=CheckResult(
            name=row["name"],
            state=row["state"],
            detail=clean(row["detail"]),
            seconds=row["seconds"],
            numbers=tuple(sorted(numbers.items())),
        ),
        outcome=row["outcome"],
    )


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


_FIELDS = Fields(
    format=Annotated[int, Fixed(table.FORMAT)],
    nonce=object,
    target=object,
    python=object,
    running=Annotated[str, Among(("", *table.CHECKS))],
    checks=checks_kind(table.CHECKS, (table.LOAD_FAILED, table.WRONG_NUMBERS)),
)


def parse_smoke_report(data: bytes, nonce: str) -> SmokeReport:
    """Raises ReportFault for anything but a report of this suite's format with this nonce."""
    found = parse_fields(data, _FIELDS)
    if found["nonce"] != nonce:
        raise ReportFault("its report does not bring back the nonce of this run")
    return SmokeReport(running=found["running"], rows=tuple(map(clean_check, found["checks"])))
