"""Libraries of the system that wheels ask for and a base does not have, told before an image is built.

What a wheel asks for is read from its own libraries where the file is in the cache, and else taken from the
table beside this file, in which every row has its source. Only libraries that the table knows, by a
package of Debian or by what else brings them, are told: whether a wheel finds those of other wheels, the
smoke test says.
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
"""Of a wheel, and of one library in it: what is larger is not read for this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingLibraries:
    """One wheel, the libraries that it asks for in vain, and the packages of Debian that have them.

    `instead` is a project that does without, empty where none is known. Where no package has them, `base` is
    what brings them.
    """

    wheel: LockedWheel
    libraries: tuple[str, ...]
    packages: tuple[str, ...]
    instead: str
    base: str = ""

    def told(self, base: str) -> str:
        """All of it in one line."""
        asks = (
            f"{self.wheel.name} {self.wheel.version} asks for {', '.join(self.libraries)}, which base {base}"
        )
        if self.base:
            return f"{asks} does not have, nor has Debian: name {self.base} at base in the recipe"
        does = "" if not self.instead else f"{self.instead} does without them; or "
        names = ", ".join(self.packages)
        return f"{asks} does not have: {does}write system: [{names}] in the recipe"


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def package_of_library(name: str) -> str:
    """Return the package of Debian that has a library, by its soname; empty where it is not known."""
    return str(_table()["library"].get(name) or _table()["other-library"].get(name, ""))


def find_lacking(
    wheels: Iterable[LockedWheel], base: Iterable[str], cached: Callable[[LockedWheel], Path | None]
) -> tuple[MissingLibraries, ...]:
    """What of `wheels` asks for libraries that none of the packages of Debian named in `base` has.

    `cached` gives a wheel's file, None where it is not there.
    """
    known: dict[str, str] = _table()["library"]
    elsewhere: dict[str, str] = _table()["elsewhere"]
    there = {name.removesuffix("t64") for name in base}
    rows = {row["name"]: row for row in _table()["wheel"]}
    found = []
    for wheel in wheels:
        row = rows.get(wheel.name, {})
        path = cached(wheel)
        needed = read_needed(path) if path is not None else None
        wanted = row.get("needs", ()) if needed is None else needed
        missing = sorted(name for name in wanted if name in known and known[name] not in there)
        if missing:
            packages = tuple(dict.fromkeys(known[name] for name in missing))
            found.append(
                MissingLibraries(
                    wheel=wheel,
                    libraries=tuple(missing),
                    packages=packages,
                    instead=row.get("instead", ""),
                )
            )
        if other := sorted(name for name in wanted if name in elsewhere):
            lacking = MissingLibraries(
                wheel=wheel, libraries=tuple(other), packages=(), instead="", base=elsewhere[other[0]]
            )
            found.append(lacking)
    return tuple(found)


def read_needed(path: Path) -> frozenset[str] | None:
    """The sonames that the libraries of a wheel ask for and that are not among them.

    None for a file that is too large to be read for this, or no wheel.
    """
    own, needed = set[str](), set[str]()
    try:
        with zipfile.ZipFile(path) as wheel:
            if sum(one.file_size for one in wheel.infolist()) > MOST_BYTES:
                return None
            for entry in wheel.infolist():
                name = entry.filename.rpartition("/")[2]
                if ".so" not in name:
                    continue
                own.add(name)
                dynamic = _dynamic(wheel.read(entry))
                own |= {dynamic.soname} if dynamic else set()
                needed |= {*dynamic.needed} if dynamic else set()
    except (OSError, zipfile.BadZipFile):
        return None
    return frozenset(needed - own)


def _dynamic(data: bytes) -> elf.Dynamic | None:
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    try:
        return elf.parse_dynamic(data)
    except elf.NotReadable:  # which the smoke test tells
        return None
