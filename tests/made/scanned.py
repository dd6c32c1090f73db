"""Layers and .sif files of few entries: what scans read."""

from __future__ import annotations

import io
import struct
import tarfile

from imagefactory.oci.sif import MAGIC

VERSION = b"""from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.3.1+cu121'
debug = False
cuda: Optional[str] = '12.1'
git_version = '63d5e9221bedd1546b7d364b5ce4171547db12a9'
hip: Optional[str] = None
"""


Entry = tuple[str, bytes | None]  # None: a folder; b"->x": a symbolic link; b"=>x": a hard link


def tar(*entries: Entry, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for path, data in entries:
            info = tarfile.TarInfo(path)
            if data is None:
                info.type = tarfile.DIRTYPE
            elif data.startswith(b"->"):
                info.type, info.linkname = tarfile.SYMTYPE, data[2:].decode()
            elif data.startswith(b"=>"):
                info.type, info.linkname = tarfile.LNKTYPE, data[2:].decode()
            else:
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data or b""))
    return out.getvalue()


def sif(*, kind: int = 0x4004, system: int = 1, part: int = 2, offset: int = 8192, size: int = 100) -> bytes:
    """The headers of a .sif with one descriptor at 4096, and 100 bytes at 8192."""
    head = b"#!/usr/bin/env run-singularity\n\0" + MAGIC + b"01\x0002\0" + bytes(16)
    head += struct.pack("<8q", 0, 0, 47, 48, 4096, 48 * 585, 8192, 100)
    extra = struct.pack("<ii3s", system, part, b"02\0").ljust(384, b"\0")
    row = struct.pack("<i?III7q", kind, True, 1, 0, 0, offset, size, size, 0, 0, 0, 0) + bytes(128) + extra
    return head.ljust(4096, b"\0") + row.ljust(4096, b"\0") + b"hsqs".ljust(100, b"\0")
