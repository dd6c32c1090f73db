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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ... import reference
from ...context import Failure, Finding
from .. import table
from ..context import GpuContext, Refusal
from ..portability import measure, models, runtime

# Of the CPU, at most: a batch of 1 has no use for more, and figures of machines compare.
THREADS = 8

# Of the largest output, in float32. Measured on the CPU the models are off by at most 2e-6; cuDNN's fastest
# convolutions (Winograd) lose a digit more. TF32 rounds each factor to 2^-11, 5e-4: it would be seen.
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Bench:
    """`exporter` is the framework's file of portability/, `runtime` ONNX Runtime's.

    `devices` are of `cpu` and `gpu`, `threads` the CPU's for both; `classify` has the word for an exception.
    """

    exporter: Any
    runtime: Any
    devices: tuple[str, ...]
    threads: int
    classify: Callable[[Exception], str]


def check_portability(context: GpuContext) -> Finding:
    """Every model, whatever became of the one before; in a rehearsal on the CPU alone."""
    exporter: Any = importlib.import_module(f"..portability.{context.asked.expected.framework}", __package__)
    bench = Bench(
        exporter=exporter,
        runtime=runtime,
        devices=("cpu",) if context.asked.rehearsal else ("gpu", "cpu"),
        threads=min(THREADS, len(os.sched_getaffinity(0))),
        classify=context.framework.classify,
    )
    exporter.prepare(bench.threads)
    return try_models(models.MODELS, bench)


def try_models(chosen: Iterable[models.Model], bench: Bench) -> Finding:
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
        except Failure as failure:
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


def try_model(model: models.Model, bench: Bench) -> Iterator[tuple[str, float]]:
    """The numbers of one model as they come. Raises Failure at what differs or came from another device."""
    exporter = bench.exporter
    sample = models.make_sample(model)
    network = exporter.build(model)
    expected = exporter.compute(exporter.as_double(network), sample, "cpu")
    check_repeats(exporter, network, sample)
    check_told_apart(exporter.compute(exporter.damaged(network), sample, "cpu"), expected)
    with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
        path = os.path.join(scratch, f"{model.name}.onnx")
        exporter.export(network, sample, path)
        opset, nodes = bench.runtime.look(path)
        yield from (("opset", opset), ("nodes", nodes))
        for device in bench.devices:
            engine = f"{device}-{exporter.NAME}"
            yield from agree(engine, exporter.compute(network, sample, device), expected)
            yield from clock(engine, exporter.caller(network, sample, device))

            engine = f"{device}-{bench.runtime.NAME}"
            session = bench.runtime.open_session(path, sample, device, bench.threads)
            found = bench.runtime.compute(session)
            yield f"{engine}-kernels", bench.runtime.prove(session)
            yield from agree(engine, found, expected)
            yield from clock(engine, bench.runtime.caller(session))


def agree(engine: str, found: Any, expected: Any) -> Iterator[tuple[str, float]]:
    """How far `found` is off, relative to the largest expected value. Raises Failure beyond the tolerance."""
    device, _, name = engine.partition("-")
    if found is None:
        raise Failure(f"{name} did not compute on the {device}")
    error = reference.error(found, expected)
    yield f"{engine}-error", error
    if not error <= TOLERANCE:
        raise Failure(
            f"{name} on the {device} is off by {error:.2g} (at most {TOLERANCE:.0e})",
            outcome=table.WRONG_NUMBERS,
        )


def clock(engine: str, call: Callable[[], None]) -> Iterator[tuple[str, float]]:
    p50, p95 = measure.latencies(call)
    yield from ((f"{engine}-p50-ms", p50), (f"{engine}-p95-ms", p95))


def check_repeats(exporter: Any, network: Any, sample: Mapping[str, Any]) -> None:
    """Raises Failure where the same input gives two answers."""
    once, again = (exporter.compute(network, sample, "cpu") for _ in range(2))
    if not reference.error(again, once) <= TOLERANCE:
        raise Failure("draws random numbers, so there is nothing to compare: give it an override")


def check_told_apart(wrong: Any, expected: Any) -> None:
    """Raises Failure where a wrong weight would pass."""
    error = reference.error(wrong, expected)
    if error <= TOLERANCE:
        raise Failure(f"a wrong weight is not told apart: it changes the output by {error:.2g} alone")
