"""Turn an image on offer into a job and write its files into this directory. No job is submitted.

    offer + JobParameters -> resolve_job() -> JobSpec -> write_job() -> texts by file name -> save_files()

Only the functions in the second half access files. All errors are of type ImagefactoryError.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path

from imagefactory.build.definition import PREFIX
from imagefactory.errors import CheckFailedError, UsageError, os_problem
from imagefactory.fs import replace_all
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import rocm_of
from imagefactory.jobs.htcondor import write_htcondor
from imagefactory.jobs.kubernetes import FILES_MOST, write_kubernetes
from imagefactory.jobs.offer import (
    GpuClass,
    ImageEvidence,
    ImageForm,
    choose_form,
    expected_grounds,
    forms_of,
)
from imagefactory.jobs.spec import JobParameters, JobSpec, run_directory
from imagefactory.progress import Progress
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import Site
from imagefactory.settings.choices import KUBERNETES, SLURM
from imagefactory.suite import table
from imagefactory.trust.catalog import CENTER_HINT, ImageOffer
from imagefactory.trust.claims import multi_gpu_capabilities
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import VerdictStatus

PYTHON = f"{PREFIX}/bin/python"
_TRIALS = {
    "torch": "import torch; print(torch.__version__, torch.cuda.get_device_name())",
    "tensorflow": "import tensorflow as tf; print(tf.__version__, tf.config.list_physical_devices('GPU'))",
    "jax": "import jax; print(jax.__version__, jax.devices('gpu'))",
}
_PLAIN = "import sys; print(sys.version)"
_CHUNK = 1 << 20


def resolve_job(offer: ImageOffer, request: JobParameters, trust: TrustRules, now: datetime) -> JobSpec:
    """Return the requested job with the best form of an image. Pure.

    An image for CPUs needs no verdict. Raises NothingSelectedError if the form is not on offer,
    CheckFailedError if no GPU is verified, UsageError for an invalid value.
    """
    image = offer.image
    form = choose_form(
        forms_of(offer, request.sif_folder),
        request.site,
        request.kind,
        default_form=image.target if request.own else "",
    )
    if rocm_of(image.cuda) and request.site.batch == SLURM:
        raise UsageError(
            "amd-not-supported",
            f"{image.target} is for AMD GPUs, but scripts for Slurm check only NVIDIA GPUs",
            hint="write the script yourself: apptainer exec --rocm",
        )
    classes, excluded = form.grounds.classes, form.grounds.refused
    if image.gpu:
        expected = expected_grounds(form.grounds, image, faulty=request.faulty)
        if request.predicted:
            classes, excluded = expected.classes, expected.refused
        else:
            classes = tuple(gpu_class for gpu_class in expected.classes if gpu_class.verified)
        if not classes:
            raise _not_verified(offer, form, expected, trust, request)
        _check_site(classes, request.site)
    else:
        request = _without_gpus(request, image.target)
    if not request.executable:
        words = ("-c", _first_trial(image.framework, request.gpus))
        request = replace(request, executable=PYTHON, in_image=True, arguments=words)
    fetch = f"get {Path(form.image.address).name} from the maintainer of the catalog"
    if request.own:
        fetch = f"imagefactory image export {image.target} --format sif"
    values = {row.name: getattr(request, row.name) for row in fields(JobParameters)}
    return JobSpec(
        **{**values, "name": request.name or image.target, "target": image.target},
        platform=image.platform,
        image=form.image,
        classes=classes,
        excluded=excluded,
        multi_gpu=multi_gpu_capabilities(offer.judged, request.gpus),
        fetch=form.fetch or fetch,
        date=now,
    )


def _check_site(classes: Sequence[GpuClass], site: Site) -> None:
    """Raise CheckFailedError if all GPUs on which a job may run are older than those of the site."""
    least = parse_capability(site.lowest) if site.lowest else None
    if least is None or any(row.capability.processor or row.capability >= least for row in classes):
        return
    names = ", ".join(str(row.capability) for row in classes)
    raise CheckFailedError(
        "no-matching-gpu",
        f"{site.title} has no GPU below {least}, and this job may only run on {names}",
        hint="choose another image: imagefactory search",
    )


def _without_gpus(request: JobParameters, target: str) -> JobParameters:
    for option, value in (
        ("--gpus", request.gpus > 1),
        ("--gpu-memory", request.gpu_memory),
        ("--allow-mig", request.mig),
    ):
        if value:
            raise UsageError(
                "option-conflict",
                f"{target} is for CPUs only, but {option} requests GPUs",
                hint=f"remove {option}",
            )
    return replace(request, gpus=0)


def _first_trial(framework: str, gpus: int) -> str:
    """Return a Python program that prints the GPU that the framework uses, or its version on CPUs."""
    if gpus:
        return _TRIALS.get(framework, _PLAIN)
    module = table.module_of(framework)
    known = framework in table.FRAMEWORKS
    return f"import {module}; print({module}.__name__, {module}.__version__)" if known else _PLAIN


def _not_verified(
    offer: ImageOffer, form: ImageForm, expected: ImageEvidence, trust: TrustRules, request: JobParameters
) -> CheckFailedError:
    """Return an error that says why there is no job, what is predicted, and what the user can do."""
    name = f"{request.prefix}{offer.image.target}"
    sifs = (sif.judged for sif in offer.sifs if sif.sif.subject == form.image.subject)
    poor = [row for row in next(sifs, offer.judged) if row.standing is not VerdictStatus.GOOD]
    reasons = [f"{name} ({form.image.kind}) is not verified on any GPU by a key that you trust"]
    if not trust.keys:
        reasons = [f"{name}: you trust no key, so no verdict counts"]
    reasons += [f"a verdict is {row.standing.value}: {row.why}" for row in poor[:5]]
    reasons += [f"not {capability}: {reason}" for capability, reason in form.grounds.refused]
    reasons += [f"not {row.where}: {row.summary}" for row in form.grounds.revoked if not row.capability]
    predicted = ", ".join(str(gpu_class.capability) for gpu_class in expected.classes)
    denied = ", ".join(str(row[0]) for row in expected.refused if row not in form.grounds.refused)
    reasons.append(f"predicted to run on {predicted}" if predicted else "no GPU is predicted to run it")
    reasons += [f"not predicted to run on {denied}"] if denied else []
    untrusted = not trust.keys or any(row.standing is VerdictStatus.WRONG_KEY for row in poor)
    if request.own and untrusted:
        hint = "compare the fingerprint of the key with its owner, then run imagefactory key trust FILE.pub"
    elif request.own:
        hint = f"verify it: imagefactory sweep start {name}"
    elif untrusted:
        hint = f"{CENTER_HINT}; then run imagefactory site join ADDRESS|FILE and compare them"
    else:
        hint = (
            f"choose another image (imagefactory search {offer.image.family}) or ask your center to verify it"
        )
    if predicted:
        hint += f"; or accept the risk: imagefactory job write {name} --allow-unverified"
    return CheckFailedError("not-verified", "; ".join(reasons), hint=hint)


def write_job(spec: JobSpec) -> dict[str, str]:
    """Return the texts of the files by name, the job first. Pure. Raises the errors of the writers."""
    if spec.site.batch == SLURM:
        from imagefactory.jobs.slurm import write_slurm

        return write_slurm(spec)
    return write_kubernetes(spec) if spec.site.batch == KUBERNETES else write_htcondor(spec)


# --- files


def check_files(spec: JobSpec, progress: Progress) -> None:
    """Check the files that a job transfers. Raises UsageError for a missing or wrong file."""
    for option, program in (("--executable", spec.executable), ("--finalize", spec.gather)):
        if program and not spec.in_image:
            _check_program(option, Path(program), runs_here=spec.site.batch == SLURM)
    for path in spec.inputs:
        if "://" not in path and not Path(path).exists():
            raise UsageError(
                "input-not-found",
                f"input file {path} does not exist",
                hint="pass its path relative to this directory: --input PATH",
            )
    if spec.image.kind is ImageKind.SIF:
        _check_sif(Path(spec.image.address), spec, progress)


def _check_program(option: str, path: Path, *, runs_here: bool) -> None:
    """Check that another machine can start a program.

    HTCondor makes the file executable. With `runs_here` (Slurm), the file must be executable.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(256)
    except OSError as error:
        raise UsageError(
            *os_problem("read", path, error), hint=f"pass a program in this directory: {option} train.sh"
        ) from error
    if line.startswith(b"#!") and line.rstrip(b"\n").endswith(b"\r"):
        raise UsageError(
            "program-line-endings",
            f"{path} has Windows line endings, so its interpreter is not found",
            hint=f"convert them: sed -i 's/\\r$//' {path}",
        )
    if not line.startswith((b"#!", b"\x7fELF")):
        raise UsageError(
            "program-no-interpreter",
            f"{path} does not name its interpreter",
            hint="start it with #!/bin/sh, #!/bin/bash or #!/usr/bin/env python3",
        )
    if runs_here and not os.access(path, os.X_OK):
        raise UsageError(
            "program-not-executable",
            f"{option} {path} is not executable",
            hint=f"make it executable: chmod +x {path}",
        )


