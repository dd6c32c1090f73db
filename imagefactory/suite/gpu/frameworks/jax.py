"""JAX with its plugin for CUDA or ROCm."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

from ...context import CheckFailure, LazyModule
from .. import reference, table
from ..context import GpuContext
from .nccl import all_reduce as all_reduce  # XLA leaves out a sum over one device
from .results import Transfer, type_of

KINDS = ("float32", "tf32", "float16", "bfloat16")
CPU_LACKS: tuple[str, ...] = ()
PLATFORMS = ("gpu", "cuda", "rocm")
"""The names of the plugin's devices in jax."""

jax: Any = LazyModule("jax")


def prepare(context: GpuContext) -> None:
    """Set the platforms: jax computes on the first one, and must open all.

    The CPU is included for a control, whose result on the CPU must be rejected. From 0.10 on, jax silently
    skips the first platform if it finds no GPU, so `_device` checks that.
    """
    gpu = "rocm" if context.request.expected.rocm else "cuda"
    os.environ["JAX_PLATFORMS"] = "cpu" if context.rehearsal else f"{gpu},cpu"
    os.environ["JAX_ENABLE_X64"] = "1"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def _device(context: GpuContext) -> Any:
    """Return the device on which jax computes. Raises CheckFailure if it is on the wrong platform."""
    device = jax.devices()[0]
    if device.platform not in _platforms(context):
        raise CheckFailure(f"jax computes on {device.platform}: it sees no GPU", outcome=table.NO_GPU)
    return device


def _platforms(context: GpuContext) -> tuple[str, ...]:
    return ("cpu",) if context.rehearsal else PLATFORMS


def _array(context: GpuContext, values: Any, kind: str) -> Any:
    """Convert with numpy on the CPU, so that the GPU only copies. bfloat16 is that of ml_dtypes."""
    return jax.device_put(values.astype(jax.numpy.dtype(type_of(kind))), _device(context))


def on_cpu(values: Any, kind: str) -> Any:
    return jax.device_put(values.astype(type_of(kind)), jax.devices("cpu")[0])


def fetch(context: GpuContext, array: Any, kind: str) -> Any:
    platforms = {device.platform for device in array.devices()}
    if not platforms or not platforms <= set(_platforms(context)):
        raise CheckFailure(f"jax computed on {', '.join(sorted(platforms))}")
    if str(array.dtype) != type_of(kind):
        raise CheckFailure(f"jax computed in {array.dtype}, not in {kind}", outcome=table.WRONG_NUMBERS)
    return reference.numpy.asarray(array).astype("float64")


def _precision(kind: str) -> str:
    """Return the precision: `default` lets XLA multiply float32 as tf32, `highest` does not."""
    return "highest" if kind == "float32" else "default"


def matmul(context: GpuContext, matrix: Any, right: Any, kind: str) -> Any:
    arrays = _array(context, matrix, kind), _array(context, right, kind)
    return fetch(context, jax.numpy.matmul(*arrays, precision=_precision(kind)), kind)


def elementwise(context: GpuContext, values: Any) -> Any:
    return fetch(context, jax.numpy.tanh(_array(context, values, "float32")), "float32")


def reduce(context: GpuContext, values: Any, axis: int | None, kind: str) -> Any:
    return fetch(context, _array(context, values, kind).sum(axis=axis), kind)


def largest(context: GpuContext, values: Any) -> Any:
    return fetch(context, _array(context, values, "float32").max(), "float32")


def convolution(context: GpuContext, case: reference.ConvolutionCase, kind: str) -> dict[str, Any]:
    edge = (case.padding, case.padding)

    def convolve(image: Any, filters: Any) -> Any:
        return jax.lax.conv_general_dilated(
            image, filters, (case.stride, case.stride), (edge, edge), precision=_precision(kind)
        )

    def both(image: Any, filters: Any, outer: Any) -> Any:
        output, back = jax.vjp(convolve, image, filters)
        return output, *back(outer)

    # One program: XLA would compile one for each operation.
    inputs = (_array(context, values, kind) for values in (case.image, case.filters, case.outer))
    arrays = zip(("forward", "image", "filters"), jax.jit(both)(*inputs))  # noqa: B905
    return {name: fetch(context, array, kind) for name, array in arrays}


def factorise(context: GpuContext, square: Any, side: Any, kind: str) -> reference.Factors:
    matrix = _array(context, square, kind)
    packed, _, order = jax.lax.linalg.lu(matrix)
    solution = jax.numpy.linalg.solve(matrix, _array(context, side, kind))
    arrays = (packed, solution, *jax.numpy.linalg.svd(matrix, full_matrices=False))
    order = reference.numpy.asarray(order)
    return reference.Factors(order, *(fetch(context, array, kind) for array in arrays))


def train(context: GpuContext, case: reference.TrainingCase) -> tuple[list[float], Any, Any]:
    inputs, targets = (_array(context, values, "float32") for values in (case.inputs, case.targets))
    weights = tuple(_array(context, values, "float32") for values in (case.first, case.second))

    def loss(pair: tuple[Any, Any]) -> Any:
        hidden = jax.numpy.tanh(jax.numpy.matmul(inputs, pair[0], precision="highest"))
        return ((jax.numpy.matmul(hidden, pair[1], precision="highest") - targets) ** 2).mean()

    step, losses = jax.jit(jax.value_and_grad(loss)), []  # one program, as above
    for place in range(reference.STEPS + 1):
        value, gradients = step(weights)
        losses.append(float(fetch(context, value, "float32")))
        if place < reference.STEPS:
            pairs = zip(weights, gradients)  # noqa: B905
            weights = tuple(weight - reference.RATE * gradient for weight, gradient in pairs)
    first, second = (fetch(context, weight, "float32") for weight in weights)
    return losses, first, second


def transfer(context: GpuContext, values: Any) -> Transfer:
    """Copy through XLA, which uses page-locked memory."""
    began = time.perf_counter()
    there = jax.block_until_ready(jax.device_put(values, _device(context)))
    between = time.perf_counter()
    back = jax.device_get(there)
    ended = time.perf_counter()
    fetch(context, there[:1], "float32")
    return Transfer(back=back, up=between - began, down=ended - between, pinned=False)


def in_use(context: GpuContext) -> int:
    return int(_device(context).memory_stats()["bytes_in_use"])


def release(context: GpuContext) -> None:  # noqa: ARG001
    gc.collect()


def compile(context: GpuContext, inputs: Any, weights: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run an XLA program that was compiled ahead, and the operations one by one."""

    def rows(matrix: Any, right: Any) -> Any:
        product = jax.numpy.matmul(matrix, right, precision="highest")
        return jax.scipy.special.logsumexp(jax.numpy.tanh(product / 8), axis=1)

    def both(matrix: Any, right: Any) -> dict[str, Any]:
        output, back = jax.vjp(lambda kernel: rows(matrix, kernel), right)
        return {"rows": output, "gradient": back(jax.numpy.ones_like(output))[0]}

    arrays = _array(context, inputs, "float32"), _array(context, weights, "float32")
    program = jax.jit(both).lower(*arrays).compile()
    eager, compiled = (
        {name: fetch(context, array, "float32") for name, array in function(*arrays).items()}
        for function in (both, program)
    )
    return eager, compiled, f"jax.jit by XLA, {len(program.as_text().splitlines())} lines of HLO"
