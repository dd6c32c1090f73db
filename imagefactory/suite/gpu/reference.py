"""Inputs of T2 and T3, and the expected results in float64 by numpy on the CPU.

Inputs are numbers k / 2^bits from a fixed sequence, exact in their number type, so only the arithmetic
differs. float32 inputs use all 24 bits, so that a multiplication with fewer bits is detected. Arrays are
numpy arrays: images [n, channel, y, x], filters [filter, channel, y, x].
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

numpy: Any = importlib.import_module("numpy")

# Kind -> bits after the point of its inputs.
BITS = {"float64": 40, "float32": 23, "tf32": 23, "float16": 10, "bfloat16": 7}

STEPS, RATE = 8, 0.5


def numbers(seed: int, shape: tuple[int, ...], kind: str) -> Any:
    """Return float64 in [-1, 1), exact in `kind`, by splitmix64 (Steele, Lea and Flood, 2014) of the seed."""
    count = math.prod(shape)
    state = numpy.arange(1, count + 1, dtype="uint64") + numpy.uint64(seed << 40)
    state = state * numpy.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    state = state ^ (state >> numpy.uint64(31))
    bits = BITS[kind]
    whole = (state >> numpy.uint64(63 - bits)).astype("int64") - (1 << bits)
    return (whole.astype("float64") / float(1 << bits)).reshape(shape)


def integers(seed: int, count: int) -> Any:
    """Return -1, 0 and 1 as float64. Up to 2^24 of them have an exact sum in float32, in any order."""
    return numpy.rint(numbers(seed, (count,), "float32") * 1.49)


@dataclass(frozen=True)
class ExpectedArray:
    """An expected result. `value` is the result, `scale` the unit of an error: an array or a number."""

    value: Any
    scale: Any


def error(result: Any, expected: ExpectedArray) -> float:
    """Return the largest error in units of the scale; infinite for another shape, a NaN or an infinity."""
    if tuple(result.shape) != tuple(expected.value.shape) or not numpy.isfinite(result).all():
        return math.inf
    scale = numpy.maximum(expected.scale, numpy.finfo("float64").tiny)
    return float((numpy.abs(result - expected.value) / scale).max(initial=0.0))


def cut(values: Any) -> Any:
    """Return float32 as tensor cores read it in tf32: ten bits after the point, the rest truncated."""
    bits = values.astype("float32").view("uint32") & numpy.uint32(0xFFFFE000)
    return bits.view("float32").astype("float64")


def matmul(matrix: Any, right: Any) -> ExpectedArray:
    return ExpectedArray(matrix @ right, numpy.sqrt((matrix * matrix) @ (right * right)))


@dataclass(frozen=True)
class ConvolutionCase:
    """Inputs of a convolution.

    `outer` is the gradient from above. Padding keeps the middle of a filter on the image.
    """

    image: Any
    filters: Any
    outer: Any
    stride: int
    padding: int

    @property
    def lengths(self) -> Mapping[str, int]:
        """Return the number of products that each type of result sums."""
        filters, channels, height, width = self.filters.shape
        images, _, rows, columns = self.outer.shape
        return {
            "forward": channels * height * width,
            "image": filters * height * width,
            "filters": images * rows * columns,
        }


def make_convolution(sizes: tuple[int, int, int, int], kind: str, *, stride: int) -> ConvolutionCase:
    """Return inputs of the given sizes: images, channels, side, filters.

    For a stride of 2, the side is odd.
    """
    images, channels, side, filters = sizes
    out = (side + 2 - 3) // stride + 1
    return ConvolutionCase(
        image=numbers(11, (images, channels, side, side), kind),
        filters=numbers(12, (filters, channels, 3, 3), kind),
        outer=numbers(13, (images, filters, out, out), kind),
        stride=stride,
        padding=1,
    )


def convolution(case: ConvolutionCase) -> dict[str, ExpectedArray]:
    """Return a cross-correlation and its two gradients, each with one scale, since cuDNN computes in
    tiles.
    """
    values = _convolve(case.image, case.filters, case.outer, case)
    squares = _convolve(case.image**2, case.filters**2, case.outer**2, case)
    return {name: ExpectedArray(value, math.sqrt(squares[name].max())) for name, value in values.items()}


def _convolve(image: Any, filters: Any, outer: Any, case: ConvolutionCase) -> dict[str, Any]:
    """Convolve through rows of windows, as three matrix products."""
    count, edge = filters.shape[0], case.padding
    padded = numpy.pad(image, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
    rows, columns = outer.shape[2:]
    step, reach = case.stride, filters.shape[2]
    windows = numpy.stack(
        [
            padded[:, :, dy : dy + step * rows : step, dx : dx + step * columns : step]
            for dy in range(reach)
            for dx in range(reach)
        ],
        axis=2,
    )  # [n, channel, place in the filter, y, x]
    flat = windows.transpose(0, 3, 4, 1, 2).reshape(-1, image.shape[1] * reach * reach)
    weights = filters.reshape(count, -1)
    above = outer.transpose(0, 2, 3, 1).reshape(-1, count)
    forward = (flat @ weights.T).reshape(outer.shape[0], rows, columns, count).transpose(0, 3, 1, 2)
    spread = (above @ weights).reshape(*outer.shape[:1], rows, columns, image.shape[1], reach, reach)
    back = numpy.zeros_like(padded)
    for dy in range(reach):
        for dx in range(reach):
            place = back[:, :, dy : dy + step * rows : step, dx : dx + step * columns : step]
            place += spread[..., dy, dx].transpose(0, 3, 1, 2)
    inner = back[:, :, edge : back.shape[2] - edge, edge : back.shape[3] - edge]
    return {"forward": forward, "image": inner, "filters": (above.T @ flat).reshape(filters.shape)}


@dataclass(frozen=True)
class Factors:
    """A framework's factors of square matrices, and solutions, as numpy arrays in float64.

    `order` is the order of the rows ([n, size], integers). `packed` is U, with L below the diagonal, without
    its ones. `solution` is [n, size, 1]. The matrix is `left @ diag(values) @ right`.
    """

    order: Any
    packed: Any
    solution: Any
    left: Any
    values: Any
    right: Any


def residuals(square: Any, side: Any, factors: Factors) -> dict[str, float]:
    """Return errors by operation, relative to the norms in `tolerances`, infinite for a NaN.

    `lu` is P A - L U, `solve` is A x - b. `svd` is the worst error of the singular values compared with
    numpy, of the product of the factors, and of their orthogonality.
    """
    size = square.shape[-1]
    lower = numpy.tril(factors.packed, -1) + numpy.eye(size)
    upper = numpy.triu(factors.packed)
    moved = numpy.take_along_axis(square, factors.order.astype("int64")[..., None], axis=1)
    bound = (numpy.abs(lower) @ numpy.abs(upper)).max(axis=(1, 2), keepdims=True)
    known = numpy.linalg.svd(square, compute_uv=False)
    top = known.max(axis=1)[:, None, None]
    product = (factors.left * factors.values[:, None, :]) @ factors.right
    length = numpy.abs(square).sum(axis=2).max(axis=1)[:, None, None]
    answer = numpy.abs(factors.solution).max(axis=1, keepdims=True)
    identity = ExpectedArray(numpy.broadcast_to(numpy.eye(size), square.shape), 1.0)
    worst = [
        error(product, ExpectedArray(square, top)),
        error(factors.values, ExpectedArray(known, top[..., 0])),
        error(numpy.swapaxes(factors.left, 1, 2) @ factors.left, identity),
        error(factors.right @ numpy.swapaxes(factors.right, 1, 2), identity),
    ]
    each_once = (numpy.sort(factors.order, axis=-1) == numpy.arange(factors.order.shape[-1])).all()
    return {
        "lu": error(lower @ upper, ExpectedArray(moved, bound)) if each_once else math.inf,
        "solve": error(square @ factors.solution, ExpectedArray(side, length * answer)),
        "svd": max(worst),
    }


def order_of(pivots: Any) -> Any:
    """Return the order of the rows for LAPACK's pivots (from 1: row i was swapped with pivots[i])."""
    order = numpy.tile(numpy.arange(pivots.shape[-1]), (pivots.shape[0], 1))
    every = numpy.arange(pivots.shape[0])
    for step in range(pivots.shape[-1]):
        other = pivots[:, step].astype("int64") - 1
        order[every, step], order[every, other] = order[every, other], order[every, step].copy()
    return order


