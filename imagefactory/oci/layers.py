"""Layers: the same input gives the same bytes. Tar entries without clocks or owners, and the codecs.

A layer is a sequence of *segments*. Each is a complete compressed frame (zstd) or member (gzip) with some
tar entries, and the last one has the end of the archive. Frames and members may be joined, so a segment is
compressed once and copied into every layer that needs it.

A gzip member has a raw DEFLATE stream, and so has a file in a zip. Such a stream is *spliced*: it becomes
its own member unchanged, between the members with the tar headers before and after it. The tar, and so the
diff_id, is the same for every codec.
"""

from __future__ import annotations

import hashlib
import struct
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from imagefactory.errors import StoreError, UsageError
from imagefactory.oci.tree import LayerTree, unpackable_parts

BLOCK = 512
CHUNK = 1 << 20
PIECE = 128 * 1024
END_OF_ARCHIVE = bytes(2 * BLOCK)
# The header of a member (RFC 1952): DEFLATE, no flags, no time, unknown system.
GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
# Measured on PyTorch's 27 wheels: from 4 KiB there are 1,690 more members, from 64 KiB 98, and the size
# differs by 0.1 %, the time not at all.
SPLICE = 64 * 1024


class Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


class Decompressor(Protocol):
    def __call__(self, path: Path, /) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCodec:
    """A way to compress layers.

    `identity` is the library, version and level, which determine the bytes together with the input.
    `decompress` reads a file of one or more frames in chunks of about 1 MiB. `splice` is the smallest
    DEFLATE stream in bytes that is used unchanged, 0 if the codec can use none.
    """

    name: str
    media_type: str
    identity: str
    compressor: Callable[[], Compressor]
    decompress: Decompressor
    splice: int = 0


# Measured on CUDA libraries, level 1 is the last one faster than isal inflates (690 MB/s a core against 570).
# It leaves 52 % of the bytes where level -1 leaves 65 %.
ZSTD_LEVEL = 1


def codec(name: str) -> LayerCodec:
    """Return a codec of CODECS by its name. Raises UsageError for another name."""
    if name not in CODECS:
        raise UsageError(
            "option-invalid", f"unknown layer codec '{name}'", hint=f"supported codecs: {', '.join(CODECS)}"
        )
    return CODECS[name]()


def _zstd(level: int) -> LayerCodec:
    import zstandard

    def read(path: Path) -> Iterator[bytes]:
        # Its reads limit its output. A truncated file ends early: readers compare its digest.
        decompressor = zstandard.ZstdDecompressor()
        try:
            with path.open("rb") as file, decompressor.stream_reader(file, read_across_frames=True) as plain:
                yield from iter(partial(plain.read, CHUNK), b"")
        except zstandard.ZstdError as error:
            raise _damaged(path, str(error)) from error

    version = ".".join(str(part) for part in zstandard.ZSTD_VERSION)
    return LayerCodec(
        name="zstd" if level == ZSTD_LEVEL else f"zstd-{level}",
        media_type="application/vnd.oci.image.layer.v1.tar+zstd",
        identity=f"libzstd {version} level {level}",
        compressor=lambda: zstandard.ZstdCompressor(level=level).compressobj(),
        decompress=read,
    )


