"""A report as a static site: file names and their texts. Pure functions.

    index.html            the matrix
    images/TARGET.html    a page for each image, and TARGET.svg, its badge
    gpus/8.0.html         a page for each compute capability
    matrix.svg            the matrix as a picture
    night.html            the changes of the last nightly run, if there was one
    log.html, log.jsonl   the signatures, revocations and other events in this store, if there are any
    style.css

The templates escape every value. File names consist of letters, digits and `._+-`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from imagefactory.extras.site.action import ReportContents
from imagefactory.extras.site.images import ReportImage
from imagefactory.extras.site.matrix import (
    BAD,
    GOOD,
    HOPE,
    NONE,
    NOPE,
    OPEN,
    STATUSES,
    STYLED,
    ImageMatrixRow,
    MatrixColumn,
    StatusWord,
    check_names,
    count_statuses,
    effects_on,
    latency_chart,
    matrix_gpus,
    matrix_rows,
    predicted_status,
    timing_chart,
)
from imagefactory.gpu.values import CellClaim
from imagefactory.matrix.combos import REPORTED, VERIFIED, ComboCell, ComboState
from imagefactory.model import Outcome
from imagefactory.trust.offers import verdict_ages_of
from imagefactory.trust.verdict import Verdict
from imagefactory.versions import natural
from imagefactory.views.charts import fill, policy
from imagefactory.views.verdicts import format_ages, passed

TEMPLATES = Path(__file__).parent / "templates"
PAGE = "night.html"


# --- The badge of one image as a small SVG: on which capabilities it is verified. Pure


GREEN, RED, GREY = "#0b6e4f", "#b42318", "#5d6770"
_CHARACTER = 6.6  # units of a letter in 11 px Verdana, on the average


def format_badge(image: ReportImage) -> str:
    """Return a badge: `verified on sm_80, sm_90`, or that the image failed, is untested or is for CPUs."""
    right, colour = _status_text(image)
    target = image.target
    label_width = round(len(target) * _CHARACTER + 14)
    width = label_width + round(len(right) * _CHARACTER + 14)
    return fill(TEMPLATES, "badge.svg", left=target, right=right, colour=colour, at=label_width, width=width)


def _status_text(image: ReportImage) -> tuple[str, str]:
    verified = [combo.capability.sm for combo in image.combos if combo.status is ComboState.VALID]
    if verified:
        return f"verified on {', '.join(verified)}", GREEN
    failed = [combo for combo in image.combos if combo.status is ComboState.FAILED]
    if failed:
        cause = str(failed[0].cause)
        location = ", ".join(combo.capability.sm for combo in failed if combo.cause == failed[0].cause)
        return f"{cause} on {location}", RED
    return "not tested" if image.gpu else "for CPUs", GREY


# --- The matrix as one picture: an SVG without script, light and dark by the reader's preference. Pure
# It contains no time, so that the same images give the same bytes.


NAME, COLUMN, CELL = 245, 66, 56
TOP, ROW, GROUP = 54, 24, 30
MARK = 165


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureCell:
    word: StatusWord
    x: int
    width: int = CELL


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureLine:
    text: str
    x: int
    y: int
    cells: tuple[PictureCell, ...] = ()
    bold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureMark:
    """An entry of the legend."""

    word: StatusWord
    x: int
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureHeading:
    gpu: MatrixColumn
    x: int


def format_picture(rows: Sequence[ImageMatrixRow], gpus: Sequence[MatrixColumn]) -> str:
    """Return the picture without images for CPUs, about 100 bytes for each cell."""
    rows = [row for row in rows if row.image.gpu]
    width = max(NAME + COLUMN * len(gpus) + 12, 520)
    lines, y = _lines(rows)
    words = [word for row in rows for word in row.words]
    used = [word for word, count in count_statuses(words) if count]
    verified = sum(word.kind == GOOD for word in words)
    per_line = max((width - 16) // MARK, 1)
    marks = [
        PictureMark(word=word, x=16 + number % per_line * MARK, y=y + 16 + number // per_line * 26)
        for number, word in enumerate(used)
    ]
    height = (marks[-1].y if marks else y) + 54
    return fill(
        TEMPLATES,
        "picture.svg",
        width=width,
        height=height,
        heads=[PictureHeading(gpu=gpu, x=NAME + COLUMN * i + CELL // 2) for i, gpu in enumerate(gpus)],
        lines=lines,
        marks=marks,
        says=f"{len(rows)} images on {len(gpus)} compute capabilities: "
        + ", ".join(f"{count} {word.word}" for word, count in count_statuses(words) if count),
        foot=f"imagefactory report: {verified} of {len(words)} verified. Filled: ran. Outlined: predicted.",
    )


def _lines(rows: Sequence[ImageMatrixRow]) -> tuple[list[PictureLine], int]:
    """Return the lines from top to bottom, and the y coordinate after the last one."""
    lines, y, family = [], TOP, ""
    for row in rows:
        if row.image.family != family:
            family = row.image.family
            lines.append(PictureLine(text=family, x=16, y=y + 6, bold=True))
            y += GROUP
        cells = tuple(PictureCell(word=word, x=NAME + COLUMN * i) for i, word in enumerate(row.words))
        lines.append(PictureLine(text=row.image.target, x=24, y=y, cells=cells))
        y += ROW
    return lines, y


LOG, LOG_LINES = "log.html", "log.jsonl"
MAX_ACTS = 200
"""The limit of entries on the log page. log.jsonl has more."""
AGES = (7, 30, 90)
"""The choices in the filter for the age of the newest verdict, in days."""
_STATUS_GROUPS = (
    (GOOD, "Verified", "The suite passed in that very image on a GPU of this capability."),
    (HOPE, "Predicted to run", "Not tested. The image's GPU code, or a project's page, says that it runs."),
    (OPEN, "Undecided", "It was tested, but the result says nothing about the image."),
    (BAD, "Failed", "The image was tested and failed."),
    (NOPE, "Predicted not to run", "Not tested. The known facts say that it does not run."),
    (NONE, "Not tested", "Nothing is known."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCell:
    """One image on one capability: the prediction, and the result of running it there."""

    gpu: MatrixColumn
    outcome: StatusWord
    combo: ComboCell
    claim: CellClaim | None
    predicted: StatusWord
    verdict: Verdict | None
    passed: str
    tried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    target: str
    file: str
    word: StatusWord
    driver: str
    why: str


class ReportFiles(Mapping[str, str]):
    """The text of each file by its name, formatted when it is read."""

    def __init__(self, files: Mapping[str, Callable[[], str]]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> str:
        return self._files[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def make_site(report: ReportContents) -> ReportFiles:
    """Return the files of a report."""
    return ReportFiles(dict(_pages(report)))


def _pages(report: ReportContents) -> Iterator[tuple[str, Callable[[], str]]]:
    columns = matrix_gpus(report)
    rows = matrix_rows(report)
    on_gpus = tuple(row for row in rows if row.image.gpu)
    values = {
        "gpus": columns,
        "made": f"{report.made:%Y-%m-%d %H:%M} UTC",
        "place": report.place,
        "words": STATUSES,
        "here": "",
        "night": report.night is not None,
        "log": bool(report.acts),
    }
    files = {row.image.target: row.file for row in rows}
    yield "style.css", partial(fill, TEMPLATES, "style.css", **STYLED)
    yield "index.html", partial(_index, report, rows, values)
    yield "matrix.svg", partial(format_picture, rows, columns)
    if report.night:
        yield (
            PAGE,
            partial(
                fill, TEMPLATES, PAGE, **{**values, "here": "night"}, up="", policy=policy(), **report.night
            ),
        )
    if report.acts:
        acts, page = report.acts[: -MAX_ACTS - 1 : -1], {**values, "here": "log"}
        yield (
            LOG,
            partial(
                fill,
                TEMPLATES,
                LOG,
                **page,
                up="",
                policy=policy(),
                acts=acts,
                count=len(report.acts),
                file=LOG_LINES,
            ),
        )
        yield LOG_LINES, lambda: "".join(json.dumps(asdict(act)) + "\n" for act in report.acts)
    image_page = {**values, "up": "../", "policy": policy(TEMPLATES / "copy.js"), "keys": report.keys}

    def image_text(row: ImageMatrixRow) -> str:
        return fill(TEMPLATES, "image.html", **image_page, **_image(row, columns))

    for row in rows:
        yield f"images/{row.file}.html", partial(image_text, row)
        yield f"images/{row.file}.svg", partial(format_badge, row.image)
    gpu_page = {**values, "up": "../", "policy": policy(), "files": files, "kinds": _STATUS_GROUPS}

    def gpu_text(number: int) -> str:
        gpu = columns[number]
        by_kind: dict[str, list[GpuRow]] = {kind: [] for kind, _, _ in _STATUS_GROUPS}
        for row in on_gpus:
            by_kind[row.words[number].kind].append(_gpu_row(row, number))
        effects = effects_on([(row.image, row.runs) for row in on_gpus], gpu.text)
        page = {**gpu_page, "here": gpu.text, "gpu": gpu, "by_kind": by_kind, "effects": effects}
        return fill(TEMPLATES, "gpu.html", **page)

    for number, gpu in enumerate(columns):
        yield f"gpus/{gpu.text}.html", partial(gpu_text, number)


# --- the matrix ----------------------------------------------------------------------------------


def _index(report: ReportContents, rows: Sequence[ImageMatrixRow], values: Mapping[str, Any]) -> str:
    groups = [
        (framework, family, list(some))
        for (framework, family), some in groupby(
            rows, key=lambda row: (row.image.framework, row.image.family)
        )
    ]
    frameworks = dict.fromkeys(framework for framework, _, _ in groups)
    legend = count_statuses(word for row in rows for word in row.words)
    cudas = sorted({row.image.cuda for row in rows}, key=natural)
    columns = values["gpus"]
    filters = [
        ("framework", "Framework", [(name, name) for name in frameworks]),
        ("cuda", "CUDA", [(cuda, cuda) for cuda in cudas]),
        ("gpu", "GPU", [(gpu.text, f"{gpu.text} {gpu.first}".rstrip()) for gpu in columns]),
        ("outcome", "Outcome", [(word.code, word.word) for word, count in legend if count]),
        ("age", "Newest verdict", [(str(days), f"within {days} days") for days in AGES]),
    ]
    return fill(
        TEMPLATES,
        "index.html",
        **values,
        up="",
        policy=policy(TEMPLATES / "matrix.js"),
        images=len(rows),
        ages=format_ages(verdict_ages_of((row.image.offer for row in rows if row.image.offer), report.made)),
        trusted=report.trusted,
        notes=report.notes,
        legend=legend,
        groups=groups,
        filters=filters,
    )


# --- pages ---------------------------------------------------------------------------------------


def _image(row: ImageMatrixRow, columns: Sequence[MatrixColumn]) -> dict[str, Any]:
    runs = row.runs
    return {
        "image": row.image,
        "cells": _cells(row, columns),
        "runs": runs,
        "checks": check_names(runs),
        "timings": [timing_chart(run) for run in runs],
        "latencies": [chart for run in runs if (chart := latency_chart(run))],
    }


def _cells(row: ImageMatrixRow, columns: Sequence[MatrixColumn]) -> list[SiteCell]:
    combos = {combo.capability: combo for combo in row.image.combos}
    newest: dict[str, Verdict] = {}
    for run in row.runs:
        known = newest.get(run.capability)
        if known is None or run.verdict.issued > known.issued:
            newest[run.capability] = run.verdict
    cells = []
    for gpu, word in zip(columns if row.image.gpu else (), row.words, strict=True):
        claim, verdict = row.image.predicted.get(gpu.capability), newest.get(gpu.text)
        combo = combos[gpu.capability]
        cells.append(
            SiteCell(
                gpu=gpu,
                outcome=word if word.kind in (GOOD, BAD, OPEN) else STATUSES[Outcome.NOT_TESTED],
                combo=combo,
                claim=claim,
                predicted=predicted_status(claim),
                verdict=verdict,
                passed=passed(verdict) if verdict else "",
                tried=combo.basis in (VERIFIED, REPORTED),
            )
        )
    return cells


def _gpu_row(row: ImageMatrixRow, number: int) -> GpuRow:
    combos = {combo.capability: combo for combo in row.image.combos}
    combo = combos[sorted(combos)[number]]
    claim, word = row.image.predicted.get(combo.capability), row.words[number]
    ran = combo.basis in (VERIFIED, REPORTED)
    driver = combo.driver if ran else (claim.driver if claim and word.kind == HOPE else "")
    return GpuRow(
        target=row.image.target,
        file=row.file,
        word=word,
        driver=f"{driver} or newer" if driver else "",
        why=combo.reason if ran or claim is None else claim.reason,
    )
