"""A base as an image of the store: found, or made from Debian's packages and kept under what made it."""

from __future__ import annotations

import datetime
import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from imagefactory.build.base.fetch import BaseArchives, fetch_base
from imagefactory.build.base.look import base_key
from imagefactory.build.base.make import BaseTar, build_base, read_facts, write_difference
from imagefactory.build.definition import SYSTEM_PATH
from imagefactory.errors import LockError
from imagefactory.fs import check_checksum, explain_full_disk, require_space
from imagefactory.gpu.capability import architecture
from imagefactory.lock.debian.archive import DebianMirror
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

ENVIRONMENT = (("PATH", SYSTEM_PATH),)
"""The variables of a base of Debian's packages."""
LEAST_UNPACKED, LEAST_LAYER = 2.5, 0.8
"""What a byte of Debian's packages becomes unpacked and as a layer, at least: 119 MB of debian-12's are 350
and 127."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltBase:
    """A base in the store: its own image, and where its layers are unpacked, lowest first.

    `identity` names what decided it (the locked packages); `published` is false when the mirror no
    longer had them and the suite's newer ones were taken. `epoch` is the clock of what is built on it,
    seconds since 1970.
    """

    image: Image
    folders: tuple[Path, ...]
    identity: str
    epoch: int
    published: bool


@dataclass(slots=True, kw_only=True)
class PendingBase:
    """A base of which all is known but its bytes: `environment` is its image's. `made` once it is there."""

    identity: str
    epoch: int
    environment: tuple[tuple[str, str], ...]
    make: Callable[[], BuiltBase]
    made: BuiltBase | None = None

    def get(self) -> BuiltBase:
        """The base, made if need be. For one thread."""
        self.made = self.made or self.make()
        return self.made


