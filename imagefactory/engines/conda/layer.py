"""One linked conda package becomes tar entries: its files as they lie in the staging prefix.

conda_install.py has linked all packages and settled who owns what; a package's record in conda-meta lists
its files. Their bytes are checked against that list while they are read, so what was unpacked earlier and
has changed since is not believed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagefactory.build.conda.prefix import Change
from imagefactory.build.wheel_layer import TEXT, AlteredError, Compiler, LaidFile, Prefix
from imagefactory.errors import BuildError
from imagefactory.oci.layers import Segment
from imagefactory.build.conda_install import source_of
from imagefactory.trees import open_file, read_chunks, read_file

RECORD = 1 << 28  # bytes; a package of 100,000 files has a tenth of that


@dataclass(frozen=True, slots=True, kw_only=True)
class CondaRecord:
    """What a package's record says: `rows` are those of paths_data, `data` the record itself."""

    name: str
    path: Path
    data: bytes
    rows: tuple[dict[str, Any], ...]

    def sources(self, place: Prefix) -> tuple[str, ...]:
        """The paths whose byte code belongs into an image."""
        return tuple(row["_path"] for row in self.rows if is_source(row["_path"], place))


def read_record(path: Path) -> CondaRecord:
    """Raises BuildError for a record that is missing or none."""
    try:
        data = read_file(path.parent, path.name, RECORD)
        told = json.loads(data)
        return CondaRecord(name=told["name"], path=path, data=data, rows=tuple(told["paths_data"]["paths"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(
            "conda-record-invalid", f"{path.name} is not a valid conda record: {error}"
        ) from error


def is_source(path: str, place: Prefix) -> bool:
    """Whether byte code is made of a package's file: Python's, outside of folders called `tests`."""
    parts = path.split("/")
    return parts[:2] == ["lib", f"python{place.python}"] and path.endswith(".py") and "tests" not in parts


def lay_package(
    record: Path, place: Prefix, segment: Segment, compiler: Compiler, *, report: Callable[[int], None]
) -> tuple[LaidFile, ...]:
    """Writes a linked package below `place` into `segment`, its .pyc files last; gives the files laid.

    `record` is its file in the prefix's conda-meta. `report` hears of the bytes read. Raises AlteredError.
    """
    package, root = read_record(record), record.parents[1]
    top = place.prefix.lstrip("/")
    laid = []
    for row in package.rows:
        path, source = f"{top}/{row['_path']}", root / row["_path"]
        content = lay_path(source, path, segment, expected=_expected(row), owner=record.name, report=report)
        if content:
            laid.append(LaidFile(path=path, content=content))
    path = f"{top}/conda-meta/{record.name}"
    segment.file(path, [package.data], size=len(package.data), executable=False)
    laid.append(LaidFile(path=path, content=_content(hashlib.sha256(package.data).digest())))
    for inside in package.sources(place):
        _compile(root, inside, place, segment, compiler)
    return tuple(laid)


def _compile(root: Path, inside: str, place: Prefix, segment: Segment, compiler: Compiler) -> None:
    """Writes the byte code of one source, which no link may be."""
    top, source = place.prefix.lstrip("/"), root / inside
    if source.is_symlink():
        return
    try:
        data = read_file(source.parent, source.name, TEXT)
    except OSError as error:
        raise BuildError(
            "bytecode-failed", f"/{top}/{inside} cannot be compiled: {error.strerror}"
        ) from error
    pyc = compiler.compile(f"/{top}/{inside}", data)
    if pyc is not None:
        folder, _, name = inside.rpartition("/")
        tag = "cpython-" + place.python.replace(".", "")
        cached = f"{top}/{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
        segment.file(cached, [pyc], size=len(pyc), executable=False)


def _expected(row: dict[str, Any]) -> str:
    return str(row.get("sha256_in_prefix") or row.get("sha256") or "")


def lay_path(
    source: Path,
    path: str,
    segment: Segment,
    *,
    expected: str = "",
    owner: str = "",
    report: Callable[[int], None] = lambda _: None,
) -> str:
    """Writes what lies at `source` as `path`; gives its content for conflicts, empty for a folder."""
    try:
        state = source.lstat()
    except OSError as error:
        raise _altered(owner, f"{path} is missing") from error
    if stat.S_ISLNK(state.st_mode):
        target = str(source.readlink())
        segment.link(path, target)
        return f"link={target}"
    if stat.S_ISDIR(state.st_mode):
        segment.folder(path)
        return ""
    if not stat.S_ISREG(state.st_mode):
        raise BuildError("file-type-unsupported", f"/{path} is not a file, link or directory")
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        with open_file(source.parent, source.name, state.st_size) as fd:
            for data in read_chunks(fd, path, state.st_size):
                digest.update(data)
                report(len(data))
                yield data

    segment.file(path, chunks(), size=state.st_size, executable=bool(state.st_mode & stat.S_IXUSR))
    if expected and digest.hexdigest() != expected:
        raise _altered(owner, f"{path} has sha256 {digest.hexdigest()}, its package says {expected}")
    return _content(digest.digest())


def _altered(owner: str, what: str) -> AlteredError:
    error = AlteredError(
        "package-altered",
        f"{owner.removesuffix('.json')}: /{what}",
        hint="constrain the package in the recipe to another version or build",
    )
    error.name = owner
    return error


def _content(digest: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def lay_changes(
    prefix: Path, changes: Sequence[Change], place: Prefix, segment: Segment, compiler: Compiler
) -> tuple[LaidFile, ...]:
    """Writes what post-link scripts changed; what they removed as OCI's whiteouts.

    Byte code of sources that they changed is made anew, since that of the packages' layers is believed
    unchecked; what they made themselves of sources that are there is left out.
    """
    top, laid = place.prefix.lstrip("/"), []
    for change in changes:
        source = source_of(change.path)
        if source and (prefix / source).is_file():
            continue
        path = f"{top}/{change.path}"
        if change.removed:
            folder, _, name = path.rpartition("/")
            segment.file(f"{folder}/.wh.{name}", [], size=0, executable=False)
            laid.append(LaidFile(path=path, content="removed"))  # nor may a wheel's file go with it
            continue
        content = lay_path(prefix / change.path, path, segment)
        if content:
            laid.append(LaidFile(path=path, content=content))
    for change in changes:
        if not change.removed and is_source(change.path, place) and (prefix / change.path).is_file():
            _compile(prefix, change.path, place, segment, compiler)
    return tuple(laid)
