"""imagefactory doctor."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.output import (
    CommandContext,
    json_option,
    print_json,
    print_next_command,
    print_prose,
    print_result,
    restricted_lines,
    terminal_width,
    write_terminal,
)
from imagefactory.errors import EXIT_OK, EXIT_TOOL, UsageError

if TYPE_CHECKING:
    from imagefactory.settings.sources import RestrictedSetting


PURPOSES = ("build", "job", "verify", "site")
SITE_STATUSES = {"missing": "not set up", "denied": "broken"}


@click.command(cls=Command)
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
    """Check this machine, and suggest fixes.

    \b
    imagefactory doctor                   for building images here
    imagefactory doctor --for job         for jobs: catalog, trust, site, pool
    imagefactory doctor --for verify      for verifying images, here or on the pool
    imagefactory doctor --for site        for running a site: registry, keys, catalog, nightly runs

    Exit code 6 if a requirement is missing or denied.
    """
    from imagefactory.actions.doctor import examine_for

    findings, good = examine_for(purpose, ctx.obj.checked_settings, os.environ, datetime.now(UTC))
    if as_json:
        rows = [{**dataclasses.asdict(finding), "state": finding.state.value} for finding in findings]
        value: dict[str, object] = {"for": purpose, "good": good, "findings": rows}
        print_json("doctor", {"can_build": good, **value} if purpose == "build" else value)
    else:
        words = SITE_STATUSES if purpose == "site" else {}
        width = 10 if words else 8
        for finding in findings:
            word = words.get(finding.state.value, finding.state.value)
            print_prose(f"{word:{width}}  {finding.name}: {finding.detail}", width + 2)
            if finding.remedy:
                print_prose(f"{'':{width}}  fix: {finding.remedy}")
    if good:
        print_next_command("list")
    ctx.exit(EXIT_OK if good else EXIT_TOOL)


# --- imagefactory config


@click.command(cls=Command)
@click.option("--trust", is_flag=True, help="Trust this project, until its imagefactory.toml changes.")
@click.option("--untrust", is_flag=True, help="Trust this project no more.")
@json_option
@click.pass_obj
def config(call: CommandContext, trust: bool, untrust: bool, as_json: bool) -> None:
    """Print every setting, its value and where it came from.

    \b
    imagefactory config                  in the current project
    imagefactory config --trust          accept all that its imagefactory.toml sets
    imagefactory -C DIR config --trust   the same, for the project in DIR

    Set one in imagefactory.toml (debian-mirror = "...") or the environment (IMAGEFACTORY_DEBIAN_MIRROR). An
    untrusted project can set only a few of them. Programs, directories, servers and keys then come from your
    own file, the site's file, or the environment.
    """
    from imagefactory.http import redact
    from imagefactory.settings.files import trust_command
    from imagefactory.views.text import format_table

    if trust or untrust:
        return _change(call, trust=trust, untrust=untrust, as_json=as_json)
    loaded = call.checked_settings
    rows = [
        {"name": name, "value": redact(setting.value), "origin": setting.origin}
        for name, setting in loaded.rows()
    ]
    if as_json:
        return print_json("settings", {"settings": rows, "untrusted": _as_json(loaded.untrusted)})
    table = [(row["name"], row["origin"], "; ".join(row["value"].split("\n")) or "-") for row in rows]
    print_result(format_table(("NAME", "SOURCE", "VALUE"), table, terminal_width()))
    if loaded.untrusted:
        write_terminal(2, "not used, because you do not trust this project:")
        write_terminal(2, "\n".join(f"  {line}" for line in restricted_lines(loaded.untrusted)))
        write_terminal(2, f"hint: read imagefactory.toml. To trust it: {trust_command(loaded.root_path)}")
    return None


def _change(call: CommandContext, *, trust: bool, untrust: bool, as_json: bool) -> None:
    from imagefactory.settings.files import (
        FILE_NAME,
        parse_document,
        read_content,
        trust_project,
        untrust_project,
    )
    from imagefactory.settings.sources import find_restricted

    if trust and untrust:
        raise UsageError(
            "option-conflict", "--trust and --untrust exclude each other", hint="remove one of them"
        )
    loaded = call.checked_settings
    root, file = loaded.root_path, loaded.root_path / FILE_NAME
    content = None if loaded.shipped else read_content(file)
    if content is None:
        raise UsageError(
            "project-not-found",
            "there is no imagefactory.toml here or in a parent directory",
            hint="pass the project: imagefactory -C DIR config --trust",
        )
    if untrust:
        before = untrust_project(root, os.environ)
        if as_json:
            return print_json("project-trust", {"file": str(file), "trusted": False, "before": before})
        return print_result(f"{file} is not trusted" + ("" if before else ", and was not"))
    # What is shown and what is recorded are of the same bytes.
    rows = find_restricted(parse_document(content, file), content.decode())
    trust_project(root, content, os.environ)
    if as_json:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        value = {"file": str(file), "trusted": True, "sha256": digest, "settings": _as_json(rows)}
        return print_json("project-trust", value)
    print_result(f"{file} is trusted until it changes")
    for line in restricted_lines(rows):
        print_prose(f"  {line}")
    return None


def _as_json(settings: Iterable[RestrictedSetting]) -> list[dict[str, object]]:
    from imagefactory.settings.files import without_secrets

    return [
        {"name": row.name, "value": without_secrets(row.value), "line": row.line or None} for row in settings
    ]


# --- imagefactory completion


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script for a shell.

    Write eval "$(imagefactory completion bash)" in ~/.bashrc."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    print_result(
        kind(
            click.get_current_context().find_root().command, {}, "imagefactory", "_IMAGEFACTORY_COMPLETE"
        ).source()
    )
