"""Environments that people have already, read into what recipes can say of them.

`environment.yml`, `requirements.txt`, `pixi.lock` (versions 4 to 6), `conda-lock.yml` (version 1). Nothing is
dropped silently: what a recipe cannot say stands in `Wish.left`, with its place and what to do. These
files are data from strangers, read within caps and through the same allow-lists as recipes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from imagefactory.errors import RecipeError, UsageError
from imagefactory.match_spec import channel_address, channel_name, parse_spec
from imagefactory.model import Where
from imagefactory.recipe_values import RULES, what_to_write, without_secrets
from imagefactory.yaml_tree import Limits, Node, parse_tree, refused, show, too_large

PLATFORM = "linux-64"
PIXI_VERSIONS = ("4", "5", "6")
# Locks of several platforms are large.
LIMITS = Limits(size=32 * 1024 * 1024, nodes=1_000_000, depth=12)
# What a marker may ask of the machine that the image is for; Python's version is added.
_MARKERS = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_release": "",
    "platform_system": "Linux",
    "platform_version": "",
    "sys_platform": "linux",
    "extra": "",
}
_NOTHING = (
    "is no environment that can be taken over",
    "give an environment.yml, requirements.txt, pixi.lock or conda-lock.yml",
)
_NO_ENVIRONMENTS = "has no environments to choose from, as a pixi.lock has", "leave out --environment"


@dataclass(slots=True)
class Wish:
    """What a file asks for, in a recipe's terms.

    `conda` are match specs and `pip` PEP 508 strings in the spelling of recipes, `channels` names or
    addresses, the first asked first. `python` are the bounds on Python as a match spec has them, empty
    for none. `locked`: the specs are what a solver chose, not what a person asked for. `hints` are words
    of the file that tell its CUDA. `left` reads `file:line:column: what (what to do)`.
    """

    file: str
    conda: list[str] = field(default_factory=list)
    pip: list[str] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    python: str = ""
    locked: bool = False
    hints: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def leave(self, where: Where, what: str, do: str) -> None:
        """Notes what is not taken over, without the secrets that addresses may hold."""
        self.left.append(f"{where}: {without_secrets(what)} ({do})")


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
        return _pixi_lock(root, file, environment)
    if environment:
        raise refused(start, *_NO_ENVIRONMENTS)
    if root.kind == "map" and "package" in root.keys:
        return _conda_lock(root, file)
    if root.kind == "map" and "dependencies" in root.keys:
        return _environment(root, text, file, python)
    raise refused(start, *_NOTHING)


def minor_python(bounds: str) -> str:
    """`3.11` of conda's bounds on Python that name one minor version, empty for others."""
    found = re.fullmatch(r"(?:==|~=)?(3\.[0-9]{1,2})(\..*)?", bounds) if "," not in bounds else None
    return found[1] if found else ""


# --- environment.yml -----------------------------------------------------------------------------


def _environment(root: Node, text: str, file: str, python: str) -> Wish:
    wish, lines = Wish(file=file), text.split("\n")
    _refuse_selectors(root, lines)
    for key, value in root.pairs:
        match key.text:
            case "name":
                pass
            case "channels":
                _channels(wish, value)
            case "dependencies":
                for item in _items(wish, value, "dependencies"):
                    _dependency(wish, item, python)
            case "variables":
                _variables(wish, value)
            case "platforms":
                if PLATFORM not in [item.text for item in value.items]:
                    wish.leave(key.where, f"{PLATFORM} is not among its platforms", "see whether it locks")
            case _:
                wish.leave(key.where, f"{show(key.text)} is nothing that a recipe says", "nothing to do")
    return wish


def _refuse_selectors(root: Node, lines: list[str]) -> None:
    """conda-lock's and conda-build's ways to ask for a package on some platforms only."""
    found = []
    for item in _leaves(root):
        line = lines[item.where.line - 1] if item.where.line <= len(lines) else ""
        if re.search(r"#\s*\[[^\]]+\]\s*$", line):
            found.append(
                f"{item.where}: a selector ({show(line[line.rindex('#') :].strip())}) is not read "
                f"(write the file for {PLATFORM} alone: drop the line, or the selector)"
            )
    if found:
        raise RecipeError(dict.fromkeys(found))


