"""Environments that people have already, read into what recipes can say of them.

`environment.yml` here; pip_lines.py reads requirements files, manifests.py what projects want,
dockerfiles.py and definitions.py what containers are built from, foreign_locks.py and python_locks.py what
other tools locked. All of them are data from strangers, read within
caps and through the same allow-lists as recipes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from imagefactory.errors import RecipeError, UsageError
from imagefactory.model import Where
from imagefactory.recipes.container import Around
from imagefactory.recipes.definitions import DEFINITION, read_definition
from imagefactory.recipes.dockerfiles import DOCKERFILE, NAMED, read_dockerfile
from imagefactory.recipes.foreign_locks import EXPLICIT, read_conda_lock, read_explicit, read_pixi_lock
from imagefactory.recipes.manifests import ProjectAsk, read_project
from imagefactory.recipes.pip_lines import Beside, take_pip_line, take_requirements
from imagefactory.recipes.python_locks import read_poetry_lock, read_uv_lock
from imagefactory.recipes.toml_tree import parse_toml
from imagefactory.recipes.wish import (
    PLATFORM,
    Wish,
    items_of,
    minor_python,
    poetry_bounds,
    selected,
    take_channels,
    take_match_spec,
    text_of,
)
from imagefactory.recipes.yaml_tree import Limits, YamlNode, parse_tree, refused, show, too_large

# Locks of several platforms are large.
LIMITS = Limits(size=32 * 1024 * 1024, nodes=1_000_000, depth=12)
_NOTHING = (
    "is no environment that can be taken over",
    "give an environment.yml, requirements.txt, pixi.toml, pyproject.toml, a Dockerfile, a definition of "
    "apptainer or a lock of conda-lock, pixi, uv or Poetry",
)
_NO_ENVIRONMENTS = "has no environments to choose from, as a pixi.lock has", "leave out --environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a file is read.

    `pythons` are what bases carry, the preferred first: markers are judged by the first that the file allows.
    `environment` names one of pixi's, `beside` reads files that this one names.
    """

    pythons: tuple[str, ...]
    environment: str = ""
    beside: Callable[[str], str | None] = lambda _: None

    def inside(self, bounds: str) -> Beside:
        """What pip's lines are read with, in an environment whose Python is bounded."""
        return Beside(self.python(bounds), self.beside, project=self._project)

    def _project(self, folder: str, extras: tuple[str, ...]) -> Wish | None:
        file = str(PurePosixPath(folder) / "pyproject.toml")
        text = self.beside(file)
        if text is None:
            return None
        try:
            root = parse_toml(text, file, LIMITS)
            bounds = text_of(root.get("project") or root, "requires-python")
            return read_project(root, file, ProjectAsk(python=self.python(bounds), extras=extras))
        except RecipeError:  # many hold the settings of tools alone
            return None

    def python(self, bounds: str) -> str:
        """The Python by which markers are judged."""
        return minor_python(bounds) or next(
            (one for one in self.pythons if _within(one, bounds)), self.pythons[0]
        )


def _within(python: str, bounds: str) -> bool:
    try:
        return SpecifierSet(bounds).contains(f"{python}.5")
    except InvalidSpecifier:
        return False


def read_wish(path: Path, reading: Reading) -> Wish:
    """What the file at `path` asks for; its content tells which kind it is.

    Raises UsageError when it cannot be read, RecipeError for what is none of these files.
    """
    text = _read(path)

    def beside(name: str) -> str | None:
        other = path.parent / name
        try:
            inside = other.resolve().is_relative_to(path.parent.resolve())
            return _read(other) if inside and other.is_file() else None
        except (RecipeError, UsageError):
            return None

    return parse_wish(text, show(path.name)[1:-1], replace(reading, beside=beside))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(LIMITS.size + 1)
        if len(data) > LIMITS.size:
            raise too_large(show(path.name)[1:-1], LIMITS)
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", hint="name a file that is there"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", hint="save it as UTF-8") from error


def parse_wish(text: str, file: str, reading: Reading) -> Wish:
    """The same of a text. Raises RecipeError."""
    if read := _container(text, file):
        if reading.environment:
            raise refused(Where(file=file, line=1, column=1), *_NO_ENVIRONMENTS)
        around = Around(
            inside=lambda bounds: _within_file(reading.inside(bounds), file),
            parse=lambda inner, name: _parse_packages(inner, name, reading),
        )
        return read(text, file, around)
    return _parse_packages(text, file, reading)


