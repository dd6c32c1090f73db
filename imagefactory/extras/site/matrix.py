"""The matrix: a row for each image, a column for each compute capability, a word in each cell. Pure."""

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

# --- What checks measured, by GPU: the numbers of one image, and one check across versions. Pure


_LATENCY = re.compile(r"(?P<what>.+)-p50-ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRunSummary:
    """The newest verdict of an image on one kind of GPU that can be relied on."""

    gpu: str
    capability: str
    verdict: Verdict
    by_name: Mapping[str, CheckResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRates:
    """One framework on one kind of GPU: runs by version, oldest first, each with the image's target.

    `checks` are the names of those that ran in any of them; `charts` show how long each took.
    """

    gpu: str
    framework: str
    checks: tuple[str, ...]
    runs: tuple[tuple[ReportImage, GpuRunSummary], ...]
    charts: tuple[BarChart, ...]


def runs_of(image: ReportImage) -> tuple[GpuRunSummary, ...]:
    """The newest good verdict of the image itself, or of a .sif of it, on each kind of GPU."""
    own = _own(image)
    newest: dict[tuple[str, str], GpuRunSummary] = {}
    for subject, judged in image.history:  # the newest first
        verdict = judged.verdict
        if judged.standing is not VerdictStatus.GOOD or verdict is None or subject.manifest not in own:
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
    """The checks of these runs in the suite's order, those of another suite behind."""
    names = dict.fromkeys(check.name for run in runs for check in run.verdict.report.checks)
    order = {name: number for number, name in enumerate(CHECKS)}
    return tuple(sorted(names, key=lambda name: order.get(name, len(order))))


def timing_chart(run: GpuRunSummary) -> BarChart:
    """How long each check took."""
    return row_chart(f"Seconds of each check on {run.gpu}", [_timing(check) for check in _ran(run)])


def latency_chart(run: GpuRunSummary) -> BarChart | None:
    """How long each model took, in its framework and in another runtime; thin: the 95th percentile."""
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
    """The same checks across versions, for each framework on each kind of GPU of a capability."""
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
        state = check.state.value if check else "not asked"
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


# --- The words of a report's cells: one symbol, one meaning and one way of being drawn each. Pure
# Three ways of being drawn, so that nobody needs the colours: filled, something ran there; outlined, it is
# only
# foretold; plain, nothing is known. Filled ones differ by symbol, and by colour for those who see it.


GOOD, BAD, OPEN, HOPE, NOPE, NONE = "good", "bad", "open", "hope", "nope", "none"
"""Verified; ran and said no; tried, which says nothing of it; foretold yes; foretold no; nothing known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusWord:
    """`code` is its short name in pages, one for each word."""

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
        "the suite passed on several GPUs at once, which says nothing of one; signed",
    ),
    (Outcome.APART, "ap", "⇹", OPEN, "the suite failed on several GPUs at once, which says nothing of one"),
    (Outcome.WRONG_NUMBERS, "wn", "≠", BAD, "the suite ran there and computed wrongly"),
    (Outcome.NO_KERNEL, "nk", "∅", BAD, "the suite ran there and met no code for that GPU"),
    (Outcome.DRIVER_TOO_OLD, "do", "↓", BAD, "the suite ran there and the driver was too old"),
    (Outcome.LOAD_FAILED, "lf", "✗", BAD, "the suite ran there and something did not load"),
    (REVOKED, "rv", "↺", BAD, "it was verified there, and that was taken back; signed"),
    (Outcome.BUILD_FAILED, "bf", "⊥", BAD, "the image could not be built"),
    (Outcome.UNSOLVABLE, "us", "⊗", BAD, "no environment could be locked"),
    (Outcome.NO_GPU, "ng", "○", OPEN, "tried, and there was no GPU"),
    (Outcome.WRONG_GPU, "wg", "⇄", OPEN, "tried, and the GPU was another than asked for"),
    (Outcome.PULL_FAILED, "pf", "⇣", OPEN, "tried, and the image could not be fetched"),
    (Outcome.TIMEOUT, "to", "…", OPEN, "tried, and it took too long"),
    (Outcome.HELD, "he", "‖", OPEN, "tried, and the pool held the job"),
    (Outcome.NO_MATCH, "nm", "∄", OPEN, "tried, and no machine of the pool fits"),
    (Outcome.INFRASTRUCTURE, "in", "!", OPEN, "tried, and the machine was at fault"),
    (PREDICTED, "p", "◇", HOPE, "not tested; by its GPU code it runs there"),
    (PARTLY, "pp", "◈", HOPE, "not tested; by its GPU code some of it runs there"),
    (DOCUMENTED, "d", "□", HOPE, "not tested; a project's page says that it runs there"),
    (HALF_DOCUMENTED, "dp", "◪", HOPE, "not tested; a project's page says that some of it runs there"),
    (UNLIKELY, "pn", "⊘", NOPE, "not tested; by its GPU code it does not run there"),
    (UNDOCUMENTED, "dn", "⊖", NOPE, "not tested; a project's page speaks against it"),
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
    """What a claim without a verdict says."""
    word = _PREDICTED_STATUSES.get((claim.basis, claim.answer)) if claim else None
    return STATUSES[word or Outcome.NOT_TESTED]


def status_of(combo: ComboCell, claim: CellClaim | None) -> StatusWord:
    """The word of a cell; `claim` is the weightiest without a verdict, for one that nobody ran."""
    if combo.state is ComboState.VALID:
        return STATUSES[Outcome.VERIFIED]
    if combo.basis in (VERIFIED, REPORTED) or combo.cause in (Outcome.UNSOLVABLE, Outcome.NO_MATCH):
        return STATUSES[str(combo.cause)]
    if combo.state is ComboState.RULED_OUT:
        return STATUSES[UNDOCUMENTED if combo.basis == ClaimBasis.DOCUMENTED else UNLIKELY]
    return predicted_status(claim)


def count_statuses(words: Iterable[StatusWord]) -> tuple[tuple[StatusWord, int], ...]:
    """Every word with how often it stands there, in the order of the table."""
    counts = Counter(word.word for word in words)
    return tuple((word, counts[name]) for name, word in STATUSES.items())


def _codes() -> list[tuple[str, list[str]]]:
    kinds = (GOOD, BAD, OPEN, HOPE, NOPE, NONE)
    return [(kind, [word.code for word in STATUSES.values() if word.kind == kind]) for kind in kinds]


STYLED: Mapping[str, object] = {"words": tuple(STATUSES.values()), "kinds": _codes()}
"""What the style of pages is made with."""


_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixColumn:
    """A column: the capability, the first GPU of it and all that are known by name."""

    capability: Capability
    text: str
    first: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMatrixRow:
    """`day` is when the newest verdict was signed that can be relied on, in days since 1970; 0 for none."""

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
    """By framework and family, numbers by their size; a column for each capability of the report."""
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
    """A word for each capability; none at all of an image for CPUs alone."""
    if not image.gpu:
        return ()
    combos = {combo.capability: combo for combo in image.combos}
    return tuple(
        status_of(combos[capability], image.predicted.get(capability)) for capability in capabilities
    )


def file_name(target: str) -> str:
    """The target's name; of one that is none, a hash of it."""
    return target if _SAFE.fullmatch(target) else f"image-{hashlib.sha256(target.encode()).hexdigest()[:16]}"


def _newest_day(image: ReportImage) -> int:
    days = [
        judged.verdict.issued.timestamp() // 86400
        for _, judged in image.history
        if judged.verdict and judged.standing is VerdictStatus.GOOD
    ]
    return int(max(days, default=0))
