"""The protocol of engines: they build an image of the store from a definition and its packages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from imagefactory.build.base.image import BuiltBase, PendingBase
from imagefactory.errors import StoreError
from imagefactory.fs import require_space
from imagefactory.model import BuildSpec, Target
from imagefactory.oci.layout import Layout, reference
from imagefactory.oci.manifests import INDEX_TYPE, Descriptor, Image, SifArtifact
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import Progress

if TYPE_CHECKING:
    from imagefactory.lock.download import PendingDownloads

LEAST_LAYER, LEAST_UNPACKED = 0.8, 1.3
"""The least bytes, in a layer and unpacked, for each byte of a package.

With torch 2.3 and its dependencies, every wheel above 20 MB is 1.3 to 2.7 times as large unpacked.
"""


def require_image_space(store: Path, definition: BuildSpec) -> None:
    """Raise StoreError if the store has no space for the image. For engines that fetch inside the build."""
    packed = sum(package.size for package in definition.lock.packages)
    require_space({store: round(LEAST_LAYER * packed)}, f"the image of {definition.target.name}")


def recorded_image(layout: Layout, key: str, target: Target) -> Image | None:
    """Return the image that was recorded under `key`, None if the store lacks a part of it."""
    record = layout.recall("images", key)
    try:
        digest, size = str(record["digest"]), int(record["size"])  # type: ignore[index]
        descriptor = Descriptor(media_type=INDEX_TYPE, digest=digest, size=size)
        return layout.load(reference(target), descriptor)
    except (KeyError, TypeError, ValueError, StoreError):
        return None


def tag_image(layout: Layout, target: Target, image: Image | SifArtifact) -> None:
    """Point the target's tag at an image of the store."""
    size = layout.blob_path(image.digest).stat().st_size
    layout.tag(reference(target), Descriptor(media_type=INDEX_TYPE, digest=image.digest, size=size))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInputs:
    """The inputs of a build, which may still be arriving.

    `packages` fetches the locked packages into the cache, for engines that use it. `base` fetches those of
    the base, once. `unpacked` also gets each layer as files, None for no such copy.
    """

    base: Callable[[], PendingBase]
    packages: Callable[[], AbstractContextManager[PendingDownloads]]
    unpacked: UnpackedLayers | None


class Engine(Protocol):
    """An engine. Its module has a function `make_engine(access)`, and its row is in settings/choices.py."""

    def require(self) -> str:
        """Return the engine's version. Raises ToolError if it does not work on this machine."""

    def find(self, definition: BuildSpec, base: BuiltBase) -> Image | SifArtifact | None:
        """Return the image of this definition on this base, None if the store lacks a part of it."""

    def build(self, definition: BuildSpec, inputs: BuildInputs, progress: Progress) -> Image | SifArtifact:
        """Build and tag the image. Raises BuildError. The store gets no incomplete image."""

    def toolchain(self, definition: BuildSpec) -> str:
        """Return the tools that determine layer bytes, empty for an engine that does not reproduce them."""

    def tag(self, definition: BuildSpec, image: Image | SifArtifact) -> None:
        """Point the target's tag at the image."""
