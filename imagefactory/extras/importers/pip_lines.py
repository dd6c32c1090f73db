"""Read requirements files of pip, and the files that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from posixpath import normpath
from urllib.parse import unquote

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from imagefactory.extras.importers.spec import (
    PLATFORM,
    EnvironmentSpec,
    LockedRow,
    add_git,
    add_match_spec,
    git_of_archive,
    recipe_path,
)
from imagefactory.gpu import knowledge
from imagefactory.model import SourceLocation
from imagefactory.recipes.values import RULES, canonical, parse_spec, without_secrets
from imagefactory.recipes.yaml_tree import show

MOST_FILES = 20
# Options of pip without a loss, with what happens instead.
_IGNORED_OPTIONS = {
    "--only-binary": "packages are taken as wheels",
    "--prefer-binary": "packages are taken as wheels",
    "--no-build-isolation": "packages without wheels are built with the target's own packages",
    "--no-deps": "what packages need comes with them, and is solved with the others",
    "--hash": "it belongs to no package, and locks have the hash of each file",
    "--use-feature": "it says how pip works, and packages are solved by uv",
    "--require-hashes": "locks have the hash of each file",
    "--trusted-host": "certificates are a setting of this machine",
}
_WHEEL_DIRECTORY_HINT = "put those wheels into the project and write their paths under packages: ./wheels/..."
_BUILT = (
    "build it with your options and write the wheel under packages: `imagefactory recipe build-wheel --help`"
)
# Options with a loss, with a fix; for indexes it is `_INDEX`.
_LOST_OPTIONS = {
    "--pre": "write a bound such as >=2.0.0rc1 to allow a pre-release",
    "--no-binary": _BUILT,
    "--config-settings": _BUILT,
    "--config-setting": _BUILT,
    "--global-option": _BUILT,
    "--install-option": _BUILT,
    "--build-option": _BUILT,
}
_INDEX = (
    "the index is that of this machine's settings; add this one there, and name it in the recipe by `index`"
)
_PAGE = (
    "a lock needs hashes, and a page of links has none: download the wheel for your Python and CUDA from it, "
    "and write its path under packages: ./wheels/..."
)
PAGE_OPTIONS = ("--find-links", "-f")
_DEFAULT_INDEX = ("--index-url", "-i", "--default-index", "the default index")
_INDEX_OPTIONS = (
    "--index-url",
    "-i",
    "--extra-index-url",
    "--index",
    "--default-index",
    *PAGE_OPTIONS,
)
# Folders of PyTorch's own index, by CUDA, and the page that had them all before.
_OF_PYTORCH = re.compile(r"/whl(/(cu[0-9]{2,3}|cpu|rocm[0-9.]+|torch_stable\.html|torch|stable\.html))?/?$")
# A mirror of PyPI, by its address.
_MIRROR = re.compile(
    r"https?://([^/]*pypi[^/]*/(pypi/)?|[^/]+/(repository/)?pypi/(web/)?)simple/?", re.IGNORECASE
)
# Build tags that name the platform of a wheel, not its content: cu118, cpu, rocm6.0, pt21cu118.
_BUILT_FOR = re.compile(r"(pt[0-9.]+)?((cu|cuda|rocm)[0-9.]+|cpu)?([.]?(cudnn|torch)[0-9.]+.*)?", re.ASCII)
_OTHER_BUILD = "put that wheel into the project, and write its path under packages: ./wheels/..."
_COMMENT = re.compile(r"\s*#")
_ARCHIVE = r"\.(?:whl|zip|tar(?:\.[a-z0-9]+)?|tgz)$"
# `NAME[EXTRA] @ ADDRESS`, an address alone, or the path of an archive.
_ELSEWHERE = re.compile(
    r"(?:([A-Za-z0-9][\w.-]*)\s*(?:\[([^\]]*)\])?\s*@\s*)?"
    r"((?:\w+\+)?\w+://\S+|file:\S+|\S+\.(?:whl|zip|tgz|tar\.gz|tar\.bz2))"
)
# Folders in which conda builds packages.
_OF_CONDA = re.compile(
    r"file:/.*/(build_artifacts|feedstock_root|croot|conda-bld|80754af9|bld|ci_py[0-9]+|abs_\w+)/"
)
# The values of markers for the image's machine; Python's version is added.
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
class ReferencedFiles:
    """The files that a file may name. `read` returns the text of a file in or near its directory, else None.

    `python` is the version that evaluates markers. `above` are the files that led to this one. `project`
    returns the requirements of the project in a directory with some of its extras, None if no file lists
    them. `place` is the directory of the first file relative to the root of the imagefactory project, None
    outside of it.
    """

    python: str
    read: Callable[[str], str | None] = lambda _: None
    above: tuple[str, ...] = ()
    project: Callable[[str, tuple[str, ...], ReferencedFiles], EnvironmentSpec | None] = lambda _, __, ___: (
        None
    )
    place: str | None = None

    def path(self, name: str) -> str:
        """Return a path in the current file relative to the first file's directory.

        Empty for absolute paths and addresses.
        """
        above = PurePosixPath(self.above[-1]).parent if self.above else PurePosixPath()
        if name.startswith("file:") and not name.startswith("file://"):
            name = unquote(name.removeprefix("file:")).replace("\0", "%00")
        return "" if "://" in name or name.startswith(("/", "~")) else normpath(above / name)


def add_requirements(spec: EnvironmentSpec, text: str, file: str, referenced_files: ReferencedFiles) -> None:
    """Add a requirements file. `conda list --export` writes files with that name too."""
    if re.search(r"^# \$ conda create --name <env> --file", text, re.MULTILINE):
        _conda_export(spec, text, file, referenced_files)
        return
    lines = re.split(r"\r\n|\r|\n", text)
    number = 0
    while number < len(lines):
        first, line = number, lines[number].rstrip()
        while line.endswith("\\") and not _COMMENT.match(line) and number + 1 < len(lines):
            number += 1
            if _COMMENT.match(lines[number]):  # which ends what is continued, as pip reads it
                line = line.rstrip("\\")
                break
            line = line.rstrip("\\") + lines[number].rstrip()
        number += 1
        column = len(line) - len(line.lstrip()) + 1
        add_pip_line(
            spec,
            line.rstrip("\\"),
            SourceLocation(file=file, line=first + 1, column=column),
            referenced_files,
        )


def add_pip_line(
    spec: EnvironmentSpec, line: str, location: SourceLocation, referenced_files: ReferencedFiles
) -> None:
    """Add one line with the rules of pip. Hashes are dropped, since the lock has them."""
    text = re.sub(r"(^|\s)#.*", "", line).strip()
    if spec.frozen:
        spec.rows += [LockedRow(kind="requirements", where=location, text=text)] if text else []
        return
    text = re.sub(r"\s--hash[= ]\S+", "", text).strip()
    if not text:
        return
    spec.hints += re.findall(r"[/+]cu[0-9]{2,3}\b|/rocm[0-9][0-9.]*", text)
    if match := re.search(r"\$\{[A-Z0-9_]+\}", text):
        spec.leave(location, f"{show(text, limit=100)} contains the variable {match[0]}", "write it out")
        return
    if text.startswith("-"):
        spec.hints += re.findall(r"/cpu\b", text)
        _options(spec, text, location, referenced_files)
        return
    if own := re.search(r"\s(--[a-z][a-z-]*).*$", text):  # of the one requirement
        _option(spec, own[1], own[0].strip(), location, of=text[: own.start()].strip())
        text = text[: own.start()].strip()
    if re.match(r"\.{1,2}(/|\[|$)|/|file:|[\w.-]+/", text) and not re.search(
        _ARCHIVE, text.partition("[")[0]
    ):
        add_project(spec, text, location, referenced_files)
    elif not _is_elsewhere(spec, text, location, referenced_files) and (
        requirement := _requirement(spec, text, location, referenced_files.python)
    ):
        _take(spec, requirement, text, location)


def _options(
    spec: EnvironmentSpec, text: str, location: SourceLocation, referenced_files: ReferencedFiles
) -> None:
    """Add the options in one line, which may have several: `-i ADDRESS --trusted-host HOST`."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    while words:
        option, value = words.pop(0), ""
        if match := re.fullmatch(r"(--[a-z-]+)=(.*)|(-[a-z])=?(.+)", option):
            option, value = match[1] or match[3], match[2] or match[4] or ""
        elif words and not words[0].startswith("-"):
            value = words.pop(0)
        if option in ("-c", "--constraint", "-r", "--requirement"):
            constraint = option in ("-c", "--constraint")
            if reason := add_file(spec, value, referenced_files, constraint=constraint):
                do = "add its lines" if not constraint else "write its bounds under constraints"
                spec.leave(location, f"{show(value)} {reason}", do)
        elif (
            option in ("-e", "--editable")
            and "://" not in value
            and not re.search(r"^\w[\w.\[\], -]* @", value)
        ):
            add_project(spec, value, location, referenced_files)
        elif option in ("-e", "--editable"):
            add_pip_line(spec, value, location, referenced_files)
        elif option in _INDEX_OPTIONS:
            add_index(spec, value, location, option)
        else:
            _option(spec, option, f"{option} {value}".strip(), location)


