"""One model that moves: what is exported and compared, and what must hold of it whoever runs it.

The suite's own models (`MODELS`) are layers, sizes, sample inputs and weights, for every framework. They
are built from these tables, with weights from NumPy's generator, so that every framework and version makes
the same model. Nothing is fetched. AlexNet is Krizhevsky's of 2014 (arXiv:1404.5997), SqueezeNet its
version 1.1 (arXiv:1602.07360), BERT the published `small` (arXiv:1908.08962), and Variational an autoencoder
that draws its code (arXiv:1312.6114).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..context import CheckFailure

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
    """How far it is off. Raises CheckFailure beyond the tolerance, and where it was computed elsewhere."""
    if found is None:
        raise CheckFailure(f"{who} did not compute on the {device}")
    error = off(found, expected)
    if not error <= tolerance:
        detail = f"{who} on the {device} is off by {error:.2g} (at most {tolerance:.0e})"
        raise Differs(detail, error)
    return error


class Differs(CheckFailure):
    """Not the same numbers; `error` is how far they are off."""

    def __init__(self, detail: str, error: float) -> None:
        super().__init__(detail, outcome=WRONG_NUMBERS)
        self.error = error


def check_repeats(case: Case) -> tuple[list[Any], float]:
    """What the framework computes of what is held out, on the CPU, and how far a second time is off.

    Raises CheckFailure where that is beyond the tolerance.
    """
    once, again = (case.exporter.compute(case.network, case.held_out, "cpu") for _ in range(2))
    if once is None or again is None:
        raise CheckFailure(f"{case.exporter.NAME} did not compute on the cpu")
    if any(not _finite(output) for output in once):
        raise CheckFailure("gives values that are no numbers")
    error = off(again, once)
    if not error <= case.tolerance:
        raise CheckFailure("draws random numbers, so there is nothing to compare: give it an override")
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
    """One input of a model: whole numbers below `below` where that is given, else normal ones in float32."""

    name: str
    shape: tuple[int, ...]
    below: int = 0


@dataclass(frozen=True)
class Model:
    """A model and the sample that it is exported and tried with.

    `kind` names the builder: `layers` of `layers`, or `bert` and `variational` of `sizes`. A stochastic model
    is overridden: `override` is the method that is exported and compared in place of the one that draws.
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
    """NumPy arrays by the inputs' names, the same each time."""
    numpy = importlib.import_module("numpy")
    random = numpy.random.default_rng(model.seed)
    return {
        one.name: (
            random.integers(0, one.below, one.shape, dtype="int64")
            if one.below
            else random.standard_normal(one.shape, dtype="float32")
        )
        for one in model.sample
    }


def make_weights(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any]]:
    """(name, array) for each parameter, in the order given; names end in `weight` or `bias`.

    Matrices and filters are normal with a variance of 2 over what goes in (arXiv:1502.01852), which keeps the
    size of activations through the layers, so that a wrong weight anywhere is seen in the output. Weights of
    a normalisation are near 1, biases near 0.
    """
    random = importlib.import_module("numpy").random.default_rng(1000 + model.seed)
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype="float32")
        if len(shape) > 1:
            values *= math.sqrt(2 / math.prod(shape[1:]))
        else:
            values *= 0.1
            if name.endswith("weight"):
                values += 1
        yield name, values
