"""Read a file once without seeking back: a parser requests bytes or the next mark, and gets them.

A parser is a generator of requests with increasing offsets. The same parser runs over a file, where only
requested parts are read, and over a stream, where other parts are skipped. Only the bytes of the current
request are in memory.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Generator
from typing import NamedTuple

from imagefactory.errors import ToolError, extra_hint

# Bytes per search. The first search is short, since containers mostly follow each other; the longest still
# fits the processor's cache.
_FIRST_WINDOW = 1 << 12
_MAX_WINDOW = 1 << 18

FATBIN = b"\x50\xed\x55\xba\x01\x00\x10\x00"  # magic, version 1, header of 16 bytes
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED_BUNDLE = b"CCOB"
_MARKS = (FATBIN, BUNDLE, COMPRESSED_BUNDLE)
# Four letters occur by chance, so the version and the method after them are compared as well.
_COMPRESSED = re.compile(rb"CCOB[\x01-\x03]\x00[\x00\x01]\x00", re.DOTALL)
_OVERLAP = len(BUNDLE) - 1


class ReadRequest(NamedTuple):
    """A request for `length` bytes from `offset`, or with length 0 for the next mark from there."""

    offset: int
    length: int


class BytesPiece(NamedTuple):
    """The bytes at `offset` (fewer at the end of the file), or the mark there (empty for none)."""

    offset: int
    data: bytes


Walk = Generator[ReadRequest, BytesPiece, None]


class ForwardReader:
    """Runs a parser over bytes with increasing offsets."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._base = 0  # the offset of the first buffered byte
        self._kept = b""
        self._places: dict[bytes, int] = {}  # the next position of each mark in the buffer, its end for none
        self._look = _FIRST_WINDOW
        self._request: ReadRequest | None = next(walk, None)

    @property
    def wants(self) -> ReadRequest | None:
        """Return the next useful bytes (never a length of 0); None when the parser is finished."""
        if self._request is None:
            return None
        offset, length = self._request
        start = max(offset, self._base + len(self._kept))
        return ReadRequest(start, offset + length - start if length else self._look)

    @property
    def searching(self) -> bool:
        """Return whether any number of bytes is accepted, and some may be skipped."""
        return self._request is not None and not self._request.length

    def give(self, offset: int, data: bytes) -> None:
        """Process bytes at the requested offset, or after it while searching."""
        if self._request is None:
            return
        rest = self._kept[max(self._request.offset - self._base, 0) :]
        if not rest or offset != self._base + len(self._kept) or self._ends_nothing(rest, data):
            self._base, self._kept = offset, data
        else:
            self._base, self._kept = offset - len(rest), rest + data
        self._places.clear()
        self._serve(last=False)

    def end(self) -> None:
        """End the bytes. Requests are answered with the available bytes."""
        self._serve(last=True)

    def _ends_nothing(self, rest: bytes, data: bytes) -> bool:
        """Return whether no mark begins in the rest, so that the rest need not be copied."""
        if not self.searching or len(data) < _OVERLAP:
            return False
        return _find_mark(rest + data[:_OVERLAP], 0, {})[0] >= len(rest)

    def _serve(self, *, last: bool) -> None:
        while self._request is not None:
            piece = self._marked_piece(last=last) if self.searching else self._exact_piece(last=last)
            if piece is None:
                return
            try:
                self._request = self._walk.send(piece)
            except StopIteration:
                self._request = None

    def _exact_piece(self, *, last: bool) -> BytesPiece | None:
        assert self._request is not None
        offset, length = self._request
        start = offset - self._base
        data = self._kept[start : start + length]
        return BytesPiece(offset, data) if last or len(data) == length else None

    def _marked_piece(self, *, last: bool) -> BytesPiece | None:
        assert self._request is not None
        start = max(self._request.offset - self._base, 0)
        position, mark = _find_mark(self._kept, start, self._places)
        if mark or last:
            self._look = _FIRST_WINDOW
            return BytesPiece(self._base + position, mark)
        self._look = min(2 * self._look, _MAX_WINDOW)
        # A mark may begin in the last bytes and end in the next ones.
        self._request = ReadRequest(self._base + max(start, len(self._kept) - _OVERLAP), 0)
        return None


