"""ONNX Runtime. Models are written byte by byte, because the lock does not have the package `onnx`."""

from __future__ import annotations

import ctypes
import fnmatch
import importlib
import os
from typing import Any

from .. import elf
from ..checks.libraries import DRIVER_LIBRARIES
from ..context import CheckFailure, Context, LazyModule
from ..onnx_model import Node, write_model

MODULES = (("onnxruntime-gpu", "onnxruntime"), ("onnxruntime", "onnxruntime"))
PROVIDER = "CUDAExecutionProvider"


runtime: Any = LazyModule("onnxruntime")


def cuda_version(context: Context) -> tuple[str, str]:
    """Return the CUDA version of the build. All libraries of its CUDA provider must load.

    Newer wheels contain their CUDA version (1.23 does, 1.18 does not). For the others, libcudart of the
    provider has the major version, and the locked runtime with that major version has the rest.
    """
    if PROVIDER not in runtime.get_available_providers():
        raise CheckFailure(f"onnxruntime has no {PROVIDER}: install onnxruntime-gpu without onnxruntime")
    folder = os.path.join(os.path.dirname(runtime.__file__), "capi")
    library = os.path.join(folder, "libonnxruntime_providers_cuda.so")
    if not os.path.exists(library):
        raise CheckFailure(f"{PROVIDER} is named but its library is not there: {library}")
    provider = elf.read_dynamic(library)
    if provider is None:
        raise CheckFailure(f"{library} is not a shared library")
    how = load_needed(provider)
    try:
        version = importlib.import_module("onnxruntime.capi.build_and_package_info").cuda_version
    except ImportError:
        version = _runtime_version(provider, context)
        # Measured with 1.18.1: it dies by a segmentation fault when it meets no driver.
        how += "; a build as old as this does not say its CUDA (the runtime's is taken) "
        how += "and cannot load its provider without a driver"
    else:
        if any(_of_driver(name) for name in provider.needed):
            how += ", its provider needs the driver to load"
        else:
            load_provider(library)
    return str(version), how


def load_needed(provider: elf.Dynamic) -> str:
    """Load the libraries that the provider needs, except the driver. Return how they were found."""
    needed = [name for name in provider.needed if not _of_driver(name)]
    try:
        for name in needed:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        return "CUDA libraries found by the loader"
    except OSError as error:
        if not hasattr(runtime, "preload_dlls"):
            raise CheckFailure(
                f"the CUDA provider cannot load: {error}; lock the nvidia packages and put their directories "
                "in LD_LIBRARY_PATH"
            ) from error
    runtime.preload_dlls()
    for name in needed:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise CheckFailure(
                f"the CUDA provider cannot load, even after preload_dlls(): {error}; install "
                "onnxruntime-gpu[cuda,cudnn]"
            ) from error
    return "CUDA libraries found after onnxruntime.preload_dlls()"


def load_provider(library: str) -> None:
    """Let ONNX Runtime load its provider, which other programs cannot load.

    Without a GPU, it stops after that.
    """
    model = _model("MatMul", 2, kind="float32", a=2, b=2)
    reason = "ONNX Runtime does not say why"
    try:
        runtime.InferenceSession(model, providers=[PROVIDER])
    except Exception as error:  # its own classes have no common name over the versions
        reason = str(error)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        if os.path.realpath(library) not in maps.read():
            raise CheckFailure(f"ONNX Runtime does not load {os.path.basename(library)}: {reason}")


def _of_driver(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in DRIVER_LIBRARIES)


def _runtime_version(provider: elf.Dynamic, context: Context) -> str:
    for name in provider.needed:
        if name.startswith("libcudart.so."):
            major = name.removeprefix("libcudart.so.").partition(".")[0]
            return context.expected.packages.get(f"nvidia-cuda-runtime-cu{major}", major)
    raise CheckFailure("the CUDA provider names no libcudart, so its CUDA version is not known")


def _model(operator: str, rank: int, *, kind: str, **inputs: int) -> bytes:
    return write_model((Node(operator, tuple(inputs), "y"),), inputs, rank, kind=kind)


def _run(model: bytes, inputs: dict[str, object], kind: str) -> Any:
    numpy: Any = importlib.import_module("numpy")
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    if session.get_providers() != ["CPUExecutionProvider"]:
        raise CheckFailure(f"asked for the CPU, got {session.get_providers()}")
    feed = {name: numpy.array(value, dtype=kind) for name, value in inputs.items()}
    return session.run(None, feed)[0].astype("float64").tolist()


def matmul(matrix: list[list[float]], right: list[list[float]], kind: str) -> Any:
    return _run(_model("MatMul", 2, kind=kind, a=2, b=2), {"a": matrix, "b": right}, kind)


def total(values: list[float], kind: str) -> Any:
    return _run(_model("ReduceSum", 1, kind=kind, a=1), {"a": values}, kind)


def convolution(image: object, filters: object, kind: str) -> Any:
    return _run(_model("Conv", 4, kind=kind, x=4, w=4), {"x": [image], "w": filters}, kind)[0]
