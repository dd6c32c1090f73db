"""Portability seen from the host: what is asked of an image, the two runs inside, and what they wrote.

    models.py -> export (in the image that trained) -> NAME.onnx, NAME.npz -> try (in each image that serves)

What an image wrote is a stranger's: files are taken as plain files alone, documents by a strict parser.
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

from imagefactory.errors import CheckFailedError, LimitError, StatementError, UsageError
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
"""For a program, all models together; a runtime has its own end before."""
LARGEST_MODEL = 16 << 30
"""Bytes of a model, or of its data: an ONNX file is a message of protobuf, which ends at 2 GiB."""

# Framework and runtime compute float32 as such, whatever their own settings for it are.
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
    """An image to run in, what starts it, and which GPUs it sees (`CUDA_VISIBLE_DEVICES=...`)."""

    made: Image | SifArtifact
    definition: BuildSpec
    runner: Runner
    gpus: bool
    visible: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModels:
    """What the first program wrote; the models' files lie in its folder, named after them."""

    processor: str
    threads: int
    models: tuple[PortableModel, ...]
    rows: tuple[PortableRow, ...]


def parse_runtime(text: str) -> tuple[str, str]:
    """`openvino-cpu@TARGET` as runtime and image, which is empty where it is the one that exports.

    Raises UsageError for a runtime that nobody knows.
    """
    name, at, image = text.partition("@")
    if name not in RUNTIMES or (at and not image):
        raise UsageError(
            "option-invalid",
            f"--to {text}: unknown runtime '{name}'" if name not in RUNTIMES else f"--to {text}: no image",
            hint=f"write RUNTIME or RUNTIME@TARGET; runtimes: {', '.join(RUNTIMES)}",
        )
    return name, image


def check_has_runtime(name: str, definition: BuildSpec) -> None:
    """Raises UsageError where the lock of an image names nothing that brings the runtime."""
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
    shop: RuntimeImage, models: Path, folder: Path, asked: Mapping[str, Any], where: str
) -> ExportedModels:
    """Runs the first program on `models`, whose folder it sees; its files go to `folder`, which is empty.

    Raises CheckFailedError where the models could not be read, or the process ended before it was done.
    """
    mount = Mount(source=models.parent, target=MODELS_MOUNT)
    told = {**asked, "models": f"{MODELS_MOUNT}/{models.name}"}
    read = _run(shop, "export", (mount,), folder, told, exporting.REPORT)
    found = _parse(read, _EXPORTED, asked["nonce"], where)
    if found["fault"]:
        raise CheckFailedError("models-unreadable", clean(found["fault"]), hint="fix it and run it again")
    _check_complete(found, read, where)
    if not {row.model for row in found["rows"]} <= {model.name for model in found["models"]}:
        raise CheckFailedError(
            "model-report-invalid", f"{where}: the report has rows of unknown models", hint="run it again"
        )
    done = {row.model for row in found["rows"] if row.error is not None}
    for name in done:
        check_file(folder, f"{name}{DATA}", where)
    exported = []
    for model in found["models"]:
        if model.name in done:
            digest, size = check_file(folder, f"{model.name}{ONNX}", where)
            model = replace(model, digest=digest, size=size)
        exported.append(model)
    return ExportedModels(
        processor=found["processor"], threads=found["threads"], models=tuple(exported), rows=found["rows"]
    )


def try_models(
    shop: RuntimeImage, exported: Path, folder: Path, asked: Mapping[str, Any], where: str
) -> tuple[PortableRow, ...]:
    """Runs the second program on what lies in `exported`; its report goes to `folder`, which is empty.

    Raises CheckFailedError where the process ended before it was done.
    """
    mount = Mount(source=exported, target=EXPORTED_MOUNT, bind=True)
    read = _run(shop, "try", (mount,), folder, {**asked, "folder": EXPORTED_MOUNT}, trying.REPORT)
    found = _parse(read, _TRIED_SCHEMA, asked["nonce"], where)
    _check_complete(found, read, where)
    wanted = [(model["name"], by) for by in asked["runtimes"] for model in asked["models"]]
    if [(row.model, row.by) for row in found["rows"]] != wanted:
        raise CheckFailedError(
            "model-report-invalid",
            f"{where}: the report has other models or runtimes than requested",
            hint="run it again",
        )
    rows: tuple[PortableRow, ...] = found["rows"]
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadReport:
    """A report's bytes, or why there are none, and how the process ended."""

    data: bytes
    fault: str
    ended: str


