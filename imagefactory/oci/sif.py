"""A .sif file in the store: an OCI artifact, so that whatever moves images moves it too.

The manifest has the form that `apptainer pull oras://` takes (tried: by tag and by digest, with and
without a subject): one layer, the file itself. Converted from an image, it names that image's platform
manifest as its subject and needs no tag: `store gc` keeps it as long as the image. Built by apptainer
from a definition it has no subject and the tag `<family>:<tag>.sif`.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagefactory.errors import StoreError, UsageError, os_problem
from imagefactory.fs import explain_full_disk, replacing
from imagefactory.model import Target
from imagefactory.oci.archive import check_output
from imagefactory.oci.layers import CHUNK
from imagefactory.oci.layout import Layout, reference
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.manifests import (
    MANIFEST_TYPE,
    TITLE,
    canonical_json,
    format_descriptor,
    parse_descriptor,
)
from imagefactory.oci.model import Descriptor, Sif
from imagefactory.progress import Progress

SIF_TYPE = "application/vnd.sylabs.sif.layer.v1.sif"
"""Media type of the file, and the artifact's type: what apptainer itself pushes and pulls."""
SIF_CONFIG_TYPE = "application/vnd.sylabs.sif.config.v1+json"
SIF_CONFIG = b"{}"
COMPRESSION = "imagefactory.sif.compression"
TARGET = "imagefactory.target"


@dataclass(frozen=True, slots=True, kw_only=True)
class SifOrigin:
    """What a .sif is: of which target, how compressed, and the platform manifest it was converted from.

    `subject` is None where apptainer built it from a definition.
    """

    target: str
    compression: str
    subject: Descriptor | None = None


def sif_name(target: str, digest: str) -> str:
    """`<target>-<12 hex of the file's sha256>.sif`: other bytes, other name, since caches go by names."""
    return f"{target}-{digest.removeprefix('sha256:')[:12]}.sif"


def sif_reference(target: Target) -> str:
    """The tag of a .sif built from the target's definition: `pytorch:2.3-cu121.sif`."""
    return f"{reference(target)}.sif"


def format_sif_manifest(file: Descriptor, config: Descriptor, origin: SifOrigin) -> dict[str, object]:
    """The artifact's manifest. Pure."""
    title = sif_name(origin.target, file.digest)
    layer = {**format_descriptor(file), "annotations": {TITLE: title}}
    manifest: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": SIF_TYPE,
        "config": format_descriptor(config),
        "layers": [layer],
        "annotations": {TITLE: title, COMPRESSION: origin.compression, TARGET: origin.target},
    }
    if origin.subject:
        plain = Descriptor(
            media_type=origin.subject.media_type, digest=origin.subject.digest, size=origin.subject.size
        )
        manifest["subject"] = format_descriptor(plain)
    return manifest


def is_sif_manifest(manifest: dict[str, Any]) -> bool:
    """Whether this is a manifest of a .sif, ours or of another tool's pushing."""
    layers = manifest.get("layers") or [{}]
    return len(layers) == 1 and layers[0].get("mediaType") == SIF_TYPE


def keep_sif(layout: Layout, path: Path, origin: SifOrigin, *, digest: str = "", tag: str = "") -> Sif:
    """Moves the file at `path` (on the store's file system) into the store, with its manifest.

    `digest` is the file's where it is known; `tag` is a whole reference (`pytorch:2.3-cu121.sif`). The caller
    holds the layout's `in_use`.
    """
    with explain_full_disk(layout.path):
        with path.open("rb") as handle:
            digest = digest or f"sha256:{hashlib.file_digest(handle, 'sha256').hexdigest()}"
            os.fchmod(handle.fileno(), 0o644)
        file = Descriptor(media_type=SIF_TYPE, digest=digest, size=path.stat().st_size)
        blob = layout.blob_path(digest)
        blob.parent.mkdir(parents=True, exist_ok=True)
        path.replace(blob)
    config = layout.add(SIF_CONFIG, SIF_CONFIG_TYPE)
    data = canonical_json(format_sif_manifest(file, config, origin))
    repository, _, name = (tag or f"{origin.target}:").partition(":")
    descriptor = LayoutStore(layout).put_manifest(repository, data, MANIFEST_TYPE, name)
    return load_sif(layout, descriptor.digest)


