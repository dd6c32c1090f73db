"""Store checks: blobs by their digests, records by their checksums, tags by completeness.

Unpacked layers must not have changed since they were unpacked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagefactory.errors import StoreError, os_reason
from imagefactory.fs import Removal, check_checksum, entries_of, remove_inside
from imagefactory.oci.layout import Layout, referrer_record
from imagefactory.oci.manifests import (
    CONFIG_TYPES,
    INDEX_TYPES,
    MALFORMED,
    Descriptor,
    media_type_of,
    parse_config,
    parse_descriptor,
)
from imagefactory.oci.squash_layers import SQUASHED
from imagefactory.oci.store import DIGEST
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import Progress, ProgressTask
from imagefactory.trees import directory_lock, unlocked_directories

# --- The parts that tags need: manifests, their blobs, and their complete referrers


class UnreadableError(StoreError):
    """A manifest is missing or corrupt, so its parts are unknown."""


class ReachableDigests:
    """Digests and diff ids of all reachable parts: manifests, their blobs and their referrers.

    `bad` are digests of blobs that are known to be damaged.
    """

    def __init__(self, layout: Layout, bad: frozenset[str] = frozenset()) -> None:
        self.layout, self.bad = layout, bad
        self.digests: set[str] = set()
        self.diff_ids: set[str] = set()
        self.damaged: list[tuple[str, StoreError]] = []

    def reach_tags(self) -> None:
        """Add all parts of tagged images; for an incomplete image all existing parts.

        Raises StoreError for an unreadable manifest, as its parts are unknown.
        """
        for name, descriptor in self.layout.tags().items():
            hint = f"build or pull {name} again, or remove it: imagefactory image remove {name}"
            try:
                self.reach(descriptor)
            except UnreadableError as error:
                raise StoreError(
                    "image-incomplete", f"{name}: {error.message}; nothing was deleted", hint=hint
                ) from error
            except StoreError as error:
                self.damaged.append(
                    (name, StoreError("image-incomplete", f"{name}: {error.message}", hint=hint))
                )

    def reach_whole(self, digest: str) -> None:
        """Add a manifest without a tag, unless it is missing or incomplete."""
        copy = self._copy()
        try:
            manifest = self.layout.manifest(digest)
            if manifest:
                copy.reach(manifest[0])
        except StoreError:
            return
        self._take(copy)

    def _copy(self) -> ReachableDigests:
        copied = ReachableDigests(self.layout, self.bad)
        copied._take(self)
        return copied

    def _take(self, other: ReachableDigests) -> None:
        self.digests |= other.digests
        self.diff_ids |= other.diff_ids

    def reach(self, root: Descriptor) -> None:
        """Add all parts of `root`, and complete referrers.

        An image does not need a damaged referrer, such as a .sif without its file: it is removed and
        rebuilt.
        """
        records = self._reach_below(root)
        while records:
            copy = self._copy()
            try:
                referrer = self.layout.referrer(records.pop())
                more = copy._reach_below(referrer[0]) if referrer else []
            except StoreError:
                continue
            self._take(copy)
            records += more

    def _reach_below(self, root: Descriptor) -> list[Path]:
        """Add all parts of `root`; return the records of referrers of its manifests.

        For an index only the existing manifests are added: other platforms may never have been pulled.
        """
        layout, waiting, records = self.layout, [root], []
        while waiting:
            descriptor = waiting.pop()
            if descriptor.digest in self.digests:
                continue
            try:
                data = self._read(descriptor)
            except StoreError as error:
                raise UnreadableError("manifest-unreadable", error.message, hint=error.hint) from error
            self.digests.add(descriptor.digest)
            try:
                value = json.loads(data)
                if media_type_of(value) in INDEX_TYPES:
                    waiting += filter(layout.has, map(parse_descriptor, value["manifests"]))
                else:
                    self._reach_blobs(value)
            except MALFORMED as error:
                raise StoreError(
                    "store-corrupt",
                    f"{descriptor.digest} in {layout.path} is not a manifest, "
                    f"or its config is not valid: {error}",
                    hint=FIX_HINT,
                ) from error
            records += layout.referring(descriptor.digest)
        return records

    def _reach_blobs(self, manifest: Mapping[str, Any]) -> None:
        layout = self.layout
        config, *layers = map(parse_descriptor, (manifest["config"], *manifest["layers"]))
        self.digests |= {config.digest, *(layer.digest for layer in layers)}
        if config.media_type in CONFIG_TYPES:
            self.diff_ids |= set(parse_config(self._read(config), len(layers)).diff_ids)
        for descriptor in (config, *layers):
            if descriptor.digest in self.bad or not layout.has(descriptor):
                raise StoreError(
                    "store-corrupt",
                    f"{descriptor.digest} is missing from {layout.path}, truncated or corrupt",
                    hint=FIX_HINT,
                )

    def _read(self, descriptor: Descriptor) -> bytes:
        if descriptor.digest in self.bad:
            raise StoreError(
                "store-corrupt", f"{descriptor.digest} in {self.layout.path} is corrupt", hint=FIX_HINT
            )
        return self.layout.read(descriptor)


CHECKSUMMED_DIRECTORIES = ("layers", "images", "checks", "scans", "sizes", "pushed", "bases", SQUASHED)
"""Directories of records that contain their checksum."""
FIX_HINT = "run imagefactory image check --fix"
_WORKERS = 4  # hashing releases the interpreter's lock


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFault:
    """A fault of `place`, a path below the store or a tag. `mended` is true after a repair."""

    place: str
    error: StoreError
    mended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCheck:
    """The numbers of checked items (`bytes` in blobs), and the faults."""

    blobs: int
    bytes: int
    records: int
    tags: int
    faults: tuple[StoreFault, ...]


def check(layout: Layout, progress: Progress, *, mend: bool) -> StoreCheck:
    """Check every byte of every blob and unpacked layer, every record, and the parts of each tag.

    With `mend`, wait until the store is unused, repair derivable files and delete other damaged ones: builds
    and pulls write them again. No tag is removed. Raises StoreError for a directory that is not a store.
    """
    if not layout.founded():
        return StoreCheck(blobs=0, bytes=0, records=0, tags=0, faults=())
    with layout.alone(progress) if mend else layout.in_use(progress):
        blobs = entries_of(layout.path / "blobs" / "sha256")
        records = [path for kind in CHECKSUMMED_DIRECTORIES for path in entries_of(layout.path / kind)]
        sealed = [path for path in records if not path.name.startswith(".")]  # dot files are being written
        referring = [
            path for directory in entries_of(layout.path / "referrers") for path in entries_of(directory)
        ]
        size = sum(path.lstat().st_size for path in blobs)
        with progress.task(f"check {len(blobs)} blobs", total=size) as task:
            wrong = [*_wrong_blobs(blobs, task)]
        bad = frozenset(f"sha256:{mismatch.path.name}" for mismatch in wrong)
        wrong += [
            _BlobMismatch(path, "does not match its checksum")
            for path in sealed
            if check_checksum(path) is None
        ]
        wrong += [mismatch for path in referring if (mismatch := _wrong_referrer(layout, path, bad))]
        faults = [_blob_fault(layout, mismatch, mend=mend) for mismatch in wrong]
        unpacked = UnpackedLayers(layout.path / "unpacked")
        for name, message in unpacked.check_all(progress, mend=mend):
            location = f"unpacked/{name}"
            faults.append(
                StoreFault(
                    place=location,
                    error=StoreError("store-corrupt", f"{location}: {message}", hint=FIX_HINT),
                    mended=mend,
                )
            )
        try:
            tags = layout.tags()
        except StoreError as error:
            tags, faults = {}, [*faults, StoreFault(place="index.json", error=error)]
        for name, descriptor in tags.items():
            faults += _check_tags(layout, name, descriptor, bad)
    return StoreCheck(
        blobs=len(blobs),
        bytes=size,
        records=len(sealed) + len(referring),
        tags=len(tags),
        faults=tuple(faults),
    )


@dataclass(frozen=True, slots=True)
class _BlobMismatch:
    """A file with a fault; `right` is the correct content, if it can be derived."""

    path: Path
    what: str
    right: bytes | None = None


def _blob_fault(layout: Layout, wrong: _BlobMismatch, *, mend: bool) -> StoreFault:
    location = str(wrong.path.relative_to(layout.path))
    error = StoreError("store-corrupt", f"{location} {wrong.what}", hint=FIX_HINT)
    if not mend:
        return StoreFault(place=location, error=error)
    try:
        if wrong.right is None:
            remove_inside(layout.path, wrong.path)
        else:
            layout.write_file(wrong.path, wrong.right)
    except OSError as failed:
        hint = f"check its permissions, or delete it: rm -r {wrong.path}"
        return StoreFault(
            place=location,
            error=StoreError(
                "store-corrupt", f"{error.message}; cannot repair it: {os_reason(failed)}", hint=hint
            ),
        )
    return StoreFault(place=location, error=error, mended=True)


def _wrong_blobs(blobs: list[Path], task: ProgressTask) -> Iterator[_BlobMismatch]:
    def look(path: Path) -> str:
        try:
            if path.is_symlink() or not path.is_file() or not DIGEST.fullmatch(f"sha256:{path.name}"):
                return "is not a blob"
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                task.advance(os.fstat(file.fileno()).st_size)
        except OSError as error:
            return f"cannot be read: {os_reason(error)}"
        return "" if digest == path.name else "does not match its digest"

    with ThreadPoolExecutor(_WORKERS) as pool:
        for path, message in zip(blobs, pool.map(look, blobs), strict=True):
            if message:
                yield _BlobMismatch(path, message)


def _wrong_referrer(layout: Layout, path: Path, bad: frozenset[str]) -> _BlobMismatch | None:
    digest = f"sha256:{path.stem}"
    try:
        stored = None if digest in bad else layout.manifest(digest)
        if stored is None:
            return _BlobMismatch(path, "refers to a manifest that is not in the store")
        descriptor, data = stored
        manifest = json.loads(data)
        if manifest["subject"]["digest"] != f"sha256:{path.parent.name}":
            return _BlobMismatch(path, "refers to a manifest with another subject")
        ReachableDigests(layout, bad).reach(descriptor)
        right = referrer_record(descriptor, manifest)
        return (
            None if path.read_bytes() == right else _BlobMismatch(path, "does not match its manifest", right)
        )
    except (*MALFORMED, StoreError) as error:
        return _BlobMismatch(path, f"refers to something incomplete: {error}")


def _check_tags(
    layout: Layout, name: str, descriptor: Descriptor, bad: frozenset[str]
) -> Iterator[StoreFault]:
    try:
        ReachableDigests(layout, bad).reach(descriptor)
        if descriptor.media_type in INDEX_TYPES:
            layout.load(name, descriptor)  # loading an index finds its existing parts
    except StoreError as error:
        hint = f"build or pull {name} again, or drop it: imagefactory image remove {name}"
        yield StoreFault(
            place=name, error=StoreError("image-incomplete", f"{name}: {error.message}", hint=hint)
        )


# --- Unneeded parts of a store, and their removal
# Tags need manifests, their blobs, and their complete referrers. A record about a digest stays as long as the
# digest.


_ABOUT_A_DIGEST = ("checks", "scans", "sizes")
"""Directories of records whose names begin with the hex of their digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectResult:
    """Counts and bytes of removed blobs, unpacked layers and records.

    `damaged` are incomplete images by tag; their parts stay. `stuck` are paths that could not be removed.
    """

    blobs: int
    unpacked: int
    records: int
    bytes: int
    damaged: tuple[tuple[str, StoreError], ...] = ()
    stuck: tuple[tuple[str, StoreError], ...] = ()


