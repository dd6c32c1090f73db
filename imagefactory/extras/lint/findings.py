"""A checked file as a value: what it is checked for, what is wrong with it, where its jobs get. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from imagefactory.schedulers.pool import Inventory
from imagefactory.schedulers.sites import Site
from imagefactory.trust.catalog import Catalog, CatalogImage, ImageOffer
from imagefactory.views.text import format_table, wrap

# --- What is told about a submit file: one thing with its line, and what certainly mends it. Pure


class Severity(StrEnum):
    """WRONG: jobs fail, wait for ever or are not what they seem. ADVICE: it can be had better."""

    WRONG = "wrong"
    ADVICE = "advice"


class FileLocation(NamedTuple):
    """Where in a file a finding is; columns count from 1, and 0 is the whole line."""

    line: int
    column: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LineEdit:
    """Lines `first` to `last` of a file become `text`; where `last` is before `first`, it is put there."""

    first: int
    last: int
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFinding:
    """One thing about a file. `rule` is a word for tables, `hint` what to write.

    `edits` do what the hint says where that is certain to be what the file means; else there are none.
    `column` counts from 1; 0 is the whole line.
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
    """What a file is checked for. `inventory` and `catalogue` are None where there is none to be had.

    `offer` judges the verdicts of a catalogued image, by the reader's trust and clock. `digest` asks the
    registry what a reference with a tag points to now; empty where that is not to be had.
    """

    site: Site
    inventory: Inventory | None
    catalogue: Catalog | None
    offer: Callable[[CatalogImage], ImageOffer]
    digest: Callable[[str], str] = lambda _: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachableGpus:
    """GPUs of one capability that the jobs of a `queue` can get, and what is known of the image there.

    `word` is VERIFIED, PREDICTED, UNTESTED, REFUSED or REVOKED, empty where nothing is known of the image.
    """

    capability: str
    gpus: int
    free: int
    unsure: int
    image: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCheckResult:
    """One `queue`: what is wrong, and where its jobs get. `target` is the catalogue's name of its image.

    `title` names it to a person. `total` counts the GPUs of the inventory, `causes` what keeps jobs from how
    many. `known` is false where there was no inventory, `gpu` where the jobs ask for none.
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
        return sum(one.gpus for one in self.reached)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCheckResult:
    """A whole file. `findings` are those of no single `queue`."""

    name: str
    jobs: tuple[QueueCheckResult, ...]
    findings: tuple[SubmitFinding, ...]

    @property
    def all_findings(self) -> tuple[SubmitFinding, ...]:
        """Each once, by line, what is wrong first. What several `queue` lack is told of the first."""
        queues = {jobs.line for jobs in self.jobs}
        found: dict[SubmitFinding, SubmitFinding] = {}
        for one in [*self.findings, *(one for jobs in self.jobs for one in jobs.findings)]:
            found.setdefault(replace(one, line=0) if one.line in queues else one, one)
        return tuple(
            sorted(
                found.values(),
                key=lambda one: (one.line, one.severity is not Severity.WRONG, one.column, one.rule),
            )
        )

    @property
    def wrong(self) -> bool:
        return any(one.severity is Severity.WRONG for one in self.all_findings)


# --- Findings as a person reads them, and as JSON


WIDTH, MIN_WIDTH = 110, 60


def format_check(checked: SubmitCheckResult, width: int | None = None) -> str:
    """Findings by line, as compilers tell them; then where the jobs of each `queue` get; then the answer."""
    room = max(min(width or WIDTH, WIDTH), MIN_WIDTH)
    blocks = [list(_findings(checked, room)), *(list(_reach(jobs, room)) for jobs in checked.jobs)]
    return "\n\n".join("\n".join(block) for block in [*blocks, [summary(checked)]] if block)


def summary(checked: SubmitCheckResult) -> str:
    """`train.sub: 2 things are wrong, 1 can be had better`."""
    found = checked.all_findings
    bad = sum(one.severity is Severity.WRONG for one in found)
    better = len(found) - bad
    parts = [f"{bad} thing{'s are' if bad != 1 else ' is'} wrong"] if bad else ["nothing is wrong"]
    parts += [f"{better} can be had better"] if better else []
    return f"{checked.name}: {', '.join(parts)}"


def _findings(checked: SubmitCheckResult, width: int) -> Iterator[str]:
    for finding in checked.all_findings:
        where = f"{finding.line}:{finding.column}" if finding.column else f"{finding.line}"
        first = f"{checked.name}:{where}: {finding.severity}: "
        text = f"{finding.message} [{finding.rule}]"
        lines = wrap(first + text, width)
        yield lines[0]
        yield from ("  " + line for line in lines[1:])
        if finding.hint:
            yield from ("    " + line for line in wrap(finding.hint, width - 4))


def _reach(jobs: QueueCheckResult, width: int) -> Iterator[str]:
    many = "some jobs" if jobs.count is None else f"{jobs.count} job{'s' if jobs.count != 1 else ''}"
    which = f" of {jobs.target}" if jobs.target else ""
    if not jobs.gpu:
        yield f"{jobs.title}: {many}{which}, asking for no GPU"
        return
    if not jobs.known:
        yield f"{jobs.title}: {many}{which}; no inventory tells how many GPUs that reaches"
        return
    share = f"{jobs.gpus} of {jobs.total} GPU{'s' if jobs.total != 1 else ''}"
    yield f"{jobs.title}: {many}{which}, each can get {share} of this pool"
    if jobs.reached:
        header = ("CAPABILITY", "GPUS", "FREE", "IMAGE", "WHY")
        yield from format_table(header, [_row(one) for one in jobs.reached], width).splitlines()
    if jobs.causes:
        rest = f" the other {jobs.total - jobs.gpus}" if jobs.gpus else ""
        yield from wrap(f"why not{rest}: {join_causes(jobs.causes)}", width)


def _row(one: ReachableGpus) -> tuple[str, ...]:
    unsure = f"{one.unsure} of them may not take it (START or what changes)" if one.unsure else ""
    why = "; ".join(part for part in (one.why, unsure) if part)
    return one.capability, str(one.gpus), str(one.free), one.image or "not known", why


def check_json(checked: SubmitCheckResult) -> Mapping[str, object]:
    """`{file, wrong, findings: [...], queues: [...]}`; a count that a list outside decides is null."""
    return {
        "file": checked.name,
        "wrong": checked.wrong,
        "findings": [
            {
                "line": finding.line,
                "column": finding.column or None,
                "rule": finding.rule,
                "severity": finding.severity.value,
                "message": finding.message,
                "hint": finding.hint,
            }
            for finding in checked.all_findings
        ],
        "queues": [
            {
                "line": jobs.line,
                "jobs": jobs.count,
                "image": jobs.image,
                "target": jobs.target,
                "gpus": jobs.gpus if jobs.known else None,
                "of": jobs.total if jobs.known else None,
                "reached": jobs.reached,
                "missed": [{"gpus": count, "why": cause} for cause, count in jobs.causes],
            }
            for jobs in checked.jobs
        ],
    }


def join_causes(causes: Iterable[tuple[str, int]]) -> str:
    """What keeps jobs from GPUs in a line, with how many where there are several causes."""
    every = tuple(causes)
    return "; ".join(cause if len(every) == 1 else f"{cause} ({count})" for cause, count in every)
