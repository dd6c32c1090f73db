"""imagefactory reconcile."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from imagefactory.cli.output import Call, collecting, json_option, registry_option, say, say_json, say_next


@click.command()
@registry_option
@json_option
@click.pass_obj
def reconcile(call: Call, place: str, as_json: bool) -> None:
    """Let the registry list all verdicts that were attached from here.

    Registries without the referrers API keep lists that two writers at once can overwrite. What was attached
    stands in the store's journal. Run it where nobody attaches just then.
    """
    from imagefactory.views.verdicts import format_reconciled
    from imagefactory.stages.reconcile import reconcile_all

    factory = call.sound_factory
    with collecting(factory) as failures:
        repositories = reconcile_all(factory, place, datetime.now(UTC), call.progress)
        if as_json:
            return say_json("reconcile", {"repositories": repositories, "errors": failures.as_json()})
        say(format_reconciled(repositories))
    return say_next("registry", "list")
