"""What `compute` should give, in float64 by plain Python.

Inputs are made of k/64 with |k| < 128, so each is exact in every floating type from bfloat16 up:
what differs afterwards is the arithmetic alone. Matrices are lists of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Matrix = list[list[float]]

# Largest error that is no fault, relative to the largest value of the reference: some tens of the
# type's rounding step, which covers the order of sums.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}

ROWS, INNER, COLUMNS = 48, 64, 40
TOTAL = 4096
SOLVED = 24
CHANNELS, SIDE, FILTERS, KERNEL = 3, 12, 4, 3


@dataclass(frozen=True)
class ComputeCase:
    """Inputs and expected results. `image` is [channel][y][x], `filters` [filter][channel][y][x]."""

    left: Matrix
    right: Matrix
    values: list[float]
    square: Matrix
    side: list[float]
    image: list[Matrix]
    filters: list[list[Matrix]]


def make_case() -> ComputeCase:
    stream = _Stream()
    square = [stream.take(SOLVED) for _ in range(SOLVED)]
    for index in range(SOLVED):
        square[index][index] += 64.0  # far from singular
    return ComputeCase(
        left=[stream.take(INNER) for _ in range(ROWS)],
        right=[stream.take(COLUMNS) for _ in range(INNER)],
        values=stream.take(TOTAL),
        square=square,
        side=stream.take(SOLVED),
        image=[[stream.take(SIDE) for _ in range(SIDE)] for _ in range(CHANNELS)],
        filters=[
            [[stream.take(KERNEL) for _ in range(KERNEL)] for _ in range(CHANNELS)] for _ in range(FILTERS)
        ],
    )


class _Stream:
    """A fixed sequence (a linear congruential generator, constants of Knuth's MMIX)."""

    def __init__(self) -> None:
        self.state = 20240601

    def take(self, count: int) -> list[float]:
        values = []
        for _ in range(count):
            self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
            values.append(((self.state >> 33) % 255 - 127) / 64)
        return values


def matmul(left: Matrix, right: Matrix) -> Matrix:
    columns = list(zip(*right, strict=True))
    return [
        [math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left
    ]


def total(values: list[float]) -> float:
    return math.fsum(values)


def convolution(image: list[Matrix], filters: list[list[Matrix]]) -> list[Matrix]:
    """Cross-correlation without padding, stride 1: what frameworks call a convolution."""
    size = len(image[0]) - len(filters[0][0]) + 1
    reach = range(len(filters[0][0]))
    return [
        [
            [
                math.fsum(
                    image[channel][y + dy][x + dx] * kernel[channel][dy][dx]
                    for channel in range(len(image))
                    for dy in reach
                    for dx in reach
                )
                for x in range(size)
            ]
            for y in range(size)
        ]
        for kernel in filters
    ]


def solve(square: Matrix, side: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting."""
    rows = [[*row, value] for row, value in zip(square, side, strict=True)]
    size = len(rows)
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


def gradient(left: Matrix, right: Matrix) -> Matrix:
    """Of sum(tanh(left @ right / 64) ** 2) after `right`, by hand: left.T @ (2 t (1 - t^2)) / 64."""
    outer = [
        [2 * math.tanh(value / 64) * (1 - math.tanh(value / 64) ** 2) / 64 for value in row]
        for row in matmul(left, right)
    ]
    return matmul([list(column) for column in zip(*left, strict=True)], outer)


def flatten(value: object) -> list[float]:
    """Nested lists, or one number, as a flat list."""
    if isinstance(value, list):
        return [number for item in value for number in flatten(item)]
    return [float(value)]  # type: ignore[arg-type]


def error(found: object, expected: object) -> float:
    """Largest difference relative to the largest expected value; infinite for another shape or a NaN."""
    one, other = flatten(found), flatten(expected)
    if len(one) != len(other) or not all(math.isfinite(value) for value in one):
        return math.inf
    scale = max(abs(value) for value in other) or 1.0
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) / scale
