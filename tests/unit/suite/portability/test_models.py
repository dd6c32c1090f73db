"""The tables of the portability models are the published networks: sizes fit, parameters count the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from imagefactory.suite.portability.models import ALEXNET, IMAGE, MODELS, SQUEEZENET, Layers


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
