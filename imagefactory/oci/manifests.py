"""Manifests, indexes and descriptors of the OCI image specification: their types, bytes and digests."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagefactory.errors import NoPlatformError
from imagefactory.gpu.capability import AMD64
from imagefactory.model import ContainerStart

# --- The frozen values of artifacts: descriptors, layers, images and .sif files
# Digests are strings `sha256:<64 hex>`; sizes are bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """OCI content descriptor: a digest, its media type and size in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OciLayer:
    """One layer: its compressed blob and `diff_id`, the digest of the uncompressed tar."""

    descriptor: Descriptor
    diff_id: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image of the store.

    `digest` is the image index that tags point to, `manifest` the platform manifest that verdicts are about,
    `config` the image config, which determines the uncompressed content. `size` is the sum of the compressed
    layers in bytes. `architecture` (`amd64`) may be empty. `start` is how a container starts.
    """

    name: str
    digest: str
    manifest: str
    config: str
    size: int
    layers: tuple[OciLayer, ...]
    environment: tuple[tuple[str, str], ...]
    architecture: str = ""
    start: ContainerStart = field(default_factory=ContainerStart)


@dataclass(frozen=True, slots=True, kw_only=True)
class SifArtifact:
    """A .sif file of the store, stored as an OCI artifact.

    `digest` is the artifact's manifest. `file` is the descriptor of the .sif itself, whose digest is the
    file's sha256. `made_from` is the digest of the platform manifest that the .sif was converted from, empty
    if apptainer built it from a definition.
    """

    name: str
    digest: str
    file: Descriptor
    path: Path
    made_from: str
    compression: str

    @property
    def config(self) -> str:
        """The key of check results, as the config of an image. Here it is the sha256 of the file."""
        return self.file.digest


INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
# OCI types first; many registries still have docker's own.
INDEX_TYPES = (INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFEST_TYPES = (MANIFEST_TYPE, "application/vnd.docker.distribution.manifest.v2+json")
CONFIG_TYPES = (CONFIG_TYPE, "application/vnd.docker.container.image.v1+json")
MANIFEST_LIMIT = 4 << 20  # bytes; the limit of registries in the distribution specification
REF_NAME = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image.title"


def canonical_json(value: object) -> bytes:
    """Return one byte sequence for one value: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def parse_descriptor(data: Mapping[str, Any]) -> Descriptor:
    """Return a descriptor; its digest is not checked. Raises one of MALFORMED."""
    size = data["size"]
    if type(size) is not int:  # JSON has 1e400 and true too
        raise ValueError(f"{str(size)[:40]!r} is not a size")
    return Descriptor(
        media_type=str(data["mediaType"]),
        digest=str(data["digest"]),
        size=size,
        annotations=tuple(sorted((str(k), str(v)) for k, v in (data.get("annotations") or {}).items())),
    )


def format_descriptor(descriptor: Descriptor) -> dict[str, object]:
    plain: dict[str, object] = {
        "mediaType": descriptor.media_type,
        "digest": descriptor.digest,
        "size": descriptor.size,
    }
    if descriptor.annotations:
        plain["annotations"] = dict(descriptor.annotations)
    return plain


