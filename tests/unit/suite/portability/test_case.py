"""What is the same, and what is not.

The tables of the portability models are the published networks: sizes fit, parameters count the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from imagefactory.suite.context import CheckFailure
from imagefactory.suite.portability import case
from imagefactory.suite.portability.case import (
    ALEXNET,
    IMAGE,
    MODELS,
    SQUEEZENET,
    Case,
    Layers,
    agree,
    check_repeats,
    of_batch,
    off,
)


def array(*values: float) -> Any:
    return numpy.array(values)


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([array(1.0, 4.0)], [array(1.0, 4.0)], 0.0),
        ([array(1.0, 4.2)], [array(1.0, 4.0)], 0.05),
        ([array(1.0), array(0.0, 20.0)], [array(1.0), array(0.0, 10.0)], 1.0),
        ([array(0.5)], [array(0.0)], 0.5),  # where nothing is expected it is absolute
        ([array()], [array()], 0.0),
        ([array(1.0, float("nan"))], [array(1.0, 2.0)], float("inf")),
        ([array(1.0, float("inf"))], [array(1.0, 2.0)], float("inf")),
        ([array(1.0)], [array(1.0, 2.0)], float("inf")),
        ([], [array(1.0)], float("inf")),
        (None, [array(1.0)], float("inf")),
    ],
)
def test_how_far_it_is_off(found: Any, expected: Any, error: float) -> None:
    assert off(found, expected) == pytest.approx(error)


def test_what_differs_keeps_its_number() -> None:
    assert agree("tvm", "cpu", [array(1.0)], [array(1.0)], 1e-4) == 0.0
    with pytest.raises(case.DiffersError, match=r"tvm .*cpu .*0\.5 .*1e-04") as caught:
        agree("tvm", "cpu", [array(1.5)], [array(1.0)], 1e-4)
    assert (caught.value.error, caught.value.outcome) == (0.5, "wrong-numbers")
    with pytest.raises(CheckFailure, match="cuda"):
        agree("torch", "cuda", None, [array(1.0)], 1e-4)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([[array(1.0)], [array(1.1)]], "draws random numbers"),
        ([[array(float("nan"))], [array(float("nan"))]], "values that are no numbers"),
        ([None, None], "did not compute"),
    ],
)
def test_a_model_that_cannot_be_compared(answers: list[Any], said: str) -> None:
    with pytest.raises(CheckFailure, match=said):
        check_repeats(made(answers))


def test_a_model_that_repeats_gives_what_is_expected() -> None:
    (expected,), error = check_repeats(made([[array(2.0)], [array(2.0001)]]))
    assert (expected.tolist(), error) == ([2.0], pytest.approx(5e-5))


def made(answers: list[Any]) -> Case:
    told = iter(answers)
    exporter = SimpleNamespace(NAME="torch", compute=lambda *_: next(told))
    return Case("net", exporter, None, {}, {})


def test_a_batch_is_rows_repeated_or_cut() -> None:
    inputs = {"x": numpy.arange(6.0).reshape(3, 2), "n": numpy.arange(3)}
    assert of_batch(inputs, 2)["x"].tolist() == [[0, 1], [2, 3]]
    large = of_batch(inputs, 5)
    assert large["n"].tolist() == [0, 1, 2, 0, 1]
    assert large["x"].shape == (5, 2)
    assert large["x"].flags["C_CONTIGUOUS"]


def walk(layers: Layers) -> Iterator[tuple[tuple[int, ...], int]]:
    """After each layer the shape of one image and the layer's parameters."""
    (_, channels, height, _) = IMAGE[0].shape
    features = 0

    def conv(goes_in: int, comes_out: int, kernel: int) -> int:
        return goes_in * comes_out * kernel**2 + comes_out

    for kind, *sizes in layers:
        made = 0
        if kind == "conv":
            out, kernel, stride, padding = sizes
            made, channels = conv(channels, out, kernel), out
            height = (height + 2 * padding - kernel) // stride + 1
        elif kind == "pool":
            kernel, stride, hangs_over = sizes
            steps = -(-(height - kernel) // stride) if hangs_over else (height - kernel) // stride
            height = steps + 1
        elif kind == "fire":
            squeezed, expanded = sizes
            made = conv(channels, squeezed, 1) + conv(squeezed, expanded, 1) + conv(squeezed, expanded, 3)
            channels = 2 * expanded
        elif kind == "flatten":
            features = channels * height**2
            assert sizes == [features]
        elif kind == "linear":
            made, features = features * sizes[0] + sizes[0], sizes[0]
        elif kind == "mean":
            features = channels
        assert height > 0
        yield ((features,) if features else (channels, height, height)), made


@pytest.mark.parametrize(
    ("layers", "parameters"),
    [(ALEXNET, 61_100_840), (SQUEEZENET, 1_235_496)],
    ids=["alexnet", "squeezenet"],
)
def test_layers_fit_and_count_as_published(layers: Layers, parameters: int) -> None:
    """The counts are torchvision's of `alexnet` and `squeezenet1_1`; both tell ImageNet's 1000 classes."""
    walked = list(walk(layers))
    assert sum(made for _, made in walked) == parameters
    assert walked[-1][0] == (1000,)


def test_bert_counts_as_published() -> None:
    """BERT small of arXiv:1908.08962, `bert_uncased_L-4_H-512_A-8`: its sizes make 28.8 million."""
    (bert,) = (model for model in MODELS if model.name == "bert")
    size = dict(bert.sizes)
    width, inner = size["width"], size["inner"]
    norm, layer = 2 * width, 4 * (width + 1) * width + (width + 1) * inner + (inner + 1) * width
    embedded = (size["words"] + size["places"] + 2) * width + norm
    pooled = (width + 1) * width
    assert embedded + size["depth"] * (layer + 2 * norm) + pooled == 28_763_648
    assert width % size["heads"] == 0


def test_models_differ_in_name_and_seed() -> None:
    assert len({model.name for model in MODELS}) == len({model.seed for model in MODELS}) == len(MODELS)
