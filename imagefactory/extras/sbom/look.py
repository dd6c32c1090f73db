"""The licenses of packages: from wheels and conda archives in the cache, or from the layers of an image.

An image has the package list of dpkg with its copyright files, conda records, and METADATA of other packages
in site-packages.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packageurl import PackageURL
from packaging.metadata import parse_email
from packaging.utils import canonicalize_name

from imagefactory.errors import StoreError
from imagefactory.extras.sbom.bill import (
    BillComponent,
    BillOfMaterials,
    ComponentLicense,
    PackageType,
    merge_carried,
    sorted_components,
)
from imagefactory.extras.sbom.licenses import (
    NO_FIELD,
    copyright_licenses,
    metadata_licenses,
    plain,
    read_license,
    unique,
)
from imagefactory.lock.debian.archive import parse_stanzas
from imagefactory.lock.debian.lock import format_base_lock
from imagefactory.lock.files import lock_digest
from imagefactory.model import BaseLock, BaseSpec, Lock, LockedPackage, LockedWheel
from imagefactory.oci.inflate import CorruptDataError
from imagefactory.oci.tar_stream import DIRECTORY, FILE, HIDDEN, REMOVED, SYMLINK, TarStream, entries
from imagefactory.oci.tree import OPAQUE, WHITEOUT
from imagefactory.scan.files import read_index
from imagefactory.scan.findings import readable_path
from imagefactory.scan.zip import damaged, member_bytes, members_of

LARGEST = 64 << 20  # bytes of one record; conda's list every file of a package
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HINT = "build or pull the image again"
_STATUS, _RELEASE, _DOC = "var/lib/dpkg/status", "usr/lib/os-release", "usr/share/doc/"
_COPYRIGHT = re.compile(r"usr/share/doc/[^/]+(?:/copyright)?")
_METADATA = ".dist-info/METADATA"
_SBOM = re.compile(r"(?:^|(?<=/))[^/]+\.dist-info/sboms/[^/]+\.json")
_DIST_INFO = re.compile(  # dist-packages are Debian's own, but for those below /usr/local
    r"(?:(?:.*/)?site-packages|usr/local/lib/python3[^/]*/dist-packages)/[^/]+\.dist-info/METADATA"
)
_CONDA_META = re.compile(r"((?:.*/)?)conda-meta/[^/]+\.json")

LicenseAndSource = tuple[tuple[ComponentLicense, ...], str]
"""Licenses, or why there are none."""


# --- packages of the cache -------------------------------------------------------------------------


def package_licenses(package: LockedPackage, path: Path) -> LicenseAndSource:
    """Return the licenses in the archive at `path`. Raises UsageError for a corrupt archive."""
    if not isinstance(package, LockedWheel):
        try:
            return _record_licenses(json.loads(read_index(path)))
        except (ValueError, AttributeError, RecursionError) as error:
            raise damaged(path, f"info/index.json: {error}") from error
    for member in members_of(path):
        if member.filename.count("/") == 1 and member.filename.endswith(_METADATA):
            if member.file_size > LARGEST:
                break
            try:
                return metadata_licenses(b"".join(member_bytes(path, member)))
            except CorruptDataError as error:
                raise damaged(path, str(error)) from error
    return (), "its wheel has no METADATA"


def package_carried(package: LockedPackage, path: Path) -> tuple[tuple[BillComponent, ...], tuple[str, ...]]:
    """Return the libraries that a wheel declares to contain (PEP 770), and faults of these declarations."""
    if not isinstance(package, LockedWheel):
        return (), ()
    components, faults = list[BillComponent](), list[str]()
    for member in members_of(path):
        if _SBOM.fullmatch(member.filename):
            try:
                if member.file_size > LARGEST:
                    raise ValueError(f"it has {member.file_size} bytes, the limit is {LARGEST}")
                data = b"".join(member_bytes(path, member))
                components += _carried(data, (PackageType.PYPI, package.name, package.version))
            except (CorruptDataError, ValueError) as error:
                faults.append(f"{package.filename}: {member.filename[:200]} cannot be read: {error}")
    return tuple(components), tuple(faults)


def _carried(data: bytes, owner: tuple[str, str, str]) -> Iterator[BillComponent]:
    """Yield the libraries in a CycloneDX document, without its owner.

    Raises ValueError for other documents.
    """
    try:
        document = json.loads(data)
        if document.get("bomFormat") != "CycloneDX":
            raise ValueError("it is not a CycloneDX document")
        rows = list(document.get("components") or ())
        for row in rows:  # grows below: components are nested
            rows += row.get("components") or ()
            if not row.get("purl"):
                continue
            purl = PackageURL.from_string(str(row["purl"]))
            if purl.type not in set(PackageType) or not purl.version:
                continue
            name = canonicalize_name(purl.name) if purl.type == PackageType.PYPI else plain(purl.name)
            component = BillComponent(
                kind=PackageType(purl.type),
                name=name,
                version=plain(purl.version),
                namespace=plain(purl.namespace or ""),
                licenses=(licenses := _document_licenses(row)),
                why="" if licenses else "the SBOM in the wheel names no license",
                qualifiers=tuple(
                    sorted((plain(key), plain(value)) for key, value in purl.qualifiers.items())
                ),
                within=(owner,),
            )
            if component.key != owner:
                yield component
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from error


def _document_licenses(row: dict[str, Any]) -> tuple[ComponentLicense, ...]:
    texts = []
    for entry in row.get("licenses") or ():
        license_fields: dict[str, Any] = entry.get("license") or {}
        texts.append(
            str(entry.get("expression") or license_fields.get("id") or license_fields.get("name") or "")
        )
    return unique([read_license(text) for text in texts])


def _record_licenses(record: dict[str, Any]) -> LicenseAndSource:
    licenses = unique([read_license(str(record.get("license") or ""))])
    return licenses, "" if licenses else NO_FIELD


def conda_qualifiers(url: str, subdir: str, build: str) -> tuple[tuple[str, str], ...]:
    """Return the package URL qualifiers of a conda package. `channel` is the path on the channel's host."""
    directory, _, filename = url.partition("://")[2].partition("/")[2].rpartition("/")
    channel = directory.removesuffix(subdir).strip("/")
    kind = "tar.bz2" if filename.endswith(".tar.bz2") else "conda" if filename.endswith(".conda") else ""
    pairs = (("build", build), ("channel", channel), ("subdir", subdir), ("type", kind))
    return tuple((key, value) for key, value in pairs if value)


