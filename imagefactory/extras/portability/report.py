"""The types of portability: the user's models, the runtimes that ran them, and the results.

Latencies are in milliseconds. Errors are relative to the largest expected value of an output.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    FormattedAs,
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
from imagefactory.trust.judgement import period_problem, unrecorded_reason, verify_envelope
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
    """An input of a model: its NumPy type, and the shape of the sample at export."""

    name: str
    type: str
    shape: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableModel:
    """A model and its file. `held_out` rows were compared. `digest` is empty if it was not exported."""

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
    """The median and the 95th percentile of the time of one batch, in milliseconds."""

    batch: Count
    p50: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableRow:
    """The result of one model in its framework on a device (`torch-cpu`), or in a runtime (`openvino-cpu`).

    `error` is None if no output was compared. `kernels` is the number of kernels, if the runtime reports it.
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
    """The image in which a runtime ran."""

    by: Name
    subject: VerifiedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableReport:
    """The results of one image's models in runtimes, in that image or in others. Unsigned.

    `subject` is the image that exported. `processor` is the name of the CPU, `threads` the number of threads.
    `gpus` and `driver` are those of the host, empty if no runtime needs a GPU.
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
        """The rows in the order of the models, then of the runtimes."""
        return tuple(row for model in self.models for row in self.rows if row.model == model.name)

    @property
    def portable(self) -> bool:
        """Return whether every model computed the same results in every requested runtime."""
        pairs = {(row.model, row.by) for row in self.rows}
        complete = all((model.name, source.by) in pairs for model in self.models for source in self.served)
        passed = all(row.state is CheckState.PASSED for row in self.rows)
        return bool(self.models and self.served) and complete and passed


FormattedPortableReport = Annotated[Mapping[str, object], FormattedAs(PortableReport, FORMAT)]


def format_portable(report: PortableReport) -> dict[str, Any]:
    """Return the report as JSON; `format` is its version."""
    return format_document(report, FORMAT)


def parse_portable(value: object, location: str) -> PortableReport:
    """Parse the JSON of `format_portable`. Raises StatementError for other JSON."""
    report = parse_document(value, PortableReport, FORMAT, location)
    assert isinstance(report, PortableReport)
    names = [model.name for model in report.models]
    if len(set(names)) != len(names):
        raise invalid_value_error(f"{location}: models", "it has a duplicate model")
    if len({(row.model, row.by) for row in report.rows}) != len(report.rows):
        raise invalid_value_error(f"{location}: rows", "it has a duplicate row of a model and runtime")
    return report


# --- Statements of portability: signed like verdicts, with another predicate type, so never a verdict
#     PortableReport -> sign_portable() -> envelope        envelope -> verify_portable() -> PortableResult
# An in-toto Statement v1 about the image that exported the models; its predicate is the report, which has the
# digest of each model file.


PORTABLE = "https://imagefactory.dev/portable/v1"

_PERIOD = ObjectSchema(issued=datetime, expires=datetime)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableStatement:
    """A signed report, with its period."""

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
    """A statement attached to an image. `why` is the reason if it is not GOOD."""

    digest: str
    standing: VerdictStatus
    why: str
    statement: PortableStatement | None


def sign_portable(report: PortableReport, key: SigningKey, *, now: datetime, days: int) -> SignedPortable:
    """Sign a statement that is valid for `days` days.

    Raises StatementError if a model did not compute the same results in a requested runtime.
    """
    if not report.portable:
        raise StatementError(
            "report-not-signable",
            "a report with failed models cannot be signed",
            hint="correct or remove the models that failed, then run it again",
        )
    issued = now.replace(microsecond=0)
    statement = PortableStatement(report=report, issued=issued, expires=issued + timedelta(days=days))
    payload = format_statement_of(statement)
    parse_statement(payload, "the statement to sign")  # sign only what readers accept
    envelope = sign_envelope(payload, key)
    parse_envelope(envelope, "the statement to sign")
    return SignedPortable(statement=statement, envelope=envelope)


def format_statement_of(statement: PortableStatement) -> bytes:
    """Return the bytes of the statement."""
    period = {"issued": format_time(statement.issued), "expires": format_time(statement.expires)}
    return format_statement(
        statement.report.subject, PORTABLE, {**format_portable(statement.report), **period}
    )


def parse_statement(payload: bytes, location: str) -> PortableStatement:
    """Parse the bytes of `format_statement_of`. Raises StatementError for any other bytes."""
    row = dict(parse_predicate(payload, location, PORTABLE))
    period = _PERIOD.parse({name: row.pop(name, None) for name in ("issued", "expires")}, location)
    statement = PortableStatement(report=parse_portable(row, location), **period)
    if not statement.report.portable:
        raise invalid_value_error(location, "a model in it did not compute the same results")
    if not timedelta(0) < statement.expires - statement.issued <= LONGEST_LIFE:
        raise invalid_value_error(
            f"{location}: expires", f"it is not within {LONGEST_LIFE.days} days after it was issued"
        )
    if statement.report.ended - statement.issued > SKEW:
        raise invalid_value_error(f"{location}: ended", "it is after the signature")
    if format_statement_of(statement) != payload:
        raise invalid_value_error(
            location, "its subjects do not match its report, or it is not in canonical form"
        )
    return statement


def verify_portable(
    data: bytes, digest: str, subject: VerifiedImage, trust: TrustRules, now: datetime
) -> PortableResult:
    """Verify an envelope attached to `subject`. `digest` is the digest of its artifact."""
    opened = verify_envelope(data, trust)
    statement: PortableStatement | None = None
    standing, reason = opened.standing, opened.why
    if opened.envelope is not None:
        try:
            statement = parse_statement(opened.envelope.payload, "statement")
        except StatementError as error:
            if opened.key:
                standing, reason = VerdictStatus.MALFORMED, error.message
    if opened.key is not None and statement is not None and standing is VerdictStatus.GOOD:
        own, payload = statement.report.subject, digest_of(opened.envelope.payload) if opened.envelope else ""
        late = period_problem(opened.key, statement.issued, payload) or unrecorded_reason(
            opened.key, payload, now
        )
        if late:
            standing, reason = late
        elif own.manifest != subject.manifest:
            standing, reason = VerdictStatus.OTHER_SUBJECT, f"it is about {own.manifest}"
        elif statement.issued - now > SKEW:
            standing, reason = VerdictStatus.NOT_YET, f"it is issued at {format_time(statement.issued)}"
        elif now >= (end := min(statement.expires, statement.issued + timedelta(days=trust.policy.days))):
            standing, reason = VerdictStatus.EXPIRED, f"it expired at {format_time(end)}"
    return PortableResult(digest=digest, standing=standing, why=reason, statement=statement)
