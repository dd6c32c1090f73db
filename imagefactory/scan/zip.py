"""The members of a zip from a stranger: its list, checked before it is read, and their plain bytes."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.oci.inflate import DamagedError, inflate
from imagefactory.scan.look import CHUNK

MEMBERS = 100_000  # the most of a zip
DIRECTORY = 32 << 20  # bytes; the largest list of members
PLAIN = 64 << 30  # bytes; the most that an archive may unpack to


def members_of(path: Path) -> list[zipfile.ZipInfo]:
    """The files of a zip that may tell something. Raises UsageError for a hostile or damaged one."""
    size = path.stat().st_size
    try:
        _check_directory(path, size)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise damaged(path, str(error)) from error
    end = size
    for member in sorted(members, key=lambda one: -one.header_offset):
        if member.header_offset + member.compress_size > end or member.header_offset < 0:
            raise damaged(path, f"{member.filename[:80]!r} overlaps with another member")
        end = member.header_offset
    if sum(member.file_size for member in members) > PLAIN:
        raise damaged(path, f"it would unpack to more than {PLAIN} bytes")
    return [member for member in members if not member.is_dir()]


def _check_directory(path: Path, size: int) -> None:
    """Raises ValueError where the zip's list of members is too long to be read (APPNOTE 4.3.14, 4.3.16)."""
    with path.open("rb") as file:
        file.seek(max(0, size - 65_557 - 20))
        tail = file.read()
        at = len(tail) - 22  # where it stands without a comment, and zipfile looks first
        if tail[at : at + 4] != b"PK\x05\x06" or tail[-2:] != b"\0\0":
            at = tail.rfind(b"PK\x05\x06")
        if at < 0:
            raise ValueError("it is no zip archive")
        found = [struct.unpack_from("<HI", tail.ljust(at + 22), at + 10)]
        if at >= 20 and tail[at - 20 : at - 16] == b"PK\x06\x07":
            found = [(found[0][0] % 0xFFFF, found[0][1] % 0xFFFFFFFF)]
            # The larger record stands where this says, or right before, where zipfile takes it.
            told = int.from_bytes(tail[at - 12 : at - 4], "little")
            for place in (min(told, size), max(0, size - len(tail) + at - 76)):
                file.seek(place)
                record = file.read(56)
                if record[:4] == b"PK\x06\x06":
                    found.append(struct.unpack_from("<QQ", record.ljust(56), 32))
    count, length = map(max, zip(*found, strict=True))
    if count > MEMBERS or length > DIRECTORY:
        raise ValueError(f"it lists {count} members in {length} bytes")


def member_bytes(path: Path, member: zipfile.ZipInfo) -> Iterator[bytes]:
    """The member's plain bytes, exactly as many as it says. Raises DamagedError."""
    left = member.file_size
    for piece in _inflated(_packed_bytes(path, member), member.compress_type):
        left -= len(piece)
        if left < 0:
            break
        yield piece
    if left:
        raise DamagedError(f"it does not hold the {member.file_size} bytes that the archive's list says")


def _inflated(packed: Iterator[bytes], method: int) -> Iterator[bytes]:
    if method == zipfile.ZIP_STORED:
        return packed
    if method == zipfile.ZIP_DEFLATED:
        return inflate(packed)
    raise DamagedError(f"it is packed by method {method}, which wheels do not use")


def _packed_bytes(path: Path, member: zipfile.ZipInfo) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(member.header_offset)
        header = file.read(30)
        if header[:4] != b"PK\x03\x04" or len(header) < 30:
            raise DamagedError(f"no member begins at byte {member.header_offset}")
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        left = member.compress_size
        while left and (data := file.read(min(left, CHUNK))):
            left -= len(data)
            yield data
    if left:
        raise DamagedError("the file is cut")


def damaged(path: Path, why: str) -> UsageError:
    kind = "wheel" if path.suffix == ".whl" else "conda package"
    return UsageError(f"{path} is no proper {kind}: {why}", hint="fetch it again")
