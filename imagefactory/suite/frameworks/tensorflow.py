"""TensorFlow."""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..context import CheckFailure, Context
from . import ptxas

MODULES = (
    ("tensorflow", "tensorflow"),
    ("tensorflow-cpu", "tensorflow"),
    ("tensorflow-gpu", "tensorflow"),
    ("tensorflow-rocm", "tensorflow"),
    ("keras", "keras"),
)


def prepare() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _tensorflow() -> Any:
    return importlib.import_module("tensorflow")


def cuda_version(context: Context) -> tuple[str, str]:
    build = _tensorflow().sysconfig.get_build_info()
    if not build.get("is_cuda_build"):
        raise CheckFailure(
            f"tensorflow was built without CUDA: lock its build for CUDA {context.expected.cuda} "
            "(tensorflow[and-cuda], or conda's build string *cuda*)"
        )
    code = " ".join(build.get("cuda_compute_capabilities", ()))
    return build["cuda_version"], f"cuDNN {build.get('cudnn_version')}, code for {code}"


def rocm_version(context: Context) -> tuple[str, str]:
    build = _tensorflow().sysconfig.get_build_info()
    if not build.get("is_rocm_build"):
        raise CheckFailure(
            f"tensorflow was built without ROCm: lock its build for ROCm {context.expected.rocm}"
        )
    return build["rocm_version"], ""


def _tensor(values: object, kind: str) -> Any:
    return _tensorflow().constant(values, dtype=kind)


def _list(tensor: Any) -> Any:
    return _tensorflow().cast(tensor, "float64").numpy().tolist()


def matmul(left: list[list[float]], right: list[list[float]], kind: str) -> Any:
    return _list(_tensorflow().linalg.matmul(_tensor(left, kind), _tensor(right, kind)))


def total(values: list[float], kind: str) -> Any:
    return _list(_tensorflow().reduce_sum(_tensor(values, kind)))


def convolution(image: object, filters: object, kind: str) -> Any:
    """TensorFlow's CPU kernel wants channels last: [y][x][channel] and [y][x][channel][filter]."""
    tf = _tensorflow()
    pixels = tf.transpose(_tensor(image, kind), (1, 2, 0))[None]
    kernel = tf.transpose(_tensor(filters, kind), (2, 3, 1, 0))
    return _list(tf.transpose(tf.nn.conv2d(pixels, kernel, 1, "VALID")[0], (2, 0, 1)))


def solve(square: list[list[float]], side: list[float], kind: str) -> Any:
    column = [[value] for value in side]
    return _list(_tensorflow().linalg.solve(_tensor(square, kind), _tensor(column, kind)))


def gradient(left: list[list[float]], right: list[list[float]], kind: str) -> Any:
    tf = _tensorflow()
    weights = tf.Variable(_tensor(right, kind))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.tanh(tf.linalg.matmul(_tensor(left, kind), weights) / 64) ** 2)
    return _list(tape.gradient(loss, weights))


def compilers(context: Context, scratch: str) -> tuple[str, dict[str, float]]:
    return ptxas.compilers(context, scratch)
