"""The container of a .sif file: where its root file system lies, and one made around another such.

Format: sylabs/sif, `pkg/sif` (little endian): at 32 the magic, at 96 how many descriptors there are and
where; a descriptor of 585 bytes says what it is of and where that lies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import UsageError, os_problem

MAGIC = b"SIF_MAGIC\0"
_HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
_DESCRIPTOR = struct.Struct("<i?III qqq qqqq 128s 384s".replace(" ", ""))
_PARTITION = 0x4004
_SQUASHFS, _SYSTEM = 1, 2  # file system; partition of the primary system
MOST_DESCRIPTORS = 4096
_PAGE = 4096  # where a partition begins
_PROCESSORS = {"amd64": b"02\0", "arm64": b"04\0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Where the squashfs of the system lies in the file, in bytes."""

    offset: int
    size: int


def is_sif(path: Path) -> bool:
    """Whether the file begins as a .sif."""
    with path.open("rb") as file:
        return file.read(_HEADER.size)[32 : 32 + len(MAGIC)] == MAGIC


def parse_sif(data: bytes) -> tuple[int, int]:
    """(offset, count) of the descriptors, from a file's first bytes. Raises ValueError."""
    if len(data) < _HEADER.size:
        raise ValueError("it is truncated")
    fields = _HEADER.unpack_from(data)
    if fields[1] != MAGIC:
        raise ValueError("it has no .sif header")
    total, offset = fields[8], fields[9]
    if not 0 <= total <= MOST_DESCRIPTORS or offset < 0:
        raise ValueError(f"it claims {total} descriptors")
    return offset, total


def parse_descriptors(data: bytes) -> Partition:
    """The system's partition. Raises ValueError where there is none, or it is no squashfs."""
    for at in range(0, len(data) - _DESCRIPTOR.size + 1, _DESCRIPTOR.size):
        fields = _DESCRIPTOR.unpack_from(data, at)
        kind, used, offset, size, extra = fields[0], fields[1], fields[5], fields[6], fields[13]
        file_system, part = struct.unpack_from("<ii", extra)
        if used and kind == _PARTITION and part == _SYSTEM:
            if file_system != _SQUASHFS:
                raise ValueError("its system is not a squashfs (it may be encrypted, or a writable image)")
            return Partition(offset=offset, size=size)
    raise ValueError("it has no system partition")


def read_partition(path: Path) -> Partition:
    """Where the system of the .sif at `path` lies. Raises UsageError."""
    try:
        with path.open("rb") as file:
            offset, total = parse_sif(file.read(_HEADER.size))
            file.seek(offset)
            partition = parse_descriptors(file.read(total * _DESCRIPTOR.size))
        if (
            partition.offset < 0
            or partition.size < 0
            or partition.offset + partition.size > path.stat().st_size
        ):
            raise ValueError("its system partition is outside of the file")
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="choose a file that you can read") from error
    except ValueError as error:
        raise UsageError(
            "sif-invalid", f"{path} is not a valid .sif: {error}", hint="download or build it again"
        ) from error
    return partition


def around(made: bytes, change: Callable[[bytes], bytes], size: int, moment: int) -> bytes:
    """All that stands before the system's partition in a .sif like `made`, whose partition has `size` bytes.

    `made` is a whole .sif whose last part is its partition. What the other parts say goes through `change`,
    and all times are `moment` (seconds since 1970); the file's id is nil, as apptainer's reproducible ones
    have it. Raises ValueError for another layout.
    """
    offset, total = parse_sif(made)
    header = list(_HEADER.unpack_from(made))
    first, at = header[11], header[11]
    rows = [_DESCRIPTOR.unpack_from(made, offset + n * _DESCRIPTOR.size) for n in range(total)]
    used = [row for row in rows if row[1]]
    if not used or used[-1][0] != _PARTITION or any(row[0] == _PARTITION for row in used[:-1]):
        raise ValueError("its partition is not its last part")
    parts = bytearray()
    table = bytearray()
    for row in used:
        plain = b"" if row[0] == _PARTITION else change(made[row[5] : row[5] + row[6]])
        padding = -at % _PAGE if row[0] == _PARTITION else 0
        length = size if row[0] == _PARTITION else len(plain)
        parts += bytes(padding) + plain
        place = (at + padding, length, padding + length, moment, moment, 0, 0)
        table += _DESCRIPTOR.pack(*row[:5], *place, *row[12:])
        at += padding + length
    header[4:7] = bytes(16), moment, moment
    header[12] = at - first
    begin = _HEADER.pack(*header)
    free = made[offset + len(table) : first]
    return begin + made[len(begin) : offset] + bytes(table) + free + bytes(parts)


def for_processor(head: bytes, processor: str) -> bytes:
    """What stands before a system's partition, for `processor` (OCI's word); for one not known as it was.

    Apptainer refuses a file that claims to be for another processor than the machine's.
    """
    if processor not in _PROCESSORS:
        return head
    offset, total = parse_sif(head)
    fields, made = list(_HEADER.unpack_from(head)), bytearray(head)
    fields[3] = _PROCESSORS[processor]
    made[: _HEADER.size] = _HEADER.pack(*fields)
    for at in range(offset, offset + total * _DESCRIPTOR.size, _DESCRIPTOR.size):
        row = list(_DESCRIPTOR.unpack_from(head, at))
        if row[1] and row[0] == _PARTITION:
            row[13] = row[13][:8] + _PROCESSORS[processor] + row[13][11:]
            made[at : at + _DESCRIPTOR.size] = _DESCRIPTOR.pack(*row)
    return bytes(made)
