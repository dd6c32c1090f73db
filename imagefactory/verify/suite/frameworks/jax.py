"""JAX with its CUDA plugin."""

from __future__ import annotations

import ctypes
import glob
import importlib
import importlib.metadata
import os
from typing import Any

from ..context import Context, Failure
from . import ptxas

MODULES = (("jax", "jax"), ("jaxlib", "jaxlib"))


def prepare() -> None:
    """The CPU is asked for by name: with the CUDA plugin and no driver jax would warn and take it anyway."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_X64"] = "1"


def cuda_version(context: Context) -> tuple[str, str]:
    """The CUDA runtime that the plugin was compiled with; the plugin must be registered and load."""
    major = context.expected.cuda.partition(".")[0]
    plugins = {
        point.value: point.name
        for point in importlib.metadata.entry_points(group="jax_plugins")
        if "cuda" in point.name
    }
    if not plugins:
        raise Failure(f"jax has no CUDA plugin, so it is a build for the CPU: install jax[cuda{major}]")
    if len(plugins) > 1:
        raise Failure(f"jax has more than one CUDA plugin: {', '.join(sorted(plugins.values()))}")
    (module_name, name), *_ = plugins.items()
    folder = os.path.dirname(str(importlib.import_module(module_name).__file__))
    libraries = glob.glob(os.path.join(folder, "*.so"))
    if not libraries:
        raise Failure(f"the CUDA plugin {name} has no library in {folder}")
    for library in libraries:
        ctypes.CDLL(library)
    versions = importlib.import_module("jax._src.lib").cuda_versions
    if versions is None:
        raise Failure(f"jaxlib does not find the CUDA kernels of its plugin {name}: install jax[cuda{major}]")
    number = versions.cuda_runtime_build_version()  # 12030 is 12.3
    runtimes = [
        f"{package} {version}"
        for package, version in sorted(context.expected.packages.items())
        if package.startswith("nvidia-cuda-runtime")
    ]
    if not runtimes:
        raise Failure(f"the lock holds no nvidia-cuda-runtime: install jax[cuda{major}]")
    wrong = [runtime for runtime in runtimes if runtime.split()[1].partition(".")[0] != str(number // 1000)]
    if wrong:
        raise Failure(f"the plugin {name} was made for CUDA {number // 1000}, locked is {', '.join(wrong)}")
    return f"{number // 1000}.{number % 1000 // 10}", f"plugin {name}, {', '.join(runtimes)}"


def _array(values: object, kind: str) -> Any:
    return importlib.import_module("jax.numpy").array(values, dtype=kind)


def _list(array: Any) -> Any:
    """Refuses a result that came from elsewhere than the CPU."""
    platforms = {device.platform for device in array.devices()}
    if platforms != {"cpu"}:
        raise Failure(f"computed on {', '.join(sorted(platforms))}, not on the CPU")
    return array.astype("float64").tolist()


def matmul(left: list[list[float]], right: list[list[float]], kind: str) -> Any:
    return _list(_array(left, kind) @ _array(right, kind))


def total(values: list[float], kind: str) -> Any:
    return _list(_array(values, kind).sum())


def convolution(image: object, filters: object, kind: str) -> Any:
    lax = importlib.import_module("jax.lax")
    return _list(lax.conv(_array(image, kind)[None], _array(filters, kind), (1, 1), "VALID")[0])


def solve(square: list[list[float]], side: list[float], kind: str) -> Any:
    return _list(importlib.import_module("jax.numpy").linalg.solve(_array(square, kind), _array(side, kind)))


def gradient(left: list[list[float]], right: list[list[float]], kind: str) -> Any:
    """Through jit as well, so that XLA's own compiler is tried."""
    jax = importlib.import_module("jax")
    inputs = _array(left, kind)

    def loss(weights: Any) -> Any:
        return (jax.numpy.tanh(inputs @ weights / 64) ** 2).sum()

    return _list(jax.jit(jax.grad(loss))(_array(right, kind)))


def compilers(context: Context, scratch: str) -> tuple[str, dict[str, float]]:
    return ptxas.compilers(context, scratch)
