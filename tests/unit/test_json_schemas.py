"""Every document that imagefactory prints or writes has a type, and its JSON Schema is valid."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from docs.json_schemas import document_types
from tests.made.documents import document_faults, validator
from tests.made.source import HOUSE


def test_every_printed_format_has_a_type() -> None:
    texts = (
        path.read_text(encoding="utf-8")
        for room in ("cli", "views", "extras")
        for path in (HOUSE / room).rglob("*.py")
    )
    printed = {
        name
        for text in texts
        for name in re.findall(r'(?:"format": |\bformat=)"(imagefactory\.[a-z-]+/\d+)"', text)
    }
    assert len(printed) > 30
    assert printed - {*document_types()} == set()


@pytest.mark.parametrize("document_format", document_types())
def test_every_schema_is_valid_and_strict_in_tests(document_format: str) -> None:
    assert validator(document_format).schema["properties"]["format"] == {"const": document_format}
    assert document_faults({"format": document_format, "no-such-key": 1}) != []


@pytest.mark.parametrize("document_format", document_types())
def test_no_key_of_a_document_may_have_any_value(document_format: str) -> None:
    assert [*_open_keys(validator(document_format).schema, "")] == []


def _open_keys(schema: object, path: str) -> Iterator[str]:
    if isinstance(schema, list | dict):
        rows = schema.items() if isinstance(schema, dict) else enumerate(schema)
        for name, row in rows:
            yield from _open_keys(row, f"{path}/{name}")
    if isinstance(schema, dict) and not {*schema} - {"description"}:
        yield path


def test_what_has_no_schema_is_a_fault() -> None:
    assert document_faults({"format": "imagefactory.nothing/1"}) != []
    assert document_faults({}) != []
    assert document_faults([]) != []
