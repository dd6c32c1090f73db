"""T2 and T3: compare results of the framework and its compiler on the GPU with float64 on the CPU.

Every comparison records the error and its limit; `tolerances` has the reason for each limit. The driver
copies between page-locked memory and the GPU, as in every framework.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...context import CheckFailure, Finding
from .. import reference, table, tolerances
from ..context import GpuContext, MeasuredFailure
from ..driver import Driver, DriverError
from ..libraries import find_loaded, judge_libraries
from ..reference import ExpectedArray


@dataclass(frozen=True)
class PinnedCopy:
    """A copy to the GPU and back.

    `up` and `down` are the best times in seconds, `back` is the returned data.
    """

    back: bytes
    up: float
    down: float


def copy_pinned(data: bytes, driver: Driver | None = None) -> PinnedCopy:
    """Copy to the first device and back, twice, because the first copy touches the pages.

    Raises DriverError.
    """
    driver = driver or Driver()
    driver.call("cuInit", 0)
    with driver.context(driver.device(0)), driver.memory(len(data)) as there:
        near, far = (_lock(driver, len(data)) for _ in range(2))
        try:
            ctypes.memmove(near, data, len(data))
            up = min(_timed(driver, "cuMemcpyHtoD_v2", there, near, len(data)) for _ in range(2))
            down = min(_timed(driver, "cuMemcpyDtoH_v2", far, there, len(data)) for _ in range(2))
            return PinnedCopy(back=ctypes.string_at(far, len(data)), up=up, down=down)
        finally:
            for address in (near, far):
                _call(driver, "cuMemFreeHost", ctypes.c_void_p(address))


def _lock(driver: Driver, count: int) -> int:
    address = ctypes.c_void_p()
    _call(driver, "cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(count), ctypes.c_uint(0))
    return int(address.value or 0)


def _timed(driver: Driver, name: str, to: int, start: int, count: int) -> float:
    began = time.perf_counter()
    _call(driver, name, ctypes.c_uint64(to), ctypes.c_uint64(start), ctypes.c_size_t(count))
    return time.perf_counter() - began


def _call(driver: Driver, name: str, *arguments: Any) -> None:
    """Call a function that the driver has no shape for. The arguments are ctypes values."""
    function = getattr(driver.library, name)
    function.argtypes, function.restype = None, ctypes.c_int
    code = function(*arguments)
    if code != 0:
        raise DriverError(name, code, driver.explain(code))


MEBI = 1 << 20
# Bytes by which a repeated workload may grow: none of its arrays is as small.
GROWTH = MEBI
ROUNDS, MOST_ROUNDS = 3, 8


class Ledger:
    """The comparisons of one check: errors as numbers, and faults."""

    def __init__(self, context: GpuContext) -> None:
        self.context = context
        self.numbers: dict[str, float] = {}
        self.wrong: list[str] = []
        self.skipped: dict[str, str] = {}

    def compare(self, name: str, result: Any, expected: ExpectedArray, bound: float) -> None:
        self.note(name, reference.error(result, expected), bound)

    def note(self, name: str, off: float, bound: float) -> None:
        """Record an error and its limit in the same unit. NaN and infinity are always wrong."""
        self.numbers[f"{name}-error"] = min(off, 1e300) if off == off else 1e300  # JSON has no infinity
        self.numbers[f"{name}-bound"] = bound
        if not off <= bound:
            self.wrong.append(f"{name} is off by {off:.2g} (at most {bound:.2g})")

    def kinds(self, kinds: tuple[str, ...]) -> list[str]:
        """Return the number types that this GPU (in a rehearsal, this CPU) supports. Note the others."""
        capability = str(self.context.device.get("capability", ""))
        lacking = self.context.framework.CPU_LACKS if self.context.rehearsal else ()
        for kind in kinds:
            if kind in lacking:
                self.skipped[kind] = "not on this framework's CPU"
            elif not tolerances.applies(kind, capability):
                self.skipped[kind] = f"no units for it before {tolerances.oldest(kind)}"
        return [kind for kind in kinds if kind not in self.skipped]

    def finding(self, detail: str) -> Finding:
        """Return the finding with the numbers. Raises Refusal with the numbers if a result was wrong."""
        if self.wrong:
            raise MeasuredFailure("; ".join(self.wrong), outcome=table.WRONG_NUMBERS, numbers=self.numbers)
        skipped = ", ".join(f"{kind} ({why})" for kind, why in self.skipped.items())
        out = f"; skipped: {skipped}" if skipped else ""
        return Finding(f"{detail}{out}{_place(self.context)}", self.numbers)


def _place(context: GpuContext) -> str:
    return " (rehearsed on the CPU)" if context.rehearsal else ""


def check_matmul(context: GpuContext) -> Finding:
    """Multiply matrices of odd sizes and a batch, in every number type. float32 without tf32 must be real
    float32.

    A compiler such as XLA needs seconds for each shape, so at the quick level only float32 has all shapes.
    """
    ledger, framework = Ledger(context), context.framework
    shapes = [("odd", (127, 1021, 65)), ("square", (512, 512, 512)), ("row", (1, 2048, 33))]
    if context.thorough:
        shapes += [("large", (2048, 2048, 2048)), ("long", (256, 4096, 256))]
    for kind in ledger.kinds(framework.KINDS):
        few = kind != "float32" and not context.thorough
        for name, (rows, inner, columns) in shapes[:1] if few else shapes:
            matrix = reference.numbers(1, (rows, inner), kind)
            right = reference.numbers(2, (inner, columns), kind)
            product = framework.matmul(context, matrix, right, kind)
            bound = tolerances.products(kind, inner)
            ledger.compare(f"{kind}-{name}", product, reference.matmul(matrix, right), bound)
        matrix, right = reference.numbers(3, (8, 96, 160), kind), reference.numbers(4, (8, 160, 64), kind)
        product = framework.matmul(context, matrix, right, kind)
        bound = tolerances.products(kind, 160)
        ledger.compare(f"{kind}-batch", product, reference.matmul(matrix, right), bound)
    return ledger.finding(f"{len(ledger.numbers) // 2} products of matrices agree with float64")


def check_reduction(context: GpuContext) -> Finding:
    """Sum millions of numbers whose sum is exact in any order, sum along both axes, and find the largest."""
    ledger, framework = Ledger(context), context.framework
    count = (1 << 24) if context.thorough else (1 << 22)
    whole = reference.integers(5, count)
    exact = ExpectedArray(whole.sum(), 1.0)
    ledger.compare("exact-sum", framework.reduce(context, whole, None, "float32"), exact, 0.0)
    rows, columns = count // 4096, 4096
    values = abs(reference.numbers(6, (rows, columns), "float32"))
    for axis, name, length in ((1, "rows", columns), (0, "columns", rows)):
        total = values.sum(axis=axis)
        sums, bound = framework.reduce(context, values, axis, "float32"), tolerances.sums("float32", length)
        ledger.compare(f"{name}-sum", sums, ExpectedArray(total, total), bound)
    values[rows // 3, columns // 5] = 1.5
    largest = framework.largest(context, values)
    ledger.compare("largest", largest, ExpectedArray(values.max(), 1.0), 0.0)
    return ledger.finding(f"reductions of {count} numbers agree with float64")


def check_convolution(context: GpuContext) -> Finding:
    """Convolve and compute both gradients: with and without a stride, with and without tf32, and in
    float16.
    """
    ledger, framework = Ledger(context), context.framework
    sizes = [("plain", (4, 16, 17, 24), 1), ("stride", (2, 3, 33, 16), 2)]
    if context.thorough:
        sizes.append(("large", (8, 64, 29, 64), 1))
    for kind in ledger.kinds(tuple(kind for kind in framework.KINDS if kind != "bfloat16")):
        few = kind != "float32" and not context.thorough
        for name, size, stride in sizes[:1] if few else sizes:
            case = reference.make_convolution(size, kind, stride=stride)
            arrays = framework.convolution(context, case, kind)
            for part, expected in reference.convolution(case).items():
                bound = tolerances.convolution(kind, case.lengths[part])
                ledger.compare(f"{kind}-{name}-{part}", arrays[part], expected, bound)
    return ledger.finding(f"{len(ledger.numbers) // 2} convolutions and gradients agree with float64")


def check_linear_algebra(context: GpuContext) -> Finding:
    """Compute LU with pivots, solutions and singular values of a batch. Check them by their residuals."""
    ledger, size = Ledger(context), 128 if context.thorough else 48
    for kind in ("float32", "float64"):
        square = reference.numbers(7, (16, size, size), kind)
        side = reference.numbers(8, (16, size, 1), kind)
        factors = context.framework.factorise(context, square, side, kind)
        bounds = {"svd": tolerances.singular(kind, size)}
        for name, off in reference.residuals(square, side, factors).items():
            ledger.note(f"{kind}-{name}", off, bounds.get(name, tolerances.solution(kind, size)))
    return ledger.finding(f"LU, solutions and singular values of 16 matrices of {size} rows are right")


def check_transfers(context: GpuContext) -> Finding:
    """Copy to the GPU and back, through the framework and through the driver. All bits must be equal."""
    count = (256 if context.thorough else 64) * MEBI
    values = reference.numbers(9, (count // 4,), "float32").astype("float32")
    copied = context.framework.transfer(context, values)
    numbers = {"bytes": float(count)}
    if not context.rehearsal:  # the rate of the CPU's copies to itself would mislead
        numbers.update(_rates("framework", count, copied.up, copied.down))
    if copied.back.dtype != values.dtype or copied.back.tobytes() != values.tobytes():
        text = "the framework's copy to the GPU and back is not what was sent"
        raise MeasuredFailure(text, outcome=table.WRONG_NUMBERS, numbers=numbers)
    how = "pinned by the framework" if copied.pinned else "the framework's copies"
    if context.rehearsal:
        return Finding(f"{count // MEBI} MiB there and back{_place(context)}", numbers)
    if context.request.expected.rocm:  # copy_pinned needs libcuda
        return Finding(f"{count // MEBI} MiB there and back: {how} the same", numbers)
    pinned = copy_pinned(values.tobytes())
    numbers.update(_rates("pinned", count, pinned.up, pinned.down))
    if pinned.back != values.tobytes():
        text = "the driver's copy from pinned memory and back is not what was sent"
        raise MeasuredFailure(text, outcome=table.WRONG_NUMBERS, numbers=numbers)
    rates = f"{numbers['pinned-up-gb-per-s']:.1f} GB/s up, {numbers['pinned-down-gb-per-s']:.1f} down"
    return Finding(f"{count // MEBI} MiB there and back: {rates} pinned; {how} the same", numbers)


def _rates(name: str, count: int, up: float, down: float) -> dict[str, float]:
    """Return the rates in 10^9 bytes per second."""
    return {
        f"{name}-{way}-gb-per-s": count / max(took, 1e-9) / 1e9 for way, took in (("up", up), ("down", down))
    }


def check_collective(context: GpuContext) -> Finding:
    """Sum over one rank with the image's NCCL."""
    ledger = Ledger(context)
    values = reference.numbers(10, (1 << 20,), "float32")
    sums, how = context.framework.all_reduce(context, values)
    ledger.compare("all-reduce", sums, ExpectedArray(values, 1.0), 0.0)
    return ledger.finding(f"an all-reduce of one rank by {how}")


