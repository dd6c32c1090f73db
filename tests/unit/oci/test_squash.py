"""Layers become a squashfs: what is in it, what is packed again and what is not, what is refused."""

from __future__ import annotations

import json
import os
import random
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.oci.maintenance import collect
from imagefactory.oci.manifests import OciLayer
from imagefactory.oci.sif import SifOrigin, store_sif
from imagefactory.oci.squash_layers import (
    SQUASHED,
    LayerIndex,
    LayerPacker,
    PackerPool,
    SquashCompression,
    StoredSifChangedError,
    format_index,
    parse_index,
)
from imagefactory.oci.squashfs import InodeAttributes, SquashDirectory, SquashFile, SquashSymlink
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.layer_store import Entry, LayerStore, file, folder, link, make_tar
from tests.made.squashfs import MOMENT, Squashed, SquashReader, count_packed

NOISE = random.Random(18).randbytes(10_000)  # two blocks and a rest that no codec makes smaller
TEXT = b"what is said again and again " * 1000


class Ground:
    """Layers of few entries, and the store that squashes them."""

    def __init__(self, path: Path, squeeze: SquashCompression | None = None, workers: int = 2) -> None:
        path.mkdir(exist_ok=True)
        self.layers = LayerStore(path)
        self.squashed = Squashed(path, squeeze, workers) if squeeze else Squashed(path, workers=workers)

    def layer(self, *entries: Entry, codec: str = "") -> OciLayer:
        made = self.layers.add(make_tar(*entries), codec)
        return self.squashed.add(made, self.layers.blob_path(made.descriptor.digest))

    def image(self, *layers: OciLayer) -> SquashReader:
        return SquashReader(self.squashed.write(*layers))


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_packed(monkeypatch)


# --- what is in it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["", "+gzip", "+zstd"])
def test_every_kind_of_entry(ground: Ground, codec: str) -> None:
    layer = ground.layer(
        folder("", mode=0o711),
        folder("a", mode=0o1777, uid=7, gid=70_000),
        file("a/empty", b""),
        file("a/small", b"hello", mode=0o4755, uid=65534),
        file("a/block", TEXT[:4096]),
        file("a/large", TEXT, mtime=1_234_567_890.75),
        file("a/noise", NOISE),
        link("a/link", "../somewhere/else"),
        link("again", "a/large", tarfile.LNKTYPE),
        file("implied/parent/file"),
        file("old", mtime=-5),
        codec=codec,
    )
    image = ground.image(layer)
    found = {path.decode(): entry for path, entry in image.entries.items()}
    assert sorted(found) == [
        *("", "a", "a/block", "a/empty", "a/large", "a/link", "a/noise", "a/small"),
        *("again", "implied", "implied/parent", "implied/parent/file", "old"),
    ]
    contents = {path: entry.content for path, entry in found.items() if entry.kind == "file"}
    assert contents == {
        "a/empty": b"", "a/small": b"hello", "a/block": TEXT[:4096], "a/large": TEXT, "a/noise": NOISE,
        "again": TEXT, "implied/parent/file": b"x", "old": b"x",
    }  # fmt: skip
    assert (found["a/link"].kind, found["a/link"].target) == ("link", b"../somewhere/else")
    assert found["again"].inode == found["a/large"].inode
    assert [found[path].names for path in ("again", "a/small", "a", "")] == [2, 1, 2, 4]
    assert (found["a"].mode, found["a"].owner) == (0o1777, (7, 70_000))
    assert (found["a/small"].mode, found["a/small"].owner[0], found[""].mode) == (0o4755, 65534, 0o711)
    assert (found["implied"].mode, found["implied"].owner, found["implied"].mtime) == (0o755, (0, 0), 0)
    assert [found[path].mtime for path in ("a/small", "a/large", "old")] == [1_600_000_000, 1_234_567_890, 0]
    assert (image.mtime, image.inodes) == (MOMENT, len(found) - 1)


