"""One image of the layout as one file that other tools load, and what docker's daemon loads and saves.

`oci-archive` is an image layout (OCI image-spec, image-layout.md) in a tar: the very blobs, so every
digest stays. `docker-archive` is what `docker save` writes and any `docker load` reads: manifest.json,
the config, and the layers as plain tars named by their diff ids; config and diff ids stay, so Docker
gives it the image id that the config's digest is. Same image, same bytes of the file.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from imagefactory.errors import StoreError, UsageError
from imagefactory.oci.layers import BLOCK, CHUNK, END_OF_ARCHIVE, Codec, codec
from imagefactory.oci.layout import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    REF_NAME,
    BlobWriter,
    Layout,
    canonical_json,
    explain_full_disk,
    parse_descriptor,
)
from imagefactory.oci.model import Descriptor, Image, Layer
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


def check_output(out: Path) -> None:
    """Raises UsageError unless `out` can be replaced: a name in /dev, even a link there, must not be."""
    if out.absolute().is_relative_to("/dev") or out.absolute().is_relative_to("/proc"):
        raise UsageError(
            f"{out} is a device or the system's, no place for a file", hint="name a file in a folder of yours"
        )
    if out.exists() and not out.is_file():
        raise UsageError(f"{out} is a folder or a device, not a file", hint="name a file to write")


@contextmanager
def _replacing(out: Path) -> Iterator[IO[bytes]]:
    """A new file beside `out` that takes its place when all went well."""
    folder = out.absolute().parent
    check_output(out)
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


# --- what docker loads and saves, as streams -------------------------------------------------------


def stream_docker(layout: Layout, image: Image, name: str) -> Iterator[bytes]:
    """`image` as docker's daemon loads it, called `name`: a docker-archive whose layers stay compressed.

    Every size is known beforehand, so nothing is written down on the way. The daemon inflates (gzip,
    zstd), and refuses a layer that is not what the config says. Raises StoreError for a blob that is
    missing or cut, in the middle of the stream.
    """
    config = layout.read(Descriptor(media_type="", digest=image.config, size=0))
    blobs = {layer.descriptor.digest: layer.descriptor for layer in image.layers}
    names = {digest: f"{digest.removeprefix('sha256:')}.layer" for digest in blobs}
    entry = {
        "Config": f"{image.config.removeprefix('sha256:')}.json",
        "RepoTags": [name],
        "Layers": [names[layer.descriptor.digest] for layer in image.layers],
    }
    for file, data in ((entry["Config"], config), ("manifest.json", canonical_json([entry]))):
        yield _header(str(file), len(data)) + data + bytes(-len(data) % BLOCK)
    for digest, descriptor in blobs.items():
        yield _header(names[digest], descriptor.size)
        left = descriptor.size
        try:
            for chunk in _chunks(layout.blob_path(digest)):
                left -= len(chunk)
                yield chunk
        except FileNotFoundError:
            raise _missing(layout, digest) from None
        if left:
            raise _damaged(layout, digest)
        yield bytes(-descriptor.size % BLOCK)
    yield END_OF_ARCHIVE


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """How a saved image comes into the layout.

    `codec` compresses new layers; `known` gives the layers that the store has, by diff id, whose bytes
    are then not touched; `report` hears of the plain bytes as they come.
    """

    codec: Codec
    known: Mapping[str, Layer]
    report: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A saved image whose blobs are in the layout: the config's own bytes, and its layers in order."""

    config: bytes
    layers: tuple[Layer, ...]


def take_docker(layout: Layout, stream: IO[bytes], taking: Taking) -> Taken:
    """Reads what `docker save` writes (also docker 25's, which is an image layout too), in one pass.

    Layers may come compressed and in any order; each is hashed and must be what the config says. Raises
    StoreError for a stream that ends early or is not an image. Nothing names what was written.
    """
    small: dict[str, bytes] = {}
    links: dict[str, str] = {}
    made: dict[str, Layer] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK) as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.issym() or member.islnk():
                    above = name.rpartition("/")[0] if member.issym() else ""
                    links[name] = posixpath.normpath(posixpath.join(above, member.linkname))
                elif member.isfile():
                    file = tar.extractfile(member)
                    assert file is not None
                    if member.size <= _SMALL:
                        small[name] = file.read()
                    elif _named(name) in taking.known:
                        taking.report(member.size)  # docker 25 names a blob by its digest: skip the bytes
                    else:
                        made[name] = _take_layer(layout, file, taking)
        return _put_together(layout, taking, _Saved(small=small, links=links, made=made))
    except _NO_IMAGE as error:
        why = f"{type(error).__name__}: {error}"
        raise StoreError(f"what docker saved is not a whole image: {why}", hint="build it again") from error


_NO_IMAGE = (tarfile.TarError, zlib.error, EOFError, KeyError, IndexError, TypeError, ValueError)
_SMALL = 1 << 20
"""Bytes up to which a file of the stream is kept until it is known what it is; configs are far smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    small: Mapping[str, bytes]
    links: Mapping[str, str]
    made: Mapping[str, Layer]


def _named(name: str) -> str:
    return f"sha256:{name.rpartition('/')[2]}"


def _put_together(layout: Layout, taking: Taking, saved: _Saved) -> Taken:
    (entry,) = json.loads(saved.small["manifest.json"])
    config = saved.small[entry["Config"]]
    diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    layers = []
    for name, diff_id in zip(entry["Layers"], diff_ids, strict=True):
        file = saved.links.get(name, name)
        if diff_id in taking.known:
            layers.append(taking.known[diff_id])
            continue
        layer = saved.made.get(file) or _take_layer(layout, io.BytesIO(saved.small[file]), taking)
        if layer.diff_id != diff_id:
            raise StoreError(f"docker saved a layer {layer.diff_id} where its config says {diff_id}")
        layers.append(layer)
    return Taken(config=config, layers=tuple(layers))


def _take_layer(layout: Layout, file: IO[bytes], taking: Taking) -> Layer:
    plain = hashlib.sha256()
    with explain_full_disk(layout.path), BlobWriter(layout) as blob:
        compressor = taking.codec.compressor()
        for data in _inflated(file):
            plain.update(data)
            taking.report(len(data))
            blob.write(compressor.compress(data))
        blob.write(compressor.flush())
        descriptor = blob.commit(taking.codec.media_type)
    return Layer(descriptor=descriptor, diff_id=f"sha256:{plain.hexdigest()}", title="")


def _inflated(file: IO[bytes]) -> Iterator[bytes]:
    """The plain tar: daemons that keep images in containerd save their layers as they hold them."""
    first = file.read(CHUNK)
    rest = chain([first], iter(partial(file.read, CHUNK), b""))
    if first.startswith(b"\x1f\x8b"):
        yield from _members(rest, lambda: zlib.decompressobj(31))
    elif first.startswith(b"\x28\xb5\x2f\xfd"):
        import zstandard

        try:
            yield from _members(rest, lambda: zstandard.ZstdDecompressor().decompressobj())
        except zstandard.ZstdError as error:
            raise ValueError(f"a layer is no zstd: {error}") from error
    else:
        yield from rest


def _members(chunks: Iterator[bytes], begin: Callable[[], Any]) -> Iterator[bytes]:
    """Inflates gzip members or zstd frames, as many as follow each other."""
    inflater, fed = begin(), False
    for chunk in chunks:
        data = chunk
        while data:
            yield inflater.decompress(data)
            fed = not inflater.eof
            data = inflater.unused_data if inflater.eof else b""
            if inflater.eof:
                inflater = begin()
    if fed:
        raise EOFError("a layer ends in the middle")
