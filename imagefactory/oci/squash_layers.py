"""One layer as a squashfs has it: its files' blocks in a row, and an index of its entries.

The row depends on the layer and on `Squeeze` alone, not on what lies before it: an image's squashfs is the
rows of its layers, and tables over them (squash_tree.py). The packing is done by other threads, in pieces of
about a megabyte; the blocks are written in the order of the tar whoever is ready first.
"""

from __future__ import annotations

import tarfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any

from imagefactory.oci.squashfs import STORED, File, Folder, Link, Node, Owned
from imagefactory.oci.tree import OPAQUE, WHITEOUT, Data, Member

PIECE = 1 << 20
_WAITING = 8  # pieces of a layer that are packed or wait for that: what bounds its memory

Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Squeeze:
    """How blocks are packed: zstd's level, and the bytes of a block (a power of two, 4 KiB to 1 MiB)."""

    level: int
    block: int

    @property
    def identity(self) -> str:
        """What decides the packed bytes beside the plain ones: library, version, level, size of a block."""
        import zstandard

        version = ".".join(map(str, zstandard.ZSTD_VERSION))
        return f"libzstd {version} level {self.level} blocks of {self.block}"

    def compressor(self) -> Callable[[bytes], bytes]:
        """Packs one block, for one thread."""
        import zstandard

        return zstandard.ZstdCompressor(level=self.level).compress


@dataclass(slots=True, kw_only=True)
class LayerIndex:
    """What a layer does to those below it: first it hides, then it lays `root` over them.

    `hidden` are paths, `opaque` folders whose lower entries go. `fragments` are starts and packed sizes;
    they and the files' starts count from the beginning of the layer's row.
    """

    root: Folder = field(default_factory=Folder)
    hidden: list[Parts] = field(default_factory=list)
    opaque: list[Parts] = field(default_factory=list)
    fragments: list[tuple[int, int]] = field(default_factory=list)


class Packers:
    """Threads that pack blocks. `stop` ends them within a piece, as the end of the `with` does."""

    def __init__(self, squeeze: Squeeze, workers: int) -> None:
        self.squeeze = squeeze
        self.stopped = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=workers)
        self._own = threading.local()

    def __enter__(self) -> Packers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def pack(self, piece: bytes) -> Future[list[bytes | None]]:
        """The packed blocks of `piece`, None for one that is to be stored as it is."""
        return self._pool.submit(self._pack, piece)

    def _pack(self, piece: bytes) -> list[bytes | None]:
        if self.stopped.is_set():
            raise StoppedError
        if not hasattr(self._own, "compress"):
            self._own.compress = self.squeeze.compressor()
        packed: list[bytes | None] = []
        for plain in _blocks(piece, self.squeeze.block):
            made = self._own.compress(plain)
            packed.append(made if len(made) < len(plain) else None)
        return packed


class StoppedError(Exception):
    """Another thread failed, or the user interrupts."""