def _check_sif(path: Path, spec: JobSpec, progress: Progress) -> None:
    """Check the digest of the .sif file. Skip the check if its directory is not on this machine."""
    if not path.parent.is_dir():
        return
    if not path.is_file():
        location = "" if path.parent == Path() else f"  (in {path.parent})"
        raise UsageError("sif-missing", f"{path} does not exist", hint=f"fetch it: {spec.fetch}{location}")
    sha256 = hashlib.sha256()
    with path.open("rb") as file, progress.task(f"checking {path.name}", total=path.stat().st_size) as task:
        while data := file.read(_CHUNK):
            sha256.update(data)
            task.advance(len(data))
    if sha256.hexdigest() != spec.image.sha256.removeprefix("sha256:"):
        raise UsageError(
            "sif-mismatch",
            f"{path} is not the .sif file of this image",
            hint=f"fetch it again: rm {path}; {spec.fetch}",
        )


def read_files(request: JobParameters) -> Mapping[str, bytes]:
    """Return the program and its inputs by name, for a Job that contains them. Raises UsageError."""
    paths = [("--executable", request.executable)] if request.executable and not request.in_image else []
    files: dict[str, bytes] = {}
    for option, path in [*paths, *(("--input", path) for path in request.inputs)]:
        name = Path(path).name
        if "://" in path:
            raise UsageError(
                "option-conflict",
                f"{option} {path} does not work on Kubernetes, which does not download files",
                hint="download it in the program",
            )
        if name in files:
            raise UsageError(
                "file-name-duplicate",
                f"two input files have the name {name}",
                hint="rename one: the job has one directory",
            )
        try:
            with Path(path).open("rb") as file:
                files[name] = file.read(FILES_MOST + 1)
        except OSError as error:
            raise UsageError(
                *os_problem("read", path, error),
                hint=f"pass a file with {option}; put directories into a volume and add it to the manifest",
            ) from error
    return files


