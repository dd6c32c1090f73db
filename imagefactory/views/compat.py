"""Compatibility of targets and GPUs as tables with numbered sources, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, TypedDict

from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.contradictions import CapabilityDifference
from imagefactory.gpu.values import Cell, CellClaim, Compatibility, platform_of
from imagefactory.matrix.compat import (
    RUNS,
    CompatGpu,
    CompatRow,
    Cover,
    CoverCandidate,
    UnservedGpu,
    serves,
    severe_rules,
)
from imagefactory.views.text import Footnotes, fold, format_matrix, format_table, table_width

LETTERS = {
    Compatibility.YES: "Y",
    Compatibility.PTX: "P",
    Compatibility.PARTLY: "~",
    Compatibility.NO: "-",
    Compatibility.UNKNOWN: "?",
}
LEGEND = (
    "Y runs   P runs, if the driver compiles its PTX   ~ runs in part",
    "- does not run   ? unknown   ! has a known fault",
    "v verified by the suite   p predicted by a scan of its GPU code   d documented",
)

ALIKE = "5.0-6.1: the same for all GPUs of this range, except those of ARM boards (8.7, 11.0)"
ALIKE_AMD = "gfx908-gfx942: the same for all known processors of this range"


def format_gpu(
    gpu: CompatGpu,
    rows: Sequence[CompatRow],
    width: int | None = None,
    *,
    show_sources: bool = False,
    merge: bool = False,
) -> str:
    """Return the images that run on one GPU, and why the others do not. Each row has one cell.

    With `merge`, releases with the same answer for several CUDA versions have one row.
    """
    sources, warnings = Footnotes(shown=show_sources), Footnotes("!{}")
    running = [row for row in rows if serves(row.cells[0])]
    rest = [row for row in rows if not serves(row.cells[0]) and not _is_blank(row)]
    displayed = (*running, *rest)
    table = [_gpu_row(row, sources, warnings) for row in (merge_releases(displayed) if merge else displayed)]
    unknown = sum(row.cells[0].answer is Compatibility.UNKNOWN for row in rows)
    head = f"{gpu.title}: {len(running)} of {len(rows)} run on it"
    head += f", {unknown} unknown" if unknown else ""
    lines = [
        head,
        "",
        format_table(("TARGET", "RUNS", "STATUS", "DRIVER", "WHY"), table, width, ("DRIVER",)),
    ]
    if gpu.capability not in (*knowledge.capabilities(), *knowledge.processors()):
        lines[1:1] = [f"no GPU of capability {gpu.capability} is known; it is judged by the rules for all"]
    more = [*_named(warnings, "Warnings"), *_named(sources, "Sources"), *_blank(rows), *_unlocked(rows)]
    more += _newest_patches(rows)
    return "\n".join([*lines, *fold(more, width)])


def merge_releases(rows: Sequence[CompatRow]) -> tuple[CompatRow, ...]:
    """Return rows with one for all CUDA versions of a release that have the same answers.

    Rows are sorted by CUDA version, the newest first. The reason is that of the newest version.
    """
    merged: list[CompatRow] = []
    for _, group in groupby(rows, key=_release_answers):
        some = list(group)
        first, last = some[0].candidate, some[-1].candidate
        if len(some) > 1 and not first.name:
            cuda = f"{last.question.cuda} to {first.question.cuda}"
            question = replace(first.question, cuda=cuda)
            some = [replace(some[0], candidate=replace(first, question=question))]
        merged += some
    return tuple(merged)


def _release_answers(row: CompatRow) -> tuple[object, ...]:
    candidate, question = row.candidate, row.candidate.question
    cells = tuple(
        (
            cell.answer,
            *((claim.basis, claim.rule, claim.driver) for claim in cell.claims[:1]),
            cell_code(cell),
        )
        for cell in row.cells
    )
    return candidate.name, question.framework, question.version, candidate.requested, row.fix, cells


def _is_blank(row: CompatRow) -> bool:
    """Return whether no recipe builds the version and no fact about it is known."""
    return not row.candidate.name and not any(cell.claims for cell in row.cells)


def _blank(rows: Sequence[CompatRow]) -> list[str]:
    titles = [row.candidate.title for row in rows if _is_blank(row)]
    return ["", f"unknown: {'; '.join(titles)}"] if titles else []


def _gpu_row(row: CompatRow, sources: Footnotes, warnings: Footnotes) -> tuple[str, ...]:
    cell = row.cells[0]
    if not cell.claims:
        return row.candidate.title, Compatibility.UNKNOWN.value, "", "", f"nothing is known of it{_fix(row)}"
    first = cell.claims[0]
    runs = first.answer in RUNS
    others = [
        claim
        for claim in cell.claims[1:]
        if claim.basis is not first.basis and (claim.answer in RUNS) != runs
    ]
    reason = [f"{first.reason}{sources.mark([first.source])}"]
    reason += [
        f"{claim.basis}: {claim.answer}, {claim.reason}{sources.mark([claim.source])}" for claim in others
    ]
    warned = [f"{claim.reason}{sources.mark([claim.source])}" for claim in displayed_warnings(cell)]
    marks = warnings.mark(warned)
    basis = first.basis.value
    return row.candidate.title, f"{first.answer}{marks}", basis, first.driver, "; ".join(reason) + _fix(row)


def _fix(row: CompatRow) -> str:
    """Return a clause with what would work instead, or with the next step for an unknown answer."""
    if not row.fix:
        return ""
    return f"; {row.fix}" if row.cells[0].answer is Compatibility.UNKNOWN else f"; use {row.fix}"


def displayed_warnings(cell: Cell) -> tuple[CellClaim, ...]:
    """Return the warnings about an image that runs at least partly."""
    return () if cell.answer is Compatibility.NO else cell.warnings


def format_rows(
    rows: Sequence[CompatRow],
    capabilities: Sequence[Capability],
    width: int | None = None,
    *,
    show_sources: bool = False,
) -> str:
    """Return a table of candidates x capabilities with two letters for each cell.

    Each row has a cell for each capability. Equal neighbor columns are merged.
    """
    sources, displayed = Footnotes(shown=show_sources), [row for row in rows if not _is_blank(row)]
    texts = list(zip(*([cell_code(cell) for cell in row.cells] for row in displayed), strict=True))
    groups = [list(some) for _, some in groupby(range(len(texts)), key=texts.__getitem__)]
    ends = [(capabilities[some[0]], capabilities[some[-1]]) for some in groups]
    spans = [str(first) if first == last else f"{first}-{last}" for first, last in ends]
    cells = [[texts[some[0]][number] for some in groups] for number in range(len(displayed))]
    marks = [
        sources.mark(claim.source for cell in row.cells for claim in cell.claims[:1]).strip()
        for row in displayed
    ]
    names = [
        row.candidate.name or f"({_version(row)} {platform_of(row.candidate.question.cuda)})"
        for row in displayed
    ]
    header = ["TARGET", "VERSION", "CUDA", *spans, *(["SOURCES"] if show_sources else [])]
    table = [
        [
            *(row.candidate.name or "(no recipe)", _version(row), row.candidate.question.cuda, *some),
            *([mark] if show_sources else []),
        ]
        for row, some, mark in zip(displayed, cells, marks, strict=True)
    ]
    if width is not None and table_width([header, *table]) > width:  # a target's name contains the rest
        rest = [[name, *some] for name, some in zip(names, cells, strict=True)]
        text = format_matrix(["TARGET", *spans], rest, width, keep=1)
    else:
        text = format_table(header, table)
    amd = any(capability.processor for capability in capabilities)
    alike = [ALIKE_AMD if amd else ALIKE] if any(len(some) > 1 for some in groups) else []
    more = [*LEGEND, *alike, *_named(sources, "Sources"), *_blank(rows), *_unlocked(rows)]
    more += _newest_patches(rows)
    return "\n".join([text, "", *fold(more, width)])


def _version(row: CompatRow) -> str:
    return f"{row.candidate.question.framework} {row.candidate.question.version}"


def _unlocked(rows: Sequence[CompatRow]) -> list[str]:
    """Return a line about the targets that have no current lock."""
    names = [
        f"{candidate.name} ({candidate.lock})"
        for candidate in (row.candidate for row in rows)
        if candidate.lock not in ("", "ok")
    ]
    return ["", f"only by their recipes, since no lock is current: {', '.join(names)}"] if names else []


def _newest_patches(rows: Sequence[CompatRow]) -> list[str]:
    """Return a line for each requested minor version: the patch release that answers for it."""
    read = {
        f"{candidate.question.framework} {candidate.requested}": candidate.question.version
        for candidate in (row.candidate for row in rows)
        if candidate.requested
    }
    lines = [
        f"{requested} is answered for {version}, its newest patch" for requested, version in read.items()
    ]
    return ["", *lines] if lines else []


def cell_code(cell: Cell) -> str:
    """Return `Yp`: the answer and its basis. A `!` means a known fault."""
    basis = cell.claims[0].basis.value[0] if cell.claims else ""
    return f"{LETTERS[cell.answer]}{basis}{'!' if displayed_warnings(cell) else ''}"


def format_covers(covers: Sequence[Cover], width: int | None = None, *, show_sources: bool = False) -> str:
    """Return the fewest images of each group, the GPUs for each image, and the GPUs without an image."""
    sources = Footnotes(shown=show_sources)
    blocks = [_cover(cover, sources, width) for cover in covers]
    return "\n".join(["\n\n".join(blocks), *fold(_named(sources, "Sources"), width)])


def _cover(cover: Cover, sources: Footnotes, width: int | None) -> str:
    count = len(cover.images)
    images = f"{count} image{'s' if count != 1 else ''}"
    gpus = sum(len(choice.serves) for choice in cover.images)
    lines = [f"{cover.group}: {images} for {gpus} of {gpus + len(cover.unserved)} types of GPU"]
    for choice in cover.images:
        table = [_served_text(gpu, cell, sources) for gpu, cell in choice.serves]
        lock = f" (lock: {choice.candidate.lock})" if choice.candidate.lock not in ("", "ok") else ""
        lines += [f"  {choice.candidate.title}{lock}", *format_table(table[0], table[1:], width).splitlines()]
    lines += fold((f"  none for {_unserved(unserved, sources)}" for unserved in cover.unserved), width)
    return "\n".join(lines)


def _served_text(gpu: CompatGpu, cell: Cell, sources: Footnotes) -> tuple[str, ...]:
    first = cell.claims[0]
    floor = f", driver {first.driver} or newer" if first.driver and not gpu.driver else ""
    reasons = [f"{first.basis}{sources.mark([first.source])}{floor}"]
    reasons += [f"! {claim.reason}{sources.mark([claim.source])}" for claim in severe_rules(cell)]
    return f"    {gpu.count} x {gpu.title}", first.answer.value, "; ".join(reasons)


def _unserved(unserved: UnservedGpu, sources: Footnotes) -> str:
    title, claim = unserved.gpu.title, unserved.claim
    if unserved.candidate is None or claim is None:
        return f"{title}: unknown"
    return f"{title}: {unserved.candidate.title}: {claim.reason}{sources.mark([claim.source])}"


def _named(sources: Footnotes, title: str) -> list[str]:
    lines = sources.lines()
    return ["", title, *lines] if lines else []


def format_differences(differences: Sequence[CapabilityDifference], width: int | None = None) -> str:
    """Return the differences between documentation and scans of wheels."""
    sources = Footnotes()
    table = [
        (
            f"{difference.framework} {difference.version}",
            difference.cuda,
            " ".join(map(str, difference.capabilities)),
            f"{difference.documented}{sources.mark([difference.documented_source])}",
            f"{difference.found}{sources.mark([_scan(difference)])}",
            difference.reason,
        )
        for difference in differences
    ]
    if not table:
        return "no difference is known"
    header = ("VERSION", "CUDA", "CAPABILITIES", "DOCUMENTED", "PREDICTED", "WHY")
    return "\n".join([format_table(header, table, width), *fold(_named(sources, "Sources"), width)])


def _scan(difference: CapabilityDifference) -> str:
    return f"scan of {', '.join(difference.wheels)} ({difference.scanned_source})"


# --- JSON


class DifferenceRow(TypedDict):
    framework: str
    version: str
    cuda: str
    capabilities: list[str]
    documented: Compatibility
    documented_source: str
    predicted: Compatibility
    predicted_source: str
    reason: str


class CompatDifferencesDocument(TypedDict):
    """Where the documentation of a framework and a scan of its wheels differ."""

    format: Literal["imagefactory.compat-differences/1"]
    differences: list[DifferenceRow]


def differences_json(differences: Sequence[CapabilityDifference]) -> CompatDifferencesDocument:
    rows = [
        DifferenceRow(
            framework=difference.framework,
            version=difference.version,
            cuda=difference.cuda,
            capabilities=[str(capability) for capability in difference.capabilities],
            documented=difference.documented,
            documented_source=difference.documented_source,
            predicted=difference.found,
            predicted_source=_scan(difference),
            reason=difference.reason,
        )
        for difference in differences
    ]
    return CompatDifferencesDocument(format="imagefactory.compat-differences/1", differences=rows)


class CandidateRow(TypedDict):
    """A target, or a release of a framework."""

    target: str
    """Empty for a release without a target."""
    family: str
    framework: str
    version: str
    requested: str
    """The version of the request, if `version` is its newest patch."""
    cuda: str
    lock: str


class CellRow(TypedDict):
    """Whether an image runs on a GPU; the claims are the grounds, the strongest first."""

    capability: str
    driver: str
    answer: Compatibility
    claims: Sequence[CellClaim]
    warnings: Sequence[CellClaim]


class CompatGpuRow(TypedDict):
    gpu: str
    capability: str
    driver: str
    count: int


class CompatTargetRow(CandidateRow):
    cells: list[CellRow]
    """One for each GPU, in the same order."""
    fix: str
    """With --gpu: what would work instead, or the next step if the answer is unknown."""


class CompatDocument(TypedDict):
    """Which targets run on which GPUs."""

    format: Literal["imagefactory.compat/1"]
    gpus: list[CompatGpuRow]
    rows: list[CompatTargetRow]


def compat_json(rows: Sequence[CompatRow], gpus: Sequence[CompatGpu]) -> CompatDocument:
    return CompatDocument(
        format="imagefactory.compat/1",
        gpus=[_gpu_json(gpu) for gpu in gpus],
        rows=[
            CompatTargetRow(
                **_candidate_json(row.candidate), cells=[_cell_json(cell) for cell in row.cells], fix=row.fix
            )
            for row in rows
        ],
    )


class CoveredGpuRow(CompatGpuRow):
    answer: Compatibility
    claims: Sequence[CellClaim]
    warnings: Sequence[CellClaim]


class CoverImageRow(CandidateRow):
    gpus: list[CoveredGpuRow]


class UncoveredGpuRow(CompatGpuRow):
    """A GPU on which no image runs."""

    answer: Compatibility
    nearest: CandidateRow | None
    claim: CellClaim | None
    """Why the nearest candidate does not run there."""


class CoverRow(TypedDict):
    family: str
    images: list[CoverImageRow]
    uncovered: list[UncoveredGpuRow]


class CompatCoverDocument(TypedDict):
    """The fewest images that together run on all GPUs of a file."""

    format: Literal["imagefactory.compat-cover/1"]
    covers: list[CoverRow]


def covers_json(covers: Sequence[Cover]) -> CompatCoverDocument:
    rows = [
        CoverRow(
            family=cover.group,
            images=[
                CoverImageRow(
                    **_candidate_json(choice.candidate),
                    gpus=[
                        CoveredGpuRow(
                            **_gpu_json(gpu), answer=cell.answer, claims=cell.claims, warnings=cell.warnings
                        )
                        for gpu, cell in choice.serves
                    ],
                )
                for choice in cover.images
            ],
            uncovered=[
                UncoveredGpuRow(
                    **_gpu_json(row.gpu),
                    answer=row.answer,
                    nearest=_candidate_json(row.candidate) if row.candidate else None,
                    claim=row.claim,
                )
                for row in cover.unserved
            ],
        )
        for cover in covers
    ]
    return CompatCoverDocument(format="imagefactory.compat-cover/1", covers=rows)


def _candidate_json(candidate: CoverCandidate) -> CandidateRow:
    question = candidate.question
    return CandidateRow(
        target=candidate.name,
        family=candidate.group,
        framework=question.framework,
        version=question.version,
        requested=candidate.requested,
        cuda=question.cuda,
        lock=candidate.lock,
    )


def _cell_json(cell: Cell) -> CellRow:
    return CellRow(
        capability=str(cell.question.capability),
        driver=cell.question.driver,
        answer=cell.answer,
        claims=cell.claims,
        warnings=cell.warnings,
    )


def _gpu_json(gpu: CompatGpu) -> CompatGpuRow:
    return CompatGpuRow(gpu=gpu.name, capability=str(gpu.capability), driver=gpu.driver, count=gpu.count)
