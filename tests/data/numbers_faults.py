"""Runs checks of the GPU suite in a rehearsal, each with one thing broken: SUITE EXPECTATIONS REPORT.

Started by tests in an environment that holds a framework. The report maps each fault to the check's row; ""
is the check without a fault. What is broken is the framework itself where its Python can be, else the file of
the suite that calls it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import runpy
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

suite, expectations, report = sys.argv[1:]
runpy.run_path(f"{suite}/smoke.py")["load_suite"](suite)
gpu = "imagefactory_suite.gpu"
part, contexts = importlib.import_module(f"{gpu}.part"), importlib.import_module(f"{gpu}.context")
asked = contexts.parse_request(Path(expectations).read_text())
context = contexts.GpuContext(
    request=asked, framework=None, site=sysconfig.get_path("purelib"), prefix=sys.prefix
)
fault, context = part.load_framework("numbers", context)
assert fault is None, fault
framework = context.framework
reference, tolerances = (importlib.import_module(f"{gpu}.{name}") for name in ("reference", "tolerances"))
numpy = reference.numpy


@contextlib.contextmanager
def broken(owner, name, change):
    """`change` gets what the function of that name answered."""
    whole = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: change(whole(*arguments, **named)))
    try:
        yield
    finally:
        setattr(owner, name, whole)


def one_off(values):
    values = numpy.array(values)
    values[numpy.unravel_index(abs(values).argmax(), values.shape)] *= 1.001
    return values


def nan(values):
    values = numpy.array(values)
    values.flat[0] = float("nan")
    return values


def part_off(name):
    return lambda found: {**found, name: one_off(found[name])}


def field_off(name, change):
    return lambda found: replace(found, **{name: change(getattr(found, name))})


def first_off(found):
    return (one_off(found[0]), *found[1:])


def flipped(made):
    back = made.back.copy()
    back.view("uint8")[12345] ^= 1
    return replace(made, back=back)


kept = []


def leaking(found):
    kept.append(numpy.ones(8 << 20, dtype="float64"))
    return found


def own(name, change):
    return lambda: broken(framework, name, change)


@contextlib.contextmanager
def taking():
    """A `fetch` that takes everything."""
    whole = framework.fetch
    framework.fetch = lambda context, array, kind: numpy.asarray(
        array.numpy() if hasattr(array, "numpy") else array, dtype="float64"
    )
    try:
        yield
    finally:
        framework.fetch = whole


@contextlib.contextmanager
def coarse():
    """float32 that is multiplied as tf32, as a GPU does by default."""
    whole = framework.matmul

    def matmul(context, left, right, kind):
        if kind == "float32":
            left, right = reference.cut(left), reference.cut(right)
        return whole(context, left, right, kind)

    framework.matmul = matmul
    try:
        yield
    finally:
        framework.matmul = whole


FAULTS = {
    "matmul": {
        "one-element": own("matmul", one_off),
        "nan": own("matmul", nan),
        "shape": own("matmul", lambda found: found[:-1]),
        "tf32-for-float32": coarse,
    },
    "reduction": {"lost": own("reduce", lambda found: found - 1), "nan": own("reduce", nan)},
    "convolution": {name: own("convolution", part_off(name)) for name in ("forward", "image", "filters")},
    "transfers": {"bit": own("transfer", flipped)},
    "memory": {"leak": own("reduce", leaking)},
    "numbers-controls": {
        "takes-all": taking,
        "sees-nothing": lambda: broken(reference, "error", lambda off: 0.0),
        "refuses-all": lambda: broken(reference, "error", lambda off: 1.0),
        "too-wide": lambda: broken(tolerances, "products", lambda bound: 0.1),
    },
}


if asked.expected.framework == "jax":
    jax = importlib.import_module("jax")
    # The framework's own function, as a wrong kernel would be; jax's arrays are changed by copies.
    FAULTS["matmul"]["kernel"] = lambda: broken(
        jax.numpy, "matmul", lambda made: made.at[(0,) * made.ndim].multiply(1.01)
    )
    FAULTS["matmul"]["type"] = lambda: broken(jax.numpy, "matmul", lambda made: made.astype("float16"))
    FAULTS["linear-algebra"] = {
        "lu": own("factorise", field_off("packed", one_off)),
        "order": own("factorise", field_off("order", lambda order: order[:, ::-1])),
        "solution": own("factorise", field_off("solution", one_off)),
        "values": own("factorise", field_off("values", lambda values: values[:, ::-1])),
        "left": own("factorise", field_off("left", lambda left: left * 1.01)),
    }
    FAULTS["training"] = {
        "loss": own("train", first_off),
        "stands-still": own("train", lambda found: ([found[0][0]] * len(found[0]), *found[1:])),
        "weights": own("train", lambda found: (found[0], one_off(found[1]), found[2])),
    }
    FAULTS["jit"] = {
        "compiled": own("compile", lambda found: (found[0], part_off("gradient")(found[1]), found[2])),
        "eager": own("compile", lambda found: (part_off("rows")(found[0]), *found[1:])),
    }
rows = {}
for check, faults in FAULTS.items():
    rows[check] = {"": part.run_check(check, context, None)[0]}
    for name, breaking in faults.items():
        with breaking():
            rows[check][name] = part.run_check(check, context, None)[0]
    kept.clear()

if asked.expected.framework == "jax":
    rows["collective"] = {"no-nccl": part.run_check("collective", context, None)[0]}

# On a GPU the same framework, of which there is none here, must not go on with the CPU.
strict = replace(context, request=replace(asked, rehearsal=False))
getattr(framework, "prepare", lambda _: None)(strict)
rows["matmul"]["cpu"] = part.run_check("matmul", strict, None)[0]
rows["native-code"] = {"cpu": part.run_check("native-code", strict, None)[0]}
Path(report).write_text(json.dumps(rows))
