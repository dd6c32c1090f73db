"""What every engine offers: an image of the store from a definition and its packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from imagefactory.engines.base.image import BaseImage
from imagefactory.model import Definition, LockedPackage
from imagefactory.oci.model import Image, Sif
from imagefactory.progress import Progress

Packages = Callable[[], Mapping[LockedPackage, Path]]
"""Fetches the locked packages into the cache, for engines that take them from there."""


class Engine(Protocol):
    """The module of each has a `make_engine` that takes an Access; its row stands in settings/choices.py."""

    def require(self) -> str:
        """The engine's version. Raises ToolError, with what mends it, when it cannot work here."""

    def find(self, definition: Definition, base: BaseImage) -> Image | Sif | None:
        """What this engine made of exactly this definition on this base, if the store holds it whole."""

    def build(
        self, definition: Definition, base: BaseImage, packages: Packages, progress: Progress
    ) -> Image | Sif:
        """Makes and tags the image. Raises BuildError; nothing half-done stays in the store."""

    def tag(self, definition: Definition, made: Image | Sif) -> None:
        """Points the target's tag at what was made."""
