"""ONNX Runtime: sessions that run on one provider and nowhere else, and the proof that they did."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..context import CheckFailure
from .runtimes import Runtime

NAME = "onnxruntime"


@dataclass(frozen=True)
class OnnxRuntimeSession:
    """An ONNX Runtime session, its inputs and outputs bound where its runtime has them.

    On the CPU what is bound is an array's own memory, and no binding keeps the array: `inputs` do.
    """

    handle: Any
    binding: Any
    runtime: Runtime
    inputs: Mapping[str, Any]


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


def open_session(
    path: str, inputs: Mapping[str, Any], runtime: Runtime, threads: int, profile: str
) -> OnnxRuntimeSession:
    """A session whose nodes all run by the runtime's providers. Profiling, to files that `profile` begins, is
    on until `prove` ends it.

    Raises CheckFailure where the provider is not in this build or cannot start: ONNX Runtime would go on
    with the
    CPU. With `disable_cpu_ep_fallback` it refuses a model of which a node would run there.
    """
    module, provider = _onnxruntime(), runtime.providers[0]
    if provider not in module.get_available_providers():
        raise CheckFailure(
            f"onnxruntime {module.__version__} has no {provider}: install {runtime.brings[0]} alone"
        )
    options = module.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = profile
    if runtime.gpu:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    wanted = [
        (name, {"device_id": "0", "use_tf32": "0"}) if name == "CUDAExecutionProvider" else name
        for name in runtime.providers
    ]
    handle = module.InferenceSession(path, options, providers=wanted, enable_fallback=0)
    if handle.get_providers()[:1] != [provider]:
        raise CheckFailure(f"asked ONNX Runtime for {provider}, got {', '.join(handle.get_providers())}")
    binding = handle.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, module.OrtValue.ortvalue_from_numpy(array, runtime.place, 0))
    binding.synchronize_inputs()
    for output in handle.get_outputs():
        binding.bind_output(output.name, runtime.place, 0)
    return OnnxRuntimeSession(handle, binding, runtime, dict(inputs))


def compute(session: OnnxRuntimeSession) -> list[Any] | None:
    """The outputs as arrays of float64; None where one came from elsewhere than the session's place."""
    call(session)
    outputs = session.binding.get_outputs()
    if any(output.device_name() != session.runtime.place for output in outputs):
        return None
    return [array.astype("float64") for array in session.binding.copy_outputs_to_cpu()]


def caller(session: OnnxRuntimeSession) -> Callable[[], None]:
    """One pass with the inputs already in their place; the pass is over when the call returns."""
    return lambda: call(session)


def call(session: OnnxRuntimeSession) -> None:
    session.handle.run_with_iobinding(session.binding)
    session.binding.synchronize_outputs()


def prove(session: OnnxRuntimeSession) -> int:
    """How many kernels ran, by ONNX Runtime's own profile of what `session` did; ends the profile.

    Raises CheckFailure where any ran on another provider than the session's, or none on its first.
    """
    path = session.handle.end_profiling()
    with open(path, encoding="utf-8") as file:
        events = json.load(file)
    os.remove(path)
    return count_kernels(events, session.runtime.providers)


def count_kernels(events: Iterable[Mapping[str, Any]], providers: tuple[str, ...]) -> int:
    """Of the events of a profile. Raises CheckFailure like `prove`."""
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
