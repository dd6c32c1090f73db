"""Layers and images: what they hold for GPUs, in one forward pass over each layer's tar.

What a layer tells is kept in the store under its digest, so a layer that many images share is read once.
An image is its layers one over the other: what an upper one removes or replaces counts no more (OCI image
specification, "Layer Filesystem Changeset": whiteouts).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from imagefactory.gpu.values import Contents
from imagefactory.oci.inflate import DamagedError, plain_layer
from imagefactory.oci.layout import Layout
from imagefactory.oci.model import Layer
from imagefactory.oci.tar_stream import (
    FILE,
    FOLDER,
    HARD_LINK,
    HIDDEN,
    REMOVED,
    TarEntry,
    TarStream,
    entries,
    layer_error,
)
from imagefactory.oci.tree import OPAQUE, WHITEOUT
from imagefactory.progress import Progress, Task
from imagefactory.scan.findings import FileFinding, format_contents, is_text, read_name, readable_path
from imagefactory.scan.look import CHUNK, Look, stopping_pool
from imagefactory.scan.records import LayerScan, keep_scan, recall_scan
from imagefactory.scan.zip import PLAIN

RENAMED_LIMIT = 1_000_000  # names of files of one layer that are told anew as others are replaced


def merge_layers(scans: Iterable[LayerScan]) -> tuple[FileFinding, ...]:
    """What is seen of layers, the lowest first."""
    seen: dict[str, FileFinding] = {}
    links: dict[str, list[str]] = {}  # other names of what is seen
    for scan in scans:
        others = (*(finding.path for finding in scan.found), *(name for name, _ in scan.links))
        over, opaque = {*scan.plain, *scan.removed, *others}, set(scan.opaque)
        links = {
            path: kept
            for path, names in links.items()
            if (kept := [name for name in names if not _hidden(name, over, opaque)])
        }
        for path in [path for path in seen if _hidden(path, over, opaque)]:
            finding = seen.pop(path)
            if names := links.pop(path, []):  # the file is still there
                seen[names[0]] = _renamed(finding, seen.get(names[0]), names[0])
                links[names[0]] = names[1:]
        seen.update((finding.path, finding) for finding in scan.found)
        for name, path in scan.links:
            links.setdefault(path, []).append(name)
    return tuple(seen[path] for path in sorted(seen))


def _hidden(path: str, over: set[str], opaque: set[str]) -> bool:
    """Whether a layer with `over` and `opaque` removes or replaces what is at `path`, or a folder above."""
    above = _above(path)
    return path in over or not over.isdisjoint(above) or not opaque.isdisjoint(above)


def _renamed(found: FileFinding, told: FileFinding | None, name: str) -> FileFinding:
    """What was found, by another name of the file; `told` is what that name itself tells."""
    library = replace(found.library, path=name) if found.library else None
    own = told or read_name(name)
    return FileFinding(
        path=name, library=library, package=own.package, facts=found.facts, toolkit=own.toolkit
    )


def _above(path: str) -> list[str]:
    """The folders that hold `path`, the root (an empty text) among them."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]


# --- one layer -----------------------------------------------------------------------------------


