"""TensorFlow."""

from __future__ import annotations

import gc
import importlib
import os
import time
from typing import Any

from ...context import CheckFailure, Finding
from .. import reference, table
from ..context import GpuContext
from . import nccl, results
from .probe import run_probe
from .results import Transfer

KINDS = ("float32", "tf32", "float16", "bfloat16")
CPU_LACKS = ("float16",)
"""Up to 2.15 its CPU adds up products of float16 in float16."""


def prepare(context: GpuContext) -> None:
    """Memory as it is needed, or a GPU is taken whole; in a rehearsal no GPU is looked for."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    if context.asked.rehearsal:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def classify(error: BaseException) -> str:
    return results.classify(error)


def _tensorflow() -> Any:
    """An operation without a kernel for the GPU is an error, never one for the CPU."""
    tf = importlib.import_module("tensorflow")
    if tf.config.get_soft_device_placement():
        tf.config.set_soft_device_placement(False)
    return tf


def _device(context: GpuContext) -> str:
    return "CPU:0" if context.asked.rehearsal else "GPU:0"


def _tensor(context: GpuContext, values: Any, kind: str) -> Any:
    """Rounded by the CPU, so that the copy is all the GPU did."""
    tf = _tensorflow()
    with tf.device("CPU:0"):
        here = tf.cast(tf.constant(values), _type(kind))
    with tf.device(_device(context)):
        return tf.identity(here)


def _type(kind: str) -> str:
    return "float32" if kind == "tf32" else kind


def on_cpu(values: Any, kind: str) -> Any:
    tf = _tensorflow()
    with tf.device("CPU:0"):
        return tf.identity(tf.constant(values, dtype=_type(kind)))


def fetch(context: GpuContext, array: Any, kind: str) -> Any:
    """`device` is where it was computed, `backing_device` where it lies."""
    places, wanted = {array.device, array.backing_device}, _device(context)
    if not all(place.endswith(f"device:{wanted}") for place in places):
        raise CheckFailure(f"tensorflow computed on {', '.join(sorted(places))}", outcome=table.LOAD_FAILED)
    if array.dtype.name != _type(kind):
        raise CheckFailure(
            f"tensorflow computed in {array.dtype.name}, not in {kind}", outcome=table.WRONG_NUMBERS
        )
    return array.numpy().astype("float64")


def _multiply_in(kind: str) -> None:
    _tensorflow().config.experimental.enable_tensor_float_32_execution(kind == "tf32")


def matmul(context: GpuContext, left: Any, right: Any, kind: str) -> Any:
    _multiply_in(kind)
    tensors = _tensor(context, left, kind), _tensor(context, right, kind)
    with _tensorflow().device(_device(context)):
        return fetch(context, _tensorflow().linalg.matmul(*tensors), kind)


def elementwise(context: GpuContext, values: Any) -> Any:
    with _tensorflow().device(_device(context)):
        return fetch(context, _tensorflow().tanh(_tensor(context, values, "float32")), "float32")


def reduce(context: GpuContext, values: Any, axis: int | None, kind: str) -> Any:
    with _tensorflow().device(_device(context)):
        return fetch(context, _tensorflow().reduce_sum(_tensor(context, values, kind), axis=axis), kind)


def largest(context: GpuContext, values: Any) -> Any:
    with _tensorflow().device(_device(context)):
        return fetch(context, _tensorflow().reduce_max(_tensor(context, values, "float32")), "float32")


def convolution(context: GpuContext, case: reference.ConvolutionCase, kind: str) -> dict[str, Any]:
    """Channels last, which is what its CPU has as well; filters are [y, x, channel, filter]."""
    _multiply_in(kind)
    tf = _tensorflow()
    last, kept = (0, 2, 3, 1), (case.padding, case.padding)
    with tf.device(_device(context)):
        image = _tensor(context, case.image.transpose(last), kind)
        filters = _tensor(context, case.filters.transpose(2, 3, 1, 0), kind)
        with tf.GradientTape() as tape:
            tape.watch((image, filters))
            padding = ((0, 0), kept, kept, (0, 0))
            made = tf.nn.conv2d(image, filters, strides=case.stride, padding=padding)
        outer = _tensor(context, case.outer.transpose(last), kind)
        back = tape.gradient(made, (image, filters), output_gradients=outer)
    return {
        "forward": fetch(context, made, kind).transpose(0, 3, 1, 2),
        "image": fetch(context, back[0], kind).transpose(0, 3, 1, 2),
        "filters": fetch(context, back[1], kind).transpose(3, 2, 0, 1),
    }


def factorise(context: GpuContext, square: Any, side: Any, kind: str) -> reference.Factors:
    tf = _tensorflow()
    _multiply_in(kind)
    with tf.device(_device(context)):
        matrix = _tensor(context, square, kind)
        packed, order = tf.linalg.lu(matrix)
        values, left, right = tf.linalg.svd(matrix)
        solution = tf.linalg.solve(matrix, _tensor(context, side, kind))
    found = (fetch(context, tensor, kind) for tensor in (packed, solution, left, values, right))
    packed, solution, left, values, right = found
    return reference.Factors(packed, order.numpy(), solution, left, values, right.transpose(0, 2, 1))


def train(context: GpuContext, case: reference.TrainingCase) -> tuple[list[float], Any, Any]:
    """The weights are tensors, not variables: TensorFlow updates in place only where nothing is watched."""
    _multiply_in("float32")
    tf = _tensorflow()
    inputs, wanted = (_tensor(context, values, "float32") for values in (case.inputs, case.wanted))
    weights = [_tensor(context, values, "float32") for values in (case.first, case.second)]
    losses = []
    with tf.device(_device(context)):
        for step in range(reference.STEPS + 1):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                off = tf.tanh(inputs @ weights[0]) @ weights[1] - wanted
                loss = tf.reduce_mean(off**2)
            losses.append(float(fetch(context, loss, "float32")))
            if step < reference.STEPS:
                pairs = zip(weights, tape.gradient(loss, weights), strict=True)
                weights = [weight - reference.RATE * gradient for weight, gradient in pairs]
    return losses, fetch(context, weights[0], "float32"), fetch(context, weights[1], "float32")


def transfer(context: GpuContext, values: Any) -> Transfer:
    """TensorFlow copies through pinned memory of its own; a caller cannot ask for it."""
    tf = _tensorflow()
    with tf.device("CPU:0"):
        here = tf.constant(values)
    began = time.perf_counter()
    with tf.device(_device(context)):
        there = tf.identity(here)
        fetch(context, there[:1], "float32")  # waits for the copy
    between = time.perf_counter()
    back = there.numpy()
    ended = time.perf_counter()
    return Transfer(back=back, up=between - began, down=ended - between, pinned=False)


def all_reduce(context: GpuContext, values: Any) -> tuple[Any, str]:
    """By the image's NCCL itself: up to 2.18 TensorFlow has one linked in that no lock tells of."""
    return nccl.all_reduce(context, values)


def loaded(context: GpuContext) -> dict[str, str]:  # noqa: ARG001
    """It tells what it was built with alone; what is loaded is seen in the process."""
    return {}


def in_use(context: GpuContext) -> int:
    return int(_tensorflow().config.experimental.get_memory_info(_device(context))["current"])


def release(context: GpuContext) -> None:  # noqa: ARG001
    gc.collect()


def probe(context: GpuContext) -> Finding:
    return run_probe(context)


def compile(context: GpuContext, inputs: Any, weights: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """tf.function with jit_compile=True: XLA compiles it whole, or TensorFlow raises."""
    _multiply_in("float32")
    tf = _tensorflow()

    def both(left: Any, right: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(right)
            rows = tf.reduce_logsumexp(tf.tanh(left @ right / 8), axis=1)
        return rows, tape.gradient(rows, right)

    found = []
    with tf.device(_device(context)):
        arrays = _tensor(context, inputs, "float32"), _tensor(context, weights, "float32")
        for function in (both, tf.function(both, jit_compile=True)):
            rows, gradient = function(*arrays)
            found.append(
                {"rows": fetch(context, rows, "float32"), "gradient": fetch(context, gradient, "float32")}
            )
    return found[0], found[1], "tf.function by XLA"
