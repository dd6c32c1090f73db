"""What pip reads: lines of requirements files, and the files that they name beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from posixpath import normpath

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement

from imagefactory.gpu import knowledge
from imagefactory.model import Where
from imagefactory.recipes.match_spec import parse_spec
from imagefactory.recipes.values import RULES, canonical
from imagefactory.recipes.wish import PLATFORM, Wish, take_match_spec
from imagefactory.recipes.yaml_tree import show

MOST_FILES = 20
# What an option of pip asks for that no recipe says, and what to do; of indexes it is `_INDEX`.
_OPTIONS = {
    "--pre": "write a bound such as >=2.0.0rc1 where a release before the release is meant",
    "--no-binary": "nothing to do: images are made of wheels alone",
    "--only-binary": "nothing to do: images are made of wheels alone",
    "--prefer-binary": "nothing to do: images are made of wheels alone",
    "--no-build-isolation": "nothing to do: images are made of wheels alone",
    "--no-deps": "what the packages need comes with them; bound it under constraints",
    "--require-hashes": "nothing to do: locks hold the hash of each file",
    "--trusted-host": "name the index in pip's settings, or imagefactory.toml",
    "--find-links": "put those wheels into the factory and write their paths under packages: ./wheels/...",
    "-f": "put those wheels into the factory and write their paths under packages: ./wheels/...",
}
_INDEX = (
    "the index is the machine's own: pip's settings, or imagefactory.toml; one for some packages is named by "
    "`index`"
)
_WHEEL = "put the project into an image by a wheel, ./wheels/... under packages"
_ARCHIVE = r"\.(?:whl|zip|tar(?:\.[a-z0-9]+)?|tgz)$"
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
_FRAMEWORKS = {
    name for own in knowledge.families().values() for name in (own, *knowledge.companion_names(own))
}
_BUILD_TAG = r"\+([A-Za-z0-9][A-Za-z0-9._-]*)"


@dataclass(frozen=True, slots=True)
class Beside:
    """The files that a file may name: `read` gives the text of one in its folder or below, else None.

    `python` is what markers are judged by. `above` are the names of the files that led here. `project`
    tells what the project in such a folder needs, with these of its extras; None where nothing says it.
    """

    python: str
    read: Callable[[str], str | None] = lambda _: None
    above: tuple[str, ...] = ()
    project: Callable[[str, tuple[str, ...]], Wish | None] = lambda _, __: None


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
    wish.hints += re.findall(r"[/+]cu[0-9]{2,3}\b|/rocm[0-9][0-9.]*", text)
    if text.startswith("-"):
        wish.hints += re.findall(r"/cpu\b", text)
        _option(wish, text, where, beside)
        return
    if own := re.search(r"\s(--[a-z][a-z-]*).*$", text):  # of the one requirement
        do = _OPTIONS.get(own[1], _OPTIONS["--no-binary"])
        wish.leave(where, f"the option {show(own[0].strip())} is not taken over", do)
        text = text[: own.start()].strip()
    if re.match(r"\.{1,2}(/|\[|$)|/|file:|[\w.-]+/", text) and not re.search(
        _ARCHIVE, text.partition("[")[0]
    ):
        take_project(wish, text, where, beside)
    elif requirement := _requirement(wish, text, where, beside.python):
        _take(wish, requirement, text, where)


def _option(wish: Wish, text: str, where: Where, beside: Beside) -> None:
    found = re.match(r"(--[a-z-]+|-[a-z])[ =]*(.*)", text)
    option, value = (found[1], found[2].strip("\"'")) if found else (text, "")
    if option in ("-c", "--constraint", "-r", "--requirement"):
        constraint = option in ("-c", "--constraint")
        if why := take_file(wish, value, beside, constraint=constraint):
            do = "add its lines" if not constraint else "write its bounds under constraints"
            wish.leave(where, f"{show(value)} {why}", do)
    elif option in ("-e", "--editable") and "://" not in value:
        take_project(wish, value, where, beside)
    elif option in ("-e", "--editable"):
        take_pip_line(wish, value, where, beside)
    elif option.endswith("index-url") and knowledge.known_index(value):
        wish.indexes += [value] if value not in wish.indexes else []
        wish.note(
            where, f"{show(text, limit=100)}: what PyPI lacks is taken from there, by `index` of the recipe"
        )
    else:
        cuda = re.search(r"/cu([0-9]{2})([0-9])\b", value)
        do = f"{_INDEX}; CUDA {cuda[1]}.{cuda[2]} was read from it" if cuda else _OPTIONS.get(option, _INDEX)
        wish.leave(where, f"the option {show(text, limit=100)} is not taken over", do)


def _place(name: str, beside: Beside) -> str:
    """A file's or folder's path below the folder of the first file; empty where it lies elsewhere."""
    above = PurePosixPath(beside.above[-1]).parent if beside.above else PurePosixPath()
    place = normpath(above / name)
    return "" if "://" in name or place.startswith(("/", "..")) else place


def take_file(wish: Wish, name: str, beside: Beside, *, constraint: bool) -> str:
    """Takes over a file that lies below the folder of the first; or says why not."""
    place = _place(name, beside)
    if not place:
        return "is not in the folder of the file that is imported"
    if place in beside.above or wish.files >= MOST_FILES:
        return "is read already" if place in beside.above else f"is one file more than {MOST_FILES}"
    text = beside.read(place)
    if text is None:
        return "cannot be read"
    wish.files += 1
    inner = replace(beside, above=(*beside.above, place))
    if not constraint:
        take_requirements(wish, text, place, inner)
        return ""
    bounds = Wish(file=wish.file, files=wish.files)
    take_requirements(bounds, text, place, inner)
    wish.files = bounds.files
    wish.left += bounds.left
    wish.hints += bounds.hints
    wish.builds |= bounds.builds
    wish.constraints += [one for one in (*bounds.pip, *bounds.constraints) if RULES["constraint"].allows(one)]
    return ""


def take_project(wish: Wish, written: str, where: Where, beside: Beside) -> None:
    """What a project in a folder needs; the project itself is no package of an index."""
    folder, _, extras = written.partition("[")
    name = folder.removeprefix("file:").strip() or "."
    place = _place(name, beside)
    wanted = tuple(part.strip() for part in extras.partition("]")[0].split(",") if part.strip())
    needs = beside.project(place, wanted) if place and wish.files < MOST_FILES else None
    if needs is None:
        why = (
            "has no pyproject.toml beside it that says what it needs"
            if place
            else "is not in the folder of the file"
        )
        wish.leave(where, f"the project {show(written)} {why}", f"add what it needs, and {_WHEEL}")
        return
    wish.files += 1
    wish.merge(needs)
    wish.leave(where, f"the project {show(written)} itself: what it needs was taken", _WHEEL)


def _requirement(wish: Wish, text: str, where: Where, python: str) -> Requirement | None:
    try:
        requirement = Requirement(_plain_wheel(text))
    except InvalidRequirement:
        wish.leave(where, f"{show(text, limit=100)} cannot be taken over", _instead(text))
        return None
    if requirement.url:
        wish.leave(
            where, f"{show(text, limit=100)} is taken from an address", _instead(text, requirement.name)
        )
        return None
    if requirement.marker and not holds(requirement.marker, python):
        wish.leave(where, f"{show(text)} is not for Python {python} on {PLATFORM}", "nothing to do")
        return None
    return requirement


def _wheel(text: str) -> tuple[str, str]:
    """The name and the version in a wheel's file name, empty for other files."""
    found = re.search(
        r"([A-Za-z0-9._]+)-([0-9][A-Za-z0-9.!+_]*)(-[^-/]+){3,4}\.whl", text.replace("%2B", "+")
    )
    return (canonical(found[1]), found[2]) if found else ("", "")


