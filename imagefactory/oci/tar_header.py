"""How large a tar's extended header may be: one rule for every reader of a tar from a stranger."""

from __future__ import annotations

import tarfile
from typing import Self

HEADER_LIMIT = 1 << 20  # bytes; the largest extended header of one entry

_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class CappedInfo(tarfile.TarInfo):
    """tarfile reads a long name, a pax header and the map of a sparse file whole.

    A gigabyte of them packs into a few kilobytes.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> Self:
        # The entry point that tarfile leaves to subclasses: the header is known, its bytes are not read yet.
        if self.type in _EXTENDED and self.size > HEADER_LIMIT:
            raise tarfile.ReadError(f"a header of {self.size} bytes (limit: {HEADER_LIMIT})")
        if self.type == tarfile.GNUTYPE_SPARSE:  # its map goes on for as many blocks as it likes
            raise tarfile.ReadError(f"{self.name[:200]!a} is stored as a sparse file")
        made: Self = super()._proc_member(archive)  # type: ignore[misc]
        return made

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError(f"{self.name[:200]!a} is stored as a sparse file")
