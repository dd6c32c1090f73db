"""What every engine offers: an image of the store from a definition and its packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from imagefactory.model import Definition, Image, LockedWheel
from imagefactory.progress import Progress

if TYPE_CHECKING:
    from imagefactory.engines.base_image import BaseLayer


class Engine(Protocol):
    def require(self) -> str:
        """The engine's version. Raises ToolError, with what mends it, when it cannot work here."""

    def find(self, definition: Definition, base: BaseLayer) -> Image | None:
        """The image of exactly this definition on this base, if the store holds it whole."""

    def build(
        self,
        definition: Definition,
        base: BaseLayer,
        wheels: Mapping[LockedWheel, Path],
        progress: Progress,
    ) -> Image:
        """Makes and tags the image. Raises BuildError; nothing half-done stays in the store."""

    def tag(self, definition: Definition, image: Image) -> None:
        """Points the target's tag at `image`."""
