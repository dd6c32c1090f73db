"""The file in which uv is asked for packages: plain lines, or a project where some come from elsewhere.

Only a project tells uv that a package comes from one index and from no other; the index is asked for
nothing else then. Wheels that lie in the factory are shown to uv as such an index, so that no path of this
machine gets into what it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.lock.pypi.local import local_wheels
from imagefactory.lock.pypi.origins import from_files, from_indexes
from imagefactory.model import Lock
from imagefactory.recipes.values import package_of

_PROJECT = "imagefactory-asked"
_LOCAL = "factory.wheels"  # unlike any name of the settings


def write_asked(folder: Path, wanted: Iterable[str], lock: Lock, index: PackageIndex) -> Path:
    """Write the file in `folder` that requires `wanted` (PEP 508), those of `lock.origins` from there.

    Their order is kept: of two packages that compete, uv gives the newest release to the first one.
    Raises UsageError for an index whose address this machine does not know, LockError for a wheel as
    `local_wheels` does.
    """
    lines = list(dict.fromkeys(wanted))
    names = set(map(package_of, lines))
    origins = [pair for pair in lock.origins if pair[0] in names]
    if not origins:
        path = folder / "asked.txt"
        path.write_text(as_lines(lines))
        return path
    path = folder / "pyproject.toml"
    named, files = from_indexes(tuple(origins)), from_files(tuple(origins))
    addresses = {name: index.address(name, f"{lock.target}: {one}") for one, name in named.items()}
    flat = folder / "wheels"
    for wheel in local_wheels(replace(lock, origins=tuple(files.items())), index.root):
        flat.mkdir(exist_ok=True)
        (flat / wheel.filename).symlink_to(index.root.absolute() / files[wheel.name])
    text = [
        f'[project]\nname = "{_PROJECT}"\nversion = "0"\ndependencies = {json.dumps(lines)}',
        # Else uv would look for one in the folders above, where anyone could have put it.
        "[tool.uv.workspace]\nmembers = []",
        "[tool.uv.sources]",
        *(f"{one} = {{ index = {json.dumps(name)} }}" for one, name in named.items()),
        *(f"{one} = {{ index = {json.dumps(_LOCAL)} }}" for one in files),
    ]
    for name, url in addresses.items():
        text.append(f"[[tool.uv.index]]\nname = {json.dumps(name)}\nurl = {json.dumps(url)}\nexplicit = true")
    if files:
        text.append(
            f'[[tool.uv.index]]\nname = {json.dumps(_LOCAL)}\nurl = "{flat.as_uri()}"\nformat = "flat"'
            "\nexplicit = true"
        )
    path.write_text(as_lines(text))
    return path


def read_via(solution: str) -> dict[str, tuple[str, ...]]:
    """Return the packages that require each one, by uv's comments in a file that it compiled."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for line in solution.splitlines():
        if "==" in line and not line.startswith(" "):
            name = package_of(line)
        elif by := re.fullmatch(r" +# +(?:via +)?([A-Za-z0-9][A-Za-z0-9._-]*)", line):
            found[name] = (*found.get(name, ()), package_of(by[1]))
    return {name: tuple(one for one in by if one not in ("via", _PROJECT)) for name, by in found.items()}


def as_lines(entries: Iterable[str]) -> str:
    """A line each."""
    return "".join(f"{entry}\n" for entry in entries)


def in_plain_words(told: str) -> str:
    """What uv says of the project as it says it of plain lines."""
    return told.replace(f"{_PROJECT} depends on", "you require")
