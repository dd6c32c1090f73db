"""Where packages lie that PyPI does not have, or has in other releases alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from imagefactory.gpu.knowledge.tables import read_table

_NEWEST = "9999"
"""Stands for a release that is yet to come: of a range without an end it is the one that is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElsewhereRow:
    """Where releases of a package lie that PyPI has no wheels of.

    `index` is what its index may be called in the settings, empty for a page of links to wheels. `versions`
    are those releases, empty for all. `tagged` says that it is so only of builds with a tag (`cu118`), which
    stands for `{tag}` in `index` and `url`.
    """

    package: str
    index: str
    url: str
    versions: str
    tagged: bool
    source: str

    def with_tag(self, tag: str) -> tuple[str, str]:
        """The name and the address of the index for a build tag."""
        return self.index.replace("{tag}", tag), self.url.replace("{tag}", tag)


@cache
def _rows() -> dict[str, ElsewhereRow]:
    table = read_table("indexes")
    urls = {row["name"]: row["url"] for row in table["index"]}
    rows = [(row, row["index"], urls[row["index"]]) for row in table["package"]]
    rows += [(row, "", row["url"]) for row in table["page"]]
    return {
        name: ElsewhereRow(
            package=name,
            index=index,
            url=url,
            versions=row["versions"],
            tagged=row.get("tagged", False),
            source=row["source"],
        )
        for row, index, url in rows
        for name in row["names"]
    }


def elsewhere(package: str, bounds: str, tag: str = "") -> ElsewhereRow | None:
    """Where a package lies whose releases within `bounds` (PEP 440) have no wheels on PyPI.

    None where PyPI may have one. `tag` is the build tag that is asked for.
    """
    row = _rows().get(package)
    if row is None or (row.tagged and not tag) or not _covers(row.versions, bounds):
        return None
    return None if "{tag}" in row.url and not tag else row


def known_index(address: str) -> bool:
    """Whether an address is that of an index of the table."""
    patterns = (
        re.escape(row["url"].rstrip("/")).replace(r"\{tag\}", "[a-z0-9]+")
        for row in read_table("indexes")["index"]
    )
    return any(re.fullmatch(rf"{one}(/simple)?/?", address) for one in patterns)


def _covers(versions: str, bounds: str) -> bool:
    """Whether of the releases within `bounds` those that one would get are all among `versions`."""
    try:
        there, wanted = SpecifierSet(versions, prereleases=True), SpecifierSet(bounds, prereleases=True)
    except InvalidSpecifier:
        return False
    if wanted.contains(_NEWEST):
        return there.contains(_NEWEST)
    named = {re.sub(r"\.\*$", "", one.version) for one in (*there, *wanted)}
    allowed = [one for one in (*named, "0") if wanted.contains(Version(one))]
    some = [one for one in allowed if one != "0"] or allowed
    return bool(some) and all(there.contains(one) for one in some)
