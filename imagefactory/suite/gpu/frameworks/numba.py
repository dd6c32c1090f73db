"""Numba with numba-cuda: kernels in this file, which NVVM compiles for the GPU.

A kernel computes one element of its result. In a rehearsal, Numba's CPU compiler runs it in a loop.
"""

from __future__ import annotations

import functools
import gc
import importlib
import math
import time
from collections.abc import Callable
from typing import Any

from ...context import LazyModule
from .. import reference
from ..context import GpuContext
from ..reference import convolve
from . import results
from .results import Transfer

KINDS = ("float32", "float64", "float16")
CPU_LACKS = ("float16",)
BLOCK = 128

Body = Callable[..., None]

numba: Any = LazyModule("numba")
cuda: Any = LazyModule("numba.cuda")


# --- kernels: place in the result, arrays [n, row, column] or [n, channel, y, x], the result last ----------


def _product(place: int, zero: Any, matrix: Any, right: Any, out: Any) -> None:
    """Compute one element of a product. `zero` has the number type of the sums."""
    rest, column = divmod(place, out.shape[2])
    n, row = divmod(rest, out.shape[1])
    total = zero
    for k in range(matrix.shape[2]):
        total += (zero + matrix[n, row, k]) * (zero + right[n, k, column])
    out[n, row, column] = total


def _correlate(place: int, zero: Any, stride: int, image: Any, filters: Any, out: Any) -> None:
    rest, x = divmod(place, out.shape[3])
    rest, y = divmod(rest, out.shape[2])
    n, kernel = divmod(rest, out.shape[1])
    total = zero
    for channel in range(filters.shape[1]):
        for dy in range(filters.shape[2]):
            for dx in range(filters.shape[3]):
                value = image[n, channel, y * stride + dy, x * stride + dx]
                total += (zero + value) * (zero + filters[kernel, channel, dy, dx])
    out[n, kernel, y, x] = total


def _sum(place: int, zero: Any, values: Any, out: Any) -> None:
    """Sum a column of [row, column]."""
    total = zero
    for row in range(values.shape[0]):
        total += values[row, place]
    out[place] = total


def _largest(place: int, values: Any, out: Any) -> None:
    out[place] = values[0, place]
    for row in range(1, values.shape[0]):
        out[place] = max(out[place], values[row, place])


def _tanh(place: int, factor: Any, values: Any, out: Any) -> None:
    out.flat[place] = math.tanh(values.flat[place] * factor)


def _turn(place: int, values: Any, out: Any) -> None:
    row, column = divmod(place, out.shape[2])
    out[0, row, column] = values[0, column, row]


def _off(place: int, output: Any, targets: Any, squares: Any, out: Any) -> None:
    off = output.flat[place] - targets.flat[place]
    squares[place, 0] = off * off
    out.flat[place] = 2 * off / output.size


def _inner(place: int, hidden: Any, out: Any) -> None:
    """Compute the gradient of tanh, whose result is `hidden`."""
    out.flat[place] *= 1 - hidden.flat[place] * hidden.flat[place]


def _step(place: int, rate: Any, gradient: Any, out: Any) -> None:
    out.flat[place] -= rate * gradient.flat[place]


def _rows(place: int, inputs: Any, weights: Any, outer: Any, out: Any) -> None:
    """Compute T3's function for a row: the products, their tanh, log(sum(exp)), and the gradient of the
    products.
    """
    total = out[place] * 0
    for column in range(weights.shape[2]):
        product = out[place] * 0
        for k in range(inputs.shape[2]):
            product += inputs[0, place, k] * weights[0, k, column]
        hidden = math.tanh(product / 8)
        outer[0, place, column] = math.exp(hidden) * (1 - hidden * hidden) / 8
        total += math.exp(hidden)
    for column in range(weights.shape[2]):
        outer[0, place, column] /= total
    out[place] = math.log(total)


def _exponents(place: int, hidden: Any, out: Any) -> None:
    out.flat[place] = math.exp(hidden.flat[place])


def _logarithms(place: int, sums: Any, out: Any) -> None:
    out[place] = math.log(sums[place])


def _outer(place: int, powers: Any, sums: Any, out: Any) -> None:
    """Convert results of tanh into the gradient of its input, divided by 8."""
    row = place // out.shape[2]
    hidden = out.flat[place]
    out.flat[place] = powers.flat[place] / sums[row] * (1 - hidden * hidden) / 8


