"""From a target's name to a submit file in this folder: what is offered, what of it is proven, what to write.

    Catalogue + trust -> Offer -> Form -> text, written as FILE.sub (and FILE.dag with run-1/, ...)

Nothing is submitted. Only the writer at the end touches files. Raises only ImagefactoryError.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from imagefactory.build.definition import PREFIX
from imagefactory.errors import CheckFailedError, UsageError, os_problem
from imagefactory.fs import replace_all
from imagefactory.gpu.builds import rocm_of
from imagefactory.jobs import slurm
from imagefactory.jobs.htcondor import (
    GATHER,
    ROWS_MOST,
    RUN,
    JobImageSpec,
    SubmitCommand,
    format_runs,
    format_submit,
    requested_resources,
    run_directory,
)
from imagefactory.jobs.kubernetes import FILES_MOST, SUFFIX, format_manifest
from imagefactory.jobs.offer import (
    ImageEvidence,
    ImageForm,
    ResourceRequest,
    choose_form,
    expected_grounds,
    forms_of,
)
from imagefactory.jobs.slurm import NO_GPU, SlurmRequest, format_sbatch, request_gpus
from imagefactory.progress import Progress
from imagefactory.schedulers.pool import MACHINE_HAS, ImageKind, Inventory
from imagefactory.schedulers.sites import Site
from imagefactory.settings.choices import KUBERNETES, SLURM
from imagefactory.suite import table
from imagefactory.trust.catalog import CENTER_HINT, Catalog, ImageOffer
from imagefactory.trust.claims import multi_gpu_capabilities
from imagefactory.trust.offers import find_offer
from imagefactory.trust.policy import TrustRules
from imagefactory.trust.verdict import VerdictStatus, VerificationResult

# --- What runs where a person names no program, and what a job in an image for CPUs alone may ask. Pure


PYTHON = f"{PREFIX}/bin/python"
_TRIALS = {
    "torch": "import torch; print(torch.__version__, torch.cuda.get_device_name())",
    "tensorflow": "import tensorflow as tf; print(tf.__version__, tf.config.list_physical_devices('GPU'))",
    "jax": "import jax; print(jax.__version__, jax.devices('gpu'))",
}
_PLAIN = "import sys; print(sys.version)"


def first_trial(run: SubmitCommand, framework: str) -> SubmitCommand:
    """Without a program of one's own: the framework says which GPU it sees, on CPUs its version."""
    said = _TRIALS.get(framework, _PLAIN)
    if not run.gpus:
        module = table.module_of(framework)
        known = framework in table.FRAMEWORKS
        said = f"import {module}; print({module}.__name__, {module}.__version__)" if known else _PLAIN
    return replace(run, executable=PYTHON, in_image=True, arguments=("-c", said))


def without_gpus(run: SubmitCommand, target: str) -> SubmitCommand:
    """The run on CPUs. Raises UsageError for one that asks for more than the one GPU that is usual."""
    for option, asked in (
        ("--gpus", run.gpus > 1),
        ("--gpu-memory", run.gpu_memory),
        ("--allow-mig", run.mig),
    ):
        if asked:
            raise UsageError(
                "option-conflict",
                f"{target} is for CPUs only, but {option} requests GPUs",
                hint=f"remove {option}",
            )
    return replace(run, gpus=0)


# --- The job that runs once, when all runs of a sweep are done, with their folders run-1 and so on. Pure
# HTCondor sends it the folders, as they came back, and DAGMan waits for the runs; Slurm's machines see them.


