"""Layers as folders: each layer of the store is unpacked once, verified, and shared by all images.

`<store>/unpacked/<hex of diff_id>/` holds the content of one layer as overlay wants it: the whiteouts
of the OCI image specification become overlay's own (character device 0/0, `user.overlay.opaque`).
`<store>/unpacked/.sums/<hex>` says what it was like (unpacked_sum.py), and comes before it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from imagefactory.errors import StoreError, os_problem
from imagefactory.fs import Removal, entries_of, explain_full_disk, open_lock, path_inside, refuse_links, remove_inside, replacing, seal, unseal
from imagefactory.oci.model import Layer
from imagefactory.oci.tree import LayerTree
from imagefactory.oci.unpack_layer import unpack_layer
from imagefactory.oci.unpacked_sum import record, what_changed
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
                self._unpack_all(missing, blob_path, task, progress, workers)
        return tuple(self.path(layer.diff_id) for layer in layers)

    @contextmanager
    def writing(self, diff_id: Callable[[], str]) -> Iterator[LayerTree]:
        """Takes the entries of a layer that is being made; `diff_id` is asked when all were written."""
        self._prepare()
        with self._part("new") as part:
            with LayerTree(part, owners=os.geteuid() == 0) as tree:
                yield tree
            final = self.path(diff_id())
            with self._lock(final.name, wait=True):
                if not final.is_dir():
                    self._keep(part, tree.digests, final)

    def collect(self, keep: Collection[str], removal: Removal) -> tuple[str, ...]:
        """Removes layers whose diff_id is not in `keep` and that no sandbox uses, and leftovers.

        Returns the names of the folders that went.
        """
        kept = {_hex(diff_id) for diff_id in keep}
        gone = []
        for entry in entries_of(self.folder):
            leftover = entry.name.startswith(".") and entry.name.endswith(".part")
            digest = entry.name[1:].partition(".")[0] if leftover else entry.name
            if not entry.is_dir() or entry.name in (".locks", ".sums") or (digest in kept and not leftover):
                continue
            with removal.going_on(entry), ExitStack() as held:
                if not held.enter_context(self._lock(digest, wait=False)):
                    continue
                if not leftover and not held.enter_context(_unused(entry)):
                    continue
                if removal.remove(entry, by_way_of="" if leftover else self._new_part(digest).name):
                    gone.append(entry.name)
        for sums in [] if removal.dry_run else entries_of(self.folder / ".sums"):
            # One that begins with a dot was being written, of the layer that comes next in its name.
            digest = sums.name.removeprefix(".").partition(".")[0]
            with removal.going_on(sums), self._lock(digest, wait=False) as alone:
                if alone and not (self.folder / sums.name).is_dir():
                    remove_inside(removal.top, sums)
        return tuple(gone)

    def drop_changed(self, layers: Sequence[Layer], progress: Progress) -> None:
        """Removes of `layers` what is not as it was unpacked, so that `unpack` makes it anew.

        Content is trusted where size, times and inode are as they were. Waits for sandboxes that use what
        goes.
        """
        for name in dict.fromkeys(_hex(layer.diff_id) for layer in layers):
            self._check(name, progress, every_byte=False, mend=True)

    def check_all(self, progress: Progress, *, mend: bool) -> tuple[tuple[str, str], ...]:
        """Reads every byte of all that is unpacked: (hex of the diff_id, what is wrong) of what changed.

        `mend` removes that, once no sandbox uses it; the next run or build unpacks it anew.
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
            if not tree.is_dir():  # another process removed it while this one waited
                return ""
            recorded = unseal(self._sums(name))
            if recorded is None:
                fault = "its record is corrupt, or of an earlier version"
            else:
                fault = what_changed(tree, recorded, every_byte=every_byte)
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
        refuse_links(self.folder.parent, self.folder.name)
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
        layers: Sequence[Layer],
        blob_path: Callable[[str], Path],
        task: Task,
        progress: Progress,
        workers: int,
    ) -> None:
        # Threads are enough: decompression, hashing and writing all happen outside the interpreter's lock.
        pool = ThreadPoolExecutor(max_workers=max(1, min(workers, len(layers))))
        largest_first = sorted(layers, key=lambda layer: -layer.descriptor.size)
        try:
            futures = [
                pool.submit(self._unpack_one, layer, blob_path, task, progress) for layer in largest_first
            ]
            for future in futures:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _unpack_one(
        self, layer: Layer, blob_path: Callable[[str], Path], task: Task, progress: Progress
    ) -> None:
        final = self.path(layer.diff_id)
        with self._lock(final.name, wait=True):
            if final.is_dir():
                task.advance(layer.descriptor.size)
                return
            for left in self.folder.glob(f".{final.name}.*part"):
                with suppress(OSError):  # what stays is in nobody's way, and `store gc` names it
                    remove_inside(self.folder.parent, left)
            with self._part(final.name) as part:
                digests = unpack_layer(layer, blob_path(layer.descriptor.digest), part, task, progress)
                self._keep(part, digests, final)

    def _keep(self, part: Path, digests: Mapping[int, str], final: Path) -> None:
        sums = self._sums(final.name)
        with explain_full_disk(self.folder), replacing(sums) as file:
            file.write(seal(sums, record(part, digests)))
        part.rename(final)

    @contextmanager
    def _part(self, name: str) -> Iterator[Path]:
        """A folder to fill; what nobody took is removed."""
        part = self._new_part(name)
        part.mkdir()
        part.chmod(0o755)  # the / of an image, whatever the umask
        try:
            yield part
        finally:
            with suppress(OSError):
                remove_inside(self.folder.parent, part)

    def _new_part(self, name: str) -> Path:
        """Where a layer is made or removed. Each time another: one that cannot be removed may lie there."""
        return self.folder / f".{name}.{secrets.token_hex(4)}.part"

    @contextmanager
    def _lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        """True while this process alone may make or remove the layer `name`; False when another does."""
        locks = self.folder / ".locks"
        locks.mkdir(exist_ok=True)
        with open_lock(locks / name) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True


# --- folders in use ------------------------------------------------------------------------------


@contextmanager
def _unused(folder: Path, before_waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """True while no sandbox holds the shared lock that it takes on each of its layers.

    With `before_waiting`, which is called first, it waits for that; else it is False where one does.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
