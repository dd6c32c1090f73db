"""The submit command, which writes submit files and checks existing ones."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    CommandContext,
    complete_targets,
    json_option,
    print_catalog_notes,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
    terminal_width,
    write_terminal,
)
from imagefactory.cli.pool import find_inventory, inventory_option
from imagefactory.errors import EXIT_CHECK, UsageError, os_problem
from imagefactory.settings.choices import HTCONDOR, KUBERNETES, SITES, SLURM

if TYPE_CHECKING:
    from imagefactory.actions.centers import CenterCatalogs, JoinedCenter
    from imagefactory.extras.emulate.summary import ResourceAdvice
    from imagefactory.jobs.offer import AvailableGpu
    from imagefactory.jobs.spec import JobParameters, JobSpec
    from imagefactory.schedulers.pool import Inventory
    from imagefactory.trust.catalog import CatalogImage, ImageOffer

REGISTRY_SECONDS = 5
IMAGE_TYPES = ("docker", "oras", "sif", "osdf")
SUFFIX = {HTCONDOR: "sub", SLURM: "sbatch", KUBERNETES: "yaml"}
PREDICTED, IGNORABLE_RULES = "predicted", "known-bad"
ALONE = (
    "executable", "in_image", "input", "result", "arguments", "dag", "gather", "checkpoint", "accept",
    "output", "time", "force", "mig", "emulated",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of `submit` that describe a job and its files, as written."""

    site: str | None
    executable: str
    in_image: bool
    arguments: str
    input: tuple[str, ...]
    result: tuple[str, ...]
    gpus: int
    gpu_memory: str
    cpus: int
    emulated: Path | None
    memory: str
    disk: str
    time: str
    kind: str | None
    dag: str
    gather: str
    checkpoint: str
    accept: tuple[str, ...]
    mig: bool
    output: str
    force: bool
    inventory: Path | None