@functools.cache
def _kernel(body: Body, rehearsal: bool) -> Any:
    """Return a function `kernel(count, arguments)` that calls `body(place, *arguments)` for each place below
    `count`.
    """
    if rehearsal:
        inner = numba.njit(body)

        @numba.njit  # type: ignore[untyped-decorator]
        def loop(count: int, arguments: Any) -> None:
            for place in range(count):
                inner(place, *arguments)

        return loop
    gpu: Any = importlib.import_module("numba.cuda")  # a kernel may name only modules, functions and numbers
    inner = gpu.jit(device=True)(body)

    @gpu.jit  # type: ignore[untyped-decorator]
    def kernel(count: int, arguments: Any) -> None:
        place = gpu.grid(1)
        if place < count:
            inner(place, *arguments)

    return kernel


def _run(context: GpuContext, body: Body, count: int, *arguments: Any) -> Any:
    """Run `body` at `count` places and return the last argument, to which it writes."""
    kernel = _kernel(body, context.rehearsal)
    if not context.rehearsal:
        kernel = kernel[-(-count // BLOCK), BLOCK]
    kernel(count, arguments)
    return arguments[-1]


def _array(context: GpuContext, values: Any, kind: str) -> Any:
    here = reference.numpy.ascontiguousarray(values, dtype=kind)
    return here.copy() if context.rehearsal else cuda.to_device(here)


def _empty(context: GpuContext, shape: tuple[int, ...], kind: str) -> Any:
    return _array(context, reference.numpy.zeros(shape), kind)


def _zero(kind: str) -> Any:
    """Return a zero in the number type for sums: float32 for float16."""
    return reference.numpy.dtype("float32" if kind == "float16" else kind).type(0)


def on_cpu(values: Any, kind: str) -> Any:
    return values.astype(kind)


def fetch(context: GpuContext, array: Any, kind: str) -> Any:
    results.check_cuda_array(context, array, kind, name="numba")
    return (array if context.rehearsal else array.copy_to_host()).astype("float64")


def _multiply(context: GpuContext, matrix: Any, right: Any, kind: str) -> Any:
    """Multiply device arrays, [n, row, column]."""
    out = _empty(context, (matrix.shape[0], matrix.shape[1], right.shape[2]), kind)
    return _run(context, _product, out.size, _zero(kind), matrix, right, out)


def matmul(context: GpuContext, matrix: Any, right: Any, kind: str) -> Any:
    shape = (*matrix.shape[:-1], right.shape[-1])
    rows, columns = (
        _array(context, values if values.ndim == 3 else values[None], kind) for values in (matrix, right)
    )
    return fetch(context, _multiply(context, rows, columns, kind), kind).reshape(shape)


def elementwise(context: GpuContext, values: Any) -> Any:
    there = _array(context, values, "float32")
    out = _empty(context, values.shape, "float32")
    return fetch(context, _run(context, _tanh, out.size, _zero("float32") + 1, there, out), "float32")


def _columns(values: Any) -> Any:
    """Return all numbers as [row, column], for a first reduction to one row."""
    return values.reshape(-1, math.gcd(values.size, 4096))


def _reduce(context: GpuContext, body: Body, there: Any, *arguments: Any) -> Any:
    out = _empty(context, there.shape[1:], str(there.dtype))
    return _run(context, body, out.size, *arguments, there, out)


def reduce(context: GpuContext, values: Any, axis: int | None, kind: str) -> Any:
    if axis is not None:
        there = _array(context, values if axis == 0 else values.T, kind)
        return fetch(context, _reduce(context, _sum, there, _zero(kind)), kind)
    row = _reduce(context, _sum, _array(context, _columns(values), kind), _zero(kind))
    return fetch(context, _reduce(context, _sum, row.reshape(-1, 1), _zero(kind)), kind)[0]


def largest(context: GpuContext, values: Any) -> Any:
    row = _reduce(context, _largest, _array(context, _columns(values), "float32"))
    return fetch(context, _reduce(context, _largest, row.reshape(-1, 1)), "float32")[0]


def convolution(context: GpuContext, case: reference.ConvolutionCase, kind: str) -> dict[str, Any]:
    def correlate(image: Any, filters: Any, stride: int) -> Any:
        arrays = _array(context, image, kind), _array(context, filters, kind)
        side = tuple((size - reach) // stride + 1 for size, reach in zip(image.shape[2:], filters.shape[2:]))  # noqa: B905
        out = _empty(context, (image.shape[0], filters.shape[0], *side), kind)
        return fetch(context, _run(context, _correlate, out.size, _zero(kind), stride, *arrays, out), kind)

    return convolve(case, correlate)


def train(context: GpuContext, case: reference.TrainingCase) -> tuple[list[float], Any, Any]:
    """Train with a formula for the gradients, since Numba cannot differentiate."""
    rate, unit, losses = _zero("float32") + reference.RATE, _zero("float32") + 1, []
    names = (case.inputs, case.targets, case.first, case.second)
    inputs, targets, first, second = (_array(context, values[None], "float32") for values in names)

    def multiply(matrix: Any, right: Any) -> Any:
        return _multiply(context, matrix, right, "float32")

    def turned(values: Any) -> Any:
        _, rows, columns = values.shape
        return _run(context, _turn, values.size, values, _empty(context, (1, columns, rows), "float32"))

    for step in range(reference.STEPS + 1):
        product = multiply(inputs, first)
        hidden = _run(context, _tanh, product.size, unit, product, _empty(context, product.shape, "float32"))
        output = multiply(hidden, second)
        squares = _empty(context, (output.size, 1), "float32")
        outer = _empty(context, output.shape, "float32")
        _run(context, _off, output.size, output, targets, squares, outer)
        total = fetch(context, _reduce(context, _sum, squares, _zero("float32")), "float32")
        losses.append(float(total[0]) / output.size)
        if step < reference.STEPS:
            inner = _run(context, _inner, hidden.size, hidden, multiply(outer, turned(second)))
            steps = (second, multiply(turned(hidden), outer)), (first, multiply(turned(inputs), inner))
            for weights, gradient in steps:
                _run(context, _step, weights.size, rate, gradient, weights)
    return losses, fetch(context, first, "float32")[0], fetch(context, second, "float32")[0]


def transfer(context: GpuContext, values: Any) -> Transfer:
    wait = (lambda: None) if context.rehearsal else cuda.synchronize
    began = time.perf_counter()
    there = _array(context, values, "float32")
    wait()
    between = time.perf_counter()
    back = there.copy() if context.rehearsal else there.copy_to_host()
    ended = time.perf_counter()
    fetch(context, there[:1], "float32")
    return Transfer(back=back, up=between - began, down=ended - between, pinned=False)


def in_use(context: GpuContext) -> int:  # noqa: ARG001
    """Return all bytes in use on the GPU, by any program: numba does not count its memory."""
    free, total = cuda.current_context().get_memory_info()
    return int(total - free)


def release(context: GpuContext) -> None:
    """Free memory now. By default, numba waits until there is more to free."""
    gc.collect()
    if not context.rehearsal:
        cuda.current_context().deallocations.clear()


def compile(context: GpuContext, inputs: Any, weights: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run one kernel for a whole row, and a kernel for each step. All of them are compiled."""
    matrix, right = (_array(context, values[None], "float32") for values in (inputs, weights))
    turned = _array(context, inputs.T[None], "float32")
    eighth, count = _zero("float32") + 0.125, inputs.shape[0]

    product = _multiply(context, matrix, right, "float32")
    outer = _run(context, _tanh, product.size, eighth, product, _empty(context, product.shape, "float32"))
    powers = _run(context, _exponents, outer.size, outer, _empty(context, outer.shape, "float32"))
    across = _empty(context, (1, powers.shape[2], count), "float32")
    _run(context, _turn, powers.size, powers, across)
    sums = _reduce(context, _sum, across.reshape(powers.shape[2], count), _zero("float32"))
    rows = _run(context, _logarithms, count, sums, _empty(context, (count,), "float32"))
    _run(context, _outer, outer.size, powers, sums, outer)
    steps = {"rows": rows, "gradient": _multiply(context, turned, outer, "float32")}

    outer, rows = _empty(context, outer.shape, "float32"), _empty(context, (count,), "float32")
    _run(context, _rows, count, matrix, right, outer, rows)
    whole = {"rows": rows, "gradient": _multiply(context, turned, outer, "float32")}
    eager, compiled = (
        {
            "rows": fetch(context, arrays["rows"], "float32"),
            "gradient": fetch(context, arrays["gradient"], "float32")[0],
        }
        for arrays in (steps, whole)
    )
    version = importlib.import_module("numba_cuda").__version__
    return eager, compiled, f"numba-cuda {version}, one kernel and one for each step"
