"""The checks of the GPU suite by part and level, and the checks that cannot apply: data for suite and host.

A part is a process. So a crash, a hang, or an environment that must be set before CUDA starts affects only
that part. The host rejects a state `not-applicable` that does not follow from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from .. import table
from ..portability.runtimes import not_portable

FORMAT = 1

PASSED, FAILED, NOT_APPLICABLE, NOT_RUN = table.PASSED, table.FAILED, table.NOT_APPLICABLE, table.NOT_RUN

# The outcomes of a failed check. All others are the host's.
NO_GPU, WRONG_GPU, DRIVER_TOO_OLD = "no-gpu", "wrong-gpu", "driver-too-old"
NO_KERNEL, WRONG_NUMBERS, LOAD_FAILED, TIMEOUT = "no-kernel", "wrong-numbers", "load-failed", "timeout"
# The machine's fault: a GPU in use by others, two halves of a driver that differ.
INFRASTRUCTURE = "infrastructure"
OUTCOMES = (NO_GPU, WRONG_GPU, DRIVER_TOO_OLD, NO_KERNEL, WRONG_NUMBERS, LOAD_FAILED, TIMEOUT, INFRASTRUCTURE)

QUICK, FULL, SEVERAL, NODE, NODES = "quick", "full", "several", "node", "nodes"

# Part -> its checks, both in the order in which they run.
PARTS = {
    # The driver's library alone, by ctypes: no framework.
    "driver": ("driver", "device", "vector-add", "memory-returned", "driver-controls"),
    # The framework with the driver's compiler for PTX switched off, then with all machine code skipped.
    "native": ("native-code",),
    "ptx": ("ptx-code",),
    "numbers": (
        "matmul",
        "reduction",
        "convolution",
        "linear-algebra",
        "transfers",
        "collective",
        "library-versions",
        "training",
        "numbers-controls",
        "memory",
    ),
    "jit": ("jit",),
    "portability": ("portability",),
    "profile": ("profile",),
    # All visible GPUs of one capability, a process for each.
    "several": ("gpus", "peer-to-peer", "all-reduce", "transport", "data-parallel"),
    # A GPU of each node of a job.
    "nodes": ("nodes",),
}
# Variables that the driver reads at start (CUDA C++ Programming Guide, "CUDA Environment Variables"). The
# image's own settings of JIT_VARIABLES are removed from every part first. Loading is lazy in `ptx`, or a
# framework would compile all of its code before its first operation.
JIT_VARIABLES = (
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_DISABLE_JIT",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_FORCE_JIT",
    "CUDA_CACHE_DISABLE",
)
PART_ENVIRONMENT = {
    "driver": {"CUDA_CACHE_DISABLE": "1"},
    "native": {"CUDA_DISABLE_PTX_JIT": "1"},
    "ptx": {"CUDA_FORCE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1", "CUDA_MODULE_LOADING": "LAZY"},
    # Framework and runtime compute float32 as such, whatever their own settings for it are.
    "portability": {"NVIDIA_TF32_OVERRIDE": "0"},
}
# Parts in which each check needs the one before it.
CHAINED = ("driver",)
LEVELS = {
    QUICK: ("driver", "native", "ptx", "numbers", "jit"),
    FULL: ("driver", "native", "ptx", "numbers", "jit", "portability", "profile"),
    SEVERAL: ("driver", "several"),
    NODE: ("driver", "numbers"),
    NODES: ("driver", "nodes"),
}
# Seconds after which a part is ended, by level: several times those of a slow start, to end a hang.
SECONDS = {QUICK: 240.0, FULL: 420.0, SEVERAL: 420.0, NODE: 40.0, NODES: 900.0}

CHECKS = tuple(check for checks in PARTS.values() for check in checks)

# Checks that need a framework the suite knows.
OF_FRAMEWORKS = tuple(check for part, checks in PARTS.items() if part != "driver" for check in checks)

# (file of frameworks/, check) -> why it does not apply.
CHECKS_NOT_APPLICABLE = {
    # XLA compiles each program in the process and loads it as machine code. A driver that must skip machine
    # code rejects it, even if the plugin's library has PTX.
    ("jax", "ptx-code"): "XLA hands the driver machine code that it made itself, no PTX",
    ("onnxruntime", "linear-algebra"): "ONNX has no operators that factorise or solve",
    ("onnxruntime", "training"): "ONNX Runtime's inference package does not train",
    ("onnxruntime", "collective"): "ONNX Runtime uses one GPU and no NCCL",
    ("onnxruntime", "jit"): "ONNX Runtime compiles nothing at run time",
    ("numba", "ptx-code"): "Numba links its PTX to machine code itself and hands that to the driver",
    ("numba", "linear-algebra"): "Numba brings no functions that factorise or solve on a GPU",
    ("numba", "collective"): "Numba uses one GPU and no NCCL",
    ("numba", "library-versions"): "Numba uses neither cuDNN nor NCCL",
    ("cupy", "ptx-code"): "CuPy has NVRTC make machine code, and hands that to the driver",
}

# check -> why it does not apply to AMD GPUs.
ROCM_NOT_APPLICABLE = {
    "ptx-code": "AMD's GPUs have no PTX: code is for a processor or it is not",
    "collective": "the suite knows NCCL, and ROCm has RCCL",
    "library-versions": "cuDNN and NCCL are NVIDIA's",
    "portability": "the suite supports only ONNX Runtime for CUDA",
    "profile": "the emulation supports only NVIDIA GPUs",
    **dict.fromkeys((*PARTS["several"], *PARTS["nodes"]), "the suite knows NCCL, and ROCm has RCCL"),
}

# The only framework of the parts `profile`, `several` and `nodes`, and why they do not apply to the others.
TORCH, NOT_SEVERAL = "torch", "on several GPUs the suite supports only PyTorch"
NOT_PROFILED = "a GPU is profiled by PyTorch, for which it is emulated"

# CuPy uses NCCL if it is locked. It has not used cuDNN since 14.
NCCL, NO_NCCL = "nvidia-nccl", "the lock has no NCCL (nvidia-nccl-cu12), which CuPy uses if it is locked"


def checks_of(level: str) -> tuple[str, ...]:
    """Return the checks of a level, in order."""
    return tuple(check for part in LEVELS[level] for check in PARTS[part])


def part_of(check: str) -> str:
    return next(part for part, checks in PARTS.items() if check in checks)


def is_rocm(packages: Mapping[str, str]) -> bool:
    """Return whether a lock has builds for AMD GPUs, by a name (`jax-rocm7-plugin`) or a local version."""
    return any(
        "-rocm" in name or name.endswith("-migraphx") or "+rocm" in version
        for name, version in packages.items()
    )


def not_applicable(framework: str, check: str, packages: Mapping[str, str]) -> str:
    """Return why `check` does not apply to this framework and lock, empty if it does.

    `packages` maps locked names of wheels and conda packages to versions.
    """
    if framework == table.OTHER:
        return "no framework of the suite is in this image" if check in OF_FRAMEWORKS else ""
    if reason := ROCM_NOT_APPLICABLE.get(check) if is_rocm(packages) else None:
        return reason
    if check == "profile" and framework != TORCH:
        return NOT_PROFILED
    if check in (*PARTS["several"], *PARTS["nodes"]) and framework != TORCH:
        return NOT_SEVERAL
    if check == "portability":
        return not_portable(framework, packages)
    if framework == "cupy" and check in ("collective", "library-versions"):
        return "" if any(name.startswith(NCCL) for name in packages) else NO_NCCL
    return CHECKS_NOT_APPLICABLE.get((framework, check), "")