@click.command()
@click.argument("name", metavar="[TARGET]", default="", shell_complete=complete_targets)
@click.option(
    "--site", type=click.Choice(SITES), help="Whose rules the file follows. Default: the setting `site`."
)
@click.option(
    "--executable", default="", metavar="FILE", help="Your program. Default: one that names the GPU it got."
)
@click.option("--in-image", is_flag=True, help="Programs are files of the image, such as /app/train.py.")
@click.option("--arguments", default="", metavar="TEXT", help="Its arguments, quoted as in a shell.")
@click.option(
    "--input", multiple=True, metavar="FILE|URL", help="A file that the job needs. May be repeated."
)
@click.option(
    "--result", multiple=True, metavar="FILE", help="A file that comes back. Default: all new ones."
)
@click.option("--gpus", type=click.IntRange(1, 16), default=1, show_default=True, help="GPUs of one job.")
@click.option("--gpu-memory", default="", metavar="SIZE", help="What each GPU must have: 24GB.")
@click.option("--cpus", type=click.IntRange(1, 1024), default=1, show_default=True, help="Cores of one job.")
@click.option(
    "--emulated",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Ask for the GPUs, their memory and the cores that `run --emulate GPU --summary FILE` told.",
)
@click.option("--memory", default="", metavar="SIZE", help="Default: by the size of the image.")
@click.option("--disk", default="", metavar="SIZE", help="Image and all. Default: the image's, and 1 GB.")
@click.option("--time", default="", metavar="TIME", help="The longest that a job runs: 90m, 12h, 3d.")
@click.option(
    "--image",
    "kind",
    type=click.Choice(IMAGE_TYPES),
    help="How jobs get the image. Default: what the site advises and is verified.",
)
@click.option(
    "--dag",
    default="",
    metavar="N|FILE",
    help="A sweep: N runs, or one for each line of a CSV file of values.",
)
@click.option(
    "--gather",
    default="",
    metavar="FILE",
    help="A program that runs once when all runs of a sweep are done, with their folders and no GPU.",
)
@click.option(
    "--checkpoint",
    default="",
    metavar="FILE",
    help="What the program saves before it leaves with exit code 85, to be started again with that.",
)
@click.option(
    "--accept",
    multiple=True,
    type=click.Choice((PREDICTED, IGNORABLE_RULES)),
    help="Take GPUs too on which it is only predicted to run, with known-bad those where some calls fail.",
)
@click.option("--mig", is_flag=True, help="Take slices of GPUs (MIG) too, of which no verdict speaks.")
@click.option(
    "-o",
    "--output",
    default="",
    metavar="NAME.sub",
    help="In this folder. Default: TARGET.sub, for Slurm TARGET.sbatch, for Kubernetes TARGET.yaml.",
)
@click.option("--force", is_flag=True, help="Write over files that are here already.")
@click.option(
    "--check",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Say what is wrong with a submit file or a batch script for this pool, and write nothing.",
)
@click.option("--fix", is_flag=True, help="With --check: mend in a submit file what is certain, and show it.")
@inventory_option
@click.option("--list", "offers", is_flag=True, help="List what there is, and on which GPUs it is verified.")
@json_option
@click.pass_obj
def submit(
    call: CommandContext,
    /,
    *,
    name: str,
    site: str | None,
    executable: str,
    in_image: bool,
    arguments: str,
    input: tuple[str, ...],
    result: tuple[str, ...],
    gpus: int,
    gpu_memory: str,
    cpus: int,
    emulated: Path | None,
    memory: str,
    disk: str,
    time: str,
    kind: str | None,
    dag: str,
    gather: str,
    checkpoint: str,
    accept: tuple[str, ...],
    mig: bool,
    output: str,
    force: bool,
    check: Path | None,
    fix: bool,
    inventory: Path | None,
    offers: bool,
    as_json: bool,
) -> None:
    """Write a submit file for the GPUs where an image is verified.

    \b
    imagefactory submit --list
    imagefactory submit pytorch-2.3-cu121 --executable train.sh --input data.csv
    imagefactory submit pytorch-2.3-cu121 --executable train.py --dag 100 --arguments '--seed $(run)'
    imagefactory submit pytorch-2.3-cu121 --executable train.py --dag values.csv
    imagefactory submit pytorch-2.3-cu121 --executable train.py --emulated told.json
    imagefactory submit pytorch-2.3-cu121 --executable train.py --site slurm
    imagefactory submit pytorch-2.3-cu121 --executable train.py --site kubernetes
    imagefactory submit --check old.sub
    imagefactory submit --check old.sub --fix
    imagefactory submit --check train.sbatch

    No factory is needed: images and verdicts come from the signed catalogue that you joined (`imagefactory
    join`). Which verdicts count, the [[trust]] rows of your settings say. Without a verdict nothing is
    written (exit 9). Nothing is submitted: that is condor_submit's work, sbatch's or kubectl's.

    A sweep is FILE.dag beside FILE.sub, for condor_submit_dag. Each run has a folder of its own, run-1,
    run-2 and so on; $(run) is its number, and the columns of a CSV file are filled in by their names, such as
    $(lr). Without --arguments a program is given each column as an option (--lr 0.1), or the run's number.
    For Slurm it is one script with an array, for Kubernetes an indexed Job. The job of --gather has a file of
    its own, NAME-gather.sub or .sbatch.
    """
    options = JobOptions(
        site=site, executable=executable, in_image=in_image, arguments=arguments, input=input,
        result=result, gpus=gpus, gpu_memory=gpu_memory, cpus=cpus, emulated=emulated, memory=memory,
        disk=disk, time=time, kind=kind, dag=dag, gather=gather, checkpoint=checkpoint, accept=accept,
        mig=mig, output=output, force=force, inventory=inventory,
    )  # fmt: skip
    if check is not None:
        _reject_others(name, options, "--check")
        return _check_file(call, check, name=site, inventory=inventory, fix=fix, as_json=as_json)
    reject_conflict(fix, "--fix requires --check", "write --check FILE.sub --fix")
    if offers:
        _reject_others(name, options, "--list")
        return _list(call, options, as_json=as_json)
    if not name:
        raise UsageError(
            "argument-missing", "no target is given", hint="list the available images: imagefactory find"
        )
    from imagefactory.actions.centers import centers_of, find_center_image, read_centers
    from imagefactory.jobs.make import check_files, resolve_job, save_files, write_job
    from imagefactory.jobs.offer import by_class, find_places, format_places, index_machines
    from imagefactory.jobs.slurm import format_reach
    from imagefactory.jobs.spec import resource_request
    from imagefactory.trust.offers import find_offer

    now, centers = datetime.now(UTC), centers_of(call.settings)
    # Invalid options are reported before a registry is queried, unless that decides whose rules apply.
    request = _job_request(centers[0], name, options) if len(centers) == 1 else None
    opened = read_centers(call.settings, os.environ, now, (name,), name)
    print_catalog_notes(opened.notes)
    entry, image = find_center_image(opened, name)
    catalogue, trust = entry.catalogue, entry.center.trust
    request = replace(request or _job_request(entry.center, name, options), target=image.target)
    job = resolve_job(find_offer(catalogue, image.target, trust, now), request, trust, now)
    files = write_job(job)
    check_files(job, call.progress)
    save_files(job, files, force=force)
    has_pool = job.gpus and job.site.batch == HTCONDOR
    nodes = _available_pool(inventory, now) if has_pool else None
    places: tuple[AvailableGpu, ...] = ()
    if nodes:
        places = find_places(by_class(job.classes), resource_request(job), index_machines(nodes))
    if as_json:
        from imagefactory.jobs.make import summary
        from imagefactory.views.catalog import source_json

        known = _reach_json(places, nodes) if nodes else None
        more = {"site": job.site.name, "files": list(files), "reach": known, **source_json(catalogue)}
        more |= entry.center.json_of(image.target)
        print_json("submit", {**summary(job), **more})
    else:
        reach = format_places(places, nodes, now) if nodes else ""
        _print_files(job, tuple(files), format_reach(job) if job.site.batch == SLURM else reach)
    return None


