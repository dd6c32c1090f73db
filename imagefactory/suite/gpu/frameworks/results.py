"""Results of frameworks: copies to the GPU and back, outcomes of errors, and versions of libraries."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...context import CheckFailure
from .. import table
from ..context import GpuContext


@dataclass(frozen=True)
class Transfer:
    """A copy to the GPU and back. `back` is the returned array, `up` and `down` are seconds.

    `pinned` means that its pages were locked.
    """

    back: Any
    up: float
    down: float
    pinned: bool


# Outcome -> messages of CUDA's runtime and driver, HIP, XLA and ONNX Runtime. 35, 100 and 209 are of
# `cudaError_t`; a driver mismatch is a libcuda that does not fit the kernel's module.
MESSAGES = (
    (
        table.DRIVER_TOO_OLD,
        r"driver version is insufficient|driver.{0,60} too old|INSUFFICIENT_DRIVER|"
        r"UNSUPPORTED_PTX_VERSION|unsupported toolchain|COMPAT_NOT_SUPPORTED_ON_DEVICE|"
        r"forward compatibility was attempted on non supported HW|"
        r"cudaErrorCallRequiresNewerDriver|"
        r"CUDA (?:failure|error):? 35\b",
    ),
    (
        table.INFRASTRUCTURE,
        r"SYSTEM_DRIVER_MISMATCH|unsupported display driver|SYSTEM_NOT_READY|system not yet initialized|"
        r"DEVICE_UNAVAILABLE|devices are busy or unavailable",
    ),
    (
        table.NO_KERNEL,
        r"no kernel image|NO_BINARY_FOR_GPU|INVALID_DEVICE_FUNCTION|invalid device function|"
        r"hipErrorNoBinaryForGpu|hipErrorSharedObjectInitFailed|INVALID_ISA|"
        r"JIT_COMPILATION_DISABLED|PTX JIT compilation was disabled|ARCH_MISMATCH|"
        r"CUDA (?:failure|error):? 209\b",
    ),
    (
        table.NO_GPU,
        r"no CUDA-capable device|CUDA_ERROR_NO_DEVICE|No CUDA GPUs are available|No CUDA devices? found|"
        r"no NVIDIA driver on your system|Could not satisfy device specification \S*GPU|"
        r"no ROCm-capable device|hipErrorNoDevice|No HIP GPUs are available|"
        r"Unknown backend:? '?(?:cuda|gpu|rocm)|CUDA (?:failure|error):? 100\b",
    ),
)

# From the first number on, the factor of the major version is the second, below it 1000 (NVIDIA's
# cudnn_version.h and nccl.h.in).
NUMBERS = {"cudnn": (90000, 10000), "nccl": (20900, 10000)}


def classify(error: BaseException) -> str:
    """Return the outcome for an exception, by its message and the messages of its causes."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        current = current.__cause__ or current.__context__
    text = "\n".join(f"{type(each).__name__}: {each}" for each in seen)
    for outcome, pattern in MESSAGES:
        if re.search(pattern, text, re.IGNORECASE):
            return outcome
    return table.LOAD_FAILED


def type_of(kind: str) -> str:
    return "float32" if kind == "tf32" else kind


def check_cuda_array(context: GpuContext, array: Any, kind: str, *, name: str) -> None:
    """Raise CheckFailure for an array on the wrong device or of the wrong number type."""
    on_gpu = hasattr(array, "__cuda_array_interface__")
    if on_gpu is context.rehearsal:
        raise CheckFailure(f"{name} computed on {'a GPU' if on_gpu else 'the CPU'}")
    if array.dtype != kind:
        raise CheckFailure(f"{name} computed in {array.dtype}, not in {kind}", outcome=table.WRONG_NUMBERS)


def version_of(library: str, number: int) -> str:
    """Return `9.1.0` for 90100, `8.5.0` for 8500; `2.20.5` for 22005, `2.8.4` for 2804."""
    limit, factor = NUMBERS[library]
    major = factor if number >= limit else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"