def test_many_names_and_large_folders(ground: Ground) -> None:
    names = [f"folder/{number:05}-{'n' * (number % 200)}" for number in range(3000)]
    folders = [f"{name}.d" for name in names[:9]]
    layer = ground.layer(*(file(name, name.encode()) for name in names), *map(folder, folders))
    found = ground.image(layer).entries
    assert {path.decode() for path in found} == {"", "folder", *names, *folders}
    assert all(found[name.encode()].content == name.encode() for name in names)
    assert found[b"folder"].names == 11


def test_names_that_are_no_text(ground: Ground) -> None:
    name = os.fsdecode(b"not \xff text")
    layer = ground.layer(file(name), link("to", name))
    for _ in range(2):  # packed, and told by the record
        found = ground.image(layer).entries
        assert found[b"not \xff text"].content == b"x"
        assert found[b"to"].target == b"not \xff text"


def test_an_empty_layer(ground: Ground) -> None:
    assert list(ground.image(ground.layer()).entries) == [b""]


@pytest.mark.parametrize(
    ("upper", "wanted"),
    [
        ([file("a/b", b"new")], {"a": "folder", "a/b": b"new", "a/c": b"low", "d": b"low"}),
        ([file("a/.wh.b", b"")], {"a": "folder", "a/c": b"low", "d": b"low"}),
        ([file("a/.wh.nothing", b"")], {"a": "folder", "a/b": b"low", "a/c": b"low", "d": b"low"}),
        ([file(".wh.a", b"")], {"d": b"low"}),
        ([file(".wh.a", b""), file("a/b", b"new")], {"a": "folder", "a/b": b"new", "d": b"low"}),
        ([file("a/b", b"new"), file(".wh.a", b"")], {"a": "folder", "a/b": b"new", "d": b"low"}),
        ([file("a/.wh..wh..opq", b""), file("a/e", b"new")], {"a": "folder", "a/e": b"new", "d": b"low"}),
        ([file("a/e", b"new"), file("a/.wh..wh..opq", b"")], {"a": "folder", "a/e": b"new", "d": b"low"}),
        ([file(".wh..wh..opq", b""), file("e", b"new")], {"e": b"new"}),
        ([file("a", b"new")], {"a": b"new", "d": b"low"}),
        ([file("d/e", b"new")], {"a": "folder", "a/b": b"low", "a/c": b"low", "d": "folder", "d/e": b"new"}),
        ([link("d", "a/b")], {"a": "folder", "a/b": b"low", "a/c": b"low", "d": "link"}),
    ],
)
def test_an_upper_layer_hides_and_replaces(
    ground: Ground, upper: list[Entry], wanted: dict[str, object]
) -> None:
    lower = ground.layer(file("a/b", b"low"), file("a/c", b"low"), file("d", b"low"))
    found = ground.image(lower, ground.layer(*upper)).entries
    seen = {path.decode(): entry.content or entry.kind for path, entry in found.items() if path}
    assert seen == wanted


def test_a_folder_has_what_the_highest_layer_says_of_it(ground: Ground) -> None:
    lower = ground.layer(folder("a", mode=0o700), folder("b", mode=0o700))
    upper = ground.layer(file("a/file"), folder("b", mode=0o711))
    found = ground.image(lower, upper).entries
    assert [found[path].mode for path in (b"a", b"b")] == [0o700, 0o711]


def test_hard_links_end_with_their_layer(ground: Ground) -> None:
    lower = ground.layer(file("a", TEXT), link("b", "a", tarfile.LNKTYPE))
    found = ground.image(lower, ground.layer(file("a", b"new"))).entries
    assert [(found[path].names, found[path].content) for path in (b"a", b"b")] == [(1, b"new"), (1, TEXT)]


def test_a_layer_twice(ground: Ground) -> None:
    once, other = ground.layer(file("a", TEXT)), ground.layer(file(".wh.a", b""))
    found = ground.image(once, other, replace(once, title="again")).entries
    assert found[b"a"].content == TEXT