def _job_request(center: JoinedCenter, name: str, options: JobOptions) -> JobParameters:
    """Return the options as values. Raises UsageError for invalid ones."""
    from imagefactory.jobs.make import read_files
    from imagefactory.jobs.spec import JobParameters
    from imagefactory.jobs.sweep import read_rows
    from imagefactory.project import is_project
    from imagefactory.schedulers.pool import ImageKind
    from imagefactory.schedulers.sites import site_of
    from imagefactory.schedulers.sizes import parse_size, parse_time

    columns, rows = read_rows(options.dag) if options.dag else ((), ())
    settings = center.settings
    site = site_of(options.site or settings.site.value, settings)
    memory, disk, gpu_memory = (
        parse_size(text) if text else 0 for text in (options.memory, options.disk, options.gpu_memory)
    )
    _check_programs(options)
    gpus, cpus = options.gpus, options.cpus
    time = parse_time(options.time) if options.time else None
    if options.emulated:
        advice, source = _advice(options.emulated), click.get_current_context().get_parameter_source
        if site.batch != SLURM:  # Slurm cannot select GPUs by memory
            gpu_memory = gpu_memory or advice.gpu_memory or 0
        time = time or advice.time
        gpus = advice.gpus if source("gpus") is click.core.ParameterSource.DEFAULT else gpus
        cpus = advice.cpus if source("cpus") is click.core.ParameterSource.DEFAULT else cpus
    job_name = _file_name(options.output, SUFFIX[site.batch])
    reject_conflict(
        site.batch == KUBERNETES and options.inventory,
        "--inventory does not apply to Kubernetes: a Job chooses nodes by their labels",
        "remove --inventory",
    )
    request = JobParameters(
        target=name,
        site=site,
        kind=ImageKind(options.kind) if options.kind else None,
        sif_folder=settings.sif_folder.value,
        predicted=bool(options.accept),
        faulty=IGNORABLE_RULES in options.accept,
        own=is_project(settings),
        prefix=center.prefix,
        name=job_name,
        executable=options.executable,
        in_image=options.in_image,
        arguments=_arguments(options.arguments, columns),
        inputs=options.input,
        outputs=options.result,
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        disk=disk,
        gpu_memory=gpu_memory,
        mig=options.mig,
        time=time,
        columns=columns,
        rows=rows,
        checkpoint=options.checkpoint,
        gather=options.gather,
        inventory=_available_cluster(options.inventory) if site.batch == SLURM and name else None,
    )
    return replace(request, files=read_files(request)) if site.batch == KUBERNETES else request


