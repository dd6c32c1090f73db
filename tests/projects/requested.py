"""What a project's own file asks for, and whether a lock has it, read by `packaging` only.

Nothing of imagefactory is imported here. A mistake of its importers must not be a mistake of this check too.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from packaging.markers import InvalidMarker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

VALUE_OPTIONS = {
    *("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--python", "-p", "--cache-dir", "-t"),
    *(
        "--target",
        "--prefix",
        "--root",
        "--timeout",
        "--retries",
        "--trusted-host",
        "--index",
        "--torch-backend",
    ),
    *(
        "--no-binary",
        "--only-binary",
        "--config-settings",
        "-C",
        "--prerelease",
        "--index-strategy",
        "--proxy",
    ),
}
_INSTALL = re.compile(r"^(?:\S*python[0-9.]* +-m +)?(?:\S*pip[0-9.]*|uv +pip) +install\b")
_CLONE = re.compile(r"git +clone +(?:.* )?(\w+://\S+)(?: +(\S+))?$")
_CHANGE = re.compile(r"(?:cd|pushd|WORKDIR) +(\S+)$")


@dataclass
class Requested:
    """`requirements` are PEP 508, `conda` specs of an environment.yml, `unread` lines of another form."""

    requirements: list[Requirement] = field(default_factory=list)
    conda: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        try:
            self.requirements.append(Requirement(text))
        except InvalidRequirement:
            self.unread.append(text)


def read(path: Path, root: Path, extras: Sequence[str] = (), groups: Sequence[str] = ()) -> Requested:
    """Return what the file at `path` asks for. `root` is the folder of the whole project."""
    found = Requested()
    if path.name == "pyproject.toml":
        _pyproject(found, path, extras, groups)
    elif path.suffix in (".yml", ".yaml"):
        _environment(found, path, root)
    elif path.suffix == ".lock":
        _lock(found, path, extras)
    elif "dockerfile" in path.name.lower() or path.suffix == ".def":
        _container(found, path, root)
    elif path.suffix in (".txt", ".in"):
        _lines(found, path, root, frozenset())
    return found


def _lines(found: Requested, path: Path, root: Path, seen: frozenset[Path]) -> None:
    if path in seen or not path.is_file():
        return
    text = re.sub(r"\\\r?\n", " ", path.read_text(errors="replace"))
    for line in text.splitlines():
        words = re.sub(r"(^|\s)#.*", "", line).strip()
        words = re.sub(r"\s--hash=\S+", "", words).strip()
        if other := re.fullmatch(r"(?:-r|--requirement)[ =]*(\S+)", words):
            _lines(found, path.parent / other[1], root, seen | {path})
        elif words and not words.startswith("-"):
            found.add(words)
        elif re.match(r"(-e|--editable)\b", words):
            found.unread.append(words)


def _pyproject(found: Requested, path: Path, extras: Sequence[str], groups: Sequence[str]) -> None:
    data = tomllib.loads(path.read_text())
    project = data.get("project", {})
    texts = list(project.get("dependencies", ()))
    for extra in extras:
        texts += project.get("optional-dependencies", {}).get(extra, ())
    for group in groups:
        texts += [one for one in data.get("dependency-groups", {}).get(group, ()) if isinstance(one, str)]
    for text in texts:
        found.add(text)
    for name, bounds in data.get("tool", {}).get("poetry", {}).get("dependencies", {}).items():
        if name != "python" and not (isinstance(bounds, Mapping) and bounds.get("optional")):
            found.add(
                name
            )  # Poetry's own bounds are for its own reader: that the package is there is checked


def _environment(found: Requested, path: Path, root: Path) -> None:
    data = yaml.safe_load(path.read_text()) or {}
    for item in data.get("dependencies", ()):
        if isinstance(item, str):
            found.conda.append(item)
        for text in item.get("pip", ()) if isinstance(item, Mapping) else ():
            if other := re.fullmatch(r"(?:-r|--requirement)[ =]*(\S+)", text):
                _lines(found, path.parent / other[1], root, frozenset())
            elif not text.startswith("--"):
                found.add(text)


def _lock(found: Requested, path: Path, extras: Sequence[str]) -> None:
    """The direct dependencies of a uv.lock's own project, at the locked versions."""
    packages = tomllib.loads(path.read_text()).get("package", [])
    versions: dict[str, set[str]] = {}
    for one in packages:
        versions.setdefault(canonicalize_name(one["name"]), set()).add(str(one.get("version", "")))
    own = next((one for one in packages if set(one.get("source", ())) & {"editable", "virtual"}), None)
    if own is None:
        return
    needs = list(own.get("dependencies", ()))
    for extra in extras:
        needs += own.get("optional-dependencies", {}).get(extra, ())
    for need in needs:
        known = versions.get(canonicalize_name(need["name"]), set())
        bounds = f"=={next(iter(known))}" if len(known) == 1 else ""
        marker = f" ; {need['marker']}" if "marker" in need else ""
        found.add(f"{need['name']}{bounds}{marker}")


