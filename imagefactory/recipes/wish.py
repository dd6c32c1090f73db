"""What an environment that people have already asks for, in a recipe's terms.

Nothing is dropped silently: what a recipe cannot say stands in `Wish.left`, with its place and what to do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from packaging.requirements import InvalidRequirement, Requirement

from imagefactory.model import Where
from imagefactory.recipes.match_spec import channel_address, channel_name, parse_spec
from imagefactory.recipes.values import RULES, what_to_write, without_secrets
from imagefactory.recipes.yaml_tree import YamlNode, show

PLATFORM = "linux-64"
# The words of selectors that hold of it, and those that do not.
_SELECTORS = {
    **dict.fromkeys(("linux", "linux64", "linux-64", "unix", "x86_64", "64"), True),
    **dict.fromkeys(("osx", "osx64", "osx-64", "osx-arm64", "win", "win64", "win-64", "win32"), False),
    **dict.fromkeys(("arm64", "aarch64", "linux-aarch64", "ppc64le", "linux-ppc64le"), False),
}


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


def minor_python(bounds: str) -> str:
    """`3.11` of conda's bounds on Python that name one minor version, empty for others."""
    found = re.fullmatch(r"(?:==|~=)?(3\.[0-9]{1,2})(\..*)?", bounds) if "," not in bounds else None
    return found[1] if found else ""


def selected(selector: str) -> bool | None:
    """Whether a selector (`linux`, `not win`, `linux or osx`) holds of PLATFORM; None for other words."""
    anyone = False
    for part in selector.strip().split(" or "):
        every = True
        for word in part.split(" and "):
            name = word.strip().removeprefix("not ").strip()
            if name not in _SELECTORS:
                return None
            every &= _SELECTORS[name] != word.strip().startswith("not ")
        anyone |= every
    return anyone


def take_channels(wish: Wish, node: YamlNode) -> None:
    for item in items_of(wish, node, "channels"):
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


def take_match_spec(wish: Wish, written: str, where: Where) -> None:
    """A package as people write it, with the spaces and stars that conda overlooks."""
    text = re.sub(r"\s+", " ", written.strip())
    text = re.sub(r" ?(===?|!=|<=|>=|~=|<|>|=|,) ?", lambda found: found[1].replace("===", "=="), text)
    text = re.sub(r"(?<=[=<>])(['\"])([^'\"]*)\1", r"\2", text)
    text = re.sub(r"((?:>=|<=|<|>)[0-9][0-9A-Za-z._]*?)\.?\*(?=,|=| |$)", r"\1", text)
    # bounds=build, which recipes write with a blank
    text = re.sub(r"([<>!~]=?[^=<>!~ ]+)=([^=<>!~, ]+)$", r"\1 \2", text)
    if re.search(r"==[^,*= ]+\*", text):  # conda drops this star; whoever wrote it wants the series
        text = re.sub(r"==([^,*= ]+\*)", r"=\1", text)
        wish.leave(where, f"{show(written)} was read as {show(text)}", "drop the star to mean that version")
    if not RULES["match spec"].allows(text):
        do = f"write it as {RULES['match spec'].write.removeprefix('a package as ')}"
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


def take_pip_line(wish: Wish, line: str, where: Where, python: str) -> None:
    """One line as pip reads it. Hashes need not stand in a recipe: its lock has them."""
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
        requirement = Requirement(text)
    except InvalidRequirement:
        do = "write NAME and its bounds as PyPI knows them; files and addresses are not locked"
        wish.leave(where, f"{show(text)} cannot be taken over", do)
        return
    if requirement.url:
        wish.leave(
            where,
            f"{show(text)} is taken from an address",
            f"write {requirement.name} with bounds, if an index has it",
        )
        return
    if requirement.marker and not requirement.marker.evaluate(_marker_values(python)):
        wish.leave(where, f"{show(text)} is not for Python {python} on {PLATFORM}", "nothing to do")
        return
    # as PEP 440 has versions: no v before them, and === of one is ==
    bounds = re.sub(r"(?<=[=<>])v(?=[0-9])", "", str(requirement.specifier).replace("===", "=="))
    if "+" in bounds:
        wish.leave(
            where,
            f"the local version in {show(text)}",
            "nothing to do: it was taken over without, as PyPI has it",
        )
        bounds = re.sub(r"\+[A-Za-z0-9._-]+", "", bounds)
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    found = f"{requirement.name}{extras}{bounds}"
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


def text_of(node: YamlNode, key: str) -> str:
    found = node.get(key)
    return found.text if found else ""


def items_of(wish: Wish, node: YamlNode, key: str) -> list[YamlNode]:
    if node.kind != "list" and node.made != "nothing":
        wish.leave(node.where, f"'{key}' is not a list", f"write {key}: and its items, each after -")
    return node.items
