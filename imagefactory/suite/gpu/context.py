"""The input and the results of GPU checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..context import CheckFailure, Expected, Finding, expected_image, load_document
from . import table


class MeasuredFailure(CheckFailure):
    """A CheckFailure with `numbers` for its row and `facts` for the report."""

    def __init__(
        self,
        detail: str,
        *,
        outcome: str,
        numbers: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail, outcome=outcome)
        self.numbers, self.facts = dict(numbers or {}), dict(facts or {})


@dataclass(frozen=True)
class FindingWithFacts(Finding):
    """A Finding with `facts` for the report: `cuda` (`12.4`), `libcuda` (a path) and the `device`."""

    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Predicted:
    """The prediction of the host's scan for one capability: machine code, PTX, and either of them."""

    native: bool
    ptx: bool
    runs: bool
    reason: str


@dataclass(frozen=True)
class SuiteRequest:
    """The request. The GPU must have `capability` (`8.0`), empty for any. `predicted` is by capability.

    `driver` is the oldest driver for the CUDA version of the image, in the format of libcuda (`12.0`), empty
    if unknown. A `rehearsal` computes on the CPU, only for tests of this suite, and its report says so.
    """

    expected: Expected
    level: str
    capability: str
    driver: str
    predicted: Mapping[str, Predicted]
    rehearsal: bool = False


@dataclass(frozen=True)
class GpuContext:
    """The image under test. `framework` is a module of gpu/frameworks, None for an unknown framework.

    `site` is the directory of packages in the image, `prefix` the environment. `device` is the GPU found by
    T0 (`name`, `capability`, `uuid`, `memory`), empty before T0 and in a rehearsal.
    """

    request: SuiteRequest
    framework: Any
    site: str
    prefix: str
    device: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rehearsal(self) -> bool:
        return self.request.rehearsal

    @property
    def thorough(self) -> bool:
        """Return whether this is the full level, with larger and more sizes."""
        return self.request.level == table.FULL


def parse_request(text: str) -> SuiteRequest:
    """Return the expectations of the GPU suite. Raises ValueError or KeyError."""
    data = load_document(text, table.FORMAT)
    if data["level"] not in table.LEVELS:
        raise ValueError(f"unknown level: {data['level']}")
    return SuiteRequest(
        expected=expected_image(data, table.checks_of(data["level"])),
        level=data["level"],
        capability=data["capability"],
        driver=data["driver"],
        predicted={key: Predicted(**row) for key, row in data["predicted"].items()},
        rehearsal=data["rehearsal"],
    )
