"""The licenses that a package declares, and the check against a list of allowed licenses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from license_expression import ExpressionError, get_spdx_licensing
from packaging.metadata import parse_email

from imagefactory.extras.sbom.bill import BillOfMaterials, ComponentLicense, LicenseCheck
from imagefactory.lock.debian.archive import parse_stanzas

LICENSING = get_spdx_licensing()


NAME = 120  # characters; a longer field is the text of a license, not its name


NO_FIELD = "its record names no license"


_PROSE = "its copyright file is prose"


_DEP5 = re.compile(r"https?://\S*/copyright-format/1\.0/?")


_GNU = re.compile(r"(L?GPL|AGPL|GFDL)-([0-9])(\.[0-9])?(\+?)")


def read_license(text: str) -> ComponentLicense | None:
    """Return the license in a field, None for an empty field and for a full license text."""
    text = " ".join(plain(text).split())
    if not text or len(text) > NAME or text.upper() in ("UNKNOWN", "NONE", "NOASSERTION"):
        return None
    try:
        info = LICENSING.validate(text)
    except (ExpressionError, TypeError, AttributeError, IndexError, AssertionError):
        # The library raises these for malformed expressions.
        return ComponentLicense(text=text, spdx=False)
    if info.errors or not info.normalized_expression:
        return ComponentLicense(text=text, spdx=False)
    return ComponentLicense(text=str(info.normalized_expression), spdx=True)


def plain(text: str) -> str:
    """Return the text without control characters, since packages are untrusted and terminals obey these
    characters.
    """
    return "".join(character if character.isprintable() else " " for character in text)


def unique(licenses: Iterable[ComponentLicense | None]) -> tuple[ComponentLicense, ...]:
    return tuple(sorted({license for license in licenses if license is not None}))


def metadata_licenses(metadata: bytes) -> tuple[tuple[ComponentLicense, ...], str]:
    """Return the licenses in METADATA, or why there are none.

    The order is License-Expression, License, classifiers.
    """
    raw, _ = parse_email(metadata)
    for field in (raw.get("license_expression"), raw.get("license")):
        if field and (named := read_license(field)):
            return (named,), ""
    classifiers = [
        text.split(" :: ")[1:] for text in raw.get("classifiers", ()) if text.startswith("License ::")
    ]
    names = [parts[-1] for parts in classifiers if parts and parts[-1] != "OSI Approved"]
    if licenses := unique(map(read_license, names)):
        return licenses, ""
    return (), "its METADATA has a license's text, not its name" if raw.get("license") else NO_FIELD


def copyright_licenses(text: str) -> tuple[tuple[ComponentLicense, ...], str]:
    """Return the licenses of all files in a Debian copyright file (DEP-5), or why there are none.

    Source: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
    """
    stanzas = [{key.lower(): value for key, value in stanza.items()} for stanza in parse_stanzas(text)]
    if not stanzas or not _DEP5.fullmatch(stanzas[0].get("format", "")):
        return (), _PROSE
    named = [stanza["license"].split("\n")[0] for stanza in stanzas if "license" in stanza]
    licenses = unique(map(_debian_license, named))
    return licenses, "" if licenses else "its copyright file names no license"


def _debian_license(text: str) -> ComponentLicense | None:
    """Translate a DEP-5 license to SPDX.

    Its short names differ from SPDX; GNU and Expat have the same meaning. `and` has priority over `or`,
    unless a comma precedes it; such expressions stay unchanged.
    """
    words = " ".join(text.split())
    parts = re.split(r" (and|or) ", words)
    if "," in words or "exception" in words:
        return read_license(words)
    mapped = " ".join(part.upper() if part in ("and", "or") else _spdx_name(part) for part in parts)
    license = read_license(mapped)
    return license if license and license.spdx else read_license(words)


def _spdx_name(name: str) -> str:
    if name == "Expat":
        return "MIT"
    match = _GNU.fullmatch(name)
    if not match:
        return name
    return f"{match[1]}-{match[2]}{match[3] or '.0'}-{'or-later' if match[4] else 'only'}"


NO_LICENSE = "NOASSERTION"


def check_licenses(bill: BillOfMaterials, allowed: Collection[str]) -> LicenseCheck:
    """Check that all licenses of every package are allowed.

    `allowed` are identifiers and names with `*` and `?`, in any case. In an expression, OR requires one side,
    AND requires both, and `X WITH Y` is one license. Only NOASSERTION accepts packages without a license.
    """
    counts = Counter(license for component in bill.components for license in component.licenses)
    fits = {license: is_allowed(license, allowed) for license in counts}
    refused = (
        (component, tuple(license for license in component.licenses if not fits[license]))
        for component in bill.components
    )
    order = sorted(counts, key=lambda license: (-counts[license], license))
    return LicenseCheck(
        counted=tuple((license, counts[license], fits[license]) for license in order),
        refused=tuple((component, wrong) for component, wrong in refused if wrong),
        unknown=tuple(component for component in bill.components if not component.licenses),
        accepted=NO_LICENSE in (name.upper() for name in allowed),
    )


def is_allowed(license: ComponentLicense, allowed: Collection[str]) -> bool:
    patterns = [name.lower() for name in allowed]

    def named(text: str) -> bool:
        return any(fnmatchcase(text.lower(), pattern) for pattern in patterns)

    def holds(node: Any) -> bool:
        if isinstance(node, LICENSING.AND):
            return all(map(holds, node.args))
        if isinstance(node, LICENSING.OR):
            return any(map(holds, node.args))
        return named(node.render())

    return holds(LICENSING.parse(license.text)) if license.spdx else named(license.text)
