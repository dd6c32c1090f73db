"""A report as a static site: file names and their texts. Pure.

    index.html            the matrix
    images/TARGET.html    a page for each image, and TARGET.svg, its badge
    gpus/8.0.html         a page for each compute capability
    matrix.svg            the matrix as a picture
    night.html            what the last night changed, where there was one
    log.html, log.jsonl   who signed, revoked, promoted and published from this store, where anyone did
    style.css

Every value goes through templates that escape it; names of files are made of letters, digits and `._+-`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from imagefactory.trust.offers import ages_of
from imagefactory.gpu.values import Claim
from imagefactory.matrix.combos import REPORTED, VERIFIED, Combo
from imagefactory.model import Outcome
from imagefactory.report.html.badge import format_badge
from imagefactory.report.html.checks import (
    check_names,
    effects_on,
    latency_chart,
    timing_chart,
)
from imagefactory.extras.site.matrix import MatrixRow, ShownGpu, matrix_rows, shown_gpus
from imagefactory.report.html.night import PAGE, format_page
from imagefactory.report.html.picture import format_picture
from imagefactory.report.html.templating import fill, policy
from imagefactory.report.html.words import (
    BAD,
    GOOD,
    HOPE,
    NONE,
    NOPE,
    OPEN,
    STYLED,
    WORDS,
    Word,
    count_words,
    foretold,
)
from imagefactory.views.verdicts import format_ages, passed
from imagefactory.extras.site.action import Reported
from imagefactory.trust.verdict import Verdict
from imagefactory.versions import natural

if TYPE_CHECKING:
    pass

LOG, LOG_LINES = "log.html", "log.jsonl"
SHOWN_ACTS = 200
"""Acts on the page of the log; the file of lines has more."""
AGES = (7, 30, 90)
"""Days within which the newest verdict may be."""
_KINDS = (
    (GOOD, "Verified", "The suite passed in that very image on a GPU of this capability."),
    (HOPE, "Foretold to run", "Not tested. The image's GPU code, or a project's page, says that it runs."),
    (OPEN, "Tried, undecided", "What came of it says nothing of the image."),
    (BAD, "Failed", "It was tried and does not do."),
    (NOPE, "Foretold not to run", "Not tested. What is known speaks against it."),
    (NONE, "Not tested", "Nothing is known: a test would tell."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCell:
    """One image on one capability: what was foretold beside what came out of running it there."""

    gpu: ShownGpu
    outcome: Word
    combo: Combo
    claim: Claim | None
    foretold: Word
    verdict: Verdict | None
    passed: str
    tried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    target: str
    file: str
    word: Word
    driver: str
    why: str


def make_site(report: Reported) -> Iterator[tuple[str, str]]:
    """Name and text of each file, the pages one by one."""
    shown = shown_gpus(report)
    rows = matrix_rows(report)
    on_gpus = tuple(row for row in rows if row.image.gpu)
    given = {
        "gpus": shown,
        "made": f"{report.made:%Y-%m-%d %H:%M} UTC",
        "place": report.place,
        "words": WORDS,
        "here": "",
        "night": report.night is not None,
        "log": bool(report.acts),
    }
    files = {row.image.target: row.file for row in rows}
    yield "style.css", fill("style.css", **STYLED)
    yield "index.html", _index(report, rows, given)
    yield "matrix.svg", format_picture(rows, shown)
    if report.night:
        yield PAGE, format_page(report.night, {**given, "here": "night"})
    if report.acts:
        acts, page = report.acts[: -SHOWN_ACTS - 1 : -1], {**given, "here": "log"}
        yield (
            LOG,
            fill(LOG, **page, up="", policy=policy(), acts=acts, count=len(report.acts), file=LOG_LINES),
        )
        yield LOG_LINES, "".join(json.dumps(asdict(act)) + "\n" for act in report.acts)
    image_page = {**given, "up": "../", "policy": policy("copy.js"), "keys": report.keys}
    for row in rows:
        yield f"images/{row.file}.html", fill("image.html", **image_page, **_image(row, shown))
        yield f"images/{row.file}.svg", format_badge(row.image)
    gpu_page = {**given, "up": "../", "policy": policy(), "files": files, "kinds": _KINDS}
    for number, gpu in enumerate(shown):
        by_kind: dict[str, list[GpuRow]] = {kind: [] for kind, _, _ in _KINDS}
        for row in on_gpus:
            by_kind[row.words[number].kind].append(_gpu_row(row, number))
        yield (
            f"gpus/{gpu.text}.html",
            fill(
                "gpu.html",
                **{**gpu_page, "here": gpu.text},
                gpu=gpu,
                by_kind=by_kind,
                effects=effects_on([(row.image, row.runs) for row in on_gpus], gpu.text),
            ),
        )


# --- the matrix ----------------------------------------------------------------------------------


def _index(report: Reported, rows: Sequence[MatrixRow], given: Mapping[str, Any]) -> str:
    groups = [
        (framework, family, list(some))
        for (framework, family), some in groupby(
            rows, key=lambda row: (row.image.framework, row.image.family)
        )
    ]
    frameworks = dict.fromkeys(framework for framework, _, _ in groups)
    legend = count_words(word for row in rows for word in row.words)
    cudas = sorted({row.image.cuda for row in rows}, key=natural)
    shown = given["gpus"]
    filters = [
        ("framework", "Framework", [(name, name) for name in frameworks]),
        ("cuda", "CUDA", [(cuda, cuda) for cuda in cudas]),
        ("gpu", "GPU", [(gpu.text, f"{gpu.text} {gpu.first}".rstrip()) for gpu in shown]),
        ("outcome", "Outcome", [(word.code, word.word) for word, count in legend if count]),
        ("age", "Newest verdict", [(str(days), f"within {days} days") for days in AGES]),
    ]
    return fill(
        "index.html",
        **given,
        up="",
        policy=policy("matrix.js"),
        images=len(rows),
        ages=format_ages(ages_of((row.image.offer for row in rows if row.image.offer), report.made)),
        trusted=report.trusted,
        notes=report.notes,
        legend=legend,
        groups=groups,
        filters=filters,
    )


# --- pages ---------------------------------------------------------------------------------------


def _image(row: MatrixRow, shown: Sequence[ShownGpu]) -> dict[str, Any]:
    runs = row.runs
    return {
        "image": row.image,
        "cells": _cells(row, shown),
        "runs": runs,
        "checks": check_names(runs),
        "timings": [timing_chart(run) for run in runs],
        "latencies": [chart for run in runs if (chart := latency_chart(run))],
    }


def _cells(row: MatrixRow, shown: Sequence[ShownGpu]) -> list[ShownCell]:
    combos = {combo.capability: combo for combo in row.image.combos}
    newest: dict[str, Verdict] = {}
    for run in row.runs:
        known = newest.get(run.capability)
        if known is None or run.verdict.issued > known.issued:
            newest[run.capability] = run.verdict
    cells = []
    for gpu, word in zip(shown if row.image.gpu else (), row.words, strict=True):
        claim, verdict = row.image.predicted.get(gpu.capability), newest.get(gpu.text)
        combo = combos[gpu.capability]
        cells.append(
            ShownCell(
                gpu=gpu,
                outcome=word if word.kind in (GOOD, BAD, OPEN) else WORDS[Outcome.NOT_TESTED],
                combo=combo,
                claim=claim,
                foretold=foretold(claim),
                verdict=verdict,
                passed=passed(verdict) if verdict else "",
                tried=combo.basis in (VERIFIED, REPORTED),
            )
        )
    return cells


def _gpu_row(row: MatrixRow, number: int) -> GpuRow:
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
