"""imagefactory add."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import Call, json_option, say, say_json, say_next

if TYPE_CHECKING:
    from imagefactory.actions.lock import Relock


@click.command()
@click.argument("family")
@click.argument("version")
@click.option("--cuda", default="", metavar="VERSION", help="Where the version comes with more than one.")
@click.option("--print", "only_print", is_flag=True, help="Print the row instead of writing it.")
@json_option
@click.pass_obj
def add(call: Call, family: str, version: str, cuda: str, only_print: bool, as_json: bool) -> None:
    """Add a version to a family's recipe, lock it and render it.

    Its CUDA, extras, companions and capabilities come from what is known of the framework, its bounds from
    the row nearest to it.
    """
    from imagefactory.project import require_own
    from imagefactory.recipes.scaffold import check_name
    from imagefactory.report.locks import format_relock
    from imagefactory.stages.add import make_addition, plan_addition

    for value, rule in ((family, "family"), (version, "version"), (cuda, "cuda")):
        if value:
            check_name(value, rule)
    if not only_print:
        require_own(call.settings, "add")
    factory = call.sound_factory
    added = plan_addition(factory, family, version, cuda)
    for line in added.addition.told:
        call.progress.note(f"note: {line}")
    say(added.addition.row, unless=as_json)
    names = []
    if not only_print:

        def tell(relock: Relock) -> None:
            say(format_relock(relock), unless=as_json)

        names = list(make_addition(factory, added, call.progress, tell))
    if as_json:
        document = {"path": str(added.path), "row": added.addition.row, "notes": list(added.addition.told)}
        say_json("added", {**document, "targets": names})
    for name in names:
        say_next("build", name)
