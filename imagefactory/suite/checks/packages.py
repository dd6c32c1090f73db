"""`packages`: the image holds the locked packages for its Python, each whole, and nothing else.

Every file that a RECORD names, or a record of conda-meta, must be there with its size; files of up to
HASHED_BYTES are hashed too (the large ones are gigabytes, and the image's digest speaks for them).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import conda
from ..context import CheckFailure, Context, Finding, same_version

HASHED_BYTES = 256 * 1024
SHOWN = 8


@dataclass
class Tally:
    """What the records said and what was found on disk.

    `overwritten` counts the files of wheels of which another wheel has another one at the same path.
    """

    files: int = 0
    overwritten: int = 0
    hashed: int = 0
    size: int = 0
    faults: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)


def check(context: Context) -> Finding:
    expected = context.expected
    records, faults = conda.read_records(context.prefix)
    faults += compare_records(records, expected.conda)
    owned = find_owned(records, os.path.relpath(context.site, context.prefix))
    installed, unnamed = find_packages(context.site, owned)
    faults += unnamed + compare(installed, expected.packages)
    python = ".".join(map(str, sys.version_info[:2]))
    if python != expected.python:
        faults.append(f"the image runs Python {python}, the lock is for {expected.python}")
    if not expected.locked:
        faults.append("the lock names no package")
    tally = Tally(faults=faults)
    read_paths(context.prefix, records, tally)
    claims: dict[str, list[Claim]] = {}
    for name in sorted(os.listdir(context.site)):
        if name.endswith(".dist-info") and name not in owned:
            read_record(context.site, name, claims, tally)
    compare_claims(claims, tally)
    # conda's packages may put a file anywhere in the environment, wheels are looked at where they go.
    strays = find_strays(context.prefix if expected.conda else context.site, tally.known)
    scripted = conda.scripted(records)
    if strays and not scripted:
        tally.faults.append(f"files that belong to no package: {shorten(strays)}")
    if tally.faults:
        raise CheckFailure("; ".join(tally.faults[:SHOWN]) + more(tally.faults))
    kinds = f" ({len(records)} of conda)" if records else ""
    there = f"{tally.files} files in place"
    over = f", {tally.overwritten} of them differ between packages" if tally.overwritten else ""
    made = f", {len(strays)} more that scripts of {shorten(scripted)} may have made" if strays else ""
    return Finding(
        f"{len(installed) + len(records)} packages{kinds} as locked, {there}{over}{made}",
        {
            "packages": len(installed) + len(records),
            "files": tally.files,
            "overwritten-files": tally.overwritten,
            "hashed-files": tally.hashed,
            "bytes": tally.size,
        },
    )


def find_packages(site: str, owned: Collection[str] = ()) -> tuple[dict[str, str], list[str]]:
    """Installed name (PEP 503) -> version, and what is wrong with the metadata itself.

    `owned` are the metadata folders that conda's packages brought: those are no wheels.
    """
    installed: dict[str, str] = {}
    faults = []
    for distribution in importlib.metadata.distributions(path=[site]):
        if os.path.basename(str(getattr(distribution, "_path", ""))) in owned:
            continue
        name = distribution.metadata["Name"]
        if not name:
            faults.append(f"no name in {getattr(distribution, '_path', 'a dist-info folder')}")
            continue
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in installed:
            faults.append(f"{key} is there twice: {installed[key]} and {distribution.version}")
        installed[key] = distribution.version
    return installed, faults


def compare(installed: Mapping[str, str], locked: Mapping[str, str]) -> list[str]:
    faults = []
    for name in sorted(locked):
        if name not in installed:
            faults.append(f"{name} {locked[name]} is missing")
        elif not same_version(installed[name], locked[name]):
            faults.append(f"{name} is {installed[name]}, locked is {locked[name]}")
    faults += [
        f"{name} {installed[name]} is not in the lock" for name in sorted(set(installed) - set(locked))
    ]
    return faults


# --- conda's packages ----------------------------------------------------------------------------


def compare_records(records: Iterable[conda.Record], locked: Mapping[str, str]) -> list[str]:
    """conda's packages must be the locked builds, not only the locked versions."""
    installed: dict[str, str] = {}
    faults = []
    for record in records:
        if record.name in installed:
            faults.append(f"{record.name} has two records in {conda.META}")
        installed[record.name] = f"{record.version} {record.build}"
    for name in sorted(locked):
        if name not in installed:
            faults.append(f"{name} {locked[name]} is missing")
        elif installed[name] != locked[name]:
            faults.append(f"{name} is {installed[name]}, locked is {locked[name]}")
    return faults + [
        f"{name} {installed[name]} is not in the lock" for name in sorted(set(installed) - set(locked))
    ]