def test_what_apptainer_adds(ground: Ground) -> None:
    """Its files replace files; the image keeps its folders, and what is of another kind than apptainer's."""
    low = InodeAttributes(mode=0o700, uid=0, gid=0, mtime=1)
    new = InodeAttributes(mode=0o755, uid=0, gid=0, mtime=2)

    def tree() -> SquashDirectory:
        return SquashDirectory(owned=new, entries={"x": SquashFile(owned=new, size=0)})

    dress = LayerIndex(
        root=SquashDirectory(
            owned=new,
            entries={
                "file": SquashFile(owned=new, size=0),
                "link": SquashSymlink(owned=new, target="new"),
                "kept link": SquashFile(owned=new, size=0),
                "kept file": SquashSymlink(owned=new, target="new"),
                "folder": tree(),
                "added": tree(),
                "no folder": tree(),
            },
        )
    )
    layer = ground.layer(
        folder("", mode=low.mode),
        *(file("file", b"old"), link("link", "old"), link("kept link", "old"), file("kept file", b"old")),
        *(folder("folder", mode=low.mode), link("no folder", "elsewhere")),
    )
    found = SquashReader(ground.squashed.write(layer, dress=dress)).entries
    assert sorted(found) == [
        *(b"", b"added", b"added/x", b"file", b"folder", b"folder/x"),
        *(b"kept file", b"kept link", b"link", b"no folder"),
    ]
    assert (found[b"file"].content, found[b"kept file"].content) == (b"", b"old")
    targets = [found[path].target for path in (b"link", b"kept link", b"no folder")]
    assert targets == [b"new", b"old", b"elsewhere"]
    assert [found[path].mode for path in (b"", b"folder", b"added")] == [low.mode, low.mode, new.mode]


# --- what is refused, as unpacking does --------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ([file("../x")], "outside"),
        ([file("a"), file("a/b")], "'a' is used"),
        ([link("a", "b", tarfile.LNKTYPE)], "'b', not in"),
        ([folder("b"), link("a", "b", tarfile.LNKTYPE)], "'b', which"),
        ([file(".wh.", b"")], "whiteout"),
        ([file("a", uid=1 << 40)], str(1 << 40)),
        ([link("a", "")], "not a path"),
        ([link("a", "b" * 4096)], "not a path"),
        ([("fifo", b"", {"type": b"V"})], "the type"),
    ],
)
def test_what_no_layer_may_hold(ground: Ground, entries: list[Entry], named: str) -> None:
    good, bad = ground.layer(*(file(f"{n}", NOISE) for n in range(9))), ground.layer(*entries)
    with fails("layer-entry-unsafe", named):
        ground.squashed.rows(good, bad)


def test_another_content_than_the_diff_id_says(ground: Ground) -> None:
    layer = replace(ground.layer(file("a")), diff_id="sha256:" + "0" * 64)
    with fails("layer-corrupt", "sha256:"):
        ground.squashed.rows(layer)


# --- the same bytes, made once -----------------------------------------------------------------------


def image_layers(ground: Ground, package: bytes) -> list[OciLayer]:
    base = ground.layer(*(file(f"base/{n}", TEXT[n:] + NOISE) for n in range(20)), file("base/tiny"))
    large = ground.layer(file("large", NOISE * 300), link("hard", "large", tarfile.LNKTYPE), codec="+zstd")
    return [base, large, ground.layer(file("package", package), file("base/.wh.tiny", b""))]


def test_the_same_bytes_whoever_is_ready_first(tmp_path: Path) -> None:
    made = set()
    for workers in (1, 2, 7):
        ground = Ground(tmp_path / str(workers), SquashCompression(level=1, block=16384), workers)
        made.add(ground.squashed.write(*image_layers(ground, b"1")))
    assert len(made) == 1


def test_a_changed_layer_alone_is_packed(ground: Ground, packed: list[int]) -> None:
    first = ground.squashed.write(*image_layers(ground, b"1"))
    assert sum(packed) > 3_000_000
    packed.clear()
    assert ground.squashed.write(*image_layers(ground, b"1")) == first
    assert packed == []
    second = ground.squashed.write(*image_layers(ground, b"22"))
    assert packed == [2]
    assert SquashReader(second).entries[b"package"].content == b"22"
    fresh = Ground(ground.squashed.path / "fresh")
    assert fresh.squashed.write(*image_layers(fresh, b"22")) == second


