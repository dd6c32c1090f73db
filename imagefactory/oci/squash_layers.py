"""Layers as parts of a squashfs: the blocks of a layer in a row, an index, and tables over all layers.

A row depends only on its layer and on SquashCompression. An image's squashfs is the rows of its layers and
tables. Threads compress pieces of about a megabyte; blocks are written in the order of the tar.

No row is stored separately. It is part of a .sif of the store, and a record has its .sif, offset, checksum
and files. Without either, the layer is compressed again, into the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO, Any

from imagefactory.errors import StoreError
from imagefactory.fs import remove_inside
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Descriptor, OciLayer, canonical_json
from imagefactory.oci.squashfs import (
    NO_FRAGMENT,
    STORED,
    SUPERBLOCK,
    InodeAttributes,
    Node,
    SquashDirectory,
    SquashFile,
    SquashSymlink,
    format_tables,
)
from imagefactory.oci.tree import OPAQUE, WHITEOUT, FileData, TarMember
from imagefactory.oci.unpack import read_layer, report_skipped
from imagefactory.progress import Progress, ProgressTask

PIECE = 1 << 20
_WAITING = 8  # pieces of a layer in progress, which limits its memory

Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SquashCompression:
    """The level of zstd, and the bytes of a block (a power of two, 4 KiB to 1 MiB)."""

    level: int
    block: int

    @property
    def identity(self) -> str:
        """A text of everything that determines the compressed bytes, besides the plain ones."""
        import zstandard

        version = ".".join(map(str, zstandard.ZSTD_VERSION))
        return f"libzstd {version} level {self.level} blocks of {self.block}"

    def compressor(self) -> Callable[[bytes], bytes]:
        """Return a function that compresses one block, for one thread."""
        import zstandard

        return zstandard.ZstdCompressor(level=self.level).compress


@dataclass(slots=True, kw_only=True)
class LayerIndex:
    """The effect of a layer on lower layers: it hides paths, then adds `root`.

    `hidden` are paths, `opaque` directories whose lower entries disappear. `fragments` are starts and
    compressed sizes. Starts of fragments and files count from the start of the layer's row.
    """

    root: SquashDirectory = field(default_factory=SquashDirectory)
    hidden: list[Parts] = field(default_factory=list)
    opaque: list[Parts] = field(default_factory=list)
    fragments: list[tuple[int, int]] = field(default_factory=list)


class PackerPool:
    """Threads that compress blocks. `stopped` ends them within a piece, as the end of the `with` does."""

    def __init__(self, squeeze: SquashCompression, workers: int) -> None:
        self.squeeze = squeeze
        self.stopped = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=workers)
        self._own = threading.local()

    def __enter__(self) -> PackerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def pack(self, piece: bytes) -> Future[list[bytes | None]]:
        """Return the compressed blocks of `piece`, None for a block that is stored uncompressed."""
        return self._pool.submit(self._pack, piece)

    def _pack(self, piece: bytes) -> list[bytes | None]:
        if self.stopped.is_set():
            raise PackingStoppedError
        if not hasattr(self._own, "compress"):
            self._own.compress = self.squeeze.compressor()
        packed: list[bytes | None] = []
        for plain in _blocks(piece, self.squeeze.block):
            data = self._own.compress(plain)
            packed.append(data if len(data) < len(plain) else None)
        return packed


class PackingStoppedError(Exception):
    """Another thread failed, or the user interrupted."""


class LayerPacker:
    """An EntrySink that writes a layer's row to `out`. `index` is complete at the end.

    Replaced entries stay in the row as unused bytes.
    """

    def __init__(self, out: IO[bytes], packers: PackerPool) -> None:
        self.index = LayerIndex()
        self.size = 0
        self._out, self._packers = out, packers
        self._block = packers.squeeze.block
        self._open = bytearray()  # the current fragment
        self._opened = 0  # its number
        self._waiting: deque[tuple[bytes, Future[list[bytes | None]], SquashFile | None]] = deque()

    def __enter__(self) -> LayerPacker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._close_fragment()
            while self._waiting:
                self._write_first()

    def folder(self, parts: Parts, member: TarMember) -> None:
        self._folder(parts).owned = _inode_attributes(member)

    def file(self, parts: Parts, member: TarMember, data: FileData) -> None:
        file_ = SquashFile(owned=_inode_attributes(member), size=member.size)
        rest, small = member.size, member.size < self._block
        while rest:
            piece = data.read(min(PIECE, rest))
            if len(piece) < min(PIECE, rest):
                raise EOFError(f"the archive ends inside '{member.name}'")
            rest -= len(piece)
            if small:
                self._share(file_, piece)
            else:
                self._send(piece, file_)
        self._put(parts, file_)

    def symlink(self, parts: Parts, member: TarMember) -> None:
        self._put(parts, SquashSymlink(owned=_inode_attributes(member), target=member.linkname))

    def hard_link(self, parts: Parts, target: Parts, member: TarMember) -> None:
        node = _find(self.index.root, target)
        if node is None:
            raise tarfile.TarError(f"'{member.name}' links to '{member.linkname}', not in this layer")
        if not isinstance(node, SquashFile):
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
        _remove(self.index.root, parts)

    def ensure_folder(self, parts: Parts) -> None:
        """Add a directory that keeps mode and owner where a lower layer has it."""
        self._folder(parts)

    def _folder(self, parts: Parts) -> SquashDirectory:
        here = self.index.root
        for name in parts:
            below = here.entries.setdefault(name, SquashDirectory())
            if not isinstance(below, SquashDirectory):
                raise tarfile.TarError(f"'{'/'.join(parts)}' is used as a directory but is a link or file")
            here = below
        return here

    def _put(self, parts: Parts, node: SquashFile | SquashSymlink) -> None:
        entries = self._folder(parts[:-1]).entries
        if isinstance(entries.get(parts[-1]), SquashDirectory):
            raise tarfile.TarError(f"'{parts[-1]}' is a directory in one entry and not in a later one")
        entries[parts[-1]] = node

    def _share(self, file: SquashFile, data: bytes) -> None:
        if len(self._open) + len(data) > self._block:
            self._close_fragment()
        file.fragment, file.offset = self._opened, len(self._open)
        self._open += data

    def _close_fragment(self) -> None:
        if self._open:
            self._send(bytes(self._open), None)
            self._open.clear()
            self._opened += 1

    def _send(self, piece: bytes, file: SquashFile | None) -> None:
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


def _find(root: SquashDirectory, parts: Parts) -> Node | None:
    node: Node | None = root
    for name in parts:
        node = node.entries.get(name) if isinstance(node, SquashDirectory) else None
    return node


def _remove(root: SquashDirectory, parts: Parts) -> None:
    parent = _find(root, parts[:-1])
    if isinstance(parent, SquashDirectory):
        parent.entries.pop(parts[-1], None)


def _blocks(piece: bytes, block: int) -> Iterator[bytes]:
    if len(piece) <= block:
        yield piece
    else:
        yield from (piece[offset : offset + block] for offset in range(0, len(piece), block))


def _inode_attributes(member: TarMember) -> InodeAttributes:
    mtime = min(max(int(member.mtime), 0), (1 << 32) - 1)
    return InodeAttributes(mode=member.mode & 0o7777, uid=member.uid, gid=member.gid, mtime=mtime)


# --- the index as a record ---


def format_index(index: LayerIndex) -> dict[str, object]:
    """Return an index for JSON; `parse_index` reads it."""
    files: dict[int, int] = {}
    rows: list[list[object]] = []

    def node(value: Node) -> object:
        if isinstance(value, SquashFile):
            if id(value) not in files:
                files[id(value)] = len(rows)
                rows.append(
                    [
                        [*astuple(value.owned)],
                        value.size,
                        value.start,
                        value.blocks,
                        value.fragment,
                        value.offset,
                    ]
                )
            return files[id(value)]
        if isinstance(value, SquashSymlink):
            return [value.target, [*astuple(value.owned)]]
        entries = {name: node(below) for name, below in value.entries.items()}
        return {"owned": value.owned and [*astuple(value.owned)], "entries": entries}

    return {
        "root": node(index.root),
        "files": rows,
        "hidden": index.hidden,
        "opaque": index.opaque,
        "fragments": index.fragments,
    }


def parse_index(value: dict[str, Any]) -> LayerIndex:
    """Return an index. Raises KeyError, TypeError, ValueError or IndexError for an invalid record."""
    files = [
        SquashFile(
            owned=_attributes(owned), size=size, start=start, blocks=blocks, fragment=fragment, offset=offset
        )
        for owned, size, start, blocks, fragment, offset in value["files"]
    ]

    def node(value: Any) -> Node:
        if isinstance(value, int):
            return files[value]
        if isinstance(value, list):
            return SquashSymlink(owned=_attributes(value[1]), target=value[0])
        owned = _attributes(value["owned"]) if value["owned"] else None
        return SquashDirectory(
            owned=owned, entries={name: node(below) for name, below in value["entries"].items()}
        )

    root = node(value["root"])
    if not isinstance(root, SquashDirectory):
        raise ValueError("the root is not a directory")
    return LayerIndex(
        root=root,
        hidden=[tuple(path) for path in value["hidden"]],
        opaque=[tuple(path) for path in value["opaque"]],
        fragments=[(start, size) for start, size in value["fragments"]],
    )


def _attributes(row: list[int]) -> InodeAttributes:
    mode, uid, gid, mtime = row
    return InodeAttributes(mode=mode, uid=uid, gid=gid, mtime=mtime)


# --- rows in the store ---

SQUASHED = "squashed"
"""The directory of the records."""
VERSION = 1
"""The format of rows and images. With another number all are rebuilt."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SquashRow:
    """A row of `size` bytes at `offset` in the file at `path`; a new row has no `digest` (sha256) yet."""

    index: LayerIndex
    path: Path
    offset: int
    size: int
    digest: str = ""


