"""The commands list, show and new."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    CommandContext,
    choose_targets,
    complete_targets,
    exit_with_first_failure,
    image_json,
    json_option,
    package_json,
    print_catalog_notes,
    print_json,
    print_next_command,
    print_result,
    target_json,
    targets_argument,
    terminal_width,
)
from imagefactory.errors import NothingSelectedError, UsageError, os_problem, without_logins

if TYPE_CHECKING:
    from imagefactory.actions.lock import LockResult
    from imagefactory.extras.importers.new import NewRequest, RecipePlan


@click.command("list")
@targets_argument(required=False)
@json_option
@click.pass_obj
def list_targets(call: CommandContext, names: tuple[str, ...], as_json: bool) -> None:
    """List the targets: what is locked, built, pushed and verified.

    Without a factory, the images of the catalogue that you joined: on which GPUs each is verified.
    """
    from imagefactory.actions.locked import lock_state
    from imagefactory.project import uses_catalog
    from imagefactory.recipes.edit import omitted_companions
    from imagefactory.trust.verdict import ImageProgress
    from imagefactory.views.images import format_targets

    if uses_catalog(call.settings):
        return _list_catalogued(call, names, as_json=as_json)
    factory = call.sound_factory
    chosen = choose_targets(factory, names)
    for line in filter(None, map(omitted_companions, chosen)):
        call.progress.note(line)
    states = {target.name: lock_state(factory, target) for target in chosen}
    marks = dict.fromkeys((target.name for target in chosen), ImageProgress())
    if factory.layout.tags():  # a new factory answers at once: what judges images is slow to load
        from imagefactory.actions.images import find_marks

        marks = find_marks(factory, chosen, datetime.now(UTC))
    with exit_with_first_failure(factory) as failures:
        if as_json:
            listed = [
                {
                    **target_json(t),
                    "lock": states[t.name],
                    "left_out": omitted_companions(t),
                    **asdict(marks[t.name]),
                }
                for t in chosen
            ]
            print_json("targets", {"targets": listed, "errors": failures.as_json()})
            return None
        print_result(format_targets([(t, states[t.name], marks[t.name]) for t in chosen], terminal_width()))
    return (
        print_next_command("show", chosen[0].name)
        if chosen
        else print_next_command("new", "pytorch", "--framework", "torch")
    )


def _list_catalogued(call: CommandContext, names: tuple[str, ...], *, as_json: bool) -> None:
    from imagefactory.actions.centers import read_center_images
    from imagefactory.views.catalog import center_images_json, format_center_images

    shelves = read_center_images(call.settings, os.environ, names, datetime.now(UTC))
    print_catalog_notes(shelves[0].notes)
    if as_json:
        return print_json("images", center_images_json(shelves))
    return print_result(format_center_images(shelves, terminal_width()))


def _show_catalogued(call: CommandContext, name: str, *, as_json: bool) -> None:
    from imagefactory.actions.centers import read_offer
    from imagefactory.views.catalog import center_images_json, format_offer

    shelf = read_offer(call.settings, os.environ, name, datetime.now(UTC))
    print_catalog_notes(shelf.notes)
    if as_json:
        return print_json("images", center_images_json((shelf,)))
    return print_result(format_offer(shelf, terminal_width()))


@click.command()
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@json_option
@click.pass_obj
def show(call: CommandContext, name: str, as_json: bool) -> None:
    """Show one target: what it asks for, its lock and its image.

    Without a factory, an image of the catalogue that you joined: what is known of it on which GPUs.
    """
    from imagefactory.actions.definition import promised_image
    from imagefactory.actions.images import stored_image
    from imagefactory.actions.lock import outdated_packages_of
    from imagefactory.actions.locked import lock_state, read_target_lock, read_unsolvable_reason
    from imagefactory.model import Outcome
    from imagefactory.project import uses_catalog
    from imagefactory.recipes.edit import omitted_companions
    from imagefactory.recipes.expand import select_single
    from imagefactory.views.images import TargetState, format_target

    if uses_catalog(call.settings):
        return _show_catalogued(call, name, as_json=as_json)
    factory = call.factory
    target = select_single(factory.targets, name)
    lock, image = read_target_lock(factory, target), stored_image(factory, target)
    state = lock_state(factory, target)
    why = read_unsolvable_reason(factory, target) if state == Outcome.UNSOLVABLE else None
    behind, lacking = outdated_packages_of(factory, lock) if lock else (), omitted_companions(target)
    promised = promised_image(factory, target) if state == "ok" else None
    if not as_json:
        now = TargetState(
            lock=lock,
            state=state,
            why=why,
            image=image,
            promised=promised.digest if promised else "",
            behind=behind,
            left_out=lacking,
        )
        print_result(format_target(target, now, terminal_width()))
        if why is None and state == "ok" and image is not None and not target.gpu:
            return print_next_command("run", target.name, "--", "python")
        doing = "lock" if state != "ok" else "build" if image is None else "verify"
        return print_next_command(doing, target.name) if why is None else None
    value = {
        **target_json(target),
        "lock": state,
        "why": {"reason": why.reason, "hint": why.hint, "tree": why.tree} if why else None,
        "note": lock.note if lock else "",
        "behind": [asdict(package) for package in behind],
        "left_out": lacking,
        "packages": [package_json(package) for package in (lock.packages if lock else ())],
        "image": image_json(image) if image else None,
        "layers": {"digest": promised.digest, "manifest": promised.manifest} if promised else None,
    }
    return print_json("target", value)


@click.command()
@click.argument("family")
@click.option(
    "--framework", default="", metavar="NAME[=VERSION]", help="The framework's package, e.g. torch."
)
@click.option("--cuda", default="", metavar="VERSION", help="The CUDA version, where FILE does not say it.")
@click.option(
    "--source",
    "kind",
    type=click.Choice(("pypi", "conda")),
    help="Where its packages come from.  [default: what FILE says, or pypi]",
)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take over an environment.yml, requirements.txt, pyproject.toml, setup.py, pixi.toml, "
    "Dockerfile, apptainer's definition, list of addresses (@EXPLICIT), a pylock.toml, or a lock of "
    "conda-lock, pixi, uv or Poetry.",
)
@click.option(
    "--context",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The build context of a Dockerfile.  [default: the root of its git work tree]",
)
@click.option(
    "--build-arg",
    "build_args",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an ARG of a Dockerfile, or {{ NAME }} of apptainer's definition (repeatable).",
)
@click.option("--environment", default="", metavar="NAME", help="The environment of pixi's that is meant.")
@click.option(
    "--extra",
    "extras",
    multiple=True,
    metavar="NAME",
    help="Take an extra of a pyproject.toml, setup.py or lock too (repeatable).",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="NAME",
    help="Take a group of a pyproject.toml or lock too (repeatable).",
)
@click.option(
    "--on",
    default="",
    metavar="TARGET",
    shell_complete=complete_targets,
    help="Add packages to TARGET, all of it as locked. A shipped family is copied first.",
)
@click.option("--partial", is_flag=True, help="Write the recipe without what it cannot keep of FILE.")
@click.option("--print", "only_print", is_flag=True, help="Print the recipe instead of writing it.")
@json_option
@click.pass_obj
def new(
    call: CommandContext,
    /,
    *,
    family: str,
    framework: str,
    cuda: str,
    kind: str | None,
    source: Path | None,
    context: Path | None,
    build_args: tuple[str, ...],
    environment: str,
    extras: tuple[str, ...],
    groups: tuple[str, ...],
    on: str,
    partial: bool,
    only_print: bool,
    as_json: bool,
) -> None:
    """Write a recipe: a new one, or from an environment that exists.

    It becomes recipes/FAMILY.yaml. The solver chooses what FILE leaves open. What a recipe cannot keep of
    FILE stops the command, unless --partial is given."""
    from imagefactory.extras.importers.new import NewRequest
    from imagefactory.fs import create_bytes
    from imagefactory.project import recipes_directory, require_own_project

    if not only_print:
        require_own_project(call.settings, "new")
    path = recipes_directory(call.settings) / f"{family}.yaml"
    exists = UsageError("recipe-exists", f"{path} already exists", hint="edit it, or choose another family")
    if path.exists() and not only_print:
        raise exists
    if on and not call.settings.shipped:
        _copy_family(call, on, only_print=only_print)
    name, _, version = framework.partition("=")
    request = NewRequest(
        family=family,
        file=source,
        on=on,
        framework=name,
        version=version,
        cuda=cuda,
        source=kind or "",
        environment=environment,
        extras=extras,
        groups=groups,
        context=context,
    )
    plan = _plan(call, request, build_args, partial=partial)
    drafted = plan.draft
    for line in drafted.notes:
        call.progress.note(f"note: {line}")
    stopped = bool(drafted.lost) and not partial
    for line in () if stopped else drafted.lost:
        call.progress.note(f"lost: {line}")
    if only_print and not as_json:
        print_result(drafted.text.rstrip("\n"))
    plan.check()
    value = {
        "family": family,
        "path": "" if only_print or stopped else str(path),
        "recipe": drafted.text,
        "chosen": {**asdict(drafted.choice), "why": list(plan.why)} if drafted.choice else None,
        "notes": list(drafted.notes),
        "lost": list(drafted.lost),
        "unsolved": plan.unsolved,
        "without_wheel": list(plan.without_wheel),
    }
    if only_print or stopped:
        with exit_with_first_failure() as failures:
            if stopped:
                failures.add(_print_losses(source.name if source else family, drafted.lost))
            if as_json:
                print_json("recipe", {**value, "errors": failures.as_json()})
        return None
    try:
        if not create_bytes(path, drafted.text.encode()):
            raise exists
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    if as_json:
        return print_json("recipe", {**value, "errors": []})
    print_result(f"wrote {path}: look it over before it is locked")
    return print_next_command("lock", family, *(("--build",) if plan.without_wheel else ()))


def _build_args(texts: Sequence[str]) -> dict[str, str]:
    """Return values by name; the last of one name wins, as in docker. Raises UsageError."""
    values = dict(text.partition("=")[::2] for text in texts)
    for text in texts:
        if not re.fullmatch(r"[A-Za-z_]\w*=[^\x00-\x1f\x7f]*", text, re.ASCII):
            raise UsageError(
                "option-invalid",
                f"--build-arg {text!a} is not NAME=VALUE",
                hint="write, for example, VERSION=2.3.1",
            )
    return values


def _print_losses(file: str, lost: Sequence[str]) -> UsageError:
    lines = "".join(f"\n  {line}" for line in lost)
    return UsageError(
        "import-incomplete",
        f"a recipe cannot contain all of {file}:{lines}",
        hint="change the file as the brackets say, or write the recipe without these: --partial",
    )


def _copy_family(call: CommandContext, on: str, *, only_print: bool) -> None:
    """Copy the family of a shipped target into the project if it is missing.

    Raises UsageError if nothing may be written.
    """
    from imagefactory.actions.new_project import create_project, find_shipped
    from imagefactory.recipes.expand import select_single

    try:
        select_single(call.factory.targets, on)
        return
    except NothingSelectedError:
        shipped = find_shipped(on, call.settings, os.environ)
    if shipped is None:
        return
    if only_print:
        root = shlex.quote(str(call.settings.root_path))
        raise UsageError(
            "family-not-in-project",
            f"{shipped.name} comes with imagefactory, but this project does not have it",
            hint=f"copy its family first: imagefactory init {root} --with {shipped.family}",
        )
    brought = create_project(call.settings.root_path, (shipped.family,), call.settings, os.environ)
    families = " and ".join(brought.families)
    call.progress.note(
        f"note: copied {families} into this project, with its locks, since {shipped.name} is of it"
    )


def _plan(
    call: CommandContext, request: NewRequest, build_args: tuple[str, ...], *, partial: bool
) -> RecipePlan:
    """Return the recipe to write. Only --from and --on need the other recipes. Raises UsageError."""
    from imagefactory.extras.importers.new import IndexSolver, RecipePlan, plan_recipe
    from imagefactory.recipes.edit import check_name, scaffold
    from imagefactory.recipes.read import read_bases

    source, on, framework, version = request.file, request.on, request.framework, request.version
    for option, value, needs in (
        ("--cuda", request.cuda, source and not on),
        ("--framework NAME=VERSION", version, source and not on),
        ("--environment", request.environment, source),
        ("--context", request.context, source),
        ("--build-arg", build_args, source),
        ("--extra", request.extras, source),
        ("--group", request.groups, source),
        ("--partial", partial, source),
        ("--framework", framework, not on),
        ("--source", request.source, not on),
    ):
        if value and not needs:
            inherited = on or option == "--source"
            hint = f"remove it: it comes from {on}" if inherited else "add --from FILE; see --help"
            raise UsageError("option-conflict", f"{option} does not apply here", hint=hint)
    if not source and not on:
        bases = read_bases(call.settings.root_path / "recipes")
        drafted = scaffold(request.family, bases, framework=framework, source=request.source or "pypi")
        return RecipePlan(draft=drafted, check=lambda: None)
    check_name(request.family, "family")
    if request.cuda == "none":
        raise UsageError(
            "option-invalid",
            "--cuda none: new recipes are for GPUs",
            hint="afterwards add a row with cuda: [none]",
        )
    version = version.lstrip("=")
    for value, rule in ((framework, "framework"), (version, "version"), (request.cuda, "cuda")):
        if value:
            check_name(value, rule)
    factory = call.factory
    request = replace(request, version=version, build_args=_build_args(build_args))
    return plan_recipe(factory, request, IndexSolver(factory=factory, progress=call.progress), call.progress)


# --- imagefactory add


@click.command()
@click.argument("family")
@click.argument("version")
@click.option("--cuda", default="", metavar="VERSION", help="Where the version comes with more than one.")
@click.option("--print", "only_print", is_flag=True, help="Print the row instead of writing it.")
@json_option
@click.pass_obj
def add(call: CommandContext, family: str, version: str, cuda: str, only_print: bool, as_json: bool) -> None:
    """Add a version to a family's recipe, lock it and render it.

    Its CUDA, extras, companions and capabilities come from what is known of the framework, its bounds from
    the row nearest to it.
    """
    from imagefactory.actions.new_project import make_addition, plan_addition
    from imagefactory.project import require_own_project
    from imagefactory.recipes.edit import check_name
    from imagefactory.views.images import format_relock

    for value, rule in ((family, "family"), (version, "version"), (cuda, "cuda")):
        if value:
            check_name(value, rule)
    if not only_print:
        require_own_project(call.settings, "add")
    factory = call.sound_factory
    added = plan_addition(factory, family, version, cuda)
    for line in added.addition.notes:
        call.progress.note(f"note: {line}")
    print_result(added.addition.row, unless=as_json)
    names = []
    if not only_print:

        def tell(relock: LockResult) -> None:
            print_result(format_relock(relock), unless=as_json)

        names = list(make_addition(factory, added, call.progress, tell))
    if as_json:
        document = {"path": str(added.path), "row": added.addition.row, "notes": list(added.addition.notes)}
        print_json("added", {**document, "targets": names})
    for name in names:
        print_next_command("build", name)


# --- imagefactory init


@click.command()
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=None)
@click.option(
    "--with",
    "families",
    default="",
    metavar="FAMILY,...",
    help="Take along these families of those that come with imagefactory: recipes and locks.",
)
@click.option("--github", is_flag=True, help="Write the nightly build for GitHub Actions, with a README.")
@click.option("--gitlab", is_flag=True, help="Write the nightly build for GitLab CI, with a README.")
@json_option
@click.pass_obj
def init(
    call: CommandContext, folder: Path | None, families: str, github: bool, gitlab: bool, as_json: bool
) -> None:
    """Make a factory of your own in DIR (default: here). What is there is never overwritten.

    \b
    imagefactory init lab                        an empty one: settings, and bases with their locks
    imagefactory init lab --with pytorch,jax     with the recipes and locks of these families
    imagefactory init lab --github               with its nightly build in GitHub Actions
    """
    from imagefactory.actions.new_project import create_project, nightly_files

    family_names = tuple(dict.fromkeys(name for text in families.split(",") if (name := text.strip())))
    root = folder or call.directory or Path()
    if without_logins(str(root)) != str(root):
        raise UsageError(
            "folder-name-invalid",
            f"{root} contains a password, so it is not a directory",
            hint="pass a directory name: imagefactory init lab",
        )
    services = [name for name, flag in (("github", github), ("gitlab", gitlab)) if flag]
    nights = nightly_files(services, root)
    tree = create_project(root, family_names, call.settings, os.environ, nights)
    after = (
        f"imagefactory build {tree.target}" if tree.target else "imagefactory new pytorch --framework torch"
    )
    if root.absolute() != Path.cwd():
        after = f"cd {shlex.quote(str(root))} && {after}"
    where = str(root.absolute())
    if as_json:
        value = {"root": where, "families": tree.families, "written": tree.written, "next": after}
        return print_json("init", value)
    what = f"{len(tree.written)} files written" if tree.written else "nothing to write: all of it is there"
    print_result(f"{where}: {what}")
    print_result(f"  families  {', '.join(tree.families) or 'none yet'}")
    for name in nights:
        if name.endswith("README.md"):
            print_result(f"  nightly   {root / name} lists the variables, secrets and runners that it needs")
    print_result(f"next: {after}")
    return None
