"""The store: blobs before names, written beside and renamed, collected only when nobody needs them."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from imagefactory.oci.layout import BlobWriter, Layout, LayoutStore
from imagefactory.oci.maintenance import collect
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    OciLayer,
    canonical_json,
    digest_of,
    format_descriptor,
)
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.layout import LAYER_TYPE, add_image
from tests.made.store_contract import CONFIGS_THAT_ARE_NONE, artifact, blob, image_manifest, odd_image


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "store")


def test_an_image_is_found_by_its_tag(layout: Layout) -> None:
    index = add_image(layout, "a:1", [b"one", b"two"])
    image = layout.image("a:1")
    assert image is not None
    assert image.digest == index.digest
    assert image.size == 6
    assert image.environment == (("A", "1=2"),)
    assert layout.image("a:2") is None
    assert json.loads((layout.path / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}


def test_a_store_not_made_yet_is_empty_and_stays_unmade(layout: Layout) -> None:
    assert layout.tags() == {}
    assert collect(layout, QuietProgress()).blobs == 0
    assert not layout.path.exists()


def test_a_killed_writer_leaves_no_blob(layout: Layout) -> None:
    with BlobWriter(layout) as writer:
        writer.write(b"half")
    assert not (layout.path / "blobs").exists()
    assert list(layout.tmp.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_an_incomplete_image_is_said(layout: Layout, damage: str) -> None:
    add_image(layout, "a:1", [b"one"])
    blob = layout.blob_path(layout.add(b"one", LAYER_TYPE).digest)
    blob.unlink() if damage == "missing" else blob.write_bytes(b"o")
    with fails("blob-missing"):
        layout.image("a:1")


def test_a_damaged_manifest_is_said(layout: Layout) -> None:
    index = add_image(layout, "a:1", [b"one"])
    layout.blob_path(index.digest).write_bytes(b"{}" + b" " * (index.size - 2))
    with fails("store-corrupt"):
        layout.image("a:1")


def test_a_name_that_is_no_digest_does_not_become_a_path(layout: Layout) -> None:
    for digest in ("sha256:../../../etc/passwd", "sha256:" + "a" * 63, "sha256:" + "a" * 64 + "\n"):
        with fails("digest-invalid"):
            layout.blob_path(digest)


def test_nothing_is_tagged_that_is_not_there(layout: Layout) -> None:
    with fails("blob-missing"):
        layout.tag("a:1", Descriptor(media_type="x", digest="sha256:" + "0" * 64, size=1))


def test_collect_keeps_what_tags_need_and_removes_the_rest(layout: Layout) -> None:
    add_image(layout, "a:1", [b"one", b"shared"])
    add_image(layout, "b:1", [b"two", b"shared"])
    one = layout.add(b"one", LAYER_TYPE)
    layout.record_layer("k1", OciLayer(descriptor=one, diff_id=one.digest, title="one"))
    (layout.path / "layers" / "k1.files").write_text("x")
    (layout.path / "unpacked" / one.digest[7:]).mkdir(parents=True)
    (layout.tmp / "left-by-a-kill").write_bytes(b"x" * 100)
    add_image(layout, "a:1", [b"new", b"shared"])

    planned = collect(layout, QuietProgress(), dry_run=True)
    assert layout.has(one)
    done = collect(layout, QuietProgress())
    assert planned == done
    assert done.blobs == 4  # the old image's index, manifest, config and its layer
    assert done.unpacked == 1
    assert not layout.has(one)
    assert layout.recall_layer("k1") is None
    assert list(layout.tmp.iterdir()) == []
    assert layout.image("a:1") is not None
    assert layout.image("b:1") is not None
    assert collect(layout, QuietProgress()).bytes == 0


def _tag_many(path: str, worker: int) -> None:
    layout = Layout(Path(path))
    for number in range(10):
        add_image(layout, f"w{worker}:{number}", [f"{worker} {number}".encode()])


def test_writers_at_once_lose_no_tag(layout: Layout) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_tag_many, args=(str(layout.path), n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert len(layout.tags()) == 40


def test_collect_waits_for_a_build(layout: Layout) -> None:
    add_image(layout, "a:1", [b"one"])
    blob = layout.add(b"on its way into an image", LAYER_TYPE)
    told: list[str] = []

    class Watcher(QuietProgress):
        def note(self, text: str) -> None:
            told.append(text)
            os.write(ask, b"x")

    answer, ask = os.pipe()
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:  # a build: holds the store until the collector says that it waits
        with Layout(layout.path).in_use(QuietProgress()):
            os.write(begun, b"x")
            os.read(answer, 1)
            held = Layout(layout.path).has(blob)
        os._exit(0 if held else 1)
    os.read(ready, 1)
    assert collect(layout, Watcher()).blobs == 1
    assert told == ["waiting for running builds to end ..."]
    assert os.waitpid(child, 0)[1] == 0


def test_a_record_that_cannot_be_read_counts_as_none(layout: Layout) -> None:
    one = layout.add(b"one", LAYER_TYPE)
    layout.record_layer("k", OciLayer(descriptor=one, diff_id=one.digest, title="one"))
    assert layout.recall_layer("k") is not None
    (layout.path / "layers" / "k.json").write_text("{")
    assert layout.recall_layer("k") is None


def test_a_build_killed_before_its_first_tag_leaves_a_store_that_is_collected(layout: Layout) -> None:
    with layout.in_use(QuietProgress()):
        left = layout.add(b"half of an image", LAYER_TYPE)
    assert collect(layout, QuietProgress()).blobs == 1
    assert not layout.has(left)
    assert layout.tags() == {}


def test_a_folder_with_files_of_others_does_not_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "thesis.tex").write_text("mine")
    with fails("store-invalid"), Layout(tmp_path).in_use(QuietProgress()):
        pass
    with fails("store-invalid"):
        collect(Layout(tmp_path), QuietProgress())
    assert (tmp_path / "tmp" / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize(
    "part", ["locks", "nonces/spent", "sweeps", "nights", "reports", "keys", "lost+found"]
)
def test_what_was_written_before_the_store_was_made_belongs_to_it(tmp_path: Path, part: str) -> None:
    """By a first sweep or nightly run of an earlier release; a collection keeps it."""
    kept = tmp_path / part / "1.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    layout = Layout(tmp_path)
    assert not layout.founded()
    with layout.in_use(QuietProgress()):
        add_image(layout, "a:1", [b"one"])
    assert layout.founded()
    collect(layout, QuietProgress())
    assert list(layout.tags()) == ["a:1"]
    assert kept.read_text() == "{}"


def test_a_file_of_others_beside_such_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nonces").mkdir()
    (tmp_path / "thesis.tex").write_text("mine")
    with fails("store-invalid", r"thesis\.tex"):
        Layout(tmp_path).make()
    assert not (tmp_path / "oci-layout").exists()


def test_an_index_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"mine": true}')
    with Layout(tmp_path).in_use(QuietProgress()):
        pass
    assert (tmp_path / "index.json").read_text() == '{"mine": true}'


def test_using_a_store_keeps_its_tags(layout: Layout) -> None:
    add_image(layout, "a:1", [b"one"])
    with layout.in_use(QuietProgress()):
        assert list(layout.tags()) == ["a:1"]


# --- what others made ----------------------------------------------------------------------------


def put_image(store: LayoutStore, *layers: bytes, tag: str = "", **more: object) -> Descriptor:
    return store.put_manifest("a", image_manifest(store, "a", *layers, **more), MANIFEST_TYPE, tag)


def put_index(store: LayoutStore, tag: str, **platforms: Descriptor) -> Descriptor:
    rows = []
    for name, descriptor in platforms.items():
        system, _, architecture = name.partition("_")
        rows.append(
            format_descriptor(descriptor) | {"platform": {"os": system, "architecture": architecture}}
        )
    data = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows})
    return store.put_manifest("a", data, INDEX_TYPE, tag)


@pytest.fixture
def store(layout: Layout) -> LayoutStore:
    return LayoutStore(layout)


def test_a_tag_may_name_a_plain_manifest(layout: Layout, store: LayoutStore) -> None:
    row = put_image(store, b"one", tag="1")
    image = layout.image("a:1")
    assert image is not None
    assert image.digest == image.manifest == row.digest
    assert image.environment == ()
    collect(layout, QuietProgress())
    assert layout.image("a:1") == image


def test_dockers_own_types_are_images(layout: Layout, store: LayoutStore) -> None:
    layer = layout.add(b"one", "application/vnd.docker.image.rootfs.diff.tar.gzip")
    config = canonical_json({"config": {"Env": None}, "rootfs": {"diff_ids": [layer.digest]}})
    docker = "application/vnd.docker."
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{docker}distribution.manifest.v2+json",
        "config": format_descriptor(layout.add(config, f"{docker}container.image.v1+json")),
        "layers": [format_descriptor(layer)],
    }
    row = store.put_manifest("a", canonical_json(manifest), str(manifest["mediaType"]))
    entry = format_descriptor(row) | {"platform": {"os": "linux", "architecture": "amd64"}}
    index = {"mediaType": f"{docker}distribution.manifest.list.v2+json", "manifests": [entry]}
    store.put_manifest("a", canonical_json(index), str(index["mediaType"]), "1")
    image = layout.image("a:1")
    assert image is not None
    assert image.manifest == row.digest
    assert collect(layout, QuietProgress()).blobs == 0


def test_of_several_platforms_the_usual_one_is_taken(layout: Layout, store: LayoutStore) -> None:
    arm, amd = put_image(store, b"arm"), put_image(store, b"amd")
    put_index(store, "1", linux_arm64=arm, linux_amd64=amd, unknown_unknown=arm)
    image = layout.image("a:1")
    assert image is not None
    assert image.manifest == amd.digest
    put_index(store, "2", linux_arm64=arm, windows_amd64=amd)
    with fails("store-platform-missing", r"linux/amd64.*linux/arm64, windows/amd64"):
        layout.image("a:2")


def test_of_an_index_all_that_is_here_is_kept(layout: Layout, store: LayoutStore) -> None:
    amd = put_image(store, b"amd")
    arm = put_image(store, b"arm")
    absent = Descriptor(media_type=MANIFEST_TYPE, digest=digest_of(b"never came"), size=10)
    put_index(store, "1", linux_arm64=arm, linux_amd64=amd, linux_s390x=absent)
    assert collect(layout, QuietProgress()).blobs == 0
    layout.blob_path(digest_of(b"arm")).unlink()
    layout.add(b"loose", LAYER_TYPE)
    for unpacked in (b"arm", b"nobody's"):
        (layout.path / "unpacked" / digest_of(unpacked)[7:]).mkdir(parents=True)
    done = collect(layout, QuietProgress())
    ((name, error),) = done.damaged
    assert (name, done.blobs, done.unpacked) == ("a:1", 1, 1)
    assert error.code == "image-incomplete"
    assert digest_of(b"arm") in error.message
    assert "image remove a:1" in error.hint
    assert store.has("a", amd)


@pytest.mark.parametrize("fault", [Path.unlink, lambda path: flip(path)], ids=["missing", "damaged"])
@pytest.mark.parametrize("index", [False, True])
def test_nothing_is_removed_where_nobody_knows_what_an_image_names(
    layout: Layout, store: LayoutStore, index: bool, fault: Callable[[Path], None]
) -> None:
    image = put_image(store, b"one", tag="1")
    root = put_index(store, "1", linux_amd64=image) if index else image
    loose = layout.add(b"loose", LAYER_TYPE)
    for descriptor in (image, root):
        before = layout.blob_path(descriptor.digest).read_bytes()
        if index and descriptor == image and fault is Path.unlink:
            continue  # another platform's, which never came
        fault(layout.blob_path(descriptor.digest))
        with fails("image-incomplete", "a:1: blob") as caught:
            collect(layout, QuietProgress())
        assert "image remove a:1" in caught.value.hint
        assert layout.has(loose)
        assert layout.has(blob(b"one"))
        layout.add(before, MANIFEST_TYPE)
    assert collect(layout, QuietProgress()).blobs == 1


def test_a_damaged_blob_that_cannot_be_removed_is_said(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of somebody else: root may remove all, so the refusal is made."""
    one = layout.add(b"one", LAYER_TYPE)
    flip(layout.blob_path(one.digest))

    def refuse(_: Path, path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("imagefactory.oci.layout.remove_inside", refuse)
    error = layout.damaged(one.digest)
    assert error.code == "store-corrupt"
    assert f"rm {layout.blob_path(one.digest)}" in error.hint


@pytest.mark.parametrize("config", CONFIGS_THAT_ARE_NONE.values(), ids=CONFIGS_THAT_ARE_NONE)
def test_an_image_without_a_config_stops_no_other(layout: Layout, store: LayoutStore, config: bytes) -> None:
    put_image(store, b"two", tag="1")
    bad = store.put_manifest("a", odd_image(store, "a", config), MANIFEST_TYPE, "bad")
    with fails("store-corrupt", "a:bad"):
        layout.image("a:bad")
    layout.add(b"loose", LAYER_TYPE)
    done = collect(layout, QuietProgress())
    assert ([name for name, _ in done.damaged], done.blobs) == (
        ["a:bad"],
        2,
    )  # and the config that was put aside
    assert all(store.has("a", kept) for kept in (bad, blob(b"one"), blob(config)))
    assert layout.image("a:1") is not None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_blob_that_changed_is_removed_where_it_is_read(layout: Layout, store: LayoutStore) -> None:
    """Its size is right: who looks for what to make again would take it for whole."""
    layer = OciLayer(descriptor=layout.add(b"one", LAYER_TYPE), diff_id=digest_of(b"one"), title="")
    layout.record_layer("ab", layer)
    whole = layout.add(b"two", LAYER_TYPE)
    flip(layout.blob_path(layer.descriptor.digest))
    assert layout.recall_layer("ab") == layer
    with fails("store-corrupt") as caught:
        list(store.read("a", layer.descriptor))
    assert "imagefactory build" in caught.value.hint
    assert layout.recall_layer("ab") is None
    layout.add(b"one", LAYER_TYPE)
    assert layout.recall_layer("ab") == layer
    assert layout.damaged(whole.digest).code == "store-corrupt"
    assert layout.has(whole)


def test_an_artifact_is_kept_and_is_no_image(layout: Layout, store: LayoutStore) -> None:
    subject = put_image(store, b"one")
    sif = artifact(store, "a", subject, "application/vnd.sylabs.sif.layer.v1.sif", "squashed")
    store.put_manifest("a", sif, MANIFEST_TYPE, "1.sif")
    with fails("not-an-image"):
        layout.image("a:1.sif")
    collect(layout, QuietProgress())
    assert store.has("a", blob(b"squashed"))
    assert store.manifest("a", "1.sif") is not None
    assert not store.has("a", subject)  # what it was made from is not what it needs


def test_what_refers_to_a_kept_image_is_kept(layout: Layout, store: LayoutStore) -> None:
    kept = put_image(store, b"one")
    put_index(store, "1", linux_amd64=kept)
    verdict = store.put_manifest(
        "a", artifact(store, "a", kept, "application/vnd.verdict", "verdict"), MANIFEST_TYPE
    )
    on_verdict = artifact(store, "a", verdict, "application/vnd.signature", "signature")
    store.put_manifest("a", on_verdict, MANIFEST_TYPE)
    dropped = put_image(store, b"two")
    lost = artifact(store, "a", dropped, "application/vnd.verdict", "lost")
    store.put_manifest("a", lost, MANIFEST_TYPE)

    planned = collect(layout, QuietProgress(), dry_run=True)
    done = collect(layout, QuietProgress())
    assert planned == done
    assert done.blobs == 5  # the untagged image: manifest, config, layer; its verdict: manifest and blob
    assert done.records == 1
    assert [row.digest for row in store.referrers("a", kept.digest)] == [verdict.digest]
    assert [row.digest for row in store.referrers("a", verdict.digest)] == [digest_of(on_verdict)]
    assert store.has("a", blob(b"signature"))
    assert store.referrers("a", dropped.digest) == ()
    assert not store.has("a", blob(b"lost"))
    assert collect(layout, QuietProgress()).bytes == 0
    layout.untag("a:1")
    collect(layout, QuietProgress())
    assert list((layout.path / "blobs" / "sha256").iterdir()) == []
    assert not list((layout.path / "referrers").rglob("*.json"))


@pytest.mark.parametrize("damage", ["lost", "cut", "manifest lost", "manifest damaged", "record damaged"])
def test_a_damaged_referrer_goes_and_all_else_stays(layout: Layout, store: LayoutStore, damage: str) -> None:
    kept = put_image(store, b"one")
    put_index(store, "1", linux_amd64=kept)
    data = artifact(store, "a", kept, "application/vnd.sif", "squashed")
    sif = store.put_manifest("a", data, MANIFEST_TYPE)
    signature = artifact(store, "a", sif, "application/vnd.signature", "signature")
    store.put_manifest("a", signature, MANIFEST_TYPE)
    verdict = artifact(store, "a", kept, "application/vnd.verdict", "verdict")
    store.put_manifest("a", verdict, MANIFEST_TYPE)
    record = layout.path / "referrers" / kept.digest[7:] / f"{sif.digest[7:]}.json"
    paths = {"manifest": layout.blob_path(sif.digest), "record": record}
    path = paths.get(damage.split()[0], layout.blob_path(digest_of(b"squashed")))
    path.unlink() if "lost" in damage else path.write_bytes(b"x" * (sif.size if " " in damage else 3))

    planned = collect(layout, QuietProgress(), dry_run=True)
    assert collect(layout, QuietProgress()) == planned
    assert not record.exists()
    for gone in (b"squashed", data, signature, b"signature"):
        assert not layout.blob_path(digest_of(gone)).exists()
    assert [row.digest for row in store.referrers("a", kept.digest)] == [digest_of(verdict)]
    assert store.has("a", blob(b"verdict"))
    assert layout.image("a:1") is not None
    assert collect(layout, QuietProgress()).bytes == 0


def test_a_referrer_that_names_its_subject_ends_the_walk(layout: Layout, store: LayoutStore) -> None:
    row = put_image(store, b"one", tag="1")
    value = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [format_descriptor(row)],
        "subject": format_descriptor(row),
    }
    index = store.put_manifest("a", canonical_json(value), INDEX_TYPE)
    assert collect(layout, QuietProgress()).blobs == 0
    assert store.manifest("a", index.digest) is not None


