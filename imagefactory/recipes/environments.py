"""Environments that people have already, read into what recipes can say of them.

`environment.yml` and `requirements.txt` here; foreign_locks.py reads `pixi.lock` and `conda-lock.yml`. These
files are data from strangers, read within caps and through the same allow-lists as recipes.
"""

from __future__ import annotations

import re
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.model import Where
from imagefactory.recipes.foreign_locks import read_conda_lock, read_pixi_lock
from imagefactory.recipes.values import OWNED_PREFIX, OWNED_VARIABLES, RULES
from imagefactory.recipes.wish import (
    PLATFORM,
    Wish,
    items_of,
    minor_python,
    selected,
    take_channels,
    take_match_spec,
    take_pip_line,
)
from imagefactory.recipes.yaml_tree import Limits, YamlNode, parse_tree, refused, show, too_large

# Locks of several platforms are large.
LIMITS = Limits(size=32 * 1024 * 1024, nodes=1_000_000, depth=12)
_NOTHING = (
    "is no environment that can be taken over",
    "give an environment.yml, requirements.txt, pixi.lock or conda-lock.yml",
)
_NO_ENVIRONMENTS = "has no environments to choose from, as a pixi.lock has", "leave out --environment"


def read_wish(path: Path, python: str, environment: str = "") -> Wish:
    """What the file at `path` asks for; its content tells which kind it is.

    `python` is the version that markers are judged by, `environment` names one of a pixi.lock.
    Raises UsageError when it cannot be read, RecipeError for what is none of these files.
    """
    file = show(path.name)[1:-1]
    try:
        with path.open("rb") as stream:
            data = stream.read(LIMITS.size + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", hint="name a file that is there"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", hint="save it as UTF-8") from error
    if len(data) > LIMITS.size:
        raise too_large(file, LIMITS)
    return parse_wish(text, file, python, environment)


def parse_wish(text: str, file: str, python: str, environment: str = "") -> Wish:
    """The same of a text. Raises RecipeError."""
    start = Where(file=file, line=1, column=1)
    if file.endswith((".txt", ".in", ".pip")):
        if environment:
            raise refused(start, *_NO_ENVIRONMENTS)
        return _requirements(text, file, python)
    if file.endswith(".toml"):
        raise refused(
            start, "says what is wanted, not what it came to", "give the lock that is made of it: pixi.lock"
        )
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
        return _environment(root, text, file, python)
    raise refused(start, *_NOTHING)


# --- environment.yml -----------------------------------------------------------------------------


def _environment(root: YamlNode, text: str, file: str, python: str) -> Wish:
    wish, lines = Wish(file=file), text.split("\n")
    for key, value in root.pairs:
        match key.text:
            case "name":
                pass
            case "channels":
                take_channels(wish, value)
            case "dependencies":
                for item in items_of(wish, value, "dependencies"):
                    if _for_platform(wish, item, lines):
                        _dependency(wish, item, python, lines)
            case "variables":
                _variables(wish, value)
            case "platforms":
                if PLATFORM not in [item.text for item in value.items]:
                    wish.leave(key.where, f"{PLATFORM} is not among its platforms", "see whether it locks")
            case _:
                wish.leave(key.where, f"{show(key.text)} is nothing that a recipe says", "nothing to do")
    return wish


def _for_platform(wish: Wish, item: YamlNode, lines: list[str]) -> bool:
    """Judges a selector behind an item (`# [linux]`), as conda-lock reads them; to conda it is a comment."""
    line = lines[item.where.line - 1] if item.kind == "text" and item.where.line <= len(lines) else ""
    found = re.search(r"#\s*\[([^\]]+)\]\s*$", line)
    if not found:
        return True
    holds = selected(found[1])
    if holds is None:
        do = "drop the line where it is not meant for every image"
        wish.leave(item.where, f"the selector {show(found[0].strip())} is not judged, its line was taken", do)
    elif not holds:
        wish.leave(item.where, f"{show(item.text)} is not for {PLATFORM}", "nothing to do")
    return holds is not False


def _dependency(wish: Wish, item: YamlNode, python: str, lines: list[str]) -> None:
    if item.kind == "text":
        take_match_spec(wish, item.text, item.where)
        return
    for key, value in item.pairs:
        if key.text == "pip":
            for line in items_of(wish, value, "pip"):
                if _for_platform(wish, line, lines):
                    take_pip_line(wish, line.text, line.where, minor_python(wish.python) or python)
        else:
            wish.leave(
                key.where, f"{show(key.text)} is not read", f"write its packages for {PLATFORM} as a list"
            )
    if item.kind == "list":
        wish.leave(item.where, "a list in a list is not read", "write its packages one level up")


def _variables(wish: Wish, node: YamlNode) -> None:
    for key, value in node.pairs:
        owned = key.text in OWNED_VARIABLES or key.text.startswith(OWNED_PREFIX)
        if not owned and RULES["variable"].allows(key.text) and RULES["value"].allows(value.text):
            wish.environment[key.text] = value.text
        else:
            why = "is set by the factory" if owned else "is no variable that a recipe may set"
            wish.leave(key.where, f"{show(key.text)} {why}", "set it where the image runs")


# --- requirements.txt, and the pip part of others ------------------------------------------------


def _requirements(text: str, file: str, python: str) -> Wish:
    wish = Wish(file=file)
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first, line = number, lines[number].rstrip()
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = f"{line[:-1]} {lines[number].strip()}"
        number += 1
        column = len(line) - len(line.lstrip()) + 1
        take_pip_line(wish, line, Where(file=file, line=first + 1, column=column), python)
    return wish
