"""Small files that hold GPU code, as far as their headers tell: what scans read and nothing runs.

A container's layout stands in imagefactory/scan/fatbin.py's docstring.
"""

from __future__ import annotations

import struct

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