def _option(spec: EnvironmentSpec, option: str, text: str, location: SourceLocation, *, of: str = "") -> None:
    option_text = f"the option {show(text, limit=100)}{f' of {show(of, limit=100)}' if of else ''}"
    if option in _IGNORED_OPTIONS:
        spec.note(location, f"{option_text}: {_IGNORED_OPTIONS[option]}")
    else:
        do = _LOST_OPTIONS.get(option, "see what it asks for, and remove it from the file")
        spec.leave(location, f"{option_text} is not taken over", do)


def add_index(
    spec: EnvironmentSpec, address: str, location: SourceLocation, option: str = "the index"
) -> None:
    """Add an index that is not in the settings. Other indexes may not have its packages."""
    index = show(f"{option} {without_secrets(address)}", limit=120)
    if "://" not in address:
        spec.leave(location, f"{index}: packages in a directory are not supported", _WHEEL_DIRECTORY_HINT)
        return
    plain = re.sub(r"(?<=://)[^/@\s]*@", "", address)
    spec.hints += [hint for hint in re.findall(r"/cu[0-9]{2,3}\b", plain) if hint not in spec.hints]
    if plain in spec.indexes:
        return
    spec.indexes.append(plain)
    if knowledge.is_known_index(plain):
        spec.note(location, f"{index}: what PyPI lacks is taken from there, by `index` of the recipe")
    elif _OF_PYTORCH.search(plain):
        cuda = re.search(r"/cu([0-9]{2})([0-9])\b", plain)
        meaning = f"CUDA {cuda[1]}.{cuda[2]} is read from it" if cuda else "its name contains the build"
        spec.note(
            location, f"{index}: {meaning}, and packages come from the index of this machine's settings"
        )
    elif option in _DEFAULT_INDEX and is_mirror(plain):
        spec.note(location, f"{index}: packages come from the index of this machine's settings")
    else:
        page = option in PAGE_OPTIONS or re.search(r"\.html?$", re.split(r"[?#]", plain)[0])
        spec.leave(location, f"{index} is not taken over", _PAGE if page else _INDEX)


