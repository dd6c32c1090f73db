"""What every Store promises: one suite for the store on disk, the registry made here and the real one.

A test class inherits StoreContract and gives two fixtures: `store`, and `repository`, a name that nothing
uses yet. `removes_tags` is False where the registry cannot (docker-registry 2.8).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from imagefactory.errors import ImagefactoryError, RegistryError, StoreError
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    canonical_json,
    digest_of,
    format_descriptor,
)
from imagefactory.oci.store import Source, Store
from tests.made.errors import fails

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
Fails = (StoreError, RegistryError)


def blob(data: bytes, media_type: str = LAYER_TYPE) -> Descriptor:
    return Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def source(data: bytes, step: int = 65536) -> Source:
    """`data` from any offset on, in pieces."""
    return lambda offset: (data[i : i + step] for i in range(offset, len(data), step))


def put_blob(store: Store, repository: str, data: bytes, media_type: str = LAYER_TYPE) -> Descriptor:
    descriptor = blob(data, media_type)
    store.write(repository, descriptor, source(data))
    return descriptor


def image_manifest(store: Store, repository: str, *layers: bytes, **more: object) -> bytes:
    """A manifest of a small image whose blobs `store` has."""
    rows = [put_blob(store, repository, layer) for layer in layers]
    config = canonical_json({"rootfs": {"type": "layers", "diff_ids": [row.digest for row in rows]}})
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(put_blob(store, repository, config, CONFIG_TYPE)),
        "layers": [format_descriptor(row) for row in rows],
        **more,
    }
    return canonical_json(value)


CONFIGS_THAT_ARE_NONE = {
    "without end": b"[" * 100_000,
    "a list": b"[]",
    "without layers": b"{}",
    "too few layers": b'{"rootfs": {"diff_ids": []}}',
    "layers are objects": b'{"rootfs": {"diff_ids": [{}]}}',
    "layers are paths": b'{"rootfs": {"diff_ids": ["../../etc"]}}',
    "a variable is a number": canonical_json(
        {"rootfs": {"diff_ids": [digest_of(b"one")]}, "config": {"Env": [1]}}
    ),
}


def odd_image(store: Store, repository: str, config: bytes) -> bytes:
    """A manifest of an image of one layer that has this config."""
    value = json.loads(image_manifest(store, repository, b"one"))
    value["config"] = format_descriptor(put_blob(store, repository, config, CONFIG_TYPE))
    return canonical_json(value)


def image_index(*manifests: Descriptor) -> bytes:
    rows = [format_descriptor(manifest) for manifest in manifests]
    return canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows})


def artifact(store: Store, repository: str, subject: Descriptor, kind: str, note: str = "") -> bytes:
    """A manifest of type `kind` that refers to `subject`, as a verdict or a .sif does."""
    empty = put_blob(store, repository, b"{}", "application/vnd.oci.empty.v1+json")
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": kind,
            "config": format_descriptor(empty),
            "layers": [format_descriptor(put_blob(store, repository, note.encode() or b"{}"))],
            "subject": format_descriptor(subject),
            "annotations": {"note": note or "none"},
        }
    )


class StoreContract:
    removes_tags = True

    # --- blobs -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 2, 1 << 20, (1 << 20) + 1, 3_333_333])
    def test_a_blob_comes_back_as_it_was(self, store: Store, repository: str, size: int) -> None:
        data = noise(size, seed=size)
        descriptor = blob(data)
        assert store.write(repository, descriptor, source(data)) == size
        assert store.has(repository, descriptor)
        assert b"".join(store.read(repository, descriptor)) == data
        for offset in {0, size // 2, max(size - 1, 0), size}:
            assert b"".join(store.read(repository, descriptor, offset)) == data[offset:]

    def test_a_blob_that_is_there_is_not_sent(self, store: Store, repository: str) -> None:
        descriptor = put_blob(store, repository, b"once")

        def never(offset: int) -> Iterator[bytes]:
            raise AssertionError("it was read")

        assert store.write(repository, descriptor, never) == 0

    def test_a_blob_that_is_not_there_is_said(self, store: Store, repository: str) -> None:
        descriptor = blob(noise(100, seed=99))
        assert not store.has(repository, descriptor)
        with pytest.raises(Fails):
            list(store.read(repository, descriptor))

    @pytest.mark.parametrize("size", [1000, 3_000_000])
    @pytest.mark.parametrize("fault", ["other bytes", "too short", "too long", "much too long", "empty"])
    def test_a_wrong_blob_is_refused(self, store: Store, repository: str, fault: str, size: int) -> None:
        data = noise(size, seed=7)
        wrong = {
            "other bytes": bytes([data[0] ^ 1]) + data[1:],
            "too short": data[:-1],
            "too long": data + b"x",
            "much too long": data + data,
            "empty": b"",
        }[fault]
        with pytest.raises(Fails):
            store.write(repository, blob(data), source(wrong))
        assert not store.has(repository, blob(data))
        with pytest.raises(Fails):
            list(store.read(repository, blob(data)))

    def test_a_source_that_breaks_is_passed_on_and_leaves_nothing(
        self, store: Store, repository: str
    ) -> None:
        data = noise(2_500_000, seed=8)

        def breaks(offset: int) -> Iterator[bytes]:
            yield data[offset:1_500_000]
            raise RegistryError("origin-gone", "the other registry went away")

        with fails("origin-gone"):
            store.write(repository, blob(data), breaks)
        assert not store.has(repository, blob(data))
        assert store.write(repository, blob(data), source(data)) == len(data)

    def test_a_blob_is_mounted_from_where_it_is(self, store: Store, repository: str) -> None:
        descriptor = put_blob(store, f"{repository}/origin", b"shared")
        assert store.mount(f"{repository}/copy", descriptor, f"{repository}/origin")
        assert b"".join(store.read(f"{repository}/copy", descriptor)) == b"shared"

    def test_nothing_is_mounted_from_where_it_is_not(self, store: Store, repository: str) -> None:
        descriptor = blob(noise(64, seed=5))
        assert not store.mount(repository, descriptor, f"{repository}/none")
        assert not store.has(repository, descriptor)

    def test_many_at_once(self, store: Store, repository: str) -> None:
        contents = [noise(200_000, seed=number % 5) for number in range(20)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda data: put_blob(store, repository, data), contents))
            found = pool.map(lambda data: b"".join(store.read(repository, blob(data))), contents)
            assert list(found) == contents

    # --- manifests -------------------------------------------------------------------------------

    def test_an_image_comes_back_by_tag_and_by_digest(self, store: Store, repository: str) -> None:
        data = image_manifest(store, repository, b"one", b"two", annotations={"who": "Zoë"})
        put = store.put_manifest(repository, data, MANIFEST_TYPE, "1.0")
        assert put == Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(data), size=len(data))
        assert store.manifest(repository, "1.0") == (put, data)
        assert store.manifest(repository, put.digest) == (put, data)

    def test_the_bytes_of_a_manifest_are_kept(self, store: Store, repository: str) -> None:
        value = json.loads(image_manifest(store, repository, b"one"))
        data = json.dumps(value, indent=3, ensure_ascii=True).encode() + b"\n"
        put = store.put_manifest(repository, data, MANIFEST_TYPE)
        assert put.digest == digest_of(data)
        assert store.manifest(repository, put.digest) == (put, data)
        assert store.tags(repository) == ()

    def test_there_is_no_manifest_until_one_is_put(self, store: Store, repository: str) -> None:
        assert store.manifest(repository, "1.0") is None
        assert store.manifest(repository, digest_of(b"none")) is None

    def test_a_manifest_without_its_blobs_is_refused(self, store: Store, repository: str) -> None:
        value = json.loads(image_manifest(store, repository, b"one"))
        value["layers"].append(format_descriptor(blob(b"never sent")))
        data = canonical_json(value)
        with pytest.raises(Fails):
            store.put_manifest(repository, data, MANIFEST_TYPE, "1.0")
        assert store.tags(repository) == ()
        assert store.manifest(repository, digest_of(data)) is None

    def test_an_index_without_its_manifests_is_refused(self, store: Store, repository: str) -> None:
        image_manifest(store, repository, b"one")
        lost = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(b"lost"), size=4)
        with pytest.raises(Fails):
            store.put_manifest(repository, image_index(lost), INDEX_TYPE, "1.0")
        assert store.manifest(repository, "1.0") is None

    def test_what_is_no_manifest_is_refused(self, store: Store, repository: str) -> None:
        for data in (b"", b"{", b"[]", b"{}", b'{"schemaVersion": 2}'):
            with pytest.raises(Fails):
                store.put_manifest(repository, data, MANIFEST_TYPE, "1.0")
        assert store.manifest(repository, "1.0") is None

    def test_an_index_names_images(self, store: Store, repository: str) -> None:
        manifest = store.put_manifest(repository, image_manifest(store, repository, b"one"), MANIFEST_TYPE)
        data = image_index(manifest)
        index = store.put_manifest(repository, data, INDEX_TYPE, "1.0")
        assert store.manifest(repository, "1.0") == (index, data)

    # --- tags ------------------------------------------------------------------------------------

    def test_tags_are_of_their_repository_and_sorted(self, store: Store, repository: str) -> None:
        other = f"{repository}/other"
        data = image_manifest(store, repository, b"one")
        for tag in ("2.0", "1.0", "_x", "A" * 128):
            store.put_manifest(repository, data, MANIFEST_TYPE, tag)
        assert store.tags(repository) == ("1.0", "2.0", "A" * 128, "_x")
        assert store.tags(other) == ()
        assert store.manifest(other, "1.0") is None

    def test_a_tag_moves(self, store: Store, repository: str) -> None:
        first = store.put_manifest(
            repository, image_manifest(store, repository, b"one"), MANIFEST_TYPE, "1.0"
        )
        second = store.put_manifest(
            repository, image_manifest(store, repository, b"two"), MANIFEST_TYPE, "1.0"
        )
        found = store.manifest(repository, "1.0")
        assert found is not None
        assert found[0] == second
        assert store.manifest(repository, first.digest) is not None
        assert store.tags(repository) == ("1.0",)

    def test_a_tag_is_removed_alone(self, store: Store, repository: str) -> None:
        data = image_manifest(store, repository, b"one")
        for tag in ("1.0", "latest"):
            store.put_manifest(repository, data, MANIFEST_TYPE, tag)
        if not self.removes_tags:
            with fails("registry-delete-unsupported"):
                store.untag(repository, "latest")
            return
        store.untag(repository, "latest")
        store.untag(repository, "latest")
        assert store.tags(repository) == ("1.0",)
        assert store.manifest(repository, digest_of(data)) is not None

    def test_writers_of_different_tags_lose_none(self, store: Store, repository: str) -> None:
        data = image_manifest(store, repository, b"one")
        names = [f"t{number}" for number in range(16)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda tag: store.put_manifest(repository, data, MANIFEST_TYPE, tag), names))
        assert store.tags(repository) == tuple(sorted(names))

    # --- referrers -------------------------------------------------------------------------------

    def test_what_refers_to_an_image_is_found_by_type(self, store: Store, repository: str) -> None:
        subject = store.put_manifest(
            repository, image_manifest(store, repository, b"one"), MANIFEST_TYPE, "1.0"
        )
        assert store.referrers(repository, subject.digest) == ()
        put = {
            kind: store.put_manifest(repository, artifact(store, repository, subject, kind), MANIFEST_TYPE)
            for kind in ("application/vnd.a", "application/vnd.b")
        }
        assert _digests(store, repository, subject) == {row.digest for row in put.values()}
        for kind, row in put.items():
            found = store.referrers(repository, subject.digest, kind)
            assert [(f.digest, f.size, f.media_type) for f in found] == [
                (row.digest, row.size, MANIFEST_TYPE)
            ]
            assert dict(found[0].annotations) == {"note": "none"}
        assert store.referrers(repository, subject.digest, "application/vnd.c") == ()
        assert store.referrers(repository, digest_of(b"other")) == ()

    def test_a_referrer_is_put_twice_and_listed_once(self, store: Store, repository: str) -> None:
        subject = store.put_manifest(
            repository, image_manifest(store, repository, b"one"), MANIFEST_TYPE, "1.0"
        )
        data = artifact(store, repository, subject, "application/vnd.a")
        for tag in ("", "", "named"):
            store.put_manifest(repository, data, MANIFEST_TYPE, tag)
        assert [row.digest for row in store.referrers(repository, subject.digest)] == [digest_of(data)]

    def test_a_referrer_may_come_before_its_subject(self, store: Store, repository: str) -> None:
        later = image_manifest(store, repository, b"one")
        subject = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(later), size=len(later))
        data = artifact(store, repository, subject, "application/vnd.a")
        store.put_manifest(repository, data, MANIFEST_TYPE)
        store.put_manifest(repository, later, MANIFEST_TYPE, "1.0")
        assert _digests(store, repository, subject) == {digest_of(data)}

    def test_threads_that_attach_lose_none(self, store: Store, repository: str) -> None:
        """Within one process; writers in several can lose entries where the API is missing."""
        subject = store.put_manifest(
            repository, image_manifest(store, repository, b"one"), MANIFEST_TYPE, "1.0"
        )
        notes = [artifact(store, repository, subject, "application/vnd.a", f"{n}") for n in range(8)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda data: store.put_manifest(repository, data, MANIFEST_TYPE), notes))
        assert _digests(store, repository, subject) == set(map(digest_of, notes))

    # --- names -----------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "digest", ["sha256:../../../etc/passwd", "sha256:" + "a" * 63, "md5:" + "a" * 32]
    )
    def test_what_is_no_digest_is_refused(self, store: Store, repository: str, digest: str) -> None:
        descriptor = Descriptor(media_type=LAYER_TYPE, digest=digest, size=1)
        for call in (
            lambda: store.has(repository, descriptor),
            lambda: list(store.read(repository, descriptor)),
            lambda: store.write(repository, descriptor, source(b"x")),
            lambda: store.manifest(repository, digest),
            lambda: store.referrers(repository, digest),
        ):
            with pytest.raises(ImagefactoryError):
                call()

    @pytest.mark.parametrize("tag", ["../x", "a b", "x" * 129, "a\n", "a?b", ".a"])
    def test_what_is_no_tag_is_refused(self, store: Store, repository: str, tag: str) -> None:
        data = image_manifest(store, repository, b"one")
        for call in (
            lambda: store.put_manifest(repository, data, MANIFEST_TYPE, tag),
            lambda: store.manifest(repository, tag),
            lambda: store.untag(repository, tag),
        ):
            with pytest.raises(ImagefactoryError):
                call()
        assert store.tags(repository) == ()

    @pytest.mark.parametrize("name", ["../x", "A", "a//b", "a/", "a:b", "a?n=1", "a\n", ""])
    def test_what_is_no_repository_is_refused(self, store: Store, name: str) -> None:
        for call in (lambda: store.tags(name), lambda: store.manifest(name, "1.0")):
            with pytest.raises(ImagefactoryError):
                call()


def _digests(store: Store, repository: str, subject: Descriptor) -> set[str]:
    return {row.digest for row in store.referrers(repository, subject.digest)}
