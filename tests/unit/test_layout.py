"""The store: blobs before names, written beside and renamed, collected only when nobody needs them."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from imagefactory.engines.base_image import write_index
from imagefactory.errors import StoreError
from imagefactory.model import Descriptor, Layer
from imagefactory.oci.layout import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    BlobWriter,
    Layout,
    canonical_json,
    format_descriptor,
)
from imagefactory.progress import Quiet

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


def add_image(layout: Layout, name: str, contents: list[bytes]) -> Descriptor:
    layers = [layout.add(content, LAYER_TYPE) for content in contents]
    config = {"config": {"Env": ["A=1=2"]}, "rootfs": {"diff_ids": [layer.digest for layer in layers]}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(layer) for layer in layers],
    }
    index = write_index(layout, manifest, "linux/amd64")
    layout.tag(name, index)
    return index


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
    assert layout.collect(Quiet()).blobs == 0
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
    with pytest.raises(StoreError, match="missing or cut"):
        layout.image("a:1")


def test_a_damaged_manifest_is_said(layout: Layout) -> None:
    index = add_image(layout, "a:1", [b"one"])
    layout.blob_path(index.digest).write_bytes(b"{}" + b" " * (index.size - 2))
    with pytest.raises(StoreError, match="damaged"):
        layout.image("a:1")


def test_a_name_that_is_no_digest_does_not_become_a_path(layout: Layout) -> None:
    for digest in ("sha256:../../../etc/passwd", "sha256:" + "a" * 63, "sha256:" + "a" * 64 + "\n"):
        with pytest.raises(StoreError, match="not a sha256 digest"):
            layout.blob_path(digest)


def test_nothing_is_tagged_that_is_not_there(layout: Layout) -> None:
    with pytest.raises(StoreError, match="nothing to tag"):
        layout.tag("a:1", Descriptor(media_type="x", digest="sha256:" + "0" * 64, size=1))


def test_collect_keeps_what_tags_need_and_removes_the_rest(layout: Layout) -> None:
    add_image(layout, "a:1", [b"one", b"shared"])
    add_image(layout, "b:1", [b"two", b"shared"])
    one = layout.add(b"one", LAYER_TYPE)
    layout.record_layer("k1", Layer(descriptor=one, diff_id=one.digest, title="one"))
    (layout.path / "layers" / "k1.files").write_text("x")
    (layout.path / "unpacked" / one.digest[7:]).mkdir(parents=True)
    (layout.tmp / "left-by-a-kill").write_bytes(b"x" * 100)
    add_image(layout, "a:1", [b"new", b"shared"])

    planned = layout.collect(Quiet(), dry_run=True)
    assert layout.has(one)
    done = layout.collect(Quiet())
    assert planned == done
    assert done.blobs == 4  # the old image's index, manifest, config and its layer
    assert done.unpacked == 1
    assert not layout.has(one)
    assert layout.recall_layer("k1") is None
    assert list(layout.tmp.iterdir()) == []
    assert layout.image("a:1") is not None
    assert layout.image("b:1") is not None
    assert layout.collect(Quiet()).bytes == 0


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
        worker.join(30)
        assert worker.exitcode == 0
    assert len(layout.tags()) == 40


def test_collect_waits_for_a_build(layout: Layout) -> None:
    add_image(layout, "a:1", [b"one"])
    blob = layout.add(b"on its way into an image", LAYER_TYPE)
    told: list[str] = []

    class Watcher(Quiet):
        def note(self, text: str) -> None:
            told.append(text)
            os.write(ask, b"x")

    answer, ask = os.pipe()
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:  # a build: holds the store until the collector says that it waits
        with Layout(layout.path).in_use(Quiet()):
            os.write(begun, b"x")
            os.read(answer, 1)
            held = Layout(layout.path).has(blob)
        os._exit(0 if held else 1)
    os.read(ready, 1)
    assert layout.collect(Watcher()).blobs == 1
    assert told == ["waiting for running builds to end ..."]
    assert os.waitpid(child, 0)[1] == 0


def test_a_record_that_cannot_be_read_counts_as_none(layout: Layout) -> None:
    one = layout.add(b"one", LAYER_TYPE)
    layout.record_layer("k", Layer(descriptor=one, diff_id=one.digest, title="one"))
    assert layout.recall_layer("k") is not None
    (layout.path / "layers" / "k.json").write_text("{")
    assert layout.recall_layer("k") is None


def test_a_build_killed_before_its_first_tag_leaves_a_store_that_is_collected(layout: Layout) -> None:
    with layout.in_use(Quiet()):
        left = layout.add(b"half of an image", LAYER_TYPE)
    assert layout.collect(Quiet()).blobs == 1
    assert not layout.has(left)
    assert layout.tags() == {}


def test_a_folder_with_files_of_others_does_not_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "thesis.tex").write_text("mine")
    with pytest.raises(StoreError, match="not empty"), Layout(tmp_path).in_use(Quiet()):
        pass
    with pytest.raises(StoreError, match="is no store"):
        Layout(tmp_path).collect(Quiet())
    assert (tmp_path / "tmp" / "thesis.tex").read_text() == "mine"


def test_using_a_store_keeps_its_tags(layout: Layout) -> None:
    add_image(layout, "a:1", [b"one"])
    with layout.in_use(Quiet()):
        assert list(layout.tags()) == ["a:1"]