def load_sif(layout: Layout, digest: str) -> Sif:
    """The .sif of a manifest. Raises StoreError when it is not here whole or is no .sif."""
    found = layout.manifest(digest)
    if found is None:
        raise StoreError("blob-missing", f"{digest} is not in {layout.path}")
    manifest = json.loads(found[1])
    if not is_sif_manifest(manifest):
        raise StoreError("not-a-sif", f"{digest} in {layout.path} is not a .sif")
    file = parse_descriptor(manifest["layers"][0])
    if not layout.has(file):
        raise StoreError(
            "blob-missing",
            f"the file of {digest} is missing from {layout.path}, or truncated",
            hint="build the .sif again: it is kept then",
        )
    notes = manifest.get("annotations") or {}
    return Sif(
        name=str(notes.get(TITLE) or dict(file.annotations).get(TITLE) or sif_name("image", file.digest)),
        digest=digest,
        file=Descriptor(media_type=file.media_type, digest=file.digest, size=file.size),
        path=layout.blob_path(file.digest),
        made_from=str((manifest.get("subject") or {}).get("digest", "")),
        compression=str(notes.get(COMPRESSION, "")),
    )


def copy_sif(sif: Sif, output: Path, progress: Progress) -> None:
    """Copies the file to `output`, beside and renamed, checked by its sha256 on the way.

    A copy and not a link: what a person does to a file of his own (`apptainer sign`) must not reach the
    store. Raises StoreError when the kept file is damaged, UsageError when `output` cannot be written.
    """
    check_output(output)
    sha256 = hashlib.sha256()
    try:
        with sif.path.open("rb") as source, replacing(output, mode=0o755) as file:
            with progress.task(f"writing {output.name}", total=sif.file.size) as task:
                while data := source.read(CHUNK):
                    sha256.update(data)
                    file.write(data)
                    task.advance(len(data))
            if f"sha256:{sha256.hexdigest()}" != sif.file.digest:
                raise StoreError(
                    "store-corrupt",
                    f"the kept file of {sif.name} is corrupt",
                    hint=f"delete it (rm {sif.path}) and run the same command again",
                )
    except OSError as error:
        raise UsageError(*os_problem("write", output, error), hint="choose another file: -o FILE") from error


def find_sif(layout: Layout, tag: str) -> Sif | None:
    """The .sif that a tag of the layout (`pytorch:2.3-cu121.sif`) points to, or None."""
    descriptor = layout.tags().get(tag)
    return None if descriptor is None else load_sif(layout, descriptor.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A .sif that the store keeps with the image whose platform manifest is `subject`, without a tag.

    `digest` is of its own manifest; `found` is the .sif, or why it cannot be used.
    """

    name: str
    subject: str
    digest: str
    found: Sif | StoreError


def kept_sifs(layout: Layout, manifest: str) -> tuple[Kept, ...]:
    """The .sif files made from the image of this platform manifest, by name, the damaged ones too."""
    referrers = LayoutStore(layout).referrers("", manifest, SIF_TYPE)
    return tuple(sorted((_kept(layout, manifest, each) for each in referrers), key=lambda one: one.name))


def _kept(layout: Layout, subject: str, referrer: Descriptor) -> Kept:
    found: Sif | StoreError
    try:
        found = load_sif(layout, referrer.digest)
        name = found.name
    except StoreError as error:
        found = StoreError(
            "sif-unusable",
            error.message,
            hint="run imagefactory store gc to drop it: it is built again when needed",
        )
        name = dict(referrer.annotations).get(TITLE) or referrer.digest
    return Kept(name=name, subject=subject, digest=referrer.digest, found=found)


def sifs_of(layout: Layout, manifest: str) -> tuple[Sif, ...]:
    """The .sif files made from the image of this platform manifest, by name, without damaged ones."""
    return tuple(one.found for one in kept_sifs(layout, manifest) if isinstance(one.found, Sif))
