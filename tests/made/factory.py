"""A factory of the family pytorch, of which one target is locked, and images of that target."""

from __future__ import annotations

import io
import tarfile

from imagefactory.actions.definition import define_target
from imagefactory.build.base.image import write_index
from imagefactory.model import Target
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import CONFIG_TYPE, MANIFEST_TYPE, canonical_json, format_descriptor
from imagefactory.project import Project
from tests.made.layout import LAYER_TYPE

NAME = "pytorch-2.3-cu121"


def put_image(factory: Project, target: Target, **labels: str | None) -> str:
    """An image that says it was made of the target's lock; the digest of its index."""
    layout, told = factory.layout, {**dict(define_target(factory, target).labels), **labels}
    told = {name: text for name, text in told.items() if text is not None}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("hello"))
    layer = layout.add(packed.getvalue(), LAYER_TYPE)
    config = {"config": {"Env": [], "Labels": told}, "rootfs": {"diff_ids": [layer.digest]}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(layer)],
    }
    index = write_index(layout, manifest, "linux/amd64")
    layout.tag(reference(target), index)
    return index.digest
