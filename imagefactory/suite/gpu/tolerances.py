"""Tolerances: how far a result may be from float64, by number type and size, and why.

A kind is a number type, or `tf32`: float32 multiplied by tensor cores that use ten bits of each factor.

A sum of n products a_k b_k is measured in units of s = sqrt(sum (a_k b_k)^2). That is its size if the signs
are random, as in `reference.py`. Three roundings add up, none depending on the sign of another (Higham and
Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019):
- that of the factors, if the kind truncates them: 2 u of s;
- that of the running sum, at most s each, n of them: sqrt(n) u of s, with the u of the accumulator (float32
for
  all kinds except float64; defaults of cuBLAS and XLA);
- that of the result: u of a value that is itself a few s.
SPREAD times that covers the largest of many millions of results. A kernel that loses a product, reads a wrong
place or multiplies in a coarser kind exceeds it. For example, tf32 in place of float32 has an error of about
2^-11 s, which is 30 times the limit for float32 at n = 1024.
"""

from __future__ import annotations

import math

# Half of the distance from 1 to the next number: IEEE 754, and NVIDIA's for tf32 and bfloat16.
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Tensor cores take float32's upper bits: what is cut off is at most this part of a factor.
CUT = {"tf32": 2.0**-10}

SPREAD = 8.0

# Kind -> the oldest capability with units for it. CUDA C++ Programming Guide, "Arithmetic Instructions".
OLDEST = {"bfloat16": (8, 0)}

# Winograd's transforms of a 3x3 filter, which cuDNN may choose, enlarge the rounding of float32 by about ten
# (F(4x4, 3x3) of Barabasz and others, "Error Analysis and Improving the Accuracy of Winograd Convolution").
WINOGRAD = 12.0

# A long product may be split and its parts added in the type of the result (cuBLAS's split-K with reduced
# precision, torch's default for float16 and bfloat16): a few more roundings of that type.
SPLIT = 4.0

# Backward stable algorithms: the residual is below c n u of the norms with a small c (Higham, "Accuracy and
# Stability of Numerical Algorithms", chapters 9 and 20). One-sided Jacobi, cuSOLVER's for batches, stops at a
# residual of its own, some ten times above.
STABLE, JACOBI = 8.0, 32.0


def unit_of(kind: str) -> float:
    """Return the rounding unit of results of this number type."""
    return UNITS["float32" if kind == "tf32" else kind]


def applies(kind: str, capability: str) -> bool:
    """Return whether GPUs of `capability` (`7.5`; empty in a rehearsal) can multiply numbers of this type."""
    if not capability or capability.startswith("gfx"):  # all AMD GPUs that ROCm supports have them
        return True
    major, _, minor = capability.partition(".")
    return (int(major), int(minor or 0)) >= OLDEST.get(kind, (0, 0))


def oldest(kind: str) -> str:
    """Return the oldest capability that supports this number type, such as `8.0`."""
    return ".".join(map(str, OLDEST[kind]))


def products(kind: str, length: int) -> float:
    """Return the limit for a sum of `length` products, in units of the root of the sum of their squares."""
    unit = unit_of(kind)
    running = math.sqrt(length) * (unit if kind == "float64" else UNITS["float32"])
    ending = unit if kind in ("float64", "float32", "tf32") else SPLIT * unit
    return SPREAD * (2 * CUT.get(kind, 0.0) + running + ending)


def convolution(kind: str, length: int) -> float:
    """Return the limit for a convolution: Winograd's transforms increase the rounding of the running sums."""
    return products(kind, length) + SPREAD * (WINOGRAD - 1) * math.sqrt(length) * UNITS["float32"]


def sums(kind: str, length: int) -> float:
    """Return the limit for a sum of `length` numbers of one sign, relative to the sum.

    In sequence, the running sum grows like k, so the roundings are u k with random signs: in total
    sqrt(length / 3) u of the whole. Kernels that add in a tree have smaller errors.
    """
    running = math.sqrt(length / 3) * (UNITS["float64"] if kind == "float64" else UNITS["float32"])
    return SPREAD * running + SPLIT * unit_of(kind)


def solution(kind: str, size: int) -> float:
    """Return the limit for residuals of LU and of `size` equations, relative to the norms of the factors."""
    return STABLE * size * unit_of(kind)


def singular(kind: str, size: int) -> float:
    """Return the limit for singular values and the product of the factors, relative to the largest value."""
    return JACOBI * size * unit_of(kind)


def training(steps: int, length: int) -> float:
    """Return the relative limit for losses and weights after `steps` of gradient descent in float32.

    Each step has the error of its longest sum. The loss falls, so earlier errors grow at most by a factor of
    two.
    """
    return 2.0 * steps * products("float32", length)


def data_parallel(steps: int, length: int) -> float:
    """Return the limit between the same steps on several GPUs and on one, relative to the largest value.

    Each is within `training` of the true value, so they differ at most by twice that. The sum over the GPUs
    is part of the longest sum.
    """
    return 2.0 * training(steps, length)


def compiled(length: int) -> float:
    """Return the limit for float32 results with exp, log and tanh, relative to the largest value.

    Compilers reorder sums and use approximations of functions, which are accurate to a few units.
    """
    return products("float32", length) + 16.0 * UNITS["float32"]
