"""The file in which uv is asked for packages: plain lines, or a project where some come from named indexes.

Only a project tells uv that a package comes from one index and from no other; the index is asked for
nothing else then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.model import Lock
from imagefactory.recipes.values import package_of

_PROJECT = "imagefactory-asked"


def write_asked(folder: Path, wanted: Iterable[str], lock: Lock, index: PackageIndex) -> Path:
    """The file in `folder` that asks for `wanted` (PEP 508), those of `lock.origins` from their indexes.

    Raises UsageError for an index whose address this machine does not know.
    """
    lines = sorted(set(wanted))
    names = set(map(package_of, lines))
    origins = [pair for pair in lock.origins if pair[0] in names]
    if not origins:
        path = folder / "asked.txt"
        path.write_text(as_lines(lines))
        return path
    path = folder / "pyproject.toml"
    addresses = {name: index.address(name, f"{lock.target}: {one}") for one, name in origins}
    text = [
        f'[project]\nname = "{_PROJECT}"\nversion = "0"\ndependencies = {json.dumps(lines)}',
        # Else uv would look for one in the folders above, where anyone could have put it.
        "[tool.uv.workspace]\nmembers = []",
        "[tool.uv.sources]",
        *(f"{one} = {{ index = {json.dumps(name)} }}" for one, name in origins),
    ]
    for name, url in addresses.items():
        text.append(f"[[tool.uv.index]]\nname = {json.dumps(name)}\nurl = {json.dumps(url)}\nexplicit = true")
    path.write_text(as_lines(text))
    return path


def as_lines(entries: Iterable[str]) -> str:
    """A line each."""
    return "".join(f"{entry}\n" for entry in entries)


def in_plain_words(told: str) -> str:
    """What uv says of the project as it says it of plain lines."""
    return told.replace(f"{_PROJECT} depends on", "you require")
