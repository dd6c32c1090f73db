"""An image by its layer lock: its digest, config, manifest and index, without a byte of a layer. Pure.

Of the embedded engine alone, on a base of Debian's packages.
"""

from __future__ import annotations

from collections.abc import Sequence

from imagefactory.build.base.image import BaseImage, Blobs, write_base
from imagefactory.build.base.look import base_key
from imagefactory.engines.image_config import write_image
from imagefactory.engines.own_layer import TITLE, own_title
from imagefactory.lock.files import lock_digest
from imagefactory.lock.layers import LayerLock
from imagefactory.model import BaseLock, Definition
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import CONFIG_TYPE, MANIFEST_TYPE, digest_of, hash_key, parse_config
from imagefactory.oci.model import Descriptor, Image, Layer


def lock_layers(definition: Definition, bases: Sequence[BaseLock], image: Image, made_with: str) -> LayerLock:
    """The layer lock of an image that was made here, on bases of those locks, the lowest first."""
    return LayerLock(
        target=definition.target.name,
        lock=lock_digest(definition.lock),
        base=_bases_key(bases),
        made_with=made_with,
        layers=image.layers,
    )


def moved_on(lock: LayerLock, definition: Definition, bases: Sequence[BaseLock]) -> str:
    """What has changed since the layer lock was written, so that it is another image's; "" for nothing."""
    if lock.lock != lock_digest(definition.lock):
        return f"the lock of {definition.target.name} has changed"
    if lock.base != _bases_key(bases):
        return f"the base {definition.base.name} has changed"
    own = own_title(definition)
    there = [layer.title for layer in lock.layers if layer.title.startswith(TITLE)]
    return "" if there == ([own] if own else []) else "the own files have changed"


def _bases_key(bases: Sequence[BaseLock]) -> str:
    keys = [base_key(base) for base in bases]
    return keys[0] if len(keys) == 1 else f"sha256:{hash_key('bases', *keys)}"


def image_of(
    lock: LayerLock, definition: Definition, bases: Sequence[BaseLock], blobs: Blobs | None = None
) -> Image:
    """The image of a definition and these layers; its config, manifest and index go to `blobs`."""
    epoch, below = bases[0].source_date_epoch, lock.layers[: len(bases)]
    named = _Named()
    index = write_base(named, below, epoch, definition.base.platform)
    on = BaseImage(
        image=named.image(f"base:{definition.base.name}", index, below),
        folders=(),
        identity=base_key(bases[0]),
        epoch=epoch,
        published=True,
    )
    named = _Named(blobs)
    index = write_image(named, definition, on, lock.layers)
    return named.image(reference(definition.target), index, lock.layers)


class _Named:
    """Names blobs as a layout does, hands them on to `blobs`, and knows the last of each media type."""

    def __init__(self, blobs: Blobs | None = None) -> None:
        self.blobs, self.last, self.config = blobs, dict[str, Descriptor](), b""

    def add(self, data: bytes, media_type: str) -> Descriptor:
        if self.blobs is not None:
            self.blobs.add(data, media_type)
        if media_type == CONFIG_TYPE:
            self.config = data
        self.last[media_type] = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
        return self.last[media_type]

    def image(self, name: str, index: Descriptor, layers: Sequence[Layer]) -> Image:
        config = parse_config(self.config, len(layers))
        return Image(
            name=name,
            digest=index.digest,
            manifest=self.last[MANIFEST_TYPE].digest,
            config=self.last[CONFIG_TYPE].digest,
            size=sum(layer.descriptor.size for layer in layers),
            layers=tuple(layers),
            environment=config.environment,
            architecture=config.architecture,
            start=config.start,
        )
