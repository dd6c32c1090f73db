"""Layers as directories: each layer of the store is unpacked once, verified, and shared by all images.

`<store>/unpacked/<hex of diff_id>/` has the content of one layer in overlayfs' format: the whiteouts of the
OCI image specification become overlayfs' own (character device 0/0, `user.overlay.opaque`).
`<store>/unpacked/.sums/<hex>` is the record of its entries (below), and is written first.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from imagefactory.errors import StoreError, os_problem, os_reason
from imagefactory.fs import (
    Removal,
    add_checksum,
    check_checksum,
    check_no_links,
    entries_of,
    explain_full_disk,
    open_lock,
    path_inside,
    remove_inside,
    replacing,
)
from imagefactory.oci.inflate import CorruptDataError, plain_layer
from imagefactory.oci.manifests import OciLayer
from imagefactory.oci.tar_stream import (
    DIRECTORY,
    FILE,
    HARD_LINK,
    HIDDEN,
    REMOVED,
    TarStream,
    entries,
    layer_error,
)
from imagefactory.oci.tree import CHUNK, FileData, LayerTree, TarMember
from imagefactory.progress import Progress, ProgressTask, format_bytes
from imagefactory.trees import printable, remove_tree

# --- One layer of the store: read entry by entry, verified by its diff_id, written to a directory
# A tar from a stranger can name anything, so every entry is written relative to an open directory, never
# through a symbolic link, and only regular files, directories and links are created.


class EntrySink(Protocol):
    """A sink for a layer's entries in order. The last entry with a name wins.

    A path is its parts, () for the root. Raises tarfile.TarError for an entry that is not allowed in a
    layer.
    """

    def __enter__(self) -> object: ...
    def __exit__(self, kind: object, /, *_: object) -> None: ...
    def folder(self, parts: tuple[str, ...], member: TarMember) -> None: ...
    def file(self, parts: tuple[str, ...], member: TarMember, data: FileData) -> None: ...
    def symlink(self, parts: tuple[str, ...], member: TarMember) -> None: ...
    def whiteout(self, parts: tuple[str, ...]) -> None: ...
    def remove(self, parts: tuple[str, ...]) -> None: ...

    def hard_link(self, parts: tuple[str, ...], target: tuple[str, ...], member: TarMember) -> None: ...


def unpack_layer(
    layer: OciLayer, blob: Path, directory: Path, task: ProgressTask, progress: Progress
) -> Mapping[int, str]:
    """Write the layer in `blob` to the empty `directory` and check its diff_id.

    Return the sha256 of the files there, by inode.
    """
    tree = LayerTree(directory, owners=os.geteuid() == 0)
    report_skipped(layer, read_layer(layer, blob, directory, tree, task), progress)
    return tree.digests


def read_layer(
    layer: OciLayer, blob: Path, directory: Path, tree: EntrySink, task: ProgressTask
) -> list[str]:
    """Pass the entries in `blob` to `tree`, which writes to `directory`, and check the diff_id.

    Return the names of skipped device nodes and FIFOs. Raises StoreError for another diff_id, an entry that
    is not allowed in a layer, or a full disk, and ToolError for a missing codec.
    """
    content = _HashingReader(plain_layer(layer.descriptor.media_type, _packed(layer, blob, task)))
    stream = TarStream(iter(content))
    title = printable(layer.title) or layer.diff_id
    try:
        with tree:
            _feed_entries(stream, tree)
        stream.drain()
    except (CorruptDataError, tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise layer_error(title, error) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(directory, stream, content, error) from error
        raise StoreError(
            "layer-unpack-failed",
            f"cannot unpack layer {title} into {directory}: {error}",
            hint="check the directory's permissions and file system",
        ) from error
    if content.digest != layer.diff_id:
        raise StoreError(
            "layer-corrupt",
            f"layer {title} has the digest {content.digest}, not {layer.diff_id}",
            hint="remove the corrupt image, then build or pull it again",
        )
    return stream.skipped


def report_skipped(layer: OciLayer, skipped: list[str], progress: Progress) -> None:
    """Print the skipped entries of a layer, except those below /dev, which every runner creates."""
    names = [printable(name) for name in skipped if not name.lstrip("./").startswith("dev/")]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        progress.note(
            f"  layer {layer.diff_id[7:19]}: device nodes and FIFOs are skipped: {', '.join(names[:3])}{more}"
        )


def _packed(layer: OciLayer, blob: Path, task: ProgressTask) -> Iterator[bytes]:
    """Yield the compressed bytes, and advance the progress."""
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


class _HashingReader:
    """The plain bytes, hashed and counted during reading."""

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


def _full(directory: Path, stream: TarStream, content: _HashingReader, error: OSError) -> StoreError:
    """Return the error of a full disk. Reads the layer to its end for its size."""
    stream.drain()
    free = shutil.disk_usage(directory).free
    return StoreError(
        "disk-full",
        f"{directory.parent}: {os_reason(error)}: this layer needs {format_bytes(content.size)} "
        f"({content.size} bytes), {format_bytes(free)} are free",
        hint="free space there (imagefactory image prune), or set `store` to another disk",
    )


def _feed_entries(stream: TarStream, tree: EntrySink) -> None:
    for entry in entries(stream):
        if entry.kind == FILE:
            tree.file(entry.parts, entry, entry)
        elif entry.kind == DIRECTORY:
            tree.folder(entry.parts, entry)
        elif entry.kind == HARD_LINK:
            tree.hard_link(entry.parts, entry.target, entry)
        elif entry.kind == HIDDEN:
            tree.whiteout(entry.parts)
        elif entry.kind == REMOVED:
            tree.remove(entry.parts)
        else:
            tree.symlink(entry.parts, entry)


# --- The record of an unpacked layer's entries, and its comparison with the directory
# For each entry it has mode, owner, size and time, which must match; ctime and inode, which show writes; and
# its content: a file's sha256, a link's target, overlay's marks. It detects changes by programs, people and
# disks, but not by an attacker who can write to the store, since the record is there too.


_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_RECORDED_FIELDS = ("mode", "owner", "group", "size", "time", "device")
_ANOTHER = "has another {} than in the layer"
_TIME = _ANOTHER.format("time")
_MARKS = "user.overlay."

Rows = dict[str, list[Any]]
"""The rows of a directory, by name: fields of the entry, ctime and inode, content. The root is `.`."""


class _TreeChangedError(Exception):
    """A change in a tree, named by the message. Only used in this file."""


def record_tree(directory: Path, digests: Mapping[int, str]) -> bytes:
    """Return the record of a new unpacked layer; `digests` are the sha256 of its files by inode."""
    known: dict[str, Rows] = {}

    def look(path: str, opened: int) -> Iterable[str]:
        rows = known[path] = {}
        inner = []
        for name in (*os.listdir(opened), *(() if path else (".",))):
            status = os.stat(name, dir_fd=opened, follow_symlinks=False)
            digest = digests[status.st_ino] if stat.S_ISREG(status.st_mode) else None
            content = digest or _content(opened, name, status)
            rows[name] = [*_recorded_fields(status), *_observed_fields(status), content]
            if stat.S_ISDIR(status.st_mode) and name != "." and _readable(status):
                inner.append(name)
        return inner

    _visit(directory, look)
    return json.dumps(known, separators=(",", ":")).encode()


def find_tree_changes(directory: Path, recorded: bytes, *, every_byte: bool) -> str:
    """Return the fault of the first entry that changed since its record, "" for none.

    Content counts as unchanged if ctime and inode are, unless `every_byte` is set: then it is read.
    """
    known: dict[str, Rows] = json.loads(recorded)
    times: list[str] = []

    def look(path: str, opened: int) -> Iterable[str]:
        rows = known[path]
        for name in sorted(set(os.listdir(opened)) - rows.keys()):
            raise _TreeChangedError(f"{path + name!r} is not in the layer")
        for name, row in rows.items():
            fault = _compare(opened, name, row, every_byte=every_byte)
            if fault == _TIME and stat.S_ISDIR(row[0]):
                times.append(f"{path + name!r} {fault}")  # changes inside are more precise
            elif fault:
                raise _TreeChangedError(f"{path + name!r} {fault}")
        return [name for name in rows if f"{path}{name}/" in known]

    try:
        _visit(directory, look)
    except _TreeChangedError as changed:
        return str(changed)
    except OSError as error:
        return f"it cannot be read: {error}"
    return next(iter(times), "")


def _compare(opened: int, name: str, row: list[Any], *, every_byte: bool) -> str:
    try:
        status = os.stat(name, dir_fd=opened, follow_symlinks=False)
    except FileNotFoundError:
        return "is missing"
    for word, was, now in zip(_RECORDED_FIELDS, row, _recorded_fields(status), strict=False):
        if was != now:
            return _ANOTHER.format(word)
    untouched = _observed_fields(status) == row[6:8]
    # A file whose mode denies reading is skipped; a change of mode would be detected inside.
    if untouched and not (every_byte and _readable(status)):
        return ""
    return "" if _content(opened, name, status) == row[8] else _ANOTHER.format("content")


def _visit(root: Path, look: Callable[[str, int], Iterable[str]]) -> None:
    """Call `look` with each open directory and its path ending in `/`. It returns the entries to visit."""
    opened: list[int] = []
    waiting = [(0, "", str(root))]
    try:
        while waiting:
            depth, path, name = waiting.pop()
            while len(opened) > depth:
                os.close(opened.pop())
            opened.append(os.open(name, _OPEN_DIRECTORY, dir_fd=opened[-1] if opened else None))
            waiting += [(depth + 1, f"{path}{inner}/", inner) for inner in look(path, opened[-1])]
    finally:
        for fd in opened:
            os.close(fd)


def _recorded_fields(status: os.stat_result) -> list[int]:
    size = (
        0 if stat.S_ISDIR(status.st_mode) else status.st_size
    )  # the size of a directory depends on its file system
    return [status.st_mode, status.st_uid, status.st_gid, size, status.st_mtime_ns, status.st_rdev]


def _observed_fields(status: os.stat_result) -> list[int]:
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
    """Return overlay's attributes; nothing if the file system has no attributes."""
    path = f"/proc/self/fd/{opened}/{name}"
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return ""
        raise
    marks = sorted(mark for mark in names if mark.startswith(_MARKS))
    return "".join(f" {mark}={os.getxattr(path, mark, follow_symlinks=False).hex()}" for mark in marks)


