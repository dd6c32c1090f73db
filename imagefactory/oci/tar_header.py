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
    """tarfile reads a long name or a pax header whole, and a gigabyte of it packs into a few kilobytes."""

    def _proc_member(self, archive: tarfile.TarFile) -> Self:
        # The entry point that tarfile leaves to subclasses: the header is known, its bytes are not read yet.
        if self.type in _EXTENDED and self.size > HEADER_LIMIT:
            raise tarfile.ReadError(f"a header of {self.size} bytes; {HEADER_LIMIT} may be")
        made: Self = super()._proc_member(archive)  # type: ignore[misc]
        return made
