"""imagefactory settings."""

from __future__ import annotations

import click

from imagefactory.cli.output import json_option, say, say_json


@click.command()
@json_option
@click.pass_context
def settings(ctx: click.Context, as_json: bool) -> None:
    """Print every setting, its value and where it came from.

    Set one in imagefactory.toml (debian-mirror = "...") or the environment (IMAGEFACTORY_DEBIAN_MIRROR).
    """
    from imagefactory.web import redact

    rows = [
        {"name": name, "value": redact(setting.value), "origin": setting.origin}
        for name, setting in ctx.obj.settings.rows()
    ]
    if as_json:
        return say_json("settings", {"settings": rows})
    names, values = [max(len(row[key]) for row in rows) for key in ("name", "value")]
    for row in ({"name": "NAME", "value": "VALUE", "origin": "ORIGIN"}, *rows):
        say(f"{row['name']:{names}}  {row['value'] or '-':{values}}  {row['origin']}")
    return None
