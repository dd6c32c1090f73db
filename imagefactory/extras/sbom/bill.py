"""The frozen values of a bill of materials."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum

from packageurl import PackageURL


class PackageType(StrEnum):
    """Where a component comes from, as package addresses (purl) say it."""

    DEB = "deb"
    PYPI = "pypi"
    CONDA = "conda"
    OCI = "oci"
    RPM = "rpm"
    APK = "apk"
    GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ComponentLicense:
    """`text` is an SPDX expression where `spdx` is true, else the name that the package itself gives."""

    text: str
    spdx: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BillComponent:
    """One package, or the base image that others stand on.

    `sha256` is of the package's own file (64 hex digits), empty where it is not known. No `licences` means
    that none is known, and `why` says why. `namespace` and `qualifiers` are those of its package address;
    `source` is (name, version) of the Debian source package, empty where not known, and `release` that of
    the distribution (`12`). `within` are the keys of the packages that carry a copy of it, as wheels carry
    libraries of a distribution.
    """

    kind: PackageType
    name: str
    version: str
    sha256: str = ""
    licences: tuple[ComponentLicense, ...] = ()
    why: str = ""
    namespace: str = ""
    qualifiers: tuple[tuple[str, str], ...] = ()
    source: tuple[str, str] = ("", "")
    release: str = ""
    within: tuple[tuple[str, str, str], ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """What the same package has in a lock and in an image."""
        return (self.kind, self.name, self.version)

    @property
    def purl(self) -> PackageURL:
        return PackageURL(
            self.kind, self.namespace or None, self.name, self.version, dict(self.qualifiers) or None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BillOfMaterials:
    """What `name` is made of, sorted. `digest` is that of the locks or of the image's manifest.

    `created` is in seconds since 1970, of the base or the image; None where nothing says.
    """

    name: str
    digest: str
    created: int | None
    components: tuple[BillComponent, ...]

    @property
    def serial(self) -> uuid.UUID:
        """The same content has the same number, whoever writes it."""
        told = [self.name, self.digest, str(self.created)]
        told += [
            repr([getattr(one, field.name) for field in fields(one) if field.name != "within" or one.within])
            for one in self.components
        ]
        return uuid.uuid5(uuid.NAMESPACE_OID, hashlib.sha256("\n".join(told).encode()).hexdigest())

    @property
    def moment(self) -> datetime:
        """`created` as a time; the beginning of 1970 where nothing says, as reproducible builds have it."""
        return datetime.fromtimestamp(self.created or 0, UTC)


def merge_carried(
    components: dict[tuple[str, str, str], BillComponent], carried: Iterable[BillComponent]
) -> None:
    """Adds what packages carry, each once; what is installed too only says who carries it."""
    for one in carried:
        own = components.setdefault(one.key, one)
        if own is not one:
            components[one.key] = replace(own, within=tuple(sorted({*own.within, *one.within})))


def sorted_components(components: dict[tuple[str, str, str], BillComponent]) -> tuple[BillComponent, ...]:
    return tuple(components[key] for key in sorted(components))


@dataclass(frozen=True, slots=True, kw_only=True)
class LicenseCheck:
    """`counted` are the licences, the packages of each and whether it is allowed, the most frequent first.

    `refused` are packages with those of their licences that are not allowed, `unknown` those without any,
    which may be `accepted`.
    """

    counted: tuple[tuple[ComponentLicense, int, bool], ...]
    refused: tuple[tuple[BillComponent, tuple[ComponentLicense, ...]], ...]
    unknown: tuple[BillComponent, ...]
    accepted: bool

    @property
    def holds(self) -> bool:
        return not self.refused and (self.accepted or not self.unknown)
