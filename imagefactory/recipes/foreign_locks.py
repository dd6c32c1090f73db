"""Locks of conda's tools, read into a wish: `pixi.lock` (versions 4 to 7), `conda-lock.yml` (version 1), and
lists of addresses (`@EXPLICIT`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from imagefactory.model import Where
from imagefactory.recipes.match_spec import channel_address, channel_name, parse_spec
from imagefactory.recipes.own_code import take_folder, take_git
from imagefactory.extras.importers.pip_lines import Beside, take_pip_line
from imagefactory.recipes.values import RULES
from imagefactory.extras.importers.spec import PLATFORM, Wish, take_channel, take_channels, text_of
from imagefactory.recipes.yaml_tree import YamlNode, first_place, refused, show

PIXI_VERSIONS = ("4", "5", "6", "7")
EXPLICIT = re.compile(r"^@EXPLICIT\s*$", re.MULTILINE)
# What conda-build makes of all that a package is built with, behind the version of its Python.
_BUILD_HASH = re.compile(r"(?:py[0-9]*)?h[0-9a-f]{6,7}$")
# `# pip NAME @ ADDRESS`, as conda-lock and micromamba write what pip brings.
_PIP_ROW = re.compile(
    r"#\s*pip\s+(\S+)\s*@\s*\S*?/[^/\s]+?-([0-9][^-/\s]*)(?:-[^/\s]+\.whl|\.tar\.gz|\.zip)(?:[#\s]|$)"
)

_VIRTUAL = "{} is a virtual package, which a machine has and no channel"


def read_pixi_lock(root: YamlNode, file: str, environment: str, beside: Beside) -> Wish:
    """One environment of a pixi.lock for linux-64, each package at its version."""
    version = root.get("version")
    if version is None or version.text not in PIXI_VERSIONS:
        found = version.text if version else "none"
        raise refused(
            (version or root).where,
            "format-unsupported",
            f"has the format {show(found)}",
            f"create it with a pixi that writes {' or '.join(PIXI_VERSIONS)}",
        )
    environments = root.get("environments")
    names = environments.keys if environments else ()
    wanted = environment or ("default" if "default" in names or len(names) != 1 else names[0])
    chosen = environments.get(wanted) if environments else None
    if chosen is None:
        raise refused(
            root.where,
            "environment-unknown",
            f"has no environment {show(wanted)}",
            f"--environment {' or '.join(names) or 'NAME'}",
        )
    wish = Wish(file=file, locked=True)
    if channels := chosen.get("channels"):
        take_channels(wish, channels)
    indexes = chosen.get("indexes")
    for index in indexes.items[1:] if indexes else ():  # the first is the one that is usual there
        take_pip_line(wish, f"--extra-index-url {index.text}", index.where, Beside(""))
    packages = chosen.get("packages")
    # Since version 7 a platform has a name of its own, and several may be kinds of one.
    named = root.get("platforms")
    kinds = [one for one in (named.items if named else ()) if text_of(one, "subdir") == PLATFORM]
    names_of_it = [PLATFORM, *(text_of(one, "name") for one in kinds)]
    of_platform = next((packages.get(name) for name in names_of_it if packages and packages.get(name)), None)
    if of_platform is None:
        there = ", ".join(packages.keys) if packages else "nothing"
        raise refused(
            chosen.where,
            "platform-missing",
            f"has no packages for {PLATFORM}, only for {there}",
            f"add {PLATFORM} and lock",
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
    _name_channels(wish)
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
            (version or root).where,
            "format-unsupported",
            f"has the format {show(found)}",
            "create it with conda-lock 1 or newer",
        )
    wish = Wish(file=file, locked=True)
    metadata = root.get("metadata")
    ours = metadata.get("custom_metadata") if metadata else None
    if ours and (pip := ours.get("imagefactory.pip")):  # our own locks of two files
        beside = f"{text_of(ours, 'imagefactory.target')}.requirements.txt"
        wish.leave(pip.where, f"packages from PyPI are in {show(beside)}", "add those packages under pip")
    packages = root.get("package")
    rows = packages.items if packages else []
    fitting = [row for row in rows if text_of(row, "platform") == PLATFORM]
    real = [row for row in fitting if not text_of(row, "name").startswith("__")]
    if not fitting:
        there = ", ".join(sorted({text_of(row, "platform") for row in rows})) or "nothing"
        raise refused(
            root.where,
            "platform-missing",
            f"has no packages for {PLATFORM}, only for {there}",
            f"lock for {PLATFORM} too",
        )
    headed = _channels(wish, metadata.get("channels") if metadata else None, real or fitting)
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
            address = text_of(row, "url")
            if name.startswith("__"):
                wish.note(row.where, _VIRTUAL.format(show(name)))
                continue
            package = (name, version_, _parts(address)[2])
            _locked_spec(wish, package, row.where, channel=_headed(_channel(address), headed))
    _name_channels(wish)
    for category, names in others.items():
        what = f"optional, not taken: the packages of category {show(category)}"
        names_ = show(", ".join(names), limit=4000)[1:-1]
        wish.note(packages.where if packages else root.where, f"{what}: {names_}")
    return wish


def _channels(wish: Wish, heading: YamlNode | None, rows: list[YamlNode]) -> tuple[str, ...]:
    """Takes the channels of the heading, in its order, and those that the rows' addresses lie in.

    Returns those of the heading. `defaults` there is what the rows say that it was.
    """
    for item in heading.items if heading else ():
        name = text_of(item, "url") if item.kind == "map" else item.text
        if name != "defaults":
            take_channel(wish, name, item.where)
    headed = tuple(wish.channels)
    mirrors: dict[str, None] = {}
    for row in rows:
        address = row.get("url") if text_of(row, "manager") != "pip" else None
        channel = _channel(address.text) if address else ""
        if address and channel.startswith("file:"):
            continue  # which each package tells
        if address and channel and _headed(channel, headed) == channel:
            if channel_name(channel) not in wish.channels:
                take_channel(wish, channel, address.where)
        elif channel and channel_name(channel) not in headed:
            mirrors[channel] = None
    where = heading.where if heading else rows[0].where
    if mirrors:
        wish.note(where, f"the channels of the heading are asked, and not their mirrors {', '.join(mirrors)}")
    if headed and (more := wish.channels[len(headed) :]):
        wish.note(where, f"packages come from {', '.join(more)} too, which the heading does not name")
    return headed


def _headed(channel: str, headed: tuple[str, ...]) -> str:
    """The channel of a heading that an address is, or mirrors; else the address."""
    names = (name for name in headed if "://" not in name and channel.endswith(f"/{name}"))
    return next(names, channel)


def _channel(address: str) -> str:
    """The channel that an archive's address lies in, empty for other addresses."""
    found = re.match(r"([a-z]+://.+)/(?:linux-64|noarch)/[^/]+$", address.partition("#")[0])
    return found[1] if found else ""


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
            if parts[0].startswith("__"):
                wish.note(where, _VIRTUAL.format(show(parts[0])))
                continue
            channel = _channel(address)
            if channel and not channel.startswith("file:") and channel_name(channel) not in wish.channels:
                take_channel(wish, channel, where)
            _locked_spec(wish, parts, where, channel=channel)
    _name_channels(wish)
    others = [name for name in platforms if name not in (PLATFORM, "noarch")]
    if others:
        raise refused(
            first_place(file),
            "platform-missing",
            f"has packages for {', '.join(others)}",
            f"pass a list for {PLATFORM}",
        )
    if not wish.conda and not wish.python:
        raise refused(
            first_place(file), "no-packages", "lists no packages", "create it with: conda list --explicit"
        )
    return wish