def _leaves(node: Node) -> Iterator[Node]:
    if node.kind == "text":
        yield node
    for child in (*node.items, *(value for _, value in node.pairs)):
        yield from _leaves(child)


def _dependency(wish: Wish, item: Node, python: str) -> None:
    if item.kind == "text":
        _match_spec(wish, item.text, item.where)
        return
    for key, value in item.pairs:
        if key.text == "pip":
            for line in _items(wish, value, "pip"):
                _pip_line(wish, line.text, line.where, minor_python(wish.python) or python)
        else:
            wish.leave(
                key.where, f"{show(key.text)} is not read", f"write its packages for {PLATFORM} as a list"
            )
    if item.kind == "list":
        wish.leave(item.where, "a list in a list is not read", "write its packages one level up")


def _channels(wish: Wish, node: Node) -> None:
    for item in _items(wish, node, "channels"):
        name = item.text if item.kind == "text" else (item.get("url") or item).text
        name = name.rstrip("/")
        if name == "nodefaults":
            continue  # nothing but the named channels is ever asked
        if name == "defaults":
            wish.leave(
                item.where, "'defaults' stands for several channels of Anaconda", "name the one you mean"
            )
        elif not RULES["channel"].allows(name):
            wish.leave(
                item.where,
                f"the channel {show(name)} cannot be taken over",
                what_to_write(name, "channel"),
            )
        elif (short := channel_name(channel_address(name))) not in wish.channels:
            wish.channels.append(short)


def _variables(wish: Wish, node: Node) -> None:
    from imagefactory.recipes import OWNED_PREFIX, OWNED_VARIABLES

    for key, value in node.pairs:
        owned = key.text in OWNED_VARIABLES or key.text.startswith(OWNED_PREFIX)
        if not owned and RULES["variable"].allows(key.text) and RULES["value"].allows(value.text):
            wish.environment[key.text] = value.text
        else:
            why = "is set by the factory" if owned else "is no variable that a recipe may set"
            wish.leave(key.where, f"{show(key.text)} {why}", "set it where the image runs")


def _match_spec(wish: Wish, written: str, where: Where) -> None:
    """A package as people write it, with the spaces and stars that conda overlooks."""
    text = re.sub(r"\s+", " ", written.strip())
    text = re.sub(r" ?(==|!=|<=|>=|~=|<|>|=) ?", r"\1", text)
    text = re.sub(r"((?:>=|<=|<|>)[0-9][0-9A-Za-z._]*?)\.?\*", r"\1", text)
    if not RULES["match spec"].allows(text):
        do = f"write it as {RULES['match spec'].write.removeprefix('a package as ')}"
        if re.search(r"==[^,*=]*\*", text):
            do = "write = in place of ==, which conda takes for that very version"
        wish.leave(where, f"{show(written)} cannot be taken over", do)
        return
    spec = parse_spec(text)
    if spec.name == "python":
        wish.python = spec.version or wish.python
        if spec.build or spec.channel:
            do = f"add '{replace(spec, version='')}' to constraints, if it must be that one"
            wish.leave(where, f"the build or channel in {show(written)}", do)
    elif spec.name == "cpuonly":
        wish.leave(where, "'cpuonly' asks for builds without CUDA", "nothing to do: images here are for GPUs")
    else:
        wish.conda.append(str(spec))
        if spec.channel and (name := channel_name(spec.channel)) not in wish.channels:
            wish.channels.append(name)


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
        _pip_line(wish, line, Where(file=file, line=first + 1, column=column), python)
    return wish