# --- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _DistributionRecord:
    """A package from its record. `owned` are METADATA files that it installed."""

    component: BillComponent
    owned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _EmbeddedSbom:
    """The SBOM in a wheel, whose package is not known yet."""

    data: bytes


_Fact = _DistributionRecord | LicenseAndSource | _EmbeddedSbom | str


class LayerStack:
    """The packages visible in stacked layers. Add the lowest layer first."""

    def __init__(self) -> None:
        self._facts: dict[str, _Fact] = {}  # by path; a str is the text of a file
        self._links: dict[str, str] = {}
        self.faults: list[str] = []

    def add(self, chunks: Iterator[bytes]) -> None:
        """Add a layer, given as chunks of its tar. Raises CorruptDataError."""
        stream = TarStream(chunks)
        facts: dict[str, _Fact] = {}
        links: dict[str, str] = {}
        files: dict[str, _Fact] = {}  # also those of a package cache: an environment may hard-link them

        def drop(path: str) -> None:
            facts.pop(path, None)
            links.pop(path, None)
            files.pop(path, None)

        for entry in entries(stream):
            path = readable_path(entry.path)
            directory, _, name = path.rpartition("/")
            if entry.kind == HIDDEN and name == OPAQUE:
                self._remove(directory, itself=False)
            elif entry.kind == HIDDEN:
                self._remove(posixpath.join(directory, name[len(WHITEOUT) :]), itself=True)
            elif entry.kind == REMOVED:
                for member in [
                    member for member in (*files, *links) if member == path or member.startswith(f"{path}/")
                ]:
                    drop(member)
            elif entry.kind != DIRECTORY and (_has_license(path) or path.endswith(_METADATA)):
                drop(path)
                same = readable_path("/".join(entry.target))
                if entry.kind == SYMLINK:
                    target = readable_path(entry.linkname)
                    links[path] = posixpath.normpath(posixpath.join("/", directory, target))[1:]
                elif entry.kind == FILE:
                    if entry.size > LARGEST:
                        raise CorruptDataError(f"{path[:200]} has {entry.size} bytes, the limit is {LARGEST}")
                    files[path] = _read(path, entry.read(entry.size))
                elif same in files:
                    files[path] = files[same]
                if _has_license(path) and path in files:
                    facts[path] = files[path]
        stream.drain()
        for path in (*facts, *links):
            self._remove(path, itself=True)
        self._facts |= facts
        self._links |= links

    def _remove(self, path: str, *, itself: bool) -> None:
        prefix = f"{path}/" if path else ""
        for rows in (self._facts, self._links):
            for key in [key for key in rows if key.startswith(prefix) or (itself and key == path)]:
                del rows[key]

    def components(self) -> tuple[BillComponent, ...]:
        """Return every installed package once."""
        records = [fact for fact in self._facts.values() if isinstance(fact, _DistributionRecord)]
        owned = {path for record in records for path in record.owned}
        by_key = {component.key: component for component in self._debian()}
        for path, fact in sorted(self._facts.items()):
            if isinstance(fact, _DistributionRecord) and path not in owned:
                by_key.setdefault(fact.component.key, fact.component)
        self.faults = []
        for path, fact in sorted(self._facts.items()):
            owner = self._facts.get(f"{path.rpartition('/sboms/')[0]}/METADATA")
            if isinstance(fact, _EmbeddedSbom) and isinstance(owner, _DistributionRecord):
                try:
                    merge_carried(by_key, list(_carried(fact.data, owner.component.key)))
                except ValueError as error:
                    self.faults.append(f"{path[:200]} cannot be read: {error}")
        return sorted_components(by_key)

    def _debian(self) -> Iterator[BillComponent]:
        status, release = self._facts.get(_STATUS, ""), self._facts.get(_RELEASE, "")
        if not isinstance(status, str) or not isinstance(release, str):
            return
        rows = (row.partition("=") for row in release.splitlines())
        says = {key: plain(value).strip("\"' ") for key, _, value in rows}
        distribution = (says.get("ID", "debian"), says.get("VERSION_ID", ""))
        for stanza in parse_stanzas(status):
            if stanza.get("Status", "").split()[-1:] != ["installed"]:
                continue
            name, version = plain(stanza.get("Package", "")), plain(stanza.get("Version", ""))
            if not name or not version:
                raise StoreError(
                    "package-record-invalid", f"{_STATUS} has a package without name or version", hint=_HINT
                )
            source, _, of = stanza.get("Source", name).partition(" ")
            licenses, reason = self._copyright(name)
            yield replace(
                debian_component(name, version, stanza.get("Architecture", ""), distribution),
                source=(plain(source), plain(of.strip("()")) or version),
                licenses=licenses,
                why=reason,
            )

    def _copyright(self, package: str) -> LicenseAndSource:
        path = f"{_DOC}{package}/copyright"
        for _ in range(8):  # links to links; the limit ends cycles
            fact = self._facts.get(path)
            if fact is not None and not isinstance(fact, str | _DistributionRecord | _EmbeddedSbom):
                return fact
            directory = path.rpartition("/")[0]
            if path in self._links:
                path = self._links[path]
            elif directory in self._links:
                path = f"{self._links[directory]}/copyright"
            else:
                break
        return (), "the image has no copyright file for it"


