"""Layers made of a few entries, and a folder in which they are unpacked."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import zstandard

from imagefactory.oci.manifests import Descriptor, OciLayer
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import LineProgress

TAR = "application/vnd.oci.image.layer.v1.tar"
Entry = tuple[str, bytes, dict[str, object]]


def file(name: str, content: bytes = b"x", **fields: object) -> Entry:
    return (name, content, fields)


def folder(name: str, **fields: object) -> Entry:
    return (name, b"", {"type": tarfile.DIRTYPE, "mode": 0o755, **fields})


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Entry:
    return (name, b"", {"type": kind, "linkname": target})


def make_tar(*entries: Entry) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, fields in entries:
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(content), 1_600_000_000, 0o644
            info.uid, info.gid = os.geteuid(), os.getegid()
            for key, value in fields.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class LayerStore:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.unpacked = UnpackedLayers(path / "unpacked")
        self.told = io.StringIO()
        self.progress = LineProgress(self.told)
        (path / "blobs").mkdir()

    def blob_path(self, blob: str) -> Path:
        return self.path / "blobs" / blob

    def add(self, tar: bytes, codec: str = "", *, packed: bytes | None = None) -> OciLayer:
        pack = {"": bytes, "+gzip": gzip.compress, "+zstd": zstandard.compress}[codec]
        data = pack(tar) if packed is None else packed
        self.blob_path(digest(data)).write_bytes(data)
        descriptor = Descriptor(media_type=TAR + codec, digest=digest(data), size=len(data))
        return OciLayer(descriptor=descriptor, diff_id=digest(tar), title="test")

    def unpack(self, *layers: OciLayer) -> tuple[Path, ...]:
        return self.unpacked.unpack(layers, self.blob_path, self.progress)

    def one(self, *entries: Entry) -> Path:
        return self.unpack(self.add(make_tar(*entries)))[0]

    def leftovers(self) -> list[str]:
        return [path.name for path in self.unpacked.folder.iterdir() if path.name not in (".locks", ".sums")]
