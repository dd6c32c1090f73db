"""How long a GPU takes for the pieces that a training is made of, as torch uses it.

Each is the least of a few rounds, as whatever else the machine does only adds to it. Kernels are timed by the
GPU's own clock, queued behind one that keeps it busy meanwhile, so that the program's time for handing them
over is in none of them; `launch` is that time.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .torch_steps import marks, wait, where_room

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
