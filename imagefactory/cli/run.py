"""imagefactory run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    CommandContext,
    complete_targets,
    print_catalog_notes,
    reject_conflict,
    runner_option,
    terminal_width,
    write_terminal,
)
from imagefactory.errors import LimitError, UsageError

if TYPE_CHECKING:
    from imagefactory.model import CommandResult, Mount, RunSpec
    from imagefactory.oci.manifests import Image, SifArtifact
    from imagefactory.trust.verdict import VerificationResult

HIGHEST_USER = 65534


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("name", metavar="TARGET|IMAGE", shell_complete=complete_targets)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@runner_option
@click.option("--network", is_flag=True, help="Let the command reach the network (off by default).")
@click.option("--nv", is_flag=True, help="Show the machine's GPUs and driver inside; fails without one.")
@click.option(
    "--emulate",
    default="",
    metavar="GPU",
    help="Let torch see this GPU on a machine without one, A100 or T4, and tell what a training needs of it.",
)
@click.option(
    "--gpus",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="With --emulate: so many of them.",
)
@click.option(
    "--summary",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --emulate: write what it tells to a file too, for `submit --emulated`.",
)
@click.option("--read-only", is_flag=True, help="Nothing but /tmp can be written inside.")
@click.option(
    "--user", "uid", type=click.IntRange(0, HIGHEST_USER), help="The user inside; else the image's."
)
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set a variable inside.")
@click.option(
    "--mount",
    "mounts",
    multiple=True,
    metavar="SOURCE:TARGET[:rw|:bind]",
    help="Show a folder of this machine inside, read-only unless :rw. "
    "Sockets and named pipes in it answer only with :rw or :bind.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=AMOUNT",
    help="processes=4096, memory=16G, files=65536, scratch=50G or time=2h, with commas or repeated; "
    "NAME=none lifts one. `doctor` shows what holds without.",
)
@click.option("--workdir", default="", metavar="DIR", help="The folder inside in which the command starts.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    name: str,
    command: tuple[str, ...],
    runner: str | None,
    network: bool,
    nv: bool,
    emulate: str,
    gpus: int,
    summary: Path | None,
    read_only: bool,
    uid: int | None,
    variables: tuple[str, ...],
    mounts: tuple[str, ...],
    limits: tuple[str, ...],
    workdir: str,
) -> None:
    """Run a command inside an image of the store.

    \b
    imagefactory run pytorch-2.3-cu121 -- python train.py
    imagefactory run --mount .:/work:rw --workdir /work pytorch-2.3-cu121 -- bash
    imagefactory run pytorch:2.3-cu121 -- python      a tag or digest of the store
    imagefactory run --emulate A100 pytorch-2.3-cu121 -- python train.py

    Without --mount and --workdir the command starts in /work, which is the folder here, read-only. Your home,
    hidden folders, the store, the system's folders (/run, /etc, /tmp itself, ...) and what holds one of them
    are not shown; it starts in / then, as it does with --mount alone.
    Without a factory TARGET is an image of the catalogue that you joined, fetched once by its digest.
    Without COMMAND it is the image's own, in its own folder, or bash where the recipe names none.
    Changes to the image's files are thrown away. The exit code is the command's own.
    """
    from imagefactory.actions.centers import names_center, read_offer
    from imagefactory.actions.images import find_stored
    from imagefactory.actions.run import (
        fetch_offered,
        find_built,
        mounted_directory,
        own_start,
        run_artifact,
    )
    from imagefactory.model import RunSpec
    from imagefactory.project import uses_catalog
    from imagefactory.recipes.expand import select_single
    from imagefactory.runtime.here import WORKDIR
    from imagefactory.runtime.limits import parse_limits

    call: CommandContext = ctx.obj
    access, runner = call.access, runner or ""
    of_center = uses_catalog(call.settings) and names_center(name, call.settings)
    artifact, target = None if of_center else find_stored(access, name), None
    offered: Sequence[VerificationResult] = ()
    if artifact is None and uses_catalog(call.settings):
        shelf = read_offer(call.settings, os.environ, name, datetime.now(UTC))
        call.progress.note(shelf.said)
        print_catalog_notes(shelf.notes)
        offer = shelf.offers[0]
        artifact, offered = fetch_offered(access, offer.image, call.progress), offer.judged
    elif artifact is None:
        factory = call.factory
        target = select_single(factory.targets, name)
        artifact = find_built(factory, target, runner)
    argv = command[1:] if command[:1] == ("--",) else command
    if command and command[0] != "--" and command[0].startswith("-"):
        raise UsageError(
            "option-misplaced",
            f"{command[0]} is after the target, where imagefactory expects the command to run",
            hint=f"imagefactory run {command[0]} {name} -- COMMAND",
        )
    bounds = parse_limits(limits)
    time = bounds.pop("time", None)
    folders = tuple(_mount(text) for text in mounts)
    start = own_start(artifact, target)
    uid = int(start.user or 0) if uid is None else uid
    if uid > HIGHEST_USER:
        raise UsageError(
            "user-not-supported",
            f"{name} starts as user {uid}, but a sandbox supports users up to {HIGHEST_USER}",
            hint="add --user 0",
        )
    if not argv and start.command:
        argv, workdir = start.command, workdir or start.workdir
    if not mounts and not workdir:
        here, note = mounted_directory(access, Path.cwd())
        call.progress.note(note)
        folders, workdir = ((here,), WORKDIR) if here else ((), "")
    spec = RunSpec(
        argv=argv or ("bash",),
        environment=tuple(_variable(text) for text in variables),
        workdir=workdir or "/",
        uid=uid,
        read_only=read_only,
        network=network,
        gpus=nv,
        mounts=folders,
        timeout=time,
        limits=tuple(bounds.items()),
        capture=False,
    )
    reject_conflict(
        (summary or gpus > 1) and not emulate, "--summary and --gpus require --emulate", "add --emulate GPU"
    )
    if emulate:
        device = (emulate, gpus)
        completed = _emulated(call, artifact, offered, spec, device, summary=summary, runner=runner)
    else:
        completed = run_artifact(access, artifact, spec, runner, call.progress)
    message, hint = completed.over
    if completed.timed_out:
        message = f"the run was stopped: it reached the limit time={time}s"
        hint = "increase `--limit time=...`"
    if message:
        raise LimitError("limit-reached", message, hint=hint)
    ctx.exit(completed.returncode)


def _emulated(
    call: CommandContext,
    artifact: Image | SifArtifact,
    offered: Sequence[VerificationResult],
    spec: RunSpec,
    device: tuple[str, int],
    *,
    summary: Path | None,
    runner: str,
) -> CommandResult:
    """Run with an emulated GPU, and print a summary to stderr: stdout is the command's.

    `offered` are verdicts of the image from a catalog, `device` is a GPU and how many.
    """
    from imagefactory.actions.images import scratch_directory
    from imagefactory.actions.run import fitting_runner, run_artifact
    from imagefactory.extras.emulate.run import (
        emulating,
        read_emulation_summaries,
        recorded_profile,
        write_emulation_summary,
    )
    from imagefactory.extras.emulate.summary import NONE, format_emulated, main_run
    from imagefactory.gpu.knowledge import find_data_sheet

    name, gpus = device
    sheet, others = find_data_sheet(name)
    if others:
        known = ", ".join(other.name for other in others)
        call.progress.note(f"{name} is taken as {sheet.name}; there are also {known}")
    recorded = recorded_profile(call.access, artifact, sheet, datetime.now(UTC), offered)
    if recorded:
        call.progress.note(
            f"{sheet.name}: as recorded with driver {recorded.driver}, {recorded.when:%Y-%m-%d}"
        )
    scratch = scratch_directory(call.access, fitting_runner(call.access, artifact, runner))
    with emulating(sheet, gpus, spec, recorded, scratch=scratch) as (emulated_spec, folder):
        completed = run_artifact(call.access, artifact, emulated_spec, runner, call.progress)
        runs = read_emulation_summaries(folder)
        main = main_run(runs)
        write_terminal(
            2, "\n".join(NONE) if main is None else format_emulated(main, len(runs), terminal_width())
        )
        if summary:
            write_emulation_summary(folder, runs, summary)
    return completed


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(
            "option-invalid", f"--env {text!r} is not NAME=VALUE", hint="write, for example, --env SEED=1"
        )
    return name, value


def _mount(text: str) -> Mount:
    from imagefactory.model import Mount

    parts = text.split(":")
    how = parts[2] if len(parts) == 3 else "ro"
    if len(parts) not in (2, 3) or how not in ("ro", "rw", "bind"):
        raise UsageError(
            "option-invalid",
            f"--mount {text!r} is not SOURCE:TARGET, with an optional :rw or :bind",
            hint="write, for example, --mount data:/data",
        )
    source = Path(parts[0]).absolute()
    if not source.exists():
        raise UsageError(
            "mount-source-missing", f"--mount {text!r}: {source} does not exist", hint=f"create {source}"
        )
    if not parts[1].startswith("/") or ".." in parts[1].split("/"):
        raise UsageError(
            "option-invalid",
            f"--mount {text!r}: the target is not an absolute path inside the image",
            hint="write, for example, --mount data:/data",
        )
    return Mount(source=source, target=parts[1], writable=how == "rw", bind=how == "bind")
