"""The store on disk as a Store: all repositories share one pool of blobs and differ in their tags.

The tag `2.3-cu121` of the repository `pytorch` is the layout's `pytorch:2.3-cu121`. Whoever writes
holds the layout's `in_use`, so that no collection takes blobs before a tag needs them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from imagefactory.errors import StoreError
from imagefactory.fs import explain_full_disk
from imagefactory.oci.blob_writer import BlobWriter
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import INDEX_TYPES, MALFORMED, digest_of, media_type_of, parse_descriptor
from imagefactory.oci.model import Descriptor
from imagefactory.oci.store import DIGEST, Source, check_repository, check_wanted

_CHUNK = 1 << 20


class LayoutStore:
    """`layout` as a Store. Safe to use from several threads and processes. Raises StoreError.

    With `every_byte` a blob that is there is read before it counts as one, and comes anew where it changed.
    """

    def __init__(self, layout: Layout, *, every_byte: bool = False) -> None:
        self.layout = layout
        self._has = layout.holds if every_byte else layout.has

    @property
    def name(self) -> str:
        return str(self.layout.path)

    # --- blobs -----------------------------------------------------------------------------------

    def has(self, repository: str, descriptor: Descriptor) -> bool:  # noqa: ARG002
        return self._has(descriptor)

    def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:  # noqa: ARG002
        path = self.layout.blob_path(descriptor.digest)
        sha256 = hashlib.sha256() if offset == 0 else None
        left = descriptor.size - offset
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise StoreError(
                "blob-missing", f"blob {descriptor.digest} is missing from {self.name}"
            ) from None
        with explain_full_disk(self.layout.path), file:
            file.seek(offset)
            while data := file.read(_CHUNK):
                left -= len(data)
                if left < 0:
                    break
                if sha256:
                    sha256.update(data)
                yield data
        if left or (sha256 and f"sha256:{sha256.hexdigest()}" != descriptor.digest):
            raise self.layout.damaged(descriptor.digest)

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:  # noqa: ARG002
        """As Store has it: always from `source(0)`, for nothing is kept of what did not come whole."""
        if self._has(descriptor):
            return 0
        with explain_full_disk(self.layout.path), BlobWriter(self.layout) as blob:
            for data in source(0):
                blob.write(data)
                if blob.size > descriptor.size:
                    break
            if blob.size != descriptor.size or blob.digest != descriptor.digest:
                raise StoreError(
                    "blob-mismatch",
                    f"the received bytes of blob {descriptor.digest} do not match its digest",
                    hint="run the same command again",
                )
            blob.commit(descriptor.media_type)
        return descriptor.size

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:  # noqa: ARG002
        return self.layout.has(descriptor)

    # --- manifests -------------------------------------------------------------------------------

    def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        if DIGEST.fullmatch(wanted):
            return self.layout.manifest(wanted)
        descriptor = self.layout.tags().get(_name(repository, wanted))
        if descriptor is None:
            return None
        manifest = self.layout.manifest(descriptor.digest)
        if manifest is None:
            raise StoreError(
                "blob-missing",
                f"{_name(repository, wanted)} points to "
                f"{descriptor.digest}, which is missing from {self.name}",
                hint=f"run imagefactory store rm {_name(repository, wanted)}",
            )
        return manifest

    def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
        """As Store has it. Of an index, one manifest that is there is enough: others are other platforms'."""
        name = _name(repository, tag) if tag else ""
        try:
            value = json.loads(data)
            self._check(value, media_type)
            subject = str(value["subject"]["digest"]) if value.get("subject") else ""
        except MALFORMED as error:
            raise StoreError(
                "store-manifest-invalid",
                f"{digest_of(data)} is not a manifest: {type(error).__name__}: {error}",
            ) from error
        descriptor = self.layout.add(data, media_type)
        if subject:
            self.layout.refer(subject, descriptor, value)
        if name:
            self.layout.tag(name, descriptor)
        return descriptor

    def _check(self, value: Mapping[str, Any], media_type: str) -> None:
        """Raises StoreError where the manifest names blobs that are not here, or is not of its type."""
        if media_type_of(value) != media_type:
            raise StoreError(
                "store-manifest-invalid",
                f"a manifest of type {media_type_of(value)} was stored as {media_type}",
            )
        if media_type in INDEX_TYPES:
            named = [parse_descriptor(entry) for entry in value["manifests"]]
            missing = named if named and not any(map(self.layout.has, named)) else []
        else:
            named = [parse_descriptor(entry) for entry in (value["config"], *value["layers"])]
            missing = [descriptor for descriptor in named if not self.layout.has(descriptor)]
        if missing:
            raise StoreError(
                "blob-missing", f"{missing[0].digest}, which the manifest names, is not in {self.name}"
            )

    # --- tags and referrers ----------------------------------------------------------------------

    def tags(self, repository: str) -> tuple[str, ...]:
        check_repository(repository)
        names = (name.rpartition(":") for name in self.layout.tags())
        return tuple(sorted(tag for found, _, tag in names if found == repository))

    def untag(self, repository: str, tag: str) -> None:
        name = _name(repository, tag)
        if name in self.layout.tags():
            self.layout.untag(name)

    def referrers(self, repository: str, digest: str, artifact_type: str = "") -> tuple[Descriptor, ...]:  # noqa: ARG002
        found = self.layout.referrers(digest)
        return tuple(descriptor for descriptor, kind in found if artifact_type in ("", kind))


def _name(repository: str, tag: str) -> str:
    return f"{check_repository(repository)}:{check_wanted(tag)}"
