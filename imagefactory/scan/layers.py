"""Find the GPU code of layers and images, in one pass over each layer's tar.

The findings of a layer are stored under its digest, so a layer that many images share is read once. An image
is its layers on top of each other: entries that an upper layer removes or replaces do not count (OCI image
specification, "Layer Filesystem Changeset": whiteouts).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from imagefactory.errors import ToolError
from imagefactory.gpu.capability import parse_code
from imagefactory.gpu.values import GpuLibrary, InstalledPackage, ModuleCount, ScanResult
from imagefactory.oci.inflate import CorruptDataError, plain_layer
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image, OciLayer
from imagefactory.oci.sif import read_partition
from imagefactory.oci.tar_stream import (
    DIRECTORY,
    FILE,
    HARD_LINK,
    HIDDEN,
    REMOVED,
    TarEntry,
    TarStream,
    entries,
    layer_error,
)
from imagefactory.oci.tree import OPAQUE, WHITEOUT
from imagefactory.progress import Progress, ProgressTask, format_bytes
from imagefactory.scan.findings import (
    CHUNK,
    FileFinding,
    FileScan,
    format_contents,
    is_text,
    only_name_counts,
    read_name,
    readable_path,
    stopping_pool,
)
from imagefactory.scan.zip import PLAIN
from imagefactory.trees import remove_tree

# --- Stored findings: a record in the store for each layer, by its digest
# A record is only a cache. One that is unreadable, or from another scanner, counts as missing.


SCANNER = 8
"""The version of the findings. Another number invalidates all stored scans."""
RECORDS = "scans"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScan:
    """The findings of one layer, with paths without slashes at their ends, sorted.

    `plain` are its other entries except directories and texts, since they replace entries of lower layers.
    `removed` are its whiteouts, `opaque` the directories that hide everything below. `links` are other names
    of findings, as (name, path): a file exists as long as one of them.
    """

    findings: tuple[FileFinding, ...]
    plain: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()


def put_scan(layout: Layout, digest: str, scan: LayerScan) -> None:
    layout.record(RECORDS, layout.blob_path(digest).name, format_scan(scan))


def get_scan(layout: Layout, digest: str) -> LayerScan | None:
    """Return the stored scan of a layer, None if it is missing, of another scanner or unreadable."""
    value = layout.recall(RECORDS, layout.blob_path(digest).name)
    return None if value is None else parse_scan(value)


def cached_contents(layout: Layout, image: Image) -> ScanResult | None:
    """Return earlier scans of the layers of an image, None if one of them was never scanned."""
    scans = [get_scan(layout, layer.descriptor.digest) for layer in image.layers]
    known = [scan for scan in scans if scan is not None]
    if not known or len(known) < len(scans):
        return None
    return format_contents(f"the image {image.name} in the store", merge_layers(known), image.environment)


def format_scan(scan: LayerScan) -> dict[str, object]:
    """Return JSON for `parse_scan`."""
    return {
        "scanner": SCANNER,
        "found": [_format_findings(finding) for finding in scan.findings],
        "plain": scan.plain,
        "removed": scan.removed,
        "opaque": scan.opaque,
        "links": scan.links,
    }


def parse_scan(value: Mapping[str, Any]) -> LayerScan | None:
    """Return a scan, None for another scanner's or an invalid record, because it is only a cache."""
    try:
        if value["scanner"] != SCANNER:
            return None
        return LayerScan(
            findings=tuple(_parse_findings(row) for row in value["found"]),
            plain=tuple(value["plain"]),
            removed=tuple(value["removed"]),
            opaque=tuple(value["opaque"]),
            links=tuple((name, path) for name, path in value["links"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _format_findings(finding: FileFinding) -> dict[str, object]:
    value: dict[str, object] = {"path": finding.path}
    if library := finding.library:
        value["size"] = library.size
        value["modules"] = [_format_modules(modules) for modules in library.modules]
        value["compressions"] = library.compressions
        value["damage"] = library.damage
        value["unread"] = library.unread
    if package := finding.package:
        value["package"] = [package.name, package.version, package.build]
    if finding.facts:
        value["facts"] = finding.facts
    if finding.toolkit:
        value["toolkit"] = finding.toolkit
    return value


def _parse_findings(value: Mapping[str, Any]) -> FileFinding:
    library = package = None
    if "modules" in value:
        library = GpuLibrary(
            path=value["path"],
            size=value["size"],
            modules=tuple(_parse_modules(text) for text in value["modules"]),
            compressions=tuple(value["compressions"]),
            damage=value["damage"],
            unread=value["unread"],
        )
    if "package" in value:
        name, version, build = value["package"]
        package = InstalledPackage(name=name, version=version, build=build)
    facts = tuple((framework, key, text) for framework, key, text in value.get("facts", ()))
    return FileFinding(
        path=value["path"], library=library, package=package, facts=facts, toolkit=value.get("toolkit", "")
    )


def _format_modules(modules: ModuleCount) -> str:
    """Return `332 sm_50 sm_60 compute_90/8.1`: the count, then the codes."""
    return " ".join((str(modules.count), *map(str, modules.codes)))


def _parse_modules(text: str) -> ModuleCount:
    """Parse the output of `_format_modules`. Raises ValueError."""
    count, *codes = text.split(" ")
    return ModuleCount(codes=tuple(map(parse_code, codes)), count=int(count))


RENAMED_LIMIT = 1_000_000  # names of a layer's files that are reported again when others are replaced


def merge_layers(scans: Iterable[LayerScan]) -> tuple[FileFinding, ...]:
    """Return the visible findings of layers, the lowest first."""
    seen: dict[str, FileFinding] = {}
    links: dict[str, list[str]] = {}  # other names of visible files
    for scan in scans:
        others = (*(finding.path for finding in scan.findings), *(name for name, _ in scan.links))
        over, opaque = {*scan.plain, *scan.removed, *others}, set(scan.opaque)
        links = {
            path: visible
            for path, names in links.items()
            if (visible := [name for name in names if not _hidden(name, over, opaque)])
        }
        for path in [path for path in seen if _hidden(path, over, opaque)]:
            finding = seen.pop(path)
            if names := links.pop(path, []):  # the file still exists
                seen[names[0]] = _renamed(finding, seen.get(names[0]), names[0])
                links[names[0]] = names[1:]
        seen.update((finding.path, finding) for finding in scan.findings)
        for name, path in scan.links:
            links.setdefault(path, []).append(name)
    return tuple(seen[path] for path in sorted(seen))


def _hidden(path: str, over: set[str], opaque: set[str]) -> bool:
    """Return whether a layer with `over` and `opaque` removes or replaces `path` or one of its parents."""
    above = _parent_paths(path)
    return path in over or not over.isdisjoint(above) or not opaque.isdisjoint(above)


def _renamed(finding: FileFinding, named: FileFinding | None, name: str) -> FileFinding:
    """Return a finding under another name of the file. `named` is the finding of that name itself."""
    library = replace(finding.library, path=name) if finding.library else None
    of_name = named or read_name(name) or FileFinding(path=name)
    return replace(of_name, library=library, facts=finding.facts)


def _parent_paths(path: str) -> list[str]:
    """Return the directories above `path`, with the root (an empty text)."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]


# --- one layer -----------------------------------------------------------------------------------


def scan_layer(chunks: Iterator[bytes]) -> LayerScan:
    """Return the findings of the tar in `chunks`. Reads it to the end. Raises CorruptDataError."""
    stream = TarStream(chunks)
    findings: dict[str, FileFinding] = {}
    plain: set[str] = set()
    removed: list[str] = []
    opaque: list[str] = []
    links: dict[str, str] = {}
    others: dict[str, dict[str, None]] = {}  # the links by their targets
    renames = RENAMED_LIMIT

    def drop(path: str) -> None:
        nonlocal renames
        plain.discard(path)
        if first := links.pop(path, ""):
            del others[first][path]
        finding, names = findings.pop(path, None), others.pop(path, None)
        if finding and names:  # the file still has its other names
            renames -= len(names)
            if renames < 0:
                raise CorruptDataError(f"its files are renamed more than {RENAMED_LIMIT} times")
            heir, *rest = names
            del links[heir]
            findings[heir] = _renamed(finding, findings.get(heir), heir)
            links.update(dict.fromkeys(rest, heir))
            others[heir] = dict.fromkeys(rest)

    for entry in entries(stream):
        path = readable_path(entry.path)
        if entry.kind == HIDDEN:
            directory, _, name = path.rpartition("/")
            if name == OPAQUE:
                opaque.append(directory)
            else:
                removed.append(f"{directory}/{name[len(WHITEOUT) :]}".lstrip("/"))
        elif entry.kind == REMOVED:
            for below in [
                name_ for name_ in (*findings, *plain) if name_ == path or name_.startswith(f"{path}/")
            ]:
                drop(below)
        elif entry.kind != DIRECTORY:
            finding = _scan_entries(entry, path)
            drop(path)  # a path may appear twice; the last one counts
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
        findings=tuple(findings[path] for path in sorted(findings)),
        plain=tuple(sorted(plain - findings.keys())),
        removed=tuple(sorted(removed)),
        opaque=tuple(sorted(opaque)),
        links=tuple(sorted((name, path) for name, path in links.items() if path in findings)),
    )


def _scan_entries(entry: TarEntry, path: str) -> FileFinding | None:
    if entry.kind != FILE or only_name_counts(path, entry.size):
        return read_name(path)
    look = FileScan(path, entry.size)
    while entry.remaining and not look.idle:
        look.feed(entry.piece(entry.remaining))
    return look.close()


# --- images --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCache:
    """The source of layers. `layout` stores the findings.

    `read` returns the compressed bytes of a layer and checks their digest, which is the key. A diff_id
    cannot be the key, because any manifest may claim any diff_id.
    """

    layout: Layout
    read: Callable[[OciLayer], Iterator[bytes]]
    workers: int = 1


def scan_image(
    source: str,
    layers: Sequence[OciLayer],
    shelf: ScanCache,
    progress: Progress,
    *,
    environment: Iterable[tuple[str, str]] = (),
) -> ScanResult:
    """Return the findings of an image of `layers`, the lowest first. Unknown layers are read in parallel.

    `environment` has the variables that the image sets.

    The caller holds the layout's `in_use`. Raises StoreError for a corrupt layer, ToolError without
    zstandard.
    """
    known = {digest: get_scan(shelf.layout, digest) for digest in map(_digest, layers)}
    unknown = {_digest(layer): layer for layer in layers if known[_digest(layer)] is None}
    if unknown:
        total = sum(layer.descriptor.size for layer in unknown.values())
        largest_first = sorted(unknown.values(), key=lambda layer: -layer.descriptor.size)
        with (
            progress.task(f"scan {len(unknown)} layers", total=total) as task,
            stopping_pool(shelf.workers) as pool,
        ):
            scans = pool.map(lambda layer: _scan_layer_cached(layer, shelf, task), largest_first)
            known.update(zip(map(_digest, largest_first), scans, strict=True))
    seen = merge_layers(scan for layer in layers if (scan := known[_digest(layer)]))
    return format_contents(source, seen, environment)


def layout_scan_cache(layout: Layout, workers: int) -> ScanCache:
    """Return the layers of a store on this machine, which were checked when they were stored."""

    def read(layer: OciLayer) -> Iterator[bytes]:
        with layout.blob_path(layer.descriptor.digest).open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) != layer.descriptor.size:
                raise CorruptDataError(f"expected {layer.descriptor.size} bytes, found {size}")
            while data := file.read(CHUNK):
                yield data

    return ScanCache(layout=layout, read=read, workers=workers)


def _scan_layer_cached(layer: OciLayer, shelf: ScanCache, task: ProgressTask) -> LayerScan:
    name = readable_path(layer.title)[:80] or _digest(layer)
    try:
        plain = plain_layer(layer.descriptor.media_type, _counted(shelf.read(layer), task))
        scan = scan_layer(bounded(plain))
    except CorruptDataError as error:
        raise layer_error(name, error) from error
    put_scan(shelf.layout, _digest(layer), scan)
    return scan


def _digest(layer: OciLayer) -> str:
    return layer.descriptor.digest


def _counted(chunks: Iterator[bytes], task: ProgressTask) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        task.advance(len(chunk))


def bounded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield plain bytes. Raises CorruptDataError above the limit."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > PLAIN:
            raise CorruptDataError(f"it unpacks to more than {PLAIN} bytes")
        yield chunk


# --- The root file system of a .sif, unpacked for a scan: a squashfs, which unsquashfs reads without root


@contextmanager
def unpacked_sif(path: Path, scratch: Path, progress: Progress) -> Iterator[Path]:
    """Yield the root of the .sif at `path` as a directory below `scratch`, removed at the end.

    Raises UsageError if it is not a .sif, ToolError if unsquashfs is missing or fails.
    """
    partition = read_partition(path)
    command = shutil.which("unsquashfs")
    if command is None:
        raise ToolError(
            "tool-missing",
            f"unsquashfs is not installed, and scanning {path.name} needs it",
            hint="install squashfs-tools (Debian: apt install squashfs-tools)",
        )
    scratch.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=scratch, prefix="sif-"))
    root = directory / "root"
    argv = [command, "-offset", str(partition.offset), "-dest", str(root)]
    argv += ["-no-xattrs", "-no-progress", "-quiet", str(path.absolute())]
    try:
        with progress.stage(f"unpack {path.name} ({format_bytes(partition.size)}) into {scratch}"):
            process = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
            )
        # 2: something was skipped, such as device files without root; only files matter here.
        if process.returncode not in (0, 2) or not root.is_dir():
            lines = (process.stderr or process.stdout).strip().splitlines() or ["no output"]
            raise ToolError(
                "sif-unpack-failed",
                f"unsquashfs cannot unpack {path.name}: {lines[-1][:300]}",
                hint=f"check the free space in {scratch}, or download the file again",
            )
        yield root
    finally:
        remove_tree(directory)
