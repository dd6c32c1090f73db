"""Locks of Python's own tools, read into a wish: `uv.lock` (version 1) and `poetry.lock`.

Both hold what every platform and Python needs. What is meant for an image is found as the tools find it:
along dependencies whose markers hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.markers import InvalidMarker, Marker

from imagefactory.recipes.pip_lines import Beside, holds, take_pip_line
from imagefactory.recipes.values import canonical
from imagefactory.recipes.wish import Wish, poetry_bounds, text_of
from imagefactory.recipes.yaml_tree import YamlNode, refused, show

Key = tuple[str, str]
"""Name and version: a lock may hold several versions of one name."""


def read_uv_lock(root: YamlNode, file: str, python: str) -> Wish:
    """What the project of a uv.lock needs at run time, each package at its version."""
    if text_of(root, "version") != "1":
        found = text_of(root, "version") or "none"
        raise refused(root.where, f"has the format {show(found)}", "make it with a uv that writes 1")
    wish = Wish(file=file, locked=True)
    wish.bound_python(text_of(root, "requires-python"), root.where)
    rows = {_key(row): row for row in _rows(root, "package")}
    own = {key: row for key, row in rows.items() if _source(row) in ("virtual", "editable", "directory")}
    here = {key: row for key, row in own.items() if text_of(_map(row, "source"), _source(row)) == "."}
    asked = _manifest(root, rows) if not own else []
    _tell_groups(wish, here or own)
    reached: dict[Key, None] = {}
    waiting = [*(here or own), *asked] or list(rows)
    extras = {key: set[str]() for key in waiting}
    while waiting:
        key = waiting.pop(0)
        reached[key] = None
        row = rows[key]
        wanted = [*_rows(row, "dependencies")]
        for extra in sorted(extras[key]):
            wanted += _rows(_map(row, "optional-dependencies"), extra)
        for dependency in wanted:
            more = {item.text for item in _rows(dependency, "extra")}
            for other in _meant(dependency, rows, python):
                new = more - extras.setdefault(other, set())
                if other not in reached or new:
                    extras[other] |= new
                    waiting.append(other)
    for key in sorted(reached):
        if key not in own:
            _take(wish, rows[key], python)
    return wish


def _manifest(root: YamlNode, rows: dict[Key, YamlNode]) -> list[Key]:
    """What the lock of a script was asked for."""
    names = {canonical(text_of(one, "name")) for one in _rows(_map(root, "manifest"), "requirements")}
    return [key for key in rows if key[0] in names]


def _tell_groups(wish: Wish, projects: dict[Key, YamlNode]) -> None:
    for row in projects.values():
        for kind, word in (("optional-dependencies", "extra"), ("dev-dependencies", "group")):
            for key, _ in _map(row, kind).pairs:
                wish.leave(key.where, f"the {word} {show(key.text)} is not taken", "add what it must have")


def _meant(dependency: YamlNode, rows: dict[Key, YamlNode], python: str) -> Iterator[Key]:
    """The packages that a row of dependencies is, none where its marker does not hold."""
    if not _holds(text_of(dependency, "marker"), python):
        return
    name, version = canonical(text_of(dependency, "name")), text_of(dependency, "version")
    yield from (key for key in rows if key[0] == name and version in ("", key[1]))


def read_poetry_lock(root: YamlNode, file: str, python: str) -> Wish:
    """The packages of a poetry.lock for run time, each at its version."""
    wish = Wish(file=file, locked=True)
    wish.bound_python(poetry_bounds(text_of(_map(root, "metadata"), "python-versions")) or "", root.where)
    rows = _rows(root, "package")
    needed: dict[str, list[bool]] = {}
    for row in rows:
        for key, value in _map(row, "dependencies").pairs:
            for one in value.items or [value]:
                needed.setdefault(canonical(key.text), []).append(_holds(text_of(one, "markers"), python))
    for row in rows:
        name = text_of(row, "name")
        groups = [item.text for item in _rows(row, "groups")] or [text_of(row, "category") or "main"]
        marker = row.get("markers")
        text = marker.text if marker and marker.kind == "text" else text_of(marker, "main") if marker else ""
        if "main" not in groups:
            wish.leave(
                row.where, f"{show(name)} is of the group {show(groups[0])}", "add it if it must be there"
            )
        elif text_of(row, "optional") == "true":
            wish.leave(row.where, f"{show(name)} is optional", "add it if it must be there")
        elif not (_holds(text, python) if text else any(needed.get(canonical(name), [True]))):
            wish.leave(row.where, f"{show(name)} is not for Python {python} here", "nothing to do")
        else:
            _take(wish, row, python)
    return wish


def _take(wish: Wish, row: YamlNode, python: str) -> None:
    name, version, source = text_of(row, "name"), text_of(row, "version"), _map(row, "source")
    kind = text_of(source, "type") or _source(row)
    address = text_of(source, "url") or text_of(source, "registry")
    wish.hints += re.findall(r"/cu[0-9]{2,3}\b", address)
    if kind in ("git", "url", "file", "directory", "path", "editable", "virtual"):
        do = f"write {name} with bounds, if an index has it"
        wish.leave(row.where, f"{show(name)} does not come from an index", do)
    else:
        take_pip_line(wish, f"{name}=={version}", row.where, Beside(python))


def _holds(marker: str, python: str) -> bool:
    """A marker that cannot be read holds: a package too many is told by the lock, one too few by nobody."""
    try:
        return not marker or holds(Marker(marker), python)
    except InvalidMarker:
        return True


def _source(row: YamlNode) -> str:
    return next(iter(_map(row, "source").keys), "")


def _key(row: YamlNode) -> Key:
    return canonical(text_of(row, "name")), text_of(row, "version")


def _map(node: YamlNode, key: str) -> YamlNode:
    return node.get(key) or YamlNode(node.where, "map")


def _rows(node: YamlNode, key: str) -> list[YamlNode]:
    return _map(node, key).items
