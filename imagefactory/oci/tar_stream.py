"""A layer's tar, read once without seeking: every reader of layers uses this code.

Supports POSIX pax, ustar and older formats, GNU long names, large numbers and sparse files. Only a chunk, a
header, and the names of the layer are in memory. The path of each entry in the layer follows the rules of
docker, podman and skopeo (moby's pkg/archive/diff.go, Go's archive/tar):

- `/a`, `./a` and `x/../a` are `a`; a name outside of the root is rejected.
- A link of the layer to a directory is followed inside the layer, never on this machine.
- The last entry with a name wins; the replaced one is reported first, as REMOVED.
- Device nodes and FIFOs are skipped, and counted in `TarStream.skipped`.
"""

from __future__ import annotations

import math
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self, TypeAlias

from imagefactory.errors import StoreError
from imagefactory.oci.inflate import CorruptDataError
from imagefactory.oci.tree import DEEPEST, LONGEST, OPAQUE, WHITEOUT, entry_parts
from imagefactory.trees import printable

# --- The size limit of a tar's extended header: one rule for every reader of an untrusted tar


HEADER_LIMIT = 1 << 20  # bytes; the largest extended header of one entry

_HEADER_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class CappedInfo(tarfile.TarInfo):
    """A tar entry with limits. tarfile reads long names, pax headers and maps of sparse files into memory.

    A gigabyte of them compresses into a few kilobytes.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> Self:
        # The hook that tarfile provides for subclasses: the header is parsed, its bytes are not read yet.
        if self.type in _HEADER_EXTENDED and self.size > HEADER_LIMIT:
            raise tarfile.ReadError(f"a header has {self.size} bytes (limit: {HEADER_LIMIT})")
        if self.type == tarfile.GNUTYPE_SPARSE:  # its map may have any number of blocks
            raise tarfile.ReadError(f"{self.name[:200]!a} is a sparse file, which is not supported")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError(f"{self.name[:200]!a} is a sparse file, which is not supported")


BLOCK = 512
NAMES_LIMIT = 64 << 20  # characters; the limit of all names of one layer
SPARSE_LIMIT = 16 << 30  # bytes; the limit of the unpacked sparse files of one layer
LINKS_LIMIT = 40  # symbolic links in the path of one entry, as on Linux
FOLLOWED_LIMIT = 64 << 20  # characters of the followed links of one layer
RECENT_LIMIT = 1000  # directories whose place is remembered
REPLACED_LIMIT = 1000  # directories replaced by other entries, or the reverse, in one layer
LONGEST_TARGET = 4095  # bytes of a symbolic link, as on Linux
LAST_OWNER = (1 << 32) - 2  # the largest number of a user or group
LAST_TIME = (1 << 34) - 1  # seconds since 1970; the last time in ext4
META = ".wh..wh."  # reserved names of AUFS, at the top of its layers

DIRECTORY: Final = "folder"
FILE: Final = "file"
SYMLINK: Final = "symlink"
HARD_LINK: Final = "hard link"
HIDDEN: Final = "whiteout"
REMOVED: Final = "removed"
"""A file, or a directory with all its contents, that a later entry of the layer replaces."""
_SKIPPED: Final = "skipped"

Parts = tuple[str, ...]


class EntryError(CorruptDataError):
    """A complete archive with an entry that is not allowed in a layer."""


def layer_error(title: str, error: Exception) -> StoreError:
    """Return the error of a reader of the layer `title`."""
    if isinstance(error, EntryError):
        return StoreError(
            "layer-entry-unsafe",
            f"layer {title} has an unsafe entry: {error}",
            hint="rebuild the image without this file",
        )
    return StoreError(
        "layer-corrupt",
        f"layer {title} is not a valid archive: {str(error) or type(error).__name__}",
        hint="remove the image, and build or pull it again",
    )


@dataclass(slots=True)
class TarEntry:
    """An entry at `parts` in the layer, () for its root. `name` is its name in the archive.

    `target` is the file of a hard link, `linkname` the text of a symbolic link. The last part of a whiteout
    has its prefix. `remaining` bytes are not read yet, and may be left unread.
    """

    parts: Parts
    kind: str
    name: str
    linkname: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    source: TarStream
    remaining: int = 0
    target: Parts = ()

    @property
    def path(self) -> str:
        return "/".join(self.parts)

    def piece(self, most: int) -> bytes | memoryview:
        """Return one to `most` of the remaining bytes, without a copy; no bytes at the end."""
        if not self.remaining:
            return b""
        piece = self.source.piece(min(most, self.remaining))
        self.remaining -= len(piece)
        return piece

    def read(self, size: int, /) -> bytes:
        """Return `size` of the remaining bytes, fewer only at the file's end."""
        data = bytearray()
        while len(data) < size and (piece := self.piece(size - len(data))):
            if not data and len(piece) == size:
                return bytes(piece)
            data += piece
        return bytes(data)

    def skip(self) -> None:
        self.source.skip(self.remaining)
        self.remaining = 0


