"""TensorFlow: models of Keras, modules and functions, which tf2onnx exports."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

NAME = "tensorflow"


def _tensorflow() -> Any:
    return importlib.import_module("tensorflow")


def version() -> str:
    return str(_tensorflow().__version__)


def prepare(threads: int) -> None:  # noqa: ARG001
    """float32 as such: no TF32. The threads of the CPU are fixed when TensorFlow starts (exporting.py)."""
    _tensorflow().config.experimental.enable_tensor_float_32_execution(False)


def owns(network: Any) -> bool:
    tensorflow = _tensorflow()
    kinds = (tensorflow.Module, tensorflow.keras.Model, tensorflow.types.experimental.GenericFunction)
    return isinstance(network, kinds)


def settle(network: Any) -> Any:
    """The network as for inference: `_call` asks Keras for no training."""
    return network


def override(network: Any, method: str) -> Any:
    """A function that shares the network's weights and computes what `method` of it does."""
    return _tensorflow().function(getattr(network, method))


def canonical(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of the types in which the exported model takes them."""
    return dict(inputs)


def compute(network: Any, inputs: Mapping[str, Any], device: str) -> list[Any] | None:
    """The outputs as float64, computed on `device` (`cpu`, `gpu`); None where one came from elsewhere."""
    tensorflow = _tensorflow()
    with tensorflow.device(_device(device)):
        outputs = tensorflow.nest.flatten(_call(network, _place(inputs, device)))
    if any(not output.device.endswith(_device(device)) for output in outputs):
        return None
    return [output.numpy().astype("float64") for output in outputs]


def caller(network: Any, inputs: Mapping[str, Any], device: str) -> Callable[[], None]:
    """One compiled pass with the inputs already on the device; the pass is over when the call returns."""
    tensorflow = _tensorflow()
    placed = _place(inputs, device)
    compiled = tensorflow.function(lambda *values: _call(network, values))

    def call() -> None:
        with tensorflow.device(_device(device)):
            outputs = tensorflow.nest.flatten(compiled(*placed))
        for output in outputs:
            output.numpy()

    return call


def export(network: Any, inputs: Mapping[str, Any], path: str, *, outputs: int, batched: bool) -> None:  # noqa: ARG001
    """Writes the network as ONNX; of any size of batch where `batched`. Other sizes are fixed."""
    tensorflow, tf2onnx = _tensorflow(), importlib.import_module("tf2onnx")
    first = (lambda shape: (None, *shape[1:])) if batched else tuple
    signature = [
        tensorflow.TensorSpec(first(array.shape), array.dtype, name=name) for name, array in inputs.items()
    ]
    function = tensorflow.function(lambda *values: _call(network, values), input_signature=signature)
    tf2onnx.convert.from_function(function, input_signature=signature, output_path=path)


def _place(inputs: Mapping[str, Any], device: str) -> list[Any]:
    tensorflow = _tensorflow()
    with tensorflow.device(_device(device)):
        return [tensorflow.constant(array) for array in inputs.values()]


def _call(network: Any, values: Any) -> Any:
    """Keras takes several inputs as one list, and is told that this is no training."""
    if not isinstance(network, _tensorflow().keras.Model):
        return network(*values)
    return network(values[0] if len(values) == 1 else list(values), training=False)


def _device(device: str) -> str:
    return {"cpu": "CPU:0", "gpu": "GPU:0"}[device]
