"""TensorFlow."""

from __future__ import annotations

import gc
import importlib
import os
import time
from typing import Any

from ...context import CheckFailure
from .. import reference, table
from ..context import GpuContext
from .nccl import all_reduce as all_reduce  # up to 2.18 TensorFlow has one linked in that no lock names
from .results import Transfer, type_of

KINDS = ("float32", "tf32", "float16", "bfloat16")
CPU_LACKS = ("float16",)
"""Up to 2.15, its CPU sums products of float16 in float16."""


def prepare(context: GpuContext) -> None:
    """Let memory grow, since TensorFlow would allocate the whole GPU. Hide the GPU from a rehearsal."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    if context.rehearsal:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def _tensorflow(kind: str = "float32") -> Any:
    """Return TensorFlow, configured to multiply in `kind`.

    An operation without a kernel for the GPU is an error, and never runs on the CPU.
    """
    tf: Any = importlib.import_module("tensorflow")
    if tf.config.get_soft_device_placement():
        tf.config.set_soft_device_placement(False)
    tf.config.experimental.enable_tensor_float_32_execution(kind == "tf32")
    return tf


def _device(context: GpuContext) -> str:
    return "CPU:0" if context.rehearsal else "GPU:0"


def _tensor(context: GpuContext, values: Any, kind: str) -> Any:
    """Round on the CPU, so that the GPU only copies."""
    tf: Any = importlib.import_module("tensorflow")
    with tf.device("CPU:0"):
        here = tf.cast(tf.constant(values), type_of(kind))
    with tf.device(_device(context)):
        return tf.identity(here)


def on_cpu(values: Any, kind: str) -> Any:
    tf = _tensorflow()
    with tf.device("CPU:0"):
        return tf.identity(tf.constant(values, dtype=type_of(kind)))


def fetch(context: GpuContext, array: Any, kind: str) -> Any:
    """Return a result as numpy. `device` is where it was computed, `backing_device` where it is stored."""
    places = {array.device, array.backing_device}
    if not all(place.endswith(f"device:{_device(context)}") for place in places):
        raise CheckFailure(f"tensorflow computed on {', '.join(sorted(places))}")
    if array.dtype.name != type_of(kind):
        text = f"tensorflow computed in {array.dtype.name}, not in {kind}"
        raise CheckFailure(text, outcome=table.WRONG_NUMBERS)
    return array.numpy().astype("float64")


def matmul(context: GpuContext, matrix: Any, right: Any, kind: str) -> Any:
    tf = _tensorflow(kind)
    with tf.device(_device(context)):
        product = tf.linalg.matmul(_tensor(context, matrix, kind), _tensor(context, right, kind))
        return fetch(context, product, kind)


def elementwise(context: GpuContext, values: Any) -> Any:
    tf = _tensorflow()
    with tf.device(_device(context)):
        return fetch(context, tf.tanh(_tensor(context, values, "float32")), "float32")


def reduce(context: GpuContext, values: Any, axis: int | None, kind: str) -> Any:
    tf = _tensorflow()
    with tf.device(_device(context)):
        return fetch(context, tf.reduce_sum(_tensor(context, values, kind), axis=axis), kind)


def largest(context: GpuContext, values: Any) -> Any:
    tf = _tensorflow()
    with tf.device(_device(context)):
        return fetch(context, tf.reduce_max(_tensor(context, values, "float32")), "float32")


def convolution(context: GpuContext, case: reference.ConvolutionCase, kind: str) -> dict[str, Any]:
    """Convolve with channels last, which its CPU supports too. Filters are [y, x, channel, filter]."""
    tf = _tensorflow(kind)
    last, edge = (0, 2, 3, 1), (case.padding, case.padding)
    with tf.device(_device(context)):
        image = _tensor(context, case.image.transpose(last), kind)
        filters = _tensor(context, case.filters.transpose(2, 3, 1, 0), kind)
        with tf.GradientTape() as tape:
            tape.watch((image, filters))
            padding = ((0, 0), edge, edge, (0, 0))
            output = tf.nn.conv2d(image, filters, strides=case.stride, padding=padding)
        outer = _tensor(context, case.outer.transpose(last), kind)
        back = tape.gradient(output, (image, filters), output_gradients=outer)
    return {
        "forward": fetch(context, output, kind).transpose(0, 3, 1, 2),
        "image": fetch(context, back[0], kind).transpose(0, 3, 1, 2),
        "filters": fetch(context, back[1], kind).transpose(3, 2, 0, 1),
    }


def factorise(context: GpuContext, square: Any, side: Any, kind: str) -> reference.Factors:
    tf = _tensorflow(kind)
    with tf.device(_device(context)):
        matrix = _tensor(context, square, kind)
        packed, order = tf.linalg.lu(matrix)
        values, bases, right = tf.linalg.svd(matrix)
        solution = tf.linalg.solve(matrix, _tensor(context, side, kind))
    tensors = (packed, solution, bases, values, right)
    packed, solution, bases, values, right = (fetch(context, tensor, kind) for tensor in tensors)
    return reference.Factors(order.numpy(), packed, solution, bases, values, right.transpose(0, 2, 1))


def train(context: GpuContext, case: reference.TrainingCase) -> tuple[list[float], Any, Any]:
    """Train with weights that are tensors: TensorFlow cannot update watched variables in place."""
    tf = _tensorflow()
    inputs, targets = (_tensor(context, values, "float32") for values in (case.inputs, case.targets))
    weights = [_tensor(context, values, "float32") for values in (case.first, case.second)]
    losses = []
    with tf.device(_device(context)):
        for step in range(reference.STEPS + 1):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                off = tf.tanh(inputs @ weights[0]) @ weights[1] - targets
                loss = tf.reduce_mean(off**2)
            losses.append(float(fetch(context, loss, "float32")))
            if step < reference.STEPS:
                pairs = zip(weights, tape.gradient(loss, weights))  # noqa: B905
                weights = [weight - reference.RATE * gradient for weight, gradient in pairs]
    return losses, fetch(context, weights[0], "float32"), fetch(context, weights[1], "float32")


def transfer(context: GpuContext, values: Any) -> Transfer:
    """Copy through TensorFlow's page-locked memory, which a caller cannot choose."""
    tf = _tensorflow()
    with tf.device("CPU:0"):
        here = tf.constant(values)
    began = time.perf_counter()
    with tf.device(_device(context)):
        there = tf.identity(here)
        fetch(context, there[:1], "float32")  # waits for the copy
    between = time.perf_counter()
    back = there.numpy()
    return Transfer(back=back, up=between - began, down=time.perf_counter() - between, pinned=False)


def in_use(context: GpuContext) -> int:
    return int(_tensorflow().config.experimental.get_memory_info(_device(context))["current"])


def release(context: GpuContext) -> None:  # noqa: ARG001
    gc.collect()


def compile(context: GpuContext, inputs: Any, weights: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run tf.function with jit_compile=True: XLA compiles all of it, or TensorFlow raises an error."""
    tf = _tensorflow()

    def both(matrix: Any, right: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            tape.watch(right)
            rows = tf.reduce_logsumexp(tf.tanh(matrix @ right / 8), axis=1)
        return {"rows": rows, "gradient": tape.gradient(rows, right)}

    outputs = []
    with tf.device(_device(context)):
        arrays = _tensor(context, inputs, "float32"), _tensor(context, weights, "float32")
        for function in (both, tf.function(both, jit_compile=True)):
            tensors = function(*arrays)
            outputs.append({name: fetch(context, tensor, "float32") for name, tensor in tensors.items()})
    return outputs[0], outputs[1], "tf.function by XLA"
