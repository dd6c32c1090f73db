"""A catalog in a registry: its address, its manifest, and its compressed bytes. Pure functions.

    <registry>/catalog:current                    the newest catalog; this tag moves
    <registry>/catalog:<YYYYMMDD>-<12 hex>        each catalog, under a separate tag
    <registry>/catalog:invitation                 the invitation to the catalog (invitation.py)

Catalogs and invitations are OCI artifacts with one layer, compressed with gzip. A catalog compresses itself.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from dataclasses import dataclass

from imagefactory.errors import RegistryError, StatementError, UsageError
from imagefactory.oci.inflate import GZIP, CorruptDataError, inflate
from imagefactory.oci.manifests import Descriptor, artifact_type, parse_descriptor
from imagefactory.oci.store import ImageReference, split_place, split_tagged
from imagefactory.serialize import DIGEST
from imagefactory.trust.catalog import LARGEST, LARGEST_IMAGES

REPOSITORY, CURRENT = "catalog", "current"
LARGEST_PACKED = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFormat:
    """A type of artifact: its name, the media types of its manifest and layer, and the layer's limit."""

    name: str
    artifact_type: str
    layer_type: str
    largest: int = LARGEST_PACKED


CATALOG_ARTIFACT = ArtifactFormat(
    name="catalog",
    artifact_type="application/vnd.imagefactory.catalog.v1+json",
    layer_type="application/vnd.dsse.envelope.v1+json+gzip",
    largest=LARGEST_PACKED + LARGEST_IMAGES,
)
INVITATION = ArtifactFormat(
    name="invitation",
    artifact_type="application/vnd.imagefactory.invitation.v1+toml",
    layer_type="application/vnd.imagefactory.invitation.v1+toml+gzip",
)
_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20


def catalog_repository(text: str) -> ImageReference:
    """Return the catalog's reference in the registry `HOST[/PATH][:TAG]`.

    A path that already ends in `catalog` is unchanged. Raises UsageError for an empty text.
    """
    if not text:
        raise UsageError(
            "no-catalog-set",
            "no catalog is set, and this directory is not a project",
            hint="ask your center for its invitation, then run imagefactory site join ADDRESS|FILE; or "
            "select a "
            "project: -C DIR",
        )
    repository, tag = split_tagged(text)
    host, path = split_place(repository)
    if path.rpartition("/")[2] != REPOSITORY:
        path = f"{path}/{REPOSITORY}" if path else REPOSITORY
    return ImageReference(registry=host, repository=path, tag=tag or CURRENT)


def pack_artifact(envelope: bytes) -> bytes:
    """Compress with gzip if it is not compressed. Equal input gives equal bytes."""
    return envelope if envelope.startswith(_MAGIC) else gzip.compress(envelope, 9, mtime=0)


def unpack_artifact(data: bytes, location: str, largest: int | None = None) -> bytes:
    """Decompress an envelope if it is compressed.

    Raises StatementError for corrupt data or for more than `largest` bytes.
    """
    most = LARGEST if largest is None else largest
    if not data.startswith(_MAGIC):
        return data
    chunks = (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))
    unpacked = io.BytesIO()
    try:
        for piece in inflate(chunks, GZIP):
            if unpacked.tell() + len(piece) > most:
                raise StatementError(
                    "catalog-too-large",
                    f"{location} has more than {most} bytes when unpacked",
                    hint="let its owner publish fewer targets",
                )
            unpacked.write(piece)
    except (CorruptDataError, zlib.error) as error:
        raise StatementError(
            "catalog-corrupt", f"{location} is corrupt: {error}", hint="download it again"
        ) from error
    return unpacked.getvalue()


def parse_layer(manifest: bytes, location: str, kind: ArtifactFormat = CATALOG_ARTIFACT) -> Descriptor:
    """Return the layer in a manifest of type `kind`. Raises RegistryError for other manifests."""
    try:
        value = json.loads(manifest)
        if artifact_type(value) != kind.artifact_type:
            raise ValueError(f"its type is {artifact_type(value)[:80]!r}")
        (layer,) = map(parse_descriptor, value["layers"])
        if layer.media_type != kind.layer_type or not 0 < layer.size <= kind.largest:
            raise ValueError(f"its layer has type {layer.media_type[:80]!r} and {layer.size} bytes")
        if not DIGEST.fullmatch(layer.digest):  # the name of a file in the cache
            raise ValueError("its layer has no digest")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise RegistryError(
            "artifact-malformed",
            f"{location} is not of type {kind.name}: {error}",
            hint="check the address, or let its owner publish it again",
        ) from error
    return layer
