"""A blob of the layout, from its first byte to its name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol

from imagefactory.fs import create_in, move_to
from imagefactory.oci.model import Descriptor


class Blobs(Protocol):
    """Where blobs are written and where they lie: a Layout."""

    tmp: Path

    def blob_path(self, digest: str) -> Path: ...


class BlobWriter:
    """A blob on its way into the layout: hashed while written, visible only once committed."""

    def __init__(self, layout: Blobs) -> None:
        self._layout = layout
        handle, self.path = create_in(layout.tmp, "blob-")
        self._file = os.fdopen(handle, "wb")
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    @property
    def digest(self) -> str:
        """Of what was written so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def commit(self, media_type: str) -> Descriptor:
        self._file.flush()
        os.fchmod(self._file.fileno(), 0o644)
        self._file.close()
        digest = self.digest
        move_to(self.path, self._layout.blob_path(digest))
        return Descriptor(media_type=media_type, digest=digest, size=self.size)

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()  # writes what is buffered, so a full disk speaks here too
        finally:
            self.path.unlink(missing_ok=True)
