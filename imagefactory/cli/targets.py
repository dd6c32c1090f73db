"""Commands for targets: list, show, new."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from imagefactory.cli.output import (
    Call,
    choose_targets,
    collecting,
    complete_targets,
    image_json,
    json_option,
    package_json,
    say,
    say_json,
    say_next,
    target_json,
    targets_argument,
    terminal_width,
)
from imagefactory.errors import NothingSelectedError, UsageError

if TYPE_CHECKING:
    from imagefactory.recipes.draft import Draft


@click.command("list")
@targets_argument(required=False)
@json_option
@click.pass_obj
def list_targets(call: Call, names: tuple[str, ...], as_json: bool) -> None:
    """List the targets: what is locked, built, pushed and verified.

    Without a factory, the images of the catalogue that you joined: on which GPUs each is verified.
    """
    from imagefactory.factory import catalogue_answers
    from imagefactory.recipes.companions import left_out
    from imagefactory.report.targets import format_targets
    from imagefactory.stages.locked import lock_state
    from imagefactory.verdicts.model import Marks

    if catalogue_answers(call.settings):
        return _list_catalogued(call, names, as_json=as_json)
    factory = call.sound_factory
    chosen = choose_targets(factory, names)
    for line in filter(None, map(left_out, chosen)):
        call.progress.note(line)
    states = {target.name: lock_state(factory, target) for target in chosen}
    marks = dict.fromkeys((target.name for target in chosen), Marks())
    if factory.layout.tags():  # a new factory answers at once: what judges images is slow to load
        from imagefactory.stages.marks import find_marks

        marks = find_marks(factory, chosen, datetime.now(UTC))
    with collecting(factory) as failures:
        if as_json:
            listed = [
                {
                    **target_json(t),
                    "lock": states[t.name],
                    "left_out": left_out(t),
                    **asdict(marks[t.name]),
                }
                for t in chosen
            ]
            say_json("targets", {"targets": listed, "errors": failures.as_json()})
            return None
        say(format_targets([(t, states[t.name], marks[t.name]) for t in chosen], terminal_width()))
    return say_next("show", chosen[0].name) if chosen else say_next("new", "pytorch", "--framework", "torch")


def _list_catalogued(call: Call, names: tuple[str, ...], *, as_json: bool) -> None:
    from imagefactory.report.catalogued import format_shelf, shelf_json
    from imagefactory.stages.catalogued import read_shelf

    shelf = read_shelf(call.settings, os.environ, names, datetime.now(UTC))
    if as_json:
        return say_json("images", shelf_json(shelf))
    return say(format_shelf(shelf, terminal_width()))


def _show_catalogued(call: Call, name: str, *, as_json: bool) -> None:
    from imagefactory.report.catalogued import format_offer, shelf_json
    from imagefactory.stages.catalogued import read_offer

    shelf = read_offer(call.settings, os.environ, name, datetime.now(UTC))
    if as_json:
        return say_json("images", shelf_json(shelf))
    return say(format_offer(shelf, terminal_width()))


@click.command()
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@json_option
@click.pass_obj
def show(call: Call, name: str, as_json: bool) -> None:
    """Show one target: what it asks for, its lock and its image.

    Without a factory, an image of the catalogue that you joined: what is known of it on which GPUs.
    """
    from imagefactory.factory import catalogue_answers
    from imagefactory.model import Outcome
    from imagefactory.recipes.companions import left_out
    from imagefactory.recipes.expand import select_one
    from imagefactory.report.targets import TargetState, format_target
    from imagefactory.stages.layers import promised_image
    from imagefactory.stages.lock import behind_of
    from imagefactory.stages.locked import lock_state, read_target_lock, read_why
    from imagefactory.stages.stored import stored_image

    if catalogue_answers(call.settings):
        return _show_catalogued(call, name, as_json=as_json)
    factory = call.factory
    target = select_one(factory.targets, name)
    lock, image = read_target_lock(factory, target), stored_image(factory, target)
    state = lock_state(factory, target)
    why = read_why(factory, target) if state == Outcome.UNSOLVABLE else None
    behind, lacking = behind_of(factory, lock) if lock else (), left_out(target)
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
        say(format_target(target, now, terminal_width()))
        if why is None and state == "ok" and image is not None and not target.gpu:
            return say_next("run", target.name, "--", "python")
        doing = "lock" if state != "ok" else "build" if image is None else "verify"
        return say_next(doing, target.name) if why is None else None
    value = {
        **target_json(target),
        "lock": state,
        "why": {"reason": why.reason, "hint": why.hint, "tree": why.tree} if why else None,
        "note": lock.note if lock else "",
        "behind": [asdict(one) for one in behind],
        "left_out": lacking,
        "packages": [package_json(package) for package in (lock.packages if lock else ())],
        "image": image_json(image) if image else None,
        "layers": {"digest": promised.digest, "manifest": promised.manifest} if promised else None,
    }
    return say_json("target", value)


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
    help="Take over an environment.yml, requirements.txt, pixi.toml, pyproject.toml, Dockerfile, apptainer's "
    "definition, list of addresses (@EXPLICIT), or a lock of conda-lock, pixi, uv or Poetry.",
)
@click.option("--environment", default="", metavar="NAME", help="The environment of pixi's that is meant.")
@click.option(
    "--on",
    default="",
    metavar="TARGET",
    shell_complete=complete_targets,
    help="Add packages to TARGET, all of it as locked. A shipped family is copied first.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the recipe instead of writing it.")
@json_option
@click.pass_obj
def new(call: Call, /, family: str, only_print: bool, as_json: bool, **asked: Any) -> None:
    """Write a recipe: a new one, or from an environment that exists.

    It becomes recipes/FAMILY.yaml."""
    from imagefactory.factory import recipes_folder, require_own
    from imagefactory.files import create_bytes

    if not only_print:
        require_own(call.settings, "new")
    path = recipes_folder(call.settings) / f"{family}.yaml"
    exists = UsageError(f"{path} exists", hint="edit it, or choose another family")
    if path.exists() and not only_print:
        raise exists
    if asked["on"] and not call.settings.shipped:
        _bring_family(call, asked["on"], only_print=only_print)
    drafted, check = _draft(call, family, asked)
    _say_notes(call, drafted.told)
    if only_print and not as_json:
        say(drafted.text.rstrip("\n"))
    check()
    written = "" if only_print else str(path)
    told = {"family": family, "path": written, "recipe": drafted.text, "notes": list(drafted.told)}
    if only_print:
        return say_json("recipe", told) if as_json else None
    try:
        if not create_bytes(path, drafted.text.encode()):
            raise exists
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="mend its rights") from error
    if as_json:
        return say_json("recipe", told)
    say(f"wrote {path}: look it over before it is locked")
    return say_next("lock", family)


def _bring_family(call: Call, on: str, *, only_print: bool) -> None:
    """Copy the family of a shipped target into the project, where the project does not have it.

    Raises UsageError where nothing may be written.
    """
    from imagefactory.recipes.expand import select_one
    from imagefactory.stages.init import find_shipped, make_factory

    try:
        select_one(call.factory.targets, on)
        return
    except NothingSelectedError:
        shipped = find_shipped(on, call.settings, os.environ)
    if shipped is None:
        return
    if only_print:
        root = shlex.quote(str(call.settings.root_path))
        raise UsageError(
            f"{shipped.name} comes with imagefactory, but this project does not have it",
            hint=f"copy its family first: imagefactory init {root} --with {shipped.family}",
        )
    brought = make_factory(call.settings.root_path, (shipped.family,), call.settings, os.environ)
    families = " and ".join(brought.families)
    call.progress.note(
        f"note: copied {families} into this project, with its locks, since {shipped.name} is of it"
    )


def _say_notes(call: Call, notes: Iterable[str]) -> None:
    for line in notes:
        call.progress.note(f"note: {line}")


def _draft(call: Call, family: str, asked: Mapping[str, Any]) -> tuple[Draft, Callable[[], None]]:
    """The text to write, by what was asked, and what raises RecipeError where it does not fit.

    Only what is taken over, or built on others, needs the others.
    """
    from imagefactory.recipes.bases import all_bases
    from imagefactory.recipes.draft import DraftAsk, check_draft, draft, draft_on
    from imagefactory.recipes.environments import Reading, read_wish
    from imagefactory.recipes.expand import select_one
    from imagefactory.recipes.read import read_bases, read_recipes
    from imagefactory.recipes.scaffold import check_name, scaffold

    folder, source, on = call.settings.root_path / "recipes", asked["source"], asked["on"]
    framework, _, version = asked["framework"].partition("=")
    for option, value, needs in (
        ("--cuda", asked["cuda"], source and not on),
        ("--framework NAME=VERSION", version, source and not on),
        ("--environment", asked["environment"], source),
        ("--framework", framework, not on),
        ("--source", asked["kind"], not on),
    ):
        if value and not needs:
            hint = f"leave it out: it comes from {on}" if on else "it completes --from FILE; see --help"
            if option == "--source":
                hint = f"leave it out: it comes from {on}"
            raise UsageError(f"{option} says nothing here", hint=hint)
    bases = read_bases(folder)
    if not source and not on:
        return scaffold(family, bases, framework=framework, source=asked["kind"] or "pypi"), lambda: None
    check_name(family, "family")
    if asked["cuda"] == "none":
        raise UsageError("--cuda none: new recipes are for GPUs", hint="write a row with cuda: [none] then")
    for value, rule in ((framework, "framework"), (version.lstrip("="), "version"), (asked["cuda"], "cuda")):
        if value:
            check_name(value, rule)
    recipes = [recipe for recipe in read_recipes(folder) if recipe.family != family]
    target = select_one(call.factory.targets, on) if on else None
    pythons = [target.python] if target else [base.python for base in bases if base.python]
    reading = Reading(pythons=tuple(pythons) or ("3.12",), environment=asked["environment"])
    wish = read_wish(source, reading) if source else None
    if target:
        drafted = draft_on(wish, family, target)
    else:
        assert wish is not None
        said = DraftAsk(
            family=family,
            framework=framework,
            version=version.lstrip("="),
            cuda=asked["cuda"],
            source=asked["kind"] or "",
            indexes=call.settings.index_map,
        )
        try:
            drafted = draft(wish, said, bases, call.factory.targets)
        except UsageError:  # often for want of a line that could not be read
            _say_notes(call, [*wish.notes, *wish.left])
            raise

    def check() -> None:
        check_draft(drafted.text, family, recipes, all_bases(bases, recipes))

    return drafted, check
