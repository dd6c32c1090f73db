"""A version space without recipes: rows of framework x version x CUDA x capability.

No I/O. Every row is accepted or skipped, with a reason, by the same rules as a plan (matrix/plan.py).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from imagefactory.errors import Diagnostic, RecipeError
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.cells import CellEvidence, answer_cell
from imagefactory.gpu.drivers import driver_floor, older, read_driver
from imagefactory.gpu.knowledge import distributions, families, known_names, newest_patch
from imagefactory.gpu.knowledge.toolkits import native_driver
from imagefactory.gpu.values import CellClaim, CellQuery, ClaimBasis, Compatibility
from imagefactory.matrix.plan import (
    GPU_NOT_LISTED,
    NO_MATCH,
    UNSOLVABLE,
    Answerer,
    CellRuling,
    PlanGpu,
    weigh_claims,
    with_fix,
)
from imagefactory.recipes.yaml_tree import show
from imagefactory.versions import natural, nearest

MAX_ROWS = 20_000
COLUMNS = ("framework", "version", "cuda", "capability")
OPTIONAL = ("driver", "outcome")
UNSOLVED = ("environment resolution failure", "unsolvable")
"""Outcomes, in lower case, for environments without a solution: CHTC's label, and imagefactory's."""
_ALIASES = {"framework_version": "version"}
_NUMBERS = {
    "version": (r"[0-9]{1,4}(\.[0-9]{1,6}){0,3}", "a version such as 2.3"),
    "cuda": (r"(rocm)?[0-9]{1,2}(\.[0-9]{1,2}){0,2}", "a CUDA version such as 12.1 or 12, or rocm6.2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpaceRow:
    """One line of a version space. `framework` is the distribution, `given` its name in the file.

    `where` is `file:line`. `outcome` is the file's outcome, empty without one.
    """

    where: str
    given: str
    framework: str
    version: str
    cuda: str
    device: PlanGpu
    outcome: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRuling:
    row: VersionSpaceRow
    ruling: CellRuling


def parse_rows(text: str, file: str) -> tuple[VersionSpaceRow, ...]:
    """Parse a CSV with the columns framework, version, cuda, capability and optionally driver, outcome.

    The framework is a distribution or another name for it (`pytorch`, `tf`). Empty lines and lines that
    begin with `#` are skipped. Raises RecipeError with file:line of every problem.
    """
    lines = _lines(text, file)
    header_where, header = next(lines, (f"{file}:1", []))
    columns = [_ALIASES.get(name.strip().lower(), name.strip().lower()) for name in header]
    _check_header(header_where, columns)
    faults: list[Diagnostic] = []
    rows: list[VersionSpaceRow] = []
    for location, values in lines:
        if len(rows) + len(faults) >= MAX_ROWS:
            raise RecipeError(
                [Diagnostic("too-many-rows", location, f"more than {MAX_ROWS:,} rows", "split the file")]
            )
        if len(values) != len(columns):
            message = f"{len(values)} values for {len(columns)} columns"
            faults.append(Diagnostic("columns-mismatch", location, message, f"write {','.join(columns)}"))
            continue
        fields = dict(zip(columns, (value.strip() for value in values), strict=True))
        wrong = tuple(_row_errors(location, fields))
        faults += wrong
        if not wrong:
            rows.append(_row(location, fields))
    if faults:
        more = (
            [Diagnostic("more-problems", file, f"{len(faults) - 20} more problems")]
            if len(faults) > 20
            else []
        )
        raise RecipeError([*faults[:20], *more])
    return tuple(rows)


def _lines(text: str, file: str) -> Iterator[tuple[str, list[str]]]:
    """Yield `file:line` and the values of each line that is not empty."""
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True)
    try:
        for values in reader:
            if any(value.strip() for value in values) and not values[0].lstrip().startswith("#"):
                yield f"{file}:{reader.line_num}", values
    except csv.Error as error:
        raise RecipeError(
            [
                Diagnostic(
                    "csv-invalid", f"{file}:{reader.line_num}", f"not valid CSV: {error}", "fix the line"
                )
            ]
        ) from error


def _check_header(location: str, columns: Sequence[str]) -> None:
    known = (*COLUMNS, *OPTIONAL)
    missing = [name for name in COLUMNS if name not in columns]
    unknown = [name for name in columns if name not in known]
    hint = f"write the header {','.join(COLUMNS)}; {' and '.join(OPTIONAL)} are optional"
    if unknown:
        suggestion = nearest(unknown[0], known)
        meant = f"did you mean '{suggestion}'?" if suggestion else ""
        raise RecipeError(
            [Diagnostic("column-unknown", location, f"unknown column {show(unknown[0])}", meant)], hint=hint
        )
    if missing or len(set(columns)) < len(columns):
        problem = (
            Diagnostic("column-missing", location, f"the column {missing[0]} is missing")
            if missing
            else Diagnostic("duplicate-column", location, "a column is duplicate", "remove one of the two")
        )
        raise RecipeError([problem], hint=hint)


def _row_errors(location: str, fields: Mapping[str, str]) -> Iterator[Diagnostic]:
    if hidden := next((column for column, value in fields.items() if not value.isprintable()), ""):
        yield Diagnostic("hidden-character", location, f"{hidden} has an invisible character", "remove it")
        return
    name = fields["framework"].lower()
    if name not in known_names():
        suggestion = nearest(name, sorted(known_names()))
        meant = (
            f"did you mean '{suggestion}'?" if suggestion else f"use one of {', '.join(sorted(families()))}"
        )
        yield Diagnostic("framework-unknown", location, f"unknown framework '{name[:40]}'", meant)
    for column, (pattern, example) in _NUMBERS.items():
        if not re.fullmatch(pattern, fields.get(column, ""), re.ASCII) and (column in fields):
            yield Diagnostic(
                "value-invalid", location, f"{column} cannot be '{fields[column][:40]}'", f"write {example}"
            )
    try:
        read_driver(fields["driver"]) if fields.get("driver") else ""
    except ValueError as error:
        yield Diagnostic("value-invalid", location, str(error), "write a driver's version such as 535.54.03")
    try:
        parse_capability(fields["capability"])
    except ValueError as error:
        yield Diagnostic("capability-invalid", location, str(error), "write a capability such as 8.0")


def _row(location: str, fields: Mapping[str, str]) -> VersionSpaceRow:
    name, driver = fields["framework"].lower(), fields.get("driver", "")
    device = PlanGpu(
        capability=parse_capability(fields["capability"]), driver=read_driver(driver) if driver else ""
    )
    return VersionSpaceRow(
        where=location,
        given=name,
        framework=distributions(name, fields["version"], fields["cuda"])[0],
        version=fields["version"],
        cuda=fields["cuda"],
        device=device,
        outcome=fields.get("outcome", ""),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsQuery:
    """Rows, and the GPUs to check them against. Without GPUs each row's own capability is used.

    `pool` is the pool with these GPUs, empty for a list of a user. In a pool one GPU of a capability is
    enough. `strict` requires a driver that supports the row's exact CUDA, as CHTC's
    gpu-compatibility-testing did; otherwise any driver of the same major is enough, as NVIDIA documents.
    `recorded` accepts the rows' own outcomes for environments without a solution.
    """

    rows: tuple[VersionSpaceRow, ...]
    devices: tuple[PlanGpu, ...] = ()
    allow: frozenset[str] = frozenset()
    answer: Answerer = answer_cell
    pool: str = ""
    strict: bool = False
    recorded: bool = False


def rule_rows(query: RowsQuery) -> tuple[RowRuling, ...]:
    """Return each row, accepted or skipped; for a user's list once for each GPU with its capability.

    For a pool each row is returned once, with the newest driver on which it is not skipped. A row with a
    driver keeps it.
    """
    judged: list[RowRuling] = []
    for row in query.rows:
        fitting = [device for device in query.devices if device.capability == row.device.capability]
        if query.pool:
            fitting.sort(key=lambda device: natural(device.cuda or device.driver), reverse=True)
        every = [_rule_row(row, device, query) for device in fitting or (None,)]
        judged += [min(every, key=lambda ruling: ruling.ruling.skipped)] if query.pool else every
    return tuple(judged)


def _rule_row(row: VersionSpaceRow, listed: PlanGpu | None, query: RowsQuery) -> RowRuling:
    """Return the decision for a row on one type of GPU, None if no listed GPU has its capability."""
    row_driver, device = row.device.driver, listed or row.device
    ruled = replace(row, device=replace(device, driver=row_driver, cuda="") if row_driver else device)
    question = CellQuery(
        framework=row.framework,
        version=newest_patch(row.framework, row.version),
        cuda=row.cuda,
        capability=device.capability,
        driver=ruled.device.oldest_driver,
        host=device.host,
    )
    cell = query.answer(question, CellEvidence())
    against = (*_recorded(row, query), *_unmatched(row, listed, query))
    ruling = weigh_claims(replace(cell, warnings=(*against, *cell.warnings)), query.allow)
    return RowRuling(row=ruled, ruling=ruling if against else with_fix(ruling, cell, ruled.device))


def _recorded(row: VersionSpaceRow, query: RowsQuery) -> Iterator[CellClaim]:
    if query.recorded and row.outcome.lower() in UNSOLVED:
        reason = f"recorded as '{row.outcome}', not solved here"
        yield _against(UNSOLVABLE, reason, f"the rows of {row.where.rpartition(':')[0]}")


def _unmatched(row: VersionSpaceRow, listed: PlanGpu | None, query: RowsQuery) -> Iterator[CellClaim]:
    """Yield the reasons why listed GPUs do not match the row."""
    capability = row.device.capability
    if query.devices and listed is None:
        if query.pool:
            yield _against(NO_MATCH, f"no GPU there has capability {capability}", query.pool)
        else:
            reason = f"none of the listed GPUs has capability {capability}"
            yield _against(GPU_NOT_LISTED, reason, "the list of GPUs")
    elif query.pool and listed is not None and not row.device.driver:
        needed = row.cuda if query.strict else driver_floor(row.cuda)
        if not _driver_supports(listed, needed):
            most = f"take CUDA {listed.cuda} at most" if listed.cuda else f"are {listed.driver} at most"
            yield _against(
                NO_MATCH,
                f"the drivers of GPUs with {capability} {most}, and CUDA {needed} is needed",
                query.pool,
            )


def _driver_supports(device: PlanGpu, cuda: str) -> bool:
    """Return whether a GPU's driver supports programs of that CUDA version. An unknown driver may."""
    if device.cuda:
        return natural(device.cuda) >= natural(cuda)
    first = native_driver(cuda)
    return not device.driver or not first or not older(device.driver, first)


def _against(rule: str, reason: str, source: str) -> CellClaim:
    return CellClaim(
        basis=ClaimBasis.DOCUMENTED, answer=Compatibility.NO, rule=rule, reason=reason, source=source
    )
