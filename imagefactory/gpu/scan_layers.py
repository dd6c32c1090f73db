"""Layers and images: what they hold for GPUs, in one forward pass over each layer's tar.

What a layer tells is kept in the store under its diff_id, so a layer that many images share is read once.
An image is its layers one over the other: what an upper one removes or replaces counts no more (OCI image
specification, "Layer Filesystem Changeset": whiteouts).
"""

from __future__ import annotations

import hashlib
import queue
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from imagefactory.errors import StoreError
from imagefactory.gpu.findings import Found, format_contents, is_text, read_name, readable_path
from imagefactory.gpu.model import Contents
from imagefactory.gpu.scan import CHUNK, PLAIN, Look, stopping_pool
from imagefactory.gpu.scan_records import LayerScan, keep_scan, recall_scan
from imagefactory.model import Layer
from imagefactory.oci.inflate import DamagedError, plain_layer
from imagefactory.oci.layout import Layout
from imagefactory.oci.unpack import OPAQUE, WHITEOUT, entry_parts
from imagefactory.progress import Progress, Task

BLOCK = 512
HEADER_LIMIT = 1 << 20  # bytes; the largest extended header of one entry
NAMES_LIMIT = 64 << 20  # characters; what the names of one layer may take together


def merge_layers(scans: Iterable[LayerScan]) -> tuple[Found, ...]:
    """What is seen of layers, the lowest first."""
    seen: dict[str, Found] = {}
    for scan in scans:
        over = {*scan.plain, *scan.removed, *(one.path for one in scan.found)}
        opaque = set(scan.opaque)
        for path in list(seen):
            above = _above(path)
            if path in over or not over.isdisjoint(above) or not opaque.isdisjoint(above):
                del seen[path]
        seen.update((one.path, one) for one in scan.found)
    return tuple(seen[path] for path in sorted(seen))


