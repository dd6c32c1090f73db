"""Inputs of T2 and T3 and what should come out, in float64 by numpy on the CPU.

The same inputs everywhere: numbers k / 2^bits from a fixed sequence, each exact in the kind that it is for,
so that what differs afterwards is the arithmetic alone. float32 gets all of its 24 bits, so that multiplying
with fewer is seen. Arrays are numpy's, images [n, channel, y, x], filters [filter, channel, y, x].

Convolutions by one correlation alone: for frameworks that have no other, and derive nothing themselves.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

numpy: Any = importlib.import_module("numpy")

# Kind -> how many bits after the point its inputs have.
BITS = {"float64": 40, "float32": 23, "tf32": 23, "float16": 10, "bfloat16": 7}

STEPS, RATE = 8, 0.5


def numbers(seed: int, shape: tuple[int, ...], kind: str) -> Any:
    """float64 in [-1, 1), exact in `kind`: splitmix64 (Steele, Lea and Flood, 2014) of seed and place."""
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
    """Whole numbers -1, 0 and 1 as float64: up to 2^24 of them have an exact sum in float32, in any order."""
    return numpy.rint(numbers(seed, (count,), "float32") * 1.49)


@dataclass(frozen=True)
class Want:
    """`value` is what should come out, `scale` what an error is measured in: an array or one number."""

    value: Any
    scale: Any


def error(found: Any, want: Want) -> float:
    """Largest difference in units of the scale; infinite for another shape, a NaN or an infinity."""
    if tuple(found.shape) != tuple(want.value.shape) or not numpy.isfinite(found).all():
        return math.inf
    smallest = numpy.finfo("float64").tiny
    return float((numpy.abs(found - want.value) / numpy.maximum(want.scale, smallest)).max(initial=0.0))


def cut(values: Any) -> Any:
    """What tensor cores read of float32 in tf32: ten bits after the point, the rest cut off."""
    bits = values.astype("float32").view("uint32") & numpy.uint32(0xFFFFE000)
    return bits.view("float32").astype("float64")


def matmul(left: Any, right: Any) -> Want:
    return Want(left @ right, numpy.sqrt((left * left) @ (right * right)))


@dataclass(frozen=True)
class ConvolutionCase:
    """`outer` is the gradient that comes from above. Padding keeps the middle of a filter on the image."""

    image: Any
    filters: Any
    outer: Any
    stride: int
    padding: int

    @property
    def lengths(self) -> Mapping[str, int]:
        """How many products each kind of result adds up."""
        filters, channels, height, width = self.filters.shape
        images, _, rows, columns = self.outer.shape
        return {
            "forward": channels * height * width,
            "image": filters * height * width,
            "filters": images * rows * columns,
        }


def make_convolution(sizes: tuple[int, int, int, int], kind: str, *, stride: int) -> ConvolutionCase:
    """`sizes`: images, channels, side, filters. The side is odd for a stride of 2: no row is left over."""
    images, channels, side, filters = sizes
    out = (side + 2 - 3) // stride + 1
    return ConvolutionCase(
        image=numbers(11, (images, channels, side, side), kind),
        filters=numbers(12, (filters, channels, 3, 3), kind),
        outer=numbers(13, (images, filters, out, out), kind),
        stride=stride,
        padding=1,
    )


def convolution(case: ConvolutionCase) -> dict[str, Want]:
    """Cross-correlation and its two gradients. One scale for a whole array: cuDNN works in tiles."""
    values = _convolve(case.image, case.filters, case.outer, case)
    squares = _convolve(case.image**2, case.filters**2, case.outer**2, case)
    return {name: Want(value, math.sqrt(squares[name].max())) for name, value in values.items()}


def _convolve(image: Any, filters: Any, outer: Any, case: ConvolutionCase) -> dict[str, Any]:
    """By rows of windows, so that it is three products of matrices."""
    count, kept = filters.shape[0], case.padding
    padded = numpy.pad(image, ((0, 0), (0, 0), (kept, kept), (kept, kept)))
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
    inner = back[:, :, kept : back.shape[2] - kept, kept : back.shape[3] - kept]
    return {"forward": forward, "image": inner, "filters": (above.T @ flat).reshape(filters.shape)}


@dataclass(frozen=True)
class Factors:
    """What a framework made of a batch of square matrices and right sides, all of it numpy's float64.

    `packed` is L below the diagonal (its ones left out) and U, `order` the rows' order ([n, size], whole
    numbers), `solution` [n, size, 1]; the matrix is `left @ diag(values) @ right`.
    """

    packed: Any
    order: Any
    solution: Any
    left: Any
    values: Any
    right: Any


def residuals(square: Any, side: Any, factors: Factors) -> dict[str, float]:
    """By operation, relative to the norms that `tolerances` names; infinite where something is no number.

    `lu`: P A - L U; `solve`: A x - b; `svd`: the worst of the singular values against numpy's, of what the
    factors multiply to, and of how far they are from orthogonal.
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
    worst = [
        error(product, Want(square, top)),
        error(factors.values, Want(known, top[..., 0])),
        error(numpy.swapaxes(factors.left, 1, 2) @ factors.left, Want(_eyes(square), 1.0)),
        error(factors.right @ numpy.swapaxes(factors.right, 1, 2), Want(_eyes(square), 1.0)),
    ]
    return {
        "lu": error(lower @ upper, Want(moved, bound)) if _is_order(factors.order) else math.inf,
        "solve": error(square @ factors.solution, Want(side, length * answer)),
        "svd": max(worst),
    }


