"""The first program: runs the user's models in their framework, and writes each as ONNX with its expected
outputs.

The models come from `models()` in a Python file, which returns one mapping for each model.

FOLDER/export.json       a row for each model and device FOLDER/NAME.onnx         the model FOLDER/NAME.npz
`in.INPUT`: the held-out inputs; `out.NUMBER`: the framework's outputs
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from ..context import CheckFailure, LazyModule
from ..table import LOAD_FAILED, PASSED
from . import rows
from .case import TOLERANCE, Case, agree, check_repeats, of_batch
from .onnxruntime import read_model

EXPORTERS = ("torch", "tensorflow", "jax")
"""The frameworks in test order: JAX is last, because its models are functions, as others may be."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
KEYS = ("name", "model", "sample", "held_out", "tolerance", "override", "batched")
LARGEST_BATCH = 65536

numpy: Any = LazyModule("numpy")


def read_models(path: str) -> list[Case]:
    """Return the models in a file, each with the file of its framework.

    Raises CheckFailure that names the file, the line in it that raised, and a fix.
    """
    file = os.path.basename(path)
    models = _call_models(path, file)
    if not isinstance(models, (list, tuple)) or not models:
        raise CheckFailure(f"{file}: models() gives a {type(models).__name__}: let it give a list of models")
    cases = [_case(row, f"{file}: models()[{number}]") for number, row in enumerate(models)]
    names = [case.name for case in cases]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise CheckFailure(f"{file}: two models are called '{twice}': give each a name of its own")
    return cases


def _call_models(path: str, file: str) -> Any:
    """Return the result of `models()`, with a generator as a list. The file can import neighbor files."""
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("models", path)
    if spec is None or spec.loader is None:
        raise CheckFailure(f"{file} is not a Python file: rename it to models.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["models"] = module
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, "models", None)):
            raise CheckFailure(f"{file} has no function models(): let it give a list of models")
        models = module.models()
        whole = isinstance(models, (list, tuple, Mapping)) or not hasattr(models, "__iter__")
        return models if whole else list(models)
    except CheckFailure:
        raise
    except (Exception, SystemExit) as error:
        raise CheckFailure(f"{_line_of(error, path, file)}: {type(error).__name__}: {error}") from error


def _line_of(error: BaseException, path: str, file: str) -> str:
    """Return `models.py:12`, the last line in that file that was running."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{file}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return next((f"{file}:{frame.lineno}" for frame in reversed(frames) if frame.filename == path), file)


def _case(row: object, where: str) -> Case:
    if not isinstance(row, Mapping):
        raise CheckFailure(f"{where} is a {type(row).__name__}: write a dict with {', '.join(KEYS[:3])}")
    unknown = sorted(str(key) for key in row if key not in KEYS)
    if unknown:
        raise CheckFailure(f"{where} has '{unknown[0]}', which means nothing: it may have {', '.join(KEYS)}")
    missing = next((key for key in KEYS[:3] if key not in row), "")
    if missing:
        raise CheckFailure(f"{where} has no '{missing}'")
    name = row["name"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CheckFailure(
            f"{where}: {name!r} is not a valid name: use lowercase letters, digits, dots and dashes"
        )
    where = f"{where} '{name}'"
    exporter, network = _exporter(row["model"], where), row["model"]
    if method := row.get("override", ""):
        if not isinstance(method, str) or not callable(getattr(network, method, None)):
            raise CheckFailure(f"{where}: override is {method!r}: name a method of the model, as a text")
        network = exporter.override(network, method)
    batched, tolerance = row.get("batched", True), row.get("tolerance", TOLERANCE)
    if not isinstance(batched, bool):
        raise CheckFailure(f"{where}: batched is {batched!r}: write True or False")
    if not isinstance(tolerance, (float, int)) or not 0 < tolerance < 1:
        hint = "write a part of the largest output, such as 1e-4"
        raise CheckFailure(f"{where}: tolerance is {tolerance!r}: {hint}")
    sample = _arrays(row["sample"], f"{where}: sample", batched=batched)
    held_out = _arrays(row.get("held_out", sample), f"{where}: held_out", batched=batched)
    if list(sample) != list(held_out):
        raise CheckFailure(f"{where}: held_out has {', '.join(held_out)}, and sample {', '.join(sample)}")
    for name_of_input, array in sample.items():
        other, start = held_out[name_of_input], 1 if batched else 0
        if array.dtype != other.dtype or array.shape[start:] != other.shape[start:]:
            raise CheckFailure(
                f"{where}: '{name_of_input}' is {other.dtype}{list(other.shape)} in held_out and "
                f"{array.dtype}{list(array.shape)} in sample"
            )
    return Case(
        name=name,
        exporter=exporter,
        network=exporter.settle(network),
        sample=exporter.canonical(sample),
        held_out=exporter.canonical(held_out),
        tolerance=float(tolerance),
        batched=batched,
    )


def _exporter(network: object, where: str) -> Any:
    """Return the file of the model's framework, one of the frameworks that are loaded."""
    for name in EXPORTERS:
        if name in sys.modules:
            exporter: Any = importlib.import_module(f".{name}", __package__)
            if exporter.owns(network):
                return exporter
    raise CheckFailure(
        f"{where}: model is of type {type(network).__name__}: give a torch.nn.Module, a model of Keras, a "
        "tf.Module, a tf.function, or a function of JAX's arrays"
    )