def find_owned(records: Iterable[conda.Record], site: str) -> set[str]:
    """Names of the folders and files of metadata (*.dist-info, *.egg-info) in `site` that conda brought."""
    names = {path.partition("/")[0] for record in records for path in conda.within(record.files, site)}
    return {name for name in names if name.endswith((".dist-info", ".egg-info"))}


def read_paths(prefix: str, records: Iterable[conda.Record], tally: Tally) -> None:
    """Compares what conda's records name with the disk; adds to `tally`.

    Where several packages claim one path, it must be as one of them says.
    """
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
        faults = [look_at(path, row, tally) for _, row in claimed]
        if all(faults):
            tally.faults.append(f"{claimed[0][0].name}: {name} {faults[0]}")
        elif not os.path.islink(path) and os.path.isfile(path):
            tally.files += 1
            tally.size += os.stat(path).st_size


def look_at(path: str, row: Mapping[str, Any], tally: Tally) -> str:
    """What is wrong with a path, in words that go on from its name; empty if nothing is."""
    if row.get("path_type") == "softlink":
        return "" if os.path.lexists(path) else "is missing"
    if row.get("path_type") == "directory":
        return "" if os.path.isdir(path) else "is missing"
    try:
        found = os.stat(path).st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    # Of a file that the prefix was written into, the record has the hash of what came of it.
    digest = row.get("sha256_in_prefix") or row.get("sha256")
    size = row.get("size_in_bytes")
    if size is not None and digest == row.get("sha256") and found != size:
        return f"has {found} bytes, its record says {size}"
    if digest and found <= HASHED_BYTES:
        tally.hashed += 1
        with open(path, "rb") as file:
            if hashlib.sha256(file.read()).hexdigest() != digest:
                return "is not the file that its record names"
    return ""


# --- wheels --------------------------------------------------------------------------------------


Claim = tuple[str, str, str, str]
"""A row of a RECORD: its dist-info, the path as written, the digest and the size."""


def read_record(site: str, info: str, claims: dict[str, list[Claim]], tally: Tally) -> None:
    """Adds the rows of `info`/RECORD to `claims`, by the path on disk."""
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


def compare_claims(claims: Mapping[str, list[Claim]], tally: Tally) -> None:
    """Compares the files that RECORDs name with the disk; adds to `tally`.

    Where several wheels claim one path, it must be as one of them says: the last one that is installed
    overwrites the others'.
    """
    for path, claimed in claims.items():
        info, name, _, _ = claimed[0]
        try:
            found = os.stat(path).st_size
        except OSError as error:
            tally.faults.append(f"{info}: {name}: {error.strerror}")
            continue
        tally.files += 1
        tally.size += found
        if is_byte_code(name):
            continue  # some wheels carry byte code, and an image's own is compiled anew in its place
        faults = [look_at_claim(path, found, claim, tally) for claim in claimed]
        if all(faults):
            tally.faults.append(faults[0])
        elif any(faults):
            tally.overwritten += 1


def look_at_claim(path: str, found: int, claim: Claim, tally: Tally) -> str:
    """What is wrong with a file of `found` bytes, empty if nothing is."""
    info, name, digest, size = claim
    if size and int(size) != found:
        return f"{info}: {name} has {found} bytes, its RECORD says {size}"
    if digest and found <= HASHED_BYTES:
        tally.hashed += 1
        if not matches(path, digest):
            return f"{info}: {name} is not the file that its RECORD names"
    return ""


def matches(path: str, digest: str) -> bool:
    """`digest` as RECORD writes it: `sha256=` and base64 for URLs without padding (PEP 376, 427)."""
    algorithm, _, value = digest.partition("=")
    with open(path, "rb") as file:
        found = hashlib.new(algorithm, file.read()).digest()
    return base64.urlsafe_b64encode(found).rstrip(b"=").decode() == value.rstrip("=")


def is_byte_code(name: str) -> bool:
    return name.endswith(".pyc") and "__pycache__" in name.split("/")


def find_strays(root: str, known: set[str]) -> list[str]:
    """Files under `root` that no record names, links to folders too; but byte code beside its source.

    Byte code anywhere else can be imported, so it is a stray like others.
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
