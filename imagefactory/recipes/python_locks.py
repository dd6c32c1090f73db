"""Locks of Python's own tools, read into a wish: `uv.lock` (version 1) and `poetry.lock`.

Both hold what every platform and Python needs. What is meant for an image is found as the tools find it:
along dependencies whose markers hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from imagefactory.model import Where
from imagefactory.recipes.manifests import (
    Optional,
    ProjectAsk,
    marker_holds,
    note_of_scripts,
    read_folder_project,
)
from imagefactory.recipes.own_code import take_folder, take_git
from imagefactory.recipes.pip_lines import Beside, take_index, take_pip_line
from imagefactory.recipes.values import canonical
from imagefactory.recipes.wish import Wish, poetry_bounds, text_of
from imagefactory.recipes.yaml_tree import YamlNode, refused, show

Key = tuple[str, str, str]
"""Name, version and source: a lock may hold several of one name."""
_OWN = ("virtual", "editable", "directory")


# --- uv.lock -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lock:
    """The rows of a uv.lock, and what markers are judged by: Python, and the extras that are active."""

    rows: dict[Key, YamlNode]
    python: str
    active: frozenset[str]

    def meant(self, dependency: YamlNode) -> Iterator[Key]:
        """The packages that a row of dependencies is, none where its marker does not hold."""
        if not marker_holds(self._plain(text_of(dependency, "marker")), self.python):
            return
        name, version = canonical(text_of(dependency, "name")), text_of(dependency, "version")
        source = _said(_map(dependency, "source"))
        for key in self.rows:
            if key[0] == name and version in ("", key[1]) and source in ("", key[2]):
                yield key

    def _plain(self, marker: str) -> str:
        """Markers on extras of projects that exclude each other, as uv writes them: `extra-4-proj-cpu`."""

        def judged(found: re.Match[str]) -> str:
            holds = (found[2] in self.active) == (found[1] == "==")
            return "python_version >= '0'" if holds else "python_version < '0'"

        return re.sub(r"extra (==|!=) '((?:extra|group|project)-[0-9]+-[^']+)'", judged, marker)


def read_uv_lock(root: YamlNode, file: str, asked: ProjectAsk) -> Wish:
    """What the project of a uv.lock needs at run time, each package at its version.

    Raises RecipeError for another format, and for an extra or a group that it does not have.
    """
    if text_of(root, "version") != "1":
        found = text_of(root, "version") or "none"
        raise refused(root.where, f"has the format {show(found)}", "make it with a uv that writes 1")
    wish = Wish(file=file, locked=True)
    wish.bound_python(text_of(root, "requires-python"), root.where)
    rows = {_key(row): row for row in _rows(root, "package")}
    own = {key: row for key, row in rows.items() if _kind(row) in _OWN}
    here = {key: row for key, row in own.items() if text_of(_map(row, "source"), _kind(row)) == "."}
    chosen = here or own
    extras, groups = _chosen(wish, chosen, asked, root.where)
    active = {f"extra-{len(key[0])}-{key[0]}-{extra}" for key in chosen for extra in extras}
    active |= {f"group-{len(key[0])}-{key[0]}-{group}" for key in chosen for group in groups}
    lock = _Lock(rows=rows, python=asked.beside.python, active=frozenset(active))
    starts = [*chosen, *(_manifest(root, rows) if not own else [])] or list(rows)
    for key in _reached(lock, starts, chosen, (extras, groups)):
        if key in own:
            _take_own(wish, rows[key], asked.beside)
        else:
            _take(wish, rows[key], asked.beside)
    return wish


def _reached(
    lock: _Lock, starts: Iterable[Key], chosen: Iterable[Key], wanted: tuple[set[str], set[str]]
) -> list[Key]:
    """The packages along dependencies from `starts`, of the `chosen` with the wanted extras and groups."""
    first, reached = set(chosen), dict[Key, None]()
    waiting = list(starts)
    extras = {key: set(wanted[0]) if key in first else set[str]() for key in waiting}
    while waiting:
        key = waiting.pop(0)
        reached[key] = None
        row = lock.rows[key]
        needed = [*_rows(row, "dependencies")]
        for extra in sorted(extras[key]):
            needed += _optional(row, "optional-dependencies", extra)
        for group in sorted(wanted[1]) if key in first else ():
            needed += _optional(row, "dev-dependencies", group)
        for dependency in needed:
            more = {canonical(item.text) for item in _rows(dependency, "extra")}
            for other in lock.meant(dependency):
                new = more - extras.setdefault(other, set())
                if other not in reached or new:
                    extras[other] |= new
                    waiting.append(other)
    return sorted(reached)


def _chosen(
    wish: Wish, projects: dict[Key, YamlNode], asked: ProjectAsk, where: Where
) -> tuple[set[str], set[str]]:
    """The extras and groups that are asked for, of those that the lock's own projects have."""
    extras, groups, optional = set[str](), set[str](), Optional()
    for row in projects.values():
        for name in _map(row, "optional-dependencies").keys:
            optional.add_extra(name, lambda name=name: extras.add(canonical(name)))  # type: ignore[misc]
        for name in _map(row, "dev-dependencies").keys:
            optional.add_group(name, lambda name=name: groups.add(canonical(name)))  # type: ignore[misc]
    optional.take(wish, asked, where)
    return extras, groups


