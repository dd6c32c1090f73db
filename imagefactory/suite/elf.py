"""The dynamic section of ELF files: which shared libraries a library asks for, and where it looks.

A small reader of the ELF64 little-endian layout (System V ABI, chapters 4 and 5), standard library
only, because the image has no readelf. It never executes what it reads.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

MAGIC = b"\x7fELF"
CLASS_64, LITTLE_ENDIAN = 2, 1
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SONAME, DT_RPATH, DT_RUNPATH = 0, 1, 5, 14, 15, 29
FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
DYNAMIC_ENTRY = struct.Struct("<qQ")
MACHINES = {"x86_64": 62, "aarch64": 183}
LONGEST_TEXT = 1 << 20  # bazel writes search paths of many thousand bytes


class NotReadable(Exception):
    """An ELF file whose headers point outside of it: cut off or damaged."""


@dataclass(frozen=True)
class Dynamic:
    """What the loader reads of one library. `machine` is the ELF number (62 is x86-64).

    `rpath` and `runpath` are as written, `$ORIGIN` included, split at colons.
    """

    machine: int
    soname: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]


def read_dynamic(path: str) -> Dynamic | None:
    """The dynamic section of the file at `path`.

    None for a file that is not ELF64 little-endian or has no dynamic section (a linker script, an
    object file). Raises NotReadable for a damaged one and OSError for one that cannot be opened.
    """
    with open(path, "rb") as file:
        head = file.read(FILE_HEADER.size)
        if len(head) < FILE_HEADER.size or head[:4] != MAGIC:
            return None
        if head[4] != CLASS_64 or head[5] != LITTLE_ENDIAN:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_dynamic(data)


def parse_dynamic(data: mmap.mmap | bytes) -> Dynamic | None:
    """As `read_dynamic`, of the bytes of an ELF64 little-endian file."""
    try:
        header = FILE_HEADER.unpack_from(data, 0)
        machine, table, entry_size, count = header[2], header[5], header[9], header[10]
        loads, dynamic = [], None
        for index in range(count):
            kind, _, offset, address, _, size, _, _ = PROGRAM_HEADER.unpack_from(
                data, table + index * entry_size
            )
            if kind == PT_LOAD:
                loads.append((address, size, offset))
            elif kind == PT_DYNAMIC:
                dynamic = (offset, size)
        if dynamic is None:
            return None
        entries = []
        for position in range(dynamic[0], dynamic[0] + dynamic[1], DYNAMIC_ENTRY.size):
            tag, value = DYNAMIC_ENTRY.unpack_from(data, position)
            if tag == DT_NULL:
                break
            entries.append((tag, value))
    except struct.error as error:
        raise NotReadable("its headers point outside of the file") from error
    strings = next((value for tag, value in entries if tag == DT_STRTAB), None)
    if strings is None:
        return None
    base = _offset_of(strings, loads)

    def texts(wanted: int) -> tuple[str, ...]:
        return tuple(_text(data, base + value) for tag, value in entries if tag == wanted)

    def folders(wanted: int) -> tuple[str, ...]:
        return tuple(part for text in texts(wanted) for part in text.split(":") if part)

    return Dynamic(
        machine=machine,
        soname="".join(texts(DT_SONAME)[:1]),
        needed=texts(DT_NEEDED),
        rpath=folders(DT_RPATH),
        runpath=folders(DT_RUNPATH),
    )


def _offset_of(address: int, loads: list[tuple[int, int, int]]) -> int:
    for start, size, offset in loads:
        if start <= address < start + size:
            return address - start + offset
    raise NotReadable("its string table lies in no loaded part")


def _text(data: mmap.mmap | bytes, position: int) -> str:
    end = data.find(b"\0", position, position + LONGEST_TEXT)
    if end < 0:
        raise NotReadable("a text in it has no end")
    return data[position:end].decode("utf-8", "replace")
