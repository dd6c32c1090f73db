"""OpenVINO on the CPU in float32: by default it uses bfloat16 if the processor supports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..context import CheckFailure, LazyModule
from .runtimes import Runtime

NAME = "openvino"

openvino: Any = LazyModule("openvino")


@dataclass(frozen=True)
class OpenVinoSession:
    compiled: Any
    request: Any
    inputs: Mapping[str, Any]


def version() -> str:
    return str(openvino.__version__).partition("-")[0]


def open_session(
    path: str,
    inputs: Mapping[str, Any],
    runtime: Runtime,  # noqa: ARG001
    threads: int,
    profile: str,  # noqa: ARG001
) -> OpenVinoSession:
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "PERF_COUNT": True,
    }
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return OpenVinoSession(compiled, compiled.create_infer_request(), dict(inputs))


def compute(session: OpenVinoSession) -> list[Any] | None:
    outputs = session.request.infer(session.inputs)
    if list(session.compiled.get_property("EXECUTION_DEVICES")) != ["CPU"]:
        return None
    return [outputs[output].astype("float64") for output in session.compiled.outputs]


def caller(session: OpenVinoSession) -> Callable[[], None]:
    return lambda: session.request.infer(session.inputs)


def count_kernels(session: OpenVinoSession) -> int:
    """Count the kernels with OpenVINO's counters of the last pass."""
    count = sum(str(row.status).endswith("EXECUTED") for row in session.request.profiling_info)
    if not count:
        raise CheckFailure("OpenVINO's counters name nothing that ran")
    return count
