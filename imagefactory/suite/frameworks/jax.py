"""JAX with its plugin for CUDA or ROCm."""

from __future__ import annotations

import ctypes
import glob
import importlib
import importlib.metadata
import os
import re
from typing import Any

from ..context import CheckFailure, Context, LazyModule
from .ptxas import compilers as compilers

MODULES = (("jax", "jax"), ("jaxlib", "jaxlib"))
RUNTIME = re.compile(r"nvidia-cuda-runtime(-cu[0-9]+)?|cuda-cudart|cudatoolkit")
"""Names of packages with the CUDA runtime library, on PyPI and conda."""

jax: Any = LazyModule("jax")


def prepare() -> None:
    """Select the CPU by name.

    With the CUDA plugin and no driver, jax would print a warning and use the CPU anyway.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_X64"] = "1"


def cuda_version(context: Context) -> tuple[str, str]:
    """Return the CUDA runtime that jax's GPU code was compiled with. It must exist and load."""
    how = find_gpu_code(context)
    versions = importlib.import_module("jax._src.lib").cuda_versions
    if versions is None:
        raise CheckFailure(f"jaxlib does not find the CUDA kernels of its {how}: {_hint(context)}")
    number = versions.cuda_runtime_build_version()  # 12030 is 12.3
    locked = sorted(context.expected.locked.items())
    runtimes = [f"{package} {version}" for package, version in locked if RUNTIME.fullmatch(package)]
    if not runtimes:
        raise CheckFailure(f"the lock has no nvidia-cuda-runtime: {_hint(context)}")
    wrong = [runtime for runtime in runtimes if runtime.split()[1].partition(".")[0] != str(number // 1000)]
    if wrong:
        raise CheckFailure(f"the {how} was made for CUDA {number // 1000}, locked is {', '.join(wrong)}")
    return f"{number // 1000}.{number % 1000 // 10}", f"{how}, {', '.join(runtimes)}"


def rocm_version(context: Context) -> tuple[str, str]:
    """Return the ROCm version of jax's plugin, whose name has the major version. The plugin must load."""
    plugins = _plugins("rocm")
    if len(plugins) != 1:
        names = ", ".join(sorted(plugins.values())) or "none"
        raise CheckFailure(
            f"jax has one ROCm plugin or computes on the CPU, here it has {names}: {_hint(context)}"
        )
    (module_name, name), *_ = plugins.items()
    number = re.search(r"rocm([0-9])([0-9]?)$", name)
    if number is None:
        raise CheckFailure(f"the ROCm plugin {name} does not contain its ROCm version")
    load_all(module_name, name)
    return ".".join(filter(None, number.groups())), f"plugin {name}"


def _plugins(maker: str) -> dict[str, str]:
    points = importlib.metadata.entry_points(group="jax_plugins")
    return {point.value: point.name for point in points if maker in point.name}


def find_gpu_code(context: Context) -> str:
    """Load the libraries of jax's plugin, of which there must be one. Return its name."""
    plugins = _plugins("cuda")
    if not plugins and "jaxlib" in context.expected.conda:
        return "CUDA code of jaxlib"  # some builds of conda have no plugin
    if not plugins:
        raise CheckFailure(f"jax has no CUDA plugin, so it is a build for the CPU: {_hint(context)}")
    if len(plugins) > 1:
        raise CheckFailure(f"jax has more than one CUDA plugin: {', '.join(sorted(plugins.values()))}")
    (module_name, name), *_ = plugins.items()
    load_all(module_name, name)
    return f"plugin {name}"


def load_all(module_name: str, name: str) -> None:
    """Load the libraries of a plugin. Raises CheckFailure if it has none, OSError if one does not load."""
    folder = os.path.dirname(str(importlib.import_module(module_name).__file__))
    libraries = glob.glob(os.path.join(folder, "*.so"))
    if not libraries:
        raise CheckFailure(f"the plugin {name} has no library in {folder}")
    for library in libraries:
        ctypes.CDLL(library)


def _hint(context: Context) -> str:
    if context.expected.rocm:
        return f"install jax[rocm{context.expected.rocm.partition('.')[0]}-local]"
    if "jaxlib" in context.expected.conda:
        return f"lock jaxlib's build for CUDA {context.expected.cuda} (build string *cuda*)"
    return f"install jax[cuda{context.expected.cuda.partition('.')[0]}]"


def _array(values: object, kind: str) -> Any:
    return jax.numpy.array(values, dtype=kind)


def _list(array: Any) -> Any:
    """Return a result as lists. Raises CheckFailure if it was not computed on the CPU."""
    platforms = {device.platform for device in array.devices()}
    if platforms != {"cpu"}:
        raise CheckFailure(f"computed on {', '.join(sorted(platforms))}, not on the CPU")
    return array.astype("float64").tolist()


def matmul(matrix: list[list[float]], right: list[list[float]], kind: str) -> Any:
    return _list(_array(matrix, kind) @ _array(right, kind))


def total(values: list[float], kind: str) -> Any:
    return _list(_array(values, kind).sum())


def convolution(image: object, filters: object, kind: str) -> Any:
    return _list(jax.lax.conv(_array(image, kind)[None], _array(filters, kind), (1, 1), "VALID")[0])


def solve(square: list[list[float]], side: list[float], kind: str) -> Any:
    return _list(jax.numpy.linalg.solve(_array(square, kind), _array(side, kind)))


def gradient(inputs: list[list[float]], right: list[list[float]], kind: str) -> Any:
    """Return the gradient, also computed through jit to test the XLA compiler."""
    rows = _array(inputs, kind)

    def loss(weights: Any) -> Any:
        return (jax.numpy.tanh(rows @ weights / 64) ** 2).sum()

    return _list(jax.jit(jax.grad(loss))(_array(right, kind)))
