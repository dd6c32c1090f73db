"""Write files atomically through temporary files, and lock files until the process ends."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from imagefactory.errors import ImagefactoryError, StoreError, os_problem
from imagefactory.progress import Progress, format_bytes
from imagefactory.trees import directory_lock, remove_tree, tree_bytes, unlocked_directories


@contextmanager
def replacing(path: Path, *, mode: int = 0o644, durable: bool = False) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` if no error occurs. Readers see the old or the new file.

    With `durable` it is replaced only after its bytes are on the disk. Raises OSError, and leaves no
    temporary file.
    """
    handle, beside = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name[:200]}.")
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fchmod(handle, mode)
            if durable:
                os.fsync(handle)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


@contextmanager
def temporary_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new directory in `parent` or the default place. It is removed at the end, however deep.

    Entries that cannot be removed stay, without an error.
    """
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
    try:
        yield directory
    finally:
        with suppress(OSError):
            remove_tree(directory)


def replace_all(files: Mapping[Path, bytes]) -> None:
    """Write each file next to its path, and rename them when all are complete.

    Raises OSError, such as for a full disk, and leaves every path unchanged.
    """
    with ExitStack() as written:
        for path, data in files.items():
            file = written.enter_context(replacing(path))
            file.write(data)
            file.flush()


def create_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> bool:
    """Write a new file and sync it to the disk. Return False if there is a file or a link.

    It has its `mode` from the start. Raises OSError, and leaves no temporary file.
    """
    handle, beside = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name[:200]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(handle, mode)
            os.fsync(handle)
        os.link(beside, path)
    except FileExistsError:
        return False
    finally:
        Path(beside).unlink(missing_ok=True)
    return True


def user_temporary_directory() -> Path:
    """Return the user's private directory for temporary files. Raises StoreError if another user owns it."""
    directory = Path(tempfile.gettempdir(), f"imagefactory-{os.geteuid()}")
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    state = directory.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        raise StoreError(
            "temporary-not-yours",
            f"{directory} is not a directory, or belongs to another user",
            hint="set TMPDIR to another directory",
        )
    return directory


@contextmanager
def locked_temporary_directory(prefix: str, parent: Path) -> Iterator[Path]:
    """Yield a new temporary directory, locked while this process lives.

    Directories in `parent` with this prefix whose process was killed are removed first.
    """
    with explain_full_disk(parent):
        parent.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(parent), directory_lock(parent):
        for dead in unlocked_directories(parent, lambda _: None, prefix):
            with suppress(OSError):
                remove_tree(dead)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield directory
    finally:
        with suppress(OSError):
            remove_tree(directory)
        os.close(lock)


def replace_text(path: Path, text: str) -> None:
    """Write `text` to a new file and rename it to `path`. Raises OSError, and leaves no temporary file."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Write `data` like `replace_text`."""
    with replacing(path) as file:
        file.write(data)


_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explain_full_disk(directory: Path, *, setting: str = "store") -> Iterator[None]:
    """Raise a StoreError with the directory for errors of the operating system.

    `setting` is the setting of that directory: `store` or `cache`.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise no_space(directory) from error
        if isinstance(error, FileNotFoundError):
            raise
        raise StoreError(
            *os_problem("use", error.filename or directory, error),
            hint=f"set `{setting}` (imagefactory.toml, "
            f"IMAGEFACTORY_{setting.upper()}) to a directory that you can write",
        ) from error


def no_space(directory: Path) -> StoreError:
    """Return the error for a full disk."""
    return StoreError(
        "disk-full",
        f"no space left in {directory}",
        hint="free some space (imagefactory image prune), then run the same command again",
    )


def require_space(bytes_by_path: Mapping[Path, int], message: str) -> None:
    """Raise StoreError if the disks of these directories lack the bytes for the work.

    Directories on one disk share its space. Pass the least bytes that are needed, so that no possible work
    is rejected.
    """
    disks: dict[int, list[tuple[Path, Path, int]]] = {}
    for directory, size in bytes_by_path.items():
        there = next(path for path in (directory, *directory.parents) if path.exists())
        disks.setdefault(there.stat().st_dev, []).append((there, directory, size))
    for parts in disks.values():
        needed, free = sum(size for *_, size in parts), shutil.disk_usage(parts[0][0]).free
        if needed > free:
            location = " and ".join(str(directory) for _, directory, _ in parts)
            raise StoreError(
                "disk-full",
                f"not enough disk space in {location}: {message} needs at least "
                f"{format_bytes(needed)}, {format_bytes(free)} are free",
                hint="free some space (imagefactory image prune --cache), or set `store`, `cache` "
                "(IMAGEFACTORY_STORE, IMAGEFACTORY_CACHE) or, for bases, TMPDIR to a larger disk",
            )


@contextmanager
def shared_use(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold `lock` together with other users; wait for a collection."""
    with open_lock(lock) as handle:
        _wait_for_lock(handle, fcntl.LOCK_SH, lambda: progress.note("waiting for image prune to end ..."))
        yield


