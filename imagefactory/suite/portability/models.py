"""The models of the portability check, for every framework: layers, sizes, sample inputs, weights.

They are built from these tables, with weights from NumPy's generator, so that every framework and version
makes the same model. Nothing is fetched. AlexNet is Krizhevsky's of 2014 (arXiv:1404.5997), SqueezeNet its
version 1.1 (arXiv:1602.07360), BERT the published `small` (arXiv:1908.08962), and Variational an autoencoder
that draws its code (arXiv:1312.6114).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
