"""Check portability on the host: write the request, run two programs in images, and parse their output.

    models.py -> export (in the image that trained) -> NAME.onnx, NAME.npz -> try (in each image that serves)

The output of an image is untrusted: only regular files are accepted, and a strict parser reads documents.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from imagefactory.errors import CheckFailedError, LimitError, StatementError, UsageError, os_reason
from imagefactory.extras.portability.report import PortableModel, PortableRow
from imagefactory.model import BuildSpec, CheckState, Mount, RunSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.runtime.protocol import Runner
from imagefactory.serialize import ObjectSchema, parse_json, printable_value
from imagefactory.suite.portability import exporting, trying
from imagefactory.suite.portability.rows import FORMAT
from imagefactory.suite.portability.runtimes import RUNTIMES
from imagefactory.trees import open_file, read_chunks
from imagefactory.verify.outcome import InvalidReportError, clean, exit_summary, read_report
from imagefactory.verify.suite_files import (
    EXPECT_MOUNT,
    REPORT_MOUNT,
    SUITE_MOUNT,
    read_suite,
    write_suite,
)

ENTRY, REQUEST_FILE = "portable.py", "asked.json"
MODELS_MOUNT, EXPORTED_MOUNT = "/imagefactory/models", "/imagefactory/exported"
ONNX, DATA = ".onnx", ".npz"
SECONDS = 3600.0
"""The time limit in seconds of a program for all models. Each runtime has a shorter limit."""
LARGEST_MODEL = 16 << 30
"""The limit in bytes of a model file or its data."""

# Framework and runtime compute in full float32, independent of their own defaults.
PLAIN_FLOATS = ("NVIDIA_TF32_OVERRIDE", "0")

_EXPORTED = ObjectSchema(
    format=object,
    nonce=object,
    fault=str,
    processor=str,
    threads=int,
    running=str,
    models=tuple[PortableModel, ...],
    rows=tuple[PortableRow, ...],
)
_TRIED_SCHEMA = ObjectSchema(
    format=object, nonce=object, threads=int, running=str, rows=tuple[PortableRow, ...]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeImage:
    """A prepared image, its runner, and the GPUs that it sees (`CUDA_VISIBLE_DEVICES=...`)."""

    image: Image | SifArtifact
    definition: BuildSpec
    runner: Runner
    gpus: bool
    visible: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModels:
    """The output of the first program. The files of the models are in its directory and have their names."""

    processor: str
    threads: int
    models: tuple[PortableModel, ...]
    rows: tuple[PortableRow, ...]


def parse_runtime(text: str) -> tuple[str, str]:
    """Parse `openvino-cpu@TARGET` into runtime and image, empty for the image that exports.

    Raises UsageError for an unknown runtime.
    """
    name, separator, image = text.partition("@")
    if name not in RUNTIMES or (separator and not image):
        raise UsageError(
            "option-invalid",
            f"--to {text}: unknown runtime '{name}'" if name not in RUNTIMES else f"--to {text}: no image",
            hint=f"write RUNTIME or RUNTIME@TARGET; runtimes: {', '.join(RUNTIMES)}",
        )
    return name, image


def check_has_runtime(name: str, definition: BuildSpec) -> None:
    """Raise UsageError if the lock of an image has no package of the runtime."""
    brings = RUNTIMES[name].brings
    locked = {package.name for package in definition.lock.packages}
    if not locked & set(brings):
        target = definition.target.name
        raise UsageError(
            "runtime-not-locked",
            f"{target} has no {brings[0]}, which {name} requires",
            hint=f"pass an image that has it: {name}@TARGET; or add {brings[0]} on top of this one: "
            f"imagefactory recipe new FAMILY --extends {target}",
        )


def export_models(
    runtime: RuntimeImage, models: Path, directory: Path, request: Mapping[str, Any], location: str
) -> ExportedModels:
    """Run the first program on `models`, whose directory it can read.

    Its files are written to the new `directory`.

    Raises CheckFailedError if the models are unreadable, or the process ended early.
    """
    mount = Mount(source=models.parent, target=MODELS_MOUNT)
    document = {**request, "models": f"{MODELS_MOUNT}/{models.name}"}
    read = _run(runtime, "export", (mount,), directory, document, exporting.REPORT)
    report = _parse(read, _EXPORTED, request["nonce"], location)
    if report["fault"]:
        raise CheckFailedError(
            "models-unreadable", clean(report["fault"]), hint="correct the models file and run it again"
        )
    _check_complete(report, read, location)
    if not {row.model for row in report["rows"]} <= {model.name for model in report["models"]}:
        raise CheckFailedError(
            "model-report-invalid", f"{location}: the report has rows of unknown models", hint="run it again"
        )
    completed = {row.model for row in report["rows"] if row.error is not None}
    for name in completed:
        check_file(directory, f"{name}{DATA}", location)
    exported = []
    for model in report["models"]:
        if model.name in completed:
            digest, size = check_file(directory, f"{model.name}{ONNX}", location)
            model = replace(model, digest=digest, size=size)
        exported.append(model)
    return ExportedModels(
        processor=report["processor"], threads=report["threads"], models=tuple(exported), rows=report["rows"]
    )


def try_models(
    runtime: RuntimeImage, exported: Path, directory: Path, request: Mapping[str, Any], location: str
) -> tuple[PortableRow, ...]:
    """Run the second program on the files in `exported`. Its report is written to the new `directory`.

    Raises CheckFailedError if the process ended early.
    """
    mount = Mount(source=exported, target=EXPORTED_MOUNT, bind=True)
    read = _run(runtime, "try", (mount,), directory, {**request, "folder": EXPORTED_MOUNT}, trying.REPORT)
    report = _parse(read, _TRIED_SCHEMA, request["nonce"], location)
    _check_complete(report, read, location)
    expected = [(model["name"], by) for by in request["runtimes"] for model in request["models"]]
    if [(row.model, row.by) for row in report["rows"]] != expected:
        raise CheckFailedError(
            "model-report-invalid",
            f"{location}: the report has other models or runtimes than requested",
            hint="run it again",
        )
    rows: tuple[PortableRow, ...] = report["rows"]
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadReport:
    """The bytes of a report or the reason why they are missing, and how the process ended."""

    data: bytes
    fault: str
    ended: str


def _run(
    runtime: RuntimeImage,
    program: str,
    mounts: Sequence[Mount],
    directory: Path,
    request: Mapping[str, Any],
    report: str,
) -> _ReadReport:
    suite, expect = (
        directory.with_name(f"{directory.name}-suite"),
        directory.with_name(f"{directory.name}-asked"),
    )
    write_suite(suite, read_suite())
    write_suite(expect, {REQUEST_FILE: json.dumps(request).encode()})
    directory.mkdir()
    directory.chmod(0o777)  # the unknown user of the image writes here; the parent directory is private
    spec = RunSpec(
        argv=(
            f"{runtime.definition.prefix}/bin/python",
            *("-I", "-B", f"{SUITE_MOUNT}/{ENTRY}", program, f"{EXPECT_MOUNT}/{REQUEST_FILE}", REPORT_MOUNT),
        ),
        environment=(PLAIN_FLOATS, *runtime.visible),
        gpus=runtime.gpus,
        mounts=(
            Mount(source=suite, target=SUITE_MOUNT, bind=True),
            Mount(source=expect, target=EXPECT_MOUNT, bind=True),
            Mount(source=directory, target=REPORT_MOUNT, writable=True, scratch=True),
            *mounts,
        ),
        workdir=EXPORTED_MOUNT if program == "try" else MODELS_MOUNT,
        timeout=SECONDS,
    )
    completed = runtime.runner.run(runtime.image, spec)
    for gone in (suite, expect):
        shutil.rmtree(gone)
    message, hint = completed.over
    if message:
        raise LimitError("limit-reached", message, hint=hint)
    ended = f"it was stopped after {SECONDS:.0f} s" if completed.timed_out else exit_summary(completed)
    try:
        return _ReadReport(data=read_report(directory / report), fault="", ended=ended)
    except InvalidReportError as error:
        return _ReadReport(data=b"", fault=str(error), ended=ended)


def _parse(read: _ReadReport, fields: ObjectSchema, nonce: str, location: str) -> dict[str, Any]:
    """Return the fields of a report with the nonce. Raises CheckFailedError for other data."""
    if read.fault:
        raise CheckFailedError(
            "model-report-missing", f"{location}: {read.fault}: {read.ended}", hint="run it again"
        )
    try:
        document = parse_json(read.data)
        _printable_rows(document)
        report = fields.parse(document, location)
    except (ValueError, StatementError) as error:
        problem = error.message if isinstance(error, StatementError) else "not JSON"
        message = f"{location}: the report is not valid: {problem}"
        raise CheckFailedError("model-report-invalid", message, hint="run it again") from error
    if report["format"] != FORMAT or report["nonce"] != nonce:
        raise CheckFailedError(
            "model-report-invalid", f"{location}: the report is from another run", hint="run it again"
        )
    return report


def _printable_rows(document: object) -> None:
    """Replace each detail by one printable line, since messages of packages are untrusted."""
    rows = document.get("rows") if isinstance(document, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("detail"), str):
            row["detail"] = clean(row["detail"])
    if isinstance(document, dict) and isinstance(document.get("fault"), str):
        document["fault"] = clean(document["fault"])


def _check_complete(report: Mapping[str, Any], read: _ReadReport, location: str) -> None:
    if report["running"]:
        raise CheckFailedError(
            "model-run-failed",
            f"{location}: {clean(report['running'])} did not finish: {read.ended}",
            hint="run only this model and runtime, to see its output",
        )


def check_file(directory: Path, name: str, location: str) -> tuple[str, int]:
    """Return the digest and size of a file that an image wrote, and reset its mode.

    Raises CheckFailedError unless it is a regular file of at most LARGEST_MODEL bytes.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open_file(directory, name, LARGEST_MODEL) as fd:
            os.fchmod(fd, 0o644)  # else root would leave a setuid file of the image on this machine
            for data in read_chunks(fd, name, LARGEST_MODEL):
                digest.update(data)
                size += len(data)
    except OSError as error:
        raise CheckFailedError(
            "model-file-invalid",
            f"{location}: cannot use {printable_value(name)}: {os_reason(error)}",
            hint="run it again",
        ) from error
    return f"sha256:{digest.hexdigest()}", size


def not_run(models: Sequence[PortableModel], name: str, reason: str) -> tuple[PortableRow, ...]:
    """Return rows of models that a runtime did not run, because they were not exported."""
    return tuple(
        PortableRow(
            model=model.name,
            by=name,
            version="",
            state=CheckState.NOT_RUN,
            outcome="",
            detail=reason,
            error=None,
            kernels=0,
            seconds=0.0,
            latencies=(),
        )
        for model in models
    )
