"""The page of a portability report, one file that needs no other. Pure."""

from __future__ import annotations

from imagefactory.model import CheckState
from imagefactory.extras.site.charts import Chart, Measure, row_chart
from imagefactory.report.html.templating import fill, policy
from imagefactory.report.html.words import STYLED
from imagefactory.extras.portability.view import batches_of, latency_of, says, where, word_of
from imagefactory.extras.portability.report import PortableReport

PAGE = "portability.html"


def format_page(report: PortableReport) -> str:
    return fill(
        PAGE,
        **STYLED,
        policy=policy(),
        report=report,
        word=word_of(report),
        where=where(report),
        rows=[(row, says(report, row)) for row in report.rows_by_model],
        tolerances={model.name: model.tolerance for model in report.models},
        batches=batches_of(report),
        latency_of=latency_of,
        charts=charts_of(report),
    )


def charts_of(report: PortableReport) -> tuple[Chart, ...]:
    """For each model and size of batch how long a pass takes, by whom; thin: the 95th percentile."""
    charts = []
    for model in report.models:
        for batch in batches_of(report):
            measures = [
                Measure(
                    label=row.by,
                    value=one.p50,
                    unit="ms",
                    upper=one.p95,
                    bad=row.state is CheckState.FAILED,
                )
                for row in report.rows
                if row.model == model.name and (one := latency_of(row, batch))
            ]
            if measures:
                charts.append(row_chart(f"{model.name}, batch {batch}: milliseconds of one pass", measures))
    return tuple(charts)
