"""The checks of the suite, and those that cannot apply: data for the suite and the host.

The host rejects a state `not-applicable` that does not follow from these tables. So an image cannot skip a
check.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

FORMAT = 1

PASSED, FAILED, NOT_APPLICABLE, NOT_RUN = "passed", "failed", "not-applicable", "not-run"
LOAD_FAILED, WRONG_NUMBERS = "load-failed", "wrong-numbers"

# The CPU-level checks in the order in which they run; each name is a row of checks/__init__.py.
CHECKS = ("packages", "libraries", "import", "cuda-version", "compute", "compiler", "jupyter", "unprivileged")
# Checks that a recipe must name, because an image need not have what they look for.
ASKED_CHECKS = ("jupyter",)

# Checks of the second run, as an ordinary user on a read-only root. `unprivileged` checks that the run
# is as requested.
UNPRIVILEGED_CHECKS = ("unprivileged", "import", "compute")
UNPRIVILEGED_UID = 65534

# The CUDA version of an image for CPUs only.
NO_CUDA = "none"
# The prefix of the ROCm version, in its place, in an image for AMD GPUs.
ROCM = "rocm"

# A package's name in the lock, of PyPI or conda -> its file of frameworks/.
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
    "cupy-cuda13x": "cupy",
}

# Packages with Triton, and the prefixes of the names of those with ptxas, of PyPI and conda.
TRITON = ("triton", "torchtriton")
ASSEMBLER = ("nvidia-cuda-nvcc", "cuda-nvcc")

# The checks for every other package: it is complete, finds its libraries and loads.
OTHER = "other"
OTHER_CHECKS = ("packages", "libraries", "import", "unprivileged")

# Checks that do not apply to a framework, in any version.
CHECKS_NOT_APPLICABLE = {
    ("cupy", "compute"): "CuPy computes only on GPUs",
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
    """Return the likely module name of a package, derived from its name."""
    name = re.sub("-(gpu|cpu|rocm|cuda[0-9]+x)$", "", package.lower())
    return {"pytorch": "torch"}.get(name, name.replace("-", "_"))


def unprivileged_checks(framework: str, checks: Iterable[str]) -> tuple[str, ...]:
    """Return the checks of the second run for a framework and the checks in the recipe."""
    if framework != OTHER:
        return UNPRIVILEGED_CHECKS
    return ("unprivileged", *(("import",) if "import" in checks else ()))


def check_not_applicable(framework: str, check: str, packages: Mapping[str, str]) -> str:
    """Return why `check` does not apply to this framework and lock, empty if it does.

    `packages` maps locked names of wheels and conda packages to versions. torch before 2.0 has no Triton. jax
    and tensorflow compile with ptxas if it is locked, else with the compiler in the driver.
    """
    reason = CHECKS_NOT_APPLICABLE.get((framework, check), "")
    if reason or check != "compiler":
        return reason
    if framework == "torch" and not packages.keys() & set(TRITON):
        version = packages.get("torch") or packages.get("pytorch", "")
        return "torch before 2.0 has no Triton" if version.startswith(("0.", "1.")) else ""
    if framework in ("jax", "tensorflow") and not any(name.startswith(ASSEMBLER) for name in packages):
        return "the lock has no ptxas (nvidia-cuda-nvcc, or conda's cuda-nvcc), so there is none to test"
    return ""


def operation_not_applicable(framework: str, operation: str, kind: str) -> str:
    """Return why the framework lacks `operation` in the number type `kind` on the CPU, empty if it supports
    it.
    """
    table = OPERATIONS_NOT_APPLICABLE
    return table.get((framework, operation, "")) or table.get((framework, operation, kind), "")