def _optional(row: YamlNode, kind: str, wanted: str) -> Iterator[YamlNode]:
    for key, value in _map(row, kind).pairs:
        if canonical(key.text) == wanted:
            yield from value.items


def _manifest(root: YamlNode, rows: dict[Key, YamlNode]) -> list[Key]:
    """What the lock of a script was asked for."""
    names = {canonical(text_of(one, "name")) for one in _rows(_map(root, "manifest"), "requirements")}
    return [key for key in rows if key[0] in names]


def _take_own(wish: Wish, row: YamlNode, beside: Beside) -> None:
    """A project that is locked with what it needs: a source where it is a package."""
    if _kind(row) == "virtual":
        wish.note(row.where, f"{show(text_of(row, 'name'))}: {note_of_scripts()}")
    else:
        take_folder(wish, beside.place, text_of(_map(row, "source"), _kind(row)), row.where)


# --- poetry.lock ---------------------------------------------------------------------------------


def read_poetry_lock(root: YamlNode, file: str, asked: ProjectAsk) -> Wish:
    """The packages of a poetry.lock for run time, each at its version, and the project's own code."""
    wish = Wish(file=file, locked=True)
    wish.bound_python(poetry_bounds(text_of(_map(root, "metadata"), "python-versions")) or "", root.where)
    rows = _rows(root, "package")
    python = asked.beside.python
    extras, groups = _of_poetry(wish, root, rows, asked)
    roots = _roots(asked, extras, groups) if not any(_groups(row) for row in rows) else None
    needed = _needed(rows, python, {*extras, *(roots or ())}, marked=roots is not None)
    for row in rows:
        name = canonical(text_of(row, "name"))
        marker = row.get("markers")
        text = marker.text if marker and marker.kind == "text" else text_of(marker, "main") if marker else ""
        text = re.sub(r"extra (==|!=) \"([^\"]+)\"", lambda found: _extra_holds(found, asked), text)
        own = set(_groups(row) or ["main"])
        if roots is not None:
            if name in needed:
                _take(wish, row, asked.beside)
        elif not own & {"main", *groups} or (
            text_of(row, "optional") == "true" and name not in needed and not own & groups
        ):
            continue  # told with the extras and groups
        elif not (marker_holds(text, python) if text else needed.get(name, True)):
            wish.note(row.where, f"{show(name)} is not for Python {python} here")
        else:
            _take(wish, row, asked.beside)
    project = read_folder_project(".", ProjectAsk(beside=asked.beside), lambda _: python)
    for source in project.sources[:1] if project else ():
        take_folder(wish, asked.beside.place, source, root.where)
    return wish


def _extra_holds(found: re.Match[str], asked: ProjectAsk) -> str:
    holds = (canonical(found[2]) in map(canonical, asked.extras)) == (found[1] == "==")
    return "python_version >= '0'" if holds else "python_version < '0'"


def _groups(row: YamlNode) -> list[str]:
    return [item.text for item in _rows(row, "groups")] or list(filter(None, [text_of(row, "category")]))


