"""CuPy. It does not compute on a CPU, so a rehearsal uses numpy, which has the same functions."""

from __future__ import annotations

import gc
import importlib
import time
from typing import Any

from ...context import LazyModule
from .. import reference
from ..context import GpuContext
from ..reference import convolve
from . import results
from .nccl import all_reduce as all_reduce  # where the lock has it
from .results import Transfer

KINDS = ("float32", "float64", "float16")
CPU_LACKS = ("float16",)
"""numpy sums products of float16 in float16."""

BLOCK = 128
# T3's function in one: a row's products, their tanh, log(sum(exp)), and the gradient of the products.
SOURCE = """
extern "C" __global__ void rows(const float* inputs, const float* weights, float* outer, float* out,
                                int count, int inner, int columns) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= count) return;
    float total = 0;
    for (int column = 0; column < columns; ++column) {
        float product = 0;
        for (int k = 0; k < inner; ++k) product += inputs[row * inner + k] * weights[k * columns + column];
        float hidden = tanhf(product / 8);
        outer[row * columns + column] = expf(hidden) * (1 - hidden * hidden) / 8;
        total += expf(hidden);
    }
    for (int column = 0; column < columns; ++column) outer[row * columns + column] /= total;
    out[row] = logf(total);
}
"""

cupy: Any = LazyModule("cupy")


def _module(context: GpuContext) -> Any:
    return reference.numpy if context.rehearsal else cupy


def _array(context: GpuContext, values: Any, kind: str) -> Any:
    return _module(context).asarray(reference.numpy.ascontiguousarray(values, dtype=kind))


def on_cpu(values: Any, kind: str) -> Any:
    return values.astype(kind)


def fetch(context: GpuContext, array: Any, kind: str) -> Any:
    results.check_cuda_array(context, array, kind, name="cupy")
    return (array if context.rehearsal else array.get()).astype("float64")


def matmul(context: GpuContext, matrix: Any, right: Any, kind: str) -> Any:
    return fetch(context, _array(context, matrix, kind) @ _array(context, right, kind), kind)


def elementwise(context: GpuContext, values: Any) -> Any:
    return fetch(context, _module(context).tanh(_array(context, values, "float32")), "float32")


def reduce(context: GpuContext, values: Any, axis: int | None, kind: str) -> Any:
    return fetch(context, _array(context, values, kind).sum(axis=axis), kind)


def largest(context: GpuContext, values: Any) -> Any:
    return fetch(context, _array(context, values, "float32").max(), "float32")


def convolution(context: GpuContext, case: reference.ConvolutionCase, kind: str) -> dict[str, Any]:
    """Convolve through windows and a product of tensors, because CuPy has no cuDNN since 14."""
    module = _module(context)

    def correlate(image: Any, filters: Any, stride: int) -> Any:
        pixels, kernels = _array(context, image, kind), _array(context, filters, kind)
        windows = module.lib.stride_tricks.sliding_window_view(pixels, filters.shape[2:], axis=(2, 3))
        windows = windows[:, :, ::stride, ::stride]
        product = module.tensordot(windows, kernels, axes=((1, 4, 5), (1, 2, 3)))
        return fetch(context, product, kind).transpose(0, 3, 1, 2)

    return convolve(case, correlate)


def factorise(context: GpuContext, square: Any, side: Any, kind: str) -> reference.Factors:
    """Factorize one matrix after the other."""
    linalg, matrix = _module(context).linalg, _array(context, square, kind)
    pairs = [_lu(context, each) for each in matrix]
    packed = reference.numpy.stack([fetch(context, each, kind) for each, _ in pairs])
    pivots = reference.numpy.stack([pivot.get() if hasattr(pivot, "get") else pivot for _, pivot in pairs])
    arrays = (linalg.solve(matrix, _array(context, side, kind)), *linalg.svd(matrix, full_matrices=False))
    order = reference.order_of(pivots + 1)
    return reference.Factors(order, packed, *(fetch(context, array, kind) for array in arrays))


