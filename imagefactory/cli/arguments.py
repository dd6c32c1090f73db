"""Durations as people write them for an option."""

from __future__ import annotations

import re
from datetime import timedelta

import click

_TIME = re.compile(r"([0-9]{1,6})([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class Duration(click.ParamType[timedelta]):
    """A duration such as `30m`, `24h` or `2d`."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        match = _TIME.fullmatch(str(value))
        if match is None or not int(match[1]):
            self.fail(f"'{str(value)[:40]}' is no time: write 30m, 24h or 2d", param, ctx)
        return timedelta(seconds=int(match[1]) * _UNITS[match[2]])
