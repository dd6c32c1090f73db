"""ONNX Runtime: sessions that run only on one provider, as their profiles show."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..context import CheckFailure, LazyModule
from .runtimes import Runtime

NAME = "onnxruntime"

onnxruntime: Any = LazyModule("onnxruntime")


@dataclass(frozen=True)
class OnnxRuntimeSession:
    """A session with its inputs and outputs bound on the device of its runtime.

    On the CPU, the memory of an array is bound. The binding does not reference the array, so `inputs` do.
    """

    handle: Any
    binding: Any
    runtime: Runtime
    inputs: Mapping[str, Any]


def version() -> str:
    return str(onnxruntime.__version__)


def read_model(path: str) -> tuple[int, int]:
    """Return the operator set and number of nodes of a model file, which must pass onnx's checker."""
    onnx: Any = importlib.import_module("onnx")
    onnx.checker.check_model(path)
    model = onnx.load(path, load_external_data=False)
    (opset,) = [row.version for row in model.opset_import if row.domain in ("", "ai.onnx")]
    return int(opset), len(model.graph.node)


def open_session(
    path: str, inputs: Mapping[str, Any], runtime: Runtime, threads: int, profile: str
) -> OnnxRuntimeSession:
    """Open a session whose nodes all run on the runtime's providers, with a profile in files named like
    `profile`.

    Raises CheckFailure if this build lacks the provider or it cannot start, since ONNX Runtime would continue
    on the CPU. With `disable_cpu_ep_fallback`, ONNX Runtime rejects a model with a node for the CPU.
    """
    provider = runtime.providers[0]
    if provider not in onnxruntime.get_available_providers():
        raise CheckFailure(f"onnxruntime {version()} has no {provider}: install {runtime.brings[0]} alone")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = profile
    if runtime.gpu:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    providers = [
        (name, {"device_id": "0", "use_tf32": "0"}) if name == "CUDAExecutionProvider" else name
        for name in runtime.providers
    ]
    handle = onnxruntime.InferenceSession(path, options, providers=providers, enable_fallback=0)
    if handle.get_providers()[:1] != [provider]:
        raise CheckFailure(f"requested {provider} from ONNX Runtime, got {', '.join(handle.get_providers())}")
    binding = handle.io_binding()
    for name, array in inputs.items():
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array, runtime.place, 0)
        binding.bind_ortvalue_input(name, value)
    binding.synchronize_inputs()
    for output in handle.get_outputs():
        binding.bind_output(output.name, runtime.place, 0)
    return OnnxRuntimeSession(handle, binding, runtime, dict(inputs))


def compute(session: OnnxRuntimeSession) -> list[Any] | None:
    call(session)
    outputs = session.binding.get_outputs()
    if any(output.device_name() != session.runtime.place for output in outputs):
        return None
    return [array.astype("float64") for array in session.binding.copy_outputs_to_cpu()]


def caller(session: OnnxRuntimeSession) -> Callable[[], None]:
    return lambda: call(session)


def call(session: OnnxRuntimeSession) -> None:
    session.handle.run_with_iobinding(session.binding)
    session.binding.synchronize_outputs()


def count_kernels(session: OnnxRuntimeSession) -> int:
    """Count the kernels in ONNX Runtime's profile, which ends. One must have run on the first provider."""
    path = session.handle.end_profiling()
    with open(path, encoding="utf-8") as file:
        events = json.load(file)
    os.remove(path)
    return count_events(events, session.runtime.providers)


def count_events(events: Iterable[Mapping[str, Any]], providers: tuple[str, ...]) -> int:
    ran = [event for event in events if event.get("cat") == "Node" and "provider" in event.get("args", {})]
    elsewhere = sorted(
        {
            f"{event['args'].get('op_name', event.get('name'))} on {event['args']['provider']}"
            for event in ran
            if event["args"]["provider"] not in providers
        }
    )
    if elsewhere:
        raise CheckFailure(f"not all ran on {providers[0]}: {', '.join(elsewhere[:5])}")
    if not any(event["args"]["provider"] == providers[0] for event in ran):
        raise CheckFailure(f"ONNX Runtime's profile names nothing that ran on {providers[0]}")
    return len(ran)
