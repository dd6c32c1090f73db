"""Locks of Python's own tools, read into a wish: `uv.lock` (version 1), `poetry.lock` and `pylock.toml`.

They hold what every platform and Python needs. What is meant for an image is found as the tools find it:
along dependencies whose markers hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from imagefactory.model import Where
from imagefactory.extras.importers.manifests import OptionalPackages, ProjectAsk, is_package, marker_holds, note_of_scripts, parse_project, read_folder_project
from imagefactory.recipes.own_code import take_folder, take_git
from imagefactory.extras.importers.pip_lines import Beside, is_mirror, take_index, take_pip_line
from imagefactory.recipes.values import canonical
from imagefactory.extras.importers.spec import PLATFORM, Wish, poetry_bounds, text_of
from imagefactory.recipes.yaml_tree import YamlNode, refused, show

Key = tuple[str, str, str]
"""Name, version and source: a lock may hold several of one name."""
_OWN = ("virtual", "editable", "directory")


# --- uv.lock -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lock:
    """The rows of a uv.lock, and what markers are judged by: Python, and the extras that are active.

    Those of projects whose extras exclude each other are `extra-4-proj-cpu` there, with the name's length.
    """

    rows: dict[Key, YamlNode]
    python: str
    active: frozenset[str]

    def meant(self, dependency: YamlNode) -> Iterator[Key]:
        """The packages that a row of dependencies is, none where its marker does not hold."""
        if not marker_holds(text_of(dependency, "marker"), self.python, self.active):
            return
        name, version = canonical(text_of(dependency, "name")), text_of(dependency, "version")
        source = _said(_map(dependency, "source"))
        for key in self.rows:
            if key[0] == name and version in ("", key[1]) and source in ("", key[2]):
                yield key


def read_uv_lock(root: YamlNode, file: str, asked: ProjectAsk) -> Wish:
    """What the project of a uv.lock needs at run time, each package at its version.

    Raises RecipeError for another format, and for an extra or a group that it does not have.
    """
    if text_of(root, "version") != "1":
        found = text_of(root, "version") or "none"
        raise refused(
            root.where,
            "format-unsupported",
            f"has the format {show(found)}",
            "create it with a uv that writes 1",
        )
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
    main = _main_registry(rows.values())
    if main and not is_mirror(main):
        what = f"the index {show(main, limit=120)}"
        wish.note(root.where, f"{what}: packages come from the index of this machine's settings")
    starts = [*chosen, *(_manifest(root, rows) if not own else [])] or list(rows)
    for key in _reached(lock, starts, chosen, (extras, groups)):
        if key in own:
            _take_own(wish, rows[key], asked.beside)
        else:
            _take(wish, rows[key], asked.beside, main)
    return wish


def _main_registry(rows: Iterable[YamlNode]) -> str:
    """The index that most packages of a uv.lock come from; none that has builds for one CUDA, and no page."""
    found = [text_of(_map(row, "source"), "registry") for row in rows]
    plain = [one for one in found if one and not re.search(r"/whl(/|$)|/cu[0-9]{2,3}\b|\.html?$", one)]
    return max(plain, key=plain.count, default="")


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
    extras, groups, optional = set[str](), set[str](), OptionalPackages()
    for row in projects.values():
        for key, value in _map(row, "optional-dependencies").pairs:
            needs = [text_of(item, "name") for item in value.items]
            optional.add_extra(key.text, lambda name=key.text: extras.add(canonical(name)), needs)  # type: ignore[misc]
        for key, value in _map(row, "dev-dependencies").pairs:
            needs = [text_of(item, "name") for item in value.items]
            optional.add_group(key.text, lambda name=key.text: groups.add(canonical(name)), needs)  # type: ignore[misc]
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
    rows, python = _rows(root, "package"), asked.beside.python
    chosen, groups = _of_poetry(wish, root, rows, asked)
    project = read_folder_project(".", replace(asked, named=False), lambda _: python)
    grouped = any(_groups(row) for row in rows)
    starts = chosen
    if not grouped and project is not None:  # as Poetry 1.5 to 1.8 wrote it
        starts = chosen | dict(map(_name_extras, project.pip))
    reached, needed = _needed(rows, starts, python), _meant_by_any(rows, python)
    taken: dict[str, list[YamlNode]] = {}
    for row in rows:
        name, marker = canonical(text_of(row, "name")), row.get("markers")
        text = marker.text if marker and marker.kind == "text" else text_of(marker, "main") if marker else ""
        own = set(_groups(row)) or {"main"}
        if not own & {"main", *groups} or (text_of(row, "optional") == "true" and name not in reached):
            continue  # told with the extras and groups
        if not grouped and project is not None and name not in reached:
            continue
        if marker_holds(text, python, asked.extras) if text else needed.get(name, True):
            taken.setdefault(name, []).append(row)
        else:
            wish.note(row.where, f"{show(name)} {text_of(row, 'version')} is not for Python {python} here")
    for name, same in taken.items():
        versions = [text_of(row, "version") for row in same]
        if len(set(versions)) > 1:
            do = "import the project's pyproject.toml, with --extra NAME"
            what = f"which of {show(' and '.join(versions))} of {show(name)} is meant"
            wish.leave(same[0].where, f"the lock does not say {what}", do)
        else:
            _take(wish, same[0], asked.beside)
    described = parse_project(asked.beside.read("pyproject.toml"), "pyproject.toml")
    if described is not None and is_package(described):
        take_folder(wish, asked.beside.place, ".", root.where)
    return wish


def _groups(row: YamlNode) -> list[str]:
    return [item.text for item in _rows(row, "groups")] or list(filter(None, [text_of(row, "category")]))


def _name_extras(text: str) -> tuple[str, frozenset[str]]:
    """The package and the extras of `uvicorn[standard] (>=0.12)`."""
    extras = re.findall(r"[A-Za-z0-9._-]+", text.partition("[")[2].partition("]")[0])
    return canonical(re.split(r"[ (\[<>=!~;]", text)[0]), frozenset(map(canonical, extras))


def _of_poetry(
    wish: Wish, root: YamlNode, rows: list[YamlNode], asked: ProjectAsk
) -> tuple[dict[str, frozenset[str]], set[str]]:
    """The packages of the extras that are asked for, with their own extras, and the groups."""
    packages, groups, optional = dict[str, frozenset[str]](), set[str](), OptionalPackages()
    for key, value in _map(root, "extras").pairs:
        named = dict(_name_extras(item.text) for item in value.items)
        optional.add_extra(key.text, lambda named=named: packages.update(named), named)  # type: ignore[misc]
    for name in dict.fromkeys(group for row in rows for group in _groups(row) if group != "main"):
        optional.add_group(name, lambda name=name: groups.add(name))  # type: ignore[misc]
    optional.take(wish, asked, root.where)
    return packages, groups


def _needed(
    rows: list[YamlNode], starts: Mapping[str, frozenset[str]], python: str
) -> dict[str, frozenset[str]]:
    """What is reached from some packages by dependencies that hold here, with the extras asked of each."""
    by_name: dict[str, list[YamlNode]] = {}
    for row in rows:
        by_name.setdefault(canonical(text_of(row, "name")), []).append(row)
    reached, waiting = dict[str, frozenset[str]](), list(starts.items())
    while waiting:
        name, extras = waiting.pop()
        if name in reached and extras <= reached[name]:
            continue
        extras |= reached.get(name, frozenset())
        reached[name] = extras
        for row in by_name.get(name, ()):
            for key, value in _map(row, "dependencies").pairs:
                for one in value.items or [value]:
                    if marker_holds(text_of(one, "markers"), python, extras):
                        more = frozenset(canonical(item.text) for item in _rows(one, "extras"))
                        waiting.append((canonical(key.text), more))
    return reached


def _meant_by_any(rows: list[YamlNode], python: str) -> dict[str, bool]:
    """By name whether a package that needs it needs it here; the lock has what some extra asks for."""
    found: dict[str, bool] = {}
    for row in rows:
        for key, value in _map(row, "dependencies").pairs:
            name = canonical(key.text)
            for one in value.items or [value]:
                found[name] = found.get(name, False) or marker_holds(text_of(one, "markers"), python)
    return found


# --- pylock.toml ---------------------------------------------------------------------------------

_IN_LIST = re.compile(r"""["']([^"']+)["']\s+(not\s+)?in\s+(extras|dependency_groups)\b""")


def read_pylock(root: YamlNode, file: str, asked: ProjectAsk) -> Wish:
    """The packages of a pylock.toml that its markers choose for this Python, each at its version.

    Source: PyPA's specification "pylock.toml". Raises RecipeError for another format, and for a lock of other
    environments.
    """
    version, python = text_of(root, "lock-version"), asked.beside.python
    if version.partition(".")[0] != "1":
        do = "make it with a tool that writes 1.0"
        raise refused(root.where, "format-unsupported", f"has the format {show(version or 'none')}", do)
    wish = Wish(file=file, locked=True)
    wish.bound_python(text_of(root, "requires-python"), root.where)
    environments = [item.text for item in _rows(root, "environments")]
    if environments and not any(marker_holds(one, python) for one in environments):
        what = f"is for other environments than {PLATFORM} with Python {python}"
        raise refused(_map(root, "environments").where, "platform-missing", what, "lock it for Linux too")
    rows = _rows(root, "packages")
    chosen = _chosen_of_pylock(wish, root, rows, asked)
    taken: dict[str, YamlNode] = {}
    for row in rows:
        name, bounds = canonical(text_of(row, "name")), text_of(row, "requires-python")
        if not _pylock_holds(row, python, *chosen):
            optional = _pylock_holds(row, python, None, None)
            if not optional:  # what an extra or group brings is told with these
                wish.note(
                    row.where, f"{show(name)} {text_of(row, 'version')} is not for Python {python} here"
                )
        elif bounds and not _python_within(python, bounds):
            do = "lock it for that Python, or take another"
            wish.leave(row.where, f"{show(name)} is for Python {show(bounds)}, not {python}", do)
        elif name in taken:
            what = f"the lock has two packages {show(name)} for one environment"
            raise refused(
                row.where,
                "duplicate-package",
                what,
                f"lock it again: the other is in line {taken[name].where.line}",
            )
        else:
            taken[name] = row
    main = _main_index(taken.values())
    if main and not is_mirror(main):
        what = f"the index {show(main, limit=120)}"
        wish.note(root.where, f"{what}: packages come from the index of this machine's settings")
    for row in taken.values():
        _take_of_pylock(wish, row, asked.beside, main)
    return wish


def _chosen_of_pylock(
    wish: Wish, root: YamlNode, rows: list[YamlNode], asked: ProjectAsk
) -> tuple[set[str], set[str]]:
    """The extras and groups that are asked for, the groups of a default install among them."""
    default = {canonical(item.text) for item in _rows(root, "default-groups")}
    extras, groups, optional = set[str](), set(default), OptionalPackages()
    python = asked.beside.python

    def needs(extras: set[str], groups: set[str]) -> list[str]:
        fitting = (row for row in rows if _pylock_holds(row, python, extras, groups))
        return [text_of(row, "name") for row in fitting if not _pylock_holds(row, python, set(), default)]

    for item in _rows(root, "extras"):
        name = canonical(item.text)
        optional.add_extra(item.text, lambda name=name: extras.add(name), needs({name}, default))  # type: ignore[misc]
    for item in _rows(root, "dependency-groups"):
        name = canonical(item.text)
        if name not in default:
            optional.add_group(item.text, lambda name=name: groups.add(name), needs(set(), {*default, name}))  # type: ignore[misc]
    optional.take(wish, asked, root.where)
    return extras, groups


def _pylock_holds(row: YamlNode, python: str, extras: set[str] | None, groups: set[str] | None) -> bool:
    """Whether a package's marker holds with these extras and groups; None stands for any."""

    def judged(found: re.Match[str]) -> str:
        chosen = extras if found[3] == "extras" else groups
        holds = chosen is None or (canonical(found[1]) in chosen) != bool(found[2])
        return f"python_version {'>=' if holds else '<'} '0'"

    return marker_holds(_IN_LIST.sub(judged, text_of(row, "marker")), python)


