"""Durations as options, commands whose help has sections, and groups of commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from datetime import timedelta
from difflib import get_close_matches
from importlib import import_module
from typing import ParamSpec

import click

from imagefactory.cli.output import CommandContext
from imagefactory.errors import UsageError
from imagefactory.plugins import has_extra

P = ParamSpec("P")

_TIME = re.compile(r"([0-9]{1,6})([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class DurationType(click.ParamType[timedelta]):
    """A duration such as `30m`, `24h` or `2d`."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        match = _TIME.fullmatch(str(value))
        if match is None or not int(match[1]):
            self.fail(f"'{str(value)[:40]}' is not a duration: write 30m, 24h or 2d", param, ctx)
        return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


# --- Help


COMMON = ("Common options", {"--json", "--quiet", "--help"})
MANY_OPTIONS = 8
"""Commands with more options than this show them in sections."""
_SECTIONS: dict[click.Parameter, str] = {}


def section(title: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that puts the next options into a section of the help with this title."""

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        for parameter in getattr(command, "__click_params__", ()):
            _SECTIONS.setdefault(parameter, title)
        return command

    return decorate


def section_of(option: click.Parameter) -> str:
    """Return the title above an option in the help of its command."""
    title, names = COMMON
    return title if names & {*option.opts} else _SECTIONS.get(option, "Options")


_WHOLE = {ord("-"): "\ue000", ord(" "): "\ue001"}  # private characters, which nothing splits
_BROKEN = {ord(new): chr(old) for old, new in _WHOLE.items()}


class HelpFormatter(click.HelpFormatter):
    """A formatter that does not break lines at hyphens or in backticks."""

    def _join(self, text: str) -> str:
        return re.sub(r"`[^`]*`|\S+-\S*", lambda match: match[0].translate(_WHOLE), text)

    def write_text(self, text: str) -> None:
        super().write_text(self._join(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(name, self._join(text)) for name, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().translate(_BROKEN)


class HelpContext(click.Context):
    formatter_class = HelpFormatter


class Command(click.Command):
    """A command whose help shows many options in sections, and the common options last."""

    context_class = HelpContext

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)):
                sections.setdefault(section_of(option), []).append(record)
        if sum(map(len, sections.values())) <= MANY_OPTIONS:
            sections = {"Options": [record for records in sections.values() for record in records]}
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


# --- Groups of commands, whose modules are imported when a command runs or shows its help


HABITS = {
    "find": "search",
    "gc": "image prune",
    "images": "image list",
    "info": "show",
    "inspect": "compat",
    "leave": "site remove",
    "ls": "list",
    "rm": "image remove",
    "submit": "job write",
    "update": "recipe update",
    "version": "--version",
}
"""Commands of similar tools, and the equivalent command here."""
CUTOFF = 0.8
"""The similarity above which a command is suggested. With difflib's 0.6, `version` would suggest `verify`."""


class CommandGroup(click.Group):
    """A group of commands whose help has sections and whole lines."""

    context_class = HelpContext

    _loaded: MutableMapping[str, click.Command]
    _sections: dict[str, str]  # by command
    _places: dict[str, str]  # by command: its module and function

    def add_rows(self, rows: Mapping[str, Mapping[str, str]], groups: Mapping[str, str]) -> None:
        """Add commands by section and path: `sweep start` is the command `start` of the group `sweep`.

        Each row names a module and a function. Rows of an extra whose directory was deleted are skipped.
        `groups` has the help of each group.
        """
        for section, paths in rows.items():
            for path, location in paths.items():
                name, _, below = path.partition(" ")
                if location.startswith("extras.") and not has_extra(location.split(".")[1]):
                    continue
                self._sections.setdefault(name, section)
                if not below:
                    self._places[name] = location
                    continue
                group = self._loaded.setdefault(name, CommandGroup(name, help=groups[name]))
                assert isinstance(group, CommandGroup)
                group.add_rows({"Commands": {below: location}}, groups)

    @property
    def commands(self) -> dict[str, click.Command]:
        """All commands that the help shows, imported."""
        loaded = ((name, self._load(name)) for name in self._names())
        return {name: command for name, command in loaded if command and not command.hidden}

    @commands.setter
    def commands(self, commands: MutableMapping[str, click.Command]) -> None:
        self._loaded, self._sections, self._places = commands, {}, {}

    def _names(self) -> list[str]:
        return list(dict.fromkeys((*self._sections, *self._loaded)))

    def _load(self, name: str) -> click.Command | None:
        if name in self._places and name not in self._loaded:
            module, function = self._places[name].split(":")
            command = getattr(import_module(f"imagefactory.{module}"), function)
            for leaf in leaf_commands(command):
                leaf.params.append(_quiet_option())
            command.name = name
            self._loaded[name] = command
        return self._loaded.get(name)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        self._loaded[name or cmd.name or ""] = cmd

    def list_commands(self, _: click.Context) -> list[str]:
        return self._names()

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        return self._load(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self._load(args[0]) or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        root = ctx.find_root().command
        paths = root.paths() if isinstance(root, CommandGroup) else []
        command_name = ctx.command_path.partition(" ")[2]
        suggestion = _similar(
            args[0], [path for path in paths if command_name and path.startswith(f"{command_name} ")]
        )
        suggestion = suggestion or _similar(args[0], paths)
        program = ctx.find_root().info_name
        hint = " or ".join(f"`{program} {path}`" for path in suggestion)
        hint = f"did you mean {hint}?" if suggestion else f"`{ctx.command_path} --help` lists the commands"
        if args[0] == "login":
            hint = "`docker login HOST` or `podman login HOST`: imagefactory uses their logins"
        raise UsageError("command-unknown", f"'{args[0]}' is not a command of {ctx.command_path}", hint=hint)

    def paths(self) -> list[str]:
        """Return all commands with their groups, as users type them."""
        below = {
            name: group.paths() for name, group in self._loaded.items() if isinstance(group, CommandGroup)
        }
        return [
            path
            for name in self._names()
            for path in (name, *(f"{name} {rest}" for rest in below.get(name, ())))
        ]

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        commands = self.commands
        width = max(map(len, commands))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in commands.items():
            rows = sections.setdefault(self._sections.get(name, "Commands"), [])
            rows.append((name.ljust(width), first_line(command)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _similar(word: str, paths: Sequence[str]) -> list[str]:
    """Return the commands that a word may mean: an equivalent, the same last word, or a similar spelling."""
    if word in HABITS and HABITS[word] in (*paths, "--version"):
        return [HABITS[word]]
    last = [path for path in paths if path.split()[-1] == word]
    if last:
        return last
    suggestion = get_close_matches(word, {part for path in paths for part in path.split()}, cutoff=CUTOFF)
    return [path for part in suggestion for path in paths if path.split()[-1] == part]


def leaf_commands(command: click.Command) -> Iterator[click.Command]:
    """Return the commands of a group and its subgroups, without the groups. For a command, return it."""
    if not isinstance(command, click.Group):
        yield command
        return
    for child in command.commands.values():
        yield from leaf_commands(child)


def first_line(command: click.Command) -> str:
    """Return the first sentence of the help without its full stop."""
    paragraph = " ".join((command.help or "").split("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


def _quiet_option() -> click.Option:
    def hush(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and isinstance(ctx.obj, CommandContext):
            ctx.obj = replace(ctx.obj, progress_style="quiet")

    return click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=hush,
        help="Print only results and errors.",
    )
