"""`packages`: the image holds the locked packages for its Python, each whole, and nothing else.

Every file that a RECORD names must be there with its size; files of up to HASHED_BYTES are hashed
too (the large ones are gigabytes, and the image's digest speaks for them).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..context import Context, Failure, Finding, same_version

HASHED_BYTES = 256 * 1024
SHOWN = 8


@dataclass
class Tally:
    """What the RECORD files said and what was found on disk."""

    files: int = 0
    hashed: int = 0
    size: int = 0
    faults: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)


def check(context: Context) -> Finding:
    installed, faults = find_packages(context.site)
    faults += compare(installed, context.expected.packages)
    python = ".".join(map(str, sys.version_info[:2]))
    if python != context.expected.python:
        faults.append(f"the image runs Python {python}, the lock is for {context.expected.python}")
    if not installed and not context.expected.packages:
        faults.append("the lock names no package")
    tally = Tally(faults=faults)
    for name in sorted(os.listdir(context.site)):
        if name.endswith(".dist-info"):
            read_record(context.site, name, tally)
    strays = find_strays(context.site, tally.known)
    if strays:
        tally.faults.append(f"files that belong to no package: {shorten(strays)}")
    if tally.faults:
        raise Failure("; ".join(tally.faults[:SHOWN]) + more(tally.faults))
    return Finding(
        f"{len(installed)} packages as locked, {tally.files} files in place",
        {
            "packages": len(installed),
            "files": tally.files,
            "hashed-files": tally.hashed,
            "bytes": tally.size,
        },
    )


def find_packages(site: str) -> tuple[dict[str, str], list[str]]:
    """Installed name (PEP 503) -> version, and what is wrong with the metadata itself."""
    installed: dict[str, str] = {}
    faults = []
    for distribution in importlib.metadata.distributions(path=[site]):
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


def read_record(site: str, info: str, tally: Tally) -> None:
    """Compares the files that `info`/RECORD names with the disk; adds to `tally`."""
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
        try:
            found = os.stat(path).st_size
        except OSError as error:
            tally.faults.append(f"{info}: {name}: {error.strerror}")
            continue
        tally.files += 1
        tally.size += found
        if name.endswith(".pyc") and "__pycache__" in name.split("/"):
            continue  # some wheels carry byte code, and an image's own is compiled anew in its place
        if size and int(size) != found:
            tally.faults.append(f"{info}: {name} has {found} bytes, its RECORD says {size}")
        elif digest and found <= HASHED_BYTES:
            tally.hashed += 1
            if not matches(path, digest):
                tally.faults.append(f"{info}: {name} is not the file that its RECORD names")


def matches(path: str, digest: str) -> bool:
    """`digest` as RECORD writes it: `sha256=` and base64 for URLs without padding (PEP 376, 427)."""
    algorithm, _, value = digest.partition("=")
    with open(path, "rb") as file:
        found = hashlib.new(algorithm, file.read()).digest()
    return base64.urlsafe_b64encode(found).rstrip(b"=").decode() == value.rstrip("=")


def find_strays(site: str, known: set[str]) -> list[str]:
    """Files under `site` that no RECORD names. Compiled Python files (.pyc) are a layer of their own."""
    strays = []
    for folder, _, names in os.walk(site):
        for name in names:
            path = os.path.join(folder, name)
            if path not in known and not name.endswith(".pyc"):
                strays.append(os.path.relpath(path, site))
    return sorted(strays)


def shorten(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + more(names)


def more(items: list[str]) -> str:
    return f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
