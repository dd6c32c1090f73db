"""`profile`: how fast this GPU is for what a training is made of. It measures, and judges nothing but that
a GPU did it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...context import Failure, Finding
from ..context import GpuContext
from ..frameworks import torch_steps
from ..frameworks.torch_rates import Rates


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
    kinds = ("fp32",) if rehearsal else ("fp32", torch_steps.AMP)
    numbers.update(torch_steps.record_steps(device, kinds, few=rehearsal))
    if wrong := sorted(name for name, value in numbers.items() if value <= 0 and name != "launch"):
        raise Failure(f"{', '.join(wrong)} took no time at all")
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
