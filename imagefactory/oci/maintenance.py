"""Whether a store is what it says: blobs by their digests, records by their sums, tags whole.

What is unpacked must be as it was when it was made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import StoreError
from imagefactory.fs import entries_of, remove_inside, unseal
from imagefactory.oci.layout import Layout, referrer_record
from imagefactory.oci.manifests import INDEX_TYPES, MALFORMED
from imagefactory.oci.model import Descriptor
from imagefactory.oci.needed import Needed
from imagefactory.oci.squash_store import SQUASHED
from imagefactory.oci.store import DIGEST
from imagefactory.oci.unpack import Unpacked
from imagefactory.progress import Progress, Task

SEALED = ("layers", "images", "checks", "scans", "sizes", "pushed", "bases", SQUASHED)
"""Folders of records that carry their sum."""
MEND = "run imagefactory store check --fix"
_WORKERS = 4  # hashing happens outside the interpreter's lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with `place`, a path below the store or a tag. `mended`: it no longer is."""

    place: str
    error: StoreError
    mended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How much was looked at (`bytes` are those of the blobs), and what is wrong."""

    blobs: int
    bytes: int
    records: int
    tags: int
    faults: tuple[Fault, ...]


def check(layout: Layout, progress: Progress, *, mend: bool) -> Checked:
    """Reads every byte of every blob and unpacked layer, every record, and what each tag names.

    With `mend`, waits until nobody uses the store, writes what the rest tells and removes what it does not:
    builds and pulls make anew what is not there. No tag is removed. Raises StoreError for what is no store.
    """
    if not layout.founded():
        return Checked(blobs=0, bytes=0, records=0, tags=0, faults=())
    with layout.alone(progress) if mend else layout.in_use(progress):
        blobs = entries_of(layout.path / "blobs" / "sha256")
        kept = [path for kind in SEALED for path in entries_of(layout.path / kind)]
        sealed = [path for path in kept if not path.name.startswith(".")]  # those are being written
        referring = [path for folder in entries_of(layout.path / "referrers") for path in entries_of(folder)]
        size = sum(path.lstat().st_size for path in blobs)
        with progress.task(f"check {len(blobs)} blobs", total=size) as task:
            wrong = [*_wrong_blobs(blobs, task)]
        bad = frozenset(f"sha256:{one.path.name}" for one in wrong)
        wrong += [_Wrong(path, "does not match its checksum") for path in sealed if unseal(path) is None]
        wrong += [one for path in referring if (one := _wrong_referrer(layout, path, bad))]
        faults = [_fault(layout, one, mend=mend) for one in wrong]
        unpacked = Unpacked(layout.path / "unpacked")
        for name, what in unpacked.check_all(progress, mend=mend):
            place = f"unpacked/{name}"
            faults.append(
                Fault(
                    place=place, error=StoreError("store-corrupt", f"{place}: {what}", hint=MEND), mended=mend
                )
            )
        try:
            tags = layout.tags()
        except StoreError as error:
            tags, faults = {}, [*faults, Fault(place="index.json", error=error)]
        for name, descriptor in tags.items():
            faults += _tag_faults(layout, name, descriptor, bad)
    return Checked(
        blobs=len(blobs),
        bytes=size,
        records=len(sealed) + len(referring),
        tags=len(tags),
        faults=tuple(faults),
    )


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A file that is not what it should be; `right` is that, where the rest of the store tells."""

    path: Path
    what: str
    right: bytes | None = None


def _fault(layout: Layout, wrong: _Wrong, *, mend: bool) -> Fault:
    place = str(wrong.path.relative_to(layout.path))
    error = StoreError("store-corrupt", f"{place} {wrong.what}", hint=MEND)
    if not mend:
        return Fault(place=place, error=error)
    try:
        if wrong.right is None:
            remove_inside(layout.path, wrong.path)
        else:
            layout.write_file(wrong.path, wrong.right)
    except OSError as failed:
        hint = f"check the permissions there, or delete it: rm -r {wrong.path}"
        return Fault(
            place=place,
            error=StoreError(
                "store-corrupt", f"{error.message}; cannot repair it: {failed.strerror}", hint=hint
            ),
        )
    return Fault(place=place, error=error, mended=True)


def _wrong_blobs(blobs: list[Path], task: Task) -> Iterator[_Wrong]:
    def look(path: Path) -> str:
        try:
            if path.is_symlink() or not path.is_file() or not DIGEST.fullmatch(f"sha256:{path.name}"):
                return "is not a blob"
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                task.advance(os.fstat(file.fileno()).st_size)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return "" if found == path.name else "does not match its digest"

    with ThreadPoolExecutor(_WORKERS) as pool:
        for path, what in zip(blobs, pool.map(look, blobs), strict=True):
            if what:
                yield _Wrong(path, what)


def _wrong_referrer(layout: Layout, path: Path, bad: frozenset[str]) -> _Wrong | None:
    digest = f"sha256:{path.stem}"
    try:
        stored = None if digest in bad else layout.manifest(digest)
        if stored is None:
            return _Wrong(path, "refers to a manifest that is not in the store")
        descriptor, data = stored
        manifest = json.loads(data)
        if manifest["subject"]["digest"] != f"sha256:{path.parent.name}":
            return _Wrong(path, "refers to a manifest with another subject")
        Needed(layout, bad).reach(descriptor)
        right = referrer_record(descriptor, manifest)
        return None if path.read_bytes() == right else _Wrong(path, "does not match its manifest", right)
    except (*MALFORMED, StoreError) as error:
        return _Wrong(path, f"refers to something incomplete: {error}")


def _tag_faults(layout: Layout, name: str, descriptor: Descriptor, bad: frozenset[str]) -> Iterator[Fault]:
    try:
        Needed(layout, bad).reach(descriptor)
        if descriptor.media_type in INDEX_TYPES:
            layout.load(name, descriptor)  # reaching an index takes what is here of it
    except StoreError as error:
        hint = f"build or pull {name} again, or drop it: imagefactory store rm {name}"
        yield Fault(place=name, error=StoreError("image-incomplete", f"{name}: {error.message}", hint=hint))