class StoredSifChangedError(Exception):
    """A row in a .sif of the store changed. `place` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.place = number


class SquashStore:
    """The rows of layers of `layout`, compressed by this number of threads."""

    def __init__(self, layout: Layout, squeeze: SquashCompression, workers: int) -> None:
        self.layout, self.squeeze, self.workers = layout, squeeze, workers

    def rows(self, layers: list[OciLayer], directory: Path, progress: Progress) -> list[SquashRow]:
        """Return the layers' rows in their order; missing rows are written to new files in `directory`.

        Raises StoreError for a corrupt layer, ToolError for a missing codec.
        """
        records = [self._recall(layer) for layer in layers]
        missing = [number for number, row in enumerate(records) if row is None]
        missing.sort(key=lambda number: -layers[number].descriptor.size)  # the longest first
        if missing:
            total = sum(layers[number].descriptor.size for number in missing)
            title = f"pack {len(missing)} of {len(layers)} layers"
            with (
                progress.task(title, total=total) as task,
                _threads(min(self.workers, len(missing))) as readers,
                PackerPool(self.squeeze, self.workers) as packers,
            ):
                packing = {
                    readers.submit(
                        self._pack, layers[number], directory / f"row-{number}", packers, task, progress
                    ): number
                    for number in missing
                }
                for future in as_completed(packing):
                    records[packing[future]] = future.result()
        return [row for row in records if row is not None]

    def _pack(
        self, layer: OciLayer, path: Path, packers: PackerPool, task: ProgressTask, progress: Progress
    ) -> SquashRow:
        with path.open("wb") as out:
            packer = LayerPacker(out, packers)
            blob = self.layout.blob_path(layer.descriptor.digest)
            report_skipped(layer, read_layer(layer, blob, path.parent, packer, task), progress)
        return SquashRow(index=packer.index, path=path, offset=0, size=packer.size)

    def remember(self, layer: OciLayer, sif: str, row: SquashRow) -> None:
        """Record that the row of `layer` is in the blob with the digest `sif`."""
        record = {"digest": sif, "offset": row.offset, "size": row.size, "sha256": row.digest}
        data = json.dumps({**record, "index": format_index(row.index)}, separators=(",", ":")).encode()
        self.layout.keep(self._record(layer), data)

    def forget(self, layer: OciLayer) -> None:
        """Delete the record of a layer whose row changed, and the .sif if it is corrupt."""
        record = self.layout.recall(SQUASHED, self._record(layer).stem) or {}
        remove_inside(self.layout.path, self._record(layer))
        if digest := str(record.get("digest", "")):
            self.layout.holds(Descriptor(media_type="", digest=digest, size=0))

    def _recall(self, layer: OciLayer) -> SquashRow | None:
        record = self.layout.recall(SQUASHED, self._record(layer).stem)
        try:
            if record is None or not (path := self.layout.blob_path(record["digest"])).is_file():
                return None
            return SquashRow(
                index=parse_index(record["index"]),
                path=path,
                offset=int(record["offset"]),
                size=int(record["size"]),
                digest=str(record["sha256"]),
            )
        except (StoreError, LookupError, TypeError, ValueError):
            return None  # a record of another version

    def _record(self, layer: OciLayer) -> Path:
        parts = canonical_json([SQUASHED, VERSION, self.squeeze.identity, layer.diff_id])
        return self.layout.path / SQUASHED / f"{hashlib.sha256(parts).hexdigest()}.json"

    def write(
        self, path: Path, head: bytes, rows: list[SquashRow], tail: bytes, task: ProgressTask
    ) -> tuple[str, list[SquashRow]]:
        """Write `head`, the rows and `tail` to a new file; return its digest, and the rows in it.

        New rows are removed from their old place. Raises StoredSifChangedError if a row does not match its
        record.
        """
        starts, offset = [], len(head)
        for row in rows:
            starts.append(offset)
            offset += row.size
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write_all(file, head, 0)
            _write_all(file, tail, offset)
            whole = _PrefixChecksum(file)
            written = []
            whole.to(len(head))
            with _threads(self.workers) as pool:
                copies = [
                    pool.submit(_copy, row, file, start, task)
                    for row, start in zip(rows, starts, strict=True)
                ]
                for number, (row, copy) in enumerate(zip(rows, copies, strict=True)):
                    digest = copy.result()
                    if row.digest not in ("", digest):
                        raise StoredSifChangedError(number)
                    written.append(
                        SquashRow(
                            index=row.index, path=path, offset=starts[number], size=row.size, digest=digest
                        )
                    )
                    whole.to(starts[number] + row.size)
            whole.to(offset + len(tail))
        finally:
            os.close(file)
        return whole.digest, written


class _PrefixChecksum:
    """A running digest for a file whose beginning is complete."""

    def __init__(self, file: int) -> None:
        self._file, self._at, self._sha256 = file, 0, hashlib.sha256()

    def to(self, end: int) -> None:
        while self._at < end:
            data = os.pread(self._file, min(_CHUNK, end - self._at), self._at)
            self._sha256.update(data)
            self._at += len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha256.hexdigest()}"


def _copy(row: SquashRow, file: int, start: int, task: ProgressTask) -> str:
    """Copy the row to `start`; return its sha256, or "cut" if the source is too short."""
    sha256 = hashlib.sha256()
    source = os.open(row.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not row.digest:
            row.path.unlink()  # a new row is not needed on the disk twice
        copied = 0
        while copied < row.size:
            data = os.pread(source, min(_CHUNK, row.size - copied), row.offset + copied)
            if not data:
                return "cut"
            sha256.update(data)
            _write_all(file, data, start + copied)
            copied += len(data)
            task.advance(len(data))
    finally:
        os.close(source)
    return sha256.hexdigest()


def _write_all(file: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written


@contextmanager
def _threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads whose queued work is dropped after a failure or an interrupt."""
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# --- one tree of all layers (OCI specification, whiteouts) ---


