"""A base from a registry, by digest: pulled into the store once, and checked.

The recipe declares the image's Python and C library, because locking pulls nothing. They are checked in the
image itself before anything is built on it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from imagefactory.build.base.image import BuiltBase, PendingBase, as_pending_base
from imagefactory.errors import BuildError, RegistryError, StoreError
from imagefactory.fs import explain_full_disk
from imagefactory.gpu.capability import architecture
from imagefactory.model import BaseLock, BaseSpec, CommandResult, RunSpec
from imagefactory.oci.graph import Manifest, StoreRepository, choose_platform, read_graph, read_manifest
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    CONFIG_TYPES,
    INDEX_TYPE,
    INDEX_TYPES,
    MANIFEST_TYPES,
    Descriptor,
    Image,
    canonical_json,
    format_descriptor,
    images_of,
)
from imagefactory.oci.store import ImageReference, Mirrors, Store, parse_reference, resolve_mirror
from imagefactory.oci.transfer import TransferRequest, send
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import Progress
from imagefactory.runtime.hardware import PROBE_GLIBC
from imagefactory.runtime.unshare import UnshareRunner

REPOSITORY = "base"
# The OCI names of the same bytes: an image on a base is an OCI image.
LAYER_TYPES = {
    "application/vnd.docker.image.rootfs.diff.tar": "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar": "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}
# 1980, the first year that wheels can write, to 2100: for images without a date or with a nonsensical one.
OLDEST, NEWEST = 315_532_800, 4_102_444_800
# The image's own Python runs it: its version, and its C library (confstr(3), only with glibc).
PROBE = """\
import os, sys
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION")
except (ValueError, OSError):
    libc = None
print("%d.%d" % sys.version_info[:2], libc or "another C library than glibc", sep="\\n")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BasePullRequest:
    """A base to find or pull. `open_registry` opens a host's registry, only if something is missing."""

    base: BaseSpec
    mirrors: Mirrors
    open_registry: Callable[[str], Store]

    @property
    def locks(self) -> tuple[BaseLock, ...]:
        """None: a pulled base is locked by its digest."""
        return ()

    def stored(self, layout: Layout) -> BuiltBase | None:
        """Return the base as `find` stored it, None if it must be pulled."""
        recorded = _get_pulled(layout, _key(self.base), self.base)
        return _as_base(layout, self.base, recorded[1]) if recorded else None

    def find(self, layout: Layout, progress: Progress) -> BuiltBase:
        """Return the base in the store, pulled if needed, unpacked and tagged `base:<name>`.

        The caller holds `in_use`. Raises RegistryError if the pull fails, BuildError with the recipe's
        location if the image is for another platform or differs from the recipe.
        """
        base, unpacked = self.base, UnpackedLayers(layout.path / "unpacked")
        key = _key(base)
        with layout.locked(f"base-{base.name}"), explain_full_disk(layout.path):
            recorded = _get_pulled(layout, key, base)
            if recorded is None:
                with progress.stage(f"{base.name}: base from {base.image.partition('/')[0]}"):
                    index = _pull(layout, self, progress)
                    image = _load(layout, base, index)
                    unpacked.unpack(image.layers, layout.blob_path, progress)
                    _try(layout, base, image)
                layout.record("images", key, {"digest": index.digest, "size": index.size})
            else:
                index, image = recorded
            directories = unpacked.unpack(image.layers, layout.blob_path, progress)
            tag = f"base:{base.name}"
            tagged = layout.tags().get(tag)
            if tagged is None or tagged.digest != index.digest:
                layout.tag(tag, index)
        return replace(_as_base(layout, base, image), folders=directories)

    def begin(self, layout: Layout, progress: Progress) -> PendingBase:
        """Return the result of `find` as a pending base."""
        return as_pending_base(self.find(layout, progress))


def _as_base(layout: Layout, base: BaseSpec, image: Image) -> BuiltBase:
    return BuiltBase(
        image=image,
        folders=(),
        identity=f"{image.manifest} {base.python_path}",
        epoch=parse_created(_config(layout, image).get("created")),
        published=True,
    )


