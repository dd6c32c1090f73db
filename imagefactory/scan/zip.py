"""The members of an untrusted zip: its list, which is checked first, and their uncompressed bytes."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from imagefactory.errors import UsageError
from imagefactory.oci.inflate import CorruptDataError, inflate
from imagefactory.oci.tar_stream import TarStream
from imagefactory.scan.findings import CHUNK

MEMBERS = 100_000  # the limit of a zip
DIRECTORY = 32 << 20  # bytes; the largest list of members
PLAIN = 64 << 30  # bytes; the limit of the uncompressed archive
_HEADER = struct.Struct("<4s5H3I2H")  # of a member, before its name (APPNOTE 4.3.7)
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 0x1, 0x8, 0x800  # flags of a member
_IN_EXTRA = 0xFFFFFFFF  # a size that is in the extra field, which has more bits


def members_of(path: Path) -> list[zipfile.ZipInfo]:
    """Return the files of a zip to scan. Raises UsageError for a hostile or corrupt one."""
    try:
        with path.open("rb") as file:
            check_list(file)
            with zipfile.ZipFile(file) as archive:
                check_members(file, archive)
                members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise damaged(path, str(error)) from error
    if sum(member.file_size for member in members) > PLAIN:
        raise damaged(path, f"it would unpack to more than {PLAIN} bytes")
    return [member for member in members if not member.is_dir()]


def check_members(file: IO[bytes], archive: zipfile.ZipFile) -> None:
    """Raise ValueError for members that overlap, and like `data_start`."""
    end = archive.start_dir
    for member in sorted(archive.infolist(), key=lambda info: -info.header_offset):
        if data_start(file, member) + member.compress_size > end:
            raise ValueError(f"{member.filename[:80]!r} overlaps with another member")
        end = member.header_offset


def data_start(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Return the start of the compressed bytes. Raises ValueError if the header differs from the list.

    Programs that read such a zip without its list unpack other files than those that use the list. A
    truncated header raises struct.error.
    """
    if member.header_offset < 0:  # relative to the list: more is missing before it than exists
        raise ValueError(f"{member.filename[:80]!r} has an invalid offset")
    file.seek(member.header_offset)
    magic, _, flags, method, _, _, crc, *sizes, named, extra = _HEADER.unpack(file.read(_HEADER.size))
    name = member.orig_filename
    if magic != b"PK\x03\x04":
        raise ValueError(f"{name[:80]!r} has no file header")
    if member.filename != name:  # zipfile cuts at a NUL, and later versions take a name from the extra field
        raise ValueError(f"{name[:80]!r} is an ambiguous file name")
    if (flags | member.flag_bits) & _ENCRYPTED:
        raise ValueError(f"{name[:80]!r} is encrypted")
    header = {"name": file.read(named).decode("utf-8" if flags & _UTF8 else "cp437"), "method": method}
    listed = {"name": name, "method": member.compress_type}
    if not flags & _SIZES_FOLLOW:
        packed, plain = _sizes(sizes, file.read(extra))
        header |= {"CRC": crc, "packed size": packed, "size": plain}
        listed |= {"CRC": member.CRC, "packed size": member.compress_size, "size": member.file_size}
    for message, entry_value in header.items():
        if entry_value != listed[message]:
            difference = (
                f"{str(entry_value)[:80]!r} in its own header, {str(listed[message])[:80]!r} in the list"
            )
            raise ValueError(f"{name[:80]!r} has the {message} {difference}")
    return member.header_offset + _HEADER.size + int(named) + int(extra)


