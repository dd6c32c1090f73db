"""The runtimes that a model can be moved to, and which locks the portability check needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Runtime:
    """A file of this folder with what it is asked for. `brings` are distributions any of which has it.

    `providers` are ONNX Runtime's: nodes may run on each of them, and the first must have run some. `place`
    is where inputs and outputs lie: `cuda`, or `cpu`.
    """

    name: str
    module: str
    brings: tuple[str, ...]
    providers: tuple[str, ...] = ()
    place: str = "cpu"
    gpu: bool = False


_ONNX, _CUDA = "onnxruntime", "CUDAExecutionProvider"
# AMD's take their inputs from the host: their builds know no device by the name of cuda.
_ROWS = (
    Runtime(
        "onnxruntime-cpu",
        _ONNX,
        ("onnxruntime", "onnxruntime-gpu", "onnxruntime-migraphx", "onnxruntime-rocm"),
        ("CPUExecutionProvider",),
    ),
    Runtime("onnxruntime-cuda", _ONNX, ("onnxruntime-gpu",), (_CUDA,), "cuda", gpu=True),
    Runtime(
        "onnxruntime-tensorrt",
        _ONNX,
        ("onnxruntime-gpu",),
        ("TensorrtExecutionProvider", _CUDA),
        "cuda",
        gpu=True,
    ),
    Runtime(
        "onnxruntime-migraphx", _ONNX, ("onnxruntime-migraphx",), ("MIGraphXExecutionProvider",), gpu=True
    ),
    Runtime("onnxruntime-rocm", _ONNX, ("onnxruntime-rocm",), ("ROCMExecutionProvider",), gpu=True),
    Runtime("openvino-cpu", "openvino", ("openvino",)),
    Runtime("tvm-cpu", "tvm", ("apache-tvm",)),
)
RUNTIMES = {row.name: row for row in _ROWS}


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
