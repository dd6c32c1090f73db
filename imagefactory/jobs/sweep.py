"""The runs of a sweep: a count, or the lines of a CSV file, and filled in by a shell."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator
from pathlib import Path

from imagefactory.errors import UsageError, os_problem
from imagefactory.jobs.spec import MACRO, ROWS_MOST, RUN, JobSpec

LARGEST_ROWS = 1 << 20
_WIDTH = 100
_HINT = "pass a CSV file of values: --params FILE"

Rows = tuple[tuple[str, ...], ...]


def number_runs(count: int | None) -> tuple[tuple[str, ...], Rows]:
    """Return the columns and rows of a sweep without values, none for None. Raises UsageError."""
    if count is None:
        return (), ()
    if not 0 < count <= ROWS_MOST:
        raise UsageError(
            "sweep-size-invalid",
            f"a sweep has 1 to {ROWS_MOST:,} runs, not {count:,}",
            hint="create several sweeps",
        )
    return (RUN,), ((),) * count


def read_rows(path: Path) -> tuple[tuple[str, ...], Rows]:
    """Return the columns and rows of a CSV file whose first row names columns.

    The first column is `run`, which rows do not have. Raises UsageError, which names the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_ROWS + 1)
        content = data.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise UsageError("sweep-values-invalid", f"{path} is not UTF-8 text", hint=_HINT) from error
    if len(data) > LARGEST_ROWS:
        raise UsageError(
            "sweep-size-invalid", f"{path} has more than {LARGEST_ROWS:,} bytes", hint="create several sweeps"
        )
    return parse_rows(content, path.name)


def parse_rows(text: str, where: str) -> tuple[tuple[str, ...], Rows]:
    """Return the columns and rows of a CSV file without its empty lines. Raises UsageError."""
    reader = csv.reader(io.StringIO(text), strict=True)
    rows: list[tuple[str, ...]] = []
    try:
        for row in reader:
            cells = tuple(cell.strip() for cell in row)
            if not any(cells):
                continue
            rows.append(cells)
            if len(cells) != len(rows[0]):
                raise UsageError(
                    "sweep-values-invalid",
                    f"{where}:{reader.line_num}: {len(cells)} values for {len(rows[0])} columns",
                    hint=f"write one value for each of {', '.join(rows[0])}",
                )
    except csv.Error as error:
        raise UsageError(
            "sweep-values-invalid", f"{where}:{reader.line_num}: {error}", hint="separate values by commas"
        ) from error
    if len(rows) < 2:
        raise UsageError(
            "sweep-values-invalid",
            f"{where} has no values",
            hint="write column names in the first line (lr,seed), then one line per run",
        )
    return (RUN, *rows[0]), tuple(rows[1:])


def value_arrays(spec: JobSpec) -> Iterator[str]:
    """Yield a shell array of the values of each column. Runs count from 1, so the first element is unused."""
    for column, name in enumerate(spec.columns[1:]):
        lines = ["   "]
        for row in spec.rows:
            word = shlex.quote(row[column])
            if len(lines[-1]) + len(word) + 1 > _WIDTH and lines[-1].strip():
                lines.append("   ")
            lines[-1] += f" {word}"
        yield "\n".join([f"value_{name}=(none", *lines, ")"])


def format_run_argument(word: str, spec: JobSpec, index: str) -> str:
    """Return an argument in which a shell fills in `$(run)` and columns; its variable `index` counts runs."""
    names = {name.lower(): name for name in spec.columns}
    parts, start = [], 0
    for macro in MACRO.finditer(word):
        name = names[macro[1].lower()]
        parts.append(shlex.quote(word[start : macro.start()]) if macro.start() > start else "")
        parts.append(f'"${index}"' if name == RUN else f'"${{value_{name}[{index}]}}"')
        start = macro.end()
    rest = word[start:]
    return "".join([*parts, shlex.quote(rest) if rest or not parts else ""])
