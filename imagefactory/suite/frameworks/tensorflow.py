"""TensorFlow."""

from __future__ import annotations

import os
from typing import Any

from ..context import CheckFailure, Context, LazyModule
from .ptxas import compilers as compilers

MODULES = (
    ("tensorflow", "tensorflow"),
    ("tensorflow-cpu", "tensorflow"),
    ("tensorflow-gpu", "tensorflow"),
    ("tensorflow-rocm", "tensorflow"),
    ("keras", "keras"),
)

tf: Any = LazyModule("tensorflow")


def prepare() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def cuda_version(context: Context) -> tuple[str, str]:
    build = tf.sysconfig.get_build_info()
    if not build.get("is_cuda_build"):
        raise CheckFailure(
            f"tensorflow was built without CUDA: lock its build for CUDA {context.expected.cuda} "
            "(tensorflow[and-cuda], or conda's build string *cuda*)"
        )
    code = " ".join(build.get("cuda_compute_capabilities", ()))
    return build["cuda_version"], f"cuDNN {build.get('cudnn_version')}, code for {code}"


def rocm_version(context: Context) -> tuple[str, str]:
    build = tf.sysconfig.get_build_info()
    if not build.get("is_rocm_build"):
        raise CheckFailure(
            f"tensorflow was built without ROCm: lock its build for ROCm {context.expected.rocm}"
        )
    return build["rocm_version"], ""


def _tensor(values: object, kind: str) -> Any:
    return tf.constant(values, dtype=kind)


def _list(tensor: Any) -> Any:
    return tf.cast(tensor, "float64").numpy().tolist()


def matmul(matrix: list[list[float]], right: list[list[float]], kind: str) -> Any:
    return _list(tf.linalg.matmul(_tensor(matrix, kind), _tensor(right, kind)))


def total(values: list[float], kind: str) -> Any:
    return _list(tf.reduce_sum(_tensor(values, kind)))


def convolution(image: object, filters: object, kind: str) -> Any:
    """Convolve with channels last, as required by TensorFlow's CPU kernel: [y][x][channel] and
    [y][x][channel][filter].
    """
    pixels = tf.transpose(_tensor(image, kind), (1, 2, 0))[None]
    kernel = tf.transpose(_tensor(filters, kind), (2, 3, 1, 0))
    return _list(tf.transpose(tf.nn.conv2d(pixels, kernel, 1, "VALID")[0], (2, 0, 1)))


def solve(square: list[list[float]], side: list[float], kind: str) -> Any:
    return _list(tf.linalg.solve(_tensor(square, kind), _tensor([[value] for value in side], kind)))


def gradient(inputs: list[list[float]], right: list[list[float]], kind: str) -> Any:
    weights = tf.Variable(_tensor(right, kind))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.tanh(tf.linalg.matmul(_tensor(inputs, kind), weights) / 64) ** 2)
    return _list(tape.gradient(loss, weights))
