"""The commands list, show, init, `recipe new` and `recipe add-version`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.output import (
    CommandContext,
    ErrorRow,
    ImageRow,
    PackageRow,
    TargetRow,
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
    reject_conflict,
    target_json,
    targets_argument,
    terminal_width,
)
from imagefactory.errors import (
    NothingSelectedError,
    OutdatedPackageRow,
    UsageError,
    os_problem,
    without_logins,
)

if TYPE_CHECKING:
    from imagefactory.actions.lock import LockResult
    from imagefactory.recipes.edit import RecipeDraft


class ListedTargetRow(TargetRow):
    lock: str
    """`ok`, or why the lock cannot be used."""
    note: str
    """Packages of the same framework that the recipe omits; empty for none."""
    built: bool
    pushed: bool
    verified: Sequence[str]
    """The capabilities on which the image is verified."""


class ListDocument(TypedDict):
    """The targets of a project."""

    format: Literal["imagefactory.list/1"]
    targets: list[ListedTargetRow]
    errors: list[ErrorRow]


class UnsolvableRow(TypedDict):
    reason: str
    hint: str
    tree: str


class LockedImageRow(TypedDict):
    """The image that the layer lock pins."""

    digest: str
    manifest: str


class ShowDocument(TargetRow):
    """A target: its requirements, its lock and its image."""

    format: Literal["imagefactory.show/1"]
    lock: str
    """`ok`, or why the lock cannot be used."""
    unsolvable: UnsolvableRow | None
    lock_note: str
    """The note that `lock --note` wrote."""
    outdated: list[OutdatedPackageRow]
    note: str
    """Packages of the same framework that the recipe omits; empty for none."""
    packages: list[PackageRow]
    image: ImageRow | None
    """The image in the store."""
    locked_image: LockedImageRow | None


@click.command("list", cls=Command)
@targets_argument(required=False)
@json_option
@click.pass_obj
def list_targets(call: CommandContext, names: tuple[str, ...], as_json: bool) -> None:
    """List targets: which are locked, built, pushed and verified.

    \b
    imagefactory list
    imagefactory list 'pytorch-*'

    Outside a project it lists the images of the catalog that you joined.
    """
    from imagefactory.actions.locked import lock_state
    from imagefactory.model import ImageProgress
    from imagefactory.project import uses_catalog
    from imagefactory.recipes.edit import omitted_companions
    from imagefactory.views.images import format_targets

    if uses_catalog(call.settings):
        return _list_cataloged(call, names, as_json=as_json)
    factory = call.factory
    selection = choose_targets(factory, names)
    for line in filter(None, map(omitted_companions, selection)):
        call.progress.note(line)
    states = {target.name: lock_state(factory, target) for target in selection}
    marks = dict.fromkeys((target.name for target in selection), ImageProgress())
    if factory.layout.tags():  # an empty project needs no slow imports
        from imagefactory.actions.verdicts import find_marks

        marks = find_marks(factory, selection, datetime.now(UTC))
    with exit_with_first_failure(factory, names) as failures:
        if as_json:
            listed = [
                ListedTargetRow(
                    **target_json(t),
                    lock=states[t.name],
                    note=omitted_companions(t),
                    built=marks[t.name].built,
                    pushed=marks[t.name].pushed,
                    verified=marks[t.name].verified,
                )
                for t in selection
            ]
            return print_json(
                ListDocument(format="imagefactory.list/1", targets=listed, errors=failures.as_json())
            )
        print_result(
            format_targets([(t, states[t.name], marks[t.name]) for t in selection], terminal_width())
        )
    return (
        print_next_command("show", selection[0].name)
        if selection
        else print_next_command("recipe", "new", "pytorch", "--framework", "torch")
    )


def _list_cataloged(call: CommandContext, names: tuple[str, ...], *, as_json: bool) -> None:
    from imagefactory.actions.centers import read_center_images
    from imagefactory.views.catalog import center_images_json, format_center_images

    shelves = read_center_images(call.settings, os.environ, names, datetime.now(UTC))
    print_catalog_notes(shelves[0].notes)
    if as_json:
        return print_json(center_images_json(shelves))
    return print_result(format_center_images(shelves, terminal_width()))


def _show_cataloged(call: CommandContext, name: str, *, as_json: bool) -> None:
    from imagefactory.actions.centers import read_offer
    from imagefactory.views.catalog import center_images_json, format_offer

    shelf = read_offer(call.settings, os.environ, name, datetime.now(UTC))
    print_catalog_notes(shelf.notes)
    if as_json:
        return print_json(center_images_json((shelf,)))
    return print_result(format_offer(shelf, terminal_width()))


@click.command(cls=Command)
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@json_option
@click.pass_obj
def show(call: CommandContext, name: str, as_json: bool) -> None:
    """Show a target: its requirements, its lock and its image.

    \b
    imagefactory show pytorch-2.3-cu121

    Outside a project it shows an image of the catalog that you joined, with its status on each GPU.
    """
    from imagefactory.actions.definition import promised_image
    from imagefactory.actions.images import stored_image
    from imagefactory.actions.locked import (
        lock_state,
        outdated_packages_of,
        read_target_lock,
        read_unsolvable_reason,
    )
    from imagefactory.model import Outcome
    from imagefactory.project import uses_catalog
    from imagefactory.recipes.edit import omitted_companions
    from imagefactory.views.images import TargetState, format_target

    if uses_catalog(call.settings):
        return _show_cataloged(call, name, as_json=as_json)
    factory = call.factory
    target = factory.select_single(name)
    lock, image = read_target_lock(factory, target), stored_image(factory, target)
    state = lock_state(factory, target)
    reason = read_unsolvable_reason(factory, target) if state == Outcome.UNSOLVABLE else None
    behind, lacking = outdated_packages_of(factory, lock) if lock else (), omitted_companions(target)
    publishers = dict(lock.publishers) if lock else {}
    promised = promised_image(factory, target) if state == "ok" else None
    if not as_json:
        now = TargetState(
            lock=lock,
            state=state,
            why=reason,
            image=image,
            promised=promised.digest if promised else "",
            behind=behind,
            left_out=lacking,
        )
        print_result(format_target(target, now, terminal_width()))
        if reason is None and state == "ok" and image is not None and not target.gpu:
            return print_next_command("run", target.name, "--", "python")
        doing = "lock" if state != "ok" else "build" if image is None else "verify"
        return print_next_command(doing, target.name) if reason is None else None
    unsolvable = UnsolvableRow(reason=reason.reason, hint=reason.hint, tree=reason.tree) if reason else None
    locked = LockedImageRow(digest=promised.digest, manifest=promised.manifest) if promised else None
    return print_json(
        ShowDocument(
            format="imagefactory.show/1",
            **target_json(target),
            lock=state,
            unsolvable=unsolvable,
            lock_note=lock.note if lock else "",
            outdated=[package.as_json() for package in behind],
            note=lacking,
            packages=[
                package_json(package, publishers.get(package.name, ""))
                for package in (lock.packages if lock else ())
            ],
            image=image_json(image) if image else None,
            locked_image=locked,
        )
    )


@click.command(cls=Command)
@click.argument("family")
@click.option("--framework", default="", metavar="NAME", help="The package of the framework, such as torch.")
@click.option("--source", type=click.Choice(("pypi", "conda")), help="Where packages come from.")
@click.option(
    "--extends",
    default="",
    metavar="TARGET",
    shell_complete=complete_targets,
    help="Add packages to TARGET, whose packages stay as locked. A bundled family is copied first.",
)
@click.option("--dry-run", is_flag=True, help="Print the recipe instead of writing it.")
@json_option
@click.pass_obj
def new(
    call: CommandContext,
    family: str,
    framework: str,
    source: str | None,
    extends: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a new recipe to start from.

    \b
    imagefactory recipe new mylab --framework torch
    imagefactory recipe new mylab --extends pytorch-2.3-cu121

    It writes recipes/FAMILY.yaml. To start from a requirements.txt or another file, use `imagefactory
    recipe import`.
    """
    from imagefactory.recipes.bases import all_bases
    from imagefactory.recipes.edit import check_draft, check_name, scaffold, scaffold_on
    from imagefactory.recipes.read import read_bases, read_each
    from imagefactory.settings.load import SHIPPED

    path = new_recipe_path(call, family, "recipe new", dry_run=dry_run)
    for option, text in (("--framework", framework), ("--source", source)):
        reject_conflict(
            text and extends, f"{option} does not apply here", f"remove it: it comes from {extends}"
        )
    directory = call.settings.root_path / "recipes"
    with copied_family(call, extends, dry_run=dry_run):
        if extends:
            check_name(family, "family")
            draft = scaffold_on(family, call.factory.select_single(extends))
        else:
            bundled, bases = read_each(SHIPPED / "recipes")[0], read_bases(directory)
            draft = scaffold(family, bases, bundled, framework=framework, source=source or "pypi")
        for line in draft.notes:
            call.progress.note(f"note: {line}")
        if dry_run and not as_json:
            print_result(draft.text.rstrip("\n"))
        if extends:
            others = [recipe for recipe in read_each(directory)[0] if recipe.family != family]
            check_draft(draft.text, family, others, all_bases(read_bases(directory), others))
        value = recipe_json(family, "" if dry_run else str(path), draft)
        if dry_run:
            return print_json(value) if as_json else None
        write_recipe(path, value, as_json=as_json)
    return print_next_command("lock", family)


