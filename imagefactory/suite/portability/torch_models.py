"""The models of the suite as PyTorch modules."""

from __future__ import annotations

import copy
import importlib
from typing import Any

from . import case
from . import torch as exporter


def _torch() -> Any:
    """Return the module torch: exporters follow no import inside of a model."""
    return importlib.import_module("torch")


def build(model: case.Model) -> Any:
    """Return the model on the CPU in float32, with its weights, for inference.

    If it draws, it is overridden.
    """
    torch = _torch()
    network = {"layers": _layers, "bert": _bert, "variational": _variational}[model.kind](model)
    parameters = dict(network.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, values in case.make_weights(model, shapes):
            parameters[name].copy_(torch.from_numpy(values))
    return exporter.override(network, model.override) if model.override else network.eval()


def _layers(model: case.Model) -> Any:
    nn = _torch().nn
    layers, channels = [], model.sample[0].shape[1]
    for kind, *sizes in model.layers:
        if kind == "conv":
            layers.append(nn.Conv2d(channels, *sizes))
            channels = sizes[0]
        elif kind == "fire":
            layers.append(_fire(channels, *sizes))
            channels = 2 * sizes[1]
        elif kind == "linear":
            layers.append(nn.Linear(channels, *sizes))
            channels = sizes[0]
        elif kind == "flatten":
            layers.append(nn.Flatten())
            channels = sizes[0]
        elif kind == "pool":
            layers.append(nn.MaxPool2d(sizes[0], sizes[1], ceil_mode=sizes[2]))
        elif kind == "mean":
            layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        else:
            layers.append({"relu": nn.ReLU, "dropout": nn.Dropout}[kind](*sizes))
    return nn.Sequential(*layers)


def _fire(channels: int, squeezed: int, expanded: int) -> Any:
    torch = _torch()
    nn = torch.nn

    class Fire(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.squeeze = nn.Conv2d(channels, squeezed, 1)
            self.one = nn.Conv2d(squeezed, expanded, 1)
            self.three = nn.Conv2d(squeezed, expanded, 3, padding=1)

        def forward(self, x: Any) -> Any:
            x = self.squeeze(x).relu()
            return torch.cat((self.one(x).relu(), self.three(x).relu()), 1)

    return Fire()


def _bert(model: case.Model) -> Any:
    """Return only the encoder, with explicit attention, so that every exporter sees the same operators."""
    torch, sizes = _torch(), model.sizes
    nn = torch.nn
    width, heads = sizes["width"], sizes["heads"]
    head = width // heads

    class EncoderBlock(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.inner, self.outer = nn.Linear(width, sizes["inner"]), nn.Linear(sizes["inner"], width)
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: Any, shut: Any) -> Any:
            query, key, value = (
                part(x).view(1, -1, heads, head).transpose(1, 2)
                for part in (self.query, self.key, self.value)
            )
            scores = query @ key.transpose(2, 3) / head**0.5 + shut
            mixed = (self.dropout(scores.softmax(-1)) @ value).transpose(1, 2).reshape(1, -1, width)
            x = self.first(x + self.dropout(self.out(mixed)))
            inner = nn.functional.gelu(self.inner(x))
            return self.second(x + self.dropout(self.outer(inner)))

    class Bert(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(sizes["words"], width)
            self.places = nn.Embedding(sizes["places"], width)
            self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
            self.blocks = nn.ModuleList(EncoderBlock() for _ in range(sizes["depth"]))
            length = model.sample[0].shape[1]
            self.register_buffer("order", torch.arange(length).unsqueeze(0), persistent=False)

        def forward(self, words: Any, mask: Any) -> Any:
            x = self.dropout(self.norm(self.words(words) + self.places(self.order)))
            shut = (1 - mask.to(x.dtype)).view(1, 1, 1, -1) * -10000.0
            for block in self.blocks:
                x = block(x, shut)
            return x

    return Bert()


def _variational(model: case.Model) -> Any:
    torch, sizes = _torch(), model.sizes
    nn = torch.nn

    class Variational(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(sizes["inputs"], sizes["inner"])
            self.mean = nn.Linear(sizes["inner"], sizes["code"])
            self.spread = nn.Linear(sizes["inner"], sizes["code"])
            self.decode = nn.Linear(sizes["code"], sizes["inner"])
            self.output = nn.Linear(sizes["inner"], sizes["inputs"])

        def forward(self, image: Any) -> Any:
            inner = self.encode(image).relu()
            mean = self.mean(inner)
            return self.draw(mean + torch.randn_like(mean) * (0.5 * self.spread(inner)).exp())

        def reconstruct(self, image: Any) -> Any:
            """Decode the mean of the code in place of a random code."""
            return self.draw(self.mean(self.encode(image).relu()))

        def draw(self, code: Any) -> Any:
            return self.output(self.decode(code).relu()).sigmoid()

    return Variational()


def as_double(network: Any) -> Any:
    """Return a copy in float64."""
    return copy.deepcopy(network).double()


def damaged(network: Any) -> Any:
    """Return a copy whose last weight matrix is 1 % too large."""
    torch, copied = _torch(), copy.deepcopy(network)
    weights = [parameter for parameter in copied.parameters() if parameter.dim() > 1]
    with torch.no_grad():
        weights[-1].mul_(1.01)
    return copied
