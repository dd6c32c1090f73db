"""The second program: runs exported models in the runtimes of an image, and compares the outputs.

Each runtime has a separate process. If a model ends it, the later models and the other runtimes still run.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..context import CheckFailure, LazyModule
from ..table import LOAD_FAILED, PASSED
from . import rows
from .case import agree, of_batch
from .runtimes import RUNTIMES, Runtime

REPORT = "try.json"
SECONDS = 1200.0
"""The time limit in seconds of a runtime for all models, several times that of a slow compiler."""
LAST_WORDS = 600
ENTRY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "portable.py")

numpy: Any = LazyModule("numpy")


def main(request_path: str, folder: str) -> int:
    """Return 0 if every runtime computes the same results for every model, 1 otherwise."""
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    results: list[rows.Row] = []
    for name in request["runtimes"]:
        results += _run_runtime(request_path, request, folder, name, results)
    _write(folder, request, "", results)
    return 0 if all(row["state"] == PASSED for row in results) else 1


def _run_runtime(
    request_path: str, request: Mapping[str, Any], folder: str, name: str, before: Sequence[rows.Row]
) -> list[rows.Row]:
    """Return the rows of a runtime.

    If a model ends its process, another process starts with the next model.
    """
    names = [model["name"] for model in request["models"]]
    part = os.path.join(folder, "part.json")
    results: list[rows.Row] = []
    while len(results) < len(names):
        first = names[len(results)]
        _write(folder, request, f"{name} {first}", [*before, *results])
        end = _run(request_path, part, name, first)
        if os.path.exists(part):
            with open(part, encoding="utf-8") as file:
                for row in json.load(file)["rows"]:
                    print(f"{row['model']} by {name}: {row['state']} {row['detail']}", flush=True)
                    results.append(row)
            os.remove(part)
        if end and len(results) < len(names):
            row = rows.make_row(names[len(results)], name)
            results.append(rows.failed(row, CheckFailure(end), LOAD_FAILED))
    return results


def _run(request_path: str, part: str, name: str, first: str) -> str:
    """Run the models from `first` on in a runtime. Return how the process failed, if it did."""
    command = [sys.executable, "-I", "-B", "-X", "faulthandler", ENTRY]
    command += ["one", request_path, part, name, first]
    with tempfile.TemporaryFile() as log:
        try:
            code = subprocess.run(command, stderr=log, timeout=SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"stopped: it had {SECONDS:.0f} s"
        if code == 0:
            return ""
        log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS))
        lines = log.read().decode("utf-8", "replace").split("\n")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    words = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"the process ended by {how}" + (f": {words}" if words else " and said nothing")


def _write(folder: str, request: Mapping[str, Any], running: str, results: Sequence[rows.Row]) -> None:
    document = {"threads": rows.threads(), "running": running, "rows": list(results)}
    rows.write(os.path.join(folder, REPORT), request["nonce"], document)


def run_models(request_path: str, part: str, name: str, first: str) -> int:
    """Run the models from `first` on, inside the process of a runtime. The parent reports a crash."""
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    results: list[rows.Row] = []
    names = [model["name"] for model in request["models"]]
    for model in request["models"][names.index(first) :]:
        results.append(try_model(model, RUNTIMES[name], request))
        rows.write(part, request["nonce"], {"rows": results})
    sys.stdout.flush()
    os._exit(0)  # a runtime that crashes at exit has computed the results


def try_model(model: Mapping[str, Any], runtime: Runtime, request: Mapping[str, Any]) -> rows.Row:
    """Run a model in a runtime, compare the results on the held-out inputs, check the device, and measure the
    time.
    """
    row, began = rows.make_row(model["name"], runtime.name), time.monotonic()
    try:
        engine = _engine(runtime)
        row["version"] = engine.version()
        held_out, expected = _read_data(os.path.join(request["folder"], f"{model['name']}.npz"))
        path = os.path.join(request["folder"], f"{model['name']}.onnx")
        with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
            profile = os.path.join(scratch, "profile")
            session = engine.open_session(path, held_out, runtime, rows.threads(), profile)
            outputs = engine.compute(session)
            row["kernels"] = engine.count_kernels(session)
            row["error"] = agree(engine.NAME, runtime.place, outputs, expected, model["tolerance"])
            calls = []
            for size in request["batches"] if model["batched"] else (model["held_out"],):
                inputs = of_batch(held_out, size) if model["batched"] else held_out
                timed = engine.open_session(path, inputs, runtime, rows.threads(), f"{profile}-{size}")
                engine.compute(timed)
                engine.count_kernels(timed)
                calls.append((size, engine.caller(timed)))
            row["latencies"] = rows.clock(calls)
        row["state"] = PASSED
    except Exception as error:
        row = rows.failed(row, error, LOAD_FAILED)
    return {**row, "seconds": round(time.monotonic() - began, 3)}


def _engine(runtime: Runtime) -> Any:
    """Return the file of the runtime. Raises CheckFailure if this image does not have the runtime."""
    engine: Any = importlib.import_module(f".{runtime.module}", __package__)
    try:
        engine.version()
    except ImportError as error:
        missing = f"this image has no {runtime.module} ({error}): add {' or '.join(runtime.brings)}"
        raise CheckFailure(missing) from error
    return engine


def _read_data(path: str) -> tuple[dict[str, Any], list[Any]]:
    with numpy.load(path, allow_pickle=False) as data:
        held_out = {name.removeprefix("in."): data[name] for name in data.files if name.startswith("in.")}
        count = sum(name.startswith("out.") for name in data.files)
        return held_out, [data[f"out.{number}"] for number in range(count)]
