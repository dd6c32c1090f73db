"""imagefactory copy."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import Call, json_option, say, say_json, say_next
from imagefactory.cli.transfer import sent_json

if TYPE_CHECKING:
    pass


@click.command("copy")
@click.argument("source", metavar="SOURCE")
@click.argument("destination", metavar="DESTINATION")
@click.option("--referrers", is_flag=True, help="Copy verdicts and other artifacts of the image too.")
@json_option
@click.pass_obj
def copy_(call: Call, source: str, destination: str, referrers: bool, as_json: bool) -> None:
    """Copy an image from registry to registry; its digest stays.

    \b
    imagefactory copy a.example.org/pytorch:2.3-cu121 b.example.org/gpu/pytorch:2.3-cu121

    Nothing lies on this machine in between. Within one registry nothing is sent at all. The tag you
    name is moved, whatever it is: copying is how a person promotes by hand.
    """
    from imagefactory.oci.store import parse_reference
    from imagefactory.report.registries import format_copied
    from imagefactory.stages.copy import Copying, copy_image

    copying = Copying(
        source=parse_reference(source),
        destination=parse_reference(destination),
        referrers=referrers,
        now=datetime.now(UTC),
    )
    copied = copy_image(call.access, copying, call.progress)
    if as_json:
        where = copied.destination
        value = {"source": str(copied.source), "destination": str(where), "digest": where.digest}
        return say_json("copy", {**value, **sent_json(copied.sent)})
    say(format_copied(copied))
    return say_next("verdicts", str(copied.destination))
