"""Read, walk and remove directories that an untrusted program filled, with few file descriptors.

Only this file opens files that an image, a package build or a job wrote. No link is followed, a FIFO or a
device is never opened, and the caller sets the limits. Path length, recursion depth and the number of open
files do not limit it. Kits and the sandbox contain this file as a link, so it uses only the standard library
of Python 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn, Union

Place = Union[str, "os.PathLike[str]"]
CHUNK = 1 << 20
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class TreeLimits(NamedTuple):
    """The limits of a walk: the total number of entries, and the levels of directories."""

    entries: int
    depth: int


def read_file(directory: Place, path: str, most: int) -> bytes:
    """Return the bytes of the regular file `path` below `directory`, at most `most`.

    Raises OSError with `path`: for a link in any component, for anything but a regular file, and for a file
    with more bytes.
    """
    with open_file(directory, path, most) as fd:
        return b"".join(read_chunks(fd, path, most))


@contextlib.contextmanager
def open_file(directory: Place, path: str, most: int) -> Iterator[int]:
    """Open a file like `read_file`, for `read_chunks`.

    `directory` itself may be a link, since the caller named it.
    """
    *parents, name = path.split("/")
    if not {"", ".", ".."}.isdisjoint((*parents, name)):
        raise OSError(errno.EINVAL, "not a path inside the directory", printable(path))
    here = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            for parent in parents:
                above, here = here, os.open(parent, os.O_RDONLY | _FOLDER, dir_fd=here)
                os.close(above)
            _check_regular(os.stat(name, dir_fd=here, follow_symlinks=False), path, most)
            fd = os.open(name, _FILE, dir_fd=here)
        finally:
            os.close(here)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(
                error.errno, "a link or file is where a directory must be", printable(path)
            ) from None
        raise OSError(error.errno, error.strerror, printable(path)) from None
    try:
        _check_regular(os.fstat(fd), path, most)  # it may have been replaced since
        yield fd
    finally:
        os.close(fd)


def read_chunks(fd: int, path: str, most: int) -> Iterator[bytes]:
    """Yield the bytes of a file that may grow. Raises OSError for more than `most` bytes."""
    remaining = most
    while data := os.read(fd, min(CHUNK, remaining + 1)):
        remaining -= len(data)
        if remaining < 0:
            raise _too_large(path, most)
        yield data


def list_names(directory: Place, most: int) -> list[str]:
    """Return the sorted names in `directory`. Raises OSError for more than `most` names, and for a link."""
    fd = os.open(directory, os.O_RDONLY | _FOLDER)
    try:
        names = list[str]()
        with os.scandir(fd) as entries:
            for entry in entries:
                if len(names) == most:
                    raise OSError(errno.EFBIG, f"more than {most} entries", printable(str(directory)))
                names.append(entry.name)
        return sorted(names)
    finally:
        os.close(fd)


def printable(text: str) -> str:
    """Return a name from an untrusted directory as one short line without terminal control characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:200])


def _check_regular(state: os.stat_result, path: str, most: int) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", printable(path))
    if state.st_size > most:
        raise _too_large(path, most)


def _too_large(path: str, most: int) -> OSError:
    return OSError(errno.EFBIG, f"more than {most} bytes", printable(path))


def remove_tree(path: Place) -> None:
    """Remove the tree at `path`, whatever its permissions. A missing path is not an error.

    No link is followed, and mount points are not entered. Continues after a failed removal, and then raises
    the first OSError, which has the path.
    """
    try:
        here = _Cursor(path, unlock=True)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(path)
        return
    with here:
        removal = _Removal(here)
        while True:
            name = removal.next_folder()
            if name:
                try:
                    here.down(name)
                except OSError as error:
                    removal.keep(name, error)
            elif here.above:
                removal.emptied = here.identity()
                here.up()
            else:
                break
    if removal.first:
        raise removal.first
    os.rmdir(path)