def _gzip() -> LayerCodec:
    import isal
    from isal import igzip, isal_zlib

    level = 1

    def read(path: Path) -> Iterator[bytes]:
        try:
            with igzip.open(path, "rb") as file:  # type: ignore[no-untyped-call]
                yield from iter(partial(file.read, CHUNK), b"")
        except (OSError, EOFError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # a disk error, not corrupt data
            raise _damaged(path, str(error)) from error

    def compressor() -> Compressor:
        # wbits 31: a gzip member; its header has no name and, in this call, no time.
        return _FixedChunks(isal_zlib.compressobj(level, isal_zlib.DEFLATED, 31))

    return LayerCodec(
        name="gzip",
        media_type="application/vnd.oci.image.layer.v1.tar+gzip",
        identity=f"isa-l {isal.ISAL_VERSION} level {level}, DEFLATE of {SPLICE} bytes or more as it came",
        compressor=compressor,
        decompress=read,
        splice=SPLICE,
    )


def _damaged(path: Path, reason: str) -> StoreError:
    return StoreError(
        "store-corrupt",
        f"{path} is corrupt: {reason}",
        hint=f"delete it (rm {path}) and run imagefactory build TARGET",
    )


class _FixedChunks:
    """A sink that passes on pieces of one size, because isa-l's output depends on the size."""

    def __init__(self, inner: Compressor) -> None:
        self._inner = inner
        self._waiting = bytearray()

    def compress(self, data: bytes, /) -> bytes:
        self._waiting += data
        whole = len(self._waiting) - len(self._waiting) % PIECE
        ready = bytes(self._waiting[:whole])
        del self._waiting[:whole]
        return b"".join(
            self._inner.compress(ready[offset : offset + PIECE]) for offset in range(0, whole, PIECE)
        )

    def flush(self) -> bytes:
        return self._inner.compress(bytes(self._waiting)) + self._inner.flush()


# On CUDA libraries level 9 leaves 20 % less than level 1, at 27 MB/s a core. Level 12 or a window of 128 MiB
# gain 3 % more at most.
CODECS: dict[str, Callable[[], LayerCodec]] = {
    "zstd": partial(_zstd, ZSTD_LEVEL),
    "zstd-9": partial(_zstd, 9),
    "gzip": _gzip,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeflateStream:
    """A file's raw DEFLATE stream of `size` bytes, read by `chunks`. `crc` is for the uncompressed bytes."""

    size: int
    crc: int
    chunks: Callable[[], Iterator[bytes]]


class ByteSink(Protocol):
    def write(self, data: bytes, /) -> object: ...


class TarSegment:
    """A segment of tar entries, compressed into a sink. Counts and hashes the plain bytes.

    `folders` and `files` are the paths so far. No path may be twice in a layer, because docker's image store
    rejects such a layer ("duplicates of file paths"). So a segment that shares its layer is `bare`: it has
    no entries for directories, which are in the layer's first segment. And it omits the files of `skip`,
    which another segment has. A path that cannot be unpacked is a BuildError. `tree` gets all entries as
    files, in the same pass.
    """

    def __init__(
        self,
        codec: LayerCodec,
        sink: ByteSink,
        plain: hashlib._Hash,
        *,
        epoch: int,
        bare: bool = False,
        skip: Collection[str] = (),
        tree: LayerTree | None = None,
    ) -> None:
        self._codec, self._compressor = codec, codec.compressor()
        self._sink, self._plain, self._epoch = sink, plain, epoch
        self._bare, self._skip, self._tree = bare, skip, tree
        self.folders: set[str] = set()
        self.files: list[str] = []

    def _put(self, data: bytes) -> None:
        self._plain.update(data)
        packed = self._compressor.compress(data)
        if packed:
            self._sink.write(packed)

    def _header(
        self, path: str, kind: bytes, *, mode: int, size: int = 0, link: str = ""
    ) -> tuple[tuple[str, ...], tarfile.TarInfo]:
        parts = unpackable_parts(path)
        info = tarfile.TarInfo(path)
        info.type, info.mode, info.size, info.linkname = kind, mode, size, link
        info.mtime = self._epoch
        self._put(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        return parts, info

    def folder(self, path: str, mode: int = 0o755) -> None:
        """Add the directory `path` (relative, no outer slashes) with `mode`, and its parents, once each."""
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            above = "/".join(parts[:depth])
            if above and above not in self.folders:
                self.folders.add(above)
                if not self._bare:
                    entry = self._header(above, tarfile.DIRTYPE, mode=mode if above == path else 0o755)
                    if self._tree:
                        self._tree.folder(*entry)

    def known(self, *directories: str) -> None:
        """Register directories of lower layers. They get no entry, which would change their mode."""
        self.folders.update(directories)

    def _parent(self, path: str) -> None:
        self.folder(path.rpartition("/")[0])

    def link(self, path: str, target: str) -> None:
        self._parent(path)
        entry = self._header(path, tarfile.SYMTYPE, mode=0o777, link=target)
        if self._tree:
            self._tree.symlink(*entry)

    def file(
        self,
        path: str,
        chunks: Iterator[bytes] | list[bytes],
        *,
        size: int,
        executable: bool,
        deflated: DeflateStream | None = None,
    ) -> None:
        """Add a file of exactly `size` bytes. Raises StoreError if the chunks have another number.

        `deflated` is its DEFLATE stream, if any. `chunks` must have checked that stream when they end.
        """
        if path in self._skip:
            for _ in chunks:  # the caller relies on a full read
                pass
            return
        self._parent(path)
        self.files.append(path)
        entry = self._header(path, tarfile.REGTYPE, mode=0o755 if executable else 0o644, size=size)
        spliced = deflated if deflated and 0 < self._codec.splice <= deflated.size else None
        put, rest = self._plain.update if spliced else self._put, size
        for chunk in self._tree.passing(*entry, chunks) if self._tree else chunks:
            rest -= len(chunk)
            put(chunk)
        if rest:
            raise StoreError(
                "file-size-mismatch",
                f"{path}: expected {size} bytes, found {size - rest}",
                hint="build again, and do not change files meanwhile",
            )
        if spliced:
            self._splice(spliced, size)
        if size % BLOCK:
            self._put(bytes(BLOCK - size % BLOCK))

    def _splice(self, deflated: DeflateStream, size: int) -> None:
        self._sink.write(self._compressor.flush() + GZIP_HEADER)
        for chunk in deflated.chunks():
            self._sink.write(chunk)
        self._sink.write(struct.pack("<2I", deflated.crc, size % (1 << 32)))
        self._compressor = self._codec.compressor()

    def raw(self, data: bytes) -> None:
        """Add complete tar bytes."""
        self._put(data)

    def close(self) -> None:
        self._sink.write(self._compressor.flush())
