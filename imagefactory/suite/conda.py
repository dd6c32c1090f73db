"""What a conda environment says of itself: the records in conda-meta, one JSON file a package.

Written by whatever linked the packages; the format is conda's own (`PrefixRecord`), of which name, version,
build and `paths_data` are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

META = "conda-meta"
HISTORY = f"{META}/history"


@dataclass(frozen=True)
class Record:
    """One package. `file` is where its record lies and `paths` are rows, one a path it brought."""

    name: str
    version: str
    build: str
    file: str
    paths: tuple[dict[str, Any], ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(str(row["_path"]) for row in self.paths)


def read_records(prefix: str) -> tuple[tuple[Record, ...], list[str]]:
    """The records of the environment at `prefix`, by name, and what is wrong with them."""
    folder, records, faults = os.path.join(prefix, META), [], []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if not name.endswith(".json"):
            continue
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                records.append(_parse(json.load(file), f"{META}/{name}"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            faults.append(f"{META}/{name} cannot be read: {type(error).__name__}: {error}")
    return tuple(records), faults


def _parse(data: dict[str, Any], file: str) -> Record:
    paths = tuple(data["paths_data"]["paths"])
    for row in paths:
        if not isinstance(row["_path"], str):
            raise TypeError("a path that is no text")
    return Record(name=data["name"], version=data["version"], build=data["build"], file=file, paths=paths)


def scripted(records: Iterable[Record]) -> list[str]:
    """Names of the packages that run a script when they are linked: what it writes is in no record."""
    return [record.name for record in records if f"bin/.{record.name}-post-link.sh" in record.files]


def within(paths: Iterable[str], folder: str) -> set[str]:
    """The paths that lie in `folder`, as seen from there."""
    start = folder.rstrip("/") + "/"
    return {path[len(start) :] for path in paths if path.startswith(start)}
