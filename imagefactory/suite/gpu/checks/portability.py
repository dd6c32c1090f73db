"""The check `portability`: models of the framework give the same results in ONNX Runtime, on CPU and GPU.

Each model is built from code, computed by the framework in float64 on the CPU, and exported to ONNX.
Framework and runtime run it on the CPU and on the GPU, and all four results must agree with float64. The
profile of ONNX Runtime must show that every kernel ran on the requested device. Latencies are for batch size
1 in float32 without TF32, with inputs on the device.

Each model has two controls. A copy with a wrong weight must give other results, and the framework must
compute the same results twice: a model that draws random numbers needs an override in the table.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...context import CheckFailure, Finding
from ...portability import case, onnxruntime, rows
from ...portability.runtimes import RUNTIMES
from ..context import GpuContext, MeasuredFailure
from ..frameworks.results import classify

# Device -> the runtime that must run all of a model there.
ON = {"cpu": RUNTIMES["onnxruntime-cpu"], "gpu": RUNTIMES["onnxruntime-cuda"]}


@dataclass(frozen=True)
class PortabilityModules:
    """The modules for this check.

    `exporter` is the framework's file in portability/, `maker` builds its models.

    `runtime` is the file of ONNX Runtime. `devices` are `cpu` or `gpu`, `threads` is the number of CPU
    threads.
    """

    exporter: Any
    maker: Any
    runtime: Any
    devices: tuple[str, ...]
    threads: int


def check_portability(context: GpuContext) -> Finding:
    """Test every model, also after a failure; in a rehearsal only on the CPU."""
    name = context.request.expected.framework
    exporter: Any = importlib.import_module(f"...portability.{name}", __package__)
    bench = PortabilityModules(
        exporter=exporter,
        maker=importlib.import_module(f"...portability.{name}_models", __package__),
        runtime=onnxruntime,
        devices=("cpu",) if context.rehearsal else ("gpu", "cpu"),
        threads=rows.threads(),
    )
    exporter.prepare(bench.threads)
    return try_models(case.MODELS, bench)


def try_models(chosen: Iterable[case.Model], bench: PortabilityModules) -> Finding:
    """Return the numbers.

    Raises Refusal with all failures and numbers, and the outcome of the first failure.
    """
    numbers: dict[str, float] = {"threads": bench.threads}
    names: list[str] = []
    faults: dict[str, list[str]] = {}
    outcomes: list[str] = []
    for model in chosen:
        names.append(model.name)
        try:
            for name, value in try_model(model, bench):
                numbers[f"{model.name}-{name}"] = value
        except CheckFailure as failure:
            faults.setdefault(failure.detail, []).append(model.name)
            outcomes.append(failure.outcome)
        except Exception as error:
            faults.setdefault(f"{type(error).__name__}: {error}", []).append(model.name)
            outcomes.append(classify(error))
    if faults:
        text = "; ".join(f"{', '.join(models)}: {detail}" for detail, models in faults.items())
        raise MeasuredFailure(text, outcome=outcomes[0], numbers=numbers)
    worst = max(value for name, value in numbers.items() if name.endswith("-error"))
    return Finding(
        f"{', '.join(names)} give the same in {bench.exporter.NAME} {bench.exporter.version()} and "
        f"ONNX Runtime {bench.runtime.version()} on {' and '.join(bench.devices)}, "
        f"off by {worst:.1g} at most",
        numbers,
    )


def try_model(model: case.Model, bench: PortabilityModules) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a model. Raises CheckFailure for a wrong result or device."""
    exporter, maker = bench.exporter, bench.maker
    sample = case.make_sample(model)
    network = maker.build(model)
    expected = exporter.compute(maker.as_double(network), sample, "cpu")
    case.check_repeats(case.Case(model.name, exporter, network, sample, sample, batched=False))
    check_differs(exporter.compute(maker.damaged(network), sample, "cpu"), expected)
    with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
        path = os.path.join(scratch, f"{model.name}.onnx")
        exporter.export(network, sample, path, outputs=len(expected), batched=False)
        opset, nodes = bench.runtime.read_model(path)
        yield from (("opset", opset), ("nodes", nodes))
        for device in bench.devices:
            engine = f"{device}-{exporter.NAME}"
            yield from agree(engine, exporter.compute(network, sample, device), expected)
            yield from clock(engine, exporter.caller(network, sample, device))

            engine = f"{device}-{bench.runtime.NAME}"
            profile = f"{path}.{device}"
            session = bench.runtime.open_session(path, sample, ON[device], bench.threads, profile)
            outputs = bench.runtime.compute(session)
            yield f"{engine}-kernels", bench.runtime.count_kernels(session)
            yield from agree(engine, outputs, expected)
            yield from clock(engine, bench.runtime.caller(session))


def agree(engine: str, outputs: list[Any] | None, expected: list[Any]) -> Iterator[tuple[str, float]]:
    """Return the error. Raises CheckFailure if it exceeds the tolerance."""
    device, _, name = engine.partition("-")
    if outputs is not None:
        yield f"{engine}-error", case.off(outputs, expected)
    case.agree(name, device, outputs, expected, case.TOLERANCE)


def clock(engine: str, call: Callable[[], None]) -> Iterator[tuple[str, float]]:
    p50, p95 = rows.latencies(call)
    yield from ((f"{engine}-p50-ms", p50), (f"{engine}-p95-ms", p95))


def check_differs(wrong: list[Any] | None, expected: list[Any]) -> None:
    """Raise CheckFailure if a wrong weight would pass."""
    error = case.off(wrong, expected)
    if error <= case.TOLERANCE:
        raise CheckFailure(f"a wrong weight is not detected: it changes the output by only {error:.2g}")
