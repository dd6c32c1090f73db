"""Locks of other tools, read into a wish: `pixi.lock` (versions 4 to 6), `conda-lock.yml` (version 1)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from imagefactory.model import Where
from imagefactory.recipes.match_spec import parse_spec
from imagefactory.recipes.values import RULES
from imagefactory.recipes.wish import PLATFORM, Wish, take_channels, take_pip_line, text_of
from imagefactory.recipes.yaml_tree import YamlNode, refused, show

PIXI_VERSIONS = ("4", "5", "6")


def read_pixi_lock(root: YamlNode, file: str, environment: str) -> Wish:
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
    if metadata and (channels := metadata.get("channels")):
        take_channels(wish, channels)
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
        what = f"the packages of category {show(category)}: {show(', '.join(names), limit=4000)[1:-1]}"
        wish.leave(packages.where if packages else root.where, what, "add those that must be there by hand")
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
        wish.hints += re.findall(r"cu(?:da)?[0-9]{2,3}|cuda[0-9]+\.[0-9]+", build)


def _locked_wheel(wish: Wish, wheel: tuple[str, str], where: Where) -> None:
    take_pip_line(wish, f"{wheel[0]}=={wheel[1]}", where, "")
