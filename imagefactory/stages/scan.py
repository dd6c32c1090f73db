"""The GPU code in a file, an image of the store or one of a registry: which bytes are scanned."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.access import Access, open_registry
from imagefactory.errors import RegistryError, StoreError, UsageError, os_problem
from imagefactory.gpu.values import Contents
from imagefactory.oci.graph import (
    Manifest,
    Place,
    choose_platform,
    parse_parts,
    read_config,
    read_manifest,
)
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import INDEX_TYPES, ImageConfig, images_of
from imagefactory.oci.mirrors import resolve
from imagefactory.oci.model import Image, Layer, Sif
from imagefactory.oci.sif import sifs_of
from imagefactory.oci.sif_container import is_sif
from imagefactory.oci.store import Reference, parse_reference
from imagefactory.progress import Progress
from imagefactory.scan.files import scan_folder, scan_path
from imagefactory.scan.layers import ScanShelf, layout_shelf, scan_image
from imagefactory.scan.sif import unpacked_sif


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """What was looked at. `how` says in a line where its contents come from; `digest` is an image's.

    `platform` is the architecture that it is made for (`amd64`), empty where it does not say.
    """

    contents: Contents
    how: str
    digest: str = ""
    platform: str = ""


def inspect_made(access: Access, made: Image | Sif, progress: Progress) -> Inspected:
    """What an image or a .sif of the store holds."""
    if isinstance(made, Sif):
        return inspect_kept_sif(access, made, progress)
    return scan_stored(access, made, progress)


def inspect_path(access: Access, path: Path, progress: Progress) -> Inspected:
    workers = access.settings.worker_count
    if path.is_file():
        try:
            sif = is_sif(path)
        except OSError as error:
            raise UsageError(
                *os_problem("read", path, error), hint="pass a file that you can read"
            ) from error
        if sif:
            return _inspect_sif(access, path, progress)
    kind = "folder" if path.is_dir() else "wheel" if path.suffix == ".whl" else "file"
    contents = scan_path(path, progress, workers=workers)
    return Inspected(contents=contents, how=f"scan of the {kind}", platform=wheel_platform(path.name))


def wheel_platform(name: str) -> str:
    """`amd64` for `numba-0.60-cp311-cp311-manylinux_2_17_x86_64.whl`; empty for what is no such wheel."""
    found = re.search(r"_(x86_64|aarch64)\.whl$", name)
    return {"x86_64": "amd64", "aarch64": "arm64"}[found[1]] if found else ""


def _inspect_sif(access: Access, path: Path, progress: Progress) -> Inspected:
    """By the image it was made from, where the store has that; else unpacked."""
    image = _origin(access.layout, path)
    if image is not None:
        found = scan_stored(access, image, progress)
        contents = replace(found.contents, source=path.name)
        return replace(found, contents=contents, how=f"scan of {image.name}, from which it was made")
    layout = access.layout
    with layout.in_use(progress), unpacked_sif(path, layout.tmp, progress) as root:
        contents = scan_folder(root, progress, workers=access.settings.worker_count)
    return Inspected(contents=replace(contents, source=path.name), how="scan of the unpacked .sif")


def _origin(layout: Layout, path: Path) -> Image | None:
    """The image of the store that the .sif at `path` was made from, told by the file's sha256."""
    size, digest = path.stat().st_size, ""
    for name, descriptor in layout.tags().items():
        with contextlib.suppress(StoreError):
            image = layout.load(name, descriptor)
            for sif in sifs_of(layout, image.manifest):
                if sif.file.size == size:
                    digest = digest or _sha256(path)
                    if sif.file.digest == digest:
                        return image
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def inspect_kept_sif(access: Access, sif: Sif, progress: Progress) -> Inspected:
    found = _inspect_sif(access, sif.path, progress)
    return replace(found, contents=replace(found.contents, source=sif.name), digest=sif.digest)


def scan_stored(access: Access, image: Image, progress: Progress) -> Inspected:
    layout = access.layout
    with layout.in_use(progress):
        shelf = layout_shelf(layout, access.settings.worker_count)
        contents = scan_image(image.name, image.layers, shelf, progress)
    return Inspected(
        contents=contents,
        how=f"scan of the image in {layout.path}",
        digest=image.digest,
        platform=image.architecture,
    )


def inspect_registry(access: Access, reference: Reference, progress: Progress) -> Inspected:
    """An image of a registry: of its layers those not known are read through, none is kept."""
    asked, place = find_place(access, str(reference))
    found = image_at(place, asked.wanted)
    with access.layout.in_use(progress):
        shelf = ScanShelf(
            layout=access.layout,
            read=lambda layer: place.store.read(place.repository, layer.descriptor),
            workers=access.settings.worker_count,
        )
        contents = scan_image(str(reference), found.layers, shelf, progress)
    return Inspected(
        contents=contents,
        how=f"scan of the image in {place}",
        digest=found.digest,
        platform=found.config.architecture,
    )


def find_place(access: Access, name: str) -> tuple[Reference, Place]:
    """What a full reference asks for, and where: a mirror, if the site has one."""
    asked = resolve(parse_reference(name), access.settings.mirror_map)
    return asked, Place(store=open_registry(access, asked.registry), repository=asked.repository)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAt:
    """An image where it lies: the digest of its root and of its own manifest, its config and layers."""

    digest: str
    manifest: str
    config: ImageConfig
    layers: tuple[Layer, ...]


def image_at(place: Place, wanted: str) -> ImageAt:
    """The image that a tag or digest names, of several the one for linux/amd64.

    Raises RegistryError for what is none.
    """
    root = read_manifest(place, wanted)
    root = read_manifest(place, choose_platform(root, "").digest)
    manifest = _image_manifest(place, root)
    config, layers = _layers(place, manifest)
    return ImageAt(
        digest=root.descriptor.digest, manifest=manifest.descriptor.digest, config=config, layers=layers
    )


def _image_manifest(place: Place, root: Manifest) -> Manifest:
    """The image's own manifest, also where its index is the root."""
    if root.descriptor.media_type not in INDEX_TYPES:
        return root
    parse_parts(root)  # well-formed from here on
    entries = json.loads(root.data)["manifests"]
    (digest, *_) = (str(entry["digest"]) for entry in images_of(entries))
    return read_manifest(place, digest)


def _layers(place: Place, manifest: Manifest) -> tuple[ImageConfig, tuple[Layer, ...]]:
    config = read_config(place, manifest)
    if config is None:
        raise RegistryError(
            "artifact-not-image",
            f"{place} {manifest.descriptor.digest} is an artifact, not an image",
            hint="if it is a .sif, run imagefactory pull --format sif and inspect the file",
        )
    return config, tuple(
        Layer(descriptor=blob, diff_id=diff_id, title="")
        for blob, diff_id in zip(parse_parts(manifest)[1][1:], config.diff_ids, strict=True)
    )
