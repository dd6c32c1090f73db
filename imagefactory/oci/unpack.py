"""Layers as folders: each layer of the store is unpacked once, verified, and shared by all images.

`<store>/unpacked/<hex of diff_id>/` holds the content of one layer as overlay wants it: the whiteouts
of the OCI image specification become overlay's own (character device 0/0, `user.overlay.opaque`).
A tar from a stranger can name anything, so every entry is written relative to an open folder,
never through a symbolic link, and only regular files, folders and links are made.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tarfile import HeaderError, ReadError
from typing import IO, Protocol, Self, cast

from imagefactory.errors import StoreError, ToolError
from imagefactory.oci.model import Layer
from imagefactory.progress import Progress, Task, format_bytes

MEDIA_TYPES = {
    "application/vnd.oci.image.layer.v1.tar": "tar",
    "application/vnd.oci.image.layer.v1.tar+gzip": "gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "zstd",
    "application/vnd.docker.image.rootfs.diff.tar": "tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
}
CHUNK = 1 << 20
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
# Overlay reads user.* inside a user namespace (mount option userxattr), and the runner always makes one.
OPAQUE_ATTRIBUTE = "user.overlay.opaque"
DEEPEST = 60
OPEN_FOLDERS = 2 * DEEPEST + 8  # an entry and the target of its hard link, both as deep as may be


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

    def collect(self, keep: Collection[str], *, dry_run: bool = False) -> tuple[tuple[str, int], ...]:
        """Removes layers whose diff_id is not in `keep` and that no sandbox uses, and leftovers.

        Returns (name of the folder, bytes) of each that went, or with `dry_run` would go.
        """
        if not self.folder.is_dir():
            return ()
        kept = {_hex(diff_id) for diff_id in keep}
        gone = []
        for entry in sorted(self.folder.iterdir()):
            leftover = entry.name.startswith(".") and entry.name.endswith(".part")
            digest = entry.name[1:].removesuffix(".part") if leftover else entry.name
            if not entry.is_dir() or entry.name == ".locks" or (digest in kept and not leftover):
                continue
            with ExitStack() as held:
                if not held.enter_context(self._lock(digest, wait=False)):
                    continue
                if not leftover and not held.enter_context(_unused(entry)):
                    continue
                gone.append((entry.name, _size(entry)))
                if not dry_run:
                    part = self.folder / f".{digest}.part"
                    if entry != part:
                        remove_tree(part)
                        entry.rename(part)
                    remove_tree(part)
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
            part = self.folder / f".{final.name}.part"
            remove_tree(part)
            try:
                part.mkdir()
                part.chmod(0o755)  # the / of an image, whatever the umask
                unpack_layer(layer, blob_path(layer.descriptor.digest), part, task)
                part.rename(final)
            except BaseException:
                remove_tree(part)
                raise

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
        content = _Hashed(_decoder(layer.descriptor.media_type, packed, opened))
        try:
            with _Tree(folder, owners=os.geteuid() == 0) as tree:
                _write_entries(content, tree)
            content.drain()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(folder, content, error) from error
            raise StoreError(
                f"layer {layer.title or layer.diff_id} cannot be unpacked into {folder}: {error}",
                hint="look at the folder's permissions and file system",
            ) from error
        except (tarfile.TarError, EOFError, ValueError, OverflowError, _decoder_errors()) as error:
            raise StoreError(
                f"layer {layer.title or layer.diff_id} is not a proper archive: {error}",
                hint="the blob is damaged: remove the image and build it again",
            ) from error
    if content.digest != layer.diff_id:
        raise StoreError(
            f"layer {layer.title or layer.diff_id} holds {content.digest}, not {layer.diff_id}",
            hint="the blob or its manifest is damaged: remove the image and build it again",
        )


def remove_tree(folder: Path) -> None:
    """Removes `folder` whatever the modes inside it; nothing there is fine."""

    def unlock(function: Callable[..., object], path: str, _: object) -> None:
        for place in (Path(path).parent, Path(path)):
            if place.is_dir() and not place.is_symlink():
                place.chmod(0o700)
        if function in (os.open, os.scandir, os.listdir):
            shutil.rmtree(path)
        elif Path(path).is_dir() and not Path(path).is_symlink():
            Path(path).rmdir()
        else:
            Path(path).unlink()

    if folder.is_dir() and not folder.is_symlink():
        folder.chmod(0o700)
        shutil.rmtree(folder, onerror=unlock)


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


class _Hashed:
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
    codec = MEDIA_TYPES.get(media_type)
    if codec == "tar":
        return packed
    if codec == "gzip":
        try:
            from isal import igzip

            fast = igzip.GzipFile(fileobj=packed, mode="rb")  # type: ignore[no-untyped-call]
            return cast("_Source", opened.enter_context(fast))
        except ImportError:
            import gzip

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
        hint=f"the store's layers are {', '.join(sorted(MEDIA_TYPES))}",
    )


def _decoder_errors() -> type[Exception]:
    """zstandard's own exception, where it is installed; zlib's and isal's are OSError or EOFError."""
    try:
        import zstandard
    except ImportError:
        return EOFError
    return zstandard.ZstdError


