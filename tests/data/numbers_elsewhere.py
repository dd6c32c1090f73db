"""Shows the files of frameworks results of a GPU and of elsewhere: SUITE EXPECTATIONS. Prints the answers."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import types
from dataclasses import replace
from pathlib import Path

suite, expectations = sys.argv[1:]
runpy.run_path(f"{suite}/smoke.py")["load_suite"](suite)
package = "imagefactory_suite.gpu"
contexts, plain = (importlib.import_module(f"{name}.context") for name in (package, "imagefactory_suite"))
numpy = importlib.import_module("numpy")
asked = contexts.parse_request(Path(expectations).read_text())
strict = contexts.GpuContext(request=replace(asked, rehearsal=False), framework=None, site="", prefix="")
names = ("torch", "tensorflow", "onnxruntime")
files = {name: importlib.import_module(f"{package}.frameworks.{name}") for name in names}
sys.modules["torch"] = types.SimpleNamespace(float32="float32", float16="float16")


class Tensor:
    def __init__(self, place, kind):
        self.device, self.dtype, self.backing_device = types.SimpleNamespace(type=place), kind, place
        self.place, self.kind = place, kind

    def detach(self):
        return self

    cpu = double = detach

    def numpy(self):
        return numpy.zeros(1)


class Eager(Tensor):
    def __init__(self, place, kind, lies=""):
        super().__init__(place, kind)
        self.device, self.dtype = lies or place, types.SimpleNamespace(name=kind)


class Value(Tensor):
    def device_name(self):
        return self.place

    def data_type(self):
        return self.kind


gpu, cpu = ("/job:localhost/replica:0/task:0/device:" + name for name in ("GPU:0", "CPU:0"))
tries = {
    "torch": [Tensor("cuda", "float32"), Tensor("cpu", "float32"), Tensor("cuda", "float16")],
    "tensorflow": [
        Eager(gpu, "float32"),
        Eager(cpu, "float32"),
        Eager(gpu, "float16"),
        Eager(cpu, "float32", gpu),
    ],
    "onnxruntime": [
        Value("cuda", "tensor(float)"),
        Value("cpu", "tensor(float)"),
        Value("cuda", "tensor(double)"),
    ],
}
said = {}
for name, arrays in tries.items():
    for array in arrays:
        try:
            files[name].fetch(strict, array, "float32")
            said.setdefault(name, []).append("")
        except plain.CheckFailure as error:
            said.setdefault(name, []).append(error.detail)

runtime = files["onnxruntime"]
job = runtime._Job((runtime.Node("MatMul", ("a", "b"), "y"),), {}, 2, "float16")
gpu, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"


def event(operator, provider, kind):
    shapes = [{kind: [2, 2]}, {kind: [2, 2]}]
    arguments = {"op_name": operator, "provider": provider, "input_type_shape": shapes}
    return {"cat": "Node", "name": f"{operator}_kernel_time", "args": arguments}


profiles = [
    [event("Cast", gpu, "float"), event("MatMul", gpu, "float16")],
    [event("Cast", gpu, "float"), event("MatMul", cpu, "float16")],
    [event("Cast", cpu, "float"), event("MatMul", gpu, "float16")],
    [event("Cast", gpu, "float"), event("MatMul", gpu, "float")],
    [event("Cast", gpu, "float")],
    [],
]
for events in profiles:
    try:
        runtime._judge_profile(events, job, gpu)
        said.setdefault("profile", []).append("")
    except plain.CheckFailure as error:
        said.setdefault("profile", []).append(error.detail)
print(json.dumps(said))