class UnpackedLayers:
    """The unpacked layers under `folder` (usually `<store>/unpacked`), which is created with mode 0700."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory

    def path(self, diff_id: str) -> Path:
        """Return the path of the layer with this diff_id (`sha256:<64 hex>`), which may not exist."""
        return self.folder / _hex(diff_id)

    def unpack(
        self,
        layers: Sequence[OciLayer],
        blob_path: Callable[[str], Path],
        progress: Progress,
        *,
        workers: int = 2,
    ) -> tuple[Path, ...]:
        """Return the directories of `layers`, the lowest first. Missing ones are unpacked and verified.

        `blob_path` returns the file of a blob by its digest. Raises StoreError for content that does not
        match its diff_id, that is not allowed in a layer, or that does not fit the disk, and ToolError for a
        missing codec. Each layer is unpacked by one process. If that process is killed, the next call
        removes its directory.
        """
        missing = list(
            {layer.diff_id: layer for layer in layers if not self.path(layer.diff_id).is_dir()}.values()
        )
        if missing:
            self._prepare()
            total = sum(layer.descriptor.size for layer in missing)
            with progress.task(f"unpack {len(missing)} layers", total=total) as task:
                self._unpack_all(missing, blob_path, task, progress, workers)
        return tuple(self.path(layer.diff_id) for layer in layers)

    @contextmanager
    def writing(self, diff_id: Callable[[], str]) -> Iterator[LayerTree]:
        """Yield a tree for a new layer's entries. `diff_id` is called when all are written."""
        self._prepare()
        with self._part("new") as part:
            with LayerTree(part, owners=os.geteuid() == 0) as tree:
                yield tree
            final = self.path(diff_id())
            with self._lock(final.name, wait=True):
                if not final.is_dir():
                    self._keep(part, tree.digests, final)

    def collect(self, keep: Collection[str], removal: Removal) -> tuple[str, ...]:
        """Remove layers that are not in `keep` and not in use, and leftovers; return their names."""
        hexes = {_hex(diff_id) for diff_id in keep}
        gone = []
        for entry in entries_of(self.folder):
            leftover = entry.name.startswith(".") and entry.name.endswith(".part")
            digest = entry.name[1:].partition(".")[0] if leftover else entry.name
            if not entry.is_dir() or entry.name in (".locks", ".sums") or (digest in hexes and not leftover):
                continue
            with removal.going_on(entry), ExitStack() as locks:
                if not locks.enter_context(self._lock(digest, wait=False)):
                    continue
                if not leftover and not locks.enter_context(_unused(entry)):
                    continue
                if removal.remove(entry, by_way_of="" if leftover else self._new_part(digest).name):
                    gone.append(entry.name)
        for sums in [] if removal.dry_run else entries_of(self.folder / ".sums"):
            # A name with a dot is of an unfinished layer, whose name follows.
            digest = sums.name.removeprefix(".").partition(".")[0]
            with removal.going_on(sums), self._lock(digest, wait=False) as alone:
                if alone and not (self.folder / sums.name).is_dir():
                    remove_inside(removal.top, sums)
        return tuple(gone)

    def drop_changed(self, layers: Sequence[OciLayer], progress: Progress) -> None:
        """Remove the layers that changed since they were unpacked. `unpack` then unpacks them again.

        Content counts as unchanged if size, times and inode are. Waits for sandboxes that use a removed
        layer.
        """
        for name in dict.fromkeys(_hex(layer.diff_id) for layer in layers):
            self._check(name, progress, every_byte=False, mend=True)

    def check_all(self, progress: Progress, *, mend: bool) -> tuple[tuple[str, str], ...]:
        """Check every byte of all unpacked layers. Return (hex of the diff_id, fault) of the changed ones.

        With `mend` they are removed once no sandbox uses them. The next run or build unpacks them again.
        """
        names = [path.name for path in entries_of(self.folder) if not path.name.startswith(".")]
        faults = []
        with progress.task("check unpacked layers", total=len(names), unit="layers") as task:
            for name in names:
                fault = self._check(name, progress, every_byte=True, mend=mend)
                task.advance(1)
                if fault:
                    faults.append((name, fault))
        return tuple(faults)

    def _check(self, name: str, progress: Progress, *, every_byte: bool, mend: bool) -> str:
        tree = self.folder / name
        if not tree.is_dir():
            return ""
        with self._lock(name, wait=True):
            if not tree.is_dir():  # another process removed it meanwhile
                return ""
            recorded = check_checksum(self._sums(name))
            if recorded is None:
                fault = "its record is corrupt, or of an earlier version"
            else:
                fault = find_tree_changes(tree, recorded, every_byte=every_byte)
            if fault and mend:
                progress.note(f"  layer {name[:12]} was deleted, and will be unpacked again: {fault}")
                waiting = "  waiting for commands that run in it to end ..."
                with (
                    _unused(tree, lambda: progress.note(waiting)),
                    path_inside(self.folder.parent, tree) as pinned,
                ):
                    remove_tree(pinned.rename(pinned.with_name(self._new_part(name).name)))
        return fault

    def _sums(self, name: str) -> Path:
        return self.folder / ".sums" / name

    def _prepare(self) -> None:
        check_no_links(self.folder.parent, self.folder.name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            for inner in (".locks", ".sums"):
                (self.folder / inner).mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(
                *os_problem("create", self.folder, error),
                hint="set `store` to a directory that you can write",
            ) from error

    def _unpack_all(
        self,
        layers: Sequence[OciLayer],
        blob_path: Callable[[str], Path],
        task: ProgressTask,
        progress: Progress,
        workers: int,
    ) -> None:
        # Threads are enough: decompression, hashing and writing all release the interpreter's lock.
        pool = ThreadPoolExecutor(max_workers=max(1, min(workers, len(layers))))
        largest_first = sorted(layers, key=lambda layer: -layer.descriptor.size)
        try:
            futures = [
                pool.submit(self._unpack_layer, layer, blob_path, task, progress) for layer in largest_first
            ]
            for future in futures:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _unpack_layer(
        self, layer: OciLayer, blob_path: Callable[[str], Path], task: ProgressTask, progress: Progress
    ) -> None:
        final = self.path(layer.diff_id)
        with self._lock(final.name, wait=True):
            if final.is_dir():
                task.advance(layer.descriptor.size)
                return
            for leftover in self.folder.glob(f".{final.name}.*part"):
                with suppress(OSError):  # leftovers do no harm, and `image prune` lists them
                    remove_inside(self.folder.parent, leftover)
            with self._part(final.name) as part:
                digests = unpack_layer(layer, blob_path(layer.descriptor.digest), part, task, progress)
                self._keep(part, digests, final)

    def _keep(self, part: Path, digests: Mapping[int, str], final: Path) -> None:
        sums = self._sums(final.name)
        with explain_full_disk(self.folder), replacing(sums) as file:
            file.write(add_checksum(sums, record_tree(part, digests)))
        part.rename(final)

    @contextmanager
    def _part(self, name: str) -> Iterator[Path]:
        """Yield a new directory to fill. It is removed at the end unless it was renamed."""
        part = self._new_part(name)
        part.mkdir()
        part.chmod(0o755)  # the / of an image, whatever the umask
        try:
            yield part
        finally:
            with suppress(OSError):
                remove_inside(self.folder.parent, part)

    def _new_part(self, name: str) -> Path:
        """Return a unique path to create or remove a layer: an old one may not be removable."""
        return self.folder / f".{name}.{secrets.token_hex(4)}.part"

    @contextmanager
    def _lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Yield whether only this process may create or remove the layer `name`."""
        locks = self.folder / ".locks"
        locks.mkdir(exist_ok=True)
        with open_lock(locks / name) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True


# --- directories in use ---------------------------------------------------------------------------


@contextmanager
def _unused(directory: Path, before_waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Yield whether no sandbox has the shared lock on this layer.

    With `before_waiting`, call it and wait for the lock.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if before_waiting is None:
                yield False
                return
            before_waiting()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(fd)


def _hex(diff_id: str) -> str:
    algorithm, _, digits = diff_id.partition(":")
    if algorithm != "sha256" or len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise StoreError(
            "digest-invalid", f"'{diff_id}' is not a digest", hint="write sha256: and 64 hex digits"
        )
    return digits