def parse_created(value: object) -> int:
    """Return an image config's `created` (RFC 3339) in seconds since 1970, between 1980 and 2100.

    Reproducible builders write no date, 1970 or the year 1: all of these read as 1980.
    """
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d)(?:\.\d+)?([Zz]|[+-]\d\d:\d\d)", str(value))
    if not match:
        return OLDEST
    try:
        zone = "+00:00" if match[2] in "Zz" else match[2]
        moment = datetime.datetime.fromisoformat(match[1].upper() + zone)
        return int(min(max(moment.timestamp(), OLDEST), NEWEST))
    except (ValueError, OverflowError):
        return OLDEST


def _key(base: BaseSpec) -> str:
    """Return the key of the record of a checked base: all its values in the recipe."""
    digest = base.image.partition("@")[2]
    parts = ["pulled", 1, digest, base.platform, base.python, base.glibc, base.python_path]
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def _get_pulled(layout: Layout, key: str, base: BaseSpec) -> tuple[Descriptor, Image] | None:
    record = layout.recall("images", key)
    try:
        descriptor = Descriptor(
            media_type=INDEX_TYPE, digest=str(record["digest"]), size=int(record["size"])  # type: ignore[index]
        )  # fmt: skip
        return descriptor, _load(layout, base, descriptor)
    except (KeyError, TypeError, ValueError, StoreError):
        return None  # a missing or corrupt one is pulled again