def entries(stream: TarStream) -> Iterator[TarEntry]:
    """Yield the entries of a tar with their paths. The next entry skips the rest of the previous file.

    Raises CorruptDataError for an incomplete archive, EntryError for an entry that is not allowed in a
    layer.
    """
    layer = _LayerNames()
    space, holes = NAMES_LIMIT, SPARSE_LIMIT
    for entry, sparse in _headers(stream):
        stored = entry.size
        space -= len(entry.name) + len(entry.linkname) + 1
        if space < 0:
            raise CorruptDataError(f"its file names have more than {NAMES_LIMIT} characters together")
        if not (0 <= entry.uid <= LAST_OWNER and 0 <= entry.gid <= LAST_OWNER):
            owner = entry.gid if 0 <= entry.uid <= LAST_OWNER else entry.uid
            raise EntryError(f"'{printable(entry.name)}' has the invalid owner {owner}")
        if sparse is not None:
            entry.size, pieces = _expand(entry, sparse)
            entry.source, entry.remaining = TarStream(pieces), entry.size
            holes -= entry.size
            if holes < 0:
                raise EntryError(f"its sparse files unpack to more than {SPARSE_LIMIT} bytes")
        for placed in layer.place(entry):
            if placed.kind == _SKIPPED:
                stream.skipped.append(entry.name)
            else:
                yield placed
        if sparse is not None:
            entry.skip()
            entry.source.drain()
        stream.skip(entry.remaining + -stored % BLOCK)
        entry.remaining = 0


# --- places of entries -----------------------------------------------------------------------------


class _LayerSymlink(str):
    """The target of a symbolic link of the layer."""

    __slots__ = ()


class _OtherEntry:
    """A file, or a skipped entry."""

    __slots__ = ("file",)

    def __init__(self, file: bool) -> None:
        self.file = file


_FILE, _NOTHING = _OtherEntry(True), _OtherEntry(False)
_LayerDirectory: TypeAlias = "dict[str, _LayerDirectory | _LayerSymlink | _OtherEntry]"