def check_library_versions(context: GpuContext) -> Finding:
    """Compare the loaded cuDNN and NCCL with the lock."""
    framework = context.framework
    return judge_libraries(
        context, find_loaded(), framework.loaded(context) if hasattr(framework, "loaded") else {}
    )


def check_training(context: GpuContext) -> Finding:
    """Run a few steps of gradient descent.

    The loss must fall, and losses and weights must agree with the CPU.
    """
    ledger, rows = Ledger(context), 512
    case = reference.make_training(rows)
    losses, first, second = reference.training(case)
    trained, *weights = context.framework.train(context, case)
    numpy, bound = reference.numpy, tolerances.training(reference.STEPS, rows)
    ledger.compare("losses", numpy.array(trained), ExpectedArray(numpy.array(losses), losses[0]), bound)
    for name, array, value in zip(("first", "second"), weights, (first, second)):  # noqa: B905
        ledger.compare(f"{name}-weights", array, ExpectedArray(value, abs(value).max()), bound)
    before, after = trained[0], trained[-1]
    ledger.numbers.update({"loss-before": before, "loss-after": after})
    if not after < before / 2:
        ledger.wrong.append(f"the loss goes from {before:.4g} to {after:.4g}")
    return ledger.finding(f"{reference.STEPS} steps: loss {before:.4g} to {after:.4g}, as on the CPU")


