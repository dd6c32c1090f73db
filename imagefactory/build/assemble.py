"""The embedded engine: build an OCI image from a lock, without daemon, root or Dockerfile.

The digest depends only on lock, recipe, base and the codec's version. Images and layers are recorded by
their inputs, so an image that the store has is found without its packages, and another image with the same
package writes nothing. assembly.py does the work.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from imagefactory import __version__
from imagefactory.access import Access
from imagefactory.build.base.image import BuiltBase
from imagefactory.build.definition import entrypoint
from imagefactory.build.layer_lock import build_tools_hash, linker
from imagefactory.build.protocol import BuildInputs, recorded_image, tag_image
from imagefactory.model import PLAIN_START, BuildSpec
from imagefactory.oci.layers import codec
from imagefactory.oci.layout import Layout, reference
from imagefactory.oci.manifests import Image, SifArtifact, canonical_json, hash_key
from imagefactory.progress import Progress
from imagefactory.recipes.values import named_packages
from imagefactory.runtime.unshare import UnshareRunner


def make_engine(access: Access) -> AssembleEngine:
    settings = access.settings
    return AssembleEngine(
        access.layout, settings.cache_path, codec=settings.codec.value, workers=settings.worker_count
    )


class AssembleEngine:
    """Builds into `layout` with `workers` threads. `cache` has small segments."""

    def __init__(self, layout: Layout, cache: Path, *, codec: str, workers: int) -> None:
        self.layout, self.cache, self.codec, self.workers = layout, cache, codec, workers

    def find(self, definition: BuildSpec, base: BuiltBase) -> Image | None:
        """Return the image of this definition on this base, None if the store lacks a part of it."""
        return recorded_image(self.layout, self.image_key(definition, base), definition.target)

    def build(self, definition: BuildSpec, inputs: BuildInputs, progress: Progress) -> Image:
        """Build the image of `definition` into the layout and tag it. Raises BuildError or StoreError.

        The caller holds the layout's `in_use`.
        """
        from imagefactory.build.assembly import Assembly

        with progress.stage(f"{definition.target.name}: assemble"):
            assembly = Assembly(self.layout, self.cache, codec=self.codec, workers=self.workers)
            descriptor, base = assembly.build(definition, inputs, progress)
            row = {"digest": descriptor.digest, "size": descriptor.size}
            self.layout.record("images", self.image_key(definition, base), row)
            image = self.layout.load(reference(definition.target), descriptor)
        self.tag(definition, image)
        return image

    def toolchain(self, definition: BuildSpec) -> str:
        return build_tools_hash(definition.lock, self.codec)

    def tag(self, definition: BuildSpec, image: Image | SifArtifact) -> None:
        """Point the target's tag at the image."""
        tag_image(self.layout, definition.target, image)

    def require(self) -> str:
        """Return the engine's version. Raises ToolError if this machine cannot run commands in a base, and
        ModuleNotFoundError if a package of the extra is missing.
        """
        import_module("imagefactory.build.assembly")
        UnshareRunner(self.layout).require()
        return __version__

    def image_key(self, definition: BuildSpec, base: BuiltBase) -> str:
        """Return the hash of all inputs of an image."""
        return hash_key(
            "image",
            codec(self.codec).identity,
            *(layer.descriptor.digest for layer in base.image.layers),
            base.image.manifest,
            base.identity,
            str(base.epoch),
            definition.target.platform,
            definition.prefix,
            definition.target.python,
            canonical_json(_of_config(definition)).decode(),
            *(f"{w.filename} {w.sha256}" for w in definition.lock.wheels),
            # The wheel whose file wins if two have the same path.
            *(
                " ".join(sorted(names))
                for names in (*definition.named_below, named_packages(definition.target))
            ),
            *((linker(),) if definition.lock.conda else ()),
            *(f"{p.url} {p.sha256}" for p in definition.lock.conda),
            # The groups that are planned together.
            *(f"below: {' '.join(sorted(p.sha256 for p in lock.packages))}" for lock in definition.under),
        )


def _of_config(definition: BuildSpec) -> list[object]:
    """Return the inputs of the image's config. `start` is included if it differs from the default."""
    start, decided = definition.start, [definition.environment, definition.labels, entrypoint(definition)]
    config_fields = [start.command, start.workdir, start.user]
    return [*decided, *(config_fields if start != PLAIN_START else [])]