def _eyes(square: Any) -> Any:
    return numpy.broadcast_to(numpy.eye(square.shape[-1]), square.shape)


def _is_order(order: Any) -> bool:
    """Whether each row names every place once."""
    return bool((numpy.sort(order, axis=-1) == numpy.arange(order.shape[-1])).all())


def order_of(pivots: Any) -> Any:
    """LAPACK's pivots (from 1: row i was swapped with pivots[i]) -> the order of the rows."""
    order = numpy.tile(numpy.arange(pivots.shape[-1]), (pivots.shape[0], 1))
    every = numpy.arange(pivots.shape[0])
    for step in range(pivots.shape[-1]):
        other = pivots[:, step].astype("int64") - 1
        order[every, step], order[every, other] = order[every, other], order[every, step].copy()
    return order


@dataclass(frozen=True)
class TrainingCase:
    """A network of two layers, tanh between, and the mean square of its error: `STEPS` steps of `RATE`."""

    inputs: Any
    wanted: Any
    first: Any
    second: Any


def make_training(rows: int) -> TrainingCase:
    """The wanted values are another network's, so there is something to learn."""
    inputs = numbers(21, (rows, 32), "float32")
    hidden = numpy.tanh(inputs @ numbers(22, (32, 16), "float32"))
    wanted = (hidden @ numbers(23, (16, 4), "float32")).astype("float32").astype("float64")
    first, second = numbers(24, (32, 48), "float32") / 4, numbers(25, (48, 4), "float32") / 4
    return TrainingCase(inputs=inputs, wanted=wanted, first=first, second=second)


def training(case: TrainingCase) -> tuple[list[float], Any, Any]:
    """The loss before each step and after the last, and the weights at the end; gradients by hand."""
    first, second, losses = case.first.copy(), case.second.copy(), []
    for step in range(STEPS + 1):
        hidden = numpy.tanh(case.inputs @ first)
        off = hidden @ second - case.wanted
        losses.append(float((off**2).mean()))
        if step == STEPS:
            break
        outer = 2 * off / off.size
        inner = (outer @ second.T) * (1 - hidden**2)
        second = second - RATE * (hidden.T @ outer)
        first = first - RATE * (case.inputs.T @ inner)
    return losses, first, second


def fused(inputs: Any, weights: Any) -> dict[str, Want]:
    """What T3 compiles: log(sum(exp(tanh(inputs @ weights / 8)))) by row, and the gradient of its total."""
    hidden = numpy.tanh(inputs @ weights / 8)
    powers = numpy.exp(hidden)
    total = powers.sum(axis=1)
    outer = powers / total[:, None] * (1 - hidden**2) / 8
    gradient = inputs.T @ outer
    size = math.sqrt(((inputs**2).T @ outer**2).max())
    return {"rows": Want(numpy.log(total), 1.0), "gradient": Want(gradient, size)}


Correlate = Callable[[Any, Any, int], Any]


def convolve(case: ConvolutionCase, correlate: Correlate) -> dict[str, Any]:
    """`forward`, and the gradients for `image` and `filters`, of `correlate(image, filters, stride)`.

    The image's correlates what comes from above, spread by the stride, with the filters turned around; the
    filters' the image with the same, images and channels exchanged. `correlate` adds nothing at the edges.
    """
    kept, swap = case.padding, (1, 0, 2, 3)
    image = numpy.pad(case.image, ((0, 0), (0, 0), (kept, kept), (kept, kept)))
    images, count, rows, columns = case.outer.shape
    step, reach = case.stride, case.filters.shape[2]
    spread = numpy.zeros((images, count, (rows - 1) * step + 1, (columns - 1) * step + 1))
    spread[:, :, ::step, ::step] = case.outer
    edge = reach - 1 - kept
    above = numpy.pad(spread, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
    turned = case.filters.transpose(swap)[:, :, ::-1, ::-1]
    return {
        "forward": correlate(image, case.filters, step),
        "image": correlate(above, turned, 1),
        "filters": correlate(image.transpose(swap), spread.transpose(swap), 1).transpose(swap),
    }
