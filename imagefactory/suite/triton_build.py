"""Build what Triton builds for its first kernel, as far as possible without a GPU.

Started as `python triton_build.py SCRATCH`, with TRITON_CACHE_DIR and TRITON_LIBCUDA_PATH set to SCRATCH. It
builds an empty libcuda to link with, Triton's driver module from C, and a kernel as GPU code. The result is
in SCRATCH/kernel.json. An exception means that Triton does not work.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import time
from typing import Any


def make_empty_libcuda(scratch: str, header: str) -> None:
    """Load a library with every name in `header` (cuda.h) as a function that returns CUDA_ERROR_UNKNOWN.

    The loader then uses it as the driver that Triton's modules need.
    """
    library = os.path.join(scratch, "libcuda.so.1")
    source = os.path.join(scratch, "empty.c")
    with open(header, encoding="utf-8") as file:
        names = sorted(set(re.findall(r"\bcu[A-Z]\w+", file.read())))
    with open(source, "w", encoding="utf-8") as file:
        file.writelines(f"int {name}(void) {{ return 999; }}\n" for name in names)
    compiler = os.environ.get("CC", "gcc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True
    )
    os.symlink("libcuda.so.1", os.path.join(scratch, "libcuda.so"))
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def find_header(folder: str, prefix: str) -> str:
    """Return the path of Triton's cuda.h, or that of the CUDA packages from conda in `prefix`."""
    places = [
        os.path.join(folder, place) for place in ("backends/nvidia/include", "third_party/cuda/include")
    ]
    places += [*glob.glob(os.path.join(prefix, "targets", "*", "include")), os.path.join(prefix, "include")]
    for place in places:
        path = os.path.join(place, "cuda.h")
        if os.path.exists(path):
            return path
    raise FileNotFoundError("cuda.h is neither in triton nor in the image's CUDA packages")


def compile_driver(scratch: str) -> None:
    """Let Triton compile a C module against Python.h and import it."""
    if driver := find_module("triton.backends.nvidia.driver"):  # from 3.0 on
        driver.CudaUtils()
    elif driver := find_module("triton.runtime.driver"):  # 2.1 to 2.3, which ask torch for a GPU first
        # 2.1 knows no variable for the folder of libcuda.
        build: Any = importlib.import_module("triton.common.build")
        build.libcuda_dirs = lambda: [scratch]
        driver.driver._obj = driver.CudaDriver()
    else:  # 2.0 has all of it in one file
        compiler: Any = importlib.import_module("triton.compiler")
        compiler.libcuda_dirs = lambda: [scratch]
        compiler.CudaUtils()


def find_module(name: str) -> Any:
    """Return a module of Triton, None if this version does not have it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        return None


def compile_kernel(triton: Any) -> int:
    """Compile the kernel for sm_80. Return its size in bytes. The interface differs between versions."""
    kernel = importlib.import_module("imagefactory_suite.triton_kernel").add
    types = {"x": "*fp32", "y": "*fp32", "z": "*fp32", "count": "i32"}
    numbered = dict(enumerate(types.values()))
    source = getattr(importlib.import_module("triton.compiler"), "ASTSource", None)
    backends = find_module("triton.backends.compiler")
    gpu = backends.GPUTarget("cuda", 80, 32) if backends else ("cuda", 80)  # 2.x
    if source is None:  # 2.0 and 2.1
        compiled = triton.compile(kernel, signature=numbered, constants={4: 128}, cc=80)
    elif isinstance(gpu, tuple):  # 2.2 and 2.3
        compiled = triton.compile(source(fn=kernel, signature=numbered, constants={4: 128}), target=gpu)
    elif "constexprs" in inspect.signature(source.__init__).parameters:  # from 3.3 on
        named = {**types, "BLOCK": "constexpr"}
        compiled = triton.compile(source(fn=kernel, signature=named, constexprs={"BLOCK": 128}), target=gpu)
    else:  # 3.0 to 3.2, of which the last takes no numbers
        compiled = triton.compile(source(fn=kernel, signature=types, constants={"BLOCK": 128}), target=gpu)
    code = compiled.asm["cubin"]
    if code[:4] != b"\x7fELF":
        raise RuntimeError("the compiled Triton kernel is not GPU code")
    return len(code)


def main(scratch: str) -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    runpy.run_path(os.path.join(folder, "smoke.py"))["load_suite"](folder)
    began = time.monotonic()
    triton = importlib.import_module("triton")
    make_empty_libcuda(scratch, find_header(os.path.dirname(str(triton.__file__)), sys.prefix))
    compile_driver(scratch)
    size = compile_kernel(triton)
    gcc = subprocess.run(
        [os.environ.get("CC", "gcc"), "--version"], check=True, capture_output=True, text=True
    )
    result = {
        "version": triton.__version__,
        "compiler": gcc.stdout.splitlines()[0],
        "cubin": size,
        "seconds": round(time.monotonic() - began, 3),
    }
    with open(os.path.join(scratch, "kernel.json"), "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(sys.argv[1])
