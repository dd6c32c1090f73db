"""imagefactory doctor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

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
    from imagefactory.doctor.facts import Health
    from imagefactory.settings.sources import RestrictedSetting


PURPOSES = ("build", "job", "verify", "site")
SITE_STATUSES = {"missing": "not set up", "denied": "broken"}


class DoctorFindingRow(TypedDict):
    name: str
    status: Health
    detail: str
    fix: str
    """A command or a setting; empty if all is well."""
    needed_for: str
    """`build`, `run`, `push`, `gpu`, `comfort`, or an engine or runner that is not the configured one."""


class DoctorDocument(TypedDict):
    """What this machine has and lacks for a purpose."""

    format: Literal["imagefactory.doctor/1"]
    purpose: str
    ready: bool
    """Whether nothing that the purpose needs is missing or denied."""
    findings: list[DoctorFindingRow]


@click.command(cls=Command)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(PURPOSES),
    default=PURPOSES[0],
    show_default=True,
    help="What you want to do. Only what it needs is checked.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, purpose: str, as_json: bool) -> None:
    """Check this machine and suggest fixes.

    \b
    imagefactory doctor               to build images on this machine
    imagefactory doctor --for job     to write and submit jobs
    imagefactory doctor --for verify  to verify images, here or on a cluster
    imagefactory doctor --for site    to run a site: registry, keys, catalog

    Exit code 6 if something that you need is missing or not permitted.
    """
    from imagefactory.actions.doctor import examine_for

    findings, good = examine_for(purpose, ctx.obj.checked_settings, os.environ, datetime.now(UTC))
    if as_json:
        rows = [
            DoctorFindingRow(
                name=finding.name,
                status=finding.state,
                detail=finding.detail,
                fix=finding.remedy,
                needed_for=finding.needed_for,
            )
            for finding in findings
        ]
        print_json(DoctorDocument(format="imagefactory.doctor/1", purpose=purpose, ready=good, findings=rows))
    else:
        words = SITE_STATUSES if purpose == "site" else {}
        width = 10 if words else 8
        for finding in findings:
            word = words.get(finding.state.value, finding.state.value)
            print_prose(f"{word:{width}}  {finding.name}: {finding.detail}", width + 2)
            if finding.remedy:
                print_prose(f"{'':{width}}  fix: {finding.remedy}")
    if good:
        print_next_command("search" if purpose == "job" else "list")
    ctx.exit(EXIT_OK if good else EXIT_TOOL)


# --- imagefactory config


class SettingRow(TypedDict):
    name: str
    value: str
    source: str
    """The file, variable or default that sets it."""


class RestrictedSettingRow(TypedDict):
    """A setting that only a trusted project may set."""

    name: str
    value: str
    line: int | None


class ConfigDocument(TypedDict):
    """Every setting, its value without secrets, and its source."""

    format: Literal["imagefactory.config/1"]
    settings: list[SettingRow]
    untrusted: list[RestrictedSettingRow]
    """The settings of this project that are ignored, because you do not trust it."""


class ConfigTrustDocument(TypedDict):
    """Whether you trust this project."""

    format: Literal["imagefactory.config-trust/1"]
    file: str
    trusted: bool
    digest: NotRequired[str]
    """The digest of the trusted file."""
    settings: NotRequired[list[RestrictedSettingRow]]
    """What the trusted file sets."""
    changed: NotRequired[bool]
    """Whether the project was trusted until now."""


@click.command(cls=Command)
@click.option("--trust", is_flag=True, help="Trust this project until its imagefactory.toml changes.")
@click.option("--untrust", is_flag=True, help="Stop trusting this project.")
@json_option
@click.pass_obj
def config(call: CommandContext, trust: bool, untrust: bool, as_json: bool) -> None:
    """Show every setting, its value and its source.

    \b
    imagefactory config                  the settings of this project
    imagefactory config --trust          trust this project's imagefactory.toml
    imagefactory -C DIR config --trust   the same, for the project in DIR

    To change a setting, write it into imagefactory.toml (site = "slurm") or set an environment variable
    (IMAGEFACTORY_SITE=slurm). A project that you do not trust can set only a few settings.
    """
    from imagefactory.errors import redact
    from imagefactory.settings.files import trust_command
    from imagefactory.views.text import format_table

    if trust or untrust:
        return _change(call, trust=trust, untrust=untrust, as_json=as_json)
    loaded = call.checked_settings
    rows = [
        SettingRow(name=name, value=redact(setting.value), source=setting.origin)
        for name, setting in loaded.rows()
    ]
    if as_json:
        untrusted = _restricted_json(loaded.untrusted)
        return print_json(ConfigDocument(format="imagefactory.config/1", settings=rows, untrusted=untrusted))
    table = [(row["name"], row["source"], "; ".join(row["value"].split("\n")) or "-") for row in rows]
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
            return print_json(
                ConfigTrustDocument(
                    format="imagefactory.config-trust/1", file=str(file), trusted=False, changed=before
                )
            )
        return print_result(f"{file} is not trusted" + ("" if before else ", and was not"))
    # What is shown and what is recorded are of the same bytes.
    rows = find_restricted(parse_document(content, file), content.decode())
    trust_project(root, content, os.environ)
    if as_json:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        return print_json(
            ConfigTrustDocument(
                format="imagefactory.config-trust/1",
                file=str(file),
                trusted=True,
                digest=digest,
                settings=_restricted_json(rows),
            )
        )
    print_result(f"{file} is trusted until it changes")
    for line in restricted_lines(rows):
        print_prose(f"  {line}")
    return None


def _restricted_json(settings: Iterable[RestrictedSetting]) -> list[RestrictedSettingRow]:
    from imagefactory.settings.files import without_secrets

    return [
        RestrictedSettingRow(name=row.name, value=without_secrets(row.value), line=row.line or None)
        for row in settings
    ]


# --- imagefactory completion


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script for a shell.

    \b
    eval "$(imagefactory completion bash)"

    Write this line into ~/.bashrc. For zsh and fish, replace bash.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    print_result(
        kind(
            click.get_current_context().find_root().command, {}, "imagefactory", "_IMAGEFACTORY_COMPLETE"
        ).source()
    )
