"""Tables in a terminal: what is dropped, folded and told line by line where there is no room."""

from __future__ import annotations

import pytest

from imagefactory.views.text import fold, format_fields, format_matrix, format_table

HEADER = ("NAME", "CUDA", "BASE", "WHY")
ROWS = (
    (
        "pytorch-2.3-cu121",
        "12.1",
        "debian-12",
        "it is what the recipe asks for, and nothing else says so here",
    ),
    ("jax-0.4.30-cu12", "12", "debian-12", "no"),
)


def test_a_table_is_whole_where_nobody_looks_or_there_is_room() -> None:
    whole = format_table(HEADER, ROWS)
    assert format_table(HEADER, ROWS, 200, ("BASE",)) == whole
    assert whole.splitlines()[0] == "NAME               CUDA  BASE       WHY"


@pytest.mark.parametrize("width", [120, 94, 93, 90, 84, 60, 50, 40, 30])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(width: int) -> None:
    for text in (
        format_table(HEADER, ROWS, width, ("BASE", "CUDA")),
        format_table(HEADER, ROWS, width),
        format_fields([("why", ROWS[0][-1]), ("base", "debian-12")], width=width + 10),
    ):
        assert max(map(len, text.splitlines())) <= width + 10
        assert " ".join(text.split()).count("nothing") == 1
    assert max(map(len, format_table(HEADER, ROWS, width).splitlines())) <= max(width, 44)


def test_columns_go_in_the_order_that_is_named_and_only_as_many_as_must() -> None:
    heads = [
        format_table(HEADER, ROWS, width, ("BASE", "CUDA")).splitlines()[0].split() for width in (66, 65, 54)
    ]
    assert heads == [["NAME", "CUDA", "BASE", "WHY"], ["NAME", "CUDA", "WHY"], ["NAME", "WHY"]]
    assert "columns omitted: BASE, CUDA (" in format_table(HEADER, ROWS, 54, ("BASE", "CUDA"))


def test_what_is_dropped_to_the_last_is_folded_beside_or_below() -> None:
    beside = format_table(HEADER, ROWS, 54, ("BASE", "CUDA")).splitlines()
    assert beside[1].startswith("pytorch-2.3-cu121  it is what")
    assert beside[2].startswith(" " * 19)
    for width, header in (
        (45, "NAME               CUDA  BASE"),
        (30, "NAME               CUDA"),
        (20, "NAME"),
    ):
        below = format_table(HEADER, ROWS, width, ("BASE", "CUDA")).splitlines()
        assert below[:2] == [header, "    WHY"]
        assert below[2].startswith("pytorch-2.3-cu121")


def test_where_no_column_fits_a_row_is_a_block() -> None:
    rows = [("a" * 20, "b" * 20, "c" * 20, "why")]
    assert format_table(HEADER, rows, 30).splitlines() == [
        "a" * 20,
        f"  CUDA  {'b' * 20}",
        f"  BASE  {'c' * 20}",
        "  WHY   why",
    ]


def test_a_matrix_unites_neighbours_that_are_alike_and_goes_on_below() -> None:
    header = ("LIBRARY", "7.0", "7.5", "8.0", "8.6")
    alike = [("lib.so", "N", "N", "N", "-"), ("other.so", "P", "P", "N", "-")]
    assert format_matrix(header, alike, None, keep=1) == format_table(header, alike)
    assert format_matrix(header, alike, 27, keep=1).splitlines()[0] == "LIBRARY   7.0-7.5  8.0  8.6"
    told = format_matrix(header, alike, 20, keep=1)
    assert [line for line in told.splitlines() if line.startswith("LIBRARY")] == [
        "LIBRARY   7.0-7.5",
        "LIBRARY   8.0  8.6",
    ]
    assert max(map(len, told.splitlines())) <= 20


def test_prose_is_folded_under_itself() -> None:
    assert fold(["[1] a page that says so", "short"], 14) == [
        "[1] a page",
        "    that says",
        "    so",
        "short",
    ]
    assert fold(["[1] a page that says so"], None) == ["[1] a page that says so"]
