"""Public reports of what ran on which GPU, asked of the tables as `compat torch==2.6 --gpu NAME` asks them.

No answer may be wrong: what ran is not answered with no, what failed not with yes. Where nothing is known,
that is the answer; how often is printed, and may not become more.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import Cell, Compatibility
from imagefactory.matrix.compat import RUNS, CompatGpu, cell, exact_releases, for_maker, severe_rules

REPORTS = tomllib.loads(Path(__file__).with_name("reports.toml").read_text(encoding="utf-8"))["report"]
UNKNOWN_AT_MOST = 0.216
"""Of the tables alone. Most of these are packages that `compat` looks up on the package index."""


def cells_of(report: dict[str, str]) -> list[Cell]:
    """The answers for each CUDA that the release is known for, where the report names none."""
    gpu = CompatGpu(
        name=report["gpu"],
        capability=parse_capability(report["capability"]),
        driver=report["driver"],
        host=report.get("platform", ""),
    )
    if re.search("rc[0-9]", report["release"]):
        return []  # it is looked up on the package index
    releases = for_maker(exact_releases(report["release"], report["cuda"]), gpu)
    return [cell(candidate, gpu) for candidate in releases]


def answered(report: dict[str, str]) -> str:
    """`right`, `half`, `unknown` or `wrong`, as the best that is said of any build that was perhaps meant.

    Half: it says that some of it runs, and all did or nothing.
    """
    cells = cells_of(report)
    answers = {cell.answer for cell in cells}
    doubted = any(severe_rules(cell) for cell in cells)
    right = {
        "runs": bool(answers & {*RUNS}),
        "fails": Compatibility.NO in answers,
        "partly": doubted or Compatibility.PARTLY in answers,
    }
    half = {
        "runs": Compatibility.PARTLY in answers,
        "fails": doubted or Compatibility.PARTLY in answers,
        "partly": bool(answers & {*RUNS}),
    }
    if right[report["happened"]]:
        return "right"
    if half[report["happened"]]:
        return "half"
    return "unknown" if not cells or Compatibility.UNKNOWN in answers else "wrong"


def marked(report: dict[str, str]) -> object:
    known = [pytest.mark.xfail(reason=report["wrong"], strict=True)] if "wrong" in report else []
    return pytest.param(report, id=f"{report['release']} on {report['gpu']}", marks=known)


@pytest.mark.parametrize("report", [marked(report) for report in REPORTS])
def test_no_answer_is_wrong(report: dict[str, str]) -> None:
    said = "; ".join(f"{cell.answer}: {cell.claims[0].reason}" for cell in cells_of(report) if cell.claims)
    assert answered(report) != "wrong", f"{report['from']} {report['happened']} ({report['what']}): {said}"


def test_most_reports_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counter(map(answered, REPORTS))
    share = counts["unknown"] / len(REPORTS)
    told = f"{counts['right']} right, {counts['half']} half, {share:.0%} unknown"
    with capsys.disabled():
        print(f"\n{len(REPORTS)} public reports: {told}")
    assert len(REPORTS) >= 60
    assert share <= UNKNOWN_AT_MOST