def gathering(run: SubmitCommand, runs: int, *, sent: bool) -> SubmitCommand:
    """That job, for a sweep of `run`: no GPU, one core. `sent` is whether files are sent to it."""
    return SubmitCommand(
        name=f"{run.name}-{GATHER}",
        executable=run.gather,
        in_image=run.in_image,
        inputs=tuple(run_directory(number) for number in range(1, runs + 1)) if sent else (),
        gpus=0,
        memory=run.memory,
        disk=run.disk,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """What a person asked for. `kind` is None for what fits best, `run.name` empty for the target's,
    `run.executable` for a first trial.

    `folder` is where .sif files lie, `predicted` whether predictions are taken too, and `faulty` those where
    some calls meet a known fault. `own`: the images are of a factory that the person works in. `rows` are of
    a sweep, without the count of runs. `inventory` are a Slurm cluster's nodes, None where none was asked.
    `files` are what a Job of Kubernetes takes along, by name. `prefix` is what commands name the target with:
    its center, where several are joined.
    """

    target: str
    site: Site
    kind: ImageKind | None
    folder: str
    run: SubmitCommand
    rows: tuple[tuple[str, ...], ...] = ()
    predicted: bool = False
    faulty: bool = False
    own: bool = False
    inventory: Inventory | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFiles:
    """A submit file not yet written, and the DAG of a sweep, empty for one job and where the file has it.

    `gather` is the file of the job that gathers a sweep's results, empty where none does. `suffix` is the
    files', `request` what a batch script asks Slurm for, None of HTCondor's files. `together` are the
    capabilities of which as many GPUs as a job asks for were verified to work together.
    """

    taken: JobImageSpec
    run: SubmitCommand
    text: str
    dag: str = ""
    own: bool = False
    request: SlurmRequest | None = None
    suffix: str = ".sub"
    gather: str = ""
    together: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.run.name}{self.suffix}"

    @property
    def gather_file(self) -> str:
        return f"{self.run.name}-{GATHER}{self.suffix}" if self.gather else ""

    @property
    def fetch(self) -> str:
        """What this person does to have the file of the image. Only who has the factory can make it."""
        asks = f"ask the maintainer of the catalog for {Path(self.taken.form.image.address).name}"
        return self.taken.form.fetch or (
            f"imagefactory export {self.taken.target} --format sif" if self.own else asks
        )


def make_submit(catalogue: Catalog, ask: SubmitRequest, trust: TrustRules, now: datetime) -> SubmitFiles:
    """Decides all that the file says. Pure.

    Raises NothingSelectedError for a target that is not offered, and as `submit_offer`.
    """
    offer = find_offer(catalogue, ask.target, trust, now)
    made = submit_offer(offer, ask, trust, now)
    return replace(made, together=multi_gpu_capabilities(offer.judged, made.run.gpus))


def submit_offer(offer: ImageOffer, ask: SubmitRequest, trust: TrustRules, now: datetime) -> SubmitFiles:
    """The same of an offer that is judged already. An image for CPUs alone needs no verdict. Pure.

    Raises NothingSelectedError for a form that is not offered, CheckFailedError where nothing of it may be
    relied on, UsageError for a value that cannot stand in a submit file.
    """
    image = offer.image
    own = image.target if ask.own else ""
    form = choose_form(forms_of(offer, ask.folder), ask.site, ask.kind, own=own)
    grounds, run = form.grounds, replace(ask.run, name=ask.run.name or image.target)
    if rocm_of(image.cuda) and ask.site.batch != KUBERNETES:
        raise UsageError(
            "amd-not-supported",
            f"{image.target} is for AMD GPUs, and HTCondor ads do not show the processor of an AMD GPU",
            hint="write the submit file manually, and name the machines in its requirements",
        )
    if image.gpu:
        hoped = expected_grounds(grounds, image, faulty=ask.faulty)
        verified = tuple(one for one in hoped.classes if one.proven)
        grounds = hoped if ask.predicted else replace(grounds, classes=verified)
        if not grounds.classes:
            raise _not_verified((offer, form), hoped, trust, ask)
    else:
        run = without_gpus(run, image.target)
    taken = JobImageSpec(
        target=image.target,
        platform=image.platform,
        form=replace(form, grounds=grounds),
        classes=grounds.classes,
        judged=now,
    )
    run = run if run.executable else first_trial(run, image.framework)
    if ask.site.batch == SLURM:
        request = request_gpus(taken, run, ask.inventory) if run.gpus else NO_GPU
        script = format_sbatch(taken, run, request, ask.rows, ask.site.own)
        last = gathering(run, len(ask.rows), sent=False)
        return SubmitFiles(
            taken=taken,
            run=run,
            text=script,
            own=ask.own,
            request=request,
            suffix=slurm.SUFFIX,
            gather=format_sbatch(taken, last, NO_GPU, (), ask.site.own) if run.gather else "",
        )
    if ask.site.batch == KUBERNETES:
        text = format_manifest(taken, run, ask.rows, ask.files)
        return SubmitFiles(taken=taken, run=run, text=text, own=ask.own, suffix=SUFFIX)
    text = format_submit(taken, run, ask.site)
    made = SubmitFiles(taken=taken, run=run, text=text, own=ask.own)
    if not run.columns:
        return made
    if run.gather:
        made = replace(made, gather=format_submit(taken, gathering(run, len(ask.rows), sent=True), ask.site))
    return replace(made, dag=format_runs(made.file, run.columns[1:], ask.rows, made.gather_file))


