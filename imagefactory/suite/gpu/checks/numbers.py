"""T2 and T3: what the framework and its compiler compute on the GPU, against float64 on the CPU.

Every comparison writes the error it found and its bound; `tolerances` gives the reason of each bound. Copies
between page-locked memory and the GPU go by the driver, as in every framework.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...context import CheckFailure, Finding
from .. import reference, table, tolerances
from ..context import GpuContext, Refusal
from ..driver import Driver, DriverError
from ..libraries import find_loaded, judge_libraries
from ..reference import Want


def resident_bytes() -> int:
    """Bytes, of proc(5)'s statm."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class PinnedCopy:
    """`up` and `down` are seconds, the better of two; `back` is what came back."""

    back: bytes
    up: float
    down: float


def copy_pinned(data: bytes, driver: Driver | None = None) -> PinnedCopy:
    """There and back on the first device, twice: the first time pages are touched. Raises DriverError."""
    driver = driver or Driver()
    driver.call("cuInit", 0)
    with driver.context(driver.device(0)), driver.memory(len(data)) as there:
        near, far = _lock(driver, len(data)), _lock(driver, len(data))
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
    """As the driver's own `call`, of functions it has no shapes for: arguments are ctypes values."""
    function = getattr(driver.library, name)
    function.argtypes, function.restype = None, ctypes.c_int
    code = function(*arguments)
    if code != 0:
        raise DriverError(name, code, driver.explain(code))


MEBI = 1 << 20
# Bytes that a repeated workload may leave behind: none of its arrays is as small.
LEFT_BEHIND = MEBI
ROUNDS, MOST_ROUNDS = 3, 8


class Ledger:
    """The comparisons of one check: errors as numbers, and what was wrong."""

    def __init__(self, context: GpuContext) -> None:
        self.context = context
        self.numbers: dict[str, float] = {}
        self.wrong: list[str] = []
        self.left_out: list[str] = []

    def compare(self, name: str, found: Any, want: Want, bound: float) -> None:
        self.note(name, reference.error(found, want), bound)

    def note(self, name: str, off: float, bound: float) -> None:
        """`off` and `bound` in the same units; a NaN or an infinity is wrong whatever the bound."""
        self.numbers[f"{name}-error"] = min(off, 1e300) if off == off else 1e300  # JSON has no infinity
        self.numbers[f"{name}-bound"] = bound
        if not off <= bound:
            self.wrong.append(f"{name} is off by {off:.2g} (at most {bound:.2g})")

    def kinds(self, kinds: tuple[str, ...]) -> list[str]:
        """Those that this GPU has units for, or in a rehearsal this CPU; the others are told."""
        capability = str(self.context.device.get("capability", ""))
        lacking = self.context.framework.CPU_LACKS if self.context.asked.rehearsal else ()
        for kind in kinds:
            if kind in lacking:
                self.left_out.append(f"{kind} (not on this framework's CPU)")
            elif not tolerances.applies(kind, capability):
                self.left_out.append(f"{kind} (no units for it before {tolerances.oldest(kind)})")
        told = {text.partition(" ")[0] for text in self.left_out}
        return [kind for kind in kinds if kind not in told]

    def finding(self, what: str) -> Finding:
        """Raises a CheckFailure with the numbers where something was wrong."""
        if self.wrong:
            raise Refusal("; ".join(self.wrong), outcome=table.WRONG_NUMBERS, numbers=self.numbers)
        out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        place = " (rehearsed on the CPU)" if self.context.asked.rehearsal else ""
        return Finding(f"{what}{out}{place}", self.numbers)


