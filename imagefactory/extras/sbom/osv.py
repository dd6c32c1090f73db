"""Find known vulnerabilities of the packages in a bill, by records in OSV format.

Source: https://ossf.github.io/osv-schema/ (affected packages, and how their ranges are evaluated).
"""

from __future__ import annotations

import json
import re
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
_RPM_VENDORS = {"almalinux": "AlmaLinux", "rocky": "Rocky Linux"}
"""The OSV ecosystem of RPM packages, by the namespace in their package URL."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Vulnerability:
    """A vulnerability of a package. `package` is its name in the ecosystem: for Debian, the source package.

    `fixed` is the first fixed version, empty if none is known. `decided` is false if the record has a version
    that cannot be compared.
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
    """The result of a check.

    `checked` are numbers of packages by ecosystem, `unchecked` numbers by reason.
    """

    found: tuple[Vulnerability, ...]
    checked: tuple[tuple[str, int], ...]
    unchecked: tuple[tuple[str, int], ...]


# --- records ---------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the records in a JSON file, a directory of files or a zip exported by OSV. Raises UsageError."""
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
            raise ValueError(f"it has {member.file_size} bytes, the limit is {LARGEST}")
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
            raise TypeError("its id is not a string")
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
    """Return the vulnerabilities of a bill. Raises UsageError for an invalid record, or without records."""
    components: dict[tuple[str, str], dict[str, BillComponent]] = {}  # then by version
    reasons: Counter[str] = Counter()
    ecosystems: Counter[str] = Counter()
    for component in bill.components:
        ecosystem, name = _osv_name(component)
        if name:
            components.setdefault((ecosystem, name), {})[_version(component)] = component
            ecosystems[ecosystem] += 1
        else:
            reasons[ecosystem] += 1
    vulnerabilities, seen = set[Vulnerability](), set[str]()
    empty = True
    for record in records:
        empty = False
        try:
            for affected in record.get("affected") or ():
                package = affected.get("package") or {}
                ecosystem = _ecosystem(str(package.get("ecosystem", "")), ecosystems)
                if ecosystem:
                    seen.add(ecosystem)
                package_key = (ecosystem, _name(ecosystem, str(package.get("name", ""))))
                affected_components = {} if record.get("withdrawn") else components.get(package_key, {})
                for affected_component in affected_components.values():
                    if effect := _affects(affected, affected_component):
                        vulnerabilities.add(_vulnerability(ecosystem, affected_component, record, effect))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(
                "osv-invalid",
                f"the OSV record {record['id']} is invalid: {type(error).__name__}: {error}",
                hint="download the OSV export again",
            ) from error
    if empty:
        raise UsageError(
            "osv-empty", "no OSV records found", hint="pass a directory with records, or an OSV export"
        )
    for ecosystem in ecosystems.keys() - seen:
        reasons[f"packages of {ecosystem}: no record of it was given"] += ecosystems[ecosystem]
    return VulnerabilityCheck(
        found=tuple(sorted(vulnerabilities)),
        checked=tuple(sorted((name, ecosystems[name]) for name in seen)),
        unchecked=tuple(sorted(reasons.items())),
    )


def _osv_name(component: BillComponent) -> tuple[str, str]:
    """Return the ecosystem and name in OSV records, or else why it cannot be checked and an empty name."""
    if component.kind is PackageType.PYPI:
        try:
            Version(component.version)
        except InvalidVersion:
            return "packages of PyPI: their version is none by PEP 440", ""
        return "PyPI", component.name
    if component.kind is PackageType.DEB and (component.source[0] or not component.within):
        if not component.source[0]:
            return "Debian packages: the image with their source packages is not available", ""
        if not component.release:
            return "Debian packages: their release is not known", ""
        return f"{component.namespace.capitalize()}:{component.release}", component.source[0]
    if component.kind is PackageType.CARGO:
        return "crates.io", component.name
    vendor = _RPM_VENDORS.get(component.namespace) if component.kind is PackageType.RPM else None
    if vendor and (release := re.search(r"\.el([0-9]+)", component.version)):
        return f"{vendor}:{release[1]}", component.name
    if component.kind is PackageType.CONDA:
        return "conda packages: OSV has no ecosystem of theirs", ""
    if component.within:
        return f"libraries in wheels: OSV has no ecosystem for {component.kind} packages like theirs", ""
    return "base image: ask for the bill of the built image", ""


