"""What of a store nothing needs any more, and its removal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What `collect` removed (or would remove): blobs, unpacked layers and records, and their bytes."""

    blobs: int
    unpacked: int
    records: int
    bytes: int
