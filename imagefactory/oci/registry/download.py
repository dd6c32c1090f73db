"""Blobs, manifests and lists on their way out of a registry, checked by their digests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from imagefactory.oci.manifests import INDEX_TYPES, MANIFEST_TYPES

ACCEPT = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))


def skip_bytes(chunks: Iterable[bytes], count: int) -> Iterator[bytes]:
    for data in chunks:
        if count >= len(data):
            count -= len(data)
            continue
        yield data[count:]
        count = 0