def format_image(
    rows: Sequence[tuple[LayerIndex, int]],
    order: Sequence[int],
    squeeze: SquashCompression,
    *,
    mtime: int,
    replaces: bool = False,
) -> tuple[bytes, bytes]:
    """Return the bytes before and after the rows of an image's layers: the superblock and the tables.

    `rows` are indexes and sizes of the layers in the file, the files of the format last. With `replaces`,
    these are an upper layer; else entries of the image that have another type stay. `order` are the numbers
    of the image's layers, the lowest first. An image may have a layer twice.
    """
    tree, starts, offset = SquashTree(), [], SUPERBLOCK
    for _, size in rows:
        starts.append(offset)
        offset += size
    for number in order:
        tree.lay(rows[number][0], starts[number])
    (tree.lay if replaces else tree.dress)(rows[-1][0], starts[-1])
    return format_tables(
        tree.root,
        tree.fragments,
        data_end=offset,
        block=squeeze.block,
        mtime=mtime,
        compress=squeeze.compressor(),
    )


class SquashTree:
    """The tree so far, and the fragments of all layers. The indexes of layers are not changed."""

    def __init__(self) -> None:
        self.root = SquashDirectory()
        self.fragments: list[tuple[int, int]] = []

    def lay(self, layer: LayerIndex, start: int) -> None:
        """Add the next layer. Its row begins at `start` in the file."""
        for path in layer.hidden:
            _remove(self.root, path)
        for path in layer.opaque:
            directory = _find(self.root, path)
            if isinstance(directory, SquashDirectory):
                directory.entries.clear()
        _lay(self.root, layer.root, _RelocatedFiles(start, len(self.fragments)))
        self._take_fragments(layer, start)

    def dress(self, index: LayerIndex, start: int) -> None:
        """Add apptainer's files to an image.

        Directories of the image stay, and so do entries with another type than apptainer's.
        """
        _set_attributes(self.root, index.root, _RelocatedFiles(start, len(self.fragments)))
        self._take_fragments(index, start)

    def _take_fragments(self, layer: LayerIndex, start: int) -> None:
        self.fragments += [(start + offset, size) for offset, size in layer.fragments]