def _check_programs(options: JobOptions) -> None:
    """Raises UsageError for an option without the one that it requires."""
    program, gather = options.executable, options.gather
    reject_conflict(
        options.arguments and not program, "--arguments requires --executable", "add --executable train.sh"
    )
    reject_conflict(
        options.checkpoint and not program, "--checkpoint requires --executable", "add --executable train.sh"
    )
    reject_conflict(gather and not options.dag, "--gather requires --dag", "add --dag N or --dag FILE")
    reject_conflict(
        options.in_image and not (program.startswith("/") and (not gather or gather.startswith("/"))),
        "--in-image requires absolute paths of programs",
        "write, for example, --executable /app/train.py",
    )


def _advice(path: Path) -> ResourceAdvice:
    """Return what an emulated run requires. Raises UsageError if it needs more memory than its GPU has."""
    from imagefactory.extras.emulate.summary import LONGEST, advise, parse_emulated

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


def _file_name(output: str, suffix: str) -> str:
    """Return the name without suffix. Raises UsageError for a path: files are written here only."""
    if not output:
        return ""
    if not output.endswith(f".{suffix}") or "/" in output:
        raise UsageError(
            "option-invalid",
            f"-o {output[:80]} is not a file name that ends in .{suffix}",
            hint=f"write, for example, -o train.{suffix}",
        )
    return output.removesuffix(f".{suffix}")


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
        least = f" with drivers that take CUDA {row.cuda}" if row.cuda else ""
        lines.append(f"  GPUs   {row.capability}{least}: {row.claim.basis}, {row.claim.reason}")
    if not job.gpus:
        lines.append("  GPUs   none is asked for: the image is for CPUs alone, tried by its smoke test")
    if job.gpus > 1:
        where = f"verified on {', '.join(job.multi_gpu)}" if job.multi_gpu else "no verdict says so"
        lines.append(f"  GPUs   {job.gpus} of a machine work together: {where}")
    lines += [f"  not    {capability}: {why}" for capability, why in job.excluded]
    if not all(row.verified for row in job.classes):
        lines.append("  WARNING: some of it is predicted, not verified")
    if job.mig:
        lines.append("  WARNING: slices of GPUs (MIG) match too, of which no verdict speaks")
    has_dag = files[-1].endswith(".dag")
    if has_dag and Path.cwd().is_relative_to("/tmp"):  # noqa: S108  # DAGMan's own rule
        lines.append("  note   DAGMan refuses logs below /tmp: go on in a folder of your home")
    if job.gather and job.site.batch == SLURM:
        lines.append(
            f"  then   sbatch --dependency=afterok:JOB {files[-1]}, JOB being the first one's number"
        )
    lines += [f"  {reach}"] if reach else []
    print_result("\n".join(lines))
    if job.site.batch == KUBERNETES:
        print_next_command("create", "-f", files[0], program="kubectl")
        return
    program = "sbatch" if job.site.batch == SLURM else "condor_submit_dag" if has_dag else "condor_submit"
    print_next_command(files[-1] if has_dag else files[0], program=program)


# --- looking ---------------------------------------------------------------------------------------