def _full(folder: Path, content: _Hashed, error: OSError) -> StoreError:
    """Reads the layer to its end, to say how many bytes it wants."""
    content.drain()
    free = shutil.disk_usage(folder).free
    return StoreError(
        f"{folder.parent}: {error.strerror}: this layer needs {format_bytes(content.size)} "
        f"({content.size} bytes), {format_bytes(free)} are free",
        hint="free space there (`imagefactory store gc`) or name another store (setting `store`)",
    )


# --- writing -------------------------------------------------------------------------------------


class _StrictInfo(tarfile.TarInfo):
    """tarfile takes a broken header after the first entry for the archive's end; here it is an error."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ in ("InvalidHeaderError", "TruncatedHeaderError"):
                raise ReadError(f"broken header at byte {tarfile.fileobj.tell()}") from error
            raise


def _write_entries(content: _Hashed, tree: _Tree) -> None:
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


def entry_parts(name: str) -> tuple[str, ...]:
    """The folders and last name of a tar entry; () is the root. Raises ValueError for what leaves it."""
    if name.startswith("/"):
        raise ValueError(f"'{name}' is an absolute path")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts or "\0" in name:
        raise ValueError(f"'{name}' leaves the layer")
    if len(parts) > DEEPEST:
        raise ValueError(f"'{name[:80]}...' is more than {DEEPEST} folders deep")
    return parts


class _Tree:
    """A folder that is written by names relative to open folders, so that no link can lead out of it."""

    def __init__(self, folder: Path, *, owners: bool) -> None:
        self.owners = owners
        self.root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.opened: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self.folders: dict[tuple[str, ...], tarfile.TarInfo] = {}

    def __enter__(self) -> _Tree:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._finish_folders()
        finally:
            for fd in self.opened.values():
                os.close(fd)
            os.close(self.root)

    def folder(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        if parts:
            self._open(parts, make=True)
        # Modes and times last: a folder that its owner may not write could not be filled.
        self.folders[parts] = member

    def file(self, parts: tuple[str, ...], member: tarfile.TarInfo, data: IO[bytes]) -> None:
        parent, name = self._parent(parts)
        self._clear(parent, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            left = member.size
            while left:
                chunk = memoryview(data.read(min(CHUNK, left)))
                if not chunk:
                    raise EOFError(f"the archive ends inside '{member.name}'")
                left -= len(chunk)
                while chunk:
                    chunk = chunk[os.write(fd, chunk) :]
            if self.owners:
                os.fchown(fd, member.uid, member.gid)
            os.fchmod(fd, member.mode & 0o777)
            os.utime(fd, ns=_times(member))
        finally:
            os.close(fd)

    def symlink(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        parent, name = self._parent(parts)
        self._clear(parent, name)
        os.symlink(member.linkname, name, dir_fd=parent)
        if self.owners:
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
        os.utime(name, ns=_times(member), dir_fd=parent, follow_symlinks=False)

    def hard_link(self, parts: tuple[str, ...], target: tuple[str, ...], member: tarfile.TarInfo) -> None:
        if not target:
            raise tarfile.TarError(f"'{member.name}' is a hard link to nothing")
        try:
            source = self._open(target[:-1], make=False)
            kind = os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode
        except FileNotFoundError as error:
            raise tarfile.TarError(
                f"'{member.name}' links to '{member.linkname}', not in this layer"
            ) from error
        if not stat.S_ISREG(kind):
            raise tarfile.TarError(f"'{member.name}' links to '{member.linkname}', which is not a file")
        parent, name = self._parent(parts)
        if target == parts:
            return
        self._clear(parent, name)
        source = self._open(target[:-1], make=False)
        os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)

    def whiteout(self, parts: tuple[str, ...]) -> None:
        """The OCI whiteout `.wh.NAME`, or the opaque mark, in overlay's words."""
        parent, name = self._parent(parts)
        hidden = name.removeprefix(WHITEOUT)
        if name == OPAQUE:
            self._set_opaque(parent)
        elif hidden in ("", ".", "..") or hidden.startswith(WHITEOUT):
            raise tarfile.TarError(f"'{'/'.join(parts)}' is not a whiteout of the OCI image specification")
        else:
            try:
                os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
            except FileExistsError:
                # The layer's own entry of that name is what is to be seen; a folder also hides the lower one.
                if stat.S_ISDIR(os.stat(hidden, dir_fd=parent, follow_symlinks=False).st_mode):
                    self._set_opaque(self._open((*parts[:-1], hidden), make=False))
            except PermissionError as error:
                raise StoreError(
                    f"the file system refuses whiteouts (mknod of character device 0/0): {error.strerror}",
                    hint="put the store on a local disk; Linux 5.8 or newer is needed",
                ) from error

    def _set_opaque(self, folder: int) -> None:
        try:
            os.setxattr(folder, OPAQUE_ATTRIBUTE, b"y")
        except OSError as error:
            raise StoreError(
                f"the file system refuses the attribute {OPAQUE_ATTRIBUTE}: {error.strerror}",
                hint="put the store on a file system with user extended attributes (ext4, xfs, btrfs)",
            ) from error

    def _clear(self, parent: int, name: str) -> bool:
        """Removes an earlier entry of that name, as later entries win. True if it was a whiteout."""
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(found.st_mode):
            raise tarfile.TarError(f"'{name}' is a folder and later something else")
        os.unlink(name, dir_fd=parent)
        return stat.S_ISCHR(found.st_mode)

    def _parent(self, parts: tuple[str, ...]) -> tuple[int, str]:
        return self._open(parts[:-1], make=True), parts[-1]

    def _open(self, parts: tuple[str, ...], *, make: bool) -> int:
        """The open folder `parts`, valid until a few dozen others were opened."""
        if not parts:
            return self.root
        if parts in self.opened:
            self.opened.move_to_end(parts)
            return self.opened[parts]
        parent, name = self._open(parts[:-1], make=make), parts[-1]
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        hides = False
        try:
            fd = os.open(name, flags, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not make:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from error
            if not isinstance(error, FileNotFoundError):
                kind = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
                if not stat.S_ISCHR(kind):
                    raise tarfile.TarError(
                        f"'{'/'.join(parts)}' is used as a folder but is a link or file"
                    ) from error
                hides = self._clear(parent, name)
            os.mkdir(name, 0o700, dir_fd=parent)
            fd = os.open(name, flags, dir_fd=parent)
            os.fchmod(fd, 0o755)
        if hides:
            self._set_opaque(fd)
        if len(self.opened) >= OPEN_FOLDERS:
            # Never the ancestors of `parts`: they were used just now and stand at the end.
            os.close(self.opened.popitem(last=False)[1])
        self.opened[parts] = fd
        return fd

    def _finish_folders(self) -> None:
        # Deepest first, so that no folder is closed to us before those inside it are done.
        for parts, member in sorted(self.folders.items(), key=lambda item: -len(item[0])):
            fd = self._open(parts, make=False)
            if self.owners:
                os.fchown(fd, member.uid, member.gid)
            os.fchmod(fd, member.mode & 0o1777)
            os.utime(fd, ns=_times(member))


def _times(member: tarfile.TarInfo) -> tuple[int, int]:
    moment = round(member.mtime * 1_000_000_000)
    return moment, moment


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


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        total += sum((Path(parent) / name).lstat().st_blocks * 512 for name in names)
    return total


def _hex(diff_id: str) -> str:
    algorithm, _, digits = diff_id.partition(":")
    if algorithm != "sha256" or len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise StoreError(f"'{diff_id}' is not a digest", hint="digests are sha256: and 64 hex digits")
    return digits
