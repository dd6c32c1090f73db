"""The runs of a sweep, by a count or a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.errors import UsageError
from imagefactory.jobs.make import LARGEST_ROWS, number_runs, parse_rows, read_rows


def test_rows_of_a_file_of_values(tmp_path: Path) -> None:
    path = tmp_path / "values.csv"
    path.write_text("lr, name\n0.1, a b\n\n0.01,c\n")
    assert read_rows(path) == (("run", "lr", "name"), (("0.1", "a b"), ("0.01", "c")))
    assert number_runs(3) == (("run",), ((), (), ()))
    path.write_text("lr\r\n0.1\r\n", encoding="utf-8-sig", newline="")  # as spreadsheets write it
    assert read_rows(path) == (("run", "lr"), (("0.1",),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "v.csv"),
        ("lr\n", "v.csv"),
        ("lr,seed\n1,2\n3\n", "v.csv:3: 1 values for 2 columns"),
        ('lr\n"1\n', "v.csv:2: "),
    ],
)
def test_files_of_values_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rows(text, "v.csv")
    assert caught.value.code == "sweep-values-invalid"
    assert message in caught.value.message


def test_what_cannot_be_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"lr\n" + b"1\n" * LARGEST_ROWS)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for source, code in (
        (0, "sweep-size-invalid"),
        (10001, "sweep-size-invalid"),
        (tmp_path / "none", "cannot-read-file"),
        (tmp_path / "big", "sweep-size-invalid"),
        (tmp_path / "binary", "sweep-values-invalid"),
    ):
        with pytest.raises(UsageError) as caught:
            number_runs(source) if isinstance(source, int) else read_rows(source)
        assert caught.value.code == code
