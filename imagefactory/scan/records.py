"""What a scan found, kept: a record in the store for each layer, by its digest.

A record is only a memory. One that cannot be read, or that another scanner made, counts as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imagefactory.gpu.capability import parse_code
from imagefactory.gpu.values import Library, Modules, Package
from imagefactory.oci.layout import Layout
from imagefactory.scan.findings import FileFinding

SCANNER = 5
"""The version of what a scan finds. Another number makes kept scans count for nothing."""
RECORDS = "scans"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScan:
    """What one layer tells, paths without a slash at either end, sorted.

    `plain` are its other entries that are no folders, for they cover what lies below at their path; texts
    are left out. `removed` are its whiteouts, `opaque` the folders of which nothing below is seen. `links`
    are other names of what was found, as (name, path): the file lives as long as one of them.
    """

    found: tuple[FileFinding, ...]
    plain: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()


def keep_scan(layout: Layout, digest: str, scan: LayerScan) -> None:
    layout.record(RECORDS, layout.blob_path(digest).name, format_scan(scan))


def recall_scan(layout: Layout, digest: str) -> LayerScan | None:
    """What was kept of a layer; None where nothing was, by another scanner, or not readably."""
    value = layout.recall(RECORDS, layout.blob_path(digest).name)
    return None if value is None else parse_scan(value)


def format_scan(scan: LayerScan) -> dict[str, object]:
    """As JSON; `parse_scan` reads it."""
    return {
        "scanner": SCANNER,
        "found": [_format_found(one) for one in scan.found],
        "plain": scan.plain,
        "removed": scan.removed,
        "opaque": scan.opaque,
        "links": scan.links,
    }


def parse_scan(value: Mapping[str, Any]) -> LayerScan | None:
    """None for what another scanner wrote, and for what is no record: it is only a memory."""
    try:
        if value["scanner"] != SCANNER:
            return None
        return LayerScan(
            found=tuple(_parse_found(one) for one in value["found"]),
            plain=tuple(value["plain"]),
            removed=tuple(value["removed"]),
            opaque=tuple(value["opaque"]),
            links=tuple((name, path) for name, path in value["links"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _format_found(finding: FileFinding) -> dict[str, object]:
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


def _parse_found(value: Mapping[str, Any]) -> FileFinding:
    library = package = None
    if "modules" in value:
        library = Library(
            path=value["path"],
            size=value["size"],
            modules=tuple(_parse_modules(text) for text in value["modules"]),
            compressions=tuple(value["compressions"]),
            damage=value["damage"],
            unread=value["unread"],
        )
    if "package" in value:
        name, version, build = value["package"]
        package = Package(name=name, version=version, build=build)
    facts = tuple((framework, key, text) for framework, key, text in value.get("facts", ()))
    return FileFinding(
        path=value["path"], library=library, package=package, facts=facts, toolkit=value.get("toolkit", "")
    )


def _format_modules(modules: Modules) -> str:
    """`332 sm_50 sm_60 compute_90/8.1`: the count, then the codes."""
    return " ".join((str(modules.count), *map(str, modules.codes)))


def _parse_modules(text: str) -> Modules:
    """What `_format_modules` wrote. Raises ValueError."""
    count, *codes = text.split(" ")
    return Modules(codes=tuple(map(parse_code, codes)), count=int(count))