def is_mirror(address: str) -> bool:
    """Return whether an index mirrors PyPI, by its address."""
    return _MIRROR.fullmatch(address) is not None


def add_file(spec: EnvironmentSpec, name: str, referenced_files: ReferencedFiles, *, constraint: bool) -> str:
    """Add a file near the first one. Return the problem, empty if it was read."""
    file_path = referenced_files.path(name)
    if not file_path:
        return "is not a path relative to the directory of the imported file"
    if file_path in referenced_files.above or spec.files >= MOST_FILES:
        return "" if file_path in referenced_files.above else f"is one file more than {MOST_FILES}"
    text = referenced_files.read(file_path)
    if text is None:
        outside = file_path.startswith("..")
        return "is not there, or outside of the git work tree" if outside else "cannot be read"
    spec.files += 1
    inner = replace(referenced_files, above=(*referenced_files.above, file_path))
    if not constraint:
        add_requirements(spec, text, file_path, inner)
        return ""
    bounds = EnvironmentSpec(file=spec.file, files=spec.files)
    add_requirements(bounds, text, file_path, inner)
    spec.files = bounds.files
    spec.lost += bounds.lost
    spec.notes += bounds.notes
    spec.hints += bounds.hints
    spec.builds |= bounds.builds
    spec.constraints += [row for row in (*bounds.pip, *bounds.constraints) if RULES["constraint"].allows(row)]
    return ""


