"""A few small operations with known results, which test whether a framework's code runs on this GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ...context import CheckFailure, Finding
from .. import reference, table, tolerances
from ..context import GpuContext

FORCED = "CUDA_FORCE_PTX_JIT"


def run_probe(context: GpuContext) -> Finding:
    """Compute with the framework's kernels only, if the driver skips machine code.

    NVIDIA libraries have PTX for few capabilities or none, so cuBLAS and cuDNN would fail although the
    framework itself runs. Raises CheckFailure for a wrong result, and the errors of the framework.
    """
    framework = context.framework
    matrix, right = reference.numbers(1, (64, 96), "float32"), reference.numbers(2, (96, 32), "float32")
    case = reference.make_convolution((2, 4, 9, 8), "float32", stride=1)
    tries: dict[str, tuple[Callable[[], Any], reference.ExpectedArray, float]] = {
        "elementwise": (
            lambda: framework.elementwise(context, matrix),
            reference.ExpectedArray(reference.numpy.tanh(matrix), 1.0),
            tolerances.compiled(1),
        ),
        "reduction": (
            lambda: framework.reduce(context, abs(matrix), 1, "float32"),
            reference.ExpectedArray(abs(matrix).sum(axis=1), abs(matrix).sum(axis=1)),
            tolerances.sums("float32", matrix.shape[1]),
        ),
    }
    if os.environ.get(FORCED) != "1":
        tries["matmul"] = (
            lambda: framework.matmul(context, matrix, right, "float32"),
            reference.matmul(matrix, right),
            tolerances.products("float32", matrix.shape[1]),
        )
        tries["convolution"] = (
            lambda: framework.convolution(context, case, "float32")["forward"],
            reference.convolution(case)["forward"],
            tolerances.convolution("float32", case.lengths["forward"]),
        )
    for name, (run, target, bound) in tries.items():
        off = reference.error(run(), target)
        if not off <= bound:
            text = f"{name} is off by {off:.2g} (at most {bound:.2g})"
            raise CheckFailure(text, outcome=table.WRONG_NUMBERS)
    return Finding(f"{', '.join(tries)} run and agree with float64", {"operations": len(tries)})
