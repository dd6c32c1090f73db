"""Read the environment files of other tools into specs for recipes.

`environment.yml` is read here, requirements files in pip_lines.py, projects in manifests.py, container files
in dockerfiles.py, and locks in locks.py. All files are untrusted: they are read within limits, and their
values must match the allow-lists of recipes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from imagefactory.errors import RecipeError, UsageError, os_problem
from imagefactory.extras.importers.build_context import (
    BuildContext,
    context_message,
    decode_text,
    git_root,
    open_context,
)
from imagefactory.extras.importers.container import ContainerFileReaders, DependencySelection
from imagefactory.extras.importers.dockerfiles import (
    DEFINITION,
    DOCKERFILE,
    NAMED,
    read_definition,
    read_dockerfile,
)
from imagefactory.extras.importers.locks import (
    EXPLICIT,
    read_conda_lock,
    read_explicit,
    read_pixi_lock,
    read_poetry_lock,
    read_pylock,
    read_uv_lock,
)
from imagefactory.extras.importers.manifests import (
    ProjectReadOptions,
    parse_toml,
    read_project,
    read_project_directory,
)
from imagefactory.extras.importers.pip_lines import (
    MOST_FILES,
    ReferencedFiles,
    add_pip_line,
    add_requirements,
)
from imagefactory.extras.importers.spec import (
    PLATFORM,
    EnvironmentSpec,
    add_channels,
    add_match_spec,
    items_of,
    minor_python,
    poetry_bounds,
    selected,
    specifiers_allow,
    text_of,
)
from imagefactory.recipes.yaml_tree import (
    YamlLimits,
    YamlNode,
    first_place,
    parse_tree,
    recipe_problem,
    show,
    too_large,
)

# Locks of several platforms are large.
LIMITS = YamlLimits(size=32 * 1024 * 1024, nodes=1_000_000, depth=12)
_NOTHING = (
    "no-packages",
    "is not a supported environment file",
    "give an environment.yml, requirements.txt, pyproject.toml, setup.py, pixi.toml, a Dockerfile, "
    "a definition of apptainer or a lock of conda-lock, pixi, uv or Poetry, or a pylock.toml",
)
_NO_ENVIRONMENTS = (
    "no-environments",
    "has no environments to choose from, as a pixi.lock has",
    "remove --environment",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options for reading a file.

    `pythons` are the Python versions of the bases, the preferred first. The first one that the file allows
    evaluates markers. `environment` is a pixi environment; `extras` and `groups` are optional parts of a
    project. `root` is the imagefactory project, in which `reserved` names are used by imagefactory.
    `build_context` is the user's directory for a container file, `context` the directory from which it
    copies. `beside` reads other files that this file names, `place` is its directory relative to the root
    (None outside), `projects` are the directories whose projects were read. `build_args` are values for a
    container file. With `frozen` the file is a lock whose very files are kept.
    """

    pythons: tuple[str, ...]
    environment: str = ""
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    root: Path | None = None
    reserved: tuple[str, ...] = ()
    build_context: Path | None = None
    beside: Callable[[str], str | None] = lambda _: None
    place: str | None = None
    projects: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    context: BuildContext | None = None
    build_args: Mapping[str, str] = field(default_factory=dict)
    frozen: bool = False

    def inside(self, bounds: str) -> ReferencedFiles:
        """Return the readers for pip lines in an environment with these bounds on Python."""
        return ReferencedFiles(self.python(bounds), self.beside, project=self._project, place=self.place)

    def _project(
        self, directory: str, extras: tuple[str, ...], referenced_files: ReferencedFiles
    ) -> EnvironmentSpec | None:
        if (key := (directory, extras)) in self.projects:  # projects may need each other
            return EnvironmentSpec(file=directory)
        if len(self.projects) >= MOST_FILES:
            return None
        self.projects.add(key)
        return read_project_directory(
            directory, ProjectReadOptions(beside=referenced_files, extras=extras), self.python
        )

    def project_options(self, bounds: str) -> ProjectReadOptions:
        """Return the options for reading the project that the file describes."""
        return ProjectReadOptions(
            beside=self.inside(bounds),
            environment=self.environment,
            extras=self.extras,
            groups=self.groups,
            named=True,
            frozen=self.frozen,
        )

    def python(self, bounds: str) -> str:
        """Return the Python version that evaluates markers."""
        fitting = (
            python for python in self.pythons if specifiers_allow(bounds, f"{python}.5", invalid=False)
        )
        return minor_python(bounds) or next(fitting, self.pythons[0])