def _python_within(python: str, bounds: str) -> bool:
    try:
        return SpecifierSet(bounds).contains(f"{python}.99")
    except InvalidSpecifier:
        return True


def _main_index(rows: Iterable[YamlNode]) -> str:
    found = [one for row in rows if (one := text_of(row, "index"))]
    plain = [one for one in found if not re.search(r"/whl(/|$)|/cu[0-9]{2,3}\b|\.html?$", one)]
    return max(plain, key=plain.count, default="")


def _take_of_pylock(wish: Wish, row: YamlNode, beside: Beside, main: str) -> None:
    name, version, index = text_of(row, "name"), text_of(row, "version"), text_of(row, "index")
    vcs, archive = _map(row, "vcs"), _map(row, "archive")
    if row.get("vcs"):
        address, commit = text_of(vcs, "url"), text_of(vcs, "commit-id")
        if text_of(vcs, "type") == "git" and address:
            written = f"{address}@{commit}" if commit else address
            take_git(wish, written, row.where, folder=text_of(vcs, "subdirectory"))
        else:
            do = "put its files into a folder of the project, and write ./FOLDER under packages"
            wish.leave(row.where, f"{show(name)} comes from no git repository with an address", do)
    elif folder := row.get("directory"):
        take_folder(wish, beside.place, text_of(folder, "path"), row.where)
    elif row.get("archive"):
        address = text_of(archive, "url") or text_of(archive, "path")
        take_pip_line(wish, f"{name} @ {address}" if "://" in address else address, row.where, beside)
    elif not version:
        do = "lock it again: packages from an index have a version"
        wish.leave(row.where, f"{show(name)} has no version and no source", do)
    else:
        if index and index != main and not is_mirror(index):
            take_index(wish, index, row.where)
        take_pip_line(wish, f"{name}=={version}", row.where, beside)


# --- rows ----------------------------------------------------------------------------------------


def _take(wish: Wish, row: YamlNode, beside: Beside, main: str = "") -> None:
    """Take a locked package. What comes from `main` comes from the index of this machine's settings."""
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
        if kind == "legacy" or (kind == "registry" and address != main and not is_mirror(address)):
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