class _LayerNames:
    """The names of a layer so far, to follow links without a file system."""

    def __init__(self) -> None:
        self._root: _LayerDirectory = {}
        self._followed = self._replaced = 0
        # Recent directories without links, by their names in the archive.
        self._recent: dict[str, tuple[Parts, _LayerDirectory]] = {}

    def place(self, entry: TarEntry) -> tuple[TarEntry, ...]:
        """Return the removed entries, then the entry with its path; nothing for an ignored entry."""
        directory, _, name = entry.name.removesuffix("/").rpartition("/")
        recent = self._recent.get(directory)
        # Most entries follow others of their directory, whose name was checked then.
        if recent and 0 < len(name) <= LONGEST // 4 and name not in (".", "..") and "\0" not in name:
            above, here = recent
        else:
            try:
                parts = entry_parts(entry.name)
            except ValueError as error:
                raise EntryError(printable(str(error))) from error
            if not parts:
                if entry.kind != DIRECTORY:
                    raise EntryError("the layer's root is not a directory")
                return (entry,)
            if parts[0].startswith(META) and parts != (OPAQUE,):
                return ()
            above, here = self._folder(parts[:-1], entry.name)
            if above and (*above, name) == parts:
                if len(self._recent) >= RECENT_LIMIT:
                    self._recent.clear()
                self._recent[directory] = above, here
            name = parts[-1]
        entry.parts = (*above, name)
        if name.startswith(WHITEOUT):
            hidden = name.removeprefix(WHITEOUT)
            if hidden in ("", ".", ".."):
                raise EntryError(f"'{printable(entry.name)}' is a whiteout without a name")
            if name == OPAQUE or not hidden.startswith(WHITEOUT):
                entry.kind = HIDDEN
                return (entry,)
            return ()
        if entry.kind == HARD_LINK and not self._link(entry, entry.parts):
            return ()
        old, new = here.get(name), _FILE if entry.kind == FILE else self._node(entry)
        if old is None:
            here[name] = new
            return (entry,)
        if isinstance(old, dict) and isinstance(new, dict):
            return (entry,)
        here[name] = new
        unseen = isinstance(new, dict) or entry.kind == _SKIPPED
        if not (unseen or isinstance(old, dict)):
            return (entry,)
        self._replaced += 1
        if self._replaced > REPLACED_LIMIT:
            raise EntryError(f"more than {REPLACED_LIMIT} entries replace earlier ones")
        self._recent.clear()
        removed = _at(entry, REMOVED, entry.parts)
        if not unseen:
            return removed, entry
        # The old entry hid the layers below, the new one would not.
        return removed, _at(entry, HIDDEN, (*above, WHITEOUT + name)), entry

    def _node(self, entry: TarEntry) -> _LayerDirectory | _LayerSymlink | _OtherEntry:
        if entry.kind == DIRECTORY:
            return {}
        if entry.kind == SYMLINK:
            target = entry.linkname.encode("utf-8", "surrogateescape")
            if not 0 < len(target) <= LONGEST_TARGET or b"\0" in target:
                raise EntryError(f"'{printable(entry.name)}' is a link whose target is not a path")
            return _LayerSymlink(entry.linkname)
        return _NOTHING if entry.kind == _SKIPPED else _FILE

    def _link(self, entry: TarEntry, parts: Parts) -> bool:
        """Set the target of a hard link. Return False for a link to itself, which changes nothing."""
        names = f"'{printable(entry.name)}' links to '{printable(entry.linkname)}'"
        try:
            target = entry_parts(entry.linkname)
        except ValueError as error:
            raise EntryError(printable(str(error))) from error
        if not target:
            raise EntryError(f"{names}, which is not a file")
        above, here = self._folder(target[:-1], entry.name, make=False)
        node = here.get(target[-1])
        entry.target = (*above, target[-1])
        if node is None or (entry.target[: len(parts)] == parts and entry.target != parts):
            raise EntryError(f"{names}, not in this layer")
        if isinstance(node, dict):
            raise EntryError(f"{names}, which is not a file")
        if entry.target == parts:
            return False
        if isinstance(node, _LayerSymlink):  # a hard link to a symbolic link is one too
            entry.kind, entry.linkname, entry.target = SYMLINK, str(node), ()
        elif not node.file:
            entry.kind, entry.target = _SKIPPED, ()
        return True

    def _folder(self, parts: Parts, name: str, *, make: bool = True) -> tuple[Parts, _LayerDirectory]:
        """Return the path and the entries of the directory `parts`, following links inside the layer."""
        todo = list(reversed(parts))
        above: list[str] = []
        directories = [self._root]
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":  # only in a link's target; the root is its own parent
                if above:
                    above.pop()
                    directories.pop()
                continue
            node = directories[-1].get(part)
            if node is None:
                node = {}
                if make:
                    directories[-1][part] = node
            if isinstance(node, _LayerSymlink):
                links += 1
                self._followed += len(node)
                if links > LINKS_LIMIT or self._followed > FOLLOWED_LIMIT:
                    raise EntryError(
                        f"the path '{printable(name)}' goes through more than {LINKS_LIMIT} links"
                    )
                if node.startswith("/"):
                    above.clear()
                    del directories[1:]
                todo += reversed([part for part in node.split("/") if part not in ("", ".")])
            elif isinstance(node, dict):
                above.append(part)
                directories.append(node)
                if len(above) >= DEEPEST:
                    raise EntryError(f"'{printable(name)}' is more than {DEEPEST} directories deep")
            else:
                path = printable("/".join((*above, part)))
                raise EntryError(f"'{path}' is used as a directory but is a file")
        return tuple(above), directories[-1]


