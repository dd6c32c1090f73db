"""Which packages of a bill have known vulnerabilities, by records in OSV's format.

Source: https://ossf.github.io/osv-schema/ (affected packages, and how their ranges are evaluated).
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from imagefactory.errors import UsageError
from imagefactory.extras.sbom.bill import BillComponent, BillOfMaterials, PackageType
from imagefactory.lock.debian.lock import debian_key

LARGEST = 64 << 20  # bytes of one record


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Vulnerability:
    """`package` is called as its ecosystem calls it: of Debian, the source package.

    `fixed` is the first version that is known to be mended, empty for none. Without `decided` the record has
    a version that cannot be compared.
    """

    ecosystem: str
    package: str
    version: str
    id: str
    aliases: tuple[str, ...]
    fixed: str
    decided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VulnerabilityCheck:
    """`checked` are numbers of packages by ecosystem; `unchecked` says of others why, with their number."""

    found: tuple[Vulnerability, ...]
    checked: tuple[tuple[str, int], ...]
    unchecked: tuple[tuple[str, int], ...]


# --- records ---------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The records of a JSON file, of a folder of them or of a zip as OSV exports it. Raises UsageError."""
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield _parse(file.read_bytes(), str(file))
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(".json"):
                    yield _parse(_member(archive, member, path), f"{path}:{member.filename}")
    else:
        yield _parse(path.read_bytes(), str(path))


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> bytes:
    try:
        if member.file_size > LARGEST:
            raise ValueError(f"it has {member.file_size} bytes")
        return archive.read(member)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise UsageError(
            "osv-invalid",
            f"cannot read {path}:{member.filename}: {error}",
            hint="download the export again",
        ) from error


def _parse(data: bytes, file: str) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
        if not isinstance(value["id"], str):
            raise TypeError("its id is not a text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            "osv-invalid",
            f"{file} is not an OSV record: {type(error).__name__}: {error}",
            hint="pass a record, a directory of records (*.json), or an OSV export (all.zip)",
        ) from error
    record: Mapping[str, Any] = value
    return record


# --- matching, pure --------------------------------------------------------------------------------


def check_vulnerabilities(bill: BillOfMaterials, records: Iterable[Mapping[str, Any]]) -> VulnerabilityCheck:
    """Raises UsageError for a record that is malformed, and where there is none."""
    wanted: dict[tuple[str, str], dict[str, BillComponent]] = {}  # then by version
    reasons: Counter[str] = Counter()
    ecosystems: Counter[str] = Counter()
    for one in bill.components:
        ecosystem, name = _osv_name(one)
        if name:
            wanted.setdefault((ecosystem, name), {})[_version(one)] = one
            ecosystems[ecosystem] += 1
        else:
            reasons[ecosystem] += 1
    found, seen = set[Vulnerability](), set[str]()
    empty = True
    for record in records:
        empty = False
        try:
            for affected in record.get("affected") or ():
                package = affected.get("package") or {}
                ecosystem = _ecosystem(str(package.get("ecosystem", "")), ecosystems)
                if ecosystem:
                    seen.add(ecosystem)
                named = (ecosystem, _name(ecosystem, str(package.get("name", ""))))
                parts = {} if record.get("withdrawn") else wanted.get(named, {})
                for part in parts.values():
                    if told := _affects(affected, part):
                        found.add(_vulnerability(ecosystem, part, record, told))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(
                "osv-invalid",
                f"the OSV record {record['id']} is malformed: {type(error).__name__}: {error}",
                hint="download it again",
            ) from error
    if empty:
        raise UsageError(
            "osv-empty", "no OSV records found", hint="pass a directory with records, or an OSV export"
        )
    for ecosystem in ecosystems.keys() - seen:
        reasons[f"packages of {ecosystem}: no record of it was given"] += ecosystems[ecosystem]
    return VulnerabilityCheck(
        found=tuple(sorted(found)),
        checked=tuple(sorted((name, ecosystems[name]) for name in seen)),
        unchecked=tuple(sorted(reasons.items())),
    )


