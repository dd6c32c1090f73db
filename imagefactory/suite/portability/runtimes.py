"""The runtimes that a model can be moved to: data for both sides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Runtime:
    """A file of this folder with what it is asked for. `brings` are distributions any of which has it.

    `providers` are ONNX Runtime's: nodes may run on each of them, and the first must have run some. `place`
    is where inputs and outputs lie: `cuda`, or `cpu`.
    """

    name: str
    module: str
    brings: tuple[str, ...]
    providers: tuple[str, ...] = ()
    place: str = "cpu"
    gpu: bool = False


_ONNX, _CUDA = "onnxruntime", "CUDAExecutionProvider"
# AMD's take their inputs from the host: their builds know no device by the name of cuda.
_ROWS = (
    Runtime(
        "onnxruntime-cpu",
        _ONNX,
        ("onnxruntime", "onnxruntime-gpu", "onnxruntime-migraphx", "onnxruntime-rocm"),
        ("CPUExecutionProvider",),
    ),
    Runtime("onnxruntime-cuda", _ONNX, ("onnxruntime-gpu",), (_CUDA,), "cuda", gpu=True),
    Runtime(
        "onnxruntime-tensorrt",
        _ONNX,
        ("onnxruntime-gpu",),
        ("TensorrtExecutionProvider", _CUDA),
        "cuda",
        gpu=True,
    ),
    Runtime(
        "onnxruntime-migraphx", _ONNX, ("onnxruntime-migraphx",), ("MIGraphXExecutionProvider",), gpu=True
    ),
    Runtime("onnxruntime-rocm", _ONNX, ("onnxruntime-rocm",), ("ROCMExecutionProvider",), gpu=True),
    Runtime("openvino-cpu", "openvino", ("openvino",)),
    Runtime("tvm-cpu", "tvm", ("apache-tvm",)),
)
RUNTIMES = {row.name: row for row in _ROWS}
