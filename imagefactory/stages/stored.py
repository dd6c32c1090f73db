"""What the store has of a target: its image, and the .sif that is made of it or that apptainer built."""

from __future__ import annotations

import json

from imagefactory.access import Access
from imagefactory.build.sif import SifMaker
from imagefactory.model import Target
from imagefactory.oci.layout import reference
from imagefactory.oci.model import Descriptor, Image, Sif
from imagefactory.oci.sif import find_sif as find
from imagefactory.oci.sif import is_sif_manifest, load_sif, sif_reference
from imagefactory.progress import Progress
from imagefactory.runtime.apptainer_command import ApptainerCommand


def stored_image(access: Access, target: Target) -> Image | None:
    """The image the target's tag points to in the store, or None."""
    return access.layout.image(reference(target))


def stored_sif(access: Access, target: Target) -> Sif | None:
    """The .sif that apptainer built from the target's definition, or None."""
    return find(access.layout, sif_reference(target))


def load_made(access: Access, name: str, descriptor: Descriptor) -> Image | Sif:
    """The image or .sif of the store behind a manifest."""
    layout = access.layout
    if is_sif_manifest(json.loads(layout.read(descriptor))):
        return load_sif(layout, descriptor.digest)
    return layout.load(name, descriptor)


def ensure_sif(access: Access, image: Image, target: str, progress: Progress, *, compression: str) -> Sif:
    """The kept .sif of an image of the store, made if need be. The caller holds the layout's `in_use`."""
    maker = SifMaker(access.layout, ApptainerCommand(access.environ), workers=access.settings.worker_count)
    return maker.make(image, target, compression, progress)
