"""PyTorch, with torchvision, torchaudio and what exports to and runs ONNX where they are locked."""

from __future__ import annotations

import importlib
from typing import Any

from ..context import CheckFailure, Context
from . import triton

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


def prepare() -> None:
    """torch needs nothing set."""


def _torch() -> Any:
    return importlib.import_module("torch")


def cuda_version(context: Context) -> tuple[str, str]:
    torch = _torch()
    if torch.version.cuda is None:
        raise CheckFailure(
            f"torch {torch.__version__} was built without CUDA: "
            f"lock the build for CUDA {context.expected.cuda}"
        )
    if not torch.backends.cuda.is_built():
        raise CheckFailure("torch names a CUDA version but was built without it")
    return torch.version.cuda, f"code for {' '.join(torch._C._cuda_getArchFlags().split())}"


def rocm_version(context: Context) -> tuple[str, str]:
    torch = _torch()
    if torch.version.hip is None:
        raise CheckFailure(
            f"torch {torch.__version__} was built without ROCm: "
            f"lock the build for ROCm {context.expected.rocm}"
        )
    return torch.version.hip, f"code for {' '.join(torch._C._cuda_getArchFlags().split())}"


def _tensor(values: object, kind: str) -> Any:
    torch = _torch()
    return torch.tensor(values, dtype=getattr(torch, kind))


def matmul(left: list[list[float]], right: list[list[float]], kind: str) -> Any:
    return (_tensor(left, kind) @ _tensor(right, kind)).double().tolist()


def total(values: list[float], kind: str) -> Any:
    return _tensor(values, kind).sum().tolist()


def convolution(image: object, filters: object, kind: str) -> Any:
    functional = importlib.import_module("torch.nn.functional")
    return functional.conv2d(_tensor(image, kind)[None], _tensor(filters, kind))[0].tolist()


def solve(square: list[list[float]], side: list[float], kind: str) -> Any:
    return _torch().linalg.solve(_tensor(square, kind), _tensor(side, kind)).tolist()


def gradient(left: list[list[float]], right: list[list[float]], kind: str) -> Any:
    weights = _tensor(right, kind).requires_grad_()
    ((_tensor(left, kind) @ weights / 64).tanh() ** 2).sum().backward()
    return weights.grad.tolist()


def compilers(context: Context, scratch: str) -> tuple[str, dict[str, float]]:
    return triton.compilers(context, scratch)
