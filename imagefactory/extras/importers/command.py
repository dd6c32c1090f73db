"""The command `recipe import`, which writes a recipe from a file of another tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.output import (
    CommandContext,
    complete_targets,
    exit_with_first_failure,
    json_option,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
)
from imagefactory.cli.recipes import copied_family, new_recipe_path, recipe_json, write_recipe
from imagefactory.errors import UsageError

if TYPE_CHECKING:
    from imagefactory.extras.importers.new import RecipeRequest


@click.command("import", cls=Command)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@section("Recipe")
@click.option(
    "--family", default="", metavar="NAME", help="Name the family.  [default: the name of FILE's directory]"
)
@click.option(
    "--extends",
    default="",
    metavar="TARGET",
    shell_complete=complete_targets,
    help="Add the packages to TARGET, whose packages stay as locked. A bundled family is copied first.",
)
@click.option(
    "--framework",
    "package",
    default="",
    metavar="NAME[=VERSION]",
    help="The package of the framework, such as torch.",
)
@click.option("--cuda", default="", metavar="VERSION", help="The CUDA version, if FILE does not name it.")
@click.option(
    "--source",
    type=click.Choice(("pypi", "conda")),
    help="Where packages come from.  [default: what FILE says, or pypi]",
)
@click.option(
    "--frozen",
    is_flag=True,
    help="Keep the very files of a lock, by their hashes. Nothing is solved.  [default: versions are bounds]",
)
@section("Parts of FILE")
@click.option(
    "--extra",
    "extras",
    multiple=True,
    metavar="NAME",
    help="Also import this extra of a pyproject.toml, setup.py or lock (repeatable).",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="NAME",
    help="Also import this group of a pyproject.toml or lock, or category of conda-lock (repeatable).",
)
@click.option("--environment", default="", metavar="NAME", help="Import this pixi environment.")
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
    help="Set an ARG of a Dockerfile, or {{ NAME }} of an Apptainer definition (repeatable).",
)
@section("Output")
@click.option("--partial", is_flag=True, help="Skip the parts of FILE that a recipe cannot express.")
@click.option("--dry-run", is_flag=True, help="Print the recipe instead of writing it.")
@json_option
@click.pass_obj
def import_recipe(
    call: CommandContext,
    /,
    *,
    family: str,
    file: Path,
    package: str,
    cuda: str,
    source: str | None,
    context: Path | None,
    build_args: tuple[str, ...],
    environment: str,
    extras: tuple[str, ...],
    groups: tuple[str, ...],
    extends: str,
    frozen: bool,
    partial: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a recipe from a requirements.txt or another file.

    \b
    imagefactory recipe import requirements.txt --extends pytorch-2.3-cu121
    imagefactory recipe import environment.yml --family mylab
    imagefactory recipe import pyproject.toml --extra train
    imagefactory recipe import uv.lock --frozen

    FILE is a requirements.txt, environment.yml, pyproject.toml, setup.py, pixi.toml, pylock.toml,
    Dockerfile, Apptainer definition, list of conda URLs (@EXPLICIT), or a lock of conda-lock, pixi, uv or
    Poetry.

    It writes recipes/FAMILY.yaml. If a recipe cannot express a part of FILE, the command stops; --partial
    skips that part.
    """
    from imagefactory.extras.importers.new import IndexSolver, RecipeRequest, plan_recipe
    from imagefactory.recipes.edit import check_name

    family = family or _default_family(file.absolute().parent.name)
    path = new_recipe_path(call, family, "recipe import", dry_run=dry_run)
    framework, _, version = package.partition("=")
    for option, text in (("--framework", framework), ("--cuda", cuda), ("--source", source)):
        reject_conflict(
            text and extends, f"{option} does not apply here", f"remove it: it comes from {extends}"
        )
    check_name(family, "family")
    if frozen:
        for option, chosen in (
            ("--extends", extends),
            ("--source", source),
            ("--context", context),
            ("--build-arg", build_args),
        ):
            reject_conflict(
                chosen, f"{option} does not apply here", "remove it: --frozen keeps the files of a lock"
            )
    if cuda == "none" and not frozen:
        raise UsageError(
            "option-invalid",
            "--cuda none is not supported: recipe new writes recipes for GPUs",
            hint="omit --cuda, then add a row with cuda: [none] to the new recipe",
        )
    version = version.lstrip("=")
    for text, rule in ((framework, "framework"), (version, "version"), (cuda, "cuda")):
        if text:
            check_name(text, rule)
    request = RecipeRequest(
        family=family,
        file=file,
        on=extends,
        framework=framework,
        version=version,
        cuda=cuda,
        source=source or "",
        environment=environment,
        extras=extras,
        groups=groups,
        context=context,
        build_args=_build_args(build_args),
    )
    if frozen:
        return _import_frozen(call, request, path, partial=partial, dry_run=dry_run, as_json=as_json)
    with copied_family(call, extends, dry_run=dry_run):
        factory = call.factory
        plan = plan_recipe(
            factory, request, IndexSolver(factory=factory, progress=call.progress), call.progress
        )
        draft = plan.draft
        for line in draft.notes:
            call.progress.note(f"note: {line}")
        stopped = bool(draft.lost) and not partial
        for line in () if stopped else draft.lost:
            call.progress.note(f"lost: {line}")
        if dry_run and not as_json:
            print_result(draft.text.rstrip("\n"))
        plan.check()
        value = recipe_json(family, "" if dry_run or stopped else str(path), draft, plan.why)
        value["unsolved"], value["unbuilt"] = plan.unsolved, list(plan.without_wheel)
        if not dry_run and not stopped:
            write_recipe(path, value, as_json=as_json)
        else:
            with exit_with_first_failure() as failures:
                if stopped:
                    failures.add(_incomplete(file.name, draft.lost))
                if as_json:
                    print_json(value | {"errors": failures.as_json()})
            return None
    return print_next_command("lock", family, *(("--build",) if plan.without_wheel else ()))


