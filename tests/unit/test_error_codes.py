"""Each error has a stable code in kebab-case, which belongs to one class of errors."""

from __future__ import annotations

import re
from pathlib import Path

from docs.error_codes import DIAGNOSTIC, error_classes, find_errors

SHARED = re.compile(r"cannot-[a-z]+-file")


def test_codes_are_kebab_case_and_each_belongs_to_one_class() -> None:
    calls = find_errors()
    assert len(calls) > 500
    codes = {call.code for call in calls}
    assert {code for code in codes if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)} == set()
    owners: dict[str, set[str]] = {}
    for call in calls:
        if not SHARED.fullmatch(call.code):
            owners.setdefault(call.code, set()).add(call.error)
    assert {code: names for code, names in owners.items() if len(names) > 1} == {}
    assert {call.error for call in calls} <= {*error_classes(), DIAGNOSTIC}


def test_every_form_of_a_call_is_read(tmp_path: Path) -> None:
    source = """
class ImagefactoryError(Exception): ...
class UsageError(ImagefactoryError): ...
class FixedError(UsageError):
    def __init__(self, name):
        super().__init__("fixed-code", f"{name} is fixed")
class PassingError(UsageError):
    def __init__(self, *texts):
        super().__init__(*texts)
def fail(path, error, many, one):
    UsageError("one-code", f"{path.name}: {', '.join(many)}, {len(one)} and {one!r}")
    errors.UsageError("other-code", "a" if one else "b", hint="c")
    UsageError(*os_problem("read", path, error))
    UsageError(error.code, f"again: {error.message}")
    FixedError(path)
    Diagnostic("recipe-code", one.location, f"'{one}' is wrong", "fix it")
    ImagefactoryError
    KeyError("no error of this package")
"""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/a.py").write_text(source)
    found = {(call.code, call.error, call.message) for call in find_errors(tmp_path / "package")}
    assert found == {
        ("fixed-code", "FixedError", "{name} is fixed"),
        ("one-code", "UsageError", "{name}: {many}, {one} and {one}"),
        ("other-code", "UsageError", "a"),
        ("cannot-read-file", "UsageError", "cannot read {path}: {reason}"),
        ("recipe-code", "Diagnostic", "'{one}' is wrong"),
    }
    assert {call.line for call in find_errors(tmp_path / "package")} == {6, 11, 12, 13, 16}