def new_recipe_path(call: CommandContext, family: str, command: str, *, dry_run: bool) -> Path:
    """Return the file of a new recipe. Raises UsageError if it exists, or if this is not a project."""
    from imagefactory.project import recipes_directory, require_own_project

    if not dry_run:
        require_own_project(call.settings, command)
    path = recipes_directory(call.settings) / f"{family}.yaml"
    if path.exists() and not dry_run:
        raise _recipe_exists(path)
    return path


def _recipe_exists(path: Path) -> UsageError:
    return UsageError("recipe-exists", f"{path} already exists", hint="edit it, or choose another family")


class RecipeChoiceRow(TypedDict):
    framework: str
    version: str
    cuda: str
    python: str
    reasons: list[str]


class RecipeDocument(TypedDict):
    """The recipe that `recipe new` or `recipe import` wrote."""

    format: Literal["imagefactory.recipe/1"]
    family: str
    path: str
    """The file; empty if none was written."""
    recipe: str
    choice: RecipeChoiceRow | None
    """The image that an import chose."""
    notes: list[str]
    frozen: bool
    """Whether the packages are the files of the imported lock. Otherwise its versions are bounds."""
    skipped: list[str]
    """The parts of the imported file that a recipe cannot express."""
    unsolved: str
    """Why the requirements have no solution; empty if they have one, or were not solved."""
    unbuilt: list[str]
    """The packages that have no wheel."""
    errors: list[ErrorRow]


