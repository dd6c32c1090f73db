"""The commands `site invite`, `site join`, `site list` and `site remove`."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.output import (
    CommandContext,
    confirm,
    is_terminal,
    json_option,
    print_catalog_notes,
    print_json,
    print_next_command,
    print_result,
    terminal_width,
    write_terminal,
)
from imagefactory.errors import EXIT_CHECK, CheckFailedError, ImagefactoryError, UsageError, os_problem

if TYPE_CHECKING:
    from imagefactory.actions.centers import CenterRow
    from imagefactory.actions.join import UserFile
    from imagefactory.trust.invitation import Invitation

FILE = "invitation.toml"


class InvitedKeyRow(TypedDict):
    name: str
    keyid: str


class SiteInviteDocument(TypedDict):
    """The invitation that was written."""

    format: Literal["imagefactory.site-invite/1"]
    file: str
    pushed: str
    """Its reference in the registry; empty without `--push`."""
    settings: dict[str, str]
    """By their names in imagefactory.toml."""
    keys: list[InvitedKeyRow]


class SiteJoinDocument(TypedDict):
    """The center that you joined."""

    format: Literal["imagefactory.site-join/1"]
    file: str
    joined_as: str
    other_centers: list[str]
    """The centers that you joined before."""
    changes: list[str]
    """The lines that were written; empty if nothing changed."""
    settings: dict[str, str]
    """By their names in imagefactory.toml."""
    keys: list[str]
    """The ids of the keys in the invitation."""
    catalog_works: bool


class SiteListDocument(TypedDict):
    """The centers that you joined, and their keys."""

    format: Literal["imagefactory.site-list/1"]
    sites: list[CenterRow]


class SiteRemoveDocument(TypedDict):
    """The settings of the center that you left."""

    format: Literal["imagefactory.site-remove/1"]
    name: str
    file: str
    removed: list[str]


@click.command(cls=Command)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write it to this file.  [default: invitation.toml]",
)
@click.option("--push", is_flag=True, help="Also push it to the registry, next to the catalog.")
@click.option(
    "--catalog",
    "catalog",
    default="",
    metavar="PLACE",
    help="HOST/PATH, or a file that everybody reads.  [default: the setting `catalog`, else `registry`]",
)
@json_option
@click.pass_obj
def invite(call: CommandContext, output: Path | None, push: bool, catalog: str, as_json: bool) -> None:
    """Write an invitation to this site.

    \b
    imagefactory site invite              write invitation.toml
    imagefactory site invite --push       for `imagefactory site join HOST/PATH`

    The invitation has the address of the catalog, the rules of the site, and the keys that are trusted
    here. It has no secrets. Publish the key's fingerprint in another place, such as a web page: users must
    compare it.
    """
    from imagefactory.actions.join import invitation_of
    from imagefactory.fs import replace_text
    from imagefactory.trust.invitation import fingerprint, format_invitation, invitation_place
    from imagefactory.trust.policy import first_moment

    now = datetime.now(UTC)
    invitation = invitation_of(call.settings, catalog, now)
    text, path = format_invitation(invitation), output or Path(FILE)
    if push and invitation.catalog.startswith("/"):
        raise UsageError(
            "catalog-not-in-registry",
            f"the catalog is a file ({invitation.catalog}), not in a registry",
            hint="share the invitation file, or pass a registry: --catalog HOST/PATH",
        )
    try:
        replace_text(path, text)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="choose another file: -o FILE") from error
    catalog_address = ""
    if push:
        catalog_address = push_invitation(call, str(invitation_place(invitation.catalog)), text, now)
    if as_json:
        return print_json(
            SiteInviteDocument(
                format="imagefactory.site-invite/1",
                file=str(path),
                pushed=catalog_address,
                settings=invitation.settings,
                keys=[InvitedKeyRow(name=grant.key.name, keyid=grant.key.keyid) for grant in invitation.keys],
            )
        )
    print_result(f"wrote {path}")
    if catalog_address:
        print_result(f"pushed {catalog_address}")
    for grant in invitation.keys:
        if first_moment(grant.until) <= now:
            print_result(
                f"key {grant.key.name}, retired since {grant.until}: remove its fingerprint from your website"
            )
            continue
        print_result(f"key {grant.key.name}, until {grant.until}; publish its fingerprint on your website:")
        print_result(f"  {fingerprint(grant.key.keyid)}")
    print_result("give it to your users, who run the next command")
    return print_next_command("site", "join", invitation.catalog if catalog_address else str(path))


def push_invitation(call: CommandContext, reference: str, text: str, now: datetime) -> str:
    from imagefactory.access import open_registry
    from imagefactory.actions.verdicts import log_acts
    from imagefactory.oci.graph import StoreRepository
    from imagefactory.oci.store import parse_reference
    from imagefactory.trust.audit import PUBLISH, AuditEntry
    from imagefactory.trust.offers import publish_invitation

    where = parse_reference(reference)
    repository = StoreRepository(
        store=open_registry(call.access, where.registry), repository=where.repository
    )
    written = str(publish_invitation(repository, text, now))
    log_acts(call.access, (AuditEntry(action=PUBLISH, what="invitation", where=written),))
    return written


@click.command(cls=Command)
@click.argument("where", metavar="ADDRESS|FILE")
@click.option(
    "--name",
    default="",
    metavar="CENTER",
    help="Your name for the center.  [default: the name in the invitation]",
)
@click.option(
    "--yes", is_flag=True, help="Do not ask for confirmation (for scripts). Changed keys are rejected."
)
@json_option
@click.pass_obj
def join(call: CommandContext, where: str, name: str, yes: bool, as_json: bool) -> None:
    """Accept an invitation: trust a center's images and keys.

    \b
    imagefactory site join registry.example.org/gpu
    imagefactory site join invitation.toml

    It shows the fingerprint of the center's key, asks for your confirmation, and writes your settings
    (~/.config/imagefactory/imagefactory.toml). You can join several centers. Write CENTER/TARGET if two of
    them have the same target.
    """
    from imagefactory.actions.join import find_joining, read_invitation

    invitation = read_invitation(call.settings, os.environ, where)
    user = find_joining(call.settings, os.environ, invitation, datetime.now(UTC), name)
    if user.joining.changes:
        write_terminal(
            2, _displayed_settings(invitation, user)
        )  # a dialogue: who is asked must see it, with --json too
        _confirm_join(user, where, yes=yes)
        user.write()
    note = _check_catalog(call, user)
    if as_json:
        return print_json(
            SiteJoinDocument(
                format="imagefactory.site-join/1",
                file=str(user.path),
                joined_as=user.center,
                other_centers=list(user.beside),
                changes=list(user.joining.changes),
                settings=invitation.settings,
                keys=[grant.key.keyid for grant in invitation.keys],
                catalog_works=not note.startswith("note"),
            )
        )
    print_result(
        f"wrote {user.path}" if user.joining.changes else f"nothing to do: {user.path} is up to date"
    )
    print_result(note)
    if user.beside:
        print_result(f"its images are {user.center}/NAME; you joined {', '.join(user.beside)} too")
    return print_next_command("search")


def _displayed_settings(invitation: Invitation, user: UserFile) -> str:
    from imagefactory.trust.invitation import fingerprint
    from imagefactory.trust.policy import first_moment

    lines = [f"An invitation to {invitation.catalog} (site {invitation.site})."]
    joining = user.joining
    if user.beside:
        lines += [
            f"You have joined {', '.join(user.beside)}. This center is called '{user.center}' here (--name),",
            "and its keys are trusted only for its own images.",
        ]
    if joining.changed:
        lines += [
            "",
            "WARNING: THE KEY OF THIS SITE HAS CHANGED.",
            "Someone may have replaced the invitation. Ask your center before you continue.",
        ]
        for name, keyid in joining.before:
            lines += [f"  trusted until now: {name}", f"    {fingerprint(keyid)}"]
    for grant in joining.fresh:
        retired = first_moment(grant.until) <= datetime.now(UTC)
        period = f"for what it signed until {grant.until}" if retired else f"until {grant.until}"
        lines += [f"  key to trust: {grant.key.name}, {period}"]
        lines += [f"    {fingerprint(grant.key.keyid)}"]
    if joining.fresh:
        lines.append("Compare these digits with those that your center publishes.")
    lines += [f"This changes {user.path}:", *(f"  {line}" for line in joining.changes)]
    return "\n".join(lines)


def _confirm_join(user: UserFile, location: str, *, yes: bool) -> None:
    """Return if the user agrees. Raises UsageError without a terminal, Exit if the user does not agree."""
    joining = user.joining
    if yes and not joining.changed:
        return
    if yes:
        raise CheckFailedError(
            "center-key-changed",
            "the center's key has changed, and --yes does not accept a changed key",
            hint=f"compare the key with your center, then run imagefactory site join {location} "
            "in a terminal, or "
            f"delete the [[trust]] rows of {', '.join(name for name, _ in joining.before)} in {user.path}",
        )
    if not is_terminal():
        raise UsageError(
            "terminal-required",
            "this is not a terminal, so imagefactory cannot ask for confirmation; nothing was written",
            hint=f"compare the key above, then run imagefactory site join {location} --yes",
        )
    question = "Do you trust the NEW key?" if joining.changed else "Do you trust this key?"
    if not joining.fresh:
        question = "Write it?"
    if not confirm(question):
        write_terminal(2, "nothing was written")
        raise click.exceptions.Exit(EXIT_CHECK)


def _check_catalog(call: CommandContext, user: UserFile) -> str:
    """Read the catalog with the current settings and return a line about it."""
    from imagefactory.actions.read_catalog import read_catalog
    from imagefactory.project import is_project
    from imagefactory.settings.files import user_file
    from imagefactory.settings.load import center_settings

    settings = call.settings
    if is_project(settings):
        return "note: inside this project, its own images are used, not the catalog"
    if user.path != user_file(os.environ):
        if user.path not in settings.centers:
            origin = (settings.catalog if settings.catalog.value else settings.registry).origin
            return f"note: it is not used here, because {origin} sets the catalog"
        settings = center_settings(settings, user.path)
    try:
        catalog = read_catalog(settings, os.environ, datetime.now(UTC))
    except ImagefactoryError as error:
        return f"note: its catalog cannot be used yet: {error.message}"
    print_catalog_notes(catalog.notes)
    count = len(catalog.images)
    return f"its catalog of {catalog.created:%Y-%m-%d} has {count} image{'s' * (count != 1)}"


@click.command(cls=Command)
@json_option
@click.pass_obj
def site_list(call: CommandContext, as_json: bool) -> None:
    """List the centers that you joined, and their keys.

    \b
    imagefactory site list

    A center whose catalog cannot be read is listed with the reason.
    """
    from imagefactory.actions.centers import list_centers
    from imagefactory.project import is_project
    from imagefactory.views.text import format_table

    if is_project(call.settings):
        raise UsageError(
            "project-not-allowed",
            "this directory is a project, which uses its own images and no center",
            hint="change to another directory, such as your home",
        )
    rows = list_centers(call.settings, os.environ, datetime.now(UTC))
    if as_json:
        return print_json(SiteListDocument(format="imagefactory.site-list/1", sites=rows))
    if not rows:
        return print_result("no center is joined: imagefactory site join ADDRESS|FILE")
    table = [
        (
            row["name"],
            row["site"],
            row["catalog"],
            row["error"] or f"{row['images']} images, {row['age']}",
            ", ".join(f"{key['name']} ({key['status']})" for key in row["keys"]) or "none",
        )
        for row in rows
    ]
    return print_result(
        format_table(("CENTER", "SITE", "CATALOG", "STATUS", "KEYS"), table, terminal_width())
    )


@click.command(cls=Command)
@click.argument("name", metavar="CENTER")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation (for scripts).")
@json_option
@click.pass_obj
def site_remove(call: CommandContext, name: str, yes: bool, as_json: bool) -> None:
    """Leave a center: its images and keys no longer count.

    \b
    imagefactory site remove lab

    For the center that you joined first, this removes its settings and all trusted keys from your
    imagefactory.toml.
    """
    from imagefactory.actions.join import remove_center
    from imagefactory.trust.policy import write_text

    path, text, gone = remove_center(call.settings, os.environ, name)
    if not yes:
        write_terminal(2, "\n".join([f"This removes from {path}:", *(f"  {line}" for line in gone)]))
        if not is_terminal():
            raise UsageError(
                "terminal-required",
                "this is not a terminal, so imagefactory cannot ask for confirmation; nothing was changed",
                hint=f"run imagefactory site remove {name} --yes",
            )
        if not confirm(f"Leave {name}?"):
            write_terminal(2, "nothing was changed")
            raise click.exceptions.Exit(EXIT_CHECK)
    try:
        path.unlink() if text is None else write_text(path, text)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    if as_json:
        return print_json(
            SiteRemoveDocument(
                format="imagefactory.site-remove/1", name=name, file=str(path), removed=list(gone)
            )
        )
    return print_result(f"left {name}: {path} is {'gone' if text is None else 'without it'}")
