"""What packages need to be built from source, where their own files do not say it: a table with sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    architectures: tuple[tuple[str, tuple[str, ...]], ...]
    source: str

    def variables(self, capabilities: Iterable[str]) -> Mapping[str, str]:
        """Return what its build reads from the environment, for these compute capabilities ("8.6")."""
        variables = dict(self.environment)
        for name, values in self.architectures:
            found = {_architecture(capability, values) for capability in capabilities} - {""}
            if found:
                variables[name] = ";".join(sorted(found, key=int))
        return variables


def _architecture(capability: str, values: Iterable[str]) -> str:
    """The newest value whose code a capability runs: of the same major version, and no newer."""
    major, _, minor = capability.partition(".")
    number = int(major + minor[:1])
    fits = [value for value in values if value[:-1] == major and int(value) <= number]
    return max(fits, key=int, default="")


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
            architectures=tuple((key, tuple(v)) for key, v in row.get("architectures", {}).items()),
            source=row["source"],
        )
        for row in read_table("source_builds")["package"]
    }
