"""`profile`: how long a GPU takes for the pieces that a training is made of, as torch uses it.

It measures, and checks only that a GPU did it. Each time is the least of a few rounds, as other work of the
machine only adds to it. Kernels are timed by the GPU's own clock, queued behind one that keeps it busy, so
that the program's time for launching them is in none of them; `launch` is that time.

Steps of training three networks have their forward pass, backward pass and optimizer timed apart. An emulated
GPU that runs this very file is compared with them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ...context import CheckFailure, Finding
from ..context import GpuContext

# Kind -> torch's type. tf32 and bf16 are computed by tensor cores from capability 8.0 on.
TYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
FROM_8_0 = ("tf32", "bf16")
ROUNDS, LONGEST, MOST = 5, 0.02, 20
PLUG, LAUNCHES = 4096, 200
MIB = 1 << 20

# Rows of a square product; images of 64 channels and 56 x 56 points; texts of so many words, with 12 heads of
# 64; bytes. In pairs: on a GPU, on a CPU.
PRODUCTS = (128, 256, 512, 1024, 2048, 4096), (64, 128, 256, 512)
IMAGES, CHANNELS, SIDE = ((1, 4, 16, 64), (1, 4)), 64, 56
TEXTS, HEADS, WIDTH = (((8, 128), (8, 512), (8, 2048)), ((1, 128), (1, 512))), 12, 64
MOVES = (12 << 10, 192 << 10, 3 * MIB, 48 * MIB, 384 * MIB), (12 << 10, 192 << 10, 3 * MIB, 48 * MIB)
COPIES = (4 << 10, 64 << 10, MIB, 16 * MIB, 128 * MIB), (4 << 10, 64 << 10, MIB, 16 * MIB)


class Rates:
    """Measures on `device`, `cuda` or, in a rehearsal, `cpu`. Each method answers seconds by the number's
    name, which ends with the operations or the bytes of one call.
    """

    def __init__(self, device: str, capability: tuple[int, int]) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.device, self.cpu = device, device == "cpu"
        self.kinds = [kind for kind in TYPES if kind not in FROM_8_0 or capability >= (8, 0)]
        if self.cpu:
            self.kinds = ["fp32"]
        self._mark, self._between = marks(self.torch, device)
        self._plug = None if self.cpu else self.torch.ones(PLUG, PLUG, device=device)

    def timed(self, call: Callable[[], Any]) -> float:
        """Seconds of the device for one call."""
        once = self._round(call, 1)  # it also loads what is loaded once
        times = max(1, min(MOST, int(LONGEST / max(once, 1e-9))))
        return min(self._round(call, times) for _ in range(ROUNDS))

    def _round(self, call: Callable[[], Any], times: int) -> float:
        if self._plug is not None:
            _ = self._plug @ self._plug
        began = self._mark()
        for _ in range(times):
            call()
        ended = self._mark()
        wait(self.torch, self.device)
        return self._between(began, ended) / times

    def waited(self, call: Callable[[], Any]) -> float:
        """Seconds of the program for one call, until the device is through with it."""

        def once() -> float:
            wait(self.torch, self.device)
            began = time.perf_counter()
            call()
            wait(self.torch, self.device)
            return time.perf_counter() - began

        once()
        return min(once() for _ in range(ROUNDS))

    def _random(self, kind: str, *shape: int) -> Any:
        torch = self.torch
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        matmul.allow_tf32 = cudnn.allow_tf32 = kind == "tf32"
        return torch.rand(shape, device=self.device).to(getattr(torch, TYPES[kind]))

    def small(self) -> dict[str, float]:
        """`kernel`: the least that a kernel takes; `launch`: the program's part of one."""
        one = self.torch.zeros(1, device=self.device)
        kernel = self.timed(lambda: one.add_(1))
        if self.cpu:
            return {"kernel": kernel, "launch": 0.0}

        def launches() -> float:
            wait(self.torch, self.device)
            began = time.perf_counter()
            for _ in range(LAUNCHES):
                one.add_(1)
            return (time.perf_counter() - began) / LAUNCHES

        launches()
        return {"kernel": kernel, "launch": min(launches() for _ in range(ROUNDS))}

    def products(self) -> dict[str, float]:
        found = {}
        for kind in self.kinds:
            for rows in PRODUCTS[self.cpu]:
                left, right = (self._random(kind, rows, rows) for _ in range(2))
                found[f"product-{kind}-{2 * rows**3}"] = self.timed(partial(self.torch.matmul, left, right))
        return found

    def convolutions(self) -> dict[str, float]:
        """There, and back for images and filters alike, which is twice the arithmetic."""
        found = {}
        for kind in self.kinds:
            if kind == "fp64":  # nobody trains in it, and cuDNN takes its time
                continue
            filters = self._random(kind, CHANNELS, CHANNELS, 3, 3).requires_grad_()
            for count in IMAGES[self.cpu]:
                images = self._random(kind, count, CHANNELS, SIDE, SIDE).requires_grad_()
                flops = 2 * 9 * count * CHANNELS * CHANNELS * SIDE * SIDE
                there = partial(self.torch.nn.functional.conv2d, images, filters, padding=1)
                found[f"convolution-{kind}-{flops}"] = self.timed(there)
                found[f"backward-{kind}-{2 * flops}"] = self.timed(self._back(there, images, filters))
        return found

    def attention(self) -> dict[str, float]:
        """Scaled dot-product attention, there and back, which is two and a half times the arithmetic."""
        found: dict[str, float] = {}
        if not hasattr(self.torch.nn.functional, "scaled_dot_product_attention"):  # before torch 2.0
            return found
        for kind in self.kinds:
            if kind not in ("fp64", "tf32"):  # which kernels of attention do not compute in
                for texts, words in TEXTS[self.cpu]:
                    with where_room():
                        found.update(self._attention(kind, texts, words))
        return found

    def _attention(self, kind: str, texts: int, words: int) -> dict[str, float]:
        parts = [self._random(kind, texts, HEADS, words, WIDTH).requires_grad_() for _ in range(3)]
        flops = 4 * texts * HEADS * words * words * WIDTH
        there = partial(self.torch.nn.functional.scaled_dot_product_attention, *parts)
        return {
            f"attention-{kind}-{flops}": self.timed(there),
            f"attention_backward-{kind}-{5 * flops // 2}": self.timed(self._back(there, *parts)),
        }

    def _back(self, there: Callable[[], Any], *leaves: Any) -> Callable[[], Any]:
        """The way back of one call."""
        made = there()
        grad = self.torch.autograd.grad
        return partial(grad, made, leaves, self.torch.ones_like(made), retain_graph=True)

    def moves(self) -> dict[str, float]:
        """A sum of two arrays: two are read, one is written."""
        found = {}
        for moved in MOVES[self.cpu]:
            left, right, made = (self.torch.zeros(moved // 12, device=self.device) for _ in range(3))
            found[f"move-{moved}"] = self.timed(partial(self.torch.add, left, right, out=made))
        return found

    def copies(self) -> dict[str, float]:
        """From the host and back, pageable and page-locked; `pin` is the host's copy into locked memory."""
        found = {}
        for size in COPIES[self.cpu]:
            there = self.torch.zeros(size, dtype=self.torch.uint8, device=self.device)
            pageable = self.torch.zeros(size, dtype=self.torch.uint8)
            hosts = {"pageable": pageable}
            if not self.cpu:
                hosts["pinned"] = pageable.pin_memory()
                found[f"pin-{size}"] = self.waited(partial(hosts["pinned"].copy_, pageable))
            for how, here in hosts.items():
                found[f"up-{how}-{size}"] = self.waited(partial(there.copy_, here, non_blocking=True))
                found[f"down-{how}-{size}"] = self.waited(partial(here.copy_, there, non_blocking=True))
        return found

    def room(self) -> dict[str, float]:
        """`processors`, and `context`: bytes of the GPU that neither are free nor are torch's."""
        if self.cpu:
            return {}
        cuda = self.torch.cuda
        free, total = cuda.mem_get_info()
        processors = cuda.get_device_properties(0).multi_processor_count
        return {"processors": processors, "context": max(0, total - free - cuda.memory_reserved())}


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


def check_profile(context: GpuContext) -> Finding:
    """Seconds by operations or bytes, and the steps of three networks; `processors`, and `context`: the bytes
    of the GPU that CUDA and its libraries take.
    """
    rehearsal = context.asked.rehearsal
    device = "cpu" if rehearsal else "cuda"
    major, minor = (0, 0) if rehearsal else map(int, context.device["capability"].split("."))
    rates = Rates(device, (major, minor))
    numbers: dict[str, float] = {}
    kernels = (rates.small, rates.products, rates.convolutions, rates.attention, rates.moves)
    for measure in (*kernels, rates.copies):
        numbers.update(measure())
    kinds = ("fp32",) if rehearsal else ("fp32", AMP)
    numbers.update(record_steps(device, kinds, few=rehearsal))
    if wrong := sorted(name for name, value in numbers.items() if value <= 0 and name != "launch"):
        raise CheckFailure(f"{', '.join(wrong)} took no time at all")
    numbers.update(rates.room())
    return Finding(describe(numbers), {with_unit(name): value for name, value in numbers.items()})


def with_unit(name: str) -> str:
    """Numbers name their units: seconds, and bytes of two of them."""
    if name == "processors":
        return name
    return f"{name}-bytes" if name.endswith(("context", "peak")) else f"{name}-s"


def describe(numbers: Mapping[str, float]) -> str:
    """The fastest product of each kind, and the memory's pace."""
    products: dict[str, float] = {}
    for name, seconds in numbers.items():
        what, _, rest = name.partition("-")
        if what == "product":
            kind, _, flops = rest.partition("-")
            products[kind] = max(products.get(kind, 0.0), float(flops) / seconds)
    moved = max(float(name[5:]) / value for name, value in numbers.items() if name.startswith("move-"))
    said = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in products.items())
    return f"products at {said} TFLOP/s, memory at {moved / 1e9:.4g} GB/s"
