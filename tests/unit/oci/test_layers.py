"""Layers: the same input gives the same bytes, and what comes out is a plain tar."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import random
import tarfile
import tracemalloc
import zlib
from pathlib import Path
from typing import cast

import pytest

from imagefactory.errors import UsageError
from imagefactory.oci.inflate import GZIP, inflate
from imagefactory.oci.layers import END_OF_ARCHIVE, SPLICE, DeflateStream, TarSegment, codec
from imagefactory.oci.tree import DEEPEST
from tests.made.errors import fails

EPOCH = 1_700_000_000


class Sink:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def make(name: str, files: dict[str, bytes]) -> tuple[bytes, str]:
    """Two segments and an end, as buckets have them."""
    sink, plain = Sink(), hashlib.sha256()
    for path, data in files.items():
        segment = TarSegment(codec(name), sink, plain, epoch=EPOCH)
        segment.file(path, [data[:10], data[10:]], size=len(data), executable=path.endswith(".sh"))
        segment.close()
    last = TarSegment(codec(name), sink, plain, epoch=EPOCH)
    last.link("opt/env/lib64", "lib")
    last.raw(END_OF_ARCHIVE)
    last.close()
    return sink.data, plain.hexdigest()


FILES = {
    "opt/env/a.py": b"print(1)\n" * 1000,
    "opt/env/b.sh": b"#!/bin/sh\n",
    f"opt/{'d' * 250}/{'e' * 250}": b"x",
}


@pytest.mark.parametrize("name", ["zstd", "zstd-9", "gzip"])
def test_a_layer_reads_back_as_the_tar_that_was_hashed(name: str, tmp_path: Path) -> None:
    data, plain = make(name, FILES)
    path = tmp_path / "layer"
    path.write_bytes(data)
    text = b"".join(codec(name).decompress(path))
    assert hashlib.sha256(text).hexdigest() == plain
    with tarfile.open(fileobj=io.BytesIO(text)) as archive:
        members = {member.name: member for member in archive.getmembers()}
        for file, content in FILES.items():
            handle = archive.extractfile(members[file])
            assert handle is not None
            assert handle.read() == content
    assert {m.mtime for m in members.values()} == {EPOCH}
    assert {(m.uid, m.gid, m.uname, m.gname) for m in members.values()} == {(0, 0, "", "")}
    assert members["opt/env/b.sh"].mode == 0o755
    assert members["opt/env/a.py"].mode == 0o644
    assert members["opt/env"].isdir()
    assert members["opt/env/lib64"].linkname == "lib"


@pytest.mark.parametrize("name", ["zstd", "zstd-9", "gzip"])
def test_the_same_input_gives_the_same_bytes(name: str) -> None:
    assert make(name, FILES) == make(name, FILES)
    assert make(name, FILES)[0] != make(name, {**FILES, "opt/z": b"z"})[0]


def deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def put_deflated(name: str, data: bytes) -> tuple[bytes, str]:
    """A layer with `data` between two small files."""
    sink, plain, packed = Sink(), hashlib.sha256(), deflate(data)
    segment = TarSegment(codec(name), sink, plain, epoch=EPOCH)
    segment.file("opt/a", [b"a"], size=1, executable=False)
    halves = DeflateStream(
        size=len(packed), crc=zlib.crc32(data), chunks=lambda: iter([packed[:999], packed[999:]])
    )
    segment.file("opt/b", [data], size=len(data), executable=True, deflated=halves)
    segment.file("opt/c", [b"c"], size=1, executable=False)
    segment.raw(END_OF_ARCHIVE)
    segment.close()
    return sink.data, plain.hexdigest()


@pytest.mark.parametrize("size", [SPLICE - 100, SPLICE + 100])
def test_a_large_deflated_file_is_spliced_and_the_tar_is_every_codecs(size: int, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(size)
    layer, plain = put_deflated("gzip", data)
    assert (deflate(data) in layer) == (len(deflate(data)) >= SPLICE) == (size > SPLICE)
    other, same = put_deflated("zstd", data)
    assert plain == same
    assert deflate(data) not in other
    (tmp_path / "layer").write_bytes(layer)
    whole = gzip.decompress(layer)
    assert hashlib.sha256(whole).hexdigest() == plain
    assert b"".join(codec("gzip").decompress(tmp_path / "layer")) == whole
    assert b"".join(inflate([layer], GZIP)) == whole


def test_the_size_of_a_spliced_member_is_told_modulo_4_gib() -> None:
    class Unhashed:
        def update(self, data: bytes) -> None: ...

    sink = Sink()
    segment = TarSegment(codec("gzip"), sink, cast("hashlib._Hash", Unhashed()), epoch=EPOCH)
    chunks = itertools.chain(itertools.repeat(bytes(1 << 20), 4096), [b"12345"])
    deflated = DeflateStream(size=SPLICE, crc=7, chunks=lambda: iter([b"packed"]))
    segment.file("a", chunks, size=(1 << 32) + 5, executable=False, deflated=deflated)
    assert sink.data.endswith(b"packed\x07\0\0\0\x05\0\0\0")


def test_a_file_of_another_size_than_announced_is_refused() -> None:
    segment = TarSegment(codec("zstd"), Sink(), hashlib.sha256(), epoch=EPOCH)
    with fails("file-size-mismatch", r"a: .*4.*3"):
        segment.file("a", [b"abc"], size=4, executable=False)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (f"opt/{'a' * 256}/b", "256 bytes"),
        (f"opt/{'ü' * 128}", "256 bytes"),
        (f"opt/.wh.{'a' * 256}", "256 bytes"),
        ("opt/" * DEEPEST + "a", f"{DEEPEST}"),
    ],
)
def test_what_could_not_be_unpacked_is_not_packed(path: str, why: str) -> None:
    segment = TarSegment(codec("zstd"), Sink(), hashlib.sha256(), epoch=EPOCH)
    for put in (
        lambda: segment.file(path, [], size=0, executable=False),
        lambda: segment.link(path, "b"),
        lambda: segment.folder(path),
    ):
        with fails("package-path-unsafe", f"^'opt/.*{why}") as told:
            put()
        assert told.value.hint


@pytest.mark.parametrize("name", ["a" * 255, "ü" * 127 + "a", "\udcff" * 255, ".wh." + "a" * 255])
def test_the_longest_names_are_packed(name: str) -> None:
    segment = TarSegment(codec("zstd"), Sink(), hashlib.sha256(), epoch=EPOCH)
    segment.file("a/" * (DEEPEST - 1) + name, [], size=0, executable=False)
    assert len(segment.files) == 1


def test_zstd_9_packs_the_same_tar_into_fewer_bytes() -> None:
    files = {"a.py": Path(__file__).read_bytes()}
    (fast, plain), (small, same) = make("zstd", files), make("zstd-9", files)
    assert same == plain
    assert len(small) < len(fast)
    assert codec("zstd-9").identity != codec("zstd").identity
    assert codec("zstd-9").media_type == codec("zstd").media_type


def test_an_unknown_codec_names_those_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        codec("lzma")
    assert "zstd, zstd-9, gzip" in caught.value.hint


def test_a_small_layer_of_zeros_is_not_held_in_memory(tmp_path: Path) -> None:
    compressor = codec("zstd").compressor()
    packed = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(200)) + compressor.flush()
    (tmp_path / "layer").write_bytes(packed)
    tracemalloc.start()
    try:
        assert sum(map(len, codec("zstd").decompress(tmp_path / "layer"))) == 200 << 20
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
