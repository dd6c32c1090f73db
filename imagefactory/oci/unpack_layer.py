"""One layer of the store, read entry by entry and proven to be its diff_id; and as files of a folder.

A tar from a stranger can name anything, so every entry is written relative to an open folder,
never through a symbolic link, and only regular files, folders and links are made.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tarfile import HeaderError, ReadError
from typing import IO, Any, Protocol, Self, cast

from imagefactory.errors import StoreError, ToolError, extra_hint
from imagefactory.oci.inflate import inflater
from imagefactory.oci.manifests import LAYER_CODECS
from imagefactory.oci.model import Layer
from imagefactory.oci.tar_header import CappedInfo
from imagefactory.oci.tree import CHUNK, WHITEOUT, Data, LayerTree, entry_parts
from imagefactory.progress import Task, format_bytes

STEP = 64 << 10
"""Bytes of headers and small files that are read at once."""


class _Source(Protocol):
    def readinto(self, buffer: memoryview, /) -> int: ...


class Entries(Protocol):
    """What takes a layer's entries, one after the other; later ones of a name win.

    A path is its parts, () the root. Raises tarfile.TarError for what no layer may hold.
    """

    def __enter__(self) -> object: ...
    def __exit__(self, kind: object, /, *_: object) -> None: ...
    def folder(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None: ...
    def file(self, parts: tuple[str, ...], member: tarfile.TarInfo, data: Data) -> None: ...
    def symlink(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None: ...
    def whiteout(self, parts: tuple[str, ...]) -> None: ...

    def hard_link(self, parts: tuple[str, ...], target: tuple[str, ...], member: tarfile.TarInfo) -> None: ...


def unpack_layer(layer: Layer, blob: Path, folder: Path, task: Task) -> Mapping[int, str]:
    """Writes the layer in `blob` into the empty `folder` and proves that it is the layer's diff_id.

    Returns the sha256 of the files there, by inode.
    """
    tree = LayerTree(folder, owners=os.geteuid() == 0)
    read_layer(layer, blob, folder, tree, task)
    return tree.digests


def read_layer(layer: Layer, blob: Path, folder: Path, tree: Entries, task: Task) -> None:
    """Gives `tree`, which writes into `folder`, the entries in `blob`, and proves that they are its diff_id.

    Raises StoreError for content that is not, that a layer may not hold, or that does not fit the disk, and
    ToolError where a codec is missing.
    """
    with ExitStack() as opened:
        try:
            packed = _Counted(opened.enter_context(blob.open("rb")), task)
        except OSError as error:
            raise StoreError(
                f"blob {layer.descriptor.digest} cannot be read: {error.strerror}",
                hint="the image is damaged: build it again",
            ) from error
        content = _HashedTar(_decoder(layer.descriptor.media_type, packed, opened))
        try:
            with tree:
                _give_entries(content, tree)
            content.drain()
        except _damage() as error:
            raise StoreError(
                f"layer {layer.title or layer.diff_id} is not a proper archive: {error}",
                hint="the blob is damaged: remove the image and build it again",
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(folder, content, error) from error
            raise StoreError(
                f"layer {layer.title or layer.diff_id} cannot be unpacked into {folder}: {error}",
                hint="look at the folder's permissions and file system",
            ) from error
    if content.digest != layer.diff_id:
        raise StoreError(
            f"layer {layer.title or layer.diff_id} holds {content.digest}, not {layer.diff_id}",
            hint="the blob or its manifest is damaged: remove the image and build it again",
        )


# --- reading -------------------------------------------------------------------------------------


class _Counted:
    """The packed bytes, reported as they are read."""

    def __init__(self, file: IO[bytes], task: Task) -> None:
        self.file, self.task = file, task

    def read(self, size: int = -1, /) -> bytes:
        data = self.file.read(size)
        self.task.advance(len(data))
        return data

    def readinto(self, buffer: memoryview, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


class _Hashed(io.RawIOBase):
    """The plain bytes, hashed and counted as they are read."""

    def __init__(self, source: _Source) -> None:
        self._source, self.size = source, 0
        self.sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        count = self._source.readinto(view)
        self.sha256.update(view[:count])
        self.size += count
        return count


class _HashedTar:
    """The plain tar as tarfile wants it, forward only: what is large is not copied on its way."""

    def __init__(self, source: _Source) -> None:
        self._hashed = _Hashed(source)
        self._buffered = io.BufferedReader(self._hashed, STEP)
        self._at = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._hashed.sha256.hexdigest()}"

    @property
    def size(self) -> int:
        return self._hashed.size

    def read(self, size: int = -1, /) -> bytes:
        data = self._buffered.read(size)
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, /) -> None:
        if to < self._at:
            raise tarfile.StreamError(f"a header before byte {self._at} points back to {to}")
        while self._at < to and self.read(min(CHUNK, to - self._at)):
            pass

    def drain(self) -> None:
        while self.read(CHUNK):
            pass


class _File:
    """The `size` bytes that come next, as the file they are of."""

    def __init__(self, tar: _HashedTar, size: int) -> None:
        self._tar, self._left = tar, size

    def read(self, size: int, /) -> bytes:
        data = self._tar.read(min(size, self._left))
        self._left -= len(data)
        return data


def _decoder(media_type: str, packed: _Counted, opened: ExitStack) -> _Source:
    codec = LAYER_CODECS.get(media_type)
    if codec == "tar":
        return packed
    if codec == "gzip":
        try:
            from isal import igzip

            fast = igzip.GzipFile(fileobj=packed, mode="rb")  # type: ignore[no-untyped-call]
            return cast("_Source", opened.enter_context(fast))
        except ImportError:
            return opened.enter_context(gzip.GzipFile(fileobj=cast("IO[bytes]", packed), mode="rb"))
    if codec == "zstd":
        try:
            import zstandard
        except ImportError as error:
            raise ToolError(
                "this layer is packed with zstd, and the Python package zstandard is not installed",
                hint=extra_hint("build"),
            ) from error
        reader = zstandard.ZstdDecompressor().stream_reader(
            cast("IO[bytes]", packed), read_across_frames=True
        )
        return opened.enter_context(reader)
    raise StoreError(
        f"layers of type '{media_type}' cannot be unpacked",
        hint=f"the store's layers are {', '.join(sorted(LAYER_CODECS))}",
    )


def _damage() -> tuple[type[Exception], ...]:
    """What comes of reading a tar that is none, by those decoders that are installed."""
    errors: list[type[Exception]] = [
        tarfile.TarError,
        EOFError,
        ValueError,
        OverflowError,
        RecursionError,  # tarfile calls itself for each extended header before an entry
        gzip.BadGzipFile,
        *inflater()[1],
    ]
    with suppress(ImportError):
        import zstandard

        errors.append(zstandard.ZstdError)
    return tuple(errors)


def _full(folder: Path, content: _HashedTar, error: OSError) -> StoreError:
    """Reads the layer to its end, to say how many bytes it wants."""
    content.drain()
    free = shutil.disk_usage(folder).free
    return StoreError(
        f"{folder.parent}: {error.strerror}: this layer needs {format_bytes(content.size)} "
        f"({content.size} bytes), {format_bytes(free)} are free",
        hint="free space there (`imagefactory store gc`) or name another store (setting `store`)",
    )


# --- writing -------------------------------------------------------------------------------------


class _StrictInfo(CappedInfo):
    """tarfile takes a broken header after the first entry for the archive's end; here it is an error."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ in ("InvalidHeaderError", "TruncatedHeaderError"):
                raise ReadError(f"broken header at byte {tarfile.fileobj.tell()}") from error
            raise


def _give_entries(content: _HashedTar, tree: Entries) -> None:
    stream = cast("IO[bytes]", content)
    with tarfile.open(fileobj=stream, mode="r:", tarinfo=_StrictInfo) as archive:
        seen: list[tarfile.TarInfo] = vars(archive)["members"]
        while (member := archive.next()) is not None:
            seen.clear()  # tarfile would keep every entry, a kilobyte each
            parts = entry_parts(member.name)
            name = parts[-1] if parts else ""
            if name.startswith(WHITEOUT):
                tree.whiteout(parts)
            elif member.isdir():
                tree.folder(parts, member)
            elif not parts:
                raise tarfile.TarError("the layer's root is not a folder")
            elif member.isreg() and not member.issparse() and member.size >= 0:
                tree.file(parts, member, _File(content, member.size))
            elif member.issym():
                tree.symlink(parts, member)
            elif member.islnk():
                tree.hard_link(parts, entry_parts(member.linkname), member)
            elif parts[0] == "dev" and (member.isdev()):
                continue  # the sandbox covers /dev with its own, so these could never be seen
            else:
                raise tarfile.TarError(f"'{member.name}' is neither a file, a folder nor a link")
