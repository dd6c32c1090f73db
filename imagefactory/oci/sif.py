"""A .sif file in the store: an OCI artifact, so every transfer of images can also transfer it.

The manifest has the form that `apptainer pull oras://` accepts (tested by tag and by digest, with and
without a subject): one layer, the file itself. A .sif converted from an image has that image's platform
manifest as its subject and needs no tag: `image prune` keeps it as long as the image. A .sif built by
apptainer from a definition has no subject, and the tag `<family>:<tag>.sif`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagefactory.errors import StoreError, UsageError, os_problem
from imagefactory.fs import explain_full_disk, replacing
from imagefactory.model import Target
from imagefactory.oci.archive import check_output
from imagefactory.oci.layers import CHUNK
from imagefactory.oci.layout import Layout, LayoutStore, reference
from imagefactory.oci.manifests import (
    MANIFEST_TYPE,
    TITLE,
    Descriptor,
    SifArtifact,
    canonical_json,
    format_descriptor,
    parse_descriptor,
)
from imagefactory.oci.store import REBUILD
from imagefactory.progress import Progress

SIF_TYPE = "application/vnd.sylabs.sif.layer.v1.sif"
"""Media type of the file and of the artifact. Apptainer itself pushes and pulls this type."""
SIF_CONFIG_TYPE = "application/vnd.sylabs.sif.config.v1+json"
SIF_CONFIG = b"{}"
COMPRESSION = "imagefactory.sif.compression"
TARGET = "imagefactory.target"


@dataclass(frozen=True, slots=True, kw_only=True)
class SifOrigin:
    """The origin of a .sif: its target, compression, and the platform manifest it was converted from.

    `subject` is None if apptainer built it from a definition.
    """

    target: str
    compression: str
    subject: Descriptor | None = None


def sif_name(target: str, digest: str) -> str:
    """Return `<target>-<12 hex of the file's sha256>.sif`. Caches compare only names."""
    return f"{target}-{digest.removeprefix('sha256:')[:12]}.sif"


def sif_reference(target: Target) -> str:
    """Return the tag of a .sif built from the target's definition: `pytorch:2.3-cu121.sif`."""
    return f"{reference(target)}.sif"


def format_sif_manifest(file: Descriptor, config: Descriptor, origin: SifOrigin) -> dict[str, object]:
    """Return the artifact's manifest."""
    title = sif_name(origin.target, file.digest)
    layer = {**format_descriptor(file), "annotations": {TITLE: title}}
    manifest: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": SIF_TYPE,
        "config": format_descriptor(config),
        "layers": [layer],
        "annotations": {TITLE: title, COMPRESSION: origin.compression, TARGET: origin.target},
    }
    if origin.subject:
        plain = Descriptor(
            media_type=origin.subject.media_type, digest=origin.subject.digest, size=origin.subject.size
        )
        manifest["subject"] = format_descriptor(plain)
    return manifest


def is_sif_manifest(manifest: dict[str, Any]) -> bool:
    """Return whether this is a manifest of a .sif, of imagefactory or another tool."""
    layers = manifest.get("layers") or [{}]
    return len(layers) == 1 and layers[0].get("mediaType") == SIF_TYPE


def store_sif(
    layout: Layout, path: Path, origin: SifOrigin, *, digest: str = "", tag: str = ""
) -> SifArtifact:
    """Move the file at `path` (on the store's file system) into the store, with its manifest.

    `digest` is the file's, if known. `tag` is a complete reference (`pytorch:2.3-cu121.sif`). The caller
    holds the layout's `in_use`.
    """
    with explain_full_disk(layout.path):
        with path.open("rb") as handle:
            digest = digest or f"sha256:{hashlib.file_digest(handle, 'sha256').hexdigest()}"
            os.fchmod(handle.fileno(), 0o644)
        file = Descriptor(media_type=SIF_TYPE, digest=digest, size=path.stat().st_size)
        blob = layout.blob_path(digest)
        blob.parent.mkdir(parents=True, exist_ok=True)
        path.replace(blob)
    config = layout.add(SIF_CONFIG, SIF_CONFIG_TYPE)
    data = canonical_json(format_sif_manifest(file, config, origin))
    repository, _, name = (tag or f"{origin.target}:").partition(":")
    descriptor = LayoutStore(layout).put_manifest(repository, data, MANIFEST_TYPE, name)
    return load_sif(layout, descriptor.digest)


