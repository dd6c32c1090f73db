"""imagefactory doctor."""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime

import click

from imagefactory.cli.output import json_option, say, say_json, say_next
from imagefactory.errors import EXIT_OK, EXIT_TOOL

PURPOSES = ("build", "submit", "verify", "site")
SITE_WORDS = {"missing": "not set up", "denied": "broken"}


@click.command()
@click.option(
    "--for",
    "purpose",
    type=click.Choice(PURPOSES),
    default=PURPOSES[0],
    show_default=True,
    help="What you want to do: only what that needs is asked.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, purpose: str, as_json: bool) -> None:
    """Say what this machine lacks, and the command that fixes it.

    \b
    imagefactory doctor                   for building images here
    imagefactory doctor --for submit      for jobs: catalogue, trust, site, pool
    imagefactory doctor --for verify      for proving images, here or on the pool
    imagefactory doctor --for site        for running a site: registry, keys, catalogue, nights

    Exit code 6 where something that is needed is missing or denied.
    """
    from imagefactory.actions.doctor import examine_for

    findings, good = examine_for(purpose, ctx.obj.checked_settings, os.environ, datetime.now(UTC))
    if as_json:
        rows = [{**dataclasses.asdict(finding), "state": finding.state.value} for finding in findings]
        value: dict[str, object] = {"for": purpose, "good": good, "findings": rows}
        say_json("doctor", {"can_build": good, **value} if purpose == "build" else value)
    else:
        words = SITE_WORDS if purpose == "site" else {}
        width = 10 if words else 8
        for finding in findings:
            word = words.get(finding.state.value, finding.state.value)
            say(f"{word:{width}}  {finding.name}: {finding.detail}")
            if finding.remedy:
                say(f"{'':{width}}  fix: {finding.remedy}")
    if good:
        say_next("list")
    ctx.exit(EXIT_OK if good else EXIT_TOOL)
