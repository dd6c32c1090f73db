"""Commands about keys: who signs verdicts here, and whose signatures are believed."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from imagefactory.cli.groups import Group
from imagefactory.cli.output import json_option, say, say_json, say_next, terminal_width
from imagefactory.verify.model import evidence_kinds

if TYPE_CHECKING:
    from imagefactory.settings.load import Settings

DAYS = 365
_user_option = click.option(
    "--global",
    "user",
    is_flag=True,
    help="In your own file (~/.config/imagefactory/imagefactory.toml), not the factory's.",
)
_DAY = click.DateTime(formats=["%Y-%m-%d"])


@click.group(cls=Group)
def keys() -> None:
    """Make and trust the keys that sign verdicts.

    \b
    imagefactory keys new lab                 lab.pem for you, lab.pub for all
    imagefactory keys trust lab               this factory believes it, for a year
    imagefactory keys trust lab.pub           where only the public key is
    imagefactory keys trust --global lab.pub  you believe it, in any folder
    """


@keys.command()
@click.argument("name")
@json_option
def new(name: str, as_json: bool) -> None:
    """Make a key: NAME.pem for you alone, NAME.pub for anybody."""
    from imagefactory.verdicts.keys import keys_folder, make_key

    folder = keys_folder(os.environ)
    key = make_key(folder, name)
    if as_json:
        private, public = (str(folder / f"{name}.{suffix}") for suffix in ("pem", "pub"))
        return say_json("key", {"name": name, "keyid": key.keyid, "private": private, "public": public})
    say(f"{folder / f'{name}.pem'}  keep it to yourself")
    say(f"{folder / f'{name}.pub'}  give it to whoever should believe it")
    say(f"key {key.keyid}")
    say("nobody believes it yet")
    return say_next("keys", "trust", name)


@keys.command()
@json_option
@click.pass_context
def show(ctx: click.Context, as_json: bool) -> None:
    """List the keys that this factory trusts and those you have."""
    from imagefactory.report.text import format_table
    from imagefactory.verdicts.keys import keys_folder, own_keys
    from imagefactory.verdicts.trust import list_keys, read_trust

    own = own_keys(keys_folder(os.environ))
    rows = list_keys(read_trust(ctx.obj.settings.files), own, datetime.now(UTC))
    if as_json:
        return say_json("keys", {"keys": rows})
    if not rows:
        say("no key is trusted, and you have none: imagefactory keys new NAME")
        return None
    header = ("NAME", "KEY", "TRUSTED", "FROM", "UNTIL", "EVIDENCE", "YOURS")
    table = [
        (
            str(row["name"]),
            str(row["keyid"])[:16],
            str(row["state"]),
            str(row["from"] or "-")[:10],
            str(row["until"] or "-")[:10],
            ",".join(row["evidence"]) or "-",
            "yes" if row["own"] else "no",
        )
        for row in rows
    ]
    return say(format_table(header, table, terminal_width(), ("EVIDENCE", "FROM")))


@keys.command()
@click.argument("key", metavar="FILE|NAME")
@click.option("--name", help="Its name here. Default: the file's.")
@click.option("--since", type=_DAY, metavar="DATE", help="Believed from then on. Default: today.")
@click.option("--until", type=_DAY, metavar="DATE", help="Believed until then. Default: a year later.")
@click.option(
    "--evidence",
    type=click.Choice(evidence_kinds()),
    multiple=True,
    help="How the GPU must have been seen. Default: in any way that the policy takes.",
)
@_user_option
@json_option
@click.pass_context
def trust(
    ctx: click.Context,
    /,
    key: str,
    name: str | None,
    since: datetime | None,
    until: datetime | None,
    evidence: tuple[str, ...],
    **options: bool,
) -> None:
    """Believe what a key signs.

    Writes its public half into imagefactory.toml.

    FILE is a .pub file that its owner gave you, NAME a key that you made. The file is the factory's; with
    --global, and where there is no factory, it is yours, for what is read from anywhere, such as a signed
    catalogue.
    """
    from dataclasses import replace

    from imagefactory.settings.files import user_file
    from imagefactory.verdicts.keys import check_name, keys_folder, read_public
    from imagefactory.verdicts.trust import Grant, add_key, read_text

    public = read_public(key, keys_folder(os.environ))
    public = replace(public, name=check_name(name or public.name))
    begin = since.date() if since else datetime.now(UTC).date()
    end = until.date() if until else begin + min(timedelta(days=DAYS), date.max - begin)
    path = _file(ctx, user=options["user"])
    if path == user_file(os.environ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    text, where = read_text(path), str(path)
    grant = Grant(key=public, since=begin, until=end, evidence=evidence)
    note = _replace(path, text, add_key(text, grant, where))
    if options["as_json"]:
        row = {"name": public.name, "keyid": public.keyid, "file": where, "evidence": list(evidence)}
        return say_json("trust", {**row, "from": begin.isoformat(), "until": end.isoformat()})
    say(f"{where}: '{public.name}' is trusted from {begin} until {end} (key {public.keyid})")
    say("compare that key with its owner's")
    say(note) if note else None
    return say_next("keys", "show")


@keys.command()
@click.argument("name")
@click.option("--until", type=_DAY, metavar="DATE", help="Believed until then. Default: now.")
@_user_option
@json_option
@click.pass_context
def retire(ctx: click.Context, /, name: str, until: datetime | None, **options: bool) -> None:
    """Believe a key no longer, for what it signs from now on.

    What it signed before stays good until it expires. A key that was stolen can write any date: delete its
    whole [[trust]] row instead.
    """
    from imagefactory.verdicts.trust import read_text, retire_key

    path = _file(ctx, user=options["user"])
    text, where = read_text(path), str(path)
    end: date = until.date() if until else datetime.now(UTC).replace(microsecond=0)
    note = _replace(path, text, retire_key(text, name, end, where))
    if options["as_json"]:
        return say_json("trust", {"name": name, "file": where, "until": end.isoformat()})
    say(f"{where}: '{name}' is trusted until {end.isoformat()}")
    say("what it signed before stays good until it expires; of a stolen key delete the whole [[trust]] row")
    say(note) if note else None
    return say_next("keys", "show")


def _replace(path: Path, before: str, text: str) -> str:
    """Write the file; keep the user's trust in its project. Return what to say where there was none to keep.

    A file without any restricted setting needs no trust, so all that needs it afterwards is the user's own
    change. Other lines are not trusted on the way.
    """
    from imagefactory.settings.files import own_files, parse_document
    from imagefactory.settings.sources import find_restricted
    from imagefactory.settings.trusted import is_trusted, trust_command, trust_project
    from imagefactory.verdicts.trust import write_text

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
    """Which imagefactory.toml is changed."""
    from imagefactory.settings.files import FILE_NAME, user_file

    settings: Settings = ctx.obj.settings
    return user_file(os.environ) if user or settings.shipped else settings.root_path / FILE_NAME
