"""The key commands: which keys sign verdicts here, and which are trusted."""

from __future__ import annotations

import os
import tomllib
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.output import json_option, print_json, print_next_command, print_result, terminal_width
from imagefactory.errors import CheckFailedError, UsageError
from imagefactory.verify.report import evidence_types

if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagefactory.actions.publish import PublishedCatalog
    from imagefactory.cli.output import CommandContext
    from imagefactory.settings.load import Settings
    from imagefactory.trust.keys import PublicKey
    from imagefactory.trust.policy import KeyRow

DAYS = 365
_user_option = click.option(
    "--user",
    is_flag=True,
    help="In your own file (~/.config/imagefactory/imagefactory.toml), not the project's.",
)
_DAY = click.DateTime(formats=["%Y-%m-%d"])


class KeyCreateDocument(TypedDict):
    """The files of a new key."""

    format: Literal["imagefactory.key-create/1"]
    name: str
    keyid: str
    private: str | None
    """The file of the private key; null with `--command`."""
    public: str
    command: str | None
    """The file that names the program that signs; null without `--command`."""


class KeyListDocument(TypedDict):
    """Your own keys, and those that this project trusts."""

    format: Literal["imagefactory.key-list/1"]
    keys: list[KeyRow]


class KeyTrustDocument(TypedDict):
    """The key that is trusted now."""

    format: Literal["imagefactory.key-trust/1"]
    name: str
    keyid: str
    file: str
    evidence: list[str]
    valid_from: str
    valid_until: str


class KeyRetireDocument(TypedDict):
    """The key that is no longer trusted for new signatures."""

    format: Literal["imagefactory.key-retire/1"]
    name: str
    file: str
    valid_until: str
    record: str | None
    """The file that lists what the key has signed."""
    recorded: int
    """The number of statements in `record`."""


class RetiredKeyRow(TypedDict):
    name: str
    keyid: str
    recorded: int
    """The number of its statements that stay valid until they expire."""


class KeyRotateDocument(TypedDict):
    """The new key, and the one that it replaces."""

    format: Literal["imagefactory.key-rotate/1"]
    name: str
    keyid: str
    valid_from: str
    valid_until: str
    retired: RetiredKeyRow
    files: list[str]
    published: list[str]


class KeyLogDocument(TypedDict):
    """Who signed, promoted and published from this store."""

    format: Literal["imagefactory.key-log/1"]
    file: str
    entries: list[Mapping[str, str]]
    """`time`, `user`, `host`, `action`, `what`, `where`, `key` and `why`, the oldest first."""


_command_option = click.option(
    "--command",
    metavar="'PROGRAM ARGUMENT ...'",
    help="A program that signs, for a key that no file has: a token, ssh-agent, a KMS.",
)
_public_option = click.option("--public", metavar="FILE", help="The public key of --command: PEM or ssh's.")


@click.command(cls=Command)
@click.argument("name")
@_command_option
@_public_option
@json_option
def create(name: str, command: str | None, public: str | None, as_json: bool) -> None:
    """Create a key that signs verdicts.

    \b
    imagefactory key create lab
    imagefactory key create lab --command '/opt/site/sign lab' --public lab.pem

    It writes NAME.pem, which only you can read, and NAME.pub for everyone. With --command it creates no
    key: the program reads bytes from stdin and prints their signature. It signs once now, to check the
    public key.
    """
    from imagefactory.trust.keys import FILE, PROGRAM, keys_directory

    directory = keys_directory(os.environ)
    key = _new_key(name, command, public)
    signer = directory / f"{name}{PROGRAM if command else FILE}"
    if as_json:
        return print_json(
            KeyCreateDocument(
                format="imagefactory.key-create/1",
                name=name,
                keyid=key.keyid,
                private=None if command else str(signer),
                public=str(directory / f"{name}.pub"),
                command=str(signer) if command else None,
            )
        )
    print_result(
        f"{signer}  names the program that signs" if command else f"{signer}  keep this private key secret"
    )
    print_result(f"{directory / f'{name}.pub'}  the public key: give it to everyone who should trust it")
    print_result(f"key {key.keyid}")
    print_result("no one trusts it yet")
    return print_next_command("key", "trust", name)


