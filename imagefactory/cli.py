"""The command line: arguments in, exit code out. The only place that prints results or exits.

Every command imports what it needs when it runs, so that `--help` and `list` answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from imagefactory import __version__
from imagefactory.engines import ENGINES
from imagefactory.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TOOL,
    BuildError,
    FactoryError,
    NothingSelectedError,
    StaleError,
    ToolError,
    UsageError,
)
from imagefactory.progress import STYLES, Progress, choose, format_bytes

if TYPE_CHECKING:
    from imagefactory.model import Image, Mount, Target
    from imagefactory.settings import Settings
    from imagefactory.workflow import Built, Factory

P = ParamSpec("P")
BUILD_MODULES = ("installer", "isal", "jinja2", "requests", "rich", "tenacity", "uv", "zstandard")
EPILOG = (
    "Exit codes: 0 all asked for holds; 1 a bug; 2 recipe or arguments; 3 nothing selected; 4 stale "
    "(--check); 5 lock; 6 tool missing; 7 build; 8 registry; 9 a check failed; 130 interrupted."
)


@dataclass(frozen=True, slots=True)
class Call:
    """What every command gets: the settings, lazily read recipes, and who watches progress."""

    directory: Path | None
    progress_style: str

    @property
    def settings(self) -> Settings:
        from imagefactory.settings import load_settings

        return load_settings(directory=self.directory, start=Path.cwd(), environ=os.environ)

    @property
    def factory(self) -> Factory:
        from imagefactory.workflow import read_factory

        return read_factory(self.settings, os.environ)

    @property
    def progress(self) -> Progress:
        return choose(self.progress_style, github=os.environ.get("GITHUB_ACTIONS") == "true")


def say(text: str, *, unless: bool = False) -> None:
    """A result for a person; `unless` is true where a program asked for JSON."""
    if not unless:
        _write(1, text)


def say_json(kind: str, value: Mapping[str, object]) -> None:
    """One JSON document on stdout. `format` names its kind and version."""
    _write(1, json.dumps({"format": f"imagefactory.{kind}/1", **value}, indent=2))


def complain(error: FactoryError, prefix: str = "") -> None:
    _write(2, f"error: {prefix}{error.message}")
    if error.hint:
        _write(2, f"  what to do: {error.hint}")


def _write(stream: int, text: str) -> None:
    """Prints; when nobody reads any more (`| head`), the work and its exit code stay what they are."""
    try:
        click.echo(text, err=stream == 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def json_option(command: Callable[P, None]) -> Callable[P, None]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(command)


def complete_targets(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Names for shell completion. A broken recipe completes nothing, it does not break the shell."""
    call = ctx.find_object(Call) or Call(None, "quiet")
    try:
        return [t.name for t in call.factory.targets if t.name.startswith(incomplete)]
    except FactoryError:
        return []


