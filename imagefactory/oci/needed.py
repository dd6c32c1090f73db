"""What the tags of a store need: manifests, their blobs, and their referrers as far as they are whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imagefactory.errors import StoreError
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPES,
    INDEX_TYPES,
    MALFORMED,
    media_type_of,
    parse_config,
    parse_descriptor,
)
from imagefactory.oci.model import Descriptor


class UnreadableError(StoreError):
    """A manifest is missing or damaged. Nobody knows what it names."""


class Needed:
    """Digests and diff ids of all that was reached: manifests, their blobs and their referrers.

    `bad` are digests of blobs that are known to be damaged.
    """

    def __init__(self, layout: Layout, bad: frozenset[str] = frozenset()) -> None:
        self.layout, self.bad = layout, bad
        self.digests: set[str] = set()
        self.diff_ids: set[str] = set()
        self.damaged: list[tuple[str, StoreError]] = []

    def reach_tags(self) -> None:
        """Adds all that tags need; of an image that is not whole, all that it names.

        Raises StoreError where a manifest cannot be read: nobody knows what it names.
        """
        for name, descriptor in self.layout.tags().items():
            hint = f"build or pull {name} again, or drop it: imagefactory store rm {name}"
            try:
                self.reach(descriptor)
            except UnreadableError as error:
                raise StoreError(
                    "image-incomplete", f"{name}: {error.message}; nothing was deleted", hint=hint
                ) from error
            except StoreError as error:
                self.damaged.append(
                    (name, StoreError("image-incomplete", f"{name}: {error.message}", hint=hint))
                )

    def reach_whole(self, digest: str) -> None:
        """Adds what nobody named here: where it is not here or not whole, nothing is needed."""
        own = self._copy()
        try:
            found = self.layout.manifest(digest)
            if found:
                own.reach(found[0])
        except StoreError:
            return
        self._take(own)

    def _copy(self) -> Needed:
        own = Needed(self.layout, self.bad)
        own._take(self)
        return own

    def _take(self, other: Needed) -> None:
        self.digests |= other.digests
        self.diff_ids |= other.diff_ids

    def reach(self, root: Descriptor) -> None:
        """Adds all that `root` needs, and the referrers that are whole.

        A damaged referrer (a .sif whose file is lost) is no need of the image: it goes, and is made again.
        """
        records = self._reach_below(root)
        while records:
            own = self._copy()
            try:
                found = self.layout.referrer(records.pop())
                more = own._reach_below(found[0]) if found else []
            except StoreError:
                continue
            self._take(own)
            records += more

    def _reach_below(self, root: Descriptor) -> list[Path]:
        """Adds what `root` itself needs; gives the records of who refers to its manifests.

        Of an index, what is here: other platforms may never have come.
        """
        layout, waiting, records = self.layout, [root], []
        while waiting:
            descriptor = waiting.pop()
            if descriptor.digest in self.digests:
                continue
            try:
                data = self._read(descriptor)
            except StoreError as error:
                raise UnreadableError("manifest-unreadable", error.message) from error
            self.digests.add(descriptor.digest)
            try:
                value = json.loads(data)
                if media_type_of(value) in INDEX_TYPES:
                    waiting += filter(layout.has, map(parse_descriptor, value["manifests"]))
                else:
                    self._reach_blobs(value)
            except MALFORMED as error:
                raise StoreError(
                    "store-corrupt",
                    f"{descriptor.digest} in {layout.path} is not a manifest, "
                    f"or its config is not valid: {error}",
                ) from error
            records += layout.referring(descriptor.digest)
        return records

    def _reach_blobs(self, manifest: Mapping[str, Any]) -> None:
        layout = self.layout
        config, *layers = map(parse_descriptor, (manifest["config"], *manifest["layers"]))
        self.digests |= {config.digest, *(layer.digest for layer in layers)}
        if config.media_type in CONFIG_TYPES:
            self.diff_ids |= set(parse_config(self._read(config), len(layers)).diff_ids)
        for descriptor in (config, *layers):
            if descriptor.digest in self.bad or not layout.has(descriptor):
                raise StoreError(
                    "store-corrupt",
                    f"{descriptor.digest} is missing from {layout.path}, truncated or corrupt",
                )

    def _read(self, descriptor: Descriptor) -> bytes:
        if descriptor.digest in self.bad:
            raise StoreError("store-corrupt", f"{descriptor.digest} in {self.layout.path} is corrupt")
        return self.layout.read(descriptor)
