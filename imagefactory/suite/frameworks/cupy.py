"""CuPy. It computes only on GPUs, but its compiler can be tested without one."""

from __future__ import annotations

import importlib
from typing import Any

from ..context import CheckFailure, Context

MODULES = (("cupy-cuda12x", "cupy"), ("cupy-cuda13x", "cupy"))

# CUDA libraries that cuda-pathfinder finds at their first use.
LIBRARIES = ("cublas", "cufft", "curand", "cusolver", "cusparse")
SOURCE = """
extern "C" __global__ void twice(const float* values, float* out, int count) {
    int place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place < count) out[place] = values[place] + values[place];
}
"""


def _nvrtc() -> Any:
    importlib.import_module("cupy")  # which loads the library first
    return importlib.import_module("cupy_backends.cuda.libs.nvrtc")


def cuda_version(context: Context) -> tuple[str, str]:  # noqa: ARG001
    """Return the CUDA toolkit that CuPy was built with.

    NVRTC must have its major version, and all libraries must load.
    """
    number = importlib.import_module("cupy_backends.cuda.api.driver").get_build_version()  # 12090 is 12.9
    if not number:
        raise CheckFailure("cupy was built without CUDA: lock cupy-cuda12x or cupy-cuda13x")
    major, minor = _nvrtc().getVersion()
    if major != number // 1000:
        raise CheckFailure(f"cupy was made for CUDA {number // 1000}, NVRTC is of {major}")
    finder = importlib.import_module("cuda.pathfinder")
    for name in LIBRARIES:
        finder.load_nvidia_dynamic_lib(name)  # as CuPy does
    return f"{number // 1000}.{number % 1000 // 10}", f"NVRTC {major}.{minor}, {', '.join(LIBRARIES)} load"


def compilers(context: Context, scratch: str) -> tuple[str, dict[str, float]]:  # noqa: ARG001
    """Compile a kernel to machine code with NVRTC, as CuPy does at run time."""
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(SOURCE, "twice.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-arch=sm_80",))
        code = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    if code[:4] != b"\x7fELF":
        raise CheckFailure("NVRTC made no GPU code")
    version = ".".join(map(str, nvrtc.getVersion()))
    return f"NVRTC {version}, kernel for sm_80 of {len(code)} bytes", {"cubin-bytes": len(code)}