def check_matmul(context: GpuContext) -> Finding:
    """Matrices, odd sizes and a batch, in every kind; float32 without tf32 must really be float32.

    A compiler such as XLA's takes seconds for each shape: the quick level has all of float32's alone.
    """
    ledger, framework = Ledger(context), context.framework
    shapes = [("odd", (127, 1021, 65)), ("square", (512, 512, 512)), ("row", (1, 2048, 33))]
    if context.thorough:
        shapes += [("large", (2048, 2048, 2048)), ("long", (256, 4096, 256))]
    for kind in ledger.kinds(framework.KINDS):
        few = kind != "float32" and not context.thorough
        for name, (rows, inner, columns) in shapes[:1] if few else shapes:
            left = reference.numbers(1, (rows, inner), kind)
            right = reference.numbers(2, (inner, columns), kind)
            found = framework.matmul(context, left, right, kind)
            bound = tolerances.products(kind, inner)
            ledger.compare(f"{kind}-{name}", found, reference.matmul(left, right), bound)
        left, right = reference.numbers(3, (8, 96, 160), kind), reference.numbers(4, (8, 160, 64), kind)
        found = framework.matmul(context, left, right, kind)
        want = reference.matmul(left, right)
        ledger.compare(f"{kind}-batch", found, want, tolerances.products(kind, 160))
    return ledger.finding(f"{len(ledger.numbers) // 2} products of matrices agree with float64")


