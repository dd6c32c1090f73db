"""JAX: functions of arrays that hold their weights, which jax2onnx exports."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

NAME = "jax"


def _jax() -> Any:
    return importlib.import_module("jax")


def version() -> str:
    return str(_jax().__version__)


def prepare(threads: int) -> None:  # noqa: ARG001
    """float32 as such: no TF32. XLA takes the threads of the process's own processors."""
    _jax().config.update("jax_default_matmul_precision", "highest")


def owns(network: Any) -> bool:
    return callable(network)


def settle(network: Any) -> Any:
    return network


def override(network: Any, method: str) -> Any:
    """What `method` of the network computes."""
    return getattr(network, method)


def canonical(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of the types in which the exported model takes them: JAX has no 64 bits unless told to."""
    numpy, jnp = importlib.import_module("numpy"), importlib.import_module("jax.numpy")
    return {name: numpy.asarray(jnp.asarray(array)) for name, array in inputs.items()}


def compute(network: Any, inputs: Mapping[str, Any], device: str) -> list[Any] | None:
    """The outputs as float64, computed on `device` (`cpu`, `gpu`); None where one came from elsewhere."""
    jax, numpy = _jax(), importlib.import_module("numpy")
    there = jax.devices(device)[0]
    with jax.default_device(there):
        outputs = jax.tree_util.tree_leaves(network(*jax.device_put(list(inputs.values()), there)))
    if any(output.devices() != {there} for output in outputs):
        return None
    return [numpy.asarray(output).astype("float64") for output in outputs]


def caller(network: Any, inputs: Mapping[str, Any], device: str) -> Callable[[], None]:
    """One compiled pass with the inputs already on the device; the pass is over when the call returns."""
    jax = _jax()
    there = jax.devices(device)[0]
    placed, compiled = jax.device_put(list(inputs.values()), there), jax.jit(network)

    def call() -> None:
        with jax.default_device(there):
            jax.block_until_ready(compiled(*placed))

    return call


def export(network: Any, inputs: Mapping[str, Any], path: str, *, outputs: int, batched: bool) -> None:
    """Writes the function as ONNX; of any size of batch where `batched`. Other sizes are fixed."""
    jax2onnx, onnx = importlib.import_module("jax2onnx"), importlib.import_module("onnx")
    first = (lambda shape: ("B", *shape[1:])) if batched else tuple
    names = ["output"] if outputs == 1 else [f"output_{number}" for number in range(outputs)]
    model = jax2onnx.to_onnx(
        network,
        [_Input(first(array.shape), array.dtype) for array in inputs.values()],
        input_names=list(inputs),
        output_names=names,
    )
    onnx.save(model, path)


class _Input:
    """An input as jax2onnx takes it: a shape, in which a text is a size that may be any, and a type."""

    def __init__(self, shape: tuple[Any, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype
