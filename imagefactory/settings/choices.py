"""A setting's value with its origin, and what settings choose among: solvers and sites, the default first."""

from __future__ import annotations

from dataclasses import dataclass

SOLVERS = ("rattler", "conda", "mamba", "micromamba")
SITES = ("generic", "chtc", "ospool")
"""Whose rules submit files follow, the default first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value and where it came from: `default`, a file's path, or `$NAME`."""

    value: str
    origin: str


def listed(text: str) -> tuple[str, ...]:
    """The items of a value with commas."""
    return tuple(item for part in text.split(",") if (item := part.strip()))
