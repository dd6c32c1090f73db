"""Export of one image: what is in the file, that it is the same file every time, and bad luck."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import resource
import tarfile
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from imagefactory.errors import StoreError
from imagefactory.oci.archive import FORMATS, ImageImport, export, stream_docker, take_docker
from imagefactory.oci.layers import codec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Image,
    canonical_json,
)
from imagefactory.progress import QuietProgress
from tests.made.errors import fails

NAME = "pytorch:2.3-cu121"


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def small_tar(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


PLAIN = [
    small_tar("etc/one", b"one" * 5000),
    small_tar("opt/two", b"two"),
    small_tar("opt/three", b"\0" * 3_000_000),
]


def descriptor(found: Descriptor) -> dict[str, object]:
    return {"mediaType": found.media_type, "digest": found.digest, "size": found.size}


def make_image(layout: Layout) -> Image:
    """An image with a zstd layer, a gzip layer and a plain one, and another image that must stay behind."""
    layers = []
    for name, data in zip(("zstd", "gzip", ""), PLAIN, strict=True):
        if name:
            compressor = codec(name).compressor()
            layers.append(layout.add(compressor.compress(data) + compressor.flush(), codec(name).media_type))
        else:
            layers.append(layout.add(data, "application/vnd.oci.image.layer.v1.tar"))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/opt/env/bin"], "Cmd": ["python"]},
        "rootfs": {"type": "layers", "diff_ids": [sha(data) for data in PLAIN]},
        "history": [{"created_by": "test"} for _ in PLAIN],
    }
    config_blob = layout.add(canonical_json(config), CONFIG_TYPE)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": descriptor(config_blob),
        "layers": [descriptor(layer) for layer in layers],
    }
    manifest_blob = layout.add(canonical_json(manifest), MANIFEST_TYPE)
    entry = {**descriptor(manifest_blob), "platform": {"architecture": "amd64", "os": "linux"}}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    index_blob = layout.add(canonical_json(index), INDEX_TYPE)
    layout.add(b"a blob of another image", "application/octet-stream")
    layout.tag(NAME, index_blob)
    image = layout.image(NAME)
    assert image is not None
    return image


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "store")


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path, "r:") as tar:
        found = {}
        for member in tar.getmembers():
            assert (member.uid, member.gid, member.mtime, member.uname) == (0, 0, 0, "")
            file = tar.extractfile(member)
            found[member.name] = file.read() if file else b""
        return found


def test_oci_archive_is_a_layout_with_this_image_alone(layout: Layout, tmp_path: Path) -> None:
    image = make_image(layout)
    out = tmp_path / "image.tar"
    export(layout, image, out, kind="oci-archive", progress=QuietProgress())
    files = contents(out)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["digest"] == image.digest
    assert entry["mediaType"] == INDEX_TYPE
    assert entry["size"] == len(files[f"blobs/{image.digest.replace(':', '/')}"])
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": "pytorch:2.3-cu121"}
    blobs = {name.removeprefix("blobs/sha256/"): data for name, data in files.items() if data and "/" in name}
    assert all(sha(data) == f"sha256:{name}" for name, data in blobs.items())
    wanted = {
        image.digest,
        image.manifest,
        image.config,
        *(layer.descriptor.digest for layer in image.layers),
    }
    assert {f"sha256:{name}" for name in blobs} == wanted


def test_docker_archive_holds_plain_layers_by_diff_id(layout: Layout, tmp_path: Path) -> None:
    image = make_image(layout)
    out = tmp_path / "image.tar"
    export(layout, image, out, kind="docker-archive", progress=QuietProgress())
    files = contents(out)
    (entry,) = json.loads(files["manifest.json"])
    assert entry["RepoTags"] == ["pytorch:2.3-cu121"]
    assert sha(files[entry["Config"]]) == image.config
    assert [files[name] for name in entry["Layers"]] == PLAIN
    assert entry["Layers"] == [f"{sha(data)[7:]}/layer.tar" for data in PLAIN]


@pytest.mark.parametrize("kind", FORMATS)
def test_same_image_same_bytes(kind: str, layout: Layout, tmp_path: Path) -> None:
    image = make_image(layout)
    one, two = tmp_path / "one.tar", tmp_path / "two.tar"
    for out in (one, two):
        export(layout, image, out, kind=kind, progress=QuietProgress())
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_size % 10240 == 0
    assert one.stat().st_mode & 0o777 == 0o644


def garble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("harm", [garble, cut, Path.unlink])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_harmed_layer_is_refused_and_the_old_file_stays(kind, harm, which, layout, tmp_path) -> None:
    image = make_image(layout)
    out = tmp_path / "out" / "image.tar"
    out.parent.mkdir()
    out.write_text("the file of yesterday")
    harm(layout.blob_path(image.layers[which].descriptor.digest))
    with pytest.raises(StoreError) as caught:
        export(layout, image, out, kind=kind, progress=QuietProgress())
    assert caught.value.code in ("store-corrupt", "blob-missing")
    assert "imagefactory build" in caught.value.hint
    assert out.read_text() == "the file of yesterday"
    assert [path.name for path in out.parent.iterdir()] == ["image.tar"]


def test_config_that_names_other_layers_is_refused(layout: Layout, tmp_path: Path) -> None:
    image = make_image(layout)
    wrong = replace(image, layers=image.layers[::-1])
    with fails("store-corrupt"):
        export(layout, wrong, tmp_path / "image.tar", kind="docker-archive", progress=QuietProgress())


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """The kernel refuses to let a file grow further, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_leaves_nothing(layout: Layout, tmp_path: Path) -> None:
    image = make_image(layout)
    out = tmp_path / "out" / "image.tar"
    out.parent.mkdir()
    with no_file_larger_than(100_000), fails("disk-full") as caught:
        export(layout, image, out, kind="docker-archive", progress=QuietProgress())
    assert caught.value.hint
    assert list(out.parent.iterdir()) == []


