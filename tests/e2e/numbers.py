"""The GPU suite inside a real image, on the CPU: it is the image's own framework that works."""

from __future__ import annotations

from pathlib import Path

from imagefactory.extras.emulate.run import NEEDED, recorded_curves, without_units
from imagefactory.suite.gpu import table
from imagefactory.suite.portability.case import MODELS
from tests.e2e import rehearsal
from tests.services.factory import Factory
from tests.services.tier import NIGHTLY

# As the check does, but what is exported is a copy with one wrong weight.
WRONG_EXPORT = """\
import importlib, runpy, sys

runpy.run_path("/suite/smoke.py")["load_suite"]("/suite")
package = "imagefactory_suite"
exporter = importlib.import_module(package + ".portability.torch")
maker = importlib.import_module(package + ".portability.torch_models")
models = importlib.import_module(package + ".portability.case")
models.MODELS = tuple(model for model in models.MODELS if model.name == "variational")
export = exporter.export
exporter.export = lambda network, *rest, **asked: export(maker.damaged(network), *rest, **asked)
sys.exit(importlib.import_module(package + ".gpu.part").main("portability", *sys.argv[1:]))
"""


TWO_NODES = """\
import json, os, subprocess, sys

parts = []
for rank in range(2):
    meeting = {"rank": rank, "nodes": ["h1", "h2"], "address": "127.0.0.1", "port": 29999}
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "IMAGEFACTORY_MEETING": json.dumps(meeting)}
    files = "/out/expectations.json", f"/out/nodes-{rank}.json"
    argv = [sys.executable, "-I", "-B", "/suite/verify.py", "--part", "nodes", *files]
    parts.append(subprocess.Popen(argv, env=environ))
sys.exit(max(part.wait() for part in parts))
"""


def assert_numbers(factory: Factory, target: str, framework: str, folder: Path) -> None:
    """`framework` is a file of the suite's; `folder` was given to `rehearsal.prepare`."""
    rows = {
        check: row
        for part in ("numbers", "jit")
        for check, row in rehearsal.rehearse(factory, target, part, folder).items()
    }
    assert tuple(rows) == (*table.PARTS["numbers"], *table.PARTS["jit"])
    for check, row in rows.items():
        applies = not table.not_applicable(framework, check, {})
        assert row["state"] == ("passed" if applies else "not-applicable"), (check, row)
        assert not [name for name in row["numbers"] if name.endswith("per-s")]
        bounds = [name.removesuffix("-bound") for name in row["numbers"] if name.endswith("-bound")]
        assert all(row["numbers"][f"{name}-error"] <= row["numbers"][f"{name}-bound"] for name in bounds)
    assert len(rows["matmul"]["numbers"]) >= 12
    if not table.not_applicable(framework, "collective", {}):
        assert "NCCL 2." in rows["collective"]["detail"]
        assert "as locked" in rows["library-versions"]["detail"]


def assert_several(factory: Factory, target: str, folder: Path) -> None:
    """Two processes stand in for two GPUs. The sum of one is made wrong: that is seen, and no other is."""
    worker = folder / "suite/gpu/frameworks/torch_ranks.py"
    sound, line = worker.read_text(), "    distributed.all_reduce(tensor)\n"
    assert sound.count(line) == 1
    worker.write_text(sound.replace(line, f"{line}    tensor[0] += rank\n"))
    rows = rehearsal.rehearse(factory, target, "several", folder)
    worker.write_text(sound)
    wrong = rows.pop("all-reduce")
    assert (wrong["state"], wrong["outcome"]) == ("failed", "wrong-numbers"), wrong
    assert wrong["detail"] == "wrong sums: 1024 bytes in process 1, 1048576 bytes in process 1"
    assert {check: row["state"] for check, row in rows.items()} == {
        "gpus": "passed",
        "peer-to-peer": "passed",
        "transport": "passed",
        "data-parallel": "passed",
    }
    assert all("rehearsed on the CPU" in row["detail"] for row in rows.values())


def assert_nodes(factory: Factory, target: str, folder: Path) -> None:
    """Two processes in one image stand in for two nodes."""
    (folder / "out/nodes.py").write_text(TWO_NODES)
    said = rehearsal.run_inside(factory, target, folder, "python", "-I", "-B", "/out/nodes.py")
    for rank in range(2):
        row = rehearsal.rows_of(folder / f"out/nodes-{rank}.json")["nodes"]
        assert (row["state"], row["numbers"]["nodes"]) == ("passed", 2), said
        assert "h1 (CPU), h2 (CPU) are exact" in row["detail"]


def assert_profile(factory: Factory, target: str, folder: Path) -> None:
    row = rehearsal.rehearse(factory, target, "profile", folder)["profile"]
    assert row["state"] == "passed", row
    assert {*NEEDED, "up-pageable", "down-pageable"} <= recorded_curves(without_units(row["numbers"])).keys()
    phases = ("forward", "backward", "optimizer", "whole")
    assert {f"step-convnet-fp32-16-{phase}-s" for phase in phases} <= row["numbers"].keys()


def assert_portable(factory: Factory, target: str, folder: Path) -> None:
    """The suite's models are exported, run, compared. By night also one with a wrong weight, and on a GPU."""
    row = rehearsal.rehearse(factory, target, "portability", folder)["portability"]
    assert row["state"] == "passed", row
    assert "on cpu, off by" in row["detail"]
    kinds = ("error", "p50-ms", "p95-ms")
    rows = {f"{model.name}-cpu-{by}" for model in MODELS for by in ("torch", "onnxruntime")}
    assert {f"{name}-{kind}" for name in rows for kind in kinds} <= row["numbers"].keys()
    assert not [name for name in row["numbers"] if "-gpu-" in name]
    if not NIGHTLY:  # the same with results of every kind: tests/unit/suite/gpu/test_portability.py
        return

    (folder / "out" / "wrong.py").write_text(WRONG_EXPORT)
    files = ("/out/expectations.json", "/out/wrong.json")
    rehearsal.run_inside(factory, target, folder, "python", "-I", "-B", "/out/wrong.py", *files)
    row = rehearsal.rows_of(folder / "out" / "wrong.json")["portability"]
    assert (row["state"], row["outcome"]) == ("failed", "wrong-numbers"), row
    assert row["detail"].startswith("variational: onnxruntime on the cpu is off by 0.0")

    rehearsal.in_earnest(folder)
    row = rehearsal.rehearse(factory, target, "portability", folder)["portability"]
    assert (row["state"], row["outcome"]) == ("failed", "no-gpu"), row
    assert not [name for name in row["numbers"] if name.endswith("-ms")]
