"""An OCI image layout on disk: the store that needs no server.

    oci-layout, index.json, blobs/sha256/<hex>   by the OCI image-layout specification
    layers/<key>.json, images/<key>.json         the layer or image that was made from <key>
    squashed/<key>.json                          the .sif that has a layer's blocks (oci/squash_layers.py)
    referrers/<subject hex>/<hex>.json           manifests that name another as their subject
    unpacked/<diff id>/                          layers ready to run, and their checksums (oci/unpack.py)
    run/                                         files that running sandboxes write (runtime/unshare.py)
    pushed/<host>.json                           the repository there of each blob (oci/transfer.py)
    checks/                                      passed smoke tests (verify/smoke.py)
    journal/<host>/<repository>.jsonl            artifacts attached to a registry (trust/attached.py)
    scans/<diff id>.json                         GPU code of a layer (scan/layers.py)
    sizes/<digest>.json                          unpacked sizes of layers (actions/catalog.py)
    bases/                                       locks of bases whose published packages are gone
    nonces/, sweeps/, nights/, reports/          verification, here and on pools
    locks/, tmp/                                 locks of processes, unfinished files

Everything is written next to its place and renamed, blobs before manifests, so a killed process leaves only
files under tmp/, which a collection (maintenance.py) removes. Builders take a shared lock, a collection an
exclusive one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from imagefactory.errors import StoreError
from imagefactory.fs import (
    add_checksum,
    check_checksum,
    check_no_links,
    create_in,
    entries_of,
    explain_full_disk,
    is_unused,
    move_to,
    open_lock,
    remove_inside,
    shared_use,
)
from imagefactory.model import Target
from imagefactory.oci.manifests import (
    CONFIG_TYPES,
    INDEX_TYPE,
    INDEX_TYPES,
    MALFORMED,
    MANIFEST_LIMIT,
    REF_NAME,
    TITLE,
    Descriptor,
    Image,
    OciLayer,
    artifact_type,
    canonical_json,
    choose_image,
    digest_of,
    format_descriptor,
    malformed_reason,
    media_type_of,
    parse_config,
    parse_descriptor,
    read_json,
)
from imagefactory.oci.store import (
    DIGEST,
    INVALID_HINT,
    REBUILD,
    Source,
    check_repository,
    check_tag_or_digest,
)
from imagefactory.progress import Progress

_CHUNK = 1 << 20
_NOT_COLLECTED = {
    "index.json", "locks", "nonces", "sweeps", "nights", "reports", "journal", "keys", "lost+found"
}  # fmt: skip
"""Paths that may exist before the store, because a collection removes nothing in them."""


class BlobWriter:
    """A blob that is written to the layout. It is hashed meanwhile, and visible only when committed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        handle, self.path = create_in(layout.tmp, "blob-")
        self._file = os.fdopen(handle, "wb")
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    @property
    def digest(self) -> str:
        """Return the digest of the bytes so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def commit(self, media_type: str) -> Descriptor:
        self._file.flush()
        os.fchmod(self._file.fileno(), 0o644)
        self._file.close()
        digest = self.digest
        move_to(self.path, self._layout.blob_path(digest))
        return Descriptor(media_type=media_type, digest=digest, size=self.size)

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()  # writes its buffer, so a full disk is an error here too
        finally:
            self.path.unlink(missing_ok=True)


def referrer_record(descriptor: Descriptor, manifest: Mapping[str, Any]) -> bytes:
    """Return the record of a manifest that names a subject."""
    return canonical_json(
        {
            **format_descriptor(descriptor),
            "artifactType": artifact_type(manifest),
            "annotations": manifest.get("annotations") or {},
        }
    )


def reference(target: Target) -> str:
    """Return the tag of a target's image: `pytorch:2.3-cu121`."""
    return f"{target.family}:{target.name.removeprefix(target.family + '-')}"


