"""The command `emulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions import run
from imagefactory.model import CommandResult, RunSpec
from imagefactory.oci.layout import Layout
from tests.made.command import Call
from tests.made.emulated import TOLD
from tests.made.layout import add_image
from tests.made.report import gpu_report
from tests.made.signing import Bench
from tests.made.verdicts import SUBJECT


def test_a_gpu_that_is_not_there_is_shown_and_what_it_told_is_said(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_: object, __: object, spec: RunSpec, *___: object) -> CommandResult:
        told = next(mount.source for mount in spec.mounts if mount.writable)
        (told / "7.json").write_text(json.dumps(TOLD))
        return CommandResult(returncode=4, stdout="", stderr="", seconds=2.0)

    monkeypatch.setattr(run, "run_artifact", end)
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    summary = tmp_path / "told.json"
    said = call("emulate", "A100", "--output", str(summary), "pytorch:2.3-cu121", "--", "python")
    assert said.code == 4
    assert "A100 stands for A100-SXM4-40GB; also known: A100-SXM4-80GB" in said.err
    assert "data stalls  67% of the time" in said.err
    assert said.out == ""
    assert json.loads(summary.read_text()) == TOLD


def test_what_the_full_suite_recorded_of_this_image_counts_for_more_than_a_data_sheet(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def end(_: object, __: object, spec: RunSpec, *___: object) -> CommandResult:
        shown = next(mount.source for mount in spec.mounts if mount.target.endswith("/emulate"))
        asked.append(json.loads((shown / "asked.json").read_text())["profile"])
        told = next(mount.source for mount in spec.mounts if mount.writable)
        (told / "7.json").write_text(json.dumps({**TOLD, "basis": asked[-1]["basis"]}))
        return CommandResult(returncode=0, stdout="", stderr="", seconds=2.0)

    monkeypatch.setattr(run, "run_artifact", end)
    digest, gpu = bench.push(b"a", 22), ("7.5", "Tesla T4")
    words = ("emulate", "T4", "one-12.1-cu121", "--", "python")
    before = bench.call(*words)
    whole = gpu_report(SUBJECT, gpu, 0)
    bench.verify(
        digest, "7.5", level="full", checks=whole.checks, device=whole.device, hardware=whole.hardware
    )
    after = bench.call(*words)
    assert "estimated from its data sheet" in before.err
    assert "T4: as recorded with driver 550.54.15, " in after.err
    assert "by times recorded on one" in after.err
    first, second = asked
    assert first["curves"]["move"] == [[320e9, 1.0]]
    assert second["curves"]["move"] == [[1 << 14, 3e-6], [1 << 28, 2e-3]]
    assert second["curves"]["peer"] == first["curves"]["peer"]
    assert (second["basis"], second["processors"], second["kernel"]) == ("recorded", 30, 4e-6)


def test_a_run_that_used_no_gpu_is_told_so(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = CommandResult(returncode=3, stdout="", stderr="", seconds=2.0)
    monkeypatch.setattr(run, "run_artifact", lambda *_: ended)
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    said = call("emulate", "T4", "pytorch:2.3-cu121", "--", "true")
    assert said.code == 3
    assert "emulated: no program of this run used a GPU through torch" in said.err


@pytest.mark.parametrize(
    ("options", "text"), [(("A101",), "'A101'"), (("--gpus", "17", "A100"), "17"), (("--nv", "A100"), "--nv")]
)
def test_what_cannot_be_emulated(call: Call, tmp_path: Path, options: tuple[str, ...], text: str) -> None:
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    result = call("emulate", *options, "pytorch:2.3-cu121", "--", "true")
    assert result.code == 2
    assert text in result.err
