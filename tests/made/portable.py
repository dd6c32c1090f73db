"""Reports of portability: two models in two runtimes, all the same unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from imagefactory.model import CheckState
from imagefactory.verify.portable_model import (
    Latency,
    PortableInput,
    PortableModel,
    PortableReport,
    PortableRow,
    Served,
)
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
        served=tuple(Served(by=one, subject=SUBJECT) for one in RUNTIMES),
        rows=(
            *(make_row(name, "torch-cpu", error=0.0, kernels=0) for name in names),
            *(make_row(name, by) for by in RUNTIMES for name in names),
        ),
    )
    return replace(report, **changes)