def _plain_wheel(text: str) -> str:
    """A framework's wheel at an address as its version; an index may have another's by other names."""
    name, version = _wheel(text)
    return f"{name}=={version}" if name in _FRAMEWORKS and "://" in text else text


def _instead(text: str, name: str = "") -> str:
    """What to do about a file or address of a package."""
    wheel, version = _wheel(text)
    egg = re.search(r"[#&]egg=([A-Za-z0-9._-]+)", text)
    name = name or wheel or (egg[1] if egg else "")
    if wheel:
        return f"write {name}=={version.partition('+')[0]}, or ./wheels/... with the wheel there"
    if name:
        return f"write {name} with bounds, or ./wheels/... with a wheel of it there"
    return "write NAME and its bounds as PyPI knows them; files and addresses are not locked"


def _take(wish: Wish, requirement: Requirement, text: str, where: Where) -> None:
    # as PEP 440 has versions: no v before them, and === of one is ==
    bounds = re.sub(r"(?<=[=<>])v(?=[0-9])", "", str(requirement.specifier).replace("===", "=="))
    if tag := re.search(_BUILD_TAG, bounds):
        wish.builds[canonical(requirement.name)] = tag[1]
        what = f"the build tag {show(tag[0])} in {show(text)}"
        wish.note(where, f"{what}: it says the CUDA or the index, the version is kept")
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
