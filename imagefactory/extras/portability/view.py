"""Portability as text and as a page: error and latency of each model in each runtime. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from imagefactory.extras.portability.report import Latency, PortableReport, PortableResult, PortableRow
from imagefactory.model import CheckState
from imagefactory.progress import format_bytes
from imagefactory.serialize import format_time
from imagefactory.views.charts import BarChart, ChartMeasure, fill, policy, row_chart
from imagefactory.views.text import format_fields, format_table

LABELS = {CheckState.PASSED: "same", CheckState.FAILED: "DIFFERS", CheckState.NOT_RUN: "not run"}
REFERENCE = "reference"
"""The result of the model in its framework on the CPU. Other results are compared with it."""
PORTABLE, NOT_PORTABLE = "portable", "not portable"


def format_portability(report: PortableReport, width: int | None = None) -> str:
    """Return a row for each model and runtime, then the failures."""
    batches = batches_of(report)
    header = (
        "MODEL",
        "BY",
        "VERSION",
        "RESULT",
        "OFF BY",
        "AT MOST",
        *(f"BATCH {batch}" for batch in batches),
    )
    most = {model.name: model.tolerance for model in report.models}
    rows, last = [], ""
    for row in report.rows_by_model:
        off = "" if row.error is None or result_text(report, row) == REFERENCE else f"{row.error:.1e}"
        bound = f"{most[row.model]:.0e}" if off else ""
        named = row.model if row.model != last else ""
        times = (format_latency(row, batch) for batch in batches)
        rows.append((named, row.by, row.version, result_text(report, row), off, bound, *times))
        last = row.model
    blocks = [format_table(header, rows, width, drop=("VERSION", "AT MOST", "OFF BY"))]
    if batches:
        blocks[0] += "\n\nmilliseconds of one pass: median/95th percentile"
    wrong = [f"{row.model} by {row.by}: {row.detail}" for row in report.rows if row.detail]
    if wrong:
        blocks.append("\n".join(wrong))
    return "\n\n".join((exported_where(report), *blocks))


def exported_where(report: PortableReport) -> str:
    """Return the image that exported, and the machine."""
    gpus = "".join(f", {gpu.name} ({gpu.capability}), driver {report.driver}" for gpu in report.gpus[:1])
    return (
        f"{report.subject.target}  on {report.processor}, {report.threads} threads{gpus}, by {report.runner}"
    )


def result_text(report: PortableReport, row: PortableRow) -> str:
    """Return `same`, `DIFFERS`, `FAILED` (no result), `not run` or `reference`."""
    if row.state is CheckState.FAILED and not row.outcome.startswith("wrong"):
        return "FAILED"
    tested_names = {(model.name, f"{model.framework}-cpu") for model in report.models}
    return (
        REFERENCE
        if row.state is CheckState.PASSED and (row.model, row.by) in tested_names
        else LABELS[row.state]
    )


def batches_of(report: PortableReport) -> tuple[int, ...]:
    return tuple(sorted({latency.batch for row in report.rows for latency in row.latencies}))


def latency_of(row: PortableRow, batch: int) -> Latency | None:
    return next((latency for latency in row.latencies if latency.batch == batch), None)


def format_latency(row: PortableRow, batch: int) -> str:
    latency = latency_of(row, batch)
    return f"{_short(latency.p50)}/{_short(latency.p95)}" if latency else ""


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.2g}" if milliseconds < 10 else f"{milliseconds:.0f}"


def status_of_check(report: PortableReport) -> str:
    return PORTABLE if report.portable else NOT_PORTABLE


def format_files(report: PortableReport) -> list[tuple[str, str]]:
    """Return the files of the models as fields."""
    return [
        (
            "model",
            f"{model.name}.onnx  {format_bytes(model.size)}, operator set {model.opset}, {model.digest}",
        )
        for model in report.models
        if model.digest
    ]


def format_statements(judged: Sequence[PortableResult], manifest: str, width: int | None = None) -> str:
    """Return a row for each signed statement of an image."""
    if not judged:
        return f"no statement says that models of {manifest} are portable"
    rows = []
    for result in judged:
        statement = result.statement
        names = ", ".join(model.name for model in statement.report.models) if statement else ""
        runtimes = ", ".join(served.by for served in statement.report.served) if statement else ""
        until = format_time(statement.expires)[:10] if statement else ""
        rows.append(
            (result.digest[7:19], result.standing.value, until, f"{names} by {runtimes}; {result.why}")
        )
    return format_table(("STATEMENT", "STATUS", "VALID UNTIL", "MODELS"), rows, width)


def fields_of(pairs: Iterable[tuple[str, str]]) -> str:
    return format_fields(list(pairs), indent="")


# --- The page of a portability report, one self-contained file. Pure


TEMPLATES, PAGE = Path(__file__).parent / "templates", "portability.html"


def format_page(report: PortableReport) -> str:
    return fill(
        TEMPLATES,
        PAGE,
        words=(),
        kinds=(),
        policy=policy(),
        report=report,
        word=status_of_check(report),
        location=exported_where(report),
        rows=[(row, result_text(report, row)) for row in report.rows_by_model],
        tolerances={model.name: model.tolerance for model in report.models},
        batches=batches_of(report),
        latency_of=latency_of,
        charts=charts_of(report),
    )


def charts_of(report: PortableReport) -> tuple[BarChart, ...]:
    """Return a chart of latencies by runtime for each model and batch size.

    Thin bars show the 95th percentile.
    """
    charts = []
    for model in report.models:
        for batch in batches_of(report):
            measures = [
                ChartMeasure(
                    label=row.by,
                    value=latency.p50,
                    unit="ms",
                    upper=latency.p95,
                    bad=row.state is CheckState.FAILED,
                )
                for row in report.rows
                if row.model == model.name and (latency := latency_of(row, batch))
            ]
            if measures:
                charts.append(row_chart(f"{model.name}, batch {batch}: milliseconds of one pass", measures))
    return tuple(charts)
