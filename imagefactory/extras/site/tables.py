"""Tables of combinations and their verdicts: read from store, registry and sweeps, written as files.

matrix/combos.py decides what the tables contain.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Literal, TypedDict

from imagefactory.access import Access
from imagefactory.actions.centers import JoinedCenter, only_center
from imagefactory.actions.locked import read_unsolvable_reason
from imagefactory.actions.plan import PlanLookup, read_stages
from imagefactory.actions.promote import PromotionRequest, list_verdicts, sifs_of
from imagefactory.actions.read_catalog import read_catalog
from imagefactory.actions.verdicts import find_in, local_place, read_verification_policy, registry_of
from imagefactory.errors import LockError, StaleError, UsageError
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.cells import CellEvidence
from imagefactory.gpu.values import CellClaim, Compatibility
from imagefactory.matrix.combos import (
    INVALID,
    REPORTED,
    VERIFIED,
    ComboCell,
    ComboEntry,
    ComboState,
    SweepNodeState,
    VersionRange,
    columns,
    make_combos,
    make_ranges,
    unite,
)
from imagefactory.matrix.plan import CellRuling, PlanGpu, PlanInput, TargetStatus, make_plan
from imagefactory.model import Outcome, Target
from imagefactory.oci.graph import StoreRepository
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.schedulers.cells import NO_MATCH
from imagefactory.schedulers.sweep_file import read_collected, read_sweep
from imagefactory.serialize import format_time
from imagefactory.settings.load import Settings
from imagefactory.trust.attached import read_subject
from imagefactory.trust.catalog import ImageOffer
from imagefactory.trust.judgement import VerdictSet
from imagefactory.trust.offers import select_images, verify_offer
from imagefactory.views.text import fold, format_table


@dataclass(frozen=True, slots=True, kw_only=True)
class TableData:
    """The contents of the files.

    `trusted` means that a key is trusted here; without one, no verdict is valid.

    `notes` are lines about skipped parts.
    """

    made: datetime
    place: str
    combos: tuple[ComboCell, ...]
    ranges: tuple[VersionRange, ...]
    trusted: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRequest:
    """Where to search verdicts (empty `registry`: only the store), and the current time.

    `capabilities` are columns in addition to those in recipes, verdicts and sweeps. `sweeps` are directories
    that the user passed. `stored` are the sweeps of the store; unreadable ones are skipped.
    """

    now: datetime
    registry: str = ""
    capabilities: tuple[Capability, ...] = ()
    sweeps: tuple[Path, ...] = ()
    stored: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSurvey:
    """A target with its images, the newest first, and its .sif files, each with its repository."""

    stage: TargetStatus
    images: tuple[tuple[StoreRepository, VerdictSet], ...]
    sifs: tuple[tuple[StoreRepository, VerdictSet], ...]


def read_tables(
    project: Project, targets: Sequence[Target], request: TableRequest, progress: Progress
) -> TableData:
    """Return the tables. Raises UsageError for unreadable trust or sweeps, RegistryError and StoreError."""
    tables = survey(project, targets, request, progress)[0]
    for_cpus = ", ".join(target.name for target in targets if not target.gpu)
    note = (f"only for CPUs, so not a combination: {for_cpus}",) if for_cpus else ()
    return replace(tables, notes=(*tables.notes, *note))


def survey(
    project: Project, targets: Sequence[Target], request: TableRequest, progress: Progress
) -> tuple[TableData, tuple[TargetSurvey, ...]]:
    """Return the tables, and a survey of each target. Targets for CPUs have no combination.

    Raises like `read_tables`.
    """
    policy = read_verification_policy(project, request.now)
    also = "" if request.registry else project.settings.registry.value
    lookup = PlanLookup(now=request.now, registry=request.registry, also=also, renew=False)
    stages = [_solved(project, stage) for stage in read_stages(project, targets, lookup)]
    surveyed = tuple(_survey(project, stage, request, progress) for stage in stages)
    on_gpus = [row for row in surveyed if row.stage.target.gpu]
    entries, stages = [_entry(row) for row in on_gpus], [row.stage for row in on_gpus]
    sweep_states, notes = _read_sweeps(request)
    capabilities = columns(entries, sweep_states, request.capabilities)
    combos = make_combos(_with_rulings(entries, stages, capabilities), sweep_states, capabilities)
    tables = TableData(
        made=request.now,
        place=_place_name(project, request.registry),
        combos=combos,
        ranges=make_ranges(combos),
        trusted=bool(policy.trust.keys),
        notes=notes,
    )
    return tables, surveyed


def _place_name(access: Access, registry: str) -> str:
    if registry:
        return registry
    return " and ".join(filter(None, (str(access.settings.store_path), access.settings.registry.value)))


def _solved(project: Project, stage: TargetStatus) -> TargetStatus:
    """Add the reason to a stage that is blocked because locking found no environment."""
    if not stage.block:
        return stage
    try:
        reason = read_unsolvable_reason(project, stage.target)
    except (LockError, StaleError):  # of the parent target, which has its own row
        return stage
    return replace(stage, evidence=CellEvidence(unsolvable=reason.reason)) if reason else stage


def _places(access: Access, family: str, registry: str) -> tuple[StoreRepository, ...]:
    """Return only the requested registry, or else the store and the registry in the settings."""
    if registry:
        return (registry_of(access, family, registry),)
    local = local_place(access, family)
    return (local, registry_of(access, family)) if access.settings.registry.value else (local,)


def _survey(access: Access, stage: TargetStatus, request: TableRequest, progress: Progress) -> TargetSurvey:
    """Return every image of the target in these repositories, the newest first, and the .sif files."""
    target, policy = stage.target, read_verification_policy(access, request.now)
    artifacts: list[tuple[StoreRepository, VerdictSet]] = []
    files: list[tuple[StoreRepository, VerdictSet]] = []
    for repository in _places(access, target.family, request.registry):
        images = list_verdicts(
            access, PromotionRequest(target=target, place=repository, now=request.now), progress
        )
        artifacts += [(repository, image) for image in images]
        for digest in sifs_of(repository, target, images):
            files.append((repository, find_in(access, repository, read_subject(repository, digest), policy)))
    return TargetSurvey(stage=stage, images=tuple(artifacts), sifs=tuple(files))


def _entry(surveyed: TargetSurvey) -> ComboEntry:
    stage, target = surveyed.stage, surveyed.stage.target
    artifacts = [verdicts for _, verdicts in (*surveyed.images, *surveyed.sifs)]
    return ComboEntry(
        target=target.name,
        framework=target.framework,
        version=target.version,
        cuda=target.cuda,
        images=frozenset(artifact.subject.manifest for artifact in artifacts),
        judged=tuple(artifact.judged for artifact in artifacts),
        required=tuple(parse_capability(capability) for capability in target.capabilities),
        block=stage.block or ("" if artifacts else stage.missing),
        revoked=tuple(
            row for _, verdicts in (*surveyed.images[:1], *surveyed.sifs) for row in verdicts.revoked
        ),
    )


def _with_rulings(
    entries: Sequence[ComboEntry], stages: Sequence[TargetStatus], capabilities: Sequence[Capability]
) -> list[ComboEntry]:
    """Add the ruling of a plan without verdicts to every cell."""
    if not capabilities:
        return list(entries)
    plan = make_plan(
        PlanInput(
            stages=tuple(replace(stage, verdicts=()) for stage in stages),
            devices=tuple(PlanGpu(capability=capability) for capability in capabilities),
        )
    )
    return [
        replace(entry, rulings={cell.device.capability: cell.ruling for cell in planned.cells})
        for entry, planned in zip(entries, plan.targets, strict=True)
    ]


def _read_sweeps(request: TableRequest) -> tuple[tuple[SweepNodeState, ...], tuple[str, ...]]:
    """Return the results of all sweeps, and notes on skipped sweeps. Raises UsageError for a passed one."""
    states = [state for directory in request.sweeps for state in read_sweep_results(directory)]
    notes = []
    for directory in request.stored:
        try:
            states += read_sweep_results(directory)
        except UsageError as error:
            notes.append(f"skipped a sweep of the store: {error.message}")
    return tuple(states), tuple(notes)


def read_sweep_results(directory: Path) -> tuple[SweepNodeState, ...]:
    """Return the results of the last `sweep collect`. Raises UsageError if `directory` is not a sweep."""
    sweep = read_sweep(directory)
    nodes = {node.name: node for node in sweep.nodes}
    states = [
        SweepNodeState(
            target=node.target,
            capability=_capability(node.capability, directory),
            outcome=node.result.outcome,
            reason=node.why or node.result.reason,
            sweep=sweep.id,
            made=sweep.created,
            images=frozenset({nodes[node.result.node].image.subject.manifest}),
        )
        for node in read_collected(directory)
        if node.result.outcome is not None and node.result.node in nodes
    ]
    states += [
        SweepNodeState(
            target=skipped.target,
            capability=_capability(skipped.capability, directory),
            outcome=Outcome.NO_MATCH,
            reason=skipped.reason,
            sweep=sweep.id,
            made=sweep.created,
            images=frozenset(),
        )
        for skipped in sweep.skipped
        if skipped.rule == NO_MATCH
    ]
    return tuple(states)


def _capability(text: str, directory: Path) -> Capability:
    try:
        return parse_capability(text)
    except ValueError as error:
        raise UsageError(
            "sweep-file-invalid",
            f"{directory}: {error}",
            hint="omit this sweep, or pass the directory of another one",
        ) from error


def read_cataloged(
    settings: Settings, environ: Mapping[str, str], names: Sequence[str], request: TableRequest
) -> TableData:
    """Return the tables of a signed catalog, with its predictions, for users without a project.

    Raises like `read_catalog`, and NothingSelectedError for an unknown name.
    """
    center, names = only_center(settings, names)
    return survey_catalog(center, environ, names, request)[0]


def survey_catalog(
    center: JoinedCenter, environ: Mapping[str, str], names: Sequence[str], request: TableRequest
) -> tuple[TableData, tuple[ImageOffer, ...]]:
    """Return the tables of a center's catalog, and its offers. Raises like `read_cataloged`."""
    catalog, trust = read_catalog(center.settings, environ, request.now), center.trust
    offers = tuple(
        verify_offer(catalog, image, trust, request.now) for image in select_images(catalog, names)
    )
    entries = [_catalog_entries(offer) for offer in offers if offer.image.gpu]
    sweep_states, notes = _read_sweeps(request)
    capabilities = columns(entries, sweep_states, request.capabilities)
    combos = make_combos(entries, sweep_states, capabilities)
    tables = TableData(
        made=request.now,
        place=center.place,
        combos=combos,
        ranges=make_ranges(combos),
        notes=(*catalog.notes, *notes),
    )
    return tables, offers


