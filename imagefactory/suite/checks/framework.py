"""The checks of the framework: `cuda-version`, `compute` and `compiler`.

It must be built for the CUDA or ROCm version of the recipe and have its GPU code. Small computations must
agree with float64 in plain Python. Its run-time compiler must work, as far as possible without a GPU.

Inputs are k/64 with |k| < 128. So each is exact in every floating-point type from bfloat16 up, and only the
arithmetic differs. Matrices are lists of rows.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass

from .. import table
from ..context import CheckFailure, Context, Finding

Matrix = list[list[float]]

# Largest error that is not a fault, relative to the largest value of the reference: some tens of the type's
# rounding step, which covers the order of sums.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}

ROWS, INNER, COLUMNS = 48, 64, 40
TOTAL = 4096
SOLVED = 24
CHANNELS, SIDE, FILTERS, KERNEL = 3, 12, 4, 3


@dataclass(frozen=True)
class ComputeCase:
    """Inputs of a computation. `image` is [channel][y][x], `filters` [filter][channel][y][x]."""

    matrix: Matrix
    right: Matrix
    values: list[float]
    square: Matrix
    side: list[float]
    image: list[Matrix]
    filters: list[list[Matrix]]


def make_case() -> ComputeCase:
    """Return inputs from a fixed sequence: a linear congruential generator with the constants of Knuth's
    MMIX.
    """
    state = 20240601

    def draw(*shape: int) -> list:  # type: ignore[type-arg]
        nonlocal state
        if len(shape) > 1:
            return [draw(*shape[1:]) for _ in range(shape[0])]
        values = []
        for _ in range(shape[0]):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            values.append(((state >> 33) % 255 - 127) / 64)
        return values

    square = draw(SOLVED, SOLVED)
    for index in range(SOLVED):
        square[index][index] += 64.0  # far from singular
    return ComputeCase(
        matrix=draw(ROWS, INNER),
        right=draw(INNER, COLUMNS),
        values=draw(TOTAL),
        square=square,
        side=draw(SOLVED),
        image=draw(CHANNELS, SIDE, SIDE),
        filters=draw(FILTERS, CHANNELS, KERNEL, KERNEL),
    )


def matmul(matrix: Matrix, right: Matrix) -> Matrix:
    columns = list(zip(*right))  # noqa: B905 - Python 3.9
    return [[math.fsum(map(float.__mul__, row, column)) for column in columns] for row in matrix]


def convolution(image: list[Matrix], filters: list[list[Matrix]]) -> list[Matrix]:
    """Cross-correlate with stride 1, without padding. Frameworks call this a convolution."""
    size = len(image[0]) - len(filters[0][0]) + 1
    reach = range(len(filters[0][0]))
    places = [(channel, dy, dx) for channel in range(len(image)) for dy in reach for dx in reach]
    return [
        [
            [
                math.fsum(image[c][y + dy][x + dx] * kernel[c][dy][dx] for c, dy, dx in places)
                for x in range(size)
            ]
            for y in range(size)
        ]
        for kernel in filters
    ]


def solve(square: Matrix, side: list[float]) -> list[float]:
    """Solve by Gaussian elimination with partial pivoting."""
    size = len(square)
    rows = [[*square[row], side[row]] for row in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            for place in range(column, size + 1):
                rows[row][place] -= factor * rows[column][place]
    result = [0.0] * size
    for row in reversed(range(size)):
        known = math.fsum(rows[row][place] * result[place] for place in range(row + 1, size))
        result[row] = (rows[row][size] - known) / rows[row][row]
    return result


def gradient(matrix: Matrix, right: Matrix) -> Matrix:
    """Return the gradient of sum(tanh(matrix @ right / 64) ** 2) by `right`: matrix.T @ (2 t (1 - t^2)) /
    64.
    """
    outer = [
        [2 * math.tanh(value / 64) * (1 - math.tanh(value / 64) ** 2) / 64 for value in row]
        for row in matmul(matrix, right)
    ]
    return matmul([list(column) for column in zip(*matrix)], outer)  # noqa: B905 - Python 3.9


def flatten(value: object) -> list[float]:
    """Return nested lists, or a single number, as a flat list."""
    if isinstance(value, list):
        return [number for item in value for number in flatten(item)]
    return [float(value)]  # type: ignore[arg-type]


def relative_error(result: object, expected: object) -> float:
    """Return the largest error relative to the largest value, infinite for another shape or a NaN."""
    values, right = flatten(result), flatten(expected)
    if len(values) != len(right) or not all(math.isfinite(value) for value in values):
        return math.inf
    scale = max(abs(value) for value in right) or 1.0
    return max(abs(values[place] - right[place]) for place in range(len(right))) / scale


def check_compute(context: Context) -> Finding:
    case = make_case()
    calls = {
        "matmul": ((case.matrix, case.right), matmul),
        "total": ((case.values,), math.fsum),
        "convolution": ((case.image, case.filters), convolution),
        "solve": ((case.square, case.side), solve),
        "gradient": ((case.matrix, case.right), gradient),
    }
    numbers, wrong, skipped = {}, [], []
    for operation, kinds in table.OPERATIONS.items():
        inputs, expect = calls[operation]
        expected = expect(*inputs)  # type: ignore[operator]
        for kind in kinds:
            if table.operation_not_applicable(context.expected.framework, operation, kind):
                skipped.append(f"{operation} {kind}")
                continue
            error, bound = (
                relative_error(getattr(context.framework, operation)(*inputs, kind), expected),
                TOLERANCES[kind],
            )
            numbers[f"{operation}-{kind}-error"] = min(error, 1e300)  # JSON has no infinity
            if not error <= bound:
                wrong.append(f"{operation} in {kind} is off by {error:.2g} (at most {bound:.0e})")
    if wrong:
        raise CheckFailure("; ".join(wrong), outcome=table.WRONG_NUMBERS)
    detail = f"{len(numbers)} computations agree with float64"
    return Finding(detail + (f"; not applicable: {', '.join(skipped)}" if skipped else ""), numbers)


def check_cuda(context: Context) -> Finding:
    rocm = context.expected.rocm
    maker, expected = ("ROCm", rocm) if rocm else ("CUDA", context.expected.cuda)
    version, detail = find_rocm(context) if rocm else context.framework.cuda_version(context)
    if not same_cuda(version, expected):
        raise CheckFailure(f"made for {maker} {version}, the recipe says {expected}")
    major, _, minor = version.partition(".")
    numbers = {"major": float(major)}
    if minor:
        numbers["minor"] = float(minor.partition(".")[0])
    return Finding(f"{maker} {version}{f' ({detail})' if detail else ''}", numbers)


def find_rocm(context: Context) -> tuple[str, str]:
    """Return version and detail of a ROCm build. Raises CheckFailure if the suite has no rule for it."""
    if not hasattr(context.framework, "rocm_version"):
        raise CheckFailure(f"the suite knows no build of {context.expected.distribution} for ROCm")
    version, detail = context.framework.rocm_version(context)
    return version, detail


def same_cuda(version: str, expected: str) -> bool:
    """Return whether all numbers of `expected` are equal: 12.1.105 matches `12` and `12.1`, 12 does not match
    `12.1`.
    """
    numbers = expected.split(".")
    return version.split(".")[: len(numbers)] == numbers


def check_compiler(context: Context) -> Finding:
    with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
        return Finding(*context.framework.compilers(context, scratch))
