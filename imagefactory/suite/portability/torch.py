"""PyTorch modules, and the exporter to ONNX that each version uses by default.

That is TorchScript up to 2.8 and torch.export from 2.9 on.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..context import LazyModule

NAME = "torch"
DEVICES = {"cpu": "cpu", "gpu": "cuda"}

TORCH_EXPORT = (2, 9)
# A file holds a model of up to 2 GB, the limit of protobuf, with some space for its graph.
LARGEST_FILE = 1_900_000_000

torch: Any = LazyModule("torch")


def version() -> str:
    return str(torch.__version__)


def prepare(threads: int) -> None:
    """Disable TF32, which convolutions use by default."""
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def owns(network: Any) -> bool:
    return isinstance(network, torch.nn.Module)


def settle(network: Any) -> Any:
    return network.eval()


def override(network: Any, method: str) -> Any:
    """Return a copy with the method `method` in place of `forward`. The copy shares the weights."""
    copied = copy.copy(network)
    copied.forward = types.MethodType(getattr(type(network), method), copied)
    return copied.eval()


def canonical(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(inputs)


def compute(network: Any, inputs: Mapping[str, Any], device: str) -> list[Any] | None:
    network, placed = _place(network, inputs, device)
    with torch.inference_mode():
        outputs = list(_tensors(network(*placed)))
    if any(output.device.type != DEVICES[device] for output in outputs):
        return None
    return [output.double().cpu().numpy() for output in outputs]


def caller(network: Any, inputs: Mapping[str, Any], device: str) -> Callable[[], None]:
    network, placed = _place(network, inputs, device)
    wait = torch.cuda.synchronize if device == "gpu" else lambda: None

    def call() -> None:
        with torch.inference_mode():
            network(*placed)
        wait()

    return call


def _tensors(output: Any) -> Iterator[Any]:
    """Yield the tensors in an output, in the order in which the exporter names them."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple, Mapping)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)
    elif output is not None:
        raise TypeError(f"the model returns a {type(output).__name__}, not a tensor")


def _place(network: Any, inputs: Mapping[str, Any], device: str) -> tuple[Any, list[Any]]:
    placed = [torch.from_numpy(array) for array in inputs.values()]
    kind = next((parameter.dtype for parameter in network.parameters()), torch.float32)
    placed = [tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in placed]
    if device == "gpu":
        network = copy.deepcopy(network)
    return network.to(DEVICES[device]), [tensor.to(DEVICES[device]) for tensor in placed]


def export(network: Any, inputs: Mapping[str, Any], path: str, *, outputs: int, batched: bool) -> None:
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
        size = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
        options["external_data"] = size > LARGEST_FILE
    torch.onnx.export(network, placed, path, **options)
