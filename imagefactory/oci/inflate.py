"""Decompression of streams in bounded memory, without seeking, for scans and other readers.

isal is used if installed, else the standard library. zstd needs zstandard. All of them release the
interpreter's lock.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, Any, cast

from imagefactory.errors import StoreError, ToolError, extra_hint
from imagefactory.oci.manifests import LAYER_CODECS

PIECE = 1 << 18
_WINDOW = 128 << 20  # bytes; zstd's own limit without the option --long
_GZIP_MEMBER = b"\x1f\x8b"
_ZSTD_FRAME = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"  # after a first byte of 50 to 5f: a possible start of zstd:chunked
RAW, GZIP = -zlib.MAX_WBITS, zlib.MAX_WBITS | 16


class CorruptDataError(Exception):
    """Compressed bytes that are truncated or invalid."""


def inflate(chunks: Iterable[bytes], wbits: int = RAW) -> Iterator[bytes]:
    """Yield inflated bytes in pieces of at most 256 KiB; with `GZIP`, of all members in the stream.

    Raises CorruptDataError, also for bytes after the end of a raw stream.
    """
    maker, faults = inflater()
    stream, begun = maker(wbits), False
    coming = iter(chunks)
    for chunk in coming:
        data = chunk
        while True:
            if not begun and wbits == GZIP:
                data = data.lstrip(b"\0")  # padding, which gzip itself allows after the last member
            if not data:
                break
            begun = True
            try:
                piece = stream.decompress(data, PIECE)
            except faults as error:
                raise CorruptDataError(str(error)) from error
            if piece:
                yield piece
            data = stream.unconsumed_tail
            if stream.eof:
                if wbits == RAW:
                    _check_no_rest(stream.unused_data or any(coming))
                    return
                data = stream.unused_data
                stream, begun = maker(wbits), False
    while begun or wbits == RAW:  # input that is not yet in the output
        try:
            piece = stream.decompress(b"", PIECE)
        except faults as error:
            raise CorruptDataError(str(error)) from error
        if piece:
            yield piece
        if stream.eof:
            _check_no_rest(wbits == RAW and stream.unused_data)
            return
        if not piece:
            raise CorruptDataError("the compressed data is truncated")


def _check_no_rest(behind: object) -> None:
    if behind:
        raise CorruptDataError("more data follows the end of the compressed data")


def inflater() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return the class of decompressors, and its errors for corrupt data."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.decompressobj, (zlib.error,)
    faults: Any = (isal_zlib.error, zlib.error)
    return isal_zlib.decompressobj, faults


def plain_layer(media_type: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the tar of a layer, in pieces of at most 256 KiB or unchanged.

    A truncated zstd stream silently ends early, so callers compare sizes or digests. Raises CorruptDataError,
    StoreError for a type that no layer has, ToolError if zstandard is missing.
    """
    if media_type not in LAYER_CODECS:
        raise StoreError(
            "layer-type-unsupported",
            f"unsupported layer type '{media_type}'",
            hint=f"supported types: {', '.join(sorted(LAYER_CODECS))}",
        )
    return unpacked(chunks)


def unpacked(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the plain bytes of gzip or zstd, detected by the first bytes. Others are unchanged."""
    first = b""
    for chunk in chunks:
        first += chunk
        if len(first) >= len(_ZSTD_FRAME):
            break
    rest = chain((first,) if first else (), chunks)
    if first.startswith(_GZIP_MEMBER):
        yield from inflate(rest, GZIP)
    elif first.startswith(_ZSTD_FRAME) or first[1:4] == _SKIPPABLE:
        yield from unzstd(rest)
    else:
        yield from rest


def unzstd(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the plain bytes of zstd frames, in pieces of at most 256 KiB; a truncated stream ends early."""
    try:
        import zstandard
    except ImportError as error:
        raise ToolError(
            "extra-not-installed",
            "this layer is compressed with zstd, and the Python package zstandard is not installed",
            hint=extra_hint("build"),
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    source = _ChunkReader(chunks)
    with decompressor.stream_reader(cast("IO[bytes]", source), read_across_frames=True) as reader:
        try:
            while piece := reader.read(PIECE):
                yield piece
        except zstandard.ZstdError as error:
            raise CorruptDataError(str(error)) from error


class _ChunkReader:
    """Chunks as a file, read forward only."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        count = len(self._left) if size < 0 else size
        piece, self._left = self._left[:count], self._left[count:]
        return bytes(piece)