class Layout:
    """The store in `path`. The first write creates it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tmp = path / "tmp"
        self.scratch = path / "run"
        """Directories of runs, each locked by its process. Later processes remove those without a process."""
        self._blobs = path / "blobs" / "sha256"

    # --- blobs

    def blob_path(self, digest: str) -> Path:
        """Return the path of the blob of `digest`, which may not exist. Raises StoreError if invalid."""
        if not DIGEST.fullmatch(digest):
            raise StoreError(
                "digest-invalid",
                f"'{digest[:80]}' is not a sha256 digest",
                hint="write sha256: and 64 hex digits",
            )
        return self._blobs / digest.removeprefix("sha256:")

    def has(self, descriptor: Descriptor) -> bool:
        """Return whether the blob exists with the right size."""
        try:
            return self.blob_path(descriptor.digest).stat().st_size == descriptor.size
        except FileNotFoundError:
            return False

    def add(self, data: bytes, media_type: str) -> Descriptor:
        descriptor = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
        if not self.holds(descriptor):
            with explain_full_disk(self.path), BlobWriter(self) as writer:
                writer.write(data)
                writer.commit(media_type)
        return descriptor

    def holds(self, descriptor: Descriptor) -> bool:
        """Return whether the blob exists and matches its digest; remove it if it does not match."""
        path = self.blob_path(descriptor.digest)
        try:
            with path.open("rb") as file:
                digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except FileNotFoundError:
            return False
        if digest != descriptor.digest:
            with suppress(OSError):  # the store of another user, and only that user can repair it
                remove_inside(self.path, path)  # its size is right, so it would never be rebuilt
        return digest == descriptor.digest

    def damaged(self, digest: str) -> StoreError:
        """Return the error for a blob that does not match its manifest. A changed blob is removed."""
        if self.holds(Descriptor(media_type="", digest=digest, size=0)):
            return StoreError(
                "store-corrupt",
                f"blob {digest} in {self.path} does not match its manifest",
                hint="remove the image (imagefactory image remove NAME), then build or pull it again",
            )
        if self.blob_path(digest).exists():
            hint = f"ask the owner of the store to run rm {self.blob_path(digest)}, then {REBUILD}"
            return StoreError(
                "store-corrupt", f"blob {digest} in {self.path} is corrupt, and cannot be deleted", hint=hint
            )
        return StoreError(
            "store-corrupt", f"blob {digest} in {self.path} was corrupt, and was deleted", hint=REBUILD
        )

    def read(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a small blob. Raises StoreError if it is missing or corrupt."""
        try:
            data = self.blob_path(descriptor.digest).read_bytes()
        except FileNotFoundError:
            raise StoreError(
                "blob-missing", f"blob {descriptor.digest} is missing from {self.path}", hint=REBUILD
            ) from None
        if digest_of(data) != descriptor.digest:
            raise self.damaged(descriptor.digest)
        return data

    def manifest(self, digest: str) -> tuple[Descriptor, bytes] | None:
        """Return the manifest or index of `digest`, None if missing. Raises StoreError for other blobs."""
        try:
            size = self.blob_path(digest).stat().st_size
        except FileNotFoundError:
            return None
        if size > MANIFEST_LIMIT:
            raise StoreError(
                "store-corrupt",
                f"{digest} in {self.path} is not a manifest: it has {size} bytes",
                hint="remove the image (imagefactory image remove NAME), then build or pull it again",
            )
        data = self.read(Descriptor(media_type="", digest=digest, size=size))
        try:
            media_type = media_type_of(read_json(data))
        except MALFORMED:
            raise StoreError(
                "store-corrupt",
                f"{digest} in {self.path} is not a manifest",
                hint="remove the image (imagefactory image remove NAME), then build or pull it again",
            ) from None
        return Descriptor(media_type=media_type, digest=digest, size=size), data

    # --- referrers

    def refer(self, subject: str, descriptor: Descriptor, manifest: Mapping[str, Any]) -> None:
        """Record that the manifest of `descriptor` has `subject` as its subject."""
        path = self._referrers(subject) / f"{self.blob_path(descriptor.digest).name}.json"
        with explain_full_disk(self.path):
            self.write_file(path, referrer_record(descriptor, manifest))

    def unrefer(self, subject: str, digest: str) -> None:
        """Remove the record of a referrer of `subject`. A collection then removes an untagged manifest."""
        with explain_full_disk(self.path):
            remove_inside(self.path, self._referrers(subject) / f"{self.blob_path(digest).name}.json")

    def referrers(self, subject: str) -> tuple[tuple[Descriptor, str], ...]:
        """Return the stored manifests with the subject `subject`, each with its artifact type."""
        rows = map(self.referrer, self.referring(subject))
        return tuple(row for row in rows if row is not None)

    def referring(self, subject: str) -> list[Path]:
        """Return the record files of the manifests with the subject `subject`."""
        return entries_of(self._referrers(subject))

    def subjects(self) -> tuple[str, ...]:
        """Return the digests that are the subject of a stored manifest, sorted."""
        return tuple(f"sha256:{entry.name}" for entry in entries_of(self.path / "referrers"))

    def referrer(self, path: Path) -> tuple[Descriptor, str] | None:
        """Return the manifest of a record and its artifact type, None if either was removed."""
        try:
            row = json.loads(path.read_bytes())
            descriptor, row_type = parse_descriptor(row), str(row["artifactType"])
        except FileNotFoundError:
            return None  # collected meanwhile
        except MALFORMED as error:
            raise StoreError(
                "store-corrupt", f"{path} is corrupt: {error}", hint=f"delete it: rm {path}"
            ) from error
        return (descriptor, row_type) if self.has(descriptor) else None

    def _referrers(self, subject: str) -> Path:
        return self.path / "referrers" / self.blob_path(subject).name

    # --- tags

    def tags(self) -> dict[str, Descriptor]:
        """Return each tag with its index or manifest, by name. Empty for a store that does not exist yet."""
        path = self.path / "index.json"
        try:
            with explain_full_disk(self.path):
                entries = [parse_descriptor(entry) for entry in json.loads(path.read_bytes())["manifests"]]
        except FileNotFoundError:
            return {}
        except MALFORMED as error:
            raise StoreError(
                "store-corrupt",
                f"{path} is corrupt: {type(error).__name__}: {error}",
                hint=f"delete it (rm {path}) and build again",
            ) from error
        named = {dict(entry.annotations).get(REF_NAME, ""): entry for entry in entries}
        return {name: entry for name, entry in sorted(named.items()) if name}

    def tag(self, name: str, descriptor: Descriptor) -> None:
        """Point `name` at an index or manifest of the layout."""
        if not self.has(descriptor):
            raise StoreError(
                "blob-missing",
                f"cannot tag {descriptor.digest} as {name}: it is not in {self.path}",
                hint=REBUILD,
            )
        current = self.tags().get(name)
        if current and current.digest == descriptor.digest:
            return
        self._update_tags(lambda tags: {**tags, name: descriptor})

    def untag(self, name: str) -> None:
        self._update_tags(lambda tags: {key: value for key, value in tags.items() if key != name})

    def _update_tags(self, change: Callable[[dict[str, Descriptor]], dict[str, Descriptor]]) -> None:
        with explain_full_disk(self.path), self.locked("index"):
            tags = change(self.tags())
            entries = [
                format_descriptor(replace(descriptor, annotations=((REF_NAME, name),)))
                for name, descriptor in sorted(tags.items())
            ]
            self.write_file(self.path / "oci-layout", canonical_json({"imageLayoutVersion": "1.0.0"}))
            index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}
            self.write_file(self.path / "index.json", canonical_json(index))

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a file next to its place and rename it, so that a reader sees the old or the new bytes."""
        handle, temporary = create_in(self.tmp, "file-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                os.fchmod(handle, 0o644)
                if path.name == "index.json":  # the names are small, and stored nowhere else
                    file.flush()
                    os.fsync(handle)
            move_to(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    # --- images

    def image(self, name: str) -> Image | None:
        """Return the image of a tag, or None. Raises StoreError if it is incomplete."""
        descriptor = self.tags().get(name)
        return None if descriptor is None else self.load(name, descriptor)

    def load(self, name: str, descriptor: Descriptor) -> Image:
        """Return the image of an index or an image manifest, whose blobs all exist with the right size.

        For an index with several images, the image for linux/amd64. Raises StoreError for a missing or
        corrupt blob, for an index without such an image, and for an artifact.
        """
        try:
            return self._load(name, descriptor)
        except MALFORMED as error:
            raise StoreError(
                "store-corrupt",
                f"{name} in {self.path} is not a valid image: {malformed_reason(error)}",
                hint=f"run imagefactory image remove {name}",
            ) from error

    def _load(self, name: str, descriptor: Descriptor) -> Image:
        manifest_descriptor, manifest = descriptor, read_json(self.read(descriptor))
        if media_type_of(manifest) in INDEX_TYPES:
            manifest_descriptor = choose_image(name, manifest["manifests"] or [])
            manifest = read_json(self.read(manifest_descriptor))
        config_descriptor = parse_descriptor(manifest["config"])
        if config_descriptor.media_type not in CONFIG_TYPES:
            raise StoreError(
                "not-an-image",
                f"{name} is an artifact ({artifact_type(manifest)}), not an image",
                hint="choose an image from imagefactory image list",
            )
        rows = manifest["layers"] or []
        config = parse_config(self.read(config_descriptor), len(rows))
        layers = tuple(
            OciLayer(
                descriptor=parse_descriptor(row),
                diff_id=diff_id,
                title=str(row.get("annotations", {}).get(TITLE, "")),
            )
            for row, diff_id in zip(rows, config.diff_ids, strict=True)
        )
        for layer in layers:
            if not self.has(layer.descriptor):
                raise StoreError(
                    "blob-missing",
                    f"layer {layer.descriptor.digest} of {name} is missing or truncated",
                    hint=REBUILD,
                )
        return Image(
            name=name,
            digest=descriptor.digest,
            manifest=manifest_descriptor.digest,
            config=config_descriptor.digest,
            size=sum(layer.descriptor.size for layer in layers),
            layers=layers,
            environment=config.environment,
            architecture=config.architecture,
            start=config.start,
        )

    # --- records

    def record(self, kind: str, key: str, value: Mapping[str, object]) -> None:
        """Record the result for the key `key` (hex): a `layers` or `images` record."""
        with explain_full_disk(self.path):
            self.keep(self.path / kind / f"{key}.json", canonical_json(value))

    def keep(self, path: Path, data: bytes) -> None:
        """Write a record with a checksum."""
        self.write_file(path, add_checksum(path, data))

    def recall(self, kind: str, key: str) -> dict[str, Any] | None:
        """Return a record, or None. An unreadable record counts as missing: it is only a cache."""
        try:
            value = json.loads(check_checksum(self.path / kind / f"{key}.json") or b"null")
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def record_layer(self, key: str, layer: OciLayer) -> None:
        value = {**format_descriptor(layer.descriptor), "diff_id": layer.diff_id, "title": layer.title}
        self.record("layers", key, value)

    def recall_layer(self, key: str) -> OciLayer | None:
        """Return the layer recorded for `key`, if its blob is complete."""
        value = self.recall("layers", key)
        if value is None:
            return None
        try:
            layer = OciLayer(
                descriptor=parse_descriptor(value), diff_id=str(value["diff_id"]), title=str(value["title"])
            )
            return layer if self.has(layer.descriptor) else None
        except (*MALFORMED, StoreError):
            return None

    # --- locks

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Lock `name` for one process, while others wait. The kernel releases the lock if a process dies."""
        with open_lock(self.path / "locks" / name) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextmanager
    def in_use(self, progress: Progress) -> Iterator[None]:
        """Lock the store for a build or a run. A collection waits until it ends."""
        self.make()
        with shared_use(self.path / "locks" / "store", progress):
            yield

    def make(self) -> None:
        """Create the store in a new or empty directory, before anything else is written there.

        Raises StoreError for a directory with other files, and writes nothing there.
        """
        self.refuse_links()
        if not self.founded():
            self._make()

    def founded(self) -> bool:
        """Return whether the store exists. An empty directory is not a store yet.

        Earlier releases wrote _NOT_COLLECTED first. Raises StoreError for a directory with other files,
        which a collection would remove.
        """
        version = self.path / "oci-layout"
        if version.exists():
            return True
        others = {entry.name for entry in entries_of(self.path)} - _NOT_COLLECTED
        if version.exists():
            return True  # another process created it meanwhile
        if others:
            raise StoreError(
                "store-invalid",
                f"{self.path} is not a store, and not empty (it contains {sorted(others)[0]})",
                hint="set `store` in imagefactory.toml (or IMAGEFACTORY_STORE) to an empty directory",
            )
        return False

    def _make(self) -> None:
        with explain_full_disk(self.path), self.locked("index"):
            if self.founded():
                return  # another build was first
            empty: dict[str, object] = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}
            for name, value in (("index.json", empty), ("oci-layout", {"imageLayoutVersion": "1.0.0"})):
                if not (self.path / name).exists():
                    # Atomic, with no unfinished file of others next to it.
                    lock_path = self.path / "locks" / name
                    lock_path.write_bytes(canonical_json(value))
                    lock_path.replace(self.path / name)

    @contextmanager
    def alone(self, progress: Progress) -> Iterator[None]:
        """Lock the store for a collection, which waits for builds. New builds wait for the collection."""
        self.refuse_links()
        with is_unused(self.path / "locks" / "store", progress):
            yield

    def refuse_links(self) -> None:
        """Raise StoreError for a link among the store's directories: a project may contain them."""
        check_no_links(self.path, "blobs", "locks", "unpacked", "journal", "referrers")


