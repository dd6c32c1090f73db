"""What every engine offers: an image of the store from a definition and its packages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from imagefactory.build.base.image import BuiltBase, PendingBase
from imagefactory.fs import require_space
from imagefactory.lock.download import PendingDownloads
from imagefactory.model import BuildSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import Progress

LEAST_LAYER, LEAST_UNPACKED = 0.8, 1.3
"""What a byte of a package becomes in a layer and unpacked, at least: of torch 2.3 and what it needs every
wheel above 20 MB is 1.3 to 2.7 times as large when it is unpacked."""


def require_image_space(store: Path, definition: BuildSpec) -> None:
    """For engines that fetch inside the build: raises StoreError where the store cannot hold the image."""
    packed = sum(package.size for package in definition.lock.packages)
    require_space({store: round(LEAST_LAYER * packed)}, f"the image of {definition.target.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInputs:
    """What an image is made of, while it is under way.

    `packages` fetches the locked packages into the cache, for engines that take them from there. `base`
    fetches its own, once, and can be made then. `unpacked` gets each layer as files too, if it is wanted.
    """

    base: Callable[[], PendingBase]
    packages: Callable[[], AbstractContextManager[PendingDownloads]]
    unpacked: UnpackedLayers | None


class Engine(Protocol):
    """The module of each has a `make_engine` that takes an Access; its row stands in settings/choices.py."""

    def require(self) -> str:
        """The engine's version. Raises ToolError, with what mends it, when it cannot work here."""

    def find(self, definition: BuildSpec, base: BuiltBase) -> Image | SifArtifact | None:
        """What this engine made of exactly this definition on this base, if the store holds it whole."""

    def build(self, definition: BuildSpec, supplies: BuildInputs, progress: Progress) -> Image | SifArtifact:
        """Makes and tags the image. Raises BuildError; nothing half-done stays in the store."""

    def made_with(self, definition: BuildSpec) -> str:
        """What beside lock and base decides layers' bytes; empty for one that makes others each time."""

    def tag(self, definition: BuildSpec, made: Image | SifArtifact) -> None:
        """Points the target's tag at what was made."""
