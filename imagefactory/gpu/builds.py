"""The GPU platform of a build, from a target's `cuda` or a conda package's build string."""

from __future__ import annotations

import re

from imagefactory.model import NO_CUDA

ROCM = "rocm"
"""The prefix of ROCm versions in a target's `cuda`."""
_CUDA_BUILD = re.compile(r"(?:^|_)cu(?:da)?([0-9]+(?:\.[0-9]+)*)")
_CPU_BUILD = re.compile(r"(?:^|_)cpu|^(?:mkl|eigen|nocuda)")


def built_for(build: str) -> str:
    """Return the platform in a build string: a CUDA version (`12.1`, `12`), `cpu`, or "".

    `py3.11_cuda12.1_cudnn8.9.2_0` is from the pytorch channel, `cuda126_py312h1763f6d_306` and
    `cpu_mkl_py312hf462abe_109` from conda-forge, `mkl_py311h...` and `eigen_py311h...` from Anaconda.
    """
    match = _CUDA_BUILD.search(build)
    if not match:
        return "cpu" if _CPU_BUILD.search(build) else ""
    if "." in match[1]:
        return minor_version(match[1])
    major = 1 if match[1][0] != "1" else 2  # 92 is 9.2, 126 is 12.6, 12 is 12
    return ".".join(part for part in (match[1][:major], match[1][major:]) if part)


def rocm_of(cuda: str) -> str:
    """Return the ROCm version (`7`) in the `cuda` of a target for AMD GPUs (`rocm7`), empty for other
    targets.
    """
    return cuda.removeprefix(ROCM) if cuda.startswith(ROCM) else ""


def platform_of(cuda: str) -> str:
    """Return the name of the platform for messages: `CUDA 12.1`, `ROCm 7`, `CPUs`."""
    rocm = rocm_of(cuda)
    return f"ROCm {rocm}" if rocm else "CPUs" if cuda == NO_CUDA else f"CUDA {cuda}"


def minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])