def save_files(spec: JobSpec, files: Mapping[str, str], *, force: bool) -> tuple[str, ...]:
    """Write the files of a job into its directory, and create the directories of its runs in this one.

    Return the paths of the files.

    Raises UsageError if the files exist, unless `force` is set, or if they cannot be written.
    """
    dag, directory = f"{spec.name}.dag", Path(spec.directory)
    if dag in files and (rescues := sorted(directory.glob(f"{dag}.rescue*"))):
        raise UsageError(
            "sweep-rescue-exists",
            f"{rescues[0]} exists, so DAGMan would continue that sweep and skip its finished runs",
            hint=f"delete {rescues[0]}, or use another name: -o NAME.sub",
        )
    texts = {str(directory / name): text for name, text in files.items()}
    runs = [run_directory(number + 1) for number in range(len(spec.rows))] if dag in files else []
    if not force:
        existing = [path for path in texts if os.path.lexists(path)]
        existing += [run for run in runs if os.path.lexists(run) and not _is_empty(Path(run))]
        if existing:
            another = f"-o NAME{Path(next(iter(files))).suffix}"
            raise UsageError(
                "file-exists",
                f"{existing[0]} already exists",
                hint="use --force to overwrite it, or "
                + ("change to another directory" if existing[0] in runs else f"another name: {another}"),
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(*os_problem("create", directory, error), hint="choose another directory") from error
    for run in runs:
        Path(run).mkdir(exist_ok=True)
    replace_all({Path(path): text.encode("ascii") for path, text in texts.items()})
    return tuple(texts)


def _is_empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())