def _new_key(name: str, command: str | None, public: str | None) -> PublicKey:
    from imagefactory.trust.keys import keys_directory, make_key, read_public, record_program

    directory = keys_directory(os.environ)
    if command is None and public is None:
        return make_key(directory, name)
    if command is None or public is None:
        raise UsageError(
            "option-conflict",
            "--command and --public require each other",
            hint="add --public FILE, the public key of the program that signs",
        )
    return record_program(directory, name, command, read_public(public, directory), os.environ)


@click.command(cls=Command)
@json_option
@click.pass_context
def list_(ctx: click.Context, as_json: bool) -> None:
    """List your own keys and those that this project trusts.

    \b
    imagefactory key list
    """
    from imagefactory.trust.keys import keys_directory, own_keys
    from imagefactory.trust.policy import list_keys, read_trust
    from imagefactory.views.text import format_table

    public_keys = own_keys(keys_directory(os.environ))
    rows = list_keys(read_trust(ctx.obj.settings.files), public_keys, datetime.now(UTC))
    if as_json:
        return print_json(KeyListDocument(format="imagefactory.key-list/1", keys=rows))
    if not rows:
        print_result("no key is trusted, and you have none: imagefactory key create NAME")
        return None
    header = ("NAME", "KEY", "STATUS", "VALID FROM", "VALID UNTIL", "EVIDENCE", "YOURS")
    table = [
        (
            row["name"],
            row["keyid"][:16],
            row["status"],
            (row["valid_from"] or "-")[:10],
            (row["valid_until"] or "-")[:10],
            ",".join(row["evidence"]) or "-",
            "yes" if row["own"] else "no",
        )
        for row in rows
    ]
    return print_result(format_table(header, table, terminal_width(), ("EVIDENCE", "VALID FROM")))


