"""Find the image or .sif of a target in the store, and the runner of either."""

from __future__ import annotations

import difflib
import json
from importlib import import_module
from pathlib import Path

from imagefactory.access import Access
from imagefactory.errors import BuildError, NothingSelectedError
from imagefactory.fs import user_temporary_directory
from imagefactory.model import Target
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import Descriptor, Image, SifArtifact
from imagefactory.oci.sif import find_sif, is_sif_manifest, load_sif, sif_reference
from imagefactory.oci.store import DIGEST, check_digest
from imagefactory.progress import Progress
from imagefactory.runtime.protocol import Runner, RunnerSupport
from imagefactory.settings.choices import RUNNERS


def stored_image(access: Access, target: Target) -> Image | None:
    """Return the image that the tag of the target points to in the store."""
    return access.layout.image(reference(target))


def stored_sif(access: Access, target: Target) -> SifArtifact | None:
    """Return the .sif that Apptainer built from the definition of the target."""
    return find_sif(access.layout, sif_reference(target))


def load_artifact(access: Access, name: str, descriptor: Descriptor) -> Image | SifArtifact:
    """Return the stored image or .sif with this manifest."""
    layout = access.layout
    if is_sif_manifest(json.loads(layout.read(descriptor))):
        return load_sif(layout, descriptor.digest)
    return layout.load(name, descriptor)


def find_stored(access: Access, name: str) -> Image | SifArtifact | None:
    """Return the stored image or .sif of a tag or digest, None for a name without a tag.

    `name` may also be `NAME@sha256:...`. Raises NothingSelectedError for a tag or digest that the store
    lacks.
    """
    layout = access.layout
    _, separator, digest = name.rpartition("@")
    if separator or DIGEST.fullmatch(name):
        message, near = digest or name, []
        manifest = layout.manifest(check_digest(message))
        if manifest is not None:
            return load_artifact(access, name, manifest[0])
    else:
        tags = layout.tags()
        if name in tags:
            return load_artifact(access, name, tags[name])
        if ":" not in name and "/" not in name:
            return None
        message, near = f"'{name}'", [] if "/" in name else difflib.get_close_matches(name, tags, n=1)
    hint = f"run imagefactory pull {name}" if "/" in name else "see imagefactory image list"
    raise NothingSelectedError(
        "image-not-found",
        f"no image {message} in {layout.path}",
        hint=f"did you mean {near[0]}?" if near else hint,
    )


def require_image(access: Access, name: str) -> Image:
    """Return the image of a tag that was just written. Raises BuildError if another process removed it."""
    image = access.layout.image(name)
    if image is None:
        raise image_removed_error(name)
    return image


def image_removed_error(name: str) -> BuildError:
    return BuildError(
        "image-removed", f"another process removed {name} from the store", hint="run the command again"
    )


def not_built_error(target: Target, more: str = "") -> BuildError:
    return BuildError(
        "image-not-built",
        f"{target.name} is not built",
        hint=f"run imagefactory build {target.name}{more}",
    )


def ensure_sif(
    access: Access, image: Image, target: str, progress: Progress, *, compression: str
) -> SifArtifact:
    """Return the .sif of a stored image, converted if needed. The caller holds the layout's `in_use` lock."""
    from imagefactory.build.sif import SifBuilder
    from imagefactory.runtime.apptainer_command import ApptainerCommand

    maker = SifBuilder(access.layout, ApptainerCommand(access.environ), workers=access.settings.worker_count)
    return maker.make(image, target, compression, progress)


def scratch_directory(access: Access, runner: str) -> Path:
    """Return the directory for files that a run writes. `unshare` uses the store's disk, which has limits.

    Docker and Apptainer get a temporary directory: they may work as root, which a store on NFS rejects.
    """
    return access.layout.scratch if runner == "unshare" else user_temporary_directory()


def make_runner(access: Access, name: str, target: str, progress: Progress) -> Runner:
    """Return the runner with this name in RUNNERS. A .sif that it creates is named after `target`."""
    support = RunnerSupport(
        layout=access.layout,
        environ=access.environ,
        progress=progress,
        workers=access.settings.worker_count,
        ensure_sif=lambda image: ensure_sif(access, image, target, progress, compression="fast"),
    )
    runner: Runner = import_module(RUNNERS[name].module).make_runner(support)
    return runner