def _of_poetry(
    wish: Wish, root: YamlNode, rows: list[YamlNode], asked: ProjectAsk
) -> tuple[set[str], set[str]]:
    """The packages of the extras that are asked for, and the groups."""
    packages, groups, optional = set[str](), set[str](), Optional()
    for key, value in _map(root, "extras").pairs:
        names = {canonical(re.split(r"[ (\[<>=!~;]", item.text)[0]) for item in value.items}
        optional.add_extra(key.text, lambda names=names: packages.update(names))  # type: ignore[misc]
    for name in dict.fromkeys(group for row in rows for group in _groups(row) if group != "main"):
        optional.add_group(name, lambda name=name: groups.add(name))  # type: ignore[misc]
    optional.take(wish, asked, root.where)
    return packages, groups


def _roots(asked: ProjectAsk, extras: set[str], groups: set[str]) -> set[str] | None:
    """What the project beside a lock without groups (Poetry 1.5 to 1.8) needs itself; None where unknown."""
    project = read_folder_project(".", ProjectAsk(beside=asked.beside), lambda _: asked.beside.python)
    if project is None:
        return None
    return {canonical(re.split(r"[ \[<>=!~]", text)[0]) for text in project.pip} | extras | groups


def _needed(rows: list[YamlNode], python: str, starts: set[str], *, marked: bool) -> dict[str, bool]:
    """By name whether something needs a package here; with `marked` only what is reached from `starts`."""
    edges: dict[str, dict[str, bool]] = {}
    for row in rows:
        below = edges.setdefault(canonical(text_of(row, "name")), {})
        for key, value in _map(row, "dependencies").pairs:
            for one in value.items or [value]:
                name = canonical(key.text)
                wanted = marker_holds(text_of(one, "markers"), python) and text_of(one, "optional") != "true"
                below[name] = below.get(name, False) or wanted
    reached, waiting = dict.fromkeys(starts, True), list(starts)
    while waiting:
        for name, wanted in edges.get(waiting.pop(), {}).items():
            if wanted and name not in reached:
                reached[name] = True
                waiting.append(name)
    if marked:
        return reached
    for below in edges.values():
        for name, wanted in below.items():
            reached[name] = reached.get(name, False) or wanted
    return reached


# --- rows ----------------------------------------------------------------------------------------


def _take(wish: Wish, row: YamlNode, beside: Beside) -> None:
    name, version, source = text_of(row, "name"), text_of(row, "version"), _map(row, "source")
    kind = text_of(source, "type") or _kind(row)
    address = text_of(source, "url") or text_of(source, kind)
    if kind == "git":
        commit = text_of(source, "resolved_reference") or address.partition("#")[2]
        query = dict(
            part.partition("=")[::2] for part in address.partition("#")[0].partition("?")[2].split("&")
        )
        folder = query.get("subdirectory", "") or text_of(source, "subdirectory")
        plain = re.split(r"[?#]", address.removeprefix("git+"))[0]
        take_git(wish, f"{plain}@{commit}" if commit else plain, row.where, folder=folder)
    elif kind in ("directory", "editable", "virtual"):
        take_folder(wish, beside.place, address, row.where)
    elif kind in ("path", "file", "url"):
        take_pip_line(wish, f"{name} @ {address}" if "://" in address else address, row.where, beside)
    else:
        if re.search(r"/whl(/|$)|/cu[0-9]{2,3}\b", address) or kind == "legacy":
            take_index(wish, address, row.where)
        take_pip_line(wish, f"{name}=={version}", row.where, beside)


def _kind(row: YamlNode) -> str:
    return next(iter(_map(row, "source").keys), "")


def _said(source: YamlNode) -> str:
    return " ".join(value.text for _, value in source.pairs)


def _key(row: YamlNode) -> Key:
    return canonical(text_of(row, "name")), text_of(row, "version"), _said(_map(row, "source"))


def _map(node: YamlNode, key: str) -> YamlNode:
    return node.get(key) or YamlNode(node.where, "map")


def _rows(node: YamlNode, key: str) -> list[YamlNode]:
    return _map(node, key).items
