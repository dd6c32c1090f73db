"""What of a store nothing needs any more, and its removal.

Needed is what a tag reaches: manifests, their blobs, and their referrers as far as they are whole. A record
that is about a digest stays as long as that does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagefactory.errors import StoreError
from imagefactory.files import entries_of
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPES,
    INDEX_TYPES,
    MALFORMED,
    media_type_of,
    parse_config,
    parse_descriptor,
)
from imagefactory.oci.model import Descriptor
from imagefactory.oci.unpack import Unpacked
from imagefactory.progress import Progress
from imagefactory.trees import remove_tree, tree_bytes

_ABOUT_A_DIGEST = ("checks", "scans", "sizes")
"""Records whose names begin with the hex of what they are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What `collect` removed (or would remove): blobs, unpacked layers and records, and their bytes.

    `damaged` says by their tags which images are not whole, and why; what they name is kept.
    """

    blobs: int
    unpacked: int
    records: int
    bytes: int
    damaged: tuple[tuple[str, StoreError], ...] = ()

    def as_json(self) -> dict[str, object]:
        """The counts."""
        return {name: getattr(self, name) for name in ("blobs", "unpacked", "records", "bytes")}


def collect(
    layout: Layout,
    progress: Progress,
    keep: Callable[[], Iterable[str]] = tuple,
    *,
    dry_run: bool = False,
) -> Freed:
    """Removes what no tag of `layout` needs. Waits for running builds, and they wait for it.

    `keep` gives digests of manifests that stay without a tag, as far as they are here and whole. Raises
    StoreError for a folder that is no store: nothing there is ours to remove.
    """
    if not layout.path.exists():
        return Freed(blobs=0, unpacked=0, records=0, bytes=0)
    for name in ("oci-layout", "index.json", "locks"):
        if not (layout.path / name).exists():
            raise StoreError(
                f"{layout.path} is no store (it has no {name}): nothing was removed",
                hint="is the setting `store` right? `imagefactory doctor` says where it comes from",
            )
    with layout.alone(progress):
        needed = _Needed(layout)
        needed.reach_tags()
        for digest in keep():
            needed.reach_whole(digest)
        return _remove_others(layout, needed, dry_run=dry_run)


def _remove_others(layout: Layout, needed: _Needed, *, dry_run: bool) -> Freed:
    freed = 0

    def remove(path: Path) -> None:
        nonlocal freed
        freed += tree_bytes(path)
        if not dry_run:
            remove_tree(path)

    folder = layout.path / "blobs" / "sha256"
    blobs = [path for path in entries_of(folder) if f"sha256:{path.name}" not in needed.digests]
    records = _records(layout, needed.digests)
    for path in (*blobs, *records, *entries_of(layout.tmp)):
        remove(path)
    # Running images hold their unpacked layers; what a killed one left under run/ the next one sweeps.
    unpacked = Unpacked(layout.path / "unpacked").collect(needed.diff_ids, dry_run=dry_run)
    freed += sum(size for _, size in unpacked)
    return Freed(
        blobs=len(blobs),
        unpacked=len(unpacked),
        records=len(records),
        bytes=freed,
        damaged=tuple(needed.damaged),
    )


def _records(layout: Layout, digests: set[str]) -> list[Path]:
    """The records about what is not in `digests`."""
    made = [
        path
        for kind in ("layers", "images")
        for path in entries_of(layout.path / kind)
        if path.suffix == ".json" and (layout.recall(kind, path.stem) or {}).get("digest") not in digests
    ]
    files = [path.with_suffix(".files") for path in made if path.with_suffix(".files").exists()]
    referring = [
        path
        for folder in entries_of(layout.path / "referrers")
        for path in entries_of(folder)
        if f"sha256:{path.stem}" not in digests
    ]
    about = [
        path
        for kind in _ABOUT_A_DIGEST
        for path in entries_of(layout.path / kind)
        if f"sha256:{path.name[:64]}" not in digests
    ]
    return [*made, *files, *referring, *about]


class _UnreadableError(StoreError):
    """A manifest is missing or damaged. Never leaves this file."""


class _Needed:
    """Digests and diff ids of all that was reached: manifests, their blobs and their referrers."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.digests: set[str] = set()
        self.diff_ids: set[str] = set()
        self.damaged: list[tuple[str, StoreError]] = []

    def reach_tags(self) -> None:
        """Adds all that tags need; of an image that is not whole, all that it names.

        Raises StoreError where a manifest cannot be read: nobody knows what it names.
        """
        for name, descriptor in self.layout.tags().items():
            hint = f"build or pull {name} again, or drop it: `imagefactory store rm {name}`"
            try:
                self._reach(descriptor)
            except _UnreadableError as error:
                raise StoreError(f"{name}: {error.message}; nothing was removed", hint=hint) from error
            except StoreError as error:
                self.damaged.append((name, StoreError(f"{name}: {error.message}", hint=hint)))

    def reach_whole(self, digest: str) -> None:
        """Adds what nobody named here: where it is not here or not whole, nothing is needed."""
        own = self._copy()
        try:
            found = self.layout.manifest(digest)
            if found:
                own._reach(found[0])
        except StoreError:
            return
        self._take(own)

    def _copy(self) -> _Needed:
        own = _Needed(self.layout)
        own._take(self)
        return own

    def _take(self, other: _Needed) -> None:
        self.digests |= other.digests
        self.diff_ids |= other.diff_ids

    def _reach(self, root: Descriptor) -> None:
        """Adds all that `root` needs, and the referrers that are whole.

        A damaged referrer (a .sif whose file is lost) is no need of the image: it goes, and is made again.
        """
        records = self._reach_below(root)
        while records:
            own = self._copy()
            try:
                found = self.layout.referrer(records.pop())
                more = own._reach_below(found[0]) if found else []
            except StoreError:
                continue
            self._take(own)
            records += more

    def _reach_below(self, root: Descriptor) -> list[Path]:
        """Adds what `root` itself needs; gives the records of who refers to its manifests.

        Of an index, what is here: other platforms may never have come.
        """
        layout, waiting, records = self.layout, [root], []
        while waiting:
            descriptor = waiting.pop()
            if descriptor.digest in self.digests:
                continue
            try:
                data = layout.read(descriptor)
            except StoreError as error:
                raise _UnreadableError(error.message) from error
            self.digests.add(descriptor.digest)
            try:
                value = json.loads(data)
                if media_type_of(value) in INDEX_TYPES:
                    waiting += filter(layout.has, map(parse_descriptor, value["manifests"]))
                else:
                    self._reach_blobs(value)
            except MALFORMED as error:
                raise StoreError(
                    f"{descriptor.digest} in {layout.path} is no manifest, or its config is none: {error}"
                ) from error
            records += layout.referring(descriptor.digest)
        return records

    def _reach_blobs(self, manifest: Mapping[str, Any]) -> None:
        layout = self.layout
        config, *layers = map(parse_descriptor, (manifest["config"], *manifest["layers"]))
        self.digests |= {config.digest, *(layer.digest for layer in layers)}
        if config.media_type in CONFIG_TYPES:
            self.diff_ids |= set(parse_config(layout.read(config), len(layers)).diff_ids)
        for descriptor in (config, *layers):
            if not layout.has(descriptor):
                raise StoreError(f"{descriptor.digest} is missing from {layout.path}, or cut")
