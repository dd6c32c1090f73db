"""A layer's entries as files of a directory that no link or name can leave."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tarfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from imagefactory.errors import BuildError, StoreError, os_reason
from imagefactory.trees import remove_tree

CHUNK = 1 << 20
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
# Overlay reads user.* inside a user namespace (mount option userxattr), and the runner always creates one.
OPAQUE_ATTRIBUTE = "user.overlay.opaque"
DEEPEST = 60
LONGEST = 255  # bytes; the limit for a name on Linux file systems
MAX_OPEN_DIRECTORIES = 2 * DEEPEST + 8  # an entry and the target of its hard link, both at the greatest depth


def entry_parts(name: str) -> tuple[str, ...]:
    """Return the directories and name of a tar entry, () for the root. Raises ValueError if outside the root.

    An absolute name starts at the layer's root, and `..` removes the name before it, as in Go's
    filepath.Clean, which docker and podman use.
    """
    parts_: list[str] = []
    for part in name.split("/"):
        if part == ".." and (parts_ or not name.startswith("/")):
            if not parts_:
                raise ValueError(f"'{name}' is outside the layer")
            parts_.pop()
        elif part not in ("", ".", ".."):
            parts_.append(part)
    if "\0" in name:
        raise ValueError(f"'{name}' is not a path")
    parts = tuple(parts_)
    if len(parts) > DEEPEST:
        raise ValueError(f"'{name[:80]}...' is more than {DEEPEST} directories deep")
    for part in parts:
        # Counting is rarely needed: a letter has 4 bytes at most. A whiteout is unpacked without its prefix.
        if len(part) > LONGEST // 4:
            size = len(part.removeprefix(WHITEOUT).encode("utf-8", "surrogateescape"))
            if size > LONGEST:
                raise ValueError(f"'{name[:80]}...' has a part of {size} bytes (limit: {LONGEST})")
    return parts


def unpackable_parts(path: str) -> tuple[str, ...]:
    """Return `entry_parts`. Raises BuildError for an entry that cannot be unpacked."""
    try:
        if path.startswith("/"):
            raise ValueError(f"'{path}' is an absolute path")
        if ".." in path.split("/"):
            raise ValueError(f"'{path}' is outside the layer")
        return entry_parts(path)
    except ValueError as error:
        hint = "constrain the package that contains it to a version without such a file"
        raise BuildError("package-path-unsafe", str(error), hint=hint) from error


class TarMember(Protocol):
    """The fields of a tar entry; a `tarfile.TarInfo` has them too."""

    @property
    def name(self) -> str: ...
    @property
    def linkname(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def mode(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def mtime(self) -> float: ...


class FileData(Protocol):
    """A file's bytes. `read` returns the requested number, fewer only at the archive's end."""

    def read(self, size: int, /) -> bytes: ...


class LayerTree:
    """A directory that is written through open directories, so that no link leads outside.

    `digests` are the sha256 of its files, by inode.
    """

    def __init__(self, directory: Path, *, owners: bool) -> None:
        self.owners = owners
        self.root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.opened: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self.folders: dict[tuple[str, ...], TarMember] = {}
        self.digests: dict[int, str] = {}

    def __enter__(self) -> LayerTree:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._finish_folders()
        finally:
            for fd in self.opened.values():
                os.close(fd)
            os.close(self.root)

    def folder(self, parts: tuple[str, ...], member: TarMember) -> None:
        if parts:
            self._open(parts, make=True)
        # Modes and times last: a directory without write permission could not be filled.
        self.folders[parts] = member

    def file(self, parts: tuple[str, ...], member: TarMember, data: FileData) -> None:
        for _ in self.passing(parts, member, _pieces(member, data)):
            pass

    def passing(self, parts: tuple[str, ...], member: TarMember, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Write a file's chunks and yield each. The file exists after the last chunk."""
        parent, name = self._parent(parts)
        self._clear(parent, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=parent)
        try:
            sha256 = hashlib.sha256()
            for chunk in chunks:
                sha256.update(chunk)
                rest = memoryview(chunk)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                yield chunk
            if self.owners:
                os.fchown(fd, member.uid, member.gid)
            os.fchmod(fd, member.mode & 0o777)
            os.utime(fd, ns=_times(member))
            self.digests[os.fstat(fd).st_ino] = sha256.hexdigest()
        finally:
            os.close(fd)

    def symlink(self, parts: tuple[str, ...], member: TarMember) -> None:
        parent, name = self._parent(parts)
        self._clear(parent, name)
        os.symlink(member.linkname, name, dir_fd=parent)
        if self.owners:
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
        os.utime(name, ns=_times(member), dir_fd=parent, follow_symlinks=False)

    def hard_link(self, parts: tuple[str, ...], target: tuple[str, ...], member: TarMember) -> None:
        parent, name = self._parent(parts)
        self._clear(parent, name)
        try:
            source = self._open(target[:-1], make=False)
            kind = os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode
        except FileNotFoundError as error:
            raise tarfile.TarError(
                f"'{member.name}' links to '{member.linkname}', not in this layer"
            ) from error
        if not stat.S_ISREG(kind):
            raise tarfile.TarError(f"'{member.name}' links to '{member.linkname}', which is not a file")
        os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)

    def remove(self, parts: tuple[str, ...]) -> None:
        """Remove everything at `parts`, for an entry of another type."""
        for below in [opened for opened in self.opened if opened[: len(parts)] == parts]:
            os.close(self.opened.pop(below))
        for below in [opened for opened in self.folders if opened[: len(parts)] == parts]:
            del self.folders[below]
        try:
            parent = self._open(parts[:-1], make=False)
        except FileNotFoundError:
            return  # the walk has reported it, and nothing was written there
        remove_tree(f"/proc/self/fd/{parent}/{parts[-1]}")

    def whiteout(self, parts: tuple[str, ...]) -> None:
        """Write the OCI whiteout `.wh.NAME`, or the opaque mark, in overlayfs' format."""
        parent, name = self._parent(parts)
        hidden = name.removeprefix(WHITEOUT)
        if name == OPAQUE:
            self._set_opaque(parent)
        else:
            try:
                os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
            except FileExistsError:
                # The layer's own entry of that name must be visible; a directory also hides the lower one.
                if stat.S_ISDIR(os.stat(hidden, dir_fd=parent, follow_symlinks=False).st_mode):
                    self._set_opaque(self._open((*parts[:-1], hidden), make=False))
            except PermissionError as error:
                raise StoreError(
                    "filesystem-unsupported",
                    "the file system does not support whiteouts (mknod of "
                    f"character device 0/0): {os_reason(error)}",
                    hint="move the store to a local disk; Linux 5.8 or newer is needed",
                ) from error

    def _set_opaque(self, directory: int) -> None:
        try:
            os.setxattr(directory, OPAQUE_ATTRIBUTE, b"y")
        except OSError as error:
            raise StoreError(
                "filesystem-unsupported",
                f"the file system does not support the attribute {OPAQUE_ATTRIBUTE}: {os_reason(error)}",
                hint="move the store to a file system with user extended attributes (ext4, xfs, btrfs)",
            ) from error

    def _clear(self, parent: int, name: str) -> bool:
        """Remove an earlier entry with this name: the last one wins. Return whether it was a whiteout."""
        try:
            state = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(state.st_mode):
            raise tarfile.TarError(f"'{name}' is a directory in one entry and not in a later one")
        os.unlink(name, dir_fd=parent)
        return stat.S_ISCHR(state.st_mode)

    def _parent(self, parts: tuple[str, ...]) -> tuple[int, str]:
        return self._open(parts[:-1], make=True), parts[-1]

    def _open(self, parts: tuple[str, ...], *, make: bool) -> int:
        """Return the open directory `parts`. It stays open until a few dozen others are opened."""
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
                        f"'{'/'.join(parts)}' is used as a directory but is a link or file"
                    ) from error
                hides = self._clear(parent, name)
            os.mkdir(name, 0o700, dir_fd=parent)
            fd = os.open(name, flags, dir_fd=parent)
            os.fchmod(fd, 0o755)
        if hides:
            self._set_opaque(fd)
        if len(self.opened) >= MAX_OPEN_DIRECTORIES:
            # Never the ancestors of `parts`: they are the most recent entries.
            os.close(self.opened.popitem(last=False)[1])
        self.opened[parts] = fd
        return fd

    def _finish_folders(self) -> None:
        # Deepest first, so that no directory loses its permissions before its children are done.
        for parts, member in sorted(self.folders.items(), key=lambda item: -len(item[0])):
            fd = self._open(parts, make=False)
            if self.owners:
                os.fchown(fd, member.uid, member.gid)
            os.fchmod(fd, member.mode & 0o1777)
            os.utime(fd, ns=_times(member))


def _times(member: TarMember) -> tuple[int, int]:
    moment = round(member.mtime * 1_000_000_000)
    return moment, moment


def _pieces(member: TarMember, data: FileData) -> Iterator[bytes]:
    rest = member.size
    while rest:
        chunk = data.read(min(CHUNK, rest))
        if not chunk:
            raise EOFError(f"the archive ends inside '{member.name}'")
        rest -= len(chunk)
        yield chunk
