"""JAX: functions of arrays that contain their weights. jax2onnx exports them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ..context import LazyModule

NAME = "jax"

jax: Any = LazyModule("jax")
numpy: Any = LazyModule("numpy")


def version() -> str:
    return str(jax.__version__)


def prepare(threads: int) -> None:  # noqa: ARG001
    """Use full float32 precision. `threads` has no effect: XLA uses the processors of the process."""
    jax.config.update("jax_default_matmul_precision", "highest")


def owns(network: Any) -> bool:
    return callable(network)


def settle(network: Any) -> Any:
    return network


def override(network: Any, method: str) -> Any:
    return getattr(network, method)


def canonical(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs without 64-bit types, which JAX does not use by default."""
    jnp: Any = importlib.import_module("jax.numpy")
    return {name: numpy.asarray(jnp.asarray(array)) for name, array in inputs.items()}


def compute(network: Any, inputs: Mapping[str, Any], device: str) -> list[Any] | None:
    there = jax.devices(device)[0]
    with jax.default_device(there):
        outputs = jax.tree_util.tree_leaves(network(*jax.device_put(list(inputs.values()), there)))
    if any(output.devices() != {there} for output in outputs):
        return None
    return [numpy.asarray(output).astype("float64") for output in outputs]


def caller(network: Any, inputs: Mapping[str, Any], device: str) -> Callable[[], None]:
    there = jax.devices(device)[0]
    placed, compiled = jax.device_put(list(inputs.values()), there), jax.jit(network)

    def call() -> None:
        with jax.default_device(there):
            jax.block_until_ready(compiled(*placed))

    return call


def export(network: Any, inputs: Mapping[str, Any], path: str, *, outputs: int, batched: bool) -> None:
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
    """An input for jax2onnx: a type, and a shape in which a string is a size that may vary."""

    def __init__(self, shape: tuple[Any, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype
