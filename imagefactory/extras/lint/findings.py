"""The result of a check: findings, fixes and reachable GPUs, as text and JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple, TypedDict

from imagefactory.schedulers.pool import Inventory
from imagefactory.schedulers.sites import Site
from imagefactory.trust.catalog import Catalog, CatalogImage, ImageOffer
from imagefactory.views.catalog import CatalogRow
from imagefactory.views.text import format_table, wrap

# --- Findings. Pure


class Severity(StrEnum):
    """WRONG: jobs fail, never start, or run another image than expected. ADVICE: there is a better way."""

    WRONG = "wrong"
    ADVICE = "advice"


class FileLocation(NamedTuple):
    """A location in a file. Columns count from 1; 0 means the whole line."""

    line: int
    column: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LineEdit:
    """Replace lines `first` to `last` by `text`. If `last` is before `first`, insert `text` there."""

    first: int
    last: int
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFinding:
    """A problem in a file. `rule` is its short name for tables.

    `edits` apply the hint. They are empty if the intended meaning is uncertain. `column` counts from 1; 0
    means the whole line.
    """

    line: int
    rule: str
    severity: Severity
    message: str
    hint: str = ""
    edits: tuple[LineEdit, ...] = ()
    column: int = 0


def wrong(
    line: int, rule: str, message: str, hint: str = "", *, edits: tuple[LineEdit, ...] = (), column: int = 0
) -> SubmitFinding:
    return SubmitFinding(
        line=line,
        rule=rule,
        severity=Severity.WRONG,
        message=message,
        hint=hint,
        edits=edits,
        column=column,
    )


def advice(
    line: int, rule: str, message: str, hint: str = "", *, edits: tuple[LineEdit, ...] = (), column: int = 0
) -> SubmitFinding:
    return replace(wrong(line, rule, message, hint, edits=edits, column=column), severity=Severity.ADVICE)


VERIFIED, PREDICTED, UNTESTED, UNUSABLE = "verified", "predicted", "not-tested", "refused"
REVOKED = "revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """The pool, catalog and registry for a check. `inventory` and `catalog` are None if unavailable.

    `offer` verifies the verdicts of a catalog image. `digest` queries the registry for the current digest of
    a tag, empty if unknown. `edf` returns the text of an EDF by its path in a script, None if it is not here.
    """

    site: Site
    inventory: Inventory | None
    catalog: Catalog | None
    offer: Callable[[CatalogImage], ImageOffer]
    digest: Callable[[str], str] = lambda _: ""
    edf: Callable[[str], str | None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachableGpus:
    """GPUs of one capability that the jobs of a `queue` can get.

    `image` is the status of the image on them: VERIFIED, PREDICTED, UNTESTED, UNUSABLE or REVOKED, empty if
    unknown. `unsure` counts GPUs that may reject the job.
    """

    capability: str
    gpus: int
    free: int
    unsure: int
    image: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCheckResult:
    """The result for one `queue`. `target` is the catalog name of its image.

    `title` is for display. `total` counts the GPUs in the inventory. `causes` are pairs of a reason and the
    number of GPUs that the jobs cannot get. `known` is false without an inventory, `gpu` is false if the jobs
    request no GPU.
    """

    line: int
    count: int | None
    image: str
    target: str
    known: bool
    total: int
    reached: tuple[ReachableGpus, ...]
    causes: tuple[tuple[str, int], ...]
    gpu: bool
    findings: tuple[SubmitFinding, ...]
    title: str

    @property
    def gpus(self) -> int:
        return sum(row.gpus for row in self.reached)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCheckResult:
    """The result for a file. `findings` are those that belong to no `queue`."""

    name: str
    jobs: tuple[QueueCheckResult, ...]
    findings: tuple[SubmitFinding, ...]

    @property
    def all_findings(self) -> tuple[SubmitFinding, ...]:
        """Return the findings by line, WRONG first. A finding of several queues appears once."""
        queues = {jobs.line for jobs in self.jobs}
        first: dict[SubmitFinding, SubmitFinding] = {}
        for finding in [*self.findings, *(finding for jobs in self.jobs for finding in jobs.findings)]:
            first.setdefault(replace(finding, line=0) if finding.line in queues else finding, finding)
        return tuple(
            sorted(
                first.values(),
                key=lambda finding: (
                    finding.line,
                    finding.severity is not Severity.WRONG,
                    finding.column,
                    finding.rule,
                ),
            )
        )

    @property
    def wrong(self) -> bool:
        return any(finding.severity is Severity.WRONG for finding in self.all_findings)


# --- Text and JSON


WIDTH, MIN_WIDTH = 110, 60


def format_check(checked: SubmitCheckResult, width: int | None = None) -> str:
    """Return the report: findings by line in the format of compilers, reachable GPUs, and a summary."""
    room = max(min(width or WIDTH, WIDTH), MIN_WIDTH)
    blocks = [list(_findings(checked, room)), *(list(_reach(jobs, room)) for jobs in checked.jobs)]
    return "\n\n".join("\n".join(block) for block in [*blocks, [summary(checked)]] if block)


def summary(checked: SubmitCheckResult) -> str:
    """Return a summary line, such as `train.sub: 2 errors, 1 warning`."""
    findings = checked.all_findings
    bad = sum(finding.severity is Severity.WRONG for finding in findings)
    better = len(findings) - bad
    parts = [f"{bad} error{'s' if bad != 1 else ''}"] if bad else ["no errors"]
    parts += [f"{better} warning{'s' if better != 1 else ''}"] if better else []
    return f"{checked.name}: {', '.join(parts)}"


def _findings(checked: SubmitCheckResult, width: int) -> Iterator[str]:
    for finding in checked.all_findings:
        location = f"{finding.line}:{finding.column}" if finding.column else f"{finding.line}"
        first = f"{checked.name}:{location}: {finding.severity}: "
        text = f"{finding.message} [{finding.rule}]"
        lines = wrap(first + text, width)
        yield lines[0]
        yield from ("  " + line for line in lines[1:])
        if finding.hint:
            yield from ("    " + line for line in wrap(finding.hint, width - 4))


def _reach(jobs: QueueCheckResult, width: int) -> Iterator[str]:
    count = "some jobs" if jobs.count is None else f"{jobs.count} job{'s' if jobs.count != 1 else ''}"
    which = f" of {jobs.target}" if jobs.target else ""
    if not jobs.gpu:
        yield f"{jobs.title}: {count}{which}, without a GPU"
        return
    if not jobs.known:
        yield f"{jobs.title}: {count}{which}; the number of matching GPUs is unknown"
        return
    share = f"{jobs.gpus} of {jobs.total} GPU{'s' if jobs.total != 1 else ''}"
    yield from wrap(f"{jobs.title}: {count}{which}, each matches {share} of this cluster", width)
    if jobs.reached:
        header = ("CAPABILITY", "TOTAL", "FREE", "STATUS", "WHY")
        yield from format_table(header, [_row(row) for row in jobs.reached], width).splitlines()
    if jobs.causes:
        rest = jobs.total - jobs.gpus
        reason = f"the other {rest} do{'es' if rest == 1 else ''} not match" if jobs.gpus else "no match"
        yield from wrap(f"{reason}: {join_causes(jobs.causes)}", width)


def _row(row: ReachableGpus) -> tuple[str, ...]:
    unsure = f"{row.unsure} of them may reject the job" if row.unsure else ""
    reason = "; ".join(part for part in (row.why, unsure) if part)
    return row.capability, str(row.gpus), str(row.free), row.image or "not known", reason


class JobFindingRow(TypedDict):
    line: int
    column: int | None
    rule: str
    severity: Severity
    message: str
    hint: str


class QueueGpusRow(TypedDict):
    """GPUs of one capability that the jobs can get."""

    capability: str
    total: int
    free: int
    uncertain: int
    """How many of them may reject the jobs."""
    status: str
    """The image there: `verified`, `predicted`, `not-tested`, `refused` or `revoked`; empty if unknown."""
    reason: str


class ExcludedGpusRow(TypedDict):
    total: int
    reason: str


class QueueRow(TypedDict):
    """The jobs of one `queue` statement or batch script. Counts are null without an inventory."""

    line: int
    jobs: int | None
    """Null if another program makes the list of jobs."""
    image: str
    target: str
    matching: int | None
    total: int | None
    """The GPUs of the pool."""
    gpus: list[QueueGpusRow]
    excluded: list[ExcludedGpusRow]


class JobCheckDocument(TypedDict):
    """The check of a job file against a pool."""

    format: Literal["imagefactory.job-check/1"]
    file: str
    site: str
    failed: bool
    """Whether a finding is an error."""
    findings: list[JobFindingRow]
    queues: list[QueueRow]
    diff: str
    """What --fix changed; empty for nothing."""
    catalogs: list[CatalogRow]


def check_json(
    checked: SubmitCheckResult, site: str, diff: str, catalogs: list[CatalogRow]
) -> JobCheckDocument:
    return JobCheckDocument(
        format="imagefactory.job-check/1",
        file=checked.name,
        site=site,
        failed=checked.wrong,
        findings=[
            JobFindingRow(
                line=finding.line,
                column=finding.column or None,
                rule=finding.rule,
                severity=finding.severity,
                message=finding.message,
                hint=finding.hint,
            )
            for finding in checked.all_findings
        ],
        queues=[
            QueueRow(
                line=jobs.line,
                jobs=jobs.count,
                image=jobs.image,
                target=jobs.target,
                matching=jobs.gpus if jobs.known else None,
                total=jobs.total if jobs.known else None,
                gpus=[
                    QueueGpusRow(
                        capability=row.capability,
                        total=row.gpus,
                        free=row.free,
                        uncertain=row.unsure,
                        status=row.image,
                        reason=row.why,
                    )
                    for row in jobs.reached
                ],
                excluded=[ExcludedGpusRow(total=count, reason=cause) for cause, count in jobs.causes],
            )
            for jobs in checked.jobs
        ],
        diff=diff,
        catalogs=catalogs,
    )


def join_causes(causes: Iterable[tuple[str, int]]) -> str:
    """Return the causes in one line. If there are several, each has its number of GPUs."""
    every = tuple(causes)
    return "; ".join(cause if len(every) == 1 else f"{cause} ({count})" for cause, count in every)
