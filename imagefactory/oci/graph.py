"""The parts of an image in any store: a root, manifests below it, their blobs, artifacts about it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagefactory.errors import RegistryError
from imagefactory.gpu.capability import AMD64, PLATFORMS
from imagefactory.oci.layers import CHUNK
from imagefactory.oci.manifests import (
    ATTESTATION,
    CONFIG_TYPES,
    INDEX_TYPES,
    MALFORMED,
    MANIFEST_LIMIT,
    MANIFEST_TYPE,
    MANIFEST_TYPES,
    Descriptor,
    ImageConfig,
    canonical_json,
    digest_of,
    format_descriptor,
    images_of,
    malformed_reason,
    media_type_of,
    parse_config,
    parse_descriptor,
    read_json,
)
from imagefactory.oci.store import DIGEST, INVALID_HINT, Store

EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
EMPTY_BLOB = Descriptor(media_type=EMPTY_TYPE, digest=digest_of(EMPTY), size=len(EMPTY))
# Limits for untrusted manifests: greater depth and breadth than images have.
MOST_MANIFESTS = 2000
MOST_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRepository:
    """A repository of a store."""

    store: Store
    repository: str

    def __str__(self) -> str:
        return f"{self.store.name}/{self.repository}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A manifest or index and its exact bytes, on which its digest depends."""

    descriptor: Descriptor
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestGraph:
    """A root and all its parts: manifests in the order to put them, and each blob once.

    `root` is one of `manifests`. Referrers, if read, come after the root.
    """

    root: Manifest
    manifests: tuple[Manifest, ...]
    blobs: tuple[Descriptor, ...]

    @property
    def size(self) -> int:
        """Return the bytes of all blobs."""
        return sum(blob.size for blob in self.blobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalArtifact:
    """A small manifest that is sent with an image, and its blobs."""

    manifest: Manifest
    blobs: tuple[tuple[Descriptor, bytes], ...]


def read_graph(repo: StoreRepository, reference: str, *, referrers: bool = False) -> ManifestGraph:
    """Return the root of a tag or digest, and all its parts.

    With `referrers`, also the artifacts whose subject is any manifest of the graph, and their own referrers.
    Raises RegistryError for a missing or invalid manifest, and for manifests nested too deep.
    """
    reader = _GraphReader(repo)
    root = reader.read(reference, depth=0)
    subjects = list(reader.manifests) if referrers else []
    for subject in subjects:  # the list grows during the loop: referrers have referrers
        for referrer in repo.store.referrers(repo.repository, subject):
            if referrer.digest not in reader.manifests:
                reader.read(referrer.digest, depth=1)
                subjects.append(referrer.digest)
    return ManifestGraph(
        root=root, manifests=tuple(reader.manifests.values()), blobs=tuple(reader.blobs.values())
    )


class _GraphReader:
    def __init__(self, repo: StoreRepository) -> None:
        self.place = repo
        self.manifests: dict[str, Manifest] = {}
        self.blobs: dict[str, Descriptor] = {}

    def read(self, reference: str, *, depth: int) -> Manifest:
        """Add a manifest after its children, so that `manifests` is in the order to put them."""
        if reference in self.manifests:
            return self.manifests[reference]
        if depth > MOST_DEPTH or len(self.manifests) >= MOST_MANIFESTS:
            raise RegistryError(
                "manifest-invalid",
                f"{self.place} {reference} is not an image: it has too many manifests, or nested too deep",
                hint=INVALID_HINT,
            )
        manifest = read_manifest(self.place, reference)
        children, blobs = parse_parts(manifest)
        for child in children:
            self.read(child.digest, depth=depth + 1)
        self.blobs.update({blob.digest: blob for blob in blobs})
        self.manifests[manifest.descriptor.digest] = manifest
        return manifest


def read_manifest(repo: StoreRepository, reference: str) -> Manifest:
    """Return the manifest of a tag or digest. Raises RegistryError if there is none."""
    manifest = repo.store.manifest(repo.repository, reference)
    if manifest is None:
        raise RegistryError(
            "manifest-not-found", f"{repo} has no {reference}", hint="check the name, or push the image"
        )
    descriptor, data = manifest
    if len(data) > MANIFEST_LIMIT:
        raise RegistryError(
            "manifest-invalid",
            f"{repo} {reference}: a manifest of {len(data)} bytes is too large (limit: {MANIFEST_LIMIT})",
            hint=INVALID_HINT,
        )
    return Manifest(descriptor=descriptor, data=data)


def parse_parts(manifest: Manifest) -> tuple[tuple[Descriptor, ...], tuple[Descriptor, ...]]:
    """Return the manifests and the blobs in a manifest. Raises RegistryError for a malformed one."""
    media_type, digest = manifest.descriptor.media_type, manifest.descriptor.digest
    children: list[Descriptor] = []
    blobs: list[Descriptor] = []
    try:
        value = read_json(manifest.data)
        if media_type in (*INDEX_TYPES, *MANIFEST_TYPES) and media_type_of(value) != media_type:
            raise ValueError(f"its media type is {media_type_of(value)[:80]!r}, expected {media_type}")
        if media_type in INDEX_TYPES:
            children = [parse_descriptor(entry) for entry in value["manifests"] or ()]
        elif media_type in MANIFEST_TYPES:
            blobs = [parse_descriptor(entry) for entry in (value["config"], *(value["layers"] or ()))]
        else:
            raise RegistryError(
                "manifest-unsupported",
                f"{digest} has the unsupported type {media_type!r}",
                hint="use an OCI image, an OCI artifact or a Docker image of schema 2",
            )
    except MALFORMED as error:
        raise RegistryError(
            "manifest-invalid",
            f"the manifest {digest} is malformed: {malformed_reason(error)}",
            hint=INVALID_HINT,
        ) from error
    for part in (*children, *blobs):
        if part.size < 0:
            raise RegistryError(
                "manifest-invalid",
                f"the manifest {digest} has a blob of {part.size} bytes, which is impossible",
                hint=INVALID_HINT,
            )
        if not DIGEST.fullmatch(part.digest):
            raise RegistryError(
                "manifest-invalid",
                f"the manifest {digest} has {part.digest[:80]!r}, which is not a sha256 digest",
                hint=INVALID_HINT,
            )
    return tuple(children), tuple(blobs)


def read_config(repo: StoreRepository, manifest: Manifest) -> ImageConfig | None:
    """Return the config of an image's manifest, None for an artifact. Raises RegistryError if malformed."""
    config, *layers = parse_parts(manifest)[1]
    if config.media_type not in CONFIG_TYPES:
        return None
    title = f"the config of {manifest.descriptor.digest}"
    if config.size > MANIFEST_LIMIT:
        raise RegistryError(
            "image-config-invalid",
            f"{title} has {config.size} bytes (limit: {MANIFEST_LIMIT})",
            hint=INVALID_HINT,
        )
    try:
        return parse_config(b"".join(repo.store.read(repo.repository, config)), len(layers))
    except MALFORMED as error:
        raise RegistryError(
            "image-config-invalid",
            f"{title} is malformed: {malformed_reason(error)}",
            hint=INVALID_HINT,
        ) from error


# --- platforms of an index ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformRoot:
    """The root to pull for one platform. `whole` is true for the requested index itself."""

    digest: str
    whole: bool


def choose_platform(manifest: Manifest, platform: str) -> PlatformRoot:
    """Return the root to pull for `platform` (`linux/amd64`) from a manifest or index.

    Without a platform: the only image, or the one for linux/amd64 of several. An index with images for only
    this platform is pulled as it is, attestations included, so its digest stays. Of other indexes only the
    platform's manifest is pulled. Raises RegistryError if there is none.
    """
    digest = manifest.descriptor.digest
    if manifest.descriptor.media_type not in INDEX_TYPES:
        return PlatformRoot(digest=digest, whole=True)
    images = images_of(_entries(manifest))
    if not platform:
        platform = next((name for name in PLATFORMS if [name] == _platforms(images)), AMD64)
    system, _, architecture = platform.partition("/")
    matches = [
        entry for entry in images if "platform" not in entry or _platform_of(entry) == (system, architecture)
    ]
    if not matches:
        available = ", ".join(_platforms(images)) or "nothing"
        raise RegistryError(
            "platform-not-found",
            f"{digest} has no image for {platform}, only for {available}",
            hint="use another tag or digest, or push an image for this platform",
        )
    if len(matches) == len(images) == 1:
        return PlatformRoot(digest=digest, whole=True)
    # amd64/v3 and similar variants need newer processors: the plain one runs everywhere.
    matches.sort(key=lambda entry: "platform" in entry and bool(entry["platform"].get("variant")))
    return PlatformRoot(digest=str(matches[0]["digest"]), whole=False)


def lacks_platform(index: Manifest, digest: str) -> bool:
    """Return whether the index has no platform for the image with this digest."""
    return not any(
        row["digest"] == digest and "platform" in row for row in json.loads(index.data)["manifests"]
    )


def check_unambiguous(manifest: Manifest) -> None:
    """Raise RegistryError if two tools may choose different images of an index for one platform.

    Tools differ on variants, on compression, on other names of a processor (containerd's `x86_64`), on
    images without a platform, and on images that claim to be attestations: BuildKit's have the platform
    unknown/unknown. So each platform may appear once, whatever its variant.
    """
    if manifest.descriptor.media_type not in INDEX_TYPES:
        return
    digest, seen = manifest.descriptor.digest, set[tuple[str, str]]()
    entries = _entries(manifest)
    images = images_of(entries)
    for entry in entries:
        parts = tuple(str(part).lower() for part in _platform_of(entry)) if "platform" in entry else ("", "")
        platform = (parts[0], _PROCESSORS.get(parts[1], parts[1]))
        if ATTESTATION in (entry.get("annotations") or {}) and platform != ("unknown", "unknown"):
            raise RegistryError(
                "manifest-ambiguous",
                f"{digest} has an attestation where tools expect the image for {'/'.join(platform)[:80]}",
                hint=INVALID_HINT,
            )
        if entry not in images:
            continue
        if platform in seen or ("" in platform and len(entries) > 1):
            raise RegistryError(
                "manifest-ambiguous",
                f"{digest} has two images for {'/'.join(platform)[:80]!r}, expected one",
                hint=INVALID_HINT,
            )
        seen.add(platform)


_PROCESSORS = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"}
"""Other names that containerd accepts (its `platforms` module, normalizeArch)."""


def platforms_in(manifest: Manifest) -> tuple[tuple[str, str], ...]:
    """Return each known platform of an index with the digest of its manifest; nothing for a single image."""
    if manifest.descriptor.media_type not in INDEX_TYPES:
        return ()
    rows = [(name, str(entry["digest"])) for entry in _entries(manifest) for name in _platforms([entry])]
    known = tuple(row for row in rows if row[0] in PLATFORMS)
    return known if len(known) > 1 else ()


def _entries(index: Manifest) -> list[Mapping[str, Any]]:
    parse_parts(index)  # raises for a malformed index
    entries: list[Mapping[str, Any]] = json.loads(index.data)["manifests"]
    return entries


def _platforms(images: Iterable[Mapping[str, Any]]) -> list[str]:
    return ["/".join(map(str, _platform_of(entry))) for entry in images if "platform" in entry]


def _platform_of(entry: Mapping[str, Any]) -> tuple[object, object]:
    platform = entry["platform"] if isinstance(entry["platform"], Mapping) else {}
    return platform.get("os"), platform.get("architecture")


# --- artifacts ---


def make_artifact(
    artifact_type: str, subject: Descriptor, annotations: dict[str, str], content: bytes = b""
) -> LocalArtifact:
    """Return a referrer of `subject` (image-spec 1.1) with one layer of its own type, or only annotations."""
    layer = EMPTY_BLOB
    if content:
        layer = Descriptor(media_type=artifact_type, digest=digest_of(content), size=len(content))
    manifest = artifact_of(artifact_type, subject, (layer,), annotations)
    blobs = {EMPTY_BLOB: EMPTY, layer: content or EMPTY}
    return LocalArtifact(manifest=manifest, blobs=tuple(blobs.items()))


def artifact_of(
    artifact_type: str,
    subject: Descriptor | None,
    layers: Sequence[Descriptor],
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """Return the manifest of a referrer of `subject` whose content is in `layers`."""
    value: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": artifact_type,
        "config": format_descriptor(EMPTY_BLOB),
        "layers": [format_descriptor(layer) for layer in layers],
    }
    if subject is not None:
        value["subject"] = format_descriptor(subject)
    if annotations is not None:
        value["annotations"] = dict(annotations)
    data = canonical_json(value)
    descriptor = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(data), size=len(data))
    return Manifest(descriptor=descriptor, data=data)


