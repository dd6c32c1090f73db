"""Find system libraries that wheels need and a base lacks, before an image is built.

The needs of a wheel are read from its own libraries if the file is in the cache, otherwise from the table
next to this file, in which every row has its source. Only libraries of that table are reported: the smoke
test checks whether a wheel finds those of other wheels.
"""

from __future__ import annotations

import tomllib
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from imagefactory.model import LockedWheel
from imagefactory.suite import elf

MOST_BYTES = 256 << 20
"""The largest wheel to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingLibraries:
    """The missing libraries of a wheel, and the Debian packages that have them.

    `instead` is a project that works without them, empty for none. `base` is a base with them, if no package
    has them.
    """

    wheel: LockedWheel
    libraries: tuple[str, ...]
    packages: tuple[str, ...]
    instead: str
    base: str = ""

    def message(self, base: str) -> str:
        """Return the problem and its fix in one line."""
        wheel, libraries = f"{self.wheel.name} {self.wheel.version}", ", ".join(self.libraries)
        problem = f"{wheel} asks for {libraries}, which base {base} does not have"
        if self.base:
            return f"{problem}, nor has Debian: name {self.base} at base in the recipe"
        other = f"{self.instead} does without them; or " if self.instead else ""
        return f"{problem}: {other}write system: [{', '.join(self.packages)}] in the recipe"


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def package_of_library(name: str) -> str:
    """Return the Debian package of a library, by its soname; empty if it is unknown."""
    return str(_table()["library"].get(name) or _table()["other-library"].get(name, ""))


def find_lacking(
    wheels: Iterable[LockedWheel], base: Iterable[str], cached: Callable[[LockedWheel], Path | None]
) -> tuple[MissingLibraries, ...]:
    """Return the libraries that `wheels` need and the Debian packages in `base` lack.

    `cached` returns a wheel's file, None for a wheel that is not in the cache.
    """
    known: dict[str, str] = _table()["library"]
    elsewhere: dict[str, str] = _table()["elsewhere"]
    installed = {name.removesuffix("t64") for name in base}
    rows = {row["name"]: row for row in _table()["wheel"]}
    lacking = []
    for wheel in wheels:
        row, path = rows.get(wheel.name, {}), cached(wheel)
        needed = read_needed(path) if path else None
        names = sorted(row.get("needs", ()) if needed is None else needed)
        if missing := tuple(name for name in names if name in known and known[name] not in installed):
            packages = tuple(dict.fromkeys(known[name] for name in missing))
            instead = row.get("instead", "")
            lacking.append(
                MissingLibraries(wheel=wheel, libraries=missing, packages=packages, instead=instead)
            )
        if other := tuple(name for name in names if name in elsewhere):
            base_name = elsewhere[other[0]]
            lacking.append(
                MissingLibraries(wheel=wheel, libraries=other, packages=(), instead="", base=base_name)
            )
    return tuple(lacking)


def read_needed(path: Path) -> frozenset[str] | None:
    """Return the sonames that the libraries of a wheel need from outside the wheel.

    None for a file that is too large, or not a wheel.
    """
    own_libraries, needed = set[str](), set[str]()
    try:
        with zipfile.ZipFile(path) as wheel:
            if sum(entry.file_size for entry in wheel.infolist()) > MOST_BYTES:
                return None
            for entry in wheel.infolist():
                name = entry.filename.rpartition("/")[2]
                if ".so" not in name:
                    continue
                own_libraries.add(name)
                dynamic = _dynamic(wheel.read(entry))
                own_libraries |= {dynamic.soname} if dynamic else set()
                needed |= {*dynamic.needed} if dynamic else set()
    except (OSError, zipfile.BadZipFile):
        return None
    return frozenset(needed - own_libraries)


def _dynamic(data: bytes) -> elf.Dynamic | None:
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    try:
        return elf.parse_dynamic(data)
    except elf.CorruptElfError:  # the smoke test reports it
        return None
