"""Read the requirements of projects: `pixi.toml`, `pyproject.toml` of pixi, Poetry or PEP 621.

setup_files.py reads setup.py and setup.cfg.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from posixpath import join, normpath
from typing import Any

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement

from imagefactory.errors import RecipeError
from imagefactory.extras.importers.framework_row import first_framework, pypi_name
from imagefactory.extras.importers.pip_lines import (
    ReferencedFiles,
    add_index,
    add_pip_line,
    add_project,
    marker_matches,
)
from imagefactory.extras.importers.setup_files import SetupFacts, read_setup
from imagefactory.extras.importers.spec import (
    PLATFORM,
    EnvironmentSpec,
    add_channels,
    add_directory,
    add_git,
    add_match_spec,
    poetry_bounds,
    specifiers_allow,
    text_of,
)
from imagefactory.model import SourceLocation
from imagefactory.recipes.values import RULES, canonical, package_of
from imagefactory.recipes.yaml_tree import YamlLimits, YamlNode, first_place, recipe_problem, show, too_large

# --- TOML text -> the tree of YAML, in which every value has its location
# The standard library's parser returns no locations, so names and values are searched for below the header of
# their table. A name that is not there (a dotted key) gets the location of its table.


_HEADER = re.compile(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")


def parse_toml(text: str, file: str, limits: YamlLimits) -> YamlNode:
    """Parse TOML into the tree of YAML. Raises RecipeError if it is not valid, too large or too deep."""
    if len(text) > limits.size:
        raise too_large(file, limits)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"\(at line ([0-9]+), column ([0-9]+)\)", str(error))
        location = (
            SourceLocation(file=file, line=int(match[1]), column=int(match[2]))
            if match
            else first_place(file)
        )
        message = re.sub(r" \(at .*\)$", "", str(error))
        raise recipe_problem(
            location, "toml-invalid", f"is not valid TOML: {show(message, limit=120)[1:-1]}", "fix the line"
        ) from error
    except RecursionError as error:
        raise _too_deep(first_place(file), limits) from error
    return _TomlLocations(text, file, limits).tree(data)


def _too_deep(location: SourceLocation, limits: YamlLimits) -> RecipeError:
    message = f"is nested more than {limits.depth} deep"
    return recipe_problem(location, "nesting-too-deep", message, "nest it less deeply")


class _TomlLocations:
    """The line numbers in one text, and where its tables start."""

    def __init__(self, text: str, file: str, limits: YamlLimits) -> None:
        self.lines = text.split("\n")
        self.file = file
        self.limits = limits
        self.count = 0
        self.headers: dict[tuple[str, ...], list[int]] = {}
        self.first: dict[tuple[str, ...], int] = {}
        for number, line in enumerate(self.lines):
            if match := _HEADER.match(line):
                path = tuple(
                    part.strip(" \"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.\"']+", match[1])
                )
                self.headers.setdefault(path, []).append(number)
                for length in range(1, len(path)):
                    self.first.setdefault(path[:length], number)

    def tree(self, data: dict[str, Any]) -> YamlNode:
        return self._node(data, (), 0, 0)

    def _where(self, line: int, text: str = "") -> SourceLocation:
        column = self.lines[line].find(text) if text and line < len(self.lines) else 0
        return SourceLocation(file=self.file, line=line + 1, column=max(column, 0) + 1)

    def _node(self, value: Any, path: tuple[str, ...], line: int, depth: int) -> YamlNode:
        self.count += 1
        if self.count > self.limits.nodes:
            message = f"has more than {self.limits.nodes} values"
            raise recipe_problem(self._where(line), "too-many-values", message, "split it")
        if depth > self.limits.depth:
            raise _too_deep(self._where(line), self.limits)
        if isinstance(value, dict):
            node = YamlNode(self._where(line), "map")
            for key, child in value.items():
                line_index = self._of_key((*path, key), line)
                name = YamlNode(self._where(line_index, key), "text", text=key)
                node.pairs.append((name, self._node(child, (*path, key), line_index, depth + 1)))
            return node
        if isinstance(value, list):
            node = YamlNode(self._where(line), "list")
            starts = self.headers.get(path, []) if all(isinstance(child, dict) for child in value) else []
            for number, child in enumerate(value):
                line_index = starts[number] if number < len(starts) else self._of_text(child, line)
                line = max(line, line_index)
                node.items.append(self._node(child, path, line_index, depth + 1))
            return node
        scalar = {bool: "true or false", int: "a number", float: "a number"}.get(type(value), "")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return YamlNode(self._where(line, text), "text", text=text, made=scalar)

    def _of_key(self, path: tuple[str, ...], line: int) -> int:
        """Return the line of a table's header, or of a key below the header at `line`."""
        if (starts := self.headers.get(path)) and len(starts) == 1:
            return starts[0]
        key = re.compile(
            rf"\s*[\"']?{re.escape(path[-1])}[\"']?\s*[=.]|.*[{{,]\s*[\"']?{re.escape(path[-1])}[\"']?\s*="
        )
        line_found = next(
            (line_index for line_index in self._below(line) if key.match(self.lines[line_index])), None
        )
        return self.first.get(path, line) if line_found is None else line_found

    def _of_text(self, value: Any, line: int) -> int:
        if not isinstance(value, str):
            return line
        return next((line_index for line_index in self._below(line) if value in self.lines[line_index]), line)

    def _below(self, line: int) -> range:
        """Return the lines from `line` to the next header."""
        end = line + 1
        while end < len(self.lines) and not _HEADER.match(self.lines[end]):
            end += 1
        return range(line, end)


