"""What every GPU check is given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import table as frameworks
from ..context import CheckFailure, Expected, Finding
from . import table


class Refusal(CheckFailure):
    """A CheckFailure with what was found out before it: `numbers` for its row, `facts` for the report."""

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
class Discovery(Finding):
    """A Finding with `facts` for the report: `cuda` (`12.4`), `device` as GpuContext has it."""

    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Predicted:
    """What the host's scan of the image says of one capability: is there machine code, PTX, anything."""

    native: bool
    ptx: bool
    runs: bool
    reason: str


@dataclass(frozen=True)
class Asked:
    """What is asked of a run. `capability` is the one the GPU must have (`8.0`), empty for any.

    `predicted` is by capability. `driver` is the oldest driver's version that the image's CUDA needs as
    libcuda tells it (`12.0`), empty where nothing is known. A `rehearsal` computes on the CPU, for the tests
    of this suite alone, and says so in its report; on a machine with a GPU it is never asked for.
    """

    expected: Expected
    level: str
    capability: str
    driver: str
    predicted: Mapping[str, Predicted]
    rehearsal: bool = False


@dataclass(frozen=True)
class GpuContext:
    """`framework` is the module of gpu/frameworks, None for an image without one that the suite knows.

    `site` is the folder of the image's packages, `prefix` the environment, `device` what T0 found
    (`name`, `capability`, `uuid`, `memory`), empty until then and in a rehearsal.
    """

    asked: Asked
    framework: Any
    site: str
    prefix: str
    device: Mapping[str, Any] = field(default_factory=dict)

    @property
    def thorough(self) -> bool:
        """Whether this is the full level: larger sizes and more of them."""
        return self.asked.level == table.FULL


def parse_asked(text: str) -> Asked:
    """Raises ValueError or KeyError for a text that the host did not write."""
    data = json.loads(text)
    if data["format"] != table.FORMAT:
        raise ValueError(f"expectations of format {data['format']}, this suite reads {table.FORMAT}")
    if data["level"] not in table.LEVELS:
        raise ValueError(f"no such level: {data['level']}")
    return Asked(
        expected=Expected(
            nonce=data["nonce"],
            target=data["target"],
            framework=frameworks.FRAMEWORKS.get(data["framework"], frameworks.OTHER),
            distribution=data["framework"],
            version=data["version"],
            cuda=data["cuda"],
            python=data["python"],
            packages=dict(data["packages"]),
            conda=dict(data["conda"]),
            checks=table.checks_of(data["level"]),
            uid=None,
        ),
        level=data["level"],
        capability=data["capability"],
        driver=data["driver"],
        predicted={key: Predicted(**row) for key, row in data["predicted"].items()},
        rehearsal=data["rehearsal"],
    )