@contextmanager
def is_unused(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold `lock` exclusively: wait for its users, and make new users wait."""
    with open_lock(lock) as handle:
        _wait_for_lock(handle, fcntl.LOCK_EX, lambda: progress.note("waiting for running builds to end ..."))
        yield


@contextmanager
def exclusive_lock(lock: Path, refusal: ImagefactoryError) -> Iterator[None]:
    """Lock `lock` exclusively. Raises `refusal` at once if another process has it."""
    with open_lock(lock) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        yield


@contextmanager
def open_lock(path: Path) -> Iterator[int]:
    with explain_full_disk(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        yield handle
    finally:
        os.close(handle)


def create_in(directory: Path, prefix: str) -> tuple[int, Path]:
    """Create a file with a unique name, open for writing, and its directory if missing."""
    try:
        handle, name = tempfile.mkstemp(dir=directory, prefix=prefix)
    except FileNotFoundError:
        directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=directory, prefix=prefix)
    return handle, Path(name)


def move_to(beside: Path, path: Path) -> None:
    """Rename a file, and create its directory if missing."""
    try:
        beside.replace(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.replace(path)


def _wait_for_lock(handle: int, kind: int, before_waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        before_waiting()
        fcntl.flock(handle, kind)


_CHECKSUM_MARK = b"\nsha256:"


def add_checksum(path: Path, data: bytes) -> bytes:
    """Return `data` and a last line with a checksum of it and of its `path`."""
    return b"".join((data, _CHECKSUM_MARK, _sum(path, data), b"\n"))


def check_checksum(path: Path) -> bytes | None:
    """Return the data at `path`, None for a missing file or a wrong checksum."""
    try:
        data, _, checksum = path.read_bytes().rpartition(_CHECKSUM_MARK)
    except OSError:
        return None
    return data if checksum == _sum(path, data) + b"\n" else None


def _sum(path: Path, data: bytes) -> bytes:
    path_bytes = f"{path.parent.name}/{path.name}\0".encode()
    return hashlib.sha256(path_bytes + data).hexdigest().encode()


def entries_of(directory: Path) -> list[Path]:
    """Return the entries of a directory, sorted; nothing if it is missing."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


@contextmanager
def path_inside(top: Path, path: Path) -> Iterator[Path]:
    """Yield a name for `path`, which is below `top`, through its open directory.

    No link below `top` is followed, even one created meanwhile, because others may write to a store or
    cache. `top` itself may be a link. Raises OSError.
    """
    *directories, name = path.relative_to(top).parts
    if ".." in directories or name == "..":
        raise OSError(errno.EINVAL, "the path is outside its directory", str(path))
    here, opened = top, os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for directory in directories:
            here /= directory
            above = opened
            try:
                opened = os.open(
                    directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above
                )
            except NotADirectoryError as error:
                raise OSError(errno.ELOOP, "a link, or not a directory", str(here)) from error
            os.close(above)
        pinned = f"/proc/self/fd/{opened}/"
        try:
            yield Path(pinned + name)
        except OSError as error:
            if str(error.filename).startswith(pinned):
                error.filename = f"{here}/{str(error.filename).removeprefix(pinned)}"
            raise
    finally:
        os.close(opened)


def remove_inside(top: Path, path: Path) -> None:
    """Remove `path`, below `top`, through `path_inside`; no error if it is missing."""
    with suppress(FileNotFoundError), path_inside(top, path) as pinned:
        remove_tree(pinned)


def check_no_links(top: Path, *directories: str) -> None:
    """Raise StoreError for a link directly in `top`, or in one of `folders` in it."""
    for directory in (top, *(top / name for name in directories)):
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_symlink():
                    raise StoreError(
                        "store-link",
                        f"{entry.path} is a link to outside {top}",
                        hint="delete the link, or set its target as the directory in your settings",
                    )


class Removal:
    """A removal of paths in `top` (none with `dry_run`), which continues after errors.

    `bytes` counts the removed bytes, or those that would be. `stuck` are the paths that stay, with errors.
    No link in `top` is followed.
    """

    def __init__(self, top: Path, *, dry_run: bool) -> None:
        self.top, self.dry_run = top, dry_run
        self.bytes = 0
        self.stuck: list[tuple[str, StoreError]] = []

    def remove(self, path: Path, *, by_way_of: str = "") -> bool:
        """Return whether `path` was removed. It is renamed to `by_way_of` first, so no partial one stays."""
        before = len(self.stuck)
        with self.going_on(path), path_inside(self.top, path) as pinned:
            size = tree_bytes(pinned)
            if not self.dry_run:
                remove_tree(pinned.rename(pinned.with_name(by_way_of)) if by_way_of else pinned)
            self.bytes += size
        return len(self.stuck) == before

    @contextmanager
    def going_on(self, path: Path) -> Iterator[None]:
        """Continue after an error of the operating system, after which `path` stays."""
        try:
            yield
        except OSError as error:
            self.keep(path, error)

    def keep(self, path: Path, error: OSError) -> None:
        hint = "check its owner, and whether it is mounted or immutable (lsattr); then run this again"
        self.stuck.append(
            (str(path), StoreError(*os_problem("delete", error.filename or path, error), hint=hint))
        )