def check_numbers_controls(context: GpuContext) -> Finding:
    """Check that wrong results are rejected. An accepted one would be a hole in the previous checks."""
    framework, holes = context.framework, []
    matrix, right = reference.numbers(31, (64, 64), "float32"), reference.numbers(32, (64, 64), "float32")
    expected, bound = reference.matmul(matrix, right), tolerances.products("float32", 64)
    good = framework.matmul(context, matrix, right, "float32")
    if not reference.error(good, expected) <= bound:
        holes.append("a right product is rejected")
    for name, wrong in _spoil(good, matrix, right).items():
        if reference.error(wrong, expected) <= bound:
            holes.append(f"{name} is not noticed")
    for row, column in ((0, 0), (17, 40), (63, 63)):  # the reference itself, against exact sums
        exact = math.fsum(float(a * b) for a, b in zip(matrix[row], right[:, column]))  # noqa: B905
        if (off := abs(exact - expected.value[row, column])) > 1e-13:
            holes.append(f"numpy's product is off by {off:.2g} itself")
    # An array on the CPU: of the right type in the wrong place, of another type in the right place.
    here, there = (replace(context, request=replace(context.request, rehearsal=cpu)) for cpu in (True, False))
    for name, place, kind in (("the CPU", there, "float32"), ("another type", here, "float64")):
        with contextlib.suppress(CheckFailure):
            framework.fetch(place, framework.on_cpu(matrix, "float32"), kind)
            holes.append(f"a result of {name} is taken")
    if holes:
        raise CheckFailure("; ".join(holes), outcome=table.WRONG_NUMBERS)
    return Finding("8 wrong results are rejected: values, shape, type, place", {"controls": 8.0})


