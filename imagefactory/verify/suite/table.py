"""What the suite checks, and what cannot apply: data that the suite and its host both read.

A state `not-applicable` that these tables do not give is refused by the host: nothing is skipped
because an image says so.
"""

from __future__ import annotations

from collections.abc import Mapping

FORMAT = 1

PASSED, FAILED, NOT_APPLICABLE, NOT_RUN = "passed", "failed", "not-applicable", "not-run"
LOAD_FAILED, WRONG_NUMBERS = "load-failed", "wrong-numbers"

# The CPU-level checks in the order in which they run; each name is a row of checks/__init__.py.
CHECKS = ("packages", "libraries", "import", "cuda-version", "compute", "compiler", "unprivileged")

# What the second run does, as an ordinary user on a read-only root: `unprivileged` looks whether the
# run is what was asked for.
UNPRIVILEGED_CHECKS = ("unprivileged", "import", "compute")
UNPRIVILEGED_UID = 65534

# A distribution's name in the lock -> the file of frameworks/ that knows it.
FRAMEWORKS = {
    "torch": "torch",
    "tensorflow": "tensorflow",
    "jax": "jax",
    "onnxruntime-gpu": "onnxruntime",
}

# Checks that have no meaning for a framework, whatever its version.
CHECKS_NOT_APPLICABLE = {
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
}


def check_not_applicable(framework: str, check: str, packages: Mapping[str, str]) -> str:
    """Why `check` has no meaning for this framework and lock; empty when it has.

    `packages` maps locked names to versions. torch before 2.0 was made without Triton; jax and
    tensorflow compile with ptxas where it is locked, and with what the driver brings where it is not.
    """
    reason = CHECKS_NOT_APPLICABLE.get((framework, check), "")
    if reason or check != "compiler":
        return reason
    if (
        framework == "torch"
        and "triton" not in packages
        and packages.get("torch", "").startswith(("0.", "1."))
    ):
        return "torch before 2.0 has no Triton"
    if framework in ("jax", "tensorflow") and not any(
        name.startswith("nvidia-cuda-nvcc") for name in packages
    ):
        return "the lock holds no nvidia-cuda-nvcc, so there is no ptxas to try"
    return ""


def operation_not_applicable(framework: str, operation: str, kind: str) -> str:
    """Why the framework cannot do `operation` in the type `kind` on the CPU; empty when it must."""
    table = OPERATIONS_NOT_APPLICABLE
    return table.get((framework, operation, "")) or table.get((framework, operation, kind), "")
