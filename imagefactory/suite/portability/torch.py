"""PyTorch: its modules, and its exporter to ONNX as a version uses it by itself.

That is TorchScript up to 2.8 and torch.export from 2.9 on.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

NAME = "torch"

TORCH_EXPORT = (2, 9)
# One file holds a model of up to 2 GB, which is protobuf's bound, with some room for its graph.
LARGEST_FILE = 1_900_000_000


def _torch() -> Any:
    return importlib.import_module("torch")


def version() -> str:
    return str(_torch().__version__)


def prepare(threads: int) -> None:
    """`threads` of the CPU, and float32 as such: no TF32, which convolutions take without it."""
    torch = _torch()
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def owns(network: Any) -> bool:
    return isinstance(network, _torch().nn.Module)


def settle(network: Any) -> Any:
    """The network as for inference: without dropout."""
    return network.eval()


def override(network: Any, method: str) -> Any:
    """A network that shares this one's weights and computes what `method` of it does."""
    taken = copy.copy(network)
    taken.forward = types.MethodType(getattr(type(network), method), taken)
    return taken.eval()


def canonical(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of the types in which the exported model takes them."""
    return dict(inputs)


def compute(network: Any, inputs: Mapping[str, Any], device: str) -> list[Any] | None:
    """The outputs as float64, computed on `device` (`cpu`, `gpu`); None where one came from elsewhere."""
    torch = _torch()
    network, placed = _place(network, inputs, device)
    with torch.inference_mode():
        outputs = list(_tensors(network(*placed)))
    if any(output.device.type != _device(device) for output in outputs):
        return None
    return [output.double().cpu().numpy() for output in outputs]


def caller(network: Any, inputs: Mapping[str, Any], device: str) -> Callable[[], None]:
    """One pass with the inputs already on the device; the pass is over when the call returns."""
    torch = _torch()
    network, placed = _place(network, inputs, device)
    wait = torch.cuda.synchronize if device == "gpu" else lambda: None

    def call() -> None:
        with torch.inference_mode():
            network(*placed)
        wait()

    return call


def _tensors(output: Any) -> Iterator[Any]:
    """The tensors of what a network gives, in the order in which its exporter names them."""
    if isinstance(output, _torch().Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif output is not None:
        raise TypeError(f"the model gives a {type(output).__name__}, which is no tensor")


def _place(network: Any, inputs: Mapping[str, Any], device: str) -> tuple[Any, list[Any]]:
    torch = _torch()
    placed = [torch.from_numpy(array) for array in inputs.values()]
    kind = next((one.dtype for one in network.parameters()), torch.float32)
    placed = [one.to(kind) if one.is_floating_point() else one for one in placed]
    if device == "gpu":
        network = copy.deepcopy(network)
    return network.to(_device(device)), [one.to(_device(device)) for one in placed]


def _device(device: str) -> str:
    return {"cpu": "cpu", "gpu": "cuda"}[device]


def export(network: Any, inputs: Mapping[str, Any], path: str, *, outputs: int, batched: bool) -> None:
    """Writes the network as ONNX at the exporter's own operator set; of any size of batch where `batched`.

    Other sizes are fixed. `outputs` is how many tensors it gives.
    """
    torch = _torch()
    placed = tuple(torch.from_numpy(array) for array in inputs.values())
    names = ["output"] if outputs == 1 else [f"output_{number}" for number in range(outputs)]
    options: dict[str, Any] = {"input_names": list(inputs), "output_names": names, "verbose": False}
    modern = tuple(int(part) for part in version().split(".")[:2]) >= TORCH_EXPORT
    if batched and modern:
        batch = torch.export.Dim("batch")
        options["dynamic_shapes"] = tuple({0: batch} for _ in placed)
    elif batched:
        options["dynamic_axes"] = {name: {0: "batch"} for name in (*inputs, *names)}
    if "external_data" in inspect.signature(torch.onnx.export).parameters:
        size = sum(one.numel() * one.element_size() for one in network.parameters())
        options["external_data"] = size > LARGEST_FILE
    torch.onnx.export(network, placed, path, **options)