def _has_license(path: str) -> bool:
    if path.startswith(_DOC):
        return bool(_COPYRIGHT.fullmatch(path))
    if path.endswith(_METADATA):
        return bool(_DIST_INFO.fullmatch(path))
    if _SBOM.search(path):
        return bool(_DIST_INFO.fullmatch(f"{path.rpartition('/sboms/')[0]}/METADATA"))
    return path in (_STATUS, _RELEASE) or bool(path.endswith(".json") and _CONDA_META.fullmatch(path))


def _read(path: str, data: bytes) -> _Fact:
    if path.startswith(_DOC):
        return copyright_licenses(data.decode(errors="replace"))
    if _SBOM.search(path):
        return _EmbeddedSbom(data)
    if path.endswith("/METADATA"):
        return _DistributionRecord(component=_distribution_component(path, data))
    if match := _CONDA_META.fullmatch(path):
        return _conda_record(path, match[1], data)
    return data.decode(errors="replace")


def _distribution_component(path: str, data: bytes) -> BillComponent:
    raw, _ = parse_email(data)
    name, _, version = path.split("/")[-2].removesuffix(".dist-info").partition("-")
    licenses, reason = metadata_licenses(data)
    return BillComponent(
        kind=PackageType.PYPI,
        name=canonicalize_name(plain(raw.get("name") or name)) or "unnamed",
        version=plain(raw.get("version") or version),
        licenses=licenses,
        why=reason,
    )


def _conda_record(path: str, prefix: str, data: bytes) -> _DistributionRecord:
    try:
        record = json.loads(data)
        name, version, build = (plain(str(record[key])) for key in ("name", "version", "build"))
        if not name:
            raise ValueError("its name is empty")
        files = [f"{prefix}{file}" for file in record.get("files") or () if str(file).endswith("METADATA")]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(
            "package-record-invalid", f"{path} is not a conda package record: {error}", hint=_HINT
        ) from error
    licenses, reason = _record_licenses(record)
    component = BillComponent(
        kind=PackageType.CONDA,
        name=name,
        version=version,
        sha256=sha256 if _SHA256.fullmatch(sha256 := str(record.get("sha256"))) else "",
        licenses=licenses,
        why=reason,
        qualifiers=conda_qualifiers(
            plain(str(record.get("url", ""))), plain(str(record.get("subdir", ""))), build
        ),
    )
    return _DistributionRecord(component=component, owned=tuple(files))


