"""Layers as folders: each layer of the store is unpacked once, verified, and shared by all images.

`<store>/unpacked/<hex of diff_id>/` holds the content of one layer as overlay wants it: the whiteouts
of the OCI image specification become overlay's own (character device 0/0, `user.overlay.opaque`).
A tar from a stranger can name anything, so every entry is written relative to an open folder,
never through a symbolic link, and only regular files, folders and links are made.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import os
import secrets
import shutil
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tarfile import HeaderError, ReadError
from typing import IO, Protocol, Self, cast

from imagefactory.errors import StoreError, ToolError
from imagefactory.files import Removal, entries_of
from imagefactory.oci.manifests import LAYER_CODECS
from imagefactory.oci.model import Layer
from imagefactory.oci.tar_header import CappedInfo
from imagefactory.oci.tree import CHUNK, WHITEOUT, LayerTree, entry_parts
from imagefactory.progress import Progress, Task, format_bytes
from imagefactory.trees import remove_tree


class _Source(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class Unpacked:
    """The unpacked layers under `folder` (usually `<store>/unpacked`), which is made with mode 0700."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, diff_id: str) -> Path:
        """Where the layer with this diff_id (`sha256:<64 hex>`) is, or will be."""
        return self.folder / _hex(diff_id)

    def unpack(
        self,
        layers: Sequence[Layer],
        blob_path: Callable[[str], Path],
        progress: Progress,
        *,
        workers: int = 2,
    ) -> tuple[Path, ...]:
        """Folders of `layers`, in their order (lowest first); what is missing is unpacked and verified.

        `blob_path` gives the file of a blob by its digest. Raises StoreError for content that is not
        what its diff_id says, that a layer may not hold, or that does not fit the disk, and ToolError
        where a codec is missing. Two processes may call it at once: each layer is unpacked by one of
        them, and a killed one leaves nothing but a folder that the next call or `collect` removes.
        """
        missing = list(
            {layer.diff_id: layer for layer in layers if not self.path(layer.diff_id).is_dir()}.values()
        )
        if missing:
            self._prepare()
            total = sum(layer.descriptor.size for layer in missing)
            with progress.task(f"unpack {len(missing)} layers", total=total) as task:
                self._unpack_all(missing, blob_path, task, workers)
        return tuple(self.path(layer.diff_id) for layer in layers)

    def collect(self, keep: Collection[str], removal: Removal) -> tuple[str, ...]:
        """Removes layers whose diff_id is not in `keep` and that no sandbox uses, and leftovers.

        Returns the names of the folders that went.
        """
        kept = {_hex(diff_id) for diff_id in keep}
        gone = []
        for entry in entries_of(self.folder):
            leftover = entry.name.startswith(".") and entry.name.endswith(".part")
            digest = entry.name[1:].partition(".")[0] if leftover else entry.name
            if not entry.is_dir() or entry.name == ".locks" or (digest in kept and not leftover):
                continue
            with removal.going_on(entry), ExitStack() as held:
                if not held.enter_context(self._lock(digest, wait=False)):
                    continue
                if not leftover and not held.enter_context(_unused(entry)):
                    continue
                if removal.remove(entry, by_way_of=None if leftover else self._new_part(digest)):
                    gone.append(entry.name)
        return tuple(gone)

    def _prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            (self.folder / ".locks").mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self.folder}: cannot be made: {error.strerror}",
                hint="name a store that this user may write (setting `store`)",
            ) from error

    def _unpack_all(
        self, layers: Sequence[Layer], blob_path: Callable[[str], Path], task: Task, workers: int
    ) -> None:
        # Threads are enough: decompression, hashing and writing all happen outside the interpreter's lock.
        pool = ThreadPoolExecutor(max_workers=max(1, min(workers, len(layers))))
        largest_first = sorted(layers, key=lambda layer: -layer.descriptor.size)
        try:
            futures = [pool.submit(self._unpack_one, layer, blob_path, task) for layer in largest_first]
            for future in futures:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _unpack_one(self, layer: Layer, blob_path: Callable[[str], Path], task: Task) -> None:
        final = self.path(layer.diff_id)
        with self._lock(final.name, wait=True):
            if final.is_dir():
                task.advance(layer.descriptor.size)
                return
            for left in self.folder.glob(f".{final.name}.*part"):
                with suppress(OSError):  # what stays is in nobody's way, and `store gc` names it
                    remove_tree(left)
            part = self._new_part(final.name)
            try:
                part.mkdir()
                part.chmod(0o755)  # the / of an image, whatever the umask
                unpack_layer(layer, blob_path(layer.descriptor.digest), part, task)
                part.rename(final)
            except BaseException:
                with suppress(OSError):
                    remove_tree(part)
                raise

    def _new_part(self, name: str) -> Path:
        """Where a layer is made or removed. Each time another: one that cannot be removed may lie there."""
        return self.folder / f".{name}.{secrets.token_hex(4)}.part"

    @contextmanager
    def _lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        """True while this process alone may make or remove the layer `name`; False when another does."""
        locks = self.folder / ".locks"
        locks.mkdir(exist_ok=True)
        with (locks / name).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True


def unpack_layer(layer: Layer, blob: Path, folder: Path, task: Task) -> None:
    """Writes the layer in `blob` into the empty `folder` and proves that it is the layer's diff_id."""
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
            with LayerTree(folder, owners=os.geteuid() == 0) as tree:
                _write_entries(content, tree)
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


class _HashedTar:
    """The plain tar, hashed and counted as it is read."""

    def __init__(self, source: _Source) -> None:
        self.source, self.size = source, 0
        self._sha256 = hashlib.sha256()

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha256.hexdigest()}"

    def read(self, size: int = -1, /) -> bytes:
        data = self.source.read(size)
        self._sha256.update(data)
        self.size += len(data)
        return data

    def drain(self) -> None:
        while self.read(CHUNK):
            pass


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
                hint="pip install 'imagefactory[build]'",
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
    found: list[type[Exception]] = [
        tarfile.TarError,
        EOFError,
        ValueError,
        OverflowError,
        RecursionError,  # tarfile calls itself for each extended header before an entry
        zlib.error,
        gzip.BadGzipFile,
    ]
    with suppress(ImportError):
        import zstandard

        found.append(zstandard.ZstdError)
    with suppress(ImportError):
        from isal import isal_zlib

        found.append(isal_zlib.error)  # type: ignore[arg-type]
    return tuple(found)


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


def _write_entries(content: _HashedTar, tree: LayerTree) -> None:
    stream = cast("IO[bytes]", content)
    with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK, tarinfo=_StrictInfo) as archive:
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
            elif member.isreg() and not member.issparse():
                data = archive.extractfile(member)
                tree.file(parts, member, cast("IO[bytes]", data))
            elif member.issym():
                tree.symlink(parts, member)
            elif member.islnk():
                tree.hard_link(parts, entry_parts(member.linkname), member)
            elif parts[0] == "dev" and (member.isdev()):
                continue  # the sandbox covers /dev with its own, so these could never be seen
            else:
                raise tarfile.TarError(f"'{member.name}' is neither a file, a folder nor a link")


# --- folders in use ------------------------------------------------------------------------------


@contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """True while no sandbox holds the shared lock that it takes on each of its layers."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _hex(diff_id: str) -> str:
    algorithm, _, digits = diff_id.partition(":")
    if algorithm != "sha256" or len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise StoreError(f"'{diff_id}' is not a digest", hint="digests are sha256: and 64 hex digits")
    return digits