class RecipeAddVersionDocument(TypedDict):
    """The row that was added to a recipe, and its targets."""

    format: Literal["imagefactory.recipe-add-version/1"]
    path: str
    row: str
    notes: list[str]
    targets: list[str]


class InitDocument(TypedDict):
    """The project that was created."""

    format: Literal["imagefactory.init/1"]
    root: str
    families: list[str]
    written: list[str]
    next: str
    """The next command."""


def recipe_json(family: str, path: str, draft: RecipeDraft, reason: Sequence[str] = ()) -> RecipeDocument:
    """Return a new recipe as JSON. `reason` are the reasons for the choices of an import."""
    choice = draft.choice
    return RecipeDocument(
        format="imagefactory.recipe/1",
        family=family,
        path=path,
        recipe=draft.text,
        choice=RecipeChoiceRow(
            framework=choice.framework,
            version=choice.version,
            cuda=choice.cuda,
            python=choice.python,
            reasons=list(reason),
        )
        if choice
        else None,
        notes=list(draft.notes),
        frozen=False,
        skipped=list(draft.lost),
        unsolved="",
        unbuilt=[],
        errors=[],
    )


def write_recipe(path: Path, value: RecipeDocument, *, as_json: bool) -> None:
    """Write a new recipe and print its path, or its JSON. Raises UsageError."""
    from imagefactory.fs import create_bytes

    try:
        if not create_bytes(path, value["recipe"].encode()):
            raise _recipe_exists(path)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    if as_json:
        return print_json(value)
    return print_result(f"wrote {path}: check it before you lock it")


