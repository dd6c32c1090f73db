"""Commands that show what can be built: list, show, new."""

from __future__ import annotations

import click

from imagefactory.cli.output import (
    Call,
    complete_targets,
    image_json,
    json_option,
    say,
    say_json,
    select_one,
    target_json,
    targets_argument,
)
from imagefactory.errors import UsageError


@click.command("list")
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
        return say_json("targets", {"targets": [{**target_json(t), "lock": states[t.name]} for t in chosen]})
    rows = [(t.name, f"{t.framework} {t.version}", t.cuda, t.python, t.base, states[t.name]) for t in chosen]
    say(format_table(("TARGET", "FRAMEWORK", "CUDA", "PYTHON", "BASE", "LOCK"), rows))
    return None


@click.command()
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
        **target_json(target),
        "lock": state,
        "packages": packages,
        "image": image_json(image) if image else None,
    }
    return say_json("target", value)


@click.command()
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
