"""One image of the layout as one file that other tools load.

`oci-archive` is an image layout (OCI image-spec, image-layout.md) in a tar: the very blobs, so every
digest stays. `docker-archive` is what `docker save` writes and any `docker load` reads: manifest.json,
the config, and the layers as plain tars named by their diff ids; config and diff ids stay, so Docker
gives it the image id that the config's digest is. Same image, same bytes of the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from imagefactory.errors import StoreError, UsageError
from imagefactory.model import Descriptor, Image, Layer
from imagefactory.oci.layers import BLOCK, CHUNK, END_OF_ARCHIVE, codec
from imagefactory.oci.layout import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    REF_NAME,
    Layout,
    canonical_json,
    parse_descriptor,
)
from imagefactory.progress import Progress

FORMATS = ("oci-archive", "docker-archive")
_RECORD = 10240
"""Tar files end on a multiple of this many bytes."""


def export(layout: Layout, image: Image, out: Path, *, kind: str, progress: Progress) -> None:
    """Write `image` to the file `out` as `kind` (one of FORMATS), beside it first and then renamed.

    The image's name in the store (`pytorch:2.3-cu121`) is what it is called when loaded. Every blob is
    hashed on its way; memory stays at a few MiB. Raises UsageError for another kind, a missing folder
    or a name without a tag, StoreError for a missing or damaged blob and for a full disk.
    """
    writers = {"oci-archive": _oci, "docker-archive": _docker}
    if kind not in writers:
        raise UsageError(f"no archive format '{kind}'", hint=f"the formats are {', '.join(FORMATS)}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._/-]*:[A-Za-z0-9_][A-Za-z0-9_.-]*", image.name):
        raise UsageError(
            f"'{image.name}' is not name:tag", hint="export an image of `imagefactory store list`"
        )
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out.parent} is not a folder", hint="make it, or name another file")
    if out.is_dir():
        raise UsageError(f"{out} is a folder", hint="name a file in it")
    with (
        progress.task(f"write {out.name}", total=image.size) as task,
        _replacing(out) as stream,
    ):
        tar = _Tar(stream)
        for size in writers[kind](layout, image, tar):
            task.advance(size)
        tar.close()


def _oci(layout: Layout, image: Image, tar: _Tar) -> Iterator[int]:
    """Yields the bytes of each layer that is written."""
    root, blobs = _closure(layout, image)
    entry: dict[str, Any] = {
        "mediaType": root.media_type,
        "digest": root.digest,
        "size": root.size,
        "annotations": {REF_NAME: image.name},
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    tar.file("oci-layout", canonical_json({"imageLayoutVersion": "1.0.0"}))
    tar.file("index.json", canonical_json(index))
    tar.folder("blobs")
    tar.folder("blobs/sha256")
    layers = {layer.descriptor.digest for layer in image.layers}
    for descriptor in blobs:
        hexes = descriptor.digest.removeprefix("sha256:")
        found = tar.stream(f"blobs/sha256/{hexes}", _chunks(layout.blob_path(descriptor.digest)))
        if found != descriptor.digest:
            raise _damaged(layout, descriptor.digest)
        if descriptor.digest in layers:
            yield descriptor.size


def _docker(layout: Layout, image: Image, tar: _Tar) -> Iterator[int]:
    """Yields the (compressed) bytes of each layer that is written."""
    config = layout.read(Descriptor(media_type="", digest=image.config, size=0))
    if json.loads(config)["rootfs"]["diff_ids"] != [layer.diff_id for layer in image.layers]:
        raise _damaged(layout, image.config)
    names = [f"{layer.diff_id.removeprefix('sha256:')}/layer.tar" for layer in image.layers]
    config_name = f"{image.config.removeprefix('sha256:')}.json"
    manifest = [{"Config": config_name, "RepoTags": [image.name], "Layers": names}]
    tar.file("manifest.json", canonical_json(manifest))
    tar.file(config_name, config)
    written: set[str] = set()
    for layer, name in zip(image.layers, names, strict=True):
        if name not in written:
            written.add(name)
            tar.folder(name.partition("/")[0])
            if tar.stream(name, _plain(layout, layer)) != layer.diff_id:
                raise _damaged(layout, layer.descriptor.digest)
        yield layer.descriptor.size


def _closure(layout: Layout, image: Image) -> tuple[Descriptor, list[Descriptor]]:
    """The image's own descriptor, and all that it names however deep, itself too, by digest."""
    size = _size(layout, image.digest)
    data = json.loads(layout.read(Descriptor(media_type="", digest=image.digest, size=size)))
    kind = data.get("mediaType", INDEX_TYPE if "manifests" in data else MANIFEST_TYPE)
    root = Descriptor(media_type=kind, digest=image.digest, size=size)
    found: dict[str, Descriptor] = {}
    ahead = [root]
    while ahead:
        descriptor = ahead.pop()
        if descriptor.digest in found:
            continue
        found[descriptor.digest] = descriptor
        if descriptor.media_type in (INDEX_TYPE, MANIFEST_TYPE):
            data = json.loads(layout.read(descriptor))
            named = [*data.get("manifests", ()), *data.get("layers", ())]
            ahead += [parse_descriptor(entry) for entry in (*named, data.get("config")) if entry]
    return root, [found[digest] for digest in sorted(found)]


def _size(layout: Layout, digest: str) -> int:
    try:
        return layout.blob_path(digest).stat().st_size
    except FileNotFoundError:
        raise _missing(layout, digest) from None


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(partial(file.read, CHUNK), b"")


def _plain(layout: Layout, layer: Layer) -> Iterator[bytes]:
    """The layer's tar. A blob that was cut may end early (its diff id tells); garbled: StoreError."""
    kind, path = layer.descriptor.media_type, layout.blob_path(layer.descriptor.digest)
    if kind.endswith(".tar"):
        yield from _chunks(path)
        return
    name = kind.replace(".tar.", "+").rpartition("+")[2]
    try:
        yield from codec(name).decompress(path)
    except Exception as error:  # each codec has errors of its own; gzip's is an OSError without number
        if isinstance(error, StoreError) or (isinstance(error, OSError) and error.errno):
            raise
        raise _damaged(layout, layer.descriptor.digest) from error


class _Tar:
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


@contextmanager
def _replacing(out: Path) -> Iterator[IO[bytes]]:
    """A new file beside `out` that takes its place when all went well."""
    folder = out.absolute().parent
    if out.exists() and not out.is_file():
        raise UsageError(f"{out} is a folder or a device, not a file", hint="name a file to write")
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{out.name}.")
        beside = Path(name)
        try:
            with os.fdopen(handle, "w+b") as stream:
                yield stream
                os.fchmod(handle, 0o644)
            beside.replace(out)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except FileNotFoundError as error:
        raise StoreError(f"{error.filename} is missing", hint=_REBUILD) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreError(
                f"no space left in {folder} for {out.name}", hint="free some space, or name another file"
            ) from error
        raise StoreError(
            f"{error.filename or out}: {error.strerror}", hint="name a file in a folder of yours"
        ) from error


_REBUILD = "build it again: `imagefactory build TARGET` makes what is missing"


def _damaged(layout: Layout, digest: str) -> StoreError:
    return StoreError(f"blob {digest} in {layout.path} is damaged", hint=_REBUILD)


def _missing(layout: Layout, digest: str) -> StoreError:
    return StoreError(f"blob {digest} is missing from {layout.path}", hint=_REBUILD)