def _catalog_entries(offer: ImageOffer) -> ComboEntry:
    image = offer.image
    claims: dict[Capability, CellClaim] = {}
    for capability, claim in image.predicted:  # the strongest of a capability comes first
        claims.setdefault(parse_capability(capability), claim)
    return ComboEntry(
        target=image.target,
        framework=image.framework,
        version=image.target.removeprefix(f"{image.family}-").partition("-")[0],
        cuda=image.cuda,
        images=frozenset({image.subject.manifest, *(row.sif.subject.manifest for row in offer.sifs)}),
        judged=(offer.judged, *(row.judged for row in offer.sifs)),
        rulings={
            capability: CellRuling(claim=claim, against=(claim,) if claim.answer is Compatibility.NO else ())
            for capability, claim in claims.items()
        },
        required=tuple(parse_capability(capability) for capability in image.required),
        revoked=tuple(
            row
            for subject in (image.subject, *(row.sif.subject for row in offer.sifs))
            for row in image.revoked_of(subject)
        ),
    )


# --- The tables as files: CSV with the columns of CHTC's compatibility test, Markdown and JSON. Pure


HEADER = "Framework, Compute Capability, Cuda Library, Framework Version, Failure Cause"


def format_csv(combos: Iterable[ComboCell]) -> str:
    """Return a line for each framework, CUDA, version and capability that runs or fails.

    `Failure Cause` is empty if it runs. A combination that was not tested, or whose job failed because of a
    machine or the pool, is not included. The header is that of CHTC's test.
    """
    decided = (combo for combo in unite(combos) if combo.status in (ComboState.VALID, *INVALID))
    out = io.StringIO()
    out.write(f"{HEADER}\n")
    csv.writer(out, lineterminator="\n").writerows(
        (
            row.framework,
            row.capability,
            row.cuda,
            row.version,
            "" if row.status is ComboState.VALID else cause(row),
        )
        for row in decided
    )
    return out.getvalue()


