"""JAX with its plugin for CUDA or ROCm."""

from __future__ import annotations

import gc
import importlib
import os
import time
from typing import Any

from ...context import CheckFailure, Finding
from .. import reference, table
from ..context import GpuContext
from . import nccl, results
from .probe import run_probe
from .results import Transfer

KINDS = ("float32", "tf32", "float16", "bfloat16")
CPU_LACKS: tuple[str, ...] = ()
PLATFORMS = ("gpu", "cuda", "rocm")
"""What jax calls a device of its plugin, and may call it."""


def prepare(context: GpuContext) -> None:
    """The first platform is where jax computes, and one that is named and cannot be opened is an error.

    The CPU is named too, because a control must see a result of it refused. jax from 0.10 on leaves the first
    out without a word where it sees no GPU, so `_device` looks.
    """
    gpu = "rocm" if context.asked.expected.rocm else "cuda"
    os.environ["JAX_PLATFORMS"] = "cpu" if context.asked.rehearsal else f"{gpu},cpu"
    os.environ["JAX_ENABLE_X64"] = "1"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def classify(error: BaseException) -> str:
    return results.classify(error)


def _jax() -> Any:
    return importlib.import_module("jax")


def _device(context: GpuContext) -> Any:
    """Where jax computes. Raises CheckFailure where that is not the place asked for."""
    device = _jax().devices()[0]
    if device.platform not in _platforms(context):
        text = f"jax computes on {device.platform}: it sees no GPU"
        raise CheckFailure(text, outcome=table.NO_GPU)
    return device


def _platforms(context: GpuContext) -> tuple[str, ...]:
    return ("cpu",) if context.asked.rehearsal else PLATFORMS


def _type(kind: str) -> str:
    return "float32" if kind == "tf32" else kind


def _array(context: GpuContext, values: Any, kind: str) -> Any:
    """Made on the CPU by numpy, whose bfloat16 is ml_dtypes', so that the copy is all the GPU did."""
    jax = _jax()
    return jax.device_put(values.astype(jax.numpy.dtype(_type(kind))), _device(context))


def on_cpu(values: Any, kind: str) -> Any:
    jax = _jax()
    return jax.device_put(values.astype(_type(kind)), jax.devices("cpu")[0])


def fetch(context: GpuContext, array: Any, kind: str) -> Any:
    platforms = {device.platform for device in array.devices()}
    if not platforms or not platforms <= set(_platforms(context)):
        raise CheckFailure(f"jax computed on {', '.join(sorted(platforms))}", outcome=table.LOAD_FAILED)
    if str(array.dtype) != _type(kind):
        raise CheckFailure(f"jax computed in {array.dtype}, not in {kind}", outcome=table.WRONG_NUMBERS)
    return reference.numpy.asarray(array).astype("float64")


def _precision(kind: str) -> str:
    """`default` lets XLA multiply float32 as tf32; `highest` does not. Other types have but one way."""
    return "highest" if kind == "float32" else "default"


def matmul(context: GpuContext, left: Any, right: Any, kind: str) -> Any:
    arrays = _array(context, left, kind), _array(context, right, kind)
    return fetch(context, _jax().numpy.matmul(*arrays, precision=_precision(kind)), kind)


def elementwise(context: GpuContext, values: Any) -> Any:
    return fetch(context, _jax().numpy.tanh(_array(context, values, "float32")), "float32")


def reduce(context: GpuContext, values: Any, axis: int | None, kind: str) -> Any:
    return fetch(context, _array(context, values, kind).sum(axis=axis), kind)


def largest(context: GpuContext, values: Any) -> Any:
    return fetch(context, _array(context, values, "float32").max(), "float32")


def convolution(context: GpuContext, case: reference.ConvolutionCase, kind: str) -> dict[str, Any]:
    jax = _jax()
    kept = (case.padding, case.padding)

    def convolve(image: Any, filters: Any) -> Any:
        return jax.lax.conv_general_dilated(
            image, filters, (case.stride, case.stride), (kept, kept), precision=_precision(kind)
        )

    def both(image: Any, filters: Any, outer: Any) -> Any:
        made, back = jax.vjp(convolve, image, filters)
        return made, *back(outer)

    # One program: XLA would compile one for each operation.
    arrays = (_array(context, values, kind) for values in (case.image, case.filters, case.outer))
    found = dict(zip(("forward", "image", "filters"), jax.jit(both)(*arrays), strict=True))
    return {name: fetch(context, array, kind) for name, array in found.items()}


