"""PyTorch."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import tempfile
import time
from typing import Any

from ...context import CheckFailure, LazyModule
from .. import reference, table
from ..context import GpuContext
from ..libraries import mapped_files
from . import nccl, results
from .results import Transfer

KINDS = ("float32", "tf32", "float16", "bfloat16")
CPU_LACKS = ("float16",)
"""Before 2.1, its CPU cannot multiply matrices of float16."""

torch: Any = LazyModule("torch")


def prepare(context: GpuContext) -> None:  # noqa: ARG001
    """Write the output of torch.compile to a directory that is removed with the process, since there may be
    no home.
    """
    folder = tempfile.mkdtemp(prefix="suite-torch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    # Workers would be forked from a process that has CUDA open, and outlive a part that is ended.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _device(context: GpuContext) -> str:
    return "cpu" if context.rehearsal else "cuda"


def _type(kind: str) -> Any:
    return getattr(torch, results.type_of(kind))


def _tensor(context: GpuContext, values: Any, kind: str) -> Any:
    """Convert on the CPU, so that the GPU only copies."""
    return on_cpu(values, kind).to(_device(context))


def on_cpu(values: Any, kind: str) -> Any:
    return torch.from_numpy(values).to(_type(kind))


def fetch(context: GpuContext, array: Any, kind: str) -> Any:
    place, expected = array.device.type, _device(context)
    if place != expected:
        raise CheckFailure(f"torch computed on {place}, not on {expected}")
    if array.dtype != _type(kind):
        raise CheckFailure(f"torch computed in {array.dtype}, not in {kind}", outcome=table.WRONG_NUMBERS)
    return array.detach().cpu().double().numpy()


def _multiply_in(kind: str) -> None:
    """Select tf32 or float32 for matrices and for convolutions, whose defaults differ."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind == "tf32"


def matmul(context: GpuContext, matrix: Any, right: Any, kind: str) -> Any:
    _multiply_in(kind)
    return fetch(context, _tensor(context, matrix, kind) @ _tensor(context, right, kind), kind)


def elementwise(context: GpuContext, values: Any) -> Any:
    return fetch(context, _tensor(context, values, "float32").tanh(), "float32")


def reduce(context: GpuContext, values: Any, axis: int | None, kind: str) -> Any:
    tensor = _tensor(context, values, kind)
    return fetch(context, tensor.sum() if axis is None else tensor.sum(dim=axis), kind)


def largest(context: GpuContext, values: Any) -> Any:
    return fetch(context, _tensor(context, values, "float32").max(), "float32")


def convolution(context: GpuContext, case: reference.ConvolutionCase, kind: str) -> dict[str, Any]:
    _multiply_in(kind)
    image, filters = (_tensor(context, array, kind).requires_grad_() for array in (case.image, case.filters))
    output = torch.nn.functional.conv2d(image, filters, stride=case.stride, padding=case.padding)
    output.backward(_tensor(context, case.outer, kind))
    tensors = {"forward": output, "image": image.grad, "filters": filters.grad}
    return {name: fetch(context, tensor, kind) for name, tensor in tensors.items()}


def factorise(context: GpuContext, square: Any, side: Any, kind: str) -> reference.Factors:
    _multiply_in(kind)
    matrix = _tensor(context, square, kind)
    packed, pivots = torch.linalg.lu_factor(matrix)
    solution = torch.linalg.solve(matrix, _tensor(context, side, kind))
    tensors = (packed, solution, *torch.linalg.svd(matrix, full_matrices=False))
    order = reference.order_of(pivots.cpu().numpy())
    return reference.Factors(order, *(fetch(context, tensor, kind) for tensor in tensors))


def train(context: GpuContext, case: reference.TrainingCase) -> tuple[list[float], Any, Any]:
    _multiply_in("float32")
    inputs, targets = (_tensor(context, values, "float32") for values in (case.inputs, case.targets))
    weights = [_tensor(context, each, "float32").requires_grad_() for each in (case.first, case.second)]
    optimizer = torch.optim.SGD(weights, lr=reference.RATE)
    losses = []
    for step in range(reference.STEPS + 1):
        loss = torch.nn.functional.mse_loss(torch.tanh(inputs @ weights[0]) @ weights[1], targets)
        losses.append(float(fetch(context, loss, "float32")))
        if step < reference.STEPS:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses, fetch(context, weights[0], "float32"), fetch(context, weights[1], "float32")