class LayerPacker:
    """Takes a layer's entries (unpack_layer.Entries), writes the row into `out`; `index` is whole at the end.

    Entries that nobody sees in the end (a file that a later one replaces) cost their bytes and no more.
    """

    def __init__(self, out: IO[bytes], packers: Packers) -> None:
        self.index = LayerIndex()
        self.size = 0
        self._out, self._packers = out, packers
        self._block = packers.squeeze.block
        self._open = bytearray()  # the fragment that is being filled
        self._opened = 0  # how many were begun
        self._waiting: deque[tuple[bytes, Future[list[bytes | None]], File | None]] = deque()

    def __enter__(self) -> LayerPacker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._close_fragment()
            while self._waiting:
                self._write_first()

    # --- entries -----------------------------------------------------------------------------------

    def folder(self, parts: Parts, member: Member) -> None:
        self._folder(parts).owned = _owned(member)

    def file(self, parts: Parts, member: Member, data: Data) -> None:
        made = File(owned=_owned(member), size=member.size)
        left, small = member.size, member.size < self._block
        while left:
            piece = data.read(min(PIECE, left))
            if len(piece) < min(PIECE, left):
                raise EOFError(f"the archive ends inside '{member.name}'")
            left -= len(piece)
            if small:
                self._share(made, piece)
            else:
                self._send(piece, made)
        self._put(parts, made)

    def symlink(self, parts: Parts, member: Member) -> None:
        self._put(parts, Link(owned=_owned(member), target=member.linkname))

    def hard_link(self, parts: Parts, target: Parts, member: Member) -> None:
        node = self._find(target)
        if node is None:
            raise tarfile.TarError(f"'{member.name}' links to '{member.linkname}', not in this layer")
        if not isinstance(node, File):
            raise tarfile.TarError(f"'{member.name}' links to '{member.linkname}', which is not a file")
        self._put(parts, node)

    def whiteout(self, parts: Parts) -> None:
        above, name = parts[:-1], parts[-1]
        hidden = name.removeprefix(WHITEOUT)
        if name == OPAQUE:
            self.index.opaque.append(above)
        else:
            self.index.hidden.append((*above, hidden))
        self._folder(above)

    def remove(self, parts: Parts) -> None:
        above = self._find(parts[:-1])
        if isinstance(above, Folder):
            above.entries.pop(parts[-1], None)

    def _folder(self, parts: Parts) -> Folder:
        here = self.index.root
        for name in parts:
            below = here.entries.setdefault(name, Folder())
            if not isinstance(below, Folder):
                raise tarfile.TarError(f"'{'/'.join(parts)}' is used as a directory but is a link or file")
            here = below
        return here

    def _put(self, parts: Parts, node: File | Link) -> None:
        entries = self._folder(parts[:-1]).entries
        if isinstance(entries.get(parts[-1]), Folder):
            raise tarfile.TarError(f"'{parts[-1]}' is a directory and later something else")
        entries[parts[-1]] = node

    def _find(self, parts: Parts) -> Node | None:
        node: Node | None = self.index.root
        for name in parts:
            node = node.entries.get(name) if isinstance(node, Folder) else None
        return node

    # --- bytes -------------------------------------------------------------------------------------

    def _share(self, file: File, data: bytes) -> None:
        if len(self._open) + len(data) > self._block:
            self._close_fragment()
        file.fragment, file.offset = self._opened, len(self._open)
        self._open += data

    def _close_fragment(self) -> None:
        if self._open:
            self._send(bytes(self._open), None)
            self._open.clear()
            self._opened += 1

    def _send(self, piece: bytes, file: File | None) -> None:
        self._waiting.append((piece, self._packers.pack(piece), file))
        if len(self._waiting) > _WAITING:
            self._write_first()

    def _write_first(self) -> None:
        piece, future, file = self._waiting.popleft()
        for plain, packed in zip(_blocks(piece, self._block), future.result(), strict=True):
            size = len(plain) | STORED if packed is None else len(packed)
            if file is None:
                self.index.fragments.append((self.size, size))
            else:
                if not file.blocks:
                    file.start = self.size
                file.blocks.append(size)
            self.size += self._out.write(plain if packed is None else packed)


def _blocks(piece: bytes, block: int) -> Iterator[bytes]:
    if len(piece) <= block:
        yield piece
    else:
        yield from (piece[at : at + block] for at in range(0, len(piece), block))


def _owned(member: Member) -> Owned:
    mtime = min(max(int(member.mtime), 0), (1 << 32) - 1)
    return Owned(mode=member.mode & 0o7777, uid=member.uid, gid=member.gid, mtime=mtime)


# --- as a record -----------------------------------------------------------------------------------


def format_index(index: LayerIndex) -> dict[str, object]:
    """For JSON; `parse_index` reads it."""
    files: dict[int, int] = {}
    rows: list[list[object]] = []

    def node(one: Node) -> object:
        if isinstance(one, File):
            if id(one) not in files:
                files[id(one)] = len(rows)
                rows.append([_row(one.owned), one.size, one.start, one.blocks, one.fragment, one.offset])
            return files[id(one)]
        if isinstance(one, Link):
            return [one.target, _row(one.owned)]
        entries = {name: node(below) for name, below in one.entries.items()}
        return {"owned": one.owned and _row(one.owned), "entries": entries}

    return {
        "root": node(index.root),
        "files": rows,
        "hidden": index.hidden,
        "opaque": index.opaque,
        "fragments": index.fragments,
    }


def parse_index(value: dict[str, Any]) -> LayerIndex:
    """Raises KeyError, TypeError, ValueError or IndexError for another program's record."""
    files = [
        File(owned=Owned(mode=m, uid=u, gid=g, mtime=t), size=size, start=start, blocks=blocks,
             fragment=fragment, offset=offset)
        for (m, u, g, t), size, start, blocks, fragment, offset in value["files"]
    ]  # fmt: skip

    def node(one: Any) -> Node:
        if isinstance(one, int):
            return files[one]
        if isinstance(one, list):
            return Link(owned=_parse_row(one[1]), target=one[0])
        owned = _parse_row(one["owned"]) if one["owned"] else None
        return Folder(owned=owned, entries={name: node(below) for name, below in one["entries"].items()})

    root = node(value["root"])
    if not isinstance(root, Folder):
        raise ValueError("the root is not a directory")
    return LayerIndex(
        root=root,
        hidden=[tuple(path) for path in value["hidden"]],
        opaque=[tuple(path) for path in value["opaque"]],
        fragments=[(start, size) for start, size in value["fragments"]],
    )


def _row(owned: Owned) -> list[int]:
    return [owned.mode, owned.uid, owned.gid, owned.mtime]


def _parse_row(row: list[int]) -> Owned:
    mode, uid, gid, mtime = row
    return Owned(mode=mode, uid=uid, gid=gid, mtime=mtime)
