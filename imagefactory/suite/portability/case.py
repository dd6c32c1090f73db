"""One model that moves: what is exported and compared, and what must hold of it whoever runs it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..context import Failure

# Of the largest output, in float32. Measured on the CPU models are off by at most 2e-6; cuDNN's fastest
# convolutions (Winograd) lose a digit more. TF32 rounds each factor to 2^-11, 5e-4: it would be seen.
TOLERANCE = 2e-4

# What a row says of numbers that are not the same, as the GPU suite does.
WRONG_NUMBERS = "wrong-numbers"


@dataclass(frozen=True)
class Case:
    """`network` is of the framework whose file `exporter` is, exported with `sample`, compared on `held_out`.

    Both are NumPy arrays by the inputs' names, in the order in which the network takes them.

    `batched` says that the first size of each input counts what is computed at once, and may be any.
    `tolerance` is of the largest value of an output.
    """

    name: str
    exporter: Any
    network: Any
    sample: Mapping[str, Any]
    held_out: Mapping[str, Any]
    tolerance: float = TOLERANCE
    batched: bool = True


def off(found: list[Any] | None, expected: list[Any]) -> float:
    """The largest difference of any output, relative to the largest value of what is expected of it.

    Infinite for outputs of another number or shape, and for values that are none.
    """
    numpy = importlib.import_module("numpy")
    if found is None or len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or not numpy.isfinite(one).all():
            return float("inf")
        if other.size:
            scale = float(numpy.abs(other).max()) or 1.0
            worst = max(worst, float(numpy.abs(one - other).max()) / scale)
    return worst


def agree(who: str, device: str, found: list[Any] | None, expected: list[Any], tolerance: float) -> float:
    """How far it is off. Raises Failure beyond the tolerance, and where it was computed elsewhere."""
    if found is None:
        raise Failure(f"{who} did not compute on the {device}")
    error = off(found, expected)
    if not error <= tolerance:
        detail = f"{who} on the {device} is off by {error:.2g} (at most {tolerance:.0e})"
        raise Differs(detail, error)
    return error


class Differs(Failure):
    """Not the same numbers; `error` is how far they are off."""

    def __init__(self, detail: str, error: float) -> None:
        super().__init__(detail, outcome=WRONG_NUMBERS)
        self.error = error


def check_repeats(case: Case) -> tuple[list[Any], float]:
    """What the framework computes of what is held out, on the CPU, and how far a second time is off.

    Raises Failure where that is beyond the tolerance.
    """
    once, again = (case.exporter.compute(case.network, case.held_out, "cpu") for _ in range(2))
    if once is None or again is None:
        raise Failure(f"{case.exporter.NAME} did not compute on the cpu")
    if any(not _finite(output) for output in once):
        raise Failure("gives values that are no numbers")
    error = off(again, once)
    if not error <= case.tolerance:
        raise Failure("draws random numbers, so there is nothing to compare: give it an override")
    return once, error


def _finite(array: Any) -> bool:
    return bool(importlib.import_module("numpy").isfinite(array).all())


def of_batch(inputs: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """The inputs with `batch` rows, repeated or cut."""
    numpy = importlib.import_module("numpy")
    return {
        name: numpy.ascontiguousarray(numpy.resize(array, (batch, *array.shape[1:])))
        for name, array in inputs.items()
    }
