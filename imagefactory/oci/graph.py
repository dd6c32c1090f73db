"""What an image consists of in any store: a root, the manifests below, their blobs, what refers to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imagefactory.errors import RegistryError
from imagefactory.gpu.capability import AMD64, PLATFORMS
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
from imagefactory.oci.store import DIGEST, Store

EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
EMPTY_BLOB = Descriptor(media_type=EMPTY_TYPE, digest=digest_of(EMPTY), size=len(EMPTY))


# Bounds for manifests of strangers: more depth and breadth than images have.
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
    """All that a root names: manifests in the order they must be put, blobs each once.

    `root` is one of `manifests`; referrers, where they were read, come after it.
    """

    root: Manifest
    manifests: tuple[Manifest, ...]
    blobs: tuple[Descriptor, ...]

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(blob.size for blob in self.blobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalArtifact:
    """A small manifest made here, with the blobs it names, to go along with an image."""

    manifest: Manifest
    blobs: tuple[tuple[Descriptor, bytes], ...]


def read_graph(place: StoreRepository, wanted: str, *, referrers: bool = False) -> ManifestGraph:
    """The root that `wanted` (a tag or digest) names and all below it.

    With `referrers`, also the artifacts whose subject is any manifest of the graph, and theirs.
    Raises RegistryError for what is not there, is no manifest, or nests deeper than images do.
    """
    reader = _GraphReader(place)
    root = reader.read(wanted, depth=0)
    walk = list(reader.manifests) if referrers else []
    for digest in walk:  # grows while it is walked: referrers have referrers
        for found in place.store.referrers(place.repository, digest):
            if found.digest not in reader.manifests:
                reader.read(found.digest, depth=1)
                walk.append(found.digest)
    return ManifestGraph(
        root=root, manifests=tuple(reader.manifests.values()), blobs=tuple(reader.blobs.values())
    )


class _GraphReader:
    def __init__(self, place: StoreRepository) -> None:
        self.place = place
        self.manifests: dict[str, Manifest] = {}
        self.blobs: dict[str, Descriptor] = {}

    def read(self, wanted: str, *, depth: int) -> Manifest:
        """Children first: `manifests` is in the order in which they can be put."""
        if wanted in self.manifests:
            return self.manifests[wanted]
        if depth > MOST_DEPTH or len(self.manifests) >= MOST_MANIFESTS:
            raise RegistryError(
                "manifest-invalid",
                f"{self.place} {wanted} is not an image: its manifests are nested too deep, or too many",
            )
        manifest = read_manifest(self.place, wanted)
        children, blobs = parse_parts(manifest)
        for child in children:
            self.read(child.digest, depth=depth + 1)
        self.blobs.update({blob.digest: blob for blob in blobs})
        self.manifests[manifest.descriptor.digest] = manifest
        return manifest


def read_manifest(place: StoreRepository, wanted: str) -> Manifest:
    """The manifest of a tag or digest. Raises RegistryError when there is none."""
    found = place.store.manifest(place.repository, wanted)
    if found is None:
        raise RegistryError(
            "manifest-not-found", f"{place} has no {wanted}", hint="check the name, and that it was pushed"
        )
    descriptor, data = found
    if len(data) > MANIFEST_LIMIT:
        raise RegistryError(
            "manifest-invalid",
            f"{place} {wanted}: a manifest of {len(data)} bytes is too large (limit: {MANIFEST_LIMIT})",
        )
    return Manifest(descriptor=descriptor, data=data)


def parse_parts(manifest: Manifest) -> tuple[tuple[Descriptor, ...], tuple[Descriptor, ...]]:
    """The manifests and the blobs a manifest names. Raises RegistryError for what is malformed."""
    kind, digest = manifest.descriptor.media_type, manifest.descriptor.digest
    try:
        value = read_json(manifest.data)
        if kind in (*INDEX_TYPES, *MANIFEST_TYPES) and media_type_of(value) != kind:
            raise ValueError(f"it says that it is {media_type_of(value)[:80]!r}, not {kind}")
        if kind in INDEX_TYPES:
            children, blobs = [parse_descriptor(entry) for entry in value["manifests"] or ()], []
        elif kind in MANIFEST_TYPES:
            children, blobs = (
                [],
                [parse_descriptor(entry) for entry in (value["config"], *(value["layers"] or ()))],
            )
        else:
            raise RegistryError(
                "manifest-unsupported",
                f"{digest} is a {kind!r}, not an image",
                hint="supported types: OCI images, OCI artifacts, Docker schema 2",
            )
    except MALFORMED as error:
        raise RegistryError(
            "manifest-invalid", f"the manifest {digest} is malformed: {malformed_reason(error)}"
        ) from error
    for part in (*children, *blobs):
        if part.size < 0:
            raise RegistryError(
                "manifest-invalid", f"the manifest {digest} names a blob of {part.size} bytes"
            )
        if not DIGEST.fullmatch(part.digest):
            raise RegistryError(
                "manifest-invalid",
                f"the manifest {digest} names {part.digest[:80]!r}, which is not a sha256 digest",
            )
    return tuple(children), tuple(blobs)


def read_config(place: StoreRepository, manifest: Manifest) -> ImageConfig | None:
    """The config of an image's manifest, None of an artifact's. Raises RegistryError for a malformed one."""
    config, *layers = parse_parts(manifest)[1]
    if config.media_type not in CONFIG_TYPES:
        return None
    called = f"the config of {manifest.descriptor.digest}"
    if config.size > MANIFEST_LIMIT:
        raise RegistryError(
            "image-config-invalid", f"{called} has {config.size} bytes (limit: {MANIFEST_LIMIT})"
        )
    try:
        return parse_config(b"".join(place.store.read(place.repository, config)), len(layers))
    except MALFORMED as error:
        raise RegistryError(
            "image-config-invalid", f"{called} is malformed: {malformed_reason(error)}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformRoot:
    """Which root to bring for one platform; `whole` is true when that is the very index asked for."""

    digest: str
    whole: bool


def choose_platform(manifest: Manifest, platform: str) -> PlatformRoot:
    """What a pull for `platform` (`linux/amd64`) brings of a manifest or index.

    Without one that is the only image, whatever it is for, and of several that for linux/amd64.

    An index whose every image is for the platform is kept, so that its digest stays what it was;
    attestations beside the images do not count. Of an index with other platforms only the platform's
    manifest is brought. Raises RegistryError when there is none.
    """
    if manifest.descriptor.media_type not in INDEX_TYPES:
        return PlatformRoot(digest=manifest.descriptor.digest, whole=True)
    parse_parts(manifest)  # well-formed from here on
    entries = json.loads(manifest.data)["manifests"]
    images = images_of(entries)
    if not platform:
        platform = next((name for name in PLATFORMS if [name] == _platforms(images)), AMD64)
    system, _, architecture = platform.partition("/")
    fitting = [
        entry for entry in images if "platform" not in entry or _platform_of(entry) == (system, architecture)
    ]
    if not fitting:
        there = ", ".join(_platforms(images)) or "nothing"
        raise RegistryError(
            "platform-not-found",
            f"{manifest.descriptor.digest} has no image for {platform}, only for {there}",
        )
    if len(fitting) == len(images) == 1:
        return PlatformRoot(digest=manifest.descriptor.digest, whole=True)
    # amd64/v3 and the like need newer processors: the plain one runs everywhere.
    fitting.sort(key=lambda entry: "platform" in entry and bool(entry["platform"].get("variant")))
    return PlatformRoot(digest=str(fitting[0]["digest"]), whole=False)


def lacks_platform(index: Manifest, digest: str) -> bool:
    """Whether an index names an image and not what it is for."""
    rows = [row for row in json.loads(index.data)["manifests"] if row["digest"] == digest]
    return not any("platform" in row for row in rows)


def check_unambiguous(manifest: Manifest) -> None:
    """Raises RegistryError for an index of which two tools could take different images for one platform.

    They differ on variants, on compression, on other spellings of a processor (containerd's `x86_64`), on an
    image without a platform, and on one that calls itself an attestation: BuildKit's have the platform
    unknown/unknown. So each platform stands there once, whatever its variant.
    """
    if manifest.descriptor.media_type not in INDEX_TYPES:
        return
    parse_parts(manifest)  # well-formed from here on
    digest, seen = manifest.descriptor.digest, set[tuple[str, str]]()
    entries = json.loads(manifest.data)["manifests"]
    images = images_of(entries)
    for entry in entries:
        named = tuple(str(part).lower() for part in _platform_of(entry)) if "platform" in entry else ("", "")
        platform = (named[0], _PROCESSORS.get(named[1], named[1]))
        if ATTESTATION in (entry.get("annotations") or {}) and platform != ("unknown", "unknown"):
            raise RegistryError(
                "manifest-ambiguous", f"{digest} has an attestation for {'/'.join(platform)[:80]}"
            )
        if entry not in images:
            continue
        if platform in seen or ("" in platform and len(entries) > 1):
            raise RegistryError(
                "manifest-ambiguous",
                f"{digest} has two images that tools may choose for {'/'.join(platform)[:80]!r}",
            )
        seen.add(platform)


_PROCESSORS = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"}
"""What containerd takes for the same processor (its `platforms` module, normalizeArch)."""


def _platforms(images: Iterable[Mapping[str, Any]]) -> list[str]:
    return ["/".join(map(str, _platform_of(entry))) for entry in images if "platform" in entry]


def platforms_in(manifest: Manifest) -> tuple[tuple[str, str], ...]:
    """The platforms that an index has images for, each with the digest of its manifest; none of one image."""
    if manifest.descriptor.media_type not in INDEX_TYPES:
        return ()
    parse_parts(manifest)  # well-formed from here on
    entries = [entry for entry in json.loads(manifest.data)["manifests"] if "platform" in entry]
    found = ((name, str(entry["digest"])) for entry in entries for name in _platforms([entry]))
    known = tuple(one for one in found if one[0] in PLATFORMS)
    return known if len(known) > 1 else ()


def _platform_of(entry: Mapping[str, Any]) -> tuple[object, object]:
    found = entry["platform"] if isinstance(entry["platform"], Mapping) else {}
    return found.get("os"), found.get("architecture")


def make_artifact(
    kind: str, subject: Descriptor, annotations: dict[str, str], content: bytes = b""
) -> LocalArtifact:
    """A referrer of `subject` (image-spec 1.1). Its content is of its own type; without, its annotations say
    what it has to say."""
    layer = (
        Descriptor(media_type=kind, digest=digest_of(content), size=len(content)) if content else EMPTY_BLOB
    )
    manifest = artifact_of(kind, subject, (layer,), annotations)
    blobs = {EMPTY_BLOB: EMPTY, layer: content or EMPTY}
    return LocalArtifact(manifest=manifest, blobs=tuple(blobs.items()))


def artifact_of(
    kind: str,
    subject: Descriptor | None,
    layers: Sequence[Descriptor],
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest of a referrer of `subject` whose content is in `layers`, files that lie elsewhere."""
    data = canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": kind,
            "config": format_descriptor(EMPTY_BLOB),
            "layers": [format_descriptor(layer) for layer in layers],
            **({} if subject is None else {"subject": format_descriptor(subject)}),
            **({} if annotations is None else {"annotations": dict(annotations)}),
        }
    )
    descriptor = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(data), size=len(data))
    return Manifest(descriptor=descriptor, data=data)
