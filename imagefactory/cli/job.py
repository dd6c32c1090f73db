"""The `job write` command, which writes job files for HTCondor, Slurm and Kubernetes."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.gpus import find_inventory, inventory_option
from imagefactory.cli.output import (
    CommandContext,
    complete_targets,
    json_option,
    print_catalog_notes,
    print_json,
    print_next_command,
    print_prose,
    reject_conflict,
    write_terminal,
)
from imagefactory.errors import UsageError
from imagefactory.settings.choices import CONTAINERS, HTCONDOR, KUBERNETES, SITES, SLURM

if TYPE_CHECKING:
    from imagefactory.actions.centers import JoinedCenter
    from imagefactory.gpu.values import ClaimBasis
    from imagefactory.jobs.offer import AvailableGpus
    from imagefactory.jobs.resources import ResourceAdvice
    from imagefactory.jobs.spec import JobParameters, JobSpec
    from imagefactory.schedulers.pool import ImageKind, Inventory
    from imagefactory.views.catalog import CatalogRow

IMAGE_TYPES = ("docker", "oras", "sif", "osdf")
SUFFIX = {HTCONDOR: "sub", SLURM: "sbatch", KUBERNETES: "yaml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a job and its files, as the user wrote them."""

    site: str | None
    container: str | None
    executable: str
    in_image: bool
    arguments: str
    input: tuple[str, ...]
    output_files: tuple[str, ...]
    gpus: int
    gpu_memory: str
    cpus: int
    resources: Path | None
    memory: str
    disk: str
    time: str
    image_format: str | None
    runs: int | None
    params: Path | None
    finalize: str
    checkpoint: str
    allow_unverified: bool
    allow_known_bad: bool
    allow_mig: bool
    output: Path | None
    inventory: Path | None


