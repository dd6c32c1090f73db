"""`cuda-version`: the framework was made for the recipe's CUDA and brings its GPU part along."""

from __future__ import annotations

from ..context import Context, Failure, Finding


def check(context: Context) -> Finding:
    context.framework.prepare()
    version, detail = context.framework.cuda_version(context)
    expected = context.expected.cuda
    if not same_cuda(version, expected):
        raise Failure(f"made for CUDA {version}, the recipe says {expected}")
    major, _, minor = version.partition(".")
    numbers = {"major": float(major)}
    if minor:
        numbers["minor"] = float(minor.partition(".")[0])
    return Finding(f"CUDA {version}{f' ({detail})' if detail else ''}", numbers)


def same_cuda(found: str, expected: str) -> bool:
    """`12` is met by every 12.x, `12.1` by 12.1 and 12.1.105, `12.1` not by `12`."""
    wanted = expected.split(".")
    return found.split(".")[: len(wanted)] == wanted
