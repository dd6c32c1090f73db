"""Where wheels come from that are not of the machine's own package index."""

from __future__ import annotations

Origins = tuple[tuple[str, str], ...]


def from_indexes(origins: Origins) -> dict[str, str]:
    """Of a target's or lock's origins those that are names of indexes, by package."""
    return {name: origin for name, origin in origins if not origin.startswith("./")}


def from_files(origins: Origins) -> dict[str, str]:
    """Those that are paths of wheels, by package."""
    return {name: origin for name, origin in origins if origin.startswith("./")}
