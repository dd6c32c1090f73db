"""A GPU report survives JSON whole, and nothing else does."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import HIDDEN, StatementError
from imagefactory.serialize import format_time, parse_value
from imagefactory.verify.outcome import clean
from imagefactory.verify.report import format_gpu_report, parse_gpu_report
from tests.made.errors import fails
from tests.made.verdicts import whole_report


def document(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(format_gpu_report(whole_report()))), **changes}


def test_a_report_survives_json() -> None:
    for report in (whole_report(), whole_report(hardware=None, device=None, cuda="")):
        assert parse_gpu_report(json.loads(json.dumps(format_gpu_report(report))), "x") == report


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"format": 2}, "format: "),
        ({"format": True}, "format"),
        ({"more": 1}, "'more'"),
        ({"suite": "sha256:" + "A" * 64}, "suite"),
        ({"suite": "sha256:" + "a" * 64 + "\n"}, "suite"),
        ({"level": "smoke"}, "level: "),
        ({"nonce": "short"}, "nonce"),
        ({"nonce": 5}, "nonce"),
        ({"started": "2026-11-22 03:00:00Z"}, "started"),
        ({"started": "2026-02-30T03:00:00Z"}, "started"),
        ({"started": "2027-01-01T00:00:00Z"}, "ended: "),
        ({"runner": "un share"}, "runner"),
        ({"device": {}}, "device: 'capability'"),
        ({"device": []}, "device: "),
        ({"cuda": "12"}, "cuda"),
        ({"checks": [1]}, "checks[0]: "),
        ({"checks": [document()["checks"][0]] * 2}, "json: checks: "),
        ({"checks": [{**document()["checks"][0], "seconds": -1}]}, "seconds: "),
        ({"checks": [{**document()["checks"][0], "seconds": float("nan")}]}, "seconds: "),
        ({"checks": [{**document()["checks"][0], "numbers": {"a": True}}]}, "numbers.a: "),
        ({"checks": [{**document()["checks"][0], "numbers": {str(n): 1 for n in range(300)}}]}, "numbers"),
        ({"checks": [{**document()["checks"][0], "state": "skipped"}]}, "state: "),
        ({"checks": [{**document()["checks"][0], "name": f"c{n}"} for n in range(300)]}, "256"),
        ({"outcome": "good"}, "outcome"),
        ({"outcome": ["verified"]}, "outcome"),
        ({"reason": "x" * 5000}, "reason: "),
        ({"reason": "two\nlines"}, "reason"),
        ({"reason": "\x1b[2J"}, "reason"),
        ({"reason": "a\u202eb"}, "reason"),
        ({"reason": "\ud800"}, "reason"),
        ({"waived": ["Jit"]}, "waived[0]"),
        ({"rehearsal": 0}, "rehearsal: "),
    ],
)
def test_what_is_refused_is_said_by_its_field(changes: dict[str, Any], value: str) -> None:
    with fails("document-invalid") as caught:
        parse_gpu_report(document(**changes), "result/report.json")
    assert value in caught.value.message
    assert caught.value.message.startswith("result/report.json")
    assert caught.value.message.isprintable()
    assert caught.value.hint


def test_a_stranger_s_field_name_reaches_no_terminal_as_it_is() -> None:
    with pytest.raises(StatementError) as caught:
        parse_gpu_report(document(**{"\x1b[31m\u202e" + "x" * 999: 1}), "x")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("field", list(document()))
def test_every_field_is_needed(field: str) -> None:
    value = document()
    del value[field]
    with fails("document-invalid") as caught:
        parse_gpu_report(value, "x")
    assert f"'{field}'" in caught.value.message


def test_times_are_utc_in_one_spelling() -> None:
    east = datetime(2026, 11, 22, 5, tzinfo=timezone(timedelta(hours=2)))
    assert format_time(east) == "2026-11-22T03:00:00Z"
    assert parse_value("2026-11-22T03:00:00.000001Z", datetime, "x") == datetime(
        2026, 11, 22, 3, 0, 0, 1, tzinfo=UTC
    )
    for text in (
        "2026-11-22T03:00:00+00:00",
        "2026-11-22T03:00:00.000000Z",
        "2026-11-22T03:00:00z",
        "",
        None,
    ):
        with pytest.raises(StatementError):
            parse_value(text, datetime, "x")


@given(st.text())
def test_what_smoke_cleans_can_be_reported(text: str) -> None:
    report = whole_report(reason=clean(text))
    assert parse_gpu_report(format_gpu_report(report), "x") == report


def test_hidden_characters_are_none_that_print() -> None:
    import re

    hidden = re.compile(f"[{HIDDEN}]")
    assert not any(chr(code).isprintable() for code in range(0x11000) if hidden.match(chr(code)))
