"""Read the dynamic section of ELF files: which shared libraries a library needs, and where it searches them.

The layout is ELF64 little-endian (System V ABI, chapters 4 and 5). The files are not executed. The image has
no readelf.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SONAME, DT_RPATH, DT_RUNPATH = 0, 1, 5, 14, 15, 29
FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
DYNAMIC_ENTRY = struct.Struct("<qQ")
MACHINES = {"x86_64": 62, "aarch64": 183}
LONGEST_TEXT = 1 << 20  # bazel writes search paths of many thousand bytes


class CorruptElfError(Exception):
    """An ELF file whose headers point outside of the file: truncated or corrupt."""


@dataclass(frozen=True)
class Dynamic:
    """The values that the loader reads from a library. `machine` is the ELF number (62 is x86-64).

    `rpath` and `runpath` are split at colons, and may contain `$ORIGIN`.
    """

    machine: int
    soname: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]


def read_dynamic(path: str) -> Dynamic | None:
    """Return the dynamic section of the file at `path`.

    None if it is not ELF64 little-endian or has no dynamic section (a linker script, an object file). Raises
    NotReadable if it is corrupt and OSError if it cannot be opened.
    """
    with open(path, "rb") as file:
        head = file.read(FILE_HEADER.size)
        if len(head) < FILE_HEADER.size or head[:6] != MAGIC:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_dynamic(data)


def parse_dynamic(data: mmap.mmap | bytes) -> Dynamic | None:
    """Return the dynamic section in the bytes of an ELF64 little-endian file, like `read_dynamic`."""
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
        raise CorruptElfError("its headers point outside of the file") from error
    strings = next((value for tag, value in entries if tag == DT_STRTAB), None)
    if strings is None:
        return None
    for start, size, offset in loads:
        if start <= strings < start + size:
            base = strings - start + offset
            break
    else:
        raise CorruptElfError("its string table is in no loaded part")

    def texts(number: int) -> tuple[str, ...]:
        return tuple(_text(data, base + value) for tag, value in entries if tag == number)

    def folders(number: int) -> tuple[str, ...]:
        return tuple(part for text in texts(number) for part in text.split(":") if part)

    return Dynamic(
        machine=machine,
        soname="".join(texts(DT_SONAME)[:1]),
        needed=texts(DT_NEEDED),
        rpath=folders(DT_RPATH),
        runpath=folders(DT_RUNPATH),
    )


def _text(data: mmap.mmap | bytes, position: int) -> str:
    end = data.find(b"\0", position, position + LONGEST_TEXT)
    if end < 0:
        raise CorruptElfError("a text in it has no end")
    return data[position:end].decode("utf-8", "replace")
