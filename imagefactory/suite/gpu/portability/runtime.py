"""ONNX Runtime: sessions that run on one provider and nowhere else, and the proof that they did."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...context import Failure

NAME = "onnxruntime"
PROVIDERS = {"cpu": "CPUExecutionProvider", "gpu": "CUDAExecutionProvider"}
DEVICES = {"cpu": "cpu", "gpu": "cuda"}


@dataclass(frozen=True)
class Session:
    """An ONNX Runtime session on `device` (`cpu` or `gpu`), its inputs and output bound there."""

    handle: Any
    binding: Any
    device: str


def _onnxruntime() -> Any:
    return importlib.import_module("onnxruntime")


def version() -> str:
    return str(_onnxruntime().__version__)


def look(path: str) -> tuple[int, int]:
    """Operator set and number of nodes of a model's file, which onnx's checker must find valid."""
    onnx: Any = importlib.import_module("onnx")
    onnx.checker.check_model(path)
    found = onnx.load(path, load_external_data=False)
    (opset,) = [one.version for one in found.opset_import if one.domain in ("", "ai.onnx")]
    return int(opset), len(found.graph.node)


def open_session(path: str, sample: Mapping[str, Any], device: str, threads: int) -> Session:
    """A session whose nodes all run on `device`. Profiling is on until `prove` ends it.

    Raises Failure where the provider is not in this build or cannot start: ONNX Runtime would go on with the
    CPU. With `disable_cpu_ep_fallback` it refuses a model of which a node would run there.
    """
    runtime, provider = _onnxruntime(), PROVIDERS[device]
    if provider not in runtime.get_available_providers():
        raise Failure(f"onnxruntime {runtime.__version__} has no {provider}: install onnxruntime-gpu alone")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = f"{path}.{device}"
    wanted: Any = provider
    if device == "gpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        wanted = (provider, {"device_id": "0", "use_tf32": "0"})
    handle = runtime.InferenceSession(path, options, providers=[wanted], enable_fallback=0)
    if handle.get_providers()[:1] != [provider]:
        raise Failure(f"asked ONNX Runtime for {provider}, got {', '.join(handle.get_providers())}")
    binding = handle.io_binding()
    for name, array in sample.items():
        binding.bind_ortvalue_input(name, runtime.OrtValue.ortvalue_from_numpy(array, DEVICES[device], 0))
    binding.synchronize_inputs()
    binding.bind_output(handle.get_outputs()[0].name, DEVICES[device], 0)
    return Session(handle, binding, device)


def compute(session: Session) -> Any:
    """The output as nested lists; None where it came from elsewhere than the session's device."""
    call(session)
    (output,) = session.binding.get_outputs()
    if output.device_name() != DEVICES[session.device]:
        return None
    (array,) = session.binding.copy_outputs_to_cpu()
    return array.astype("float64").tolist()


def caller(session: Session) -> Callable[[], None]:
    """One pass with the inputs already on the device; the pass is over when the call returns."""
    return lambda: call(session)


def call(session: Session) -> None:
    session.handle.run_with_iobinding(session.binding)
    session.binding.synchronize_outputs()


def prove(session: Session) -> int:
    """How many kernels ran, by ONNX Runtime's own profile of what `session` did; ends the profile.

    Raises Failure where any ran on another provider than the session's, or none did.
    """
    path = session.handle.end_profiling()
    with open(path, encoding="utf-8") as file:
        events = json.load(file)
    os.remove(path)
    return count_kernels(events, PROVIDERS[session.device])


def count_kernels(events: Iterable[Mapping[str, Any]], provider: str) -> int:
    """Of the events of a profile. Raises Failure like `prove`."""
    ran = [event for event in events if event.get("cat") == "Node" and "provider" in event.get("args", {})]
    elsewhere = sorted(
        {
            f"{event['args'].get('op_name', event.get('name'))} on {event['args']['provider']}"
            for event in ran
            if event["args"]["provider"] != provider
        }
    )
    if elsewhere:
        raise Failure(f"not all ran on {provider}: {', '.join(elsewhere[:5])}")
    if not ran:
        raise Failure(f"ONNX Runtime's profile names nothing that ran on {provider}")
    return len(ran)