def scan_layer(chunks: Iterator[bytes]) -> LayerScan:
    """What the tar in `chunks` tells; reads them to their end. Raises DamagedError."""
    stream = TarStream(chunks)
    findings: dict[str, FileFinding] = {}
    plain: set[str] = set()
    removed: list[str] = []
    opaque: list[str] = []
    links: dict[str, str] = {}
    others: dict[str, dict[str, None]] = {}  # the links by what they are names of
    left = RENAMED_LIMIT

    def drop(path: str) -> None:
        nonlocal left
        plain.discard(path)
        if first := links.pop(path, ""):
            del others[first][path]
        finding, names = findings.pop(path, None), others.pop(path, None)
        if finding and names:  # the file lives on by its other names
            left -= len(names)
            if left < 0:
                raise DamagedError(f"its files change their names more than {RENAMED_LIMIT} times")
            heir, *rest = names
            del links[heir]
            findings[heir] = _renamed(finding, findings.get(heir), heir)
            links.update(dict.fromkeys(rest, heir))
            others[heir] = dict.fromkeys(rest)

    for entry in entries(stream):
        path = readable_path(entry.path)
        if entry.kind == HIDDEN:
            folder, _, name = path.rpartition("/")
            if name == OPAQUE:
                opaque.append(folder)
            else:
                removed.append(f"{folder}/{name[len(WHITEOUT) :]}".lstrip("/"))
        elif entry.kind == REMOVED:
            for below in [one for one in (*findings, *plain) if one == path or one.startswith(f"{path}/")]:
                drop(below)
        elif entry.kind != FOLDER:
            finding = _look(entry, path)
            drop(path)  # a path may stand there twice; the last one holds
            if entry.kind == HARD_LINK:
                same = readable_path("/".join(entry.target))
                first = links.get(same, same)
                if (whole := findings.get(first)) and (whole.library or whole.facts):
                    links[path] = first
                    others.setdefault(first, {})[path] = None
            if finding:
                findings[path] = finding
            elif not is_text(path):
                plain.add(path)
    stream.drain()
    return LayerScan(
        found=tuple(findings[path] for path in sorted(findings)),
        plain=tuple(sorted(plain - findings.keys())),
        removed=tuple(sorted(removed)),
        opaque=tuple(sorted(opaque)),
        links=tuple(sorted((name, path) for name, path in links.items() if path in findings)),
    )


def _look(entry: TarEntry, path: str) -> FileFinding:
    if entry.kind != FILE:
        return read_name(path)
    look = Look(path, entry.size)
    while entry.left and not look.idle:
        look.feed(entry.piece(entry.left))
    return look.close()


# --- images --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanShelf:
    """Where layers come from; `layout` keeps what was found.

    `read` gives the packed bytes of one and vouches for its digest: what is found is kept under it. A
    diff_id would not do, since any manifest may claim any diff_id.
    """

    layout: Layout
    read: Callable[[Layer], Iterator[bytes]]
    workers: int = 1


def scan_image(source: str, layers: Sequence[Layer], shelf: ScanShelf, progress: Progress) -> Contents:
    """What an image of `layers`, the lowest first, holds; those not known yet are read in parallel.

    The caller holds the layout's `in_use`. Raises StoreError for a layer that is damaged, ToolError where
    zstandard is missing.
    """
    known = {digest: recall_scan(shelf.layout, digest) for digest in map(_digest, layers)}
    unknown = {_digest(layer): layer for layer in layers if known[_digest(layer)] is None}
    if unknown:
        total = sum(layer.descriptor.size for layer in unknown.values())
        largest_first = sorted(unknown.values(), key=lambda layer: -layer.descriptor.size)
        with (
            progress.task(f"scan {len(unknown)} layers", total=total) as task,
            stopping_pool(shelf.workers) as pool,
        ):
            scans = pool.map(lambda layer: _scan_one(layer, shelf, task), largest_first)
            known.update(zip(map(_digest, largest_first), scans, strict=True))
    seen = merge_layers(scan for layer in layers if (scan := known[_digest(layer)]))
    return format_contents(source, seen)


def layout_shelf(layout: Layout, workers: int) -> ScanShelf:
    """The layers of a store on this machine, which were hashed when they were put there."""

    def read(layer: Layer) -> Iterator[bytes]:
        with layout.blob_path(layer.descriptor.digest).open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) != layer.descriptor.size:
                raise DamagedError(f"its blob has {size} bytes, not {layer.descriptor.size}")
            while data := file.read(CHUNK):
                yield data

    return ScanShelf(layout=layout, read=read, workers=workers)


def _scan_one(layer: Layer, shelf: ScanShelf, task: Task) -> LayerScan:
    name = readable_path(layer.title)[:80] or _digest(layer)
    try:
        plain = plain_layer(layer.descriptor.media_type, _counted(shelf.read(layer), task))
        scan = scan_layer(bounded(plain))
    except DamagedError as error:
        raise layer_error(name, error) from error
    keep_scan(shelf.layout, _digest(layer), scan)
    return scan


def _digest(layer: Layer) -> str:
    return layer.descriptor.digest


def _counted(chunks: Iterator[bytes], task: Task) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        task.advance(len(chunk))


def bounded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Plain bytes on their way, not without end."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > PLAIN:
            raise DamagedError(f"it unpacks to more than {PLAIN} bytes")
        yield chunk
