"""What verdicts on an image of a place speak of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from imagefactory.errors import NoImageError, RegistryError
from imagefactory.oci.graph import (
    Manifest,
    Place,
    check_unambiguous,
    choose_platform,
    parse_parts,
    read_manifest,
)
from imagefactory.oci.manifests import INDEX_TYPES, images_of
from imagefactory.oci.sif import is_sif_manifest
from imagefactory.verify.model import Subject


def read_subject(place: Place, wanted: str, platform: str = "") -> Subject:
    """What verdicts on an image speak of: its manifest for `platform` and its config; of a .sif its file.

    Without a platform the only one, of several linux/amd64.

    Raises RegistryError or StoreError where `place` has no such image, NoImageError for what is not one, or
    is an index of which other tools may take another image.
    """
    root = read_manifest(place, wanted)
    with _an_image(root):
        check_unambiguous(root)
        chosen = choose_platform(root, platform).digest
    manifest = read_manifest(place, chosen)
    if manifest.descriptor.media_type in INDEX_TYPES:  # one image and what is attested of it
        with _an_image(root):
            check_unambiguous(manifest)
            entries = json.loads(manifest.data)["manifests"]
            (image,) = images_of(entries)
        manifest = read_manifest(place, str(image["digest"]))
    with _an_image(root):
        blobs = parse_parts(manifest)[1]
        config = blobs[1] if is_sif_manifest(json.loads(manifest.data)) else blobs[0]
    return Subject(
        target="", index=root.descriptor.digest, manifest=manifest.descriptor.digest, config=config.digest
    )


@contextmanager
def _an_image(root: Manifest) -> Iterator[None]:
    """What is read here was fetched whole: a fault is one of the image."""
    try:
        yield
    except RegistryError as error:
        raise NoImageError("image-malformed", error.message, hint=error.hint) from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise NoImageError(
            "image-malformed", f"{root.descriptor.digest} is not one image", hint="ask who pushed it"
        ) from error
