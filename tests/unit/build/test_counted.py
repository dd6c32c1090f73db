"""What a build reads, packs, writes and starts, counted exactly, so that none of it comes back unnoticed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import IO, Any

import pytest

from imagefactory.build import layer_plan, wheel_layer
from imagefactory.build import layers as layer_work
from imagefactory.build.assemble import AssembleEngine
from imagefactory.build.base.image import BuiltBase
from imagefactory.build.layers import BaseCompiler
from imagefactory.build.wheel_layer import WheelMember
from imagefactory.model import BuildSpec, LockedWheel
from imagefactory.oci import layers, unpack
from imagefactory.oci.layers import Compressor, LayerCodec, codec
from imagefactory.oci.layout import BlobWriter, Layout
from imagefactory.oci.manifests import Image, OciLayer
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import QUIET
from tests.made.compiled import compile_here
from tests.made.supplies import supplies
from tests.made.values import make_base, make_lock, make_target
from tests.made.wheels import locked, make_wheel

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
DATA = Random(1).randbytes(100_000)


class Counts(Counter[str]):
    """`hashed` wheels, `packed` and `written` bytes, `compilers`; `read FILE` and `unpacked LAYER`."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    compile_here(monkeypatch, PYTHON)
    counts, plain = Counts(), codec("zstd")
    hold, chunks, write = wheel_layer.open_verified, WheelMember.chunks, BlobWriter.write
    unpack_layer, new_compiler = unpack.unpack_layer, layer_work.new_compiler

    def counted_hold(wheel: Path, sha256: str) -> AbstractContextManager[IO[bytes]]:
        counts["hashed"] += 1
        return hold(wheel, sha256)

    def counted_chunks(self: WheelMember) -> Iterator[bytes]:
        counts[f"read {self.info.filename}"] += 1
        return chunks(self)

    class Packing:
        def __init__(self, inner: Compressor) -> None:
            self.inner = inner

        def compress(self, data: bytes, /) -> bytes:
            counts["packed"] += len(data)
            return self.inner.compress(data)

        def flush(self) -> bytes:
            return self.inner.flush()

    def packing() -> LayerCodec:
        return replace(plain, compressor=lambda: Packing(plain.compressor()))

    def counted_write(self: BlobWriter, data: bytes) -> None:
        counts["written"] += len(data)
        write(self, data)

    def counted_unpack(layer: OciLayer, *rest: Any) -> Mapping[int, str]:
        counts[f"unpacked {layer.title}"] += 1
        return unpack_layer(layer, *rest)

    def counted_compiler(*given: Any) -> BaseCompiler:
        counts["compilers"] += 1
        return new_compiler(*given)

    monkeypatch.setattr(wheel_layer, "open_verified", counted_hold)
    monkeypatch.setattr(WheelMember, "chunks", counted_chunks)
    monkeypatch.setitem(layers.CODECS, "zstd", packing)
    monkeypatch.setattr(BlobWriter, "write", counted_write)
    monkeypatch.setattr(unpack, "unpack_layer", counted_unpack)
    monkeypatch.setattr(layer_work, "new_compiler", counted_compiler)
    monkeypatch.setattr(layer_plan, "OWN_LAYER_BYTES", len(DATA))
    return counts


def wheels(folder: Path, changed: str = "") -> dict[LockedWheel, Path]:
    """A large one and four small ones, one of which may be `changed`."""
    folder.mkdir()
    paths = [make_wheel(folder, "large", {"large/data": DATA, "large/__init__.py": b"x = 1\n"})]
    for name in ("one", "two", "three", "four"):
        text = b"y = 2\n" if name == changed else b"y = 1\n"
        paths.append(make_wheel(folder, name, {f"{name}/__init__.py": text}))
    return {locked(path): path for path in paths}


def build(root: Path, given: Mapping[LockedWheel, Path]) -> Image:
    target = make_target(name="demo-1.0-cu12", framework="demo", version="1.0", cuda="12", python=PYTHON)
    lock = make_lock(target=target.name, python=PYTHON, wheels=tuple(given))
    base, layout = make_base(python=PYTHON), Layout(root / "store")
    definition = BuildSpec(target=target, base=base, lock=lock, prefix="/opt/env", environment=(), labels=())
    blob = layout.add(bytes(1024), "application/vnd.oci.image.layer.v1.tar")
    layer = OciLayer(descriptor=blob, diff_id=blob.digest, title="base")
    image = Image(
        name="base:b", digest=blob.digest, manifest=blob.digest, config=blob.digest, size=1024,
        layers=(layer,), environment=(),
    )  # fmt: skip
    made = BuiltBase(image=image, folders=(layout.path,), identity="b", epoch=1, published=True)
    engine = AssembleEngine(layout, root / "cache", codec="zstd", workers=2)
    unpacked = UnpackedLayers(root / "store" / "unpacked")
    found = engine.find(definition, made)  # as every build begins
    return found or engine.build(definition, supplies(made, lambda: given, unpacked), QUIET)


def plain_bytes(root: Path, image: Image) -> dict[str, int]:
    """The bytes of each layer's tar, by title."""
    layout, read = Layout(root / "store"), codec("zstd").decompress
    return {
        layer.title: sum(len(data) for data in read(layout.blob_path(layer.descriptor.digest)))
        for layer in image.layers[1:]
    }


def blobs(root: Path) -> dict[str, int]:
    """Bytes of the store's blobs, by name."""
    return {path.name: path.stat().st_size for path in (root / "store" / "blobs" / "sha256").iterdir()}


def test_a_first_build_reads_packs_and_lays_out_each_byte_once(tmp_path: Path, counts: Counts) -> None:
    given = wheels(tmp_path / "w")
    image = build(tmp_path, given)
    seen = Counts(counts)
    assert seen["hashed"] == len(given)
    assert seen["read large/data"] == 1
    assert seen["read large/__init__.py"] == seen["read one/__init__.py"] == 2  # once more for its byte code
    # Each wheel's tar entries once, and the end of each layer; the folders of a bucket stand before them.
    assert seen["packed"] == sum(plain_bytes(tmp_path, image).values())
    assert seen["written"] == sum(blobs(tmp_path).values())
    shared = {layer.title for layer in image.layers[2:] if "bucket" in layer.title}
    assert {name for name in seen if name.startswith("unpacked ")} == {f"unpacked {one}" for one in shared}
    assert 1 <= seen["compilers"] <= 2


def test_nothing_changed_reads_and_starts_nothing(tmp_path: Path, counts: Counts) -> None:
    given = wheels(tmp_path / "w")
    build(tmp_path, given)
    counts.clear()
    build(tmp_path, given)
    assert counts == {}


def test_a_small_package_that_changed_is_all_that_is_read(tmp_path: Path, counts: Counts) -> None:
    before = build(tmp_path, wheels(tmp_path / "w"))
    counts.clear()
    known = blobs(tmp_path)
    after = build(tmp_path, wheels(tmp_path / "v", changed="two"))
    seen = Counts(counts)
    new = [layer for layer in after.layers if layer not in before.layers]
    assert (len(new), seen["hashed"], seen["compilers"]) == (1, 1, 1)
    read = {name.partition("/")[0] for name in seen if name.startswith("read ")}
    assert {name for name in read if not name.endswith(".dist-info")} == {"read two"}
    assert [name for name in seen if name.startswith("unpacked ")] == [f"unpacked {new[0].title}"]
    environment = after.layers[1].descriptor.size  # made each time, a few hundred bytes
    assert seen["written"] == environment + sum(
        size for name, size in blobs(tmp_path).items() if name not in known
    )