def _default_family(directory: str) -> str:
    """Return a family's name from that of the project's directory. Raises UsageError if it has no letter."""
    words = re.sub(r"[^a-z0-9]+", "-", directory.lower()).lstrip("-0123456789")
    family = words[:40].rstrip("-")
    if not family:
        raise UsageError(
            "option-invalid",
            f"no name for the recipe follows from the directory {directory[:80]!a}",
            hint="choose one: --family NAME",
        )
    return family


def _import_frozen(
    call: CommandContext,
    request: RecipeRequest,
    path: Path,
    *,
    partial: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the recipe of a lock whose very files are kept. A lock outside of the project is copied."""
    from imagefactory.extras.importers.frozen import copy_lock, plan_frozen

    draft, inside = plan_frozen(call.factory, request, partial=partial)
    stopped = bool(draft.lost) and not partial
    for label, lines in (("note", draft.notes), ("lost", () if stopped else draft.lost)):
        for line in lines:
            call.progress.note(f"{label}: {line}")
    if dry_run and not as_json:
        print_result(draft.text.rstrip("\n"))
    value = recipe_json(request.family, "" if dry_run or stopped else str(path), draft)
    value["frozen"] = True
    if dry_run or stopped:
        with exit_with_first_failure() as failures:
            if stopped:
                failures.add(_incomplete(request.file.name, draft.lost))
            if as_json:
                print_json(value | {"errors": failures.as_json()})
        return None
    if copy_lock(call.factory, request.file, inside):
        call.progress.note(f"note: {request.file} was copied to {inside}, because it is not in the project")
    write_recipe(path, value, as_json=as_json)
    return print_next_command("lock", request.family)


def _build_args(texts: Sequence[str]) -> dict[str, str]:
    """Return the values by name.

    If a name is repeated, the last value is used, as in Docker. Raises UsageError.
    """
    values = dict(text.partition("=")[::2] for text in texts)
    for text in texts:
        if not re.fullmatch(r"[A-Za-z_]\w*=[^\x00-\x1f\x7f]*", text, re.ASCII):
            raise UsageError(
                "option-invalid",
                f"--build-arg {text!a} is not NAME=VALUE",
                hint="write, for example, VERSION=2.3.1",
            )
    return values


def _incomplete(file: str, lost: Sequence[str]) -> UsageError:
    lines = "".join(f"\n  {line}" for line in lost)
    return UsageError(
        "import-incomplete",
        f"these lines of {file} cannot become part of a recipe:{lines}",
        hint="make the change in brackets, or pass --partial to skip these lines",
    )
