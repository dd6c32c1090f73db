"""ELF files, as far as a search for GPU code needs them: what to pass over, and what a cubin is for.

In doubt nothing is passed over: a file whose tables are cut off, too long or at odds with themselves is
searched whole.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from imagefactory.gpu.capability import Capability, Code, CodeKind

HEADER_SIZE = 64
MACHINE_CUDA = 190

_MAX_SECTIONS = 4096
_WORTH_PASSING = 1 << 16
_NOBITS = 8
# Symbols, strings, relocations, hashes, the dynamic table, symbol versions: tables that linkers write.
_TABLES = frozenset({2, 3, 4, 5, 6, 9, 11, 0x6FFFFFF6, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF})
_EXECUTABLE = 0x4

Read = Callable[[int, int], bytes]


def is_cubin(head: bytes) -> bool:
    return (
        len(head) >= HEADER_SIZE
        and head[:6] == b"\x7fELF\x02\x01"
        and struct.unpack_from("<H", head, 18)[0] == MACHINE_CUDA
    )


def parse_cubin_target(head: bytes) -> Code | None:
    """What a cubin was compiled for, by its first bytes; None where its flags make no sense.

    In `e_flags` the lowest byte holds the number and 0x800 stands for the suffix `a`; from version 8 of the
    ABI (sm_100 in CUDA 12, all of CUDA 13) the second byte and 0x8. CUDA 13 tells the suffix only by the
    options of ptxas in `.note.nv.tkinfo` (measured with ptxas 12.1 to 13.5).
    """
    flags = struct.unpack_from("<I", head, 48)[0]
    number, narrow = (flags >> 8 & 0xFF, flags & 0x8) if head[8] >= 8 else (flags & 0xFF, flags & 0x800)
    if number < 10:
        return None
    told = re.search(rb"-arch[ =]sm_%d([af]?)[ \0]" % number, head)
    suffix = told[1].decode() if told else ""
    architecture = Capability(number // 10, number % 10)
    return Code(CodeKind.SASS, architecture, suffix=suffix or ("a" if narrow else ""))


def skippable(read: Read, size: int) -> tuple[tuple[int, int], ...]:
    """Ranges (start, end) of a file that hold no GPU code: machine code of the host and linkers' tables.

    `read(offset, count)` gives bytes of the file. Empty for what is no ELF file of 64 bits.
    """
    head = read(0, HEADER_SIZE)
    if len(head) < HEADER_SIZE or head[:6] != b"\x7fELF\x02\x01":
        return ()
    table, (entry, count) = struct.unpack_from("<Q", head, 40)[0], struct.unpack_from("<HH", head, 58)
    if entry != 64 or not 0 < count <= _MAX_SECTIONS or table + entry * count > size:
        return ()
    raw = read(table, entry * count)
    if len(raw) < entry * count:
        return ()
    passed: list[tuple[int, int]] = []
    held: list[tuple[int, int]] = []
    for at in range(0, len(raw), entry):
        kind, flags = struct.unpack_from("<IQ", raw, at + 4)
        start, length = struct.unpack_from("<QQ", raw, at + 24)
        if kind == _NOBITS or not length:
            continue
        if start + length > size:
            return ()
        idle = kind in _TABLES or flags & _EXECUTABLE
        (passed if idle else held).append((start, start + length))
    ranges = sorted(_joined(passed))
    if any(start < until and since < end for start, end in ranges for since, until in held):
        return ()
    return tuple((start, end) for start, end in ranges if end - start >= _WORTH_PASSING)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
