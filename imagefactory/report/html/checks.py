"""What checks measured, by GPU: the numbers of one image, and one check across versions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from imagefactory.model import CheckResult, CheckState
from imagefactory.extras.site.charts import Chart, Measure, column_chart, row_chart
from imagefactory.extras.site.images import ReportImage
from imagefactory.suite.gpu.table import CHECKS
from imagefactory.trust.verdict import Standing, Verdict
from imagefactory.versions import natural

_LATENCY = re.compile(r"(?P<what>.+)-p50-ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """The newest verdict of an image on one kind of GPU that can be relied on."""

    gpu: str
    capability: str
    verdict: Verdict
    by_name: Mapping[str, CheckResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """One framework on one kind of GPU: runs by version, oldest first, each with the image's target.

    `checks` are the names of those that ran in any of them; `charts` show how long each took.
    """

    gpu: str
    framework: str
    checks: tuple[str, ...]
    runs: tuple[tuple[ReportImage, GpuRun], ...]
    charts: tuple[Chart, ...]


def runs_of(image: ReportImage) -> tuple[GpuRun, ...]:
    """The newest good verdict of the image itself, or of a .sif of it, on each kind of GPU."""
    own = _own(image)
    found: dict[tuple[str, str], GpuRun] = {}
    for subject, judged in image.history:  # the newest first
        verdict = judged.verdict
        if judged.standing is not Standing.GOOD or verdict is None or subject.manifest not in own:
            continue
        device = verdict.report.device
        if device is not None:
            run = GpuRun(
                gpu=device.name,
                capability=device.capability,
                verdict=verdict,
                by_name={check.name: check for check in verdict.report.checks},
            )
            found.setdefault((device.capability, device.name), run)
    return tuple(found[key] for key in sorted(found, key=lambda key: (natural(key[0]), key[1])))


def _own(image: ReportImage) -> frozenset[str]:
    if image.offer is None:
        return frozenset()
    return frozenset(
        {image.offer.image.subject.manifest, *(one.sif.subject.manifest for one in image.offer.sifs)}
    )


def check_names(runs: Iterable[GpuRun]) -> tuple[str, ...]:
    """The checks of these runs in the suite's order, those of another suite behind."""
    found = dict.fromkeys(check.name for run in runs for check in run.verdict.report.checks)
    order = {name: number for number, name in enumerate(CHECKS)}
    return tuple(sorted(found, key=lambda name: order.get(name, len(order))))


def timing_chart(run: GpuRun) -> Chart:
    """How long each check took."""
    return row_chart(f"Seconds of each check on {run.gpu}", [_timing(one) for one in _ran(run)])


def latency_chart(run: GpuRun) -> Chart | None:
    """How long each model took, in its framework and in another runtime; thin: the 95th percentile."""
    measures = [
        Measure(
            label=match["what"],
            value=number,
            unit="ms",
            upper=numbers.get(f"{match['what']}-p95-ms", 0.0),
            bad=check.state is CheckState.FAILED,
        )
        for check in _ran(run)
        for numbers in (dict(check.numbers),)
        for name, number in check.numbers
        if (match := _LATENCY.fullmatch(name)) and number >= 0
    ]
    return row_chart(f"Latency on {run.gpu}, median and 95th percentile", measures) if measures else None


def effects_on(rows: Sequence[tuple[ReportImage, Sequence[GpuRun]]], capability: str) -> tuple[Effects, ...]:
    """The same checks across versions, for each framework on each kind of GPU of a capability."""
    groups: dict[tuple[str, str], list[tuple[ReportImage, GpuRun]]] = {}
    for image, runs in rows:
        for run in runs:
            if run.capability == capability:
                groups.setdefault((image.framework, run.gpu), []).append((image, run))
    return tuple(
        _effects(
            framework, gpu, sorted(rows, key=lambda row: (natural(row[0].version), natural(row[0].cuda)))
        )
        for (framework, gpu), rows in sorted(groups.items())
    )


def _effects(framework: str, gpu: str, rows: Sequence[tuple[ReportImage, GpuRun]]) -> Effects:
    names = check_names(run for _, run in rows)
    charts = [
        column_chart(name, measures)
        for name in names
        if len(rows) > 1 and (measures := [_across(image, run, name) for image, run in rows])
    ]
    return Effects(gpu=gpu, framework=framework, checks=names, runs=tuple(rows), charts=tuple(charts))


def _across(image: ReportImage, run: GpuRun, name: str) -> Measure:
    check = run.by_name.get(name)
    if check is None or check.state in (CheckState.NOT_APPLICABLE, CheckState.NOT_RUN):
        state = check.state.value if check else "not asked"
        return Measure(label=image.target, value=0.0, note=state)
    return _timing(check, label=image.target)


def _timing(check: CheckResult, label: str = "") -> Measure:
    failed = check.state is CheckState.FAILED
    return Measure(
        label=label or check.name,
        value=max(check.seconds, 0.0),
        note="failed" if failed else "",
        bad=failed,
    )


def _ran(run: GpuRun) -> list[CheckResult]:
    return [
        check
        for check in run.verdict.report.checks
        if check.state not in (CheckState.NOT_APPLICABLE, CheckState.NOT_RUN)
    ]