def read_json(data: bytes) -> Any:
    """Parse a manifest or config. Raises ValueError if other tools may read it differently.

    Docker, Podman and Apptainer ignore the case of names and use the last one (Go's encoding/json). So an
    object with one name in two spellings is rejected, and so is a field of the specification in another
    spelling, which imagefactory would not see. The keys of maps, such as labels, are exempt.
    """
    value = json.loads(data, object_pairs_hook=_object)
    _check_names(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is duplicate")
    return value


def _check_names(value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_names(item)
    if isinstance(value, dict):
        folded = {name.casefold() for name in value}
        if len(folded) != len(value):
            raise ValueError("a key is spelled in two ways")
        for name, item in value.items():
            if (field := _FIELDS.get(name.casefold(), name)) != name:
                raise ValueError(f"expected the key '{field}', found {name[:80]!r}")
            if name.casefold() not in _MAPS:
                _check_names(item)


_FIELDS = {
    name.casefold(): name
    for name in (
        *(
            "schemaVersion",
            "mediaType",
            "artifactType",
            "config",
            "layers",
            "manifests",
            "subject",
            "annotations",
        ),
        *("digest", "size", "urls", "data", "platform", "architecture", "os", "variant"),
        *("os.version", "os.features", "features", "rootfs", "diff_ids"),
        *("Env", "Entrypoint", "Cmd", "WorkingDir", "User", "Labels"),
    )
}
"""The fields that imagefactory or other tools read, in the spelling of image-spec."""
_MAPS = {"annotations", "labels", "exposedports", "volumes"}
"""Fields of manifests and configs with free keys, which the specification does not define."""


def media_type_of(value: Mapping[str, Any]) -> str:
    """Return the media type of a manifest; without the optional field, its contents decide.

    Raises ValueError for another value, and for an index and an image at once: image-spec 1.0.2 forbids that,
    as tools would disagree (CVE-2021-41190).
    """
    declared = value.get("mediaType")
    if "manifests" in value and ("config" in value or "layers" in value):
        raise ValueError("it is an image index and an image manifest at once")
    if declared:
        return str(declared)
    if isinstance(value.get("manifests"), list):
        return INDEX_TYPE
    if isinstance(value.get("config"), dict):
        return MANIFEST_TYPE
    raise ValueError("it is neither an image index nor an image manifest")


def artifact_type(value: Mapping[str, Any]) -> str:
    """Return a referrer's type: its artifactType, else its config's media type (image-spec 1.1)."""
    config = value.get("config")
    kind = value.get("artifactType") or (config.get("mediaType") if isinstance(config, dict) else "")
    return str(kind or "")


MALFORMED = (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError, OverflowError)
"""The errors of reading untrusted JSON with another structure than expected."""


def malformed_reason(error: Exception) -> str:
    """Return the reason in one of MALFORMED, for a person."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, ValueError):
        return str(error)
    return "a value in it has the wrong type"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The used parts of an image's config (image-spec). `diff_ids` are those of its layers."""

    diff_ids: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    architecture: str
    start: ContainerStart
    labels: tuple[tuple[str, str], ...]
    created: str


def parse_config(data: bytes, layers: int) -> ImageConfig:
    """Return the config of an image with this number of layers. Raises one of MALFORMED."""
    value = read_json(data)
    diff_ids, run = value["rootfs"]["diff_ids"], value.get("config") or {}
    variables, entrypoint, command = (run.get(key) or [] for key in ("Env", "Entrypoint", "Cmd"))
    single = (run.get("WorkingDir") or "", run.get("User") or "")
    if not all(isinstance(text, str) for text in (*diff_ids, *variables, *entrypoint, *command, *single)):
        raise ValueError("a diff id, a variable or the start command is not text")
    if len(diff_ids) != layers:
        raise ValueError(f"expected {layers} diff ids, one for each layer, found {len(diff_ids)}")
    wrong = next((text for text in diff_ids if not re.fullmatch(r"sha256:[0-9a-f]{64}", text)), None)
    if wrong is not None:
        raise ValueError(f"{wrong[:80]!r} is not a diff id")
    split = (variable.partition("=") for variable in variables)
    return ImageConfig(
        diff_ids=tuple(diff_ids),
        environment=tuple((name, content) for name, _, content in split),
        architecture=str(value.get("architecture", "")),
        start=ContainerStart(
            entrypoint=tuple(entrypoint), command=tuple(command), workdir=single[0], user=single[1]
        ),
        labels=tuple((str(name), str(text)) for name, text in (run.get("Labels") or {}).items()),
        created=str(value.get("created") or ""),
    )


ATTESTATION = "vnd.docker.reference.type"
"""The annotation of an index entry that is an attestation of another entry (BuildKit)."""


def images_of(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of an index that are images, without attestations.

    Attestations have no platform, BuildKit's the platform unknown/unknown. Registries that copy an index may
    drop annotations.
    """
    images = [entry for entry in entries if ATTESTATION not in (entry.get("annotations") or {})]
    return [entry for entry in images if not _is_unknown_platform(entry.get("platform"))] or images


def _is_unknown_platform(platform: object) -> bool:
    return isinstance(platform, Mapping) and platform.get("os") == platform.get("architecture") == "unknown"


def choose_image(name: str, entries: list[Mapping[str, Any]]) -> Descriptor:
    """Return the image of an index: the only one, else that of linux/amd64. Raises NoPlatformError."""
    images = images_of(entries)
    if len(images) == 1:
        return parse_descriptor(images[0])
    platforms = []
    for entry in images:
        platform = entry.get("platform") or {}
        platforms.append(f"{platform.get('os')}/{platform.get('architecture')}")
        if platforms[-1] == AMD64:
            return parse_descriptor(entry)
    there = ", ".join(dict.fromkeys(platforms)).replace("None/None", "no platform")
    raise NoPlatformError(
        "store-platform-missing",
        f"{name} has no image for {AMD64}, only for {there or 'nothing'}",
        hint=f"run imagefactory image remove {name}",
    )


# A layer's first bytes decide its compression: some tools and registries wrongly say gzip.
LAYER_CODECS = {
    "application/vnd.oci.image.layer.v1.tar": "tar",
    "application/vnd.oci.image.layer.v1.tar+gzip": "gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "zstd",
    "application/vnd.docker.image.rootfs.diff.tar": "tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "zstd",
}


LAYERS_VERSION = 2
"""The format of layers.py. Another number rebuilds every layer."""


def hash_key(*parts: str) -> str:
    return hashlib.sha256(canonical_json([LAYERS_VERSION, *parts])).hexdigest()