def read_environment_file(path: Path, reading: ReadOptions) -> EnvironmentSpec:
    """Return the requirements of the file at `path`. Its format is recognized by its content.

    Other files that it names are read in its directory, its git work tree and the imagefactory project.
    Raises UsageError if it cannot be read, RecipeError if its format is not supported.
    """
    text, directory = _read(path), path.parent.resolve()
    file = show(path.name)[1:-1]
    if _container(text, file):
        return _read_container(path, text, reading)
    if reading.build_context:
        hint = "omit --context: it is only for the COPY lines of a Dockerfile"
        raise UsageError(
            "option-conflict", f"{path} is not a container file, so --context has no effect", hint=hint
        )
    if reading.build_args:
        hint = (
            "omit --build-arg: it is only for ARG in a Dockerfile, or {{ NAME }} in an Apptainer definition"
        )
        raise UsageError(
            "option-conflict", f"{path} is not a container file, so --build-arg has no effect", hint=hint
        )
    root = reading.root.resolve() if reading.root else None
    within = [
        directory,
        *(top for top in (_work_tree(directory), root) if top and directory.is_relative_to(top)),
    ]

    def beside(name: str) -> str | None:
        other = directory / name
        try:
            inside = any(other.resolve().is_relative_to(top) for top in within)
            return _read(other) if inside and other.is_file() else None
        except (RecipeError, UsageError, OSError, ValueError):
            return None

    relative_path = str(directory.relative_to(root)) if root in within else None
    return parse_environment_file(text, file, replace(reading, beside=beside, place=relative_path))


def _read_container(path: Path, text: str, reading: ReadOptions) -> EnvironmentSpec:
    """Read a container file, whose other files are in its build context."""
    file = show(path.name)[1:-1]
    context = open_context(
        path.parent,
        selection=reading.build_context,
        project=reading.root,
        reserved=reading.reserved,
        file=path.name,
    )
    reading = replace(reading, beside=context.read, context=context, place=context.project_path("."))
    spec = parse_environment_file(text, file, reading)
    if context.root != context.own or context.named:
        spec.note(first_place(file), context_message(context))
    return spec


def _work_tree(directory: Path) -> Path | None:
    """Return the root of a directory's git work tree, None if it contains a home directory."""
    root = git_root(directory)
    return None if root is None or Path.home().is_relative_to(root) else root


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(LIMITS.size + 1)
        if len(data) > LIMITS.size:
            raise too_large(show(path.name)[1:-1], LIMITS)
        return decode_text(data)
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="check the path") from error
    except ValueError as error:
        raise UsageError("encoding-invalid", f"{path} {error}", hint="save it as UTF-8") from error


def parse_environment_file(text: str, file: str, reading: ReadOptions) -> EnvironmentSpec:
    """Return the requirements of a text. Raises RecipeError."""
    is_project_file = file in ("pyproject.toml", "setup.py", "setup.cfg")
    reading = replace(reading, projects={(".", ())} if is_project_file else set())
    if file.endswith((".py", ".cfg")):
        return _setup(text, file, reading)
    if read := _container(text, file):
        _check_no_selection(file, reading)
        around = ContainerFileReaders(
            inside=lambda bounds: _within_file(reading.inside(bounds), file),
            parse=lambda inner, name, selection: _parse_packages(
                inner, name, _with_selection(reading, selection)
            ),
            context=reading.context,
            build_args=reading.build_args,
        )
        return read(text, file, around)
    return _parse_packages(text, file, reading)