def resource_request(made: SubmitFiles, site: Site) -> ResourceRequest:
    """What the jobs of that file ask of machines and GPUs, beside the kinds of GPU."""
    image, run = made.taken.form.image, made.run
    memory, disk = requested_resources(image, run)
    return ResourceRequest(
        gpus=run.gpus,
        gpu_memory=run.gpu_memory,
        cpus=run.cpus,
        memory=memory,
        disk=disk,
        mig=run.mig,
        platform=made.taken.platform,
        needs=(MACHINE_HAS[image.kind], *site.attributes(image.address)),
    )


# --- deciding --------------------------------------------------------------------------------------


def _not_verified(
    chosen: tuple[ImageOffer, ImageForm], hoped: ImageEvidence, trust: TrustRules, ask: SubmitRequest
) -> CheckFailedError:
    """Why there is nothing to write, what is predicted, and what this person can do about it."""
    offer, form = chosen
    name, kind = f"{ask.prefix}{offer.image.target}", form.image.kind
    judged = _verdicts_of(offer, form)
    said = [f"{name} ({kind}) is not verified on any GPU by a key that you trust"]
    if not trust.keys:
        said[0] = f"{name}: you trust no key, so no verdict counts"
    poor = [judgement for judgement in judged if judgement.standing is not VerdictStatus.GOOD]
    said += [f"a verdict is {judgement.standing.value}: {judgement.why}" for judgement in poor[:5]]
    said += [f"not {capability}: {why}" for capability, why in form.grounds.refused]
    said += [f"not {row.where}: {row.summary}" for row in form.grounds.revoked if not row.capability]
    guessed = [str(gpu_class.capability) for gpu_class in hoped.classes]
    against = [
        str(capability) for capability, _ in hoped.refused if (capability, _) not in form.grounds.refused
    ]
    said.append(f"predicted to run on {', '.join(guessed)}" if guessed else "no GPU is predicted to run it")
    said += [f"predicted or documented not to run on {', '.join(against)}"] if against else []
    strangers = not trust.keys or any(judgement.standing is VerdictStatus.WRONG_KEY for judgement in poor)
    if ask.own:
        hint = f"verify it: imagefactory verify {name} --pool htcondor"
        if strangers:
            hint = (
                "compare the fingerprint of the key with its owner, then run imagefactory keys trust FILE.pub"
            )
    else:
        hint = (
            f"choose another image (imagefactory search {offer.image.family}) or ask your center to verify it"
        )
        if strangers:
            hint = f"{CENTER_HINT}; then run imagefactory join ADDRESS|FILE and compare them"
    if guessed:
        hint += f"; or accept the risk: imagefactory job write {name} --allow-unverified"
    return CheckFailedError("not-verified", "; ".join(said), hint=hint)