@click.command(cls=Command)
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@section("Program")
@click.option(
    "--executable",
    default="",
    metavar="FILE",
    help="Run this program.  [default: print the GPU of the job]",
)
@click.option("--in-image", is_flag=True, help="Take programs from the image, such as /app/train.py.")
@click.option(
    "--arguments",
    default="",
    metavar="TEXT",
    help="Pass these arguments to the program, quoted as in a shell.",
)
@click.option("--input", multiple=True, metavar="FILE|URL", help="Send this file to the job (repeatable).")
@click.option(
    "--output-file",
    "output_files",
    multiple=True,
    metavar="FILE",
    help="Return this file from the job (repeatable).  [default: all new files]",
)
@click.option(
    "--checkpoint",
    default="",
    metavar="FILE",
    help="Restart the job with this file after the program exits with code 85.",
)
@section("Resources")
@click.option(
    "--gpus",
    type=click.IntRange(1, 16),
    metavar="N",
    default=1,
    show_default=True,
    help="Request this number of GPUs for each job.",
)
@click.option("--gpu-memory", default="", metavar="SIZE", help="Require this memory of each GPU: 24GB.")
@click.option(
    "--cpus",
    type=click.IntRange(1, 1024),
    metavar="N",
    default=1,
    show_default=True,
    help="Request this number of cores for each job.",
)
@click.option(
    "--memory",
    default="",
    metavar="SIZE",
    help="Request this memory (RAM).  [default: by the size of the image]",
)
@click.option(
    "--disk",
    default="",
    metavar="SIZE",
    help="Request this disk space, with the image.  [default: the size of the image, and 1 GB]",
)
@click.option("--time", default="", metavar="TIME", help="Limit each job to this time: 90m, 12h, 3d.")
@click.option(
    "--resources-from",
    "resources",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Request the time, GPUs, GPU memory and cores that `emulate GPU --output FILE` measured.",
)
@section("Sweep")
@click.option("--runs", type=int, metavar="N", help="Write a sweep of N runs.")
@click.option(
    "--params",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a sweep with one run for each row of a CSV file.",
)
@click.option(
    "--finalize",
    default="",
    metavar="FILE",
    help="After all runs of a sweep, run this program once, without a GPU.",
)
@section("Cluster")
@click.option(
    "--site",
    type=click.Choice(SITES),
    help="The site whose rules the file follows.  [default: the setting `site`]",
)
@click.option(
    "--container",
    type=click.Choice(CONTAINERS),
    help="What starts the image of a Slurm job.  [default: the setting `container`]",
)
@inventory_option
@click.option(
    "--image-format",
    type=click.Choice(IMAGE_TYPES),
    help="How jobs get the image.  [default: the verified format that the site recommends]",
)
@click.option(
    "--allow-unverified", is_flag=True, help="Also allow GPUs where the image is only predicted to run."
)
@click.option("--allow-known-bad", is_flag=True, help="Also allow GPUs where some calls are known to fail.")
@click.option("--allow-mig", is_flag=True, help="Also allow GPU slices (MIG). No verdict covers them.")
@section("Output")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the job file to this path.  [default: TARGET.sub, .sbatch or .yaml, by the site]",
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@json_option
@click.pass_obj
def write(
    call: CommandContext,
    /,
    *,
    name: str,
    site: str | None,
    container: str | None,
    executable: str,
    in_image: bool,
    arguments: str,
    input: tuple[str, ...],
    output_files: tuple[str, ...],
    gpus: int,
    gpu_memory: str,
    cpus: int,
    resources: Path | None,
    memory: str,
    disk: str,
    time: str,
    image_format: str | None,
    runs: int | None,
    params: Path | None,
    finalize: str,
    checkpoint: str,
    allow_unverified: bool,
    allow_known_bad: bool,
    allow_mig: bool,
    output: Path | None,
    force: bool,
    inventory: Path | None,
    as_json: bool,
) -> None:
    """Write a job file for the GPUs where an image is verified.

    \b
    imagefactory job write pytorch-2.3-cu121 --executable train.py
    imagefactory job write pytorch-2.3-cu121 --executable run.sh --input data.csv
    imagefactory job write pytorch-2.3-cu121 --executable train.py --site slurm
    imagefactory job write pytorch-2.3-cu121 --executable train.py --runs 100
    imagefactory job write pytorch-2.3-cu121 --executable train.py --params lr.csv

    Nothing is submitted: use condor_submit, sbatch or kubectl. You need no project: images and verdicts
    come from the catalog that you joined (`imagefactory site join`).

    Each run of a sweep has its own directory (run-1, run-2, ...). In --arguments, $(run) is its number, and
    $(lr) its value of the column lr. Without --arguments a program gets each column as an option (--lr
    0.1).

    Exit code 9 if the image has no verdict for a GPU of the cluster.
    """
    options = JobOptions(
        site=site, container=container, executable=executable, in_image=in_image, arguments=arguments,
        input=input, output_files=output_files, gpus=gpus, gpu_memory=gpu_memory, cpus=cpus,
        resources=resources, memory=memory, disk=disk, time=time, image_format=image_format,
        runs=runs, params=params,
        finalize=finalize, checkpoint=checkpoint, allow_unverified=allow_unverified,
        allow_known_bad=allow_known_bad, allow_mig=allow_mig, output=output, inventory=inventory,
    )  # fmt: skip
    from imagefactory.actions.centers import centers_of, find_center_image, read_centers
    from imagefactory.jobs.make import check_files, resolve_job, save_files, write_job
    from imagefactory.jobs.offer import classifier_for, find_available_gpus, format_available, index_machines
    from imagefactory.jobs.spec import resource_request
    from imagefactory.trust.offers import find_offer

    now, centers = datetime.now(UTC), centers_of(call.settings)
    # Invalid options are reported before a registry is queried, unless that decides whose rules apply.
    parameters = _job_parameters(centers[0], name, options) if len(centers) == 1 else None
    center_catalogs = read_centers(call.settings, os.environ, now, (name,), name)
    print_catalog_notes(center_catalogs.notes)
    entry, image = find_center_image(center_catalogs, name)
    catalog, trust = entry.catalog, entry.center.trust
    parameters = parameters or _job_parameters(entry.center, name, options)
    job = resolve_job(find_offer(catalog, image.target, trust, now), parameters, trust, now)
    texts = write_job(job)
    check_files(job, call.progress)
    files = save_files(job, texts, force=force)
    has_pool = job.gpus and job.site.batch == HTCONDOR
    nodes = _available_pool(inventory, now) if has_pool else None
    places: tuple[AvailableGpus, ...] = ()
    if nodes:
        places = find_available_gpus(
            classifier_for(job.classes), resource_request(job), index_machines(nodes)
        )
    if as_json:
        from imagefactory.views.catalog import catalog_json

        pool = _matching_json(places, nodes) if nodes else None
        print_json(_job_json(job, files, pool, catalog_json(entry.center, catalog)))
    else:
        reach = format_available(places, nodes, now) if nodes else ""
        if job.site.batch == SLURM:
            from imagefactory.jobs.slurm import format_reach

            reach = format_reach(job)
        _print_files(job, files, reach)


