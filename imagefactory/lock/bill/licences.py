"""Which licences a package says it has: wheels in METADATA, conda packages in their record, Debian's in a
machine-readable copyright file. Nothing is guessed: what is no SPDX expression stays the name it was. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from license_expression import ExpressionError, get_spdx_licensing
from packaging.metadata import parse_email

from imagefactory.extras.sbom.bill import Licence
from imagefactory.lock.debian.sources import parse_stanzas

LICENSING = get_spdx_licensing()
NAME = 120  # characters; a field with more is a licence's text, which names none
NO_FIELD = "its record names no licence"
_PROSE = "its copyright file is prose"
_DEP5 = re.compile(r"https?://\S*/copyright-format/1\.0/?")
_GNU = re.compile(r"(L?GPL|AGPL|GFDL)-([0-9])(\.[0-9])?(\+?)")


def read_licence(text: str) -> Licence | None:
    """A licence as a field says it; None for an empty field and for the text of one."""
    text = " ".join(plain(text).split())
    if not text or len(text) > NAME or text.upper() in ("UNKNOWN", "NONE", "NOASSERTION"):
        return None
    try:
        found = LICENSING.validate(text)
    except (ExpressionError, TypeError, AttributeError, IndexError, AssertionError):
        # What the library raises for brackets and words in no order.
        return Licence(text=text, spdx=False)
    if found.errors or not found.normalized_expression:
        return Licence(text=text, spdx=False)
    return Licence(text=str(found.normalized_expression), spdx=True)


def plain(text: str) -> str:
    """Without what a terminal would act on: who made a package chose these words."""
    return "".join(one if one.isprintable() else " " for one in text)


def unique(licences: Iterable[Licence | None]) -> tuple[Licence, ...]:
    return tuple(sorted({one for one in licences if one is not None}))


def metadata_licences(metadata: bytes) -> tuple[tuple[Licence, ...], str]:
    """Of a distribution's METADATA: License-Expression, else License, else its classifiers; or why none."""
    raw, _ = parse_email(metadata)
    for field in (raw.get("license_expression"), raw.get("license")):
        if field and (named := read_licence(field)):
            return (named,), ""
    classifiers = [
        one.split(" :: ")[1:] for one in raw.get("classifiers", ()) if one.startswith("License ::")
    ]
    names = [one[-1] for one in classifiers if one and one[-1] != "OSI Approved"]
    if found := unique(map(read_licence, names)):
        return found, ""
    return (), "its METADATA has a licence's text, not its name" if raw.get("license") else NO_FIELD


def copyright_licences(text: str) -> tuple[tuple[Licence, ...], str]:
    """Of a Debian copyright file (DEP-5): the licences of all its files; or why none.

    Source: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
    """
    stanzas = [{key.lower(): value for key, value in stanza.items()} for stanza in parse_stanzas(text)]
    if not stanzas or not _DEP5.fullmatch(stanzas[0].get("format", "")):
        return (), _PROSE
    named = [stanza["license"].split("\n")[0] for stanza in stanzas if "license" in stanza]
    found = unique(map(_debian_licence, named))
    return found, "" if found else "its copyright file names no licence"


def _debian_licence(text: str) -> Licence | None:
    """DEP-5 has its own short names; those of GNU and Expat it defines as SPDX does.

    `and` binds closer than `or`, unless a comma stands before; such ones stay as they are.
    """
    words = " ".join(text.split())
    parts = re.split(r" (and|or) ", words)
    if "," in words or "exception" in words:
        return read_licence(words)
    mapped = " ".join(one.upper() if one in ("and", "or") else _spdx_name(one) for one in parts)
    found = read_licence(mapped)
    return found if found and found.spdx else read_licence(words)


def _spdx_name(name: str) -> str:
    if name == "Expat":
        return "MIT"
    found = _GNU.fullmatch(name)
    if not found:
        return name
    return f"{found[1]}-{found[2]}{found[3] or '.0'}-{'or-later' if found[4] else 'only'}"
