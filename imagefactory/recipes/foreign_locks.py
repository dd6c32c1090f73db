"""Locks of conda's tools, read into a wish: `pixi.lock` (versions 4 to 7), `conda-lock.yml` (version 1), and
lists of addresses (`@EXPLICIT`)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from imagefactory.model import Where
from imagefactory.recipes.match_spec import channel_name, parse_spec
from imagefactory.recipes.own_code import take_folder, take_git
from imagefactory.recipes.pip_lines import Beside, take_pip_line
from imagefactory.recipes.values import RULES
from imagefactory.recipes.wish import PLATFORM, Wish, take_channel, take_channels, text_of
from imagefactory.recipes.yaml_tree import YamlNode, first_place, refused, show

PIXI_VERSIONS = ("4", "5", "6", "7")
EXPLICIT = re.compile(r"^@EXPLICIT\s*$", re.MULTILINE)
# `# pip NAME @ ADDRESS`, as conda-lock and micromamba write what pip brings.
_PIP_ROW = re.compile(
    r"#\s*pip\s+(\S+)\s*@\s*\S*?/[^/\s]+?-([0-9][^-/\s]*)(?:-[^/\s]+\.whl|\.tar\.gz|\.zip)(?:[#\s]|$)"
)


def read_pixi_lock(root: YamlNode, file: str, environment: str, beside: Beside) -> Wish:
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
        take_channels(wish, channels)
    packages = chosen.get("packages")
    # Since version 7 a platform has a name of its own, and several may be kinds of one.
    named = root.get("platforms")
    kinds = [one for one in (named.items if named else ()) if text_of(one, "subdir") == PLATFORM]
    names_of_it = [PLATFORM, *(text_of(one, "name") for one in kinds)]
    of_platform = next((packages.get(name) for name in names_of_it if packages and packages.get(name)), None)
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
            elif key.text == "conda_source":
                do = "add it from a channel, if one has it"
                wish.leave(value.where, f"{show(value.text)} is made from sources", do)
            elif wheel := wheels.get(value.text):
                _locked_wheel(wish, wheel, value.where)
            else:
                _other_wheel(wish, value, beside)
    return wish


def _other_wheel(wish: Wish, value: YamlNode, beside: Beside) -> None:
    """What a pixi.lock has that no index has: `./` and other folders, `git+https://...#COMMIT`."""
    address, _, commit = value.text.partition("#")
    if address.startswith("git+"):
        plain = re.split(r"[?]", address[4:])[0]
        take_git(wish, f"{plain}@{commit}" if commit else plain, value.where)
    elif "://" in value.text or value.text.endswith(".whl"):
        take_pip_line(wish, value.text, value.where, beside)
    else:
        take_folder(wish, beside.place, value.text, value.where)


def _pixi_wheels(root: YamlNode) -> Mapping[str, tuple[str, str]]:
    """Address -> name and version of the packages from PyPI."""
    wheels = {}
    packages = root.get("packages")
    for package in packages.items if packages else ():
        name, version = package.get("name"), package.get("version")
        address = package.get("pypi") or (package.get("url") if text_of(package, "kind") == "pypi" else None)
        if address and name and version and address.text.startswith(("https://", "http://")):
            wheels[address.text] = (name.text, version.text)
    return wheels


def read_conda_lock(root: YamlNode, file: str) -> Wish:
    """The packages of a conda-lock.yml for linux-64, each at its version."""
    version = root.get("version")
    if version is None or version.text != "1":
        found = version.text if version else "none"
        raise refused(
            (version or root).where, f"has the format {show(found)}", "make it with conda-lock 1 or newer"
        )
    wish = Wish(file=file, locked=True)
    metadata = root.get("metadata")
    ours = metadata.get("custom_metadata") if metadata else None
    if ours and (pip := ours.get("imagefactory.pip")):  # our own locks of two files
        beside = f"{text_of(ours, 'imagefactory.target')}.requirements.txt"
        wish.leave(
            pip.where, f"what comes from PyPI stands in {show(beside)}", "add those packages under pip"
        )
    packages = root.get("package")
    rows = packages.items if packages else []
    fitting = [row for row in rows if text_of(row, "platform") == PLATFORM]
    if not fitting:
        there = ", ".join(sorted({text_of(row, "platform") for row in rows})) or "nothing"
        raise refused(
            root.where, f"has no packages for {PLATFORM}, only for {there}", f"lock for {PLATFORM} too"
        )
    _channels(wish, metadata.get("channels") if metadata else None, fitting)
    others: dict[str, list[str]] = {}
    for row in fitting:
        name, version_, category = (
            text_of(row, "name"),
            text_of(row, "version"),
            text_of(row, "category") or "main",
        )
        if category != "main":
            others.setdefault(category, []).append(name)
        elif text_of(row, "manager") == "pip":
            _locked_wheel(wish, (name, version_), row.where)
        else:
            address = row.get("url")
            build = _parts(address.text)[2] if address else ""
            _locked_spec(wish, (name, version_, build), row.where)
    for category, names in others.items():
        what = f"optional, not taken: the packages of category {show(category)}"
        names_ = show(", ".join(names), limit=4000)[1:-1]
        wish.note(packages.where if packages else root.where, f"{what}: {names_}")
    return wish


def _channels(wish: Wish, heading: YamlNode | None, rows: list[YamlNode]) -> None:
    """The channels of the heading, in its order, and those that the rows' addresses lie in.

    `defaults` of a heading is what the rows say that it was.
    """
    for item in heading.items if heading else ():
        name = text_of(item, "url") if item.kind == "map" else item.text
        if name != "defaults":
            take_channel(wish, name, item.where)
    headed = len(wish.channels)
    for row in rows:
        if text_of(row, "manager") != "pip" and (address := row.get("url")):
            _channel_of(wish, address.text, address.where)
    if headed and (more := wish.channels[headed:]):
        where = heading.where if heading else rows[0].where
        what = f"packages come from {', '.join(more)} too, which the heading does not name"
        wish.note(where, f"{what}: they are asked last")


def _channel_of(wish: Wish, address: str, where: Where) -> None:
    """The channel that an archive's address lies in; other addresses say none."""
    found = re.match(r"([a-z]+://.+)/(?:linux-64|noarch)/[^/]+$", address.partition("#")[0])
    if found and channel_name(found[1]) not in wish.channels:
        take_channel(wish, found[1], where)