def _ecosystem(text: str, known: Iterable[str]) -> str:
    """Return the known ecosystem of a record: `Ubuntu:24.04:LTS` is `Ubuntu:24.04`, `Debian` any release."""
    parts = text.split(":")
    for ecosystem in known:
        if ecosystem.split(":") == parts[:2] or (len(parts) == 1 and ecosystem.split(":")[0] == parts[0]):
            return ecosystem
    return ""


def _name(ecosystem: str, name: str) -> str:
    return canonicalize_name(name) if ecosystem == "PyPI" else name


def _version(component: BillComponent) -> str:
    return component.source[1] if component.kind is PackageType.DEB else component.version


def _affects(affected: Mapping[str, Any], component: BillComponent) -> tuple[str, bool] | None:
    """Return the first fixed version and whether all versions could be compared, None if it is not
    affected.
    """
    keys: dict[PackageType, Callable[[str], Any]]
    keys = {PackageType.DEB: debian_key, PackageType.RPM: rpm_key}
    key = keys.get(component.kind, _python_key)
    form = "SEMVER" if component.kind is PackageType.CARGO else "ECOSYSTEM"
    version_key = key(_version(component))
    # Versions that cannot be ordered are compared as text.
    listed = _version(component) in (affected.get("versions") or ())
    hit, decided, fixes = listed, True, []
    for text in affected.get("versions") or ():
        try:
            hit = hit or key(text) == version_key
        except ValueError:
            continue
    for bounds in affected.get("ranges") or ():
        if bounds["type"] != form:
            continue
        try:
            hit = _inside(bounds["events"], version_key, key) or hit
            fixed = [event["fixed"] for event in bounds["events"] if "fixed" in event]
            fixes += [text for text in fixed if key(text) > version_key]
        except ValueError:
            decided = False
    if not hit and decided:
        return None
    return (min(fixes, key=key) if fixes else ""), hit or decided


def _inside(events: Iterable[Mapping[str, str]], version_key: Any, key: Callable[[str], Any]) -> bool:
    """Evaluate a range by the OSV specification: events sorted by version, each turns it on or off."""
    rows = [(word, text) for event in events for word, text in event.items()]
    limits = [text for word, text in rows if word == "limit"]
    if limits and all(text != "*" and version_key >= key(text) for text in limits):
        return False
    turns = [(word, text) for word, text in rows if word in ("introduced", "fixed", "last_affected")]
    hit = False
    for word, text in sorted(turns, key=lambda row: (row[1] != "0", key(row[1]))):
        if word == "introduced" and (text == "0" or version_key >= key(text)):
            hit = True
        elif (word == "fixed" and version_key >= key(text)) or (
            word == "last_affected" and version_key > key(text)
        ):
            hit = False
    return hit


def rpm_key(text: str) -> tuple[Any, ...]:
    """Return a sort key of an RPM version (`1:2.3-4.el8`).

    Source: rpm's documentation, "Version comparison": runs of digits and letters, digits are newer than
    letters, `~` is older and `^` newer than the end.
    """
    epoch, _, rest = text.rpartition(":")
    version, _, release = rest.partition("-")
    if not re.fullmatch(r"[0-9]*", epoch) or not version:
        raise ValueError(f"not an RPM version: {text}")
    return int(epoch or 0), _rpm_parts(version), _rpm_parts(release)


def _rpm_parts(text: str) -> tuple[tuple[int, int, str], ...]:
    parts = [
        {"~": (0, 0, ""), "^": (2, 0, "")}.get(run) or ((4, int(run), "") if run.isdigit() else (3, 0, run))
        for run in re.findall(r"[0-9]+|[A-Za-z]+|~|\^", text)
    ]
    return (*parts, (1, 0, ""))


def _python_key(text: str) -> Version:
    """Return the version without its local part: records name `2.3.1`, not the build `2.3.1+cu121`."""
    return Version(Version(text).public)


def _vulnerability(
    ecosystem: str, component: BillComponent, record: Mapping[str, Any], effect: tuple[str, bool]
) -> Vulnerability:
    fixed, decided = effect
    return Vulnerability(
        ecosystem=ecosystem,
        package=component.source[0] if component.kind is PackageType.DEB else component.name,
        version=_version(component),
        id=record["id"],
        aliases=tuple(sorted(map(str, record.get("aliases") or ()))),
        fixed=fixed,
        decided=decided,
    )
