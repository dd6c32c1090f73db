"""Whether a framework's own code runs at all on this GPU: a few small operations with known answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ...context import CheckFailure, Finding
from .. import reference, table, tolerances
from ..context import GpuContext

FORCED = "CUDA_FORCE_PTX_JIT"


def run_probe(context: GpuContext) -> Finding:
    """Where machine code is passed over, the framework's own kernels alone.

    NVIDIA's libraries bring PTX for few capabilities or none, so cuBLAS and cuDNN would fail where the
    framework itself runs. Raises CheckFailure for a wrong answer and whatever the framework raises.
    """
    framework = context.framework
    left, right = reference.numbers(1, (64, 96), "float32"), reference.numbers(2, (96, 32), "float32")
    case = reference.make_convolution((2, 4, 9, 8), "float32", stride=1)
    tries: dict[str, tuple[Callable[[], Any], reference.Want, float]] = {
        "elementwise": (
            lambda: framework.elementwise(context, left),
            reference.Want(reference.numpy.tanh(left), 1.0),
            tolerances.compiled(1),
        ),
        "reduction": (
            lambda: framework.reduce(context, abs(left), 1, "float32"),
            reference.Want(abs(left).sum(axis=1), abs(left).sum(axis=1)),
            tolerances.sums("float32", left.shape[1]),
        ),
    }
    if os.environ.get(FORCED) != "1":
        tries["matmul"] = (
            lambda: framework.matmul(context, left, right, "float32"),
            reference.matmul(left, right),
            tolerances.products("float32", left.shape[1]),
        )
        tries["convolution"] = (
            lambda: framework.convolution(context, case, "float32")["forward"],
            reference.convolution(case)["forward"],
            tolerances.convolution("float32", case.lengths["forward"]),
        )
    for name, (run, want, bound) in tries.items():
        off = reference.error(run(), want)
        if not off <= bound:
            raise CheckFailure(
                f"{name} is off by {off:.2g} (at most {bound:.2g})", outcome=table.WRONG_NUMBERS
            )
    return Finding(f"{', '.join(tries)} run and agree with float64", {"operations": len(tries)})
