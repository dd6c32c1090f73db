"""The tables of a squashfs 4.0, as bytes: a tree whose data is elsewhere. No I/O.

Format: Linux's fs/squashfs/squashfs_fs.h. A file system is a superblock, the data blocks, and tables of
inodes, directories, fragments, inodes by number and owners. Tables are rows of blocks of 8 KiB, each
compressed separately. A position is the start of its block and the offset in the uncompressed block.

A file is a row of compressed blocks of one size, the last one shorter. A rest of less than a block is in a
fragment, a block that many files share.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

SUPERBLOCK = 96
STORED = 1 << 24
"""The bit in the size of a block for uncompressed bytes."""
NO_FRAGMENT = 0xFFFFFFFF
_NONE = (1 << 64) - 1
_TABLE_BLOCK = 8192
_STORED_TABLE = 1 << 15
_ZSTD = 6
_FLAGS = 0x80 | 0x200  # has the table of inodes by number (NFS, overlay's index); has no extended attributes
_DIRECTORY_INODE, _FILE, _LINK, _LARGE_DIRECTORY_INODE, _LARGE_FILE = 1, 2, 3, 8, 9
_RUN = 256  # entries of a directory per header

Compress = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class InodeAttributes:
    """Fields of every inode. `mode` are the permissions (12 bits), `mtime` seconds since 1970 (32 bits)."""

    mode: int
    uid: int
    gid: int
    mtime: int


IMPLIED = InodeAttributes(mode=0o755, uid=0, gid=0, mtime=0)
"""The attributes of a directory without an entry of its own."""


@dataclass(slots=True, eq=False, kw_only=True)
class SquashFile:
    """A file of `size` bytes. Two names of one file share the object.

    `blocks` are the packed sizes of its consecutive blocks, which begin at `start` bytes after the
    superblock's start. Or the file is at `offset` bytes in the unpacked fragment `fragment`.
    """

    owned: InodeAttributes
    size: int
    start: int = 0
    blocks: list[int] = field(default_factory=list)
    fragment: int = NO_FRAGMENT
    offset: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class SquashSymlink:
    """A symbolic link."""

    owned: InodeAttributes
    target: str


@dataclass(slots=True, eq=False, kw_only=True)
class SquashDirectory:
    """A directory with its entries by name. `owned` is None if the layer has only entries in it."""

    owned: InodeAttributes | None = None
    entries: dict[str, Node] = field(default_factory=dict)


Node = SquashFile | SquashSymlink | SquashDirectory


def format_tables(
    root: SquashDirectory,
    fragments: Sequence[tuple[int, int]],
    *,
    data_end: int,
    block: int,
    mtime: int,
    compress: Compress,
) -> tuple[bytes, bytes]:
    """Return the superblock, and the tables that follow `data_end`, padded to 4 KiB for loop devices.

    `fragments` are starts and packed sizes, counted from the superblock; `block` is the bytes of a block;
    `compress` (zstd) must be the one that packed the data.
    """
    inodes = _InodeTable(root, compress)
    inodes.write(root, inodes.count + 1)
    tables = bytearray()

    def place(data: bytes | bytearray) -> int:
        start = data_end + len(tables)
        tables.extend(data)
        return start

    def indexed(data: bytes) -> int:
        table = _MetadataTable(compress)
        table.put(data)
        table.close()
        start = place(table.packed)
        return place(b"".join(struct.pack("<Q", start + offset) for offset in table.starts))

    inode_start = place(inodes.table.packed)
    folder_start = place(inodes.folders.packed)
    fragment_start = indexed(b"".join(struct.pack("<QII", start, size, 0) for start, size in fragments))
    export_start = indexed(b"".join(struct.pack("<Q", place) for place in inodes.places()))
    owner_start = indexed(b"".join(struct.pack("<I", owner) for owner in inodes.owners))
    used = data_end + len(tables)
    superblock = struct.pack(
        "<4sIIIIHHHHHHQQQQQQQQ",
        *(b"hsqs", inodes.count, mtime, block, len(fragments)),
        *(_ZSTD, block.bit_length() - 1, _FLAGS, len(inodes.owners), 4, 0),
        *(inodes.place_of(root), used, owner_start, _NONE),
        *(inode_start, folder_start, fragment_start, export_start),
    )
    return superblock, bytes(tables) + bytes(-used % 4096)


class _MetadataTable:
    """Bytes in compressed blocks of 8 KiB; `starts` are the positions of the blocks in `packed`."""

    def __init__(self, compress: Compress) -> None:
        self._compress = compress
        self._open = bytearray()
        self.packed = bytearray()
        self.starts: list[int] = []

    @property
    def place(self) -> tuple[int, int]:
        """Return the position of the next byte: the start of its block, and the offset in that block."""
        return len(self.packed), len(self._open)

    def put(self, data: bytes) -> None:
        self._open += data
        while len(self._open) >= _TABLE_BLOCK:
            self._pack(bytes(self._open[:_TABLE_BLOCK]))
            del self._open[:_TABLE_BLOCK]

    def close(self) -> None:
        if self._open:
            self._pack(bytes(self._open))
            self._open.clear()

    def _pack(self, plain: bytes) -> None:
        self.starts.append(len(self.packed))
        packed = self._compress(plain)
        if len(packed) < len(plain):
            self.packed += struct.pack("<H", len(packed)) + packed
        else:
            self.packed += struct.pack("<H", len(plain) | _STORED_TABLE) + plain


class _InodeTable:
    """Inodes and directory lists, numbered from 1; entries of a directory are consecutive."""

    def __init__(self, root: SquashDirectory, compress: Compress) -> None:
        self.table, self.folders = _MetadataTable(compress), _MetadataTable(compress)
        self.owners: list[int] = []
        self._owner_places: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # by id(): the tree references all of them
        self._names: dict[int, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._number(root)
        self._count(root)
        self.count = len(self._numbers)

    def place_of(self, node: Node) -> int:
        start, offset = self._places[self._numbers[id(node)]]
        return start << 16 | offset

    def places(self) -> Iterator[int]:
        for number in range(1, self.count + 1):
            start, offset = self._places[number]
            yield start << 16 | offset

    def _number(self, node: Node) -> None:
        self._names[id(node)] = self._names.get(id(node), 0) + 1
        self._numbers.setdefault(id(node), len(self._numbers) + 1)

    def _count(self, directory: SquashDirectory) -> None:
        for _, node in _sorted(directory):
            self._number(node)
        for _, node in _sorted(directory):
            if isinstance(node, SquashDirectory):
                self._count(node)

    def write(self, directory: SquashDirectory, above: int) -> None:
        """Write the entries of `directory`, its list, then itself; `above` is the number of its parent."""
        number = self._numbers[id(directory)]
        for _, node in _sorted(directory):
            if isinstance(node, SquashDirectory):
                self.write(node, number)
            elif self._numbers[id(node)] not in self._places:
                self._begin(node)
                self.table.put(self._file(node) if isinstance(node, SquashFile) else self._link(node))
        listed = b"".join(self._list(_sorted(directory)))
        start, offset = self.folders.place
        self.folders.put(listed)
        self._begin(directory)
        names = 2 + sum(isinstance(node, SquashDirectory) for node in directory.entries.values())
        size = len(listed) + 3  # the format counts `.` and `..`, which are in no list
        owned = directory.owned or IMPLIED
        if size < 1 << 16:
            head = self._head(_DIRECTORY_INODE, number, owned)
            self.table.put(head + struct.pack("<IIHHI", start, names, size, offset, above))
        else:
            head = self._head(_LARGE_DIRECTORY_INODE, number, owned)
            rest = struct.pack("<IIIIHHI", names, size, start, above, 0, offset, NO_FRAGMENT)
            self.table.put(head + rest)
        if above > self.count:  # the root comes last
            self.table.close()
            self.folders.close()

    def _begin(self, node: Node) -> None:
        self._places[self._numbers[id(node)]] = self.table.place

    def _head(self, kind: int, number: int, owned: InodeAttributes) -> bytes:
        owners = (self._owner(owned.uid), self._owner(owned.gid))
        return struct.pack("<HHHHII", kind, owned.mode, *owners, owned.mtime, number)

    def _owner(self, owner: int) -> int:
        if owner not in self._owner_places:
            self._owner_places[owner] = len(self.owners)
            self.owners.append(owner)
        return self._owner_places[owner]

    def _file(self, file: SquashFile) -> bytes:
        number, names = self._numbers[id(file)], self._names[id(file)]
        if names == 1 and file.start < 1 << 32 and file.size < 1 << 32:
            head = self._head(_FILE, number, file.owned)
            rest = struct.pack("<IIII", file.start, file.fragment, file.offset, file.size)
        else:
            head = self._head(_LARGE_FILE, number, file.owned)
            rest = struct.pack(
                "<QQQIIII", file.start, file.size, 0, names, file.fragment, file.offset, NO_FRAGMENT
            )
        return head + rest + struct.pack(f"<{len(file.blocks)}I", *file.blocks)

    def _link(self, link: SquashSymlink) -> bytes:
        target = encode(link.target)
        head = self._head(_LINK, self._numbers[id(link)], link.owned)
        return head + struct.pack("<II", self._names[id(link)], len(target)) + target

    def _list(self, entries: Sequence[tuple[bytes, Node]]) -> Iterator[bytes]:
        """Yield runs of entries whose inodes are in one block and have near numbers: one header each."""
        run: list[tuple[bytes, Node]] = []
        for entry in entries:
            if run and (len(run) == _RUN or self._apart(run[0][1], entry[1])):
                yield self._run(run)
                run = []
            run.append(entry)
        if run:
            yield self._run(run)

    def _apart(self, first: Node, node: Node) -> bool:
        number, other_number = self._numbers[id(first)], self._numbers[id(node)]
        return (
            self._places[number][0] != self._places[other_number][0]
            or not -(1 << 15) <= other_number - number < 1 << 15
        )

    def _run(self, run: Iterable[tuple[bytes, Node]]) -> bytes:
        rows = [(name, self._numbers[id(node)], _inode_type(node)) for name, node in run]
        base = rows[0][1]
        head = struct.pack("<III", len(rows) - 1, self._places[base][0], base)
        return head + b"".join(
            struct.pack("<HhHH", self._places[number][1], number - base, kind, len(name) - 1) + name
            for name, number, kind in rows
        )


def encode(name: str) -> bytes:
    """Return the bytes of a name or target in the tar."""
    return name.encode("utf-8", "surrogateescape")


def _sorted(directory: SquashDirectory) -> list[tuple[bytes, Node]]:
    named = ((encode(name), node) for name, node in directory.entries.items())
    return sorted(named, key=lambda entry: entry[0])


def _inode_type(node: Node) -> int:
    return (
        _DIRECTORY_INODE
        if isinstance(node, SquashDirectory)
        else _FILE
        if isinstance(node, SquashFile)
        else _LINK
    )
