"""The forms of layers that docker, podman and skopeo unpack: every reader gives the same tree, or refuses."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import struct
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from imagefactory.errors import StoreError
from imagefactory.extras.sbom.look import LayerStack
from imagefactory.oci import tar_stream
from imagefactory.oci.inflate import CorruptDataError, plain_layer
from imagefactory.oci.manifests import OciLayer
from imagefactory.oci.tar_stream import HEADER_LIMIT, CappedInfo, EntryError, TarStream, entries
from tests.made.layer_store import Entry, LayerStore, file, folder, link, make_tar
from tests.made.layer_trees import (
    scanned_names,
    squashed_tree,
    tree_names,
    unpacked_tree,
    walked_tree,
    without_texts,
)

LINK, FIFO = tarfile.LNKTYPE, tarfile.FIFOTYPE


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path)


def read_by_all(store: LayerStore, *layers: OciLayer) -> dict[str, bytes]:
    tree = unpacked_tree(store, layers)
    assert squashed_tree(store, layers) == tree
    assert walked_tree(store, layers) == tree
    if len(layers) == 1:
        assert scanned_names(store, layers[0]) == without_texts(tree_names(tree))
    return {os.fsdecode(path): what for path, what in tree.items()}


def refused_by_all(store: LayerStore, layer: OciLayer) -> None:
    with pytest.raises(StoreError):
        unpacked_tree(store, [layer])
    with pytest.raises(StoreError):
        squashed_tree(store, [layer])
    with pytest.raises(CorruptDataError) as told:
        scanned_names(store, layer)
    assert not re.search(r"\w\(\)|^\W*$|<.* at 0x", str(told.value))  # words, not what Python says
    data = store.blob_path(layer.descriptor.digest).read_bytes()
    with pytest.raises(CorruptDataError):
        LayerStack().add(plain_layer(layer.descriptor.media_type, iter([data])))
    assert store.leftovers() == []


@pytest.mark.parametrize(
    ("taken", "tree"),
    [
        # kaniko writes its root, nix absolute names, others what `tar -P` writes
        ([folder("/"), file("/etc/x")], {"etc": b"folder", "etc/x": b"x"}),
        ([folder("."), folder("./"), file("./a")], {"a": b"x"}),
        ([file("a//b/./c")], {"a": b"folder", "a/b": b"folder", "a/b/c": b"x"}),
        ([file("a/../b"), file("/../c")], {"b": b"x", "c": b"x"}),
        ([file("/a"), link("/b", "/a", LINK), link("c", "./a", LINK)], {"a": b"x", "b": b"x", "c": b"x"}),
        ([link("a", "/etc/passwd"), link("b", "a", LINK)], {"a": b"->/etc/passwd", "b": b"->/etc/passwd"}),
        ([file("a"), link("a", "a", LINK)], {"a": b"x"}),
        # a folder of the layer that is a link is followed inside the layer
        (
            [folder("usr/lib"), link("lib", "usr/lib"), file("lib/a")],
            {"usr": b"folder", "usr/lib": b"folder", "usr/lib/a": b"x", "lib": b"->usr/lib"},
        ),
        ([link("d", "/tmp"), file("d/out")], {"d": b"->/tmp", "tmp": b"folder", "tmp/out": b"x"}),
        ([link("d", "../../.."), file("d/out")], {"d": b"->../../..", "out": b"x"}),
        ([link("a/d", ".."), folder("a/d/e")], {"a": b"folder", "a/d": b"->..", "e": b"folder"}),
        (
            [link("d", "/etc"), file("etc/passwd"), link("h", "d/passwd", LINK)],
            {"d": b"->/etc", "etc": b"folder", "etc/passwd": b"x", "h": b"x"},
        ),
        # the last entry of a name wins, of whatever kind
        ([file("a", b"1"), link("a", "b"), file("a", b"3")], {"a": b"3"}),
        ([folder("d"), file("d/e/f"), file("d", b"1")], {"d": b"1"}),
        ([file("d"), folder("d"), file("d/e")], {"d": b"folder", "d/e": b"x"}),
        ([link("d", "/etc"), folder("d"), file("d/e")], {"d": b"folder", "d/e": b"x"}),
        ([file("a", b"1"), link("b", "a", LINK), file("a", b"2")], {"a": b"2", "b": b"1"}),
        # of public reports: bazel's rules_img, kaniko's links, X11's link to its folder, SELinux's labels
        (
            [file("b/app"), link("b/app.runfiles/_main/app", "b/app", LINK)],
            {"b": b"folder", "b/app": b"x", "b/app.runfiles": b"folder", "b/app.runfiles/_main": b"folder",
             "b/app.runfiles/_main/app": b"x"},
        ),
        ([file("gawk-5"), file("gawk"), link("gawk", "/gawk-5", LINK)], {"gawk-5": b"x", "gawk": b"x"}),
        (
            [link("usr/bin/X11", "."), file("usr/bin/X11/x"), file("usr/bin/y")],
            {"usr": b"folder", "usr/bin": b"folder", "usr/bin/X11": b"->.", "usr/bin/x": b"x",
             "usr/bin/y": b"x"},
        ),
        ([folder(".", pax_headers={"SCHILY.xattr.security.selinux": "system_u:s0"}), file("a")], {"a": b"x"}),
        ([file("etc/.wh..opq", b""), file("etc/a")], {"etc": b"folder", "etc/a": b"x"}),
        # FIFOs and device nodes are skipped, wherever they are
        ([file("pipe", b"", type=FIFO), file("a")], {"a": b"x"}),
        ([file("disk", b"", type=tarfile.BLKTYPE), link("e", "disk", LINK)], {}),
        ([folder("dev"), file("dev/null", b"", type=tarfile.CHRTYPE)], {"dev": b"folder"}),
        ([file("a"), file("a", b"", type=FIFO)], {}),
        ([file("zero", b"", type=tarfile.CHRTYPE), folder("zero")], {"zero": b"folder"}),
        # what AUFS left
        ([file(".wh..wh.aufs", b""), folder(".wh..wh.plnk"), file(".wh..wh.plnk/9"), file("a")], {"a": b"x"}),
        ([file("a/.wh..wh.plnk", b"")], {}),
        ([], {}),
    ],
)  # fmt: skip
def test_what_engines_unpack_is_the_same_for_every_reader(
    store: LayerStore, taken: list[Entry], tree: dict[str, bytes]
) -> None:
    assert read_by_all(store, store.add(make_tar(*taken), "+gzip")) == tree


@pytest.mark.parametrize(
    "bad",
    [
        [file("../out")],
        [file("a/../../out")],
        [link("h", "../../outside", LINK)],
        [link("h", "a/../../outside", LINK)],
        [link("h", "missing", LINK)],
        [link("h", "later", LINK), file("later")],
        [folder("d"), link("h", "d", LINK)],
        [file("d/f"), link("d", "d/f", LINK)],
        [link("h", "/", LINK)],
        [file("f"), file("f/g")],
        [link("a", "b"), link("b", "a"), file("a/x")],
        [file("/")],
        [link(".", "/etc")],
        [folder("."), link("/", ".", LINK)],
        [file("a", pax_headers={"uid": "1000.5"})],
        [file(".wh.", b"")],
        [file(".wh..", b"")],
        [file("a/.wh...", b"")],
        [file("a", type=b"V")],
        [file("a", uid=1 << 40)],
        [link("d", "deep/" * 59), file("d/e/f")],
    ],
)
def test_what_no_engine_unpacks_is_refused_by_every_reader(store: LayerStore, bad: list[Entry]) -> None:
    refused_by_all(store, store.add(make_tar(*bad)))
    assert not (store.path / "out").exists()


@pytest.mark.parametrize(
    "upper",
    [
        [file("a/.wh.b", b"")],
        [link("c", "a"), file("c/.wh.b", b""), file("c/new")],
        [file("a/.wh..wh..opq", b""), file("a/new")],
        [file("a", b"file"), folder("a"), file("a/new")],
        [folder("a"), file("a", b"file")],
        [file(".wh.a", b""), folder("a"), file("a", b"1"), folder("a")],
        [file("a/.wh..wh..opq", b""), file("a", b""), folder("a")],
        [file("a/d"), file("a", b"", type=FIFO)],
        [link("a", "e"), file("a/f")],
    ],
)
def test_layers_over_one_another_are_the_same_for_every_reader(store: LayerStore, upper: list[Entry]) -> None:
    lower = store.add(make_tar(folder("a"), file("a/b", b"low"), file("a/c", b"low")))
    assert "a/b" in read_by_all(store, lower)
    assert read_by_all(store, lower, store.add(make_tar(*upper))).get("a/b") is None


def test_how_a_layer_is_packed_is_read_off_its_bytes(tmp_path: Path) -> None:
    tar = make_tar(file("a", b"1" * 9000))
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"what"  # as zstd:chunked and eStargz's kin have
    packings = {
        "plain": tar,
        "gzip": gzip.compress(tar),
        "members": gzip.compress(tar[:700]) + gzip.compress(tar[700:]),
        "zstd": zstandard.compress(tar),
        "frames": skippable + zstandard.compress(tar[:700]) + zstandard.compress(tar[700:]) + skippable,
    }
    for name, packed in packings.items():
        for codec in ("", "+gzip", "+zstd"):
            place = tmp_path / f"{name}{codec}"
            place.mkdir()
            store = LayerStore(place)
            assert read_by_all(store, store.add(tar, codec, packed=packed)) == {"a": b"1" * 9000}


# --- forms of headers --------------------------------------------------------------------------------


def v7(name: str, content: bytes = b"", kind: bytes = b"\0") -> bytes:
    """A header as before POSIX: no magic, and blanks where numbers end."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT)[:257] + bytes(255))
    block[156:157] = kind
    return sealed(block) + content + bytes(-len(content) % 512)


