"""Whether a lock holds what the portability check needs: data and a rule for both sides."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Frameworks in which the suite has models of its own (`torch_models.py`).
MAKERS = ("torch",)

NEEDED = ("onnx", "onnxruntime-gpu")

# From which version on PyPI's onnxruntime-gpu is built for which CUDA, the newest first.
BUILT_FOR = (((1, 28), "13"), ((1, 19), "12"), ((1, 0), "11"))

_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu([0-9]+))?|cuda-cudart|cudatoolkit")


def not_portable(framework: str, packages: Mapping[str, str]) -> str:
    """Why the check has no meaning for a file of frameworks/ and locked packages; empty when it has.

    A lock without CUDA's runtime has it from elsewhere, and is tried.
    """
    if framework not in MAKERS:
        return f"the suite has models of its own for {' and '.join(MAKERS)}, not for {framework}"
    missing = [name for name in NEEDED if name not in packages]
    if missing:
        return f"the lock holds no {' and no '.join(missing)}"
    version = packages["onnxruntime-gpu"]
    built, locked = cuda_of_runtime(version), cuda_of(packages)
    if locked and built not in locked:
        return f"onnxruntime-gpu {version} is built for CUDA {built}, the lock holds CUDA {', '.join(locked)}"
    return ""


def cuda_of_runtime(version: str) -> str:
    """The major version of CUDA that PyPI's onnxruntime-gpu of that version is built for."""
    found = tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])
    return next(cuda for since, cuda in BUILT_FOR if found >= since)


def cuda_of(packages: Mapping[str, str]) -> list[str]:
    """The major versions of CUDA's runtime in a lock, PyPI's and conda's packages of it."""
    return sorted(
        {
            match[1] or version.partition(".")[0]
            for name, version in packages.items()
            if (match := _RUNTIME.fullmatch(name))
        }
    )
