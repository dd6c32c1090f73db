"""The check `profile`: how long a GPU takes for the operations of a training in torch.

It measures, and checks only that a GPU did the work. Each time is the shortest of a few rounds, because other
work on the machine only adds time. Kernels are timed by the clock of the GPU, queued after a kernel that
occupies the GPU. So the times exclude the time of the program to launch them, which is `launch`.

For training steps of three networks it measures forward pass, backward pass and optimizer. These times are
compared with an emulated GPU that runs the same file.
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

# Kind -> torch's type. Tensor cores compute tf32 and bf16 from capability 8.0 on.
TYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
FROM_8_0 = ("tf32", "bf16")
ROUNDS, LONGEST, MOST = 5, 0.02, 20
PLUG, LAUNCHES = 4096, 200
MIB = 1 << 20

# Rows of a square product; images of 64 channels and 56 x 56 points; (texts, words), with 12 heads of 64;
# bytes. In pairs: on a GPU, on a CPU.
PRODUCTS = (128, 256, 512, 1024, 2048, 4096), (64, 128, 256, 512)
IMAGES, CHANNELS, SIDE = ((1, 4, 16, 64), (1, 4)), 64, 56
TEXTS, HEADS, WIDTH = (((8, 128), (8, 512), (8, 2048)), ((1, 128), (1, 512))), 12, 64
MOVES = (12 << 10, 192 << 10, 3 * MIB, 48 * MIB, 384 * MIB), (12 << 10, 192 << 10, 3 * MIB, 48 * MIB)
COPIES = (4 << 10, 64 << 10, MIB, 16 * MIB, 128 * MIB), (4 << 10, 64 << 10, MIB, 16 * MIB)


class Rates:
    """Measurements on `device`: `cuda` or, in a rehearsal, `cpu`.

    Each method returns seconds by name. The name ends with the operations or the bytes of a call.
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
        """Return the seconds that the device needs for a call."""
        once = self._round(call, 1)  # and loads what is loaded once
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
        """Return the seconds that the program needs for a call, until the device has finished it."""

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
        """Measure `kernel`, the shortest kernel, and `launch`, the time of the program to launch it."""
        number = self.torch.zeros(1, device=self.device)
        kernel = self.timed(lambda: number.add_(1))
        if self.cpu:
            return {"kernel": kernel, "launch": 0.0}

        def launches() -> float:
            wait(self.torch, self.device)
            began = time.perf_counter()
            for _ in range(LAUNCHES):
                number.add_(1)
            return (time.perf_counter() - began) / LAUNCHES

        launches()
        return {"kernel": kernel, "launch": min(launches() for _ in range(ROUNDS))}

    def products(self) -> dict[str, float]:
        seconds = {}
        for kind in self.kinds:
            for rows in PRODUCTS[self.cpu]:
                product = partial(self.torch.matmul, *(self._random(kind, rows, rows) for _ in range(2)))
                seconds[f"product-{kind}-{2 * rows**3}"] = self.timed(product)
        return seconds

    def convolutions(self) -> dict[str, float]:
        """Measure convolutions: forward, and backward for images and filters, which is twice the
        arithmetic.
        """
        seconds = {}
        for kind in self.kinds:
            if kind == "fp64":  # nobody trains in it, and cuDNN takes its time
                continue
            filters = self._random(kind, CHANNELS, CHANNELS, 3, 3).requires_grad_()
            for count in IMAGES[self.cpu]:
                images = self._random(kind, count, CHANNELS, SIDE, SIDE).requires_grad_()
                flops = 2 * 9 * count * CHANNELS * CHANNELS * SIDE * SIDE
                forward = partial(self.torch.nn.functional.conv2d, images, filters, padding=1)
                seconds[f"convolution-{kind}-{flops}"] = self.timed(forward)
                seconds[f"backward-{kind}-{2 * flops}"] = self.timed(self._back(forward, images, filters))
        return seconds

    def attention(self) -> dict[str, float]:
        """Measure scaled dot-product attention, and its backward pass with two and a half times the
        arithmetic.
        """
        seconds: dict[str, float] = {}
        if not hasattr(self.torch.nn.functional, "scaled_dot_product_attention"):  # before torch 2.0
            return seconds
        for kind in self.kinds:
            if kind not in ("fp64", "tf32"):  # kernels of attention do not have them
                for texts, words in TEXTS[self.cpu]:
                    with skip_if_full():
                        seconds.update(self._attention(kind, texts, words))
        return seconds

    def _attention(self, kind: str, texts: int, words: int) -> dict[str, float]:
        parts = [self._random(kind, texts, HEADS, words, WIDTH).requires_grad_() for _ in range(3)]
        flops = 4 * texts * HEADS * words * words * WIDTH
        forward = partial(self.torch.nn.functional.scaled_dot_product_attention, *parts)
        return {
            f"attention-{kind}-{flops}": self.timed(forward),
            f"attention_backward-{kind}-{5 * flops // 2}": self.timed(self._back(forward, *parts)),
        }

    def _back(self, forward: Callable[[], Any], *leaves: Any) -> Callable[[], Any]:
        """Return the backward pass of a call."""
        output = forward()
        grad = self.torch.autograd.grad
        return partial(grad, output, leaves, self.torch.ones_like(output), retain_graph=True)

    def moves(self) -> dict[str, float]:
        """Measure a sum of two arrays: two are read, one is written."""
        seconds = {}
        for moved in MOVES[self.cpu]:
            augend, addend, out = (self.torch.zeros(moved // 12, device=self.device) for _ in range(3))
            seconds[f"move-{moved}"] = self.timed(partial(self.torch.add, augend, addend, out=out))
        return seconds

    def copies(self) -> dict[str, float]:
        """Measure copies from the host and back, pageable and page-locked.

        `pin` is the host's copy into locked memory.
        """
        seconds = {}
        for size in COPIES[self.cpu]:
            there = self.torch.zeros(size, dtype=self.torch.uint8, device=self.device)
            pageable = self.torch.zeros(size, dtype=self.torch.uint8)
            hosts = {"pageable": pageable}
            if not self.cpu:
                hosts["pinned"] = pageable.pin_memory()
                seconds[f"pin-{size}"] = self.waited(partial(hosts["pinned"].copy_, pageable))
            for how, here in hosts.items():
                seconds[f"up-{how}-{size}"] = self.waited(partial(there.copy_, here, non_blocking=True))
                seconds[f"down-{how}-{size}"] = self.waited(partial(here.copy_, there, non_blocking=True))
        return seconds

    def room(self) -> dict[str, float]:
        """Return `processors`, and `context`: the bytes of GPU memory that are neither free nor torch's."""
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
"""The message of torch, in every version."""

# Network -> batches, and those of a rehearsal on a CPU.
BATCHES = {
    "resnet18": ((16, 64), (2,)),
    "bert": ((8, 32), (2,)),
    "convnet": ((16, 64), (16,)),
}


def record_steps(device: str, kinds: tuple[str, ...], *, few: bool) -> dict[str, float]:
    """Return seconds, and peak bytes of GPU memory, as `step-NETWORK-KIND-BATCH-WHAT`.

    `kinds` are number types (fp32, fp16). `few` selects small batches for a CPU. `whole` is the time from one
    step to the next, in which the program and the GPU work in parallel; `forward`, `backward` and `optimizer`
    are times of the GPU.
    """
    torch: Any = importlib.import_module("torch")
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True  # torch's defaults
    seconds = {}
    for name, batches in BATCHES.items():
        for batch in batches[few]:
            for kind in kinds:
                with skip_if_full():
                    took = dict(train(name, batch, kind, device))
                    seconds.update({f"step-{name}-{kind}-{batch}-{what}": took[what] for what in took})
    return seconds


@contextlib.contextmanager
def skip_if_full() -> Iterator[None]:
    """Skip the block if the memory of a small GPU is full."""
    gc.collect()  # networks have reference cycles
    try:
        yield
    except RuntimeError as error:
        if FULL not in str(error):
            raise


def train(name: str, batch: int, kind: str, device: str) -> Iterator[tuple[str, float]]:
    """Train a network. Return its times."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(7)
    network = NETWORKS[name](torch.nn).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    inputs, classes = (tensor.to(device) for tensor in sample(torch, name, batch))
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    mark, between = marks(torch, device)
    steps = []
    for _ in range(WARM + STEPS):
        began = mark()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=kind == AMP):
            loss = torch.nn.functional.cross_entropy(network(inputs), classes)
        there = mark()
        loss.backward()
        back = mark()
        optimizer.step()
        steps.append((began, there, back, mark()))
    wait(torch, device)
    warm = steps[WARM:]
    for at, what in enumerate(("forward", "backward", "optimizer")):
        yield what, statistics.median(between(step[at], step[at + 1]) for step in warm)
    yield "whole", statistics.median(between(warm[at][0], warm[at + 1][0]) for at in range(len(warm) - 1))
    if device != "cpu":
        yield "peak", float(torch.cuda.max_memory_allocated())


def marks(torch: Any, device: str) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return two functions: one records a time on a GPU or CPU, one waits and returns the seconds between
    two.
    """
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
    """Return a batch for the network, and its classes."""
    classes = torch.arange(batch) % 2
    if name == "bert":
        return torch.arange(batch * LENGTH).reshape(batch, LENGTH) % WORDS, classes
    side = 224 if name == "resnet18" else 64
    return torch.linspace(-1, 1, batch * 3 * side * side).reshape(batch, 3, side, side), classes


def _resnet18(nn: Any) -> Any:
    """Return ResNet-18 (He and others, Deep Residual Learning for Image Recognition, 2016, table 1)."""

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
    """Return BERT (Devlin and others, 2019) in the size `small`: 4 layers of 512, 8 heads."""

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
    """Return three convolutions and a dense layer, a simple network to distinguish cats and dogs."""
    parts = []
    for into, out in ((3, 32), (32, 64), (64, 128)):
        parts += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(128 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 2))


NETWORKS = {"resnet18": _resnet18, "bert": _bert, "convnet": _convnet}


def check_profile(context: GpuContext) -> Finding:
    """Measure seconds by operations or bytes, steps of three networks, `processors` and `context` bytes."""
    rehearsal = context.rehearsal
    device = "cpu" if rehearsal else "cuda"
    major, minor = (0, 0) if rehearsal else map(int, context.device["capability"].split("."))
    rates = Rates(device, (major, minor))
    numbers: dict[str, float] = {}
    kernels = (rates.small, rates.products, rates.convolutions, rates.attention, rates.moves)
    for measure in (*kernels, rates.copies):
        numbers.update(measure())
    numbers.update(record_steps(device, ("fp32",) if rehearsal else ("fp32", AMP), few=rehearsal))
    if wrong := sorted(name for name, value in numbers.items() if value <= 0 and name != "launch"):
        raise CheckFailure(f"{', '.join(wrong)} took no time at all")
    numbers.update(rates.room())
    return Finding(describe(numbers), {with_unit(name): value for name, value in numbers.items()})


def with_unit(name: str) -> str:
    """Return the name with its unit: bytes for two of the names, seconds for the others."""
    if name == "processors":
        return name
    return f"{name}-bytes" if name.endswith(("context", "peak")) else f"{name}-s"


def describe(numbers: Mapping[str, float]) -> str:
    """Return a line with the fastest product of each number type, and the memory bandwidth."""
    products: dict[str, float] = {}
    for name, seconds in numbers.items():
        what, _, rest = name.partition("-")
        if what == "product":
            kind, _, flops = rest.partition("-")
            products[kind] = max(products.get(kind, 0.0), float(flops) / seconds)
    moved = max(float(name[5:]) / value for name, value in numbers.items() if name.startswith("move-"))
    rates = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in products.items())
    return f"products at {rates} TFLOP/s, memory at {moved / 1e9:.4g} GB/s"