def _osv_name(one: BillComponent) -> tuple[str, str]:
    """(ecosystem, name) that records have of it; else why it cannot be asked for, and an empty name."""
    if one.kind is PackageType.PYPI:
        try:
            Version(one.version)
        except InvalidVersion:
            return "packages of PyPI: their version is none by PEP 440", ""
        return "PyPI", one.name
    if one.kind is PackageType.DEB and (one.source[0] or not one.within):
        if not one.source[0]:
            return "Debian packages: the image that tells their source packages is not at hand", ""
        if not one.release:
            return "Debian packages: their release is not known", ""
        return f"{one.namespace.capitalize()}:{one.release}", one.source[0]
    if one.kind is PackageType.CONDA:
        return "conda packages: OSV has no ecosystem of theirs", ""
    if one.within:
        return "libraries that wheels carry: their versions are those of other distributions", ""
    return "base image: ask for the bill of the built image", ""


def _ecosystem(text: str, known: Iterable[str]) -> str:
    """Which of ours a record's means: `Ubuntu:24.04:LTS` is of `Ubuntu:24.04`, `Debian` of every release."""
    parts = text.split(":")
    for one in known:
        if one.split(":") == parts[:2] or (len(parts) == 1 and one.split(":")[0] == parts[0]):
            return one
    return ""


def _name(ecosystem: str, name: str) -> str:
    return canonicalize_name(name) if ecosystem == "PyPI" else name


def _version(one: BillComponent) -> str:
    return one.source[1] if one.kind is PackageType.DEB else one.version


def _affects(affected: Mapping[str, Any], one: BillComponent) -> tuple[str, bool] | None:
    """(first version that is mended, whether all could be compared) where it is affected, else None."""
    key: Callable[[str], Any] = debian_key if one.kind is PackageType.DEB else _python_key
    own = key(_version(one))
    # Names of versions that cannot be compared are compared as they are written.
    listed = _version(one) in (affected.get("versions") or ())
    hit, decided, fixes = listed, True, []
    for text in affected.get("versions") or ():
        try:
            hit = hit or key(text) == own
        except ValueError:
            continue
    for bounds in affected.get("ranges") or ():
        if bounds["type"] != "ECOSYSTEM":
            continue
        try:
            hit = _inside(bounds["events"], own, key) or hit
            fixed = [event["fixed"] for event in bounds["events"] if "fixed" in event]
            fixes += [text for text in fixed if key(text) > own]
        except ValueError:
            decided = False
    if not hit and decided:
        return None
    return (min(fixes, key=key) if fixes else ""), hit or decided


def _inside(events: Iterable[Mapping[str, str]], own: Any, key: Callable[[str], Any]) -> bool:
    """OSV's own evaluation: the events in the order of their versions, each turning it on or off."""
    rows = [(word, text) for event in events for word, text in event.items()]
    limits = [text for word, text in rows if word == "limit"]
    if limits and all(text != "*" and own >= key(text) for text in limits):
        return False
    turns = [(word, text) for word, text in rows if word in ("introduced", "fixed", "last_affected")]
    hit = False
    for word, text in sorted(turns, key=lambda row: (row[1] != "0", key(row[1]))):
        if word == "introduced" and (text == "0" or own >= key(text)):
            hit = True
        elif (word == "fixed" and own >= key(text)) or (word == "last_affected" and own > key(text)):
            hit = False
    return hit


def _python_key(text: str) -> Version:
    """Without the local part: a build `2.3.1+cu121` is 2.3.1 to whoever writes records."""
    return Version(Version(text).public)


def _vulnerability(
    ecosystem: str, one: BillComponent, record: Mapping[str, Any], told: tuple[str, bool]
) -> Vulnerability:
    fixed, decided = told
    return Vulnerability(
        ecosystem=ecosystem,
        package=one.source[0] if one.kind is PackageType.DEB else one.name,
        version=_version(one),
        id=record["id"],
        aliases=tuple(sorted(map(str, record.get("aliases") or ()))),
        fixed=fixed,
        decided=decided,
    )
