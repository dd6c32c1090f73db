"""A checked file as a value: what it is checked for, what is wrong with it, where its jobs get. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from imagefactory.schedulers.pool import Inventory
from imagefactory.schedulers.sites import Site
from imagefactory.trust.catalog import Catalog, CatalogImage, ImageOffer

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
