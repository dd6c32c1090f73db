"""What of a store nothing needs any more, and its removal.

Needed is what a tag reaches: manifests, their blobs, and their referrers as far as they are whole. A record
that is about a digest stays as long as that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import StoreError
from imagefactory.fs import Removal, entries_of
from imagefactory.oci.layout import Layout
from imagefactory.oci.needed import Needed
from imagefactory.oci.squash_store import SQUASHED
from imagefactory.oci.unpack import Unpacked
from imagefactory.progress import Progress
from imagefactory.trees import alone_in, folders_unheld

_ABOUT_A_DIGEST = ("checks", "scans", "sizes")
"""Records whose names begin with the hex of what they are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What `collect` removed (or would remove): blobs, unpacked layers and records, and their bytes.

    `damaged` says by their tags which images are not whole, and why; what they name is kept. `stuck` says
    by their paths what is not needed and cannot be removed.
    """

    blobs: int
    unpacked: int
    records: int
    bytes: int
    damaged: tuple[tuple[str, StoreError], ...] = ()
    stuck: tuple[tuple[str, StoreError], ...] = ()

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
    if not layout.founded():
        return Freed(blobs=0, unpacked=0, records=0, bytes=0)
    for name in ("index.json", "locks"):
        if not (layout.path / name).exists():
            raise StoreError(
                "store-invalid",
                f"{layout.path} is not a store (it has no {name}): nothing was deleted",
                hint="check the setting `store`: imagefactory doctor shows where it comes from",
            )
    with layout.alone(progress):
        needed = Needed(layout)
        needed.reach_tags()
        for digest in keep():
            needed.reach_whole(digest)
        return _remove_others(layout, needed, dry_run=dry_run)


def _remove_others(layout: Layout, needed: Needed, *, dry_run: bool) -> Freed:
    removal = Removal(layout.path, dry_run=dry_run)
    folder = layout.path / "blobs" / "sha256"
    blobs = [path for path in entries_of(folder) if f"sha256:{path.name}" not in needed.digests]
    records = _records(layout, needed.digests)
    # Records first: one that is interrupted leaves none of what is not here.
    records_gone, blobs_gone = (sum(map(removal.remove, paths)) for paths in (records, blobs))
    for path in entries_of(layout.tmp):
        removal.remove(path)
    # Running images hold their scratch folders and their unpacked layers.
    if (scratch := layout.scratch).is_dir():
        with removal.going_on(scratch), alone_in(scratch):
            for dead in folders_unheld(scratch, lambda error: removal.keep(Path(error.filename), error)):
                removal.remove(Path(dead))
    unpacked = Unpacked(layout.path / "unpacked").collect(needed.diff_ids, removal)
    return Freed(
        blobs=blobs_gone,
        unpacked=len(unpacked),
        records=records_gone,
        bytes=removal.bytes,
        damaged=tuple(needed.damaged),
        stuck=tuple(removal.stuck),
    )


def _records(layout: Layout, digests: set[str]) -> list[Path]:
    """The records about what is not in `digests`."""
    made = [
        path
        for kind in ("layers", "images", SQUASHED)
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
