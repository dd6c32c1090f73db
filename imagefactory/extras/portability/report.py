"""The frozen values of portability: a person's models, the runtimes that ran them, and what was the same.

Latencies are milliseconds, errors relative to the largest value that is expected of an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from imagefactory.errors import StatementError
from imagefactory.model import CheckState
from imagefactory.oci.manifests import digest_of
from imagefactory.serialize import (
    DIGEST,
    Choices,
    Count,
    Digest,
    MaxRows,
    Name,
    NumberRange,
    ObjectSchema,
    Pattern,
    format_document,
    format_time,
    invalid_value_error,
    parse_document,
)
from imagefactory.suite import table
from imagefactory.suite.portability.exporting import NAME
from imagefactory.trust.envelope import parse_envelope, sign_envelope
from imagefactory.trust.judgement import not_witnessed, out_of_period, verify_envelope
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import LONGEST_LIFE, SKEW, VerdictStatus, format_statement, parse_predicate
from imagefactory.verify.report import GpuIdentity, Nonce, VerifiedImage, Version

FORMAT = 1
MOST_MODELS = 64
MOST_ROWS = 1024

OUTCOMES = ("", table.LOAD_FAILED, table.WRONG_NUMBERS)

ModelName = Annotated[str, Pattern(NAME)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableInput:
    """An input of a model: its NumPy type, and the shape of the sample that the model was exported with."""

    name: str
    type: str
    shape: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableModel:
    """A model and its file: `held_out` rows were compared. `digest` is empty where it was not exported."""

    name: ModelName
    framework: Name
    version: str
    tolerance: Annotated[float, NumberRange(0, 1)]
    batched: bool
    inputs: tuple[PortableInput, ...]
    held_out: Count
    opset: Count
    nodes: Count
    digest: Annotated[str, Pattern(DIGEST, empty=True)] = ""
    size: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One pass of a batch: the median and the 95th percentile of many, in milliseconds."""

    batch: Count
    p50: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableRow:
    """One model by its framework on a device (`torch-cpu`), or by a runtime (`openvino-cpu`).

    `error` is None where nothing was compared; `kernels` counts what ran, where the runtime tells it.
    """

    model: ModelName
    by: Name
    version: str
    state: CheckState
    outcome: Annotated[str, Choices(OUTCOMES)]
    detail: str
    error: float | None
    kernels: Count
    seconds: float
    latencies: tuple[Latency, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSource:
    """In which image a runtime ran."""

    by: Name
    subject: VerifiedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableReport:
    """What became of models of one image in runtimes, there or in other images. Unsigned.

    `subject` is the image that exported. `processor` is the CPU's name and `threads` how many of it were
    used; `gpus` and `driver` are what the host saw, empty where no runtime needs a GPU.
    """

    subject: VerifiedImage
    suite: Digest
    nonce: Nonce
    started: datetime
    ended: datetime
    runner: Name
    processor: str
    threads: Count
    gpus: tuple[GpuIdentity, ...]
    driver: Version
    models: Annotated[tuple[PortableModel, ...], MaxRows(MOST_MODELS)]
    served: tuple[RuntimeSource, ...]
    rows: Annotated[tuple[PortableRow, ...], MaxRows(MOST_ROWS)]

    @property
    def rows_by_model(self) -> tuple[PortableRow, ...]:
        """In the order of the models, each in that of who ran it."""
        return tuple(row for model in self.models for row in self.rows if row.model == model.name)

    @property
    def portable(self) -> bool:
        """Whether every model computed the same in every runtime that was asked for."""
        tried = {(row.model, row.by) for row in self.rows}
        every = all((model.name, one.by) in tried for model in self.models for one in self.served)
        fine = all(row.state is CheckState.PASSED for row in self.rows)
        return bool(self.models and self.served) and every and fine


def format_portable(report: PortableReport) -> dict[str, Any]:
    """The report as JSON; `format` is its version."""
    return format_document(report, FORMAT)


def parse_portable(value: object, where: str) -> PortableReport:
    """The report that `format_portable` made this of. Raises StatementError for anything else."""
    report = parse_document(value, PortableReport, FORMAT, where)
    assert isinstance(report, PortableReport)
    names = [model.name for model in report.models]
    if len(set(names)) != len(names):
        raise invalid_value_error(f"{where}: models", "it has a duplicate model")
    if len({(row.model, row.by) for row in report.rows}) != len(report.rows):
        raise invalid_value_error(f"{where}: rows", "it has a duplicate row of a model and runtime")
    return report


# --- Statements of portability: signed like verdicts, with a word of their own, and never one of them
#     PortableReport -> sign_portable() -> envelope        envelope -> judge_portable() -> PortableResult
# An in-toto Statement v1 about the image that exported the models; its predicate is the report, which names
# each model's file by digest.


PORTABLE = "https://imagefactory.dev/portable/v1"

_PERIOD = ObjectSchema(issued=datetime, expires=datetime)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableStatement:
    """A report that somebody signed, and until when it counts."""

    report: PortableReport
    issued: datetime
    expires: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedPortable:
    """A statement and its envelope."""

    statement: PortableStatement
    envelope: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableResult:
    """A statement found beside an image: `why` says why it cannot be relied on where it is not GOOD."""

    digest: str
    standing: VerdictStatus
    why: str
    statement: PortableStatement | None


def sign_portable(report: PortableReport, key: SigningKey, *, now: datetime, days: int) -> SignedPortable:
    """A statement that is good for `days` days.

    Raises StatementError where a model did not compute the same in a runtime that was asked for.
    """
    if not report.portable:
        raise StatementError(
            "report-not-signable",
            "this report cannot be signed: a model did not compute the same results",
            hint="see the failed rows of the report",
        )
    issued = now.replace(microsecond=0)
    made = PortableStatement(report=report, issued=issued, expires=issued + timedelta(days=days))
    payload = format_statement_of(made)
    parse_statement(payload, "the statement to sign")  # nothing is signed that nobody would read
    envelope = sign_envelope(payload, key)
    parse_envelope(envelope, "the statement to sign")
    return SignedPortable(statement=made, envelope=envelope)


def format_statement_of(made: PortableStatement) -> bytes:
    """The statement's bytes."""
    period = {"issued": format_time(made.issued), "expires": format_time(made.expires)}
    return format_statement(made.report.subject, PORTABLE, {**format_portable(made.report), **period})


def parse_statement(payload: bytes, where: str) -> PortableStatement:
    """What `format_statement_of` wrote. Raises StatementError for any other bytes."""
    row = dict(parse_predicate(payload, where, PORTABLE))
    period = _PERIOD.parse({name: row.pop(name, None) for name in ("issued", "expires")}, where)
    made = PortableStatement(report=parse_portable(row, where), **period)
    if not made.report.portable:
        raise invalid_value_error(where, "a model in it did not compute the same results")
    if not timedelta(0) < made.expires - made.issued <= LONGEST_LIFE:
        raise invalid_value_error(
            f"{where}: expires", f"it is not within {LONGEST_LIFE.days} days after it was issued"
        )
    if made.report.ended - made.issued > SKEW:
        raise invalid_value_error(f"{where}: ended", "it is after the signature")
    if format_statement_of(made) != payload:
        raise invalid_value_error(
            where, "its subjects do not match its report, or it is not in canonical form"
        )
    return made


def verify_portable(
    data: bytes, digest: str, subject: VerifiedImage, trust: TrustRules, now: datetime
) -> PortableResult:
    """What an envelope found beside `subject` is worth; `digest` is that of the artifact that carries it."""
    opened = verify_envelope(data, trust)
    made: PortableStatement | None = None
    standing, why = opened.standing, opened.why
    if opened.envelope is not None:
        try:
            made = parse_statement(opened.envelope.payload, "statement")
        except StatementError as error:
            if opened.key:
                standing, why = VerdictStatus.MALFORMED, error.message
    if opened.key is not None and made is not None and standing is VerdictStatus.GOOD:
        own, payload = made.report.subject, digest_of(opened.envelope.payload) if opened.envelope else ""
        late = out_of_period(opened.key, made.issued, payload) or not_witnessed(opened.key, payload, now)
        if late:
            standing, why = late
        elif own.manifest != subject.manifest:
            standing, why = VerdictStatus.OTHER_SUBJECT, f"it speaks of {own.manifest}"
        elif made.issued - now > SKEW:
            standing, why = VerdictStatus.NOT_YET, f"it is issued at {format_time(made.issued)}"
        elif now >= (end := min(made.expires, made.issued + timedelta(days=trust.policy.days))):
            standing, why = VerdictStatus.EXPIRED, f"it held until {format_time(end)}"
    return PortableResult(digest=digest, standing=standing, why=why, statement=made)
