"""The check `packages`: the image has the locked packages for its Python, all complete, and no others.

Every file in a RECORD or in a record of conda-meta must exist with its size. Files up to HASHED_BYTES are
also hashed. Hashing the others, which have gigabytes, is not needed: the digest of the image covers them.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import conda
from ..context import CheckFailure, Context, Finding, same_version

HASHED_BYTES = 256 * 1024
SHOWN = 8


@dataclass
class RecordComparison:
    """The records compared with the disk. `overwritten` counts paths that another wheel has overwritten."""

    files: int = 0
    overwritten: int = 0
    hashed: int = 0
    size: int = 0
    faults: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)


def check(context: Context) -> Finding:
    expected = context.expected
    records, faults = conda.read_records(context.prefix)
    builds: dict[str, str] = {}
    for record in records:
        if record.name in builds:
            faults.append(f"{record.name} has two records in {conda.META}")
        builds[record.name] = f"{record.version} {record.build}"
    faults += compare(builds, expected.conda, operator.eq)  # the locked builds, not only the locked versions
    owned = find_owned(records, os.path.relpath(context.site, context.prefix))
    installed, unnamed = find_packages(context.site, owned)
    faults += unnamed + compare(installed, expected.packages, same_version)
    python = ".".join(map(str, sys.version_info[:2]))
    if python != expected.python:
        faults.append(f"the image runs Python {python}, the lock is for {expected.python}")
    if not expected.locked:
        faults.append("the lock names no package")
    tally = RecordComparison(faults=faults)
    read_paths(context.prefix, records, tally)
    claims: dict[str, list[Claim]] = {}
    for name in sorted(os.listdir(context.site)):
        if name.endswith(".dist-info") and name not in owned:
            read_record(context.site, name, claims, tally)
    compare_claims(claims, tally)
    # A conda package may put a file anywhere in the environment.
    strays = find_unrecorded_files(context.prefix if expected.conda else context.site, tally.known)
    scripted = conda.scripted(records)
    if strays and not scripted:
        tally.faults.append(f"files that belong to no package: {shorten(strays)}")
    if tally.faults:
        raise CheckFailure("; ".join(tally.faults[:SHOWN]) + more(tally.faults))
    kinds = f" ({len(records)} of conda)" if records else ""
    detail = f"{len(installed) + len(records)} packages{kinds} as locked, {tally.files} files in place"
    if tally.overwritten:
        detail += f", {tally.overwritten} of them differ between packages"
    if strays:
        detail += f", {len(strays)} more that scripts of {shorten(scripted)} may have made"
    return Finding(
        detail,
        {
            "packages": len(installed) + len(records),
            "files": tally.files,
            "overwritten-files": tally.overwritten,
            "hashed-files": tally.hashed,
            "bytes": tally.size,
        },
    )


def find_packages(site: str, owned: Collection[str] = ()) -> tuple[dict[str, str], list[str]]:
    """Return the version of each installed name (PEP 503), and faults of the metadata.

    `owned` are the metadata directories of conda packages, which are not wheels.
    """
    installed: dict[str, str] = {}
    faults = []
    for distribution in importlib.metadata.distributions(path=[site]):
        if os.path.basename(str(getattr(distribution, "_path", ""))) in owned:
            continue
        name = distribution.metadata["Name"]
        if not name:
            faults.append(f"no name in {getattr(distribution, '_path', 'a dist-info directory')}")
            continue
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in installed:
            faults.append(f"{key} is there twice: {installed[key]} and {distribution.version}")
        installed[key] = distribution.version
    return installed, faults


def compare(
    installed: Mapping[str, str], locked: Mapping[str, str], same: Callable[[str, str], bool]
) -> list[str]:
    faults = []
    for name in sorted(locked):
        if name not in installed:
            faults.append(f"{name} {locked[name]} is missing")
        elif not same(installed[name], locked[name]):
            faults.append(f"{name} is {installed[name]}, locked is {locked[name]}")
    return faults + [
        f"{name} {installed[name]} is not in the lock" for name in sorted(set(installed) - set(locked))
    ]


def find_owned(records: Iterable[conda.Record], site: str) -> set[str]:
    """Return the names of metadata (*.dist-info, *.egg-info) in `site` that conda packages installed."""
    names = {path.partition("/")[0] for record in records for path in conda.within(record.files, site)}
    return {name for name in names if name.endswith((".dist-info", ".egg-info"))}


def read_paths(prefix: str, records: Iterable[conda.Record], tally: RecordComparison) -> None:
    """Compare the records of conda with the disk. If several packages have a path, one of them must match."""
    claims: dict[str, list[tuple[conda.Record, dict[str, Any]]]] = {}
    for record in records:
        tally.known.add(os.path.join(prefix, record.file))
        for row in record.paths:
            claims.setdefault(os.path.normpath(row["_path"]), []).append((record, row))
    tally.known.add(os.path.join(prefix, conda.HISTORY))
    for name, claimed in claims.items():
        path = os.path.join(prefix, name)
        tally.known.add(path)
        if is_byte_code(name):
            continue  # an image's own is compiled anew in its place
        faults = [path_fault(path, row, tally) for _, row in claimed]
        if all(faults):
            tally.faults.append(f"{claimed[0][0].name}: {name} {faults[0]}")
        elif not os.path.islink(path) and os.path.isfile(path):
            tally.files += 1
            tally.size += os.stat(path).st_size


def path_fault(path: str, row: Mapping[str, Any], tally: RecordComparison) -> str:
    """Return the fault of a path, as words that follow its name; empty if there is none."""
    if row.get("path_type") == "softlink":
        return "" if os.path.lexists(path) else "is missing"
    if row.get("path_type") == "directory":
        return "" if os.path.isdir(path) else "is missing"
    try:
        length = os.stat(path).st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    # If the prefix was written into a file, the record has the hash of the result.
    digest = row.get("sha256_in_prefix") or row.get("sha256")
    size = row.get("size_in_bytes")
    if size is not None and digest == row.get("sha256") and length != size:
        return f"has {length} bytes, its record says {size}"
    if digest and length <= HASHED_BYTES:
        tally.hashed += 1
        with open(path, "rb") as file:
            if hashlib.sha256(file.read()).hexdigest() != digest:
                return "is not the file that its record names"
    return ""


Claim = tuple[str, str, str, str]
"""A row of a RECORD: its dist-info, the path as written, the digest and the size."""


def read_record(site: str, info: str, claims: dict[str, list[Claim]], tally: RecordComparison) -> None:
    """Add the rows of `info`/RECORD to `claims`, by the path on disk."""
    record = os.path.join(site, info, "RECORD")
    try:
        with open(record, encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        tally.faults.append(f"{info}: RECORD cannot be read: {error.strerror}")
        return
    for row in rows:
        name, digest, size = (*row, "", "")[:3]
        path = os.path.normpath(os.path.join(site, name))
        tally.known.add(path)
        claims.setdefault(path, []).append((info, name, digest, size))


def compare_claims(claims: Mapping[str, list[Claim]], tally: RecordComparison) -> None:
    """Compare the files in RECORDs with the disk.

    If several wheels have a path, one of them must match: the last installed wheel overwrites the others.
    """
    for path, claimed in claims.items():
        info, name, _, _ = claimed[0]
        try:
            length = os.stat(path).st_size
        except OSError as error:
            tally.faults.append(f"{info}: {name}: {error.strerror}")
            continue
        tally.files += 1
        tally.size += length
        if is_byte_code(name):
            continue  # some wheels carry byte code, and an image's own is compiled anew in its place
        faults = [claim_fault(path, length, claim, tally) for claim in claimed]
        if all(faults):
            tally.faults.append(faults[0])
        elif any(faults):
            tally.overwritten += 1


def claim_fault(path: str, length: int, claim: Claim, tally: RecordComparison) -> str:
    """Return the fault of a file with `length` bytes, empty if there is none."""
    info, name, digest, size = claim
    if size and int(size) != length:
        return f"{info}: {name} has {length} bytes, its RECORD says {size}"
    if digest and length <= HASHED_BYTES:
        tally.hashed += 1
        # `sha256=` and base64 for URLs without padding (PEP 376, 427).
        algorithm, _, value = digest.partition("=")
        with open(path, "rb") as file:
            computed = hashlib.new(algorithm, file.read()).digest()
        if base64.urlsafe_b64encode(computed).rstrip(b"=").decode() != value.rstrip("="):
            return f"{info}: {name} is not the file that its RECORD names"
    return ""


def is_byte_code(name: str) -> bool:
    return name.endswith(".pyc") and "__pycache__" in name.split("/")


def find_unrecorded_files(root: str, known: set[str]) -> list[str]:
    """Return the files under `root` that no record lists, and links to directories. __pycache__ is skipped.

    Byte code elsewhere can be imported, so it counts like other files.
    """
    strays = []
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*names, *links):
            path = os.path.join(folder, name)
            inside = os.path.relpath(path, root)
            if path not in known and not is_byte_code(inside):
                strays.append(inside)
    return sorted(strays)


def shorten(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + more(names)


def more(items: Sequence[object]) -> str:
    return f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