def as_pending_base(made: BuiltBase) -> PendingBase:
    """One that is there."""
    return PendingBase(
        identity=made.identity,
        epoch=made.epoch,
        environment=made.image.environment,
        make=lambda: made,
        made=made,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRequest:
    """A base to find or make. `locked` stops where a locked package is gone from the mirror.

    `mirror` is asked only when something has to be fetched; `environ` is the caller's environment. `below` is
    the base that this one stands on.
    """

    base: BaseSpec
    lock: BaseLock
    codec: str
    mirror: Callable[[], DebianMirror]
    environ: Mapping[str, str]
    locked: bool
    below: BaseRequest | None = None


def find_base(layout: Layout, order: BaseRequest, progress: Progress) -> BuiltBase | None:
    """The base whose layer is in the store, unpacked, tagged `base:<name>`. None where it has to be made.

    The caller holds `in_use`. Raises LockError for a lock of another base.
    """
    if order.lock.base != order.base.name:
        raise LockError("lock-mismatch", f"the lock is of base {order.lock.base}, not {order.base.name}")
    below = find_base(layout, order.below, progress) if order.below else None
    if order.below and not below:
        return None
    with layout.locked(f"base-{order.base.name}"), explain_full_disk(layout.path):
        for lock in (order.lock, *([] if order.locked else _read_memory(layout, order))):
            layer = layout.recall_layer(_layer_key(lock, order.codec, below))
            if layer is not None:
                return _finish(layout, order, _BaseLayer(lock=lock, layer=layer, below=below), progress)
    return None


def begin_base_build(layout: Layout, order: BaseRequest, progress: Progress) -> PendingBase:
    """A base that `find_base` did not find: its packages, fetched.

    When the mirror no longer has the locked packages, the suite's newer ones are taken (and said), and what
    they were is remembered, so that the next build takes the same. Raises BuildError with `locked`.
    """
    below = None
    if order.below:
        found = find_base(layout, order.below, progress)
        below = as_pending_base(found) if found else begin_base_build(layout, order.below, progress)
    with layout.locked(f"base-{order.base.name}"), explain_full_disk(layout.path):
        with progress.stage(f"{order.base.name}: fetch {len(order.lock.packages)} packages of Debian"):
            fetched = fetch_base(order.base, order.lock, order.mirror(), progress, locked=order.locked)
        if not fetched.published:
            layout.keep(_memory_path(layout, order), format_base_lock(fetched.lock).encode())
    return PendingBase(
        identity=below.identity if below else base_key(fetched.lock),
        epoch=below.epoch if below else fetched.lock.source_date_epoch,
        environment=ENVIRONMENT,
        make=lambda: _make(layout, order, fetched, below, progress),
    )


def _make(
    layout: Layout, order: BaseRequest, fetched: BaseArchives, coming: PendingBase | None, progress: Progress
) -> BuiltBase:
    below = coming.get() if coming else None
    key = _layer_key(fetched.lock, order.codec, below)
    with layout.locked(f"base-{order.base.name}"), explain_full_disk(layout.path):
        layer = layout.recall_layer(key)  # another process may have made it
        if layer is None:
            layout.tmp.mkdir(parents=True, exist_ok=True)
            scratch = Path(order.environ.get("TMPDIR") or tempfile.gettempdir())
            room = space_for_base(fetched.lock, scratch, layout.path)
            require_space(room, f"the base {order.base.name}")
            with (
                progress.stage(f"{order.base.name}: base from Debian's packages"),
                tempfile.TemporaryDirectory(dir=layout.tmp, prefix="base-") as folder,
            ):
                made = build_base(fetched, Path(folder) / "base.tar", progress, environ=order.environ)
                if below:
                    facts = read_facts(layout, below.image.layers, progress)
                    made = write_difference(made.path, facts, Path(folder) / "above.tar")
                layer = _compress(layout, made, order)
            layout.record_layer(key, layer)
        return _finish(layout, order, _BaseLayer(lock=fetched.lock, layer=layer, below=below), progress)


def space_for_base(lock: BaseLock, scratch: Path, store: Path) -> Mapping[Path, int]:
    """The bytes that making a base takes, at least: a tree in `scratch`, a tar and a layer in the store."""
    packed = sum(package.size for package in lock.packages)
    room: dict[Path, int] = {scratch: round(LEAST_UNPACKED * packed)}
    room[store] = room.get(store, 0) + round((LEAST_UNPACKED + LEAST_LAYER) * packed)
    return room


def get_base(layout: Layout, order: BaseRequest) -> BuiltBase | None:
    """The base as `find_base` left it in the store, None where it would have to be made. Unpacks nothing."""
    below = get_base(layout, order.below) if order.below else None
    if order.below and not below:
        return None
    for lock in (order.lock, *([] if order.locked else _read_memory(layout, order))):
        layer = layout.recall_layer(_layer_key(lock, order.codec, below))
        if layer is None:
            continue
        laid = _BaseLayer(lock=lock, layer=layer, below=below)
        image = layout.image(f"base:{order.base.name}")
        if image is None or [one.diff_id for one in image.layers] != [one.diff_id for one in laid.layers]:
            return None
        return laid.base(image, (), order)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _BaseLayer:
    """A base's layer, the lock that it was made of, and the base below."""

    lock: BaseLock
    layer: OciLayer
    below: BuiltBase | None

    @property
    def layers(self) -> tuple[OciLayer, ...]:
        return (*(self.below.image.layers if self.below else ()), self.layer)

    def base(self, image: Image, folders: tuple[Path, ...], order: BaseRequest) -> BuiltBase:
        """What is built on a base that stands on another is made as on that one: layers are shared."""
        return BuiltBase(
            image=image,
            folders=folders,
            identity=self.below.identity if self.below else base_key(self.lock),
            epoch=self.below.epoch if self.below else self.lock.source_date_epoch,
            published=self.lock == order.lock and (not self.below or self.below.published),
        )


def _finish(layout: Layout, order: BaseRequest, laid: _BaseLayer, progress: Progress) -> BuiltBase:
    folders = UnpackedLayers(layout.path / "unpacked").unpack(laid.layers, layout.blob_path, progress)
    if laid.lock != order.lock:
        warn_unpublished(order.base.name, progress)
    epoch = laid.below.epoch if laid.below else laid.lock.source_date_epoch
    return laid.base(_tag(layout, order.base, laid.layers, epoch), tuple(folders), order)


def warn_unpublished(name: str, progress: Progress) -> None:
    """Says of a base what `published` says of it."""
    progress.note(
        f"{name}: made of newer packages than the locked ones, which Debian's mirror no longer has: "
        "the digest is not the published one (--locked stops instead)"
    )


def _layer_key(lock: BaseLock, codec_name: str, below: BuiltBase | None) -> str:
    parts = ["base", base_key(lock), codec(codec_name).identity]
    parts += [layer.diff_id for layer in below.image.layers] if below else []
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def _memory_path(layout: Layout, order: BaseRequest) -> Path:
    return layout.path / "bases" / f"{base_key(order.lock).removeprefix('sha256:')}.lock"


def _read_memory(layout: Layout, order: BaseRequest) -> tuple[BaseLock, ...]:
    path = _memory_path(layout, order)
    text = check_checksum(path)
    return () if text is None else (parse_base_lock(text.decode(), str(path)),)


def _compress(layout: Layout, made: BaseTar, order: BaseRequest) -> OciLayer:
    packer = codec(order.codec)
    with explain_full_disk(layout.path), BlobWriter(layout) as blob, made.path.open("rb") as file:
        compressor = packer.compressor()
        while data := file.read(CHUNK):
            blob.write(compressor.compress(data))
        blob.write(compressor.flush())
        descriptor = blob.commit(packer.media_type)
    return OciLayer(descriptor=descriptor, diff_id=f"sha256:{made.sha256}", title=order.base.name)


def _tag(layout: Layout, base: BaseSpec, layers: Sequence[OciLayer], epoch: int) -> Image:
    """Makes the base's own image and tags it."""
    index, tag = write_base(layout, layers, epoch, base.platform), f"base:{base.name}"
    known = layout.tags().get(tag)
    if known is None or known.digest != index.digest:
        layout.tag(tag, index)
    return layout.load(tag, index)


class BlobSink(Protocol):
    """Where small blobs are added: a Layout, or what only names them."""

    def add(self, data: bytes, media_type: str) -> Descriptor: ...


def write_base(blobs: BlobSink, layers: Sequence[OciLayer], epoch: int, platform: str) -> Descriptor:
    """Adds the config, manifest and index of a base's own image; gives the index's descriptor."""
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
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(blobs.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [
            {**format_descriptor(layer.descriptor), "annotations": {TITLE: layer.title}} for layer in layers
        ],
    }
    return write_index(blobs, manifest, platform)


def write_index(blobs: BlobSink, manifest: Mapping[str, object], platform: str) -> Descriptor:
    """Adds `manifest` and an image index of it alone; gives the index's descriptor."""
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
    """Seconds since 1970 as OCI's configs write times."""
    return datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
