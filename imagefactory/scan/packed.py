"""The beginning of packed GPU code: raw blocks of LZ4 and frames of zstd, never more than is asked for.

Sources: LZ4 Block Format Description; RFC 8878 (zstd), frames and blocks.
"""

from __future__ import annotations

from imagefactory.errors import ToolError, extra_hint

ZSTD_BLOCK = 1 << 17  # no block of zstd is longer, packed or not
ZSTD_START = ZSTD_BLOCK + 64  # bytes in which a frame's header and first block lie


def lz4_start(packed: bytes, most: int) -> bytes:
    """The first bytes, `most` at most, of a raw block; fewer where it is cut or is none."""
    plain = bytearray()
    at = 0
    while len(plain) < most and at < len(packed):
        token = packed[at]
        count, at = _length(packed, at + 1, token >> 4)
        plain += packed[at : at + min(count, most - len(plain))]
        at += count
        back = int.from_bytes(packed[at : at + 2], "little")
        if at + 2 > len(packed) or not 0 < back <= len(plain):
            break
        count, at = _length(packed, at + 2, token & 15)
        for _ in range(min(count + 4, most - len(plain))):
            plain.append(plain[-back])
    return bytes(plain)


def _length(packed: bytes, at: int, count: int) -> tuple[int, int]:
    """A length of which `count` stood in the token, and where what follows it begins."""
    if count < 15:
        return count, at
    while at < len(packed):
        count, at = count + packed[at], at + 1
        if packed[at - 1] < 255:
            break
    return count, at


def zstd_start(packed: bytes, most: int) -> bytes:
    """The first bytes, `most` at most, of a frame's first block, empty where it is none.

    `packed` are its first `ZSTD_START` bytes or all. The block is put into a frame of its own with a window
    of its size: the real one may ask for gigabytes. Raises ToolError without zstandard.
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
