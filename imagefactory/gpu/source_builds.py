"""What packages need to be built from source, where their own files do not say it: a table with sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from imagefactory.gpu.knowledge.tables import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBuild:
    """One row of source_builds.toml."""

    name: str
    code: frozenset[str]
    debian: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    source: str


def source_build(name: str) -> SourceBuild | None:
    """The row of a package by its normalized name, None for one that the table does not know."""
    return _rows().get(name)


@cache
def _rows() -> dict[str, SourceBuild]:
    return {
        row["name"]: SourceBuild(
            name=row["name"],
            code=frozenset(row["code"]),
            debian=tuple(row.get("debian", ())),
            environment=tuple(row.get("environment", {}).items()),
            source=row["source"],
        )
        for row in read_table("source_builds")["package"]
    }
