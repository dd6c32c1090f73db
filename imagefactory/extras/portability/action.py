"""Export the models of a user in one image, run them in runtimes, sign the result and attach it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from imagefactory.access import Access
from imagefactory.actions.images import make_runner, scratch_directory
from imagefactory.actions.resolve import ResolvedImage, check_name, resolve_image
from imagefactory.actions.run import mounted_directory
from imagefactory.actions.verdicts import (
    ANY,
    StatementRequest,
    attach_all,
    local_place,
    place_of,
    places_of,
    signing_key,
    subject_name,
)
from imagefactory.actions.verify import VerifyDependencies, runner_name
from imagefactory.errors import NoGpuError, NothingSelectedError, UsageError
from imagefactory.extras.portability.report import (
    PortableModel,
    PortableReport,
    PortableResult,
    PortableRow,
    RuntimeSource,
    SignedPortable,
    sign_portable,
    verify_portable,
)
from imagefactory.extras.portability.run import (
    DATA,
    ONNX,
    ExportedModels,
    RuntimeImage,
    check_has_runtime,
    export_models,
    not_run,
    parse_runtime,
    try_models,
)
from imagefactory.fs import explain_full_disk, locked_temporary_directory, replace_bytes, replacing
from imagefactory.gpu.values import rocm_of
from imagefactory.oci.candidates import MODELS_TYPE, PORTABLE_TYPE
from imagefactory.oci.graph import StoreRepository, artifact_of, put_files, read_manifest
from imagefactory.oci.manifests import MALFORMED, Descriptor, Image, parse_descriptor
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.runtime.emulator import check_not_emulated
from imagefactory.suite.portability.runtimes import RUNTIMES
from imagefactory.trust.attached import read_statements, read_subject
from imagefactory.trust.policy import read_trust
from imagefactory.trust.verdict import VerdictStatus
from imagefactory.verify.gpu_run import VISIBLE, VISIBLE_AMD, assigned_gpus, choose_gpus, visible_gpus
from imagefactory.verify.nonces import NONCE_BYTES, format_nonce
from imagefactory.verify.report import Hardware
from imagefactory.verify.suite_files import suite_digest

ONNX_TYPE = "application/vnd.imagefactory.model.v1+onnx"
TITLE = "org.opencontainers.image.title"
STATEMENT = "portable.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortabilityOptions:
    """The options of a check.

    `models` is a Python file, `to` lists runtimes (`openvino-cpu`, `onnxruntime-cpu@TARGET`).

    `batches` are the sizes to measure. `output` is the directory for models and report. The statement is
    attached in the store and in `registry` (`host[/path]`), if set. An empty `runner` means the setting or
    the default.
    """

    models: Path
    to: tuple[str, ...]
    batches: tuple[int, ...]
    output: Path
    registry: str = ""
    runner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortabilityResult:
    """The report. `why` is who signed it, or why it is unsigned. `attached` lists where the statement is."""

    report: PortableReport
    why: str
    attached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _RuntimeGroup:
    """The runtimes to test in one image."""

    chosen: ResolvedImage
    runtimes: tuple[str, ...]

    @property
    def gpu(self) -> bool:
        return any(RUNTIMES[name].gpu for name in self.runtimes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PortabilityRun:
    """The context of all steps. `hardware` is None if no runtime needs a GPU."""

    access: Access
    options: PortabilityOptions
    dependencies: VerifyDependencies
    hardware: Hardware | None
    progress: Progress
    folder: Path
    request: Mapping[str, Any]


def port_models(
    project: Project,
    name: str,
    options: PortabilityOptions,
    dependencies: VerifyDependencies,
    progress: Progress,
) -> PortabilityResult:
    """Export the models in the image of `name`, run them in the runtimes, write and sign the report.

    Raises NoGpuError if a runtime needs a GPU and this machine has none. Raises UsageError for a runtime that
    an image lacks and for models in a private directory, CheckFailedError if a program ended early.
    """
    models, key = resolve_models(project, options.models), signing_key(project, dependencies.clock())
    check_name(project, name, gpu=False)
    source = resolve_image(project, name, options.registry, progress, gpu=False)
    groups = _groups(project, source, options.to, progress)
    hardware = dependencies.evidence.read() if any(group.gpu for group in groups) else None
    started, nonce = dependencies.clock(), format_nonce(dependencies.random(NONCE_BYTES))
    scratch = scratch_directory(project, runner_name(project, source.made, options.runner))
    with explain_full_disk(options.output):
        options.output.mkdir(parents=True, exist_ok=True)
        with locked_temporary_directory("portability-", scratch) as directory:
            work = _PortabilityRun(
                access=project,
                options=options,
                dependencies=dependencies,
                hardware=hardware,
                progress=progress,
                folder=directory,
                request={"nonce": nonce, "batches": list(options.batches)},
            )
            exported = _export(work, source, models, gpu=groups[0].chosen is source and groups[0].gpu)
            rows = [*exported.rows]
            for group in groups:
                rows += _try(work, group, exported)
            for model in _completed_rows(exported):
                for end in (ONNX, DATA):
                    file = f"{model.name}{end}"
                    shutil.move(directory / "export" / file, options.output / file)
    report = PortableReport(
        subject=source.subject,
        suite=suite_digest(),
        nonce=nonce,
        started=started,
        ended=dependencies.clock(),
        runner=runner_name(project, source.made, options.runner),
        processor=exported.processor,
        threads=exported.threads,
        gpus=hardware.gpus if hardware else (),
        driver=hardware.driver if hardware else "",
        models=exported.models,
        served=tuple(
            RuntimeSource(by=runtime, subject=group.chosen.subject)
            for group in groups
            for runtime in group.runtimes
        ),
        rows=tuple(rows),
    )
    if not report.portable:
        return PortabilityResult(report=report, why="unsigned: not every model computed the same")
    if key is None:
        return PortabilityResult(report=report, why="unsigned: no key (imagefactory key create NAME)")
    days = read_trust(project.settings.files).policy.days
    signed = sign_portable(report, key, now=dependencies.clock(), days=days)
    replace_bytes(options.output / STATEMENT, signed.envelope)
    places = _attach(project, source, signed, options.output, progress)
    return PortabilityResult(report=report, why=f"signed by '{key.name}'", attached=places)


def resolve_models(access: Access, path: Path) -> Path:
    """Return the resolved path. Raises UsageError if its directory cannot be mounted in an image."""
    path = path.resolve()
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(
            "models-file-invalid",
            f"--models {path} is not a Python file",
            hint="pass a .py file with a function models()",
        )
    mount, message = mounted_directory(access, path.parent)
    if mount is None:
        raise UsageError(
            "models-directory-private",
            f"--models {path}: {message.partition(' and is not')[0]}",
            hint="move the file and its weights into a separate directory: the image can read all of it",
        )
    return path


def _groups(
    project: Project, source: ResolvedImage, to: tuple[str, ...], progress: Progress
) -> tuple[_RuntimeGroup, ...]:
    """Return the runtimes by image. The image that exports comes first, if it has any."""
    requests = [parse_runtime(text) for text in to]
    names = [runtime for runtime, _ in requests]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise UsageError(
            "option-conflict", f"--to {twice} is repeated", hint="run the command once for each image"
        )
    groups = []
    for image in sorted({image for _, image in requests}):
        if image:
            check_name(project, image, gpu=False)
        resolved_image = resolve_image(project, image, "", progress, gpu=False) if image else source
        runtimes = tuple(runtime for runtime, requested_image in requests if requested_image == image)
        for runtime in runtimes:
            check_has_runtime(runtime, resolved_image.definition)
        if isinstance(resolved_image.made, Image):
            check_not_emulated(resolved_image.made.name, resolved_image.made.architecture)
        groups.append(_RuntimeGroup(chosen=resolved_image, runtimes=runtimes))
    return tuple(groups)


def _export(work: _PortabilityRun, source: ResolvedImage, models: Path, *, gpu: bool) -> ExportedModels:
    location = work.options.models.name
    with work.progress.stage(f"{_target(source)}: export {location}"):
        image = _open(work, source, gpu=gpu)
        return export_models(image, models, work.folder / "export", {**work.request, "gpu": gpu}, location)


def _try(work: _PortabilityRun, group: _RuntimeGroup, exported: ExportedModels) -> tuple[PortableRow, ...]:
    """Return a row for each runtime and model, also for models that were not exported."""
    completed = _completed_rows(exported)
    failed = [model for model in exported.models if model not in completed]
    rows = [row for name in group.runtimes for row in not_run(failed, name, "it was not exported")]
    title = f"{_target(group.chosen)}: {', '.join(group.runtimes)}"
    with work.progress.stage(title):
        if completed:
            model_rows = [
                {name: getattr(model, name) for name in ("name", "tolerance", "batched", "held_out")}
                for model in completed
            ]
            request = {**work.request, "runtimes": list(group.runtimes), "models": model_rows}
            directory = work.folder / f"try-{group.runtimes[0]}"
            image = _open(work, group.chosen, gpu=group.gpu)
            rows += try_models(image, work.folder / "export", directory, request, title)
    return tuple(rows)


def _completed_rows(exported: ExportedModels) -> tuple[PortableModel, ...]:
    return tuple(model for model in exported.models if model.digest)


def _target(resolved_image: ResolvedImage) -> str:
    return resolved_image.definition.target.name


def _open(work: _PortabilityRun, resolved_image: ResolvedImage, *, gpu: bool) -> RuntimeImage:
    """Return the image, prepared for its runner, with the GPUs of its vendor if `gpu` is set.

    Raises UsageError if this machine has only GPUs of the other vendor.
    """
    visible: tuple[tuple[str, str], ...] = ()
    if gpu and work.hardware is not None:
        amd = bool(rocm_of(resolved_image.definition.target.cuda))
        seen = assigned_gpus(work.hardware, work.access.environ, amd=amd)
        if seen is None:
            name = VISIBLE_AMD if amd else VISIBLE
            value = work.access.environ[name][:200]
            raise NoGpuError(
                "gpu-not-visible",
                f"the variable {name}={value!a} matches no GPU of this machine",
                hint=f"run it in a job that requests a GPU, or unset {name}",
            )
        met = choose_gpus(seen, "", amd=amd)
        if not met:
            maker = "AMD" if amd else "NVIDIA"
            raise UsageError(
                "gpu-vendor-mismatch",
                f"{_target(resolved_image)} is for {maker} GPUs, but this machine has none",
                hint="choose an image for the GPUs of this machine: imagefactory search",
            )
        visible = visible_gpus(work.hardware, met, work.access.environ)
    runner, image = work.dependencies.runner, resolved_image.made
    if runner is None:
        with work.access.layout.in_use(work.progress):
            name = runner_name(work.access, image, work.options.runner)
            runner = make_runner(work.access, name, _target(resolved_image), work.progress)
            runner.require()
            image = runner.prepare(image, checked=True)
    return RuntimeImage(
        image=image, definition=resolved_image.definition, runner=runner, gpus=gpu, visible=visible
    )


def _attach(
    access: Access, resolved_image: ResolvedImage, signed: SignedPortable, directory: Path, progress: Progress
) -> tuple[str, ...]:
    """Attach the model files and the statement to the image, here and in its registry."""
    report, names = signed.statement.report, []
    files = {model_file(model): directory / f"{model.name}{ONNX}" for model in report.models}
    for repository, subject in places_of(access, report.subject, resolved_image.where):
        root = read_manifest(repository, subject.manifest).descriptor
        with access.layout.in_use(progress):
            put_files(repository, artifact_of(MODELS_TYPE, root, tuple(files), {}), files)
        attaching = StatementRequest(
            subject=subject,
            kind=PORTABLE_TYPE,
            envelope=signed.envelope,
            until=signed.statement.expires,
        )
        for fault in attach_all(access, repository, (attaching,), progress):
            if fault:
                raise fault
        names.append(subject_name(repository))
    return tuple(names)


def model_file(model: PortableModel) -> Descriptor:
    """Return a model file as a layer of an artifact."""
    return Descriptor(
        media_type=ONNX_TYPE,
        digest=model.digest,
        size=model.size,
        annotations=((TITLE, f"{model.name}{ONNX}"),),
    )


# --- Signed statements of portability in the store or a registry, and the model files


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableStatements:
    """The statements attached to an image, the newest last, and their repository."""

    place: StoreRepository
    manifest: str
    judged: tuple[PortableResult, ...]

    @property
    def newest(self) -> PortableResult | None:
        """The last valid statement."""
        good = [row for row in self.judged if row.standing is VerdictStatus.GOOD]
        return good[-1] if good else None


def read_portable(
    project: Project, name: str, registry: str, now: datetime, progress: Progress
) -> PortableStatements:
    """Return the statements of an image, from a registry if `name` or `registry` contains one."""
    check_name(project, name, gpu=False)
    resolved_image = resolve_image(project, name, registry, progress, gpu=False)
    repository, subject = local_place(project, ANY), resolved_image.subject
    if resolved_image.where is not None:
        repository = place_of(project, resolved_image.where)
        subject = read_subject(repository, resolved_image.where.tag_or_digest)
    trust = read_trust(project.settings.files)
    judged = [
        verify_portable(statement.envelope, statement.digest, subject, trust, now)
        for statement in read_statements(repository, subject.manifest, PORTABLE_TYPE)
    ]
    judged.sort(key=lambda row: row.statement.issued.timestamp() if row.statement else 0.0)
    return PortableStatements(place=repository, manifest=subject.manifest, judged=tuple(judged))


def write_models(statements: PortableStatements, directory: Path) -> tuple[Path, ...]:
    """Write the model files of the newest valid statement, checked by digest.

    Raises NothingSelectedError if there is no such statement, or its files are missing.
    """
    if statements.newest is None or statements.newest.statement is None:
        last = next((f": {row.standing}, {row.why}" for row in reversed(statements.judged)), "")
        raise NothingSelectedError(
            "portability-not-verified",
            f"no valid statement says that models of {statements.manifest} are portable{last}",
            hint="if you trust its signer, run imagefactory key trust FILE.pub"
            if last
            else "check the models first: imagefactory model check --models FILE --to RUNTIME",
        )
    files = _stored_models(statements)
    written = []
    for model in statements.newest.statement.report.models:
        path = directory / f"{model.name}{ONNX}"
        with explain_full_disk(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                for chunk in statements.place.store.read(statements.place.repository, _blob(model, files)):
                    file.write(chunk)
        written.append(path)
    return tuple(written)


def _blob(model: PortableModel, files: dict[str, Descriptor]) -> Descriptor:
    if model.digest not in files:
        raise NothingSelectedError(
            "model-file-missing",
            f"the registry has no file of the model '{model.name}'",
            hint="check and sign the models again: imagefactory model check",
        )
    return files[model.digest]


def _stored_models(statements: PortableStatements) -> dict[str, Descriptor]:
    """Return the model files attached to the image by digest."""
    store, repository = statements.place.store, statements.place.repository
    files: dict[str, Descriptor] = {}
    for referrer in store.referrers(repository, statements.manifest, MODELS_TYPE):
        there = store.manifest(repository, referrer.digest)
        if there is None:
            continue
        try:
            layers = [parse_descriptor(layer) for layer in json.loads(there[1])["layers"]]
        except MALFORMED:
            continue
        files |= {layer.digest: layer for layer in layers}
    return files
