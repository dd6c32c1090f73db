"""Commands about this machine: doctor, settings, completion."""

from __future__ import annotations

import dataclasses
import os

import click

from imagefactory.cli.output import json_option, say, say_json
from imagefactory.errors import EXIT_OK, EXIT_TOOL


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine has and lacks for building, and the command that mends it."""
    from imagefactory.doctor import can_build, examine

    findings = examine(ctx.obj.settings, environ=os.environ)
    good = can_build(findings)
    if as_json:
        rows = [{**dataclasses.asdict(finding), "state": finding.state.value} for finding in findings]
        say_json("doctor", {"can_build": good, "findings": rows})
    else:
        for finding in findings:
            say(f"{finding.state.value:8}  {finding.name}: {finding.detail}")
            if finding.remedy:
                say(f"          mend it: {finding.remedy}")
    ctx.exit(EXIT_OK if good else EXIT_TOOL)


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


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script: eval "$(imagefactory completion bash)" in ~/.bashrc."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    say(
        kind(
            click.get_current_context().find_root().command, {}, "imagefactory", "_IMAGEFACTORY_COMPLETE"
        ).source()
    )
