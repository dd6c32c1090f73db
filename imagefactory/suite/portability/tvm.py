"""Apache TVM on the CPU: the model compiled by LLVM for this processor, without tuning."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..context import CheckFailure
from .runtimes import Runtime

NAME = "tvm"


@dataclass(frozen=True)
class TvmSession:
    machine: Any
    kernels: int
    inputs: tuple[Any, ...]


def _tvm() -> Any:
    return importlib.import_module("tvm")


def version() -> str:
    return str(_tvm().__version__)


def open_session(
    path: str,
    inputs: Mapping[str, Any],
    runtime: Runtime,  # noqa: ARG001
    threads: int,
    profile: str,  # noqa: ARG001
) -> TvmSession:
    """Compiled for the sizes of `inputs`."""
    os.environ["TVM_NUM_THREADS"] = str(threads)  # read when its pool of threads starts
    onnx, tvm = importlib.import_module("onnx"), _tvm()
    relax, frontend = tvm.relax, importlib.import_module("tvm.relax.frontend.onnx")
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    module = frontend.from_onnx(onnx.load(path), shape_dict=shapes, keep_params_in_input=False)
    order = [variable.name for variable in module["main"].params]
    compiled = tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "mcpu": _processor()}))
    machine = relax.VirtualMachine(compiled, tvm.cpu())
    placed = tuple(tvm.runtime.tensor(inputs[name]) for name in order)
    return TvmSession(machine, _count_kernels(compiled.as_text()), placed)


def _processor() -> str:
    """As LLVM calls this one: without it code is for any x86-64, and several times slower."""
    return str(_tvm().get_global_func("target.llvm_get_system_cpu")())


def compute(session: TvmSession) -> list[Any] | None:
    """The outputs as arrays of float64; None where one lies elsewhere than on the CPU."""
    found = session.machine["main"](*session.inputs)
    outputs = [found] if hasattr(found, "numpy") else list(found)
    if any(not str(output.device).startswith("cpu") for output in outputs):
        return None
    return [output.numpy().astype("float64") for output in outputs]


def caller(session: TvmSession) -> Callable[[], None]:
    """One pass; the pass is over when the call returns."""

    def call() -> None:
        session.machine["main"](*session.inputs)

    return call


def prove(session: TvmSession) -> int:
    """How many calls of compiled functions a pass makes. Raises CheckFailure where it makes none."""
    if not session.kernels:
        raise CheckFailure("TVM made the model into nothing")
    return session.kernels


def _count_kernels(program: str) -> int:
    """Of a program of its virtual machine; what begins with `vm.` is the machine's own."""
    calls = [line.split()[1] for line in program.splitlines() if line.startswith("  call")]
    return sum(not name.startswith("vm.") for name in calls)
