"""A reader of squashfs, written from the format alone (Linux's fs/squashfs), and images of few layers."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import zstandard

from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import OciLayer
from imagefactory.oci.squash_layers import (
    LayerIndex,
    PackerPool,
    SquashCompression,
    SquashRow,
    SquashStore,
    format_image,
)
from imagefactory.progress import QuietProgress

SQUEEZE = SquashCompression(level=1, block=4096)
MOMENT = 1_700_000_000


def count_packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each piece that is packed from now on."""
    sizes: list[int] = []
    pack = PackerPool.pack

    def count(self: PackerPool, piece: bytes) -> object:
        sizes.append(len(piece))
        return pack(self, piece)

    monkeypatch.setattr(PackerPool, "pack", count)
    return sizes


@dataclass(frozen=True, kw_only=True)
class Read:
    """One entry: `content` of a file, `target` of a link; `names` is what its inode claims."""

    kind: str
    mode: int
    owner: tuple[int, int]
    mtime: int
    inode: int
    names: int
    content: bytes = b""
    target: bytes = b""


class SquashReader:
    """A whole file system in memory; `entries` by path, the root is empty."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        magic, self.inodes, self.mtime, self.block, fragments = struct.unpack_from("<4sIIII", data)
        packing, log, flags, owners, *version = struct.unpack_from("<6H", data, 20)
        root, self.used, owner_at, xattrs, *tables = struct.unpack_from("<8Q", data, 32)
        assert (magic, packing, version, xattrs) == (b"hsqs", 6, [4, 0], (1 << 64) - 1)
        assert 1 << log == self.block
        assert flags == 0x280
        assert len(data) % 4096 == 0
        assert len(data) - self.used < 4096
        self.inode_table, self.folder_table, fragment_at, export_at = tables
        self.owners = struct.unpack(f"<{owners}I", self.indexed(owner_at, 4 * owners))
        rows = self.indexed(fragment_at, 16 * fragments)
        self.fragments = [struct.unpack_from("<QII", rows, at)[:2] for at in range(0, len(rows), 16)]
        self.export = struct.unpack(f"<{self.inodes}Q", self.indexed(export_at, 8 * self.inodes))
        self.entries: dict[bytes, Read] = {}
        self.read(b"", root)

    def unpack(self, at: int, size: int, most: int) -> bytes:
        packed = self.data[at : at + (size & ~(1 << 24))]
        if size & 1 << 24:
            return packed
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=most)

    def table(self, at: int, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` of the unpacked block at `at` on."""
        found = b""
        while len(found) < offset + size:
            (head,) = struct.unpack_from("<H", self.data, at)
            length = head & 0x7FFF
            packed = self.data[at + 2 : at + 2 + length]
            if not head & 0x8000:
                packed = zstandard.ZstdDecompressor().decompress(packed, max_output_size=8192)
            assert len(packed) <= 8192
            found += packed
            at += 2 + length
        return found[offset : offset + size]

    def indexed(self, at: int, size: int) -> bytes:
        count = -(-size // 8192)
        starts = struct.unpack_from(f"<{count}Q", self.data, at)
        sizes = [min(8192, size - 8192 * number) for number in range(count)]
        return b"".join(self.table(start, 0, length) for start, length in zip(starts, sizes, strict=True))

    def read(self, path: bytes, place: int) -> int:
        """Reads the inode at `place` and all below it; gives its number."""
        at, offset = self.inode_table + (place >> 16), place & 0xFFFF
        kind, mode, uid, gid, mtime, number = struct.unpack("<HHHHII", self.table(at, offset, 16))
        assert self.export[number - 1] == place
        owner = self.owners[uid], self.owners[gid]
        common = {"mode": mode, "owner": owner, "mtime": mtime, "inode": number}

        def more(form: str) -> tuple[int, ...]:
            size = struct.calcsize(form)
            return struct.unpack(form, self.table(at, offset + 16, size))

        if kind in (1, 8):
            if kind == 1:
                start, names, size, list_at, _ = more("<IIHHI")
            else:
                names, size, start, _, indices, list_at, _ = more("<IIIIHHI")
                assert indices == 0
            self.entries[path] = Read(kind="folder", names=names, **common)
            self.list(path, self.table(self.folder_table + start, list_at, size - 3))
        elif kind in (2, 9):
            if kind == 2:
                start, fragment, fragment_at, size = more("<IIII")
                names, width = 1, 16
            else:
                start, size, _, names, fragment, fragment_at, _ = more("<QQQIIII")
                width = 40
            count = size // self.block if fragment != 0xFFFFFFFF else -(-size // self.block)
            raw = self.table(at, offset + 16 + width, 4 * count)
            content = b""
            for length in struct.unpack(f"<{count}I", raw):
                content += self.unpack(start, length, self.block)
                start += length & ~(1 << 24)
            if fragment != 0xFFFFFFFF:
                whole = self.unpack(*self.fragments[fragment], self.block)
                content += whole[fragment_at : fragment_at + size % self.block]
            assert len(content) == size
            self.entries[path] = Read(kind="file", names=names, content=content, **common)
        else:
            assert kind == 3
            names, size = more("<II")
            target = self.table(at, offset + 24, size)
            self.entries[path] = Read(kind="link", names=names, target=target, **common)
        return number

    def list(self, path: bytes, listed: bytes) -> None:
        at, last = 0, b""
        while at < len(listed):
            count, start, base = struct.unpack_from("<III", listed, at)
            assert count < 256
            at += 12
            for _ in range(count + 1):
                offset, number, _, length = struct.unpack_from("<HhHH", listed, at)
                name = listed[at + 8 : at + 9 + length]
                at += 9 + length
                assert name > last
                last = name
                assert self.read(path + b"/" * bool(path) + name, start << 16 | offset) == base + number


class Squashed:
    """A store in which images become squashfs files, without a container and without apptainer."""

    def __init__(self, path: Path, squeeze: SquashCompression = SQUEEZE, workers: int = 2) -> None:
        self.path = path
        self.layout = Layout(path / "store")
        self.store = SquashStore(self.layout, squeeze, workers)
        self.squeeze, self.made = squeeze, 0

    def add(self, layer: OciLayer, blob: Path) -> OciLayer:
        """Puts a layer of `LayerStore` into this store."""
        self.layout.add(blob.read_bytes(), layer.descriptor.media_type)
        return layer

    def rows(self, *layers: OciLayer) -> list[SquashRow]:
        self.made += 1
        folder = self.path / f"made-{self.made}"
        folder.mkdir()
        return self.store.rows(list(layers), folder, QuietProgress())

    def write(self, *layers: OciLayer, dress: LayerIndex | None = None) -> bytes:
        """The image's bytes, which are kept as a blob, and the layers' rows remembered in it."""
        rows = self.rows(*layers)
        sized = [(row.index, row.size) for row in rows]
        order = range(len(layers))
        sized.append((dress or LayerIndex(), 0))
        superblock, tables = format_image(sized, order, self.squeeze, mtime=MOMENT)
        path = self.path / f"made-{self.made}" / "squashfs"
        with QuietProgress().task("") as task:
            digest, written = self.store.write(path, superblock, rows, tables, task)
        data = path.read_bytes()
        assert self.layout.add(data, "").digest == digest
        for layer, row in zip(layers, written, strict=True):
            self.store.remember(layer, digest, row)
        return data
