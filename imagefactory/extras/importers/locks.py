"""Read the locks of uv, Poetry, pixi and conda-lock, pylock.toml and lists of addresses (`@EXPLICIT`).

Locks of Python tools contain packages for every platform and Python version. Those for an image are selected
as the tools do: along dependencies whose markers match.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from imagefactory.extras.importers.manifests import (
    OptionalPackages,
    ProjectReadOptions,
    is_package,
    marker_applies,
    note_of_scripts,
    parse_project,
    read_project_directory,
)
from imagefactory.extras.importers.pip_lines import ReferencedFiles, add_index, add_pip_line, is_mirror
from imagefactory.extras.importers.spec import (
    PLATFORM,
    EnvironmentSpec,
    LockedRow,
    add_channel,
    add_channels,
    add_directory,
    add_git,
    poetry_bounds,
    specifiers_allow,
    text_of,
)
from imagefactory.model import SourceLocation
from imagefactory.recipes.values import RULES, canonical, channel_address, channel_name, parse_spec
from imagefactory.recipes.yaml_tree import YamlNode, first_place, recipe_problem, show

Key = tuple[str, str, str]
"""Name, version and source: a lock may contain several packages with one name."""
_OWN = ("virtual", "editable", "directory")


# --- uv.lock -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _UvLock:
    """The rows of a uv.lock, with the Python version and the active extras that evaluate its markers.

    If extras of a project exclude each other, uv writes them as `extra-4-proj-cpu`, with the length of the
    name.
    """

    rows: dict[Key, YamlNode]
    python: str
    active: frozenset[str]

    def meant(self, dependency: YamlNode) -> Iterator[Key]:
        """Yield the packages of a dependency row, none if its marker does not match."""
        if not marker_applies(text_of(dependency, "marker"), self.python, self.active):
            return
        name, version = canonical(text_of(dependency, "name")), text_of(dependency, "version")
        source = _source_text(_map(dependency, "source"))
        for key in self.rows:
            if key[0] == name and version in ("", key[1]) and source in ("", key[2]):
                yield key


def _names(names: Iterable[str]) -> str:
    """Return names from an untrusted file as one printable line."""
    return show(", ".join(names), limit=4000)[1:-1]


def _check_format(location: SourceLocation, version: str, formats: Collection[str], hint: str) -> None:
    """Raise RecipeError if a lock has another format."""
    if version not in formats:
        message = f"has the format {show(version or 'none')}"
        raise recipe_problem(location, "format-unsupported", message, hint)


def read_uv_lock(root: YamlNode, file: str, options: ProjectReadOptions) -> EnvironmentSpec:
    """Return the runtime packages of the project in a uv.lock, with exact versions.

    Raises RecipeError for another format, and for an unknown extra or group.
    """
    _check_format(root.where, text_of(root, "version"), ("1",), "create it with a uv that writes 1")
    spec = EnvironmentSpec(file=file, locked=True, frozen=options.frozen)
    spec.bound_python(text_of(root, "requires-python"), root.where)
    rows = {_key(row): row for row in _rows(root, "package")}
    project_rows = {key: row for key, row in rows.items() if _source_type(row) in _OWN}
    here = {
        key: row
        for key, row in project_rows.items()
        if text_of(_map(row, "source"), _source_type(row)) == "."
    }
    selection = here or project_rows
    extras, groups = _selected_groups(spec, selection, options, root.where)
    active = {f"extra-{len(key[0])}-{key[0]}-{extra}" for key in selection for extra in extras}
    active |= {f"group-{len(key[0])}-{key[0]}-{group}" for key in selection for group in groups}
    lock = _UvLock(rows=rows, python=options.beside.python, active=frozenset(active))
    addresses = [text_of(_map(row, "source"), "registry") for row in rows.values()]
    main = _main_index(spec, addresses, root.where)
    starts = [*selection, *(_manifest(root, rows) if not project_rows else [])] or list(rows)
    for key in _reached(lock, starts, selection, (extras, groups)):
        if spec.frozen:
            spec.rows.append(LockedRow(kind="uv", where=rows[key].where, node=rows[key]))
        elif key in project_rows:
            _take_own(spec, rows[key], options.beside)
        else:
            _take(spec, rows[key], options.beside, main)
    return spec


def _main_index(spec: EnvironmentSpec, addresses: Iterable[str], location: SourceLocation) -> str:
    """Return and note the index of most packages.

    Indexes for one CUDA version and pages of links do not count.
    """
    special = re.compile(r"/whl(/|$)|/cu[0-9]{2,3}\b|\.html?$")
    plain = [address for address in addresses if address and not special.search(address)]
    main = spec.main_index = max(plain, key=plain.count, default="")
    if main and not is_mirror(main):
        index_text = f"the index {show(main, limit=120)}"
        spec.note(location, f"{index_text}: packages come from the index of this machine's settings")
    return main


def _reached(
    lock: _UvLock, starts: Iterable[Key], chosen: Iterable[Key], selection: tuple[set[str], set[str]]
) -> list[Key]:
    """Return the packages along dependencies from `starts`.

    `selection` applies to the projects in `chosen`.
    """
    first, reached = set(chosen), dict[Key, None]()
    waiting = list(starts)
    extras = {key: set(selection[0]) if key in first else set[str]() for key in waiting}
    while waiting:
        key = waiting.pop(0)
        reached[key] = None
        row = lock.rows[key]
        needed = [*_rows(row, "dependencies")]
        for extra in sorted(extras[key]):
            needed += _optional(row, "optional-dependencies", extra)
        for group in sorted(selection[1]) if key in first else ():
            needed += _optional(row, "dev-dependencies", group)
        for dependency in needed:
            more = {canonical(item.text) for item in _rows(dependency, "extra")}
            for other in lock.meant(dependency):
                new = more - extras.setdefault(other, set())
                if other not in reached or new:
                    extras[other] |= new
                    waiting.append(other)
    return sorted(reached)


def _selected_groups(
    spec: EnvironmentSpec,
    projects: dict[Key, YamlNode],
    options: ProjectReadOptions,
    location: SourceLocation,
) -> tuple[set[str], set[str]]:
    """Return the selected extras and groups that exist in the projects of the lock."""
    extras, groups, optional = set[str](), set[str](), OptionalPackages()
    for row in projects.values():
        for key, value in _map(row, "optional-dependencies").pairs:
            needs = [text_of(item, "name") for item in value.items]
            optional.add_extra(key.text, lambda name=key.text: extras.add(canonical(name)), needs)  # type: ignore[misc]
        for key, value in _map(row, "dev-dependencies").pairs:
            needs = [text_of(item, "name") for item in value.items]
            optional.add_group(key.text, lambda name=key.text: groups.add(canonical(name)), needs)  # type: ignore[misc]
    optional.take(spec, options, location)
    return extras, groups


def _optional(row: YamlNode, kind: str, name: str) -> Iterator[YamlNode]:
    for key, value in _map(row, kind).pairs:
        if canonical(key.text) == name:
            yield from value.items


def _manifest(root: YamlNode, rows: dict[Key, YamlNode]) -> list[Key]:
    """Return the direct requirements in the lock of a script."""
    names = {canonical(text_of(row, "name")) for row in _rows(_map(root, "manifest"), "requirements")}
    return [key for key in rows if key[0] in names]


def _take_own(spec: EnvironmentSpec, row: YamlNode, referenced_files: ReferencedFiles) -> None:
    """Add a locked project of the workspace. If it is a package, it becomes a source."""
    if _source_type(row) == "virtual":
        spec.note(row.where, f"{show(text_of(row, 'name'))}: {note_of_scripts()}")
    else:
        add_directory(
            spec, referenced_files.place, text_of(_map(row, "source"), _source_type(row)), row.where
        )


# --- poetry.lock ---------------------------------------------------------------------------------


def read_poetry_lock(root: YamlNode, file: str, options: ProjectReadOptions) -> EnvironmentSpec:
    """Return the runtime packages of a poetry.lock with exact versions, and the code of the project."""
    spec = EnvironmentSpec(file=file, locked=True, frozen=options.frozen)
    spec.bound_python(poetry_bounds(text_of(_map(root, "metadata"), "python-versions")) or "", root.where)
    rows, python = _rows(root, "package"), options.beside.python
    chosen, groups = _of_poetry(spec, root, rows, options)
    project = read_project_directory(".", replace(options, named=False), lambda _: python)
    grouped = any(_groups(row) for row in rows)
    starts = chosen
    if not grouped and project is not None:  # as Poetry 1.5 to 1.8 wrote it
        starts = chosen | dict(map(_name_extras, project.pip))
    reached, needed = _needed(rows, starts, python), _meant_by_any(rows, python)
    selection: dict[str, list[YamlNode]] = {}
    for row in rows:
        name, marker = canonical(text_of(row, "name")), row.get("markers")
        text = marker.text if marker and marker.kind == "text" else text_of(marker, "main") if marker else ""
        package_groups = set(_groups(row)) or {"main"}
        if not package_groups & {"main", *groups} or (
            text_of(row, "optional") == "true" and name not in reached
        ):
            continue  # told with the extras and groups
        if not grouped and project is not None and name not in reached:
            continue
        if marker_applies(text, python, options.extras) if text else needed.get(name, True):
            selection.setdefault(name, []).append(row)
        else:
            spec.note(row.where, f"{show(name)} {text_of(row, 'version')} is not for Python {python} here")
    for name, same in selection.items():
        versions = [text_of(row, "version") for row in same]
        if len(set(versions)) > 1:
            do = "import the project's pyproject.toml, with --extra NAME"
            question_text = f"which of {show(' and '.join(versions))} of {show(name)} is meant"
            spec.leave(same[0].where, f"the lock does not say {question_text}", do)
        elif spec.frozen:
            spec.rows.append(LockedRow(kind="poetry", where=same[0].where, node=same[0]))
        else:
            _take(spec, same[0], options.beside)
    described = parse_project(options.beside.read("pyproject.toml"), "pyproject.toml")
    if spec.frozen and not grouped and project is None:
        do = "put this file next to its pyproject.toml, or lock it again with Poetry 2"
        spec.leave(root.where, "this format does not say which packages the project requires", do)
    if described is not None and is_package(described):
        if spec.frozen:
            spec.rows.append(LockedRow(kind="project", where=root.where, node=described))
            return spec
        add_directory(spec, options.beside.place, ".", root.where)
    return spec


def _groups(row: YamlNode) -> list[str]:
    return [item.text for item in _rows(row, "groups")] or list(filter(None, [text_of(row, "category")]))


def _name_extras(text: str) -> tuple[str, frozenset[str]]:
    """Return the package and the extras of `uvicorn[standard] (>=0.12)`."""
    extras = re.findall(r"[A-Za-z0-9._-]+", text.partition("[")[2].partition("]")[0])
    return canonical(re.split(r"[ (\[<>=!~;]", text)[0]), frozenset(map(canonical, extras))


def _of_poetry(
    spec: EnvironmentSpec, root: YamlNode, rows: list[YamlNode], options: ProjectReadOptions
) -> tuple[dict[str, frozenset[str]], set[str]]:
    """Return the packages of the selected extras, with their extras, and the selected groups."""
    packages, groups, optional = dict[str, frozenset[str]](), set[str](), OptionalPackages()
    for key, value in _map(root, "extras").pairs:
        named = dict(_name_extras(item.text) for item in value.items)
        optional.add_extra(key.text, lambda named=named: packages.update(named), named)  # type: ignore[misc]
    for name in dict.fromkeys(group for row in rows for group in _groups(row) if group != "main"):
        optional.add_group(name, lambda name=name: groups.add(name))  # type: ignore[misc]
    optional.take(spec, options, root.where)
    return packages, groups


def _needed(
    rows: list[YamlNode], starts: Mapping[str, frozenset[str]], python: str
) -> dict[str, frozenset[str]]:
    """Return the packages along matching dependencies, with the extras required of each."""
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
                for requirement in value.items or [value]:
                    if marker_applies(text_of(requirement, "markers"), python, extras):
                        more = frozenset(canonical(item.text) for item in _rows(requirement, "extras"))
                        waiting.append((canonical(key.text), more))
    return reached


def _meant_by_any(rows: list[YamlNode], python: str) -> dict[str, bool]:
    """Return by name whether any package needs it here. A lock also has packages that only extras need."""
    needed: dict[str, bool] = {}
    for row in rows:
        for key, value in _map(row, "dependencies").pairs:
            name = canonical(key.text)
            for item in value.items or [value]:
                needed[name] = needed.get(name, False) or marker_applies(text_of(item, "markers"), python)
    return needed


# --- pylock.toml ---------------------------------------------------------------------------------

_IN_LIST = re.compile(r"""["']([^"']+)["']\s+(not\s+)?in\s+(extras|dependency_groups)\b""")


def read_pylock(root: YamlNode, file: str, options: ProjectReadOptions) -> EnvironmentSpec:
    """Return the packages of a pylock.toml whose markers match this Python version, with exact versions.

    Source: PyPA specification "pylock.toml". Raises RecipeError for another format, and for a lock for other
    environments.
    """
    version, python = text_of(root, "lock-version"), options.beside.python
    if version.partition(".")[0] != "1":
        do = "make it with a tool that writes 1.0"
        raise recipe_problem(
            root.where, "format-unsupported", f"has the format {show(version or 'none')}", do
        )
    spec = EnvironmentSpec(file=file, locked=True, frozen=options.frozen)
    spec.bound_python(text_of(root, "requires-python"), root.where)
    environments = [item.text for item in _rows(root, "environments")]
    if environments and not any(marker_applies(marker, python) for marker in environments):
        message = f"is for other environments than {PLATFORM} with Python {python}"
        raise recipe_problem(
            _map(root, "environments").where, "platform-missing", message, "lock it for Linux too"
        )
    rows = _rows(root, "packages")
    chosen = _selected_pylock_groups(spec, root, rows, options)
    selection: dict[str, YamlNode] = {}
    for row in rows:
        name, bounds = canonical(text_of(row, "name")), text_of(row, "requires-python")
        if not _pylock_marker_applies(row, python, *chosen):
            optional = _pylock_marker_applies(row, python, None, None)
            if not optional:  # what an extra or group brings is told with these
                spec.note(
                    row.where, f"{show(name)} {text_of(row, 'version')} is not for Python {python} here"
                )
        elif bounds and not specifiers_allow(bounds, f"{python}.99"):
            do = "lock it for that Python, or take another"
            spec.leave(row.where, f"{show(name)} is for Python {show(bounds)}, not {python}", do)
        elif name in selection:
            message = f"the lock has two packages {show(name)} for one environment"
            raise recipe_problem(
                row.where,
                "duplicate-package",
                message,
                f"lock it again: the other is in line {selection[name].where.line}",
            )
        else:
            selection[name] = row
    main = _main_index(spec, [text_of(row, "index") for row in selection.values()], root.where)
    for row in selection.values():
        if spec.frozen:
            spec.rows.append(LockedRow(kind="pylock", where=row.where, node=row))
            continue
        _take_of_pylock(spec, row, options.beside, main)
    return spec


def _selected_pylock_groups(
    spec: EnvironmentSpec, root: YamlNode, rows: list[YamlNode], options: ProjectReadOptions
) -> tuple[set[str], set[str]]:
    """Return the selected extras and groups, including the groups of a default install."""
    default = {canonical(item.text) for item in _rows(root, "default-groups")}
    extras, groups, optional = set[str](), set(default), OptionalPackages()
    python = options.beside.python

    def needs(extras: set[str], groups: set[str]) -> list[str]:
        fitting = (row for row in rows if _pylock_marker_applies(row, python, extras, groups))
        return [
            text_of(row, "name") for row in fitting if not _pylock_marker_applies(row, python, set(), default)
        ]

    for item in _rows(root, "extras"):
        name = canonical(item.text)
        optional.add_extra(item.text, lambda name=name: extras.add(name), needs({name}, default))  # type: ignore[misc]
    for item in _rows(root, "dependency-groups"):
        name = canonical(item.text)
        if name not in default:
            optional.add_group(item.text, lambda name=name: groups.add(name), needs(set(), {*default, name}))  # type: ignore[misc]
    optional.take(spec, options, root.where)
    return extras, groups


def _pylock_marker_applies(
    row: YamlNode, python: str, extras: set[str] | None, groups: set[str] | None
) -> bool:
    """Return whether the marker of a package matches with these extras and groups; None means any."""

    def judged(match: re.Match[str]) -> str:
        selection = extras if match[3] == "extras" else groups
        holds = selection is None or (canonical(match[1]) in selection) != bool(match[2])
        return f"python_version {'>=' if holds else '<'} '0'"

    return marker_applies(_IN_LIST.sub(judged, text_of(row, "marker")), python)


def _take_of_pylock(
    spec: EnvironmentSpec, row: YamlNode, referenced_files: ReferencedFiles, main: str
) -> None:
    name, version, index = text_of(row, "name"), text_of(row, "version"), text_of(row, "index")
    vcs, archive = _map(row, "vcs"), _map(row, "archive")
    if row.get("vcs"):
        address, commit = text_of(vcs, "url"), text_of(vcs, "commit-id")
        if text_of(vcs, "type") == "git" and address:
            written = f"{address}@{commit}" if commit else address
            add_git(spec, written, row.where, directory=text_of(vcs, "subdirectory"))
        else:
            do = "copy its files into a directory of the project, and write ./DIRECTORY under packages"
            spec.leave(row.where, f"{show(name)} comes from no git repository with an address", do)
    elif directory := row.get("directory"):
        add_directory(spec, referenced_files.place, text_of(directory, "path"), row.where)
    elif row.get("archive"):
        address = text_of(archive, "url") or text_of(archive, "path")
        add_pip_line(
            spec, f"{name} @ {address}" if "://" in address else address, row.where, referenced_files
        )
    elif not version:
        do = "lock it again: packages from an index have a version"
        spec.leave(row.where, f"{show(name)} has no version and no source", do)
    else:
        if index and index != main and not is_mirror(index):
            add_index(spec, index, row.where)
        add_pip_line(spec, f"{name}=={version}", row.where, referenced_files)


# --- rows ----------------------------------------------------------------------------------------


def _take(spec: EnvironmentSpec, row: YamlNode, referenced_files: ReferencedFiles, main: str = "") -> None:
    """Add a locked package. The index `main` is replaced by the index in the settings of this machine."""
    name, version, source = text_of(row, "name"), text_of(row, "version"), _map(row, "source")
    kind = text_of(source, "type") or _source_type(row)
    address = text_of(source, "url") or text_of(source, kind)
    if kind == "git":
        commit = text_of(source, "resolved_reference") or address.partition("#")[2]
        query = dict(
            part.partition("=")[::2] for part in address.partition("#")[0].partition("?")[2].split("&")
        )
        directory = query.get("subdirectory", "") or text_of(source, "subdirectory")
        plain = re.split(r"[?#]", address.removeprefix("git+"))[0]
        add_git(spec, f"{plain}@{commit}" if commit else plain, row.where, directory=directory)
    elif kind in ("directory", "editable", "virtual"):
        add_directory(spec, referenced_files.place, address, row.where)
    elif kind in ("path", "file", "url"):
        add_pip_line(
            spec, f"{name} @ {address}" if "://" in address else address, row.where, referenced_files
        )
    else:
        if kind == "legacy" or (kind == "registry" and address != main and not is_mirror(address)):
            add_index(spec, address, row.where)
        add_pip_line(spec, f"{name}=={version}", row.where, referenced_files)


def _source_type(row: YamlNode) -> str:
    return next(iter(_map(row, "source").keys), "")


def _source_text(source: YamlNode) -> str:
    return " ".join(value.text for _, value in source.pairs)


def _key(row: YamlNode) -> Key:
    return canonical(text_of(row, "name")), text_of(row, "version"), _source_text(_map(row, "source"))


def _map(node: YamlNode, key: str) -> YamlNode:
    return node.get(key) or YamlNode(node.where, "map")


def _rows(node: YamlNode, key: str) -> list[YamlNode]:
    return _map(node, key).items


# --- pixi.lock (versions 4 to 7), conda-lock.yml (version 1) and lists of addresses (`@EXPLICIT`)


PIXI_VERSIONS = ("4", "5", "6", "7")
EXPLICIT = re.compile(r"^@EXPLICIT\s*$", re.MULTILINE)
# The hash of a package's build inputs, which conda-build writes after the version of Python.
_BUILD_HASH = re.compile(r"(?:py[0-9]*)?h[0-9a-f]{6,7}$")
# `# pip NAME @ ADDRESS`, as conda-lock and micromamba write what pip brings.
_PIP_ROW = re.compile(
    r"#\s*pip\s+(\S+)\s*@\s*\S*?/[^/\s]+?-([0-9][^-/\s]*)(?:-[^/\s]+\.whl|\.tar\.gz|\.zip)(?:[#\s]|$)"
)

_VIRTUAL = "{} is a virtual package: a machine has it, and no channel"


def read_pixi_lock(
    root: YamlNode, file: str, environment: str, referenced_files: ReferencedFiles, *, frozen: bool = False
) -> EnvironmentSpec:
    """Return the packages of one environment in a pixi.lock for linux-64, with exact versions."""
    version = root.get("version")
    versions = PIXI_VERSIONS[2:] if frozen else PIXI_VERSIONS
    hint = f"create it with a pixi that writes {' or '.join(versions)}"
    _check_format((version or root).where, text_of(root, "version"), versions, hint)
    environments = root.get("environments")
    names = environments.keys if environments else ()
    name = environment or ("default" if "default" in names or len(names) != 1 else names[0])
    selection = environments.get(name) if environments else None
    if selection is None:
        raise recipe_problem(
            root.where,
            "environment-unknown",
            f"has no environment {show(name)}",
            f"--environment {show(' or '.join(names), limit=4000)[1:-1] or 'NAME'}",
        )
    spec = EnvironmentSpec(file=file, locked=True, frozen=frozen)
    if (channels := selection.get("channels")) and not frozen:
        add_channels(spec, channels)
    indexes = selection.get("indexes")
    if indexes and indexes.items:
        spec.main_index = indexes.items[0].text
    for index in (
        indexes.items[1:] if indexes and not frozen else ()
    ):  # the first is the one that is usual there
        add_pip_line(spec, f"--extra-index-url {index.text}", index.where, ReferencedFiles(""))
    packages = selection.get("packages")
    # Since version 7 a platform has a name of its own, and several may be kinds of one.
    named = root.get("platforms")
    kinds = [row for row in (named.items if named else ()) if text_of(row, "subdir") == PLATFORM]
    names_of_it = [PLATFORM, *(text_of(row, "name") for row in kinds)]
    of_platform = next((packages.get(name) for name in names_of_it if packages and packages.get(name)), None)
    if of_platform is None:
        there = _names(packages.keys) if packages else "nothing"
        raise recipe_problem(
            selection.where,
            "platform-missing",
            f"has no packages for {PLATFORM}, only for {there}",
            f"add {PLATFORM} and lock",
        )
    if frozen:
        described = {value.text: row for row in _rows(root, "packages") for _, value in row.pairs[:1]}
        for value in (value for item in of_platform.items for _, value in item.pairs[:1]):
            row = described.get(value.text)
            spec.rows.append(LockedRow(kind="pixi", where=value.where, node=row, text=value.text))
        return spec
    wheels = _pixi_wheels(root)
    for item in of_platform.items:
        for key, value in item.pairs[:1]:
            if key.text == "conda":
                _locked_conda(spec, value)
            elif key.text == "conda_source":
                do = "add it from a channel, if one has it"
                spec.leave(value.where, f"{show(value.text)} is made from sources", do)
            elif wheel := wheels.get(value.text):
                _locked_wheel(spec, wheel, value.where)
            else:
                _other_wheel(spec, value, referenced_files)
    _name_channels(spec)
    return spec


def _other_wheel(spec: EnvironmentSpec, value: YamlNode, referenced_files: ReferencedFiles) -> None:
    """Add a package that is not on an index: a directory, or `git+https://...#COMMIT`."""
    address, _, commit = value.text.partition("#")
    if address.startswith("git+"):
        plain = re.split(r"[?]", address[4:])[0]
        add_git(spec, f"{plain}@{commit}" if commit else plain, value.where)
    elif "://" in value.text or value.text.endswith(".whl"):
        add_pip_line(spec, value.text, value.where, referenced_files)
    else:
        add_directory(spec, referenced_files.place, value.text, value.where)


def _pixi_wheels(root: YamlNode) -> Mapping[str, tuple[str, str]]:
    """Return the name and version of the PyPI packages, by address."""
    wheels = {}
    packages = root.get("packages")
    for package in packages.items if packages else ():
        name, version = package.get("name"), package.get("version")
        address = package.get("pypi") or (package.get("url") if text_of(package, "kind") == "pypi" else None)
        if address and name and version and address.text.startswith(("https://", "http://")):
            wheels[address.text] = (name.text, version.text)
    return wheels


def read_conda_lock(
    root: YamlNode, file: str, categories: Collection[str] = (), *, frozen: bool = False
) -> EnvironmentSpec:
    """Return the packages of a conda-lock.yml for linux-64, with exact versions.

    `categories` are taken besides `main`. Raises RecipeError for an unknown one.
    """
    version = root.get("version")
    hint = "create it with conda-lock 1 or newer"
    _check_format((version or root).where, text_of(root, "version"), ("1",), hint)
    spec = EnvironmentSpec(file=file, locked=True, frozen=frozen)
    metadata = root.get("metadata")
    ours = metadata.get("custom_metadata") if metadata else None
    if ours and (pip := ours.get("imagefactory.pip")):  # our own locks of two files
        requirements_path = f"{text_of(ours, 'imagefactory.target')}.requirements.txt"
        spec.leave(
            pip.where, f"packages from PyPI are in {show(requirements_path)}", "add those packages under pip"
        )
    packages = root.get("package")
    rows = packages.items if packages else []
    fitting = [row for row in rows if text_of(row, "platform") == PLATFORM]
    real = [row for row in fitting if not text_of(row, "name").startswith("__")]
    if not fitting:
        there = _names(sorted({text_of(row, "platform") for row in rows})) or "nothing"
        raise recipe_problem(
            root.where,
            "platform-missing",
            f"has no packages for {PLATFORM}, only for {there}",
            f"lock for {PLATFORM} too",
        )
    of_channels = EnvironmentSpec(file=file) if frozen else spec  # frozen packages have their addresses
    headed = _channels(of_channels, metadata.get("channels") if metadata else None, real or fitting)
    others: dict[str, list[str]] = {}
    known = {text_of(row, "category") or "main" for row in fitting}
    if unknown := [name for name in categories if name not in known]:
        raise recipe_problem(
            root.where,
            "group-unknown",
            f"has no category {show(unknown[0])}",
            f"--group {show(' or '.join(sorted(known - {'main'})) or 'NAME', limit=4000)[1:-1]}",
        )
    for row in fitting:
        name, version_, category = (
            text_of(row, "name"),
            text_of(row, "version"),
            text_of(row, "category") or "main",
        )
        if category not in ("main", *categories):
            others.setdefault(category, []).append(name)
        elif frozen:
            spec.rows.append(LockedRow(kind="conda-lock", where=row.where, node=row))
        elif text_of(row, "manager") == "pip":
            _locked_wheel(spec, (name, version_), row.where)
        else:
            address = text_of(row, "url")
            if name.startswith("__"):
                spec.note(row.where, _VIRTUAL.format(show(name)))
                continue
            package = (name, version_, archive_parts(address)[2])
            _locked_spec(spec, package, row.where, channel=_headed(channel_of(address), headed))
    _name_channels(spec)
    for category, names in others.items():
        message = f"optional, not taken (--group {show(category)[1:-1]}): the packages of that category"
        names_ = _names(names)
        spec.note(packages.where if packages else root.where, f"{message}: {names_}")
    return spec


def _channels(spec: EnvironmentSpec, heading: YamlNode | None, rows: list[YamlNode]) -> tuple[str, ...]:
    """Add the channels in the heading, in its order, and those in the addresses of the rows.

    Return those in the heading. The rows show which channels `defaults` means.
    """
    for item in heading.items if heading else ():
        name = text_of(item, "url") if item.kind == "map" else item.text
        if name != "defaults":
            add_channel(spec, name, item.where)
    headed = tuple(spec.channels)
    mirrors: dict[str, None] = {}
    for row in rows:
        address = row.get("url") if text_of(row, "manager") != "pip" else None
        channel = channel_of(address.text) if address else ""
        if address and channel.startswith("file:"):
            continue  # which each package tells
        if address and channel and _headed(channel, headed) == channel:
            if channel_name(channel) not in spec.channels:
                add_channel(spec, channel, address.where)
        elif channel and channel_name(channel) not in headed:
            mirrors[channel] = None
    location = heading.where if heading else rows[0].where
    if mirrors:
        spec.note(location, f"the channels of the heading are used, and not their mirrors {_names(mirrors)}")
    if headed and (more := spec.channels[len(headed) :]):
        spec.note(location, f"packages come from {_names(more)} too, which the heading does not name")
    return headed


def _headed(channel: str, headed: tuple[str, ...]) -> str:
    """Return the channel in the heading for an address or its mirror, or else the address."""
    names = (name for name in headed if "://" not in name and channel.endswith(f"/{name}"))
    return next(names, channel)


def channel_of(address: str) -> str:
    """Return the channel in the address of an archive, empty for other addresses."""
    match = re.match(r"([a-z]+://.+)/(?:linux-64|noarch)/[^/]+$", address.partition("#")[0])
    return match[1] if match else ""


def read_explicit(text: str, file: str, *, frozen: bool = False) -> EnvironmentSpec:
    """Return the packages in a list of addresses, the output of `conda list --explicit` and conda-lock."""
    spec = EnvironmentSpec(file=file, locked=True, frozen=frozen)
    platforms: dict[str, None] = {}
    for number, line in enumerate(text.split("\n")):
        location, line = SourceLocation(file=file, line=number + 1, column=1), line.strip()
        is_entry = bool(line) and not line.startswith(("#", "@"))
        if frozen and (is_entry or _PIP_ROW.match(line)):
            spec.rows.append(LockedRow(kind="explicit", where=location, text=line))
        elif match := _PIP_ROW.match(line):
            _locked_wheel(spec, (match[1], match[2]), location)
        elif is_entry:
            address = line.split()[0]
            parts, platform = archive_parts(address), address.rpartition("/")[0].rpartition("/")[2]
            if not parts[0] or "://" not in address:
                do = "write the address of an archive, or add the package manually"
                spec.leave(location, f"{show(line)} is not the address of a package", do)
                continue
            platforms[platform] = None
            if parts[0].startswith("__"):
                spec.note(location, _VIRTUAL.format(show(parts[0])))
                continue
            channel = channel_of(address)
            if channel and not channel.startswith("file:") and channel_name(channel) not in spec.channels:
                add_channel(spec, channel, location)
            _locked_spec(spec, parts, location, channel=channel)
    if frozen and spec.rows:
        return spec
    _name_channels(spec)
    others = [name for name in platforms if name not in (PLATFORM, "noarch")]
    if others:
        raise recipe_problem(
            first_place(file),
            "platform-missing",
            f"has packages for {_names(others)}",
            f"pass a list for {PLATFORM}",
        )
    if not spec.conda and not spec.python:
        raise recipe_problem(
            first_place(file), "no-packages", "lists no packages", "create it with: conda list --explicit"
        )
    return spec


def _locked_conda(spec: EnvironmentSpec, address: YamlNode) -> None:
    if "://" not in address.text:
        spec.leave(
            address.where,
            f"{show(address.text)} is made from sources",
            "add it from a channel, if one has it",
        )
        return
    _locked_spec(spec, archive_parts(address.text), address.where, channel=channel_of(address.text))


def archive_parts(address: str) -> tuple[str, str, str]:
    """Return name, version and build from the file name of a conda archive, empty for another name."""
    filename = address.partition("#")[0].rpartition("/")[2]
    stem = re.sub(r"\.(conda|tar\.bz2)$", "", filename)
    parts = stem.rsplit("-", 2)
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else ("", "", "")


def _locked_spec(
    spec: EnvironmentSpec, package: tuple[str, str, str], location: SourceLocation, *, channel: str = ""
) -> None:
    name, version, build = package
    variant = build_variant(build) if name != "python" else ""
    text = f"{name} =={version} {variant}".strip()
    if channel.startswith("file:") and channel not in spec.channels:
        do = f'if that directory is a channel, write "{channel}::{name} =={version}" under packages'
        spec.leave(location, f"{show(name)} {show(version)} is a file of one machine, in {show(channel)}", do)
    elif not RULES["match spec"].allows(text):
        spec.leave(
            location, f"{show(name)} {show(version)} cannot be taken over", "add it manually if you need it"
        )
    elif name == "python":
        spec.python = f"=={version}"
    else:
        known = channel_address(channel) if channel and RULES["channel"].allows(channel) else ""
        spec.conda.append(str(replace(parse_spec(text), channel=known)))
        spec.builds[parse_spec(text).name] = build
        spec.hints += re.findall(r"cu(?:da)?[0-9]{2,3}|cuda[0-9]+\.[0-9]+", build)


def _name_channels(spec: EnvironmentSpec) -> None:
    """Drop the channels of packages if there is only one.

    With several, another could have the same package.
    """
    if len(spec.channels) < 2:
        spec.conda = [str(replace(parse_spec(text), channel="")) for text in spec.conda]


def build_variant(build: str) -> str:
    """Return the part of a build string that a user may have chosen, as a pattern; empty if there is none.

    `nompi_h2d575fe_105` returns `nompi_*`, `cuda126_py312h1763f6d_306` returns `cuda126_*`,
    `20_linux64_openblas` returns `*_linux64_openblas`. Build numbers and hashes only identify a release of
    the recipe; `py312h1763f6d` also has the Python version. Source: conda-build documentation, "build
    string".
    """
    parts = (re.sub(r"^([0-9]+|py[0-9.]*)$", "*", _BUILD_HASH.sub("*", part)) for part in build.split("_"))
    pattern = re.sub(r"\*(_\*)*", "*", "_".join(parts))
    return "" if pattern == "*" else pattern


def _locked_wheel(spec: EnvironmentSpec, wheel: tuple[str, str], location: SourceLocation) -> None:
    add_pip_line(spec, f"{wheel[0]}=={wheel[1]}", location, ReferencedFiles(""))
