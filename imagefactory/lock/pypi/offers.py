"""The files in a package index, and the ones that a lock uses."""

from __future__ import annotations

import hashlib
import io
import re
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from imagefactory.errors import DownloadError, LockError, redact
from imagefactory.fs import replacing
from imagefactory.http import (
    HttpError,
    HttpSession,
    RejectedError,
    Response,
    WebAccess,
    arriving,
    local_path,
    read_some,
)
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.no_wheel import working_versions
from imagefactory.lock.pypi.requirements import digest, fitting_tags, from_indexes
from imagefactory.model import Lock, LockedWheel


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexWheel:
    """A file in the index for a pin."""

    filename: str
    url: str
    sha256: str
    size: int | None


def reusable_wheels(previous: Lock | None, empty: Lock, update: tuple[str, ...]) -> dict[str, LockedWheel]:
    """Return the files of the previous lock that may stay, by package."""
    if previous is None or (previous.python, previous.platform) != (empty.python, empty.platform):
        return {}
    return {wheel.name: wheel for wheel in previous.wheels if wheel.name not in update}


def parse_pylock(text: str, path: Path, target: str) -> dict[str, tuple[IndexWheel, ...]]:
    """Return the files of a pylock.toml (PEP 751) that uv wrote at `path`."""
    offers: dict[str, tuple[IndexWheel, ...]] = {}
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
            wheels.append(IndexWheel(filename=filename, url=url, sha256=sha256, size=wheel.get("size")))
        offers[name] = tuple(wheels)
    return offers


def best_offer(offers: Iterable[IndexWheel], lock: Lock) -> tuple[LockedWheel, IndexWheel] | None:
    """Return the wheel that an installer would use: the most specific tag, then the highest build number."""
    rank = {tag: position for position, tag in enumerate(fitting_tags(lock.python, lock.platform))}
    ranked: list[tuple[int, tuple[int, str], str, LockedWheel, IndexWheel]] = []
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
    *_, wheel, offer = max(ranked, key=lambda row: row[:3])
    return wheel, offer


def variant_of(filename: str) -> str:
    """Return the label of a variant wheel (drafts PEP 817 and 825), empty for other files.

    Variants differ by the machine, such as its GPU, and a recipe cannot choose one. They are never locked.
    """
    parts = filename.removesuffix(".whl").split("-")
    built = len(parts) > 2 and parts[2][:1].isdigit()  # a build number
    return parts[-1] if filename.endswith(".whl") and len(parts) == 6 + built else ""


def choose(
    offers: Mapping[str, tuple[IndexWheel, ...]],
    empty: Lock,
    reusable: Mapping[str, LockedWheel],
    there: Callable[[str], tuple[IndexFile, ...]],
) -> tuple[LockedWheel, ...]:
    """Return a wheel for each package, sorted by name. New ones have no size yet.

    `there` returns the files of a project. Raises LockError for a package without a fitting wheel, or
    without a hash.
    """
    wheels = []
    for name, offered in sorted(offers.items()):
        best = best_offer(offered, empty)
        if best is None and (variants := [file.filename for file in offered if variant_of(file.filename)]):
            raise LockError(
                "wheel-variant",
                f"{empty.target}: '{name}' has only variant wheels for this Python, such as {variants[0]}",
                hint="use a version or an index with plain wheels: a recipe cannot choose a variant",
            )
        if best is None:
            other = working_versions(name, there(name), empty)
            raise LockError(
                "wheel-not-found",
                f"{empty.target}: '{name}' has no wheel for Python {empty.python} on {empty.platform}",
                hint=f"images contain only wheels, and {other}",
            )
        wheel, offer = best
        old = reusable.get(name)
        # The file locked before stays while it is offered, even if a better one came after it.
        if old and old.version == wheel.version and any(file.sha256 == old.sha256 for file in offered):
            wheels.append(old)
            continue
        if not offer.sha256:
            origin = from_indexes(empty.origins).get(name)
            location = f"the index '{origin}'" if origin else "the index"
            raise LockError(
                "hash-not-published",
                f"{empty.target}: {location} has no sha256 for {offer.filename}",
                hint=f"use an index that has one (setting '{'indexes' if origin else 'index'}' in "
                "imagefactory.toml)",
            )
        wheels.append(wheel)
    return tuple(wheels)


