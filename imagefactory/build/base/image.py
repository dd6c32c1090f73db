"""A base as an image of the store: found, or built from Debian packages and recorded by its inputs."""

from __future__ import annotations

import datetime
import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from imagefactory.build.base.look import base_key
from imagefactory.build.definition import SYSTEM_PATH
from imagefactory.errors import LockError
from imagefactory.fs import check_checksum, explain_full_disk, require_space
from imagefactory.gpu.capability import architecture
from imagefactory.lock.debian.lock import format_base_lock, parse_base_lock
from imagefactory.model import BaseLock, BaseSpec
from imagefactory.oci.layers import CHUNK, codec
from imagefactory.oci.layout import BlobWriter, Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    TITLE,
    Descriptor,
    Image,
    OciLayer,
    canonical_json,
    format_descriptor,
)
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import Progress

if TYPE_CHECKING:
    from imagefactory.build.base.fetch import BaseArchives, DebRegistry
    from imagefactory.build.base.make import BaseTar
    from imagefactory.lock.debian.archive import DebianMirror

ENVIRONMENT = (("PATH", SYSTEM_PATH),)
"""The variables of a base of Debian packages."""
LEAST_UNPACKED, LEAST_LAYER = 2.5, 0.8
"""The least bytes, unpacked and as a layer, for each byte of Debian packages.

The 119 MB of packages of debian-12 become 350 MB and 127 MB.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltBase:
    """A base in the store: its image, and the directories of its unpacked layers, the lowest first.

    `identity` is the hash of its inputs (the locked packages). `published` is false if newer packages of the
    suite were used, because the mirror no longer had the locked ones. `epoch` is the timestamp of images on
    this base, in seconds since 1970.
    """

    image: Image
    folders: tuple[Path, ...]
    identity: str
    epoch: int
    published: bool


@dataclass(slots=True, kw_only=True)
class PendingBase:
    """A base that may not be built yet. `environment` is that of its image."""

    identity: str
    epoch: int
    environment: tuple[tuple[str, str], ...]
    make: Callable[[], BuiltBase]
    built: BuiltBase | None = None

    def get(self) -> BuiltBase:
        """Return the base, built if needed. Call it from one thread."""
        self.built = self.built or self.make()
        return self.built


def as_pending_base(built: BuiltBase) -> PendingBase:
    """Return a built base as a pending one."""
    return PendingBase(
        identity=built.identity,
        epoch=built.epoch,
        environment=built.image.environment,
        make=lambda: built,
        built=built,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRequest:
    """A base to find or build. With `locked` a package that the mirror lacks is a BuildError.

    `debs` is the cache of .debs. `mirror` is called only to fetch something. `environ` is the caller's
    environment. `below` is the parent base. `registry` has .debs that no archive has. Callers of `find`
    and `begin` hold the layout's `in_use`.
    """

    base: BaseSpec
    lock: BaseLock
    codec: str
    debs: Path
    mirror: Callable[[], DebianMirror]
    environ: Mapping[str, str]
    locked: bool
    below: BaseRequest | None = None
    registry: DebRegistry | None = None

    @property
    def locks(self) -> tuple[BaseLock, ...]:
        """The locks from the lowest parent to this base."""
        return (*(self.below.locks if self.below else ()), self.lock)

    def stored(self, layout: Layout) -> BuiltBase | None:
        """Return the base as `find` stored it, None if `find` has work to do. Unpacks nothing."""
        parent_base = self.below.stored(layout) if self.below else None
        known = self._known_layer(layout, parent_base)
        image = layout.image(f"base:{self.base.name}") if known else None
        if known is None or image is None:
            return None
        lock, layer = known
        layers = _stacked(parent_base, layer)
        same = [row.diff_id for row in image.layers] == [row.diff_id for row in layers]
        return self._built(lock, parent_base, image, ()) if same else None

    def find(self, layout: Layout, progress: Progress) -> BuiltBase | None:
        """Return the base whose layer is in the store, unpacked and tagged; None if it must be built.

        Raises LockError for a lock of another base.
        """
        if self.lock.base != self.base.name:
            raise LockError(
                "lock-mismatch",
                f"the lock is of base {self.lock.base}, not {self.base.name}",
                hint=f"run imagefactory lock base:{self.base.name}",
            )
        parent_base = self.below.find(layout, progress) if self.below else None
        with layout.locked(f"base-{self.base.name}"), explain_full_disk(layout.path):
            known = self._known_layer(layout, parent_base)
            return self._finish(layout, *known, parent_base, progress) if known else None

    def begin(self, layout: Layout, progress: Progress) -> PendingBase:
        """Return the base, with its packages fetched if `find` finds none.

        If the mirror no longer has the locked packages, the suite's newer ones are used, reported and
        recorded, so that the next build uses the same. With `locked` this is a BuildError.
        """
        if built := self.find(layout, progress):
            return as_pending_base(built)
        parent_base = self.below.begin(layout, progress) if self.below else None
        with layout.locked(f"base-{self.base.name}"), explain_full_disk(layout.path):
            with progress.stage(f"{self.base.name}: fetch {len(self.lock.packages)} packages of Debian"):
                fetched = self.fetch(progress)
            if not fetched.published:
                layout.keep(_memory_path(layout, self.lock), format_base_lock(fetched.lock).encode())
        return PendingBase(
            identity=parent_base.identity if parent_base else base_key(fetched.lock),
            epoch=parent_base.epoch if parent_base else fetched.lock.source_date_epoch,
            environment=ENVIRONMENT,
            make=lambda: self._make(layout, fetched, parent_base.get() if parent_base else None, progress),
        )

    def fetch(self, progress: Progress) -> BaseArchives:
        """Return the .debs of this base without its parents. A complete cache needs no mirror."""
        from imagefactory.build.base.fetch import cached_base, fetch_base

        cached = cached_base(self.base, self.lock, self.debs)
        return cached or fetch_base(
            *(self.base, self.lock, self.mirror(), progress), locked=self.locked, registry=self.registry
        )

    def _make(
        self, layout: Layout, fetched: BaseArchives, parent_base: BuiltBase | None, progress: Progress
    ) -> BuiltBase:
        from imagefactory.build.base.make import build_base, read_facts, write_difference

        name, key = self.base.name, _layer_key(fetched.lock, self.codec, parent_base)
        with layout.locked(f"base-{name}"), explain_full_disk(layout.path):
            layer = layout.recall_layer(key)  # another process may have built it
            if layer is None:
                layout.tmp.mkdir(parents=True, exist_ok=True)
                scratch = Path(self.environ.get("TMPDIR") or tempfile.gettempdir())
                require_space(space_for_base(fetched.lock, scratch, layout.path), f"the base {name}")
                with (
                    progress.stage(f"{name}: base from Debian's packages"),
                    tempfile.TemporaryDirectory(dir=layout.tmp, prefix="base-") as directory,
                ):
                    tar = build_base(fetched, Path(directory) / "base.tar", progress, environ=self.environ)
                    if parent_base:
                        facts = read_facts(layout, parent_base.image.layers, progress)
                        tar = write_difference(tar.path, facts, Path(directory) / "above.tar")
                    layer = _compress(layout, tar, self)
                layout.record_layer(key, layer)
            return self._finish(layout, fetched.lock, layer, parent_base, progress)

    def _known_layer(self, layout: Layout, parent_base: BuiltBase | None) -> tuple[BaseLock, OciLayer] | None:
        """Return a stored layer and its lock: the committed lock, or one of newer packages used before."""
        if self.below and not parent_base:
            return None
        for lock in (self.lock, *([] if self.locked else _read_memory(layout, self.lock))):
            if layer := layout.recall_layer(_layer_key(lock, self.codec, parent_base)):
                return lock, layer
        return None

    def _finish(
        self,
        layout: Layout,
        lock: BaseLock,
        layer: OciLayer,
        parent_base: BuiltBase | None,
        progress: Progress,
    ) -> BuiltBase:
        layers = _stacked(parent_base, layer)
        directories = UnpackedLayers(layout.path / "unpacked").unpack(layers, layout.blob_path, progress)
        if lock != self.lock:
            warn_unpublished(self.base.name, progress)
        image = _tag(layout, self.base, layers, parent_base.epoch if parent_base else lock.source_date_epoch)
        return self._built(lock, parent_base, image, tuple(directories))

    def _built(
        self, lock: BaseLock, parent_base: BuiltBase | None, image: Image, directories: tuple[Path, ...]
    ) -> BuiltBase:
        # An image on this base is built like one on its parent, so that they share layers.
        return BuiltBase(
            image=image,
            folders=directories,
            identity=parent_base.identity if parent_base else base_key(lock),
            epoch=parent_base.epoch if parent_base else lock.source_date_epoch,
            published=lock == self.lock and (parent_base is None or parent_base.published),
        )


def space_for_base(lock: BaseLock, scratch: Path, store: Path) -> Mapping[Path, int]:
    """Return the least bytes to build a base: a tree in `scratch`, a tar and a layer in the store."""
    packed = sum(package.size for package in lock.packages)
    space: dict[Path, int] = {scratch: round(LEAST_UNPACKED * packed)}
    space[store] = space.get(store, 0) + round((LEAST_UNPACKED + LEAST_LAYER) * packed)
    return space


def _stacked(parent_base: BuiltBase | None, layer: OciLayer) -> tuple[OciLayer, ...]:
    return (*(parent_base.image.layers if parent_base else ()), layer)


def warn_unpublished(name: str, progress: Progress) -> None:
    """Report that a base was built from newer packages than the locked ones."""
    progress.note(
        f"{name}: made of newer packages than the locked ones, which Debian's mirror no longer has: "
        "the digest is not the published one (--strict-base stops instead)"
    )


def _layer_key(lock: BaseLock, codec_name: str, parent_base: BuiltBase | None) -> str:
    parts = ["base", base_key(lock), codec(codec_name).identity]
    parts += [layer.diff_id for layer in parent_base.image.layers] if parent_base else []
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def _memory_path(layout: Layout, lock: BaseLock) -> Path:
    return layout.path / "bases" / f"{base_key(lock).removeprefix('sha256:')}.lock"


def _read_memory(layout: Layout, lock: BaseLock) -> tuple[BaseLock, ...]:
    path = _memory_path(layout, lock)
    text = check_checksum(path)
    return () if text is None else (parse_base_lock(text.decode(), str(path)),)


def _compress(layout: Layout, tar: BaseTar, request: BaseRequest) -> OciLayer:
    packer = codec(request.codec)
    with explain_full_disk(layout.path), BlobWriter(layout) as blob, tar.path.open("rb") as file:
        compressor = packer.compressor()
        while data := file.read(CHUNK):
            blob.write(compressor.compress(data))
        blob.write(compressor.flush())
        descriptor = blob.commit(packer.media_type)
    return OciLayer(descriptor=descriptor, diff_id=f"sha256:{tar.sha256}", title=request.base.name)


def _tag(layout: Layout, base: BaseSpec, layers: Sequence[OciLayer], epoch: int) -> Image:
    """Write the base's own image and tag it."""
    index, tag = write_base(layout, layers, epoch, base.platform), f"base:{base.name}"
    known = layout.tags().get(tag)
    if known is None or known.digest != index.digest:
        layout.tag(tag, index)
    return layout.load(tag, index)


