"""Write one image of the layout as one file for other tools. The same image gives the same bytes.

`oci-archive` is an image layout (OCI image-spec, image-layout.md) in a tar. It has the same blobs, so
digests stay. `docker-archive` has its own writer below.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from imagefactory.errors import StoreError, UsageError, os_problem
from imagefactory.fs import explain_full_disk, replacing
from imagefactory.oci.inflate import CorruptDataError, plain_layer, unpacked
from imagefactory.oci.layers import BLOCK, CHUNK, END_OF_ARCHIVE, LayerCodec
from imagefactory.oci.layout import BlobWriter, Layout
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    REF_NAME,
    Descriptor,
    Image,
    OciLayer,
    canonical_json,
    parse_descriptor,
)
from imagefactory.oci.store import REBUILD
from imagefactory.oci.tar_stream import CappedInfo
from imagefactory.progress import Progress
from imagefactory.trees import printable

# --- A tar without clocks or owners, and the blobs and layers of an image as its bytes


_RECORD = 10240


def file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(partial(file.read, CHUNK), b"")


def layer_tar(layout: Layout, layer: OciLayer) -> Iterator[bytes]:
    """Yield the layer's tar. Raises StoreError for a corrupt blob; a truncated one may end early."""
    path = layout.blob_path(layer.descriptor.digest)
    try:
        yield from plain_layer(layer.descriptor.media_type, file_chunks(path))
    except CorruptDataError as error:
        raise layout.damaged(layer.descriptor.digest) from error


class PlainTar:
    """A tar without clocks or owners, written in one pass to a file that can seek."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def folder(self, name: str) -> None:
        self._header(name, 0, kind=tarfile.DIRTYPE)

    def file(self, name: str, data: bytes) -> None:
        self.stream(name, [data])

    def stream(self, name: str, chunks: Iterable[bytes]) -> str:
        """Add a file of unknown size; return the digest of its bytes."""
        start = self._stream.tell()
        self._header(name, 0)
        digest, size = hashlib.sha256(), 0
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            self._stream.write(chunk)
        self._stream.write(bytes(-size % BLOCK))
        self._stream.seek(start)
        self._header(name, size)
        self._stream.seek(0, os.SEEK_END)
        return f"sha256:{digest.hexdigest()}"

    def close(self) -> None:
        self._stream.write(END_OF_ARCHIVE)
        self._stream.write(bytes(-self._stream.tell() % _RECORD))

    def _header(self, name: str, size: int, *, kind: bytes = tarfile.REGTYPE) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, size
        info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
        # GNU's format: one block for any size, so that it can be overwritten.
        self._stream.write(info.tobuf(tarfile.GNU_FORMAT))


def missing_blob(layout: Layout, digest: str) -> StoreError:
    return StoreError("blob-missing", f"blob {digest} is missing from {layout.path}", hint=REBUILD)


def tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


# --- The format of `docker save` and `docker load`, as a file and as docker's daemon's stream
# It is manifest.json, the config, and the layers as plain tars named by their diff ids; config and diff ids
# stay, so Docker gives the image the id that the config's digest is.


def write_docker(layout: Layout, image: Image, tar: PlainTar) -> Iterator[int]:
    """Write the archive; yield the (compressed) bytes of each layer."""
    config = layout.read(Descriptor(media_type="", digest=image.config, size=0))
    if json.loads(config)["rootfs"]["diff_ids"] != [layer.diff_id for layer in image.layers]:
        raise layout.damaged(image.config)
    names = [f"{layer.diff_id.removeprefix('sha256:')}/layer.tar" for layer in image.layers]
    config_name = f"{image.config.removeprefix('sha256:')}.json"
    manifest = [{"Config": config_name, "RepoTags": [image.name], "Layers": names}]
    tar.file("manifest.json", canonical_json(manifest))
    tar.file(config_name, config)
    written: set[str] = set()
    for layer, name in zip(image.layers, names, strict=True):
        if name not in written:
            written.add(name)
            tar.folder(name.partition("/")[0])
            if tar.stream(name, layer_tar(layout, layer)) != layer.diff_id:
                raise layout.damaged(layer.descriptor.digest)
        yield layer.descriptor.size


def stream_docker(layout: Layout, image: Image, name: str) -> Iterator[bytes]:
    """Yield `image` as a docker-archive named `name`, whose layers stay compressed.

    Every size is known beforehand, so nothing is buffered. Docker checks each layer against the config.
    Raises StoreError, in the middle of the stream, for a missing or truncated blob.
    """
    config = layout.read(Descriptor(media_type="", digest=image.config, size=0))
    blobs = {layer.descriptor.digest: layer.descriptor for layer in image.layers}
    names = {digest: f"{digest.removeprefix('sha256:')}.layer" for digest in blobs}
    entry = {
        "Config": f"{image.config.removeprefix('sha256:')}.json",
        "RepoTags": [name],
        "Layers": [names[layer.descriptor.digest] for layer in image.layers],
    }
    for file, data in ((entry["Config"], config), ("manifest.json", canonical_json([entry]))):
        yield tar_header(str(file), len(data)) + data + bytes(-len(data) % BLOCK)
    for digest, descriptor in blobs.items():
        yield tar_header(names[digest], descriptor.size)
        rest = descriptor.size
        try:
            for chunk in file_chunks(layout.blob_path(digest)):
                rest -= len(chunk)
                yield chunk
        except FileNotFoundError:
            raise missing_blob(layout, digest) from None
        if rest:
            raise layout.damaged(digest)
        yield bytes(-descriptor.size % BLOCK)
    yield END_OF_ARCHIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageImport:
    """The options to import a saved image.

    `codec` compresses new layers. `known` maps diff ids to layers of the store, whose bytes are skipped.
    `report` is called with the number of plain bytes.
    """

    codec: LayerCodec
    known: Mapping[str, OciLayer]
    report: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedImage:
    """A saved image whose blobs are in the layout: the config's own bytes, and its layers in order."""

    config: bytes
    layers: tuple[OciLayer, ...]