def test_what_is_unreferred_is_kept_no_more(layout: Layout, store: LayoutStore) -> None:
    row = put_image(store, b"one", tag="1")
    one, two = (
        store.put_manifest("a", artifact(store, "a", row, "application/vnd.x", note), MANIFEST_TYPE)
        for note in ("one more", "two more")
    )
    layout.unrefer(row.digest, one.digest)
    layout.unrefer(row.digest, one.digest)  # it is gone already: nothing happens
    assert [each.digest for each in store.referrers("a", row.digest)] == [two.digest]
    assert collect(layout, QuietProgress()).blobs == 2
    with fails("digest-invalid"):
        layout.unrefer(row.digest, "../../index")


def test_a_blob_that_is_no_manifest_is_not_given_as_one(layout: Layout, store: LayoutStore) -> None:
    for data in (b"plain", b"[]", b"{}", b'{"mediaType": ""}'):
        with fails("store-corrupt"):
            store.manifest("a", layout.add(data, LAYER_TYPE).digest)


def test_a_tag_whose_manifest_is_gone_is_said(layout: Layout, store: LayoutStore) -> None:
    row = put_image(store, b"one", tag="1")
    layout.blob_path(row.digest).unlink()
    with fails("blob-missing") as caught:
        store.manifest("a", "1")
    assert caught.value.hint == "run imagefactory image remove a:1"


def test_a_manifest_is_not_put_as_another_type(store: LayoutStore) -> None:
    data = image_manifest(store, "a", b"one")
    with fails("store-manifest-invalid"):
        store.put_manifest("a", data, INDEX_TYPE)


def test_a_blob_that_was_damaged_on_disk_is_said_when_read(layout: Layout, store: LayoutStore) -> None:
    descriptor = layout.add(b"x" * 3_000_000, LAYER_TYPE)
    path = layout.blob_path(descriptor.digest)
    for data in (b"y" * descriptor.size, b"x" * 100, b"x" * 4_000_000):
        path.write_bytes(data)
        with fails("store-corrupt"):
            list(store.read("a", descriptor))