class BlobSink(Protocol):
    """A destination of small blobs: a Layout, or an object that only computes their digests."""

    def add(self, data: bytes, media_type: str) -> Descriptor: ...


def write_base(blobs: BlobSink, layers: Sequence[OciLayer], epoch: int, platform: str) -> Descriptor:
    """Add the config, manifest and index of a base's own image. Return the index's descriptor."""
    created = format_time(epoch)
    config = {
        "created": created,
        "architecture": architecture(platform),
        "os": "linux",
        "config": {
            "Env": [f"{variable}={value}" for variable, value in ENVIRONMENT],
            "Cmd": ["bash"],
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": f"imagefactory: {layer.title}"} for layer in layers],
    }
    return write_manifest(blobs, blobs.add(canonical_json(config), CONFIG_TYPE), layers, platform)


def write_manifest(
    blobs: BlobSink,
    config: Descriptor,
    layers: Sequence[OciLayer],
    platform: str,
    annotations: Mapping[str, str] | None = None,
) -> Descriptor:
    """Add a manifest of titled layers and its index. Return the index's descriptor."""
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(config),
        "layers": [
            {**format_descriptor(layer.descriptor), "annotations": {TITLE: layer.title}} for layer in layers
        ],
        **({"annotations": annotations} if annotations else {}),
    }
    return write_index(blobs, manifest, platform)


def write_index(blobs: BlobSink, manifest: Mapping[str, object], platform: str) -> Descriptor:
    """Add `manifest` and an image index with only it. Return the index's descriptor."""
    os_name, architecture = platform.split("/")
    entry = {
        **format_descriptor(blobs.add(canonical_json(manifest), MANIFEST_TYPE)),
        "platform": {"architecture": architecture, "os": os_name},
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    if "annotations" in manifest:
        index["annotations"] = manifest["annotations"]
    return blobs.add(canonical_json(index), INDEX_TYPE)


def format_time(epoch: int) -> str:
    """Return seconds since 1970 in the format of OCI configs."""
    return datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
