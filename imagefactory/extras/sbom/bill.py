"""The types of a bill of materials."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum

from packageurl import PackageURL


class PackageType(StrEnum):
    """The type of a component in its package URL (purl)."""

    DEB = "deb"
    PYPI = "pypi"
    CONDA = "conda"
    OCI = "oci"
    RPM = "rpm"
    APK = "apk"
    CARGO = "cargo"
    GITHUB = "github"
    GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ComponentLicense:
    """A license: `text` is an SPDX expression if `spdx` is true, else the name in the package."""

    text: str
    spdx: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BillComponent:
    """One package, or the base image.

    `sha256` is the hash of the package file (64 hex digits), empty if unknown. If `licenses` is empty, `why`
    is the reason. `namespace` and `qualifiers` are parts of its package URL. `source` is the name and version
    of the Debian source package, empty if unknown, `release` the release of the distribution (`12`). `within`
    are the keys of packages that contain a copy of it, such as wheels with system libraries.
    """

    kind: PackageType
    name: str
    version: str
    sha256: str = ""
    licenses: tuple[ComponentLicense, ...] = ()
    why: str = ""
    namespace: str = ""
    qualifiers: tuple[tuple[str, str], ...] = ()
    source: tuple[str, str] = ("", "")
    release: str = ""
    within: tuple[tuple[str, str, str], ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of the package, equal in a lock and in an image."""
        return (self.kind, self.name, self.version)

    @property
    def purl(self) -> PackageURL:
        return PackageURL(
            self.kind, self.namespace or None, self.name, self.version, dict(self.qualifiers) or None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BillOfMaterials:
    """The sorted components of `name`. `digest` is that of the locks or of the image's manifest.

    `created` is the time of the base or the image in seconds since 1970, None if unknown.
    """

    name: str
    digest: str
    created: int | None
    components: tuple[BillComponent, ...]

    @property
    def serial(self) -> uuid.UUID:
        """The UUID of the content: equal content has an equal UUID."""
        texts = [self.name, self.digest, str(self.created)]
        texts += [
            repr(
                [
                    getattr(component, field.name)
                    for field in fields(component)
                    if field.name != "within" or component.within
                ]
            )
            for component in self.components
        ]
        return uuid.uuid5(uuid.NAMESPACE_OID, hashlib.sha256("\n".join(texts).encode()).hexdigest())

    @property
    def moment(self) -> datetime:
        """The time `created`, or 1970 if unknown, as in reproducible builds."""
        return datetime.fromtimestamp(self.created or 0, UTC)


def merge_carried(
    components: dict[tuple[str, str, str], BillComponent], carried: Iterable[BillComponent]
) -> None:
    """Add the libraries inside packages, without duplicates.

    If a library is installed, only note the packages.
    """
    for component in carried:
        merged_component = components.setdefault(component.key, component)
        if merged_component is not component:
            components[component.key] = replace(
                merged_component, within=tuple(sorted({*merged_component.within, *component.within}))
            )


def sorted_components(components: dict[tuple[str, str, str], BillComponent]) -> tuple[BillComponent, ...]:
    return tuple(components[key] for key in sorted(components))


@dataclass(frozen=True, slots=True, kw_only=True)
class LicenseCheck:
    """The result of a license check.

    `counted` are licenses, each with its number of packages and whether it is allowed.

    The most frequent license comes first. `refused` are packages with licenses that are not allowed.
    `unknown` are packages without a license, which may be `accepted`.
    """

    counted: tuple[tuple[ComponentLicense, int, bool], ...]
    refused: tuple[tuple[BillComponent, tuple[ComponentLicense, ...]], ...]
    unknown: tuple[BillComponent, ...]
    accepted: bool

    @property
    def holds(self) -> bool:
        return not self.refused and (self.accepted or not self.unknown)
