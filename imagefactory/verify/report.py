"""A GPU report as JSON and back: what `verify` writes, what a kit's result becomes, what a verdict signs.

The parser takes exactly what the formatter gives, and refuses what the report's own fields contradict. The
shapes stand in verdict.schema.json too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from imagefactory.serialize import Most, Within, fault, format_document, parse_document
from imagefactory.model import Completed
from imagefactory.verify.model import GpuReport

FORMAT = 1


def format_gpu_report(report: GpuReport) -> dict[str, Any]:
    """The report as JSON; `format` is its version. Tuples are lists, numbers of a check a flat object."""
    return format_document(report, FORMAT)


def parse_gpu_report(value: object, where: str) -> GpuReport:
    """The report that `format_gpu_report` made this of. `where` is what messages begin with.

    Raises StatementError for anything else: a missing or further field, a value of another kind, a text with
    characters that steer a terminal, a check twice, an end before its start.
    """
    report = parse_document(value, GpuReport, FORMAT, where)
    assert isinstance(report, GpuReport)
    names = [check.name for check in report.checks]
    if len(set(names)) != len(names):
        raise fault(f"{where}: checks", "it has a duplicate check")
    if report.ended < report.started:
        raise fault(f"{where}: ended", "it is before the start")
    return report


def end_of(longest: float) -> Mapping[str, Any]:
    """The fields of run.json that say how a suite's process ended, within `longest` seconds."""
    return {
        "returncode": Annotated[int, Within(0, 255)],
        "timed_out": bool,
        "seconds": Annotated[float, Within(0, longest)],
        "said": Annotated[tuple[str, ...], Most(10)],
    }


def completed_of(row: Mapping[str, Any]) -> Completed:
    """How the process ended, of such fields: its code, its seconds, its last lines."""
    return Completed(
        returncode=row["returncode"],
        stdout="\n".join(row["said"]),
        stderr="",
        seconds=row["seconds"],
        timed_out=row["timed_out"],
    )
