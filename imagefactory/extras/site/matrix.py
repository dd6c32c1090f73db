"""The matrix: a row for each image, a column for each compute capability, a status in each cell.

Pure functions.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from imagefactory.extras.site.action import ReportContents
from imagefactory.extras.site.images import ReportImage
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.knowledge.gpus import amd_gpus, gpus
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.matrix.combos import REPORTED, REVOKED, VERIFIED, ComboCell, ComboState
from imagefactory.model import CheckResult, CheckState, Outcome
from imagefactory.suite.gpu.table import CHECKS
from imagefactory.trust.verdict import Verdict, VerdictStatus
from imagefactory.versions import natural
from imagefactory.views.charts import BarChart, ChartMeasure, column_chart, row_chart

# --- Measurements of checks by GPU: of one image, and of one check across versions. Pure


_LATENCY = re.compile(r"(?P<what>.+)-p50-ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRunSummary:
    """The newest valid verdict of an image on one type of GPU."""

    gpu: str
    capability: str
    verdict: Verdict
    by_name: Mapping[str, CheckResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRates:
    """The results of one framework on one type of GPU: runs by version, the oldest first, each with its
    image.

    `checks` are the names of the checks that ran. `charts` show how long each check took.
    """

    gpu: str
    framework: str
    checks: tuple[str, ...]
    runs: tuple[tuple[ReportImage, GpuRunSummary], ...]
    charts: tuple[BarChart, ...]


def runs_of(image: ReportImage) -> tuple[GpuRunSummary, ...]:
    """Return the newest valid verdict of the image, or of its .sif files, on each type of GPU."""
    own_runs = _own(image)
    newest: dict[tuple[str, str], GpuRunSummary] = {}
    for subject, judged in image.history:  # the newest first
        verdict = judged.verdict
        if judged.standing is not VerdictStatus.GOOD or verdict is None or subject.manifest not in own_runs:
            continue
        device = verdict.report.device
        if device is not None:
            run = GpuRunSummary(
                gpu=device.name,
                capability=device.capability,
                verdict=verdict,
                by_name={check.name: check for check in verdict.report.checks},
            )
            newest.setdefault((device.capability, device.name), run)
    return tuple(newest[key] for key in sorted(newest, key=lambda key: (natural(key[0]), key[1])))


def _own(image: ReportImage) -> frozenset[str]:
    if image.offer is None:
        return frozenset()
    return frozenset(
        {image.offer.image.subject.manifest, *(row.sif.subject.manifest for row in image.offer.sifs)}
    )


def check_names(runs: Iterable[GpuRunSummary]) -> tuple[str, ...]:
    """Return the checks of these runs in the order of the suite, then those of other suites."""
    names = dict.fromkeys(check.name for run in runs for check in run.verdict.report.checks)
    order = {name: number for number, name in enumerate(CHECKS)}
    return tuple(sorted(names, key=lambda name: order.get(name, len(order))))


def timing_chart(run: GpuRunSummary) -> BarChart:
    """Return a chart of the time of each check."""
    return row_chart(f"Seconds of each check on {run.gpu}", [_timing(check) for check in _ran(run)])


def latency_chart(run: GpuRunSummary) -> BarChart | None:
    """Return a chart of the latency of each model by runtime. Thin bars show the 95th percentile."""
    measures = [
        ChartMeasure(
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


def effects_on(
    rows: Sequence[tuple[ReportImage, Sequence[GpuRunSummary]]], capability: str
) -> tuple[FrameworkRates, ...]:
    """Return the checks across versions, for each framework on each type of GPU of a capability."""
    groups: dict[tuple[str, str], list[tuple[ReportImage, GpuRunSummary]]] = {}
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


def _effects(framework: str, gpu: str, rows: Sequence[tuple[ReportImage, GpuRunSummary]]) -> FrameworkRates:
    names = check_names(run for _, run in rows)
    charts = [
        column_chart(name, measures)
        for name in names
        if len(rows) > 1 and (measures := [_across(image, run, name) for image, run in rows])
    ]
    return FrameworkRates(gpu=gpu, framework=framework, checks=names, runs=tuple(rows), charts=tuple(charts))


def _across(image: ReportImage, run: GpuRunSummary, name: str) -> ChartMeasure:
    check = run.by_name.get(name)
    if check is None or check.state in (CheckState.NOT_APPLICABLE, CheckState.NOT_RUN):
        state = check.state.value if check else "unknown"
        return ChartMeasure(label=image.target, value=0.0, note=state)
    return _timing(check, label=image.target)


def _timing(check: CheckResult, label: str = "") -> ChartMeasure:
    failed = check.state is CheckState.FAILED
    return ChartMeasure(
        label=label or check.name,
        value=max(check.seconds, 0.0),
        note="failed" if failed else "",
        bad=failed,
    )


def _ran(run: GpuRunSummary) -> list[CheckResult]:
    return [
        check
        for check in run.verdict.report.checks
        if check.state not in (CheckState.NOT_APPLICABLE, CheckState.NOT_RUN)
    ]


# --- The statuses of a report's cells: each has one symbol, one meaning and one style. Pure
# No reader needs the colors. Filled: the suite ran there. Outlined: a prediction. Plain: nothing is known.
# Filled cells differ by symbol and by color.


GOOD, BAD, OPEN, HOPE, NOPE, NONE = "good", "bad", "open", "hope", "nope", "none"
"""The styles: verified, failed, undecided, predicted to run, predicted not to run, unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusWord:
    """The status of a cell. `code` is its unique short name in pages."""

    word: str
    code: str
    symbol: str
    kind: str
    says: str


