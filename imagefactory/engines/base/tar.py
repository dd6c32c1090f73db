"""mmdebstrap's tar, rewritten on the fly as a base's layer: sorted, without what look.py leaves out, and with
every time at most the lock's.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from imagefactory.build.base.fetch import FetchedBase
from imagefactory.build.base.look import fixed_files, is_kept
from imagefactory.errors import BuildError
from imagefactory.lock.debian.sources import parse_stanzas
from imagefactory.model import BaseLock
from imagefactory.oci.tar_header import CappedInfo
from imagefactory.oci.tree import unpackable_parts

STATUS_LIMIT = 64 << 20
"""Bytes of dpkg's list of packages: 64,000 packages, as many as Debian has."""


class HashedLayer(io.RawIOBase):
    """Counts and hashes what goes through."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256, self.size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)
        return len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenLayer:
    """A layer tar just written, and the packages its dpkg calls installed (name, version, architecture)."""

    sha256: str
    size: int
    installed: frozenset[tuple[str, str, str]]


def write_layer(stream: IO[bytes], out: Path, fetched: FetchedBase) -> WrittenLayer:
    """Rewrite mmdebstrap's tar from `stream` as a base's layer.

    Sorted by path with parents first, names without `./`, numeric owners, times at most the lock's; one
    entry is in memory at a time. Raises BuildError for what no base may hold (device nodes outside /dev,
    extended attributes, names too long to unpack), tarfile.TarError for a stream that is no whole tar.
    """
    epoch, fixed = fetched.lock.source_date_epoch, fixed_files(fetched.base)
    name, last, written = fetched.base.name, "", set[str]()
    installed: set[tuple[str, str, str]] = set()
    with out.open("wb") as file:
        hashed = HashedLayer(file)
        with (
            tarfile.open(fileobj=stream, mode="r|", tarinfo=CappedInfo) as source,
            tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8") as layer,
        ):
            entries = heapq.merge(_made(source, fixed, epoch), _fixed(fixed, epoch), key=_order)
            for member, data in entries:
                if written and _order((member, None)) <= _order((tarfile.TarInfo(last), None)):
                    raise BuildError(
                        "base-tar-invalid", f"{name}: mmdebstrap's tar is out of order at {member.name}"
                    )
                if member.islnk() and member.linkname not in written:
                    raise BuildError(
                        "base-tar-invalid",
                        f"{name}: {member.name} is a hard link to {member.linkname}, which is missing",
                    )
                unpackable_parts(member.name)
                if member.name == "var/lib/dpkg/status" and data is not None:
                    if member.size > STATUS_LIMIT:
                        raise BuildError(
                            "base-tar-invalid", f"{name}: dpkg's status file has {member.size} bytes"
                        )
                    status = data.read()
                    installed, data = parse_status(status.decode()), io.BytesIO(status)
                layer.addfile(member, data)
                written.add(member.name)
                last = member.name
        while stream.read(1 << 16):  # padding behind the end of the archive
            pass
    return WrittenLayer(sha256=hashed.sha256.hexdigest(), size=hashed.size, installed=frozenset(installed))


def check_installed(installed: frozenset[tuple[str, str, str]], lock: BaseLock) -> None:
    """Raises BuildError unless exactly the locked packages were installed."""
    odd = installed ^ {(one.name, one.version, one.architecture) for one in lock.packages}
    if odd:
        raise BuildError(
            "base-not-as-locked",
            f"{lock.base}: the installed packages differ from the lock: "
            + ", ".join(" ".join(one) for one in sorted(odd)),
            hint=f"run 'imagefactory lock base:{lock.base} --update-all'",
        )


def parse_status(text: str) -> set[tuple[str, str, str]]:
    """Name, version and architecture of the packages that dpkg's status file calls installed."""
    return {
        (stanza["Package"], stanza["Version"], stanza["Architecture"])
        for stanza in parse_stanzas(text)
        if stanza.get("Status") == "install ok installed"
    }


def _order(entry: tuple[tarfile.TarInfo, IO[bytes] | None]) -> list[str]:
    return entry[0].name.split("/")


def _made(
    source: tarfile.TarFile, fixed: Mapping[str, bytes], epoch: int
) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """What mmdebstrap made and a base keeps, each with its content."""
    for member in source:
        path = member.name.removeprefix("./")
        if path in (".", "dev") or path in fixed or not is_kept(path, is_folder=member.isdir()):
            continue
        attributes = [key for key in member.pax_headers if "xattr" in key or "acl" in key]
        if attributes or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise BuildError(
                "base-tar-invalid",
                f"/{path}: {', '.join(attributes) or 'a special file'} in a base is not allowed",
            )
        entry = tarfile.TarInfo(path)
        entry.type, entry.mode, entry.size = member.type, member.mode, member.size
        entry.uid, entry.gid = member.uid, member.gid
        # a folder's time tells in which order mmdebstrap's version unpacked; a file's is its package's
        entry.mtime = epoch if member.isdir() else min(int(member.mtime), epoch)
        entry.linkname = member.linkname.removeprefix("./") if member.islnk() else member.linkname
        yield entry, source.extractfile(member) if member.isreg() else None


def _fixed(fixed: Mapping[str, bytes], epoch: int) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """The files that are the same everywhere, and an empty /dev."""
    for path, content in sorted({"dev": None, **fixed}.items(), key=lambda item: item[0].split("/")):
        entry = tarfile.TarInfo(path)
        entry.mtime = epoch
        if content is None:
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            yield entry, None
        else:
            entry.size = len(content)
            yield entry, io.BytesIO(content)