def _pip_line(wish: Wish, line: str, where: Where, python: str) -> None:
    """One line as pip reads it. Hashes need not stand in a recipe: its lock has them."""
    from packaging.requirements import InvalidRequirement, Requirement

    text = re.sub(r"(^|\s)#.*", "", line).strip()
    text = re.sub(r"\s--hash[= ]\S+", "", text).strip()
    if not text:
        return
    wish.hints += re.findall(r"[/+]cu[0-9]{2,3}\b", text)
    if text.startswith("-"):
        option = text.split("=")[0].split()[0]
        do = {
            "-r": "import that file too, or add its lines",
            "--requirement": "import that file too, or add its lines",
            "-c": "write its bounds under constraints",
            "--constraint": "write its bounds under constraints",
            "-e": "put the project into an image by a wheel on an index",
            "--editable": "put the project into an image by a wheel on an index",
        }.get(option, "the index is the machine's own: pip's settings, or imagefactory.toml")
        wish.leave(where, f"the option {show(text)} is not taken over", do)
        return
    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        do = "write NAME and its bounds as PyPI knows them; files and addresses are not locked"
        wish.leave(where, f"{show(text)} cannot be taken over", do)
        return
    if wanted.url:
        wish.leave(
            where,
            f"{show(text)} is taken from an address",
            f"write {wanted.name} with bounds, if an index has it",
        )
        return
    if wanted.marker and not wanted.marker.evaluate(_marker_values(python)):
        wish.leave(where, f"{show(text)} is not for Python {python} on {PLATFORM}", "nothing to do")
        return
    bounds = str(wanted.specifier)
    if "+" in bounds:
        wish.leave(
            where,
            f"the local version in {show(text)}",
            "nothing to do: it was taken over without, as PyPI has it",
        )
        bounds = re.sub(r"\+[A-Za-z0-9._-]+", "", bounds)
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    found = f"{wanted.name}{extras}{bounds}"
    if RULES["package"].allows(found):
        wish.pip.append(found)
    else:
        wish.leave(where, f"{show(text)} cannot be taken over", f"write {RULES['package'].write}")


def _marker_values(python: str) -> dict[str, str]:
    return {
        **_MARKERS,
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_version": f"{python}.0",
    }


# --- locks ---------------------------------------------------------------------------------------


def _pixi_lock(root: Node, file: str, environment: str) -> Wish:
    """One environment of a pixi.lock for linux-64, each package at its version."""
    version = root.get("version")
    if version is None or version.text not in PIXI_VERSIONS:
        found = version.text if version else "none"
        raise refused(
            (version or root).where,
            f"has the format {show(found)}",
            f"make it with a pixi that writes {' or '.join(PIXI_VERSIONS)}",
        )
    environments = root.get("environments")
    names = environments.keys if environments else ()
    wanted = environment or ("default" if "default" in names or len(names) != 1 else names[0])
    chosen = environments.get(wanted) if environments else None
    if chosen is None:
        raise refused(
            root.where, f"has no environment {show(wanted)}", f"--environment {' or '.join(names) or 'NAME'}"
        )
    wish = Wish(file=file, locked=True)
    if channels := chosen.get("channels"):
        _channels(wish, channels)
    packages = chosen.get("packages")
    of_platform = packages.get(PLATFORM) if packages else None
    if of_platform is None:
        there = ", ".join(packages.keys) if packages else "nothing"
        raise refused(
            chosen.where, f"has no packages for {PLATFORM}, only for {there}", f"add {PLATFORM} and lock"
        )
    wheels = _pixi_wheels(root)
    for item in of_platform.items:
        for key, value in item.pairs[:1]:
            if key.text == "conda":
                _locked_conda(wish, value)
            elif wheel := wheels.get(value.text):
                _locked_wheel(wish, wheel, value.where)
            else:
                wish.leave(
                    value.where,
                    f"{show(value.text)} is no package of an index",
                    "add it by hand, if it must be there",
                )
    return wish


