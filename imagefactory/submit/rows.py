"""The runs of a sweep: a count, or a CSV file of values, a line each."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.submit.submit_file import ROWS_MOST, RUN

LARGEST_ROWS = 1 << 20


def read_rows(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """`--dag`: a count, or the name of a CSV file whose first row names columns. As (columns, rows).

    The first column is `run`, which no row has. Raises UsageError, naming the line.
    """
    if text.isascii() and text.isdigit() and len(text) <= 9:
        count = int(text)
        if not 0 < count <= ROWS_MOST:
            raise UsageError(f"a sweep has 1 to {ROWS_MOST:,} runs, not {count:,}", hint="make several")
        return (RUN,), ((),) * count
    path = Path(text)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_ROWS + 1)
        said = data.decode("utf-8-sig")  # spreadsheets write a mark in front
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(
            f"--dag {text[:80]}: {why}", hint="write how many runs, or the name of a CSV file of values"
        ) from error
    if len(data) > LARGEST_ROWS:
        raise UsageError(f"{path} has more than {LARGEST_ROWS:,} bytes", hint="make several sweeps")
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
                    f"{where}:{reader.line_num}: {len(cells)} values for {len(columns)} columns",
                    hint=f"write one for each of {', '.join(columns)}",
                )
            else:
                rows.append(cells)
    except csv.Error as error:
        raise UsageError(f"{where}:{reader.line_num}: {error}", hint="write values with commas") from error
    if not rows:
        raise UsageError(
            f"{where}: no values", hint="name columns in the first line (lr,seed), then a line a run"
        )
    return (RUN, *columns), tuple(rows)
