"""The records of a conda environment in conda-meta: one JSON file for each package.

The format is that of conda (`PrefixRecord`). Only name, version, build and `paths_data` are read.
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
    """The record of one package.

    `file` is the path of the record, `paths` has a row for each installed path.
    """

    name: str
    version: str
    build: str
    file: str
    paths: tuple[dict[str, Any], ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(str(row["_path"]) for row in self.paths)


def read_records(prefix: str) -> tuple[tuple[Record, ...], list[str]]:
    """Return the records of the environment at `prefix`, sorted by name, and their faults."""
    folder, records, faults = os.path.join(prefix, META), [], []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if not name.endswith(".json"):
            continue
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                data = json.load(file)
            paths = tuple(data["paths_data"]["paths"])
            if not all(isinstance(row["_path"], str) for row in paths):
                raise TypeError("a path is not a string")
            records.append(Record(data["name"], data["version"], data["build"], f"{META}/{name}", paths))
        except (OSError, ValueError, KeyError, TypeError) as error:
            faults.append(f"{META}/{name} cannot be read: {type(error).__name__}: {error}")
    return tuple(records), faults


def scripted(records: Iterable[Record]) -> list[str]:
    """Return the packages that run a script when they are linked. No record lists what a script writes."""
    return [record.name for record in records if f"bin/.{record.name}-post-link.sh" in record.files]


def within(paths: Iterable[str], folder: str) -> set[str]:
    """Return the paths in `folder`, relative to it."""
    start = folder.rstrip("/") + "/"
    return {path[len(start) :] for path in paths if path.startswith(start)}