def _job_parameters(center: JoinedCenter, name: str, options: JobOptions) -> JobParameters:
    """Return the parsed options. Raises UsageError for invalid ones."""
    from imagefactory.jobs.make import read_files
    from imagefactory.jobs.spec import JobParameters, number_runs, read_rows
    from imagefactory.project import uses_catalog
    from imagefactory.schedulers.pool import ImageKind
    from imagefactory.schedulers.sites import site_of
    from imagefactory.schedulers.sizes import parse_size, parse_time

    reject_conflict(
        options.runs is not None and options.params,
        "--runs and --params exclude each other: each line of the file is a run",
        "remove --runs",
    )
    columns, rows = read_rows(options.params) if options.params else number_runs(options.runs)
    settings = center.settings
    site = site_of(options.site or settings.site.value, settings, options.container or "")
    reject_conflict(
        options.container and site.batch != SLURM,
        f"--container applies to Slurm jobs, and {site.name} is not a Slurm site",
        "remove --container, or add --site slurm",
    )
    memory, disk, gpu_memory = (
        parse_size(text) if text else 0 for text in (options.memory, options.disk, options.gpu_memory)
    )
    _check_programs(options)
    gpus, cpus, retry_memory = options.gpus, options.cpus, 0
    time = parse_time(options.time) if options.time else None
    if options.resources:
        advice, source = _advice(options.resources), click.get_current_context().get_parameter_source
        if site.batch != SLURM:  # Slurm cannot select GPUs by memory
            gpu_memory = gpu_memory or advice.gpu_memory or 0
        if site.batch == HTCONDOR and not memory:
            retry_memory = advice.retry_memory
        time = time or advice.time
        gpus = advice.gpus if source("gpus") is click.core.ParameterSource.DEFAULT else gpus
        cpus = advice.cpus if source("cpus") is click.core.ParameterSource.DEFAULT else cpus
    file_name = _file_name(options, SUFFIX[site.batch])
    reject_conflict(
        site.batch == KUBERNETES and options.inventory,
        "--inventory does not apply to Kubernetes: a Job chooses nodes by their labels",
        "remove --inventory",
    )
    parameters = JobParameters(
        target=name,
        site=site,
        kind=ImageKind(options.image_format) if options.image_format else None,
        sif_folder=settings.sif_folder.value,
        predicted=options.allow_unverified or options.allow_known_bad,
        faulty=options.allow_known_bad,
        own=not uses_catalog(settings),
        prefix=center.prefix,
        name=file_name,
        directory=_directory(options.output),
        executable=options.executable,
        in_image=options.in_image,
        arguments=_arguments(options.arguments, columns),
        inputs=options.input,
        outputs=options.output_files,
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        disk=disk,
        gpu_memory=gpu_memory,
        retry_memory=retry_memory,
        mig=options.allow_mig,
        time=time,
        columns=columns,
        rows=rows,
        checkpoint=options.checkpoint,
        gather=options.finalize,
        inventory=_available_cluster(options.inventory) if site.batch == SLURM else None,
    )
    return replace(parameters, files=read_files(parameters)) if site.batch == KUBERNETES else parameters


