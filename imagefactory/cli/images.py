"""Commands for images: build, run, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from imagefactory.cli.output import (
    Call,
    collecting,
    complete_targets,
    json_option,
    made_json,
    say,
    say_json,
    targets_argument,
)
from imagefactory.cli.registries import Pusher, registry_option
from imagefactory.errors import BuildError, FactoryError, UsageError
from imagefactory.progress import format_bytes
from imagefactory.settings.choices import ENGINES, RUNNERS

if TYPE_CHECKING:
    from imagefactory.factory import Factory
    from imagefactory.model import Mount
    from imagefactory.workflow import Built


runner_option = click.option(
    "--runner",
    type=click.Choice(tuple(RUNNERS)),
    help="What starts the image.  [default: the setting `runner`, else what fits the engine]",
)


@click.command()
@targets_argument(required=True)
@click.option(
    "--engine",
    type=click.Choice(tuple(ENGINES)),
    help="What builds the image; assemble needs no daemon and no root.  [default: the setting `engine`]",
)
@runner_option
@click.option("--locked", is_flag=True, help="Stop if a locked package of the base is gone from the mirror.")
@click.option("--no-smoke", is_flag=True, help="Do not start and try the image.")
@click.option("--push", "pushes", is_flag=True, help="Push each image whose smoke test passed.")
@registry_option
@json_option
@click.pass_obj
def build(
    call: Call,
    names: tuple[str, ...],
    engine: str | None,
    runner: str | None,
    locked: bool,
    no_smoke: bool,
    pushes: bool,
    place: str,
    as_json: bool,
) -> None:
    """Build images into the store and try each one: start it, import, compute, on the CPU.

    Run it again after an interruption: what is done is kept.
    """
    from imagefactory.recipes.expand import select
    from imagefactory.report.console import format_built
    from imagefactory.workflow import BuildOptions, build_target

    factory, progress = call.factory, call.progress
    if pushes and no_smoke:
        raise UsageError("--push sends only what passed its smoke test", hint="leave --no-smoke out")
    if place and not pushes:
        raise UsageError("--registry says where --push sends to", hint="add --push, or leave it out")
    push = Pusher(factory, place, progress) if pushes else None
    options = BuildOptions(
        engine=engine or factory.settings.engine.value,
        runner=runner or factory.settings.runner.value,
        locked=locked,
        smoke=not no_smoke,
    )
    results: list[dict[str, object]] = []
    with collecting() as failures:
        for target in select(factory.targets, names):
            with failures.of(target.name):
                built = build_target(factory, target, options, progress)
                results.append(_built_json(built, factory))
                say(format_built(built, factory.settings.store.value), unless=as_json)
                if built.report is not None and not built.report.passed:
                    failures.add(_smoke_failure(built))
                elif push is not None:
                    results[-1]["pushed"] = push(target, quiet=as_json, made=built.image)
        if as_json:
            say_json("build", {"results": results, "errors": failures.as_json()})


def _built_json(built: Built, factory: Factory) -> dict[str, object]:
    from imagefactory.verify.smoke import format_report

    return {
        "target": built.target.name,
        "store": factory.settings.store.value,
        "image": made_json(built.image),
        "fresh": built.fresh,
        "published_base": built.published_base,
        "smoke": format_report(built.report) if built.report else None,
        "gpu": built.report.gpu.value if built.report else "not-tested",
        "seconds": dict(built.seconds),
    }


def _smoke_failure(built: Built) -> FactoryError:
    from imagefactory.errors import CheckFailedError

    assert built.report is not None
    return CheckFailedError(
        f"{built.target.name}: the image is built, but its smoke test did not pass: {built.report.failure}",
        hint="the checks above say why; the image stays in the store under its tag",
    )


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@runner_option
@click.option("--network", is_flag=True, help="Let the command reach the network (off by default).")
@click.option("--gpus", is_flag=True, help="Show the machine's GPUs and driver inside; fails without one.")
@click.option("--read-only", is_flag=True, help="Nothing but /tmp can be written inside.")
@click.option("--user", "uid", type=click.IntRange(0, 65534), default=0, help="The user inside, e.g. 65534.")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set a variable inside.")
@click.option(
    "--mount",
    "mounts",
    multiple=True,
    metavar="SOURCE:TARGET[:rw]",
    help="Show a folder of this machine inside, read-only unless :rw.",
)
@click.option("--workdir", default="/", show_default=True, help="The folder the command starts in.")
@click.pass_context
def run(ctx: click.Context, /, name: str, command: tuple[str, ...], **options: Any) -> None:
    """Run COMMAND inside a built image; changes to the image's files are thrown away.

    \b
    imagefactory run pytorch-2.3-cu121 -- python -c "import torch; print(torch.__version__)"
    imagefactory run --mount $PWD:/work:rw --workdir /work pytorch-2.3-cu121 -- bash

    The exit code is the command's own.
    """
    from imagefactory.model import RunSpec
    from imagefactory.recipes.expand import select_one
    from imagefactory.workflow import run_target

    call: Call = ctx.obj
    factory = call.factory
    target = select_one(factory.targets, name)
    argv = command[1:] if command[:1] == ("--",) else command
    if command and command[0] != "--" and command[0].startswith("-"):
        raise UsageError(
            f"{command[0]} stands after the target, where the command to run is expected",
            hint=f"imagefactory run {command[0]} {name} -- COMMAND",
        )
    spec = RunSpec(
        argv=argv or ("bash",),
        environment=tuple(_variable(text) for text in options["variables"]),
        workdir=options["workdir"],
        uid=options["uid"],
        read_only=options["read_only"],
        network=options["network"],
        gpus=options["gpus"],
        mounts=tuple(_mount(text) for text in options["mounts"]),
        capture=False,
    )
    completed = run_target(factory, target, spec, options["runner"] or "", call.progress)
    ctx.exit(completed.returncode)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--env {text!r} is not NAME=VALUE")
    return name, value


def _mount(text: str) -> Mount:
    from imagefactory.model import Mount

    parts = text.split(":")
    writable = len(parts) == 3 and parts[2] == "rw"
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("rw", "ro")):
        raise UsageError(f"--mount {text!r} is not SOURCE:TARGET or SOURCE:TARGET:rw")
    source = Path(parts[0]).absolute()
    if not source.exists():
        raise UsageError(f"--mount {text!r}: {source} does not exist")
    if not parts[1].startswith("/") or ".." in parts[1].split("/"):
        raise UsageError(f"--mount {text!r}: the target must be an absolute path inside the image")
    return Mount(source=source, target=parts[1], writable=writable)


@click.command()
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["oci-archive", "docker-archive", "sif"]),
    default="oci-archive",
    show_default=True,
    help="oci-archive for podman, skopeo, apptainer; docker-archive for `docker load`; sif for apptainer.",
)
@click.option(
    "--compression",
    type=click.Choice(["fast", "small"]),
    help="Of a .sif: small takes many times as long and saves a part.  [default: fast]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Default: TARGET.FORMAT.tar, or TARGET-<12 digits of its sha256>.sif",
)
@json_option
@click.pass_obj
def export(
    call: Call, name: str, kind: str, compression: str | None, output: Path | None, as_json: bool
) -> None:
    """Write a built image as one file that docker, podman, skopeo or apptainer read.

    A .sif is made once and kept in the store with its image.
    """
    if kind == "sif":
        return _export_sif(call, name, (compression or "", output), as_json=as_json)
    if compression:
        raise UsageError("--compression is of --format sif", hint="leave it out")
    from imagefactory.oci.archive import export as export_image
    from imagefactory.recipes.expand import select_one
    from imagefactory.workflow import find_image

    factory, progress = call.factory, call.progress
    target = select_one(factory.targets, name)
    path = output or Path(f"{target.name}.{kind}.tar")
    with factory.layout.in_use(progress):
        image = find_image(factory, target)
        if image is None:
            raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
        with progress.stage(f"{target.name}: export {kind}"):
            export_image(factory.layout, image, path, kind=kind, progress=progress)
    if as_json:
        value = {"target": target.name, "path": str(path), "kind": kind, "size": path.stat().st_size}
        return say_json("export", {**value, "digest": image.digest})
    load = {
        "oci-archive": f"skopeo inspect oci-archive:{path}",
        "docker-archive": f"docker load --input {path}",
    }[kind]
    size = format_bytes(path.stat().st_size)
    say(f"wrote {path} ({size}), image {image.name}@{image.digest}\nread it: {load}")
    return None


def _export_sif(call: Call, name: str, options: tuple[str, Path | None], *, as_json: bool) -> None:
    from imagefactory.recipes.expand import select_one
    from imagefactory.workflow import SifExport, export_sif

    factory = call.factory
    target = select_one(factory.targets, name)
    compression, output = options
    sif, path = export_sif(factory, target, SifExport(compression=compression, output=output), call.progress)
    if as_json:
        made = {**made_json(sif), "path": str(path)}
        return say_json("export", {"target": target.name, "kind": "sif", **made})
    source = f"made from {sif.made_from}" if sif.made_from else "built by apptainer from the definition"
    say(
        f"wrote {path} ({format_bytes(sif.file.size)}, {sif.compression}), {source}\n"
        f"sha256 {sif.file.digest.removeprefix('sha256:')}\ntry it: apptainer exec {path} python"
    )
    return None
