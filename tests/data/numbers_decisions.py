"""What T2 and T3 make of a GPU's answers, by a framework that gives them: SUITE EXPECTATIONS LIBCUDA.

Prints the answers. There is no GPU here: what is asked is how the checks decide.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import runpy
import sys
import types
from dataclasses import replace
from pathlib import Path

suite, expectations, libcuda = sys.argv[1:]
runpy.run_path(f"{suite}/smoke.py")["load_suite"](suite)
package = "imagefactory_suite.gpu"
contexts, part = (importlib.import_module(f"{package}.{name}") for name in ("context", "part"))
checks = importlib.import_module(f"{package}.checks.numbers")
numpy = importlib.import_module("numpy")
asked = replace(contexts.parse_request(Path(expectations).read_text()), rehearsal=False)
MEBI = 1 << 20


def run(check, **names):
    framework = types.SimpleNamespace(**names)
    context = contexts.GpuContext(request=asked, framework=framework, site="", prefix="")
    row = part.run_check(check, context, None)[0]
    return [row["state"], row["detail"]]


def memory(*levels):
    """In MiB, the last one for good."""
    told = [level * MEBI for level in levels]
    return run(
        "memory",
        matmul=lambda *_: None,
        reduce=lambda *_: None,
        release=lambda _: None,
        in_use=lambda _: told.pop(0) if len(told) > 1 else told[0],
    )


def controls(sees):
    """Of a framework whose `fetch` looks at `sees` alone: the place, the type."""

    def fetch(context, array, kind):
        if ("place" in sees and not context.rehearsal) or ("type" in sees and array != kind):
            raise contexts.CheckFailure("refused")

    return run(
        "numbers-controls",
        matmul=lambda _, left, right, kind: (left @ right).astype(kind).astype("float64"),
        on_cpu=lambda _, kind: kind,
        fetch=fetch,
    )


def triton():
    """Whether Triton 2 is shown the driver that this process has; `build` stands in for it."""
    torch = importlib.import_module(f"{package}.frameworks.torch")
    torch.prepare(None)
    torch._show_libcuda()  # with Triton 3, or none, nothing is done
    ctypes.CDLL(libcuda)
    build = types.SimpleNamespace(libcuda_dirs=list)
    sys.modules.update({"triton": types, "triton.common": types, "triton.common.build": build})
    torch._show_libcuda()
    (folder,) = build.libcuda_dirs()
    links = {link.name: link.resolve() for link in Path(folder).iterdir()}
    return [sorted(links), links["libcuda.so"] == Path(libcuda).resolve()]


class Session:
    def __init__(self, _, __, providers):
        ((self.name, self.options),) = providers

    def disable_fallback(self):
        pass

    def get_providers(self):
        return [self.name]


def tf32(kind):
    """What ONNX Runtime is asked for, which is a stand-in here."""
    options = types.SimpleNamespace(add_session_config_entry=lambda *_: None)
    level = types.SimpleNamespace(ORT_DISABLE_ALL=0)
    sys.modules["onnxruntime"] = types.SimpleNamespace(
        SessionOptions=lambda: options, GraphOptimizationLevel=level, InferenceSession=Session
    )
    module = importlib.import_module(f"{package}.frameworks.onnxruntime")
    nodes = (importlib.import_module("imagefactory_suite.onnx_model").Node("Tanh", ("a",), "y"),)
    context = contexts.GpuContext(request=asked, framework=None, site="", prefix="")
    return module._start(context, module._Job(nodes, {"a": numpy.zeros(1)}, 1, kind), "").options["use_tf32"]


answers = {
    "steady": memory(100),
    "another program takes some": memory(100, 100, 700),
    "given back late": memory(100, 100, 100, 116, 100),
    "leaks": memory(*range(100, 140)),
    "leaks in every other round": memory(*(100 + 16 * (at // 2) for at in range(40))),
    "sees all": controls(("place", "type")),
    "sees places": controls(("place",)),
    "sees types": controls(("type",)),
    "triton": triton(),
    "tf32": {kind: tf32(kind) for kind in ("float32", "tf32", "float16", "bfloat16")},
}
print(json.dumps(answers))