class LayoutStore:
    """`layout` as a Store, for several threads and processes. Methods raise StoreError.

    All repositories share one pool of blobs: the tag `2.3-cu121` of the repository `pytorch` is the layout's
    `pytorch:2.3-cu121`. Callers that write hold the layout's `in_use`, so that no collection removes blobs
    before a tag needs them. With `every_byte` an existing blob is read, and fetched again if it changed.
    """

    def __init__(self, layout: Layout, *, every_byte: bool = False) -> None:
        self.layout = layout
        self._has = layout.holds if every_byte else layout.has

    @property
    def name(self) -> str:
        return str(self.layout.path)

    def has(self, repository: str, descriptor: Descriptor) -> bool:  # noqa: ARG002
        return self._has(descriptor)

    def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:  # noqa: ARG002
        path = self.layout.blob_path(descriptor.digest)
        sha256 = hashlib.sha256() if offset == 0 else None
        rest = descriptor.size - offset
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise StoreError(
                "blob-missing", f"blob {descriptor.digest} is missing from {self.name}", hint=REBUILD
            ) from None
        with explain_full_disk(self.layout.path), file:
            file.seek(offset)
            while data := file.read(_CHUNK):
                rest -= len(data)
                if rest < 0:
                    break
                if sha256:
                    sha256.update(data)
                yield data
        if rest or (sha256 and f"sha256:{sha256.hexdigest()}" != descriptor.digest):
            raise self.layout.damaged(descriptor.digest)

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:  # noqa: ARG002
        """Write a blob as Store does, always from `source(0)`: no partial blob is stored."""
        if self._has(descriptor):
            return 0
        with explain_full_disk(self.layout.path), BlobWriter(self.layout) as blob:
            for data in source(0):
                blob.write(data)
                if blob.size > descriptor.size:
                    break
            if blob.size != descriptor.size or blob.digest != descriptor.digest:
                raise StoreError(
                    "blob-mismatch",
                    f"the received bytes of blob {descriptor.digest} do not match its digest",
                    hint="run the same command again",
                )
            blob.commit(descriptor.media_type)
        return descriptor.size

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:  # noqa: ARG002
        return self.layout.has(descriptor)

    def manifest(self, repository: str, reference: str) -> tuple[Descriptor, bytes] | None:
        if DIGEST.fullmatch(reference):
            return self.layout.manifest(reference)
        name = _name(repository, reference)
        descriptor = self.layout.tags().get(name)
        if descriptor is None:
            return None
        manifest = self.layout.manifest(descriptor.digest)
        if manifest is None:
            raise StoreError(
                "blob-missing",
                f"{name} points to {descriptor.digest}, which is missing from {self.name}",
                hint=f"run imagefactory image remove {name}",
            )
        return manifest

    def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
        """Put a manifest as Store does. For an index, one existing manifest is enough."""
        name = _name(repository, tag) if tag else ""
        try:
            value = json.loads(data)
            self._check(value, media_type)
            subject = str(value["subject"]["digest"]) if value.get("subject") else ""
        except MALFORMED as error:
            raise StoreError(
                "store-manifest-invalid",
                f"{digest_of(data)} is not a manifest: {type(error).__name__}: {error}",
                hint=INVALID_HINT,
            ) from error
        descriptor = self.layout.add(data, media_type)
        if subject:
            self.layout.refer(subject, descriptor, value)
        if name:
            self.layout.tag(name, descriptor)
        return descriptor

    def _check(self, value: Mapping[str, Any], media_type: str) -> None:
        """Raise StoreError if blobs of the manifest are missing, or the manifest has another type."""
        if media_type_of(value) != media_type:
            raise StoreError(
                "store-manifest-invalid",
                f"a manifest has the type {media_type_of(value)}, expected {media_type}",
                hint=INVALID_HINT,
            )
        if media_type in INDEX_TYPES:
            parts = [parse_descriptor(entry) for entry in value["manifests"]]
            missing = [] if any(map(self.layout.has, parts)) else parts
        else:
            parts = [parse_descriptor(entry) for entry in (value["config"], *value["layers"])]
            missing = [descriptor for descriptor in parts if not self.layout.has(descriptor)]
        if missing:
            raise StoreError(
                "blob-missing",
                f"blob {missing[0].digest} of the manifest is missing from {self.name}",
                hint=REBUILD,
            )

    def tags(self, repository: str) -> tuple[str, ...]:
        check_repository(repository)
        names = (name.rpartition(":") for name in self.layout.tags())
        return tuple(sorted(tag for name, _, tag in names if name == repository))

    def untag(self, repository: str, tag: str) -> None:
        name = _name(repository, tag)
        if name in self.layout.tags():
            self.layout.untag(name)

    def referrers(self, repository: str, digest: str, *artifact_types: str) -> tuple[Descriptor, ...]:  # noqa: ARG002
        rows = self.layout.referrers(digest)
        return tuple(
            descriptor for descriptor, row_type in rows if row_type in (artifact_types or (row_type,))
        )


def _name(repository: str, tag: str) -> str:
    return f"{check_repository(repository)}:{check_tag_or_digest(tag)}"