def address_of(wheel: LockedWheel, offers: Iterable[IndexWheel], lock: Lock) -> str:
    """Return the URL of the locked file among `offers`, empty if it is missing."""
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
                    hint="do not use this file; ask the administrator of the index why it changed",
                )
            return offer.url  # an index without hashes: the download is checked against the lock
    return ""


LARGEST = 4 << 30  # bytes of a source distribution


def choose_sdist(requirement: Requirement, files: Iterable[IndexFile]) -> tuple[IndexFile, Version]:
    """Return the newest matching source distribution. Raises LockError if the index has none."""
    sdists: dict[Version, IndexFile] = {}
    for file in files:
        try:
            _, version = parse_sdist_filename(file.filename)
        except InvalidSdistFilename:
            continue
        if not file.yanked and file.sha256:
            sdists.setdefault(version, file)
    if not (fitting := list(requirement.specifier.filter(sdists))):
        raise LockError(
            "sdist-not-found",
            f"the index has no source distribution of {requirement}",
            hint="write another version, a directory, or git+https://HOST/REPOSITORY@COMMIT",
        )
    version = max(fitting)
    return sdists[version], version


def fetch_sdist(source: WebAccess, file: IndexFile, directory: Path) -> Path:
    """Return the file in `directory`, fetched unless it exists with its hash. Raises DownloadError."""
    path = directory / file.sha256[:2] / file.sha256 / file.filename
    if path.is_file() and digest(path) == file.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    web = HttpSession(source)
    try:
        with web.open(file.url) as response, replacing(path) as out:
            content, remaining = hashlib.sha256(), LARGEST
            for data in arriving(response.raw):
                remaining -= len(data)
                if remaining < 0:
                    raise DownloadError(
                        "sdist-too-large",
                        f"{file.filename} has more than {LARGEST:,} bytes",
                        hint="download it manually, and pass the file",
                    )
                content.update(data)
                out.write(data)
            if content.hexdigest() != file.sha256:
                raise DownloadError(
                    "hash-mismatch",
                    f"{file.filename} has the wrong hash: "
                    f"expected sha256 {file.sha256}, found {content.hexdigest()}",
                    hint="run the same command again later",
                )
    except HttpError as error:
        raise DownloadError(
            "download-failed",
            f"cannot download {file.filename}: {redact(str(error))}",
            hint="run the same command again later",
        ) from error
    finally:
        web.close()
    return path


_MAX_WHOLE_BYTES = 100_000_000  # bytes of a wheel to fetch whole if its server has no ranges
_WINDOW = 1 << 16  # bytes per request; a wheel's directory is at its end


def read_metadata(web: HttpSession, url: str) -> str:
    """Return METADATA of the wheel at `url`, from its own file (PEP 658) or from parts of the wheel.

    Raises HttpError, OSError, BadZipFile, KeyError.
    """
    if path := local_path(url):
        return _inside(io.BytesIO(path.read_bytes()))
    try:
        return web.request(f"{url}.metadata", _whole).decode("utf-8")
    except RejectedError:
        size = web.size(url)
    try:
        return _inside(io.BufferedReader(_RemoteFile(web, url, size), _WINDOW))
    except _NoRangesError:
        if size > _MAX_WHOLE_BYTES:
            raise
        return _inside(io.BytesIO(web.request(url, _whole)))


def _inside(wheel: Any) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(
            (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)), "METADATA"
        )
        return archive.read(name).decode("utf-8")


class _NoRangesError(RejectedError):
    """A server that cannot send parts of a file."""


def _whole(response: Response) -> bytes:
    return read_some(response.raw, _MAX_WHOLE_BYTES)


def _part(response: Response) -> bytes:
    if response.status_code != 206:
        raise _NoRangesError(f"{redact(response.url)}: the server cannot send a part of a file")
    return read_some(response.raw, _MAX_WHOLE_BYTES)


class _RemoteFile(io.RawIOBase):
    """A file on a server, read in parts."""

    def __init__(self, web: HttpSession, url: str, size: int) -> None:
        self._web, self._url, self._size, self._at = web, url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        end = min(self._at + len(into), self._size)
        if end <= self._at:
            return 0
        data = self._web.request(self._url, _part, headers={"Range": f"bytes={self._at}-{end - 1}"})
        into[: len(data)] = data
        self._at += len(data)
        return len(data)
