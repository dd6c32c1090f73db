"""A signed catalogue on its way to its readers: an artifact of the registry, or a file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from imagefactory.trust.invitation import TAG
from imagefactory.trust.catalog_package import CATALOGUE, CURRENT, INVITATION, LARGEST_PACKED, Packed, pack
from imagefactory.errors import RegistryError, StatementError, UsageError, os_problem
from imagefactory.fs import replacing
from imagefactory.oci.artifacts import put_artifact
from imagefactory.oci.candidates import CREATED
from imagefactory.oci.graph import EMPTY, EMPTY_TYPE, Artifact, Manifest, Place
from imagefactory.oci.manifests import MANIFEST_TYPE, canonical_json, digest_of, format_descriptor
from imagefactory.oci.model import Descriptor
from imagefactory.oci.store import Reference


def make_artifact(content: bytes, made: datetime, kind: Packed = CATALOGUE) -> Artifact:
    """Its manifest and blobs (image-spec 1.1, an artifact without a subject). Pure.

    Raises StatementError for one that nobody would read.
    """
    packed = pack(content)
    if len(packed) > LARGEST_PACKED:
        raise StatementError(
            "catalog-too-large",
            f"the {kind.name} has {len(packed)} bytes when packed, the limit is {LARGEST_PACKED}",
            hint="include fewer targets: imagefactory catalogue TARGET...",
        )
    empty = Descriptor(media_type=EMPTY_TYPE, digest=digest_of(EMPTY), size=len(EMPTY))
    layer = Descriptor(media_type=kind.layer_type, digest=digest_of(packed), size=len(packed))
    data = canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": kind.artifact_type,
            "config": format_descriptor(empty),
            "layers": [format_descriptor(layer)],
            "annotations": {CREATED: made.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")},
        }
    )
    descriptor = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(data), size=len(data))
    return Artifact(
        manifest=Manifest(descriptor=descriptor, data=data), blobs=((empty, EMPTY), (layer, packed))
    )


def publish_catalogue(place: Place, envelope: bytes, made: datetime) -> tuple[Reference, ...]:
    """Puts it under a tag of its own, then lets `current` point to it; gives both.

    Raises RegistryError, also where another wrote `current` meanwhile.
    """
    artifact = make_artifact(envelope, made)
    put_artifact(place, artifact)
    digest = artifact.manifest.descriptor.digest
    own = f"{made.astimezone(UTC):%Y%m%d}-{digest.removeprefix('sha256:')[:12]}"
    references = []
    for tag in (own, CURRENT):
        put = place.store.put_manifest(place.repository, artifact.manifest.data, MANIFEST_TYPE, tag)
        there = place.store.manifest(place.repository, tag)
        if put.digest != digest or there is None or there[0].digest != digest:
            raise RegistryError(
                "catalog-overwritten",
                f"{place}:{tag} is not the catalog that was pushed: another writer replaced it",
                hint="run it again",
            )
        references.append(
            Reference(registry=place.store.name, repository=place.repository, tag=tag, digest=digest)
        )
    return tuple(references)


def publish_invitation(place: Place, text: str, made: datetime) -> Reference:
    """Puts it beside the catalogue, in the place of an earlier one. Raises RegistryError."""
    artifact = make_artifact(text.encode(), made, INVITATION)
    put_artifact(place, artifact)
    put = place.store.put_manifest(place.repository, artifact.manifest.data, MANIFEST_TYPE, TAG)
    return Reference(registry=place.store.name, repository=place.repository, tag=TAG, digest=put.digest)


def write_catalogue(path: Path, envelope: bytes) -> None:
    """The envelope as a file, beside and renamed; packed where the name ends in `.gz`. Raises UsageError."""
    try:
        with replacing(path) as file:
            file.write(pack(envelope) if path.suffix == ".gz" else envelope)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="use another file: --output FILE") from error
