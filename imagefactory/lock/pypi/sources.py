"""The source of a package that an untrusted author wrote: copied, and read for what it is built with."""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import hashlib
import json
import lzma
import os
import stat
import struct
import tarfile
import tomllib
import zipfile
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from packaging.requirements import Requirement
from packaging.utils import InvalidName, canonicalize_name

from imagefactory.errors import UsageError
from imagefactory.oci.tar_header import CappedInfo
from imagefactory.scan.zip import check_list
from imagefactory.trees import TreeLimits, open_file, printable, read_chunks, read_file, walk_tree

DEFAULT_REQUIRES = ("setuptools>=40.8", "wheel")
"""What PEP 518 says a project without its own list builds with."""
SKIPPED = (".git", "build", "*.egg-info")
"""What is no source: git's own folder, and what builds leave."""
TREE = TreeLimits(entries=1_000_000, depth=100)
PYPROJECT = "pyproject.toml"
TEXT = 1 << 20  # bytes of a pyproject.toml
MOST_REQUIRES = 200
MEMBERS, INFLATED, RATIO = 200_000, 8 << 30, 200
"""Of an archive: members, bytes of all of them, and these for each packed byte."""
_LEAST = 64 << 20  # bytes that any archive may unpack to
_MOST_LINKS = 40  # as Linux follows
_OPENERS: Mapping[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What a source says of itself: what it is built with, and its name, empty where it names none."""

    requires: tuple[str, ...]
    name: str


def read_project(source: Path) -> Project:
    """Return what a source archive or folder says (PEP 518, PEP 621). Raises UsageError for anything else."""
    try:
        document = tomllib.loads(_pyproject(source).decode())
        told = document.get("build-system", {}).get("requires", DEFAULT_REQUIRES)
        if len(told) > MOST_REQUIRES:
            raise ValueError(f"it requires {len(told)} packages to be built")
        requires = tuple(Requirement(one) for one in told)
        if elsewhere := next((one for one in requires if one.url), None):
            raise ValueError(f"to be built it requires {elsewhere.name} from an address, not from the index")
        name = document.get("project", {}).get("name", "")
        return Project(
            requires=tuple(map(str, requires)), name=canonicalize_name(name, validate=True) if name else ""
        )
    except (
        *(OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error),
        *(ValueError, TypeError, AttributeError, RuntimeError, struct.error, InvalidName),
    ) as error:
        raise UsageError(
            f"{printable(str(source))} cannot be read as a package's source: {printable(str(error))}",
            hint=f"give an archive with a {PYPROJECT} or setup.py below its one folder, or a folder",
        ) from error


def _pyproject(source: Path) -> bytes:
    """The bytes of its pyproject.toml, none where it has a setup.py alone."""
    if source.is_dir():
        path = source / PYPROJECT
        if os.path.lexists(path):
            # A link of `copy_source`, which leads to a file inside.
            return read_file(source, str(path.resolve().relative_to(source.resolve())), TEXT)
        if not (source / "setup.py").exists():
            raise ValueError(f"it has neither {PYPROJECT} nor setup.py")
        return b""
    with open_file(source.parent, source.name, 1 << 62) as fd, os.fdopen(os.dup(fd), "rb") as file:
        return _in_zip(file) if source.suffix == ".zip" else _in_tar(file)


def _in_zip(file: IO[bytes]) -> bytes:
    check_list(file)
    with zipfile.ZipFile(file) as archive:
        inside = next((info for info in archive.infolist() if _is_top(info.filename)), None)
        if inside is None:
            return b""
        with archive.open(inside) as opened:
            return _short(opened)


def _in_tar(file: IO[bytes]) -> bytes:
    size, head = os.fstat(file.fileno()).st_size, file.read(6)
    file.seek(0)
    opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
    plain = _Bounded(opener(file) if opener else file, min(INFLATED, max(_LEAST, RATIO * size)))
    with tarfile.open(fileobj=cast("IO[bytes]", plain), mode="r|", tarinfo=CappedInfo) as tar:
        for _ in range(MEMBERS):
            member = tar.next()
            if member is None:
                return b""
            if member.isreg() and _is_top(member.name):
                opened = tar.extractfile(member)
                return _short(opened) if opened else b""
            cast("Any", tar).members.clear()  # they are kept for going back, and that is not done here
    raise ValueError(f"it has more than {MEMBERS} members")


def _short(file: IO[bytes]) -> bytes:
    data = file.read(TEXT + 1)
    if len(data) > TEXT:
        raise ValueError(f"its {PYPROJECT} has more than {TEXT} bytes")
    return data


def _is_top(name: str) -> bool:
    return name.removeprefix("./").split("/")[1:] == [PYPROJECT]


class _Bounded:
    """A file that is read forwards, up to so many bytes."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._file, self._most, self._left = file, most, most

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {self._most} bytes")
        return data


# --- copying a folder ----------------------------------------------------------------------------


def copy_source(folder: Path, target: Path, most: int) -> str:
    """Copy a package's folder to `target`, which must not be there; return a sha256 of all that it holds.

    A link is copied as a link where it stays inside. `most` are the bytes of all files, as they are read: a
    hole counts. Raises UsageError for a link that leads out, for what is neither file, folder nor link, and
    for more than that.
    """
    rows, links, left = [], dict[str, str](), most
    try:
        target.mkdir()
        for path, state in walk_tree(folder, limits=TREE, skip=is_skipped):
            if stat.S_ISDIR(state.st_mode):
                (target / path).mkdir()
            elif stat.S_ISLNK(state.st_mode):
                links[path] = os.readlink(folder / path)  # noqa: PTH115 - Path would tidy it
                rows.append((path, "link", links[path]))
            elif stat.S_ISREG(state.st_mode):
                digest, size = _copy_file(folder, path, target, left)
                left -= size
                rows.append((path, str(bool(state.st_mode & stat.S_IXUSR)), digest))
            else:
                raise UsageError(
                    f"{printable(str(folder / path))} is not a file, folder or link", hint="remove it"
                )
    except OSError as error:
        raise UsageError(
            f"{printable(str(folder))} cannot be copied: {printable(str(error.filename))}: {error.strerror}",
            hint=f"remove it; files may have {most:,} bytes in all (--limit scratch=...)",
        ) from error
    for path, to in links.items():
        if leads_out(path, links):
            raise UsageError(
                f"the link {printable(str(folder / path))} leads out of the folder, to {printable(to)}",
                hint="replace it by what it leads to, if that may go into the wheel",
            )
        (target / path).symlink_to(to)
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()


def is_skipped(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in SKIPPED)


def _copy_file(folder: Path, path: str, target: Path, most: int) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with open_file(folder, path, most) as fd, (target / path).open("xb") as out:
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
    """Whether the link `path` leads out of the folder that has all `links`, also by way of another of them.

    What is no link is taken for a folder, as Linux resolves names.
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
