"""What `docker save` writes and any `docker load` reads, as a file and as docker's daemon's stream.

It is manifest.json, the config, and the layers as plain tars named by their diff ids; config and diff ids
stay, so Docker gives the image the id that the config's digest is.
"""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from imagefactory.errors import StoreError
from imagefactory.fs import explain_full_disk
from imagefactory.oci.blob_writer import BlobWriter
from imagefactory.oci.inflate import DamagedError, unpacked
from imagefactory.oci.layers import BLOCK, CHUNK, END_OF_ARCHIVE, Codec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import canonical_json
from imagefactory.oci.model import Descriptor, Image, Layer
from imagefactory.oci.plain_tar import (
    PlainTar,
    file_chunks,
    layer_tar,
    missing_blob,
    tar_header,
)
from imagefactory.oci.tar_header import CappedInfo
from imagefactory.trees import printable


def write_docker(layout: Layout, image: Image, tar: PlainTar) -> Iterator[int]:
    """Yields the (compressed) bytes of each layer that is written."""
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
    """`image` as docker's daemon loads it, called `name`: a docker-archive whose layers stay compressed.

    Every size is known beforehand, so nothing is written down on the way. The daemon inflates (gzip,
    zstd), and refuses a layer that is not what the config says. Raises StoreError for a blob that is
    missing or cut, in the middle of the stream.
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
        left = descriptor.size
        try:
            for chunk in file_chunks(layout.blob_path(digest)):
                left -= len(chunk)
                yield chunk
        except FileNotFoundError:
            raise missing_blob(layout, digest) from None
        if left:
            raise layout.damaged(digest)
        yield bytes(-descriptor.size % BLOCK)
    yield END_OF_ARCHIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """How a saved image comes into the layout.

    `codec` compresses new layers; `known` gives the layers that the store has, by diff id, whose bytes
    are then not touched; `report` hears of the plain bytes as they come.
    """

    codec: Codec
    known: Mapping[str, Layer]
    report: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenImage:
    """A saved image whose blobs are in the layout: the config's own bytes, and its layers in order."""

    config: bytes
    layers: tuple[Layer, ...]


def take_docker(layout: Layout, stream: IO[bytes], taking: Taking) -> TakenImage:
    """Reads what `docker save` writes (also docker 25's, which is an image layout too), in one pass.

    Layers may come compressed and in any order; each is hashed and must be what the config says. Raises
    StoreError for a stream that ends early or is not an image. Nothing names what was written.
    """
    small: dict[str, bytes] = {}
    links: dict[str, str] = {}
    made: dict[str, Layer] = {}
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
                        made[name] = _take_layer(layout, file, taking)
        return _put_together(layout, taking, _Saved(small=small, links=links, made=made))
    except _NO_IMAGE as error:
        why = (
            f"it has no {error}"
            if isinstance(error, KeyError)
            else printable(str(error)) or type(error).__name__
        )
        raise StoreError(
            "docker-archive-invalid", f"Docker did not save a complete image: {why}", hint="rebuild the image"
        ) from error


_NO_IMAGE = (tarfile.TarError, DamagedError, EOFError, KeyError, IndexError, TypeError, ValueError)
_SMALL = 1 << 20
"""Bytes up to which a file of the stream is kept until it is known what it is; configs are far smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    small: Mapping[str, bytes]
    links: Mapping[str, str]
    made: Mapping[str, Layer]


def _named(name: str) -> str:
    return f"sha256:{name.rpartition('/')[2]}"


def _put_together(layout: Layout, taking: Taking, saved: _Saved) -> TakenImage:
    entry = _only_image(_parse("manifest.json", saved.small["manifest.json"]))
    config = saved.small[str(entry["Config"])]
    root = _parse("config", config, dict).get("rootfs")
    names = _texts("Layers of its manifest.json", entry["Layers"])
    diff_ids = _texts("diff_ids of its config", root.get("diff_ids") if isinstance(root, dict) else None)
    if len(names) != len(diff_ids):
        raise ValueError(f"{len(names)} layers where its config has {len(diff_ids)}")
    layers = []
    for name, diff_id in zip(names, diff_ids, strict=True):
        file = saved.links.get(name, name)
        if diff_id in taking.known:
            layers.append(taking.known[diff_id])
            continue
        layer = saved.made.get(file) or _take_layer(layout, io.BytesIO(saved.small[file]), taking)
        if layer.diff_id != diff_id:
            raise StoreError(
                "docker-archive-invalid",
                f"Docker saved a layer {layer.diff_id}, but its config has {diff_id}",
            )
        layers.append(layer)
    return TakenImage(config=config, layers=tuple(layers))


def _parse(what: str, data: bytes, kind: type = list) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"its {what} is not JSON") from None
    if not isinstance(value, kind):
        raise TypeError(f"its {what} is not {'a list' if kind is list else 'an object'}")
    return value


def _texts(what: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"the {what} are not a list of names")
    return value


def _tags(one: dict[str, Any]) -> list[str]:
    return _texts("RepoTags of its manifest.json", one.get("RepoTags") or [])


def _only_image(images: list[Any]) -> Any:
    """The one image of an archive. Raises StoreError for several."""
    if not all(isinstance(one, dict) for one in images):
        raise TypeError("its manifest.json is not a list of images")
    if not images:
        raise ValueError("its manifest.json names no image")
    if len(images) > 1:
        tags = [tag for one in images for tag in _tags(one) or ["one without a name"]]
        raise StoreError(
            "docker-archive-ambiguous",
            f"the archive contains {len(images)} images: {printable(', '.join(tags))}",
            hint="save only one of them: docker save NAME:TAG",
        )
    return images[0]


def _take_layer(layout: Layout, file: IO[bytes], taking: Taking) -> Layer:
    plain = hashlib.sha256()
    with explain_full_disk(layout.path), BlobWriter(layout) as blob:
        compressor = taking.codec.compressor()
        # Daemons that keep images in containerd save their layers as they hold them.
        for data in unpacked(iter(partial(file.read, CHUNK), b"")):
            plain.update(data)
            taking.report(len(data))
            blob.write(compressor.compress(data))
        blob.write(compressor.flush())
        descriptor = blob.commit(taking.codec.media_type)
    return Layer(descriptor=descriptor, diff_id=f"sha256:{plain.hexdigest()}", title="")
