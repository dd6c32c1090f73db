"""Steps of training three networks, whose forward pass, backward pass and optimizer are timed apart.

A profile records them. An emulated GPU that runs this very file is held against them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

WARM, STEPS = 3, 6
CLASSES, WORDS, LENGTH = 1000, 30522, 128
AMP = "fp16"
FULL = "out of memory"
"""What torch says of it, in every version."""

# Network -> batches, and those of a rehearsal on a CPU.
BATCHES = {
    "resnet18": ((16, 64), (2,)),
    "bert": ((8, 32), (2,)),
    "convnet": ((16, 64), (16,)),
}


def record_steps(device: str, kinds: tuple[str, ...], *, few: bool) -> dict[str, float]:
    """Seconds, and bytes of the GPU at most, as `step-NETWORK-KIND-BATCH-WHAT`; `kinds` of fp32 and fp16,
    batches `few` as a CPU can do.

    `whole` is a step from one to the next, which hides the program's time behind the GPU's; `forward`,
    `backward` and `optimizer` are the GPU's.
    """
    torch: Any = importlib.import_module("torch")
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True  # as torch begins
    found = {}
    for name, batches in BATCHES.items():
        for batch in batches[few]:
            for kind in kinds:
                with where_room():
                    took = dict(train(name, batch, kind, device))
                    found.update({f"step-{name}-{kind}-{batch}-{what}": took[what] for what in took})
    return found


@contextlib.contextmanager
def where_room() -> Iterator[None]:
    """What a small GPU has no room for is left out of its profile, and fails nothing."""
    gc.collect()  # of what was there before, the networks hold themselves
    try:
        yield
    except RuntimeError as error:
        if FULL not in str(error):
            raise


def train(name: str, batch: int, kind: str, device: str) -> Iterator[tuple[str, float]]:
    """What one network takes."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(7)
    network = NETWORKS[name](torch.nn).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    inputs, wanted = (one.to(device) for one in sample(torch, name, batch))
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    mark, between = marks(torch, device)
    steps = []
    for _ in range(WARM + STEPS):
        began = mark()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=kind == AMP):
            loss = torch.nn.functional.cross_entropy(network(inputs), wanted)
        there = mark()
        loss.backward()
        back = mark()
        optimizer.step()
        steps.append((began, there, back, mark()))
    wait(torch, device)
    kept = steps[WARM:]
    for at, what in enumerate(("forward", "backward", "optimizer")):
        yield what, statistics.median(between(step[at], step[at + 1]) for step in kept)
    yield "whole", statistics.median(between(kept[at][0], kept[at + 1][0]) for at in range(len(kept) - 1))
    if device != "cpu":
        yield "peak", float(torch.cuda.max_memory_allocated())


def marks(torch: Any, device: str) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """What sets a mark in a GPU's time, or the CPU's, and the seconds between two, once all is done."""
    if device == "cpu":
        return time.perf_counter, lambda early, late: float(late - early)

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return mark, lambda early, late: float(early.elapsed_time(late)) / 1e3


def wait(torch: Any, device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def sample(torch: Any, name: str, batch: int) -> tuple[Any, Any]:
    """A batch that fits the network, and its classes."""
    wanted = torch.arange(batch) % 2
    if name == "bert":
        return torch.arange(batch * LENGTH).reshape(batch, LENGTH) % WORDS, wanted
    side = 224 if name == "resnet18" else 64
    return torch.linspace(-1, 1, batch * 3 * side * side).reshape(batch, 3, side, side), wanted


# --- the networks ----------------------------------------------------------------------------------


def _resnet18(nn: Any) -> Any:
    """He and others, Deep Residual Learning for Image Recognition (2016), table 1."""

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, into: int, out: int, stride: int) -> None:
            super().__init__()
            self.way = nn.Sequential(
                nn.Conv2d(into, out, 3, stride, 1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(inplace=True),
                nn.Conv2d(out, out, 3, 1, 1, bias=False),
                nn.BatchNorm2d(out),
            )
            self.beside = nn.Identity()
            if stride != 1 or into != out:
                self.beside = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

        def forward(self, images: Any) -> Any:
            return (self.way(images) + self.beside(images)).relu_()

    parts = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    parts.append(nn.MaxPool2d(3, 2, 1))
    for into, out, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        parts += [Block(into, out, stride), Block(out, out, 1)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def _bert(nn: Any) -> Any:
    """Devlin and others, BERT (2019), as small as its authors' `small`: 4 layers of 512, 8 heads."""

    class Network(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, 512), nn.Embedding(LENGTH, 512)
            layer = nn.TransformerEncoderLayer(512, 8, 2048, activation="gelu", batch_first=True)
            self.layers, self.answer = nn.TransformerEncoder(layer, 4), nn.Linear(512, 2)

        def forward(self, words: Any) -> Any:
            return self.answer(self.layers(self.words(words) + self.places.weight).mean(dim=1))

    return Network()


def _convnet(nn: Any) -> Any:
    """Three convolutions and a dense layer, as people begin with to tell cats from dogs."""
    parts = []
    for into, out in ((3, 32), (32, 64), (64, 128)):
        parts += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(128 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 2))


NETWORKS = {"resnet18": _resnet18, "bert": _bert, "convnet": _convnet}
