"""One layer of the store, read entry by entry and proven to be its diff_id; and as files of a folder.

A tar from a stranger can name anything, so every entry is written relative to an open folder,
never through a symbolic link, and only regular files, folders and links are made.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from imagefactory.errors import StoreError, os_problem
from imagefactory.oci.inflate import DamagedError, plain_layer
from imagefactory.oci.model import Layer
from imagefactory.oci.tar_stream import (
    FILE,
    FOLDER,
    HARD_LINK,
    HIDDEN,
    REMOVED,
    TarStream,
    entries,
    layer_error,
)
from imagefactory.oci.tree import CHUNK, Data, LayerTree, Member
from imagefactory.progress import Progress, Task, format_bytes
from imagefactory.trees import printable


class Entries(Protocol):
    """What takes a layer's entries, one after the other; later ones of a name win.

    A path is its parts, () the root. Raises tarfile.TarError for what no layer may hold.
    """

    def __enter__(self) -> object: ...
    def __exit__(self, kind: object, /, *_: object) -> None: ...
    def folder(self, parts: tuple[str, ...], member: Member) -> None: ...
    def file(self, parts: tuple[str, ...], member: Member, data: Data) -> None: ...
    def symlink(self, parts: tuple[str, ...], member: Member) -> None: ...
    def whiteout(self, parts: tuple[str, ...]) -> None: ...
    def remove(self, parts: tuple[str, ...]) -> None: ...

    def hard_link(self, parts: tuple[str, ...], target: tuple[str, ...], member: Member) -> None: ...


def unpack_layer(layer: Layer, blob: Path, folder: Path, task: Task, progress: Progress) -> Mapping[int, str]:
    """Writes the layer in `blob` into the empty `folder` and proves that it is the layer's diff_id.

    Returns the sha256 of the files there, by inode.
    """
    tree = LayerTree(folder, owners=os.geteuid() == 0)
    tell_skipped(layer, read_layer(layer, blob, folder, tree, task), progress)
    return tree.digests


def read_layer(layer: Layer, blob: Path, folder: Path, tree: Entries, task: Task) -> list[str]:
    """Gives `tree`, which writes into `folder`, the entries in `blob`, and proves that they are its diff_id.

    Returns the names of the device nodes and FIFOs that were skipped. Raises StoreError for content that is
    not, that a layer may not hold, or that does not fit the disk, and ToolError where a codec is missing.
    """
    content = _Hashed(plain_layer(layer.descriptor.media_type, _packed(layer, blob, task)))
    stream = TarStream(iter(content))
    title = printable(layer.title) or layer.diff_id
    try:
        with tree:
            _give_entries(stream, tree)
        stream.drain()
    except (DamagedError, tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise layer_error(title, error) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(folder, stream, content, error) from error
        raise StoreError(
            "layer-unpack-failed",
            f"cannot unpack layer {title} into {folder}: {error}",
            hint="check the directory's permissions and file system",
        ) from error
    if content.digest != layer.diff_id:
        raise StoreError(
            "layer-corrupt",
            f"layer {title} has the digest {content.digest}, not {layer.diff_id}",
            hint="remove the image and build it again: the blob or its manifest is corrupt",
        )
    return stream.skipped


def tell_skipped(layer: Layer, skipped: list[str], progress: Progress) -> None:
    """Says which entries a reader of the layer did not keep; those below /dev every runner makes itself."""
    names = [printable(name) for name in skipped if not name.lstrip("./").startswith("dev/")]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        progress.note(
            f"  layer {layer.diff_id[7:19]}: device nodes and FIFOs are skipped: {', '.join(names[:3])}{more}"
        )


def _packed(layer: Layer, blob: Path, task: Task) -> Iterator[bytes]:
    """The packed bytes, reported as they are read."""
    try:
        file = blob.open("rb")
    except OSError as error:
        raise StoreError(
            *os_problem("read", f"blob {layer.descriptor.digest}", error), hint="build the image again"
        ) from error
    with file:
        while data := file.read(CHUNK):
            task.advance(len(data))
            yield data


class _Hashed:
    """The plain bytes, hashed and counted as they are read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self.size = chunks, 0
        self._sha256 = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._sha256.update(chunk)
            self.size += len(chunk)
            yield chunk

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha256.hexdigest()}"


def _full(folder: Path, stream: TarStream, content: _Hashed, error: OSError) -> StoreError:
    """Reads the layer to its end, to say how many bytes it wants."""
    stream.drain()
    free = shutil.disk_usage(folder).free
    return StoreError(
        "disk-full",
        f"{folder.parent}: {error.strerror}: this layer needs {format_bytes(content.size)} "
        f"({content.size} bytes), {format_bytes(free)} are free",
        hint="free space there (imagefactory store gc), or set `store` to another disk",
    )


def _give_entries(stream: TarStream, tree: Entries) -> None:
    for entry in entries(stream):
        if entry.kind == FILE:
            tree.file(entry.parts, entry, entry)
        elif entry.kind == FOLDER:
            tree.folder(entry.parts, entry)
        elif entry.kind == HARD_LINK:
            tree.hard_link(entry.parts, entry.target, entry)
        elif entry.kind == HIDDEN:
            tree.whiteout(entry.parts)
        elif entry.kind == REMOVED:
            tree.remove(entry.parts)
        else:
            tree.symlink(entry.parts, entry)