def _lu(context: GpuContext, matrix: Any) -> tuple[Any, Any]:
    """Return L and U in one matrix, and the pivots from 0. numpy lacks this, so a rehearsal eliminates
    itself.
    """
    if not context.rehearsal:
        packed, pivots = importlib.import_module("cupyx.scipy.linalg").lu_factor(matrix)
        return packed, pivots
    packed, chosen = matrix.copy(), []
    for step in range(len(packed)):
        pivot = step + int(abs(packed[step:, step]).argmax())
        packed[[step, pivot]] = packed[[pivot, step]]
        packed[step + 1 :, step] /= packed[step, step]
        packed[step + 1 :, step + 1 :] -= packed[step + 1 :, step, None] * packed[step, step + 1 :]
        chosen.append(pivot)
    return packed, reference.numpy.array(chosen)


def train(context: GpuContext, case: reference.TrainingCase) -> tuple[list[float], Any, Any]:
    """Train with a formula for the gradients, since CuPy cannot differentiate."""
    module, losses = _module(context), []
    names = (case.inputs, case.targets, case.first, case.second)
    inputs, targets, first, second = (_array(context, values, "float32") for values in names)
    for step in range(reference.STEPS + 1):
        hidden = module.tanh(inputs @ first)
        off = hidden @ second - targets
        losses.append(float(fetch(context, (off * off).mean(), "float32")))
        if step < reference.STEPS:
            outer = off * (2 / off.size)
            inner = (outer @ second.T) * (1 - hidden * hidden)
            second = second - reference.RATE * (hidden.T @ outer)
            first = first - reference.RATE * (inputs.T @ inner)
    return losses, fetch(context, first, "float32"), fetch(context, second, "float32")


def transfer(context: GpuContext, values: Any) -> Transfer:
    wait = (lambda: None) if context.rehearsal else cupy.cuda.runtime.deviceSynchronize
    began = time.perf_counter()
    there = _module(context).array(values)
    wait()
    between = time.perf_counter()
    back = there.copy() if context.rehearsal else there.get()
    ended = time.perf_counter()
    fetch(context, there[:1], "float32")
    return Transfer(back=back, up=between - began, down=ended - between, pinned=False)


def in_use(context: GpuContext) -> int:  # noqa: ARG001
    return int(cupy.get_default_memory_pool().used_bytes())


def release(context: GpuContext) -> None:
    gc.collect()
    if not context.rehearsal:
        cupy.get_default_memory_pool().free_all_blocks()


def compile(context: GpuContext, inputs: Any, weights: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run CUDA C compiled with NVRTC, and CuPy's functions; only the functions in a rehearsal."""
    module = _module(context)
    matrix, right = (_array(context, values, "float32") for values in (inputs, weights))
    hidden = module.tanh(matrix @ right / 8)
    powers = module.exp(hidden)
    sums = powers.sum(axis=1)
    outer = powers / sums[:, None] * (1 - hidden * hidden) / 8
    eager = {"rows": module.log(sums), "gradient": matrix.T @ outer}
    eager = {name: fetch(context, array, "float32") for name, array in eager.items()}
    if context.rehearsal:
        return eager, eager, "numpy, in place of CUDA C by NVRTC"
    (count, inner), columns = matrix.shape, right.shape[1]
    slopes, rows = module.empty_like(outer), module.empty_like(sums)
    sizes = (reference.numpy.int32(size) for size in (count, inner, columns))
    kernel = module.RawKernel(SOURCE, "rows")
    kernel((-(-count // BLOCK),), (BLOCK,), (matrix, right, slopes, rows, *sizes))
    compiled = {"rows": rows, "gradient": matrix.T @ slopes}
    compiled = {name: fetch(context, array, "float32") for name, array in compiled.items()}
    return eager, compiled, "cupy.RawKernel, CUDA C by NVRTC"
