"""The options of `submit` that describe a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import reject_conflicts
from imagefactory.errors import UsageError
from imagefactory.settings.choices import HTCONDOR, KUBERNETES, SLURM

if TYPE_CHECKING:
    from imagefactory.submit.emulated import Advice
    from imagefactory.submit.submit_file import SubmitRun


SUFFIX = {HTCONDOR: "sub", SLURM: "sbatch", KUBERNETES: "yaml"}


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


def run_of(options: JobOptions, batch: str) -> SubmitRun:
    """Return the job that the options describe for the batch system `batch`. Raises UsageError."""
    from imagefactory.pools.sizes import parse_size, parse_time
    from imagefactory.submit.submit_file import SubmitRun

    memory, disk, gpu_memory = (
        parse_size(text) if text else 0 for text in (options.memory, options.disk, options.gpu_memory)
    )
    _check_programs(options)
    gpus, cpus = options.gpus, options.cpus
    time = parse_time(options.time) if options.time else None
    if options.emulated:
        advice, source = _advice(options.emulated), click.get_current_context().get_parameter_source
        if batch != SLURM:  # which cannot be asked for a GPU's memory
            gpu_memory = gpu_memory or advice.gpu_memory or 0
        time = time or advice.time
        gpus = advice.gpus if source("gpus") is click.core.ParameterSource.DEFAULT else gpus
        cpus = advice.cpus if source("cpus") is click.core.ParameterSource.DEFAULT else cpus
    return SubmitRun(
        name=_file_name(options.output, SUFFIX[batch]),
        executable=options.executable,
        in_image=options.in_image,
        checkpoint=options.checkpoint,
        gather=options.gather,
        inputs=options.input,
        outputs=options.result,
        gpus=gpus,
        cpus=cpus,
        time=time,
        memory=memory,
        disk=disk,
        gpu_memory=gpu_memory,
        mig=options.mig,
    )


def _check_programs(options: JobOptions) -> None:
    """Raises UsageError for an option without the one that it requires."""
    program, gather = options.executable, options.gather
    reject_conflicts(
        (options.arguments and not program, "--arguments requires --executable", "add --executable train.sh"),
        (
            options.checkpoint and not program,
            "--checkpoint requires --executable",
            "add --executable train.sh",
        ),
        (gather and not options.dag, "--gather requires --dag", "add --dag N or --dag FILE"),
        (
            options.in_image and not (program.startswith("/") and (not gather or gather.startswith("/"))),
            "--in-image requires absolute paths of programs",
            "write, for example, --executable /app/train.py",
        ),
    )


def _advice(path: Path) -> Advice:
    """Return what an emulated run requires. Raises UsageError if it needs more memory than its GPU has."""
    from imagefactory.submit.emulated import LONGEST, advise, parse_emulated

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
