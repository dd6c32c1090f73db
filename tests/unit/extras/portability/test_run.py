"""Portability from the host: what an image is asked, and what is made of what it wrote."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import CheckFailedError, LimitError, UsageError
from imagefactory.extras.portability.run import (
    ExportedModels,
    RuntimeImage,
    check_has_runtime,
    export_models,
    parse_runtime,
    try_models,
)
from imagefactory.model import CheckState, CommandResult, LockedWheel
from imagefactory.verify.suite_files import REPORT_MOUNT
from tests.made.portable import EXPORT, MODEL, NONCE, ROW, TRIED, Inside, model_files
from tests.made.trial import make_definition, make_trial
from tests.made.values import make_lock


def shop(inside: Inside, **changes: Any) -> RuntimeImage:
    given = {"image": make_trial().image, "definition": make_definition(), "runner": inside, "gpus": False}
    return RuntimeImage(**{**given, **changes})


def export(tmp_path: Path, inside: Inside, **changes: Any) -> ExportedModels:
    models = tmp_path / "mine" / "models.py"
    models.parent.mkdir(exist_ok=True)
    models.touch()
    asked = {"nonce": NONCE, "batches": [1], "gpu": False}
    return export_models(shop(inside, **changes), models, tmp_path / "export", asked, "models.py")


def setuid_files(folder: Path) -> None:
    model_files(folder)
    (folder / "net.onnx").chmod(0o4755)


def test_what_was_exported_has_its_digest(tmp_path: Path) -> None:
    inside = Inside("export.json", EXPORT, setuid_files)
    exported = export(tmp_path, inside)
    (model,) = exported.models
    assert (model.name, model.size) == ("net", 4)
    file = tmp_path / "export" / "net.onnx"
    assert model.digest == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert file.stat().st_mode & 0o7777 == 0o644
    assert (exported.processor, exported.threads, len(exported.rows)) == ("A CPU", 2, 1)
    assert inside.asked["models"] == "/imagefactory/models/models.py"
    assert inside.spec
    assert inside.spec.argv[-3:] == ("export", "/imagefactory/expect/asked.json", "/imagefactory/report")
    assert inside.spec.workdir == "/imagefactory/models"
    assert not inside.spec.gpus
    (writable,) = (mount.target for mount in inside.spec.mounts if mount.writable)
    assert writable == REPORT_MOUNT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "mine"]


def test_the_gpus_that_are_asked_for_are_shown(tmp_path: Path) -> None:
    inside = Inside("export.json", EXPORT, model_files)
    export(tmp_path, inside, gpus=True, visible=(("CUDA_VISIBLE_DEVICES", "GPU-1"),))
    assert inside.spec
    assert inside.spec.gpus
    assert ("CUDA_VISIBLE_DEVICES", "GPU-1") in inside.spec.environment
    assert ("NVIDIA_TF32_OVERRIDE", "0") in inside.spec.environment


def link(folder: Path) -> None:
    (folder / "net.npz").touch()
    (folder / "net.onnx").symlink_to("/etc/passwd")


def fifo(folder: Path) -> None:
    (folder / "net.npz").touch()
    os.mkfifo(folder / "net.onnx")


def hole(folder: Path) -> None:
    (folder / "net.onnx").touch()
    (folder / "net.npz").touch()
    os.truncate(folder / "net.npz", 1 << 43)


@pytest.mark.parametrize(
    ("report", "more", "code", "value"),
    [
        (
            {**EXPORT, "fault": "models.py:2: \x1b[31mno"},
            model_files,
            "models-unreadable",
            "models.py:2: [31mno",
        ),
        ({**EXPORT, "running": "net"}, model_files, "model-run-failed", "models.py: net did not finish: "),
        (None, model_files, "model-report-missing", "models.py: "),
        ("{", model_files, "model-report-invalid", "JSON"),
        ({**EXPORT, "nonce": "other"}, model_files, "model-report-invalid", "models.py: "),
        ({**EXPORT, "format": 2}, model_files, "model-report-invalid", "models.py: "),
        ({**EXPORT, "models": [{**MODEL, "name": "../up"}]}, model_files, "model-report-invalid", "name"),
        ({**EXPORT, "rows": [{**ROW, "state": "fine"}]}, model_files, "model-report-invalid", "state"),
        ({**EXPORT, "rows": [{**ROW, "model": "other"}]}, model_files, "model-report-invalid", "rows"),
        (EXPORT, lambda _: None, "model-file-invalid", "net."),
        (EXPORT, link, "model-file-invalid", "net."),
        (EXPORT, fifo, "model-file-invalid", "net."),
        (EXPORT, hole, "model-file-invalid", "net."),
    ],
)
def test_what_an_image_must_not_say(
    tmp_path: Path, report: object, more: Callable[[Path], object], code: str, value: str
) -> None:
    with pytest.raises(CheckFailedError) as caught:
        export(tmp_path, Inside("export.json", report, more))
    assert caught.value.code == code
    assert value in caught.value.message


def test_a_model_that_failed_has_no_file(tmp_path: Path) -> None:
    row = {**ROW, "state": "failed", "outcome": "load-failed", "detail": "no\noperator", "error": None}
    exported = export(tmp_path, Inside("export.json", {**EXPORT, "rows": [row]}))
    assert exported.models[0].digest == ""
    assert exported.rows[0].detail == "no operator"


def test_a_run_that_met_a_limit_says_so(tmp_path: Path) -> None:
    ended = CommandResult(
        returncode=137, stdout="", stderr="", seconds=1.0, over=("no memory is left", "take more")
    )
    with pytest.raises(LimitError) as caught:
        export(tmp_path, Inside("export.json", EXPORT, model_files, completed=ended))
    assert caught.value.code == "limit-reached"
    assert "no memory is left" in caught.value.message


def test_a_run_that_never_ends_says_so(tmp_path: Path) -> None:
    ended = CommandResult(returncode=137, stdout="", stderr="", seconds=1.0, timed_out=True)
    with pytest.raises(CheckFailedError) as caught:
        export(tmp_path, Inside("export.json", {**EXPORT, "running": "net"}, completed=ended))
    assert caught.value.code == "model-run-failed"
    assert "net did not finish: " in caught.value.message
    assert "3600 s" in caught.value.message


def test_what_was_tried_is_what_was_asked(tmp_path: Path) -> None:
    asked = {"nonce": NONCE, "runtimes": ["tvm-cpu"], "models": [{"name": "net"}]}
    inside = Inside("try.json", TRIED)
    (row,) = try_models(shop(inside), tmp_path, tmp_path / "try", asked, "tvm")
    assert (row.by, row.state) == ("tvm-cpu", CheckState.PASSED)
    assert inside.asked["folder"] == "/imagefactory/exported"
    again = Inside("try.json", {**TRIED, "rows": []})
    with pytest.raises(CheckFailedError) as caught:
        try_models(shop(again), tmp_path, tmp_path / "again", asked, "tvm")
    assert caught.value.code == "model-report-invalid"
    assert "tvm: " in caught.value.message


def test_a_runtime_and_its_image() -> None:
    assert parse_runtime("tvm-cpu") == ("tvm-cpu", "")
    assert parse_runtime("tvm-cpu@tvm-0.27-cpu") == ("tvm-cpu", "tvm-0.27-cpu")
    with pytest.raises(UsageError) as caught:
        parse_runtime("tvm")
    assert caught.value.code == "option-invalid"
    assert "'tvm'" in caught.value.message
    with pytest.raises(UsageError) as caught:
        parse_runtime("tvm-cpu@")
    assert caught.value.code == "option-invalid"
    assert "tvm-cpu@" in caught.value.message


def test_a_runtime_that_a_lock_does_not_bring() -> None:
    with pytest.raises(UsageError) as caught:
        check_has_runtime("openvino-cpu", make_definition())
    assert caught.value.code == "runtime-not-locked"
    assert "openvino-cpu" in caught.value.message
    assert caught.value.hint.endswith("imagefactory recipe new FAMILY --extends pytorch-1.13-cu117")


def test_a_runtime_that_any_of_its_builds_brings() -> None:
    wheel = LockedWheel(name="onnxruntime-gpu", version="1", filename="o.whl", sha256="0" * 64, size=1)
    definition = replace(make_definition(), lock=make_lock(wheels=(wheel,)))
    check_has_runtime("onnxruntime-cpu", definition)
    check_has_runtime("onnxruntime-cuda", definition)
    with pytest.raises(UsageError):
        check_has_runtime("onnxruntime-migraphx", definition)
