"""Apache TVM on the CPU: the model is compiled with LLVM for this processor, without tuning."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..context import CheckFailure, LazyModule
from .runtimes import Runtime

NAME = "tvm"

tvm: Any = LazyModule("tvm")


@dataclass(frozen=True)
class TvmSession:
    machine: Any
    kernels: int
    inputs: tuple[Any, ...]


def version() -> str:
    return str(tvm.__version__)


def open_session(
    path: str,
    inputs: Mapping[str, Any],
    runtime: Runtime,  # noqa: ARG001
    threads: int,
    profile: str,  # noqa: ARG001
) -> TvmSession:
    """Compile the model for the sizes of `inputs`."""
    os.environ["TVM_NUM_THREADS"] = str(threads)  # read when its pool of threads starts
    onnx, frontend = importlib.import_module("onnx"), importlib.import_module("tvm.relax.frontend.onnx")
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    module = frontend.from_onnx(onnx.load(path), shape_dict=shapes, keep_params_in_input=False)
    order = [variable.name for variable in module["main"].params]
    # LLVM's name of this processor: without it code is for any x86-64, and several times slower.
    processor = str(tvm.get_global_func("target.llvm_get_system_cpu")())
    compiled = tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "mcpu": processor}))
    machine = tvm.relax.VirtualMachine(compiled, tvm.cpu())
    placed = tuple(tvm.runtime.tensor(inputs[name]) for name in order)
    # Calls of its virtual machine's program; those that begin with `vm.` are the machine's own.
    calls = [line.split()[1] for line in compiled.as_text().splitlines() if line.startswith("  call")]
    return TvmSession(machine, sum(not name.startswith("vm.") for name in calls), placed)


def compute(session: TvmSession) -> list[Any] | None:
    output = session.machine["main"](*session.inputs)
    outputs = [output] if hasattr(output, "numpy") else list(output)
    if any(not str(tensor.device).startswith("cpu") for tensor in outputs):
        return None
    return [tensor.numpy().astype("float64") for tensor in outputs]


def caller(session: TvmSession) -> Callable[[], None]:
    return lambda: session.machine["main"](*session.inputs)


def count_kernels(session: TvmSession) -> int:
    if not session.kernels:
        raise CheckFailure("TVM made the model into nothing")
    return session.kernels
