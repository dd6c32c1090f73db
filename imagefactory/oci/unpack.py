"""Layers as folders: each layer of the store is unpacked once, verified, and shared by all images.

`<store>/unpacked/<hex of diff_id>/` holds the content of one layer as overlay wants it: the whiteouts
of the OCI image specification become overlay's own (character device 0/0, `user.overlay.opaque`).
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from imagefactory.errors import StoreError
from imagefactory.files import Removal, entries_of
from imagefactory.oci.model import Layer
from imagefactory.oci.unpack_layer import unpack_layer
from imagefactory.progress import Progress, Task
from imagefactory.trees import remove_tree


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
