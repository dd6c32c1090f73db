"""Blobs and manifests on their way into a registry, resumed where a connection breaks.

Source: OCI distribution-spec 1.1 and docker/distribution's upload pages; what docker-registry 2.8 does where
it differs (it answers `Range: 0-0` for no byte and for one, and drops an upload that broke in the middle of
a request).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

BINARY = "application/octet-stream"
LOST = frozenset(
    {"BLOB_UPLOAD_INVALID", "BLOB_UPLOAD_UNKNOWN", "DIGEST_INVALID", "RANGE_INVALID", "SIZE_INVALID"}
)


def range_end(headers: Mapping[str, str]) -> int | None:
    """The last byte that an upload has, by its Range header (`0-1023`)."""
    found = re.fullmatch(r"(?:bytes[= ])?0-(\d{1,18})", headers.get("Range", "").strip())
    return int(found[1]) if found else None
