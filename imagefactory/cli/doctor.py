"""imagefactory doctor."""

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
    from imagefactory.doctor.judge import can_build
    from imagefactory.doctor.look import examine

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
