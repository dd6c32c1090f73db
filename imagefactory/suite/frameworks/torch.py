"""PyTorch, with torchvision, torchaudio and the packages for ONNX if they are locked."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from typing import Any

from .. import table
from ..context import CheckFailure, Context, LazyModule
from . import ptxas

MODULES = (
    ("torch", "torch"),
    ("pytorch", "torch"),
    ("pytorch-gpu", "torch"),
    ("torchvision", "torchvision"),
    ("torchaudio", "torchaudio"),
    ("onnx", "onnx"),
    ("onnxscript", "onnxscript"),
    ("onnxruntime-gpu", "onnxruntime"),
)
SECONDS = 300.0
LDCONFIG = "/sbin/ldconfig"
SCRIPT = "triton_build.py"

torch: Any = LazyModule("torch")
functional: Any = LazyModule("torch.nn.functional")


def cuda_version(context: Context) -> tuple[str, str]:
    if torch.version.cuda is None:
        raise CheckFailure(
            f"torch {torch.__version__} was built without CUDA: "
            f"lock the build for CUDA {context.expected.cuda}"
        )
    if not torch.backends.cuda.is_built():
        raise CheckFailure("torch names a CUDA version but was built without it")
    return torch.version.cuda, f"code for {' '.join(torch._C._cuda_getArchFlags().split())}"


def rocm_version(context: Context) -> tuple[str, str]:
    if torch.version.hip is None:
        raise CheckFailure(
            f"torch {torch.__version__} was built without ROCm: "
            f"lock the build for ROCm {context.expected.rocm}"
        )
    return torch.version.hip, f"code for {' '.join(torch._C._cuda_getArchFlags().split())}"


def _tensor(values: object, kind: str) -> Any:
    return torch.tensor(values, dtype=getattr(torch, kind))


def matmul(matrix: list[list[float]], right: list[list[float]], kind: str) -> Any:
    return (_tensor(matrix, kind) @ _tensor(right, kind)).double().tolist()


def total(values: list[float], kind: str) -> Any:
    return _tensor(values, kind).sum().tolist()


def convolution(image: object, filters: object, kind: str) -> Any:
    return functional.conv2d(_tensor(image, kind)[None], _tensor(filters, kind))[0].tolist()


def solve(square: list[list[float]], side: list[float], kind: str) -> Any:
    return torch.linalg.solve(_tensor(square, kind), _tensor(side, kind)).tolist()


def gradient(inputs: list[list[float]], right: list[list[float]], kind: str) -> Any:
    weights = _tensor(right, kind).requires_grad_()
    ((_tensor(inputs, kind) @ weights / 64).tanh() ** 2).sum().backward()
    return weights.grad.tolist()


def compilers(context: Context, scratch: str) -> tuple[str, dict[str, float]]:
    """Test Triton, which torch.compile uses: its C compiler, its assembler, and a kernel for sm_80.

    It runs in a separate process: linking Triton's launcher without a driver requires an empty libcuda, which
    no other check may load.
    """
    if not context.expected.locked.keys() & set(table.TRITON):
        raise CheckFailure("the lock has no triton, which torch.compile needs")
    if not os.access(LDCONFIG, os.X_OK):
        raise CheckFailure(f"there is no {LDCONFIG}, by which triton finds the driver")
    patterns = ("backends/nvidia/bin/ptxas", "third_party/cuda/bin/ptxas")
    programs = [path for name in patterns for path in glob.glob(os.path.join(context.site, "triton", name))]
    programs += ptxas.find_programs(context, "ptxas")  # conda's Triton takes that of cuda-nvcc
    if not programs:
        raise CheckFailure("triton has no ptxas of its own in a place this suite knows, nor is there another")
    assembler = ptxas.try_ptxas(programs[0], scratch)
    script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), SCRIPT)
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-B", script, scratch],
            capture_output=True,
            timeout=SECONDS,
            text=True,
            errors="replace",
            env={**os.environ, "TRITON_CACHE_DIR": scratch, "TRITON_LIBCUDA_PATH": scratch},
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailure(f"triton did not make a kernel in {SECONDS:.0f} s") from error
    path = os.path.join(scratch, "kernel.json")
    if process.returncode != 0 or not os.path.exists(path):
        reason = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckFailure(f"triton cannot compile (exit code {process.returncode}): {reason}")
    with open(path, encoding="utf-8") as file:
        kernel = json.load(file)
    detail = f"triton {kernel['version']} with {kernel['compiler']}, {assembler}"
    size = kernel["cubin"]
    return f"{detail}, kernel for sm_80 of {size} bytes", {"cubin-bytes": size, "seconds": kernel["seconds"]}