@dataclass(frozen=True)
class TrainingCase:
    """A network of two layers with tanh between them, and a mean square error: `STEPS` steps of `RATE`."""

    inputs: Any
    targets: Any
    first: Any
    second: Any


def make_training(rows: int) -> TrainingCase:
    """Return a case whose targets are the results of another network, so that it can learn."""
    inputs = numbers(21, (rows, 32), "float32")
    hidden = numpy.tanh(inputs @ numbers(22, (32, 16), "float32"))
    targets = (hidden @ numbers(23, (16, 4), "float32")).astype("float32").astype("float64")
    first, second = numbers(24, (32, 48), "float32") / 4, numbers(25, (48, 4), "float32") / 4
    return TrainingCase(inputs=inputs, targets=targets, first=first, second=second)


def training(case: TrainingCase) -> tuple[list[float], Any, Any]:
    """Return the loss before each step and after the last, and the weights at the end."""
    first, second, losses = case.first.copy(), case.second.copy(), []
    for step in range(STEPS + 1):
        hidden = numpy.tanh(case.inputs @ first)
        off = hidden @ second - case.targets
        losses.append(float((off**2).mean()))
        if step == STEPS:
            break
        outer = 2 * off / off.size
        inner = (outer @ second.T) * (1 - hidden**2)
        second = second - RATE * (hidden.T @ outer)
        first = first - RATE * (case.inputs.T @ inner)
    return losses, first, second