def _at(entry: TarEntry, kind: str, parts: Parts) -> TarEntry:
    """Return an entry for a path that another entry implies."""
    none = TarStream(iter(()))
    return TarEntry(parts, kind, entry.name, "", 0, 0o755, entry.uid, entry.gid, entry.mtime, none)


# --- headers ---------------------------------------------------------------------------------------


_SparseMap: TypeAlias = "tuple[dict[str, str], bytes]"
"""The extended header and the header of a sparse file, which have the map of its regions."""

_ENTRY_TYPES = {
    tarfile.REGTYPE: FILE,
    tarfile.AREGTYPE: FILE,
    tarfile.CONTTYPE: FILE,
    tarfile.GNUTYPE_SPARSE: FILE,
    tarfile.DIRTYPE: DIRECTORY,
    tarfile.SYMTYPE: SYMLINK,
    tarfile.LNKTYPE: HARD_LINK,
    tarfile.CHRTYPE: _SKIPPED,
    tarfile.BLKTYPE: _SKIPPED,
    tarfile.FIFOTYPE: _SKIPPED,
}


def _headers(stream: TarStream) -> Iterator[tuple[TarEntry, _SparseMap | None]]:
    """Yield entries as in the archive, without their place in the layer. `size` are the stored bytes."""
    extended: dict[str, str] = {}
    while True:
        block = stream.exactly(BLOCK)
        if not block or not any(block):
            return  # the end of the archive is a block of zeros; some tools omit it
        offset = stream.position - BLOCK
        try:
            name, kind, length = _parse_header(block)
            if kind in _EXTENDED:
                extended |= _parse_extended(kind, stream.exactly(length, limit=HEADER_LIMIT))
                stream.skip(-length % BLOCK)
                continue
            name = extended.get("path") or name
            linkname = extended.get("linkpath") or (_name(block[157:257]) if block[157] else "")
            size = _read(extended["size"]) if extended.get("size") else length
            uid = _read(extended["uid"]) if extended.get("uid") else _number(block[108:116])
            gid = _read(extended["gid"]) if extended.get("gid") else _number(block[116:124])
            mode = _number(block[100:108])
            mtime = float(extended.get("mtime") or _number(block[136:148]))
        except ValueError as error:
            raise CorruptDataError(f"broken header at byte {offset}: {printable(str(error))}") from error
        if kind not in _ENTRY_TYPES:
            raise EntryError(f"'{printable(name)}' has the type {kind!r}, which is not allowed in a layer")
        sparse = None
        if kind == tarfile.GNUTYPE_SPARSE or (kind in tarfile.REGULAR_TYPES and _is_sparse(extended)):
            sparse = extended, block if kind == tarfile.GNUTYPE_SPARSE else b""
            name = extended.get("GNU.sparse.name") or name
        message = _ENTRY_TYPES[kind]
        if kind == tarfile.AREGTYPE and name.endswith("/"):
            message = DIRECTORY  # before POSIX a directory was a file whose name ends in a slash
        if size < 0:
            raise CorruptDataError(f"'{printable(name)}' has an invalid size: {size} bytes")
        if not 0 <= mtime <= LAST_TIME:
            mtime = min(max(mtime, 0), LAST_TIME) if math.isfinite(mtime) else 0
        if message != FILE:
            size = 0  # directories, links and devices have no bytes, whatever their header says
        yield (
            TarEntry((), message, name, linkname, size, mode & 0o7777, uid, gid, mtime, stream, size),
            sparse,
        )
        extended = {}


