"""What a conda package installs for GPUs: `.conda` (a zip with a tar in zstd) and the older `.tar.bz2`.

Paths are as below the environment's prefix.
"""

from __future__ import annotations

import bz2
from collections.abc import Iterator
from pathlib import Path

from imagefactory.oci.inflate import PIECE, DamagedError, plain_layer
from imagefactory.oci.tar_stream import FILE, TarStream, entries
from imagefactory.progress import QUIET, Progress, Task
from imagefactory.scan.findings import FileFinding, read_name
from imagefactory.scan.layers import scan_layer
from imagefactory.scan.look import CHUNK, readable
from imagefactory.scan.zip import PLAIN, damaged, member_bytes, members_of

_RECORD = 16 << 20  # bytes of a package's own record
_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"


def find_in_conda(path: Path, progress: Progress) -> tuple[FileFinding, ...]:
    """Raises UsageError for a package that is damaged, ToolError where zstandard is missing."""
    with readable(path), progress.task(f"scan {path.name}", total=path.stat().st_size) as task:
        try:
            found = scan_layer(_bounded(_tar(path, task))).found
        except DamagedError as error:
            raise damaged(path, str(error)) from error
    record = read_name(f"conda-meta/{path.name.removesuffix('.conda').removesuffix('.tar.bz2')}.json")
    # `info/` is about the package and is not installed.
    return (*((record,) if record else ()), *(one for one in found if not one.path.startswith("info/")))


def read_index(path: Path) -> bytes:
    """The package's own record, `info/index.json`. Raises as `find_in_conda`."""
    with readable(path), QUIET.task(path.name) as task:
        try:
            stream = TarStream(_bounded(_tar(path, task, part="info")))
            for entry in entries(stream):
                if entry.path == "info/index.json" and entry.kind == FILE:
                    if entry.size > _RECORD:
                        raise DamagedError(f"its info/index.json has {entry.size} bytes")
                    return entry.read(entry.size)
            raise DamagedError("it has no info/index.json")
        except DamagedError as error:
            raise damaged(path, str(error)) from error


def _tar(path: Path, task: Task, part: str = "pkg") -> Iterator[bytes]:
    if path.suffix == ".bz2":
        return _bunzip(_counted(_chunks(path), task))
    members = [one for one in members_of(path) if one.filename.startswith(f"{part}-")]
    if len(members) != 1 or not members[0].filename.endswith(".tar.zst"):
        raise DamagedError(f"it has no {part}-*.tar.zst")
    return plain_layer(_ZSTD, _counted(member_bytes(path, members[0]), task))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            yield data


def _counted(chunks: Iterator[bytes], task: Task) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        task.advance(len(chunk))


def _bounded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    left = PLAIN
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise DamagedError(f"it unpacks to more than {PLAIN} bytes")
        yield chunk


def _bunzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Streams that follow one another, in pieces of at most 256 KiB."""
    stream, begun = bz2.BZ2Decompressor(), False
    for chunk in chunks:
        data = chunk
        while data or (begun and not stream.needs_input):
            try:
                piece = stream.decompress(data, PIECE)
            except OSError as error:
                raise DamagedError(str(error)) from error
            begun, data = True, b""
            if piece:
                yield piece
            if stream.eof:
                data = stream.unused_data
                stream, begun = bz2.BZ2Decompressor(), False
    if begun:
        raise DamagedError("it ends in the middle of the data")