_TARGETS = ("unix", "linux", PLATFORM)
_LIMITS = YamlLimits(size=4 * 1024 * 1024, nodes=100_000, depth=12)
_LISTS_NOTHING = (
    "no-packages",
    "lists no packages",
    "pass the file that lists them, such as a requirements.txt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectReadOptions:
    """Options for reading a project. `beside` has its Python version and reads files near it.

    `environment` is a pixi environment, `extras` and `groups` are optional parts to add. `named` is True for
    the user's file: then an unknown extra is an error, and optional packages are listed. With `frozen` the
    file is a lock whose very files are kept.
    """

    beside: ReferencedFiles
    environment: str = ""
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    named: bool = False
    frozen: bool = False


@dataclass(slots=True)
class OptionalPackages:
    """The extras and groups of a project: functions that add them, by canonical name.

    `written` are their names in the file. `selected` are those that were added, also through others.
    `packages` are the requirements of each.
    """

    extras: dict[str, Callable[[], None]] = field(default_factory=dict)
    groups: dict[str, Callable[[], None]] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    selected: set[str] = field(default_factory=set)
    packages: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add_extra(self, name: str, take: Callable[[], None], packages: Iterable[str] = ()) -> None:
        self.extras.setdefault(canonical(name), take)
        self._keep("extra", name, packages)

    def add_group(self, name: str, take: Callable[[], None], packages: Iterable[str] = ()) -> None:
        self.groups.setdefault(canonical(name), take)
        self._keep("group", name, packages)

    def _keep(self, kind: str, name: str, packages: Iterable[str]) -> None:
        self.written.setdefault(canonical(name), name)
        self.packages.setdefault((kind, canonical(name)), []).extend(packages)

    def take(self, spec: EnvironmentSpec, options: ProjectReadOptions, location: SourceLocation) -> None:
        """Add the selected extras and groups. Raises RecipeError for an unknown one in the user's file."""
        available = []
        for kind, names, known in (
            ("extra", options.extras, self.extras),
            ("group", options.groups, self.groups),
        ):
            selection = dict.fromkeys(map(canonical, names))
            for name in selection:
                if name in known:
                    known[name]()
                    self.selected.add(name)
                elif options.named:
                    raise recipe_problem(
                        location, *unknown_extra_message(kind, name, self.names("extra"), self.names("group"))
                    )
                else:
                    spec.note(location, f"there is no {kind} {show(name)}: pip ignores it too")
            if others := [self.written[name] for name in known if name not in self.selected]:
                available.append(f"{', '.join(others)} (--{kind} NAME)")
        if available and options.named:
            for kind, name, requirement in self._frameworks(spec):
                spec.frameworks.append((kind, name))
                available.append(f"{requirement} is in the {kind} {name}: --{kind} {name}")
            spec.note(location, f"optional, not taken: {show('; '.join(available), limit=2000)[1:-1]}")

    def _frameworks(self, spec: EnvironmentSpec) -> Iterator[tuple[str, str, str]]:
        """Yield type, name and requirement of unselected frameworks that no other part requires."""
        required = set(map(pypi_name, spec.pip))
        for (kind, name), texts in self.packages.items():
            plain = [re.split(r"[;@]", text)[0].strip() for text in texts]
            framework = first_framework({pypi_name(text) for text in plain})
            sayable = re.fullmatch(r"[A-Za-z0-9._-]+", self.written[name])
            if sayable and framework and name not in self.selected and framework not in required:
                requirement = next(text for text in plain if pypi_name(text) == framework)
                yield kind, self.written[name], requirement

    def names(self, kind: str) -> list[str]:
        return [self.written[name] for name in (self.extras if kind == "extra" else self.groups)]


def unknown_extra_message(
    kind: str, name: str, extras: Iterable[str], groups: Iterable[str]
) -> tuple[str, str, str]:
    """Return the message for an unknown extra or group."""
    there = [f"--extra {known}" for known in extras] + [f"--group {known}" for known in groups]
    write = " or ".join(there) or f"remove --{kind}: it has none"
    return f"{kind}-unknown", f"has no {kind} {show(name)}", write


def read_project(root: YamlNode, file: str, options: ProjectReadOptions) -> EnvironmentSpec:
    """Return the requirements of a project. Raises RecipeError if it lists no packages."""
    environment = options.environment
    options = replace(options, beside=replace(options.beside, above=(*options.beside.above, file)))
    spec, tools, optional = EnvironmentSpec(file=file), _at(root, "tool"), OptionalPackages()
    pixi = _at(tools, "pixi") if _at(tools, "pixi").pairs else root
    poetry, project = _at(tools, "poetry"), _at(root, "project")
    is_pixi = bool(
        _at(pixi, "workspace").pairs
        or (_at(pixi, "project").pairs and pixi is root and PurePosixPath(file).name != "pyproject.toml")
    )
    is_pixi = is_pixi or pixi is not root
    if environment and not is_pixi:
        raise recipe_problem(
            root.where, "no-environments", "has no environments to choose from", "remove --environment"
        )
    if is_pixi:
        _pixi(spec, pixi, options.beside, environment)
    of_poetry = bool(_at(poetry, "dependencies").pairs)
    # Poetry's table only adds to what [project] lists, unless that says otherwise
    listed = _at(project, "dependencies").items or _at(project, "optional-dependencies").pairs
    if of_poetry and (not listed or _is_dynamic(project, "dependencies")):
        _poetry(spec, poetry, options, optional)
    if project.pairs and not (is_pixi and pixi is root):
        _project(spec, root, options, optional)
    _groups(spec, root, options, optional)
    has_tables = is_pixi or of_poetry or project.pairs
    setup = None
    if (
        not has_tables
        or _is_dynamic(project, "dependencies")
        or _is_dynamic(project, "optional-dependencies")
    ):
        setup = _dynamic(spec, root, options, optional, has_tables=bool(has_tables))
    if not has_tables and setup is None:
        raise recipe_problem(root.where, *_LISTS_NOTHING)
    optional.take(spec, options, root.where)
    if pixi is not root or not is_pixi:
        _own_code(spec, root, options, packaged=setup is not None)
    return spec


def read_setup_project(file: str, options: ProjectReadOptions) -> EnvironmentSpec | None:
    """Return the requirements of a project without a pyproject.toml, from its setup.py and setup.cfg."""
    directory = str(PurePosixPath(file).parent)
    facts = read_setup(options.beside.read, directory)
    if facts is None:
        return None
    options = replace(options, beside=replace(options.beside, above=(*options.beside.above, file)))
    spec, optional, location = EnvironmentSpec(file=file), OptionalPackages(), first_place(file)
    _take_setup(spec, facts, options, optional, location)
    optional.take(spec, options, location)
    add_directory(spec, options.beside.place, directory, location)
    return spec


def read_project_directory(
    directory: str, options: ProjectReadOptions, python: Callable[[str], str]
) -> EnvironmentSpec | None:
    """Return the requirements of the project in a directory, None if no file lists them.

    `python` returns a Python version within bounds.
    """
    file = normpath(join(directory, "pyproject.toml"))
    root = parse_project(options.beside.read(file), file)
    if root is not None:
        bounds = text_of(_at(root, "project"), "requires-python")
        ours = replace(options, beside=replace(options.beside, python=python(bounds))) if bounds else options
        tables = [
            _at(root, *keys).pairs
            for keys in (("project",), ("tool", "poetry", "dependencies"), ("tool", "pixi"))
        ]
        if any(tables):
            return read_project(root, file, ours)
    return read_setup_project(normpath(join(directory, "setup.py")), options)


def _own_code(spec: EnvironmentSpec, root: YamlNode, options: ProjectReadOptions, *, packaged: bool) -> None:
    """Add the code of the project: as a source if it is a package, otherwise with a note about `files`."""
    location = _at(root, "project").where if _at(root, "project").pairs else root.where
    if is_package(root, packaged=packaged or not options.named):
        directory = str(PurePosixPath(options.beside.above[-1]).parent)
        add_directory(spec, options.beside.place, directory, location)
    else:
        spec.note(location, note_of_scripts())


def is_package(root: YamlNode, *, packaged: bool = False) -> bool:
    """Return whether a pyproject.toml describes a package. `packaged` is True if another file does."""
    uv, poetry = _at(root, "tool", "uv"), _at(root, "tool", "poetry")
    if text_of(uv, "package") == "false" or text_of(poetry, "package-mode") == "false":
        return False
    says = bool(root.get("build-system")) or text_of(uv, "package") == "true"
    return packaged or says or bool(_at(root, "tool", "setuptools").pairs)


def note_of_scripts() -> str:
    return "the project is not a package: write its programs under files, such as files: {/app: [train.py]}"


# --- PEP 621, PEP 735, and what uv adds ----------------------------------------------------------


def _project(
    spec: EnvironmentSpec, root: YamlNode, options: ProjectReadOptions, optional: OptionalPackages
) -> None:
    project, uv = _at(root, "project"), _at(root, "tool", "uv")
    name = canonical(text_of(project, "name"))
    if not spec.python:
        spec.bound_python(text_of(project, "requires-python"), project.where)
    origins = _Origins(root, options)
    for item in _at(project, "dependencies").items:
        origins.take(spec, item.text, item.where)
    extras = _at(project, "optional-dependencies")
    reached: set[str] = set()

    def take(extra: YamlNode, lines: YamlNode) -> None:
        if canonical(extra.text) in reached:
            return
        reached.add(canonical(extra.text))
        optional.selected.add(canonical(extra.text))
        for item in lines.items:
            if (more := _own_extras(item.text, name)) is not None:
                for key, value in extras.pairs:
                    if canonical(key.text) in more:
                        take(key, value)
            else:
                origins.take(spec, item.text, item.where)

    for key, value in extras.pairs:
        texts = [item.text for item in value.items]
        optional.add_extra(key.text, lambda key=key, value=value: take(key, value), texts)  # type: ignore[misc]
    for index in _at(uv, "index").items:
        if text_of(index, "explicit") != "true" and text_of(index, "url"):
            option = "the default index" if text_of(index, "default") == "true" else "the index"
            option = "--find-links" if text_of(index, "format") == "flat" else option
            add_index(spec, text_of(index, "url"), index.where, option)
    for option in ("index-url", "extra-index-url", "find-links"):
        if addresses := uv.get(option):
            for item in addresses.items or [addresses]:
                add_index(spec, item.text, item.where, f"--{option}")
    if text_of(uv, "prerelease") == "allow":
        add_pip_line(spec, "--pre", uv.where, options.beside)
    for item in _at(uv, "constraint-dependencies").items:
        if marker_applies(item.text.partition(";")[2].strip(), options.beside.python, options.extras):
            _bound(spec, item, options)
    _overrides(spec, _at(uv, "override-dependencies").items, options)


def _overrides(spec: EnvironmentSpec, items: Sequence[YamlNode], options: ProjectReadOptions) -> None:
    """Add uv's overrides as constraints. An override whose markers never match drops the package."""
    rows: dict[str, list[tuple[YamlNode, str]]] = {}
    for item in items:
        requirement, _, marker = item.text.partition(";")
        rows.setdefault(package_of(requirement.strip()), []).append((item, marker.strip()))
    for name, group in rows.items():
        meant = [
            row for row, marker in group if marker_applies(marker, options.beside.python, options.extras)
        ]
        for item in meant:
            _bound(spec, item, options)
            message = f"the override {show(item.text)} is a constraint"
            spec.note(item.where, f"{message}: packages that forbid it stop the lock")
        if not meant and not any("extra" in marker for _, marker in group):
            do = f"write exclude: [{name}] in the recipe" if RULES["framework"].allows(name) else "remove it"
            spec.leave(group[0][0].where, f"the override {show(group[0][0].text)} drops a package", do)


def _bound(spec: EnvironmentSpec, item: YamlNode, options: ProjectReadOptions) -> None:
    bounds = EnvironmentSpec(file=spec.file)
    add_pip_line(bounds, item.text.partition(";")[0], item.where, options.beside)
    spec.lost += bounds.lost
    spec.constraints += [text for text in bounds.pip if RULES["constraint"].allows(text)]


def _own_extras(text: str, name: str) -> set[str] | None:
    """Return the extras in a requirement on the project itself: `all = ["proj[a,b]"]`."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    return set(map(canonical, requirement.extras)) if canonical(requirement.name) == name else None


def _groups(
    spec: EnvironmentSpec, root: YamlNode, options: ProjectReadOptions, optional: OptionalPackages
) -> None:
    """Add the groups of PEP 735, with the groups that they include, and the older groups of uv and PDM."""
    groups, origins = _at(root, "dependency-groups"), _Origins(root, options)
    name = canonical(text_of(_at(root, "project"), "name"))
    uv_dev = _at(root, "tool", "uv", "dev-dependencies")
    reached: set[str] = set()

    def rows_of(group: str) -> list[YamlNode]:
        rows = [item for key, value in groups.pairs if canonical(key.text) == group for item in value.items]
        rows += uv_dev.items if group == "dev" else []
        rows += [
            item
            for key, value in _at(root, "tool", "pdm", "dev-dependencies").pairs
            if canonical(key.text) == group
            for item in value.items
        ]
        return rows

    def take(group: str) -> None:
        if group in reached:
            return
        reached.add(group)
        optional.selected.add(group)
        for item in rows_of(group):
            if included := text_of(item, "include-group"):
                take(canonical(included))
            elif (own_extras := _own_extras(item.text, name)) is not None:
                for extra in own_extras & optional.extras.keys():
                    optional.extras[extra]()
            elif item.kind == "text":
                origins.take(spec, item.text, item.where)

    names = [
        *groups.keys,
        *(["dev"] if uv_dev.items else []),
        *_at(root, "tool", "pdm", "dev-dependencies").keys,
    ]
    for written in names:
        texts = [item.text for item in rows_of(canonical(written)) if item.kind == "text"]
        optional.add_group(written, lambda written=written: take(canonical(written)), texts)  # type: ignore[misc]


class _Origins:
    """The origins of dependencies in the tables of uv and Poetry."""

    def __init__(self, root: YamlNode, options: ProjectReadOptions) -> None:
        self.beside, self.root, self.options = options.beside, root, options
        uv = _at(root, "tool", "uv")
        self.indexes = {text_of(source, "name"): text_of(source, "url") for source in _at(uv, "index").items}
        self.pages = [
            text_of(source, "url") for source in _at(uv, "index").items if text_of(source, "format") == "flat"
        ]
        self.indexes |= {
            text_of(source, "name"): text_of(source, "url")
            for source in _at(root, "tool", "poetry", "source").items
        }
        self.rows = {
            canonical(key.text): value.items or [value]
            for key, value in [*_at(root, "tool", "poetry", "dependencies").pairs, *_at(uv, "sources").pairs]
            if value.kind != "text"
        }

    def take(self, spec: EnvironmentSpec, text: str, location: SourceLocation) -> None:
        """Add a requirement of the project, from its origin."""
        try:
            requirement = Requirement(text)
            meant = not requirement.marker or marker_matches(requirement.marker, self.beside.python)
        except InvalidRequirement:
            meant = False
        row = self._row(canonical(requirement.name)) if meant else None
        if row is None or not self.take_row(
            spec, requirement.name, row, location, sorted(requirement.extras)
        ):
            add_pip_line(spec, text, location, self.beside)

    def _row(self, name: str) -> YamlNode | None:
        for row in self.rows.get(name, ()):
            extra, group = canonical(text_of(row, "extra")), canonical(text_of(row, "group"))
            selection = set(map(canonical, (*self.options.extras, *self.options.groups)))
            marker = text_of(row, "marker") or text_of(row, "markers")
            if marker_applies(marker, self.beside.python, self.options.extras) and (
                (not extra or extra in selection) and (not group or group in selection)
            ):
                return row
        return None

    def take_row(
        self, spec: EnvironmentSpec, name: str, row: YamlNode, location: SourceLocation, extras: list[str]
    ) -> bool:
        """Add the package of a row with `git`, `path`, `url` or `workspace`. Return False for other rows."""
        index = self.indexes.get(text_of(row, "index") or text_of(row, "source"), "")
        brackets = f"[{','.join(extras)}]" if extras else ""
        if index:
            add_index(spec, index, row.where, "--find-links" if index in self.pages else "the index")
        if address := text_of(row, "git"):
            revision = next((text for key in ("rev", "tag", "branch") if (text := text_of(row, key))), "")
            address = f"{address}@{revision}" if revision else address
            directory = text_of(row, "subdirectory")
            add_git(spec, address.removeprefix("git+"), location, extras=brackets[1:-1], directory=directory)
        elif path := text_of(row, "path"):
            archive = re.search(r"\.(whl|zip|tar\.\w+|tgz)$", path)
            if archive:
                add_pip_line(spec, path, location, self.beside)
            else:
                add_project(spec, f"{path}{brackets}", location, self.beside)
        elif address := text_of(row, "url"):
            add_pip_line(spec, f"{name}{brackets} @ {address}", location, self.beside)
        elif text_of(row, "workspace") == "true":
            if member_path := self._member(canonical(name)):
                add_project(spec, f"{member_path}{brackets}", location, self.beside)
            else:
                do = "lock it and import its uv.lock, or write its directory under packages: ./DIRECTORY"
                spec.leave(location, f"the directory of the workspace member {show(name)} is unknown", do)
        else:
            return False
        return True

    def _member(self, name: str) -> str:
        """Return the directory of a workspace member, from its uv.lock or from the patterns for members.

        The root of the workspace is the directory of this file or a parent.
        """
        for above in (".", "..", "../..", "../../.."):
            text = self.beside.read(self.beside.path(f"{above}/uv.lock") or "uv.lock")
            lock = parse_project(text, "uv.lock")
            for row in _at(lock, "package").items if lock else ():
                source = _at(row, "source")
                directory = (
                    text_of(source, "editable") or text_of(source, "directory") or text_of(source, "virtual")
                )
                if directory and canonical(text_of(row, "name")) == name:
                    return normpath(f"{above}/{directory}")
            root = (
                self.root
                if above == "."
                else parse_project(
                    self.beside.read(self.beside.path(f"{above}/pyproject.toml") or "/"), "pyproject.toml"
                )
            )
            members = _at(root, "tool", "uv", "workspace", "members").items if root else []
            if members and root and canonical(text_of(_at(root, "project"), "name")) == name:
                return above
            for pattern in (item.text for item in members):
                for shape in (name, name.replace("-", "_")):
                    directory = pattern.replace("*", shape) if pattern.count("*") == 1 else pattern
                    if not fnmatchcase(directory, pattern):
                        continue
                    path = self.beside.path(f"{above}/{directory}/pyproject.toml")
                    project = parse_project(self.beside.read(path) if path else None, path)
                    if project and canonical(text_of(_at(project, "project"), "name")) == name:
                        return normpath(f"{above}/{directory}")
        return ""


def parse_project(text: str | None, file: str) -> YamlNode | None:
    try:
        return (
            parse_toml(text, file, YamlLimits(size=32 * 1024 * 1024, nodes=1_000_000, depth=12))
            if text
            else None
        )
    except RecipeError:
        return None


def marker_applies(marker: str, python: str, extras: Collection[str] | None = None) -> bool:
    """Return whether a marker matches with these extras selected. None selects each extra that it names.

    A marker that cannot be parsed matches: then the recipe may have a package too many, but never one too
    few.
    """

    def judged(match: re.Match[str]) -> str:
        selection = extras is None or canonical(match[2]) in map(canonical, extras)
        return f"python_version {'>=' if selection == (match[1] == '==') else '<'} '0'"

    try:
        plain = re.sub(r"""\bextra *(==|!=) *["']([^"']+)["']""", judged, marker)
        return not plain or marker_matches(Marker(plain), python)
    except InvalidMarker:
        return True


# --- setup.py, setup.cfg, and dependencies that another file says ---------------------------------


def _is_dynamic(project: YamlNode, field_name: str) -> bool:
    return field_name in [item.text for item in _at(project, "dynamic").items]


def _dynamic(
    spec: EnvironmentSpec,
    root: YamlNode,
    options: ProjectReadOptions,
    optional: OptionalPackages,
    *,
    has_tables: bool,
) -> SetupFacts | None:
    """Read dependencies in other files of a build: tables of setuptools, setup files, the hook of hatch."""
    project, tools = _at(root, "project"), _at(root, "tool")
    of_setuptools = _at(tools, "setuptools", "dynamic")
    hatch = _at(tools, "hatch", "metadata", "hooks", "requirements_txt")
    directory = str(PurePosixPath(options.beside.above[-1]).parent)
    setup, has_files = read_setup(options.beside.read, directory), False
    reads_dependencies = not has_tables or _is_dynamic(project, "dependencies")
    for table in (_at(of_setuptools, "dependencies"), hatch):
        files = _files(table)
        has_files |= bool(files)
        if reads_dependencies:
            _take_files(spec, files, options)
    for table in (_at(of_setuptools, "optional-dependencies"), _at(hatch, "optional-dependencies")):
        for key, value in table.pairs:
            names = value.items or _files(value)
            optional.add_extra(key.text, lambda names=names: _take_files(spec, names, options))  # type: ignore[misc]
    if setup is not None:
        if not has_files and reads_dependencies:
            _take_setup(spec, setup, options, optional, project.where)
        else:
            _offer_extras(spec, setup, options, optional)
    elif (
        has_tables and reads_dependencies and not has_files and not _at(tools, "poetry", "dependencies").pairs
    ):
        _computed(
            spec, next(i.where for i in _at(project, "dynamic").items if i.text == "dependencies"), options
        )
    return setup


def _files(table: YamlNode) -> list[YamlNode]:
    """Return the files of a table: `file` of setuptools, `files` or `filename` of hatch-requirements-txt."""
    rows = [value for key in ("file", "files", "filename") if (value := table.get(key))]
    return [item for value in rows for item in (value.items or [value]) if item.kind == "text"]


def _take_files(spec: EnvironmentSpec, names: list[YamlNode], options: ProjectReadOptions) -> None:
    for item in names:
        add_pip_line(spec, f"-r '{item.text}'", item.where, options.beside)


def _take_setup(
    spec: EnvironmentSpec,
    facts: SetupFacts,
    options: ProjectReadOptions,
    optional: OptionalPackages,
    location: SourceLocation,
) -> None:
    if facts.python and not spec.python:
        spec.bound_python(facts.python, location)
    for text, source_location in facts.needs:
        _take_line(spec, text, source_location, options)
    computed = [
        (source_location, code)
        for field_name, source_location, code in facts.unknown
        if not field_name.startswith("extra")
    ]
    if computed:
        source_location, code = computed[0]
        more = f" and {len(computed) - 1} more" if len(computed) > 1 else ""
        _computed(spec, source_location, options, f"{show(code, limit=100)}{more}")
    _offer_extras(spec, facts, options, optional)


def _offer_extras(
    spec: EnvironmentSpec, facts: SetupFacts, options: ProjectReadOptions, optional: OptionalPackages
) -> None:
    name = canonical(facts.name)
    reached: set[str] = set()

    def take(extra: str) -> None:
        reached.add(extra)
        optional.selected.add(extra)
        for text, location in facts.extras.get(extra, ()):
            if (own_extras := _own_extras(text, name)) is not None:
                for more in own_extras - reached:
                    take(more)
            else:
                _take_line(spec, text, location, options)
        for field_name, location, code in facts.unknown:
            if field_name in (f"extra {extra}", "extras_require"):
                do = "write its packages into a requirements file, and import that too"
                spec.leave(location, f"the extra {show(extra)} is computed: {show(code, limit=100)}", do)

    for field_name, location, code in facts.unknown:
        if field_name == "extras_require" and options.named:
            spec.note(location, f"the names of the extras are computed: {show(code, limit=100)}")
    for extra in facts.extras:
        texts = [text for text, _ in facts.extras[extra]]
        optional.add_extra(extra, lambda extra=extra: take(extra), texts)  # type: ignore[misc]


def _take_line(
    spec: EnvironmentSpec, text: str, location: SourceLocation, options: ProjectReadOptions
) -> None:
    if text.startswith("-r ") and location.file.endswith(".py"):
        spec.note(location, f"the code that reads {text[3:]} is not run: all lines of the file are taken")
    add_pip_line(spec, text, location, options.beside)


def _computed(
    spec: EnvironmentSpec, location: SourceLocation, options: ProjectReadOptions, code: str = ""
) -> None:
    """Report dependencies that only the build computes. `lock --build` reads them from the wheel."""
    message = f"what the project needs is computed by its build{f': {code}' if code else ''}"
    if options.beside.place is not None:
        spec.note(
            location, f"{message}; `imagefactory lock TARGET --build` takes it from the wheel that it builds"
        )
    else:
        do = "write it into a requirements.txt (pip freeze, where it is installed), and import that"
        spec.leave(location, message, do)


# --- Poetry --------------------------------------------------------------------------------------


def _poetry(
    spec: EnvironmentSpec, poetry: YamlNode, options: ProjectReadOptions, optional: OptionalPackages
) -> None:
    addresses = {text_of(source, "name"): text_of(source, "url") for source in _at(poetry, "source").items}
    for source in _at(poetry, "source").items:
        if text_of(source, "priority") != "explicit" and (address := text_of(source, "url")):
            add_index(spec, address, source.where, "the default index")
    rows = _at(poetry, "dependencies").pairs

    def take(pairs: Iterable[tuple[YamlNode, YamlNode]], *, selection: frozenset[str] = frozenset()) -> None:
        for key, value in pairs:
            if key.text == "python":
                spec.bound_python(poetry_bounds(value.text) or "", value.where)
                continue
            for row in value.items or [value]:
                is_chosen = canonical(key.text) in selection
                if is_chosen or text_of(row, "optional") != "true":
                    if row.kind == "map" and (address := addresses.get(text_of(row, "source"))):
                        add_index(spec, address, row.where)
                    _poetry_row(spec, key, row, options)

    take(rows)
    for key, value in _at(poetry, "extras").pairs:
        selection = frozenset(canonical(re.split(r"[ \[<>=!~;]", item.text)[0]) for item in value.items)
        of_it = [(name, row) for name, row in rows if canonical(name.text) in selection]
        optional.add_extra(
            key.text,
            lambda of_it=of_it, selection=selection: take(of_it, selection=selection),  # type: ignore[misc]
            sorted(selection),
        )
    for key, value in _at(poetry, "group").pairs:
        rows = _at(value, "dependencies").pairs
        optional.add_group(key.text, lambda rows=rows: take(rows), [name.text for name, _ in rows])  # type: ignore[misc]
    if (dev := _at(poetry, "dev-dependencies")).pairs:
        optional.add_group("dev", lambda: take(dev.pairs), dev.keys)


def _poetry_row(spec: EnvironmentSpec, key: YamlNode, value: YamlNode, options: ProjectReadOptions) -> None:
    written = value.text if value.kind == "text" else text_of(value, "version")
    extras = [item.text for item in _at(value, "extras").items]
    marker, python = text_of(value, "markers"), text_of(value, "python")
    if not (
        marker_applies(marker, options.beside.python, options.extras)
        and _allows(python, options.beside.python)
    ):
        spec.note(key.where, f"{show(key.text)} is not for Python {options.beside.python} on {PLATFORM}")
    elif value.kind == "map" and _Origins(YamlNode(value.where, "map"), options).take_row(
        spec, key.text, value, key.where, extras
    ):
        pass
    elif (bounds := poetry_bounds(written)) is None:
        do = "write bounds with commas between them, such as >=1,<3"
        spec.leave(key.where, f"{show(key.text)} {show(written)} cannot be taken over", do)
    else:
        brackets = f"[{','.join(extras)}]" if extras else ""
        add_pip_line(spec, f"{key.text}{brackets}{bounds}", key.where, options.beside)


def _allows(bounds: str, python: str) -> bool:
    """Return whether Poetry bounds allow a Python version. Alternatives (`|`) count as allowed."""
    plain = poetry_bounds(bounds)
    return not plain or specifiers_allow(plain, f"{python}.5")


# --- pixi ----------------------------------------------------------------------------------------

_LIKE_DEPENDENCIES = ("dependencies", "host-dependencies", "build-dependencies")
# The keys of a pixi table that are read here, or that do not concern an environment.
_READ = {
    *(
        "workspace",
        "project",
        "package",
        "feature",
        "environments",
        "tasks",
        "target",
        "activation",
        "channels",
    ),
    *(*_LIKE_DEPENDENCIES, "pypi-dependencies", "pypi-options", "system-requirements", "constraints"),
    *("platforms", "build-system", "dependency-groups", "tool"),
}
_CHOICES = ("channel-priority", "solve-strategy", "exclude-newer")
"""The keys that decide which of the allowed versions pixi locks."""
_ROW = {"version", "build", "channel", "extras", "index", "subdir", "path", "git", "url"}


def _pixi(spec: EnvironmentSpec, root: YamlNode, referenced_files: ReferencedFiles, environment: str) -> None:
    workspace = _at(root, "workspace") if _at(root, "workspace").pairs else _at(root, "project")
    platforms = [
        item.text if item.kind == "text" else text_of(item, "platform")
        for item in _at(workspace, "platforms").items
    ]
    if platforms and not any(name.startswith(PLATFORM) for name in platforms):
        spec.note(workspace.where, f"{PLATFORM} is not among its platforms: see whether it locks")
    parts = [_at(root, "feature", name) for name in _features(spec, root, environment)]
    if not _alone(root, environment):
        parts.insert(0, root)
    for part in [*parts[1:], *parts[:1]] if len(parts) > 1 else parts:  # a feature's channels come first
        add_channels(spec, _at(part, "channels"))
    add_channels(spec, _at(workspace, "channels"))
    for node in _at(workspace, "platforms").items:
        _driver(spec, node.get("cuda") if node.kind == "map" else None)
    for part in (workspace, *parts):
        _pypi_options(spec, _at(part, "pypi-options"), referenced_files)
        for key in (key for key, _ in part.pairs if key.text in _CHOICES):
            spec.note(key.where, f"{show(key.text)} is not taken over: the newest allowed version is locked")
    for part in parts:
        _pixi_part(spec, part, referenced_files, is_root=part is root)


def _pixi_part(
    spec: EnvironmentSpec, part: YamlNode, referenced_files: ReferencedFiles, *, is_root: bool
) -> None:
    """Add the packages and variables of a feature, or of all environments."""
    cuda = _at(part, "system-requirements").get("cuda")
    _driver(spec, cuda.get("version") or cuda if cuda else None)
    for table in (part, *(_at(part, "target", name) for name in _TARGETS)):
        for name in _LIKE_DEPENDENCIES:
            for key, value in _at(table, name).pairs:
                _conda_row(spec, key, value)
        bounds = EnvironmentSpec(file=spec.file)
        for key, value in _at(table, "constraints").pairs:
            _conda_row(bounds, key, value)
        spec.conda_bounds += bounds.conda
        spec.lost += bounds.lost
        for key, value in _at(table, "pypi-dependencies").pairs:
            _pypi_row(spec, key, value, referenced_files)
        for key, value in _at(table, "activation", "env").pairs:
            spec.variable(key.text, value.text, key.where)
        for item in _at(table, "activation", "scripts").items:
            do = "write the variables that it sets under environment"
            spec.leave(item.where, f"{show(item.text)} is run on activation, and not here", do)
    for key, value in part.pairs:
        if key.text == "tasks" and value.pairs:
            spec.note(key.where, "the tasks are not run: what they install is not in the image")
        elif is_root and key.text not in _READ and value.kind != "text":
            spec.leave(key.where, f"{show(key.text)} is not read", "write its packages under dependencies")


def _driver(spec: EnvironmentSpec, cuda: YamlNode | None) -> None:
    """Add the CUDA version that the driver must support as a hint. A solver chooses builds by it."""
    if cuda and (match := re.match(r"[0-9]{1,2}\.[0-9]", cuda.text)):
        spec.hints.append(f"cuda{match[0]}")
        spec.note(
            cuda.where, f"CUDA {match[0]} is the least that the driver must support: it sets the row's CUDA"
        )


def _pypi_options(spec: EnvironmentSpec, options: YamlNode, referenced_files: ReferencedFiles) -> None:
    """Add the options that pip has too. Report the others."""
    for key, value in options.pairs:
        known = {
            "index-url": "--index-url",
            "extra-index-urls": "--extra-index-url",
            "find-links": "--find-links",
        }
        for item in value.items or [value]:
            text = item.text if item.kind == "text" else text_of(item, "url") or text_of(item, "path")
            if option := known.get(key.text):
                add_pip_line(spec, f"{option} {text}", item.where, referenced_files)
        if key.text in ("no-build-isolation", "no-build", "no-binary", "index-strategy"):
            spec.note(key.where, f"{show(key.text)} is not taken over: images are built only from wheels")
        elif key.text not in known:
            spec.leave(key.where, f"{show(key.text)} is not read", "write the versions that it forces")


def _features(spec: EnvironmentSpec, root: YamlNode, environment: str) -> list[str]:
    """Return the features of an environment. Raises RecipeError if it does not exist."""
    environments = _at(root, "environments")
    name = environment or "default"
    selection = environments.get(name)
    if selection is None and name != "default":
        names = " or ".join(environments.keys) or "leave it out"
        raise recipe_problem(
            root.where, "environment-unknown", f"has no environment {show(name)}", f"--environment {names}"
        )
    if not environment and (others := [name for name in environments.keys if name != "default"]):
        names = show(" or ".join(others), limit=200)[1:-1]
        spec.note(
            environments.where, f"the default environment was taken (--environment {names} takes another)"
        )
    if selection is None:
        return []
    return [item.text for item in (selection.items or _at(selection, "features").items)]


def _alone(root: YamlNode, environment: str) -> bool:
    return text_of(_at(root, "environments", environment or "default"), "no-default-feature") == "true"


def _conda_row(spec: EnvironmentSpec, key: YamlNode, value: YamlNode) -> None:
    if value.kind == "text":
        add_match_spec(spec, f"{key.text} {value.text}".removesuffix(" *"), key.where)
        return
    if any(name in value.keys for name in ("path", "git", "url")):
        spec.leave(
            key.where, f"{show(key.text)} is made from sources", "add it from a channel, if one has it"
        )
        return
    _unread(spec, key, value)
    version, build, channel = (text_of(value, name) for name in ("version", "build", "channel"))
    name = f"{channel.rstrip('/')}::{key.text}" if channel else key.text
    text = f"{name} {version or '*'} {build}" if build else f"{name} {version}".removesuffix(" *")
    add_match_spec(spec, text.strip(), key.where)


def _pypi_row(
    spec: EnvironmentSpec, key: YamlNode, value: YamlNode, referenced_files: ReferencedFiles
) -> None:
    if value.kind == "text":
        add_pip_line(spec, key.text + _bounds(value.text), key.where, referenced_files)
        return
    if index := text_of(value, "index"):
        add_index(spec, index, value.where)
    _unread(spec, key, value)
    extras = [item.text for item in _at(value, "extras").items]
    origins = _Origins(YamlNode(value.where, "map"), ProjectReadOptions(beside=referenced_files))
    if not origins.take_row(spec, key.text, value, key.where, extras):
        brackets = f"[{','.join(extras)}]" if extras else ""
        add_pip_line(
            spec, f"{key.text}{brackets}{_bounds(text_of(value, 'version'))}", key.where, referenced_files
        )


def _unread(spec: EnvironmentSpec, key: YamlNode, value: YamlNode) -> None:
    """Report the unsupported keys in the row of a package, such as a build number."""
    if (more := {*value.keys} - _ROW) and not {"path", "git", "url"} & {*value.keys}:
        unread_names = ", ".join(sorted(more))
        spec.leave(
            key.where, f"{show(key.text)}: {show(unread_names)} is not read", "say it by a version or a build"
        )


def _bounds(written: str) -> str:
    return "" if written in ("", "*") else written


def _at(node: YamlNode, *keys: str) -> YamlNode:
    """Return the node at a path of keys, empty if it does not exist."""
    for key in keys:
        node = node.get(key) or YamlNode(node.where, "map", made="nothing")
    return node
