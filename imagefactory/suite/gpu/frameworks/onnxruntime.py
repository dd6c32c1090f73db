"""ONNX Runtime. Its profile shows, node by node, that its CUDA provider did the work.

Inputs and outputs are float32. Inside, nodes cast to the number type under test and back.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...context import CheckFailure, LazyModule
from ...onnx_model import TYPES, Node, write_model
from .. import reference, table
from ..context import GpuContext
from ..driver import Driver
from .results import Transfer

KINDS = ("float32", "tf32", "float16", "bfloat16")
CPU_LACKS = ("float16", "bfloat16")
"""On the CPU, it has no bfloat16 products, and computes float16 products in float32."""
PROVIDERS = {True: "CPUExecutionProvider", False: "CUDAExecutionProvider"}
"""The provider, by whether the run is a rehearsal."""

HALVES = ("float16", "bfloat16")

runtime: Any = LazyModule("onnxruntime")


def _device(context: GpuContext) -> str:
    return "cpu" if context.rehearsal else "cuda"


@dataclass(frozen=True)
class _Job:
    """A model to run: nodes, float32 inputs and int64 vectors by name, the rank of the output."""

    nodes: Sequence[Node]
    inputs: Mapping[str, Any]
    rank: int
    kind: str = "float32"
    constants: Mapping[str, Sequence[int]] = field(default_factory=dict)


def _run(context: GpuContext, job: _Job) -> Any:
    """Return the output. Raises CheckFailure if a node ran on another device or in another number type."""
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        session = _start(context, job, os.path.join(folder, "profile"))
        binding = session.io_binding()
        # On the CPU a value is the array's own memory, and before 1.20 does not keep the array.
        arrays = {name: values.astype("float32", order="C") for name, values in job.inputs.items()}
        for name, values in arrays.items():
            there = runtime.OrtValue.ortvalue_from_numpy(values, _device(context), 0)
            binding.bind_ortvalue_input(name, there)
        binding.bind_output(job.nodes[-1].output, _device(context), 0)
        session.run_with_iobinding(binding)
        (result,) = binding.get_outputs()
        with open(session.end_profiling(), encoding="utf-8") as file:
            _judge_profile(json.load(file), job, PROVIDERS[context.rehearsal])
    return fetch(context, result, "float32")


def _start(context: GpuContext, job: _Job, profile: str) -> Any:
    provider = PROVIDERS[context.rehearsal]
    options = runtime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, profile
    options.log_severity_level = 3
    # A program of one or two nodes, each as written: nothing is computed when the session starts.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    configured: Any = provider
    if not context.rehearsal:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        # Its default is 1. With 0 its convolutions leave out tensor cores for float16 as well.
        configured = (provider, {"device_id": "0", "use_tf32": "0" if job.kind == "float32" else "1"})
    ranks = {name: values.ndim for name, values in job.inputs.items()}
    model = write_model(job.nodes, ranks, job.rank, constants=job.constants)
    session = runtime.InferenceSession(model, options, providers=[configured])
    session.disable_fallback()
    if session.get_providers()[0] != provider:
        # It says why on stderr alone and goes on with the CPU.
        raise CheckFailure(f"onnxruntime opened {session.get_providers()}, not {provider}")
    return session


def _judge_profile(events: Sequence[Mapping[str, Any]], job: _Job, provider: str) -> None:
    """Raise CheckFailure unless `provider` ran every node, and each except casts in the number type of the
    job.
    """
    rows = [
        event["args"]
        for event in events
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time")
    ]
    elsewhere = sorted(
        {f"{row['op_name']} by {row['provider']}" for row in rows if row["provider"] != provider}
    )
    if elsewhere:
        raise CheckFailure(f"onnxruntime ran {', '.join(elsewhere)}, not by {provider}")
    missing = {node.operator for node in job.nodes} - {row["op_name"] for row in rows}
    if missing:
        raise CheckFailure(f"onnxruntime's profile does not show {', '.join(sorted(missing))}")
    for row in rows:
        took = {kind for shapes in row["input_type_shape"] for kind in shapes}
        if row["op_name"] != "Cast" and job.kind in HALVES and took != {job.kind}:
            text = f"onnxruntime ran {row['op_name']} on {', '.join(sorted(took))}, not on {job.kind}"
            raise CheckFailure(text, outcome=table.WRONG_NUMBERS)


def on_cpu(values: Any, kind: str) -> Any:
    return runtime.OrtValue.ortvalue_from_numpy(values.astype(kind), "cpu", 0)


def fetch(context: GpuContext, array: Any, kind: str) -> Any:
    if array.device_name().lower() != _device(context):
        raise CheckFailure(f"onnxruntime's result is on {array.device_name()}")
    names = {"float32": "tensor(float)", "float64": "tensor(double)"}
    if array.data_type() != names[kind]:
        raise CheckFailure(f"onnxruntime's result is a {array.data_type()}", outcome=table.WRONG_NUMBERS)
    return array.numpy().astype("float64")


def _run_operator(context: GpuContext, operator: Node, job: _Job) -> Any:
    """Run `operator` between casts to the number type of the job and back, unless that is float32."""
    if job.kind in ("float32", "tf32"):
        return _run(context, replace(job, nodes=(operator,)))
    there = {name: f"{name}_{job.kind}" for name in job.inputs}
    nodes = [Node("Cast", (name,), other, {"to": TYPES[job.kind]}) for name, other in there.items()]
    inputs = tuple(there.get(name, name) for name in operator.inputs)
    nodes.append(Node(operator.operator, inputs, "result", operator.attributes))
    nodes.append(Node("Cast", ("result",), operator.output, {"to": TYPES["float32"]}))
    return _run(context, replace(job, nodes=tuple(nodes)))


def matmul(context: GpuContext, matrix: Any, right: Any, kind: str) -> Any:
    job = _Job((), {"a": matrix, "b": right}, matrix.ndim, kind)
    return _run_operator(context, Node("MatMul", ("a", "b"), "y"), job)


def elementwise(context: GpuContext, values: Any) -> Any:
    return _run_operator(context, Node("Tanh", ("a",), "y"), _Job((), {"a": values}, values.ndim))


def reduce(context: GpuContext, values: Any, axis: int | None, kind: str) -> Any:
    if axis is None:
        job = _Job((), {"a": values}, 0, kind)
        return _run_operator(context, Node("ReduceSum", ("a",), "y", {"keepdims": 0}), job)
    job = _Job((), {"a": values}, values.ndim - 1, kind, {"axes": (axis,)})
    return _run_operator(context, Node("ReduceSum", ("a", "axes"), "y", {"keepdims": 0}), job)


def largest(context: GpuContext, values: Any) -> Any:
    return _run_operator(context, Node("ReduceMax", ("a",), "y", {"keepdims": 0}), _Job((), {"a": values}, 0))


def convolution(context: GpuContext, case: reference.ConvolutionCase, kind: str) -> dict[str, Any]:
    """Compute a convolution and its gradients with ONNX operators.

    The gradient of the image is ConvTranspose with the same filters. The gradient of the filters is a
    convolution of the image with the gradient from above, spread by the stride, with images and channels
    exchanged.
    """
    pads, step = [case.padding] * 4, [case.stride] * 2
    attributes = {"pads": pads, "strides": step}
    swap = (1, 0, 2, 3)
    jobs = {
        "forward": ("Conv", {"x": case.image, "w": case.filters}, attributes),
        "image": ("ConvTranspose", {"x": case.outer, "w": case.filters}, attributes),
        "filters": (
            "Conv",
            {"x": case.image.transpose(swap), "w": case.outer.transpose(swap)},
            {"pads": pads, "dilations": step},
        ),
    }
    arrays = {
        name: _run_operator(context, Node(operator, tuple(inputs), "y", options), _Job((), inputs, 4, kind))
        for name, (operator, inputs, options) in jobs.items()
    }
    return {**arrays, "filters": arrays["filters"].transpose(swap)}


def transfer(context: GpuContext, values: Any) -> Transfer:
    began = time.perf_counter()
    there = runtime.OrtValue.ortvalue_from_numpy(values, _device(context), 0)
    between = time.perf_counter()
    back = there.numpy()
    ended = time.perf_counter()
    if there.device_name().lower() != _device(context):
        raise CheckFailure(f"onnxruntime copied to {there.device_name()}")
    return Transfer(back=back, up=between - began, down=ended - between, pinned=False)


def in_use(context: GpuContext) -> int:  # noqa: ARG001
    """Return all bytes in use on the GPU, by any program: onnxruntime does not count its memory."""
    driver = Driver()
    driver.call("cuInit", 0)
    device = driver.device(0)
    with driver.context(device):
        return device.memory - driver.free_memory()


def release(context: GpuContext) -> None:
    """Do nothing: the memory of a session is freed with it."""