def _reject_others(name: str, options: JobOptions, option: str) -> None:
    """Raises UsageError for a target and for options that `option` excludes."""
    words = ["TARGET"] * bool(name)
    words += [f"--{key.replace('_', '-')}" for key in ALONE if getattr(options, key)]
    for word in words:
        reject_conflict(word, f"{option} and {word} exclude each other", "remove one of them")


def _list(call: CommandContext, options: JobOptions, *, as_json: bool) -> None:
    from dataclasses import asdict

    from imagefactory.actions.centers import read_centers
    from imagefactory.errors import NothingSelectedError
    from imagefactory.jobs.make import list_offers
    from imagefactory.views.catalog import centers_json, source_json
    from imagefactory.views.text import CPUS, format_table

    now = datetime.now(UTC)
    opened = read_centers(call.settings, os.environ, now)
    print_catalog_notes(opened.notes)
    offered, faults = [], []
    for entry in opened.open:
        request = _job_request(entry.center, "", options)
        try:
            offered += [
                (entry.center, row) for row in list_offers(entry.catalogue, request, entry.center.trust, now)
            ]
        except NothingSelectedError as error:
            faults.append(error)
    if not offered:
        raise faults[0]
    if as_json:
        catalogue = opened.open[0].catalogue
        offers = [{**asdict(row), **center.json_of(row.target)} for center, row in offered]
        head = {"made": f"{catalogue.made:%Y-%m-%dT%H:%M:%SZ}", **source_json(catalogue)}
        print_json("offers", {**head, **centers_json(opened.open), "offers": offers})
        return
    none = {True: "-", False: CPUS}
    rows = [
        (
            f"{center.prefix}{row.target}",
            " ".join(row.verified) or none[row.gpu],
            " ".join(row.predicted) or "-",
            row.kind,
        )
        for center, row in offered
    ]
    print_result(
        format_table(("TARGET", "VERIFIED ON", "PREDICTED ON", "IMAGE"), rows, terminal_width(), ("IMAGE",))
    )


def _available_pool(path: Path | None, now: datetime) -> Inventory | None:
    """Return the pool, None without one. A pool that does not answer prints a note: the file is written."""
    from imagefactory.errors import ImagefactoryError

    if path is None and not shutil.which("condor_status"):
        return None
    try:
        return find_inventory(path, now)
    except ImagefactoryError as error:
        write_terminal(2, f"note: how many GPUs it reaches is not known: {error.message}")
        return None


def _reach_json(places: Sequence[AvailableGpu], inventory: Inventory) -> dict[str, object]:
    return {
        "gpus": len(places),
        "of": len(inventory.gpus),
        "free": sum(place.free for place in places),
        "unsure": sum(place.unsure for place in places),
        "taken": f"{inventory.taken:%Y-%m-%dT%H:%M:%SZ}",
    }


# --- checking ---------------------------------------------------------------------------------------


