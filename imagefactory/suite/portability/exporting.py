"""The first program: a person's models by their own framework, and each as ONNX with what is expected of it.

FOLDER/export.json       what was done, a row a model and device
FOLDER/NAME.onnx         the model
FOLDER/NAME.npz          `in.INPUT`: what is held out; `out.NUMBER`: what the framework makes of it
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..context import Failure
from ..table import LOAD_FAILED, PASSED
from . import rows
from .case import Case, agree, check_repeats, of_batch
from .given import read_models
from .onnxruntime import look

REPORT = "export.json"


def main(asked_path: str, folder: str) -> int:
    """Exit code 0 when every model was exported, 1 when one was not, or none could be read."""
    with open(asked_path, encoding="utf-8") as file:
        asked = json.load(file)
    report, threads = os.path.join(folder, REPORT), rows.threads()
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))  # TensorFlow takes it when it starts
    state: dict[str, Any] = {"fault": "", "processor": rows.processor(), "threads": threads}
    state |= {"running": "", "models": [], "rows": []}
    rows.write(report, asked["nonce"], {**state, "running": "models()"})
    try:
        cases = read_models(asked["models"])
    except Failure as failure:
        rows.write(report, asked["nonce"], {**state, "fault": failure.detail})
        return 1
    devices = ("cpu", "gpu") if asked["gpu"] else ("cpu",)
    for exporter in {case.exporter.NAME: case.exporter for case in cases}.values():
        exporter.prepare(threads)
    for case in cases:
        rows.write(report, asked["nonce"], {**state, "running": case.name})
        model, made = export_case(case, folder, devices, asked["batches"])
        print(f"{case.name}: {made[-1]['state']} {made[-1]['detail']}", flush=True)
        state["models"].append(model)
        state["rows"] += made
    rows.write(report, asked["nonce"], state)
    return 0 if all(row["state"] == PASSED for row in state["rows"]) else 1


def export_case(
    case: Case, folder: str, devices: Sequence[str], batches: Sequence[int]
) -> tuple[Mapping[str, Any], list[rows.Row]]:
    """What the model is, and a row for each device of its framework; the first row has its faults."""
    exporter = case.exporter
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
        "held_out": _rows_of(case),
        "opset": 0,
        "nodes": 0,
        "digest": "",
        "size": 0,
    }
    made: list[rows.Row] = []
    expected: list[Any] = []
    for device in devices:
        row, began = (
            rows.make_row(case.name, f"{exporter.NAME}-{device}", exporter.version()),
            time.monotonic(),
        )
        try:
            if not made:
                expected, repeated = check_repeats(case)
                model["opset"], model["nodes"] = _export(case, expected, folder)
                row["error"] = repeated
            else:
                found = exporter.compute(case.network, case.held_out, device)
                row["error"] = agree(exporter.NAME, device, found, expected, case.tolerance)
            sizes = rows.batches_of(case.batched, model["held_out"], batches)
            row["latencies"] = rows.clock(
                (size, exporter.caller(case.network, _sized(case, size), device)) for size in sizes
            )
            row = rows.passed(row)
        except Exception as error:
            row = rows.failed(row, error, LOAD_FAILED)
        made.append({**row, "seconds": round(time.monotonic() - began, 3)})
        if not expected:
            break
    return model, made


def _rows_of(case: Case) -> int:
    return len(next(iter(case.held_out.values()))) if case.batched else 1


def _sized(case: Case, size: int) -> Mapping[str, Any]:
    return of_batch(case.held_out, size) if case.batched else case.held_out


def _export(case: Case, expected: Sequence[Any], folder: str) -> tuple[int, int]:
    """Writes the model and its data; gives operator set and number of nodes."""
    numpy: Any = importlib.import_module("numpy")
    path = os.path.join(folder, f"{case.name}.onnx")
    case.exporter.export(case.network, case.sample, path, outputs=len(expected), batched=case.batched)
    data = {f"in.{name}": array for name, array in case.held_out.items()}
    data |= {f"out.{number}": array for number, array in enumerate(expected)}
    numpy.savez(os.path.join(folder, f"{case.name}.npz"), **data)
    return look(path)
