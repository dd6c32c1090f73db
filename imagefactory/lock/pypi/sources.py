"""Copy the source of a package by an untrusted author, and read its metadata."""

from __future__ import annotations

import bz2
import configparser
import fnmatch
import gzip
import hashlib
import json
import lzma
import os
import re
import stat
import struct
import tarfile
import tomllib
import zipfile
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import Version

from imagefactory.errors import UsageError, os_problem
from imagefactory.lock.git import VARIABLES
from imagefactory.oci.tar_stream import CappedInfo
from imagefactory.scan.zip import check_list
from imagefactory.trees import TreeLimits, open_file, printable, read_chunks, read_file, walk_tree

DEFAULT_REQUIRES = ("setuptools>=40.8", "wheel")
"""The build requirements of a project without its own list (PEP 518)."""
SKIPPED = (".git", "build", "*.egg-info", ".venv", "__pycache__", "node_modules")
"""Names that are not source: git's directory, environments, and results of builds and runs."""
TREE = TreeLimits(entries=1_000_000, depth=100)
PYPROJECT = "pyproject.toml"
TEXT = 1 << 20  # bytes of a pyproject.toml
MOST_REQUIRES = 200
_MOST_DEPENDENCIES = 2000  # with those of all extras; apache-beam 2.72 has 230
CODE: Mapping[str, str] = {
    **dict.fromkeys((".cu", ".cuh"), "CUDA"),
    **dict.fromkeys((".c", ".cc", ".cpp", ".cxx", ".pyx"), "C++"),
    **dict.fromkeys((".f", ".f90", ".f95"), "Fortran"),
    "Cargo.toml": "Rust",
}
"""The languages of files that need a compiler."""
MEMBERS, INFLATED, RATIO = 200_000, 8 << 30, 200
"""Limits of an archive: members, bytes of all of them, and bytes for each packed byte."""
_LEAST = 64 << 20  # every archive may unpack to this many bytes
_EGG_INFO = re.compile(r"^(?:[^/]+/){0,2}[^/]+\.egg-info/[^/]+$")
_MOST_LINKS = 40  # as Linux follows
_OPENERS: Mapping[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProject:
    """The metadata of a source, read without running it.

    `requires` are its build requirements (PEP 518). `name` and `version` are empty if unknown.
    `dependencies` are its Requires-Dist, None if only a build knows them. `code` are the languages that need
    a compiler (a key of CODE), `imports` the packages that its setup.py imports. `version_variable` sets the
    version for a build that would query git, empty for any other.
    """

    requires: tuple[str, ...]
    name: str
    version: str = ""
    dependencies: tuple[str, ...] | None = None
    python: str = ""
    code: frozenset[str] = frozenset()
    imports: frozenset[str] = frozenset()
    version_variable: str = ""


@dataclass(slots=True)
class _SourceFiles:
    """The metadata files of a source by their path in it, and its languages."""

    texts: dict[str, bytes]
    code: set[str]

    def text(self, path: str) -> str:
        return self.texts.get(path, b"").decode(errors="replace")

    def in_egg_info(self, name: str) -> str | None:
        """Return the text of a file in the egg-info directory, None if there is none."""
        directories = sorted({path.rpartition("/")[0] for path in self.texts if _EGG_INFO.search(path)})
        return self.text(f"{directories[0]}/{name}") if directories else None


def read_project(source: Path) -> SourceProject:
    """Return the metadata of a source archive or directory. Raises UsageError for anything else."""
    try:
        contents = _contents(source)
        document = tomllib.loads(contents.texts.get(PYPROJECT, b"").decode())
        build = document.get("build-system", {}).get("requires", DEFAULT_REQUIRES)
        if len(build) > MOST_REQUIRES:
            raise ValueError(f"its build requires {len(build)} packages, more than {MOST_REQUIRES}")
        requires = tuple(Requirement(path) for path in build)
        if elsewhere := next((path for path in requires if path.url), None):
            raise ValueError(f"its build requires {elsewhere.name} from an address, not from the index")
        known = _read_metadata(contents, document)
        return SourceProject(
            requires=tuple(map(str, requires)),
            name=canonicalize_name(known.name, validate=True) if known.name else "",
            version=str(Version(known.version)) if known.version else "",
            dependencies=known.dependencies,
            python=known.python,
            code=frozenset(contents.code),
            imports=_imports(contents.text("setup.py")),
            version_variable="" if known.version else _version_variable(contents, requires),
        )
    except (
        *(OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error),
        *(ValueError, TypeError, AttributeError, RuntimeError, struct.error, InvalidName),
        configparser.Error,
    ) as error:
        raise UsageError(
            "package-source-invalid",
            f"{printable(str(source))} is not the source of a package: {printable(str(error))}",
            hint=f"pass a directory with a {PYPROJECT} or setup.py, or an archive of one",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceMetadata:
    name: str = ""
    version: str = ""
    dependencies: tuple[str, ...] | None = None
    python: str = ""


def _read_metadata(contents: _SourceFiles, document: Mapping[str, Any]) -> _SourceMetadata:
    """Return the core metadata from PKG-INFO, pyproject.toml, egg-info, setup.cfg, in this order.

    PKG-INFO is final from version 2.2 on, for each field that is not Dynamic. Older ones of setuptools lack
    Requires-Dist, which is in egg-info/requires.txt.
    """
    project = document.get("project", {})
    info, _ = parse_email(contents.text("PKG-INFO") or contents.in_egg_info("PKG-INFO") or "")
    options = _setup_cfg(contents.text("setup.cfg"))
    dynamic = {entry.lower() for entry in info.get("dynamic", [])}
    final = Version(info.get("metadata_version") or "1.0") >= Version("2.2")
    dependencies: tuple[str, ...] | None = None
    metadata = info.get("requires_dist", [])
    if metadata or (final and "requires-dist" not in dynamic):
        dependencies = tuple(metadata)
    elif project and "dependencies" not in project.get("dynamic", ()):
        dependencies = (*project.get("dependencies", ()), *_with_extras(project))
    elif (listed := contents.in_egg_info("requires.txt")) is not None:
        dependencies = tuple(_egg_requires(listed))
    elif "install_requires" in options or (options and "setup.py" not in contents.texts):
        dependencies = tuple(_lines(options.get("install_requires", "")))
    if dependencies is not None:
        for entry in dependencies[:_MOST_DEPENDENCIES]:
            Requirement(entry)
        if len(dependencies) > _MOST_DEPENDENCIES:
            raise ValueError(f"it requires {len(dependencies)} packages")
    version = info.get("version") or project.get("version", "") or options.get("version", "")
    return _SourceMetadata(
        name=project.get("name", "") or info.get("name") or options.get("name", ""),
        version="" if version.startswith(("attr:", "file:")) else version,
        dependencies=dependencies,
        python=info.get("requires_python") or project.get("requires-python", ""),
    )


def _version_variable(contents: _SourceFiles, requires: Iterable[Requirement]) -> str:
    names: list[str] = [canonicalize_name(node.name) for node in requires]
    if any("use_scm_version" in contents.text(name) for name in ("setup.py", "setup.cfg")):
        names.append("setuptools-scm")
    return next((VARIABLES[name] for name in names if name in VARIABLES), "")


def _with_extras(project: Mapping[str, Any]) -> Iterator[str]:
    for extra, extras in project.get("optional-dependencies", {}).items():
        for need in extras:
            yield _with_marker(need, f'extra == "{canonicalize_name(extra)}"')


def _with_marker(requirement: str, condition: str) -> str:
    """Return a requirement with one more marker."""
    plain, _, marker = requirement.partition(";")
    return (
        f"{plain.strip()}; ({marker.strip()}) and {condition}"
        if marker.strip()
        else f"{plain.strip()}; {condition}"
    )


def _egg_requires(text: str) -> Iterator[str]:
    """Yield Requires-Dist of a requires.txt: its sections are `[extra]`, `[:marker]` or `[extra:marker]`."""
    extra = marker = ""
    for line in _lines(text):
        if line.startswith("[") and line.endswith("]"):
            extra, _, marker = line[1:-1].partition(":")
            continue
        for condition in (
            f"({marker})" if marker else "",
            f'extra == "{canonicalize_name(extra)}"' if extra else "",
        ):
            line = _with_marker(line, condition) if condition else line
        yield line


def _setup_cfg(text: str) -> dict[str, str]:
    """Return name, version and requirements in setup.cfg."""
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    values: dict[str, str] = {}
    for section in ("metadata", "options"):
        values |= dict(parser.items(section)) if parser.has_section(section) else {}
    return {key: value for key, value in values.items() if key in ("name", "version", "install_requires")}


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _imports(text: str) -> frozenset[str]:
    """Return the packages that a program imports by name, also below `try:`."""
    return frozenset(re.findall(r"^[ \t]*(?:import|from)[ \t]+([A-Za-z_][A-Za-z0-9_]*)", text, re.MULTILINE))


def _contents(source: Path) -> _SourceFiles:
    contents = _SourceFiles({}, set())
    if source.is_dir():
        _read_directory(source, contents)
        if not contents.texts.keys() & {PYPROJECT, "setup.py", "setup.cfg"}:
            raise ValueError(f"it has neither {PYPROJECT} nor setup.py")
        return contents
    with open_file(source.parent, source.name, 1 << 62) as fd, os.fdopen(os.dup(fd), "rb") as file:
        (_read_zip if source.suffix == ".zip" else _read_tar)(file, contents)
    return contents


def _read_directory(source: Path, contents: _SourceFiles) -> None:
    root = source.resolve()
    for name in (PYPROJECT, "setup.py", "setup.cfg", "PKG-INFO"):
        if os.path.lexists(source / name):
            # A link, as copied by `copy_source`, leads to a file inside.
            inside = str((source / name).resolve().relative_to(root))
            contents.texts[name] = read_file(source, inside, TEXT)
    for path, state in walk_tree(source, limits=TREE, skip=is_skipped):
        if stat.S_ISREG(state.st_mode):
            _note_language(path, contents)


def _note_language(path: str, contents: _SourceFiles) -> None:
    suffix = path.rpartition("/")[2].rpartition(".")[2].lower()
    kind = CODE.get(f".{suffix}") or CODE.get(path.rpartition("/")[2])
    if kind:
        contents.code.add(kind)


def _read_zip(file: IO[bytes], contents: _SourceFiles) -> None:
    check_list(file)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if not info.is_dir() and (inside := _path_in_archive(info.filename)):
                _note_language(inside, contents)
                if _is_metadata_file(inside):
                    with archive.open(info) as opened:
                        contents.texts.setdefault(inside, _short(opened, inside))


def _read_tar(file: IO[bytes], contents: _SourceFiles) -> None:
    size, head = os.fstat(file.fileno()).st_size, file.read(6)
    file.seek(0)
    opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
    plain = _BoundedReader(opener(file) if opener else file, min(INFLATED, max(_LEAST, RATIO * size)))
    with tarfile.open(fileobj=cast("IO[bytes]", plain), mode="r|", tarinfo=CappedInfo) as tar:
        for _ in range(MEMBERS):
            member = tar.next()
            if member is None:
                return
            if member.isreg() and (inside := _path_in_archive(member.name)):
                _note_language(inside, contents)
                if _is_metadata_file(inside) and (opened := tar.extractfile(member)):
                    contents.texts.setdefault(inside, _short(opened, inside))
            cast("Any", tar).members.clear()  # only needed to go back, which never happens here
    raise ValueError(f"it has more than {MEMBERS} members")


def _short(file: IO[bytes], name: str) -> bytes:
    data = file.read(TEXT + 1)
    if len(data) > TEXT:
        raise ValueError(f"its {name} has more than {TEXT} bytes")
    return data


def _path_in_archive(name: str) -> str:
    """Return the path below the one directory of an archive, empty for paths outside."""
    return name.removeprefix("./").partition("/")[2]


def _is_metadata_file(path: str) -> bool:
    if path in (PYPROJECT, "setup.py", "setup.cfg", "PKG-INFO"):
        return True
    return bool(_EGG_INFO.search(path)) and path.rpartition("/")[2] in ("PKG-INFO", "requires.txt")


class _BoundedReader:
    """A file that is read without seeking, up to a number of bytes."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._file, self._most, self._left = file, most, most

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {self._most} bytes")
        return data


def copy_source(directory: Path, target: Path, most: int, *, skipped: Collection[str] = ()) -> str:
    """Copy a package's directory to the new directory `target`. Return a sha256 of all files.

    A link inside stays a link. `most` limits the bytes of all files as they are read, including holes.
    `skipped` are names at the top that are not copied. Raises UsageError for a link to outside the
    directory, for special files, and above the limit.
    """
    rows, links, remaining = [], dict[str, str](), most
    try:
        target.mkdir()
        for path, state in walk_tree(directory, limits=TREE, skip=is_skipped):
            if path.partition("/")[0] in skipped:
                continue
            if stat.S_ISDIR(state.st_mode):
                (target / path).mkdir()
            elif stat.S_ISLNK(state.st_mode):
                links[path] = os.readlink(directory / path)  # noqa: PTH115 - Path would tidy it
                rows.append((path, "link", links[path]))
            elif stat.S_ISREG(state.st_mode):
                digest, size = _copy_file(directory, path, target, remaining)
                remaining -= size
                rows.append((path, str(bool(state.st_mode & stat.S_IXUSR)), digest))
            else:
                raise UsageError(
                    "package-source-invalid",
                    f"{printable(str(directory / path))} is not a file, directory or link",
                    hint="remove it from the directory",
                )
    except OSError as error:
        raise UsageError(
            *os_problem("copy", printable(f"{directory}: {error.filename}"), error),
            hint=f"remove it, or raise the limit of {most:,} bytes for all files: --limit scratch=...",
        ) from error
    for path, to in links.items():
        if leads_out(path, links):
            raise UsageError(
                "source-link-outside",
                f"{printable(str(directory / path))} is a link to outside the directory, to {printable(to)}",
                hint="replace the link by a copy of its target",
            )
        (target / path).symlink_to(to)
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()


def is_skipped(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in SKIPPED)


def _copy_file(directory: Path, path: str, target: Path, most: int) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with open_file(directory, path, most) as fd, (target / path).open("xb") as out:
        state = os.fstat(fd)
        for data in read_chunks(fd, path, most):
            digest.update(data)
            out.write(data)
            size += len(data)
        out.flush()
        os.fchmod(out.fileno(), 0o755 if state.st_mode & stat.S_IXUSR else 0o644)
        os.utime(out.fileno(), ns=(state.st_mtime_ns, state.st_mtime_ns))
    return digest.hexdigest(), size


def leads_out(path: str, links: Mapping[str, str]) -> bool:
    """Return whether the link `path` leads outside the directory, also through another one of `links`.

    Names that are not links count as directories, as Linux resolves them.
    """
    here, coming, followed = path.split("/")[:-1], deque([path.rpartition("/")[2]]), 0
    while coming:
        part = coming.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            if not here:
                return True
            here.pop()
            continue
        to = links.get("/".join((*here, part)))
        if to is None:
            here.append(part)
        elif to.startswith("/"):
            return True
        elif followed == _MOST_LINKS:
            return False  # nothing follows it
        else:
            followed += 1
            coming.extendleft(reversed(to.split("/")))
    return False