def collect(
    layout: Layout,
    progress: Progress,
    keep: Callable[[], Iterable[str]] = tuple,
    *,
    dry_run: bool = False,
) -> CollectResult:
    """Remove all parts of `layout` that no tag needs. Waits for running builds, and new builds wait.

    `keep` returns digests of manifests that stay without a tag, if they are complete. Raises StoreError for
    a directory that is not a store.
    """
    if not layout.founded():
        return CollectResult(blobs=0, unpacked=0, records=0, bytes=0)
    for name in ("index.json", "locks"):
        if not (layout.path / name).exists():
            raise StoreError(
                "store-invalid",
                f"{layout.path} is not a store (it has no {name}): nothing was deleted",
                hint="fix the setting `store`: imagefactory doctor shows which file sets it",
            )
    with layout.alone(progress):
        needed = ReachableDigests(layout)
        needed.reach_tags()
        for digest in keep():
            needed.reach_whole(digest)
        return _remove_others(layout, needed, dry_run=dry_run)


def _remove_others(layout: Layout, needed: ReachableDigests, *, dry_run: bool) -> CollectResult:
    removal = Removal(layout.path, dry_run=dry_run)
    directory = layout.path / "blobs" / "sha256"
    blobs = [path for path in entries_of(directory) if f"sha256:{path.name}" not in needed.digests]
    records = _records(layout, needed.digests)
    # Records first: an interrupted removal leaves no record of a missing part.
    records_gone, blobs_gone = (sum(map(removal.remove, paths)) for paths in (records, blobs))
    for path in entries_of(layout.tmp):
        removal.remove(path)
    # Running images lock their scratch directories and their unpacked layers.
    if (scratch := layout.scratch).is_dir():
        with removal.going_on(scratch), directory_lock(scratch):
            for dead in unlocked_directories(
                scratch, lambda error: removal.keep(Path(error.filename), error)
            ):
                removal.remove(Path(dead))
    unpacked = UnpackedLayers(layout.path / "unpacked").collect(needed.diff_ids, removal)
    return CollectResult(
        blobs=blobs_gone,
        unpacked=len(unpacked),
        records=records_gone,
        bytes=removal.bytes,
        damaged=tuple(needed.damaged),
        stuck=tuple(removal.stuck),
    )


def _records(layout: Layout, digests: set[str]) -> list[Path]:
    """Return the records about digests that are not in `digests`."""
    inputs = [
        path
        for kind in ("layers", "images", SQUASHED)
        for path in entries_of(layout.path / kind)
        if path.suffix == ".json" and (layout.recall(kind, path.stem) or {}).get("digest") not in digests
    ]
    files = [path.with_suffix(".files") for path in inputs if path.with_suffix(".files").exists()]
    referring = [
        path
        for directory in entries_of(layout.path / "referrers")
        for path in entries_of(directory)
        if f"sha256:{path.stem}" not in digests
    ]
    about = [
        path
        for kind in _ABOUT_A_DIGEST
        for path in entries_of(layout.path / kind)
        if f"sha256:{path.name[:64]}" not in digests
    ]
    return [*inputs, *files, *referring, *about]