def _run(
    shop: RuntimeImage,
    program: str,
    mounts: Sequence[Mount],
    folder: Path,
    asked: Mapping[str, Any],
    report: str,
) -> _ReadReport:
    suite, expect = folder.with_name(f"{folder.name}-suite"), folder.with_name(f"{folder.name}-asked")
    write_suite(suite, read_suite())
    write_suite(expect, {REQUEST_FILE: json.dumps(asked).encode()})
    folder.mkdir()
    folder.chmod(0o777)  # the image's user writes here, whoever that is; the folder above is closed to others
    spec = RunSpec(
        argv=(
            f"{shop.definition.prefix}/bin/python",
            *("-I", "-B", f"{SUITE_MOUNT}/{ENTRY}", program, f"{EXPECT_MOUNT}/{REQUEST_FILE}", REPORT_MOUNT),
        ),
        environment=(PLAIN_FLOATS, *shop.visible),
        gpus=shop.gpus,
        mounts=(
            Mount(source=suite, target=SUITE_MOUNT, bind=True),
            Mount(source=expect, target=EXPECT_MOUNT, bind=True),
            Mount(source=folder, target=REPORT_MOUNT, writable=True, scratch=True),
            *mounts,
        ),
        workdir=EXPORTED_MOUNT if program == "try" else MODELS_MOUNT,
        timeout=SECONDS,
    )
    completed = shop.runner.run(shop.made, spec)
    for gone in (suite, expect):
        shutil.rmtree(gone)
    message, hint = completed.over
    if message:
        raise LimitError("limit-reached", message, hint=hint)
    ended = f"it was stopped after {SECONDS:.0f} s" if completed.timed_out else exit_summary(completed)
    try:
        return _ReadReport(data=read_report(folder / report), fault="", ended=ended)
    except InvalidReportError as error:
        return _ReadReport(data=b"", fault=str(error), ended=ended)


def _parse(read: _ReadReport, fields: ObjectSchema, nonce: str, where: str) -> dict[str, Any]:
    """The fields of a report that brings the nonce back. Raises CheckFailedError for anything else."""
    if read.fault:
        raise CheckFailedError(
            "model-report-missing", f"{where}: {read.fault}: {read.ended}", hint="run it again"
        )
    try:
        document = parse_json(read.data)
        _printable_rows(document)
        found = fields.parse(document, where)
    except (ValueError, StatementError) as error:
        problem = error.message if isinstance(error, StatementError) else "not JSON"
        message = f"the report is not valid: {problem}"
        raise CheckFailedError("model-report-invalid", message, hint="see what it contains") from error
    if found["format"] != FORMAT or found["nonce"] != nonce:
        raise CheckFailedError(
            "model-report-invalid", f"{where}: the report is from another run", hint="run it again"
        )
    return found


def _printable_rows(document: object) -> None:
    """What packages say may hold anything: details become one printable line each."""
    rows = document.get("rows") if isinstance(document, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("detail"), str):
            row["detail"] = clean(row["detail"])
    if isinstance(document, dict) and isinstance(document.get("fault"), str):
        document["fault"] = clean(document["fault"])


def _check_complete(found: Mapping[str, Any], read: _ReadReport, where: str) -> None:
    if found["running"]:
        raise CheckFailedError(
            "model-run-failed",
            f"{where}: {clean(found['running'])}: {read.ended}",
            hint="run only this one to see why",
        )


def check_file(folder: Path, name: str, where: str) -> tuple[str, int]:
    """Return the digest and size of a file that an image wrote; its mode becomes an ordinary one.

    Raises CheckFailedError for anything but a regular file of a size that a model may have.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open_file(folder, name, LARGEST_MODEL) as fd:
            os.fchmod(fd, 0o644)  # as root, a setuid file of an image would be the machine's own
            for data in read_chunks(fd, name, LARGEST_MODEL):
                digest.update(data)
                size += len(data)
    except OSError as error:
        raise CheckFailedError(
            "model-file-invalid",
            f"{where}: cannot use {printable_value(name)}: {error.strerror}",
            hint="run it again",
        ) from error
    return f"sha256:{digest.hexdigest()}", size


def not_run(models: Sequence[PortableModel], name: str, why: str) -> tuple[PortableRow, ...]:
    """Rows of models that could not be tried by a runtime, as they were not exported."""
    return tuple(
        PortableRow(
            model=model.name,
            by=name,
            version="",
            state=CheckState.NOT_RUN,
            outcome="",
            detail=why,
            error=None,
            kernels=0,
            seconds=0.0,
            latencies=(),
        )
        for model in models
    )
