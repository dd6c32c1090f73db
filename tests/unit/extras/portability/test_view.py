"""Portability as a person reads it, in a terminal of 80 columns and as a page."""

from __future__ import annotations

import re

from imagefactory.extras.portability.report import PortableResult, sign_portable
from imagefactory.extras.portability.view import (
    format_page,
    format_portability,
    format_statements,
    status_of_check,
)
from imagefactory.model import CheckState
from imagefactory.trust.verdict import VerdictStatus
from tests.made.portable import make_portable, make_row
from tests.made.verdicts import LAB, MADE_UP, NOW, SUBJECT, digest

WRONG = "openvino on the cpu is off by 0.5 (at most 1e-04)"
DIFFERS = make_portable(
    rows=(
        *make_portable().rows[:-2],
        make_row(
            "net",
            "openvino-cpu",
            state=CheckState.FAILED,
            outcome="wrong-numbers",
            detail=WRONG,
            error=0.5,
            latencies=(),
        ),
        make_row("vae", "openvino-cpu", state=CheckState.FAILED, outcome="load-failed", detail="<it> died"),
    )
)


def test_a_row_for_each_model_and_runtime_in_80_columns() -> None:
    text = format_portability(make_portable(), 80)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines() if "-cpu" in line]
    assert [row[:4] for row in rows[:3]] == [
        ["net", "torch-cpu", "1.31.1", "reference"],
        ["onnxruntime-cpu", "1.31.1", "same", "1.5e-07"],
        ["openvino-cpu", "1.31.1", "same", "1.5e-07"],
    ]
    assert rows[0][-2:] == ["0.5/0.75", "2/2.5"]
    assert len(rows) == 6
    assert status_of_check(make_portable()) == "portable"


def test_what_differs_is_told_below() -> None:
    text = format_portability(DIFFERS)
    assert re.search(r"openvino-cpu +1\.31\.1 +DIFFERS +5\.0e-01 +1e-04", text)
    assert re.search(r"openvino-cpu +1\.31\.1 +FAILED", text)
    assert text.splitlines()[-2:] == [f"net by openvino-cpu: {WRONG}", "vae by openvino-cpu: <it> died"]
    assert status_of_check(DIFFERS) == "not portable"


def test_the_gpu_stands_with_its_driver() -> None:
    report = make_portable(gpus=(MADE_UP,), driver="550.54.15")
    assert "A GPU of the tests (8.0), driver 550.54.15" in format_portability(report)


def test_the_page_needs_no_other_file_and_escapes_what_it_shows() -> None:
    page = format_page(DIFFERS)
    assert "&lt;it&gt; died" in page
    assert "<it>" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "not portable" in page
    assert page.count("<figure") == 4  # two models, two sizes
    assert "image float32[2, 3, 8, 8]" in page


def test_statements_are_told_with_what_they_are_worth() -> None:
    made = sign_portable(make_portable(), LAB, now=NOW, days=90).statement
    judged = (
        PortableResult(
            digest=digest("9"), standing=VerdictStatus.GOOD, why="signed by 'lab'", statement=made
        ),
        PortableResult(
            digest=digest("8"), standing=VerdictStatus.MALFORMED, why="it is no JSON", statement=None
        ),
    )
    text = format_statements(judged, SUBJECT.manifest)
    assert "net, vae by onnxruntime-cpu, openvino-cpu; signed by 'lab'" in text
    assert "2027-02-20" in text
    assert "malformed" in text
    assert format_statements((), SUBJECT.manifest).startswith("no statement says")