def fused(inputs: Any, weights: Any) -> dict[str, ExpectedArray]:
    """Compute T3's function, log(sum(exp(tanh(inputs @ weights / 8)))) by row, and the gradient of its
    sum.
    """
    hidden = numpy.tanh(inputs @ weights / 8)
    powers = numpy.exp(hidden)
    total = powers.sum(axis=1)
    outer = powers / total[:, None] * (1 - hidden**2) / 8
    gradient = inputs.T @ outer
    size = math.sqrt(((inputs**2).T @ outer**2).max())
    return {"rows": ExpectedArray(numpy.log(total), 1.0), "gradient": ExpectedArray(gradient, size)}


Correlate = Callable[[Any, Any, int], Any]


def convolve(case: ConvolutionCase, correlate: Correlate) -> dict[str, Any]:
    """Return `forward` and the gradients for `image` and `filters`, with `correlate`, which has no padding.

    This is for frameworks that cannot differentiate. The gradient of the image correlates the gradient from
    above, spread by the stride, with the turned filters. The gradient of the filters correlates the image
    with it, with images and channels exchanged.
    """
    pad, swap = case.padding, (1, 0, 2, 3)
    image = numpy.pad(case.image, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    images, count, rows, columns = case.outer.shape
    step, reach = case.stride, case.filters.shape[2]
    spread = numpy.zeros((images, count, (rows - 1) * step + 1, (columns - 1) * step + 1))
    spread[:, :, ::step, ::step] = case.outer
    edge = reach - 1 - pad
    above = numpy.pad(spread, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
    turned = case.filters.transpose(swap)[:, :, ::-1, ::-1]
    return {
        "forward": correlate(image, case.filters, step),
        "image": correlate(above, turned, 1),
        "filters": correlate(image.transpose(swap), spread.transpose(swap), 1).transpose(swap),
    }