def add_project(
    spec: EnvironmentSpec, written: str, location: SourceLocation, referenced_files: ReferencedFiles
) -> None:
    """Add the project in a directory: its requirements, and its code as a source."""
    directory, _, extras = written.partition("[")
    name = directory.removeprefix("file://").removeprefix("file:").strip() or "."
    file_path = referenced_files.path(name)
    names = tuple(part.strip() for part in extras.partition("]")[0].split(",") if part.strip())
    needs = referenced_files.project(file_path, names, referenced_files) if file_path else None
    if needs is not None:
        spec.narrow_python(needs.python, location)
        spec.merge(needs)
    elif not file_path:
        do = "copy it into the project, and write its path: ./DIRECTORY"
        spec.leave(location, f"the project {show(written)} is not in the directory of the file", do)
    else:
        project_text = (
            f"the project {show(written)} has no pyproject.toml, setup.py or setup.cfg that can be read"
        )
        spec.leave(location, project_text, "copy its directory here, or remove the line")


def _is_elsewhere(
    spec: EnvironmentSpec, text: str, source_location: SourceLocation, referenced_files: ReferencedFiles
) -> bool:
    """Add a package from a repository, a file or an address. Return False for other lines."""
    head, written = re.sub(r"\s+;.*|;\s.*", "", text, flags=re.DOTALL), ""
    match = _ELSEWHERE.fullmatch(head)
    if not match:
        return False
    written = text[len(head) :].lstrip("; \t")
    try:
        meant = not written or marker_matches(Marker(written), referenced_files.python)
    except InvalidMarker:
        return False
    if not meant:
        spec.note(
            source_location,
            f"{show(text, limit=100)} is not for Python {referenced_files.python} on {PLATFORM}",
        )
        return True
    name, extras, address = match[1] or "", match[2] or "", match[3]
    fragment = dict(part.partition("=")[::2] for part in address.partition("#")[2].split("&"))
    if git := git_of_archive(address):
        address = f"git+{git}"
    wheel, version = _wheel(address)
    location = show(without_secrets(address), limit=160)
    if address.startswith("git+"):
        add_git(spec, address[4:], source_location, extras=extras, directory=fragment.get("subdirectory", ""))
    elif _OF_CONDA.match(address):
        _take_of_conda(spec, name, version, source_location)
    elif wheel in _FRAMEWORKS and "://" in address and not address.startswith("file:"):
        spec.note(source_location, f"{location} is taken as {wheel} {version}")
        _take(spec, Requirement(f"{wheel}=={version}"), f"{wheel}=={version}", source_location)
    elif "://" not in address and RULES["wheel"].allows(
        path := recipe_path(
            referenced_files.place, referenced_files.path(address.removeprefix("file:")) or "/"
        )
    ):
        spec.pip.append(path)
    elif wheel or address.endswith(".whl"):
        do = f"put the wheel into the project, and write its path under packages: ./wheels/{_file(address)}"
        spec.leave(source_location, f"{location} is a wheel of no index", do)
    else:
        do = "copy its files into a directory of the project, and write ./DIRECTORY under packages"
        spec.leave(source_location, f"{location} is a package of no index", do)
    return True


def _take_of_conda(spec: EnvironmentSpec, name: str, version: str, location: SourceLocation) -> None:
    """Add `NAME @ file:///...`, which `pip freeze` writes for conda packages.

    The name of a wheel has the version.
    """
    if RULES["package"].allows(text := f"{name}=={version}"):
        spec.note(location, f"{text} was built by conda, and is taken from the index")
        spec.pip.append(text)
    else:
        do = "write the file again: `pip list --format=freeze > requirements.txt`"
        spec.leave(location, f"{show(name)} was built by conda on another machine, in no version", do)