def _commands(text: str) -> Iterator[str]:
    """Shell commands of RUN lines, or of %post; continued lines are joined, comments in them are dropped."""
    text = re.sub(r"^[ \t]*#.*\n", "", text, flags=re.MULTILINE)
    for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines():
        line = re.sub(r"^\s*RUN\s+(--\S+\s+)*", "", line)
        for part in re.split(r"&&|\|\||;", line):
            yield part.strip()


def _container(found: Requested, path: Path, root: Path) -> None:
    clones: dict[str, str] = {}
    inside = ""  # the address of the clone that is the current directory
    for command in _commands(path.read_text(errors="replace")):
        if cloned := _CLONE.match(command):
            clones[(cloned[2] or cloned[1]).rstrip("/").split("/")[-1].removesuffix(".git")] = cloned[1]
        elif changed := _CHANGE.match(command):
            inside = clones.get(changed[1].rstrip("/").split("/")[-1], "")
        if not _INSTALL.match(command):
            continue
        try:
            words = shlex.split(_INSTALL.sub("", command), comments=True)
        except ValueError:
            found.unread.append(command)
            continue
        at = iter(words)
        for word in at:
            if word in ("-r", "--requirement"):
                name = next(at, "").split("/")[-1]
                files = sorted(root.rglob(name)) if name else []
                if len(files) == 1:
                    _lines(found, files[0], root, frozenset())
                else:
                    found.unread.append(f"-r {name}")
            elif word in VALUE_OPTIONS:
                next(at, None)
            elif word in (">", "<") or word.startswith((">", "<")) or word in ("2>&1", "|"):
                break
            elif word in ("-e", "--editable"):
                found.unread.append(f"-e {_of_clone(next(at, ''), inside)}")
            elif not word.startswith("-") and "$" not in word:
                if re.match(r"[./~]|(git|hg)\+|https?:", word):
                    found.unread.append(_of_clone(word, inside))
                else:
                    found.add(word)


def _of_clone(path: str, address: str) -> str:
    """Return the address of a clone for a path that is the clone's own directory, else the path."""
    return address if address and re.fullmatch(r"\./?(\[.*\])?", path) else path


def markers_of(python: str) -> dict[str, str]:
    """The environment that markers are evaluated in: CPython on 64-bit Linux."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "implementation_name": "cpython",
        "implementation_version": f"{python}.9",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "platform_release": "",
        "platform_version": "",
        "extra": "",
    }


def applies(requirement: Requirement, python: str) -> bool:
    try:
        return requirement.marker is None or requirement.marker.evaluate(dict(markers_of(python)))
    except (InvalidMarker, KeyError):
        return True


def lock_versions(text: str) -> tuple[str, dict[str, str]]:
    """The Python and the versions by name of a lock's text (a requirements file with hashes)."""
    python = re.search(r"^# python: (\S+)$", text, re.MULTILINE)
    rows = re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE)
    return python[1] if python else "", dict(rows)


def unmet(
    requirements: Sequence[Requirement], versions: Mapping[str, str], python: str
) -> list[tuple[str, str]]:
    """Names that the lock does not have, or has outside of their bounds, each with what it has."""
    missing = []
    for one in requirements:
        if not applies(one, python):
            continue
        version = versions.get(canonicalize_name(one.name))
        bounds: SpecifierSet = one.specifier
        if version is None:
            missing.append((one.name, f"{one.name}: not in the lock"))
        elif not one.url and not bounds.contains(version, prereleases=True):
            missing.append((one.name, f"{one.name}{bounds}: {version}"))
    return missing


def cuda_majors(versions: Mapping[str, str]) -> set[str]:
    """The CUDA versions that NVIDIA's packages of a lock are for, by their names' ending."""
    majors = {found[1] for name in versions if (found := re.fullmatch(r"nvidia-.*-cu([0-9]{2})", name))}
    if "nvidia-cuda-runtime" in versions:
        majors.add(versions["nvidia-cuda-runtime"].split(".")[0])
    return majors
