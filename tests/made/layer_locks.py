"""Layer locks of a target, of layers of some bytes each."""

from __future__ import annotations

from imagefactory.actions.definition import define_target
from imagefactory.build.base.look import base_key
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.lock.files import lock_digest
from imagefactory.lock.layers import LayerLock, write_layer_lock
from imagefactory.model import Target
from imagefactory.oci.manifests import Descriptor, OciLayer, digest_of
from imagefactory.project import Project
from tests.made.layout import LAYER_TYPE

TITLES = ("debian-12", "environment", "torch 2.3.1", "bucket 0")
MADE_WITH = "a codec, layers 2"
BYTES = {digest_of(data): data for data in (title.encode() * 1000 for title in TITLES)}
"""The blobs of the layers, by digest."""


def layer_of(title: str, digest: str) -> OciLayer:
    descriptor = Descriptor(media_type=LAYER_TYPE, digest=digest, size=len(BYTES[digest]))
    return OciLayer(descriptor=descriptor, diff_id=digest_of(title.encode()), title=title)


LAYERS = tuple(layer_of(title, digest) for title, digest in zip(TITLES, BYTES, strict=True))


def put_layer_lock(factory: Project, target: Target) -> LayerLock:
    """A layer lock as `lock --layers` would write it here, had a build made `LAYERS`."""
    definition = define_target(factory, target)
    base = read_base_lock(factory.base_lock_path(definition.base))
    assert base is not None
    lock = LayerLock(
        target=target.name,
        lock=lock_digest(definition.lock),
        base=base_key(base),
        toolchain=MADE_WITH,
        layers=LAYERS,
    )
    write_layer_lock(factory.lock_folder, lock)
    return lock
