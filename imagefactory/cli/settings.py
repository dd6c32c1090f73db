"""imagefactory settings."""

from __future__ import annotations

import click

from imagefactory.cli.output import json_option, say, say_json, terminal_width


@click.command()
@json_option
@click.pass_context
def settings(ctx: click.Context, as_json: bool) -> None:
    """Print every setting, its value and where it came from.

    Set one in imagefactory.toml (debian-mirror = "...") or the environment (IMAGEFACTORY_DEBIAN_MIRROR).
    """
    from imagefactory.report.text import format_table
    from imagefactory.web import redact

    rows = [
        {"name": name, "value": redact(setting.value), "origin": setting.origin}
        for name, setting in ctx.obj.settings.rows()
    ]
    if as_json:
        return say_json("settings", {"settings": rows})
    table = [(row["name"], row["value"] or "-", row["origin"]) for row in rows]
    return say(format_table(("NAME", "VALUE", "ORIGIN"), table, terminal_width()))