def _spoil(good: Any, matrix: Any, right: Any) -> Mapping[str, Any]:
    numpy = reference.numpy
    scaled, lost, nan = good.copy(), good.copy(), good.copy()
    place = numpy.unravel_index(abs(good).argmax(), good.shape)
    scaled[place] *= 1.001
    lost[3] = matrix[3, :-1] @ right[:-1]
    nan[5, 5] = math.nan
    return {
        "one element that is off by a thousandth": scaled,
        "a row that lacks its last product": lost,
        "a NaN": nan,
        "another shape": good[:-1],
        "float32 cut to tf32": reference.cut(matrix) @ reference.cut(right),
        "zeros": good * 0,
    }


def check_memory(context: GpuContext) -> Finding:
    """Check that the memory in use on the GPU does not grow over three rounds of work.

    Some frameworks count the whole GPU, which other programs use too, and some free an array a moment after
    its result. So there can be more rounds: a leak grows in all of them.
    """
    framework = context.framework
    # A rehearsal measures the process, whose allocator keeps some: far less than a round's arrays.
    allowed = 48 * MEBI if context.rehearsal else GROWTH
    levels: list[int] = []
    values = reference.numbers(41, (2048, 2048), "float32")
    while len(levels) < MOST_ROUNDS and not (len(levels) > ROUNDS and _grown(levels) <= allowed):
        framework.matmul(context, values, values[:, :64], "float32")
        framework.reduce(context, values, 0, "float32")
        framework.release(context)
        levels.append(_resident_bytes() if context.rehearsal else framework.in_use(context))
    numbers = {"in-use-bytes": float(levels[-1]), "grown-bytes": float(_grown(levels))}
    if _grown(levels) > allowed:
        text = f"memory in use grows: {', '.join(f'{level // MEBI}' for level in levels)} MiB"
        raise MeasuredFailure(text, outcome=table.LOAD_FAILED, numbers=numbers)
    detail = f"{levels[-1] // MEBI} MiB in use, no more than {ROUNDS} rounds before"
    return Finding(f"{detail}{_place(context)}", numbers)


def _grown(levels: Sequence[int]) -> int:
    """Return the growth over the last rounds."""
    return levels[-1] - levels[-1 - ROUNDS]


def _resident_bytes() -> int:
    """Return the resident bytes in statm of proc(5)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_jit(context: GpuContext) -> Finding:
    """Compile a product, functions, a reduction and their gradient as one function."""
    ledger, inner = Ledger(context), 256
    inputs = reference.numbers(51, (1000, inner), "float32")
    weights = reference.numbers(52, (inner, 96), "float32")
    bound = tolerances.compiled(1000)
    eager, compiled, how = context.framework.compile(context, inputs, weights)
    for name, expected in reference.fused(inputs, weights).items():
        ledger.compare(f"eager-{name}", eager[name], expected, bound)
        ledger.compare(f"compiled-{name}", compiled[name], expected, bound)
        both = ExpectedArray(eager[name], expected.scale)
        ledger.compare(f"compiled-against-eager-{name}", compiled[name], both, bound)
    return ledger.finding(how)