def _check_programs(options: JobOptions) -> None:
    """Raise UsageError for an option without the other option that it requires."""
    program, finalize = options.executable, options.finalize
    reject_conflict(
        options.arguments and not program, "--arguments requires --executable", "add --executable train.sh"
    )
    reject_conflict(
        options.checkpoint and not program, "--checkpoint requires --executable", "add --executable train.sh"
    )
    reject_conflict(
        finalize and not (options.runs is not None or options.params),
        "--finalize requires --runs or --params",
        "add --runs N or --params FILE",
    )
    reject_conflict(
        options.in_image and not (program.startswith("/") and (not finalize or finalize.startswith("/"))),
        "--in-image requires absolute paths of programs",
        "write, for example, --executable /app/train.py",
    )


def _advice(path: Path) -> ResourceAdvice:
    """Return the resources for an emulated run.

    Raises UsageError if it needs more memory than its GPU has.
    """
    from imagefactory.jobs.resources import LONGEST, advise, parse_emulated

    with path.open("rb") as file:
        run = parse_emulated(file.read(LONGEST), str(path))
    advice = advise(run)
    if advice.gpu_memory is None:
        raise UsageError(
            "gpu-memory-too-small",
            f"{path}: the run needed more memory than {run.profile} has, and so would a job",
            hint="emulate a GPU with more memory, or use a smaller batch",
        )
    return advice


def _file_name(options: JobOptions, suffix: str) -> str:
    """Return the file name without suffix, "" for the default. Raises UsageError for another suffix."""
    if options.output is None:
        return ""
    if options.output.suffix != f".{suffix}":
        raise UsageError(
            "option-invalid",
            f"-o {str(options.output)[:80]} does not end in .{suffix}",
            hint=f"write, for example, -o train.{suffix}",
        )
    return options.output.stem


def _directory(output: Path | None) -> str:
    """Return the directory of -o, empty for this one."""
    return str(output.parent) if output and output.parent.parts else ""


def _available_cluster(path: Path | None) -> Inventory | None:
    """Return the nodes of the Slurm cluster, None without scontrol."""
    if path is None and not shutil.which("scontrol"):
        return None
    return find_inventory(path, datetime.now(UTC), SLURM)


def _arguments(text: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    if not text and len(columns) == 1:
        return (f"$({columns[0]})",)
    if not text:
        return tuple(word for name in columns[1:] for word in (f"--{name}", f"$({name})"))
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            "option-invalid", f"--arguments: {error}", hint="quote them as in a shell: --arguments '--lr 0.1'"
        ) from error


def _print_files(job: JobSpec, files: tuple[str, ...], reach: str) -> None:
    lines = [f"wrote {' and '.join(files)}", f"  image  {job.image.address}"]
    for row in job.classes:
        least = f", driver for CUDA {row.cuda} or newer" if row.cuda else ""
        lines.append(f"  GPUs   {row.capability}{least}: {row.claim.basis}, {row.claim.reason}")
    if not job.gpus:
        lines.append("  GPUs   none: the image is only for CPUs; its smoke test passed")
    if job.gpus > 1:
        where = f"verified on {', '.join(job.multi_gpu)}" if job.multi_gpu else "not verified"
        lines.append(f"  GPUs   {job.gpus} of one machine work together: {where}")
    lines += [f"  not    {capability}: {why}" for capability, why in job.excluded]
    if not all(row.verified for row in job.classes):
        lines.append("  WARNING: some of these GPUs are predicted, not verified")
    if job.mig:
        lines.append("  WARNING: MIG slices of GPUs match too; they have no verdict")
    has_dag = files[-1].endswith(".dag")
    logs = (Path.cwd(), Path(files[-1]).resolve())
    if has_dag and any(path.is_relative_to("/tmp") for path in logs):  # noqa: S108  # DAGMan's own rule
        lines.append("  note   DAGMan rejects logs in /tmp: run this command in your home directory")
    if job.gather and job.site.batch == SLURM:
        lines.append(
            f"  then   sbatch --dependency=afterok:JOB {files[1]}, where JOB is the number of the first job"
        )
    lines += [f"  {reach}"] if reach else []
    print_prose("\n".join(lines), indent=7)
    if job.site.batch == KUBERNETES:
        print_next_command("create", "-f", files[0], program="kubectl")
        return
    program = "sbatch" if job.site.batch == SLURM else "condor_submit_dag" if has_dag else "condor_submit"
    print_next_command(files[-1 if has_dag else 0], program=program)


