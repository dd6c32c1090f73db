"""The run command, and code shared by commands that run a program inside an image."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, ParamSpec

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.output import (
    CommandContext,
    complete_targets,
    gpus_option,
    print_catalog_notes,
    reject_conflict,
    runner_option,
)
from imagefactory.errors import LimitError, UsageError

if TYPE_CHECKING:
    from imagefactory.model import CommandResult, Mount, RunSpec
    from imagefactory.oci.manifests import Image, SifArtifact
    from imagefactory.trust.verdict import VerificationResult

P = ParamSpec("P")
HIGHEST_USER = 65534


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """An image and a command. `offered` are verdicts of the image in a catalog."""

    artifact: Image | SifArtifact
    offered: Sequence[VerificationResult]
    spec: RunSpec
    runner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options added by `run_options`, as the user wrote them."""

    runner: str | None
    network: bool
    read_only: bool
    user: int | None
    variables: tuple[str, ...]
    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    workdir: str


def run_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add the image, the command and the options of the sandbox: the fields of RunOptions."""
    options = (
        click.argument("name", metavar="TARGET|IMAGE", shell_complete=complete_targets),
        click.argument("command", nargs=-1, type=click.UNPROCESSED),
        section("Files and environment"),
        click.option(
            "-v",
            "--mount",
            "mounts",
            multiple=True,
            metavar="SOURCE:TARGET[:rw|:bind]",
            help="Mount a directory of this machine. It is read-only without :rw; :bind also keeps sockets "
            "and named pipes usable.",
        ),
        click.option(
            "-w", "--workdir", default="", metavar="DIR", help="Start the command in this directory."
        ),
        click.option(
            "-e",
            "--env",
            "variables",
            multiple=True,
            metavar="NAME=VALUE",
            help="Set an environment variable.",
        ),
        click.option("--read-only", is_flag=True, help="Make everything read-only, except /tmp."),
        section("Limits and user"),
        click.option("--network", is_flag=True, help="Allow access to the network (off by default)."),
        click.option(
            "--limit",
            "limits",
            multiple=True,
            metavar="NAME=AMOUNT",
            help="Set limits: processes=4096, memory=16G, files=65536, scratch=50G or time=2h (repeatable). "
            "NAME=none removes one; `doctor` shows the defaults.",
        ),
        click.option(
            "--user",
            type=click.IntRange(0, HIGHEST_USER),
            metavar="N",
            help="Run as this user number.  [default: the image's]",
        ),
        runner_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(cls=Command, context_settings={"allow_interspersed_args": False})
@section("GPUs")
@gpus_option
@click.option("--nv", is_flag=True, help="The same as --gpus all, as in Apptainer.")
@run_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
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
    gpus: str | None,
    nv: bool,
) -> None:
    """Run a command inside an image.

    \b
    imagefactory run pytorch-2.3-cu121 -- python train.py
    imagefactory run --gpus all pytorch-2.3-cu121 -- python train.py
    imagefactory run --gpus 0,1 pytorch-2.3-cu121 -- python train.py
    imagefactory run -v .:/work:rw -w /work pytorch-2.3-cu121 -- bash

    The current directory is /work inside, read-only. With -v or -w only your mounts are visible. Your home,
    hidden directories and system directories are never mounted by default. Changes to files of the image
    are discarded.

    Without COMMAND the image's own command runs, or bash. The exit code is that of the command.
    """
    from imagefactory.actions.run import run_artifact

    call: CommandContext = ctx.obj
    options = RunOptions(
        runner=runner, network=network, read_only=read_only, user=user, variables=variables, mounts=mounts,
        limits=limits, workdir=workdir,
    )  # fmt: skip
    reject_conflict(
        nv and gpus not in (None, "all"), "--nv takes all GPUs, and --gpus names some", "remove --nv"
    )
    prepared = prepare_run(ctx, name, command, options, gpus="all" if nv else gpus or "")
    exit_as(
        ctx,
        run_artifact(call.access, prepared.artifact, prepared.spec, prepared.runner, call.progress),
        prepared,
    )


def prepare_run(
    ctx: click.Context, name: str, command: tuple[str, ...], options: RunOptions, *, gpus: str = ""
) -> PreparedRun:
    """Find or download the image, and check the options. Raises UsageError.

    `gpus` is `all`, or names GPUs, or empty for none.
    """
    from imagefactory.actions.centers import names_center, read_offer
    from imagefactory.actions.images import find_stored
    from imagefactory.actions.run import (
        WORKDIR,
        fetch_offered,
        find_built,
        mounted_directory,
        own_start,
    )
    from imagefactory.model import RunSpec
    from imagefactory.project import uses_catalog
    from imagefactory.runtime.limits import parse_limits

    call: CommandContext = ctx.obj
    access, runner = call.access, options.runner or ""
    selected: tuple[tuple[int, str, str], ...] = ()
    selecting: dict[str, str] = {}
    if gpus not in ("", "all"):
        from imagefactory.actions.verify import select_run_gpus

        selected, selecting = select_run_gpus(gpus)
    of_center = uses_catalog(call.settings) and names_center(name, call.settings)
    artifact, target = None if of_center else find_stored(access, name), None
    offered: Sequence[VerificationResult] = ()
    if artifact is None and uses_catalog(call.settings):
        shelf = read_offer(call.settings, os.environ, name, datetime.now(UTC))
        call.progress.note(shelf.source)
        print_catalog_notes(shelf.notes)
        offer = shelf.offers[0]
        artifact, offered = fetch_offered(access, offer.image, call.progress), offer.judged
    elif artifact is None:
        factory = call.factory
        target = factory.select_single(name)
        artifact = find_built(factory, target, runner)
    argv = command[1:] if command[:1] == ("--",) else command
    if command and command[0] != "--" and command[0].startswith("-"):
        raise UsageError(
            "option-misplaced",
            f"{command[0]} is after the target, where imagefactory expects the command to run",
            hint=f"{ctx.command_path} {command[0]} {name} -- COMMAND",
        )
    bounds = parse_limits(options.limits)
    time = bounds.pop("time", None)
    mounts, workdir = tuple(_mount(text) for text in options.mounts), options.workdir
    start = own_start(artifact, target)
    uid = int(start.user or 0) if options.user is None else options.user
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
        mounts, workdir = ((here,), WORKDIR) if here else ((), "")
    spec = RunSpec(
        argv=argv or ("bash",),
        environment=tuple({**selecting, **dict(map(_variable, options.variables))}.items()),
        workdir=workdir or "/",
        uid=uid,
        read_only=options.read_only,
        network=options.network,
        gpus=bool(gpus),
        selected_gpus=selected,
        mounts=mounts,
        timeout=time,
        limits=tuple(bounds.items()),
        capture=False,
    )
    return PreparedRun(artifact=artifact, offered=offered, spec=spec, runner=runner)


def exit_as(ctx: click.Context, completed: CommandResult, prepared: PreparedRun) -> NoReturn:
    """Exit with the exit code of the command. Raises LimitError if a limit ended it."""
    message, hint = completed.over
    if completed.timed_out:
        message = f"the run was stopped: it reached the limit time={prepared.spec.timeout}s"
        hint = "increase `--limit time=...`"
    if message:
        raise LimitError("limit-reached", message, hint=hint)
    ctx.exit(completed.returncode)


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