def take_docker(layout: Layout, stream: IO[bytes], taking: ImageImport) -> ImportedImage:
    """Import the output of `docker save`, in one pass.

    Layers may be compressed and in any order; each is checked against the config. Raises StoreError for a
    truncated stream or one without an image. The result has no tag.
    """
    small: dict[str, bytes] = {}
    links: dict[str, str] = {}
    layers_by_path: dict[str, OciLayer] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK, tarinfo=CappedInfo) as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.issym() or member.islnk():
                    above = name.rpartition("/")[0] if member.issym() else ""
                    links[name] = posixpath.normpath(posixpath.join(above, member.linkname))
                elif member.isfile():
                    file = tar.extractfile(member)
                    assert file is not None
                    if member.size <= _SMALL:
                        small[name] = file.read()
                    elif _named(name) in taking.known:
                        taking.report(member.size)  # docker 25 names a blob by its digest: skip the bytes
                    else:
                        layers_by_path[name] = _take_layer(layout, file, taking)
        return _assemble_image(layout, taking, _SavedImage(small=small, links=links, layers=layers_by_path))
    except _NO_IMAGE as error:
        reason = (
            f"it has no {error}"
            if isinstance(error, KeyError)
            else printable(str(error)) or type(error).__name__
        )
        raise StoreError(
            "docker-archive-invalid",
            f"Docker did not save a complete image: {reason}",
            hint="rebuild the image",
        ) from error


