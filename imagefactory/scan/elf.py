"""ELF files, as far as a search for GPU code needs them: what to pass over, what is cut, what code is for.

In doubt nothing is passed over: a file whose tables are cut off, too long or at odds with themselves is
searched whole.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from imagefactory.gpu.capability import Capability, Code, CodeKind

HEADER_SIZE = 64
MACHINE_CUDA, MACHINE_AMD = 190, 224

_MAX_SECTIONS = 4096
_SEGMENTS_READ = 64
_LOADED, _RELOCATABLE = 1, 1
_LINKED = (2, 3)  # programs and shared libraries
_MAY_RUN, _MAY_WRITE = 1, 2
_WORTH_PASSING = 1 << 16
_NOBITS = 8
# Symbols, strings, relocations, hashes, the dynamic table, symbol versions: tables that linkers write.
_TABLES = frozenset({2, 3, 4, 5, 6, 9, 11, 0x6FFFFFF6, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF})
_EXECUTABLE = 0x4
_SEGMENT = struct.Struct("<IIQ16xQ16x")  # type, flags, offset in the file, bytes there
HEADERS = HEADER_SIZE + 56 * _SEGMENTS_READ  # bytes; where the segments usually are told

# Processors of AMD's by the lowest byte of `e_flags`, from 0x20 on, 16 in a line; `-` stands for none.
_AMD_NAMES = """
600 601 700 701 702 703 704 - 801 802 803 810 900 902 904 906
908 909 90c 1010 1011 1012 1030 1031 1032 1033 602 705 805 1035 1034 90a
940 1100 1013 1150 1103 1036 1101 1102 1200 1250 1151 941 942 - 1201 950
1310 9-generic 10-1-generic 10-3-generic 11-generic 1152 - 1154 1153 12-generic
1251 12-5-generic 1172 1170 1171 9-4-generic
"""
_AMD_PROCESSORS = {0x20 + at: f"gfx{name}" for at, name in enumerate(_AMD_NAMES.split()) if name != "-"}

Read = Callable[[int, int], bytes]


def machine(head: bytes) -> int:
    """What an ELF file of 64 bits is for, by its first bytes; 0 for other files."""
    if len(head) < HEADER_SIZE or head[:6] != b"\x7fELF\x02\x01":
        return 0
    return int(struct.unpack_from("<H", head, 18)[0])


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


def parse_amd_target(head: bytes) -> Code | None:
    """What one of AMD's code objects was compiled for, by its first bytes; None where that is not known.

    In `e_flags` the lowest byte is the processor; the next say of its features whether they must be off (2),
    on (3), or may be either, and before version 4 of the code object (2 in `e_ident`) only which are on.
    Source: LLVM, User Guide for AMDGPU Backend, ELF header.
    """
    flags, version = struct.unpack_from("<I", head, 48)[0], head[8]
    processor = _AMD_PROCESSORS.get(flags & 0xFF, "")
    if not processor or not version:
        return None
    if version == 1:
        settings = (("sramecc", "+" if flags & 0x200 else ""), ("xnack", "+" if flags & 0x100 else ""))
    else:
        words = ("", "", "-", "+")
        settings = (("sramecc", words[flags >> 10 & 3]), ("xnack", words[flags >> 8 & 3]))
    features = "".join(f":{name}{setting}" for name, setting in settings if setting)
    return Code(CodeKind.AMD, None, processor=processor + features)


def lacks_tables(head: bytes, size: int) -> bool:
    """Whether the table of sections, which stands last, would lie past the end of a file of `size` bytes."""
    if len(head) < HEADER_SIZE or head[:6] != b"\x7fELF\x02\x01":
        return False
    table, (entry, count) = struct.unpack_from("<Q", head, 40)[0], struct.unpack_from("<HH", head, 58)
    return bool(table + entry * count > size)


def loaded_end(head: bytes) -> int:
    """How long the file must be at the least to be loaded or linked, by its first bytes; 0 for unknown.

    `head` is of a file that `lacks_tables`.
    """
    kind, sections = struct.unpack_from("<H", head, 16)[0], struct.unpack_from("<Q", head, 40)[0]
    if kind == _RELOCATABLE:
        return int(sections)
    return max((end for _, _, end in _loaded(head)), default=0)


def _loaded(head: bytes) -> list[tuple[int, int, int]]:
    """Flags, start and end in the file of the segments that are loaded, as far as `head` tells them."""
    place, (entry, count) = struct.unpack_from("<Q", head, 32)[0], struct.unpack_from("<HH", head, 54)
    loaded = []
    for number in range(min(count, _SEGMENTS_READ)):
        at = place + number * entry
        if entry != _SEGMENT.size or at + entry > len(head):
            break
        kind, flags, offset, length = _SEGMENT.unpack_from(head, at)
        if kind == _LOADED:
            loaded.append((flags, offset, offset + length))
    return loaded


def unmapped(head: bytes, size: int) -> tuple[tuple[int, int], ...]:
    """Ranges (start, end) of a linked file that no program sees as data when it is loaded.

    By its first `HEADERS` bytes, so that a stream can be judged too. Those are what no segment maps (symbols,
    debugging) and segments of machine code, unless the linker put data beside the code: then the first
    segment may be run, whatever comes later (`.lrodata` has one of its own that may only be read, as in
    cuBLASLt 12.8 and cuDNN 9.10). GPU code is registered from memory, so none is there.
    """
    if len(head) < HEADER_SIZE or head[:6] != b"\x7fELF\x02\x01":
        return ()
    kind, place = struct.unpack_from("<H", head, 16)[0], struct.unpack_from("<Q", head, 32)[0]
    entry, count = struct.unpack_from("<HH", head, 54)
    if kind not in _LINKED or entry != _SEGMENT.size or place + entry * count > min(len(head), HEADERS):
        return ()
    loaded = _loaded(head)
    first = min(loaded, key=lambda one: one[1], default=(_MAY_RUN, 0, 0))
    apart = not first[0] & (_MAY_RUN | _MAY_WRITE)
    data = [one for one in loaded if not apart or one[0] & (_MAY_RUN | _MAY_WRITE) != _MAY_RUN]
    held = _joined([(start, end) for _, start, end in data])
    if not held or held[-1][1] > size:
        return ()
    passed = zip([HEADERS, *(end for _, end in held)], [*(start for start, _ in held), size], strict=True)
    return tuple((start, end) for start, end in passed if end - start >= _WORTH_PASSING)


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
