"""The models that a person gives: `models()` of a file of Python, one mapping a model."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from ..context import Failure
from .case import TOLERANCE, Case

EXPORTERS = ("torch", "tensorflow", "jax")
"""In this order: JAX's models are functions, which others may be as well."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
KEYS = ("name", "model", "sample", "held_out", "tolerance", "override", "batched")
LARGEST_BATCH = 65536


def read_models(path: str) -> list[Case]:
    """The models of a file, each with the file of its framework.

    Raises Failure for what is none: it names the file, the line where the file itself raised, and what to
    write instead.
    """
    file = os.path.basename(path)
    made = _make(path, file)
    if not isinstance(made, list | tuple) or not made:
        raise Failure(f"{file}: models() gives a {type(made).__name__}: let it give a list of models")
    cases = [_case(row, f"{file}: models()[{number}]") for number, row in enumerate(made)]
    names = [case.name for case in cases]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise Failure(f"{file}: two models are called '{twice}': give each a name of its own")
    return cases


def _make(path: str, file: str) -> Any:
    """What `models()` of the file gives; a generator as a list. What lies beside the file can be imported."""
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("models", path)
    if spec is None or spec.loader is None:
        raise Failure(f"{file} is no file of Python: call it models.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["models"] = module
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, "models", None)):
            raise Failure(f"{file} has no function models(): let it give a list of models")
        made = module.models()
        return (
            made if isinstance(made, list | tuple | Mapping) or not hasattr(made, "__iter__") else list(made)
        )
    except Failure:
        raise
    except (Exception, SystemExit) as error:
        raise Failure(f"{_line_of(error, path, file)}: {type(error).__name__}: {error}") from error


def _line_of(error: BaseException, path: str, file: str) -> str:
    """`models.py:12`: the last line of that file that was running."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{file}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return next((f"{file}:{one.lineno}" for one in reversed(frames) if one.filename == path), file)


def _case(row: object, where: str) -> Case:
    if not isinstance(row, Mapping):
        raise Failure(f"{where} is a {type(row).__name__}: write a dict with {', '.join(KEYS[:3])}")
    unknown = sorted(str(key) for key in row if key not in KEYS)
    if unknown:
        raise Failure(f"{where} has '{unknown[0]}', which means nothing: it may have {', '.join(KEYS)}")
    missing = next((key for key in KEYS[:3] if key not in row), "")
    if missing:
        raise Failure(f"{where} has no '{missing}'")
    name = row["name"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Failure(f"{where}: {name!r} is no name: write small letters, digits, dots and dashes")
    where = f"{where} '{name}'"
    exporter, network = _exporter(row["model"], where), row["model"]
    if method := row.get("override", ""):
        if not isinstance(method, str) or not callable(getattr(network, method, None)):
            raise Failure(f"{where}: override is {method!r}: name a method of the model, as a text")
        network = exporter.override(network, method)
    batched, tolerance = row.get("batched", True), row.get("tolerance", TOLERANCE)
    if not isinstance(batched, bool):
        raise Failure(f"{where}: batched is {batched!r}: write True or False")
    if not isinstance(tolerance, float | int) or not 0 < tolerance < 1:
        raise Failure(
            f"{where}: tolerance is {tolerance!r}: write a part of the largest output, such as 1e-4"
        )
    sample = _arrays(row["sample"], f"{where}: sample", batched=batched)
    held_out = _arrays(row.get("held_out", sample), f"{where}: held_out", batched=batched)
    _check_alike(sample, held_out, where, batched=batched)
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
    """Of the frameworks that are loaded, which whoever made a model has done."""
    for name in EXPORTERS:
        if name in sys.modules:
            exporter: Any = importlib.import_module(f".{name}", __package__)
            if exporter.owns(network):
                return exporter
    raise Failure(
        f"{where}: model is of type {type(network).__name__}: give a torch.nn.Module, a model of Keras, a "
        "tf.Module, a tf.function, or a function of JAX's arrays"
    )


def _arrays(value: object, where: str, *, batched: bool) -> dict[str, Any]:
    numpy = importlib.import_module("numpy")
    if not isinstance(value, Mapping) or not value:
        raise Failure(
            f"{where} is a {type(value).__name__}: write a dict of NumPy arrays by the inputs' names"
        )
    for name, array in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise Failure(f"{where}: {name!r} is no name of an input")
        if not isinstance(array, numpy.ndarray):
            raise Failure(f"{where}: '{name}' is a {type(array).__name__}: write a NumPy array")
        if batched and not (array.ndim and 0 < len(array) <= LARGEST_BATCH):
            raise Failure(f"{where}: '{name}' has no rows: give it some, or say batched: False")
    if batched and len({len(array) for array in value.values()}) > 1:
        raise Failure(f"{where}: the inputs have different numbers of rows")
    return {name: numpy.ascontiguousarray(array) for name, array in value.items()}


def _check_alike(
    sample: Mapping[str, Any], held_out: Mapping[str, Any], where: str, *, batched: bool
) -> None:
    if list(sample) != list(held_out):
        raise Failure(f"{where}: held_out has {', '.join(held_out)}, and sample {', '.join(sample)}")
    for name, array in sample.items():
        other, start = held_out[name], 1 if batched else 0
        if array.dtype != other.dtype or array.shape[start:] != other.shape[start:]:
            raise Failure(
                f"{where}: '{name}' is {other.dtype}{list(other.shape)} in held_out and "
                f"{array.dtype}{list(array.shape)} in sample"
            )
