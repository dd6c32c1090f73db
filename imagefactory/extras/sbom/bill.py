"""The frozen values of a bill of materials."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from license_expression import ExpressionError, get_spdx_licensing
from packageurl import PackageURL
from packaging.metadata import parse_email

from imagefactory.lock.debian.archive import parse_stanzas


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


# --- Which licences a package says it has: wheels in METADATA, conda packages in their record, Debian's in
# a
# machine-readable copyright file. Nothing is guessed: what is no SPDX expression stays the name it was.
# Pure.


LICENSING = get_spdx_licensing()
NAME = 120  # characters; a field with more is a licence's text, which names none
NO_FIELD = "its record names no licence"
_PROSE = "its copyright file is prose"
_DEP5 = re.compile(r"https?://\S*/copyright-format/1\.0/?")
_GNU = re.compile(r"(L?GPL|AGPL|GFDL)-([0-9])(\.[0-9])?(\+?)")


def read_license(text: str) -> ComponentLicense | None:
    """A licence as a field says it; None for an empty field and for the text of one."""
    text = " ".join(plain(text).split())
    if not text or len(text) > NAME or text.upper() in ("UNKNOWN", "NONE", "NOASSERTION"):
        return None
    try:
        found = LICENSING.validate(text)
    except (ExpressionError, TypeError, AttributeError, IndexError, AssertionError):
        # What the library raises for brackets and words in no order.
        return ComponentLicense(text=text, spdx=False)
    if found.errors or not found.normalized_expression:
        return ComponentLicense(text=text, spdx=False)
    return ComponentLicense(text=str(found.normalized_expression), spdx=True)


def plain(text: str) -> str:
    """Without what a terminal would act on: who made a package chose these words."""
    return "".join(one if one.isprintable() else " " for one in text)


def unique(licences: Iterable[ComponentLicense | None]) -> tuple[ComponentLicense, ...]:
    return tuple(sorted({one for one in licences if one is not None}))


def metadata_licenses(metadata: bytes) -> tuple[tuple[ComponentLicense, ...], str]:
    """Of a distribution's METADATA: License-Expression, else License, else its classifiers; or why none."""
    raw, _ = parse_email(metadata)
    for field in (raw.get("license_expression"), raw.get("license")):
        if field and (named := read_license(field)):
            return (named,), ""
    classifiers = [
        one.split(" :: ")[1:] for one in raw.get("classifiers", ()) if one.startswith("License ::")
    ]
    names = [one[-1] for one in classifiers if one and one[-1] != "OSI Approved"]
    if found := unique(map(read_license, names)):
        return found, ""
    return (), "its METADATA has a licence's text, not its name" if raw.get("license") else NO_FIELD


def copyright_licenses(text: str) -> tuple[tuple[ComponentLicense, ...], str]:
    """Of a Debian copyright file (DEP-5): the licences of all its files; or why none.

    Source: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
    """
    stanzas = [{key.lower(): value for key, value in stanza.items()} for stanza in parse_stanzas(text)]
    if not stanzas or not _DEP5.fullmatch(stanzas[0].get("format", "")):
        return (), _PROSE
    named = [stanza["license"].split("\n")[0] for stanza in stanzas if "license" in stanza]
    found = unique(map(_debian_license, named))
    return found, "" if found else "its copyright file names no licence"


def _debian_license(text: str) -> ComponentLicense | None:
    """DEP-5 has its own short names; those of GNU and Expat it defines as SPDX does.

    `and` binds closer than `or`, unless a comma stands before; such ones stay as they are.
    """
    words = " ".join(text.split())
    parts = re.split(r" (and|or) ", words)
    if "," in words or "exception" in words:
        return read_license(words)
    mapped = " ".join(one.upper() if one in ("and", "or") else _spdx_name(one) for one in parts)
    found = read_license(mapped)
    return found if found and found.spdx else read_license(words)


def _spdx_name(name: str) -> str:
    if name == "Expat":
        return "MIT"
    found = _GNU.fullmatch(name)
    if not found:
        return name
    return f"{found[1]}-{found[2]}{found[3] or '.0'}-{'or-later' if found[4] else 'only'}"


# --- Which licences stand in a bill, and which packages are not allowed by a list. Pure


NO_LICENSE = "NOASSERTION"


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


def check_licenses(bill: BillOfMaterials, allowed: Collection[str]) -> LicenseCheck:
    """All licences of a package must be allowed, since it names them together.

    `allowed` are identifiers and names with `*` and `?`, in any case. Of an expression, one side of OR is
    enough, AND needs both, and `X WITH Y` is one licence. Packages that say none are accepted by the word
    NOASSERTION alone.
    """
    counts = Counter(licence for one in bill.components for licence in one.licences)
    fits = {licence: is_allowed(licence, allowed) for licence in counts}
    refused = (
        (one, tuple(licence for licence in one.licences if not fits[licence])) for one in bill.components
    )
    order = sorted(counts, key=lambda licence: (-counts[licence], licence))
    return LicenseCheck(
        counted=tuple((licence, counts[licence], fits[licence]) for licence in order),
        refused=tuple((one, wrong) for one, wrong in refused if wrong),
        unknown=tuple(one for one in bill.components if not one.licences),
        accepted=NO_LICENSE in (one.upper() for one in allowed),
    )


def is_allowed(licence: ComponentLicense, allowed: Collection[str]) -> bool:
    patterns = [one.lower() for one in allowed]

    def named(text: str) -> bool:
        return any(fnmatchcase(text.lower(), pattern) for pattern in patterns)

    def holds(node: Any) -> bool:
        if isinstance(node, LICENSING.AND):
            return all(map(holds, node.args))
        if isinstance(node, LICENSING.OR):
            return any(map(holds, node.args))
        return named(node.render())

    return holds(LICENSING.parse(licence.text)) if licence.spdx else named(licence.text)
