"""OpenVINO on the CPU, in float32: left to itself it takes bfloat16 where the processor has units for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..context import CheckFailure
from .runtimes import Runtime

NAME = "openvino"


@dataclass(frozen=True)
class OpenVinoSession:
    compiled: Any
    request: Any
    inputs: Mapping[str, Any]


def _openvino() -> Any:
    return importlib.import_module("openvino")


def version() -> str:
    return str(_openvino().__version__).partition("-")[0]


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
    compiled = _openvino().Core().compile_model(path, "CPU", settings)
    return OpenVinoSession(compiled, compiled.create_infer_request(), dict(inputs))


def compute(session: OpenVinoSession) -> list[Any] | None:
    """The outputs as arrays of float64, in the model's order; None where another device was used."""
    found = session.request.infer(session.inputs)
    if list(session.compiled.get_property("EXECUTION_DEVICES")) != ["CPU"]:
        return None
    return [found[output].astype("float64") for output in session.compiled.outputs]


def caller(session: OpenVinoSession) -> Callable[[], None]:
    """One pass; the pass is over when the call returns."""

    def call() -> None:
        session.request.infer(session.inputs)

    return call


def prove(session: OpenVinoSession) -> int:
    """How many kernels ran, by OpenVINO's own counters of the last pass. Raises CheckFailure where none
    did.
    """
    ran = [one for one in session.request.profiling_info if str(one.status).endswith("EXECUTED")]
    if not ran:
        raise CheckFailure("OpenVINO's counters name nothing that ran")
    return len(ran)
