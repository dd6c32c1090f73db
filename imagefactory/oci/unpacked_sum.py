"""What an unpacked layer was like when it was made, and whether it still is.

The record has every entry: what must hold (mode, owner, size, time), what tells that nobody wrote to it since
(ctime, inode), and its content: a file's sha256, a link's target, overlay's marks. It finds what a program, a
person or a disk changed; against whoever may write to the store it proves nothing, the record lies there too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HELD = ("mode", "owner", "group", "size", "time", "device")
_ANOTHER = "has another {} than in the layer"
_TIME = _ANOTHER.format("time")
_MARKS = "user.overlay."

Rows = dict[str, list[Any]]
"""Of a folder, by name: what `_HELD` names, ctime and inode, content. The root has its own as `.`."""


class _ChangedError(Exception):
    """Says what is not as it was. Never leaves this file."""


def record(folder: Path, digests: Mapping[int, str]) -> bytes:
    """The record of a layer that was just unpacked; `digests` are the sha256 of its files by inode."""
    known: dict[str, Rows] = {}

    def look(path: str, opened: int) -> Iterable[str]:
        rows = known[path] = {}
        inner = []
        for name in (*os.listdir(opened), *(() if path else (".",))):
            status = os.stat(name, dir_fd=opened, follow_symlinks=False)
            digest = digests[status.st_ino] if stat.S_ISREG(status.st_mode) else None
            content = digest or _content(opened, name, status)
            rows[name] = [*_held(status), *_seen(status), content]
            if stat.S_ISDIR(status.st_mode) and name != "." and _readable(status):
                inner.append(name)
        return inner

    _visit(folder, look)
    return json.dumps(known, separators=(",", ":")).encode()


def what_changed(folder: Path, recorded: bytes, *, every_byte: bool) -> str:
    """What of the first entry is not as `record` saw it; "" where all is.

    Content is trusted where also ctime and inode are as they were, unless `every_byte`: then it is read.
    """
    known: dict[str, Rows] = json.loads(recorded)
    times: list[str] = []

    def look(path: str, opened: int) -> Iterable[str]:
        rows = known[path]
        for name in sorted(set(os.listdir(opened)) - rows.keys()):
            raise _ChangedError(f"{path + name!r} is not of the layer")
        for name, row in rows.items():
            fault = _compare(opened, name, row, every_byte=every_byte)
            if fault == _TIME and stat.S_ISDIR(row[0]):
                times.append(f"{path + name!r} {fault}")  # what changed inside says more
            elif fault:
                raise _ChangedError(f"{path + name!r} {fault}")
        return [name for name in rows if f"{path}{name}/" in known]

    try:
        _visit(folder, look)
    except _ChangedError as changed:
        return str(changed)
    except OSError as error:
        return f"it cannot be read: {error}"
    return next(iter(times), "")


def _compare(opened: int, name: str, row: list[Any], *, every_byte: bool) -> str:
    try:
        status = os.stat(name, dir_fd=opened, follow_symlinks=False)
    except FileNotFoundError:
        return "is missing"
    for word, was, now in zip(_HELD, row, _held(status), strict=False):
        if was != now:
            return _ANOTHER.format(word)
    untouched = _seen(status) == row[6:8]
    # What its mode hides from an ordinary user cannot be read; a mode changed for that would show inside.
    if untouched and not (every_byte and _readable(status)):
        return ""
    return "" if _content(opened, name, status) == row[8] else _ANOTHER.format("content")


def _visit(root: Path, look: Callable[[str, int], Iterable[str]]) -> None:
    """Shows `look` each folder, as a path that ends in `/` and open; it names those inside to go on with."""
    opened: list[int] = []
    waiting = [(0, "", str(root))]
    try:
        while waiting:
            depth, path, name = waiting.pop()
            while len(opened) > depth:
                os.close(opened.pop())
            opened.append(os.open(name, _FOLDER, dir_fd=opened[-1] if opened else None))
            waiting += [(depth + 1, f"{path}{inner}/", inner) for inner in look(path, opened[-1])]
    finally:
        for fd in opened:
            os.close(fd)


def _held(status: os.stat_result) -> list[int]:
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size  # a folder's is its file system's affair
    return [status.st_mode, status.st_uid, status.st_gid, size, status.st_mtime_ns, status.st_rdev]


def _seen(status: os.stat_result) -> list[int]:
    return [status.st_ctime_ns, status.st_ino]


def _readable(status: os.stat_result) -> bool:
    return os.geteuid() == 0 or bool(status.st_mode & stat.S_IRUSR)


def _content(opened: int, name: str, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(name, dir_fd=opened)
    if stat.S_ISDIR(status.st_mode):
        return _marks(opened, name) if _readable(status) else ""
    if not stat.S_ISREG(status.st_mode):
        return ""
    with os.fdopen(os.open(name, _FILE, dir_fd=opened), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() + _marks(opened, name)


def _marks(opened: int, name: str) -> str:
    """Overlay's attributes; nothing where the file system has no attributes."""
    path = f"/proc/self/fd/{opened}/{name}"
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return ""
        raise
    marks = sorted(mark for mark in names if mark.startswith(_MARKS))
    return "".join(f" {mark}={os.getxattr(path, mark, follow_symlinks=False).hex()}" for mark in marks)
