"""The emulate command."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.output import CommandContext, terminal_width, write_terminal
from imagefactory.cli.run import RunOptions, exit_as, prepare_run, run_options


@click.command(cls=Command)
@click.argument("gpu")
@section("Emulation")
@click.option(
    "--gpus",
    type=click.IntRange(1, 16),
    metavar="N",
    default=1,
    show_default=True,
    help="Emulate this number of GPUs.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the summary to a file, for `job write --resources-from`.",
)
@run_options
@click.pass_context
def emulate(
    ctx: click.Context,
    /,
    *,
    gpu: str,
    name: str,
    command: tuple[str, ...],
    runner: str | None,
    network: bool,
    read_only: bool,
    user: int | None,
    variables: tuple[str, ...],
    mounts: tuple[str, ...],
    limits: tuple[str, ...],
    workdir: str,
    gpus: int,
    output: Path | None,
) -> None:
    """Run a training on an emulated GPU and measure its needs.

    \b
    imagefactory emulate A100 pytorch-2.3-cu121 -- python train.py
    imagefactory emulate A100 -o needs.json pytorch-2.3-cu121 -- python train.py
    imagefactory job write pytorch-2.3-cu121 --resources-from needs.json

    PyTorch sees a GPU (A100, T4, ...) on a machine without one. The summary on stderr has the time, the GPU
    memory and the cores that a job needs. Nothing is computed on the emulated GPU, so losses mean nothing.
    """
    from imagefactory.actions.images import scratch_directory
    from imagefactory.actions.run import fitting_runner, run_artifact
    from imagefactory.extras.emulate.run import (
        NONE,
        emulating,
        format_emulated,
        main_run,
        read_emulation_summaries,
        recorded_profile,
        write_emulation_summary,
    )
    from imagefactory.gpu.knowledge import find_data_sheet

    call: CommandContext = ctx.obj
    options = RunOptions(
        runner=runner, network=network, read_only=read_only, user=user, variables=variables, mounts=mounts,
        limits=limits, workdir=workdir,
    )  # fmt: skip
    prepared = prepare_run(ctx, name, command, options)
    sheet, others = find_data_sheet(gpu)
    if others:
        known = ", ".join(other.name for other in others)
        call.progress.note(f"{gpu} stands for {sheet.name}; also known: {known}")
    recorded = recorded_profile(call.access, prepared.artifact, sheet, datetime.now(UTC), prepared.offered)
    if recorded:
        call.progress.note(
            f"{sheet.name}: as recorded with driver {recorded.driver}, {recorded.when:%Y-%m-%d}"
        )
    scratch = scratch_directory(call.access, fitting_runner(call.access, prepared.artifact, prepared.runner))
    with emulating(sheet, gpus, prepared.spec, recorded, scratch=scratch) as (spec, directory):
        completed = run_artifact(call.access, prepared.artifact, spec, prepared.runner, call.progress)
        runs = read_emulation_summaries(directory)
        main = main_run(runs)
        write_terminal(
            2, "\n".join(NONE) if main is None else format_emulated(main, len(runs), terminal_width())
        )
        if output:
            write_emulation_summary(directory, runs, output)
    exit_as(ctx, completed, prepared)
