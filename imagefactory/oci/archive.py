"""One image of the layout as one file that other tools load. Same image, same bytes of the file.

`oci-archive` is an image layout (OCI image-spec, image-layout.md) in a tar: the very blobs, so every
digest stays. `docker-archive` is docker_archive.py's.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from imagefactory.errors import StoreError, UsageError, os_problem
from imagefactory.fs import replacing
from imagefactory.oci.docker_archive import write_docker
from imagefactory.oci.layout import REBUILD, Layout
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_TYPE, REF_NAME, canonical_json, parse_descriptor
from imagefactory.oci.model import Descriptor, Image
from imagefactory.oci.plain_tar import PlainTar, file_chunks, missing_blob
from imagefactory.progress import Progress

FORMATS = ("oci-archive", "docker-archive")
"""Tar files end on a multiple of this many bytes."""


def export(layout: Layout, image: Image, out: Path, *, kind: str, progress: Progress) -> None:
    """Write `image` to the file `out` as `kind` (one of FORMATS), beside it first and then renamed.

    The image's name in the store (`pytorch:2.3-cu121`) is what it is called when loaded. Every blob is
    hashed on its way; memory stays at a few MiB. Raises UsageError for another kind, a missing folder
    or a name without a tag, StoreError for a missing or damaged blob and for a full disk.
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
            hint="choose an image of imagefactory store list",
        )
    if not out.absolute().parent.is_dir():
        raise UsageError(
            "directory-not-found",
            f"{out.parent} is not a directory",
            hint="create it, or choose another file",
        )
    if out.is_dir():
        raise UsageError("output-not-file", f"{out} is a directory", hint="choose a file in it")
    with (
        progress.task(f"write {out.name}", total=image.size) as task,
        _replacing(out) as stream,
    ):
        tar = PlainTar(stream)
        for size in writers[kind](layout, image, tar):
            task.advance(size)
        tar.close()


def _oci(layout: Layout, image: Image, tar: PlainTar) -> Iterator[int]:
    """Yields the bytes of each layer that is written."""
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
        found = tar.stream(f"blobs/sha256/{hexes}", file_chunks(layout.blob_path(descriptor.digest)))
        if found != descriptor.digest:
            raise layout.damaged(descriptor.digest)
        if descriptor.digest in layers:
            yield descriptor.size


def _closure(layout: Layout, image: Image) -> tuple[Descriptor, list[Descriptor]]:
    """The image's own descriptor, and all that it names however deep, itself too, by digest."""
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
    """Raises UsageError unless `out` can be replaced: a name in /dev, even a link there, must not be."""
    if out.absolute().is_relative_to("/dev") or out.absolute().is_relative_to("/proc"):
        raise UsageError(
            "output-not-file",
            f"{out} is in a directory of the system",
            hint="choose a file in a directory of yours",
        )
    if out.exists() and not out.is_file():
        raise UsageError("output-not-file", f"{out} is not a regular file", hint="choose another file")


@contextmanager
def _replacing(out: Path) -> Iterator[IO[bytes]]:
    """A new file beside `out` that takes its place when all went well."""
    folder = out.absolute().parent
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
                f"no space left in {folder} for {out.name}",
                hint="free some space, or choose another file",
            ) from error
        raise StoreError(
            *os_problem("write", error.filename or out, error), hint="choose a file in a directory of yours"
        ) from error
