"""What lies beside an image put into any store: a manifest that names it, and the blobs of that one's own."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from imagefactory.errors import RegistryError
from imagefactory.oci.graph import EMPTY, EMPTY_BLOB, LocalArtifact, Manifest, StoreRepository
from imagefactory.oci.layers import CHUNK
from imagefactory.oci.manifests import MANIFEST_TYPE, Descriptor, canonical_json, digest_of, format_descriptor

_WITHDRAWN = canonical_json(
    {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": "application/vnd.imagefactory.withdrawn.v1",
        "config": format_descriptor(EMPTY_BLOB),
        "layers": [format_descriptor(EMPTY_BLOB)],
    }
)
WITHDRAWN = Manifest(
    descriptor=Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(_WITHDRAWN), size=len(_WITHDRAWN)),
    data=_WITHDRAWN,
)
"""What a tag names that had to go in a registry that removes no tags: no engine runs it."""


def withdraw_tag(place: StoreRepository, tag: str) -> bool:
    """Remove a tag. Return False where the registry removes none, as Docker's before 3.0: it names WITHDRAWN.

    Raises RegistryError where neither is possible.
    """
    try:
        place.store.untag(place.repository, tag)
    except RegistryError:
        put_bytes(place, EMPTY_BLOB, EMPTY)
        put_manifest(place, WITHDRAWN, tag)
        return False
    return True


def put_artifact(place: StoreRepository, artifact: LocalArtifact) -> None:
    """Puts an artifact beside its subject. Raises RegistryError when the store does not confirm it."""
    for blob, data in artifact.blobs:
        put_bytes(place, blob, data)
    put_manifest(place, artifact.manifest)


def put_files(place: StoreRepository, manifest: Manifest, files: Mapping[Descriptor, Path]) -> None:
    """Puts an artifact whose layers are files on disk. Raises RegistryError as `put_artifact`."""
    put_bytes(place, EMPTY_BLOB, EMPTY)
    for blob, path in files.items():
        if not place.store.has(place.repository, blob):
            place.store.write(place.repository, blob, functools.partial(_chunks, path))
    put_manifest(place, manifest)


def _chunks(path: Path, offset: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(CHUNK):
            yield chunk


def put_bytes(place: StoreRepository, descriptor: Descriptor, data: bytes) -> int:
    if place.store.has(place.repository, descriptor):
        return 0
    return place.store.write(place.repository, descriptor, lambda offset: iter((data[offset:],)))


def put_manifest(place: StoreRepository, manifest: Manifest, tag: str = "") -> None:
    """Raises RegistryError when the store does not confirm, by the tag where there is one, what was put."""
    put = place.store.put_manifest(place.repository, manifest.data, manifest.descriptor.media_type, tag)
    if put.digest != manifest.descriptor.digest:
        raise RegistryError(
            "push-overwritten",
            f"{place}: {manifest.descriptor.digest} was pushed, but {tag or 'it'} is now {put.digest}",
            hint="another program pushes there: check it before you push again",
        )
