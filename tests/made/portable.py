"""Reports of portability, all the same unless a test says otherwise, and images that write some."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from imagefactory.extras.portability import run
from imagefactory.extras.portability.report import (
    Latency,
    PortableInput,
    PortableModel,
    PortableReport,
    PortableRow,
    RuntimeSource,
)
from imagefactory.model import CheckState, CommandResult, RunSpec
from imagefactory.oci.manifests import Image
from imagefactory.verify.suite_files import EXPECT_MOUNT, REPORT_MOUNT
from tests.made.verdicts import NOW, SUBJECT, SUITE, digest

RUNTIMES = ("onnxruntime-cpu", "openvino-cpu")


def make_model(name: str = "net", **changes: Any) -> PortableModel:
    model = PortableModel(
        name=name,
        framework="torch",
        version="2.9.1",
        tolerance=1e-4,
        batched=True,
        inputs=(PortableInput(name="image", type="float32", shape=(2, 3, 8, 8)),),
        held_out=7,
        opset=20,
        nodes=7,
        digest=digest("e"),
        size=10_712,
    )
    return replace(model, **changes)


def make_row(model: str, by: str, **changes: Any) -> PortableRow:
    row = PortableRow(
        model=model,
        by=by,
        version="1.31.1",
        state=CheckState.PASSED,
        outcome="",
        detail="",
        error=1.5e-7,
        kernels=7,
        seconds=0.25,
        latencies=(Latency(batch=1, p50=0.5, p95=0.75), Latency(batch=8, p50=2.0, p95=2.5)),
    )
    return replace(row, **changes)


def make_portable(**changes: Any) -> PortableReport:
    names = ("net", "vae")
    report = PortableReport(
        subject=SUBJECT,
        suite=SUITE,
        nonce="0123456789abcdef0123456789abcdef",
        started=NOW - timedelta(minutes=2),
        ended=NOW - timedelta(minutes=1),
        runner="unshare",
        processor="A CPU of the tests",
        threads=2,
        gpus=(),
        driver="",
        models=tuple(make_model(name) for name in names),
        served=tuple(RuntimeSource(by=one, subject=SUBJECT) for one in RUNTIMES),
        rows=(
            *(make_row(name, "torch-cpu", error=0.0, kernels=0) for name in names),
            *(make_row(name, by) for by in RUNTIMES for name in names),
        ),
    )
    return replace(report, **changes)


# --- what an image writes ---------------------------------------------------------------------------

NONCE = "5eed"
ROW = {
    **{"model": "net", "by": "torch-cpu", "version": "2.0", "state": "passed", "outcome": "", "detail": ""},
    **{"error": 0.0, "kernels": 0, "seconds": 0.5, "latencies": [{"batch": 1, "p50": 0.5, "p95": 1.0}]},
}
MODEL = {
    **{"name": "net", "framework": "torch", "version": "2.0", "tolerance": 1e-4, "batched": True},
    **{"inputs": [{"name": "x", "type": "float32", "shape": [2, 3]}], "held_out": 2, "opset": 20},
    **{"nodes": 7, "digest": "", "size": 0},
}
EXPORT = {
    **{"format": 1, "nonce": NONCE, "fault": "", "processor": "A CPU", "threads": 2, "running": ""},
    **{"models": [MODEL], "rows": [ROW]},
}
TRIED = {"format": 1, "nonce": NONCE, "threads": 2, "running": "", "rows": [{**ROW, "by": "tvm-cpu"}]}


@dataclass
class Inside:
    """An image that writes a report, and whatever `more` puts into the folder."""

    name: str
    report: object
    more: Callable[[Path], object] = lambda folder: None
    completed: CommandResult = field(
        default_factory=lambda: CommandResult(returncode=0, stdout="", stderr="it died", seconds=0.1)
    )
    spec: RunSpec | None = None
    asked: dict[str, Any] = field(default_factory=dict)

    def require(self) -> str:
        return "1"

    def run(self, image: Image, spec: RunSpec) -> CommandResult:
        self.spec = spec
        mounts = {mount.target: mount.source for mount in spec.mounts}
        self.asked = json.loads((mounts[EXPECT_MOUNT] / run.REQUEST_FILE).read_text())
        if self.report is not None:
            text = self.report if isinstance(self.report, str) else json.dumps(self.report)
            (mounts[REPORT_MOUNT] / self.name).write_text(text)
        self.more(mounts[REPORT_MOUNT])
        return self.completed


def model_files(folder: Path) -> None:
    (folder / "net.onnx").write_bytes(b"onnx")
    (folder / "net.npz").write_bytes(b"data")
