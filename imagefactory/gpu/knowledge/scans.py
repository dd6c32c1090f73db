"""What scans of framework wheels found (`scanned.toml`), by the wheel's sha256.

The rows are made by `python -m imagefactory.actions.scan_wheels`, never by hand. So what a wheel
holds can be said without fetching it: its bytes are fixed by the hash that a lock names.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from imagefactory.gpu.capability import parse_code
from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.values import Contents, Library, Modules, Package


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedWheel:
    """A wheel that was scanned: `contents.source` is its file name, `source` says when and how."""

    package: str
    version: str
    file: str
    sha256: str
    contents: Contents
    source: str


@cache
def scanned_wheels() -> tuple[ScannedWheel, ...]:
    """All rows of scanned.toml, in its order."""
    return tuple(_wheel(row) for row in read_table("scanned").get("wheel", ()))


def scanned_for_amd64() -> tuple[ScannedWheel, ...]:
    """Those of which projects' pages speak."""
    return tuple(wheel for wheel in scanned_wheels() if not wheel.file.endswith("_aarch64.whl"))


def parse_scanned(text: str) -> tuple[ScannedWheel, ...]:
    """The rows of such a text, in its order."""
    return tuple(_wheel(row) for row in tomllib.loads(text).get("wheel", ()))


def scanned(sha256: str) -> Contents | None:
    """What the wheel with this hash (64 hex digits) holds, None if it was never scanned.

    Libraries that a framework neither must load nor loads on demand may be left out.
    """
    return _by_hash().get(sha256)


@cache
def _by_hash() -> dict[str, Contents]:
    return {wheel.sha256: wheel.contents for wheel in scanned_wheels()}


def _wheel(row: dict[str, Any]) -> ScannedWheel:
    contents = Contents(
        source=row["file"],
        libraries=tuple(_library(one) for one in row.get("library", ())),
        packages=(Package(name=row["package"], version=row["version"]),),
        facts=tuple((one[0], one[1], one[2]) for one in row.get("facts", ())),
    )
    return ScannedWheel(
        package=row["package"],
        version=row["version"],
        file=row["file"],
        sha256=row["sha256"],
        contents=contents,
        source=row["source"],
    )


def _library(row: dict[str, Any]) -> Library:
    return Library(
        path=row["path"],
        size=row["size"],
        modules=tuple(_modules(text) for text in row["modules"]),
        compressions=tuple(row.get("compressions", ())),
        unread=row.get("unread", ""),
    )


def _modules(text: str) -> Modules:
    """`332 sm_50 compute_80/8.1`: how many modules hold code for exactly these targets."""
    count, *codes = text.split()
    return Modules(count=int(count), codes=tuple(sorted(parse_code(code) for code in codes)))
