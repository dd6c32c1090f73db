"""A model to export and compare, and the models of the suite.

`MODELS` are layers, sizes and sample inputs. The weights come from NumPy's generator, so every framework and
version builds the same model from them, without a download. AlexNet is Krizhevsky's of 2014
(arXiv:1404.5997), SqueezeNet its version 1.1 (arXiv:1602.07360), BERT the published `small`
(arXiv:1908.08962), and Variational an autoencoder that draws its code (arXiv:1312.6114).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..context import CheckFailure, LazyModule
from ..table import WRONG_NUMBERS

# Relative to the largest output, in float32. On the CPU, models were off by at most 2e-6; cuDNN's fastest
# convolutions (Winograd) lose another digit. TF32 rounds each factor to 2^-11, 5e-4, which would be detected.
TOLERANCE = 2e-4

numpy: Any = LazyModule("numpy")


@dataclass(frozen=True)
class Case:
    """A network of the framework in file `exporter`, exported with `sample`, compared on `held_out`.

    Both are NumPy arrays by input name, in the order of the network's arguments. With `batched`, the first
    size of each input is the batch size, and may vary. `tolerance` is relative to the largest output.
    """

    name: str
    exporter: Any
    network: Any
    sample: Mapping[str, Any]
    held_out: Mapping[str, Any]
    tolerance: float = TOLERANCE
    batched: bool = True


def off(outputs: list[Any] | None, expected: list[Any]) -> float:
    """Return the largest error of an output, relative to the largest expected value.

    Infinite for another number or shape of outputs, and for a NaN or an infinity.
    """
    if outputs is None or len(outputs) != len(expected):
        return float("inf")
    worst = 0.0
    for output, right in zip(outputs, expected):  # noqa: B905
        if output.shape != right.shape or not numpy.isfinite(output).all():
            return float("inf")
        if right.size:
            scale = float(numpy.abs(right).max()) or 1.0
            worst = max(worst, float(numpy.abs(output - right).max()) / scale)
    return worst


def agree(who: str, device: str, outputs: list[Any] | None, expected: list[Any], tolerance: float) -> float:
    """Return the error. Raises CheckFailure if it exceeds the tolerance or was computed on another device."""
    if outputs is None:
        raise CheckFailure(f"{who} did not compute on the {device}")
    error = off(outputs, expected)
    if not error <= tolerance:
        detail = f"{who} on the {device} is off by {error:.2g} (at most {tolerance:.0e})"
        raise DiffersError(detail, error)
    return error


class DiffersError(CheckFailure):
    """A result differs from the expected one by `error`."""

    def __init__(self, detail: str, error: float) -> None:
        super().__init__(detail, outcome=WRONG_NUMBERS)
        self.error = error


def check_repeats(case: Case) -> tuple[list[Any], float]:
    """Return the framework's outputs for `held_out` on the CPU, and the error of a second run.

    Raises CheckFailure if the error exceeds the tolerance.
    """
    once, again = (case.exporter.compute(case.network, case.held_out, "cpu") for _ in range(2))
    if once is None or again is None:
        raise CheckFailure(f"{case.exporter.NAME} did not compute on the cpu")
    if any(not numpy.isfinite(output).all() for output in once):
        raise CheckFailure("gives values that are no numbers")
    error = off(again, once)
    if not error <= case.tolerance:
        raise CheckFailure("draws random numbers, so there is nothing to compare: give it an override")
    return once, error


def of_batch(inputs: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Return the inputs with `batch` rows, repeated or truncated."""
    return {
        name: numpy.ascontiguousarray(numpy.resize(array, (batch, *array.shape[1:])))
        for name, array in inputs.items()
    }


# (kind, sizes...). conv: channels, kernel, stride, padding; pool: kernel, stride, whether a last window may
# hang over; fire: squeezed channels, expanded ones by a kernel of 1 and of 3; flatten, linear: features.
Layers = tuple[tuple[Any, ...], ...]

ALEXNET: Layers = (
    ("conv", 64, 11, 4, 2),
    ("relu",),
    ("pool", 3, 2, False),
    ("conv", 192, 5, 1, 2),
    ("relu",),
    ("pool", 3, 2, False),
    ("conv", 384, 3, 1, 1),
    ("relu",),
    ("conv", 256, 3, 1, 1),
    ("relu",),
    ("conv", 256, 3, 1, 1),
    ("relu",),
    ("pool", 3, 2, False),
    ("flatten", 256 * 6 * 6),
    ("dropout", 0.5),
    ("linear", 4096),
    ("relu",),
    ("dropout", 0.5),
    ("linear", 4096),
    ("relu",),
    ("linear", 1000),
)
SQUEEZENET: Layers = (
    ("conv", 64, 3, 2, 0),
    ("relu",),
    ("pool", 3, 2, True),
    ("fire", 16, 64),
    ("fire", 16, 64),
    ("pool", 3, 2, True),
    ("fire", 32, 128),
    ("fire", 32, 128),
    ("pool", 3, 2, True),
    ("fire", 48, 192),
    ("fire", 48, 192),
    ("fire", 64, 256),
    ("fire", 64, 256),
    ("dropout", 0.5),
    ("conv", 1000, 1, 1, 0),
    ("relu",),
    ("mean",),
)


@dataclass(frozen=True)
class Sample:
    """An input of a model: integers below `below` if that is set, else normally distributed float32
    numbers.
    """

    name: str
    shape: tuple[int, ...]
    below: int = 0


@dataclass(frozen=True)
class Model:
    """A model and its sample.

    `kind` is the builder: `layers` (of `layers`), `bert` or `variational` (of `sizes`).

    A stochastic model is exported and compared with its method `override` in place of the one that draws.
    """

    name: str
    kind: str
    sample: tuple[Sample, ...]
    seed: int
    layers: Layers = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    override: str = ""


IMAGE = (Sample("image", (1, 3, 224, 224)),)
BERT_SIZES = {"words": 30522, "places": 512, "width": 512, "depth": 4, "heads": 8, "inner": 2048}
LENGTH = 128

MODELS = (
    Model("alexnet", "layers", IMAGE, seed=1, layers=ALEXNET),
    Model("squeezenet", "layers", IMAGE, seed=2, layers=SQUEEZENET),
    Model(
        "bert",
        "bert",
        (Sample("words", (1, LENGTH), BERT_SIZES["words"]), Sample("mask", (1, LENGTH), 2)),
        seed=3,
        sizes=BERT_SIZES,
    ),
    Model(
        "variational",
        "variational",
        (Sample("image", (1, 784)),),
        seed=4,
        sizes={"inputs": 784, "inner": 400, "code": 20},
        override="reconstruct",
    ),
)


def make_sample(model: Model) -> dict[str, Any]:
    """Return NumPy arrays by input name, equal in each call."""
    random = numpy.random.default_rng(model.seed)
    return {
        row.name: (
            random.integers(0, row.below, row.shape, dtype="int64")
            if row.below
            else random.standard_normal(row.shape, dtype="float32")
        )
        for row in model.sample
    }


def make_weights(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
    """Return the name and array of each parameter, in order. Names end in `weight` or `bias`.

    Matrices and filters are normally distributed with variance 2 / inputs (arXiv:1502.01852). That keeps the
    size of activations through the layers, so any wrong weight changes the output. Weights of a normalization
    are near 1, biases near 0.
    """
    random = numpy.random.default_rng(1000 + model.seed)
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype="float32")
        if len(shape) > 1:
            values *= math.sqrt(2 / math.prod(shape[1:]))
        else:
            values *= 0.1
            if name.endswith("weight"):
                values += 1
        yield name, values
