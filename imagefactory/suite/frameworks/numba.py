"""Numba with numba-cuda, its CUDA target. On the CPU, Numba's compiler compiles plain loops."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from ..context import CheckFailure, Context, LazyModule

MODULES = (("numba", "numba"), ("numba-cuda", "numba_cuda"), ("llvmlite", "llvmlite"))


numpy: Any = LazyModule("numpy")


def cuda_version(context: Context) -> tuple[str, str]:
    """Return the version of NVRTC, whose headers and NVVM numba uses to compile. nvJitLink must have the same
    version.

    The CUDA target of numba without numba-cuda requires a CUDA toolkit on the machine.
    """
    major = context.expected.cuda.partition(".")[0]
    if "numba-cuda" not in context.expected.locked:
        raise CheckFailure(f"numba is locked without its CUDA target: lock numba-cuda[cu{major}]")
    nvrtc, linker = (importlib.import_module(f"cuda.bindings.{name}") for name in ("nvrtc", "nvjitlink"))
    _, *compiled = nvrtc.nvrtcVersion()
    linked = linker.version()
    if linked[0] != compiled[0]:
        raise CheckFailure(f"NVRTC is of CUDA {compiled[0]}, nvJitLink of {linked[0]}")
    version, other = (".".join(map(str, pair)) for pair in (compiled, linked))
    return version, f"NVRTC {version}, nvJitLink {other}"


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = importlib.import_module("numba").njit(function)
    return compiled


def _product(matrix: Any, right: Any, out: Any) -> None:
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            for k in range(matrix.shape[1]):
                out[row, column] += matrix[row, k] * right[k, column]


def _sum(values: Any, out: Any) -> None:
    for value in values:
        out[0] += value


def _convolve(image: Any, filters: Any, out: Any) -> None:
    channels, height, width = filters.shape[1:]
    for kernel in range(out.shape[0]):
        for y in range(out.shape[1]):
            for x in range(out.shape[2]):
                for channel in range(channels):
                    for dy in range(height):
                        for dx in range(width):
                            part = image[channel, y + dy, x + dx] * filters[kernel, channel, dy, dx]
                            out[kernel, y, x] += part


def _eliminate(square: Any, side: Any) -> None:
    """Solve by Gaussian elimination with partial pivoting, in `side`."""
    size = side.shape[0]
    for column in range(size):
        pivot = column
        for row in range(column + 1, size):
            if abs(square[row, column]) > abs(square[pivot, column]):
                pivot = row
        for place in range(size):
            square[column, place], square[pivot, place] = square[pivot, place], square[column, place]
        side[column], side[pivot] = side[pivot], side[column]
        for row in range(column + 1, size):
            factor = square[row, column] / square[column, column]
            for place in range(column, size):
                square[row, place] -= factor * square[column, place]
            side[row] -= factor * side[column]
    for row in range(size - 1, -1, -1):
        for place in range(row + 1, size):
            side[row] -= square[row, place] * side[place]
        side[row] /= square[row, row]


def _slopes(values: Any) -> None:
    """Replace each x by the slope of tanh(x / 64)^2."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            level = math.tanh(values[row, column] / 64)
            values[row, column] = 2 * level * (1 - level * level) / 64


def matmul(matrix: list[list[float]], right: list[list[float]], kind: str) -> Any:
    out = numpy.zeros((len(matrix), len(right[0])), dtype=kind)
    _compiled(_product)(numpy.array(matrix, dtype=kind), numpy.array(right, dtype=kind), out)
    return out.tolist()


def total(values: list[float], kind: str) -> Any:
    out = numpy.zeros((1,), dtype=kind)
    _compiled(_sum)(numpy.array(values, dtype=kind), out)
    return out[0].item()


def convolution(image: object, filters: object, kind: str) -> Any:
    pixels, kernels = numpy.array(image, dtype=kind), numpy.array(filters, dtype=kind)
    side = pixels.shape[1] - kernels.shape[2] + 1
    out = numpy.zeros((kernels.shape[0], side, side), dtype=kind)
    _compiled(_convolve)(pixels, kernels, out)
    return out.tolist()


def solve(square: list[list[float]], side: list[float], kind: str) -> Any:
    column = numpy.array(side, dtype=kind)
    _compiled(_eliminate)(numpy.array(square, dtype=kind), column)
    return column.tolist()


def gradient(inputs: list[list[float]], right: list[list[float]], kind: str) -> Any:
    """Return the gradient by a formula, since Numba cannot differentiate."""
    rows, weights = numpy.array(inputs, dtype=kind), numpy.array(right, dtype=kind)
    product = _compiled(_product)
    outer = numpy.zeros((rows.shape[0], weights.shape[1]), dtype=kind)
    product(rows, weights, outer)
    _compiled(_slopes)(outer)
    out = numpy.zeros(weights.shape, dtype=kind)
    product(rows.T.copy(), outer, out)
    return out.tolist()


def compilers(context: Context, scratch: str) -> tuple[str, dict[str, float]]:  # noqa: ARG001
    """Compile a kernel to PTX with NVVM and to machine code with nvJitLink, as Numba does for each kernel."""
    cuda: Any = importlib.import_module("numba.cuda")
    linker: Any = importlib.import_module("cuda.bindings.nvjitlink")

    def double(values: Any, out: Any) -> None:
        place = cuda.grid(1)
        if place < values.shape[0]:
            out[place] = values[place] + values[place]

    vector = cuda.types.float32[::1]
    ptx, _ = cuda.compile_ptx(double, (vector, vector), cc=(8, 0))
    text = ptx.encode()
    handle = linker.create(1, ["-arch=sm_80"])
    try:
        linker.add_data(handle, linker.InputType.PTX, text, len(text), "double.ptx")
        linker.complete(handle)
        code = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, code)
    finally:
        linker.destroy(handle)
    if code[:4] != b"\x7fELF":
        raise CheckFailure("nvJitLink made no GPU code of what NVVM made")
    version = ".".join(map(str, linker.version()))
    detail = f"NVVM and nvJitLink {version}, kernel for sm_80 of {len(code)} bytes"
    return detail, {"cubin-bytes": len(code)}