def _check_file(
    call: CommandContext, path: Path, *, name: str | None, inventory: Path | None, fix: bool, as_json: bool
) -> None:
    """Print the problems of a file, and exit 9 if it has any. A missing pool or catalog prints a note."""
    from imagefactory.actions.centers import merge_centers
    from imagefactory.extras.lint.batch_check import check_batch
    from imagefactory.extras.lint.batch_reader import is_batch, parse_batch
    from imagefactory.extras.lint.check import check_submit_file, fix_text, format_diff, with_secrets
    from imagefactory.extras.lint.findings import CheckContext, SubmitCheckResult
    from imagefactory.extras.lint.reader import parse_submit_file, read_neighbor_lists, read_text
    from imagefactory.extras.lint.view import check_json, format_check
    from imagefactory.schedulers.sites import find_site
    from imagefactory.trust.offers import verify_offer
    from imagefactory.views.catalog import centers_json, source_json

    now, settings = datetime.now(UTC), call.settings
    text = read_text(path)
    batch = is_batch(text, path.name)
    reject_conflict(
        batch and fix,
        "--fix applies to HTCondor submit files only",
        "remove --fix: --check prints what to write in a script",
    )
    opened = _open_to_compare(call, now)
    catalogue = merge_centers(opened) if opened else None
    nodes = _inventory_to_compare(inventory, now, SLURM if batch else HTCONDOR)

    def offer(image: CatalogImage) -> ImageOffer:
        assert opened is not None  # the image is of one of its catalogues
        entry = next(entry for entry in opened.open if any(image is own for own in entry.catalogue.images))
        return verify_offer(entry.catalogue, image, entry.center.trust, now)

    site = find_site(SLURM if batch else name or settings.site.value)
    around = CheckContext(site=site, inventory=nodes, catalogue=catalogue, offer=offer, digest=_digests(call))

    def checked_as(text: str) -> SubmitCheckResult:
        if batch:
            return with_secrets(check_batch(parse_batch(text, str(path)), around), text)
        file = parse_submit_file(text, str(path), read_neighbor_lists(path))
        return with_secrets(check_submit_file(file, around), text)

    mended = fix_text(text, checked_as) if fix else text
    checked, diff = checked_as(mended), format_diff(str(path), text, mended)
    if mended != text:
        _write_mended(path, mended)
    if as_json:
        more = {"site": site.name, "mended": diff, **source_json(catalogue)}
        more |= centers_json(opened.open if opened else ())
        print_json("check", {**check_json(checked), **more})
    else:
        print_result("\n\n".join(part for part in (diff, format_check(checked, terminal_width())) if part))
    if checked.wrong:
        raise click.exceptions.Exit(EXIT_CHECK)


def _write_mended(path: Path, text: str) -> None:
    from imagefactory.fs import replacing

    path = path.resolve()
    try:
        with replacing(path, mode=path.stat().st_mode & 0o777) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="copy it into your own directory") from error


def _digests(call: CommandContext) -> Callable[[str], str]:
    """Return a function that queries registries, once per image and briefly. A note reports a failure."""
    from imagefactory.access import Access, open_registry
    from imagefactory.errors import ImagefactoryError
    from imagefactory.http import RetryPolicy
    from imagefactory.oci.store import parse_reference

    @cache
    def digest(reference: str) -> str:
        try:
            named = parse_reference(reference)
            access = Access(settings=call.settings, environ=os.environ)
            patience = RetryPolicy(attempts=0, connect=REGISTRY_SECONDS, read=REGISTRY_SECONDS)
            registry = open_registry(access, named.registry, patience=patience)
            manifest = registry.manifest(named.repository, named.tag)
        except ImagefactoryError as error:
            write_terminal(2, f"note: the digest of {reference} is not known: {error.message}")
            return ""
        if manifest is None:
            write_terminal(2, f"note: {named.registry} has no {named.repository}:{named.tag}")
        return manifest[0].digest if manifest else ""

    return digest


def _open_to_compare(call: CommandContext, now: datetime) -> CenterCatalogs | None:
    """Return the catalogs, None outside a project without any. Raises if a named one cannot be read."""
    from imagefactory.project import has_catalog, is_project

    settings = call.settings
    if has_catalog(settings) or is_project(settings):
        from imagefactory.actions.centers import read_centers

        centers = read_centers(settings, os.environ, now)
        print_catalog_notes(centers.notes)
        return centers
    write_terminal(
        2, "note: no catalogue is known, so what is verified is not: imagefactory join ADDRESS|FILE"
    )
    return None


def _inventory_to_compare(path: Path | None, now: datetime, pool: str) -> Inventory | None:
    """Return the pool, None without its command. Raises if it or the named file does not answer."""
    command = "scontrol" if pool == SLURM else "condor_status"
    if path is not None or shutil.which(command):
        return find_inventory(path, now, pool)
    write_terminal(
        2, f"note: there is no {command} here, so what the pool has is not known (--inventory FILE)"
    )
    return None
