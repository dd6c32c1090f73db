"""What a project's own code needs of Python and setuptools, where its files do not say it.

Old research code imports modules that Python and its environments no longer have. Only the files of the
project are read, none is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from imagefactory.model import Where
from imagefactory.recipes.values import package_of
from imagefactory.extras.importers.spec import Wish

# Sources: the changelog of setuptools, 82.0.0, and its folder _distutils; PEP 632; PEP 594; for asynchat,
# asyncore, imp and smtpd "What's New In Python 3.12".
BROUGHT = {"pkg_resources": "setuptools<82", "distutils": "setuptools"}
FITTING = "81.0.0"
"""A release of setuptools that has pkg_resources."""
REMOVED = {
    **dict.fromkeys(("asynchat", "asyncore", "imp", "smtpd"), "3.12"),
    **dict.fromkeys(("cgi", "cgitb", "crypt", "imghdr", "pipes", "sndhdr", "telnetlib", "xdrlib"), "3.13"),
}
PYTHONS = ("3.9", "3.10", "3.11", "3.12")
OTHERS = {
    *("test", "tests", "example", "examples", "benchmark", "benchmarks", "doc", "docs", "build", "dist"),
    *("node_modules", "site-packages"),
}
"""Folders whose code is not the program itself."""
MOST_ENTRIES, LARGEST = 50_000, 1 << 20
# An import that is not indented is not within `try`, `if` or a function.
_IMPORT = re.compile(
    rb"^(?:import|from)[ \t]+(" + "|".join((*BROUGHT, *REMOVED)).encode() + rb")\b", re.MULTILINE
)


def add_needs(wish: Wish, root: Path) -> None:
    """Add to `wish` what the code below `root` needs, with a note each. What is locked or of conda stays."""
    if wish.locked or wish.conda:
        return
    found = find_imports(root)
    _add_setuptools(wish, {name: where for name, where in found.items() if name in BROUGHT})
    for name, where in found.items():
        if name in REMOVED:
            _bound_python(wish, name, where)


def _add_setuptools(wish: Wish, found: Mapping[str, Where]) -> None:
    if not found:
        return
    name = min(found, key=list(BROUGHT).index)
    text, where = BROUGHT[name], found[name]
    own = [Requirement(one) for one in (*wish.pip, *wish.constraints) if package_of(one) == "setuptools"]
    if name != "pkg_resources" and own:
        return
    if not all(one.specifier.contains(FITTING) for one in own):
        wish.note(where, f"the code imports {name}, which the file's own setuptools no longer has")
    elif own:
        wish.constraints.append(text)
        wish.note(where, f"{text} is a constraint: the code imports {name}, which setuptools 82 removed")
    else:
        wish.pip.append(text)
        wish.note(where, f"{text} is added: the code imports {name}, and the file names no setuptools")


def _bound_python(wish: Wish, module: str, where: Where) -> None:
    bounds = f"<{REMOVED[module]}"
    try:
        both = SpecifierSet(",".join(filter(None, (wish.python, bounds))))
    except InvalidSpecifier:  # a match spec of one version, such as 3.11.*
        return
    if any(both.contains(f"{python}.9") for python in PYTHONS) and str(both) != wish.python:
        wish.bound_python(str(both), where)
        wish.note(where, f"Python {bounds}: the code imports {module}, which {bounds[1:]} removed")


def find_imports(root: Path) -> dict[str, Where]:
    """Return the first import of each module of the tables, by its name."""
    found: dict[str, Where] = {}
    for path in _files(root):
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST)
        except OSError:
            continue
        for one in _IMPORT.finditer(data):
            line = data.count(b"\n", 0, one.start()) + 1
            found.setdefault(one[1].decode(), Where(file=str(path.relative_to(root)), line=line, column=1))
    return found


def _files(root: Path) -> Iterator[Path]:
    entries = 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(one for one in folders if one.lower() not in OTHERS and not one.startswith("."))
        if "pyvenv.cfg" in names:
            folders[:] = []
            continue
        entries += len(names)
        if entries > MOST_ENTRIES:
            return
        for name in sorted(names):
            path = Path(folder, name)
            if (
                name.endswith(".py")
                and name != "setup.py"
                and not name.startswith("test_")
                and path.is_file()
            ):
                yield path
