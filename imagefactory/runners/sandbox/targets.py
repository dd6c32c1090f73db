"""Places in a stranger's tree to mount on, found and made without following a link out of that tree."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from .syscalls import SetupError, open_beneath

# As many links as the kernel follows, and folders deeper than any image's: each is held open on the way.
LINKS_LIMIT, DEPTH_LIMIT = 40, 200


def open_target(root: int, path: str, *, folder: bool, closed: tuple[str, ...] = ()) -> int:
    """The place `path` below the open folder `root`, as a descriptor to mount on. What is missing is made.

    The kernel resolves one name at a time and no link: a link is read as text, and walked from `root` as its
    processes will. So nothing outside can be named, by '..', by an absolute link or through /proc, and where
    the walk ends is known. Raises SetupError where it ends in `root` itself or comes into a folder of `root`
    that is in `closed`, OSError where the tree has no such place and it cannot be made.
    """
    ahead = path.split("/")[::-1]
    opened: list[int] = []
    links = 0
    try:
        while ahead:
            name = ahead.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if opened:
                    os.close(opened.pop())
                continue
            if not opened and name in closed:
                raise led_to(path, f"/{name}")
            if len(opened) == DEPTH_LIMIT:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            above = opened[-1] if opened else root
            found = open_or_make(above, name, folder=folder or any(part not in ("", ".") for part in ahead))
            opened.append(found)
            if stat.S_ISLNK(os.fstat(found).st_mode):
                links += 1
                if links > LINKS_LIMIT:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                text = os.readlink("", dir_fd=found)
                os.close(opened.pop())
                if text.startswith("/"):
                    while opened:
                        os.close(opened.pop())
                ahead += text.split("/")[::-1]
        if not opened:
            raise led_to(path, "/")
        return opened.pop()
    finally:
        for fd in opened:
            os.close(fd)


def led_to(path: str, place: str) -> SetupError:
    """`place` is one of ours: the words of an image's link may hold anything, and are for no terminal."""
    return SetupError("target", errno.EXDEV, f"a link of the image leads {path} to {place}")


def open_or_make(above: int, name: str, *, folder: bool) -> int:
    with contextlib.suppress(FileNotFoundError):
        return open_beneath(above, name)
    with contextlib.suppress(FileExistsError):  # somebody else made it, or a link: looked at next
        if folder:
            os.mkdir(name, 0o755, dir_fd=above)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(name, flags, 0o644, dir_fd=above))
    return open_beneath(above, name)