PREDICTED, PARTLY, UNLIKELY = "predicted", "predicted-partly", "predicted-no"
DOCUMENTED, HALF_DOCUMENTED, UNDOCUMENTED = "documented", "documented-partly", "documented-no"

_ROWS = (
    (Outcome.VERIFIED, "v", "✓", GOOD, "the suite passed in that image, on that GPU and driver; signed"),
    (
        Outcome.TOGETHER,
        "tg",
        "⇉",
        OPEN,
        "the suite passed on several GPUs or nodes at once, which says nothing about one; signed",
    ),
    (
        Outcome.APART,
        "ap",
        "⇹",
        OPEN,
        "the suite failed on several GPUs or nodes at once, which says nothing about one",
    ),
    (Outcome.WRONG_NUMBERS, "wn", "≠", BAD, "the suite ran there and computed wrong numbers"),
    (Outcome.NO_KERNEL, "nk", "∅", BAD, "the suite ran there and found no code for that GPU"),
    (Outcome.DRIVER_TOO_OLD, "do", "↓", BAD, "the suite ran there and the driver was too old"),
    (Outcome.LOAD_FAILED, "lf", "✗", BAD, "the suite ran there and something did not load"),
    (REVOKED, "rv", "↺", BAD, "it was verified there, and the verdict was revoked; signed"),
    (Outcome.BUILD_FAILED, "bf", "⊥", BAD, "the image could not be built"),
    (Outcome.UNSOLVABLE, "us", "⊗", BAD, "no environment could be locked"),
    (Outcome.NO_GPU, "ng", "○", OPEN, "tested, but there was no GPU"),
    (Outcome.WRONG_GPU, "wg", "⇄", OPEN, "tested, but the GPU was not the requested one"),
    (Outcome.PULL_FAILED, "pf", "⇣", OPEN, "tested, but the image could not be fetched"),
    (Outcome.TIMEOUT, "to", "…", OPEN, "tested, but it took too long"),
    (Outcome.HELD, "he", "‖", OPEN, "tested, but the job is held"),
    (Outcome.NO_MATCH, "nm", "∄", OPEN, "no machine of the pool can run the job"),
    (Outcome.INFRASTRUCTURE, "in", "!", OPEN, "tested, but the machine failed"),
    (PREDICTED, "p", "◇", HOPE, "not tested; by its GPU code it runs there"),
    (PARTLY, "pp", "◈", HOPE, "not tested; by its GPU code some of it runs there"),
    (DOCUMENTED, "d", "□", HOPE, "not tested; a project's page says that it runs there"),
    (HALF_DOCUMENTED, "dp", "◪", HOPE, "not tested; a project's page says that some of it runs there"),
    (UNLIKELY, "pn", "⊘", NOPE, "not tested; by its GPU code it does not run there"),
    (UNDOCUMENTED, "dn", "⊖", NOPE, "not tested; a project's page says that it does not run there"),
    (Outcome.NOT_TESTED, "n", "·", NONE, "not tested, and nothing is known"),
)
STATUSES = {
    str(word): StatusWord(word=str(word), code=code, symbol=symbol, kind=kind, says=says)
    for word, code, symbol, kind, says in _ROWS
}
_PREDICTED_STATUSES = {
    (ClaimBasis.PREDICTED, Compatibility.YES): PREDICTED,
    (ClaimBasis.PREDICTED, Compatibility.PTX): PREDICTED,
    (ClaimBasis.PREDICTED, Compatibility.PARTLY): PARTLY,
    (ClaimBasis.PREDICTED, Compatibility.NO): UNLIKELY,
    (ClaimBasis.DOCUMENTED, Compatibility.YES): DOCUMENTED,
    (ClaimBasis.DOCUMENTED, Compatibility.PTX): DOCUMENTED,
    (ClaimBasis.DOCUMENTED, Compatibility.PARTLY): HALF_DOCUMENTED,
    (ClaimBasis.DOCUMENTED, Compatibility.NO): UNDOCUMENTED,
}


