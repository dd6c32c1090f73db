"""Small files that hold GPU code, as far as their headers tell: what scans read and nothing runs.

A container's layout stands in imagefactory/scan/fatbin.py's docstring.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from imagefactory.gpu.capability import CodeKind, parse_code

_KINDS = {CodeKind.PTX: 1, CodeKind.SASS: 2, CodeKind.LTO: 8}
_SUFFIXES = {"": 0, "a": 0x100000, "f": 0x200000}


def fat_binary(*codes: str) -> bytes:
    """A container with an entry of 24 bytes for each of `codes` (`sm_80`, `compute_90/8.0`)."""
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 88 * len(codes)) + b"".join(map(_entry, codes))


def _entry(text: str) -> bytes:
    code = parse_code(text)
    assert code.architecture is not None
    number = code.architecture.major * 10 + code.architecture.minor
    major, _, minor = (code.isa or "0.0").partition(".")
    first = struct.pack("<HHIQII", _KINDS[code.kind], 0x0101, 64, 24, 0, 64)
    middle = struct.pack("<HHIQ", int(minor), int(major), number, 0)
    return first + middle + struct.pack("<QQQ", _SUFFIXES[code.suffix], 0, 24) + bytes(24)


def library(*modules: tuple[str, ...], padding: int = 4096) -> bytes:
    """What begins as an ELF file and holds one container for each of `modules`."""
    head = b"\x7fELF\x02\x01\x01".ljust(64, b"\0")
    return head + bytes(padding) + bytes(64).join(fat_binary(*codes) for codes in modules)


def forward_note(cuda: str, drivers: Sequence[int]) -> bytes:
    """Return the contents of the section `.note.cuda.fwd_compatibility`, as in libcuda.so.575.57.08."""
    row = {"format": 1, "CUDA version": cuda, "driver": list(drivers), "device": [1, 2, 7, 8]}
    text = json.dumps(row, separators=(",", ":")).encode() + b"\0"
    name = b"NVIDIA Corporation\0"
    head = struct.pack("<III", len(name), len(text), 0)
    return head + name.ljust(-(-len(name) // 4) * 4, b"\0") + text.ljust(-(-len(text) // 4) * 4, b"\0")


def forward_libcuda(cuda: str, drivers: Sequence[int]) -> bytes:
    """Return an ELF file with only that section, and a table that names it."""
    note, names = forward_note(cuda, drivers), b"\0.note.cuda.fwd_compatibility\0.shstrtab\0"
    at = 64 + len(note) + len(names)
    rows = ((0, 0, 0, 0), (1, 7, 64, len(note)), (31, 3, 64 + len(note), len(names)))
    sections = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, start, size, 0, 0, 4, 0)
        for name, kind, start, size in rows
    )
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at, 0, 64, 56, 0, 64, len(rows), 2)
    return head + note + names + sections
