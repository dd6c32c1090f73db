"""A catalogue as it lies in a registry: its place, its manifest, its bytes packed and unpacked. Pure.

    <registry>/catalogue:current                    the newest, a tag that moves
    <registry>/catalogue:<YYYYMMDD>-<12 hex>        each one, under a tag of its own

It is an OCI artifact of one layer, the envelope packed by gzip.
"""

from __future__ import annotations

import gzip
import json
import zlib

from imagefactory.catalogue.document import LARGEST
from imagefactory.documents import DIGEST
from imagefactory.errors import RegistryError, StatementError, UsageError
from imagefactory.oci.inflate import GZIP, DamagedError, inflate
from imagefactory.oci.manifests import artifact_type, parse_descriptor
from imagefactory.oci.mirrors import split_place, split_tagged
from imagefactory.oci.model import Descriptor
from imagefactory.oci.store import Reference

REPOSITORY, CURRENT = "catalogue", "current"
ARTIFACT_TYPE = "application/vnd.imagefactory.catalogue.v1+json"
LAYER_TYPE = "application/vnd.dsse.envelope.v1+json+gzip"
LARGEST_PACKED = 64 << 20
_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 20


def catalogue_place(text: str) -> Reference:
    """`HOST[/PATH][:TAG]`, the place of a registry, as the catalogue's reference there.

    A path that ends in `catalogue` already is taken as it is. Raises UsageError for an empty text.
    """
    if not text:
        raise UsageError(
            "no catalogue is known here, and this is no factory",
            hint='write catalogue = "HOST/PATH" in ~/.config/imagefactory/imagefactory.toml, or go to a '
            "factory: -C DIR",
        )
    place, tag = split_tagged(text)
    host, path = split_place(place)
    if path.rpartition("/")[2] != REPOSITORY:
        path = f"{path}/{REPOSITORY}" if path else REPOSITORY
    return Reference(registry=host, repository=path, tag=tag or CURRENT)


def pack(envelope: bytes) -> bytes:
    """By gzip, the same bytes every time."""
    return gzip.compress(envelope, 9, mtime=0)


def unpack(data: bytes, where: str) -> bytes:
    """An envelope that may be packed. Raises StatementError for damage, and for more than LARGEST bytes."""
    if not data.startswith(_MAGIC):
        return data
    chunks = (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))
    pieces, size = [], 0
    try:
        for piece in inflate(chunks, GZIP):
            size += len(piece)
            if size > LARGEST:
                raise StatementError(f"{where}: unpacks to more than {LARGEST} bytes", hint="see who made it")
            pieces.append(piece)
    except (DamagedError, zlib.error) as error:
        raise StatementError(f"{where}: is damaged: {error}", hint="get it anew") from error
    return b"".join(pieces)


def parse_layer(manifest: bytes, where: str) -> Descriptor:
    """The layer of a catalogue's manifest. Raises RegistryError for that of anything else."""
    try:
        value = json.loads(manifest)
        if artifact_type(value) != ARTIFACT_TYPE:
            raise ValueError(f"it is a {artifact_type(value)[:80]!r}")
        (layer,) = map(parse_descriptor, value["layers"])
        if layer.media_type != LAYER_TYPE or not 0 < layer.size <= LARGEST_PACKED:
            raise ValueError(f"a layer of {layer.size} bytes")
        if not DIGEST.fullmatch(layer.digest):  # the name of a file in the cache
            raise ValueError("its layer has no digest")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise RegistryError(f"{where} is no catalogue: {error}", hint="see who put it there") from error
    return layer
