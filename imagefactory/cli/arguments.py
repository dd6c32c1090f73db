"""Durations as people write them for an option."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta

import click

from imagefactory.cli.output import CommandContext

_TIME = re.compile(r"([0-9]{1,6})([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class DurationType(click.ParamType[timedelta]):
    """A duration such as `30m`, `24h` or `2d`."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        match = _TIME.fullmatch(str(value))
        if match is None or not int(match[1]):
            self.fail(f"'{str(value)[:40]}' is no time: write 30m, 24h or 2d", param, ctx)
        return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


# --- How `--help` shows commands: grouped by purpose, one whole line each


class CommandGroup(click.Group):
    """A group of commands whose help has headings and whole lines."""

    _shelves: Mapping[str, tuple[click.Command, ...]] | None = None

    def shelve(self, shelves: Mapping[str, tuple[click.Command, ...]]) -> None:
        """Add the commands by the heading of each. All of them get `-q`."""
        self._shelves = shelves
        for commands in shelves.values():
            for command in commands:
                self.add_command(command)
        for command in leaf_commands(self):
            command.params.append(_hidden_options())

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, commands in (self._shelves or {"Commands": tuple(self.commands.values())}).items():
            with formatter.section(title):
                rows = [((command.name or "").ljust(width), first_line(command)) for command in commands]
                formatter.write_dl(rows)


def leaf_commands(group: click.Group) -> Iterator[click.Command]:
    """Return the commands of a group and its subgroups, without the groups themselves."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from leaf_commands(command)
        else:
            yield command


def first_line(command: click.Command) -> str:
    """Return the first sentence of the help without its full stop."""
    paragraph = " ".join((command.help or "").split("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


def _hidden_options() -> click.Option:
    def hush(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and isinstance(ctx.obj, CommandContext):
            ctx.obj = replace(ctx.obj, progress_style="quiet")

    return click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=hush,
        help="Say results and errors alone: no progress, no notes, no next step.",
    )