def _find_mark(data: bytes, start: int, places: dict[bytes, int]) -> tuple[int, bytes]:
    """Return position and type of the first mark from `start` on; the end of the data and empty for none.

    `places` caches results of earlier calls for the same data, so that many marks cost one search.
    """
    position, first, limit = len(data), b"", len(data)
    for mark in _MARKS:
        offset = places.get(mark, -1)
        if offset < start:
            offset = _find(data, mark, start, limit)
            if offset >= 0 and mark == COMPRESSED_BUNDLE:
                match = _COMPRESSED.search(data, offset, limit)
                offset = match.start() if match else -1
            if offset < 0 and limit < len(data):
                continue
            places[mark] = offset = offset if offset >= 0 else len(data)
        if offset < position:
            position, first, limit = offset, mark, min(limit, offset + _OVERLAP)
    return position, first


def has_mark(data: bytes) -> bool:
    """Return whether a mark may be in the data."""
    return any(_find(data, mark, 0, len(data)) >= 0 for mark in _MARKS)


def _find_by_bytes(data: bytes, mark: bytes, start: int, end: int) -> int:
    return data.find(mark, start, end)


def _find_by_memmem(data: bytes, mark: bytes, start: int, end: int) -> int:
    if start >= end:
        return -1
    # Most searches find nothing, and then no address is needed, which takes longer than a short search.
    if not start and not _memmem_of_bytes(data, end, mark, len(mark)):
        return -1
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    offset = _memmem(address + start, end - start, mark, len(mark))
    return offset - address if offset else -1


# The C library's search is five times as fast as bytes.find, and lets other threads run meanwhile.
try:
    _memmem, _memmem_of_bytes = ctypes.CDLL(None)["memmem"], ctypes.CDLL(None)["memmem"]
    _memmem.restype = _memmem_of_bytes.restype = ctypes.c_void_p
    _memmem.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    _memmem_of_bytes.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    _find = _find_by_memmem
except (AttributeError, OSError, TypeError):  # a C library without it
    _find = _find_by_bytes


# --- The beginning of compressed GPU code: raw blocks of LZ4 and frames of zstd, only as much as requested
# Sources: LZ4 Block Format Description; RFC 8878 (zstd), frames and blocks.


ZSTD_BLOCK = 1 << 17  # no block of zstd is longer, compressed or not
ZSTD_START = ZSTD_BLOCK + 64  # bytes that contain a frame's header and first block


def lz4_start(packed: bytes, most: int) -> bytes:
    """Return the first bytes, at most `most`, of a raw block; fewer if it is truncated or invalid."""
    plain = bytearray()
    offset = 0
    while len(plain) < most and offset < len(packed):
        token = packed[offset]
        count, offset = _length(packed, offset + 1, token >> 4)
        plain += packed[offset : offset + min(count, most - len(plain))]
        offset += count
        back = int.from_bytes(packed[offset : offset + 2], "little")
        if offset + 2 > len(packed) or not 0 < back <= len(plain):
            break
        count, offset = _length(packed, offset + 2, token & 15)
        for _ in range(min(count + 4, most - len(plain))):
            plain.append(plain[-back])
    return bytes(plain)


def _length(packed: bytes, offset: int, count: int) -> tuple[int, int]:
    """Return a length that begins with `count` in the token, and the position after it."""
    if count < 15:
        return count, offset
    while offset < len(packed):
        count, offset = count + packed[offset], offset + 1
        if packed[offset - 1] < 255:
            break
    return count, offset


def zstd_start(packed: bytes, most: int) -> bytes:
    """Return the first bytes, at most `most`, of a frame's first block; empty for an invalid one.

    `packed` are its first `ZSTD_START` bytes or all. The block gets a frame with a window of its size,
    because the original window may need gigabytes. Raises ToolError without zstandard.
    """
    try:
        import zstandard
    except ImportError as error:
        raise ToolError(
            "extra-not-installed",
            "this GPU code is compressed with zstd, and the Python package zstandard is not installed",
            hint=extra_hint("build"),
        ) from error
    if packed[:4] != b"\x28\xb5\x2f\xfd" or len(packed) < 6:
        return b""
    descriptor = packed[4]
    single = descriptor >> 5 & 1
    content = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3] + content
    header = int.from_bytes(packed[start : start + 3], "little")
    length = 1 if header >> 1 & 3 == 1 else header >> 3  # one byte, repeated
    block = (header | 1).to_bytes(3, "little") + packed[start + 3 : start + 3 + length]
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(b"\x28\xb5\x2f\xfd\x00\x38" + block)
        return bytes(reader.read(most))
    except zstandard.ZstdError:
        return b""