def cause(combo: ComboCell) -> str:
    """Return the cause of a failure, with its basis if it is only predicted or documented; else nothing."""
    known = not combo.cause or combo.basis in (VERIFIED, REPORTED) or combo.cause in tuple(Outcome)
    return combo.cause if known else f"{combo.cause} ({combo.basis})"


# --- JSON ----------------------------------------------------------------------------------------


class ReportDocument(TypedDict):
    """The state of every target on every compute capability (`report --format json`)."""

    format: Literal["imagefactory.report/1"]
    created: str
    place: str
    counts: dict[str, int]
    """The number of combinations in each state."""
    combos: list[ComboCell]
    ranges: list[VersionRange]
    notes: list[str]


def tables_json(tables: TableData) -> ReportDocument:
    """Return every target on every capability, tested or not, as JSON."""
    return ReportDocument(
        format="imagefactory.report/1",
        created=format_time(tables.made),
        place=tables.place,
        counts=counts(tables.combos),
        combos=list(tables.combos),
        ranges=list(tables.ranges),
        notes=list(tables.notes),
    )


def counts(combos: Iterable[ComboCell]) -> dict[str, int]:
    """Return the number of combinations in each state. Several targets with one combination count once."""
    by_state = Counter(combo.status for combo in unite(combos))
    return {state.value: by_state[state] for state in ComboState}