def targets_argument(*, required: bool) -> Callable[[Callable[P, None]], Callable[P, None]]:
    return click.argument(
        "names",
        metavar="TARGET..." if required else "[TARGET]...",
        nargs=-1,
        required=required,
        shell_complete=complete_targets,
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(__version__, message="imagefactory %(version)s")
@click.option(
    "-C",
    "directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="The factory's folder (recipes/, lockfiles/). Default: the nearest imagefactory.toml upwards.",
)
@click.option(
    "--progress",
    "style",
    type=click.Choice(STYLES),
    default="auto",
    show_default=True,
    help="How progress is shown on stderr.",
)
@click.pass_context
def cli(ctx: click.Context, directory: Path | None, style: str) -> None:
    """Make GPU container images that are locked, reproducible and tried inside.

    \b
    Start here:
      imagefactory list                        what can be built
      imagefactory build pytorch-2.3-cu121     build it, try it, say where it is
      imagefactory run pytorch-2.3-cu121 -- python
      imagefactory doctor                      what this machine has and lacks
    """
    ctx.obj = Call(directory, style)


# --- recipes -------------------------------------------------------------------------------------


@cli.command("list")
@targets_argument(required=False)
@json_option
@click.pass_obj
def list_targets(call: Call, names: tuple[str, ...], as_json: bool) -> None:
    """List the targets: what can be built, and the state of each lock."""
    from imagefactory.recipes import select
    from imagefactory.report.console import format_table
    from imagefactory.workflow import lock_state

    factory = call.factory
    chosen = select(factory.targets, names)
    states = {target.name: lock_state(factory, target) for target in chosen}
    if as_json:
        return say_json("targets", {"targets": [{**_target_json(t), "lock": states[t.name]} for t in chosen]})
    rows = [(t.name, f"{t.framework} {t.version}", t.cuda, t.python, t.base, states[t.name]) for t in chosen]
    say(format_table(("TARGET", "FRAMEWORK", "CUDA", "PYTHON", "BASE", "LOCK"), rows))
    return None


@cli.command()
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@json_option
@click.pass_obj
def show(call: Call, name: str, as_json: bool) -> None:
    """Show one target: what it asks for, what its lock holds, whether its image is in the store."""
    from imagefactory.report.console import format_target
    from imagefactory.workflow import find_image, lock_state, read_target_lock

    factory = call.factory
    target = select_one(factory.targets, name)
    lock, image = read_target_lock(factory, target), find_image(factory, target)
    state = lock_state(factory, target)
    if not as_json:
        return say(format_target(target, lock, state, image))
    packages = [
        {"name": w.name, "version": w.version, "file": w.filename, "sha256": w.sha256, "size": w.size}
        for w in (lock.wheels if lock else ())
    ]
    value = {
        **_target_json(target),
        "lock": state,
        "packages": packages,
        "image": _image_json(image) if image else None,
    }
    return say_json("target", value)


def select_one(targets: Sequence[Target], name: str) -> Target:
    """The one target of `name`. Raises UsageError for a pattern that fits several."""
    from imagefactory.recipes import select

    chosen = select(targets, (name,))
    if len(chosen) > 1:
        names = ", ".join(target.name for target in chosen)
        raise UsageError(f"'{name}' fits {len(chosen)} targets, this takes one", hint=f"name one of {names}")
    return chosen[0]


@cli.command()
@click.argument("family")
@click.option("--framework", default="", metavar="PACKAGE", help="The framework's package, e.g. torch.")
@click.option("--print", "only_print", is_flag=True, help="Print the recipe instead of writing it.")
@click.pass_obj
def new(call: Call, family: str, framework: str, only_print: bool) -> None:
    """Write recipes/FAMILY.yaml: a recipe to start from."""
    from imagefactory.recipes import read_bases, scaffold

    folder = call.settings.root_path / "recipes"
    text = scaffold(family, read_bases(folder), framework=framework)
    if only_print:
        return say(text.rstrip("\n"))
    path = folder / f"{family}.yaml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists", hint="edit it, or choose another family") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="mend its rights") from error
    say(f"wrote {path}\nnext: edit it, then `imagefactory list`, `imagefactory lock`, `imagefactory render`")
    return None


def _target_json(target: Target) -> dict[str, object]:
    return {
        "target": target.name,
        "family": target.family,
        "description": target.description,
        "source": target.source,
        "framework": target.framework,
        "version": target.version,
        "cuda": target.cuda,
        "python": target.python,
        "base": target.base,
        "platform": target.platform,
        "capabilities": target.capabilities,
        "checks": target.checks,
        "requirements": target.requirements,
        "constraints": target.constraints,
        "environment": dict(target.environment),
        "recipe": str(target.where),
    }


def _image_json(image: Image) -> dict[str, object]:
    return {
        "name": image.name,
        "digest": image.digest,
        "manifest": image.manifest,
        "config": image.config,
        "size": image.size,
        "layers": [
            {
                "title": layer.title,
                "digest": layer.descriptor.digest,
                "size": layer.descriptor.size,
                "diff_id": layer.diff_id,
            }
            for layer in image.layers
        ],
    }


# --- locks and definitions -----------------------------------------------------------------------