def _arrays(value: object, where: str, *, batched: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise CheckFailure(
            f"{where} is a {type(value).__name__}: write a dict of NumPy arrays by the inputs' names"
        )
    for name, array in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise CheckFailure(f"{where}: {name!r} is not the name of an input")
        if not isinstance(array, numpy.ndarray):
            raise CheckFailure(f"{where}: '{name}' is a {type(array).__name__}: write a NumPy array")
        if batched and not (array.ndim and 0 < len(array) <= LARGEST_BATCH):
            raise CheckFailure(f"{where}: '{name}' has no rows: give it some, or say batched: False")
    if batched and len({len(array) for array in value.values()}) > 1:
        raise CheckFailure(f"{where}: the inputs have different numbers of rows")
    return {name: numpy.ascontiguousarray(array) for name, array in value.items()}


REPORT = "export.json"


def main(request_path: str, folder: str) -> int:
    """Return 0 if every model was exported, 1 if one was not, or none could be read."""
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    report, threads = os.path.join(folder, REPORT), rows.threads()
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))  # TensorFlow reads it when it starts
    state: dict[str, Any] = {"fault": "", "processor": rows.processor(), "threads": threads}
    state |= {"running": "", "models": [], "rows": []}
    rows.write(report, request["nonce"], {**state, "running": "models()"})
    try:
        cases = read_models(request["models"])
    except CheckFailure as failure:
        rows.write(report, request["nonce"], {**state, "fault": failure.detail})
        return 1
    devices = ("cpu", "gpu") if request["gpu"] else ("cpu",)
    for exporter in {case.exporter.NAME: case.exporter for case in cases}.values():
        exporter.prepare(threads)
    for case in cases:
        rows.write(report, request["nonce"], {**state, "running": case.name})
        model, results = export_case(case, folder, devices, request["batches"])
        print(f"{case.name}: {results[-1]['state']} {results[-1]['detail']}", flush=True)
        state["models"].append(model)
        state["rows"] += results
    rows.write(report, request["nonce"], state)
    return 0 if all(row["state"] == PASSED for row in state["rows"]) else 1


def export_case(
    case: Case, folder: str, devices: Sequence[str], batches: Sequence[int]
) -> tuple[Mapping[str, Any], list[rows.Row]]:
    """Return the model, and a row for each device of its framework.

    The first row has the faults of the model.
    """
    exporter, held_out = case.exporter, case.held_out
    model: dict[str, Any] = {
        "name": case.name,
        "framework": exporter.NAME,
        "version": exporter.version(),
        "tolerance": case.tolerance,
        "batched": case.batched,
        "inputs": [
            {"name": name, "type": str(array.dtype), "shape": list(array.shape)}
            for name, array in case.sample.items()
        ],
        "held_out": len(next(iter(held_out.values()))) if case.batched else 1,
        "opset": 0,
        "nodes": 0,
        "digest": "",
        "size": 0,
    }
    results: list[rows.Row] = []
    expected: list[Any] = []
    for device in devices:
        began = time.monotonic()
        row = rows.make_row(case.name, f"{exporter.NAME}-{device}", exporter.version())
        try:
            if not results:
                expected, repeated = check_repeats(case)
                model["opset"], model["nodes"] = _export(case, expected, folder)
                row["error"] = repeated
            else:
                outputs = exporter.compute(case.network, held_out, device)
                row["error"] = agree(exporter.NAME, device, outputs, expected, case.tolerance)
            sizes = tuple(batches) if case.batched else (model["held_out"],)
            inputs = ((size, of_batch(held_out, size) if case.batched else held_out) for size in sizes)
            row["latencies"] = rows.clock(
                (size, exporter.caller(case.network, arrays, device)) for size, arrays in inputs
            )
            row["state"] = PASSED
        except Exception as error:
            row = rows.failed(row, error, LOAD_FAILED)
        results.append({**row, "seconds": round(time.monotonic() - began, 3)})
        if not expected:
            break
    return model, results


def _export(case: Case, expected: Sequence[Any], folder: str) -> tuple[int, int]:
    """Write the model and its data. Return the operator set and the number of nodes."""
    path = os.path.join(folder, f"{case.name}.onnx")
    case.exporter.export(case.network, case.sample, path, outputs=len(expected), batched=case.batched)
    data = {f"in.{name}": array for name, array in case.held_out.items()}
    data |= {f"out.{number}": array for number, array in enumerate(expected)}
    numpy.savez(os.path.join(folder, f"{case.name}.npz"), **data)
    return read_model(path)