def _parse_header(block: bytes) -> tuple[str, bytes, int]:
    """Return name, type and size of a header (POSIX ustar and older). Raises ValueError.

    tarfile reads six times as many fields, which would be most of the time to scan small files.
    """
    checksum = _number(block[148:156])
    # A half of 255s does not overflow the sum of Adler-32, which is a tenth of the time of Python's.
    total = (zlib.adler32(block[:256], 0) & 0xFFFF) + (zlib.adler32(block[256:], 0) & 0xFFFF)
    if checksum != 256 + total - sum(block[148:156]):
        signed = sum(byte - 256 * (byte > 127) for byte in block[:148] + block[156:])
        if checksum != 256 + signed:  # some old systems sum signed bytes
            raise ValueError("bad checksum")
    name, kind, size = block[:100].partition(b"\0")[0], block[156:157], _number(block[124:136])
    if size < 0:
        raise ValueError(f"invalid file size: {size} bytes")
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return name.decode("utf-8", "surrogateescape"), kind, size


def _name(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


@lru_cache(maxsize=4096)  # few owners, modes and times in most layers
def _number(field: bytes) -> int:
    """Parse octal digits, or GNU's binary form of larger numbers."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field, "big") - ((0x80 if field[0] == 0x80 else 0x100) << 8 * (len(field) - 1))
    return _read(field.partition(b"\0")[0].strip() or b"0", 8)


def _read(text: str | bytes | bytearray, base: int = 10) -> int:
    try:
        return int(text, base)
    except ValueError:
        decoded = text if isinstance(text, str) else text.decode("ascii", "replace")
        raise ValueError(f"'{decoded[:40]}' is not a number of base {base}") from None


_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_KEYS = (b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime")  # the only fields used from such a header
_SPARSE = b"GNU.sparse."
_SPARSE_KEYS = (b"major", b"name", b"size", b"realsize", b"map")
_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_EXTENDED = (*_PAX, tarfile.XGLTYPE, *_LONG)


def _parse_extended(kind: bytes, data: bytes) -> dict[str, str]:
    """Return the fields for the next entry in an extended header (POSIX pax; GNU's long names).

    A global header has no effect, as in docker.
    """
    if kind in _LONG:
        return {_LONG[kind]: _name(data)}
    records: dict[str, str] = {}
    regions: list[str] = []  # of the oldest sparse format, which repeats its keys
    offset = 0
    while kind in _PAX and offset < len(data):
        digits = data[offset : offset + 9].partition(b" ")[0]
        if not digits.isdigit() or not len(digits) + 1 < int(digits) <= len(data) - offset:
            raise CorruptDataError("broken extended header")
        end = offset + int(digits)
        key, _, value = data[offset + len(digits) + 1 : end].rstrip(b"\n").partition(b"=")
        if key in _KEYS or (key.startswith(_SPARSE) and key[len(_SPARSE) :] in _SPARSE_KEYS):
            records[key.decode()] = value.decode("utf-8", "surrogateescape")
        elif key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            regions.append(value.decode("utf-8", "surrogateescape"))
        offset = end
    return records | ({"GNU.sparse.map": ",".join(regions)} if regions else {})


# --- sparse files ----------------------------------------------------------------------------------


def _is_sparse(extended: dict[str, str]) -> bool:
    return bool(extended) and ("GNU.sparse.map" in extended or extended.get("GNU.sparse.major") == "1")


def _expand(entry: TarEntry, sparse: _SparseMap) -> tuple[int, Iterator[bytes]]:
    """Return the size of a sparse file and its bytes with filled holes (GNU tar's manual, appendix D)."""
    extended, block = sparse
    stream, stored = entry.source, entry.size
    try:
        if block:
            size, regions = _number(block[483:495]), _old_regions(stream, block)
        elif extended.get("GNU.sparse.major") == "1":
            size = _read(extended["GNU.sparse.realsize"])
            regions, used = _leading_regions(stream, stored)
            stored -= used
        else:
            size = _read(extended["GNU.sparse.size"])
            regions = _pairs([_read(text) for text in extended["GNU.sparse.map"].split(",") if text])
        end = 0
        for offset, length in regions:
            if offset < end or length < 0:
                raise ValueError("its parts overlap")
            end = offset + length
        if end > size or sum(length for _, length in regions) != stored:
            raise ValueError("its parts do not add up to its size")
    except (KeyError, ValueError) as error:
        reason = printable(f"it has no {error}" if isinstance(error, KeyError) else str(error))
        raise CorruptDataError(f"'{printable(entry.name)}' is a broken sparse file: {reason}") from error
    return size, _filled(stream, regions, size)


def _filled(stream: TarStream, regions: list[tuple[int, int]], size: int) -> Iterator[bytes]:
    at = 0
    for offset, length in (*regions, (size, 0)):
        while at < offset:
            yield bytes(min(offset - at, 1 << 18))
            at += min(offset - at, 1 << 18)
        rest = length
        while rest:
            piece = stream.piece(rest)
            rest -= len(piece)
            yield bytes(piece)
        at += length


def _old_regions(stream: TarStream, block: bytes) -> list[tuple[int, int]]:
    """Return the regions of type S: four in the header, 21 in each following block."""
    fields, more, rest = block[386:482], block[482], HEADER_LIMIT
    regions: list[tuple[int, int]] = []
    while True:
        for offset in range(0, len(fields), 24):
            if not any(fields[offset : offset + 24]):
                break
            regions.append(
                (_number(fields[offset : offset + 12]), _number(fields[offset + 12 : offset + 24]))
            )
        rest -= BLOCK
        if not more:
            return regions
        if rest < 0:
            raise ValueError(f"its map has more than {HEADER_LIMIT} bytes")
        following = stream.exactly(BLOCK)
        if not following:
            raise ValueError("its map is truncated")
        fields, more = following[:504], following[504]


def _leading_regions(stream: TarStream, stored: int) -> tuple[list[tuple[int, int]], int]:
    """Return the regions of version 1.0 (lines of numbers before the file), and the bytes of the lines."""
    data, lines, expected = bytearray(), 0, 1
    while lines < expected:
        if len(data) >= min(stored, HEADER_LIMIT):
            raise ValueError("its map is truncated")
        block = stream.exactly(BLOCK)
        if not lines and b"\n" in block:
            expected = 1 + 2 * _read((data + block).partition(b"\n")[0])
            if expected < 1:
                raise ValueError("its map is broken")
        data += block
        lines += block.count(b"\n")
    numbers = [_read(number) for number in data.split(b"\n")[1:expected]]
    return _pairs(numbers), len(data)


def _pairs(numbers: list[int]) -> list[tuple[int, int]]:
    if len(numbers) % 2:
        raise ValueError("its map is truncated")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class TarStream:
    """Chunks of a stream, read in the sizes that a tar needs. Large chunks are not copied."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = b""
        self._at = 0  # bytes of the chunk that were read
        self._before = 0  # bytes of earlier chunks
        self.skipped: list[str] = []
        """Names of the device nodes and FIFOs that were skipped."""

    @property
    def position(self) -> int:
        return self._before + self._at

    def piece(self, most: int) -> bytes | memoryview:
        """Return one to `most` bytes, a complete chunk without a copy. Raises CorruptDataError at the end."""
        if self._at == len(self._chunk):
            self._continue()
        start, end = self._at, min(self._at + most, len(self._chunk))
        self._at = end
        return self._chunk if end - start == len(self._chunk) else memoryview(self._chunk)[start:end]

    def exactly(self, count: int, *, limit: int = BLOCK) -> bytes:
        """Return `count` bytes, or none at the end of the stream."""
        if count > limit:
            raise CorruptDataError(f"invalid size of a header at byte {self.position}: {count} bytes")
        start, end = self._at, self._at + count
        if end <= len(self._chunk):
            self._at = end
            return self._chunk[start:end]
        data = bytearray()
        while len(data) < count and (self._at < len(self._chunk) or self._next()):
            data += self.piece(count - len(data))
        if data and len(data) < count:
            raise CorruptDataError(f"it ends at byte {self.position}, in the middle of a header")
        return bytes(data)

    def skip(self, count: int) -> None:
        """Skip `count` bytes. Raises CorruptDataError if the stream has fewer."""
        while count > (rest := len(self._chunk) - self._at):
            count -= rest
            self._at += rest
            self._continue()
        self._at += count

    def drain(self) -> None:
        while self._next():
            pass

    def _continue(self) -> None:
        if not self._next():
            raise CorruptDataError(f"it ends at byte {self.position}, in the middle of a file")

    def _next(self) -> bool:
        for chunk in self._chunks:
            if chunk:
                self._before += len(self._chunk)
                self._chunk, self._at = chunk, 0
                return True
        return False