def test_layers_are_not_packed_for_another_squeeze(ground: Ground, packed: list[int]) -> None:
    layer = ground.layer(file("a"))
    ground.squashed.write(layer)
    ground.squashed.store.squeeze = SquashCompression(level=2, block=4096)
    ground.squashed.write(layer)
    assert packed == [1, 1]


def kept(ground: Ground) -> Path:
    """The only blob of the store that is a squashfs."""
    blobs = (ground.squashed.layout.path / "blobs" / "sha256").iterdir()
    (found,) = (path for path in blobs if path.read_bytes()[:4] == b"hsqs")
    return found


@pytest.mark.parametrize("cut", [False, True])
def test_what_changed_on_disk_gets_into_nothing(ground: Ground, packed: list[int], cut: bool) -> None:
    layers = image_layers(ground, b"1")
    first = ground.squashed.write(*layers)
    blob = kept(ground)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data[: len(data) // 2] if cut else data)
    packed.clear()
    with pytest.raises(StoredSifChangedError) as caught:
        ground.squashed.write(*layers)
    assert packed == []
    ground.squashed.store.forget(layers[caught.value.place])
    assert not blob.exists()
    assert ground.squashed.write(*layers) == first
    assert kept(ground) == blob


@pytest.mark.parametrize("how", ["cut", "swapped", "foreign", "without its .sif"])
def test_a_record_that_says_nothing_is_made_anew(ground: Ground, packed: list[int], how: str) -> None:
    layers = image_layers(ground, b"1")
    first = ground.squashed.write(*layers)
    folder = ground.squashed.layout.path / SQUASHED
    one, other, _ = sorted(folder.iterdir())
    if how == "cut":
        one.write_bytes(one.read_bytes()[:-9])
    elif how == "swapped":
        one.write_bytes(other.read_bytes())
    elif how == "foreign":
        ground.squashed.layout.keep(one, json.dumps({"digest": f"sha256:{kept(ground).name}"}).encode())
    else:
        kept(ground).unlink()
    packed.clear()
    assert ground.squashed.write(*layers) == first
    assert sum(packed) > 0


def test_records_go_with_their_sif(ground: Ground) -> None:
    layout = ground.squashed.layout
    with layout.in_use(QuietProgress()):
        ground.squashed.write(ground.layer(file("a")))
        made = ground.squashed.path / "made.sif"
        made.write_bytes(kept(ground).read_bytes())
        store_sif(layout, made, SifOrigin(target="a", compression="fast"), tag="a:1.sif")
    collect(layout, QuietProgress())
    assert len([*(layout.path / SQUASHED).iterdir()]) == 1
    layout.untag("a:1.sif")
    collect(layout, QuietProgress())
    assert [*(layout.path / SQUASHED).iterdir()] == []


def test_an_index_survives_its_record(ground: Ground) -> None:
    (row,) = ground.squashed.rows(image_layers(ground, b"1")[1])
    again = parse_index(json.loads(json.dumps(format_index(row.index))))
    assert again.root.entries["hard"] is again.root.entries["large"]
    assert format_index(again) == json.loads(json.dumps(format_index(row.index)))


def test_a_failure_ends_the_other_layers(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, reached = PackerPool._pack, threading.Event()

    def wait(self: PackerPool, piece: bytes) -> object:
        reached.set()
        assert self.stopped.wait(60), "nobody stopped it"
        return pack(self, piece)

    monkeypatch.setattr(PackerPool, "_pack", wait)
    monkeypatch.setattr(LayerPacker, "whiteout", lambda *_: reached.wait(60))
    large, bad = ground.layer(file("large", NOISE * 1000)), ground.layer(file(".wh.a", b""), file("../bad"))
    with fails("layer-entry-unsafe", "outside"):
        ground.squashed.rows(large, bad)
