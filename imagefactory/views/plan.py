"""A plan as text, and as the matrix of a GitHub workflow."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypedDict

from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility, rocm_of
from imagefactory.matrix.plan import (
    AVOIDED,
    GPU_NOT_LISTED,
    NO_MATCH,
    UNSOLVABLE,
    CellRuling,
    CellState,
    PlanGpu,
    PlannedCell,
    PlannedTarget,
    VerificationPlan,
    starts_by_kit,
)
from imagefactory.matrix.rows import RowRuling
from imagefactory.views.text import CPUS, Footnotes, fold, format_table, wrap

DEVICE = ("gpu", "capability", "driver")
MAX_JOBS = 256
"""GitHub: "A matrix will generate a maximum of 256 jobs per workflow run"."""
WIDTH, MIN_WIDTH, COLUMN_WIDTHS = 110, 60, 10
_NO_CLAIM = (AVOIDED, GPU_NOT_LISTED, NO_MATCH, UNSOLVABLE)
"""Rules that depend on arguments or files of this call, so they have no documents and no predictions."""
_MANNER = {Compatibility.PTX: " through PTX", Compatibility.PARTLY: " in part"}
_DOING = {
    CellState.BUILD: "to build",
    CellState.VERIFY: "to verify",
    CellState.UNCHANGED: "unchanged",
    CellState.BLOCKED: "blocked",
    CellState.SKIPPED: "skipped",
}


def format_overview(plan: VerificationPlan, width: int | None = None) -> str:
    """Return one line for each target, grouped by its next step: the status of its capabilities."""
    groups: dict[tuple[CellState, str, str], list[PlannedTarget]] = {}
    for planned in plan.targets:
        groups.setdefault((planned.state, planned.reason, planned.hint), []).append(planned)
    blocks = []
    for (state, reason, hint), targets in groups.items():
        rows = [(f"  {planned.target.name}", _capabilities(planned)) for planned in targets]
        lines = [f"{_DOING[state]}: {reason}", *([f"hint: {hint}"] if hint else [])]
        blocks.append("\n".join([*fold(lines, width), format_table(rows[0], rows[1:], width)]))
    foot = "a TARGET or --inventory FILE shows each cell with its reasons"
    return "\n\n".join([*blocks, "\n".join(fold([summary(plan), foot], width))])


def _capabilities(planned: PlannedTarget) -> str:
    """Return the capabilities by status: `predicted 7.0 8.0; unknown 12.0`."""
    known: dict[str, list[str]] = {}
    for cell in planned.cells:
        claim = cell.ruling.claim
        known.setdefault(str(claim.basis) if claim else "unknown", []).append(str(cell.device))
    return "; ".join(f"{basis} {' '.join(cells)}" for basis, cells in known.items()) or CPUS


def format_plan(plan: VerificationPlan, width: int | None = None, *, show_sources: bool = False) -> str:
    """Return the planned work for each target, its repository, and the skipped cells with reasons.

    Lines fit into a terminal of that `width`, and are never longer than `WIDTH`.
    """
    sources, room = Footnotes(shown=show_sources), max(min(width or WIDTH, WIDTH), MIN_WIDTH)
    blocks = [line for target in plan.targets for line in _format_target(target, sources, room)]
    foot = [summary(plan), *_override((cell.ruling for cell in plan.cells), plan.unused)]
    return "\n".join([*blocks, *([""] if blocks else []), *fold([*foot, *_sources(sources)], width)])


def _format_target(planned: PlannedTarget, sources: Footnotes, width: int) -> list[str]:
    def add(word: str, text: str) -> None:
        first = f"  {word:<{COLUMN_WIDTHS}}"
        folded = wrap(text, width - len(first))
        lines.extend(
            (first if number == 0 else " " * len(first)) + line for number, line in enumerate(folded)
        )

    lines = [f"{planned.target.name}  {planned.state}: {planned.reason}"]
    if planned.hint:
        lines.append(f"  hint: {planned.hint}")
    for state in (CellState.BUILD, CellState.VERIFY, CellState.UNCHANGED, CellState.BLOCKED):
        cells = [cell for cell in planned.cells if cell.state is state]
        for how, alike in _grouped(cells, lambda ruling: _ground_text(ruling, sources)):
            add(str(state), f"{_marked(alike)}: {how}")
        for claim in dict.fromkeys(claim for cell in cells for claim in cell.ruling.warnings):
            affected_cells = _places(cell for cell in cells if claim in cell.ruling.warnings)
            add("", f"warning for {affected_cells}: {claim.reason}{sources.mark([claim.source])}")
    skipped = [cell for cell in planned.cells if cell.state is CellState.SKIPPED]
    for reason, alike in _grouped(skipped, lambda ruling: _skip_reason(ruling, sources)):
        add(_DOING[CellState.SKIPPED], f"{_places(alike)}: {reason}")
    return lines


def _grouped(
    cells: Sequence[PlannedCell], text: Callable[[CellRuling], str]
) -> Iterable[tuple[str, list[PlannedCell]]]:
    """Group cells with equal text, in their order."""
    groups: dict[str, list[PlannedCell]] = {}
    for cell in cells:
        groups.setdefault(text(cell.ruling), []).append(cell)
    return groups.items()


def _places(cells: Iterable[PlannedCell]) -> str:
    return ", ".join(str(cell.device) for cell in cells)


def _marked(cells: Iterable[PlannedCell]) -> str:
    """Mark cells that are planned although the recipe does not require them."""
    return ", ".join(
        str(cell.device) if cell.required else f"{cell.device} beyond the recipe" for cell in cells
    )


def _ground_text(ruling: CellRuling, sources: Footnotes) -> str:
    """Return why a cell stays in the plan."""
    if ruling.allowed:
        against = "; ".join(f"{claim.rule}: {claim.reason}" for claim in ruling.allowed)
        return f"included, although {against}{sources.mark(claim.source for claim in ruling.allowed)}"
    claim = ruling.claim
    if claim is None:
        return ruling.reason
    return f"{claim.basis} to run{_MANNER.get(claim.answer, '')}{sources.mark([claim.source])}"


def _skip_reason(ruling: CellRuling, sources: Footnotes) -> str:
    """Return rule, basis and reason of the first rule that skips the cell, and the other rules."""
    first, *others = ruling.against
    more = ", ".join(dict.fromkeys(claim.rule for claim in others))
    ground = first.rule if first.rule in _NO_CLAIM else f"{first.rule}, {first.basis}"
    text = f"{ground}: {first.reason}{sources.mark([first.source])}"
    text = f"{text}; also {more}" if more else text
    return f"{text}; use {ruling.fix}" if ruling.fix else text


def _sources(sources: Footnotes) -> list[str]:
    lines = sources.lines()
    return ["", "Sources", *(f"  {line}" for line in lines)] if lines else []


def _override(rulings: Iterable[CellRuling], unused: Sequence[str]) -> list[str]:
    rules = sorted({claim.rule for ruling in rulings for claim in ruling.against} - {AVOIDED})
    lines = (
        [f"to include skipped cells: {' '.join(f'--ignore-rule {rule}' for rule in rules)}"] if rules else []
    )
    return lines + [f"--ignore-rule {rule} changed nothing: this rule skips no cell here" for rule in unused]


def summary(plan: VerificationPlan, waiting: int = 0) -> str:
    """Return `24 targets: 20 to build, 4 unchanged; 120 cells: 110 to build, 10 skipped`."""
    counted = "; ".join(_counted(noun, by_state) for noun, by_state in counts(plan).items())
    jobs = f"{waiting} job{'s wait' if waiting > 1 else ' waits'}"
    return (
        f"{counted}; {jobs} for the next nightly run: GitHub runs at most {MAX_JOBS}" if waiting else counted
    )


def _counted(noun: str, by_state: dict[str, int]) -> str:
    total = sum(by_state.values())
    parts = ", ".join(f"{number} {_DOING[CellState(state)]}" for state, number in by_state.items() if number)
    return f"{total} {noun if total != 1 else noun[:-1]}" + (f": {parts}" if parts else "")


def counts(plan: VerificationPlan) -> dict[str, dict[str, int]]:
    """Return the number of `targets` and `cells` in each state."""
    targets, cells = [row.state for row in plan.targets], [row.state for row in plan.cells]
    return {
        noun: {state.value: Counter(states)[state] for state in CellState}
        for noun, states in (("targets", targets), ("cells", cells))
    }


def format_rows(
    judged: Sequence[RowRuling],
    unused: Sequence[str],
    width: int | None = None,
    *,
    show_sources: bool = False,
) -> str:
    """Return for each row whether it is accepted or skipped, and the reason."""
    sources = Footnotes(shown=show_sources)
    rows = []
    for ruled in judged:
        row, ruling = ruled.row, ruled.ruling
        word = "skipped" if ruling.skipped else "accepted"
        reason = _skip_reason(ruling, sources) if ruling.skipped else _ground_text(ruling, sources)
        rows.append((row.given, row.version, row.cuda, str(row.device), row.outcome, word, reason))
    header = ("FRAMEWORK", "VERSION", "CUDA", "GPU", "OUTCOME", "", "WHY")
    columns = [i for i, name in enumerate(header) if name != "OUTCOME" or any(row[i] for row in rows)]
    table = format_table([header[i] for i in columns], [[row[i] for i in columns] for row in rows], width)
    overrides = _override((ruled.ruling for ruled in judged), unused)
    foot = [rows_summary(judged), *_outcomes(judged), *overrides, *_sources(sources)]
    return "\n".join([table, "", *fold(foot, width)])


def _outcomes(judged: Sequence[RowRuling]) -> list[str]:
    """Count accepted and skipped rows by their outcome in the file."""
    outcomes: dict[str, Counter[str]] = {}
    for ruled in judged:
        if ruled.row.outcome:
            outcomes.setdefault(ruled.row.outcome, Counter())[
                "skipped" if ruled.ruling.skipped else "accepted"
            ] += 1
    return [
        f"  {outcome}: {', '.join(f'{number} {word}' for word, number in sorted(words.items()))}"
        for outcome, words in sorted(outcomes.items())
    ]


def rows_summary(judged: Sequence[RowRuling]) -> str:
    """Return `40 rows: 31 accepted (30 documented, ...), 9 skipped (9 toolkit-dropped)`."""
    accepted = Counter(_ground(row.ruling) for row in judged if not row.ruling.skipped)
    gone = Counter(row.ruling.against[0].rule for row in judged if row.ruling.skipped)
    parts = [
        f"{counts.total()} {word} ({', '.join(f'{n} {name}' for name, n in sorted(counts.items()))})"
        for word, counts in (("accepted", accepted), ("skipped", gone))
        if counts
    ]
    return f"{len(judged)} row{'' if len(judged) == 1 else 's'}: {', '.join(parts)}"


def _ground(ruling: CellRuling) -> str:
    if ruling.allowed:
        return "allowed"
    return str(ruling.claim.basis) if ruling.claim else "unknown"


class TargetJob(TypedDict):
    """A row of `targets` in `plan --github`: workflows read these keys."""

    target: str
    status: str
    digest: str
    gpu: str
    kits: str


def format_kits(plan: VerificationPlan) -> str:
    """Return `targets={"include":[...]}`: a job for each target with an image to build or to verify.

    Targets for CPUs and for AMD GPUs have no kits. `kits` are words such as `8.0/sm80-a100`, one for each GPU
    to verify on: its capability, and the name of its kit. `gpu` is `nvidia`, `amd` or `none`. `digest` is the
    candidate to verify, empty if it must be built first.
    """
    jobs: list[TargetJob] = []
    for planned in plan.targets:
        cells = [cell for cell in planned.cells if cell.state in (CellState.BUILD, CellState.VERIFY)]
        by_kits = starts_by_kit(planned.target)
        if (cells and by_kits) or (not by_kits and planned.state is CellState.BUILD):
            verifying = cells if plan.on_gpus and by_kits else []
            kits = [f"{cell.device.capability}/{kit_name(cell.device)}" for cell in verifying]
            jobs.append(
                {
                    "target": planned.target.name,
                    "status": planned.state.value,
                    "digest": planned.image,
                    "gpu": "nvidia" if by_kits else "amd" if planned.target.gpu else "none",
                    "kits": " ".join(dict.fromkeys(kits)),
                }
            )
    return "targets=" + json.dumps({"include": jobs}, separators=(",", ":"))


def kit_name(device: PlanGpu) -> str:
    """Return `sm80-a100-535.54.03` or `sm80-a100-cuda12.4`: letters, digits, dots and dashes."""
    driver = device.driver or (f"cuda{device.cuda}" if device.cuda else "")
    words = (label(device), device.name, driver)
    return "-".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-.") for word in words if word)


def label(device: PlanGpu) -> str:
    """Return `sm80`, or `sm80-1g.10gb` for a MIG slice: the label of a runner with such a GPU."""
    return "-".join(filter(None, (device.capability.sm.replace("_", ""), device.part)))


def format_matrix(plan: VerificationPlan, *, kits: bool = False) -> str:
    """Return `matrix={"include":[...]}` for $GITHUB_OUTPUT: a job for each cell to build or to verify.

    If no GPUs are listed, there is a job for each image to build. All values are strings. With `kits`, a job
    also has the name of its kit and the label of its runners, and AMD GPUs have no jobs, since no kit
    supports them. Equal jobs are merged: GPUs that differ in the CUDA version of their drivers, if no kit
    names it.
    """
    every = (
        _job(planned, cell) | (_kit(cell) if kits and isinstance(cell, PlannedCell) else {})
        for planned in plan.targets
        if not (kits and rocm_of(planned.target.cuda))
        for cell in (planned.cells if plan.on_gpus else (planned,))
        if cell.state in (CellState.BUILD, CellState.VERIFY)
    )
    jobs = list({tuple(job.items()): job for job in every}.values())
    return "matrix=" + json.dumps({"include": jobs}, separators=(",", ":"))


def _job(planned: PlannedTarget, cell: PlannedCell | PlannedTarget) -> dict[str, str]:
    target = planned.target
    device = device_json(cell.device) if isinstance(cell, PlannedCell) else dict.fromkeys(DEVICE, "")
    return {
        "target": target.name,
        "family": target.family,
        "framework": target.framework,
        "version": target.version,
        "cuda": target.cuda,
        "python": target.python,
        "platform": target.platform,
        **device,
        "status": cell.state.value,
    }


def _kit(cell: PlannedCell) -> dict[str, str]:
    return {"kit": kit_name(cell.device), "runner": label(cell.device)}


def device_json(device: PlanGpu) -> dict[str, str]:
    return dict(zip(DEVICE, (device.name, str(device.capability), device.driver), strict=True))


# --- JSON


class RulingRow(TypedDict):
    """Whether to test a cell, and the claims that decide it."""

    basis: ClaimBasis | None
    answer: Compatibility
    rule: str | None
    reason: str
    source: str
    fix: str
    """What would work instead of a skipped cell; empty if unknown."""
    override: str
    """The options that include a skipped cell."""
    skipped_by: Sequence[CellClaim]
    ignored: Sequence[CellClaim]
    """The claims that --ignore-rule ignores."""
    warnings: Sequence[CellClaim]


class PlanCellRow(RulingRow):
    gpu: str
    capability: str
    driver: str
    driver_cuda: str
    """The newest CUDA version that the driver supports."""
    mig: str
    """The type of the MIG slice; empty for a whole GPU."""
    status: CellState
    required: bool
    """Whether the recipe requires the capability."""


class PlanTargetRow(TypedDict):
    target: str
    status: CellState
    reason: str
    hint: str
    image: str
    """The digest of the existing image."""
    reference: str
    recipe: str
    """The file and line of the recipe."""
    cells: list[PlanCellRow]


class PlanDocument(TypedDict):
    """What remains to build and to verify, by target and GPU."""

    format: Literal["imagefactory.plan/1"]
    targets: list[PlanTargetRow]
    counts: dict[str, dict[str, int]]
    """The number of targets and of cells by status."""
    unused_rules: Sequence[str]


class TupleRow(RulingRow):
    location: str
    """The file and line."""
    framework: str
    version: str
    cuda: str
    gpu: str
    capability: str
    driver: str
    driver_cuda: str
    """The newest CUDA version that the driver supports."""
    outcome: str
    """The outcome that the file records; empty for none."""
    status: Literal["accepted", "skipped"]


class PlanTuplesDocument(TypedDict):
    """Which rows of a file of versions are worth a test."""

    format: Literal["imagefactory.plan-tuples/1"]
    rows: list[TupleRow]
    unused_rules: Sequence[str]


def plan_json(whole: VerificationPlan) -> PlanDocument:
    return PlanDocument(
        format="imagefactory.plan/1",
        targets=[
            PlanTargetRow(
                target=planned.target.name,
                status=planned.state,
                reason=planned.reason,
                hint=planned.hint,
                image=planned.image,
                reference=planned.reference,
                recipe=str(planned.target.where),
                cells=[_cell_json(cell) for cell in planned.cells],
            )
            for planned in whole.targets
        ],
        counts=counts(whole),
        unused_rules=whole.unused,
    )


def _cell_json(cell: PlannedCell) -> PlanCellRow:
    device = cell.device
    return PlanCellRow(
        gpu=device.name,
        capability=str(device.capability),
        driver=device.driver,
        driver_cuda=device.cuda,
        mig=device.part,
        status=cell.state,
        required=cell.required,
        **_ruling_json(cell.ruling),
    )


def rows_json(rows: Sequence[RowRuling], unused: Sequence[str]) -> PlanTuplesDocument:
    return PlanTuplesDocument(
        format="imagefactory.plan-tuples/1", rows=[_row_json(row) for row in rows], unused_rules=unused
    )


def _row_json(ruled: RowRuling) -> TupleRow:
    row = ruled.row
    return TupleRow(
        location=row.where,
        framework=row.framework,
        version=row.version,
        cuda=row.cuda,
        gpu=row.device.name,
        capability=str(row.device.capability),
        driver=row.device.driver,
        driver_cuda=row.device.cuda,
        outcome=row.outcome,
        status="skipped" if ruled.ruling.skipped else "accepted",
        **_ruling_json(ruled.ruling),
    )


def _ruling_json(ruling: CellRuling) -> RulingRow:
    """Return a ruling as JSON. Unknown `basis` and `rule` are null."""
    claim = ruling.claim
    return RulingRow(
        basis=claim.basis if claim else None,
        answer=claim.answer if claim else Compatibility.UNKNOWN,
        rule=claim.rule if claim else None,
        reason=ruling.reason,
        source=claim.source if claim else "",
        fix=ruling.fix,
        override=" ".join(f"--ignore-rule {item.rule}" for item in ruling.against),
        skipped_by=ruling.against,
        ignored=ruling.allowed,
        warnings=ruling.warnings,
    )
