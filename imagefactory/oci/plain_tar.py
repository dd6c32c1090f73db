"""A tar without clocks or owners, and the blobs and layers of an image as the bytes that go into it."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from imagefactory.errors import StoreError
from imagefactory.oci.inflate import DamagedError, plain_layer
from imagefactory.oci.layers import BLOCK, CHUNK, END_OF_ARCHIVE
from imagefactory.oci.layout import REBUILD, Layout
from imagefactory.oci.model import Layer

_RECORD = 10240


def file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(partial(file.read, CHUNK), b"")


def layer_tar(layout: Layout, layer: Layer) -> Iterator[bytes]:
    """The layer's tar. A blob that was cut may end early (its diff id tells); garbled: StoreError."""
    path = layout.blob_path(layer.descriptor.digest)
    try:
        yield from plain_layer(layer.descriptor.media_type, file_chunks(path))
    except DamagedError as error:
        raise layout.damaged(layer.descriptor.digest) from error


class PlainTar:
    """A tar without clocks or owners, written in one pass to a file that can seek."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def folder(self, name: str) -> None:
        self._header(name, 0, kind=tarfile.DIRTYPE)

    def file(self, name: str, data: bytes) -> None:
        self.stream(name, [data])

    def stream(self, name: str, chunks: Iterable[bytes]) -> str:
        """A file whose size is known at its end; gives the digest of what went in."""
        start = self._stream.tell()
        self._header(name, 0)
        digest, size = hashlib.sha256(), 0
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            self._stream.write(chunk)
        self._stream.write(bytes(-size % BLOCK))
        self._stream.seek(start)
        self._header(name, size)
        self._stream.seek(0, os.SEEK_END)
        return f"sha256:{digest.hexdigest()}"

    def close(self) -> None:
        self._stream.write(END_OF_ARCHIVE)
        self._stream.write(bytes(-self._stream.tell() % _RECORD))

    def _header(self, name: str, size: int, *, kind: bytes = tarfile.REGTYPE) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, size
        info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
        # GNU's format: one block whatever the size, so that it can be written over.
        self._stream.write(info.tobuf(tarfile.GNU_FORMAT))


def missing_blob(layout: Layout, digest: str) -> StoreError:
    return StoreError("blob-missing", f"blob {digest} is missing from {layout.path}", hint=REBUILD)


def tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)