def debian_component(
    name: str, version: str, architecture: str, distribution: tuple[str, str]
) -> BillComponent:
    """Return a package of a distribution, such as `("debian", "12")`. The release may be empty."""
    vendor, release = distribution
    pairs = (("arch", architecture), ("distro", release and f"{vendor}-{release}"))
    return BillComponent(
        kind=PackageType.DEB,
        name=name,
        version=version,
        namespace=vendor,
        qualifiers=tuple((key, value) for key, value in pairs if value),
        release=release,
    )


# --- The bill of a lock and the lock of its base. Pure


NOT_AVAILABLE = "the package is not available"


def lock_bill(
    lock: Lock,
    base: BaseSpec,
    base_lock: BaseLock | None,
    licenses: Mapping[str, LicenseAndSource],
    carried: Iterable[BillComponent] = (),
) -> BillOfMaterials:
    """Return the bill of a target. `licenses` are by sha256, `carried` are libraries inside packages.

    Without `base_lock`, the base is one component: an image that is pulled by digest.
    """
    rows = [
        package_component(package, licenses.get(package.sha256, ((), NOT_AVAILABLE)))
        for package in lock.packages
    ]
    if base_lock:
        rows += debian_components(base_lock)
    else:
        rows.append(_pulled(base.image))
    decided = f"{lock_digest(lock)}\n{base_digest(base, base_lock)}"
    components = {component.key: component for component in rows}
    merge_carried(components, carried)
    return BillOfMaterials(
        name=lock.target,
        digest=f"sha256:{hashlib.sha256(decided.encode()).hexdigest()}",
        created=base_lock.source_date_epoch if base_lock else None,
        components=sorted_components(components),
    )


def base_digest(base: BaseSpec, lock: BaseLock | None) -> str:
    """Return `sha256:...` of the base's lock, or of the pulled image."""
    if lock is None:
        return base.image.partition("@")[2]
    return f"sha256:{hashlib.sha256(format_base_lock(lock).encode()).hexdigest()}"


def package_component(package: LockedPackage, known: LicenseAndSource) -> BillComponent:
    licenses, reason = known
    wheel = isinstance(package, LockedWheel)
    pairs = (
        (("file_name", package.filename),)
        if isinstance(package, LockedWheel)
        else conda_qualifiers(package.url, package.subdir, package.build)
    )
    return BillComponent(
        kind=PackageType.PYPI if wheel else PackageType.CONDA,
        name=package.name,
        version=package.version,
        sha256=package.sha256,
        licenses=licenses,
        why=reason,
        qualifiers=pairs,
    )


def debian_components(lock: BaseLock) -> list[BillComponent]:
    # base-files is in every base, and its version begins with the Debian release.
    version = next((package.version for package in lock.packages if package.name == "base-files"), "")
    distribution = ("debian", version.partition(".")[0].partition("+")[0])
    return [
        replace(
            debian_component(package.name, package.version, package.architecture, distribution),
            sha256=package.sha256,
            why=NOT_AVAILABLE,
        )
        for package in lock.packages
    ]


def _pulled(image: str) -> BillComponent:
    repo, _, digest = image.partition("@")
    host, _, path = repo.partition("/")
    repository = f"{host}/{path.partition(':')[0]}"
    return BillComponent(
        kind=PackageType.OCI,
        name=repository.rpartition("/")[2],
        version=digest,
        sha256=digest.removeprefix("sha256:"),
        why="its packages are in the SBOM of its image",
        qualifiers=(("repository_url", repository),),
    )


def with_image_licenses(bill: BillOfMaterials, seen: Iterable[BillComponent]) -> BillOfMaterials:
    """Add the licenses and sources that an image has for the same packages."""
    by_key = {component.key: component for component in seen}
    return replace(
        bill,
        components=tuple(
            replace(
                component,
                licenses=component.licenses or known.licenses,
                why="" if component.licenses else known.why,
                source=known.source,
            )
            if (known := by_key.get(component.key))
            else component
            for component in bill.components
        ),
    )


def components_without_license(bill: BillOfMaterials) -> bool:
    """Return whether an image may have licenses that the bill lacks."""
    return any(component.why == NOT_AVAILABLE for component in bill.components)


def with_hashes(seen: tuple[BillComponent, ...], locked: BillOfMaterials) -> tuple[BillComponent, ...]:
    """Add the hashes of the lock to the packages that were read from its image."""
    by_key = {component.key: component for component in locked.components}
    return tuple(
        replace(
            component,
            sha256=component.sha256 or locked_component.sha256,
            qualifiers=locked_component.qualifiers,
        )
        if (locked_component := by_key.get(component.key))
        else component
        for component in seen
    )
