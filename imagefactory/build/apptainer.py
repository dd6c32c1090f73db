"""The engine that builds the rendered definition with Apptainer.

The base comes from the store, through an image layout that Apptainer reads (`Bootstrap: oci`), without a
registry. This machine's settings (index, channels, certificates) are in a directory that is mounted at /mnt
while %post runs. They are in no file of the .sif.

Apptainer's output differs from run to run. So it is recorded by the hash of its inputs, and named by its own
sha256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from imagefactory.access import Access
from imagefactory.build.base.image import BuiltBase
from imagefactory.build.folders import copied_files, render, write_definitions
from imagefactory.build.protocol import BuildInputs, require_image_space
from imagefactory.build.render import render_apptainer
from imagefactory.build.secrets import AskSecrets, build_secrets_of, linker_failure
from imagefactory.build.steps import SITE
from imagefactory.errors import BuildError, StoreError
from imagefactory.fs import explain_full_disk, temporary_directory
from imagefactory.model import BuildSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Image,
    SifArtifact,
    canonical_json,
    format_descriptor,
)
from imagefactory.oci.sif import SifOrigin, load_sif, sif_reference, store_sif
from imagefactory.progress import Progress
from imagefactory.runtime.apptainer_command import SQUASHFS, ApptainerCommand, SifRequest

DEFINITION = "apptainer.def"
SHARED_IMAGE = "image"
"""The directory of a shared layout. A .sif contains this name (`from: image`), which names no machine."""


def make_engine(access: Access) -> ApptainerEngine:
    command = ApptainerCommand(access.environ)
    return ApptainerEngine(access.layout, command, secrets=partial(build_secrets_of, access))


class ApptainerEngine:
    """Builds .sif files into `layout`. `secrets` is called only for a build."""

    def __init__(
        self,
        layout: Layout,
        command: ApptainerCommand,
        secrets: AskSecrets,
    ) -> None:
        self.layout, self.command, self.secrets = layout, command, secrets

    def require(self) -> str:
        """Return Apptainer's version. Raises ToolError if it cannot build here."""
        return self.command.require(building=True)

    def find(self, definition: BuildSpec, base: BuiltBase) -> SifArtifact | None:
        """Return the .sif of this definition on this base, None if the store lacks a part of it."""
        return get_cached_sif(self.layout, self._key(definition, base))

    def build(self, definition: BuildSpec, inputs: BuildInputs, progress: Progress) -> SifArtifact:
        """Build, store and tag the .sif. The packages are fetched inside, each with the lock's hash.

        Raises BuildError with apptainer's last lines, StoreError. The caller holds the layout's `in_use`.
        """
        target, base = definition.target, inputs.base().get()
        require_image_space(self.layout.path, definition)
        secrets = self.secrets(definition.lock)
        with scratch(self.layout) as directory, progress.stage(f"{target.name}: apptainer build"):
            write_definitions(directory, render(definition), copied_files(definition))
            lent = render_apptainer(definition, bootstrap="oci", image_path=SHARED_IMAGE)
            (directory / DEFINITION).write_text(lent, encoding="utf-8")
            share_layout(self.layout, base.image.manifest, directory / SHARED_IMAGE)
            site = directory / "site"
            site.mkdir(mode=0o700)
            secrets.write(site)
            order = SifRequest(
                folder=directory,
                spec=DEFINITION,
                output=directory / f"{target.name}.sif",
                binds=((site, SITE),),
                hide=secrets.hide,
            )
            try:
                self.command.build(order, _progress_reporter(progress))
            except BuildError as error:
                if problem := linker_failure(error.message):
                    raise BuildError(
                        "apptainer-build-failed",
                        f"{target.name}: apptainer build failed: {problem[0]}",
                        hint=problem[1],
                    ) from error
                raise
            origin = SifOrigin(target=target.name, compression="fast")
            sif = store_sif(self.layout, order.output, origin, tag=sif_reference(target))
        record_sif(self.layout, self._key(definition, base), sif)
        return sif

    def toolchain(self, definition: BuildSpec) -> str:  # noqa: ARG002
        return ""

    def tag(self, definition: BuildSpec, image: Image | SifArtifact) -> None:
        """Point `<family>:<tag>.sif` at the image."""
        size = self.layout.blob_path(image.digest).stat().st_size
        descriptor = Descriptor(media_type=MANIFEST_TYPE, digest=image.digest, size=size)
        self.layout.tag(sif_reference(definition.target), descriptor)

    def _key(self, definition: BuildSpec, base: BuiltBase) -> str:
        texts = [text for name, text in render(definition).items() if name != "Dockerfile"]
        return sif_key("build", SQUASHFS, base.image.manifest, *texts)


def share_layout(layout: Layout, manifest: str, directory: Path) -> Descriptor:
    """Create a layout of one image with the store's own blobs. Return its manifest's descriptor.

    The image has no tag: apptainer 1.4 takes a layout's only image, and rejects `oci:DIRECTORY:TAG`.
    """
    blob = layout.manifest(manifest)
    if blob is None:
        raise StoreError(
            "manifest-missing",
            f"{manifest} is not in {layout.path}",
            hint="build it again: imagefactory build TARGET",
        )
    with explain_full_disk(layout.path):
        directory.mkdir()
        (directory / "blobs").symlink_to((layout.path / "blobs").absolute())
        (directory / "oci-layout").write_bytes(canonical_json({"imageLayoutVersion": "1.0.0"}))
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [format_descriptor(blob[0])]}
        (directory / "index.json").write_bytes(canonical_json(index))
    return blob[0]


@contextmanager
def scratch(layout: Layout) -> Iterator[Path]:
    """Yield a directory in the store's tmp/ for one build. A killed build's directory is deleted later."""
    with explain_full_disk(layout.path):
        layout.tmp.mkdir(parents=True, exist_ok=True)
        with temporary_directory("sif-", layout.tmp) as directory:
            yield directory


def _progress_reporter(progress: Progress) -> Callable[[str], None]:
    def tell(line: str) -> None:
        if not line.startswith("+ ") and "━" not in line:  # the shell's trace of %post, pip's bars
            progress.note(f"  {line.removeprefix('INFO:').strip()}")

    return tell


def sif_key(*parts: str) -> str:
    return hashlib.sha256(canonical_json(["sif", *parts])).hexdigest()


def record_sif(layout: Layout, key: str, sif: SifArtifact) -> None:
    layout.record("images", key, {"digest": sif.digest})


def get_cached_sif(layout: Layout, key: str) -> SifArtifact | None:
    record = layout.recall("images", key)
    try:
        return load_sif(layout, str(record["digest"])) if record else None
    except (KeyError, StoreError):
        return None  # a missing or corrupt one is built again