def predicted_status(claim: CellClaim | None) -> StatusWord:
    """Return the status of a claim that is not a verdict."""
    word = _PREDICTED_STATUSES.get((claim.basis, claim.answer)) if claim else None
    return STATUSES[word or Outcome.NOT_TESTED]


def status_of(combo: ComboCell, claim: CellClaim | None) -> StatusWord:
    """Return the status of a cell.

    For untested cells, `claim` is the strongest claim that is not a verdict.
    """
    if combo.status is ComboState.VALID:
        return STATUSES[Outcome.VERIFIED]
    if combo.basis in (VERIFIED, REPORTED) or combo.cause in (Outcome.UNSOLVABLE, Outcome.NO_MATCH):
        return STATUSES[str(combo.cause)]
    if combo.status is ComboState.RULED_OUT:
        return STATUSES[UNDOCUMENTED if combo.basis == ClaimBasis.DOCUMENTED else UNLIKELY]
    return predicted_status(claim)


def count_statuses(words: Iterable[StatusWord]) -> tuple[tuple[StatusWord, int], ...]:
    """Return every status with the number of its cells, in the order of the table."""
    counts = Counter(word.word for word in words)
    return tuple((word, counts[name]) for name, word in STATUSES.items())


def _codes() -> list[tuple[str, list[str]]]:
    kinds = (GOOD, BAD, OPEN, HOPE, NOPE, NONE)
    return [(kind, [word.code for word in STATUSES.values() if word.kind == kind]) for kind in kinds]


STYLED: Mapping[str, object] = {"words": tuple(STATUSES.values()), "kinds": _codes()}
"""The values of the style template."""


_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixColumn:
    """A column: the capability, its first GPU, and all its known GPUs by name."""

    capability: Capability
    text: str
    first: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMatrixRow:
    """A row of the matrix. `day` is the day of the newest valid verdict in days since 1970, 0 for none."""

    image: ReportImage
    file: str
    words: tuple[StatusWord, ...]
    runs: tuple[GpuRunSummary, ...]
    day: int


def matrix_gpus(report: ReportContents) -> tuple[MatrixColumn, ...]:
    known = [(gpu.capability, gpu.name) for gpu in gpus()]
    known += [(gpu.processor, gpu.name) for gpu in amd_gpus()]
    matrix_columns = []
    for capability in report.capabilities:
        names = tuple(name for of, name in known if of == capability)
        first = names[0] if names else ""
        matrix_columns.append(
            MatrixColumn(capability=capability, text=str(capability), first=first, names=names)
        )
    return tuple(matrix_columns)


def matrix_rows(report: ReportContents) -> tuple[ImageMatrixRow, ...]:
    """Return the rows by framework, family and version, with a cell for each capability of the report."""
    order = sorted(
        report.images,
        key=lambda image_row: (
            *(image_row.framework, image_row.family),
            *(natural(image_row.version), natural(image_row.cuda), natural(image_row.target)),
        ),
    )
    return tuple(
        ImageMatrixRow(
            image=image,
            file=file_name(image.target),
            words=statuses_of(image, report.capabilities),
            runs=runs_of(image),
            day=_newest_day(image),
        )
        for image in order
    )


def statuses_of(image: ReportImage, capabilities: Sequence[Capability]) -> tuple[StatusWord, ...]:
    """Return the status of each capability, empty for an image for CPUs."""
    if not image.gpu:
        return ()
    combos = {combo.capability: combo for combo in image.combos}
    return tuple(
        status_of(combos[capability], image.predicted.get(capability)) for capability in capabilities
    )


def file_name(target: str) -> str:
    """Return the name of the target, or a hash of it if it is not a safe file name."""
    return target if _SAFE.fullmatch(target) else f"image-{hashlib.sha256(target.encode()).hexdigest()[:16]}"


def _newest_day(image: ReportImage) -> int:
    days = [
        judged.verdict.issued.timestamp() // 86400
        for _, judged in image.history
        if judged.verdict and judged.standing is VerdictStatus.GOOD
    ]
    return int(max(days, default=0))