def check_reduction(context: GpuContext) -> Finding:
    """A sum of millions that is exact in any order, sums along both axes, and the largest."""
    ledger, framework = Ledger(context), context.framework
    count = (1 << 24) if context.thorough else (1 << 22)
    whole = reference.integers(5, count)
    found = framework.reduce(context, whole, None, "float32")
    ledger.compare("exact-sum", found, Want(whole.sum(), 1.0), 0.0)
    rows, columns = count // 4096, 4096
    values = abs(reference.numbers(6, (rows, columns), "float32"))
    for axis, name, length in ((1, "rows", columns), (0, "columns", rows)):
        total = values.sum(axis=axis)
        found = framework.reduce(context, values, axis, "float32")
        ledger.compare(f"{name}-sum", found, Want(total, total), tolerances.sums("float32", length))
    values[rows // 3, columns // 5] = 1.5
    ledger.compare("largest", framework.largest(context, values), Want(values.max(), 1.0), 0.0)
    return ledger.finding(f"reductions of {count} numbers agree with float64")


def check_convolution(context: GpuContext) -> Finding:
    """Forward and both gradients, with and without a stride, without and with tf32, and in float16."""
    ledger, framework = Ledger(context), context.framework
    sizes = [("plain", (4, 16, 17, 24), 1), ("stride", (2, 3, 33, 16), 2)]
    if context.thorough:
        sizes.append(("large", (8, 64, 29, 64), 1))
    for kind in ledger.kinds(tuple(kind for kind in framework.KINDS if kind != "bfloat16")):
        few = kind != "float32" and not context.thorough
        for name, size, stride in sizes[:1] if few else sizes:
            case = reference.make_convolution(size, kind, stride=stride)
            found = framework.convolution(context, case, kind)
            for part, want in reference.convolution(case).items():
                bound = tolerances.convolution(kind, case.lengths[part])
                ledger.compare(f"{kind}-{name}-{part}", found[part], want, bound)
    return ledger.finding(f"{len(ledger.numbers) // 2} convolutions and gradients agree with float64")


def check_linear_algebra(context: GpuContext) -> Finding:
    """A batch of LU with pivots, solutions and singular values, judged by their residuals."""
    ledger, size = Ledger(context), 128 if context.thorough else 48
    for kind in ("float32", "float64"):
        square = reference.numbers(7, (16, size, size), kind)
        side = reference.numbers(8, (16, size, 1), kind)
        factors = context.framework.factorise(context, square, side, kind)
        bounds = {"svd": tolerances.singular(kind, size)}
        for name, off in reference.residuals(square, side, factors).items():
            ledger.note(f"{kind}-{name}", off, bounds.get(name, tolerances.solution(kind, size)))
    return ledger.finding(f"LU, solutions and singular values of 16 matrices of {size} rows hold")


def check_transfers(context: GpuContext) -> Finding:
    """The framework's copies and the driver's from pinned memory, there and back, bit for bit."""
    count = (256 if context.thorough else 64) * MEBI
    values = reference.numbers(9, (count // 4,), "float32").astype("float32")
    made = context.framework.transfer(context, values)
    numbers = {"bytes": float(count)}
    if not context.asked.rehearsal:  # a rate of the CPU's copies to itself would be mistaken for one
        numbers.update(_rates("framework", count, made.up, made.down))
    if made.back.dtype != values.dtype or made.back.tobytes() != values.tobytes():
        text = "the framework's copy to the GPU and back is not what was sent"
        raise Refusal(text, outcome=table.WRONG_NUMBERS, numbers=numbers)
    how = "pinned by the framework" if made.pinned else "the framework's copies"
    if context.asked.rehearsal:
        return Finding(f"{count // MEBI} MiB there and back (rehearsed on the CPU)", numbers)
    if context.asked.expected.rocm:  # copy_pinned asks libcuda
        return Finding(f"{count // MEBI} MiB there and back: {how} the same", numbers)
    pinned = copy_pinned(values.tobytes())
    numbers.update(_rates("pinned", count, pinned.up, pinned.down))
    if pinned.back != values.tobytes():
        text = "the driver's copy from pinned memory and back is not what was sent"
        raise Refusal(text, outcome=table.WRONG_NUMBERS, numbers=numbers)
    rates = f"{numbers['pinned-up-gb-per-s']:.1f} GB/s up, {numbers['pinned-down-gb-per-s']:.1f} down"
    return Finding(f"{count // MEBI} MiB there and back: {rates} pinned; {how} the same", numbers)


def _rates(name: str, count: int, up: float, down: float) -> dict[str, float]:
    """10^9 bytes a second."""
    return {
        f"{name}-{way}-gb-per-s": count / max(took, 1e-9) / 1e9 for way, took in (("up", up), ("down", down))
    }


def check_collective(context: GpuContext) -> Finding:
    """The sum over one rank is what was put in, by the image's NCCL."""
    ledger = Ledger(context)
    values = reference.numbers(10, (1 << 20,), "float32")
    found, how = context.framework.all_reduce(context, values)
    ledger.compare("all-reduce", found, Want(values, 1.0), 0.0)
    return ledger.finding(f"an all-reduce of one rank by {how}")


def check_library_versions(context: GpuContext) -> Finding:
    """cuDNN and NCCL as this process has them loaded are those of the lock."""
    told = context.framework.loaded(context)
    return judge_libraries(context, find_loaded(), told)


def check_training(context: GpuContext) -> Finding:
    """A few steps of gradient descent: the loss falls, and losses and weights are the CPU's."""
    ledger, rows = Ledger(context), 512
    case = reference.make_training(rows)
    losses, first, second = reference.training(case)
    found, *weights = context.framework.train(context, case)
    numpy, bound = reference.numpy, tolerances.training(reference.STEPS, rows)
    ledger.compare("losses", numpy.array(found), Want(numpy.array(losses), losses[0]), bound)
    for name, have, want in zip(("first", "second"), weights, (first, second), strict=True):
        ledger.compare(f"{name}-weights", have, Want(want, abs(want).max()), bound)
    ledger.numbers.update({"loss-before": found[0], "loss-after": found[-1]})
    if not found[-1] < found[0] / 2:
        ledger.wrong.append(f"the loss goes from {found[0]:.4g} to {found[-1]:.4g}")
    return ledger.finding(f"{reference.STEPS} steps: loss {found[0]:.4g} to {found[-1]:.4g}, as on the CPU")


def check_numbers_controls(context: GpuContext) -> Finding:
    """What must be refused is refused, here and now: each of these would be a hole in the checks above."""
    framework, holes = context.framework, []
    left, right = reference.numbers(31, (64, 64), "float32"), reference.numbers(32, (64, 64), "float32")
    want, bound = reference.matmul(left, right), tolerances.products("float32", 64)
    good = framework.matmul(context, left, right, "float32")
    if not reference.error(good, want) <= bound:
        holes.append("a right product is refused")
    for name, wrong in _spoil(good, left, right).items():
        if reference.error(wrong, want) <= bound:
            holes.append(f"{name} is not noticed")
    for row, column in ((0, 0), (17, 40), (63, 63)):  # the reference itself, against exact sums
        exact = math.fsum(float(a * b) for a, b in zip(left[row], right[:, column], strict=True))
        if abs(exact - want.value[row, column]) > 1e-13:
            holes.append(f"numpy's product is off by {abs(exact - want.value[row, column]):.2g} itself")
    # An array on the CPU: of the right type where that is the wrong place, of another where it is the right.
    here, there = (replace(context, asked=replace(context.asked, rehearsal=cpu)) for cpu in (True, False))
    for name, place, kind in (("the CPU", there, "float32"), ("another type", here, "float64")):
        if _taken(framework, place, framework.on_cpu(left, "float32"), kind):
            holes.append(f"a result of {name} is taken")
    if holes:
        raise CheckFailure("; ".join(holes), outcome=table.WRONG_NUMBERS)
    return Finding("8 wrong results are refused: values, shape, type, place", {"controls": 8.0})


def _spoil(good: Any, left: Any, right: Any) -> Mapping[str, Any]:
    numpy = reference.numpy
    one, lost, nan = good.copy(), good.copy(), good.copy()
    place = numpy.unravel_index(abs(good).argmax(), good.shape)
    one[place] *= 1.001
    lost[3] = left[3, :-1] @ right[:-1]
    nan[5, 5] = math.nan
    cut = reference.cut(left) @ reference.cut(right)
    return {
        "one element that is off by a thousandth": one,
        "a row that lacks its last product": lost,
        "a NaN": nan,
        "another shape": good[:-1],
        "float32 cut to tf32": cut,
        "zeros": good * 0,
    }


def _taken(framework: Any, context: GpuContext, array: Any, kind: str) -> bool:
    try:
        framework.fetch(context, array, kind)
    except CheckFailure:
        return False
    return True


def check_memory(context: GpuContext) -> Finding:
    """After three rounds of work no more memory of the GPU is in use than before them.

    What some count is the whole GPU's, of which other programs may take, and some give an array back a moment
    after its result is there. So it is looked at again: what leaks grows in all of the rounds.
    """
    framework = context.framework
    # A rehearsal looks at the process, whose allocator keeps some: far less than a round's arrays.
    allowed = 48 * MEBI if context.asked.rehearsal else LEFT_BEHIND
    levels: list[int] = []
    while len(levels) < MOST_ROUNDS and not (len(levels) > ROUNDS and _grown(levels) <= allowed):
        _work(context)
        framework.release(context)
        levels.append(resident_bytes() if context.asked.rehearsal else framework.in_use(context))
    numbers = {"in-use-bytes": float(levels[-1]), "grown-bytes": float(_grown(levels))}
    if _grown(levels) > allowed:
        text = f"memory in use grows: {', '.join(f'{level // MEBI}' for level in levels)} MiB"
        raise Refusal(text, outcome=table.LOAD_FAILED, numbers=numbers)
    place = " (rehearsed on the CPU)" if context.asked.rehearsal else ""
    return Finding(f"{levels[-1] // MEBI} MiB in use, no more than {ROUNDS} rounds before{place}", numbers)


def _grown(levels: Sequence[int]) -> int:
    """Over the last rounds."""
    return levels[-1] - levels[-1 - ROUNDS]


def _work(context: GpuContext) -> None:
    """64 MiB of arrays: a product and a sum."""
    values = reference.numbers(41, (2048, 2048), "float32")
    context.framework.matmul(context, values, values[:, :64], "float32")
    context.framework.reduce(context, values, 0, "float32")


def check_jit(context: GpuContext) -> Finding:
    """A product, functions, a reduction and their gradient, as one compiled function."""
    ledger, inner = Ledger(context), 256
    inputs = reference.numbers(51, (1000, inner), "float32")
    weights = reference.numbers(52, (inner, 96), "float32")
    wanted, bound = reference.fused(inputs, weights), tolerances.compiled(1000)
    eager, compiled, how = context.framework.compile(context, inputs, weights)
    for name, want in wanted.items():
        ledger.compare(f"eager-{name}", eager[name], want, bound)
        ledger.compare(f"compiled-{name}", compiled[name], want, bound)
        both = reference.Want(eager[name], want.scale)
        ledger.compare(f"compiled-against-eager-{name}", compiled[name], both, bound)
    return ledger.finding(how)
