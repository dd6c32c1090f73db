"""A tar read forwards, entry by entry: no more of it is held than the chunk at hand and one header.

POSIX pax, ustar and its elders, GNU's long names and large numbers. Sparse files are refused.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from imagefactory.oci.inflate import DamagedError
from imagefactory.oci.tar_header import HEADER_LIMIT
from imagefactory.oci.tree import entry_parts
from imagefactory.scan.findings import readable_path

BLOCK = 512


@dataclass(slots=True)
class TarEntry:
    """`left` is how many of the `size` bytes were not taken from the stream.

    `same` is the earlier entry that a hard link is another name of, `link` where a symbolic one leads, as
    it is written; both are empty for all else.
    """

    path: str
    size: int
    folder: bool
    regular: bool
    left: int
    same: str
    link: str = ""


def entries(stream: TarStream) -> Iterator[TarEntry]:
    """The entries of a tar (POSIX pax, GNU and old ones). Whoever takes one takes its bytes too."""
    extended: dict[str, str] = {}
    while True:
        header = stream.exactly(BLOCK)
        if not header or not any(header):
            return  # the end of the archive is a block of zeros; some tools leave it out
        try:
            name, kind, length = _parse_header(header)
        except ValueError as error:
            raise DamagedError(f"broken header at byte {stream.position - BLOCK}: {error}") from error
        if kind in _EXTENDED:
            extended |= _parse_extended(kind, stream.exactly(length, limit=HEADER_LIMIT))
            stream.skip(-length % BLOCK)
            continue
        if kind == tarfile.GNUTYPE_SPARSE or "sparse" in extended:
            raise DamagedError(f"'{readable_path(name)}' is stored as a sparse file")
        regular = kind in tarfile.REGULAR_TYPES
        try:
            # Folders, links and devices have no bytes, whatever their header says.
            size = int(extended.get("size", length)) if regular or kind not in tarfile.SUPPORTED_TYPES else 0
            path = "/".join(entry_parts(extended.get("path", name)))
            same = link = ""
            if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE):
                target = extended.get("linkpath", _name(header[157:257]))
                if kind == tarfile.SYMTYPE:
                    link = readable_path(target)
                else:
                    same = readable_path("/".join(entry_parts(target.lstrip("/"))))
        except ValueError as error:
            raise DamagedError(readable_path(str(error))[:200]) from error
        if size < 0:
            raise DamagedError(f"'{readable_path(path)[:80]}' has {size} bytes")
        # Before POSIX a folder was a file whose name ends in a slash.
        folder = kind == tarfile.DIRTYPE or (kind == tarfile.AREGTYPE and name.endswith("/"))
        yield TarEntry(readable_path(path), size, folder, regular and not folder, size, same, link)
        stream.skip(-size % BLOCK)
        extended = {}


def _parse_header(block: bytes) -> tuple[str, bytes, int]:
    """Name, type and size of a header (POSIX ustar and its elders). Raises ValueError.

    tarfile reads the same, and six times as many fields: for small files that is most of a scan.
    """
    told = _number(block[148:156])
    if told != 256 + sum(block[:148]) + sum(block[156:]):
        signed = sum(byte - 256 * (byte > 127) for byte in block[:148] + block[156:])
        if told != 256 + signed:  # as some old systems had it
            raise ValueError("bad checksum")
    name, kind, size = block[:100].partition(b"\0")[0], block[156:157], _number(block[124:136])
    if size < 0:
        raise ValueError(f"a file of {size} bytes")
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return name.decode("utf-8", "surrogateescape"), kind, size


def _name(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """Octal digits, or GNU's binary form for what is larger."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field, "big") - ((0x80 if field[0] == 0x80 else 0x100) << 8 * (len(field) - 1))
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_KEYS = (b"path", b"linkpath", b"size")  # of all that such a header may say
_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_EXTENDED = (*_PAX, tarfile.XGLTYPE, *_LONG)


def _parse_extended(kind: bytes, data: bytes) -> dict[str, str]:
    """What an extended header says of the next entry (POSIX pax; GNU's long names)."""
    if kind in _LONG:
        return {_LONG[kind]: _name(data)}
    records: dict[str, str] = {}
    at = 0
    while kind in _PAX and at < len(data):
        digits = data[at : at + 9].partition(b" ")[0]
        if not digits.isdigit() or not len(digits) + 1 < int(digits) <= len(data) - at:
            raise DamagedError("broken extended header")
        end = at + int(digits)
        key, _, value = data[at + len(digits) + 1 : end].rstrip(b"\n").partition(b"=")
        if key.startswith(b"GNU.sparse."):
            records["sparse"] = ""
        elif key in _KEYS:
            records[key.decode()] = value.decode("utf-8", "surrogateescape")
        at = end
    return records


class TarStream:
    """Chunks, taken in the portions of a tar. Large ones are not copied."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._whole = b""
        self._chunk = memoryview(b"")  # what is left of the whole one
        self.position = 0

    def piece(self, most: int) -> bytes | memoryview:
        """At least one byte and at most `most`; a whole chunk as it came. Raises DamagedError at the end."""
        if not self._chunk and not self._next():
            raise DamagedError(f"it ends at byte {self.position}, in the middle of a file")
        piece, self._chunk = self._chunk[:most], self._chunk[most:]
        self.position += len(piece)
        return self._whole if len(piece) == len(self._whole) else piece

    def exactly(self, count: int, *, limit: int = BLOCK) -> bytes:
        """`count` bytes, or none at the end of all."""
        if count > limit:
            raise DamagedError(f"a header of {count} bytes at byte {self.position}")
        data = bytearray()
        while len(data) < count and (self._chunk or self._next()):
            data += self.piece(count - len(data))
        if data and len(data) < count:
            raise DamagedError(f"it ends at byte {self.position}, in the middle of a header")
        return bytes(data)

    def skip(self, count: int) -> None:
        while count:
            count -= len(self.piece(count))

    def drain(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        for chunk in self._chunks:
            if chunk:
                self._whole, self._chunk = chunk, memoryview(chunk)
                return True
        return False
