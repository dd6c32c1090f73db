"""The files that a package index offers, and which of them a lock takes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion

from imagefactory.errors import LockError
from imagefactory.lock.pypi.origins import from_indexes
from imagefactory.lock.pypi.project_page import IndexFile
from imagefactory.lock.pypi.tags import fitting_tags
from imagefactory.lock.pypi.no_wheel import what_works
from imagefactory.model import Lock, LockedWheel


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelOffer:
    """A file that the index offers for a pin."""

    filename: str
    url: str
    sha256: str
    size: int | None


def kept_wheels(previous: Lock | None, empty: Lock, update: tuple[str, ...]) -> dict[str, LockedWheel]:
    """The files of the previous lock that may stay as they are, by package."""
    if previous is None or (previous.python, previous.platform) != (empty.python, empty.platform):
        return {}
    return {wheel.name: wheel for wheel in previous.wheels if wheel.name not in update}


def parse_pylock(text: str, path: Path, target: str) -> dict[str, tuple[WheelOffer, ...]]:
    """The files of a pylock.toml (PEP 751) that uv wrote at `path`."""
    offers: dict[str, tuple[WheelOffer, ...]] = {}
    for package in tomllib.loads(text).get("packages", []):
        name = canonicalize_name(package["name"])
        if "version" not in package or "archive" in package or "vcs" in package or "directory" in package:
            raise LockError(
                "package-not-from-index",
                f"{target}: '{name}' does not come from a package index",
                hint=f"write '{name}' with a version, not with an address",
            )
        wheels = []
        for wheel in package.get("wheels", []):
            url = wheel.get("url") or (path.parent / wheel["path"]).as_uri()
            filename = wheel.get("name") or unquote(urlsplit(url).path.rpartition("/")[2])
            sha256 = wheel.get("hashes", {}).get("sha256", "").lower()
            wheels.append(WheelOffer(filename=filename, url=url, sha256=sha256, size=wheel.get("size")))
        offers[name] = tuple(wheels)
    return offers


def best_offer(offers: Iterable[WheelOffer], lock: Lock) -> tuple[LockedWheel, WheelOffer] | None:
    """The wheel an installer would take: the most specific tag, then the highest build number (PEP 427)."""
    rank = {tag: place for place, tag in enumerate(fitting_tags(lock.python, lock.platform))}
    ranked: list[tuple[int, tuple[int, str], str, LockedWheel, WheelOffer]] = []
    for offer in offers:
        try:
            name, version, build, offered = parse_wheel_filename(offer.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        places = [rank[tag] for tag in offered if tag in rank]
        if places:
            number = (build[0], build[1]) if build else (-1, "")
            wheel = LockedWheel(
                name=name, version=str(version), filename=offer.filename, sha256=offer.sha256, size=0
            )
            ranked.append((-min(places), number, offer.filename, wheel, offer))
    if not ranked:
        return None
    *_, wheel, offer = max(ranked, key=lambda one: one[:3])
    return wheel, offer


def choose(
    offers: Mapping[str, tuple[WheelOffer, ...]],
    empty: Lock,
    kept: Mapping[str, LockedWheel],
    there: Callable[[str], tuple[IndexFile, ...]],
) -> tuple[LockedWheel, ...]:
    """A wheel a package, sorted by name, without the size of those that are not `kept`.

    `there` gives the files of a project. Raises LockError for a package without a fitting wheel, or without
    its hash.
    """
    wheels = []
    for name, offered in sorted(offers.items()):
        best = best_offer(offered, empty)
        if best is None:
            other = what_works(name, there(name), empty)
            raise LockError(
                "wheel-not-found",
                f"{empty.target}: '{name}' has no wheel for Python {empty.python} on {empty.platform}",
                hint=f"images contain only wheels, and {other}",
            )
        wheel, offer = best
        old = kept.get(name)
        # The file locked before stays while it is offered, even if a better one came after it.
        if old and old.version == wheel.version and any(one.sha256 == old.sha256 for one in offered):
            wheels.append(old)
            continue
        if not offer.sha256:
            origin = from_indexes(empty.origins).get(name)
            where = f"the index '{origin}'" if origin else "the index"
            raise LockError(
                "hash-not-published",
                f"{empty.target}: {where} has no sha256 for {offer.filename}",
                hint=f"use an index that has one (setting '{'indexes' if origin else 'index'}' in "
                "imagefactory.toml)",
            )
        wheels.append(wheel)
    return tuple(wheels)


def address_of(wheel: LockedWheel, offers: Iterable[WheelOffer], lock: Lock) -> str:
    """The URL of the locked file among `offers`, empty if it is not there."""
    for offer in offers:
        if offer.sha256 == wheel.sha256:
            return offer.url
    for offer in offers:
        if offer.filename == wheel.filename:
            if offer.sha256:
                raise LockError(
                    "index-file-changed",
                    f"{lock.target}: the index now has another file under the name {wheel.filename}: "
                    f"expected sha256 {wheel.sha256}, found {offer.sha256}",
                    hint="do not trust this file; ask the administrator of the index or the authors",
                )
            return offer.url  # an index that tells no hashes: the download is checked against the lock
    return ""
