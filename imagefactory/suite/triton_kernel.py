# mypy: ignore-errors
"""A Triton kernel, in a separate file because Triton reads the source of its kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, z, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(z + index, tl.load(x + index, mask=inside) + tl.load(y + index, mask=inside), mask=inside)