def _sizes(packed_plain: list[int], extra: bytes) -> tuple[int, int]:
    """Return compressed and plain size; too large sizes are in the field 1, plain first (4.5.3)."""
    packed, plain = packed_plain
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            large = iter(struct.unpack(f"<{length // 8}Q", extra[4 : 4 + length // 8 * 8]))
            plain = next(large, plain) if plain == _IN_EXTRA else plain
            packed = next(large, packed) if packed == _IN_EXTRA else packed
            break
        extra = extra[4 + length :]
    return packed, plain


def check_list(file: IO[bytes]) -> None:
    """Raise ValueError if the zip's list of members is too long (APPNOTE 4.3.14, 4.3.16)."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 65_557 - 20))
    tail = file.read()
    at = len(tail) - 22  # its position without a comment, where zipfile looks first
    if tail[at : at + 4] != b"PK\x05\x06" or tail[-2:] != b"\0\0":
        at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        raise ValueError("it is not a zip archive")
    sizes = [struct.unpack_from("<HI", tail.ljust(at + 22), at + 10)]
    if at >= 20 and tail[at - 20 : at - 16] == b"PK\x06\x07":
        sizes = [(sizes[0][0] % 0xFFFF, sizes[0][1] % 0xFFFFFFFF)]
        # The larger record is at this offset, or directly before, where zipfile takes it.
        offset = int.from_bytes(tail[at - 12 : at - 4], "little")
        for position in (min(offset, size), max(0, size - len(tail) + at - 76)):
            file.seek(position)
            record = file.read(56)
            if record[:4] == b"PK\x06\x06":
                sizes.append(struct.unpack_from("<QQ", record.ljust(56), 32))
    count, length = map(max, zip(*sizes, strict=True))
    if count > MEMBERS or length > DIRECTORY:
        raise ValueError(f"its list has {count} members in only {length} bytes")


def member_bytes(path: Path, member: zipfile.ZipInfo) -> Iterator[bytes]:
    """Return the member's plain bytes, exactly as many as in the list. Raises CorruptDataError."""
    return _plain_bytes(_packed_bytes(path, member), member)


def _plain_bytes(packed: Iterator[bytes], member: zipfile.ZipInfo) -> Iterator[bytes]:
    rest = member.file_size
    for piece in _inflated(packed, member.compress_type):
        rest -= len(piece)
        if rest < 0:
            break
        yield piece
    if rest:
        raise CorruptDataError(f"expected {member.file_size} bytes, as in the archive's list")


def _inflated(packed: Iterator[bytes], method: int) -> Iterator[bytes]:
    if method == zipfile.ZIP_STORED:
        return packed
    if method == zipfile.ZIP_DEFLATED:
        return inflate(packed)
    raise CorruptDataError(f"unsupported compression method {method}")


def _packed_bytes(path: Path, member: zipfile.ZipInfo) -> Iterator[bytes]:
    with path.open("rb") as file:
        try:
            file.seek(data_start(file, member))
        except (ValueError, struct.error) as error:
            raise CorruptDataError(str(error)) from error
        rest = member.compress_size
        while rest and (data := file.read(min(rest, CHUNK))):
            rest -= len(data)
            yield data
    if rest:
        raise CorruptDataError("the file is truncated")


def damaged(path: Path, reason: str) -> UsageError:
    kind = "wheel" if path.suffix == ".whl" else "conda package"
    return UsageError(
        "scan-archive-invalid", f"{path} is not a valid {kind}: {reason}", hint="download it again"
    )


# --- A zip on a server that sends ranges: its list of members, then the members of a stream


_TAIL = 1 << 17  # bytes of the first request, which contain the list of most wheels


@dataclass(frozen=True, slots=True)
class RemoteMember:
    """A member of a remote zip. `end` is the start of the next one, or of the list of members."""

    info: zipfile.ZipInfo
    end: int

    @property
    def start(self) -> int:
        return self.info.header_offset


class _ZipEnd:
    """The end of a remote zip as a file. `read_range(start, end)` fetches bytes, each of them once."""

    def __init__(self, read_range: Callable[[int, int], bytes], size: int) -> None:
        self._read_range, self._size, self._at = read_range, size, 0
        self._start, self._data = size, b""

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("it is not a zip archive")
        self._at = base + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        end = self._size if count < 0 else min(self._at + count, self._size)
        if self._at < min(self._start, end):
            if self._size - self._at > DIRECTORY + _TAIL:
                raise ValueError("its list of members is not at its end")
            start = max(min(self._at, self._size - _TAIL), 0)
            self._data = self._read_range(start, self._start) + self._data
            self._start = start
        data = self._data[self._at - self._start : max(end, self._at) - self._start]
        self._at += len(data)
        return data


def remote_members(read_range: Callable[[int, int], bytes], size: int, name: str) -> tuple[RemoteMember, ...]:
    """Return the files of a remote zip in their order, from its list alone.

    Raises UsageError for a hostile or corrupt list, and the errors of `read_range`.
    """
    file: IO[bytes] = _ZipEnd(read_range, size)  # type: ignore[assignment]
    try:
        check_list(file)
        with zipfile.ZipFile(file) as archive:
            infos, end = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise damaged(Path(name), str(error)) from error
    if sum(info.file_size for info in infos) > PLAIN:
        raise damaged(Path(name), f"it would unpack to more than {PLAIN} bytes")
    members = []
    for info in sorted(infos, key=lambda info: -info.header_offset):
        least = info.header_offset + _HEADER.size + len(info.orig_filename) + info.compress_size
        if info.header_offset < 0 or least > end:
            raise damaged(Path(name), f"{info.filename[:80]!r} overlaps with another member")
        members.append(RemoteMember(info, end))
        end = info.header_offset
    return tuple(member for member in reversed(members) if not member.info.is_dir())


def streamed_bytes(stream: TarStream, member: RemoteMember) -> Iterator[bytes]:
    """Yield the member's plain bytes from a stream at its header. Raises CorruptDataError."""
    head = stream.exactly(_HEADER.size)
    try:
        *_, named, extra = _HEADER.unpack(head)
        local = copy(member.info)
        local.header_offset = 0
        data_start(io.BytesIO(head + stream.exactly(named + extra, limit=1 << 18)), local)
    except (ValueError, struct.error) as error:
        raise CorruptDataError(str(error)) from error
    if _HEADER.size + named + extra + member.info.compress_size > member.end - member.start:
        raise CorruptDataError("it overlaps with another member")
    yield from _plain_bytes(_pieces(stream, member.info.compress_size), member.info)


def _pieces(stream: TarStream, rest: int) -> Iterator[bytes]:
    while rest:
        piece = bytes(stream.piece(min(rest, CHUNK)))
        rest -= len(piece)
        yield piece