def walk_tree(
    directory: Place,
    refused: Callable[[OSError], None] | None = None,
    *,
    limits: TreeLimits | None = None,
    skip: Callable[[str], bool] = lambda _: False,
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path inside `directory` and the state of each entry, a directory before its contents.

    No link is followed. Names for which `skip` is true are skipped. `refused` is called with the error of an
    unreadable entry; without `refused`, that error is raised. Exceeding `limits` also raises OSError.
    """
    for count, (parents, name, state) in enumerate(_walk(directory, refused or _raise, skip)):
        if limits and (count >= limits.entries or len(parents) > limits.depth):
            what = f"more than {limits.entries} entries" if count >= limits.entries else ""
            what = what or f"more than {limits.depth} levels of directories"
            raise OSError(errno.EFBIG, what, printable(str(directory)))
        yield "/".join((*parents, name)), state


def _walk(
    directory: Place, hear: Callable[[OSError], None], skip: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[list[str], str, os.stat_result]]:
    """Yield each entry with the names of its parent directories; joined paths would grow with each level."""
    try:
        here = _Cursor(directory, unlock=False)
    except OSError as error:
        hear(error)
        return
    parents, waiting = list[str](), [list[str]()]
    with here:
        while True:
            with os.scandir(here.fd) as entries:
                for entry in entries:
                    if skip(entry.name):
                        continue
                    state = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(state.st_mode):
                        waiting[-1].append(entry.name)
                    yield parents, entry.name, state
            while True:
                if waiting[-1]:
                    name = waiting[-1].pop()
                    try:
                        here.down(name)
                    except OSError as error:
                        hear(error)
                        continue
                    parents.append(name)
                    waiting.append([])
                    break
                waiting.pop()
                if not waiting:
                    return
                here.up()
                parents.pop()


def tree_bytes(path: Place) -> int:
    """Return the total size of files and links at `path` in bytes. Unreadable ones count as 0."""
    state = os.lstat(path)
    if not stat.S_ISDIR(state.st_mode):
        return state.st_size
    states = (state for *_, state in _walk(path, lambda _: None))
    return sum(state.st_size for state in states if not stat.S_ISDIR(state.st_mode))


@contextlib.contextmanager
def directory_lock(directory: Place) -> Iterator[None]:
    """Lock out other processes that create directories in `directory`, or that search for unlocked ones."""
    gate = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)


def unlocked_directories(
    parent: Place, refused: Callable[[OSError], None], prefix: str = ""
) -> Iterator[str]:
    """Yield the directories in `parent` that no living process has locked.

    Each is locked until the next step. Only names that start with `prefix` are included. `refused` is called
    with the error of a directory that cannot be opened. Call this inside `alone_in(parent)`.
    """
    for name in os.listdir(parent):
        if not name.startswith(prefix):
            continue
        path = os.path.join(parent, name)
        try:
            fd = os.open(path, os.O_RDONLY | _FOLDER)
        except FileNotFoundError:  # the owner has just removed it
            continue
        except OSError as error:
            refused(error)
            continue
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
        finally:
            os.close(fd)


class _Cursor:
    """An open directory, moved down by name and up by `..`, which must be its previous parent.

    `above` has the device and inode of each parent directory. With `unlock`, the owner gets access to them.
    """

    def __init__(self, top: Place, *, unlock: bool) -> None:
        self.top, self.unlock = str(top), unlock
        self.above = array("Q")
        self.fd = self._open(self.top, None)

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def identity(self) -> tuple[int, int]:
        state = os.fstat(self.fd)
        return state.st_dev, state.st_ino

    def down(self, name: str) -> None:
        below = self._open(name, self.fd)
        self.above.extend(self.identity())
        os.close(self.fd)
        self.fd = below

    def up(self) -> None:
        below, self.fd = self.fd, os.open("..", os.O_RDONLY | _FOLDER, dir_fd=self.fd)
        os.close(below)
        inode, device = self.above.pop(), self.above.pop()
        if self.identity() != (device, inode):
            raise OSError(errno.ESTALE, "a directory in it was moved meanwhile", self.top)

    def _open(self, name: str, parent: int | None) -> int:
        try:
            fd = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=parent)
        except PermissionError:
            if not self.unlock:
                raise
            # A directory without access can be examined, and its mode can only be changed by name.
            closed = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)
            try:
                os.chmod(f"/proc/self/fd/{closed}", 0o700)
                return os.open(".", os.O_RDONLY | _FOLDER, dir_fd=closed)
            finally:
                os.close(closed)
        if self.unlock and os.fstat(fd).st_mode & 0o700 != 0o700:
            with contextlib.suppress(OSError):  # later errors are reported where they occur
                os.fchmod(fd, 0o700)
        return fd


class _Removal:
    """The entries that could not be removed, and the first error.

    `emptied` is the last directory that was left.
    """

    def __init__(self, here: _Cursor) -> None:
        self.here = here
        self.left: set[tuple[tuple[int, int], str]] = set()
        self.first: OSError | None = None
        self.emptied = (0, 0)

    def keep(self, name: str, error: OSError) -> None:
        self.left.add((self.here.identity(), name))
        between = "/.../" if self.here.above else "/"
        self.first = self.first or OSError(error.errno, error.strerror, f"{self.here.top}{between}{name}")

    def next_folder(self) -> str:
        """Remove the entries that can be removed at once.

        Return a directory that is not empty, "" if none remains.
        """
        here, changed = self.here, True
        identity = here.identity()
        while changed:  # readdir(3) may skip entries of a directory that changes meanwhile
            changed = False
            with os.scandir(here.fd) as entries:
                for entry in entries:
                    if (identity, entry.name) in self.left:
                        continue
                    changed = True
                    # rmdir before listing: it fails for mount points, which must not be entered.
                    remove = os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink
                    try:
                        remove(entry.name, dir_fd=here.fd)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        full = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
                        if full and not self._was_emptied(entry.name):
                            return entry.name
                        self.keep(entry.name, error)
        return ""

    def _was_emptied(self, name: str) -> bool:
        state = os.stat(name, dir_fd=self.here.fd, follow_symlinks=False)
        return (state.st_dev, state.st_ino) == self.emptied


def _raise(error: OSError) -> NoReturn:
    raise error