def sealed(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def tar_of(form: int, *members: tuple[str, bytes], pax: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, pax_headers=pax) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_old_and_long_headers(store: LayerStore) -> None:
    old = v7("d/", kind=b"\0") + v7("d/a", b"hello") + v7("b", b"x", b"0")
    tree = {"d": b"folder", "d/a": b"hello", "b": b"x"}
    assert read_by_all(store, store.add(old + bytes(1024))) == tree
    assert read_by_all(store, store.add(old)) == tree  # without an end, and with one block of it
    assert read_by_all(store, store.add(old + bytes(512))) == tree
    long = "n" * 120 + "/" + "é" * 90
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        assert read_by_all(store, store.add(tar_of(form, (long, b"x"))))[long] == b"x"


def test_a_global_header_says_nothing_of_entries(store: LayerStore) -> None:
    """`git archive` writes one; docker ignores it, tarfile would give every entry its path."""
    tar = tar_of(tarfile.PAX_FORMAT, ("a", b"1"), ("b", b"2"), pax={"path": "evil", "comment": "abc"})
    assert read_by_all(store, store.add(tar)) == {"a": b"1", "b": b"2"}


def test_times_that_are_none_are_taken(store: LayerStore) -> None:
    for mtime in ("nan", "-9e99", "9e99"):
        info = tarfile.TarInfo("a")
        info.pax_headers = {"mtime": mtime}
        assert read_by_all(store, store.add(info.tobuf(tarfile.PAX_FORMAT))) == {"a": b""}


def test_modes_of_the_root_are_kept(store: LayerStore) -> None:
    (found,) = store.unpack(store.add(make_tar(folder("/", mode=0o711))))
    assert stat.S_IMODE(found.stat().st_mode) == 0o711


# --- sparse files ------------------------------------------------------------------------------------

SPARSE = bytes(700) + b"middle" + bytes(5000) + b"end" + bytes(9)
REGIONS = [(700, 6), (5706, 3)]


def pax_sparse(records: list[tuple[str, str]], stored: bytes) -> bytes:
    data = b""
    for key, value in records:
        text = f" {key}={value}\n".encode()
        size = len(text) + 2 if len(text) + 2 < 100 else len(text) + 3
        data += str(size).encode() + text
    head, info = tarfile.TarInfo("PaxHeader"), tarfile.TarInfo("GNUSparseFile.0/a")
    head.type, head.size, info.size = tarfile.XHDTYPE, len(data), len(stored)
    block = head.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)
    return block + info.tobuf(tarfile.USTAR_FORMAT) + stored + bytes(-len(stored) % 512)


