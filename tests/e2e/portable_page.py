"""docs/portability.md as a newcomer follows it: its files written, its commands run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from itertools import chain
from pathlib import Path

from tests.services.factory import COMMAND, ROOT, Factory
from tests.services.page import read_commands

PAGE = ROOT / "docs" / "portability.md"
EXPORTING = "pytorch-onnx-2.15-cu132"
"""What exports there."""
MODELS = {"classifier", "variational"}


def own_root(factory: Factory, folder: Path) -> Factory:
    """The factory with a root of its own, and a key that is trusted there."""
    root = folder / "root"
    for name in ("recipes", "lockfiles", "definitions"):
        shutil.copytree(ROOT / name, root / name)
    (root / "imagefactory.toml").write_text("")
    own = replace(factory, root=root, extra={**factory.extra, "XDG_CONFIG_HOME": str(folder / "config")})
    own.run("key", "create", "lab")
    own.run("key", "trust", "lab")
    return own


def follow_page(own: Factory, target: str) -> None:
    """All of it, in a terminal that stands in the root of `own_root`; then what it left is looked at.

    `target` is what exports, in place of the page's own.
    """
    page = PAGE.read_text()
    for text in re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL):
        path = own.root / text.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    said = {}
    for block in chain.from_iterable(read_commands(PAGE).values()):
        for line in block.splitlines():
            program, *words = shlex.split(line.replace(EXPORTING, target), comments=True)
            assert program == "imagefactory"
            done = subprocess.run(
                [*COMMAND, *words], cwd=own.root, env=own.environ, capture_output=True, text=True, timeout=900
            )
            assert done.returncode == 0, f"{line}: {done.stdout}\n{done.stderr}"
            said[words[0]] = done.stdout
    report = json.loads((own.root / "portable" / "report.json").read_text())
    assert_same(report, {"torch-cpu", "onnxruntime-cpu", "openvino-cpu"}, MODELS)
    assert {f"{name}.onnx" for name in MODELS} == set(said["run"].split())
    for model in report["models"]:
        first, again = (own.root / name / f"{model['name']}.onnx" for name in ("portable", "models-again"))
        assert first.read_bytes() == again.read_bytes()
        assert 0 < first.stat().st_size == model["size"]
    assert report["subject"]["target"] == target
    (found,) = json.loads(own.run("model", "show", "--json", target).stdout)["statements"]
    assert (found["status"], found["report"]) == ("good", report)


def assert_same(report: dict[str, object], by: set[str], models: set[str]) -> None:
    """Every model by each, compared, timed, and by the runtime's own word run there."""
    rows = report["rows"]
    assert isinstance(rows, list)
    assert {(row["model"], row["by"]) for row in rows} == {(model, one) for model in models for one in by}
    for row in rows:
        assert (row["state"], row["detail"]) == ("passed", ""), row
        assert row["error"] < 1e-5, row
        assert [one["batch"] for one in row["latencies"]] == [1, 8], row
        assert all(0 < one["p50"] <= one["p95"] for one in row["latencies"]), row
        assert bool(row["kernels"]) == row["by"].startswith(("onnxruntime", "openvino", "tvm")), row