def read_explicit(text: str, file: str) -> Wish:
    """A list of archives' addresses, as `conda list --explicit` and conda-lock write it."""
    wish = Wish(file=file, locked=True)
    platforms: dict[str, None] = {}
    for number, line in enumerate(text.split("\n")):
        where, line = Where(file=file, line=number + 1, column=1), line.strip()
        if found := _PIP_ROW.match(line):
            _locked_wheel(wish, (found[1], found[2]), where)
        elif line and not line.startswith(("#", "@")):
            address = line.split()[0]
            parts, platform = _parts(address), address.rpartition("/")[0].rpartition("/")[2]
            if not parts[0] or "://" not in address:
                do = "write the address of an archive, or add it by hand"
                wish.leave(where, f"{show(line)} is no address of a package", do)
                continue
            platforms[platform] = None
            _channel_of(wish, address, where)
            _locked_spec(wish, parts, where)
    others = [name for name in platforms if name not in (PLATFORM, "noarch")]
    if others:
        raise refused(
            first_place(file), f"has packages for {', '.join(others)}", f"give a list for {PLATFORM}"
        )
    if not wish.conda and not wish.python:
        raise refused(first_place(file), "lists no package", "make it with conda list --explicit")
    return wish


def _locked_conda(wish: Wish, address: YamlNode) -> None:
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
        wish.builds[parse_spec(spec).name] = build
        wish.hints += re.findall(r"cu(?:da)?[0-9]{2,3}|cuda[0-9]+\.[0-9]+", build)


def _locked_wheel(wish: Wish, wheel: tuple[str, str], where: Where) -> None:
    take_pip_line(wish, f"{wheel[0]}=={wheel[1]}", where, Beside(""))