def _parse_packages(text: str, file: str, reading: Reading) -> Wish:
    """What lists packages, and no container: what a container names may be no other."""
    start, environment = Where(file=file, line=1, column=1), reading.environment
    toml = file.endswith(".toml") or re.search(r"^\[\[package\]\]\s*$", text, re.MULTILINE)
    if toml and not file.endswith((".txt", ".in", ".pip", ".yml", ".yaml")):
        return _toml(parse_toml(text, file, LIMITS), file, reading)
    if EXPLICIT.search(text) or file.endswith((".txt", ".in", ".pip")):
        if environment:
            raise refused(start, *_NO_ENVIRONMENTS)
        if EXPLICIT.search(text):
            return read_explicit(text, file)
        wish = Wish(file=file)
        take_requirements(wish, text, file, _within_file(reading.inside(""), file))
        return wish
    if re.search(r"\{[{%]", text):
        raise refused(start, "is a template ({{ }} or {% %})", "fill it in, and import what comes out")
    if not re.search(r"^\s*[^\s#]", text, re.MULTILINE):
        raise refused(start, *_NOTHING)
    root = parse_tree(text, file, LIMITS)
    if root.kind == "map" and "environments" in root.keys:
        return read_pixi_lock(root, file, environment)
    if environment:
        raise refused(start, *_NO_ENVIRONMENTS)
    if root.kind == "map" and "package" in root.keys:
        return read_conda_lock(root, file)
    if root.kind == "map" and "dependencies" in root.keys:
        return _environment(root, text, file, reading)
    raise refused(start, *_NOTHING)


def _container(text: str, file: str) -> Callable[[str, str, Around], Wish] | None:
    """What reads it, where it is a Dockerfile or a definition by its content, or else by its name."""
    if file.endswith((".txt", ".in", ".pip", ".toml", ".lock", ".yml", ".yaml")):
        return None
    if DEFINITION.match(text) or file.endswith(".def"):
        return read_definition
    return read_dockerfile if DOCKERFILE.match(text) or NAMED.fullmatch(file) else None


def _within_file(beside: Beside, file: str) -> Beside:
    return replace(beside, above=(file,))


def _toml(root: YamlNode, file: str, reading: Reading) -> Wish:
    if not root.get("package") or root.get("project") or root.get("workspace"):
        bounds = text_of(root.get("project") or root, "requires-python")
        asked = ProjectAsk(python=reading.python(bounds), environment=reading.environment)
        return read_project(root, file, asked)
    if reading.environment:
        raise refused(root.where, *_NO_ENVIRONMENTS)
    if metadata := root.get("metadata"):
        bounds = poetry_bounds(text_of(metadata, "python-versions")) or ""
        return read_poetry_lock(root, file, reading.python(bounds))
    return read_uv_lock(root, file, reading.python(text_of(root, "requires-python")))


# --- environment.yml -----------------------------------------------------------------------------


def _environment(root: YamlNode, text: str, file: str, reading: Reading) -> Wish:
    wish, lines = Wish(file=file), text.split("\n")
    for key, value in root.pairs:
        match key.text:
            case "name" | "prefix":  # of an environment on somebody's machine
                pass
            case "channels":
                take_channels(wish, value)
            case "dependencies":
                for item in items_of(wish, value, "dependencies"):
                    if _for_platform(wish, item, lines):
                        _dependency(wish, item, reading, lines)
            case "variables":
                for name, item in value.pairs:
                    wish.variable(name.text, item.text, name.where)
            case "platforms":
                if PLATFORM not in [item.text for item in value.items]:
                    wish.note(key.where, f"{PLATFORM} is not among its platforms: see whether it locks")
            case _:
                do = "write what it asks for into the file's other keys, or remove it"
                wish.leave(key.where, f"{show(key.text)} is not a key of conda's, and not read", do)
    named = root.get("channels")
    wish.defaults = "nodefaults" not in [item.text for item in (named.items if named else ())]
    return wish


def _for_platform(wish: Wish, item: YamlNode, lines: list[str]) -> bool:
    """Judges a selector behind an item (`# [linux]`), as conda-lock reads them; to conda it is a comment."""
    line = lines[item.where.line - 1] if item.kind == "text" and item.where.line <= len(lines) else ""
    found = re.search(r"#\s*\[([^\]]+)\]\s*$", line)
    if not found:
        return True
    holds = selected(found[1])
    if holds is None:
        wish.note(
            item.where, f"the line is taken: the selector {show(found[0].strip())} is a comment to conda"
        )
    elif not holds:
        wish.note(item.where, f"{show(item.text)} is not for {PLATFORM}")
    return holds is not False


def _dependency(wish: Wish, item: YamlNode, reading: Reading, lines: list[str]) -> None:
    if item.kind == "text":
        take_match_spec(wish, item.text, item.where)
        return
    for key, value in item.pairs:
        if key.text == "pip":
            for line in items_of(wish, value, "pip"):
                if _for_platform(wish, line, lines):
                    take_pip_line(
                        wish, line.text, line.where, _within_file(reading.inside(wish.python), wish.file)
                    )
        else:
            wish.leave(
                key.where, f"{show(key.text)} is not read", f"write its packages for {PLATFORM} as a list"
            )
    if item.kind == "list":
        wish.leave(item.where, "a list in a list is not read", "write its packages one level up")