def _pull(layout: Layout, request: BasePullRequest, progress: Progress) -> Descriptor:
    """Pull the platform's manifest and its blobs. Return an index with only that manifest."""
    base = request.base
    original = parse_reference(base.image)
    source = resolve_mirror(original, request.mirrors)
    try:
        store = request.open_registry(source.registry)
        repo = StoreRepository(store=store, repository=source.repository)
        root = read_manifest(repo, original.digest)
        chosen = platform_manifest(root, base.platform)
        _check_types(base, read_manifest(repo, chosen))
        graph = read_graph(repo, chosen)
        send(repo, LayoutStore(layout), TransferRequest(graph=graph, repository=REPOSITORY), progress)
    except RegistryError as error:
        raise _unpullable(base, original, source, error) from error
    system, _, architecture = base.platform.partition("/")
    entry = {
        **format_descriptor(replace(graph.root.descriptor, annotations=())),
        "platform": {"architecture": architecture, "os": system},
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    return layout.add(canonical_json(index), INDEX_TYPE)


def platform_manifest(root: Manifest, platform: str) -> str:
    """Return the digest of the manifest for `platform` in a manifest or index. Raises RegistryError."""
    choice = choose_platform(root, platform)
    if not choice.whole or root.descriptor.media_type not in INDEX_TYPES:
        return choice.digest
    entries = json.loads(root.data)["manifests"]
    return str(images_of(entries)[0]["digest"])


def _check_types(base: BaseSpec, manifest: Manifest) -> None:
    """Raise an error for anything but a container image, before its blobs are fetched."""
    media_type = manifest.descriptor.media_type
    value: dict[str, Any] = json.loads(manifest.data)
    try:
        types, config = [media_type], ""
        if media_type in MANIFEST_TYPES:
            types = [layer["mediaType"] for layer in value["layers"]]
            config = value["config"]["mediaType"]
    except (KeyError, TypeError) as error:
        raise BuildError(
            "base-image-malformed",
            f"{base.where}: {base.image} has a malformed manifest: {error!r}",
            hint="use another image, or push this one again",
        ) from error
    strange = [name for name in types if name not in LAYER_TYPES]
    if strange or config not in CONFIG_TYPES:
        raise BuildError(
            "base-image-unsupported",
            f"{base.where}: {base.image} is not a supported container image "
            f"(it has {(strange or [config])[0]!r})",
            hint="use an image that `docker pull` accepts",
        )


def _unpullable(
    base: BaseSpec, original: ImageReference, source: ImageReference, error: RegistryError
) -> RegistryError:
    if source == original:
        return RegistryError(error.code, f"{base.where}: {base.image}: {error.message}", hint=error.hint)
    mirror = f"{source.registry}/{source.repository}"
    return RegistryError(
        "mirror-failed",
        f"{base.where}: {base.image}: its mirror {mirror} failed: {error.message}",
        hint=f"check the mirror, or fix `mirrors` in imagefactory.toml (no fallback to {original.registry})"
        + (f"; {error.hint}" if error.hint else ""),
    )


def _load(layout: Layout, base: BaseSpec, index: Descriptor) -> Image:
    """Return the image with OCI media types of its layers, each titled with the base's name."""
    image = layout.load(f"base:{base.name}", index)
    layers = tuple(
        replace(
            layer,
            title=f"{base.name} {number}",
            descriptor=replace(
                layer.descriptor, media_type=LAYER_TYPES[layer.descriptor.media_type], annotations=()
            ),
        )
        for number, layer in enumerate(image.layers, 1)
    )
    return replace(image, layers=layers)


def _config(layout: Layout, image: Image) -> Mapping[str, Any]:
    descriptor = Descriptor(media_type=CONFIG_TYPE, digest=image.config, size=0)
    value = json.loads(layout.read(descriptor))
    return value if isinstance(value, dict) else {}


def _try(layout: Layout, base: BaseSpec, image: Image) -> None:
    """Start the image's Python, and compare its answers with the recipe. Raises BuildError if they differ."""
    config = _config(layout, image)
    platform = f"{config.get('os')}/{config.get('architecture')}"
    if platform != base.platform:
        raise BuildError(
            "base-platform-mismatch",
            f"{base.where}: {base.image} is an image for {platform}, not for {base.platform}",
            hint=f"write the digest of the image's index, or of its {architecture(base.platform)} manifest",
        )
    python = (base.python_path, "-I", "-S", "-c", PROBE)
    spec = RunSpec(argv=python if base.python else PROBE_GLIBC, read_only=True, timeout=60)
    check_carried(base, UnshareRunner(layout).run(image, spec))


def check_carried(base: BaseSpec, probed: CommandResult) -> None:
    """Compare the probe's output with the recipe. Raises BuildError for a difference."""
    lines = probed.stdout.splitlines()
    if not base.python and not probed.returncode and len(lines) == 1:
        lines = ["", *lines]
    elif not base.python:
        raise BuildError(
            "base-without-glibc",
            f"{base.where}: {base.image} does not report its C library: getconf does not start",
            hint="use an image with glibc, or set python: and interpreter: of this base",
        )
    if probed.returncode or len(lines) != 2:
        problem = (probed.stderr.strip().splitlines() or [f"it ended with {probed.returncode}"])[-1]
        raise BuildError(
            "base-python-missing",
            f"{base.where}: {base.image} has no Python that starts at {base.python_path}: {problem}",
            hint="set interpreter: to the path of its Python, or use another image",
        )
    python, libc = lines
    if python != base.python:
        raise BuildError(
            "base-python-mismatch",
            f"{base.where}: {base.image} has Python {python} at {base.python_path}, not {base.python}",
            hint=f'write python: "{python}", or set interpreter: to the path of its Python {base.python}',
        )
    match = re.fullmatch(r"glibc (\d+)\.(\d+).*", libc)
    if not match:
        raise BuildError(
            "base-without-glibc",
            f"{base.where}: {base.image} has {libc}",
            hint="use an image with glibc: CUDA wheels require it",
        )
    if (int(match[1]), int(match[2])) < tuple(map(int, base.glibc.split("."))):
        version = f"{match[1]}.{match[2]}"
        raise BuildError(
            "base-glibc-mismatch",
            f"{base.where}: {base.image} has glibc {version}, older than the {base.glibc} of its recipe, "
            "so locked packages may not load",
            hint=f'write glibc: "{version}" and lock the targets on it again',
        )
