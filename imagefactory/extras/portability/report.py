"""The frozen values of portability: a person's models, the runtimes that ran them, and what was the same.

Latencies are milliseconds, errors relative to the largest value that is expected of an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from imagefactory.serialize import DIGEST, Among, Count, Digest, Matching, Most, Name, Within, fault, format_document, parse_document
from imagefactory.model import CheckState
from imagefactory.suite import table
from imagefactory.suite.portability.exporting import NAME
from imagefactory.verify.model import GpuIdentity, Nonce, Subject, Version

FORMAT = 1
MOST_MODELS = 64
MOST_ROWS = 1024

OUTCOMES = ("", table.LOAD_FAILED, table.WRONG_NUMBERS)

ModelName = Annotated[str, Matching(NAME)]


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
    tolerance: Annotated[float, Within(0, 1)]
    batched: bool
    inputs: tuple[PortableInput, ...]
    held_out: Count
    opset: Count
    nodes: Count
    digest: Annotated[str, Matching(DIGEST, empty=True)] = ""
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
    outcome: Annotated[str, Among(OUTCOMES)]
    detail: str
    error: float | None
    kernels: Count
    seconds: float
    latencies: tuple[Latency, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """In which image a runtime ran."""

    by: Name
    subject: Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableReport:
    """What became of models of one image in runtimes, there or in other images. Unsigned.

    `subject` is the image that exported. `processor` is the CPU's name and `threads` how many of it were
    used; `gpus` and `driver` are what the host saw, empty where no runtime needs a GPU.
    """

    subject: Subject
    suite: Digest
    nonce: Nonce
    started: datetime
    ended: datetime
    runner: Name
    processor: str
    threads: Count
    gpus: tuple[GpuIdentity, ...]
    driver: Version
    models: Annotated[tuple[PortableModel, ...], Most(MOST_MODELS)]
    served: tuple[Served, ...]
    rows: Annotated[tuple[PortableRow, ...], Most(MOST_ROWS)]

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
        raise fault(f"{where}: models", "it has a duplicate model")
    if len({(row.model, row.by) for row in report.rows}) != len(report.rows):
        raise fault(f"{where}: rows", "it has a duplicate row of a model and runtime")
    return report