@cli.command()
@targets_argument(required=False)
@click.option("--check", is_flag=True, help="Solve nothing; exit 4 if a lock is missing or stale.")
@click.option("--update", multiple=True, metavar="PACKAGE", help="Let this package move (repeatable).")
@click.option("--update-all", is_flag=True, help="Let every package move.")
@json_option
@click.pass_obj
def lock(
    call: Call, names: tuple[str, ...], check: bool, update: tuple[str, ...], update_all: bool, as_json: bool
) -> None:
    """Solve and write the locks of targets, or of bases (base:debian-12). Default: all of both.

    An unchanged lock solves nothing. Only what must move moves.
    """
    from imagefactory.recipes import select
    from imagefactory.report.console import format_relock
    from imagefactory.workflow import LockOptions, base_state, holding, lock_base, lock_state, lock_target

    if check and (update or update_all):
        raise UsageError("--check changes nothing, so it cannot update", hint="drop --check or --update")
    factory, progress = call.factory, call.progress
    bases = _select_bases(factory, names)
    chosen = select(factory.targets, wanted) if (wanted := _no_bases(names)) or not names else ()
    if check:
        states = {f"base:{b.name}": base_state(factory, b) for b in bases}
        states |= {t.name: lock_state(factory, t) for t in chosen}
        if as_json:
            say_json("locks", {"locks": states})
        if not names:
            refuse_orphans(factory)
        bad = {name: state for name, state in states.items() if state != "ok"}
        if bad:
            listing = ", ".join(f"{name} ({state})" for name, state in bad.items())
            raise StaleError(f"locks to make anew: {listing}", hint="imagefactory lock " + " ".join(bad))
        return None if as_json else say(f"{len(states)} locks are as the recipes ask")
    options = LockOptions(update=update, update_all=update_all)
    if update and not names:
        bases, chosen = [], holding(factory, chosen, update)
    if update and bases:
        raise UsageError(
            f"base:{bases[0].name} moves as a whole, not by package", hint="lock it with --update-all"
        )
    results: list[dict[str, object]] = []
    with collecting() as failures:
        for base in bases:
            with failures.of(f"base:{base.name}"):
                changed = lock_base(factory, base, progress, update=update_all)
                results.append({"base": base.name, "changed": changed})
                say(f"base:{base.name}: {'locked' if changed else 'unchanged'}", unless=as_json)
        for target in chosen:
            with failures.of(target.name):
                done = lock_target(factory, target, options, progress)
                results.append({"target": target.name, "changed": done.before != done.after})
                say(format_relock(done), unless=as_json)
        if as_json:
            say_json("locks", {"results": results, "errors": failures.as_json()})
    return None


def refuse_orphans(factory: Factory) -> None:
    """Raises StaleError for locks and definitions that no recipe makes any more."""
    from imagefactory.workflow import orphans

    left = [str(path.relative_to(factory.settings.root_path)) for path in orphans(factory)]
    if left:
        raise StaleError(f"no recipe makes {', '.join(left)}", hint=f"git rm -r {' '.join(left)}")


def _no_bases(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if not name.startswith("base:"))


def _select_bases(factory: Factory, names: tuple[str, ...]) -> list[Any]:
    asked = [name.removeprefix("base:") for name in names if name.startswith("base:")]
    known = {base.name: base for base in factory.bases}
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UsageError(f"no base '{unknown[0]}'", hint=f"the bases are {', '.join(known)}")
    return [known[name] for name in asked] if names else list(factory.bases)


