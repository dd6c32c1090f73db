"""The second program: exported models by the runtimes of an image, each compared with what is expected.

Each runtime is a process of its own: one that takes its process down leaves the others their turn, and the
models behind the one that it died of too.
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

from ..context import CheckFailure
from ..table import LOAD_FAILED, PASSED
from . import rows
from .case import agree, of_batch
from .runtimes import RUNTIMES, Runtime

REPORT = "try.json"
SECONDS = 1200.0
"""For a runtime and all models, several times what a slow compiler takes."""
LAST_WORDS = 600


def main(asked_path: str, folder: str) -> int:
    """Exit code 0 when every runtime gives the same for every model, 1 otherwise."""
    with open(asked_path, encoding="utf-8") as file:
        asked = json.load(file)
    done: list[rows.Row] = []
    for name in asked["runtimes"]:
        done += _in_turns(asked_path, asked, folder, name, done)
    _write(folder, asked, "", done)
    return 0 if all(row["state"] == PASSED for row in done) else 1


def _in_turns(
    asked_path: str, asked: Mapping[str, Any], folder: str, name: str, before: Sequence[rows.Row]
) -> list[rows.Row]:
    """The rows of one runtime; a process that dies is started again behind the model that it died of."""
    names = [model["name"] for model in asked["models"]]
    done: list[rows.Row] = []
    while len(done) < len(names):
        first = names[len(done)]
        _write(folder, asked, f"{name} {first}", [*before, *done])
        part = os.path.join(folder, "part.json")
        end = _run(asked_path, part, name, first)
        found = _read(part)
        for row in found:
            print(f"{row['model']} by {name}: {row['state']} {row['detail']}", flush=True)
        done += found
        if end and len(done) < len(names):
            row = rows.make_row(names[len(done)], name)
            done.append(rows.failed(row, CheckFailure(end), LOAD_FAILED))
    return done


def _run(asked_path: str, part: str, name: str, first: str) -> str:
    """Runs the models from `first` on by one runtime; gives how the process ended where that was not well."""
    command = [sys.executable, *_flags(), _entry(), "one", asked_path, part, name, first]
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
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"the process ended by {how}" + (f": {said}" if said else " and said nothing")


def _flags() -> tuple[str, ...]:
    return ("-I", "-B", "-X", "faulthandler")


def _entry() -> str:
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "portable.py")


def _read(part: str) -> list[rows.Row]:
    try:
        with open(part, encoding="utf-8") as file:
            found: list[rows.Row] = json.load(file)["rows"]
    except FileNotFoundError:
        return []
    os.remove(part)
    return found


def _write(folder: str, asked: Mapping[str, Any], running: str, done: Sequence[rows.Row]) -> None:
    document = {"threads": rows.threads(), "running": running, "rows": list(done)}
    rows.write(os.path.join(folder, REPORT), asked["nonce"], document)


# --- in the process of a runtime --------------------------------------------------------------------


def one(asked_path: str, part: str, name: str, first: str) -> int:
    """Runs the models from `first` on. Whatever a runtime raises is its row's; a crash is the parent's."""
    with open(asked_path, encoding="utf-8") as file:
        asked = json.load(file)
    done: list[rows.Row] = []
    names = [model["name"] for model in asked["models"]]
    for model in asked["models"][names.index(first) :]:
        done.append(try_model(model, RUNTIMES[name], asked))
        rows.write(part, asked["nonce"], {"rows": done})
    sys.stdout.flush()
    os._exit(0)  # a runtime that dies on its way out has computed what it was asked for


def try_model(model: Mapping[str, Any], runtime: Runtime, asked: Mapping[str, Any]) -> rows.Row:
    """One model by one runtime: compared on what is held out, proven to run there, and timed."""
    row, began = rows.make_row(model["name"], runtime.name), time.monotonic()
    try:
        engine = _engine(runtime)
        row["version"] = engine.version()
        held_out, expected = _data(os.path.join(asked["folder"], f"{model['name']}.npz"))
        path = os.path.join(asked["folder"], f"{model['name']}.onnx")
        with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
            profile = os.path.join(scratch, "profile")
            session = engine.open_session(path, held_out, runtime, rows.threads(), profile)
            found = engine.compute(session)
            row["kernels"] = engine.prove(session)
            row["error"] = agree(engine.NAME, runtime.place, found, expected, model["tolerance"])
            sizes = rows.batches_of(model["batched"], model["held_out"], asked["batches"])
            calls = []
            for size in sizes:
                inputs = of_batch(held_out, size) if model["batched"] else held_out
                timed = engine.open_session(path, inputs, runtime, rows.threads(), f"{profile}-{size}")
                engine.compute(timed)
                engine.prove(timed)
                calls.append((size, engine.caller(timed)))
            row["latencies"] = rows.clock(calls)
        row = rows.passed(row)
    except Exception as error:
        row = rows.failed(row, error, LOAD_FAILED)
    return {**row, "seconds": round(time.monotonic() - began, 3)}


def _engine(runtime: Runtime) -> Any:
    """The file of the runtime, which is there in this image. Raises CheckFailure where it is not."""
    engine: Any = importlib.import_module(f".{runtime.module}", __package__)
    try:
        engine.version()
    except ImportError as error:
        missing = f"this image has no {runtime.module} ({error}): add {' or '.join(runtime.brings)}"
        raise CheckFailure(missing) from error
    return engine


def _data(path: str) -> tuple[dict[str, Any], list[Any]]:
    numpy: Any = importlib.import_module("numpy")
    with numpy.load(path, allow_pickle=False) as data:
        held_out = {name.removeprefix("in."): data[name] for name in data.files if name.startswith("in.")}
        count = sum(name.startswith("out.") for name in data.files)
        return held_out, [data[f"out.{number}"] for number in range(count)]
