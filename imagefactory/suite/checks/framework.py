"""The framework itself: `cuda-version`, `compute` and `compiler`.

It was built for the recipe's CUDA or ROCm and has its GPU part. Small computations agree with a float64
reference in plain Python. The compiler that it uses at run time is there and works, as far as without a GPU.
"""

from __future__ import annotations

import tempfile

from .. import reference, table
from ..context import CheckFailure, Context, Finding


def check_compute(context: Context) -> Finding:
    framework, name = context.framework, context.expected.framework
    framework.prepare()
    case = reference.make_case()
    calls = {
        "matmul": ((case.left, case.right), reference.matmul),
        "total": ((case.values,), reference.total),
        "convolution": ((case.image, case.filters), reference.convolution),
        "solve": ((case.square, case.side), reference.solve),
        "gradient": ((case.left, case.right), reference.gradient),
    }
    numbers, wrong, skipped = {}, [], []
    for operation, kinds in table.OPERATIONS.items():
        inputs, expect = calls[operation]
        expected = expect(*inputs)  # type: ignore[operator]
        for kind in kinds:
            if table.operation_not_applicable(name, operation, kind):
                skipped.append(f"{operation} {kind}")
                continue
            error = reference.error(getattr(framework, operation)(*inputs, kind), expected)
            numbers[f"{operation}-{kind}-error"] = min(error, 1e300)  # JSON has no infinity
            if not error <= reference.TOLERANCES[kind]:
                wrong.append(
                    f"{operation} in {kind} is off by {error:.2g} (at most {reference.TOLERANCES[kind]:.0e})"
                )
    if wrong:
        raise CheckFailure("; ".join(wrong), outcome=table.WRONG_NUMBERS)
    detail = f"{len(numbers)} computations agree with float64"
    return Finding(detail + (f"; not applicable: {', '.join(skipped)}" if skipped else ""), numbers)


def check_cuda(context: Context) -> Finding:
    context.framework.prepare()
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
    """What the framework's file knows of its build for ROCm. Raises CheckFailure where it knows of none."""
    known = getattr(context.framework, "rocm_version", None)
    if known is None:
        raise CheckFailure(f"the suite knows no build of {context.expected.distribution} for ROCm")
    version, detail = known(context)
    return version, detail


def same_cuda(found: str, expected: str) -> bool:
    """`12` is met by every 12.x, `12.1` by 12.1 and 12.1.105, `12.1` not by `12`."""
    wanted = expected.split(".")
    return found.split(".")[: len(wanted)] == wanted


def check_compiler(context: Context) -> Finding:
    context.framework.prepare()
    with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
        detail, numbers = context.framework.compilers(context, scratch)
    return Finding(detail, numbers)