def load_sif(layout: Layout, digest: str) -> SifArtifact:
    """Return the .sif of a manifest. Raises StoreError if it is missing, corrupt or not a .sif."""
    stored = layout.manifest(digest)
    if stored is None:
        raise StoreError("blob-missing", f"{digest} is not in {layout.path}", hint=REBUILD)
    manifest = json.loads(stored[1])
    if not is_sif_manifest(manifest):
        raise StoreError(
            "not-a-sif",
            f"{digest} in {layout.path} is not a .sif",
            hint="choose a .sif from imagefactory image list",
        )
    file = parse_descriptor(manifest["layers"][0])
    if not layout.has(file):
        raise StoreError(
            "blob-missing",
            f"the file of {digest} is missing from {layout.path}, or truncated",
            hint="build the .sif again",
        )
    notes = manifest.get("annotations") or {}
    return SifArtifact(
        name=str(notes.get(TITLE) or dict(file.annotations).get(TITLE) or sif_name("image", file.digest)),
        digest=digest,
        file=Descriptor(media_type=file.media_type, digest=file.digest, size=file.size),
        path=layout.blob_path(file.digest),
        made_from=str((manifest.get("subject") or {}).get("digest", "")),
        compression=str(notes.get(COMPRESSION, "")),
    )


def copy_sif(sif: SifArtifact, output: Path, progress: Progress) -> None:
    """Copy the file to `output`, under another name first, and check its sha256.

    It is not a link, because a change of the copy (`apptainer sign`) must not reach the store. Raises
    StoreError for a corrupt file of the store, UsageError if `output` cannot be written.
    """
    check_output(output)
    sha256 = hashlib.sha256()
    try:
        with sif.path.open("rb") as source, replacing(output, mode=0o755) as file:
            with progress.task(f"writing {output.name}", total=sif.file.size) as task:
                while data := source.read(CHUNK):
                    sha256.update(data)
                    file.write(data)
                    task.advance(len(data))
            if f"sha256:{sha256.hexdigest()}" != sif.file.digest:
                raise StoreError(
                    "store-corrupt",
                    f"the stored file of {sif.name} is corrupt",
                    hint=f"delete it (rm {sif.path}) and run the same command again",
                )
    except OSError as error:
        raise UsageError(*os_problem("write", output, error), hint="choose another file: -o FILE") from error


