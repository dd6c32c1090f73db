"""Small real wheels, made by the tests that need them."""

from __future__ import annotations

import base64
import hashlib
import stat
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from imagefactory.model import LockedWheel


def record_row(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}"


def make_wheel(
    folder: Path,
    name: str,
    files: Mapping[str, bytes],
    *,
    version: str = "1.0",
    modes: Mapping[str, int] | None = None,
    order: int = 1,
) -> Path:
    """A wheel with `files` and its dist-info. `modes` are Unix modes by path, `order` -1 reverses the zip."""
    info = f"{name}-{version}.dist-info"
    texts = {
        **files,
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
    }
    rows = [record_row(path, data) for path, data in texts.items()]
    texts[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in list(texts.items())[::order]:
            entry = zipfile.ZipInfo(file, (2020, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (modes or {}).get(file, stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, data)
    return path


def locked(path: Path, *, size: int | None = None) -> LockedWheel:
    name, version = path.name.split("-")[:2]
    data = path.read_bytes()
    return LockedWheel(
        name=name.replace("_", "-"),
        version=version,
        filename=path.name,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data) if size is None else size,
    )


def add_nested(path: Path) -> None:
    """Adds the member `outer`, in whose bytes the member `inner` stands, each with its own sound header."""
    with zipfile.ZipFile(path, "a") as archive:
        inner = zipfile.ZipInfo("inner")
        inner.CRC, inner.file_size, inner.compress_size = zlib.crc32(b"x"), 1, 1
        data = inner.FileHeader() + b"x"
        archive.writestr("outer", data)
        outer = archive.getinfo("outer")
        inner.header_offset = outer.header_offset + len(outer.FileHeader())
        archive.filelist.append(inner)


def add_packed(path: Path, name: str, packed: bytes, plain: bytes) -> None:
    """Adds a member that is `packed` and says that it is `plain`, deflated."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, packed)
        info = archive.getinfo(name)
        info.compress_type, info.CRC, info.file_size = zipfile.ZIP_DEFLATED, zlib.crc32(plain), len(plain)
        assert archive.fp is not None
        archive.fp.seek(info.header_offset)
        archive.fp.write(info.FileHeader())
