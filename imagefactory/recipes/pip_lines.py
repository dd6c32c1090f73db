"""What pip reads: lines of requirements files, and the files that they name beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement

from imagefactory.model import Where
from imagefactory.recipes.match_spec import parse_spec
from imagefactory.recipes.values import RULES, canonical
from imagefactory.recipes.wish import PLATFORM, Wish, take_match_spec
from imagefactory.recipes.yaml_tree import show

MOST_FILES = 20
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
_BUILD_TAG = r"\+([A-Za-z0-9][A-Za-z0-9._-]*)"


@dataclass(frozen=True, slots=True)
class Beside:
    """The files that a file may name: `read` gives the text of one in its folder or below, else None.

    `python` is what markers are judged by. `above` are the names of the files that led here.
    """

    python: str
    read: Callable[[str], str | None] = lambda _: None
    above: tuple[str, ...] = ()


def take_requirements(wish: Wish, text: str, file: str, beside: Beside) -> None:
    """A whole requirements file. `conda list --export` writes files of that name too."""
    if re.search(r"^# \$ conda create --name <env> --file", text, re.MULTILINE):
        _conda_export(wish, text, file, beside)
        return
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first, line = number, lines[number].rstrip()
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = f"{line[:-1]} {lines[number].strip()}"
        number += 1
        column = len(line) - len(line.lstrip()) + 1
        take_pip_line(wish, line, Where(file=file, line=first + 1, column=column), beside)


def take_pip_line(wish: Wish, line: str, where: Where, beside: Beside) -> None:
    """One line as pip reads it. Hashes need not stand in a recipe: its lock has them."""
    text = re.sub(r"(^|\s)#.*", "", line).strip()
    text = re.sub(r"\s--hash[= ]\S+", "", text).strip()
    if not text:
        return
    wish.hints += re.findall(r"[/+]cu[0-9]{2,3}\b", text)
    if text.startswith("-"):
        _option(wish, text, where, beside)
        return
    if requirement := _requirement(wish, text, where, beside.python):
        _take(wish, requirement, text, where)


def _option(wish: Wish, text: str, where: Where, beside: Beside) -> None:
    found = re.match(r"(--[a-z-]+|-[a-z])[ =]*(.*)", text)
    option, value = (found[1], found[2].strip("\"'")) if found else (text, "")
    constraint = option in ("-c", "--constraint")
    if constraint or option in ("-r", "--requirement"):
        why = _take_file(wish, value, beside, constraint=constraint)
        if why:
            do = "add its lines" if not constraint else "write its bounds under constraints"
            wish.leave(where, f"{show(value)} {why}", do)
        return
    do = {
        "-e": "put the project into an image by a wheel on an index",
        "--editable": "put the project into an image by a wheel on an index",
    }.get(option, "the index is the machine's own: pip's settings, or imagefactory.toml")
    wish.leave(where, f"the option {show(text)} is not taken over", do)


def _take_file(wish: Wish, name: str, beside: Beside, *, constraint: bool) -> str:
    """Takes over a file that lies below the folder of the first; or says why not."""
    place = PurePosixPath(beside.above[-1]).parent / name if beside.above else PurePosixPath(name)
    if "://" in name or place.is_absolute() or ".." in place.parts:
        return "is not in the folder of the file that is imported"
    if str(place) in beside.above or wish.files >= MOST_FILES:
        return "is read already" if str(place) in beside.above else f"is one file more than {MOST_FILES}"
    text = beside.read(str(place))
    if text is None:
        return "cannot be read"
    wish.files += 1
    inner = Beside(beside.python, beside.read, (*beside.above, str(place)))
    if not constraint:
        take_requirements(wish, text, str(place), inner)
        return ""
    bounds = Wish(file=wish.file)
    take_requirements(bounds, text, str(place), inner)
    wish.left += bounds.left
    wish.hints += bounds.hints
    wish.builds |= bounds.builds
    wish.constraints += [one for one in bounds.pip if RULES["constraint"].allows(one)]
    return ""


def _requirement(wish: Wish, text: str, where: Where, python: str) -> Requirement | None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        do = "write NAME and its bounds as PyPI knows them; files and addresses are not locked"
        wish.leave(where, f"{show(text)} cannot be taken over", do)
        return None
    if requirement.url:
        do = f"write {requirement.name} with bounds, if an index has it"
        wish.leave(where, f"{show(text)} is taken from an address", do)
        return None
    if requirement.marker and not holds(requirement.marker, python):
        wish.leave(where, f"{show(text)} is not for Python {python} on {PLATFORM}", "nothing to do")
        return None
    return requirement


def _take(wish: Wish, requirement: Requirement, text: str, where: Where) -> None:
    # as PEP 440 has versions: no v before them, and === of one is ==
    bounds = re.sub(r"(?<=[=<>])v(?=[0-9])", "", str(requirement.specifier).replace("===", "=="))
    if tag := re.search(_BUILD_TAG, bounds):
        wish.builds[canonical(requirement.name)] = tag[1]
        do = "it was taken over without: PyPI has no builds by such names"
        wish.leave(where, f"the build tag {show(tag[0])} in {show(text)}", do)
        bounds = re.sub(_BUILD_TAG, "", bounds)
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    found = f"{requirement.name}{extras}{bounds}"
    if RULES["package"].allows(found):
        wish.pip.append(found)
    else:
        wish.leave(where, f"{show(text)} cannot be taken over", f"write {RULES['package'].write}")


def holds(marker: Marker, python: str) -> bool:
    """Whether a marker holds in an image with this Python."""
    return marker.evaluate(
        {
            **_MARKERS,
            "python_version": python,
            "python_full_version": f"{python}.0",
            "implementation_version": f"{python}.0",
        }
    )


def _conda_export(wish: Wish, text: str, file: str, beside: Beside) -> None:
    """`name=version=build` a line; what pip brought has the build pypi_0."""
    wish.locked = True
    for number, line in enumerate(text.split("\n")):
        where = Where(file=file, line=number + 1, column=1)
        name, _, rest = line.strip().partition("=")
        version, _, build = rest.partition("=")
        if not name or name.startswith("#"):
            if not re.fullmatch(r"# platform: (linux-64|noarch)|# (?!platform:).*|", line.strip()):
                wish.leave(where, f"{show(line.strip())} is not {PLATFORM}", "see whether it locks")
        elif build.startswith("pypi"):
            take_pip_line(wish, f"{name}=={version}", where, beside)
        else:
            take_match_spec(wish, f"{name}=={version}" if version else name, where)
            if RULES["match spec"].allows(name):
                wish.builds.setdefault(parse_spec(name).name, build)