def find_sif(layout: Layout, tag: str) -> SifArtifact | None:
    """Return the .sif of a tag of the layout (`pytorch:2.3-cu121.sif`), or None."""
    descriptor = layout.tags().get(tag)
    return None if descriptor is None else load_sif(layout, descriptor.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSif:
    """A .sif that the store keeps with the image of the platform manifest `subject`, without a tag.

    `digest` is that of its own manifest. `found` is the .sif, or the error of an unusable one.
    """

    name: str
    subject: str
    digest: str
    artifact: SifArtifact | StoreError


def stored_sifs(layout: Layout, manifest: str) -> tuple[StoredSif, ...]:
    """Return the .sif files converted from the image of this platform manifest, by name, damaged ones too."""
    referrers = LayoutStore(layout).referrers("", manifest, SIF_TYPE)
    return tuple(
        sorted((_stored_sif(layout, manifest, each) for each in referrers), key=lambda sif: sif.name)
    )


def _stored_sif(layout: Layout, subject: str, referrer: Descriptor) -> StoredSif:
    artifact: SifArtifact | StoreError
    try:
        artifact = load_sif(layout, referrer.digest)
        name = artifact.name
    except StoreError as error:
        artifact = StoreError(
            "sif-unusable",
            error.message,
            hint="delete it: imagefactory image prune (the next export builds a new one)",
        )
        name = dict(referrer.annotations).get(TITLE) or referrer.digest
    return StoredSif(name=name, subject=subject, digest=referrer.digest, artifact=artifact)


def sifs_of(layout: Layout, manifest: str) -> tuple[SifArtifact, ...]:
    """Return the undamaged .sif files converted from the image of this platform manifest, by name."""
    return tuple(
        sif.artifact for sif in stored_sifs(layout, manifest) if isinstance(sif.artifact, SifArtifact)
    )


# --- The container of a .sif file: the place of its root file system, and a new one for another such
# Format: sylabs/sif, `pkg/sif` (little endian): at 32 the magic, at 96 the number of descriptors and their
# offset; a descriptor of 585 bytes has the type and place of an object.


MAGIC = b"SIF_MAGIC\0"
_HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
_DESCRIPTOR = struct.Struct("<i?III qqq qqqq 128s 384s".replace(" ", ""))
_PARTITION = 0x4004
_SQUASHFS, _SYSTEM = 1, 2  # file system; partition of the primary system
MOST_DESCRIPTORS = 4096
_PAGE = 4096  # alignment of a partition
_PROCESSORS = {"amd64": b"02\0", "arm64": b"04\0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SifPartition:
    """The offset and size in bytes of the system's squashfs in the file."""

    offset: int
    size: int


def is_sif(path: Path) -> bool:
    """Return whether the file starts as a .sif."""
    with path.open("rb") as file:
        return file.read(_HEADER.size)[32 : 32 + len(MAGIC)] == MAGIC


def parse_sif(data: bytes) -> tuple[int, int]:
    """Return (offset, count) of the descriptors, from a file's first bytes. Raises ValueError."""
    if len(data) < _HEADER.size:
        raise ValueError("it is truncated")
    fields = _HEADER.unpack_from(data)
    if fields[1] != MAGIC:
        raise ValueError("it has no .sif header")
    total, offset = fields[8], fields[9]
    if not 0 <= total <= MOST_DESCRIPTORS or offset < 0:
        raise ValueError(f"its header has {total} descriptors, too many")
    return offset, total


def parse_descriptors(data: bytes) -> SifPartition:
    """Return the system's partition. Raises ValueError without one, or if it is not a squashfs."""
    for at in range(0, len(data) - _DESCRIPTOR.size + 1, _DESCRIPTOR.size):
        fields = _DESCRIPTOR.unpack_from(data, at)
        kind, used, offset, size, extra = fields[0], fields[1], fields[5], fields[6], fields[13]
        file_system, part = struct.unpack_from("<ii", extra)
        if used and kind == _PARTITION and part == _SYSTEM:
            if file_system != _SQUASHFS:
                raise ValueError("its system partition is not a squashfs (it may be encrypted, or writable)")
            return SifPartition(offset=offset, size=size)
    raise ValueError("it has no system partition")


def read_partition(path: Path) -> SifPartition:
    """Return the system's partition of the .sif at `path`. Raises UsageError."""
    try:
        with path.open("rb") as file:
            offset, total = parse_sif(file.read(_HEADER.size))
            file.seek(offset)
            partition = parse_descriptors(file.read(total * _DESCRIPTOR.size))
        if (
            partition.offset < 0
            or partition.size < 0
            or partition.offset + partition.size > path.stat().st_size
        ):
            raise ValueError("its system partition is outside of the file")
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="choose a file that you can read") from error
    except ValueError as error:
        raise UsageError(
            "sif-invalid", f"{path} is not a valid .sif: {error}", hint="download or build it again"
        ) from error
    return partition


def around(sif: bytes, change: Callable[[bytes], bytes], size: int, moment: int) -> bytes:
    """Return the bytes before the system's partition of `size` bytes, for a .sif like `sif`.

    The partition is the last part of `sif`. The other parts go through `change`. All times are `moment`
    (seconds since 1970), and the id is nil, as in apptainer's reproducible files. Raises ValueError for
    another layout.
    """
    offset, total = parse_sif(sif)
    header = list(_HEADER.unpack_from(sif))
    first, at = header[11], header[11]
    rows = [_DESCRIPTOR.unpack_from(sif, offset + n * _DESCRIPTOR.size) for n in range(total)]
    used = [row for row in rows if row[1]]
    if not used or used[-1][0] != _PARTITION or any(row[0] == _PARTITION for row in used[:-1]):
        raise ValueError("its system partition is not at its end")
    parts = bytearray()
    table = bytearray()
    for row in used:
        plain = b"" if row[0] == _PARTITION else change(sif[row[5] : row[5] + row[6]])
        padding = -at % _PAGE if row[0] == _PARTITION else 0
        length = size if row[0] == _PARTITION else len(plain)
        parts += bytes(padding) + plain
        extent = (at + padding, length, padding + length, moment, moment, 0, 0)
        table += _DESCRIPTOR.pack(*row[:5], *extent, *row[12:])
        at += padding + length
    header[4:7] = bytes(16), moment, moment
    header[12] = at - first
    begin = _HEADER.pack(*header)
    free = sif[offset + len(table) : first]
    return begin + sif[len(begin) : offset] + bytes(table) + free + bytes(parts)


def for_processor(head: bytes, processor: str) -> bytes:
    """Return the bytes before a system's partition for `processor` (OCI's name), unchanged for others.

    Apptainer rejects a file for another processor than the machine's.
    """
    if processor not in _PROCESSORS:
        return head
    offset, total = parse_sif(head)
    fields, data = list(_HEADER.unpack_from(head)), bytearray(head)
    fields[3] = _PROCESSORS[processor]
    data[: _HEADER.size] = _HEADER.pack(*fields)
    for at in range(offset, offset + total * _DESCRIPTOR.size, _DESCRIPTOR.size):
        row = list(_DESCRIPTOR.unpack_from(head, at))
        if row[1] and row[0] == _PARTITION:
            row[13] = row[13][:8] + _PROCESSORS[processor] + row[13][11:]
            data[at : at + _DESCRIPTOR.size] = _DESCRIPTOR.pack(*row)
    return bytes(data)