def _locked_conda(wish: Wish, address: YamlNode) -> None:
    if "://" not in address.text:
        wish.leave(
            address.where,
            f"{show(address.text)} is made from sources",
            "add it from a channel, if one has it",
        )
        return
    _locked_spec(wish, _parts(address.text), address.where, channel=_channel(address.text))


def _parts(address: str) -> tuple[str, str, str]:
    """Name, version and build as the name of a conda archive has them; empty for another name."""
    filename = address.partition("#")[0].rpartition("/")[2]
    stem = re.sub(r"\.(conda|tar\.bz2)$", "", filename)
    parts = stem.rsplit("-", 2)
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else ("", "", "")


def _locked_spec(wish: Wish, package: tuple[str, str, str], where: Where, *, channel: str = "") -> None:
    name, version, build = package
    variant = build_variant(build) if name != "python" else ""
    spec = f"{name} =={version} {variant}".strip()
    if channel.startswith("file:") and channel not in wish.channels:
        do = f'where that folder is a channel, write "{channel}::{name} =={version}" under packages'
        wish.leave(where, f"{show(name)} {show(version)} is a file of one machine, in {show(channel)}", do)
    elif not RULES["match spec"].allows(spec):
        wish.leave(
            where, f"{show(name)} {show(version)} cannot be taken over", "add it by hand, if it must be there"
        )
    elif name == "python":
        wish.python = f"=={version}"
    else:
        known = channel_address(channel) if channel and RULES["channel"].allows(channel) else ""
        wish.conda.append(str(replace(parse_spec(spec), channel=known)))
        wish.builds[parse_spec(spec).name] = build
        wish.hints += re.findall(r"cu(?:da)?[0-9]{2,3}|cuda[0-9]+\.[0-9]+", build)


def _name_channels(wish: Wish) -> None:
    """Leaves a package's channel out where there is only one; of several another could have its name too."""
    if len(wish.channels) < 2:
        wish.conda = [str(replace(parse_spec(text), channel="")) for text in wish.conda]


def build_variant(build: str) -> str:
    """The part of a build string that a person may have chosen, as a pattern; empty where there is none.

    `nompi_h2d575fe_105` gives `nompi_*`, `cuda126_py312h1763f6d_306` gives `cuda126_*`, `20_linux64_openblas`
    gives `*_linux64_openblas`. Build numbers and hashes, of which `py312h1763f6d` has Python's version too,
    say which release of the recipe made it. Source: conda-build's documentation, "build string".
    """
    parts = (re.sub(r"^([0-9]+|py[0-9.]*)$", "*", _BUILD_HASH.sub("*", part)) for part in build.split("_"))
    pattern = re.sub(r"\*(_\*)*", "*", "_".join(parts))
    return "" if pattern == "*" else pattern


def _locked_wheel(wish: Wish, wheel: tuple[str, str], where: Where) -> None:
    take_pip_line(wish, f"{wheel[0]}=={wheel[1]}", where, Beside(""))
