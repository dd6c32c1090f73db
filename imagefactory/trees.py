"""Folders that strangers filled, removed and walked however deep they are: by descriptors, a few at a time.

Neither the longest path nor recursion nor the number of open files is a limit here. Kits and the sandbox
carry this file, as links to it, so it knows the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from typing import NoReturn, Union

Place = Union[str, "os.PathLike[str]"]
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Place) -> None:
    """Removes what is at `path`, whatever the modes in it; nothing there is fine.

    No link is followed, and what is mounted inside is not entered. Goes past what cannot be removed, and then
    raises the OSError of the first such thing, which names it.
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
    folder: Place, refused: Callable[[OSError], None] | None = None
) -> Iterator[tuple[str, os.stat_result]]:
    """The path inside `folder` and the state of each entry, a folder before what is in it.

    No link is followed. `refused` hears of what cannot be read; without it that raises OSError.
    """
    hear = refused or _raise
    try:
        here = _Cursor(folder, unlock=False)
    except OSError as error:
        hear(error)
        return
    inside, waiting = "", [list[str]()]
    with here:
        while True:
            with os.scandir(here.fd) as entries:
                for entry in entries:
                    state = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(state.st_mode):
                        waiting[-1].append(entry.name)
                    yield inside + entry.name, state
            while True:
                if waiting[-1]:
                    name = waiting[-1].pop()
                    try:
                        here.down(name)
                    except OSError as error:
                        hear(error)
                        continue
                    inside += f"{name}/"
                    waiting.append([])
                    break
                waiting.pop()
                if not waiting:
                    return
                here.up()
                inside = inside[: inside.rfind("/", 0, -1) + 1]


def tree_bytes(path: Place) -> int:
    """The sizes of the files and links at `path`, summed; what cannot be read counts nothing."""
    state = os.lstat(path)
    if not stat.S_ISDIR(state.st_mode):
        return state.st_size
    found = (state for _, state in walk_tree(path, lambda _: None))
    return sum(state.st_size for state in found if not stat.S_ISDIR(state.st_mode))


@contextlib.contextmanager
def alone_in(folder: Place) -> Iterator[None]:
    """Waits for others who are making folders in `folder`, or looking for those that nobody holds."""
    gate = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)


def folders_unheld(parent: Place, refused: Callable[[OSError], None]) -> Iterator[str]:
    """The folders in `parent` on which no living process has a lock, each locked until the next is asked for.

    `refused` hears of what cannot be opened. To be used `alone_in(parent)`.
    """
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        try:
            fd = os.open(path, os.O_RDONLY | _FOLDER)
        except FileNotFoundError:  # whoever held it has just removed it
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
    """One open folder, moved down by name and up by `..`, which must be where it came from.

    `above` has the device and inode of each folder on the way. `unlock` opens folders to their owner.
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
            raise OSError(errno.ESTALE, "a folder in it was moved meanwhile", self.top)

    def _open(self, name: str, parent: int | None) -> int:
        try:
            fd = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=parent)
        except PermissionError:
            if not self.unlock:
                raise
            # A closed folder can be looked at, and there is no other way to change its mode than by name.
            closed = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)
            try:
                os.chmod(f"/proc/self/fd/{closed}", 0o700)
                return os.open(".", os.O_RDONLY | _FOLDER, dir_fd=closed)
            finally:
                os.close(closed)
        if self.unlock and os.fstat(fd).st_mode & 0o700 != 0o700:
            with contextlib.suppress(OSError):  # what it hinders fails in words of its own
                os.fchmod(fd, 0o700)
        return fd


class _Removal:
    """What stays where, and why the first of it does; `emptied` is the folder that was left last."""

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
        """Removes what goes at once; gives a folder that is not empty, "" where none is left to try."""
        here, found = self.here, True
        identity = here.identity()
        while found:  # what readdir(3) says of a folder that changes meanwhile is not all
            found = False
            with os.scandir(here.fd) as entries:
                for entry in entries:
                    if (identity, entry.name) in self.left:
                        continue
                    found = True
                    # rmdir before any look inside: it refuses mount points, which are not to be entered.
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
