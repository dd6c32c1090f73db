"""Which packages of an environment PyPI does not have, and the rows of `index` that take them from elsewhere.

Pure. The address of an index is a setting of the person's, never a recipe's: where the settings do not have
it, the two lines to write are told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.requirements import Requirement

from imagefactory.gpu import knowledge
from imagefactory.recipes.values import canonical, is_source
from imagefactory.extras.importers.spec import Wish


@dataclass(slots=True, kw_only=True)
class IndexRows:
    """`rows` are a recipe's `index`, package and name. `missing` are those that the settings do not have: the
    package, and what to write. `notes` are what else is known of where packages lie."""

    rows: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def index_rows(wish: Wish, known: Mapping[str, str]) -> IndexRows:
    """Rows for the packages from PyPI in `wish`. `known` are the settings' indexes, by name."""
    found = IndexRows()
    names = {url.rstrip("/"): name for name, url in known.items()}
    asked = {}
    for text in wish.pip:
        if text.startswith("./") or is_source(text):
            continue
        requirement = Requirement(text)
        asked[canonical(requirement.name)] = str(requirement.specifier)
    torch = _tag_of_torch(wish, asked)
    for package, bounds in asked.items():
        tag = _tag(wish, package) or torch
        row = knowledge.elsewhere(package, bounds, tag)
        if row is None or (row.tagged and not torch):
            continue
        name, url = row.with_tag(torch if row.tagged else tag)
        if not row.index:
            found.notes.append(
                f"{package}{bounds}: PyPI may have no wheel of it ({url} says where wheels are)"
            )
        elif own := names.get(url.rstrip("/")):
            found.rows[package] = own
        else:
            found.missing[package] = f'write below [indexes] in imagefactory.toml: {name} = "{url}"'
    return found


def _tag_of_torch(wish: Wish, asked: Mapping[str, str]) -> str:
    """The build tag of torch that PyPI does not have; what is released beside it follows."""
    tag = _tag(wish, "torch")
    if "torch" not in asked or not tag.startswith("cu"):
        return ""
    pinned = re.fullmatch(r"==([0-9.]+?)(\.\*)?", asked["torch"])
    offered = (
        {wheel.cuda.replace(".", "") for wheel in knowledge.offered("torch", pinned[1])} if pinned else set()
    )
    return "" if tag.removeprefix("cu") in offered else tag


def _tag(wish: Wish, package: str) -> str:
    """The tag of a package's build, by its version or by an index that the file names."""
    if tag := wish.builds.get(package, ""):
        return tag
    found = (re.search(r"/(cu[0-9]{2,3})/?$", address) for address in wish.indexes)
    return next((one[1] for one in found if one), "")
