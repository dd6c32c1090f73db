"""`cuda-version`: the framework was made for the recipe's CUDA, or ROCm, and brings its GPU part along."""

from __future__ import annotations

from ..context import Context, Failure, Finding


def check(context: Context) -> Finding:
    context.framework.prepare()
    rocm = context.expected.rocm
    maker, expected = ("ROCm", rocm) if rocm else ("CUDA", context.expected.cuda)
    version, detail = find_rocm(context) if rocm else context.framework.cuda_version(context)
    if not same_cuda(version, expected):
        raise Failure(f"made for {maker} {version}, the recipe says {expected}")
    major, _, minor = version.partition(".")
    numbers = {"major": float(major)}
    if minor:
        numbers["minor"] = float(minor.partition(".")[0])
    return Finding(f"{maker} {version}{f' ({detail})' if detail else ''}", numbers)


def find_rocm(context: Context) -> tuple[str, str]:
    """What the framework's file knows of its build for ROCm. Raises Failure where it knows of none."""
    known = getattr(context.framework, "rocm_version", None)
    if known is None:
        raise Failure(f"the suite knows no build of {context.expected.distribution} for ROCm")
    version, detail = known(context)
    return version, detail


def same_cuda(found: str, expected: str) -> bool:
    """`12` is met by every 12.x, `12.1` by 12.1 and 12.1.105, `12.1` not by `12`."""
    wanted = expected.split(".")
    return found.split(".")[: len(wanted)] == wanted