# --- for people ----------------------------------------------------------------------------------

_NOBODY = "No key is trusted here, so nothing can be called valid."


def format_summary(tables: TableData, width: int | None = None) -> str:
    """Return version ranges by framework and capability, and the number of combinations in each state."""
    number = counts(tables.combos)
    foot = ", ".join(f"{number[state]} {state}" for state in ComboState if number[state]) or "nothing"
    lines = [f"{sum(number.values())} combinations in {tables.place}: {foot}"]
    lines += [] if tables.trusted else [_NOBODY]
    lines += tables.notes
    if not tables.ranges:
        return "\n".join(lines)
    header, rows = _range_table(tables.ranges)
    cells = [[cell or "-" for cell in row] for row in rows]
    table = format_table([column.upper() for column in header], cells, width)
    return "\n".join([table, "", *fold(lines, width)])


def _range_table(ranges: Sequence[VersionRange]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return a row for each framework and capability, and a column for each state that occurs."""
    states = [
        state
        for state in ComboState
        if state is ComboState.VALID or any(row.status is state for row in ranges)
    ]
    header = ("Framework", "Capability", *(state.capitalize() for state in states))
    rows = [
        (framework, str(capability), *(_source_text(some, state) for state in states))
        for (framework, capability), some in _by_gpu(ranges)
    ]
    return header, rows


def _by_gpu(ranges: Iterable[VersionRange]) -> Iterable[tuple[tuple[str, Capability], list[VersionRange]]]:
    for key, some in groupby(ranges, key=lambda row: (row.framework, row.capability)):
        yield key, list(some)


def _source_text(ranges: Iterable[VersionRange], state: ComboState) -> str:
    return ", ".join(row.versions for row in ranges if row.status is state)


def format_markdown(tables: TableData) -> str:
    """Return the tables in Markdown: ranges, then valid and invalid combinations with reasons."""
    valid = [combo for combo in tables.combos if combo.status is ComboState.VALID]
    invalid = [combo for combo in tables.combos if combo.status in INVALID]
    undecided = [combo for combo in tables.combos if combo.status is ComboState.UNDECIDED]
    untested = [combo for combo in tables.combos if combo.status is ComboState.NOT_TESTED]
    parts = [
        "# Which framework runs on which GPU",
        f"Created {tables.made:%Y-%m-%d} from {_cell(tables.place)}.",
        "*Valid*: a valid verdict of exactly that capability says so. *Failed*: the suite ran there and"
        " failed. *Ruled-out*: it was not run, and is known not to work. *Undecided*: it was tested, but the"
        " result says nothing about the image.",
        *([] if tables.trusted else [_NOBODY]),
        *(_cell(note) for note in tables.notes),
        "`imagefactory report -o DIR` shows the same with filters and the checks of each image.",
        "## Version ranges",
        _markdown(*_range_table(tables.ranges)),
        "## Valid",
        _markdown(
            ("Framework", "Version", "CUDA", "Compute capability", "Target", "Driver", "Verified by"),
            [(*_place(combo), combo.target, f"{combo.driver} or newer", combo.source) for combo in valid],
        ),
        "## Invalid",
        _markdown(
            ("Framework", "Version", "CUDA", "Compute capability", "Target", "State", "Cause", "Why"),
            [
                (*_place(combo), combo.target, combo.status.value, cause(combo), combo.reason)
                for combo in invalid
            ],
        ),
        "## Undecided",
        _markdown(
            ("Framework", "Version", "CUDA", "Compute capability", "Target", "Cause", "Why"),
            [(*_place(combo), combo.target, cause(combo), combo.reason) for combo in undecided],
        ),
        "## Not tested",
        _markdown(
            ("Target", "Compute capabilities"),
            [
                (target, " ".join(str(combo.capability) for combo in some))
                for target, some in groupby(untested, key=lambda combo: combo.target)
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _place(combo: ComboCell) -> tuple[str, str, str, str]:
    return combo.framework, combo.version, combo.cuda, str(combo.capability)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "None."
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    """Return the text as one line, with the markup of Markdown and HTML escaped."""
    plain = "".join(character if character.isprintable() else " " for character in text)
    for mark in "\\|`*[]":
        plain = plain.replace(mark, f"\\{mark}")
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