def _verdicts_of(offer: ImageOffer, form: ImageForm) -> Sequence[VerificationResult]:
    own = next((one.judged for one in offer.sifs if one.sif.subject == form.image.subject), None)
    return offer.judged if own is None else own


def summary(made: SubmitFiles) -> Mapping[str, object]:
    """What was decided, for `--json`."""
    image = made.taken.form.image
    return {
        "target": made.taken.target,
        "image": {
            "kind": image.kind.value,
            "address": image.address,
            "manifest": image.subject.manifest,
            "config": image.subject.config,
        },
        "gpus": [
            {
                "capability": str(gpu_class.capability),
                "cuda": gpu_class.cuda,
                "basis": gpu_class.claim.basis.value,
                "reason": gpu_class.claim.reason,
                "source": gpu_class.claim.source,
            }
            for gpu_class in made.taken.classes
        ],
        "not": [
            {"capability": str(capability), "reason": why}
            for capability, why in made.taken.form.grounds.refused
        ],
    }


# --- The runs of a sweep: a count, or a CSV file of values, a line each


LARGEST_ROWS = 1 << 20
_WRITE = "pass a CSV file of values: --params FILE"


def number_runs(count: int | None) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return (columns, rows) of a sweep without values; none for None. Raises UsageError."""
    if count is None:
        return (), ()
    if not 0 < count <= ROWS_MOST:
        raise UsageError(
            "sweep-size-invalid",
            f"a sweep has 1 to {ROWS_MOST:,} runs, not {count:,}",
            hint="create several sweeps",
        )
    return (RUN,), ((),) * count


def read_rows(path: Path) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return (columns, rows) of a CSV file whose first row names the columns.

    The first column is `run`, which no row has. Raises UsageError, naming the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_ROWS + 1)
        said = data.decode("utf-8-sig")  # spreadsheets write a mark in front
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint=_WRITE) from error
    except UnicodeDecodeError as error:
        raise UsageError("sweep-values-invalid", f"{path} is not UTF-8 text", hint=_WRITE) from error
    if len(data) > LARGEST_ROWS:
        raise UsageError(
            "sweep-size-invalid", f"{path} has more than {LARGEST_ROWS:,} bytes", hint="create several sweeps"
        )
    return parse_rows(said, path.name)


def parse_rows(text: str, where: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The rows of a CSV file of values. Empty lines are passed over."""
    reader = csv.reader(io.StringIO(text), strict=True)
    rows: list[tuple[str, ...]] = []
    columns: tuple[str, ...] = ()
    try:
        for row in reader:
            cells = tuple(cell.strip() for cell in row)
            if not any(cells):
                continue
            if not columns:
                columns = cells
            elif len(cells) != len(columns):
                raise UsageError(
                    "sweep-values-invalid",
                    f"{where}:{reader.line_num}: {len(cells)} values for {len(columns)} columns",
                    hint=f"write one value for each of {', '.join(columns)}",
                )
            else:
                rows.append(cells)
    except csv.Error as error:
        raise UsageError(
            "sweep-values-invalid", f"{where}:{reader.line_num}: {error}", hint="separate values by commas"
        ) from error
    if not rows:
        raise UsageError(
            "sweep-values-invalid",
            f"{where} has no values",
            hint="write column names in the first line (lr,seed), then one line per run",
        )
    return (RUN, *columns), tuple(rows)


# --- Looks at what jobs take along, and writes a submit file and what belongs to it into this folder


_CHUNK = 1 << 20


