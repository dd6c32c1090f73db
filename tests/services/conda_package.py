"""Writes real conda packages: .conda and .tar.bz2 files with the metadata that conda-build writes.

A package says what conda's documentation of the format asks for: info/index.json, info/paths.json,
info/link.json for noarch ones. The bytes depend on the arguments alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

PLACEHOLDER = "/opt/placehold_" + "x" * 240
"""Where the files of a package think they lie: as long as the longest prefix may be (conda-build: 255)."""
WHEN = 1_600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of a package. `prefix` is `text` or `binary` where it holds PLACEHOLDER.

    `told` is the sha256 that info/paths.json gives, where that shall be a wrong one, `kind` the path_type.
    What is `absent` is told there and not in the archive.
    """

    data: bytes = b""
    executable: bool = False
    prefix: str = ""
    link: str = ""
    told: str = ""
    kind: str = ""
    absent: bool = False
    mode: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CondaPackage:
    """What to pack. `noarch` is empty, `generic` or `python`; paths of the last begin with `site-packages/`.

    `files` holds bytes for plain files. `extra` are further fields of info/index.json. `old` is without
    info/paths.json, which came in 2017: info/files and info/has_prefix say the same.
    """

    name: str
    version: str = "1.0"
    build: str = "0"
    noarch: str = ""
    depends: tuple[str, ...] = ()
    constrains: tuple[str, ...] = ()
    files: Mapping[str, File | bytes] = field(default_factory=dict)
    entry_points: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ".conda"
    old: bool = False

    @property
    def subdir(self) -> str:
        return "noarch" if self.noarch else "linux-64"

    @property
    def stem(self) -> str:
        return f"{self.name}-{self.version}-{self.build}"


def pack(channel: Path, package: CondaPackage) -> Path:
    """The archive of `package` in its folder of `channel`."""
    folder = channel / package.subdir
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (package.stem + package.suffix)
    files = {name: f if isinstance(f, File) else File(data=f) for name, f in sorted(package.files.items())}
    info = {name: File(data=data) for name, data in _info(package, files).items()}
    if package.suffix == ".tar.bz2":
        path.write_bytes(_tar({**info, **files}, "w:bz2"))
        return path
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        members = {
            "metadata.json": json.dumps({"conda_pkg_format_version": 2}).encode(),
            f"pkg-{package.stem}.tar.zst": _zstd(_tar(files, "w")),
            f"info-{package.stem}.tar.zst": _zstd(_tar(info, "w")),
        }
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    return path


def _info(package: CondaPackage, files: Mapping[str, File]) -> dict[str, bytes]:
    index: dict[str, Any] = {
        "name": package.name,
        "version": package.version,
        "build": package.build,
        "build_number": int(last) if (last := package.build.rpartition("_")[2]).isdigit() else 0,
        "depends": list(package.depends),
        "constrains": list(package.constrains),
        "subdir": package.subdir,
        "arch": None if package.noarch else "x86_64",
        "platform": None if package.noarch else "linux",
        "license": "none",
        "timestamp": WHEN * 1000,
    }
    if package.noarch:
        index["noarch"] = package.noarch
    link: dict[str, Any] = {"package_metadata_version": 1}
    if package.noarch == "python":
        link["noarch"] = {"type": "python", "entry_points": list(package.entry_points)}
    texts: dict[str, Any] = {
        "info/index.json": {**index, **package.extra},
        "info/paths.json": {"paths": [_path(name, file) for name, file in files.items()], "paths_version": 1},
        "info/about.json": {"summary": f"{package.name}, made by tests"},
    }
    if package.noarch == "python":
        texts["info/link.json"] = link
    made = {name: json.dumps(value, indent=2, sort_keys=True).encode() for name, value in texts.items()}
    made["info/files"] = "".join(f"{name}\n" for name in files).encode()
    if package.old:
        del made["info/paths.json"]
        rows = (f"{PLACEHOLDER} {file.prefix} {name}\n" for name, file in files.items() if file.prefix)
        made["info/has_prefix"] = "".join(rows).encode()
    return made


def _path(name: str, file: File) -> dict[str, Any]:
    data = file.data
    row: dict[str, Any] = {
        "_path": name,
        "path_type": file.kind or ("softlink" if file.link else "hardlink"),
        "sha256": file.told or hashlib.sha256(data).hexdigest(),
        "size_in_bytes": len(data),
    }
    if file.prefix:
        row |= {"prefix_placeholder": PLACEHOLDER, "file_mode": file.prefix}
    return row


def _tar(files: Mapping[str, File], mode: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        for name, file in files.items():
            entry = tarfile.TarInfo(name)
            if file.absent:
                continue
            entry.mtime, entry.mode = WHEN, file.mode or (0o775 if file.executable else 0o664)
            entry.uid = entry.gid = 1000
            if file.link:
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, file.link, 0o777
                archive.addfile(entry)
            else:
                entry.size = len(file.data)
                archive.addfile(entry, io.BytesIO(file.data))
    return buffer.getvalue()


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(data)
