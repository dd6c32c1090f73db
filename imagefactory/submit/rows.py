"""The runs of a sweep: a count, or a CSV file of values, a line each."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from imagefactory.errors import UsageError, os_problem
from imagefactory.jobs.htcondor import ROWS_MOST, RUN

LARGEST_ROWS = 1 << 20
_WRITE = "pass a number of runs or a CSV file of values: --dag N|FILE"


def read_rows(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """`--dag`: a count, or the name of a CSV file whose first row names columns. As (columns, rows).

    The first column is `run`, which no row has. Raises UsageError, naming the line.
    """
    if text.isascii() and text.isdigit() and len(text) <= 9:
        count = int(text)
        if not 0 < count <= ROWS_MOST:
            raise UsageError(
                "sweep-size-invalid",
                f"a sweep has 1 to {ROWS_MOST:,} runs, not {count:,}",
                hint="create several sweeps",
            )
        return (RUN,), ((),) * count
    path = Path(text)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_ROWS + 1)
        said = data.decode("utf-8-sig")  # spreadsheets write a mark in front
    except OSError as error:
        raise UsageError(*os_problem("read", text[:80], error), hint=_WRITE) from error
    except UnicodeDecodeError as error:
        raise UsageError("sweep-values-invalid", f"{path} is not UTF-8 text", hint=_WRITE) from error
    if len(data) > LARGEST_ROWS:
        raise UsageError(
            "sweep-size-invalid", f"{path} has more than {LARGEST_ROWS:,} bytes", hint="create several sweeps"
        )
    return parse_rows(said, path.name)


def parse_rows(text: str, where: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The rows of a CSV file of values. Empty lines are passed over."""
    reader = csv.reader(io.StringIO(text), strict=True)
    rows: list[tuple[str, ...]] = []
    columns: tuple[str, ...] = ()
    try:
        for row in reader:
            cells = tuple(cell.strip() for cell in row)
            if not any(cells):
                continue
            if not columns:
                columns = cells
            elif len(cells) != len(columns):
                raise UsageError(
                    "sweep-values-invalid",
                    f"{where}:{reader.line_num}: {len(cells)} values for {len(columns)} columns",
                    hint=f"write one value for each of {', '.join(columns)}",
                )
            else:
                rows.append(cells)
    except csv.Error as error:
        raise UsageError(
            "sweep-values-invalid", f"{where}:{reader.line_num}: {error}", hint="separate values by commas"
        ) from error
    if not rows:
        raise UsageError(
            "sweep-values-invalid",
            f"{where} has no values",
            hint="write column names in the first line (lr,seed), then one line per run",
        )
    return (RUN, *columns), tuple(rows)