def _with_selection(reading: ReadOptions, selection: DependencySelection) -> ReadOptions:
    """Return the options for a file from which a command selects parts."""
    python = minor_python(selection.python)
    return replace(
        reading,
        environment=selection.environment or reading.environment,
        extras=selection.extras,
        groups=selection.groups,
        pythons=(python, *reading.pythons) if python else reading.pythons,
    )


def _parse_packages(text: str, file: str, reading: ReadOptions) -> EnvironmentSpec:
    """Parse a list of packages.

    Container files are excluded, since a container file must not name another one.
    """
    start = first_place(file)
    toml = file.endswith(".toml") or re.search(r"^\[\[package\]\]\s*$", text, re.MULTILINE)
    if toml and not file.endswith((".txt", ".in", ".pip", ".yml", ".yaml")):
        if re.search(r"^[A-Za-z0-9][A-Za-z0-9._-]*==[^\s=]+ \\$", text, re.MULTILINE):
            # older versions of uv write this for `uv export -o pylock.toml`
            problem = "has the lines of a requirements.txt, and is not TOML"
            raise recipe_problem(start, "toml-invalid", problem, "rename it to requirements.txt")
        return _toml(parse_toml(text, file, LIMITS), file, reading)
    if EXPLICIT.search(text) or file.endswith((".txt", ".in", ".pip")):
        _check_no_selection(file, reading)
        if EXPLICIT.search(text):
            return read_explicit(text, file, frozen=reading.frozen)
        spec = EnvironmentSpec(file=file, frozen=reading.frozen)
        add_requirements(spec, text, file, _within_file(reading.inside(""), file))
        if not reading.frozen and re.search(r"\s--hash[= ]sha256:[0-9a-f]{64}", text):
            spec.note(
                start, "versions are bounds, and are solved again (--frozen keeps the files by their hashes)"
            )
        return spec
    if re.search(r"\{[{%]", text):
        raise recipe_problem(
            start,
            "template-not-filled",
            "is a template ({{ }} or {% %})",
            "fill it in, and import the result",
        )
    if not re.search(r"^\s*[^\s#]", text, re.MULTILINE):
        raise recipe_problem(start, *_NOTHING)
    root = parse_tree(text, file, LIMITS)
    if root.kind == "map" and "environments" in root.keys:
        _check_no_selection(file, replace(reading, environment=""))
        return read_pixi_lock(root, file, reading.environment, reading.inside(""), frozen=reading.frozen)
    if root.kind == "map" and "package" in root.keys:
        _check_no_selection(file, replace(reading, groups=()))
        return read_conda_lock(root, file, reading.groups, frozen=reading.frozen)
    _check_no_selection(file, reading)
    if root.kind == "map" and "dependencies" in root.keys:
        return _environment(root, text, file, reading)
    raise recipe_problem(start, *_NOTHING)


def _container(text: str, file: str) -> Callable[[str, str, ContainerFileReaders], EnvironmentSpec] | None:
    """Return the reader of a Dockerfile or definition, by content or else by name; None for other files."""
    if file.endswith((".txt", ".in", ".pip", ".toml", ".lock", ".yml", ".yaml", ".py", ".cfg")):
        return None
    if DEFINITION.match(text) or file.endswith(".def"):
        return read_definition
    return read_dockerfile if DOCKERFILE.match(text) or NAMED.fullmatch(file) else None


def _within_file(referenced_files: ReferencedFiles, file: str) -> ReferencedFiles:
    return replace(referenced_files, above=(file,))


def _check_no_selection(file: str, reading: ReadOptions) -> None:
    """Raise RecipeError if the user selects an environment, extra or group of a file that has none."""
    if reading.environment:
        raise recipe_problem(first_place(file), *_NO_ENVIRONMENTS)
    if reading.extras or reading.groups:
        option = "--extra" if reading.extras else "--group"
        message = "has no extras and no groups to choose from, as a pyproject.toml has"
        raise recipe_problem(first_place(file), "option-not-applicable", message, f"remove {option}")