@cli.command()
@targets_argument(required=False)
@click.option("--check", is_flag=True, help="Write nothing; exit 4 if a committed file differs.")
@json_option
@click.pass_obj
def render(call: Call, names: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Write definitions/TARGET/: Dockerfile, apptainer.def and the lock they install."""
    from imagefactory.recipes import select
    from imagefactory.render.folders import check_definitions, write_definitions
    from imagefactory.workflow import render_target

    factory = call.factory
    chosen = select(factory.targets, names)
    written: list[str] = []
    stale: dict[str, list[str]] = {}
    with collecting() as failures:
        for target in chosen:
            with failures.of(target.name):
                files, folder = render_target(factory, target), factory.definition_folder(target)
                found = check_definitions(folder, files)
                if found and check:
                    stale[target.name] = list(found)
                elif found:
                    write_definitions(folder, files)
                    written.append(target.name)
        if as_json:
            say_json("definitions", {"written": written, "stale": stale, "errors": failures.as_json()})
        elif failures.errors and not written:
            pass  # the errors have said it
        elif check and not stale:
            say(f"{len(chosen) - len(failures.errors)} definitions are as the recipes and locks give them")
        elif not check:
            say(f"wrote {', '.join(written)}" if written else "nothing to write: all definitions are current")
        if check and not names:
            with failures.of("definitions"):
                refuse_orphans(factory)
        for name, differences in stale.items():
            click.echo("\n".join([f"{name}:", *differences]), err=True)
        if stale:
            hint = "imagefactory render " + " ".join(stale)
            failures.add(StaleError(f"definitions that are not current: {', '.join(stale)}", hint=hint))


# --- images --------------------------------------------------------------------------------------


@cli.command()
@targets_argument(required=True)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="assemble",
    show_default=True,
    help="What builds the image: assemble needs no daemon and no root.",
)
@click.option("--locked", is_flag=True, help="Stop if a locked package of the base is gone from the mirror.")
@click.option("--no-smoke", is_flag=True, help="Do not start and try the image.")
@json_option
@click.pass_obj
def build(
    call: Call,
    names: tuple[str, ...],
    engine: str,
    locked: bool,
    no_smoke: bool,
    as_json: bool,
) -> None:
    """Build images into the store and try each one: start it, import, compute, on the CPU.

    Run it again after an interruption: what is done is kept.
    """
    from imagefactory.recipes import select
    from imagefactory.report.console import format_built
    from imagefactory.workflow import BuildOptions, build_target

    factory, progress = call.factory, call.progress
    options = BuildOptions(engine=engine, locked=locked, smoke=not no_smoke)
    results: list[dict[str, object]] = []
    with collecting() as failures:
        for target in select(factory.targets, names):
            with failures.of(target.name):
                built = build_target(factory, target, options, progress)
                results.append(_built_json(built, factory))
                say(format_built(built, factory.settings.store.value), unless=as_json)
                if built.report is not None and not built.report.passed:
                    failures.add(_smoke_failure(built))
        if as_json:
            say_json("build", {"results": results, "errors": failures.as_json()})


def _built_json(built: Built, factory: Factory) -> dict[str, object]:
    from imagefactory.verify.smoke import format_report

    return {
        "target": built.target.name,
        "store": factory.settings.store.value,
        "image": _image_json(built.image),
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


@cli.command(context_settings={"allow_interspersed_args": False})
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
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
    from imagefactory.verify.runners.unshare import UnshareRunner
    from imagefactory.workflow import find_image, unpack_image

    call: Call = ctx.obj
    factory = call.factory
    target = select_one(factory.targets, name)
    image = find_image(factory, target)
    if image is None:
        raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
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
    with factory.layout.in_use(call.progress):
        unpack_image(factory, image, call.progress)
    completed = UnshareRunner(factory.layout).run(image, spec)
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


@cli.command()
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["oci-archive", "docker-archive"]),
    default="oci-archive",
    show_default=True,
    help="oci-archive for podman, skopeo, apptainer; docker-archive for `docker load`.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: TARGET.FORMAT.tar"
)
@json_option
@click.pass_obj
def export(call: Call, name: str, kind: str, output: Path | None, as_json: bool) -> None:
    """Write a built image as one file that docker, podman, skopeo or apptainer read."""
    from imagefactory.oci.archive import export as export_image
    from imagefactory.workflow import find_image

    factory, progress = call.factory, call.progress
    target = select_one(factory.targets, name)
    image = find_image(factory, target)
    if image is None:
        raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
    path = output or Path(f"{target.name}.{kind}.tar")
    with factory.layout.in_use(progress), progress.stage(f"{target.name}: export {kind}"):
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


# --- the store and the machine -------------------------------------------------------------------


@cli.group()
def store() -> None:
    """Look into the store of built images, and free what nothing needs."""


@store.command("list")
@json_option
@click.pass_obj
def store_list(call: Call, as_json: bool) -> None:
    """List the images of the store."""
    from imagefactory.oci.layout import Layout

    settings = call.settings
    layout = Layout(settings.store_path)
    images: list[Image] = []
    with collecting() as failures:
        for name, descriptor in layout.tags().items():
            with failures.of(name):
                images.append(layout.load(name, descriptor))
        _list_images(images, settings.store.value, as_json=as_json)


def _list_images(images: Sequence[Image], place: str, *, as_json: bool) -> None:
    from imagefactory.report.console import format_table

    if as_json:
        return say_json("store", {"store": place, "images": [_image_json(image) for image in images]})
    if not images:
        return say(f"no image yet in {place}")
    rows = [(i.name, str(len(i.layers)), format_bytes(i.size), i.digest) for i in images]
    say(format_table(("IMAGE", "LAYERS", "SIZE", "DIGEST"), rows))
    unique = {layer.descriptor.digest: layer.descriptor.size for i in images for layer in i.layers}
    total = format_bytes(sum(unique.values()))
    say(f"{total} in {len(unique)} different layers, in {place}")
    return None


def complete_images(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    from imagefactory.oci.layout import Layout

    call = ctx.find_object(Call) or Call(None, "quiet")
    try:
        tags = Layout(call.settings.store_path).tags()
    except FactoryError:
        return []
    return [name for name in tags if name.startswith(incomplete)]


@store.command("rm")
@click.argument("names", metavar="IMAGE...", nargs=-1, required=True, shell_complete=complete_images)
@click.pass_obj
def store_rm(call: Call, names: tuple[str, ...]) -> None:
    """Remove images by the names `store list` shows; `store gc` then frees what only they needed."""
    import difflib

    from imagefactory.oci.layout import Layout

    layout = Layout(call.settings.store_path)
    tags = layout.tags()
    for name in names:
        if name not in tags:
            near = difflib.get_close_matches(name, tags, n=1)
            hint = f"did you mean {near[0]}?" if near else "imagefactory store list"
            raise NothingSelectedError(f"no image '{name}' in {layout.path}", hint=hint)
    for name in names:
        layout.untag(name)
        say(f"removed {name}")


@store.command("gc")
@click.option("--cache", is_flag=True, help="Also empty the cache of what no lock here names.")
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
@json_option
@click.pass_obj
def store_gc(call: Call, cache: bool, dry_run: bool, as_json: bool) -> None:
    """Remove blobs, unpacked layers and leftovers that no tag needs. Waits for running builds."""
    from imagefactory.oci.layout import Layout
    from imagefactory.workflow import collect_cache

    # The recipes are read first: without them nobody knows what in the cache is needed.
    factory = call.factory if cache else None
    layout, progress = Layout(call.settings.store_path), call.progress
    done = layout.collect(progress, dry_run=dry_run)
    freed = collect_cache(factory, progress, dry_run=dry_run) if factory else 0
    if as_json:
        return say_json("collected", {**dataclasses.asdict(done), "cache_bytes": freed, "dry_run": dry_run})
    verb = "would free" if dry_run else "freed"
    say(f"{verb} {format_bytes(done.bytes)}: {done.blobs} blobs, {done.unpacked} unpacked layers")
    if cache:
        say(f"{verb} {format_bytes(freed)} of the cache")
    return None


@cli.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine has and lacks for building, and the command that mends it."""
    from imagefactory.doctor import can_build, examine

    findings = examine(ctx.obj.settings, environ=os.environ)
    good = can_build(findings)
    if as_json:
        rows = [{**dataclasses.asdict(finding), "state": finding.state.value} for finding in findings]
        say_json("doctor", {"can_build": good, "findings": rows})
    else:
        for finding in findings:
            say(f"{finding.state.value:8}  {finding.name}: {finding.detail}")
            if finding.remedy:
                say(f"          mend it: {finding.remedy}")
    ctx.exit(EXIT_OK if good else EXIT_TOOL)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script: eval "$(imagefactory completion bash)" in ~/.bashrc."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    say(kind(cli, {}, "imagefactory", "_IMAGEFACTORY_COMPLETE").source())


# --- failures ------------------------------------------------------------------------------------


class Failures:
    """Failures of single targets: siblings go on, the exit code is the earliest failed stage's."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, FactoryError]] = []
        self._current = ""

    def of(self, name: str) -> Failures:
        self._current = name
        return self

    def add(self, error: FactoryError) -> None:
        self.errors.append((self._current, error))
        complain(error)

    def __enter__(self) -> Failures:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, OSError | EOFError):
            error = explain(error)
        if not isinstance(error, FactoryError):
            return False
        self.errors.append((self._current, error))
        complain(error, "" if self._current in error.message else f"{self._current}: ")
        return True

    def as_json(self) -> list[dict[str, object]]:
        return [
            {"target": name, "exit_code": e.exit_code, "message": e.message, "hint": e.hint}
            for name, e in self.errors
        ]


class collecting:
    """Exits with the earliest failed stage's code once every target has had its turn."""

    def __enter__(self) -> Failures:
        self.failures = Failures()
        return self.failures

    def __exit__(self, kind: type[BaseException] | None, _: object, __: object) -> None:
        if kind is None and self.failures.errors:
            raise click.exceptions.Exit(min(error.exit_code for _, error in self.failures.errors))


def explain(error: OSError | EOFError) -> FactoryError:
    """The net below the adapters: what the operating system refused, in a person's words."""
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    what = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return BuildError(f"{where}{what}", hint="look at the disk and the rights there, and run it again")


def main(argv: Sequence[str] | None = None) -> None:
    """The one error boundary."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = cli.main(args=arguments, prog_name="imagefactory", standalone_mode=False)
    except FactoryError as error:
        code = _end(error, arguments)
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort as error:
        if isinstance(error.__context__, EOFError):
            code = _end(explain(error.__context__), arguments)
        else:
            code = _interrupted()
    except KeyboardInterrupt:
        code = _interrupted()
    except OSError as error:
        code = _end(explain(error), arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in BUILD_MODULES:
            raise
        missing = ToolError(f"{error.name} is not installed", hint="pip install 'imagefactory[build]'")
        code = _end(missing, arguments)
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _interrupted() -> int:
    _write(2, "interrupted: run the same command again to go on")
    return EXIT_INTERRUPTED


def _end(error: FactoryError, arguments: Sequence[str]) -> int:
    """Says an error that ended the whole call: on stderr, and as JSON where that was asked for."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in own:
        row = {"exit_code": error.exit_code, "message": error.message, "hint": error.hint}
        say_json("error", {"errors": [row]})
    complain(error)
    return error.exit_code