def _above(path: str) -> list[str]:
    """The folders that hold `path`, the root (an empty text) among them."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]


# --- one layer -----------------------------------------------------------------------------------


def scan_layer(chunks: Iterator[bytes]) -> LayerScan:
    """What the tar in `chunks` tells; reads them to their end. Raises DamagedError."""
    stream = _Stream(chunks)
    found: dict[str, Found] = {}
    plain: set[str] = set()
    removed: list[str] = []
    opaque: list[str] = []
    room = NAMES_LIMIT
    for entry in _entries(stream):
        room -= len(entry.path) + 1
        if room < 0:
            raise DamagedError(f"the names of its files take more than {NAMES_LIMIT} characters")
        folder, _, name = entry.path.rpartition("/")
        if name == OPAQUE:
            opaque.append(folder)
        elif name.startswith(WHITEOUT):
            removed.append(f"{folder}/{name[len(WHITEOUT) :]}".lstrip("/"))
        elif entry.path and not entry.folder:
            one = _look(stream, entry)
            found.pop(entry.path, None)  # a path may stand there twice; the last one holds
            if one:
                found[entry.path] = one
            elif not is_text(entry.path):
                plain.add(entry.path)
        stream.skip(entry.left)
    stream.drain()
    return LayerScan(
        found=tuple(found[path] for path in sorted(found)),
        plain=tuple(sorted(plain - found.keys())),
        removed=tuple(sorted(removed)),
        opaque=tuple(sorted(opaque)),
    )


def _look(stream: _Stream, entry: _Entry) -> Found:
    if not entry.regular:
        return read_name(entry.path)
    look = Look(entry.path, entry.size)
    while entry.left and not look.idle:
        piece = stream.piece(entry.left)
        entry.left -= len(piece)
        look.feed(piece)
    return look.close()


@dataclass(slots=True)
class _Entry:
    """`left` is how many of the `size` bytes were not taken from the stream."""

    path: str
    size: int
    folder: bool
    regular: bool
    left: int


def _entries(stream: _Stream) -> Iterator[_Entry]:
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
        if kind == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in extended):
            raise DamagedError(f"'{name[:80]}' is stored as a sparse file")
        regular = kind in tarfile.REGULAR_TYPES
        try:
            # Folders, links and devices have no bytes, whatever their header says.
            size = int(extended.get("size", length)) if regular or kind not in tarfile.SUPPORTED_TYPES else 0
            path = "/".join(entry_parts(extended.get("path", name)))
        except ValueError as error:
            raise DamagedError(str(error)) from error
        if size < 0:
            raise DamagedError(f"'{path[:80]}' has {size} bytes")
        # Before POSIX a folder was a file whose name ends in a slash.
        folder = kind == tarfile.DIRTYPE or (kind == tarfile.AREGTYPE and name.endswith("/"))
        yield _Entry(readable_path(path), size, folder, regular and not folder, size)
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


def _number(field: bytes) -> int:
    """Octal digits, or GNU's binary form for what is larger."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field, "big") - ((0x80 if field[0] == 0x80 else 0x100) << 8 * (len(field) - 1))
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENDED = (*_PAX, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def _parse_extended(kind: bytes, data: bytes) -> dict[str, str]:
    """What an extended header says of the next entry (POSIX pax; GNU's long names)."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    found: dict[str, str] = {}
    while kind in _PAX and data:
        length = data[:9].partition(b" ")[0]
        if not length.isdigit() or not len(length) + 1 < int(length) <= len(data):
            raise DamagedError("broken extended header")
        record = data[len(length) + 1 : int(length)].rstrip(b"\n")
        key, _, value = record.partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        data = data[int(length) :]
    return found


class _Stream:
    """Chunks, taken in the portions of a tar. Large ones are not copied."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = memoryview(b"")
        self.position = 0

    def piece(self, most: int) -> memoryview:
        """At least one byte and at most `most`. Raises DamagedError at the end."""
        if not self._chunk and not self._next():
            raise DamagedError(f"it ends at byte {self.position}, in the middle of a file")
        piece, self._chunk = self._chunk[:most], self._chunk[most:]
        self.position += len(piece)
        return piece

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
                self._chunk = memoryview(chunk)
                return True
        return False


# --- images --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Where layers come from: `read` gives the packed bytes of one, `layout` keeps what was found."""

    layout: Layout
    read: Callable[[Layer], Iterator[bytes]]
    workers: int = 1


def scan_image(source: str, layers: Sequence[Layer], shelf: Shelf, progress: Progress) -> Contents:
    """What an image of `layers`, the lowest first, holds; those not known yet are read in parallel.

    The caller holds the layout's `in_use`. Raises StoreError for a layer that is damaged or is not what
    its diff_id says, ToolError where zstandard is missing.
    """
    known = {layer.diff_id: recall_scan(shelf.layout, layer.diff_id) for layer in layers}
    unknown = {layer.diff_id: layer for layer in layers if known[layer.diff_id] is None}
    if unknown:
        total = sum(layer.descriptor.size for layer in unknown.values())
        largest_first = sorted(unknown.values(), key=lambda layer: -layer.descriptor.size)
        with (
            progress.task(f"scan {len(unknown)} layers", total=total) as task,
            stopping_pool(shelf.workers) as pool,
        ):
            scans = pool.map(lambda layer: _scan_one(layer, shelf, task), largest_first)
            known.update(zip((layer.diff_id for layer in largest_first), scans, strict=True))
    seen = merge_layers(scan for layer in layers if (scan := known[layer.diff_id]))
    return format_contents(source, seen)


def layout_shelf(layout: Layout, workers: int) -> Shelf:
    """The layers of a store on this machine."""

    def read(layer: Layer) -> Iterator[bytes]:
        with layout.blob_path(layer.descriptor.digest).open("rb") as file:
            while data := file.read(CHUNK):
                yield data

    return Shelf(layout=layout, read=read, workers=workers)


def _scan_one(layer: Layer, shelf: Shelf, task: Task) -> LayerScan:
    plain = _Checked(plain_layer(layer.descriptor.media_type, _counted(shelf.read(layer), task)))
    name = layer.title or layer.diff_id
    try:
        scan = scan_layer(iter(plain))
    except DamagedError as error:
        raise StoreError(
            f"layer {name} is not a proper archive: {error}",
            hint="the blob is damaged: remove the image and build or pull it again",
        ) from error
    if plain.digest != layer.diff_id:
        raise StoreError(
            f"layer {name} holds {plain.digest}, not {layer.diff_id}",
            hint="the blob or its manifest is damaged: remove the image and build or pull it again",
        )
    keep_scan(shelf.layout, layer.diff_id, scan)
    return scan


def _counted(chunks: Iterator[bytes], task: Task) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        task.advance(len(chunk))


class _Checked:
    """Plain bytes on their way: hashed by a thread of their own, and not without end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._hash = chunks, hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        size, waiting = 0, queue.Queue[bytes](maxsize=8)
        thread = threading.Thread(target=self._hash_all, args=(waiting,), daemon=True)
        thread.start()
        try:
            for chunk in self._chunks:
                size += len(chunk)
                if size > PLAIN:
                    raise DamagedError(f"it unpacks to more than {PLAIN} bytes")
                waiting.put(chunk)
                yield chunk
        finally:
            waiting.put(b"")
            thread.join()

    def _hash_all(self, waiting: queue.Queue[bytes]) -> None:
        while chunk := waiting.get():
            self._hash.update(chunk)

    @property
    def digest(self) -> str:
        """Of all that was taken; only once they came to their end."""
        return f"sha256:{self._hash.hexdigest()}"
