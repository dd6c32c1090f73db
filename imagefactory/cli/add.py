"""imagefactory add."""

from __future__ import annotations

import click

from imagefactory.cli.output import Call, say


@click.command()
@click.argument("family")
@click.argument("version")
@click.option("--cuda", default="", metavar="VERSION", help="Where the version comes with more than one.")
@click.option("--print", "only_print", is_flag=True, help="Print the row instead of writing it.")
@click.pass_obj
def add(call: Call, family: str, version: str, cuda: str, only_print: bool) -> None:
    """Write a row for VERSION into recipes/FAMILY.yaml, lock it and render it.

    Its CUDA, extras, companions and capabilities come from what is known of the framework, its bounds from
    the row nearest to it.
    """
    from imagefactory.factory import require_own
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
        click.echo(f"note: {line}", err=True)
    say(added.addition.row)
    if only_print:
        return
    for name in make_addition(factory, added, call.progress, lambda done: say(format_relock(done))):
        say(f"next: imagefactory build {name}")