def _available_pool(path: Path | None, now: datetime) -> Inventory | None:
    """Return the pool, None without one.

    If the pool does not answer, print a note: the file is written anyway.
    """
    from imagefactory.errors import ImagefactoryError

    if path is None and not shutil.which("condor_status"):
        return None
    try:
        return find_inventory(path, now)
    except ImagefactoryError as error:
        write_terminal(2, f"note: the number of GPUs for this job is unknown: {error.message}")
        return None


# --- JSON


class JobImageRow(TypedDict):
    type: ImageKind
    reference: str
    manifest: str
    config: str


class JobGpuRow(TypedDict):
    """GPUs that the job may get."""

    capability: str
    cuda: str
    """The CUDA version that their drivers must support; empty for any."""
    basis: ClaimBasis
    reason: str
    source: str


class ExcludedGpuRow(TypedDict):
    capability: str
    reason: str


class PoolMatchRow(TypedDict):
    """The GPUs of a pool that the job can get."""

    matching: int
    free: int
    """How many of the matching GPUs are free."""
    uncertain: int
    """How many of the matching GPUs may reject the job."""
    total: int
    """The GPUs of the pool."""
    taken: str
    """The time of the inventory."""


class JobDocument(TypedDict):
    """A job file, its image, and the GPUs that it may get."""

    format: Literal["imagefactory.job/1"]
    target: str
    site: str
    files: list[str]
    image: JobImageRow
    gpus: list[JobGpuRow]
    excluded: list[ExcludedGpuRow]
    pool: PoolMatchRow | None
    catalog: CatalogRow


def _job_json(
    spec: JobSpec, files: Sequence[str], pool: PoolMatchRow | None, catalog: CatalogRow
) -> JobDocument:
    return JobDocument(
        format="imagefactory.job/1",
        target=spec.target,
        site=spec.site.name,
        files=list(files),
        image=JobImageRow(
            type=spec.image.kind,
            reference=spec.image.address,
            manifest=spec.image.subject.manifest,
            config=spec.image.subject.config,
        ),
        gpus=gpu_rows(spec),
        excluded=[
            ExcludedGpuRow(capability=str(capability), reason=reason) for capability, reason in spec.excluded
        ],
        pool=pool,
        catalog=catalog,
    )


def gpu_rows(spec: JobSpec) -> list[JobGpuRow]:
    return [
        JobGpuRow(
            capability=str(gpu_class.capability),
            cuda=gpu_class.cuda,
            basis=gpu_class.claim.basis,
            reason=gpu_class.claim.reason,
            source=gpu_class.claim.source,
        )
        for gpu_class in spec.classes
    ]


def _matching_json(places: Sequence[AvailableGpus], inventory: Inventory) -> PoolMatchRow:
    return PoolMatchRow(
        matching=sum(place.count for place in places),
        free=sum(place.free for place in places),
        uncertain=sum(place.count for place in places if place.unsure),
        total=len(inventory.gpus),
        taken=f"{inventory.taken:%Y-%m-%dT%H:%M:%SZ}",
    )
