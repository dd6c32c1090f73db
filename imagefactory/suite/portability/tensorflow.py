"""TensorFlow: Keras models, modules and functions. tf2onnx exports them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ..context import LazyModule

NAME = "tensorflow"
DEVICES = {"cpu": "CPU:0", "gpu": "GPU:0"}

tf: Any = LazyModule("tensorflow")


def version() -> str:
    return str(tf.__version__)


def prepare(threads: int) -> None:  # noqa: ARG001
    """Disable TF32. TensorFlow reads the number of CPU threads when it starts (exporting.py)."""
    tf.config.experimental.enable_tensor_float_32_execution(False)


def owns(network: Any) -> bool:
    return isinstance(network, (tf.Module, tf.keras.Model, tf.types.experimental.GenericFunction))


def settle(network: Any) -> Any:
    """Return the network unchanged: `_call` passes to Keras that this is not training."""
    return network


def override(network: Any, method: str) -> Any:
    return tf.function(getattr(network, method))


def canonical(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(inputs)


def compute(network: Any, inputs: Mapping[str, Any], device: str) -> list[Any] | None:
    with tf.device(DEVICES[device]):
        outputs = tf.nest.flatten(_call(network, _place(inputs, device)))
    if any(not output.device.endswith(DEVICES[device]) for output in outputs):
        return None
    return [output.numpy().astype("float64") for output in outputs]


def caller(network: Any, inputs: Mapping[str, Any], device: str) -> Callable[[], None]:
    placed = _place(inputs, device)
    compiled = tf.function(lambda *values: _call(network, values))

    def call() -> None:
        with tf.device(DEVICES[device]):
            outputs = tf.nest.flatten(compiled(*placed))
        for output in outputs:
            output.numpy()

    return call


def export(network: Any, inputs: Mapping[str, Any], path: str, *, outputs: int, batched: bool) -> None:  # noqa: ARG001
    tf2onnx: Any = importlib.import_module("tf2onnx")
    first = (lambda shape: (None, *shape[1:])) if batched else tuple
    signature = [tf.TensorSpec(first(array.shape), array.dtype, name=name) for name, array in inputs.items()]
    function = tf.function(lambda *values: _call(network, values), input_signature=signature)
    tf2onnx.convert.from_function(function, input_signature=signature, output_path=path)


def _place(inputs: Mapping[str, Any], device: str) -> list[Any]:
    with tf.device(DEVICES[device]):
        return [tf.constant(array) for array in inputs.values()]


def _call(network: Any, values: Any) -> Any:
    """Call the network. Keras accepts several inputs only as one list."""
    if not isinstance(network, tf.keras.Model):
        return network(*values)
    return network(values[0] if len(values) == 1 else list(values), training=False)
