"""What the suite checks, and what cannot apply: data that the suite and its host both read.

A state `not-applicable` that these tables do not give is refused by the host: nothing is skipped
because an image says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

FORMAT = 1

PASSED, FAILED, NOT_APPLICABLE, NOT_RUN = "passed", "failed", "not-applicable", "not-run"
LOAD_FAILED, WRONG_NUMBERS = "load-failed", "wrong-numbers"

# The CPU-level checks in the order in which they run; each name is a row of checks/__init__.py.
CHECKS = ("packages", "libraries", "import", "cuda-version", "compute", "compiler", "jupyter", "unprivileged")
# Those that a recipe must name: no image need hold what they look for.
ASKED_CHECKS = ("jupyter",)

# What the second run does, as an ordinary user on a read-only root: `unprivileged` looks whether the
# run is what was asked for.
UNPRIVILEGED_CHECKS = ("unprivileged", "import", "compute")
UNPRIVILEGED_UID = 65534

# What stands for CUDA's version in an image for CPUs alone.
NO_CUDA = "none"
# What stands before ROCm's version in its place, in an image for AMD's GPUs.
ROCM = "rocm"

# A package's name in the lock, PyPI's or conda's -> the file of frameworks/ that knows it.
FRAMEWORKS = {
    "torch": "torch",
    "pytorch": "torch",
    "pytorch-gpu": "torch",
    "tensorflow": "tensorflow",
    "tensorflow-cpu": "tensorflow",
    "tensorflow-gpu": "tensorflow",
    "tensorflow-rocm": "tensorflow",
    "jax": "jax",
    "jaxlib": "jax",
    "onnxruntime": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime",
    "numba": "numba",
    "cupy-cuda12x": "cupy",
}

# Packages that bring Triton, and the beginnings of the names of those that bring ptxas: PyPI's, conda's.
TRITON = ("triton", "torchtriton")
ASSEMBLER = ("nvidia-cuda-nvcc", "cuda-nvcc")

# What of every other package can be asked: that it is there whole, finds its libraries and loads.
OTHER = "other"
OTHER_CHECKS = ("packages", "libraries", "import", "unprivileged")

# Checks that have no meaning for a framework, whatever its version.
CHECKS_NOT_APPLICABLE = {
    ("cupy", "compute"): "CuPy computes on GPUs alone",
    ("onnxruntime", "compiler"): "ONNX Runtime compiles nothing on the GPU: it has no Triton and no ptxas",
}

# The operations of `compute` and the types each runs in.
OPERATIONS = {
    "matmul": ("float64", "float32", "bfloat16"),
    "total": ("float64", "float32"),
    "convolution": ("float32",),
    "solve": ("float64", "float32"),
    "gradient": ("float64", "float32"),
}

# Operations, or one type of an operation, that a framework does not have on the CPU.
OPERATIONS_NOT_APPLICABLE = {
    ("onnxruntime", "solve", ""): "ONNX has no operator that solves linear systems",
    ("onnxruntime", "gradient", ""): "ONNX Runtime's inference package has no gradients",
    ("onnxruntime", "matmul", "bfloat16"): "ONNX Runtime's CPU provider has no bfloat16 MatMul",
    ("numba", "matmul", "bfloat16"): "Numba's CPU target has no bfloat16",
}


def module_of(package: str) -> str:
    """The module that a package is imported as, as far as its name tells."""
    name = re.sub("-(gpu|cpu|rocm)$", "", package.lower())
    return {"pytorch": "torch", "cupy-cuda12x": "cupy"}.get(name, name.replace("-", "_"))


def unprivileged_checks(framework: str, checks: Iterable[str]) -> tuple[str, ...]:
    """What the second run does for a file of frameworks/ and the recipe's checks."""
    if framework != OTHER:
        return UNPRIVILEGED_CHECKS
    return ("unprivileged", *(("import",) if "import" in checks else ()))


def check_not_applicable(framework: str, check: str, packages: Mapping[str, str]) -> str:
    """Why `check` has no meaning for this framework and lock; empty when it has.

    `packages` maps locked names, of wheels and of conda's packages, to versions. torch before 2.0 was made
    without Triton; jax and tensorflow compile with ptxas where it is locked, and with what the driver
    brings where it is not.
    """
    reason = CHECKS_NOT_APPLICABLE.get((framework, check), "")
    if reason or check != "compiler":
        return reason
    if framework == "torch" and not packages.keys() & set(TRITON):
        version = packages.get("torch") or packages.get("pytorch", "")
        return "torch before 2.0 has no Triton" if version.startswith(("0.", "1.")) else ""
    if framework in ("jax", "tensorflow") and not any(name.startswith(ASSEMBLER) for name in packages):
        return "the lock holds no ptxas (nvidia-cuda-nvcc, or conda's cuda-nvcc), so there is none to try"
    return ""


def operation_not_applicable(framework: str, operation: str, kind: str) -> str:
    """Why the framework cannot do `operation` in the type `kind` on the CPU; empty when it must."""
    table = OPERATIONS_NOT_APPLICABLE
    return table.get((framework, operation, "")) or table.get((framework, operation, kind), "")