class _RelocatedFiles:
    """Files of a layer at their offset in the image. A file with two names keeps both."""

    def __init__(self, start: int, fragments: int) -> None:
        self._start, self._fragments = start, fragments
        self._files: dict[int, SquashFile] = {}

    def __call__(self, node: SquashFile | SquashSymlink) -> SquashFile | SquashSymlink:
        if isinstance(node, SquashSymlink):
            return node
        if id(node) not in self._files:
            shared = node.fragment != NO_FRAGMENT
            self._files[id(node)] = SquashFile(
                owned=node.owned,
                size=node.size,
                start=node.start + self._start if node.blocks else 0,
                blocks=node.blocks,
                fragment=node.fragment + self._fragments if shared else NO_FRAGMENT,
                offset=node.offset,
            )
        return self._files[id(node)]


def _lay(below: SquashDirectory, above: SquashDirectory, moved: _RelocatedFiles) -> None:
    below.owned = above.owned or below.owned
    for name, node in above.entries.items():
        if isinstance(node, SquashDirectory):
            there = below.entries.get(name)
            if not isinstance(there, SquashDirectory):
                there = below.entries[name] = SquashDirectory()
            _lay(there, node, moved)
        else:
            below.entries[name] = moved(node)


def _set_attributes(image: SquashDirectory, source: SquashDirectory, moved: _RelocatedFiles) -> None:
    for name, node in source.entries.items():
        there = image.entries.get(name)
        if isinstance(node, SquashDirectory):
            if there is None:
                there = image.entries[name] = SquashDirectory(owned=node.owned)
            if isinstance(there, SquashDirectory):
                _set_attributes(there, node, moved)
        elif there is None or type(there) is type(node):
            image.entries[name] = moved(node)