WITHDRAWN = artifact_of("application/vnd.imagefactory.withdrawn.v1", None, (EMPTY_BLOB,))
"""The artifact for a withdrawn tag in a registry that cannot remove tags. No engine runs it."""


def withdraw_tag(repo: StoreRepository, tag: str) -> bool:
    """Remove a tag. Return False if the registry cannot: the tag then points to WITHDRAWN.

    Docker's registry before 3.0 cannot remove tags. Raises RegistryError if neither is possible.
    """
    try:
        repo.store.untag(repo.repository, tag)
    except RegistryError:
        put_bytes(repo, EMPTY_BLOB, EMPTY)
        put_manifest(repo, WITHDRAWN, tag)
        return False
    return True


def put_artifact(repo: StoreRepository, artifact: LocalArtifact) -> None:
    """Put an artifact next to its subject. Raises RegistryError if the store does not confirm it."""
    for blob, data in artifact.blobs:
        put_bytes(repo, blob, data)
    put_manifest(repo, artifact.manifest)


def put_files(repo: StoreRepository, manifest: Manifest, files: Mapping[Descriptor, Path]) -> None:
    """Put an artifact whose layers are files on disk. Raises RegistryError like `put_artifact`."""
    put_bytes(repo, EMPTY_BLOB, EMPTY)
    for blob, path in files.items():
        if not repo.store.has(repo.repository, blob):
            repo.store.write(repo.repository, blob, functools.partial(_chunks, path))
    put_manifest(repo, manifest)


def _chunks(path: Path, offset: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(CHUNK):
            yield chunk


def put_bytes(repo: StoreRepository, descriptor: Descriptor, data: bytes) -> int:
    """Put a small blob unless it exists; return the bytes that were sent."""
    if repo.store.has(repo.repository, descriptor):
        return 0
    return repo.store.write(repo.repository, descriptor, lambda offset: iter((data[offset:],)))


def put_manifest(repo: StoreRepository, manifest: Manifest, tag: str = "") -> None:
    """Put a manifest. Raises RegistryError unless the store confirms it, by its tag if there is one."""
    media_type = manifest.descriptor.media_type
    stored = repo.store.put_manifest(repo.repository, manifest.data, media_type, tag)
    if stored.digest != manifest.descriptor.digest:
        raise RegistryError(
            "push-overwritten",
            f"{repo}: {manifest.descriptor.digest} was pushed, but "
            f"{tag or 'the stored manifest'} is now {stored.digest}",
            hint="stop the other program that pushes this tag, then push again",
        )
