"""Frozen values as JSON and back: everything that can be said comes back, and nothing else is taken."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import StatementError
from imagefactory.serialize import (
    HIDDEN,
    LARGEST_COUNT,
    Choices,
    Constant,
    Count,
    MaxRows,
    NumberRange,
    ObjectSchema,
    PairsAsObject,
    Pattern,
    TupleAsObject,
    format_document,
    format_value,
    parse_document,
    parse_json,
    parse_value,
    plain,
)
from tests.made.errors import fails


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    text: str
    word: Annotated[str, Pattern(re.compile("[a-z]+"), empty=True)]
    colour: Colour
    flag: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    made: datetime
    life: timedelta
    size: Count
    share: Annotated[float, NumberRange(0, 1)]
    level: Annotated[str, Choices(("quick", "full"))]
    best: Leaf | None
    leaves: Annotated[tuple[Leaf, ...], MaxRows(3)]
    numbers: Annotated[tuple[tuple[str, float], ...], PairsAsObject()]
    notes: tuple[Annotated[tuple[str, int], TupleAsObject(("name", "count"))], ...]
    pair: tuple[str, bool]


LINES = st.text(st.characters(exclude_categories=("Cs",)), max_size=20).filter(
    lambda text: not re.search(f"[{HIDDEN}]", text)
)
LEAVES = st.builds(
    Leaf,
    text=LINES,
    word=st.sampled_from(("", "a", "word")),
    colour=st.sampled_from(Colour),
    flag=st.booleans(),
)
TREES = st.builds(
    Tree,
    made=st.datetimes(min_value=datetime(1000, 1, 1), timezones=st.just(UTC)),
    life=st.integers(0, 10**9).map(lambda seconds: timedelta(seconds=seconds)),
    size=st.integers(0, LARGEST_COUNT),
    share=st.floats(0, 1),
    level=st.sampled_from(("quick", "full")),
    best=st.none() | LEAVES,
    leaves=st.lists(LEAVES, max_size=3).map(tuple),
    numbers=st.dictionaries(LINES, st.floats(-1e300, 1e300), max_size=3).map(
        lambda numbers: tuple(sorted(numbers.items()))
    ),
    notes=st.lists(st.tuples(LINES, st.integers(-LARGEST_COUNT, LARGEST_COUNT)), max_size=2).map(tuple),
    pair=st.tuples(LINES, st.booleans()),
)
TREE = Tree(
    made=datetime(2026, 11, 22, 3, tzinfo=UTC),
    life=timedelta(seconds=90),
    size=4,
    share=0.5,
    level="full",
    best=None,
    leaves=(Leaf(text="Ä, long", word="", colour=Colour.BLUE, flag=True),),
    numbers=(("a", 1.0),),
    notes=(("n", -1),),
    pair=("x", False),
)
WRITTEN = {
    "made": "2026-11-22T03:00:00Z",
    "life": 90.0,
    "size": 4,
    "share": 0.5,
    "level": "full",
    "best": None,
    "leaves": [{"text": "Ä, long", "word": "", "colour": "blue", "flag": True}],
    "numbers": {"a": 1.0},
    "notes": [{"name": "n", "count": -1}],
    "pair": ["x", False],
}


@given(TREES)
def test_what_is_written_is_read_again(tree: Tree) -> None:
    assert parse_value(json.loads(json.dumps(format_value(tree))), Tree, "tree") == tree


def test_how_values_are_spelt() -> None:
    assert format_value(TREE) == WRITTEN
    assert list(format_value(TREE)) == list(WRITTEN)  # in the order in which the fields stand
    assert format_value((TREE.leaves[0],), tuple[Leaf, ...]) == WRITTEN["leaves"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"made": "2026-11-22"}, "tree: made: expected a time such as 2026-01-31T12:00:00Z"),
        ({"life": -1}, "tree: life: expected a number from 0 to 1e+10"),
        ({"life": "90"}, "tree: life: expected a number"),
        ({"size": True}, "tree: size: expected an integer"),
        ({"size": 1.5}, "tree: size: expected an integer"),
        ({"size": -1}, "tree: size: expected a number from 0 to 9.0072e+15"),
        ({"size": LARGEST_COUNT + 1}, "tree: size: expected a number from 0 to 9.0072e+15"),
        ({"share": float("nan")}, "tree: share: expected a number"),
        ({"share": 2}, "tree: share: expected a number from 0 to 1"),
        ({"level": "fast"}, "tree: level: expected one of quick, full"),
        ({"best": {}}, "tree: best: 'colour' is missing"),
        ({"leaves": {}}, "tree: leaves: expected a list of at most 3 values"),
        ({"leaves": [WRITTEN["leaves"][0]] * 4}, "tree: leaves: expected a list of at most 3 values"),
        ({"leaves": [7]}, r"tree: leaves[0]: expected an object"),
        (
            {"leaves": [{**WRITTEN["leaves"][0], "word": "A"}]},
            "tree: leaves[0].word: the value has an invalid format",
        ),
        (
            {"leaves": [{**WRITTEN["leaves"][0], "colour": "green"}]},
            "tree: leaves[0].colour: expected one of red, blue",
        ),
        (
            {"leaves": [{**WRITTEN["leaves"][0], "flag": 1}]},
            "tree: leaves[0].flag: expected true or false",
        ),
        (
            {"leaves": [{**WRITTEN["leaves"][0], "text": "\x1b[2J"}]},
            "tree: leaves[0].text: expected one printable line of at most 4096 characters",
        ),
        ({"numbers": {"a": "1"}}, "tree: numbers.a: expected a number"),
        ({"numbers": [["a", 1]]}, "tree: numbers: expected an object of at most 256 fields"),
        ({"notes": [{"name": "n"}]}, "tree: notes[0]: 'count' is missing"),
        ({"notes": [{"name": "n"}] * 257}, "tree: notes: expected a list of at most 256 values"),
        ({"pair": ["x"]}, "tree: pair: expected a list of 2 values"),
        ({"more\x1b": 1}, "tree: 'more?' is not a known field"),
    ],
)
def test_what_is_refused_is_said_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StatementError) as caught:
        parse_value({**WRITTEN, **changes}, Tree, "tree")
    assert caught.value.message == message
    assert caught.value.hint


@pytest.mark.parametrize("name", list(WRITTEN))
def test_every_field_is_needed(name: str) -> None:
    with fails("document-invalid", f"'{name}' is missing"):
        parse_value({key: value for key, value in WRITTEN.items() if key != name}, Tree, "tree")


def test_a_document_has_the_version_of_its_form() -> None:
    written = format_document(TREE, 2)
    assert written == {"format": 2, **WRITTEN}
    assert parse_document(written, Tree, 2, "tree") == TREE
    for version in (1, 2.0, True, "2"):
        with fails("document-invalid", r"format: .* 2"):
            parse_document({**written, "format": version}, Tree, 2, "tree")
    for other in (WRITTEN, [], None):
        with fails("document-invalid", "'format'"):
            parse_document(other, Tree, 2, "tree")


def test_fields_that_become_no_value_of_their_own() -> None:
    inner = ObjectSchema(size=Count)
    outer = ObjectSchema(
        form=Annotated[int, Constant(1)], any=object, inner=tuple[Annotated[object, inner], ...]
    )
    assert outer.parse({"form": 1, "any": [None], "inner": [{"size": 3}]}, "x") == {
        "form": 1,
        "any": [None],
        "inner": ({"size": 3},),
    }
    with fails("document-invalid", r"^x: inner\[0\]\.size: "):
        outer.parse({"form": 1, "any": 0, "inner": [{"size": "3"}]}, "x")


@dataclass(frozen=True, slots=True)
class Spoken:
    major: int

    def __str__(self) -> str:
        return f"{self.major}.0"


def test_output_is_written_from_values_of_any_kind() -> None:
    value = {
        "leaves": TREE.leaves,
        "at": TREE.made,
        "day": TREE.made.date(),
        "path": Path("/a"),
        "is": Spoken(8),
    }
    assert json.loads(json.dumps(value, default=plain)) == {
        "leaves": WRITTEN["leaves"],
        "at": "2026-11-22T03:00:00Z",
        "day": "2026-11-22",
        "path": "/a",
        "is": "8.0",
    }
    with pytest.raises(TypeError, match="set"):
        json.dumps({1}, default=plain)


def test_a_kind_that_has_no_json_is_a_fault_of_the_program() -> None:
    with pytest.raises(TypeError, match="set"):
        format_value({1}, set)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 65 + "]" * 65,
        "[" * 1_000_000,
        '{"a":' * 65 + "1" + "}" * 65,
        '"' + '\\"' * 100_000,
        "{",
        b"\xff",
        b"",
    ],
)
def test_json_of_a_stranger_is_read_to_a_depth(text: bytes | str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of json, of UTF-8 or of the depth
        parse_json(text)


def test_brackets_in_texts_are_no_depth() -> None:
    value = {"a\\": "[" * 100 + '\\"{' * 100, "b": [[]] * 100}
    assert parse_json(json.dumps(value)) == value
    assert parse_json(b"[" * 64 + b"]" * 64)
