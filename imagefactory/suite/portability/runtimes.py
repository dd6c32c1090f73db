"""The runtimes that can run a model, and which locks the portability check requires."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Runtime:
    """A file in this directory and its options. Each of the distributions in `brings` contains the runtime.

    `providers` are those of ONNX Runtime: nodes may run on each of them, and some must run on the first.
    `place` is where inputs and outputs are: `cuda` or `cpu`.
    """

    name: str
    module: str
    brings: tuple[str, ...]
    providers: tuple[str, ...] = ()
    place: str = "cpu"
    gpu: bool = False


_ONNX, _CUDA = "onnxruntime", "CUDAExecutionProvider"
# AMD's take their inputs from the host: their builds know no device named cuda.
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
    """Return why the check cannot apply to a file of frameworks/ and locked packages, empty if it can.

    It applies to a lock without the CUDA runtime, which comes from elsewhere.
    """
    if framework not in MAKERS:
        return f"the suite has models of its own for {' and '.join(MAKERS)}, not for {framework}"
    missing = [name for name in NEEDED if name not in packages]
    if missing:
        return f"the lock has no {' and no '.join(missing)}"
    version = packages["onnxruntime-gpu"]
    built = cuda_of_runtime(version)
    # PyPI's and conda's packages of CUDA's runtime, by major version.
    locked = sorted(
        {
            match[1] or number.partition(".")[0]
            for name, number in packages.items()
            if (match := _RUNTIME.fullmatch(name))
        }
    )
    if locked and built not in locked:
        return f"onnxruntime-gpu {version} is built for CUDA {built}, the lock has CUDA {', '.join(locked)}"
    return ""


def cuda_of_runtime(version: str) -> str:
    """Return the CUDA major version for which onnxruntime-gpu of that version on PyPI is built."""
    numbers = tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])
    return next(cuda for since, cuda in BUILT_FOR if numbers >= since)
