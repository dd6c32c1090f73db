"""The documents that a test prints: each must match the JSON Schema of its format."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from docs.json_schemas import document_types, schema_of
from imagefactory.cli import output


@functools.cache
def validator(document_format: str) -> Draft202012Validator:
    schema = schema_of(document_format, strict=True)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def document_faults(document: Any) -> list[str]:
    """Return where a document differs from its schema."""
    name = document.get("format", "no format") if isinstance(document, dict) else "no object"
    if name not in document_types():
        return [f"{name}: without a schema"]
    return [f"{name}: {error.json_path}: {error.message}" for error in validator(name).iter_errors(document)]


def part_faults(document_format: str, part: str, value: Any) -> list[str]:
    """Return where an object in a document differs from its part of the schema."""
    schema = {"$ref": f"#/$defs/{part}", "$defs": validator(document_format).schema["$defs"]}
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


def check_printed(text: str) -> None:
    """Check the output of another process: if it is one of our documents, it matches its schema."""
    if text.startswith('{\n  "format": "imagefactory.'):
        assert document_faults(json.loads(text)) == []


@pytest.fixture(autouse=True)
def documents_match_their_schemas() -> Iterator[None]:
    """Validate all documents that the command prints in this process."""
    faults: list[str] = []
    print_document = output.print_json_document

    def check(text: str) -> None:
        document = json.loads(text)
        if not {"bomFormat", "spdxVersion"} & {*document}:  # a bill of materials has a schema of others
            faults.extend(document_faults(document))
        print_document(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "print_json_document", check)
        yield
    assert faults == []
