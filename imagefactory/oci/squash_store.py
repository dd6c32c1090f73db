"""Layers' rows of blocks in the store: where they lie, packed once, copied and proven.

No row is kept by itself: it lies in a .sif of the store, and a sealed record says in which, where, with which
sum and of which files. Without the .sif or the record a layer is packed again, into the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import StoreError
from imagefactory.fs import remove_inside
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import canonical_json
from imagefactory.oci.model import Descriptor, Layer
from imagefactory.oci.squash_layers import LayerIndex, LayerPacker, Packers, Squeeze, format_index, parse_index
from imagefactory.oci.unpack_layer import read_layer, tell_skipped
from imagefactory.progress import Progress, Task

SQUASHED = "squashed"
"""The kind of the records."""
VERSION = 1
"""Of what a row holds, and of what is made of rows. Another number makes all anew."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of `size` bytes, `offset` bytes into the file at `path`.

    `digest` is its sha256 where a record says so; a row that was just packed has none yet.
    """

    index: LayerIndex
    path: Path
    offset: int
    size: int
    digest: str = ""


class ChangedError(Exception):
    """What lies in a .sif of the store is not what was written there; `place` is its number of the rows."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


class SquashStore:
    """Rows of layers of `layout`, packed as `squeeze` says by so many threads."""

    def __init__(self, layout: Layout, squeeze: Squeeze, workers: int) -> None:
        self.layout, self.squeeze, self.workers = layout, squeeze, workers

    def rows(self, layers: list[Layer], folder: Path, progress: Progress) -> list[Row]:
        """The layers' rows in their order; what the store lacks is packed into new files in `folder`.

        Raises StoreError for a layer that is damaged, ToolError where a codec is missing.
        """
        found = [self._recall(layer) for layer in layers]
        missing = [place for place, row in enumerate(found) if row is None]
        missing.sort(key=lambda place: -layers[place].descriptor.size)  # the longest first
        if missing:
            total = sum(layers[place].descriptor.size for place in missing)
            title = f"pack {len(missing)} of {len(layers)} layers"
            with (
                progress.task(title, total=total) as task,
                _threads(min(self.workers, len(missing))) as readers,
                Packers(self.squeeze, self.workers) as packers,
            ):
                packing = {
                    readers.submit(
                        self._pack, layers[place], folder / f"row-{place}", packers, task, progress
                    ): place
                    for place in missing
                }
                for done in as_completed(packing):
                    found[packing[done]] = done.result()
        return [row for row in found if row is not None]

    def _pack(self, layer: Layer, path: Path, packers: Packers, task: Task, progress: Progress) -> Row:
        with path.open("wb") as out:
            packer = LayerPacker(out, packers)
            blob = self.layout.blob_path(layer.descriptor.digest)
            tell_skipped(layer, read_layer(layer, blob, path.parent, packer, task), progress)
        return Row(index=packer.index, path=path, offset=0, size=packer.size)

    # --- records -----------------------------------------------------------------------------------

    def remember(self, layer: Layer, sif: str, row: Row) -> None:
        """Records that `layer`'s row lies in the blob of digest `sif` as `row` says."""
        place = {"digest": sif, "offset": row.offset, "size": row.size, "sha256": row.digest}
        # Names that are no UTF-8 stand in JSON's own escapes.
        data = json.dumps({**place, "index": format_index(row.index)}, separators=(",", ":")).encode()
        self.layout.keep(self._record(layer), data)

    def forget(self, layer: Layer) -> None:
        """Drops the record of a layer whose row changed, and the .sif where it does."""
        record = self.layout.recall(SQUASHED, self._record(layer).stem) or {}
        remove_inside(self.layout.path, self._record(layer))
        if digest := str(record.get("digest", "")):
            self.layout.holds(Descriptor(media_type="", digest=digest, size=0))

    def _recall(self, layer: Layer) -> Row | None:
        record = self.layout.recall(SQUASHED, self._record(layer).stem)
        try:
            if record is None or not (path := self.layout.blob_path(record["digest"])).is_file():
                return None
            return Row(
                index=parse_index(record["index"]),
                path=path,
                offset=int(record["offset"]),
                size=int(record["size"]),
                digest=str(record["sha256"]),
            )
        except (StoreError, LookupError, TypeError, ValueError):
            return None  # what another version wrote is made again

    def _record(self, layer: Layer) -> Path:
        parts = canonical_json([SQUASHED, VERSION, self.squeeze.identity, layer.diff_id])
        return self.layout.path / SQUASHED / f"{hashlib.sha256(parts).hexdigest()}.json"

    # --- bytes -------------------------------------------------------------------------------------

    def write(
        self, path: Path, head: bytes, rows: list[Row], tail: bytes, task: Task
    ) -> tuple[str, list[Row]]:
        """Writes `head`, the rows and `tail` to a new file; gives its digest, and the rows as they lie there.

        Rows that were just packed go from where they were. Raises ChangedError where a row is not what its
        record says: then the file is worth nothing.
        """
        starts, at = [], len(head)
        for row in rows:
            starts.append(at)
            at += row.size
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write_all(file, head, 0)
            _write_all(file, tail, at)
            whole = _Ahead(file)
            written = []
            whole.to(len(head))
            with _threads(self.workers) as pool:
                copies = [
                    pool.submit(_copy, row, file, start, task)
                    for row, start in zip(rows, starts, strict=True)
                ]
                for place, (row, copy) in enumerate(zip(rows, copies, strict=True)):
                    digest = copy.result()
                    if row.digest not in ("", digest):
                        raise ChangedError(place)
                    written.append(
                        Row(index=row.index, path=path, offset=starts[place], size=row.size, digest=digest)
                    )
                    whole.to(starts[place] + row.size)
            whole.to(at + len(tail))
        finally:
            os.close(file)
        return whole.digest, written


class _Ahead:
    """The sum of a file whose beginning is whole already."""

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


def _copy(row: Row, file: int, start: int, task: Task) -> str:
    """Copies the row to `start`; the sum of what was written, or no sum where the source is cut."""
    sha256 = hashlib.sha256()
    source = os.open(row.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not row.digest:
            row.path.unlink()  # what was just packed need not be on the disk twice
        done = 0
        while done < row.size:
            data = os.pread(source, min(_CHUNK, row.size - done), row.offset + done)
            if not data:
                return "cut"
            sha256.update(data)
            _write_all(file, data, start + done)
            done += len(data)
            task.advance(len(data))
    finally:
        os.close(source)
    return sha256.hexdigest()


def _write_all(file: int, data: bytes, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        left, at = left[written:], at + written


@contextmanager
def _threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads whose waiting work is dropped when one fails or the user interrupts."""
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