@click.command(cls=Command)
@click.argument("key", metavar="FILE|NAME")
@click.option("--name", help="Call the key NAME here.  [default: the file's name]")
@click.option("--since", type=_DAY, metavar="DATE", help="Trust it from this date.  [default: today]")
@click.option("--until", type=_DAY, metavar="DATE", help="Trust it until this date.  [default: a year later]")
@click.option(
    "--evidence",
    type=click.Choice(evidence_types()),
    multiple=True,
    help="Trust only verdicts from this source.  [default: those that the policy allows]",
)
@_user_option
@json_option
@click.pass_context
def trust(
    ctx: click.Context,
    /,
    *,
    key: str,
    name: str | None,
    since: datetime | None,
    until: datetime | None,
    evidence: tuple[str, ...],
    user: bool,
    as_json: bool,
) -> None:
    """Trust the signatures of a key.

    \b
    imagefactory key trust lab.pub
    imagefactory key trust lab --until 2027-12-31

    FILE is a .pub file from its owner, NAME a key that you created. It is written to the imagefactory.toml
    of the project. With --user, or outside a project, it is written to your own file and applies
    everywhere.
    """
    from dataclasses import replace

    from imagefactory.settings.files import user_file
    from imagefactory.trust.keys import check_name, keys_directory, read_public
    from imagefactory.trust.policy import TrustGrant, add_key, read_text

    public = read_public(key, keys_directory(os.environ))
    public = replace(public, name=check_name(name or public.name))
    begin = since.date() if since else datetime.now(UTC).date()
    end = until.date() if until else begin + min(timedelta(days=DAYS), date.max - begin)
    path = _file(ctx, user=user)
    if path == user_file(os.environ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    text, location = read_text(path), str(path)
    grant = TrustGrant(key=public, since=begin, until=end, evidence=evidence)
    note = _replace(path, text, add_key(text, grant, location))
    _log(ctx, "trust", (public.name, public.keyid), location)
    if as_json:
        return print_json(
            KeyTrustDocument(
                format="imagefactory.key-trust/1",
                name=public.name,
                keyid=public.keyid,
                file=location,
                evidence=list(evidence),
                valid_from=begin.isoformat(),
                valid_until=end.isoformat(),
            )
        )
    print_result(f"{location}: '{public.name}' is trusted from {begin} until {end} (key {public.keyid})")
    print_result("compare this key with its owner")
    print_result(note) if note else None
    return print_next_command("key", "list")


@click.command(cls=Command)
@click.argument("name")
@click.option("--until", type=_DAY, metavar="DATE", help="Trust it until this date.  [default: now]")
@click.option("--stolen", is_flag=True, help="Nothing that it ever signed counts any more.")
@_user_option
@json_option
@click.pass_context
def retire(
    ctx: click.Context, /, *, name: str, until: datetime | None, stolen: bool, user: bool, as_json: bool
) -> None:
    """Stop trusting new signatures of a key.

    \b
    imagefactory key retire lab
    imagefactory key retire lab --stolen

    Its earlier signatures stay valid until they expire. They are listed in retired-keys/NAME.txt, because
    the owner of a key can sign any date. `key rotate` does the same and creates a new key.
    """
    from imagefactory.actions.promote import record_of, write_record
    from imagefactory.project import is_project
    from imagefactory.trust.policy import named_key, read_text, retire_key

    path, call, now = _file(ctx, user=user), ctx.obj, datetime.now(UTC).replace(microsecond=0)
    text, location = read_text(path), str(path)
    if until and stolen:
        raise UsageError(
            "option-conflict", "--stolen and --until contradict each other", hint="remove one of them"
        )
    end: date = until.date() if until else now
    key, record, file = named_key(text, name, location), b"", None
    if stolen:
        end = key.since
    elif not until or until.replace(tzinfo=UTC) <= now:
        settings = call.settings
        record = record_of(call.factory, key, now, call.progress) if is_project(settings) else b""
    changed = retire_key(text, name, end, location, record)
    if record:
        file = write_record(path.parent, key.name, record)
    note = _replace(path, text, changed)
    _log(ctx, "retire", (key.name, key.keyid), location, "stolen" if stolen else f"until {end.isoformat()}")
    count = len(record.splitlines())
    if as_json:
        return print_json(
            KeyRetireDocument(
                format="imagefactory.key-retire/1",
                name=key.name,
                file=location,
                valid_until=end.isoformat(),
                record=str(file) if file else None,
                recorded=count,
            )
        )
    print_result(f"{location}: '{key.name}' is trusted until {end.isoformat()}")
    if stolen:
        print_result("none of its signatures count any more; sign its revocations again")
    elif file:
        print_result(f"{file}: {count} of its signatures stay valid until they expire; commit both files")
    elif isinstance(end, datetime):
        print_result("no signature of it is recorded here, so its signatures count only in a signed catalog")
    else:
        print_result(
            "run this again on that day: it records the signatures of the key, and only those stay valid"
        )
    print_result("renew the invitation: imagefactory site invite --push; users then join again")
    print_result(note) if note else None
    return print_next_command("key", "list")


@click.command(cls=Command)
@click.option("--name", help="The new key's name.  [default: the old one's with a number]")
@_command_option
@_public_option
@_user_option
@json_option
@click.pass_context
def rotate(
    ctx: click.Context,
    /,
    *,
    name: str | None,
    command: str | None,
    public: str | None,
    user: bool,
    as_json: bool,
) -> None:
    """Replace the signing key with a new one.

    \b
    imagefactory key rotate

    It creates a key, retires the old one, signs the catalog again and renews the invitation in the
    registry. Signatures of the old key stay valid until they expire. Then it prints the steps for other
    people.
    """
    from imagefactory.actions.promote import next_name, record_of, write_record
    from imagefactory.actions.publish import current_place, read_current
    from imagefactory.actions.verdicts import signing_key
    from imagefactory.trust.keys import PROGRAM, PublicKey, check_name, keys_directory, own_keys, read_public
    from imagefactory.trust.policy import TrustGrant, add_key, named_key, read_text, read_trust, retire_key

    call, path, now = ctx.obj, _file(ctx, user=user), datetime.now(UTC).replace(microsecond=0)
    factory = call.factory
    if factory.settings.signing_key.value:
        raise UsageError(
            "signing-key-fixed",
            f"the setting signing-key selects the key that signs ({factory.settings.signing_key.origin})",
            hint="remove the setting, then rotate: the newest trusted key signs by default",
        )
    signing = signing_key(factory, now)
    if signing is None:
        raise CheckFailedError(
            "signing-key-missing",
            "no key signs on this machine",
            hint="run imagefactory key create NAME, then imagefactory key trust NAME",
        )
    text, location = read_text(path), str(path)
    old = named_key(text, signing.keyid, location)
    directory = keys_directory(os.environ)
    if command is None and (directory / f"{signing.name}{PROGRAM}").exists():
        raise UsageError(
            "key-type-mismatch",
            f"'{signing.name}' signs with a program, but its successor would be a file",
            hint="pass --command ... --public ...; for a key file: key create, key trust, key retire",
        )
    trusted = read_trust(factory.settings.files)
    if public and (known := trusted.key(read_public(public, directory).keyid)):
        raise UsageError(
            "key-already-trusted", f"--public: key '{known.name}' is already trusted", hint="pass a new key"
        )
    key_names = {key.name for key in trusted.keys}
    key_names |= {key.name for key in own_keys(directory)}
    new_name = check_name(name or next_name(old.name, key_names))
    registry = factory.settings.registry.value
    before = read_current(current_place(factory, ""), trusted, now) if registry else None
    record = record_of(factory, old, now, call.progress)
    key = _new_key(new_name, command, public)
    end = now.date() + timedelta(days=DAYS)
    grant = TrustGrant(
        key=PublicKey(name=new_name, raw=key.raw), since=now, until=end, evidence=_evidence(text, old.name)
    )
    changed = add_key(retire_key(text, old.name, now, location, record), grant, location)
    files = [str(write_record(path.parent, old.name, record))] if record else []
    note = _replace(path, text, changed)
    _log(ctx, "rotate", (new_name, key.keyid), location, f"in the place of {old.name}")
    written, fault = _published(call, now, before)
    count = len(record.splitlines())
    if as_json:
        print_json(
            KeyRotateDocument(
                format="imagefactory.key-rotate/1",
                name=new_name,
                keyid=key.keyid,
                valid_from=now.isoformat(),
                valid_until=end.isoformat(),
                retired=RetiredKeyRow(name=old.name, keyid=old.keyid, recorded=count),
                files=[location, *files],
                published=written,
            )
        )
    else:
        _print_rotation((old.name, new_name, key.keyid), count, [location, *files], written)
        print_result(note) if note else None
    if fault:
        raise fault
    print_next_command("key", "list")


def _evidence(text: str, name: str) -> tuple[str, ...]:
    """Return the evidence in the row of a key, empty if it uses the policy's."""
    rows = tomllib.loads(text)["trust"]
    return tuple(next(row for row in rows if row["name"] == name).get("evidence", ()))


def _published(
    call: CommandContext, now: datetime, before: PublishedCatalog | None
) -> tuple[list[str], CheckFailedError | None]:
    """Sign the catalog and renew the invitation with the new key. Return the addresses and the error."""
    from imagefactory.actions.join import invitation_of
    from imagefactory.actions.publish import publish_again, publishing_key
    from imagefactory.cli.join import push_invitation
    from imagefactory.errors import ImagefactoryError
    from imagefactory.trust.invitation import format_invitation, invitation_place

    written: list[str] = []
    try:
        factory = call.factory
        written += publish_again(factory, publishing_key(factory, now), now, "", call.progress, before)
        if before:
            invitation = invitation_of(factory.settings, "", now)
            if not invitation.catalog.startswith("/"):
                address = str(invitation_place(invitation.catalog))
                written.append(push_invitation(call, address, format_invitation(invitation), now))
    except ImagefactoryError as error:
        return written, CheckFailedError(
            "publish-incomplete",
            f"the new key is in use, but the catalog or the invitation is not published: {error.message}",
            hint="publish again: imagefactory site publish && imagefactory site invite --push",
        )
    return written, None


def _print_rotation(names: tuple[str, str, str], count: int, files: list[str], written: list[str]) -> None:
    from imagefactory.trust.invitation import fingerprint

    old, new, keyid = names
    print_result(f"'{new}' signs from now on; '{old}' is retired and signs nothing")
    print_result(f"{count} statements that '{old}' signed are recorded; they stay valid until they expire")
    for address in written:
        print_result(f"written: {address}")
    print_result("next steps:")
    print_result(f"  commit {' and '.join(files)}; users of a clone pull it and trust the project again")
    print_result(f"  publish the new fingerprint on your website, and remove that of '{old}':")
    print_result(f"    {fingerprint(keyid)}")
    print_result(
        "  ask your users to join again: imagefactory site join ADDRESS; until then they cannot read the "
        "catalog"
    )
    if not written:
        print_result(
            "  no catalog was found to sign again: imagefactory site publish, and imagefactory site invite"
        )
    print_result(
        f"  copy the new key to other machines that sign (such as a CI secret); delete '{old}' there"
    )


@click.command(cls=Command)
@json_option
@click.pass_context
def log(ctx: click.Context, /, *, as_json: bool) -> None:
    """List who signed, promoted and published from this store.

    \b
    imagefactory key log

    The log file has one JSON object in each line; --json prints its path. Lines are only added.
    """
    from imagefactory.trust.audit import NAME, read_audit
    from imagefactory.views.text import format_table

    store = ctx.obj.settings.store_path
    rows = list(read_audit(store))
    if as_json:
        return print_json(
            KeyLogDocument(format="imagefactory.key-log/1", file=str(store / "journal" / NAME), entries=rows)
        )
    if not rows:
        return print_result("nothing was signed, revoked, approved, promoted or published from this store")
    header = ("TIME", "USER", "ACTION", "WHAT", "WHERE", "KEY", "WHY")
    names = ("time", "user", "action", "what", "where", "key", "why")
    table = [tuple(row.get(name, "")[: 16 if name == "key" else None] for name in names) for row in rows]
    return print_result(format_table(header, table, terminal_width(), ("WHERE", "USER")))


def _log(ctx: click.Context, action: str, key: tuple[str, str], location: str, reason: str = "") -> None:
    from imagefactory.access import Access
    from imagefactory.actions.verdicts import log_acts
    from imagefactory.trust.audit import AuditEntry

    name, keyid = key
    call = (
        ctx.obj
    )  # the file was changed just now: what it may not set counts no more than for the next command
    access = Access(settings=call.checked_settings, environ=os.environ, tell=call.progress.note)
    if not (access.layout.path / "oci-layout").exists():
        return  # a reader's own trust needs no store
    log_acts(access, (AuditEntry(action=action, what=name, where=location, key=keyid, why=reason),))


def _replace(path: Path, before: str, text: str) -> str:
    """Write the file and keep the project trusted. Return a message if it was not trusted before.

    A file without restricted settings needs no trust, so the only change that needs trust is the user's. This
    trusts no other lines.
    """
    from imagefactory.settings.files import (
        is_trusted,
        own_files,
        parse_document,
        trust_command,
        trust_project,
    )
    from imagefactory.settings.sources import find_restricted
    from imagefactory.trust.policy import write_text

    root, content = path.parent, before.encode()
    known = is_trusted(root, content, os.environ)
    known = known or not find_restricted(parse_document(content, path), before)
    write_text(path, text)
    if path in own_files(os.environ):
        return ""
    if known:
        trust_project(root, text.encode(), os.environ)
        return ""
    return f"this counts when you trust the project: {trust_command(root)}"


def _file(ctx: click.Context, *, user: bool) -> Path:
    """Return the path of the imagefactory.toml to change."""
    from imagefactory.settings.files import FILE_NAME, user_file

    settings: Settings = ctx.obj.settings
    return user_file(os.environ) if user or settings.shipped else settings.root_path / FILE_NAME
