"""A framework of plain Python that answers the calls which the suite makes of torch, with gradients.

Tests put it into a virtual environment as the package `torch`. FAULT is replaced by what shall be wrong.
"""

from __future__ import annotations

import math
import os
import struct
import sys
import time
import types

FAULT = ""
__version__ = "1.13.1+cu117"

if FAULT == "import":
    raise ImportError("libcudart.so.11.0: cannot open shared object file")
if FAULT == "crash":
    os.abort()
if FAULT == "hang":
    time.sleep(600)
if FAULT == "exit":
    print("PASSED")
    sys.exit(0)
if FAULT == "leave":
    print("PASSED", flush=True)
    os._exit(0)
if FAULT == "version":
    __version__ = "1.13.0+cu117"

float64, float32, bfloat16 = "float64", "float32", "bfloat16"
version = types.SimpleNamespace(cuda={"cpu": None, "cuda": "11.8"}.get(FAULT, "11.7"))
backends = types.SimpleNamespace(cuda=types.SimpleNamespace(is_built=lambda: True))
_C = types.SimpleNamespace(_cuda_getArchFlags=lambda: "sm_70 sm_80")


def _rounded(value, kind):
    if isinstance(value, list):
        return [_rounded(item, kind) for item in value]
    if kind == bfloat16:
        return struct.unpack("<f", b"\0\0" + struct.pack("<f", value)[2:])[0]
    return struct.unpack("<f", struct.pack("<f", value))[0] if kind == float32 else float(value)


def _map(function, value):
    return [_map(function, item) for item in value] if isinstance(value, list) else function(value)


def _zip(function, one, other):
    if isinstance(one, list):
        return [_zip(function, a, b) for a, b in zip(one, other, strict=False)]
    return function(one, other)


def _flat(value):
    return [number for item in value for number in _flat(item)] if isinstance(value, list) else [value]


def _product(left, right):
    columns = list(zip(*right, strict=False))
    return [[sum(a * b for a, b in zip(row, column, strict=False)) for column in columns] for row in left]


class Tensor:
    def __init__(self, value, kind, back=None):
        self.value, self.kind, self.back, self.grad = _rounded(value, kind), kind, back, None

    def _new(self, value, back=None):
        return Tensor(value, self.kind, back)

    def requires_grad_(self):
        self.back = lambda gradient: setattr(self, "grad", self._new(gradient))
        return self

    def _send(self, gradient):
        if self.back:
            self.back(gradient)

    def __matmul__(self, other):
        def back(gradient):
            other._send(_product([list(column) for column in zip(*self.value, strict=False)], gradient))

        value = _product(self.value, other.value)
        if FAULT == "matmul":
            value[3][5] *= 1.001
        if FAULT == "nan":
            value[0][0] = math.nan
        return self._new(value, back)

    def __truediv__(self, number):
        return self._new(
            _map(lambda x: x / number, self.value), lambda g: self._send(_map(lambda x: x / number, g))
        )

    def tanh(self):
        value = _map(math.tanh, self.value)
        return self._new(value, lambda g: self._send(_zip(lambda a, t: a * (1 - t * t), g, value)))

    def __pow__(self, _):
        return self._new(
            _map(lambda x: x * x, self.value),
            lambda g: self._send(_zip(lambda a, x: a * 2 * x, g, self.value)),
        )

    def sum(self):
        return self._new(math.fsum(_flat(self.value)), lambda g: self._send(_map(lambda _: g, self.value)))

    def backward(self):
        self._send(-1.0 if FAULT == "gradient" else 1.0)

    def double(self):
        return Tensor(self.value, float64)

    def tolist(self):
        return self.value

    def __getitem__(self, key):
        return self._new([self.value] if key is None else self.value[key])


def tensor(values, dtype):
    return Tensor(values, dtype)


def _solve(square, side):
    rows = [[*row, value] for row, value in zip(square.value, side.value, strict=False)]
    size = len(rows)
    for column in range(size):
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for row in range(size):
            if row != column:
                factor = rows[row][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=False)]
    return Tensor([row[-1] for row in rows], square.kind)


def _conv2d(images, filters):
    (image,), size = images.value, len(images.value[0][0]) - len(filters.value[0][0]) + 1
    reach = range(len(filters.value[0][0]))
    return Tensor(
        [
            [
                [
                    [
                        sum(
                            plane[y + dy][x + dx] * weights[dy][dx]
                            for plane, weights in zip(image, kernel, strict=False)
                            for dy in reach
                            for dx in reach
                        )
                        for x in range(size)
                    ]
                    for y in range(size)
                ]
                for kernel in filters.value
            ]
        ],
        images.kind,
    )


linalg = types.SimpleNamespace(solve=_solve)
nn = types.ModuleType("torch.nn")
sys.modules["torch.nn"] = nn
functional = sys.modules["torch.nn.functional"] = types.ModuleType("torch.nn.functional")
functional.conv2d = _conv2d
