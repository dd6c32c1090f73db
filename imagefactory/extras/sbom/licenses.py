"""Which licenses a package says it has, and which are not allowed by a list."""

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


NO_LICENSE = "NOASSERTION"


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
