"""`portability`: models made by the framework run in ONNX Runtime with the same results, on CPU and GPU.

Each model is built from code, computed by the framework in float64 on the CPU, exported to ONNX and run: by
framework and runtime, on the CPU and on the GPU. All four must agree with float64. ONNX Runtime's own profile
must say that every kernel ran on the device that was asked for. Latencies are of batch 1 in float32 without
TF32, with the inputs on the device.

Two controls go with each model: a copy with one wrong weight must be told apart, and the framework must say
the same twice, or the model draws random numbers and needs an override in the table.
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
from ..context import GpuContext, Refusal

# Device -> the runtime that must run all of a model there.
ON = {"cpu": RUNTIMES["onnxruntime-cpu"], "gpu": RUNTIMES["onnxruntime-cuda"]}


@dataclass(frozen=True)
class Bench:
    """`exporter` is the framework's file of portability/, `maker` that of its models.

    `runtime` is ONNX Runtime's file, `devices` are of `cpu` and `gpu`, `threads` the CPU's for both;
    `classify` has the word for an exception.
    """

    exporter: Any
    maker: Any
    runtime: Any
    devices: tuple[str, ...]
    threads: int
    classify: Callable[[Exception], str]


def check_portability(context: GpuContext) -> Finding:
    """Every model, whatever became of the one before; in a rehearsal on the CPU alone."""
    name = context.asked.expected.framework
    exporter: Any = importlib.import_module(f"...portability.{name}", __package__)
    bench = Bench(
        exporter=exporter,
        maker=importlib.import_module(f"...portability.{name}_models", __package__),
        runtime=onnxruntime,
        devices=("cpu",) if context.asked.rehearsal else ("gpu", "cpu"),
        threads=rows.threads(),
        classify=context.framework.classify,
    )
    exporter.prepare(bench.threads)
    return try_models(case.MODELS, bench)


def try_models(chosen: Iterable[case.Model], bench: Bench) -> Finding:
    """Raises Refusal with all that failed and what was measured, under the word of the first."""
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
            outcomes.append(bench.classify(error))
    if faults:
        said = "; ".join(f"{', '.join(whose)}: {detail}" for detail, whose in faults.items())
        raise Refusal(said, outcome=outcomes[0], numbers=numbers)
    worst = max(value for name, value in numbers.items() if name.endswith("-error"))
    return Finding(
        f"{', '.join(names)} give the same in {bench.exporter.NAME} {bench.exporter.version()} and "
        f"ONNX Runtime {bench.runtime.version()} on {' and '.join(bench.devices)}, "
        f"off by {worst:.1g} at most",
        numbers,
    )


def try_model(model: case.Model, bench: Bench) -> Iterator[tuple[str, float]]:
    """The numbers of one model as they come. Raises CheckFailure at what differs or came from another
    device.
    """
    exporter, maker = bench.exporter, bench.maker
    sample = case.make_sample(model)
    made = case.Case(model.name, exporter, maker.build(model), sample, sample, batched=False)
    expected = exporter.compute(maker.as_double(made.network), sample, "cpu")
    case.check_repeats(made)
    check_told_apart(exporter.compute(maker.damaged(made.network), sample, "cpu"), expected)
    with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
        path = os.path.join(scratch, f"{model.name}.onnx")
        exporter.export(made.network, sample, path, outputs=len(expected), batched=False)
        opset, nodes = bench.runtime.look(path)
        yield from (("opset", opset), ("nodes", nodes))
        for device in bench.devices:
            engine = f"{device}-{exporter.NAME}"
            yield from agree(engine, exporter.compute(made.network, sample, device), expected)
            yield from clock(engine, exporter.caller(made.network, sample, device))

            engine = f"{device}-{bench.runtime.NAME}"
            profile = f"{path}.{device}"
            session = bench.runtime.open_session(path, sample, ON[device], bench.threads, profile)
            found = bench.runtime.compute(session)
            yield f"{engine}-kernels", bench.runtime.prove(session)
            yield from agree(engine, found, expected)
            yield from clock(engine, bench.runtime.caller(session))


def agree(engine: str, found: list[Any] | None, expected: list[Any]) -> Iterator[tuple[str, float]]:
    """How far `found` is off. Raises CheckFailure beyond the tolerance, once that number is given."""
    device, _, name = engine.partition("-")
    if found is not None:
        yield f"{engine}-error", case.off(found, expected)
    case.agree(name, device, found, expected, case.TOLERANCE)


def clock(engine: str, call: Callable[[], None]) -> Iterator[tuple[str, float]]:
    p50, p95 = rows.latencies(call)
    yield from ((f"{engine}-p50-ms", p50), (f"{engine}-p95-ms", p95))


def check_told_apart(wrong: list[Any] | None, expected: list[Any]) -> None:
    """Raises CheckFailure where a wrong weight would pass."""
    error = case.off(wrong, expected)
    if error <= case.TOLERANCE:
        raise CheckFailure(f"a wrong weight is not told apart: it changes the output by {error:.2g} alone")