def factorise(context: GpuContext, square: Any, side: Any, kind: str) -> reference.Factors:
    jax = _jax()
    matrix = _array(context, square, kind)
    packed, _, order = jax.lax.linalg.lu(matrix)
    left, values, right = jax.numpy.linalg.svd(matrix, full_matrices=False)
    solution = jax.numpy.linalg.solve(matrix, _array(context, side, kind))
    found = (fetch(context, array, kind) for array in (packed, solution, left, values, right))
    packed, solution, left, values, right = found
    return reference.Factors(packed, reference.numpy.asarray(order), solution, left, values, right)


def train(context: GpuContext, case: reference.TrainingCase) -> tuple[list[float], Any, Any]:
    jax = _jax()
    inputs, wanted = (_array(context, values, "float32") for values in (case.inputs, case.wanted))
    weights = tuple(_array(context, values, "float32") for values in (case.first, case.second))

    def loss(pair: tuple[Any, Any]) -> Any:
        hidden = jax.numpy.tanh(jax.numpy.matmul(inputs, pair[0], precision="highest"))
        return ((jax.numpy.matmul(hidden, pair[1], precision="highest") - wanted) ** 2).mean()

    step, losses = jax.jit(jax.value_and_grad(loss)), []  # one program, as above
    for place in range(reference.STEPS + 1):
        value, gradients = step(weights)
        losses.append(float(fetch(context, value, "float32")))
        if place < reference.STEPS:
            pairs = zip(weights, gradients, strict=True)
            weights = tuple(weight - reference.RATE * gradient for weight, gradient in pairs)
    first, second = (fetch(context, weight, "float32") for weight in weights)
    return losses, first, second


def transfer(context: GpuContext, values: Any) -> Transfer:
    """XLA copies through pinned memory of its own where the caller's is not."""
    jax = _jax()
    began = time.perf_counter()
    there = jax.block_until_ready(jax.device_put(values, _device(context)))
    between = time.perf_counter()
    back = jax.device_get(there)
    ended = time.perf_counter()
    fetch(context, there[:1], "float32")
    return Transfer(back=back, up=between - began, down=ended - between, pinned=False)


def all_reduce(context: GpuContext, values: Any) -> tuple[Any, str]:
    """By NCCL itself: XLA leaves out a sum over one device."""
    return nccl.all_reduce(context, values)


def loaded(context: GpuContext) -> dict[str, str]:  # noqa: ARG001
    """jax tells none; what is loaded is seen in the process."""
    return {}


def in_use(context: GpuContext) -> int:
    return int(_device(context).memory_stats()["bytes_in_use"])


def release(context: GpuContext) -> None:  # noqa: ARG001
    gc.collect()


def probe(context: GpuContext) -> Finding:
    return run_probe(context)


def compile(context: GpuContext, inputs: Any, weights: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """One program of XLA, compiled ahead and then called, against one operation after the other."""
    jax = _jax()

    def rows(left: Any, right: Any) -> Any:
        product = jax.numpy.matmul(left, right, precision="highest")
        return jax.scipy.special.logsumexp(jax.numpy.tanh(product / 8), axis=1)

    def both(left: Any, right: Any) -> tuple[Any, Any]:
        made, back = jax.vjp(lambda kernel: rows(left, kernel), right)
        (gradient,) = back(jax.numpy.ones_like(made))
        return made, gradient

    arrays = _array(context, inputs, "float32"), _array(context, weights, "float32")
    program = jax.jit(both).lower(*arrays).compile()
    found = []
    for made, gradient in (both(*arrays), program(*arrays)):
        found.append(
            {"rows": fetch(context, made, "float32"), "gradient": fetch(context, gradient, "float32")}
        )
    return found[0], found[1], f"jax.jit by XLA, {len(program.as_text().splitlines())} lines of HLO"