def gnu_sparse(regions: list[tuple[int, int]], stored: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("a")
    info.size, info.type = len(stored), tarfile.GNUTYPE_SPARSE
    rows = b"".join(b"%011o\0%011o\0" % region for region in regions)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[386:482], block[482], block[483:495] = rows[:96].ljust(96, b"\0"), len(rows) > 96, b"%011o\0" % size
    more = rows[96:].ljust(504, b"\0") + bytes(8) if len(rows) > 96 else b""
    return sealed(block) + more + stored + bytes(-len(stored) % 512)


ROWS = ",".join(f"{at},{size}" for at, size in REGIONS)
MAP = b"2\n700\n6\n5706\n3\n".ljust(512, b"\0")
SIZE = str(len(SPARSE))
FORMS = {
    "0.0": pax_sparse(
        [
            *(("GNU.sparse.size", SIZE), ("GNU.sparse.numblocks", "2"), ("path", "a")),
            *(("GNU.sparse.offset", "700"), ("GNU.sparse.numbytes", "6")),
            *(("GNU.sparse.offset", "5706"), ("GNU.sparse.numbytes", "3")),
        ],
        b"middleend",
    ),
    "0.1": pax_sparse(
        [("GNU.sparse.size", SIZE), ("GNU.sparse.name", "a"), ("GNU.sparse.map", ROWS)], b"middleend"
    ),
    "1.0": pax_sparse(
        [
            *(("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0")),
            *(("GNU.sparse.name", "a"), ("GNU.sparse.realsize", SIZE)),
        ],
        MAP + b"middleend",
    ),
    "old": gnu_sparse(REGIONS, b"middleend", len(SPARSE)),
    "old, of more blocks": gnu_sparse(
        [(at, 1) for at in range(700, 706)] + [(5706, 3)], b"middleend", len(SPARSE)
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_sparse_files_are_filled(store: LayerStore, form: str) -> None:
    tar = FORMS[form] + make_tar(file("b", b"2"))
    assert read_by_all(store, store.add(tar, "+zstd")) == {"a": SPARSE, "b": b"2"}


@pytest.mark.parametrize(
    "broken",
    [
        gnu_sparse([(5, 3), (4, 3)], b"abcdef", 9),
        gnu_sparse([(0, 6)], b"abcdef", 5),
        gnu_sparse([(0, 5)], b"abcdef", 9),
        pax_sparse([("GNU.sparse.size", "x"), ("GNU.sparse.map", "0,1")], b"1"),
        pax_sparse([("GNU.sparse.size", "9"), ("GNU.sparse.map", "0,1,2")], b"1"),
        pax_sparse([("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "9")], b"9" * 600),
        pax_sparse([("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "9")], b"-5\n".ljust(512, b"\0")),
        gnu_sparse([(0, 1)], b"1", 1 << 35),
    ],
)
def test_broken_and_endless_sparse_files_are_refused(store: LayerStore, broken: bytes) -> None:
    refused_by_all(store, store.add(broken))


# --- what it costs -----------------------------------------------------------------------------------


def test_names_and_headers_without_end_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1
    assert list(entries(TarStream(iter([(info.tobuf() + bytes(512)) * 5000])))) == []
    monkeypatch.setattr(tar_stream, "NAMES_LIMIT", 20)
    with pytest.raises(CorruptDataError, match="names"):
        list(entries(TarStream(iter([make_tar(file("0123456789"), file("abcdefghij"))]))))


def test_links_to_links_end(store: LayerStore) -> None:
    rows = [link(f"l{n}", f"l{n + 1}/l{n + 1}") for n in range(60)]
    with pytest.raises(EntryError, match="links"):
        list(entries(TarStream(iter([make_tar(*rows, file("l0/x"))]))))


def test_what_replaces_itself_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    again = make_tar(*[file("a"), folder("a")] * 3)
    list(entries(TarStream(iter([again]))))
    monkeypatch.setattr(tar_stream, "REPLACED_LIMIT", 3)
    with pytest.raises(EntryError, match="replace"):
        list(entries(TarStream(iter([again]))))
    monkeypatch.setattr(tar_stream, "FOLLOWED_LIMIT", 30)
    with pytest.raises(EntryError, match="links"):
        list(entries(TarStream(iter([make_tar(link("a", "b" * 9), *[file("a/x")] * 5)]))))


def test_what_is_skipped_is_said(store: LayerStore) -> None:
    fifo, node = file("run/pipe", b"", type=FIFO), file("dev/null", b"", type=tarfile.CHRTYPE)
    store.unpack(store.add(make_tar(fifo, node)))
    assert "run/pipe" in store.told.getvalue()
    assert "dev/null" not in store.told.getvalue()


def test_what_is_not_read_of_a_file_is_passed() -> None:
    stream = TarStream(iter([make_tar(file("a", b"1" * 700), file("b", b"2" * 700))]))
    assert [(entry.path, entry.read(3)) for entry in entries(stream)] == [("a", b"111"), ("b", b"222")]


def test_the_place_of_a_folder_is_forgotten_when_a_link_replaces_it() -> None:
    data = make_tar(file("d/s/a"), file("d/s/b"), link("d/s", "../e"), file("d/s/c"))
    assert [(entry.kind, entry.path) for entry in entries(TarStream(iter([data])))] == [
        ("file", "d/s/a"),
        ("file", "d/s/b"),
        ("removed", "d/s"),
        ("symlink", "d/s"),
        ("file", "e/c"),
    ]


KINDS = [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]


class Zeros(io.RawIOBase):
    """A header, and then zeros for as long as somebody reads."""

    def __init__(self, header: bytes) -> None:
        self.header = header

    def read(self, size: int = -1) -> bytes:
        data, self.header = self.header[:size], self.header[size:]
        return data + bytes(size - len(data))


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_of_gigabytes_is_not_read(kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 64 * HEADER_LIMIT
    tracemalloc.start()
    try:
        with (
            pytest.raises(tarfile.ReadError, match=str(HEADER_LIMIT)),
            tarfile.open(fileobj=Zeros(info.tobuf()), mode="r|", tarinfo=CappedInfo),
        ):
            pass
        assert tracemalloc.get_traced_memory()[1] < 4 * HEADER_LIMIT
    finally:
        tracemalloc.stop()


def test_a_long_name_is_still_read() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("a/" * 200 + "b"))
    packed.seek(0)
    with tarfile.open(fileobj=packed, mode="r|", tarinfo=CappedInfo) as archive:
        assert archive.getnames() == ["a/" * 200 + "b"]