_NO_IMAGE = (tarfile.TarError, CorruptDataError, EOFError, KeyError, IndexError, TypeError, ValueError)
_SMALL = 1 << 20
"""The largest file, in bytes, that is buffered until its type is known; configs are far smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedImage:
    small: Mapping[str, bytes]
    links: Mapping[str, str]
    layers: Mapping[str, OciLayer]


def _named(name: str) -> str:
    return f"sha256:{name.rpartition('/')[2]}"


def _assemble_image(layout: Layout, taking: ImageImport, saved: _SavedImage) -> ImportedImage:
    entry = _only_image(_parse("manifest.json", saved.small["manifest.json"]))
    config = saved.small[str(entry["Config"])]
    root = _parse("config", config, dict).get("rootfs")
    names = _texts("Layers of its manifest.json", entry["Layers"])
    diff_ids = _texts("diff_ids of its config", root.get("diff_ids") if isinstance(root, dict) else None)
    if len(names) != len(diff_ids):
        raise ValueError(f"it has {len(names)} layers, but its config has {len(diff_ids)}")
    layers = []
    for name, diff_id in zip(names, diff_ids, strict=True):
        file = saved.links.get(name, name)
        if diff_id in taking.known:
            layers.append(taking.known[diff_id])
            continue
        layer = saved.layers.get(file) or _take_layer(layout, io.BytesIO(saved.small[file]), taking)
        if layer.diff_id != diff_id:
            raise StoreError(
                "docker-archive-invalid",
                f"Docker saved the layer {layer.diff_id}, but the image's config has {diff_id}",
                hint="rebuild the image",
            )
        layers.append(layer)
    return ImportedImage(config=config, layers=tuple(layers))


def _parse(message: str, data: bytes, kind: type = list) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"its {message} is not JSON") from None
    if not isinstance(value, kind):
        raise TypeError(f"its {message} is not {'a list' if kind is list else 'an object'}")
    return value


def _texts(message: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"the {message} are not a list of names")
    return value


def _tags(row: dict[str, Any]) -> list[str]:
    return _texts("RepoTags of its manifest.json", row.get("RepoTags") or [])


def _only_image(images: list[Any]) -> Any:
    """Return the only image of an archive. Raises StoreError for several."""
    if not all(isinstance(row, dict) for row in images):
        raise TypeError("its manifest.json is not a list of images")
    if not images:
        raise ValueError("its manifest.json has no image")
    if len(images) > 1:
        tags = [tag for row in images for tag in _tags(row) or ["one without a name"]]
        raise StoreError(
            "docker-archive-ambiguous",
            f"the archive contains {len(images)} images: {printable(', '.join(tags))}",
            hint="save only one of them: docker save NAME:TAG",
        )
    return images[0]


def _take_layer(layout: Layout, file: IO[bytes], taking: ImageImport) -> OciLayer:
    plain = hashlib.sha256()
    with explain_full_disk(layout.path), BlobWriter(layout) as blob:
        compressor = taking.codec.compressor()
        # Daemons with containerd's image store save their layers compressed.
        for data in unpacked(iter(partial(file.read, CHUNK), b"")):
            plain.update(data)
            taking.report(len(data))
            blob.write(compressor.compress(data))
        blob.write(compressor.flush())
        descriptor = blob.commit(taking.codec.media_type)
    return OciLayer(descriptor=descriptor, diff_id=f"sha256:{plain.hexdigest()}", title="")


FORMATS = ("oci-archive", "docker-archive")
"""The supported formats."""


def export(layout: Layout, image: Image, out: Path, *, kind: str, progress: Progress) -> None:
    """Write `image` to the file `out` as `kind` (one of FORMATS), under another name first.

    The image is loaded under its name in the store (`pytorch:2.3-cu121`). Every blob is checked; memory stays
    at a few MiB. Raises UsageError for another kind, a missing directory or a name without a tag, StoreError
    for a missing or corrupt blob and for a full disk.
    """
    writers = {"oci-archive": _oci, "docker-archive": write_docker}
    if kind not in writers:
        raise UsageError(
            "option-invalid",
            f"unknown archive format '{kind}'",
            hint=f"supported formats: {', '.join(FORMATS)}",
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9._/-]*:[A-Za-z0-9_][A-Za-z0-9_.-]*", image.name):
        raise UsageError(
            "image-name-invalid",
            f"'{image.name}' is not a name with a tag (NAME:TAG)",
            hint="choose an image from imagefactory image list",
        )
    if not out.absolute().parent.is_dir():
        raise UsageError(
            "directory-not-found",
            f"{out.parent} is not a directory",
            hint="create it, or choose another file",
        )
    if out.is_dir():
        raise UsageError("output-not-file", f"{out} is a directory", hint="add a file name to this path")
    with (
        progress.task(f"write {out.name}", total=image.size) as task,
        _replacing(out) as stream,
    ):
        tar = PlainTar(stream)
        for size in writers[kind](layout, image, tar):
            task.advance(size)
        tar.close()


def _oci(layout: Layout, image: Image, tar: PlainTar) -> Iterator[int]:
    """Write the archive; yield the bytes of each layer."""
    root, blobs = _closure(layout, image)
    entry: dict[str, Any] = {
        "mediaType": root.media_type,
        "digest": root.digest,
        "size": root.size,
        "annotations": {REF_NAME: image.name},
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    tar.file("oci-layout", canonical_json({"imageLayoutVersion": "1.0.0"}))
    tar.file("index.json", canonical_json(index))
    tar.folder("blobs")
    tar.folder("blobs/sha256")
    layers = {layer.descriptor.digest for layer in image.layers}
    for descriptor in blobs:
        hexes = descriptor.digest.removeprefix("sha256:")
        digest = tar.stream(f"blobs/sha256/{hexes}", file_chunks(layout.blob_path(descriptor.digest)))
        if digest != descriptor.digest:
            raise layout.damaged(descriptor.digest)
        if descriptor.digest in layers:
            yield descriptor.size


def _closure(layout: Layout, image: Image) -> tuple[Descriptor, list[Descriptor]]:
    """Return the descriptors of the image and of all its parts, by digest."""
    size = _size(layout, image.digest)
    data = json.loads(layout.read(Descriptor(media_type="", digest=image.digest, size=size)))
    kind = data.get("mediaType", INDEX_TYPE if "manifests" in data else MANIFEST_TYPE)
    root = Descriptor(media_type=kind, digest=image.digest, size=size)
    by_digest: dict[str, Descriptor] = {}
    ahead = [root]
    while ahead:
        descriptor = ahead.pop()
        if descriptor.digest in by_digest:
            continue
        by_digest[descriptor.digest] = descriptor
        if descriptor.media_type in (INDEX_TYPE, MANIFEST_TYPE):
            data = json.loads(layout.read(descriptor))
            named = [*data.get("manifests", ()), *data.get("layers", ())]
            ahead += [parse_descriptor(entry) for entry in (*named, data.get("config")) if entry]
    return root, [by_digest[digest] for digest in sorted(by_digest)]


def _size(layout: Layout, digest: str) -> int:
    try:
        return layout.blob_path(digest).stat().st_size
    except FileNotFoundError:
        raise missing_blob(layout, digest) from None


def check_output(out: Path) -> None:
    """Raise UsageError if `out` must not be replaced, such as a name in /dev or a link there."""
    if out.absolute().is_relative_to("/dev") or out.absolute().is_relative_to("/proc"):
        raise UsageError(
            "output-not-file",
            f"{out} is in a system directory",
            hint="choose a file in your home directory",
        )
    if out.exists() and not out.is_file():
        raise UsageError("output-not-file", f"{out} is not a regular file", hint="choose another file")


@contextmanager
def _replacing(out: Path) -> Iterator[IO[bytes]]:
    """Yield a new file next to `out` that replaces it at the end."""
    directory = out.absolute().parent
    check_output(out)
    try:
        with replacing(out) as stream:
            yield stream
    except FileNotFoundError as error:
        raise StoreError("blob-missing", f"{error.filename} is missing", hint=REBUILD) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreError(
                "disk-full",
                f"no space left in {directory} for {out.name}",
                hint="free some space, or choose another file",
            ) from error
        raise StoreError(
            *os_problem("write", error.filename or out, error),
            hint="choose a file in a directory that you can write",
        ) from error