@contextmanager
def copied_family(call: CommandContext, on: str, *, dry_run: bool) -> Iterator[None]:
    """Copy the family of a bundled target into the project if it is missing. Remove it again after an error.

    Raises UsageError if the files cannot be written.
    """
    from imagefactory.actions.new_project import create_project, find_shipped, remove_written

    shipped = None
    if on and not call.settings.shipped:
        try:
            call.factory.select_single(on)
        except NothingSelectedError:
            shipped = find_shipped(on, call.settings, os.environ)
    if shipped is None:
        yield
        return
    if dry_run:
        root = shlex.quote(str(call.settings.root_path))
        raise UsageError(
            "family-not-in-project",
            f"{shipped.name} comes with imagefactory, but this project does not have it",
            hint=f"copy its family first: imagefactory init {root} --with {shipped.family}",
        )
    copied = create_project(call.settings.root_path, (shipped.family,), call.settings, os.environ)
    try:
        yield
    except BaseException:
        remove_written(call.settings.root_path, copied)
        raise
    families = " and ".join(copied.families)
    call.progress.note(
        f"note: copied {families} into this project, with its locks, because {shipped.name} belongs to it"
    )


# --- imagefactory recipe add-version


@click.command(cls=Command)
@click.argument("family")
@click.argument("version")
@click.option(
    "--cuda", default="", metavar="VERSION", help="The CUDA version, if the version supports more than one."
)
@click.option("--dry-run", is_flag=True, help="Print the row instead of writing it.")
@json_option
@click.pass_obj
def add_version(
    call: CommandContext, family: str, version: str, cuda: str, dry_run: bool, as_json: bool
) -> None:
    """Add a version to a family's recipe, lock it and render it.

    \b
    imagefactory recipe add-version pytorch 2.9

    CUDA version, extras and capabilities come from the framework tables, and the version limits from the
    nearest row of the recipe.
    """
    from imagefactory.actions.new_project import make_addition, plan_addition
    from imagefactory.project import require_own_project
    from imagefactory.recipes.edit import check_name
    from imagefactory.views.images import format_relock

    for value, rule in ((family, "family"), (version, "version"), (cuda, "cuda")):
        if value:
            check_name(value, rule)
    if not dry_run:
        require_own_project(call.settings, "recipe add-version")
    factory = call.factory
    added = plan_addition(factory, family, version, cuda)
    for line in added.addition.notes:
        call.progress.note(f"note: {line}")
    print_result(added.addition.row, unless=as_json)
    names = []
    if not dry_run:

        def tell(relock: LockResult) -> None:
            print_result(format_relock(relock), unless=as_json)

        names = list(make_addition(factory, added, call.progress, tell))
    if as_json:
        print_json(
            RecipeAddVersionDocument(
                format="imagefactory.recipe-add-version/1",
                path=str(added.path),
                row=added.addition.row,
                notes=list(added.addition.notes),
                targets=names,
            )
        )
    for name in names:
        print_next_command("build", name)


# --- imagefactory init


@click.command(cls=Command)
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=None)
@click.option(
    "--with",
    "families",
    default="",
    metavar="FAMILY,...",
    help="Copy the recipes and locks of these bundled families.",
)
@click.option("--github", is_flag=True, help="Write a nightly build for GitHub Actions, with a README.")
@click.option("--gitlab", is_flag=True, help="Write a nightly build for GitLab CI, with a README.")
@json_option
@click.pass_obj
def init(
    call: CommandContext, folder: Path | None, families: str, github: bool, gitlab: bool, as_json: bool
) -> None:
    """Create a project in DIR (default: here).

    \b
    imagefactory init lab                      an empty project with locked bases
    imagefactory init lab --with pytorch,jax   add these families and their locks
    imagefactory init lab --github             add a nightly build for GitHub

    Existing files are never overwritten.
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
        f"imagefactory build {tree.target}"
        if tree.target
        else "imagefactory recipe new pytorch --framework torch"
    )
    if root.absolute() != Path.cwd():
        after = f"cd {shlex.quote(str(root))} && {after}"
    directory = str(root.absolute())
    if as_json:
        return print_json(
            InitDocument(
                format="imagefactory.init/1",
                root=directory,
                families=list(tree.families),
                written=list(tree.written),
                next=after,
            )
        )
    summary = f"{len(tree.written)} files written" if tree.written else "nothing to write: all of it is there"
    print_result(f"{directory}: {summary}")
    print_result(f"  families  {', '.join(tree.families) or 'none yet'}")
    for name in nights:
        if name.endswith("README.md"):
            print_result(f"  nightly   {root / name} lists the variables, secrets and runners that it needs")
    print_result(f"next: {after}")
    return None