def test_refusals_say_what_to_write(layout: Layout, tmp_path: Path) -> None:
    image = make_image(layout)
    with fails("option-invalid", "zip") as caught:
        export(layout, image, tmp_path / "image.zip", kind="zip", progress=QuietProgress())
    assert "docker-archive" in caught.value.hint
    with fails("directory-not-found"):
        export(layout, image, tmp_path / "no" / "image.tar", kind="oci-archive", progress=QuietProgress())
    with fails("output-not-file"):
        export(layout, image, tmp_path, kind="oci-archive", progress=QuietProgress())


@pytest.mark.parametrize("name", ["pytorch", "pytorch:", "Latest:1", "a:b\n", "../a:b"])
def test_name_that_cannot_be_loaded_is_refused(name: str, layout: Layout, tmp_path: Path) -> None:
    image = replace(make_image(layout), name=name)
    for kind in FORMATS:
        with fails("image-name-invalid"):
            export(layout, image, tmp_path / "image.tar", kind=kind, progress=QuietProgress())


# --- what docker loads and saves -------------------------------------------------------------------


def test_stream_for_docker_is_an_archive_of_the_very_blobs(layout: Layout, tmp_path: Path) -> None:
    image = make_image(layout)
    data = b"".join(stream_docker(layout, image, "imagefactory/run:1"))
    (tmp_path / "stream.tar").write_bytes(data)
    with tarfile.open(tmp_path / "stream.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    (entry,) = json.loads(files["manifest.json"])
    assert entry["RepoTags"] == ["imagefactory/run:1"]
    assert sha(files[entry["Config"]]) == image.config
    assert [sha(files[name]) for name in entry["Layers"]] == [
        layer.descriptor.digest for layer in image.layers
    ]


@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_stream_of_a_harmed_image_breaks_off(harm, layout: Layout) -> None:
    image = make_image(layout)
    harm(layout.blob_path(image.layers[1].descriptor.digest))
    with pytest.raises(StoreError) as caught:
        for _ in stream_docker(layout, image, "imagefactory/run:1"):
            pass
    assert caught.value.code in ("store-corrupt", "blob-missing")


BIG = small_tar("opt/big", bytes(range(256)) * 10_000)
SAVED = [PLAIN[0], PLAIN[1], PLAIN[1], BIG]
"""A layer that stands twice, and one larger than what is kept in memory."""


def saved_config() -> bytes:
    config = {"config": {}, "rootfs": {"type": "layers", "diff_ids": [sha(data) for data in SAVED]}}
    return json.dumps(config, indent=3).encode()  # not canonical: its bytes must stay


def tar_of(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, to in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, to
            tar.addfile(info)
    return buffer.getvalue()


def new_saved() -> bytes:
    """As docker 25 and newer save: an image layout, blobs by digest, what names them at the end."""
    names = [f"blobs/sha256/{sha(data)[7:]}" for data in SAVED]
    config = saved_config()
    entry = {"Config": f"blobs/sha256/{sha(config)[7:]}", "RepoTags": None, "Layers": names}
    return tar_of({
        **dict(zip(names, SAVED, strict=True)),
        entry["Config"]: config,
        "index.json": b"{}",
        "manifest.json": json.dumps([entry]).encode(),
    })  # fmt: skip


def old_saved() -> bytes:
    """As docker before 25 saves: folders of random names, a layer that stands twice as a link."""
    entry = {"Config": "abc.json", "RepoTags": None, "Layers": [f"{n}/layer.tar" for n in "1234"]}
    files = {
        "4/layer.tar": SAVED[3],
        "1/layer.tar": SAVED[0],
        "1/json": b"{}",
        "2/layer.tar": SAVED[1],
        "abc.json": saved_config(),
        "manifest.json": json.dumps([entry]).encode(),
    }
    return tar_of(files, {"3/layer.tar": "../2/layer.tar"})


def containerd_saved() -> bytes:
    """As docker saves that keeps images in containerd: layers compressed, named by what they are then."""
    packed = [gzip.compress(SAVED[0]), zstandard.compress(SAVED[1]), SAVED[2], zstandard.compress(SAVED[3])]
    names = [f"blobs/sha256/{sha(data)[7:]}" for data in packed]
    entry = {"Config": "blobs/sha256/c", "RepoTags": None, "Layers": names}
    return tar_of({
        **dict(zip(names, packed, strict=True)),
        "blobs/sha256/c": saved_config(),
        "manifest.json": json.dumps([entry]).encode(),
    })  # fmt: skip


def taking(**changes: object) -> ImageImport:
    return replace(ImageImport(codec=codec("zstd"), known={}, report=lambda _: None), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("saved", [new_saved, old_saved, containerd_saved])
@pytest.mark.parametrize("packer", ["zstd", "gzip"])
def test_saved_images_come_in_whole(saved, packer: str, layout: Layout) -> None:
    taken = take_docker(layout, io.BytesIO(saved()), taking(codec=codec(packer)))
    assert taken.config == saved_config()
    assert [layer.diff_id for layer in taken.layers] == [sha(data) for data in SAVED]
    for layer, plain in zip(taken.layers, SAVED, strict=True):
        assert layer.descriptor.media_type == codec(packer).media_type
        path = layout.blob_path(layer.descriptor.digest)
        assert sha(path.read_bytes()) == layer.descriptor.digest
        assert b"".join(codec(packer).decompress(path)) == plain
    assert list(layout.tmp.iterdir()) == []


def test_layers_of_the_store_are_not_touched(layout: Layout) -> None:
    known = make_image(layout).layers[0]
    read: list[int] = []
    options = taking(
        known={known.diff_id: known, sha(BIG): replace(known, diff_id=sha(BIG))}, report=read.append
    )
    taken = take_docker(layout, io.BytesIO(new_saved()), options)
    assert taken.layers[0] is known
    assert sha(BIG) == taken.layers[3].diff_id
    assert read[0] == len(BIG)  # counted for whoever watches, though nothing was packed
    assert (
        len(list((layout.path / "blobs" / "sha256").iterdir())) == 7 + 1
    )  # the image made here, and one layer


@pytest.mark.parametrize("saved", [new_saved, old_saved, containerd_saved])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_stream_that_ends_early_is_no_image(saved, part: float, layout: Layout) -> None:
    data = saved().rstrip(b"\0")
    with fails("docker-archive-invalid"):
        take_docker(layout, io.BytesIO(data[: int(len(data) * part)]), taking())
    assert not layout.tags()


def test_layer_that_is_not_what_the_config_says(layout: Layout) -> None:
    data = new_saved().replace(b"three", b"eerht").replace(bytes(range(256)) * 20, bytes(5120), 1)
    with fails("docker-archive-invalid", r"sha256:.* sha256:"):
        take_docker(layout, io.BytesIO(data), taking())


@pytest.mark.parametrize("manifest", [b"", b"[]", b"{}", b'[{"Config": "x", "Layers": []}]'])
def test_manifest_that_is_none(manifest: bytes, layout: Layout) -> None:
    with fails("docker-archive-invalid"):
        take_docker(layout, io.BytesIO(tar_of({"manifest.json": manifest})), taking())


@pytest.mark.parametrize(
    ("manifest", "config"),
    [
        ("{", "{}"),
        ("null", "{}"),
        ("[" * 100_000, "{}"),
        ("[null]", "{}"),
        ("[null, null]", "{}"),
        ('[{"Config": "c", "RepoTags": 3, "Layers": []}, {}]', "{}"),
        ('[{"Config": ["c"], "Layers": []}]', "{}"),
        ('[{"Config": "c", "Layers": null}]', '{"rootfs": {"diff_ids": []}}'),
        ('[{"Config": "c", "Layers": [3]}]', '{"rootfs": {"diff_ids": ["sha256:a"]}}'),
        *(
            ('[{"Config": "c", "Layers": []}]', one)
            for one in ("[]", "[" * 100_000, '{"rootfs": null}', "{}")
        ),
    ],
)
def test_what_is_wrong_with_a_saved_image_is_said_in_words(
    manifest: str, config: str, layout: Layout
) -> None:
    saved = tar_of({"manifest.json": manifest.encode(), "c": config.encode()})
    with fails("docker-archive-invalid") as told:
        take_docker(layout, io.BytesIO(saved), taking())
    assert not re.search(r"\w\(\)|'(?:NoneType|int|list|str)'|subscript|hashable", told.value.message)


def test_an_archive_with_fewer_layers_than_its_config_says_how_many(layout: Layout) -> None:
    entries = [{"Config": "c", "RepoTags": ["x:1"], "Layers": []}]
    saved = tar_of({"manifest.json": json.dumps(entries).encode(), "c": saved_config()})
    with fails("docker-archive-invalid", f"0 layers.*{len(SAVED)}"):
        take_docker(layout, io.BytesIO(saved), taking())


def test_of_several_saved_images_none_is_taken_silently(layout: Layout) -> None:
    entries = [{"Config": "c", "RepoTags": tags, "Layers": []} for tags in (["x:1", "y:2"], None)]
    saved = tar_of({"manifest.json": json.dumps(entries).encode(), "c": saved_config()})
    with fails("docker-archive-ambiguous", "2 images: x:1, y:2, ") as told:
        take_docker(layout, io.BytesIO(saved), taking())
    assert told.value.hint


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_small_saved_layer_of_zeros_is_not_held_in_memory(pack, layout: Layout) -> None:
    plain = bytes(100 << 20)
    config = json.dumps({"rootfs": {"diff_ids": [sha(plain)]}}).encode()
    manifest = json.dumps([{"Config": "config", "RepoTags": None, "Layers": ["layer"]}]).encode()
    saved = tar_of({"layer": pack(plain), "config": config, "manifest.json": manifest})
    tracemalloc.start()
    try:
        assert take_docker(layout, io.BytesIO(saved), taking()).layers[0].diff_id == sha(plain)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