def _requirement(
    spec: EnvironmentSpec, text: str, location: SourceLocation, python: str
) -> Requirement | None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        single = re.fullmatch(r"([A-Za-z0-9][\w.-]*)\s*=\s*([0-9][^=\s]*)", text)
        do = f"write {single[1]}=={single[2]}" if single else "write NAME and its bounds as PEP 508 has them"
        spec.leave(location, f"{show(text, limit=100)} cannot be taken over", do)
        return None
    if requirement.marker and not marker_matches(requirement.marker, python):
        spec.note(location, f"{show(text)} is not for Python {python} on {PLATFORM}")
        return None
    return requirement


def _wheel(text: str) -> tuple[str, str]:
    """Return the name and version in a wheel's file name, empty for other files."""
    match = re.search(
        r"([A-Za-z0-9._]+)-([0-9][A-Za-z0-9.!+_]*)(-[^-/]+){3,4}\.whl", text.replace("%2B", "+")
    )
    return (canonical(match[1]), match[2]) if match else ("", "")


def _file(address: str) -> str:
    """Return the file name at the end of an address."""
    return show(address.partition("#")[0].rpartition("/")[2].replace("%2B", "+"), limit=160)[1:-1]


def _take(spec: EnvironmentSpec, requirement: Requirement, text: str, location: SourceLocation) -> None:
    # as PEP 440 has versions: no v before them, and === of one is ==
    bounds = re.sub(r"(?<=[=<>])v(?=[0-9])", "", str(requirement.specifier).replace("===", "=="))
    if tag := re.search(_BUILD_TAG, bounds):
        spec.builds[canonical(requirement.name)] = tag[1]
        bounds = re.sub(_BUILD_TAG, "", bounds)
        build_tag_text = f"the build tag {show(tag[0])} in {show(text)}"
        if _BUILT_FOR.fullmatch(tag[1]):
            spec.note(
                location, f"{build_tag_text}: indexes have no builds by such names, the version is kept"
            )
        else:
            spec.leave(location, f"{build_tag_text} names a release that PyPI does not have", _OTHER_BUILD)
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    package = f"{requirement.name}{extras}{_normal(bounds)}"
    if RULES["package"].allows(package):
        spec.pip.append(package)
    else:
        spec.leave(location, f"{show(text)} cannot be taken over", f"write {RULES['package'].write}")


def _normal(bounds: str) -> str:
    """Return bounds with each version in normal form (PEP 440): 2.0.0-rc1 becomes 2.0.0rc1."""

    def normal(match: re.Match[str]) -> str:
        try:
            return match[1] + str(Version(match[2]))
        except InvalidVersion:
            return match[0]

    return re.sub(r"([=<>~!]=?|===)([^,*=<>~!]+)(?=,|$)", normal, bounds)


def marker_matches(marker: Marker, python: str) -> bool:
    """Return whether a marker matches an image with this Python version."""
    return marker.evaluate(
        {
            **_MARKERS,
            "python_version": python,
            "python_full_version": f"{python}.0",
            "implementation_version": f"{python}.0",
        }
    )


def _conda_export(spec: EnvironmentSpec, text: str, file: str, referenced_files: ReferencedFiles) -> None:
    """Add lines `name=version=build`. Packages that pip installed have the build pypi_0."""
    spec.locked = True
    for number, line in enumerate(text.split("\n")):
        location = SourceLocation(file=file, line=number + 1, column=1)
        name, _, rest = line.strip().partition("=")
        version, _, build = rest.partition("=")
        if not name or name.startswith("#"):
            if not re.fullmatch(r"# platform: (linux-64|noarch)|# (?!platform:).*|", line.strip()):
                spec.leave(location, f"{show(line.strip())} is not {PLATFORM}", f"export it on {PLATFORM}")
        elif build.startswith("pypi"):
            add_pip_line(spec, f"{name}=={version}", location, referenced_files)
        else:
            add_match_spec(spec, f"{name}=={version}" if version else name, location)
            if RULES["match spec"].allows(name):
                spec.builds.setdefault(parse_spec(name).name, build)