def _toml(root: YamlNode, file: str, reading: ReadOptions) -> EnvironmentSpec:
    if root.get("lock-version"):
        if reading.environment:
            raise recipe_problem(root.where, *_NO_ENVIRONMENTS)
        return read_pylock(root, file, reading.project_options(text_of(root, "requires-python")))
    if not root.get("package") or root.get("project") or root.get("workspace"):
        return read_project(
            root, file, reading.project_options(text_of(root.get("project") or root, "requires-python"))
        )
    if reading.environment:
        raise recipe_problem(root.where, *_NO_ENVIRONMENTS)
    if metadata := root.get("metadata"):
        bounds = poetry_bounds(text_of(metadata, "python-versions")) or ""
        return read_poetry_lock(root, file, reading.project_options(bounds))
    return read_uv_lock(root, file, reading.project_options(text_of(root, "requires-python")))


def _setup(text: str, file: str, reading: ReadOptions) -> EnvironmentSpec:
    """Read the project of a setup.py or setup.cfg, and its pyproject.toml."""
    if reading.environment:
        raise recipe_problem(first_place(file), *_NO_ENVIRONMENTS)
    near = reading.beside
    reading = replace(reading, beside=lambda name: text if name == file else near(name))
    named = file in ("setup.py", "setup.cfg")
    spec = read_project_directory(".", reading.project_options(""), reading.python) if named else None
    if spec is None:
        message = "has no readable call of setup()" if file.endswith(".py") else "has no options of a package"
        raise recipe_problem(
            first_place(file),
            "setup-not-readable",
            message,
            "list the packages in a requirements.txt, and import that",
        )
    return replace(spec, file=file)


# --- environment.yml -----------------------------------------------------------------------------


def _environment(root: YamlNode, text: str, file: str, reading: ReadOptions) -> EnvironmentSpec:
    spec, lines = EnvironmentSpec(file=file), text.split("\n")
    for key, value in root.pairs:
        match key.text:
            case "name" | "prefix":  # of an environment on somebody's machine
                pass
            case "channels":
                add_channels(spec, value)
            case "dependencies":
                for item in items_of(spec, value, "dependencies"):
                    if _for_platform(spec, item, lines):
                        _dependency(spec, item, reading, lines)
            case "variables":
                for name, item in value.pairs:
                    spec.variable(name.text, item.text, name.where)
            case "platforms":
                if PLATFORM not in [item.text for item in value.items]:
                    spec.note(key.where, f"{PLATFORM} is not among its platforms: see whether it locks")
            case _:
                do = "write what it asks for into the file's other keys, or remove it"
                spec.leave(key.where, f"{show(key.text)} is not a key of conda's, and not read", do)
    named = root.get("channels")
    spec.defaults = "nodefaults" not in [item.text for item in (named.items if named else ())]
    return spec


def _for_platform(spec: EnvironmentSpec, item: YamlNode, lines: list[str]) -> bool:
    """Return whether a selector after an item (`# [linux]`) matches, with the rules of conda-lock."""
    line = lines[item.where.line - 1] if item.kind == "text" and item.where.line <= len(lines) else ""
    match = re.search(r"#\s*\[([^\]]+)\]\s*$", line)
    if not match:
        return True
    holds = selected(match[1])
    if holds is None:
        spec.note(
            item.where, f"the line is taken: the selector {show(match[0].strip())} is a comment to conda"
        )
    elif not holds:
        spec.note(item.where, f"{show(item.text)} is not for {PLATFORM}")
    return holds is not False


def _dependency(spec: EnvironmentSpec, item: YamlNode, reading: ReadOptions, lines: list[str]) -> None:
    if item.kind == "text":
        add_match_spec(spec, item.text, item.where)
        return
    for key, value in item.pairs:
        if key.text == "pip":
            for line in items_of(spec, value, "pip"):
                if _for_platform(spec, line, lines):
                    add_pip_line(
                        spec, line.text, line.where, _within_file(reading.inside(spec.python), spec.file)
                    )
        else:
            spec.leave(
                key.where, f"{show(key.text)} is not read", f"write its packages for {PLATFORM} as a list"
            )
    if item.kind == "list":
        spec.leave(item.where, "a list in a list is not read", "write its packages one level up")