def _pixi_wheels(root: Node) -> Mapping[str, tuple[str, str]]:
    """Address -> name and version of the packages from PyPI."""
    found = {}
    packages = root.get("packages")
    for package in packages.items if packages else ():
        name, version = package.get("name"), package.get("version")
        address = package.get("pypi") or (package.get("url") if _text(package, "kind") == "pypi" else None)
        if address and name and version and address.text.startswith(("https://", "http://")):
            found[address.text] = (name.text, version.text)
    return found


def _conda_lock(root: Node, file: str) -> Wish:
    """The packages of a conda-lock.yml for linux-64, each at its version."""
    version = root.get("version")
    if version is None or version.text != "1":
        found = version.text if version else "none"
        raise refused(
            (version or root).where, f"has the format {show(found)}", "make it with conda-lock 1 or newer"
        )
    wish = Wish(file=file, locked=True)
    metadata = root.get("metadata")
    if metadata and (channels := metadata.get("channels")):
        _channels(wish, channels)
    ours = metadata.get("custom_metadata") if metadata else None
    if ours and (pip := ours.get("imagefactory.pip")):  # our own locks of two files
        beside = f"{_text(ours, 'imagefactory.target')}.requirements.txt"
        wish.leave(
            pip.where, f"what comes from PyPI stands in {show(beside)}", "add those packages under pip"
        )
    packages = root.get("package")
    rows = packages.items if packages else []
    fitting = [row for row in rows if _text(row, "platform") == PLATFORM]
    if not fitting:
        there = ", ".join(sorted({_text(row, "platform") for row in rows})) or "nothing"
        raise refused(
            root.where, f"has no packages for {PLATFORM}, only for {there}", f"lock for {PLATFORM} too"
        )
    others: dict[str, list[str]] = {}
    for row in fitting:
        name, version_, category = _text(row, "name"), _text(row, "version"), _text(row, "category") or "main"
        if category != "main":
            others.setdefault(category, []).append(name)
        elif _text(row, "manager") == "pip":
            _locked_wheel(wish, (name, version_), row.where)
        else:
            address = row.get("url")
            build = _parts(address.text)[2] if address else ""
            _locked_spec(wish, (name, version_, build), row.where)
    for category, names in others.items():
        what = f"the packages of category {show(category)}: {show(', '.join(names), limit=4000)[1:-1]}"
        wish.leave(packages.where if packages else root.where, what, "add those that must be there by hand")
    return wish


def _locked_conda(wish: Wish, address: Node) -> None:
    if "://" not in address.text:
        wish.leave(
            address.where,
            f"{show(address.text)} is made from sources",
            "add it from a channel, if one has it",
        )
        return
    _locked_spec(wish, _parts(address.text), address.where)


def _parts(address: str) -> tuple[str, str, str]:
    """Name, version and build as the name of a conda archive has them; empty for another name."""
    filename = address.partition("#")[0].rpartition("/")[2]
    stem = re.sub(r"\.(conda|tar\.bz2)$", "", filename)
    parts = stem.rsplit("-", 2)
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else ("", "", "")


def _locked_spec(wish: Wish, package: tuple[str, str, str], where: Where) -> None:
    name, version, build = package
    spec = f"{name} =={version}"
    if not RULES["match spec"].allows(spec):
        wish.leave(
            where, f"{show(name)} {show(version)} cannot be taken over", "add it by hand, if it must be there"
        )
    elif name == "python":
        wish.python = f"=={version}"
    else:
        wish.conda.append(str(parse_spec(spec)))
        wish.hints += re.findall(r"cu(?:da)?[0-9]{2,3}|cuda[0-9]+\.[0-9]+", build)


def _locked_wheel(wish: Wish, wheel: tuple[str, str], where: Where) -> None:
    _pip_line(wish, f"{wheel[0]}=={wheel[1]}", where, "")


def _text(node: Node, key: str) -> str:
    found = node.get(key)
    return found.text if found else ""


def _items(wish: Wish, node: Node, key: str) -> list[Node]:
    if node.kind != "list" and node.made != "nothing":
        wish.leave(node.where, f"'{key}' is not a list", f"write {key}: and its items, each after -")
    return node.items
