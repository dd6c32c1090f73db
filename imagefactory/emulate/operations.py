"""The arithmetic of torch's operations, from the shapes of what goes in and comes out. Pure.

A multiplication and an addition are two operations. What is not named here moves bytes and computes next to
nothing, which a roofline knows by the bytes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Shape = Sequence[int]


def flops_of(name: str, ins: Sequence[Shape], outs: Sequence[Shape], *, transposed: bool = False) -> float:
    """Operations of one call. `name` is aten's without its namespace (`addmm`), `ins` and `outs` the
    tensors'.

    `transposed` is of convolutions.
    """
    if name in MATMULS:
        return _matmul(ins[-2:], outs[0])
    if name.startswith("_scaled_dot_product"):
        return _attention(name, ins)
    if name in CONVOLUTIONS and ins:
        return _convolution(ins[0], ins[1], outs[0], transposed=transposed)
    if name in BACKWARDS:
        gradient, image, weight = ins[0], ins[1], ins[2]
        once = _convolution(image, weight, gradient, transposed=transposed)
        return once * sum(1 for out in outs if len(out) == len(weight))
    return 0.0


def what_of(name: str) -> str:
    """What such an operation is to a profile."""
    if name.startswith("_scaled_dot_product"):
        return "attention_backward" if "backward" in name else "attention"
    return "backward" if name in BACKWARDS else "convolution" if name in CONVOLUTIONS else "product"


MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_addmm_activation"})
CONVOLUTIONS = frozenset({"convolution", "_convolution", "cudnn_convolution"})
BACKWARDS = frozenset({"convolution_backward"})


def _matmul(ins: Sequence[Shape], out: Shape) -> float:
    """`(..., m, k) x (..., k, n)`: each of the results is k multiplications and additions."""
    inner = ins[0][-1] if ins[0] else 1
    return 2.0 * prod(out) * inner


def _convolution(image: Shape, weight: Shape, out: Shape, *, transposed: bool) -> float:
    """Each result is a product over the kernel and the channels of its group; transposed, each of what goes
    in.
    """
    points = prod(image if transposed else out)
    return 2.0 * points * prod(weight[1:])


def _attention(name: str, ins: Sequence[Shape]) -> float:
    """Two products of query length x key length x width; two and a half times that on the way back."""
    if "backward" in name:
        _, query, key, value = ins[0], ins[1], ins[2], ins[3]
        return 2.5 * _forward(query, key, value)
    return _forward(ins[0], ins[1], ins[2])


def _forward(query: Shape, key: Shape, value: Shape) -> float:
    *batch, length, width = query
    return 2.0 * prod(batch) * length * key[-2] * (width + value[-1])