def transfer(context: GpuContext, values: Any) -> Transfer:
    """Copy through torch's page-locked memory, which a rehearsal does not have."""
    here = torch.from_numpy(values)
    back = torch.empty_like(here)
    if not context.rehearsal:
        here, back = here.pin_memory(), back.pin_memory()
    _wait(context)
    began = time.perf_counter()
    there = here.to(_device(context), non_blocking=True, copy=True)
    _wait(context)
    between = time.perf_counter()
    back.copy_(there, non_blocking=True)
    _wait(context)
    ended = time.perf_counter()
    if there.device.type != _device(context):
        raise CheckFailure(f"torch copied to {there.device}")
    return Transfer(back=back.numpy(), up=between - began, down=ended - between, pinned=here.is_pinned())


def _wait(context: GpuContext) -> None:
    if not context.rehearsal:
        torch.cuda.synchronize()


def all_reduce(context: GpuContext, values: Any) -> tuple[Any, str]:
    """Sum in a group of one process that meets through a file, so no network is needed."""
    backend = "gloo" if context.rehearsal else "nccl"
    distributed: Any = importlib.import_module("torch.distributed")
    os.environ.update(nccl.MEETING)
    tensor = _tensor(context, values, "float32")
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        distributed.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            distributed.all_reduce(tensor)
            _wait(context)
            result = fetch(context, tensor, "float32")
        finally:
            distributed.destroy_process_group()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return result, f"torch.distributed with {backend}, NCCL {version}"


def loaded(context: GpuContext) -> dict[str, str]:  # noqa: ARG001
    """Return the versions of libraries that torch has linked or loaded."""
    number = torch.backends.cudnn.version()
    versions = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {**versions, "cudnn": results.version_of("cudnn", number)} if number else versions


def in_use(context: GpuContext) -> int:  # noqa: ARG001
    return int(torch.cuda.memory_allocated())


def release(context: GpuContext) -> None:
    gc.collect()
    if not context.rehearsal:
        torch.cuda.empty_cache()


def _show_libcuda() -> None:
    """Help Triton 2 find the driver: it links with libcuda.so, which 2.1 searches only in the loader cache.

    A container with its driver in LD_LIBRARY_PATH has no such entry and often not that name. Triton 3
    searches libcuda.so.1 and uses the variable.
    """
    try:
        build: Any = importlib.import_module("triton.common.build")
    except ModuleNotFoundError:
        return
    driver = next(path for path in mapped_files() if os.path.basename(path).startswith("libcuda.so"))
    folder = tempfile.mkdtemp(dir=os.path.dirname(os.environ["TRITON_CACHE_DIR"]))
    os.symlink(driver, os.path.join(folder, "libcuda.so"))
    build.libcuda_dirs = lambda: [folder]


def compile(context: GpuContext, inputs: Any, weights: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run torch.compile with a backend that counts its graphs; before 2.0, the tracing compiler."""
    _multiply_in("float32")
    module: Any = importlib.import_module("torch")  # torch.compile follows no import inside of a function

    def rows(matrix: Any, right: Any) -> Any:
        return module.logsumexp(module.tanh(matrix @ right / 8), dim=1)

    def run(function: Any) -> dict[str, Any]:
        kernel = _tensor(context, weights, "float32").requires_grad_()
        output = function(_tensor(context, inputs, "float32"), kernel)
        output.sum().backward()
        tensors = {"rows": output, "gradient": kernel.grad}
        return {name: fetch(context, tensor, "float32") for name, tensor in tensors.items()}

    eager = run(rows)
    if not hasattr(torch, "compile"):
        example = (_tensor(context, inputs, "float32"), _tensor(context, weights, "float32"))
        traced = torch.jit.trace(rows, example)
        for _ in range(3):  # it profiles first and fuses then
            compiled = run(traced)
        return eager, compiled, "torch.jit.trace (torch before 2.0 has no torch.compile)"
    if not context.rehearsal:
        _show_libcuda()
    # A rehearsal is on a CPU, where inductor would compile C++ and none of the kernels under test.
    backend = "aot_eager" if context.rehearsal else "inductor"
    graphs: list[Any] = []
    make = importlib.import_module("torch._dynamo.backends.registry").lookup_backend(backend)

    def count(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return make(graph, examples)

    compiled = run(torch.compile(rows, backend=count, fullgraph=True))
    if not graphs:
        raise CheckFailure("torch.compile compiled nothing")
    return eager, compiled, f"torch.compile with {backend}, {len(graphs)} graph"