def check_files(made: SubmitFiles, progress: Progress) -> None:
    """Looks whether what the job takes along is there, and is what it must be. Raises UsageError."""
    for option, program in (("--executable", made.run.executable), ("--finalize", made.run.gather)):
        if program and not made.run.in_image:
            _check_program(option, Path(program), runs_here=made.request is not None)
    for path in made.run.inputs:
        if "://" not in path and not Path(path).exists():
            raise UsageError(
                "input-not-found",
                f"input file {path} does not exist",
                hint="pass its path relative to this directory: --input PATH",
            )
    image = made.taken.form.image
    if image.kind is ImageKind.SIF:
        _check_sif(Path(image.address), made, progress)


def read_files(run: SubmitCommand) -> Mapping[str, bytes]:
    """The program and its inputs by name, for a Job that carries them. Raises UsageError."""
    paths = [("--executable", run.executable)] if run.executable and not run.in_image else []
    files: dict[str, bytes] = {}
    for option, path in [*paths, *(("--input", one) for one in run.inputs)]:
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


def write_submit_files(made: SubmitFiles, folder: Path, *, force: bool) -> tuple[str, ...]:
    """Write the files into `folder`, and the runs' directories here. Return the files' paths.

    Raises UsageError if they exist.
    """
    name = made.run.name
    if made.dag and (rescues := sorted(Path().glob(f"{name}.dag.rescue*"))):
        raise UsageError(
            "sweep-rescue-exists",
            f"{rescues[0]} exists: DAGMan would continue that sweep and skip its finished runs",
            hint=f"rm {rescues[0]}, or use another name: -o NAME.sub",
        )
    files = {made.file: made.text} | ({made.gather_file: made.gather} if made.gather else {})
    files |= {f"{name}.dag": made.dag} if made.dag else {}
    texts = {str(folder / file): text for file, text in files.items()}
    folders = [run_directory(number) for number in range(1, made.dag.count("\nVARS ") + 1)]
    if not force:
        there = [path for path in texts if os.path.lexists(path)]
        there += [run for run in folders if os.path.lexists(run) and not _is_empty(Path(run))]
        if there:
            raise UsageError(
                "file-exists",
                f"{there[0]} already exists",
                hint="use --force to overwrite it, "
                + (
                    "or change to another directory"
                    if there[0] in folders
                    else "or another name: -o NAME" + Path(made.file).suffix
                ),
            )
    for run in folders:
        Path(run).mkdir(exist_ok=True)
    replace_all({Path(path): text.encode("ascii") for path, text in texts.items()})
    return tuple(texts)


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _check_program(option: str, path: Path, *, runs_here: bool) -> None:
    """The machine that runs it knows not what is installed here; HTCondor sends the file and lets it run."""
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
            hint=f"sed -i 's/\\r$//' {path}",
        )
    if not line.startswith((b"#!", b"\x7fELF")):
        raise UsageError(
            "program-no-interpreter",
            f"{path} does not name its interpreter",
            hint="start it with #!/bin/sh, #!/bin/bash or #!/usr/bin/env python3",
        )
    if runs_here and not os.access(path, os.X_OK):
        raise UsageError(
            "program-not-executable", f"{option} {path} is not executable", hint=f"chmod +x {path}"
        )


def _check_sif(path: Path, made: SubmitFiles, progress: Progress) -> None:
    """That the file is the one that was verified. A folder that this machine does not see is passed over."""
    image, name = made.taken.form.image, path.name
    if not path.parent.is_dir():
        return
    if not path.is_file():
        into = "" if path.parent == Path() else f"  (in {path.parent})"
        raise UsageError("sif-missing", f"{path} does not exist", hint=f"{made.fetch}{into}")
    sha256 = hashlib.sha256()
    with path.open("rb") as file, progress.task(f"checking {name}", total=path.stat().st_size) as task:
        while data := file.read(_CHUNK):
            sha256.update(data)
            task.advance(len(data))
    if sha256.hexdigest() != image.sha256.removeprefix("sha256:"):
        raise UsageError("sif-mismatch", f"{path} is not the offered file", hint=f"rm {path}; {made.fetch}")
